"""`tf.distribute.MirroredStrategy` on two logical devices."""

import subprocess
import sys

import keras
import numpy as np
import tensorflow as tf

from keras_attn.layers import LinearAttention
from keras_attn.layers import MultiHeadAttention


def train():
    """Trains a model for two steps; returns its weights as one vector."""
    keras.utils.set_random_seed(0)
    inputs = keras.Input((11, 13))
    x = inputs + MultiHeadAttention(3, 5)(inputs)
    x = x + LinearAttention(3, 5)(x)
    model = keras.Model(inputs, x)
    model.compile(keras.optimizers.SGD(0.5), "mse")
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(2, 8, 11, 13)).astype("float32")
    before = np.concatenate([w.ravel() for w in model.get_weights()])
    model.fit(x, y, batch_size=4, shuffle=False, verbose=0)
    after = np.concatenate([w.ravel() for w in model.get_weights()])
    assert np.abs(after - before).max() > 1e-3
    return after


def train_on_two_devices(path):
    cpu = tf.config.list_physical_devices("CPU")[0]
    half = tf.config.LogicalDeviceConfiguration()
    tf.config.set_logical_device_configuration(cpu, [half, half])
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    assert strategy.num_replicas_in_sync == 2
    with strategy.scope():
        np.save(path, train())


def test_two_replicas_train_like_one(tmp_path):
    program = "import sys; from tests.distribution.test_tensorflow import *; "
    program += "train_on_two_devices(sys.argv[1])"
    path = tmp_path / "weights.npy"
    subprocess.run([sys.executable, "-c", program, path], check=True)
    np.testing.assert_allclose(np.load(path), train(), rtol=1e-5, atol=1e-6)
