import keras
import numpy as np
import pytest
from keras import ops

from keras_attn import layers
from tests import golden
from tests.backend import gradients
from tests.backend import to_numpy
from tests.backend import weight_gradients
from tests.reference import linformer as definitions


def sequence(length=11, features=13, batch=2, seed=0):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(batch, length, features)).astype("float32")


def close(actual, expected, tolerance=1e-5):
    np.testing.assert_allclose(
        to_numpy(actual), to_numpy(expected), rtol=tolerance, atol=tolerance
    )


def golden_layer(data, projection_weights, **kwargs):
    """The layer of a golden file, whose value bias went into the output's.

    Weights sum up to 1, so that a vector which the program adds to the values
    of all slots comes out as it is; one that it adds to all keys has no effect.
    """
    _, heads, size = data["W_q"].shape
    bias = data.get("b_v", np.zeros((heads, size)))
    bias = bias + data.get("F_conv_bias", 0.0)
    bias = np.einsum("nv,nve->e", bias, data["W_o"]) + data["b_o"]
    zeros = np.zeros((heads, size))
    layer = layers.LinformerAttention(heads, size, **kwargs)
    layer.build(data["x"].shape)
    weights = [data["W_q"], data.get("b_q", zeros)]
    weights += [data["W_k"], zeros, data["W_v"], zeros, data["W_o"], bias]
    layer.set_weights([*weights, *projection_weights])
    return layer


@pytest.mark.parametrize("name", golden.names("linformer_short_sequence*"))
def test_matches_lucidrains(name):
    data = golden.load(name)
    layer = golden_layer(
        data,
        [data["E"].T, data["F"].T],
        max_length=data["E"].shape[1],
        projected_length=data["E"].shape[0],
    )
    x, weights = data["x"], ops.convert_to_tensor(data["R"])
    close(layer(x), data["out"], 2e-5)
    (gradient,) = gradients(lambda x: layer(x) * weights, x)
    close(gradient, data["grad_x"], 2e-4)
    kernels = [layer.key_projection.kernel, layer.value_projection.kernel]
    of_keys, of_values = weight_gradients(lambda: layer(x) * weights, kernels)
    close(of_keys.T, data["grad_E"], 2e-4)
    close(of_values.T, data["grad_F"], 2e-4)


@pytest.mark.parametrize("name", golden.names("linformer_fairseq_order*"))
def test_matches_the_authors_program(name):
    """Fairseq multiplies the input with E and F, and adds biases later."""
    data = golden.load(name)
    layer = golden_layer(
        data,
        [data["E"].T, data["F"].T],
        max_length=data["E"].shape[1],
        projected_length=data["E"].shape[0],
    )
    x, weights = data["x"], ops.convert_to_tensor(data["R"])
    output, scores = layer(x, return_attention_scores=True)
    close(output, data["out"], 2e-5)
    close(scores, data["attention_weights"], 2e-5)
    (gradient,) = gradients(lambda x: layer(x) * weights, x)
    close(gradient, data["grad_x"], 2e-4)
    kernels = [layer.key_projection.kernel]
    (gradient,) = weight_gradients(lambda: layer(x) * weights, kernels)
    close(gradient.T, data["grad_E"], 2e-4)


@pytest.mark.parametrize("name", golden.names("linformer_conv*"))
def test_convolution_matches_linformer_pytorch(name):
    data = golden.load(name)
    kernels = [data["E_conv_kernel"], data["F_conv_kernel"]]
    x, weights = data["x"], ops.convert_to_tensor(data["R"])
    layer = golden_layer(
        data,
        [kernel[0] for kernel in kernels],
        max_length=x.shape[1],
        projected_length=x.shape[1] // kernels[0].shape[1],
        projection="convolution",
    )
    close(layer(x), data["out"], 2e-5)
    (gradient,) = gradients(lambda x: layer(x) * weights, x)
    close(gradient, data["grad_x"], 2e-4)


