import functools
import json

import numpy as np
import pytest
from keras import ops

from keras_attn.ops import lsh_attention
from keras_attn.ops import lsh_buckets
from tests import golden
from tests import memory
from tests.backend import gradients
from tests.backend import run
from tests.reference import lsh

OPTIONS = [
    {},
    {"wrap": True},
    {"chunks_before": 2, "chunks_after": 1},
    {"chunks_before": 0, "chunks_after": 0},
    {"chunks_after": 1, "wrap": True},
    {"attend_across_buckets": False},
    {"attend_across_buckets": False, "wrap": True},
    {"allow_duplicates": False},
    {"allow_duplicates": False, "wrap": True},
    {"allow_duplicates": False, "attend_across_buckets": False},
    {
        "allow_duplicates": False,
        "attend_across_buckets": False,
        "wrap": True,
        "chunks_after": 1,
    },
    {"prefix_consistent": True},
    {"prefix_consistent": True, "chunks_before": 2},
    {"prefix_consistent": True, "allow_duplicates": False},
]


def tensors(length, rounds=3, num_buckets=4, seed=0):
    rng = np.random.default_rng(seed)
    return (
        rng.normal(size=(2, length, 2, 5)).astype("float32"),
        rng.normal(size=(2, length, 2, 7)).astype("float32"),
        rng.integers(num_buckets, size=(2, 2, rounds, length), dtype="int32"),
    )


def count_visits(
    buckets,
    padding,
    bucket_size,
    chunks_before=1,
    chunks_after=0,
    wrap=False,
    attend_across_buckets=True,
    prefix_consistent=False,
    allow_duplicates=True,
):
    count = np.zeros((*buckets.shape[:2], buckets.shape[3], buckets.shape[3]))
    bucket_size = min(bucket_size, buckets.shape[3])
    for b, n in np.ndindex(*buckets.shape[:2]):
        if prefix_consistent:
            reach = chunks_before * bucket_size
            count[b, n] = lsh.prefix_visits(buckets[b, n], padding[b], reach)
        else:
            count[b, n] = lsh.visits(
                buckets[b, n],
                padding[b],
                bucket_size,
                chunks_before,
                chunks_after,
                wrap,
                not attend_across_buckets,
            )
    return count


CASES = [(13, options) for options in OPTIONS] + [
    (length, options)
    for length in (1, 3, 8)  # one chunk, less than that, and two of them
    for options in (
        {},
        {"wrap": True},
        {"wrap": True, "attend_across_buckets": False},
        {"prefix_consistent": True},
    )
]


