"""`tf.distribute.MirroredStrategy` on two logical devices."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.distribution.examples import inputs
from tests.distribution.examples import make
from tests.layers.every_layer import nightly_but


def train(example):
    """Trains a layer for two steps; returns the weights before and after."""
    keras.utils.set_random_seed(0)
    x = inputs(example)
    tensors = keras.Input(x.shape[1:])
    # a replica normalizes by the statistics of its own part of a batch
    normalizes = "use_normalization" in example.layer().get_config()
    options = {"use_normalization": False} if normalizes else {}
    model = keras.Model(tensors, make(example, **options)(tensors))
    before = model.get_weights()
    model.compile(keras.optimizers.SGD(0.5), "mse")
    y = np.random.default_rng(1).normal(size=(len(x), *model.output_shape[1:]))
    model.fit(x, y, batch_size=4, shuffle=False, verbose=0)
    return before, model.get_weights()


@pytest.fixture(scope="module")
def strategy():
    # a second one in a process would get the keys of the first
    return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])


@pytest.mark.support("Scale", "`MirroredStrategy`")
@nightly_but("MultiHeadAttention", "LinearAttention")
def test_two_replicas_train_like_one(example, strategy):
    before, expected = train(example)
    assert strategy.num_replicas_in_sync == 2
    with strategy.scope():
        _, actual = train(example)
    moved = 0
    for old, a, b in zip(before, actual, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5)
        moved = max(moved, np.abs(b - old).max())
    assert moved > 1e-3
