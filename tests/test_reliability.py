"""Long streams, broken files, and files that would run code."""

import keras
import numpy as np
import pytest

import keras_attn
from tests.backend import compiled
from tests.backend import to_numpy
from tests.reference import attend
from tests.reference import linear

TOKENS = 100_000
PIECE = 1_000
SEEN = 50  # positions at the end that are compared


def stream(layer, x):
    """Outputs of the last positions, after all others went through a state."""

    @compiled
    def step(piece, state):
        return layer(piece, state=state)

    layer.build(x.shape)
    state = layer.initial_state(batch_size=1)
    for start in range(0, x.shape[1], PIECE):
        output, state = step(
            keras.ops.convert_to_tensor(x[:, start : start + PIECE]), state
        )
    return to_numpy(output)[:, -SEEN:]


def heads(dense, x):
    kernel, bias = (to_numpy(w.value).astype("float64") for w in dense.weights)
    return np.einsum("btf,fnh->btnh", x.astype("float64"), kernel) + bias


def project(layer, x):
    return [
        heads(dense, x)
        for dense in (layer.query_dense, layer.key_dense, layer.value_dense)
    ]


def output(layer, heads):
    kernel, bias = (to_numpy(w.value) for w in layer.output_dense.weights)
    return np.einsum("btnv,nve->bte", heads, kernel.astype("float64")) + bias


def long_text():
    rng = np.random.default_rng(0)
    return rng.normal(size=(1, TOKENS, 6)).astype("float32")


@pytest.mark.nightly
def test_linear_attention_is_exact_after_100_000_tokens():
    x, layer = long_text(), keras_attn.LinearAttention(2, 4)
    actual = stream(layer, x)
    query, key, value = project(layer, x)
    expected, _ = linear.long_causal_linear_attention(
        query, key, value, np.ones_like(value)
    )
    expected = output(layer, expected[:, -SEEN:])
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-4)


@pytest.mark.nightly
def test_sliding_window_is_exact_after_100_000_tokens():
    x, layer = long_text(), keras_attn.SlidingWindowAttention(2, 4, 20)
    actual = stream(layer, x)
    x = x[:, -SEEN - 10 :]  # what the last windows see
    t, s = np.arange(len(x[0]))[:, None], np.arange(len(x[0]))
    expected, _ = attend(*project(layer, x), (s <= t) & (s >= t - 10))
    expected = output(layer, expected[:, -SEEN:])
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-5)


@pytest.mark.nightly
def test_sharnn_is_finite_after_100_000_tokens():
    model = keras_attn.models.SHARNN(
        20, hidden_dim=8, num_layers=2, memory_length=30
    )
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 20, (1, TOKENS))
    model(tokens[:, :PIECE])

    @compiled
    def step(piece, state):
        return model(piece, state=state)

    state = model.initial_state(batch_size=1)
    for start in range(0, TOKENS, PIECE):
        piece = keras.ops.convert_to_tensor(tokens[:, start : start + PIECE])
        logits, state = step(piece, state)
    (memory,) = [x for x in keras.tree.flatten(state) if x.shape[1:] == (30, 8)]
    assert np.isfinite(to_numpy(logits)).all()
    assert np.isfinite(to_numpy(memory)).all()


def small_model():
    x = keras.Input((None, 6))
    y = keras_attn.LongformerAttention(2, 4, 2, num_global_tokens=1)(x)
    return keras.Model(x, keras_attn.LinearAttention(2, 4)(y))


def truncate(path, share):
    content = path.read_bytes()
    path.write_bytes(content[: int(share * len(content))])


truncated = pytest.mark.parametrize("share", [0.0, 0.3, 0.9, 0.999])


@truncated
def test_truncated_weights_raise_and_change_nothing(tmp_path, share):
    path = tmp_path / "model.weights.h5"
    small_model().save_weights(path)
    truncate(path, share)
    model = small_model()
    before = model.get_weights()
    with pytest.raises(OSError, match="truncated|signature"):
        model.load_weights(path)
    for weight, expected in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(weight, expected)


@truncated
def test_a_truncated_model_raises(tmp_path, share):
    path = tmp_path / "model.keras"
    small_model().save(path)
    truncate(path, share)
    with pytest.raises(ValueError, match="File not found|zip"):
        keras.saving.load_model(path)


def test_weights_of_other_shapes_are_refused(tmp_path):
    path = tmp_path / "other.weights.h5"
    x = keras.Input((None, 6))
    other = keras.Model(x, keras_attn.LinearAttention(2, 5, name="same")(x))
    other.save_weights(path)
    model = keras.Model(x, keras_attn.LinearAttention(2, 4, name="same")(x))
    with pytest.raises(ValueError, match="shape"):
        model.load_weights(path)


def test_loading_runs_no_code_of_the_file(tmp_path):
    x = keras.Input((None, 6))
    layer = keras_attn.LinearAttention(2, 4, feature_map=lambda x: x * x + 1)
    path = tmp_path / "model.keras"
    model = keras.Model(x, layer(x))
    with pytest.warns(UserWarning, match="`lambda`"):
        model.save(path)
    with pytest.raises(Exception, match="safe_mode"):
        keras.saving.load_model(path)
    loaded = keras.saving.load_model(path, safe_mode=False)
    inputs = np.ones((1, 3, 6), "float32")
    np.testing.assert_allclose(
        to_numpy(loaded(inputs)), to_numpy(model(inputs)), rtol=1e-6
    )
