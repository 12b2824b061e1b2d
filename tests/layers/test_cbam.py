import inspect

import keras
import numpy as np
import pytest
from keras import ops

from keras_attn import layers
from tests import backend
from tests import golden
from tests.golden import cbam as transposed
from tests.reference import cbam as reference

LAYERS = [layers.ChannelAttention, layers.SpatialAttention, layers.CBAM]
SHAPES = {3: (3, 7, 5), 4: (3, 5, 4, 6), 5: (3, 4, 2, 3, 5)}
# channels_first convolves nothing, and so works on a CPU with TensorFlow
FORMATS = ["channels_last", "channels_first"]
CUSTOM = {
    "gate_activation": "hard_sigmoid",
    "identity_init": True,
    "data_format": "channels_first",
    "kernel_initializer": "he_normal",
    "bias_initializer": "ones",
    "kernel_regularizer": keras.regularizers.L2(0.1),
    "bias_regularizer": keras.regularizers.L1(0.2),
    "kernel_constraint": "max_norm",
    "bias_constraint": "non_neg",
}
CHANNEL = {
    "reduction_ratio": 3,
    "pooling": ("lse", "avg"),
    "activation": "gelu",
    "use_bias": False,
}
SPATIAL = {
    "kernel_size": (3, 5),
    "use_normalization": False,
    "momentum": 0.9,
    "epsilon": 0.1,
    "gamma_initializer": "zeros",
}
BOTH = {"order": "parallel", "spatial_kernel_initializer": "lecun_normal"}
CONFIGS = [
    (layers.ChannelAttention, {**CUSTOM, **CHANNEL}),
    (layers.SpatialAttention, {**CUSTOM, **SPATIAL, "use_bias": True}),
    (layers.CBAM, {**CUSTOM, **CHANNEL, **SPATIAL, **BOTH}),
]

every_layer = pytest.mark.parametrize("cls", LAYERS)


def normal(*shape, seed=0):
    rng = np.random.default_rng(seed)
    return rng.normal(size=shape).astype("float32")


def close(actual, expected, tolerance=1e-5):
    np.testing.assert_allclose(
        backend.to_numpy(actual),
        backend.to_numpy(expected),
        rtol=tolerance,
        atol=tolerance,
    )


def randomize(layer, scale=1.0):
    """Gives every weight, biases and statistics included, a random value."""
    for seed, weight in enumerate(layer.weights):
        value = scale * normal(*weight.shape, seed=seed)
        positive = weight.path.endswith("variance")
        weight.assign(1 + np.abs(value) if positive else value)
    return layer


def built(cls, shape, **kwargs):
    layer = cls(**kwargs)
    layer.build(shape)
    return randomize(layer)


def padding():
    """Samples of 7 positions: one with holes, one of padding, one full."""
    return np.array([[0, 1, 1, 0, 1, 0, 0], [0] * 7, [1] * 7], bool)


# golden data


def arrays(data, data_format, *names):
    """Golden feature maps, which have their channels first."""
    found = [data[name] for name in names]
    if data_format == "channels_last":
        found = [np.moveaxis(x, 1, -1) for x in found]
    return found


def stateless(layer, x, **options):
    """Calls a layer and drops the statistics that it would update."""
    with keras.StatelessScope():
        return layer(x, **options)


def output_and_gradients(layer, x, loss, **options):
    x, loss = ops.convert_to_tensor(x), ops.convert_to_tensor(loss)
    output = backend.run(lambda x: stateless(layer, x, **options), x)
    (of_input,) = backend.gradients(
        lambda x: loss * stateless(layer, x, **options), x
    )
    of_weights = backend.weight_gradients(
        lambda: loss * layer(x, **options), layer.trainable_weights
    )
    return output, of_input, of_weights


