"""Adapters of LoRA, and quantization, in every layer."""

import subprocess
import sys

import keras
import numpy as np
import pytest

from keras_attn import layers
from tests.backend import run
from tests.backend import to_numpy
from tests.layers.every_layer import EXAMPLES
from tests.layers.every_layer import LENGTH
from tests.layers.every_layer import nightly_but

# of the output, root mean square to root mean square
ERRORS = {"int8": 0.02, "int4": 0.15, "float8": 0.12}
# where rounding decides what is attended
CHOOSING = {"int8": 0.15, "int4": 0.4, "float8": 0.25}


@pytest.mark.support("LoRA and quantization", "LoRA")
@nightly_but("LongformerAttention", "CBAM")
def test_training_moves_the_adapters_alone(example, tmp_path):
    model, x = example.model(LENGTH), example.inputs()
    layer = model.layers[-1]
    expected = output(model, x)
    frozen = list(layer.weights)
    layer.enable_lora(2)
    np.testing.assert_allclose(output(model, x), expected, 1e-5, 1e-5)
    old = to_numpy([w.value for w in layer.weights])
    model.compile(keras.optimizers.SGD(1.0), "mse")
    model.fit(x, example.inputs(seed=1)[:, : expected.shape[1]], verbose=0)
    moved = {
        weight.path
        for weight, value in zip(layer.weights, old, strict=True)
        if (to_numpy(weight.value) != value).any()
    }
    # the other factor has a gradient once this one is not zero
    assert moved == {
        w.path for w in layer.trainable_weights if "lora_kernel_b" in w.path
    }
    assert not {w.path for w in frozen} & moved
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    np.testing.assert_allclose(output(loaded, x), output(model, x), 1e-5, 1e-5)


# Keras warns of every layer that it does not quantize, be it an `InputLayer`
quiet = pytest.mark.filterwarnings("ignore:Layer .* `quantize` method")


@pytest.mark.support("LoRA and quantization", "int8")
@quiet
@nightly_but("LongformerAttention", "SHARNNBlock")
def test_int8_is_close_and_saved(example, tmp_path, unsupported):
    check_quantized(example, "int8", tmp_path, unsupported)


@pytest.mark.support("LoRA and quantization", "int4")
@quiet
@nightly_but("LinformerAttention")
def test_int4_is_close_and_saved(example, tmp_path, unsupported):
    check_quantized(example, "int4", tmp_path, unsupported)


@pytest.mark.support("LoRA and quantization", "float8")
@quiet
@nightly_but("LinformerAttention")
def test_float8_is_close_and_saved(example, tmp_path, unsupported):
    check_quantized(example, "float8", tmp_path, unsupported)


def check_quantized(example, mode, folder, unsupported):
    """Quantizes a layer, and compares it with itself before and as loaded."""
    model, x = example.model(LENGTH), example.inputs()
    expected = output(model, x)
    model.quantize(mode)
    if example.cls is layers.SpatialAttention:
        with unsupported("Keras quantizes no convolutions.", AssertionError):
            assert any("scale" in weight.path for weight in model.weights)
        return
    actual = output(model, x)
    error = rms(actual - expected) / rms(expected)
    chooses = example.sorts or example.cls is layers.TopKAttention
    assert 0 < error < (CHOOSING if chooses else ERRORS)[mode]
    model.save(folder / "model.keras")
    loaded = keras.saving.load_model(folder / "model.keras")
    np.testing.assert_allclose(output(loaded, x), actual, 1e-6, 1e-6)


def output(model, x):
    # a function of its own, since JAX would not compile the model again
    return run(lambda x: model(x), x)


def rms(x):
    return np.sqrt(np.mean(np.square(x)))


@pytest.mark.support(
    "LoRA and quantization",
    "quantized, in another process",
    layers=[str(example) for example in EXAMPLES],
)
@pytest.mark.nightly
@quiet
def test_quantized_models_load_in_another_process(tmp_path):
    modes = list(ERRORS)
    for i, example in enumerate(EXAMPLES):
        model = example.model(LENGTH)
        model.quantize(modes[i % len(modes)])
        model.save(tmp_path / f"{i}.keras")
        np.save(tmp_path / f"{i}-input.npy", example.inputs())
        np.save(tmp_path / f"{i}.npy", output(model, example.inputs()))
    program = """
import sys
import keras, keras_attn, numpy as np
folder, count = sys.argv[1], int(sys.argv[2])
for i in range(count):
    model = keras.saving.load_model(f"{folder}/{i}.keras")
    x, expected = (np.load(f"{folder}/{i}{s}.npy") for s in ("-input", ""))
    difference = np.abs(model.predict(x, verbose=0) - expected)
    assert difference.max() < 1e-5, (i, difference.max())
"""
    subprocess.run(
        [sys.executable, "-c", program, str(tmp_path), str(len(EXAMPLES))],
        check=True,
    )


def test_a_quantized_layer_loads_wherever_it_is_put(tmp_path):
    """Its config tells of its projections whatever surrounds it."""
    inputs = keras.Input((LENGTH, 13))
    layer = layers.MultiHeadAttention(2, 4, name="inner")
    model = keras.Model(inputs, layer(inputs))
    with pytest.warns(UserWarning, match="quantize"):
        model.quantize("int8")
    model.save_weights(tmp_path / "model.weights.h5")
    twin = layers.MultiHeadAttention.from_config(layer.get_config())
    with keras.name_scope("elsewhere"):
        twin.build((None, LENGTH, 13))
    assert twin.query_dense.quantization_mode == "int8"
    assert twin.output_dense.quantization_mode == "int8"
    assert twin.quantization_mode is None


def test_what_has_no_projections_takes_no_adapters():
    layer = layers.LAMA(num_heads=2)
    with pytest.raises(ValueError, match="LAMA.*before it is built"):
        layer.enable_lora(2)
    layer.build((None, LENGTH, 13))
    with pytest.raises(ValueError, match="LAMA.*no dense layer"):
        layer.enable_lora(2)