@pytest.mark.parametrize("sharing", ["none", "headwise", "key_value"])
def test_arguments_reach_the_definition(sharing):
    x, value = sequence(), sequence(7, seed=1)
    mask = np.arange(7) < [[7], [4]]
    layer = layers.LinformerAttention(
        3, 5, 8, 4, sharing, value_dim=7, bias_initializer="normal"
    )
    output, scores = layer(
        x, value, value_mask=mask, return_attention_scores=True
    )
    query, key, values = (
        np.einsum("btf,fnh->btnh", x, to_numpy(dense.kernel.value))
        + to_numpy(dense.bias.value)
        for x, dense in (
            (x, layer.query_dense),
            (value, layer.key_dense),
            (value, layer.value_dense),
        )
    )
    projections = [
        to_numpy((projection or layer.key_projection).kernel.value)
        for projection in (layer.key_projection, layer.value_projection)
    ]
    shape = (3, 8, 4) if sharing == "none" else (8, 4)
    assert [p.shape for p in projections] == [shape] * 2
    heads, expected = definitions.linformer_attention(
        query, key, values, projections, mask
    )
    close(scores, expected)
    kernel, bias = [to_numpy(w.value) for w in layer.output_dense.weights]
    close(output, np.einsum("btnv,nve->bte", heads, kernel) + bias)


def test_identity_projections_give_multi_head_attention():
    layer = layers.LinformerAttention(3, 5, 11, 11, value_dim=7)
    full = layers.MultiHeadAttention(3, 5, value_dim=7)
    x = sequence()
    full.build(x.shape)
    layer.build(x.shape)
    layer.set_weights([*full.get_weights(), np.eye(11), np.eye(11)])
    for actual, expected in zip(
        layer(x, return_attention_scores=True),
        full(x, return_attention_scores=True),
        strict=True,
    ):
        close(actual, expected)


def test_windows_of_one_give_multi_head_attention():
    layer = layers.LinformerAttention(3, 5, 11, 11, projection="mean")
    full = layers.MultiHeadAttention(3, 5)
    x, mask = sequence(), np.arange(11) < [[11], [6]]
    full.build(x.shape)
    layer.build(x.shape)
    layer.set_weights(full.get_weights())
    close(layer(x, mask=mask), full(x, mask=mask))


def transformer_stack(sharing, num_layers=12, num_heads=12):
    """Twelve layers of twelve heads; counts the matrices of 16 x 4."""
    x = inputs = keras.Input((16, 24))
    options = {}
    if sharing == "layerwise":
        projection = layers.LengthProjection(16, 4, name="projection")(x)
        options = {"length_projection": projection}
    for _ in range(num_layers):
        x = layers.LinformerAttention(num_heads, 2, 16, 4, sharing)(
            x, **options
        )
    return keras.Model(inputs, x)


@pytest.mark.parametrize(
    ("sharing", "matrices"),
    [("none", 288), ("headwise", 24), ("key_value", 12), ("layerwise", 1)],
)
def test_number_of_matrices_is_that_of_the_paper(sharing, matrices):
    full = layers.MultiHeadAttention(12, 2)
    full.build((None, 16, 24))
    plain = 12 * full.count_params()
    model = transformer_stack(sharing)
    assert model.count_params() - plain == matrices * 16 * 4


def test_layerwise_sharing_survives_saving(tmp_path):
    model = transformer_stack("layerwise", num_layers=2, num_heads=2)
    x = sequence(16, 24)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    close(loaded(x), model(x))
    assert len(loaded.weights) == len(model.weights) == 2 * 8 + 1
    # both layers still read the one weight
    kernel = loaded.get_layer("projection").kernel
    kernel.assign(to_numpy(kernel.value) + 1)
    expected = model.get_layer("projection").kernel
    expected.assign(to_numpy(expected.value) + 1)
    close(loaded(x), model(x))


def test_layerwise_sharing_trains_the_one_matrix():
    model = transformer_stack("layerwise", num_layers=2, num_heads=2)
    before = to_numpy(model.get_layer("projection").kernel.value)
    model.compile(keras.optimizers.SGD(1.0), "mse")
    model.fit(sequence(16, 24), sequence(16, 24, seed=1), verbose=0)
    after = to_numpy(model.get_layer("projection").kernel.value)
    assert (after != before).all() and np.isfinite(after).all()


