"""Compiled models of every layer, and how often they are compiled."""

import contextlib

import keras
import numpy as np
import pytest
from keras import ops

from keras_attn.layers import LSHAttention
from tests.backend import run
from tests.layers.every_layer import LENGTH
from tests.layers.every_layer import nightly_but

# Dynamo warns of what it does not trace in Keras
pytestmark = pytest.mark.filterwarnings("ignore")


class Counter(keras.layers.Layer):
    """Counts how often Python runs the call of a layer, as tracing does."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer
        self.calls = 0

    def build(self, input_shape):
        self.layer.build(input_shape)

    def call(self, inputs):
        self.calls += 1
        return self.layer(inputs)

    def compute_output_shape(self, input_shape):
        return self.layer.compute_output_shape(input_shape)


@pytest.mark.support("Compilation", "`jit_compile=True` or `torch.compile`")
@nightly_but()
def test_compiled_model_predicts_and_trains_as_an_eager_one(example):
    x = example.inputs()
    models = [example.model(LENGTH) for _ in range(2)]
    models[1].set_weights(models[0].get_weights())
    target = example.inputs(seed=1)[:, : models[0].output_shape[1]]
    for model, is_compiled in zip(models, (False, True), strict=True):
        model.compile(
            keras.optimizers.SGD(0.1),
            "mse",
            jit_compile=is_compiled,
            run_eagerly=not is_compiled and not is_jax(),
        )
    close(*(model.predict(x, verbose=0) for model in models))
    for model in models:
        model.fit(x, target, verbose=0)
    for eager, compiled in zip(*(m.weights for m in models), strict=True):
        close(ops.convert_to_numpy(eager), ops.convert_to_numpy(compiled))


# what is compiled anew for a first or second call, may not be for a third
LENGTHS = (LENGTH, LENGTH, LENGTH, 5, 5, LENGTH, LENGTH)


@pytest.mark.support("Compilation", "one trace per length")
@nightly_but("MultiHeadAttention")
def test_one_trace_for_each_length(example, unsupported):
    is_torch = keras.backend.backend() == "torch"
    counts = (count_graphs if is_torch else count_traces)(example)
    assert counts[0] >= 1
    assert counts[2] == counts[4] == counts[6] == 0
    limit = contextlib.nullcontext()
    if is_torch and example.cls is LSHAttention:
        limit = unsupported(
            "PyTorch compiles parts of it once more when a length comes back "
            "after another.",
            AssertionError,
        )
    with limit:
        assert counts[5] == 0


def count_traces(example):
    """How often Python runs a layer whose model is compiled by XLA."""
    layer = Counter(example.layer())
    model = example.model(layer=layer)
    model.compile(jit_compile=True)
    counts = []
    for length in LENGTHS:
        x = example.inputs(length, seed=len(counts))
        layer.calls = 0
        actual = model.predict(x, verbose=0)
        counts.append(layer.calls)
        close(actual, run(lambda x: layer.layer(x), x))
    return counts


def count_graphs(example):
    """How many graphs `torch.compile` makes of a layer."""
    import torch

    graphs, counts = [], []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    layer = example.built()
    function = torch.compile(lambda x: layer(x), backend=backend)
    for length in LENGTHS:
        x = torch.from_numpy(example.inputs(length, seed=len(counts)))
        graphs.clear()
        with torch.no_grad():
            actual = function(x)
            counts.append(len(graphs))
            close(actual.numpy(), layer(x).numpy())
    return counts


def is_jax():
    return keras.backend.backend() == "jax"


def close(actual, expected):
    np.testing.assert_allclose(actual, expected, 1e-4, 1e-5)
