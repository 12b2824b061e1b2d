import keras
import numpy as np
import pytest
from keras import ops

from keras_attn.ops import dot_product_attention
from keras_attn.ops import top_k_attention
from tests import golden
from tests import reference
from tests.backend import compiled
from tests.backend import gradients
from tests.backend import run
from tests.backend import to_numpy
from tests.reference import top_k as definition

BATCH, QUERIES, KEYS, HEADS, SIZE, VALUE = 2, 5, 11, 3, 4, 6


def close(actual, expected, tolerance=1e-5):
    np.testing.assert_allclose(actual, expected, rtol=tolerance, atol=tolerance)


def heads(queries=QUERIES, keys=KEYS, seed=0):
    rng = np.random.default_rng(seed)
    shapes = ((queries, SIZE), (keys, SIZE), (keys, VALUE))
    return [
        rng.normal(size=(BATCH, length, HEADS, size)).astype("float32")
        for length, size in shapes
    ]


def scores_of(query, key):
    scores = np.einsum("btnh,bsnh->bnts", query.astype("float64"), key)
    return scores / np.sqrt(query.shape[-1])


# whole numbers, on which all backends agree to the last bit
def tied_heads(queries=QUERIES, keys=KEYS):
    rng = np.random.default_rng(0)
    shapes = ((queries, SIZE), (keys, SIZE), (keys, VALUE))
    return [
        rng.integers(-1, 2, size=(BATCH, length, HEADS, size)).astype("float32")
        for length, size in shapes
    ]


@pytest.mark.parametrize("top_k", [1, 3, 10, 11, 30, 0.3, 0.75, 1.0])
@pytest.mark.parametrize("use_causal_mask", [False, True])
def test_matches_dense_reference(top_k, use_causal_mask):
    query, key, value = heads(KEYS if use_causal_mask else QUERIES)
    padding = np.arange(KEYS) < [[KEYS], [4]]
    allowed = np.random.default_rng(1).random((BATCH, query.shape[1], KEYS))
    for masks in ((None, None), (padding, None), (padding, allowed < 0.6)):
        seen = np.ones((1, 1, query.shape[1], KEYS), bool)
        if use_causal_mask:
            seen = np.tril(seen)
        if masks[0] is not None:
            seen = seen & masks[0][:, None, None]
        if masks[1] is not None:
            seen = seen & masks[1][:, None]
        kept = definition.chosen(scores_of(query, key), top_k, seen)
        expected, weights = reference.attend(query, key, value, kept)

        def attend(query, key, value, masks=masks):
            return top_k_attention(
                query,
                key,
                value,
                top_k,
                *masks,
                use_causal_mask=use_causal_mask,
                return_attention_scores=True,
            )

        output, scores = run(attend, query, key, value)
        close(output, expected)
        close(scores, weights)
        np.testing.assert_array_equal(scores > 0, weights > 0)


@pytest.mark.parametrize("top_k", [1, 3, 0.3])
def test_ties_are_kept_to_the_last_one(top_k):
    query, key, value = tied_heads()
    padding = np.arange(KEYS) < [[KEYS], [9]]
    kept = definition.chosen(
        scores_of(query, key), top_k, padding[:, None, None]
    )
    _, scores = run(
        lambda q, k, v: top_k_attention(
            q, k, v, top_k, padding, return_attention_scores=True
        ),
        query,
        key,
        value,
    )
    np.testing.assert_array_equal(scores > 0, kept)
    count = top_k if isinstance(top_k, int) else 3
    assert (kept.sum(axis=-1) > count).any()


def test_a_choice_by_hand():
    key = np.array([3.0, 1.0, 4.0, 1.0, 5.0], "float32").reshape(1, 5, 1, 1)
    query = np.ones((1, 1, 1, 1), "float32")

    def kept(top_k, **masks):
        fn = top_k_attention
        _, scores = run(
            lambda q, k: fn(
                q, k, k, top_k, return_attention_scores=True, **masks
            ),
            query,
            key,
        )
        return list(np.flatnonzero(scores[0, 0, 0]))

    assert kept(1) == [4]
    assert kept(2) == [2, 4]
    assert kept(4) == [0, 1, 2, 3, 4]  # the last two of them tie
    assert kept(0.6) == [0, 2, 4]
    assert kept(0.61) == [0, 1, 2, 3, 4]
    without = np.array([[True, True, False, True, False]])
    assert kept(1, padding_mask=without) == [0]
    assert kept(0.3, padding_mask=without) == [0]
    assert kept(3, padding_mask=without) == [0, 1, 3]


