import functools
import json
import math
import re

import numpy as np
import pytest
from keras import ops

from keras_attn.ops import fixed_sparse_attention
from keras_attn.ops import parts
from keras_attn.ops import sparse_transformer as module
from keras_attn.ops import strided_sparse_attention
from tests import golden
from tests import memory
from tests import reference
from tests.backend import gradients
from tests.backend import run
from tests.backend import to_numpy
from tests.reference import sparse_transformer

STRIDED_HEADS = ("split", "merged", "local", "strided")
FIXED_HEADS = ("split", "merged", "local", "summary")


def tensors(length, num_heads=3, seed=0):
    rng = np.random.default_rng(seed)
    return [
        rng.normal(size=(2, length, num_heads, size)).astype("float32")
        for size in (5, 5, 7)
    ]


def check(op, mask, length, num_heads=3, **options):
    """Compares outputs and weights with dense attention, padded or not."""
    arrays = tensors(length, num_heads)
    padding = np.arange(length) < [[length], [max(length - 3, 1)]]
    for padding_mask in (None, padding):
        masked = functools.partial(op, padding_mask=padding_mask)

        def both(*tensors, op=masked):
            return op(*tensors), op(*tensors, return_attention_scores=True)

        output, with_scores = run(both, *arrays)
        seen = mask if padding_mask is None else mask & padding[:, None, None]
        expected, weights = reference.attend(*arrays, seen)
        np.testing.assert_allclose(output, expected, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(with_scores[0], output, atol=1e-6)
        np.testing.assert_allclose(with_scores[1], weights, atol=1e-6)


@pytest.mark.parametrize("use_causal_mask", [True, False])
@pytest.mark.parametrize(
    ("length", "stride", "heads"),
    [
        (1, 3, "merged"),
        (2, 3, "split"),  # shorter than the stride
        (9, 3, "local"),  # the blocks fill exactly
        (9, 3, "strided"),
        (11, 3, "split"),  # positions are left over
        (11, 4, "merged"),
        (7, 1, "merged"),  # the strided set is everything
        (7, 1, "local"),  # the local set is the query itself
        (7, 7, "strided"),
    ],
)
def test_strided_matches_dense_reference(
    length, stride, heads, use_causal_mask
):
    mask = sparse_transformer.strided_mask(
        length, stride, heads, 3, use_causal_mask
    )

    def op(*tensors, **options):
        return strided_sparse_attention(
            *tensors,
            stride=stride,
            heads=heads,
            use_causal_mask=use_causal_mask,
            **options,
        )

    check(op, mask, length)


@pytest.mark.parametrize("use_causal_mask", [True, False])
@pytest.mark.parametrize(
    ("length", "sizes", "heads", "num_heads"),
    [
        (1, (3, 1, 1), "merged", 3),
        (2, (5, 2, 1), "summary", 3),  # ends before the first summary
        (4, (5, 2, 1), "split", 3),  # ends within the first summary
        (9, (3, 1, 1), "merged", 3),  # the blocks fill exactly
        (11, (4, 2, 1), "split", 3),  # positions are left over
        (11, (4, 2, 1), "summary", 3),
        (11, (4, 2, 1), "local", 3),
        (11, (4, 1, 3), "merged", 3),  # a summary of its own for each head
        (11, (5, 2, 2), "split", 4),
        (11, (4, 2, 2), "summary", 4),
        (7, (3, 3, 1), "merged", 3),  # the summary is the block
        (7, (1, 1, 1), "split", 3),
    ],
)
def test_fixed_matches_dense_reference(
    length, sizes, heads, num_heads, use_causal_mask
):
    mask = sparse_transformer.fixed_mask(
        length, *sizes, heads, num_heads, use_causal_mask
    )

    def op(*tensors, **options):
        return fixed_sparse_attention(
            *tensors,
            *sizes,
            heads=heads,
            use_causal_mask=use_causal_mask,
            **options,
        )

    check(op, mask, length, num_heads)


def weights_of(op, length, num_heads, **options):
    """The weights of an op, `(N, T, S)`, when all scores are equal."""
    zeros = np.zeros((1, length, num_heads, 1), "float32")
    # the value of a key tells it from the others
    values = np.zeros((1, length, num_heads, length), "float32")
    values[:] = np.eye(length)[None, :, None]

    def attend(query, value):
        return op(query, query, value, use_causal_mask=True, **options)

    return run(attend, zeros, values)[0].transpose(1, 0, 2)


def uniform(mask):
    """Equal weights for what the rows of a mask may see."""
    return mask / np.maximum(mask.sum(axis=-1, keepdims=True), 1)


def test_strided_index_sets_are_those_of_the_authors():
    masks = golden.load("sparse_transformer_masks")
    for length, stride in json.loads(str(masks["meta_json"]))["cases"]:
        for kind in ("local", "strided"):
            weights = weights_of(
                strided_sparse_attention, length, 1, stride=stride, heads=kind
            )
            expected = uniform(masks[f"mask_{kind}_n{length}_l{stride}"])
            np.testing.assert_allclose(weights[0], expected, atol=1e-6)


def test_fixed_index_sets_are_those_of_the_authors():
    masks = golden.load("sparse_transformer_fixed_masks")
    for name in [name for name in masks if name.startswith("mask")]:
        length, block_size, num_summary, num_subblocks, num_heads, _ = (
            int(number) for number in re.findall("[0-9]+", name)
        )
        weights = weights_of(
            fixed_sparse_attention,
            length,
            num_heads,
            block_size=block_size,
            num_summary=num_summary,
            num_subblocks=num_subblocks,
            heads="merged",
        )
        np.testing.assert_allclose(weights, uniform(masks[name]), atol=1e-6)


def test_index_sets_are_those_of_the_paper():
    """The local set of the paper has one more position, as its text notes."""
    masks = golden.load("sparse_transformer_paper_index_sets")
    for length, size, count in json.loads(str(masks["meta_json"]))["cases"]:
        kinds = {
            "strided_A1": ("local", strided_sparse_attention, (size + 1,)),
            "strided_A2": ("strided", strided_sparse_attention, (size,)),
            "fixed_A1": ("local", fixed_sparse_attention, (size, count)),
            "fixed_A2": ("summary", fixed_sparse_attention, (size, count)),
        }
        for name, (heads, op, sizes) in kinds.items():
            weights = weights_of(
                lambda q, k, v, op=op, sizes=sizes, **options: op(
                    q, k, v, *sizes, **options
                ),
                length,
                num_heads=1,
                heads=heads,
            )
            mask = masks[f"{name}_n{length}_l{size}_c{count}"]
            np.testing.assert_allclose(weights[0], uniform(mask), atol=1e-6)


@pytest.mark.parametrize(
    "name",
    [
        name
        for name in golden.names("sparse_transformer_*")
        if not name.endswith(("masks", "sets"))
    ],
)
def test_matches_the_authors_program(name):
    data = golden.load(name)
    meta = json.loads(str(data["meta_json"]))
    heads = name.rsplit("_", 1)[1]
    heads = {"heads": "split", "all": "local"}.get(heads, heads)
    if "fixed" in name:
        op, sizes = (
            fixed_sparse_attention,
            {
                "block_size": meta["stride"],
                "num_summary": meta["summary"]["c"],
                "num_subblocks": meta["summary"]["verts"],
            },
        )
    else:
        # full attention is a local set that is wide enough
        stride = 32 if name.endswith("all") else meta["stride"]
        op, sizes = strided_sparse_attention, {"stride": stride}
    batch, length, features = data["query"].shape
    size = features // meta["num_heads"]
    shape = (batch, length, meta["num_heads"], size)
    padding_mask = data.get("key_padding_mask")

    def attend(*tensors):
        output = op(
            *(ops.reshape(x, shape) for x in tensors),
            **sizes,
            heads=heads,
            padding_mask=padding_mask,
            use_causal_mask=True,
        )
        output = ops.reshape(output, (batch, length, features))
        if padding_mask is None:
            return output
        return output * ops.cast(padding_mask, "float32")[..., None]

    arrays = [data[key] for key in ("query", "key", "value")]
    np.testing.assert_allclose(
        run(attend, *arrays), data["output"], rtol=1e-5, atol=2e-5
    )

    def loss(*tensors):
        return ops.multiply(attend(*tensors), data["loss_weight_R"])

    for key, gradient in zip(
        ("query", "key", "value"), gradients(loss, *arrays), strict=True
    ):
        np.testing.assert_allclose(gradient, data[f"grad_{key}"], atol=2e-4)


PATTERNS = [
    pytest.param(strided_sparse_attention, (3, heads), id=f"strided-{heads}")
    for heads in ("split", "merged", "local", "strided")
] + [
    pytest.param(fixed_sparse_attention, (4, 1, 3, heads), id=f"fixed-{heads}")
    for heads in ("split", "merged", "local", "summary")
]


@pytest.mark.parametrize(("op", "arguments"), PATTERNS)
def test_queries_that_start_later_are_those_of_one_pass(op, arguments):
    query, key, value = tensors(length=11)
    padding = np.arange(11) != [[4], [11]]
    whole = run(
        lambda *x: op(*x, *arguments, padding, use_causal_mask=True),
        query,
        key,
        value,
    )

    def later(query, key, value, start):
        return op(query, key, value, *arguments, padding, start=start)

    for length in (1, 2, 7):  # shorter than a block, and longer
        for start in (0, 3, 11 - length):
            start = np.array(start, "int32")
            chunk = slice(start, start + length)
            output = run(later, query[:, chunk], key, value, start)
            np.testing.assert_allclose(output, whole[:, chunk], atol=1e-6)


@pytest.mark.parametrize(("op", "arguments"), PATTERNS)
def test_dropped_weights_lose_their_values(op, arguments):
    query, key, value = tensors(length=7)
    for use_causal_mask in (False, True):
        output = op(
            *(ops.convert_to_tensor(x) for x in (query, key, value)),
            *arguments,
            use_causal_mask=use_causal_mask,
            dropout=ops.zeros_like,
        )
        assert not to_numpy(output).any()


@pytest.mark.parametrize(("op", "arguments"), PATTERNS)
def test_queries_without_keys_get_zeros(op, arguments):
    arrays = tensors(length=7)
    nothing = np.zeros((2, 7), bool)
    output = run(lambda *x: op(*x, *arguments, nothing), *arrays)
    np.testing.assert_array_equal(output, 0)
    for gradient in gradients(lambda *x: op(*x, *arguments, nothing), *arrays):
        np.testing.assert_array_equal(gradient, 0)


@pytest.mark.parametrize(("op", "arguments"), PATTERNS)
def test_half_precision_keeps_scores_in_float32(op, arguments):
    query, key, value = tensors(length=11)
    arrays = [x.astype("float16") for x in (40 * query, 40 * key, value)]
    expected = run(
        lambda *x: op(*x, *arguments), *(x.astype("float32") for x in arrays)
    )
    output = run(lambda *x: op(*x, *arguments), *arrays)
    assert output.dtype == "float16"
    np.testing.assert_allclose(output, expected, atol=5e-3)


def let_blocks_take_turns(monkeypatch, many_blocks=2, turns=16):
    monkeypatch.setattr(module, "MANY_BLOCKS", many_blocks)
    monkeypatch.setattr(module, "MANY_FIXED_BLOCKS", 2)
    monkeypatch.setattr(module, "TURNS", turns)


# of all patterns four turns, and of fixed attention two
@pytest.mark.parametrize("many_blocks", [2, 99])
@pytest.mark.parametrize(("op", "arguments"), PATTERNS)
def test_parts_agree_with_all_blocks_at_once(
    op, arguments, many_blocks, monkeypatch
):
    arrays = tensors(length=17)  # the last part is not full
    padding = np.arange(17) < [[15], [17]]

    def attend(*tensors):
        return ops.square(op(*tensors, *arguments, padding))

    expected = run(attend, *arrays), *gradients(attend, *arrays)
    let_blocks_take_turns(monkeypatch, many_blocks, turns=4)
    # new functions, for JAX remembers how it has traced one
    actual = (
        run(lambda *x: attend(*x), *arrays),
        *gradients(lambda *x: attend(*x), *arrays),
    )
    for a, b in zip(actual, expected, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


@pytest.mark.parametrize(
    ("op", "sizes"),
    [(strided_sparse_attention, (3,)), (fixed_sparse_attention, (4, 1, 3))],
)
def test_parts_take_less_memory(op, sizes, monkeypatch):
    def largest_array():
        return memory.largest_array(
            lambda *x: op(*x, *sizes, "merged"), *tensors(length=300)
        )

    all_at_once = largest_array()
    monkeypatch.setattr(parts, "MANY_POSITIONS", 300)
    let_blocks_take_turns(monkeypatch)
    assert largest_array() < all_at_once / 2


@pytest.mark.parametrize(("op", "arguments"), PATTERNS)
def test_parts_do_not_draw_the_same_dropout(op, arguments, monkeypatch):
    let_blocks_take_turns(monkeypatch)
    sizes = []

    def dropout(weights):
        sizes.append(weights.shape[2] * weights.shape[3])
        return weights

    query, key, value = (ops.convert_to_tensor(x) for x in tensors(length=12))
    op(query, key, value, *arguments, dropout=dropout)
    assert set(sizes) == {12}


def test_two_steps_reach_every_earlier_position():
    strided = [
        sparse_transformer.strided_mask(12, 4, heads, 1, True)[0]
        for heads in ("local", "strided")
    ]
    for first, second in (strided, reversed(strided)):
        steps = first.astype(int) @ second.astype(int)
        assert (steps[np.tril_indices(12)] > 0).all()


@pytest.mark.parametrize(("op", "arguments"), PATTERNS)
@pytest.mark.parametrize("use_causal_mask", [False, True])
def test_memory_grows_as_the_length_to_the_power_of_three_halves(
    op, arguments, use_causal_mask
):
    """A stride that is the root of the length doubles when that quadruples."""

    def attend(query, key, value):
        size = math.isqrt(query.shape[1])
        sizes = (size,) if op is strided_sparse_attention else (size, 2, 3)
        return op(
            query,
            key,
            value,
            *sizes,
            arguments[-1],
            use_causal_mask=use_causal_mask,
        )

    assert max(memory.growth(attend, tensors, length=256)) <= 8.5


def test_what_cannot_be_honoured_is_refused():
    query, key, value = tensors(length=6, num_heads=1)
    with pytest.raises(ValueError, match="heads='summary'"):
        strided_sparse_attention(query, key, value, 3, "summary")
    with pytest.raises(ValueError, match="cannot be split"):
        strided_sparse_attention(query, key, value, 3)
    with pytest.raises(ValueError, match="4 queries and 6 keys"):
        fixed_sparse_attention(query[:, :4], key, value, 3, 1, heads="merged")
