import keras
import numpy as np
import pytest
from keras import ops

from keras_attn import layers
from keras_attn.ops import positive_random_features
from tests import golden
from tests.backend import gradients
from tests.backend import to_numpy
from tests.backend import weight_gradients
from tests.reference import linear as definitions


@keras.saving.register_keras_serializable(package="keras_attn_tests")
def softplus_and_one(x):
    return ops.concatenate(
        [ops.softplus(x), ops.ones_like(x[..., :1])], axis=-1
    )


def sequence(length=11, features=13, batch=2, seed=0):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(batch, length, features)).astype("float32")


def close(actual, expected, tolerance=1e-5):
    np.testing.assert_allclose(
        to_numpy(actual), to_numpy(expected), rtol=tolerance, atol=tolerance
    )


@pytest.mark.parametrize("name", golden.names("linear_layer_*"))
def test_matches_the_papers_program(name):
    data = golden.load(name)
    _, heads, size = data["W_q"].shape
    layer = layers.LinearAttention(
        num_heads=heads,
        key_dim=size,
        value_dim=data["W_v"].shape[-1],
        output_shape=data["W_o"].shape[-1],
        epsilon=float(data["eps"]),
    )
    x = data["x_query"]
    value = data.get("x_keyvalue")
    layer.build(x.shape, None if value is None else value.shape)
    layer.set_weights([data[f"{x}_{y}"] for y in "qkvo" for x in "Wb"])
    options = {
        "value_mask": data["key_keep_mask"],
        "use_causal_mask": bool(data["causal"]),
    }
    close(layer(x, value, **options), data["out"], 2e-5)
    weights = ops.convert_to_tensor(data["R"])
    (gradient,) = gradients(lambda x: layer(x, value, **options) * weights, x)
    close(gradient, data["grad_x_query"], 2e-4)
    kernels = [
        layer.query_dense.kernel,
        layer.key_dense.kernel,
        layer.value_dense.kernel,
    ]
    for x, gradient in zip(
        "qkv",
        weight_gradients(
            lambda: layer(data["x_query"], value, **options) * weights, kernels
        ),
        strict=True,
    ):
        close(gradient, data[f"grad_W_{x}"], 2e-4)
    if "final_state_S" in data:
        del options["use_causal_mask"]
        _, state = layer(
            data["x_query"], state=layer.initial_state(2), **options
        )
        close(state["key_value_sum"], data["final_state_S"])
        close(state["key_sum"], data["final_state_Z"])


@pytest.mark.parametrize("feature_map", ["elu", "relu", "squared_relu"])
def test_arguments_reach_the_definition(feature_map):
    x, value = sequence(), sequence(7, seed=1)
    layer = layers.LinearAttention(
        3, 5, feature_map, epsilon=0.1, value_dim=7, bias_initializer="normal"
    )
    output, scores = layer(x, value, return_attention_scores=True)
    query, key, values, output_weights = (
        [to_numpy(w.value) for w in dense.weights]
        for dense in (
            layer.query_dense,
            layer.key_dense,
            layer.value_dense,
            layer.output_dense,
        )
    )
    heads, expected = definitions.linear_attention(
        np.einsum("btf,fnh->btnh", x, query[0]) + query[1],
        np.einsum("btf,fnh->btnh", value, key[0]) + key[1],
        np.einsum("btf,fnh->btnh", value, values[0]) + values[1],
        phi=feature_map,
        epsilon=0.1,
    )
    close(scores, expected)
    kernel, bias = output_weights
    close(output, np.einsum("btnv,nve->bte", heads, kernel) + bias)


def test_state_does_not_grow():
    layer = layers.LinearAttention(num_heads=3, key_dim=5, value_dim=7)
    for length in (None, 100_000):
        state = layer.initial_state(2, max_length=length)
        assert state["key_value_sum"].shape == (2, 3, 5, 7)
        assert state["key_sum"].shape == (2, 3, 5)


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_state_is_float32_under_half_precision(policy):
    layer = layers.LinearAttention(num_heads=3, key_dim=5, dtype=policy)
    _, state = layer(sequence(), state=layer.initial_state(2))
    for sums in state.values():
        assert keras.backend.standardize_dtype(sums.dtype) == "float32"


@pytest.mark.parametrize(
    ("policy", "tolerance"),
    [("float32", 1e-5), ("mixed_bfloat16", 2e-2), ("mixed_float16", 2e-3)],
)
def test_long_sequences_keep_their_precision(policy, tolerance):
    length = 65_536
    x = sequence(length, features=3, batch=1) + 0.5
    layer = layers.LinearAttention(
        1, 2, dtype=policy, bias_initializer="normal", output_shape=2
    )
    layer.build(x.shape)
    identity = np.eye(2, dtype="float32")[None]
    layer.output_dense.kernel.assign(identity)
    layer.output_dense.bias.assign(np.zeros(2))
    output = to_numpy(ops.cast(layer(x, use_causal_mask=True), "float32"))
    query, key, value = (
        np.einsum("btf,fnh->btnh", x, to_numpy(dense.kernel.value))
        + to_numpy(dense.bias.value)
        for dense in (layer.query_dense, layer.key_dense, layer.value_dense)
    )
    expected, _ = definitions.long_causal_linear_attention(
        query, key, value, np.zeros_like(value)
    )
    error = np.abs(output - expected[:, :, 0])[:, 1000:]
    assert error.max() < tolerance * np.abs(expected[:, 1000:]).max()
    error = np.linalg.norm(output - expected[:, :, 0])
    assert error < tolerance * np.linalg.norm(expected)


