import inspect
import math
import subprocess
import sys

import keras
import numpy as np
import pytest
from keras import ops

from keras_attn import layers
from keras_attn import models
from keras_attn.models.cbam_resnet import DEPTHS
from keras_attn.models.cbam_resnet import Blocks
from tests import backend
from tests import golden
from tests.golden import cbam as transposed

# parameters of torchvision's ResNet and of the authors' program
PARAMETERS = {
    18: (11_689_512, 11_779_392),
    34: (21_797_672, 21_960_468),
    50: (25_557_032, 28_089_624),
    101: (44_549_160, 49_330_172),
    152: (60_192_808, 66_826_848),
}
CUSTOM = {
    "depth": 18,
    "attention": layers.CBAM(8, kernel_size=3),
    "stem": "cifar",
    "include_top": False,
    "weights": None,
    "input_shape": (16, 16, 1),
    "pooling": "max",
    "classes": 7,
    "classifier_activation": "sigmoid",
    "data_format": "channels_last",
    "dtype": "mixed_bfloat16",
    "name": "net",
}


def images(*shape, seed=0):
    rng = np.random.default_rng(seed)
    return rng.normal(size=shape).astype("float32")


def count(weights):
    return sum(math.prod(weight.shape) for weight in weights)


def widths(depth):
    """How many channels leave each block of a ResNet."""
    kind, lengths = DEPTHS[depth]
    expansion = 4 if kind == "bottleneck" else 1
    return [
        expansion * 64 * 2**stage
        for stage, length in enumerate(lengths)
        for _ in range(length)
    ]