def test_shares_are_exact():
    # 30 * 0.1 is 3.0000000000000004, for instance
    rng = np.random.default_rng(0)
    query = np.ones((1, 1, 1, 1), "float32")
    for share, count in ((0.1, 3), (0.7, 21), (1 / 3, 10), (0.001, 1)):
        key = rng.permutation(30).astype("float32").reshape(1, 30, 1, 1)
        _, scores = run(
            lambda q, k, share=share: top_k_attention(
                q, k, k, share, return_attention_scores=True
            ),
            query,
            key / 10,
        )
        assert (scores > 0).sum() == count, share


def test_all_keys_are_dot_product_attention():
    query, key, value = heads()
    expected = run(dot_product_attention, query, key, value)
    for top_k in (KEYS, KEYS + 1, 1.0):
        output = run(
            lambda q, k, v, n=top_k: top_k_attention(q, k, v, n),
            query,
            key,
            value,
        )
        close(output, expected)


@pytest.mark.parametrize("top_k", [2, 0.3])
def test_no_gradient_flows_through_the_choice(top_k):
    query, key, value = heads(queries=2)
    kept = definition.chosen(scores_of(query, key), top_k)

    def sparse(query, key, value):
        return ops.square(top_k_attention(query, key, value, top_k))

    def masked(query, key, value):
        return ops.square(
            dot_product_attention(query, key, value, attention_mask=kept)
        )

    found = gradients(sparse, query, key, value)
    for actual, expected in zip(
        found, gradients(masked, query, key, value), strict=True
    ):
        close(actual, expected, 1e-4)
    unchosen = np.moveaxis(~kept.any(axis=2), 1, 2)  # (B, S, N)
    assert unchosen.any()
    assert (found[1][unchosen] == 0).all() and (found[2][unchosen] == 0).all()


@pytest.mark.parametrize("top_k", [2, 0.3])
def test_queries_without_keys_get_zeros_and_finite_gradients(top_k):
    query, key, value = heads()
    padding = np.arange(KEYS) < [[KEYS], [0]]

    def attend(query, key, value):
        return top_k_attention(query, key, value, top_k, padding)

    output = run(attend, query, key, value)
    assert (output[1] == 0).all() and (output[0] != 0).all()
    for gradient in gradients(attend, query, key, value):
        assert np.isfinite(gradient).all()
        assert (gradient[1] == 0).all()


@pytest.mark.parametrize("top_k", [3, 0.3])
def test_keeps_as_many_when_compiled(top_k):
    # a threshold that is rounded unlike the scores would drop its own key
    def attend(query, key, value):
        return top_k_attention(
            query, key, value, top_k, return_attention_scores=True
        )

    fn = compiled(attend)
    rng = np.random.default_rng(0)
    for _ in range(3):
        arrays = rng.normal(size=(3, 1, 64, 2, 16)).astype("float32")
        _, scores = fn(*(ops.convert_to_tensor(x) for x in arrays))
        count = (to_numpy(scores) > 0).sum(axis=-1)
        assert (count == (3 if top_k == 3 else 20)).all()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_chooses_in_float32(dtype):
    query, key, value = (
        ops.cast(x, dtype) for x in heads(queries=20, keys=200)
    )
    _, scores = top_k_attention(
        query, key, value, 5, return_attention_scores=True
    )
    assert keras.backend.standardize_dtype(scores.dtype) == dtype
    # scores rounded to these dtypes tie in many rows of these data
    kept = to_numpy(ops.cast(scores, "float32")) > 0
    exact = scores_of(*(to_numpy(ops.cast(x, "float32")) for x in (query, key)))
    np.testing.assert_array_equal(kept, definition.chosen(exact, 5))


def test_nan_is_not_hidden():
    query, key, value = heads()
    query[0, 0] = np.nan
    output = run(lambda *x: top_k_attention(*x, 3), query, key, value)
    assert np.isnan(output[0, 0]).all()
    assert np.isfinite(output[1]).all()


@pytest.mark.parametrize("name", golden.names("topk_core_*"))
def test_equals_golden_data(name):
    data = golden.load(name)
    arrays = [data[x] for x in "qkv"]

    def attend(query, key, value):
        return top_k_attention(
            query,
            key,
            value,
            int(data["top_k"]),
            data.get("key_keep_mask"),
            use_causal_mask=bool(data["causal"]),
        )

    close(run(attend, *arrays), data["out"], 2e-5)
    found = gradients(lambda *x: ops.multiply(attend(*x), data["R"]), *arrays)
    for name, gradient in zip("qkv", found, strict=True):
        close(gradient, data[f"grad_{name}"], 2e-4)
