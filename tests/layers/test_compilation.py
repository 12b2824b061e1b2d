"""Compiled models of every layer, and how often they are compiled."""

import keras
import numpy as np
import pytest
from keras import ops

from tests.backend import run
from tests.layers.every_layer import LENGTH
from tests.layers.every_layer import nightly_but


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


@pytest.mark.support("Compilation", "one trace per length, none per batch")
@nightly_but("SlidingWindowAttention")
def test_one_trace_for_each_length(example):
    """Further batches, and on TensorFlow further lengths, take no trace."""
    if keras.backend.backend() == "torch":
        count_graphs(example)
        return
    layer = Counter(example.layer())
    model = example.model(layer=layer)
    model.compile(jit_compile=True)
    counts = []
    for length, batch in (
        (LENGTH, 2),
        (LENGTH, 2),
        (5, 2),
        (5, 2),
        (LENGTH, 2),
    ):
        x = example.inputs(length, batch, seed=len(counts))
        layer.calls = 0
        actual = model.predict(x, verbose=0)
        counts.append(layer.calls)
        close(actual, run(example_call(layer.layer), x))
    # XLA compiles for each length all the same, but Python does not run
    assert counts[0] >= 1 and counts[2] >= 1
    assert counts[1] == counts[3] == counts[4] == 0


def example_call(layer):
    return lambda x: layer(x)


def count_graphs(example):
    """On PyTorch, what Dynamo compiles for a second batch, and a length."""
    import torch

    compiled = []

    def backend(graph, inputs):
        compiled.append(graph)
        return graph.forward

    layer = example.built()
    function = torch.compile(lambda x: layer(x), backend=backend)
    counts = []
    for length, batch in (
        (LENGTH, 2),
        (LENGTH, 2),
        (5, 2),
        (5, 2),
        (LENGTH, 2),
    ):
        x = example.inputs(length, batch, seed=len(counts))
        compiled.clear()
        with torch.no_grad():
            actual = function(torch.from_numpy(x))
            counts.append(len(compiled))
            expected = layer(x)
        close(actual.numpy(), expected.numpy())
    assert counts[0] >= 1
    assert counts[1] == counts[3] == counts[4] == 0


def is_jax():
    return keras.backend.backend() == "jax"


def close(actual, expected):
    np.testing.assert_allclose(actual, expected, 1e-4, 1e-5)