def added(depth, attention):
    """Parameters that attention adds, from the formulas of the paper."""
    channel = [2 * c * (c // 16) + c // 16 + c for c in widths(depth)]
    spatial = [98 + 2 for _ in widths(depth)]
    return {
        None: 0,
        "channel": sum(channel),
        "spatial": sum(spatial),
        "cbam": sum(channel) + sum(spatial),
    }[attention]


def plain(depth):
    """Parameters of a ResNet without attention, layer by layer."""
    kind, lengths = DEPTHS[depth]
    total = 3 * 64 * 49 + 2 * 64
    inside = 64
    for stage, length in enumerate(lengths):
        width = 64 * 2**stage
        outside = 4 * width if kind == "bottleneck" else width
        for _ in range(length):
            if kind == "bottleneck":
                kernels = [inside * width, 9 * width**2, width * outside]
                norms = 2 * (2 * width + outside)
            else:
                kernels = [9 * inside * width, 9 * width**2]
                norms = 4 * width
            if inside != outside:
                kernels.append(inside * outside)
                norms += 2 * outside
            total += sum(kernels) + norms
            inside = outside
    return total + 1000 * inside + 1000


@pytest.mark.parametrize("depth", DEPTHS)
def test_every_depth_has_the_published_number_of_parameters(depth):
    assert plain(depth) == PARAMETERS[depth][0]
    assert plain(depth) + added(depth, "cbam") == PARAMETERS[depth][1]


def test_number_of_parameters_with_the_stem_for_small_images():
    kwargs = {"depth": 18, "stem": "cifar", "classes": 10}
    model = models.CBAMResNet(**kwargs)
    assert count(model.trainable_weights) == 11_263_842
    model = models.CBAMResNet(**kwargs, attention=None)
    assert count(model.trainable_weights) == 11_173_962


def multiply_adds(model):
    """Multiplications of the kernels, as the paper counts them."""
    total = 0
    for layer in model.layers:
        positions = math.prod(layer.output.shape[1:-1])
        if isinstance(layer, (keras.layers.Conv2D, keras.layers.Dense)):
            total += math.prod(layer.kernel.shape) * positions
        elif isinstance(layer, layers.CBAM):
            channel, spatial = layer.channel_attention, layer.spatial_attention
            for dense in (channel.reduce_dense, channel.expand_dense):
                total += 2 * math.prod(dense.kernel.shape)
            total += math.prod(spatial.conv.kernel.shape) * positions
    return total


@pytest.mark.parametrize(
    ("depth", "attention", "published"),
    [
        (18, None, 1.814),
        (18, "channel", None),
        (18, "spatial", None),
        (18, "cbam", 1.815),
        (50, "cbam", 3.864),
    ],
)
def test_models_are_as_large_as_published(depth, attention, published):
    model = models.CBAMResNet(
        depth, attention, input_shape=(224, 224, 3), data_format="channels_last"
    )
    expected = plain(depth) + added(depth, attention)
    assert count(model.trainable_weights) == expected
    if published is not None:
        total = multiply_adds(model)
        if depth == 50:
            # the paper counts the stride in the first convolution of a block
            for inside, positions in ((256, 28**2), (512, 14**2), (1024, 7**2)):
                total -= 3 * positions * inside * inside // 2
        assert round(total / 1e9, 3) == published


@pytest.mark.parametrize("kind", ["basic", "basic_stride", "bottleneck"])
def test_residual_blocks_equal_the_authors(kind):
    data = golden.load(f"cbam_resnet_{kind}")
    x, loss, expected, gradient = (
        np.moveaxis(data[name], 1, -1)
        for name in ("input.x", "loss_R", "expected.out", "grad.x")
    )
    inputs = keras.Input(x.shape[1:])
    block = getattr(Blocks("cbam", "channels_last"), kind.split("_")[0])
    filters = data["weight.conv1.weight"].shape[0]
    stride = int(data["option.stride"])
    model = keras.Model(inputs, block(inputs, filters, stride, "block"))
    for layer in model.layers:
        name = layer.name.removeprefix("block_")
        name = name.replace("shortcut_conv", "downsample.0")
        name = name.replace("shortcut_bn", "downsample.1")
        if isinstance(layer, layers.CBAM):
            layer.set_weights(transposed.cbam(data, "cbam."))
        elif isinstance(layer, keras.layers.Conv2D):
            layer.set_weights(transposed.convolution(data, name))
        elif isinstance(layer, keras.layers.BatchNormalization):
            layer.set_weights(transposed.normalization(data, name))
    np.testing.assert_allclose(
        backend.run(model, x), expected, atol=2e-5, rtol=2e-5
    )
    loss = ops.convert_to_tensor(loss)
    (of_input,) = backend.gradients(lambda x: loss * model(x), x)
    tolerance = 1e-4 * np.abs(gradient).max()
    np.testing.assert_allclose(of_input, gradient, rtol=0, atol=tolerance)


def test_initial_values_are_those_of_the_authors():
    model = models.CBAMResNet(18, stem="cifar", classes=100)
    for weight in model.weights:
        value = backend.to_numpy(weight)
        path = weight.path
        if path.endswith(("norm/gamma", "bias", "beta", "moving_mean")):
            assert not value.any(), path
        elif path.endswith(("gamma", "moving_variance")):
            assert (value == 1).all(), path
        elif "shortcut" in path or "channel_attention" in path:
            bound = 1 / np.sqrt(value[..., 0].size)  # the fan in
            assert np.abs(value).max() <= bound, path
            assert np.abs(value).max() > 0.9 * bound, path
        else:
            fan = value.size // value.shape[-1 if "predict" in path else -2]
            assert abs(value.std() / np.sqrt(2 / fan) - 1) < 0.3, path
            assert np.abs(value).max() > 2.3 * np.sqrt(2 / fan), path
    x = images(2, 16, 16, 3)
    inner = model.get_layer("layer1_0_attention").input
    features = keras.Model(model.input, inner)(x)
    attention = model.get_layer("layer1_0_attention")
    _, _, spatial = attention(features, return_attention_scores=True)
    assert (backend.to_numpy(spatial) == 0.5).all()


@pytest.mark.parametrize("data_format", ["channels_last", "channels_first"])
@pytest.mark.parametrize("stem", ["imagenet", "cifar"])
def test_shapes(stem, data_format):
    last = data_format == "channels_last"
    kwargs = {"stem": stem, "data_format": data_format, "include_top": False}
    shrinks = 32 if stem == "imagenet" else 8
    space = (64 // shrinks, 96 // shrinks)
    shape = (64, 96, 3) if last else (3, 64, 96)
    model = models.CBAMResNet(18, **kwargs, input_shape=shape)
    assert model.output_shape == (
        (None, *space, 512) if last else (None, 512, *space)
    )


def test_features_of_images_of_unknown_size():
    kwargs = {"depth": 18, "include_top": False, "pooling": "avg"}
    for data_format, shape in (
        ("channels_last", (None, None, 3)),
        ("channels_first", (3, None, None)),
    ):
        model = models.CBAMResNet(**kwargs, data_format=data_format)
        assert model.input_shape == (None, *shape)
        assert model.output_shape == (None, 512)


@pytest.mark.parametrize("stem", ["imagenet", "cifar"])
def test_images_of_any_size(stem):
    model = models.CBAMResNet(
        18, stem=stem, classes=5, data_format="channels_last"
    )
    for size in ((32, 32), (20, 33)):
        output = model.predict(images(2, *size, 3), verbose=0)
        assert output.shape == (2, 5)
        np.testing.assert_allclose(output.sum(axis=-1), 1, rtol=1e-5)


def test_attention_may_be_a_layer_or_make_one():
    expected = count(models.CBAMResNet(18).weights)
    ratio = layers.CBAM(reduction_ratio=16)
    for attention in (ratio, layers.CBAM, lambda: layers.CBAM(16)):
        model = models.CBAMResNet(18, attention=attention)
        assert count(model.weights) == expected
        assert not ratio.built
    found = [x for x in model.layers if isinstance(x, layers.CBAM)]
    assert [x.name for x in found] == [
        f"layer{stage}_{block}_attention"
        for stage in (1, 2, 3, 4)
        for block in (0, 1)
    ]


def test_every_argument_is_in_the_config():
    arguments = set(inspect.signature(models.CBAMResNet).parameters)
    assert arguments == set(CUSTOM)
    model = models.CBAMResNet(**CUSTOM)
    config = model.get_config()
    for name, value in CUSTOM.items():
        if name != "attention":
            assert config[name] == value
    assert config["attention"]["config"]["reduction_ratio"] == 8
    revived = models.CBAMResNet.from_config(config)
    assert revived.get_config() == config
    assert [w.path for w in revived.weights] == [w.path for w in model.weights]
    assert revived.get_layer("relu1").compute_dtype == "bfloat16"


def test_saved_model_is_the_same_in_a_fresh_process(tmp_path):
    kwargs = {**CUSTOM, "dtype": "float32", "include_top": True}
    model = models.CBAMResNet(**kwargs)
    for seed, weight in enumerate(model.weights):
        if weight.path.endswith(("gamma", "beta", "bias")):
            weight.assign(1 + 0.1 * images(*weight.shape, seed=seed))
    x = images(2, 16, 16, 1)
    model.save(tmp_path / "model.keras")
    model.save_weights(tmp_path / "model.weights.h5")
    np.save(tmp_path / "x.npy", x)
    program = (
        "import sys, keras, keras_attn, numpy as np\n"
        "model = keras.saving.load_model(sys.argv[1] + '/model.keras')\n"
        "x = np.load(sys.argv[1] + '/x.npy')\n"
        "assert type(model) is keras_attn.models.CBAMResNet\n"
        "np.save(sys.argv[1] + '/y.npy', model.predict(x, verbose=0))\n"
    )
    subprocess.run([sys.executable, "-c", program, tmp_path], check=True)
    np.testing.assert_allclose(
        np.load(tmp_path / "y.npy"), backend.run(model, x), rtol=1e-4, atol=1e-5
    )
    path = str(tmp_path / "model.weights.h5")
    loaded = models.CBAMResNet(**{**kwargs, "weights": path})
    for a, b in zip(loaded.weights, model.weights, strict=True):
        np.testing.assert_array_equal(
            backend.to_numpy(a), backend.to_numpy(b), err_msg=a.path
        )


def test_fifty_steps_at_a_high_rate_from_the_initial_values():
    blocks = Blocks("cbam", "channels_last")
    inputs = keras.Input((8, 8, 3))
    x = blocks.basic(inputs, 8, 2, "block")
    model = keras.Model(inputs, blocks.top(x, 2, "softmax"))
    x = images(8, 8, 8, 3)
    y = np.arange(8) % 2
    model.compile(
        keras.optimizers.SGD(0.1, momentum=0.9),
        "sparse_categorical_crossentropy",
    )
    history = model.fit(x, y, epochs=50, batch_size=8, verbose=0)
    losses = history.history["loss"]
    assert np.isfinite(losses).all()
    assert losses[-1] < 0.05


@pytest.mark.parametrize(
    "kwargs",
    [
        {"depth": 20},
        {"stem": "mnist"},
        {"pooling": "mean"},
        {"classes": 0},
        {"classes": 10.0},
        {"data_format": "NHWC"},
        {"attention": "se"},
        {"attention": 16},
        {"attention": lambda: 16},
        {"weights": "imagenet"},
    ],
)
def test_bad_arguments_are_refused(kwargs):
    ((name, value),) = kwargs.items()
    with pytest.raises(ValueError, match=f"CBAMResNet.*`{name}`"):
        models.CBAMResNet(**kwargs)
