"""`keras.remat` around every layer gives the gradients of the layer."""

import contextlib

import keras
import numpy as np
import pytest
from keras import ops

from keras_attn.layers import MultiHeadAttention
from tests.backend import weight_gradients
from tests.layers.every_layer import every_layer
from tests.layers.every_layer import nightly_but

IS_JAX = keras.backend.backend() == "jax"
# JAX compiles every layer twice, for minutes
quick_first = nightly_but("LinearAttention", "Boom") if IS_JAX else every_layer


def close(actual, expected):
    # a sum is rounded in proportion to what is summed, even if that cancels
    largest = max(np.abs(b).max() for b in expected)
    for a, b in zip(actual, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-6 * largest)


@pytest.mark.support("Scale", "`keras.remat`")
@quick_first
def test_gradients_are_those_without_remat(example):
    layer, calls = example.built(), []
    x = ops.convert_to_tensor(example.inputs())

    def call(x):
        calls.append(x)
        return layer(x)

    def gradients(call):
        return weight_gradients(
            lambda: ops.square(call(x)), layer.trainable_weights
        )

    expected = gradients(layer)
    close(gradients(keras.remat(call)), expected)
    # JAX traces a call once, and recomputes what it has traced
    assert len(calls) == (1 if IS_JAX else 2)


@pytest.mark.support(
    "Scale", "`keras.remat`, dropout", layers=["MultiHeadAttention"]
)
def test_dropout_within_remat(unsupported):
    layer = MultiHeadAttention(3, 5, dropout=0.5, seed=3)
    x = np.random.default_rng(0).normal(size=(2, 11, 13))
    x = ops.convert_to_tensor(x, "float32")
    layer.build(x.shape)
    (state,) = (v for v in layer.variables if "seed" in v.path)
    start = ops.convert_to_numpy(state)

    def call(x):
        return layer(x, training=True)

    def gradients(call):
        state.assign(start)
        return weight_gradients(
            lambda: ops.square(call(x)), layer.trainable_weights
        )

    expected = gradients(call)
    redraws = unsupported(
        "What Keras recomputes draws new random numbers, and the gradients are "
        "those of another dropout.",
        AssertionError,
    )
    with contextlib.nullcontext() if IS_JAX else redraws:
        close(gradients(keras.remat(call)), expected)
