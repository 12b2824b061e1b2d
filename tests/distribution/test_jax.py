"""`keras.distribution` on eight simulated devices."""

import dataclasses
import functools

import jax
import keras
import numpy as np
import pytest
from keras import distribution
from keras import ops

from keras_attn import layers
from keras_attn import models
from keras_attn.distribution import layout_map
from tests.backend import to_numpy
from tests.distribution.examples import EXAMPLES
from tests.distribution.examples import inputs
from tests.distribution.examples import make
from tests.layers.every_layer import nightly_but

quick_first = nightly_but("MultiHeadAttention", "LinearAttention")
WITHOUT_HEADS = (
    layers.ChannelAttention,
    layers.SpatialAttention,
    layers.CBAM,
)


@dataclasses.dataclass
class Step:
    """What a step of training gives, and what it takes on each device."""

    results: list  # the loss and the gradients of all weights
    parameters: int  # bytes of the weights
    activations: int  # bytes of what is computed in between


def mesh(shape=(2, 4)):
    return distribution.DeviceMesh(
        shape, ["batch", "model"], distribution.list_devices()
    )


def step(layer, x, **options):
    """Compiles and runs the gradients of a layer where its weights lie."""
    is_trained = [v.trainable for v in layer.variables]

    def loss(trained, others, x):
        given = {True: iter(trained), False: iter(others)}
        values = [next(given[trained]) for trained in is_trained]
        scope = keras.StatelessScope(
            state_mapping=list(zip(layer.variables, values, strict=True))
        )
        with scope:
            return ops.mean(ops.square(layer(x, **options)))

    arguments = (
        [v.value for v in layer.trainable_variables],
        [v.value for v in layer.non_trainable_variables],
        x,
    )
    compiled = jax.jit(jax.value_and_grad(loss)).lower(*arguments).compile()
    return Step(
        keras.tree.flatten(to_numpy(compiled(*arguments))),
        sum(v.value.addressable_shards[0].data.nbytes for v in layer.variables),
        compiled.memory_analysis().temp_size_in_bytes,
    )


@functools.cache
def on_one_device(name):
    (example,) = (e for e in EXAMPLES if str(e) == name)
    layer = make(example)
    return step(layer, inputs(example)), layer.get_weights()


def on_devices(example, layouts, weights):
    """The same step, with the batch and perhaps the weights split."""
    distribution.set_distribution(layouts)
    try:
        layer = make(example)
        layer.set_weights(weights)
        x = inputs(example)
        layout = layouts.get_data_layout(x.shape)
        return step(layer, distribution.distribute_tensor(x, layout))
    finally:
        distribution.set_distribution(None)


def close(actual, expected):
    for a, b in zip(actual, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.support("Scale", "data parallel")
@quick_first
def test_batch_over_eight_devices(example):
    alone, weights = on_one_device(str(example))
    devices = distribution.list_devices()
    together = on_devices(
        example, distribution.DataParallel(devices=devices), weights
    )
    close(together.results, alone.results)
    assert together.parameters == alone.parameters
    assert together.activations < alone.activations / 2


@pytest.mark.support("Scale", "heads split")
@quick_first
def test_batch_over_two_and_heads_over_four_devices(example):
    alone, weights = on_one_device(str(example))
    layouts = distribution.ModelParallel(
        layout_map=layout_map(mesh()), batch_dim_name="batch"
    )
    together = on_devices(example, layouts, weights)
    close(together.results, alone.results)
    assert together.activations < alone.activations / 2
    if example.cls in WITHOUT_HEADS:
        assert together.parameters == alone.parameters
    else:
        assert together.parameters < 0.75 * alone.parameters


@pytest.mark.support(
    "Scale",
    "sequence split",
    layers=["SlidingWindowAttention", "LinearAttention"],
)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(
    "cls",
    [
        functools.partial(layers.SlidingWindowAttention, window_size=64),
        layers.LinearAttention,
    ],
)
def test_sequence_over_four_devices(cls, is_causal):
    length = 2048
    layer = cls(2, 8)
    layer.build((1, length, 16))
    x = np.random.default_rng(0).normal(size=(1, length, 16))
    x = ops.convert_to_tensor(x, "float32")
    alone = step(layer, x, use_causal_mask=is_causal)
    layout = distribution.TensorLayout((None, "model", None), mesh())
    x = distribution.distribute_tensor(x, layout)
    assert x.addressable_shards[0].data.shape == (1, length // 4, 16)
    for variable in layer.variables:
        whole = distribution.TensorLayout((None,) * len(variable.shape), mesh())
        variable.assign(distribution.distribute_tensor(variable.value, whole))
    together = step(layer, x, use_causal_mask=is_causal)
    close(together.results, alone.results)
    assert together.activations < 0.3 * alone.activations


def test_model_trains_with_heads_split():
    def train():
        keras.utils.set_random_seed(0)
        model = models.Transformer(
            vocabulary_size=9,
            hidden_dim=16,
            num_layers=1,
            attention=lambda depth: layers.MultiHeadAttention(
                4, 5, name="attention"
            ),
            max_length=12,
            head="tokens",
        )
        model.compile(
            keras.optimizers.Adam(0.01),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )
        rng = np.random.default_rng(0)
        x, y = rng.integers(9, size=(2, 16, 12))
        model.fit(x, y, batch_size=8, shuffle=False, verbose=0)
        return model, model.predict(x, verbose=0)

    _, expected = train()
    layouts = distribution.ModelParallel(
        layout_map=layout_map(mesh()), batch_dim_name="batch"
    )
    distribution.set_distribution(layouts)
    try:
        model, actual = train()
    finally:
        distribution.set_distribution(None)
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5)
    (kernel,) = (v for v in model.weights if v.path.endswith("query/kernel"))
    slots = [v for v in model.optimizer.variables if "query_kernel" in v.path]
    assert len(slots) == 2
    for variable in (kernel, *slots):
        shard = variable.value.addressable_shards[0].data
        assert variable.shape == (16, 4, 5) and shard.shape == (16, 1, 5)


@pytest.mark.parametrize(
    ("cls", "sizes", "message"),
    [
        (layers.MultiHeadAttention, (6, 5), "'odd'.*num_heads=6.*4.*'model'"),
        (layers.LAMA, (6, 1), "'odd'.*num_heads=6"),
        (layers.Boom, (18,), "'odd'.*intermediate_dim=18"),
        (layers.SingleHeadAttention, (), "'odd'.*features=18"),
    ],
)
def test_unequal_shares_are_refused(cls, sizes, message):
    for names in ((), ("odd",)):
        layouts = layout_map(mesh(), replicated=names)
        distribution.set_distribution(
            distribution.ModelParallel(layout_map=layouts)
        )
        layer = cls(*sizes, name="odd")
        try:
            if names:
                layer.build((None, 12, 18))
            else:
                with pytest.raises(ValueError, match=message):
                    layer.build((None, 12, 18))
        finally:
            distribution.set_distribution(None)