def test_given_projection_takes_the_place_of_the_own():
    layer = layers.LinformerAttention(3, 5, 12, 4, "key_value")
    shared = layers.LinformerAttention(3, 5, 12, 4, "layerwise")
    x, mask = sequence(), np.arange(11) < [[11], [6]]
    layer.build(x.shape)
    shared.build(x.shape)
    shared.set_weights(layer.get_weights()[:-1])
    matrix = layer.get_weights()[-1]
    expected = layer(x, mask=mask)
    close(shared(x, mask=mask, length_projection=matrix), expected)
    assert (
        np.abs(
            to_numpy(layer(x))
            - to_numpy(layer(x, length_projection=2 * matrix))
        ).max()
        > 1e-3
    )


def test_layerwise_sharing_honours_masks_and_any_length():
    tokens = keras.Input((None,), dtype="int32")
    x = keras.layers.Embedding(9, 13, mask_zero=True)(tokens)
    projection = layers.LengthProjection(12, 4)(x)
    assert projection.shape == (12, 4)
    layer = layers.LinformerAttention(3, 5, 12, 4, "layerwise")
    model = keras.Model(tokens, layer(x, length_projection=projection))
    ids = np.array([[3, 1, 4, 1, 5, 0, 0, 0]])
    padded = model.predict(ids, verbose=0)[:, :5]
    close(padded, model.predict(ids[:, :5], verbose=0))


@pytest.mark.parametrize("projection", ["linear", "mean", "convolution"])
def test_any_length_up_to_the_maximum(projection):
    layer = layers.LinformerAttention(3, 5, 12, 4, projection=projection)
    inputs = keras.Input((None, 13))
    model = keras.Model(inputs, layer(inputs))
    for length in (1, 3, 4, 11, 12):
        x = sequence(length)
        padded = np.pad(x, [(0, 0), (0, 12 - length), (0, 0)])
        mask = np.arange(12) < [[length]] * 2
        close(layer(x), layer(padded, mask=mask)[:, :length])
        close(model(x), layer(x))
    for value in (sequence(13), keras.KerasTensor((2, 13, 13))):
        with pytest.raises(ValueError, match="max_length=12.*13"):
            layer(value)
        with pytest.raises(ValueError, match="max_length=12.*13"):
            layer(sequence(5), value)
    # only the value is limited
    assert tuple(layer(sequence(20), sequence(12)).shape) == (2, 20, 13)


def test_random_projections_are_drawn_once(tmp_path):
    def build(seed, **kwargs):
        layer = layers.LinformerAttention(
            3, 5, 400, 30, projection="random", seed=seed, **kwargs
        )
        layer.build((None, None, 13))
        return layer

    layer = build(3)
    assert len(layer.trainable_weights) == 8
    key = to_numpy(layer.key_projection.kernel.value)
    value = to_numpy(layer.value_projection.kernel.value)
    assert (key != value).any()
    for matrix in (key, value):
        np.testing.assert_allclose(matrix.std(), 400**-0.5, rtol=0.03)
    # the same numbers on every backend
    close(key[0, :3] * 20, [2.040919, -2.555665, 0.418099], 1e-4)
    close(build(3).key_projection.kernel.value, key)
    assert (to_numpy(build(4).key_projection.kernel.value) != key).any()
    own = build(3, sharing="none").key_projection.kernel
    assert own.shape == (3, 400, 30) and not own.trainable

    inputs = keras.Input((None, 13))
    model = keras.Model(inputs, layer(inputs))
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    close(loaded(sequence()), model(sequence()))