def test_scores_of_a_streaming_call_are_those_of_its_own_keys():
    layer = layers.LinearAttention(num_heads=3, key_dim=5)
    x = sequence()
    _, whole = layer(x, use_causal_mask=True, return_attention_scores=True)
    _, state = layer(x[:, :4], state=layer.initial_state(2))
    _, scores, _ = layer(x[:, 4:], state=state, return_attention_scores=True)
    close(scores, to_numpy(whole)[:, :, 4:, 4:])


def test_random_features_estimate_multi_head_attention():
    favor = layers.LinearAttention(3, 5, "favor", num_directions=20_000, seed=3)
    elu = layers.LinearAttention(3, 5)
    full = layers.MultiHeadAttention(3, 5)
    x = sequence() / 2
    for layer in (favor, elu, full):
        layer.build(x.shape)
    elu.set_weights(full.get_weights())
    directions = to_numpy(favor.random_features.directions.value)
    favor.set_weights([*full.get_weights(), directions])
    expected = to_numpy(full(x))
    errors = [
        np.linalg.norm(to_numpy(layer(x)) - expected) / np.linalg.norm(expected)
        for layer in (favor, elu)
    ]
    assert errors[0] < 0.05 < 0.2 < errors[1], errors


def test_random_directions_are_orthogonal_and_reproducible(tmp_path):
    def build(seed, **kwargs):
        layer = layers.LinearAttention(
            3, 5, "favor", seed=seed, num_directions=12, **kwargs
        )
        layer.build((None, None, 13))
        return layer

    layer = build(seed=3)
    assert not layer.random_features.directions.trainable
    directions = to_numpy(layer.random_features.directions.value)
    for group in (directions[:, :5], directions[:, 5:10]):
        products = group.T @ group
        assert np.abs(products - np.diag(np.diag(products))).max() < 1e-5
    # the same numbers on every backend
    close(directions[0, :3], [-2.045747, -0.303833, 0.067668], 1e-4)
    close(build(seed=3).random_features.directions.value, directions)
    assert (
        to_numpy(build(seed=4).random_features.directions.value) != directions
    ).any()
    keras.utils.set_random_seed(1)
    first = to_numpy(build(seed=None).random_features.directions.value)
    assert (
        to_numpy(build(seed=None).random_features.directions.value) != first
    ).all()
    keras.utils.set_random_seed(1)
    close(build(seed=None).random_features.directions.value, first)
    assert build(seed=3, dtype="float16")(sequence()).dtype is not None

    inputs = keras.Input((None, 13))
    model = keras.Model(inputs, layer(inputs))
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    close(loaded(sequence()), model(sequence()))


def test_random_directions_have_the_lengths_of_normal_vectors():
    layer = layers.LinearAttention(
        1, 16, "favor", seed=0, num_directions=20_000
    )
    layer.build((None, None, 13))
    squares = (to_numpy(layer.random_features.directions.value) ** 2).sum(
        axis=0
    )
    # of a chi-squared distribution with 16 degrees of freedom
    np.testing.assert_allclose(squares.mean(), 16, rtol=0.02)
    np.testing.assert_allclose(squares.var(), 32, rtol=0.05)


@pytest.mark.parametrize(
    "feature_map", [softplus_and_one, keras.activations.softplus]
)
def test_functions_as_feature_maps(feature_map, tmp_path):
    inputs = keras.Input((None, 13))
    layer = layers.LinearAttention(3, 5, feature_map)
    model = keras.Model(inputs, layer(inputs, use_causal_mask=True))
    x = sequence()
    output, _ = layer(x, state=layer.initial_state(2))
    close(output, model(x))
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    close(loaded(x), model(x))
    assert loaded.layers[-1].feature_map is feature_map


def test_a_layer_as_feature_map_is_trained_and_saved(tmp_path):
    inputs = keras.Input((None, 13))
    layer = layers.LinearAttention(
        3, 5, keras.layers.Dense(8, activation="softplus")
    )
    layer.build((None, None, 13))
    shapes = {w.shape for w in layer.trainable_weights}
    assert {(5, 8), (8,)} <= shapes
    model = keras.Model(inputs, layer(inputs, use_causal_mask=True))
    x = sequence()
    output, state = layer(x, state=layer.initial_state(2))
    assert state["key_sum"].shape == (2, 3, 8)
    close(output, model(x))
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    close(loaded(x), model(x))


def test_equal_features_give_the_mean_of_the_values():
    layer = layers.LinearAttention(3, 5, lambda x: x * 0 + 1, epsilon=1e-9)
    full = layers.MultiHeadAttention(3, 5)
    x = sequence()
    layer.build(x.shape)
    full.build(x.shape)
    full.set_weights(layer.get_weights())
    full.query_dense.kernel.assign(np.zeros((13, 3, 5)))
    close(layer(x), full(x))
    close(layer(x, use_causal_mask=True), full(x, use_causal_mask=True))


def test_bad_arguments_are_refused():
    for arguments, message in [
        ({"feature_map": "cosine"}, "elu.*favor.*feature_map='cosine'"),
        ({"feature_map": None}, "feature_map=None"),
        ({"epsilon": 0.0}, "LinearAttention.*epsilon=0.0"),
        ({"num_directions": 0}, "num_directions=0"),
    ]:
        with pytest.raises(ValueError, match=message):
            layers.LinearAttention(3, 5, **arguments)


def test_favor_features_are_those_of_the_op():
    layer = layers.LinearAttention(1, 5, "favor", seed=3)
    x = sequence(7)
    layer.build(x.shape)
    assert layer.random_features.directions.shape == (5, 10)
    _, state = layer(x, state=layer.initial_state(2))
    keys = layer.key_dense(x)
    features = positive_random_features(
        keys, ops.convert_to_tensor(layer.random_features.directions)
    )
    assert state["key_sum"].shape == (2, 1, 20)
    close(state["key_sum"], to_numpy(features).sum(axis=1))
