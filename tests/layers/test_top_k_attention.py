import keras
import numpy as np
import pytest
from keras import ops

from keras_attn import layers
from tests import golden
from tests.backend import gradients
from tests.backend import to_numpy
from tests.backend import weight_gradients


def close(actual, expected, tolerance=1e-5):
    np.testing.assert_allclose(
        to_numpy(actual), to_numpy(expected), rtol=tolerance, atol=tolerance
    )


def draw(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype("float32")


@pytest.mark.parametrize("name", golden.names("topk_layer_*"))
def test_equals_golden_data(name):
    data = golden.load(name)
    _, heads, size = data["W_q"].shape
    # a negative `div` of that program is the number of keys
    top_k = -int(data["div"]) if data["div"] < 0 else int(data["k_effective"])
    layer = layers.TopKAttention(heads, size, top_k=top_k)
    x = data["x"]
    layer.build(x.shape)
    layer.set_weights(
        [data[f"{kind}_{name}"] for name in "qkvo" for kind in "Wb"]
    )
    options = {
        "value_mask": data.get("key_keep_mask"),
        "use_causal_mask": bool(data["causal"]),
    }
    output, scores = layer(x, return_attention_scores=True, **options)
    close(output, data["out"], 2e-5)
    close(scores, data["attention_weights"], 2e-5)
    np.testing.assert_array_equal(
        to_numpy(scores) > 0, data["attention_weights"] > 0
    )

    def loss(x):
        return ops.multiply(layer(x, **options), data["R"])

    (gradient,) = gradients(loss, x)
    close(gradient, data["grad_x"], 2e-4)
    kernels = {
        f"grad_W_{name[0]}": getattr(layer, f"{name}_dense").kernel
        for name in ("query", "key", "value")
    }
    kernels = {k: w for k, w in kernels.items() if k in data}
    found = weight_gradients(
        lambda: loss(ops.convert_to_tensor(x)), list(kernels.values())
    )
    for name, gradient in zip(kernels, found, strict=True):
        close(gradient, data[name], 2e-4)


@pytest.mark.parametrize("top_k", [11, 20, 1.0])
def test_all_keys_are_multi_head_attention(top_k):
    x = draw(2, 11, 13)
    mask = np.arange(11) < [[11], [6]]
    layer = layers.TopKAttention(3, 5, top_k=top_k)
    full = layers.MultiHeadAttention(3, 5)
    layer.build(x.shape)
    full.build(x.shape)
    layer.set_weights(full.get_weights())
    for options in ({}, {"mask": mask}, {"use_causal_mask": True}):
        close(layer(x, **options), full(x, **options))


@pytest.mark.parametrize("top_k", [3, 0.3])
def test_a_known_and_an_unknown_length_are_one(top_k):
    layer = layers.TopKAttention(3, 5, top_k=top_k)
    inputs = keras.Input((None, 13))
    model = keras.Model(inputs, layer(inputs, use_causal_mask=True))
    for jit_compile in (False, keras.backend.backend() != "torch"):
        model.compile(jit_compile=jit_compile)
        for length in (1, 2, 11):  # fewer and more than `top_k`
            x = draw(2, length, 13)
            expected = layer(x, use_causal_mask=True)
            close(model.predict(x, verbose=0), expected)


def test_a_share_does_not_see_padding_or_the_future():
    layer = layers.TopKAttention(3, 5, top_k=0.5)
    x = draw(1, 11, 13)
    options = {"return_attention_scores": True, "use_causal_mask": True}
    _, scores = layer(x, **options)
    count = (to_numpy(scores) > 0).sum(axis=-1)
    expected = np.broadcast_to([1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6], count.shape)
    np.testing.assert_array_equal(count, expected)
    close(layer(x[:, :5], use_causal_mask=True), layer(x, **options)[0][:, :5])


@pytest.mark.parametrize("bad", [0, -1, True, 0.0, 1.5, -0.5, "3", None])
def test_bad_numbers_of_keys_are_refused(bad):
    with pytest.raises(ValueError, match=f"`TopKAttention`.*top_k={bad!r}"):
        layers.TopKAttention(3, 5, top_k=bad)


def test_learns_to_find_the_key_that_fits():
    """One of four pairs has the key that is asked for; its value is wanted."""
    rng = np.random.default_rng(0)
    keys = np.stack([rng.permutation(np.eye(4)) for _ in range(64)])
    values = rng.normal(size=(64, 4, 3))
    asked = np.eye(4)[rng.integers(4, size=64)][:, None]
    wanted = np.sum(values * np.sum(keys * asked, -1, keepdims=True), axis=1)
    pairs = np.concatenate([keys, values], axis=-1)

    inputs = keras.Input((1, 4)), keras.Input((4, 7))
    layer = layers.TopKAttention(2, 8, top_k=2, output_shape=3)
    model = keras.Model(inputs, layer(*inputs))
    model.compile(keras.optimizers.Adam(0.1), "mse")
    history = model.fit(
        [asked, pairs], wanted[:, None], batch_size=64, epochs=40, verbose=0
    ).history["loss"]
    assert history[-1] < 0.1 < 0.5 < history[0]