def test_the_heads_do_not_count_as_inputs_of_a_matrix():
    layer = layers.LinformerAttention(16, 2, 100, 50, "none")
    layer.build((None, None, 13))
    kernel = to_numpy(layer.key_projection.kernel.value)
    np.testing.assert_allclose(kernel.std(), (2 / 150) ** 0.5, rtol=0.02)
    layer = layers.LinformerAttention(
        16, 10, 40, 10, "none", projection="convolution"
    )
    layer.build((None, None, 13))
    kernel = to_numpy(layer.key_projection.kernel.value)
    assert kernel.shape == (16, 4, 10, 10)
    np.testing.assert_allclose(kernel.std(), (2 / 80) ** 0.5, rtol=0.03)


def test_number_of_weights_of_each_projection():
    for projection, sharing, shapes in [
        ("linear", "headwise", [(12, 5)] * 2),
        ("random", "key_value", [(12, 5)]),
        ("mean", "none", []),
        ("convolution", "headwise", [(3, 2, 2), (3, 7, 7)]),
        ("convolution", "none", [(4, 3, 2, 2), (4, 3, 7, 7)]),
    ]:
        layer = layers.LinformerAttention(
            4, 2, 12, 5, sharing, projection, value_dim=7
        )
        layer.build((None, None, 13))
        assert [w.shape for w in layer.weights[8:]] == shapes


def test_what_cannot_be_honoured_is_refused():
    x = sequence()
    shared = layers.LinformerAttention(3, 5, 12, 4, "layerwise")
    with pytest.raises(ValueError, match="needs the output of a `LengthP"):
        shared(x)
    for shape in [(11, 4), (12, 5), (2, 12, 4)]:
        with pytest.raises(ValueError, match=rf"\(12, 4\).*\({shape[0]}, "):
            shared(x, length_projection=np.ones(shape, "float32"))
    mean = layers.LinformerAttention(3, 5, 12, 4, projection="mean")
    with pytest.raises(ValueError, match="'mean'.*`length_projection`"):
        mean(x, length_projection=np.ones((12, 4), "float32"))
    with pytest.raises(ValueError, match="use_causal_mask"):
        shared(
            x,
            use_causal_mask=True,
            length_projection=np.ones((12, 4), "float32"),
        )


def test_bad_arguments_are_refused():
    for arguments, message in [
        ({"sharing": "all"}, "headwise.*sharing='all'"),
        ({"projection": "max"}, "convolution.*projection='max'"),
        ({"max_length": 0}, "max_length=0"),
        ({"projected_length": 2.0}, "projected_length=2.0"),
        ({"sharing": "layerwise", "projection": "mean"}, "projection='mean'"),
        (
            {
                "sharing": "key_value",
                "projection": "convolution",
                "value_dim": 7,
            },
            "value_dim=7",
        ),
    ]:
        arguments = {"max_length": 12, "projected_length": 4, **arguments}
        with pytest.raises(ValueError, match=message):
            layers.LinformerAttention(3, 5, **arguments)
    for arguments, message in [
        ({"projection": "mean"}, "linear.*projection='mean'"),
        ({"max_length": -1}, "max_length=-1"),
        ({"num_heads": 0}, "num_heads=0"),
    ]:
        arguments = {"max_length": 12, "projected_length": 4, **arguments}
        with pytest.raises(ValueError, match=message):
            layers.LengthProjection(**arguments)


def test_length_projection_by_itself():
    layer = layers.LengthProjection(
        12,
        4,
        num_heads=3,
        initializer="ones",
        regularizer="l2",
        constraint="non_neg",
        seed=3,
    )
    x = sequence()
    close(layer(x), np.ones((3, 12, 4)))
    assert len(layer.losses) == 1
    config = layer.get_config()
    assert layers.LengthProjection.from_config(config).get_config() == config
    assert config["num_heads"] == 3 and config["seed"] == 3
    for value in (sequence(13), keras.KerasTensor((None, 13, 13))):
        with pytest.raises(ValueError, match="max_length=12.*13"):
            layer(value)
    half = layers.LengthProjection(12, 4, dtype="mixed_bfloat16")
    output = half(x)
    assert keras.backend.standardize_dtype(output.dtype) == "bfloat16"
    assert half.kernel.dtype == "float32"
