import keras
import numpy as np
import pytest
from keras import ops

from keras_attn import layers
from keras_attn.ops import boom
from keras_attn.ops import quick_gelu
from tests import golden
from tests.backend import gradients
from tests.backend import run
from tests.backend import to_numpy
from tests.backend import weight_gradients
from tests.golden.sharnn import load_weights
from tests.golden.sharnn import named_gradients

CASES = {"sum": 48, "sum_trim": 55, "linear": 40}


def golden_case(case):
    arrays = golden.load("sharnn_boom")
    x = arrays[f"{case}.input.x"]
    down = "dense" if case == "linear" else "sum"
    layer = layers.Boom(CASES[case], down=down)
    layer.build(x.shape)
    load_weights(layer, arrays, f"{case}.weight.")
    return layer, x, arrays


@pytest.mark.parametrize("case", CASES)
def test_golden(case):
    layer, x, arrays = golden_case(case)
    np.testing.assert_allclose(
        run(layer, x), arrays[f"{case}.expected.out"], rtol=2e-5, atol=2e-5
    )
    pairs = named_gradients(layer, arrays, f"{case}.grad.weight.")
    assert len(pairs) == len(layer.trainable_weights)

    def loss(x):
        return ops.multiply(layer(x), arrays[f"{case}.loss_R"])

    actual = gradients(loss, x) + weight_gradients(
        lambda: loss(ops.convert_to_tensor(x)), [weight for weight, _ in pairs]
    )
    expected = [arrays[f"{case}.grad.x"], *(array for _, array in pairs)]
    for gradient, array in zip(actual, expected, strict=True):
        tolerance = 1e-4 * np.abs(array).max() + 1e-6
        np.testing.assert_allclose(gradient, array, atol=tolerance)


def test_feature_i_lands_on_i_modulo_the_size():
    output = run(lambda x: boom(x, 3), np.eye(11, dtype="float32"))
    expected = np.zeros((11, 3))
    for i in range(9):  # the last two are beyond a whole chunk
        expected[i, i % 3] = 1
    np.testing.assert_array_equal(output, expected)


def test_quick_gelu():
    x = np.linspace(-5, 5, 11, dtype="float32")
    np.testing.assert_allclose(
        run(quick_gelu, x), x / (1 + np.exp(-1.702 * x)), rtol=1e-5, atol=1e-6
    )


def test_narrow_booms_are_refused():
    with pytest.raises(ValueError, match="intermediate_dim=5"):
        layers.Boom(5)(np.zeros((2, 3, 6), "float32"))
    with pytest.raises(ValueError, match="whole chunk"):
        boom(ops.zeros((2, 5)), 6)
    with pytest.raises(ValueError, match="down='mean'"):
        layers.Boom(12, down="mean")
    # a second matrix maps any width
    layers.Boom(5, down="dense")(np.zeros((2, 3, 6), "float32"))


def test_activation_and_config():
    x = np.random.default_rng(0).normal(size=(2, 3, 6)).astype("float32")
    layer = layers.Boom(12, activation="relu", dropout=0.5, seed=3)
    layer.build(x.shape)
    kernel, _ = layer.get_weights()
    expected = np.maximum(x @ kernel, 0)
    np.testing.assert_allclose(
        to_numpy(layer(x)),
        expected[..., :6] + expected[..., 6:],
        rtol=1e-5,
        atol=1e-6,
    )
    assert np.abs(to_numpy(layer(x, training=True)) - to_numpy(layer(x))).any()
    for activation in ("quick_gelu", "relu", "linear"):
        config = layers.Boom(12, activation=activation).get_config()
        assert config["activation"] == activation
        again = layers.Boom.from_config(config)
        assert again.get_config() == config
    model = keras.Sequential([keras.Input((None, 6)), layer])
    assert model.output_shape == (None, None, 6)
