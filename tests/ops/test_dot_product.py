import keras
import numpy as np
import pytest
from keras import ops

from keras_attn.ops import dot_product_attention
from tests import golden
from tests import reference
from tests.backend import gradients
from tests.backend import run

B, T, S, N, H, V = 2, 5, 7, 3, 4, 6


def heads(length=T, key_length=S, value_size=V, dtype="float32"):
    rng = np.random.default_rng(0)
    shapes = (
        (B, length, N, H),
        (B, key_length, N, H),
        (B, key_length, N, value_size),
    )
    return [rng.normal(size=shape).astype(dtype) for shape in shapes]


def masks(length=T, key_length=S):
    """A padding mask with an empty row, and masks by batch and by head."""
    rng = np.random.default_rng(1)
    return (
        np.arange(key_length) < [[key_length - 2], [0]],
        rng.random((B, length, key_length)) < 0.5,
        rng.random((B, N, length, key_length)) < 0.5,
    )


def identity(weights):
    """Dropout that drops nothing, and yet shuts the fused kernel out."""
    return weights


@pytest.mark.parametrize("value_size", [H, V])  # fused, and not
@pytest.mark.parametrize("use_padding_mask", [False, True])
@pytest.mark.parametrize("attention", [None, "batch", "head"])
@pytest.mark.parametrize("use_causal_mask", [False, True])
def test_matches_reference_on_every_path(
    value_size, use_padding_mask, attention, use_causal_mask
):
    key_length = T if use_causal_mask else S
    arrays = heads(key_length=key_length, value_size=value_size)
    padding, by_batch, by_head = masks(key_length=key_length)
    attention_mask = {"batch": by_batch, "head": by_head}.get(attention)
    mask = np.ones((B, N, T, key_length), bool)
    options = {"use_causal_mask": use_causal_mask}
    if use_padding_mask:
        mask &= padding[:, None, None]
        options["padding_mask"] = padding
    if attention == "batch":
        mask &= by_batch[:, None]
    if attention == "head":
        mask &= by_head
    if use_causal_mask:
        mask &= np.tri(T, key_length, dtype=bool)
    expected, weights = reference.attend(*arrays, mask)

    def every_path(query, key, value):
        args = {"attention_mask": attention_mask, **options}
        return (
            dot_product_attention(query, key, value, **args),
            dot_product_attention(query, key, value, dropout=identity, **args),
            *dot_product_attention(
                query, key, value, return_attention_scores=True, **args
            ),
        )

    fast, dropped, output, scores = run(every_path, *arrays)
    for actual in (fast, dropped, output):
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(scores, weights, rtol=1e-5, atol=1e-5)
    empty = ~mask.any(axis=-1).transpose(0, 2, 1)
    assert (fast[empty] == 0).all() and (output[empty] == 0).all()


def test_a_masked_key_of_two_has_no_part():
    query = np.ones((1, 1, 1, 1), "float32")
    key = np.array([2.0, 3.0], "float32").reshape(1, 2, 1, 1)
    value = np.array([5.0, 7.0], "float32").reshape(1, 2, 1, 1)
    output = run(dot_product_attention, query, key, value)
    share = 1 / (1 + np.exp(-1.0))  # of the second key
    np.testing.assert_allclose(output[0, 0, 0, 0], 5 + 2 * share, rtol=1e-6)
    mask = np.array([[True, False]])
    output = run(
        lambda *x: dot_product_attention(*x, padding_mask=mask),
        query,
        key,
        value,
    )
    assert output[0, 0, 0, 0] == 5


@pytest.mark.parametrize("value_size", [H, V])
def test_an_empty_row_does_not_spoil_gradients(value_size):
    arrays = heads(value_size=value_size)
    padding, *_ = masks()
    grads = gradients(
        lambda *x: ops.square(dot_product_attention(*x, padding_mask=padding)),
        *arrays,
    )
    for grad in grads:
        assert np.isfinite(grad).all()
        assert (grad[1] == 0).all()
        assert (grad[0] != 0).any()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("value_size", [H, V])
def test_half_precision_does_not_overflow(dtype, value_size):
    arrays = heads(value_size=value_size)
    arrays[0] *= 200  # scores of up to 1e5 before they are scaled
    arrays[1] *= 200
    halves = lambda *x: [ops.cast(a, dtype) for a in x]  # noqa: E731

    def fn(*x):
        return ops.cast(dot_product_attention(*halves(*x)), "float32")

    rounded = run(
        lambda *x: [ops.cast(a, "float32") for a in halves(*x)], *arrays
    )
    expected, _ = reference.attend(*rounded)
    output = run(fn, *arrays)
    assert np.isfinite(output).all()
    # the scores are large, so that rounding may change the winning key
    close = np.abs(output - expected) < 0.05
    assert close.mean() > 0.9


def test_float64_stays_float64():
    arrays = heads(dtype="float64")
    if keras.backend.backend() == "jax":
        import jax

        with jax.enable_x64(True):
            output = run(dot_product_attention, *arrays)
    else:
        output = run(dot_product_attention, *arrays)
    expected, _ = reference.attend(*arrays)
    np.testing.assert_allclose(output, expected, rtol=1e-12, atol=1e-12)


def test_dropout_acts_on_the_weights():
    arrays = heads(value_size=H)
    doubled = run(
        lambda *x: dot_product_attention(*x, dropout=lambda w: 2 * w), *arrays
    )
    plain = run(dot_product_attention, *arrays)
    np.testing.assert_allclose(doubled, 2 * plain, rtol=1e-5, atol=1e-5)


def test_causal_attention_needs_equal_lengths():
    for value_size in (H, V):
        with pytest.raises(ValueError, match="5 queries and 7 keys"):
            arrays = heads(value_size=value_size)
            dot_product_attention(*arrays, use_causal_mask=True)


@pytest.mark.parametrize("name", golden.names("sdpa_*"))
def test_golden(name):
    data = golden.load(name)
    query, key, value, upstream = (
        np.swapaxes(data[x], 1, 2) for x in ("q", "k", "v", "R")
    )
    mask = data.get("attention_keep_mask")
    options = {"use_causal_mask": bool(data["causal"])}
    if mask is not None:
        shape = (*query.shape[:2], key.shape[1])
        options["attention_mask"] = np.broadcast_to(mask, shape)
    assert np.isclose(data["scale"], query.shape[-1] ** -0.5)
    for dropout in (None, identity):

        def fn(*x, dropout=dropout):
            return dot_product_attention(*x, dropout=dropout, **options)

        output = run(fn, query, key, value)
        np.testing.assert_allclose(
            np.swapaxes(output, 1, 2), data["out"], rtol=0, atol=2e-5
        )
        grads = gradients(
            lambda *x: ops.multiply(fn(*x), upstream), query, key, value
        )
        for grad, x in zip(grads, "qkv", strict=True):
            np.testing.assert_allclose(
                np.swapaxes(grad, 1, 2), data[f"grad_{x}"], rtol=0, atol=2e-4
            )
