"""Half and double precision, in every layer."""

import contextlib

import keras
import numpy as np
import pytest
from keras import ops

from keras_attn import layers
from tests.backend import compiled
from tests.backend import quick
from tests.backend import to_numpy
from tests.layers.every_layer import LENGTH
from tests.layers.every_layer import nightly_but

TOLERANCES = {"mixed_float16": 0.01, "mixed_bfloat16": 0.05}
# those that lose digits of float64 in operations of Keras, and the operations
USE_MEAN = (
    layers.SingleHeadAttention,
    layers.SHARNNBlock,
    layers.TransformerBlock,
    layers.LAMA,
    layers.SpatialAttention,
    layers.CBAM,
)
USE_MATMUL = (layers.LinearAttention, layers.Boom, layers.ChannelAttention)
CAST_TO_FLOAT32 = {
    "jax": ("JAX, `keras.ops.mean` casts", USE_MEAN),
    "torch": (
        "PyTorch, `keras.ops.matmul` and `keras.ops.mean` cast",
        USE_MEAN + USE_MATMUL,
    ),
    "tensorflow": ("", ()),
}


def masked_call(example, layer):
    """The layer as a function of an array and a mask."""
    if example.takes_mask:
        return lambda x, mask: layer(x, mask=mask)
    return lambda x, mask: layer(x)


def inputs_of(example):
    """Inputs, and a mask that leaves nothing of the second of them."""
    return example.inputs(), example.mask(LENGTH - 2, 0)


def limits_of(example, policy, unsupported):
    """What the comparison with float32 is run in."""
    is_limit = (
        example.cls is layers.TopKAttention
        and policy == "mixed_bfloat16"
        and keras.backend.backend() == "jax"
    )
    if not is_limit:
        return contextlib.nullcontext()
    return unsupported(
        "Rounded to bfloat16, one query chooses another key than in float32.",
        AssertionError,
        "Not equal to tolerance",
    )


def check_half_precision(example, policy, unsupported):
    x, mask = (ops.convert_to_tensor(x) for x in inputs_of(example))
    half, full = example.built(dtype=policy), example.built()
    full.set_weights(half.get_weights())
    actual = compiled(masked_call(example, half))(x, mask)
    dtype = keras.backend.standardize_dtype(actual.dtype)
    assert dtype == policy.removeprefix("mixed_")
    actual = to_numpy(ops.cast(actual, "float32"))
    assert np.isfinite(actual).all()
    if not example.sorts:  # else rounding decides what a position sees
        expected = to_numpy(quick(masked_call(example, full))(x, mask))
        tolerance = TOLERANCES[policy]
        with limits_of(example, policy, unsupported):
            np.testing.assert_allclose(actual, expected, tolerance, tolerance)

    inputs = keras.Input(example.shape(LENGTH)[1:])
    masks = keras.Input(mask.shape[1:], dtype="bool")
    outputs = masked_call(example, half)(inputs, masks)
    model = keras.Model([inputs, masks], outputs)
    optimizer = keras.optimizers.SGD(0.1)
    if policy == "mixed_float16":
        optimizer = keras.optimizers.LossScaleOptimizer(
            optimizer, initial_scale=2.0**10
        )
    model.compile(optimizer, "mse")
    old = to_numpy([w.value for w in half.trainable_weights])
    target = np.zeros((2, *model.output_shape[1:]), "float32")
    history = model.fit([x, mask], target, verbose=0)
    assert np.isfinite(history.history["loss"]).all()
    new = to_numpy([w.value for w in half.trainable_weights])
    assert all(np.isfinite(w).all() for w in new)
    # a step whose gradients are not finite would have been left out
    assert any((a != b).any() for a, b in zip(old, new, strict=True))
    assert all(w.dtype == "float32" for w in half.trainable_weights)


@pytest.mark.support("Precision", "`mixed_float16`")
@nightly_but("MultiHeadAttention", "SHARNNBlock")
def test_float16_is_close_and_trains_with_loss_scaling(example, unsupported):
    check_half_precision(example, "mixed_float16", unsupported)


@pytest.mark.support("Precision", "`mixed_bfloat16`")
@nightly_but()
def test_bfloat16_is_close_and_trains(example, unsupported):
    check_half_precision(example, "mixed_bfloat16", unsupported)


@contextlib.contextmanager
def double_precision():
    """JAX has no float64 unless told so."""
    if keras.backend.backend() != "jax":
        yield
        return
    import jax

    with jax.enable_x64(True):
        yield


@pytest.mark.support("Precision", "`float64`")
@nightly_but("MultiHeadAttention")
def test_float64_has_the_digits_of_float64(example, unsupported):
    x, mask = inputs_of(example)
    full = example.built()
    expected = to_numpy(quick(masked_call(example, full))(x, mask))
    with double_precision():
        layer = example.built(dtype="float64")
        layer.set_weights(full.get_weights())
        call = quick(masked_call(example, layer))
        direction = example.inputs(seed=1).astype("float64")

        def output(step):
            inputs = ops.convert_to_tensor(x + step * direction, "float64")
            result = call(inputs, mask)
            dtype = keras.backend.standardize_dtype(result.dtype)
            assert dtype == "float64"
            return to_numpy(result)

        np.testing.assert_allclose(output(0.0), expected, 1e-4, 1e-5)
        # slopes over steps that are lost in the rounding of float32
        steps = (1e-6, 1e-7)
        slopes = [(output(h) - output(-h)) / (2 * h) for h in steps]

    def compare():
        np.testing.assert_allclose(*slopes, 1e-4, 1e-4)

    culprits, classes = CAST_TO_FLOAT32[keras.backend.backend()]
    if example.cls in classes:
        reason = (
            "Takes and gives float64, but with the digits of float32: on "
            f"{culprits} to float32."
        )
        with unsupported(reason, AssertionError):
            compare()
    else:
        compare()


@nightly_but("LSHAttention")
def test_floatx_does_not_reach_a_layer_of_its_own_dtype(example):
    layer = example.built(dtype="float32")
    x = np.random.default_rng(0).normal(size=example.shape(LENGTH, 2))
    x = ops.convert_to_tensor(x, dtype="float32")
    expected = to_numpy(layer(x))
    keras.config.set_floatx("float16")
    try:
        actual = to_numpy(layer(x))
    finally:
        keras.config.set_floatx("float32")
    keras.tree.map_structure(
        lambda x, y: np.testing.assert_allclose(x, y, atol=1e-6),
        actual,
        expected,
    )