@pytest.mark.parametrize(("length", "options"), CASES, ids=str)
@pytest.mark.parametrize("use_causal_mask", [True, False])
def test_matches_dense_reference(length, use_causal_mask, options):
    if options.get("prefix_consistent") and not use_causal_mask:
        return
    query, value, buckets = tensors(length)
    padding = np.arange(length) < [[length], [max(length - 5, 1)]]
    padding[0, 0] = length < 8  # padding on the left
    op = functools.partial(
        lsh_attention,
        bucket_size=4,
        padding_mask=padding,
        use_causal_mask=use_causal_mask,
        **options,
    )
    count = count_visits(buckets, padding, 4, **options)
    expected, weights = lsh.attend(
        query,
        value,
        count,
        use_causal_mask,
        options.get("allow_duplicates", True),
    )

    def both(*tensors):
        return op(*tensors), op(*tensors, return_attention_scores=True)

    fast, (output, scores) = run(both, query, value, buckets)
    np.testing.assert_allclose(fast, expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(output, expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(scores, weights, rtol=1e-5, atol=1e-5)


def shared_heads(data, meta):
    """Reads the golden inputs as `hidden_states` and kernels `(F, N, H)`."""
    heads = meta["num_heads"]
    kernels = []
    for name in ("query_key_kernel", "value_kernel"):
        kernel = data[name]
        if len(kernel.shape) == 3:  # (N, F, H)
            kernels.append(kernel.transpose(1, 0, 2))
        else:
            kernels.append(kernel.reshape(len(kernel), heads, -1))
    return kernels


@pytest.mark.parametrize("name", golden.names("reformer_lsh_hf_*"))
def test_matches_hugging_face(name):
    data = golden.load(name)
    meta = json.loads(str(data["meta_json"]))
    x = data["hidden_states"]
    kernels = shared_heads(data, meta)
    shape = x.shape[:2] + (-1,)
    real = data.get("key_padding_mask", np.ones(x.shape[:2], bool))
    short = np.zeros((len(x), meta["num_heads"], 2, x.shape[1]), "int32")

    def attend(x, query_kernel, value_kernel):
        query = ops.einsum("btf,fnh->btnh", x, query_kernel)
        value = ops.einsum("btf,fnh->btnh", x, value_kernel)
        output = lsh_attention(
            query,
            value,
            ops.convert_to_tensor(data.get("buckets", short)),
            bucket_size=meta["chunk_length"],
            chunks_before=meta["chunks_before"],
            chunks_after=meta["chunks_after"],
            wrap=True,
            padding_mask=ops.convert_to_tensor(real),
            use_causal_mask=meta["causal"],
        )
        # that program shows padding to itself where it sees nothing else
        is_empty = ops.all(output == 0, axis=(2, 3), keepdims=True)
        output = ops.where(is_empty, value, output)
        return ops.reshape(output, shape)

    exact = "_exact" if "output_exact" in data else ""
    np.testing.assert_allclose(
        run(attend, x, *kernels), data["output" + exact], atol=2e-5
    )

    def loss(*tensors):
        return ops.multiply(attend(*tensors), data["loss_weight_R"])

    names = ("hidden_states", "query_key_kernel", "value_kernel")
    for key, gradient in zip(names, gradients(loss, x, *kernels), strict=True):
        expected = data[f"grad_{key}{exact}"]
        np.testing.assert_allclose(
            gradient.reshape(expected.shape), expected, atol=2e-4
        )


@pytest.mark.parametrize(
    "name",
    [
        name
        for name in golden.names("reformer_lsh_hf_*")
        if not name.endswith("short")
    ],
)
def test_hashes_as_hugging_face_does(name):
    data = golden.load(name)
    meta = json.loads(str(data["meta_json"]))
    kernel, _ = shared_heads(data, meta)
    num_buckets = meta["num_buckets"]
    if isinstance(num_buckets, list):
        num_buckets = tuple(num_buckets)

    def hash(x, rotations):
        query = ops.einsum("btf,fnh->btnh", x, kernel)
        return lsh_buckets(query, rotations, num_buckets)

    buckets = run(hash, data["hidden_states"], data["random_rotations"])
    expected = data["buckets"]
    real = np.broadcast_to(expected < meta["num_buckets_total"], expected.shape)
    np.testing.assert_array_equal(buckets[real], expected[real])


@pytest.mark.parametrize(
    "name",
    [
        name
        for name in golden.names("reformer_lsh_lucidrains_*")
        if not name.endswith(("layer", "context"))
    ],
)
def test_matches_reformer_pytorch(name):
    data = golden.load(name)
    meta = json.loads(str(data["meta_json"]))
    padding = data.get("key_padding_mask")

    def attend(query, value):
        # that program scales scores, and keeps heads on the batch axis
        output = lsh_attention(
            query[:, :, None] / np.sqrt(query.shape[-1]),
            value[:, :, None],
            ops.convert_to_tensor(data["buckets"][:, None]),
            bucket_size=meta["bucket_size"],
            wrap=True,
            attend_across_buckets=meta["attend_across_buckets"],
            allow_duplicates=meta["allow_duplicate_attention"],
            padding_mask=padding,
            use_causal_mask=meta["causal"],
        )
        return output[:, :, 0]

    arrays = data["query_key"], data["value"]
    # that program leaves padding where it hashes to, and so among the others
    whole = slice(None) if padding is None else padding.all(axis=1)
    np.testing.assert_allclose(
        run(attend, *arrays)[whole], data["output_exact"][whole], atol=2e-5
    )
    if padding is not None:
        return

    def loss(*tensors):
        return ops.multiply(attend(*tensors), data["loss_weight_R"])

    for key, gradient in zip(
        ("query_key", "value"), gradients(loss, *arrays), strict=True
    ):
        # its float32 gradients of rows that see only themselves are coarse
        np.testing.assert_allclose(gradient, data[f"grad_{key}"], atol=5e-3)


def test_one_chunk_is_full_attention_with_shared_queries_and_keys():
    data = golden.load("reformer_fullqk_lucidrains")

    def attend(query, value):
        output = lsh_attention(
            query[:, :, None] / np.sqrt(query.shape[-1]),
            value[:, :, None],
            ops.zeros((len(query), 1, 1, 14), dtype="int32"),
            bucket_size=14,
            use_causal_mask=True,
        )
        return output[:, :, 0]

    arrays = data["query_key"], data["value"]
    np.testing.assert_allclose(run(attend, *arrays), data["output"], atol=2e-5)

    def loss(*tensors):
        return ops.multiply(attend(*tensors), data["loss_weight_R"])

    for key, gradient in zip(
        ("query_key", "value"), gradients(loss, *arrays), strict=True
    ):
        np.testing.assert_allclose(gradient, data[f"grad_{key}"], atol=5e-3)


@pytest.mark.parametrize("name", golden.names("reformer_lsh_trax_*"))
def test_matches_the_authors_program(name):
    data = golden.load(name)
    meta = json.loads(str(data["meta_json"]))
    kernels = *shared_heads(data, meta), data["output_kernel"]
    padding = data.get("key_padding_mask")

    def attend(x, query_kernel, value_kernel, output_kernel):
        op = functools.partial(
            lsh_attention,
            ops.einsum("tf,fnh->tnh", x, query_kernel)[None],
            ops.einsum("tf,fnh->tnh", x, value_kernel)[None],
            ops.convert_to_tensor(data["buckets"][None]),
            bucket_size=meta["chunk_length"],
            chunks_before=meta["chunks_before"],
            chunks_after=meta["chunks_after"],
            wrap=True,
            padding_mask=None if padding is None else padding[None],
            use_causal_mask=meta["causal"],
        )
        output = ops.einsum("tnv,nve->te", op()[0], output_kernel)
        return output, op(return_attention_scores=True)[1]

    output, scores = run(attend, data["hidden_states"], *kernels)
    difference = np.abs(output - data["output"]).max(axis=1)
    if padding is not None:
        difference = difference[padding]
        scores = scores[:, :, padding][..., padding]
    # the rows that see only themselves are coarse in that program
    alone = np.diagonal(scores[0], axis1=1, axis2=2).max(axis=0) == 1
    assert difference[alone].max(initial=0) < 2e-2
    assert difference[~alone].max() < 2e-5
    assert not alone.all()


@pytest.mark.parametrize(
    "name",
    [
        "reformer_lsh_nowrap_ref",
        "reformer_lsh_nowrap_padmask_ref",
        "reformer_lsh_paper_ref",
    ],
)
def test_matches_the_dense_oracle(name):
    data = golden.load(name)
    meta = json.loads(str(data["meta_json"]))
    x = data["hidden_states"]
    real = data.get("key_padding_mask", np.ones(x.shape[:2], bool))
    kernels = shared_heads(data, meta)

    def attend(x, query_kernel, value_kernel):
        output = lsh_attention(
            ops.einsum("btf,fnh->btnh", x, query_kernel),
            ops.einsum("btf,fnh->btnh", x, value_kernel),
            ops.convert_to_tensor(data["buckets"]),
            bucket_size=meta["chunk_length"],
            chunks_before=meta["chunks_before"],
            chunks_after=meta["chunks_after"],
            attend_across_buckets=meta["attend_across_buckets"],
            allow_duplicates=meta["allow_duplicate_attention"],
            padding_mask=ops.convert_to_tensor(real),
            use_causal_mask=meta["causal"],
        )
        return ops.reshape(output, (*x.shape[:2], -1))

    output = run(attend, x, *kernels)
    np.testing.assert_allclose(output[real], data["context"][real], atol=2e-5)
    if not real.all():
        return  # the oracle shows padding to itself

    def loss(*tensors):
        output = ops.matmul(attend(*tensors), data["output_kernel"])
        return ops.multiply(output, data["loss_weight_R"])

    gradient, *_ = gradients(loss, x, *kernels)
    np.testing.assert_allclose(gradient, data["grad_hidden_states"], atol=2e-4)


def test_rounds_of_one_bucket_see_the_neighbours_in_the_sequence():
    """One bucket leaves the order alone: chunks of two and the one before."""
    query = np.zeros((1, 6, 1, 3), "float32")
    value = np.array([3.0, 6.0, 9.0, 12.0, 15.0, 18.0], "float32")
    buckets = np.zeros((1, 1, 2, 6), "int32")
    output = run(
        functools.partial(lsh_attention, bucket_size=2, use_causal_mask=True),
        query,
        value.reshape(1, 6, 1, 1),
        buckets,
    )
    # the first sees itself, for want of others
    expected = [3.0, 3.0, 4.5, 6.0, 10.5, 12.0]
    np.testing.assert_allclose(output[0, :, 0, 0], expected, rtol=1e-6)


def test_buckets_are_the_nearest_directions():
    query = np.array([[2, 1], [-1, 3], [-2, 1], [0, -1]], "float32")
    rotations = np.eye(2, dtype="float32")[None, :, None]
    buckets = run(
        functools.partial(lsh_buckets, num_buckets=4),
        query[None, :, None],
        rotations,
    )
    np.testing.assert_array_equal(buckets[0, 0, 0], [0, 1, 2, 3])


@pytest.mark.parametrize(
    ("length", "expected"),
    [(1, 2), (31, 2), (64, 4), (127, 4), (128, 8), (2048, 128), (4096, 256)],
)
def test_automatic_buckets_follow_the_length_without_padding(length, expected):
    rng = np.random.default_rng(0)
    rotations = rng.normal(size=(1, 8, 1, 64)).astype("float32")
    query = rng.normal(size=(1, 4096, 1, 8)).astype("float32")
    padding = np.arange(4096)[None] < length
    padded = run(
        lambda *x: lsh_buckets(*x, bucket_size=32, padding_mask=padding),
        query,
        rotations,
    )
    bare = run(
        functools.partial(lsh_buckets, bucket_size=32),
        query[:, :length],
        rotations,
    )
    np.testing.assert_array_equal(padded[..., :length], bare)
    assert expected / 2 <= padded.max() < expected


def test_padding_moves_nothing():
    query, value, buckets = tensors(length=24)
    op = functools.partial(lsh_attention, bucket_size=4, chunks_after=1)
    padding = np.arange(24) < [[24], [13]]
    padded = run(lambda *x: op(*x, padding_mask=padding), query, value, buckets)
    bare = run(op, query[1:, :13], value[1:, :13], buckets[1:, ..., :13])
    np.testing.assert_allclose(padded[1:, :13], bare, atol=1e-6)


def test_what_is_earlier_is_all_that_counts_if_prefix_consistent():
    query, value, buckets = tensors(length=29)
    changed = [query.copy(), value.copy(), buckets.copy()]
    changed[0][:, 17:] += 1
    changed[1][:, 17:] += 1
    changed[2][..., 17:] = 3 - changed[2][..., 17:]
    for options in ({}, {"allow_duplicates": False}, {"chunks_before": 2}):
        op = functools.partial(
            lsh_attention,
            bucket_size=4,
            use_causal_mask=True,
            prefix_consistent=True,
            **options,
        )
        a, b = run(op, query, value, buckets), run(op, *changed)
        np.testing.assert_allclose(a[:, :17], b[:, :17], atol=1e-6)
    # which chunks are not
    op = functools.partial(lsh_attention, bucket_size=4, use_causal_mask=True)
    a, b = run(op, query, value, buckets), run(op, *changed)
    assert np.abs(a - b)[:, :17].max() > 1e-2


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_gradients_are_those_of_all_pairs(options):
    query, value, buckets = tensors(length=13)

    def attend(query, value, return_attention_scores):
        result = lsh_attention(
            query,
            value,
            ops.convert_to_tensor(buckets),
            bucket_size=4,
            use_causal_mask=True,
            return_attention_scores=return_attention_scores,
            **options,
        )
        return ops.square(result[0] if return_attention_scores else result)

    for actual, expected in zip(
        gradients(lambda *x: attend(*x, False), query, value),
        gradients(lambda *x: attend(*x, True), query, value),
        strict=True,
    ):
        np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5)


def test_dropped_weights_lose_their_values():
    arrays = tensors(length=13)
    for options in ({}, {"return_attention_scores": True}):
        output = run(
            lambda *x, options=options: lsh_attention(
                *x, bucket_size=4, dropout=ops.zeros_like, **options
            ),
            *arrays,
        )
        assert not (output[0] if options else output).any()


def test_nothing_but_padding_gives_zeros():
    query, value, buckets = tensors(length=13)
    nothing = np.zeros((2, 13), bool)

    def attend(query, value):
        return lsh_attention(
            query,
            value,
            ops.convert_to_tensor(buckets),
            bucket_size=4,
            padding_mask=nothing,
        )

    np.testing.assert_array_equal(run(attend, query, value), 0)
    for gradient in gradients(attend, query, value):
        np.testing.assert_array_equal(gradient, 0)


def test_half_precision_keeps_scores_in_float32():
    query, value, buckets = tensors(length=13)
    # sums of these values that are not yet divided would overflow
    halves = [x.astype("float16") for x in (40 * query, 9000 * value)]
    op = functools.partial(lsh_attention, bucket_size=4)
    output = run(op, *halves, buckets)
    expected = run(op, *(x.astype("float32") for x in halves), buckets)
    assert output.dtype == "float16"
    np.testing.assert_allclose(output / 9000, expected / 9000, atol=5e-3)


def test_chunks_cannot_be_prefix_consistent_without_causality():
    with pytest.raises(ValueError, match="use_causal_mask"):
        lsh_attention(*tensors(5), bucket_size=4, prefix_consistent=True)


@pytest.mark.parametrize(
    "options",
    [{}, {"prefix_consistent": True}, {"allow_duplicates": False}],
    ids=str,
)
def test_memory_grows_with_the_length(options):
    rotations = np.ones((2, 5, 2, 64), "float32")

    def attend(query, value):
        buckets = lsh_buckets(query, rotations, bucket_size=16)
        return lsh_attention(
            query,
            value,
            buckets,
            bucket_size=16,
            use_causal_mask=True,
            **options,
        )

    def inputs(length):
        return tensors(length)[:2]

    assert max(memory.growth(attend, inputs, length=256)) <= 4.5