def close_gradients(actual, expected):
    tolerance = 1e-4 * np.abs(expected).max()
    np.testing.assert_allclose(actual, expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("data_format", FORMATS)
@pytest.mark.parametrize(
    "pooling", ["avg_max", "avg", "max", "lp", "lse", "avg_max_lp_lse"]
)
def test_channel_attention_equals_the_authors(pooling, data_format):
    data = golden.load("cbam_channel")
    names = [f"{pooling}.{n}" for n in ("loss_R", "expected.out", "grad.x")]
    x, loss, expected, gradient = arrays(data, data_format, "input.x", *names)
    layer = layers.ChannelAttention(
        8, pooling=tuple(pooling.split("_")), data_format=data_format
    )
    layer.build(x.shape)
    layer.set_weights(transposed.channel_attention(data))
    output, of_input, of_weights = output_and_gradients(layer, x, loss)
    np.testing.assert_allclose(output, expected, atol=2e-5, rtol=2e-5)
    close_gradients(of_input, gradient)
    if pooling == "avg_max":
        names = ("mlp.1.weight", "mlp.1.bias", "mlp.3.weight", "mlp.3.bias")
        for name, actual in zip(names, of_weights, strict=True):
            close_gradients(actual.T, data[f"avg_max.grad.weight.{name}"])


@pytest.mark.parametrize("data_format", FORMATS)
@pytest.mark.parametrize("mode", ["eval", "train"])
def test_spatial_attention_equals_the_authors(mode, data_format):
    data = golden.load("cbam_spatial")
    names = [f"{mode}.{n}" for n in ("loss_R", "expected.out", "grad.x")]
    x, loss, expected, gradient = arrays(data, data_format, "input.x", *names)
    layer = layers.SpatialAttention(data_format=data_format)
    layer.build(x.shape)
    layer.set_weights(transposed.spatial_attention(data))
    output, of_input, of_weights = output_and_gradients(
        layer, x, loss, training=mode == "train"
    )
    np.testing.assert_allclose(output, expected, atol=2e-5, rtol=2e-5)
    close_gradients(of_input, gradient)
    kernel, gamma, beta = of_weights
    grads = f"{mode}.grad.weight.spatial."
    close_gradients(kernel.transpose(3, 2, 0, 1), data[f"{grads}conv.weight"])
    close_gradients(gamma, data[f"{grads}bn.weight"])
    close_gradients(beta, data[f"{grads}bn.bias"])


@pytest.mark.parametrize("masked", [False, True])
def test_moving_statistics_move_as_the_authors(masked):
    data = golden.load("cbam_spatial")
    (x,) = arrays(data, "channels_last", "input.x")
    layer = layers.SpatialAttention(data_format="channels_last")
    layer.build(x.shape)
    layer.set_weights(transposed.spatial_attention(data))
    before = backend.to_numpy(layer.norm.moving_variance)
    mask = np.ones(x.shape[:-1], bool) if masked else None
    layer(x, mask=mask, training=True)
    close(layer.norm.moving_mean, data["train.torch_running_mean_after"])
    # torch keeps the unbiased variance, keras the biased one
    unbiased = data["train.torch_running_var_after"] - 0.99 * before
    count = np.prod(x.shape[:-1])
    close(
        layer.norm.moving_variance,
        0.99 * before + unbiased * (count - 1) / count,
    )


@pytest.mark.parametrize("data_format", FORMATS)
def test_cbam_equals_the_authors(data_format):
    data = golden.load("cbam_block")
    names = ("input.x", "loss_R", "expected.out", "grad.x")
    x, loss, expected, gradient = arrays(data, data_format, *names)
    layer = layers.CBAM(data_format=data_format)
    layer.build(x.shape)
    layer.set_weights(transposed.cbam(data))
    output, of_input, of_weights = output_and_gradients(layer, x, loss)
    np.testing.assert_allclose(output, expected, atol=2e-5, rtol=2e-5)
    close_gradients(of_input, gradient)
    names = [k for k in data if k.startswith("grad.weight.")]
    for name, actual in zip(names, of_weights, strict=True):
        if actual.ndim == 4:
            actual = actual.transpose(3, 2, 0, 1)
        close_gradients(actual.T if actual.ndim == 2 else actual, data[name])
    (expected,) = arrays(data, data_format, "no_spatial.expected.out")
    close(layer.channel_attention(x), expected, 2e-5)


# the reference, on maps of every rank


@pytest.mark.parametrize("data_format", FORMATS)
@pytest.mark.parametrize(
    ("rank", "order"),
    [
        (3, "spatial_first"),
        (4, "channel_first"),
        (4, "spatial_first"),
        (4, "parallel"),
        (5, "channel_first"),
    ],
)
def test_gates_of_maps_of_every_rank(rank, order, data_format):
    x = normal(*SHAPES[rank])
    fed = x if data_format == "channels_last" else np.moveaxis(x, -1, 1)
    layer = built(
        layers.CBAM,
        fed.shape,
        reduction_ratio=2,
        kernel_size=3,
        order=order,
        data_format=data_format,
    )
    output, channel, spatial = backend.run(
        lambda x: layer(x, return_attention_scores=True), fed
    )

    *mlp, kernel, gamma, beta, mean, variance = layer.get_weights()
    norm = (gamma, beta, mean, variance)
    space = tuple(range(1, rank - 1))
    by_channel = by_position = x
    if order == "channel_first":
        gates = reference.channel_gates(x, mlp)
        by_channel = x * np.expand_dims(gates, space)
    elif order == "spatial_first":
        gates = reference.spatial_gates(x, kernel, norm)
        by_position = x * gates[..., None]
    expected_channel = reference.channel_gates(by_position, mlp)
    expected_spatial = reference.spatial_gates(by_channel, kernel, norm)
    expected = x * np.expand_dims(expected_channel, space)
    expected = expected * expected_spatial[..., None]
    if data_format == "channels_first":
        expected = np.moveaxis(expected, -1, 1)
    close(channel, expected_channel)
    close(spatial, expected_spatial)
    close(output, expected)


@pytest.mark.parametrize(
    "shape", [(2, 1, 1, 4), (1, 3, 5, 4), (2, 1, 4), (1, 2, 1, 1, 4)]
)
@pytest.mark.parametrize("kernel_size", [7, 4])
def test_windows_may_be_larger_than_the_map(shape, kernel_size):
    layer = built(
        layers.SpatialAttention,
        shape,
        kernel_size=kernel_size,
        use_normalization=False,
        data_format="channels_last",
    )
    x = normal(*shape)
    _, gates = layer(x, return_attention_scores=True)
    close(gates, reference.spatial_gates(x, layer.get_weights()[0]))


def test_windows_may_differ_between_axes():
    x = normal(2, 3, 5, 4)
    layer = built(
        layers.SpatialAttention,
        x.shape,
        kernel_size=(1, 4),
        use_normalization=False,
        data_format="channels_last",
    )
    _, gates = layer(x, return_attention_scores=True)
    close(gates, reference.spatial_gates(x, layer.get_weights()[0]))


def test_order_of_positions_leaves_channel_gates_as_they_are():
    x = normal(2, 5, 7, 6)
    layer = built(layers.ChannelAttention, x.shape, data_format="channels_last")
    mixed = np.random.default_rng(1).permutation(x.reshape(2, 35, 6), axis=1)
    output, gates = layer(x, return_attention_scores=True)
    close(layer(mixed.reshape(x.shape), return_attention_scores=True)[1], gates)
    close(output, x * backend.to_numpy(gates)[:, None, None])


def test_order_of_channels_leaves_spatial_gates_as_they_are():
    x = normal(2, 5, 7, 6)
    layer = built(layers.SpatialAttention, x.shape, data_format="channels_last")
    mixed = np.random.default_rng(1).permutation(x, axis=3)
    output, gates = layer(x, return_attention_scores=True)
    close(layer(mixed, return_attention_scores=True)[1], gates)
    close(output, x * backend.to_numpy(gates)[..., None])


def test_one_perceptron_sees_every_pool():
    x = np.broadcast_to(normal(2, 1, 1, 6), (2, 4, 3, 6))  # mean = maximum
    layer = built(layers.ChannelAttention, x.shape, data_format="channels_last")
    kernel_0, bias_0, kernel_1, bias_1 = layer.get_weights()
    hidden = np.maximum(x[:, 0, 0] @ kernel_0 + bias_0, 0)
    expected = reference.sigmoid(2 * (hidden @ kernel_1 + bias_1))
    close(layer(x, return_attention_scores=True)[1], expected)


# weights


@pytest.mark.parametrize("ratio", [1, 3, 16, 64])
@pytest.mark.parametrize("channels", [1, 3, 8, 33])
def test_number_of_weights(channels, ratio):
    layer = layers.CBAM(ratio, data_format="channels_last")
    layer.build((None, 4, 4, channels))
    hidden = max(1, channels // ratio)
    channel = 2 * channels * hidden + hidden + channels
    assert layer.channel_attention.count_params() == channel
    assert sum(np.prod(w.shape) for w in layer.trainable_weights) == (
        channel + 98 + 2
    )


def test_weights_have_stable_names():
    layer = layers.CBAM(name="cbam", identity_init=True)
    layer.build((None, 4, 4, 4))
    assert [w.path for w in layer.weights] == [
        f"cbam/{path}"
        for path in (
            "channel_attention/strength",
            "channel_attention/reduce/kernel",
            "channel_attention/reduce/bias",
            "channel_attention/expand/kernel",
            "channel_attention/expand/bias",
            "spatial_attention/strength",
            "spatial_attention/conv/kernel",
            "spatial_attention/norm/gamma",
            "spatial_attention/norm/beta",
            "spatial_attention/norm/moving_mean",
            "spatial_attention/norm/moving_variance",
        )
    ]


def test_initializers_regularizers_and_constraints_reach_the_weights():
    layer = layers.CBAM(
        2,
        kernel_initializer=keras.initializers.Constant(3.0),
        bias_initializer=keras.initializers.Constant(2.0),
        spatial_kernel_initializer=keras.initializers.Constant(5.0),
        gamma_initializer="zeros",
        kernel_regularizer=keras.regularizers.L1(1.0),
        bias_regularizer=keras.regularizers.L1(0.5),
        kernel_constraint="non_neg",
        bias_constraint="unit_norm",
        data_format="channels_last",
    )
    layer.build((None, 4, 4, 4))
    values = [np.unique(w).tolist() for w in layer.get_weights()]
    assert values == [[3], [2], [3], [2], [5], [0], [0], [0], [1]]
    loss = backend.to_numpy(ops.sum(ops.stack(layer.losses)))
    assert loss == 3 * 8 + 3 * 8 + 5 * 98 + 0.5 * 2 * (2 + 4)
    for name in ("reduce_dense", "expand_dense"):
        dense = getattr(layer.channel_attention, name)
        assert isinstance(dense.kernel_constraint, keras.constraints.NonNeg)
        assert isinstance(dense.bias_constraint, keras.constraints.UnitNorm)


def test_no_two_kernels_start_alike():
    layer = layers.ChannelAttention(1, kernel_initializer="glorot_uniform")
    layer.build((None, 4, 4, 4))
    kernels = [w for w in layer.get_weights() if w.ndim == 2]
    assert (kernels[0] != kernels[1]).all()


@every_layer
def test_gradients_reach_every_weight(cls):
    inputs = keras.Input((4, 3, 6))
    layer = built(cls, inputs.shape, data_format="channels_last")
    model = keras.Model(inputs, layer(inputs))
    before = [backend.to_numpy(w) for w in layer.trainable_weights]
    model.compile(keras.optimizers.SGD(1.0), "mse")
    model.fit(normal(5, 4, 3, 6), normal(5, 4, 3, 6, seed=1), verbose=0)
    for old, weight in zip(before, layer.trainable_weights, strict=True):
        new = backend.to_numpy(weight)
        assert np.isfinite(new).all()
        assert (new != old).any(), weight.path


# identity at the start


@every_layer
@pytest.mark.parametrize("training", [False, True])
def test_identity_init_returns_the_input(cls, training):
    x = normal(2, 5, 4, 6)
    layer = cls(identity_init=True, data_format="channels_last")
    output, *gates = layer(x, training=training, return_attention_scores=True)
    np.testing.assert_array_equal(backend.to_numpy(output), x)
    for gate in gates:
        assert (backend.to_numpy(gate) == 1).all()


@every_layer
def test_identity_init_becomes_plain_attention_at_full_strength(cls):
    x = normal(2, 5, 4, 6)
    plain = built(cls, x.shape, data_format="channels_last")
    layer = cls(identity_init=True, data_format="channels_last")
    layer.build(x.shape)
    strengths = [w for w in layer.weights if w.path.endswith("strength")]
    others = [w for w in layer.weights if not w.path.endswith("strength")]
    for weight, value in zip(others, plain.get_weights(), strict=True):
        weight.assign(value)
    for strength in strengths:
        strength.assign(1.0)
    close(layer(x), plain(x))
    assert len(strengths) == (2 if cls is layers.CBAM else 1)


def test_identity_init_learns():
    inputs = keras.Input((4, 3, 6))
    layer = layers.CBAM(identity_init=True, data_format="channels_last")
    model = keras.Model(inputs, layer(inputs))
    x = normal(8, 4, 3, 6)
    model.compile(keras.optimizers.Adam(0.05), "mse")
    history = model.fit(x, x * (x[..., :1] > 0), epochs=20, verbose=0)
    losses = history.history["loss"]
    assert losses[-1] < 0.8 * losses[0]
    assert all(w.numpy().any() for w in layer.trainable_weights if w.shape)


# masks


@pytest.mark.support("Masks", "padding is invisible")
@every_layer
@pytest.mark.parametrize("training", [False, True])
def test_padding_is_invisible(cls, training):
    mask, x = padding(), normal(3, 7, 6)
    layer = built(cls, x.shape, data_format="channels_last")
    before = layer.get_weights()
    options = {"return_attention_scores": True, "training": training}
    expected = backend.to_numpy(layer(x, mask=mask, **options))
    statistics = layer.get_weights()
    for filling in (np.nan, np.inf, 1e30, 0.0):
        layer.set_weights(before)
        filled = np.where(mask[..., None], x, np.float32(filling))
        for a, b in zip(
            layer(filled, mask=mask, **options), expected, strict=True
        ):
            close(a, b)
        for a, b in zip(layer.get_weights(), statistics, strict=True):
            close(a, b)
    assert not expected[0][~mask].any()
    assert all(np.isfinite(part).all() for part in expected)


@pytest.mark.support("Masks", "padding has no gradient")
@every_layer
@pytest.mark.parametrize("training", [False, True])
def test_gradients_do_not_see_padding(cls, training):
    mask, x = padding(), normal(3, 7, 6)
    layer = built(cls, x.shape, data_format="channels_last")
    x[~mask] = np.nan
    (of_input,) = backend.gradients(
        lambda x: stateless(layer, x, mask=mask, training=training), x
    )
    assert np.isfinite(of_input).all()
    assert not of_input[~mask].any()
    assert of_input[mask].any()
    for gradient in backend.weight_gradients(
        lambda: layer(
            ops.convert_to_tensor(x),
            mask=ops.convert_to_tensor(mask),
            training=training,
        ),
        layer.trainable_weights,
    ):
        assert np.isfinite(gradient).all()
        assert gradient.any()


@every_layer
def test_padded_sequence_equals_the_bare_one(cls):
    x = normal(1, 9, 6)
    layer = built(cls, x.shape, data_format="channels_last")
    whole = layer(x, mask=np.arange(9)[None] < 5)
    close(whole[:, :5], layer(x[:, :5]))


def test_batch_statistics_leave_padding_out():
    mask, x = padding(), normal(3, 7, 6)
    layer = built(
        layers.SpatialAttention,
        x.shape,
        kernel_size=3,
        momentum=0.75,
        data_format="channels_last",
    )
    kernel, gamma, beta, mean, variance = layer.get_weights()
    _, gates = layer(x, mask=mask, training=True, return_attention_scores=True)
    expected = reference.spatial_gates(x, kernel, (gamma, beta), mask)
    close(gates, expected)
    logits = reference.spatial_logits(x, kernel, mask)[mask]
    close(layer.norm.moving_mean, 0.75 * mean + 0.25 * logits.mean())
    close(layer.norm.moving_variance, 0.75 * variance + 0.25 * logits.var())


def test_a_batch_of_padding_leaves_the_statistics_alone():
    x = normal(2, 7, 6)
    layer = built(layers.SpatialAttention, x.shape, data_format="channels_last")
    before = layer.get_weights()
    output = layer(x, mask=np.zeros((2, 7), bool), training=True)
    assert not backend.to_numpy(output).any()
    for a, b in zip(layer.get_weights(), before, strict=True):
        np.testing.assert_array_equal(a, b)


def test_frozen_statistics_do_not_move_under_a_mask():
    x = normal(3, 7, 6)
    layer = built(layers.CBAM, x.shape, data_format="channels_last")
    layer.trainable = False
    before = layer.get_weights()
    close(
        layer(x, mask=padding(), training=True),
        layer(x, mask=padding(), training=False),
    )
    for a, b in zip(layer.get_weights(), before, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.support("Masks", "attached masks")
@every_layer
def test_masks_come_with_the_input_and_go_with_the_output(cls):
    tokens = np.array([[5, 3, 0, 8, 0], [1, 0, 0, 0, 0]])
    embedding = keras.layers.Embedding(9, 6, mask_zero=True)
    x = embedding(tokens)
    layer = built(cls, x.shape, data_format="channels_last")
    expected = layer(backend.to_numpy(x), mask=tokens != 0)
    output = layer(x)
    close(output, expected)
    np.testing.assert_array_equal(
        backend.to_numpy(output._keras_mask), tokens != 0
    )
    inputs = keras.Input((None,), dtype="int32")
    model = keras.Model(inputs, layer(embedding(inputs)))
    close(model.predict(tokens, verbose=0), expected)


@every_layer
def test_masks_do_not_go_with_the_gates(cls):
    inputs = keras.Input((7, 6))
    masked = keras.layers.Masking()(inputs)
    outputs = cls(data_format="channels_last")(
        masked, return_attention_scores=True
    )
    model = keras.Model(inputs, outputs)
    x = np.where(padding()[..., None], normal(3, 7, 6), 0.0)
    output, *gates = model(x)
    assert tuple(output._keras_mask.shape) == (3, 7)
    assert all(getattr(g, "_keras_mask", None) is None for g in gates)


@every_layer
@pytest.mark.parametrize("dtype", ["int32", "uint8"])
def test_masks_may_be_integers(cls, dtype):
    x = normal(3, 7, 6)
    layer = built(cls, x.shape, data_format="channels_last")
    close(layer(x, mask=padding().astype(dtype)), layer(x, mask=padding()))


@every_layer
@pytest.mark.parametrize("data_format", FORMATS)
def test_images_may_be_padded_too(cls, data_format):
    x = normal(2, 5, 6, 4)
    mask = np.zeros((2, 5, 6), bool)
    mask[0, :3, :4] = mask[1] = True
    padded, small = x, x[:1, :3, :4]
    if data_format == "channels_first":
        padded, small = (np.moveaxis(x, -1, 1) for x in (padded, small))
    layer = built(cls, padded.shape, data_format=data_format)
    output = backend.to_numpy(layer(padded, mask=mask))
    if data_format == "channels_first":
        output = np.moveaxis(output, 1, -1)
    expected = backend.to_numpy(layer(small))
    if data_format == "channels_first":
        expected = np.moveaxis(expected, 1, -1)
    close(output[:1, :3, :4], expected)
    assert not output[~mask].any()


# gates on request, unknown sizes, compilation, saving, precision


@every_layer
@pytest.mark.parametrize("data_format", FORMATS)
@pytest.mark.parametrize("rank", SHAPES)
def test_symbolic_and_real_outputs_agree(cls, rank, data_format):
    shape = SHAPES[rank]
    channels = shape[-1]
    space = (None,) * (rank - 2)
    if data_format == "channels_first":
        unknown, shape = (channels, *space), (shape[0], channels, *shape[1:-1])
    else:
        unknown = (*space, channels)
    layer = cls(data_format=data_format)
    inputs = keras.Input(unknown)
    symbolic = layer(inputs, return_attention_scores=True)
    assert layer(inputs).shape == (None, *unknown)
    real = layer(normal(*shape), return_attention_scores=True)
    assert type(symbolic) is type(real) is tuple
    for s, r in zip(symbolic, real, strict=True):
        assert len(s.shape) == len(r.shape)
        assert all(
            a in (None, b) for a, b in zip(s.shape, r.shape, strict=True)
        )
        assert s.dtype == keras.backend.standardize_dtype(r.dtype)
    count = 2 if cls is layers.CBAM else 1
    assert len(symbolic) == 1 + count


@pytest.mark.parametrize("data_format", FORMATS)
def test_one_compiled_model_takes_any_size(data_format):
    last = data_format == "channels_last"
    inputs = keras.Input((None, None, 4) if last else (4, None, None))
    layer = layers.CBAM(data_format=data_format)
    outputs = layer(inputs, return_attention_scores=True)
    randomize(layer)
    model = keras.Model(inputs, outputs)
    if keras.backend.backend() != "torch":  # minutes of compilation
        model.compile(jit_compile=True)
    for size in ((5, 4), (3, 7)):
        x = normal(2, *size, 4)
        x = x if last else np.moveaxis(x, -1, 1)
        for a, b in zip(
            model.predict(x, verbose=0),
            layer(x, return_attention_scores=True),
            strict=True,
        ):
            close(a, b)


@pytest.mark.parametrize("masked", [False, True])
def test_compiled_training_equals_eager_training(masked):
    x, y = normal(3, 7, 6), normal(3, 7, 6, seed=1)
    weights = []
    for compiled in (True, False):
        inputs = keras.Input((7, 6))
        masked_inputs = keras.layers.Masking()(inputs) if masked else inputs
        layer = layers.CBAM(data_format="channels_last")
        model = keras.Model(inputs, layer(masked_inputs))
        randomize(layer)
        if keras.backend.backend() == "torch":
            compiled = False
        model.compile(
            keras.optimizers.SGD(0.1),
            "mse",
            jit_compile=compiled,
            run_eagerly=not compiled,
        )
        fed = np.where(padding()[..., None], x, 0.0) if masked else x
        model.fit(fed, y, verbose=0, epochs=2)
        weights.append(model.get_weights())
    for a, b in zip(*weights, strict=True):
        close(a, b)


@pytest.mark.parametrize(("cls", "config"), CONFIGS)
def test_config_round_trip(cls, config):
    layer = cls(**config, name="attention", dtype="mixed_bfloat16")
    actual = layer.get_config()
    assert cls.from_config(actual).get_config() == actual
    revived = keras.saving.deserialize_keras_object(
        keras.saving.serialize_keras_object(layer)
    )
    assert revived.get_config() == actual
    plain = cls().get_config()
    for name in config:  # so none of them was the default, or lost
        assert actual[name] != plain[name], name


def test_both_halves_get_the_arguments_of_the_whole():
    cls, config = CONFIGS[-1]
    layer = cls(**config, dtype="mixed_float16")
    layer.build((None, 6, 5, 4))
    whole = layer.get_config()
    for half in (layer.channel_attention, layer.spatial_attention):
        part = half.get_config()
        del part["name"]
        if half is layer.spatial_attention:
            initializer = whole["spatial_kernel_initializer"]
            assert part.pop("kernel_initializer") == initializer
            assert part.pop("use_bias") is False
        for name, value in part.items():
            assert value == whole[name], name


@pytest.mark.parametrize(("cls", "config"), CONFIGS)
def test_every_argument_is_in_the_config(cls, config):
    arguments = set()
    for base in cls.__mro__[: cls.__mro__.index(keras.Layer)]:
        arguments |= set(inspect.signature(base.__init__).parameters)
    arguments -= {"self", "args", "kwargs"}
    assert arguments <= set(cls().get_config())
    assert arguments == set(config)


@pytest.mark.support("Saving", "`.keras`, `.weights.h5`")
@pytest.mark.parametrize(("cls", "config"), CONFIGS)
def test_saved_model_is_the_same_model(cls, config, tmp_path):
    inputs = keras.Input((6, None, None))
    outputs = cls(**config)(inputs)
    outputs = cls(data_format="channels_first")(outputs)
    model = randomize(keras.Model(inputs, outputs))
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    x = normal(2, 6, 5, 4)
    close(loaded(x), model(x))
    model.save_weights(tmp_path / "model.weights.h5")
    clone = keras.models.clone_model(model)
    clone.load_weights(tmp_path / "model.weights.h5")
    close(clone(x), model(x))


@pytest.mark.support("Saving", "clones and wrappers")
@every_layer
def test_sequential_and_time_distributed(cls):
    x = normal(2, 3, 5, 4, 6)
    layer = built(cls, x[:, 0].shape, data_format="channels_last")
    model = keras.Sequential([keras.layers.TimeDistributed(layer)])
    output = backend.to_numpy(model(x))
    for step in range(3):
        close(output[:, step], layer(x[:, step]))


@every_layer
@pytest.mark.parametrize(
    "policy", ["mixed_float16", "mixed_bfloat16", "float16", "bfloat16"]
)
def test_half_precision(cls, policy):
    x, mask = normal(3, 7, 6), padding()
    layer = built(cls, x.shape, dtype=policy, data_format="channels_last")
    full = built(cls, x.shape, data_format="channels_last")
    outputs = layer(x, mask=mask, training=True, return_attention_scores=True)
    assert keras.backend.standardize_dtype(outputs[0].dtype) == (
        layer.compute_dtype
    )
    variables = "float32" if policy.startswith("mixed") else policy
    assert {w.dtype for w in layer.weights} == {variables}
    expected = full(x, mask=mask, training=True, return_attention_scores=True)
    for a, b in zip(outputs, expected, strict=True):
        close(ops.cast(a, "float32"), b, 0.05)
    symbolic = layer(keras.Input((7, 6)), return_attention_scores=True)
    for a, b in zip(symbolic, outputs, strict=True):
        assert a.dtype == keras.backend.standardize_dtype(b.dtype)


def test_large_sums_do_not_overflow_in_half_precision():
    x = np.full((1, 64, 64, 4), 200.0, "float32")
    kwargs = {"pooling": ("lp", "lse"), "data_format": "channels_last"}
    full = built(layers.ChannelAttention, x.shape, **kwargs)
    half = built(
        layers.ChannelAttention, x.shape, dtype="mixed_float16", **kwargs
    )
    for layer in (full, half):  # hidden units beyond 65504, which cancel
        kernel = [[20.0], [10.0], [10.0], [10.0]]
        weights = [kernel, [0.0], [[1e-6, -1e-6, 2e-6, 0.0]], [0.0] * 4]
        layer.set_weights([np.array(w) for w in weights])
    _, expected = full(x, return_attention_scores=True)
    output, gates = half(x, return_attention_scores=True)
    close(gates, expected, 1e-3)
    assert np.isfinite(backend.to_numpy(output)).all()


# bad input


@pytest.mark.parametrize("bad", [0, -1, 2.0, True, None, "16"])
@pytest.mark.parametrize(
    ("cls", "name"),
    [
        (layers.ChannelAttention, "reduction_ratio"),
        (layers.CBAM, "reduction_ratio"),
        (layers.SpatialAttention, "kernel_size"),
        (layers.CBAM, "kernel_size"),
    ],
)
def test_sizes_must_be_positive_integers(cls, name, bad):
    with pytest.raises(ValueError, match=f"{cls.__name__}.*{name}={bad!r}"):
        cls(**{name: bad})


@pytest.mark.parametrize("bad", [(), ("avg", "sum"), "avg", ("avg", "avg"), 2])
@pytest.mark.parametrize("cls", [layers.ChannelAttention, layers.CBAM])
def test_unknown_pooling_is_refused(cls, bad):
    with pytest.raises(ValueError, match=f"{cls.__name__}.*`pooling`"):
        cls(pooling=bad)


@pytest.mark.parametrize(
    ("cls", "kwargs"),
    [
        (layers.CBAM, {"order": "both"}),
        (layers.CBAM, {"momentum": 1.5}),
        (layers.CBAM, {"epsilon": 0.0}),
        (layers.CBAM, {"kernel_size": (3, 0)}),
        (layers.SpatialAttention, {"momentum": -0.5}),
        (layers.SpatialAttention, {"epsilon": -1}),
        (layers.SpatialAttention, {"kernel_size": (3, 1.0)}),
        *((cls, {"data_format": "NCHW"}) for cls in LAYERS),
    ],
)
def test_bad_options_are_refused(cls, kwargs):
    ((name, value),) = kwargs.items()
    with pytest.raises(ValueError, match=f"{cls.__name__}.*`{name}`.*") as e:
        cls(**kwargs)
    assert str(value) in str(e.value)


@every_layer
@pytest.mark.parametrize("shape", [(6,), (2, 6), (2, 2, 2, 2, 2, 6)])
@pytest.mark.parametrize("symbolic", [False, True])
def test_maps_of_other_ranks_are_refused(cls, shape, symbolic):
    x = keras.Input(batch_shape=shape) if symbolic else normal(*shape)
    with pytest.raises(ValueError, match=f"{cls.__name__}.*rank 3, 4 or 5"):
        cls()(x)


@pytest.mark.parametrize("cls", [layers.ChannelAttention, layers.CBAM])
def test_unknown_channels_are_refused(cls):
    with pytest.raises(ValueError, match=f"{cls.__name__}.*channels"):
        cls(data_format="channels_last")(keras.Input((4, 4, None)))


def test_positions_do_not_need_to_know_the_channels():
    inputs = keras.Input((4, 4, None))
    layer = layers.SpatialAttention(data_format="channels_last")
    model = keras.Model(inputs, layer(inputs))
    for channels in (3, 5):
        assert model(normal(2, 4, 4, channels)).shape == (2, 4, 4, channels)


@every_layer
@pytest.mark.parametrize("symbolic", [False, True])
def test_integer_images_are_refused(cls, symbolic):
    x = np.zeros((2, 4, 4, 3), "uint8")
    x = keras.Input((4, 4, 3), dtype="uint8") if symbolic else x
    with pytest.raises(ValueError, match=f"{cls.__name__}.*Rescaling"):
        cls()(x)


@every_layer
@pytest.mark.parametrize("symbolic", [False, True])
@pytest.mark.parametrize("shape", [(3, 6), (3, 7, 6), (3,), (2, 7)])
def test_masks_of_other_shapes_are_refused(cls, shape, symbolic):
    x = normal(3, 7, 6)
    mask = np.ones(shape, bool)
    if symbolic:
        x = keras.Input(batch_shape=x.shape)
        mask = keras.Input(batch_shape=shape, dtype="bool")
    with pytest.raises(ValueError, match=f"{cls.__name__}.*`mask`"):
        cls(data_format="channels_last")(x, mask=mask)


@every_layer
def test_float_masks_are_refused(cls):
    with pytest.raises(ValueError, match=f"{cls.__name__}.*`mask`.*float32"):
        cls(data_format="channels_last")(
            normal(3, 7, 6), mask=np.ones((3, 7), "float32")
        )


def test_windows_must_fit_the_rank():
    with pytest.raises(ValueError, match=r"SpatialAttention.*\(3, 3\)"):
        layers.SpatialAttention((3, 3))(normal(2, 4, 6))


@every_layer
def test_maps_of_another_rank_than_the_first_are_refused(cls):
    layer = cls(name="attention")
    layer(normal(2, 4, 6))
    with pytest.raises(ValueError, match="attention"):
        layer(normal(2, 4, 4, 6))
