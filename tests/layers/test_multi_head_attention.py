import keras
import numpy as np
import pytest
from keras import ops

from keras_attn import layers
from tests import golden
from tests.backend import gradients
from tests.backend import run
from tests.backend import to_numpy


def build(data):
    """The layer of a golden file, with its weights, and its call options."""
    inputs = [data[x] for x in ("x", "x_query") if x in data]
    inputs += [data[x] for x in ("x_value", "x_key") if x in data]
    _, num_heads, key_dim = data["W_q"].shape
    layer = layers.MultiHeadAttention(
        num_heads,
        key_dim,
        value_dim=data["W_v"].shape[-1],
        output_shape=data["W_o"].shape[-1],
        use_bias="b_q" in data,
    )
    layer.build(*(x.shape for x in inputs))
    names = [f"{kind}_{x}" for x in "qkvo" for kind in "Wb"]
    layer.set_weights([data[name] for name in names if name in data])
    options = {"use_causal_mask": bool(data["causal"])}
    if "key_keep_mask" in data:
        options["value_mask"] = data["key_keep_mask"]
    return layer, inputs, options


@pytest.mark.parametrize("name", golden.names("mha_*"))
def test_golden(name):
    data = golden.load(name)
    layer, inputs, options = build(data)
    output = run(lambda *x: layer(*x, **options), *inputs)
    np.testing.assert_allclose(output, data["out"], rtol=0, atol=2e-5)
    output, scores = run(
        lambda *x: layer(*x, return_attention_scores=True, **options), *inputs
    )
    np.testing.assert_allclose(output, data["out"], rtol=0, atol=2e-5)
    np.testing.assert_allclose(
        scores, data["attention_weights"], rtol=0, atol=2e-5
    )
    grads = gradients(
        lambda *x: ops.multiply(layer(*x, **options), data["R"]), *inputs
    )
    names = [x for x in ("x", "x_query") if x in data]
    names += [x for x in ("x_value", "x_key") if x in data]
    for grad, x in zip(grads, names, strict=True):
        np.testing.assert_allclose(grad, data[f"grad_{x}"], rtol=0, atol=2e-4)


@pytest.mark.parametrize("use_causal_mask", [False, True])
def test_equals_keras_multi_head_attention(use_causal_mask):
    rng = np.random.default_rng(0)
    query = rng.normal(size=(2, 7, 6)).astype("float32")
    value = rng.normal(size=(2, 7, 5)).astype("float32")
    attention_mask = rng.random((2, 7, 7)) < 0.7
    attention_mask |= np.eye(7, dtype=bool)  # every query sees some key
    kwargs = {"num_heads": 2, "key_dim": 4, "value_dim": 3}
    theirs = keras.layers.MultiHeadAttention(**kwargs)
    ours = layers.MultiHeadAttention(**kwargs)
    options = {
        "attention_mask": attention_mask,
        "use_causal_mask": use_causal_mask,
    }
    # the fused path of Keras 3.15 on JAX needs value_dim == key_dim
    expected, _ = theirs(query, value, return_attention_scores=True, **options)
    ours.build(query.shape, value.shape)
    ours.set_weights(theirs.get_weights())
    np.testing.assert_allclose(
        to_numpy(ours(query, value, **options)),
        to_numpy(expected),
        rtol=1e-5,
        atol=1e-6,
    )


def test_two_layers_that_share_a_masked_input_both_mask_it():
    tokens = np.array([[1, 2, 0, 0]])
    encoded = keras.layers.Embedding(10, 8, mask_zero=True)(tokens)
    shorter = ops.convert_to_tensor(to_numpy(encoded)[:, :2])
    x = np.random.default_rng(0).normal(size=(1, 3, 8)).astype("float32")
    first = layers.MultiHeadAttention(2, 4)
    second = layers.MultiHeadAttention(2, 4)
    np.testing.assert_allclose(
        to_numpy(second(first(x, encoded), encoded)),
        to_numpy(second(first(x, shorter), shorter)),
        rtol=1e-5,
        atol=1e-6,
    )


def test_a_lone_key_gives_its_value():
    x = np.random.default_rng(0).normal(size=(2, 3, 6)).astype("float32")
    layer = layers.MultiHeadAttention(2, 4)
    output = layer(x, x[:, :1])
    value = layer.output_dense(layer.value_dense(x[:, :1]))
    for t in range(3):
        np.testing.assert_allclose(
            to_numpy(output)[:, t], to_numpy(value)[:, 0], rtol=1e-5, atol=1e-6
        )


def test_order_of_keys_does_not_matter():
    x = np.random.default_rng(0).normal(size=(2, 5, 6)).astype("float32")
    layer = layers.MultiHeadAttention(2, 4)
    np.testing.assert_allclose(
        to_numpy(layer(x, x[:, ::-1].copy())),
        to_numpy(layer(x, x)),
        rtol=1e-5,
        atol=1e-6,
    )


def test_a_full_state_refuses_more():
    x = np.zeros((2, 3, 6), "float32")
    layer = layers.MultiHeadAttention(2, 4)
    _, state = layer(x, state=layer.initial_state(2, max_length=4))
    with pytest.raises(ValueError, match="holds 4 positions, of which 3"):
        layer(x, state=state)
    with pytest.raises(ValueError, match="max_length=None"):
        layer.initial_state(2)
