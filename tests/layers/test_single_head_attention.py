import keras
import numpy as np
import pytest
from keras import ops

from keras_attn import layers
from tests import golden
from tests.backend import gradients
from tests.backend import run
from tests.backend import to_numpy
from tests.backend import weight_gradients
from tests.golden.sharnn import load_weights
from tests.golden.sharnn import named_gradients

FILES = ["sharnn_attention", "sharnn_attention_kvr_heads"]


def batch_first(x):
    return np.swapaxes(x, 0, 1)


def golden_case(name):
    """The layer with the golden weights, its inputs, and the golden arrays."""
    arrays = golden.load(name)
    has_projections = "weight.k.weight" in arrays
    layer = layers.SingleHeadAttention(
        num_heads=int(arrays["option.heads"]),
        use_key_projection=has_projections,
        use_value_projection=has_projections,
        output_mixing=has_projections,
    )
    inputs = [
        batch_first(arrays[f"input.{name}"])
        for name in ("query", "value", "key")
    ]
    layer.build(*(x.shape for x in inputs))
    load_weights(layer, arrays)
    mask = arrays.get("input.allowed")
    if mask is not None:
        mask = np.stack([mask, mask])
    return layer, inputs, mask, arrays


@pytest.mark.parametrize("name", FILES)
def test_golden_outputs(name):
    layer, inputs, mask, arrays = golden_case(name)
    output, scores = run(
        lambda *x: layer(*x, attention_mask=mask, return_attention_scores=True),
        *inputs,
    )
    expected = batch_first(arrays["expected.out"])
    np.testing.assert_allclose(output, expected, rtol=2e-5, atol=2e-5)
    if "expected.attention_weights" in arrays:
        np.testing.assert_allclose(
            scores, arrays["expected.attention_weights"], rtol=2e-5, atol=2e-6
        )
    fused = run(lambda *x: layer(*x, attention_mask=mask), *inputs)
    np.testing.assert_allclose(fused, expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("name", FILES)
def test_golden_gradients(name):
    layer, inputs, mask, arrays = golden_case(name)
    weights = batch_first(arrays["loss_R"])

    def loss(*x):
        return ops.multiply(layer(*x, attention_mask=mask), weights)

    expected = [
        batch_first(arrays[f"grad.{x}"]) for x in ("query", "value", "key")
    ]
    pairs = named_gradients(layer, arrays, "grad.weight.")
    assert len(pairs) == len(layer.trainable_weights)
    actual = gradients(loss, *inputs) + weight_gradients(
        lambda: loss(*(ops.convert_to_tensor(x) for x in inputs)),
        [weight for weight, _ in pairs],
    )
    expected += [array for _, array in pairs]
    for gradient, array in zip(actual, expected, strict=True):
        # softmax cannot see the bias of the key, whose gradient is 0
        tolerance = 1e-4 * np.abs(array).max() + 1e-6
        np.testing.assert_allclose(gradient, array, atol=tolerance)


@pytest.mark.parametrize("name", FILES)
def test_collapsed_gate_gives_the_same_output(name):
    layer, inputs, mask, arrays = golden_case(name)
    collapsed = layer.collapse()
    units = inputs[0].shape[-1]
    np.testing.assert_allclose(
        to_numpy(collapsed.value_vector.value),
        arrays["expected.value_gate"][0, 0],
        rtol=1e-5,
        atol=1e-6,
    )
    np.testing.assert_allclose(
        run(lambda *x: collapsed(*x, attention_mask=mask), *inputs),
        batch_first(arrays["expected.out"]),
        rtol=2e-5,
        atol=2e-5,
    )
    saved = layer.count_params() - collapsed.count_params()
    assert saved == 2 * units * units + 2 * units
    with pytest.raises(ValueError, match="vector"):
        collapsed.collapse()


def random(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype("float32")


def trained_layer(**kwargs):
    """A layer whose vectors are not zeros, as they are initially."""
    layer = layers.SingleHeadAttention(**kwargs)
    layer.build((2, 5, 6))
    for seed, weight in enumerate(layer.weights):
        weight.assign(random(*weight.shape, seed=seed))
    return layer


def test_number_of_parameters():
    units = 6
    counts = {
        gate: trained_layer(value_gate=gate).count_params()
        for gate in ("overparam", "vector", "sigmoid", None)
    }
    query = units * units + units + 2 * units + 2 * units
    assert counts == {
        "overparam": query + units + 2 * units * units + 2 * units,
        "vector": query + units,
        "sigmoid": query + units,
        None: query,
    }


@pytest.mark.parametrize("gate", ["vector", "sigmoid", None])
def test_value_gate_multiplies_the_output(gate):
    x = random(2, 5, 6)
    layer = trained_layer(value_gate=gate)
    bare = trained_layer(value_gate=None)
    for name in ("query_vector", "key_vector"):
        getattr(bare, name).assign(getattr(layer, name))
    bare.query_dense.set_weights(layer.query_dense.get_weights())
    bare.query_norm.set_weights(layer.query_norm.get_weights())
    factor = 1.0
    if gate is not None:
        factor = to_numpy(layer.value_vector.value)
    if gate == "sigmoid":
        factor = 1 / (1 + np.exp(-factor))
    np.testing.assert_allclose(
        run(layer, x), factor * run(bare, x), rtol=1e-5, atol=1e-6
    )


@pytest.mark.support("Sequences", "causal", layers=["SingleHeadAttention"])
@pytest.mark.parametrize("num_heads", [1, 3])
def test_memory_is_seen_by_all_and_the_future_by_none(num_heads):
    x, memory = random(2, 5, 6), random(2, 4, 6, seed=1)
    layer = trained_layer(num_heads=num_heads)

    def call(x, memory, memory_mask):
        return layer(
            x,
            memory=memory,
            memory_mask=memory_mask,
            use_causal_mask=True,
            return_attention_scores=True,
        )

    mask = np.array([[False, True, True, True], [True] * 4])
    output, scores = run(call, x, memory, mask)
    assert scores.shape == (2, num_heads, 5, 9)
    visible = np.concatenate(
        [np.repeat(mask[:, None], 5, 1), np.tril(np.ones((2, 5, 5)))], axis=-1
    )
    np.testing.assert_array_equal(scores[:, 0] > 0, visible)
    # an empty slot may hold anything
    memory[0, 0] = np.nan
    np.testing.assert_array_equal(run(call, x, memory, mask)[0], output)


@pytest.mark.support(
    "Masks", "padding is invisible", layers=["SingleHeadAttention"]
)
def test_padding_is_invisible_wherever_it_is():
    x = random(2, 5, 6)
    layer = trained_layer()
    mask = np.array([[False, True, True, True, False]] * 2)
    bare = run(lambda x: layer(x[:, 1:4]), x)
    x[:, [0, 4]] = np.nan
    padded = run(lambda x: layer(x, mask=mask), x)
    np.testing.assert_allclose(padded[:, 1:4], bare, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(padded[:, [0, 4]], 0)


@pytest.mark.support("Masks", "empty rows", layers=["SingleHeadAttention"])
def test_query_without_keys_gets_zeros_and_finite_gradients():
    x = random(2, 5, 6)
    layer = trained_layer()
    mask = np.array([[False] * 5, [True] * 5])

    def call(x, y):
        return layer(x, y, value_mask=mask)

    np.testing.assert_array_equal(run(call, x, x)[0], 0)
    for gradient in gradients(call, x, x):
        assert np.isfinite(gradient).all()


def test_masked_queries_attend_to_nothing():
    layer, x = trained_layer(), random(2, 5, 6)
    mask = np.array([[True, True, False, True, True]] * 2)

    def call(x):
        return layer(x, query_mask=mask, return_attention_scores=True)

    output, scores = run(call, x)
    assert (output[:, 2] == 0).all() and (scores[:, :, 2] == 0).all()
    assert (scores[:, :, 1].sum(axis=-1) > 0.99).all()


@pytest.mark.support("Masks", "attached masks", layers=["SingleHeadAttention"])
def test_masks_are_read_and_combined():
    x = random(2, 5, 6)
    layer = trained_layer()
    first = np.array([[True, True, True, True, False]] * 2)
    second = np.array([[False, True, True, True, True]] * 2)
    masked = keras.layers.Masking()
    padded = x * first[..., None]
    np.testing.assert_allclose(
        to_numpy(layer(x, masked(padded), key_mask=second)),
        to_numpy(layer(x, padded, value_mask=first & second)),
        rtol=1e-5,
        atol=1e-6,
    )


def test_dropout_acts_in_training_alone():
    x = random(2, 5, 6)
    for rate in ("dropout", "query_dropout", "value_dropout"):
        layer = trained_layer(**{rate: 0.5})
        plain = trained_layer()
        np.testing.assert_allclose(
            to_numpy(layer(x)), to_numpy(plain(x)), rtol=1e-5, atol=1e-6
        )
        difference = to_numpy(layer(x, training=True)) - to_numpy(plain(x))
        assert np.abs(difference).max() > 1e-2, rate


@pytest.mark.parametrize("projects", [False, True])
def test_streaming_equals_one_causal_pass(projects):
    layer = trained_layer(
        num_heads=2, use_key_projection=projects, output_mixing=projects
    )
    x, length = random(2, 5, 6), 5
    mask = np.array([[True, True, False, True, True], [True] * 4 + [False]])

    def step(x, mask, state):
        return layer(x, mask=mask, return_attention_scores=True, state=state)

    expected, scores = run(
        lambda x, mask: layer(
            x, mask=mask, return_attention_scores=True, use_causal_mask=True
        ),
        x,
        mask,
    )
    state = layer.initial_state(2, max_length=length)
    assert ("key" in state) == projects
    outputs, weights = [], []
    for chunk in (slice(0, 3), slice(3, 4), slice(4, length)):
        output, part, state = run(step, x[:, chunk], mask[:, chunk], state)
        outputs.append(output)
        weights.append(part)
    np.testing.assert_allclose(
        np.concatenate(outputs, axis=1), expected, rtol=1e-4, atol=1e-5
    )
    np.testing.assert_allclose(
        np.concatenate(weights, axis=2), scores, rtol=1e-4, atol=1e-5
    )
    symbols = keras.tree.map_structure(
        lambda x: keras.KerasTensor(x.shape, x.dtype), state
    )
    spec = layer(
        keras.KerasTensor((2, 1, x.shape[2])),
        return_attention_scores=True,
        state=symbols,
    )
    assert spec[1].shape == (2, 2, 1, length)
    with pytest.raises(ValueError, match="`memory` with `state`"):
        layer(x, memory=x, state=state)
    with pytest.raises(ValueError, match="as many keys as queries"):
        layer(x, x[:, :2], state=state)


@pytest.mark.parametrize("dtype", ["mixed_bfloat16", "mixed_float16"])
def test_half_precision_stays_close(dtype):
    x = random(2, 5, 6)
    layer = trained_layer(dtype=dtype)
    output = to_numpy(ops.cast(layer(x, use_causal_mask=True), "float32"))
    expected = to_numpy(trained_layer()(x, use_causal_mask=True))
    np.testing.assert_allclose(output, expected, atol=0.03, rtol=0.03)


@pytest.mark.support("Sequences", "any length", layers=["SingleHeadAttention"])
def test_functional_model_with_scores_and_free_lengths():
    inputs = keras.Input((None, 6))
    memory = keras.Input((None, 6))
    outputs = layers.SingleHeadAttention(num_heads=2)(
        inputs, memory=memory, return_attention_scores=True
    )
    assert outputs[0].shape == (None, None, 6)
    assert outputs[1].shape == (None, 2, None, None)
    model = keras.Model([inputs, memory], outputs)
    for length in (1, 4):
        y, scores = model([random(2, length, 6), random(2, 3, 6)])
        assert tuple(y.shape) == (2, length, 6)
        assert tuple(scores.shape) == (2, 2, length, length + 3)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"num_heads": 0}, "num_heads=0"),
        ({"value_gate": "tanh"}, "value_gate='tanh'"),
        ({"query_dropout": 1.0}, "query_dropout=1.0"),
    ],
)
def test_bad_arguments_are_refused(arguments, match):
    with pytest.raises(ValueError, match=match):
        layers.SingleHeadAttention(**arguments)


def test_bad_calls_are_refused():
    x = random(2, 5, 6)
    layer = trained_layer()
    with pytest.raises(ValueError, match="num_heads=4"):
        layers.SingleHeadAttention(num_heads=4)(x)
    with pytest.raises(ValueError, match="features of `query`"):
        layer(x, x[..., :3])
    with pytest.raises(ValueError, match="must be equal"):
        layer(x, x, x[:, :3])
    with pytest.raises(ValueError, match="belongs into `memory`"):
        layer(x, x[:, :3], use_causal_mask=True)
    with pytest.raises(ValueError, match="features of `query`"):
        layer(x, memory=x[..., :3])
    with pytest.raises(ValueError, match="boolean `attention_mask`"):
        layer(x, attention_mask=np.ones((2, 5, 5), "float32"))
    with pytest.raises(ValueError, match="broadcasts to"):
        layer(x, attention_mask=np.ones((2, 5, 4), "bool"))
    with pytest.raises(ValueError, match="cannot tell"):
        layer(x, x, mask=np.ones((2, 5), "bool"))
