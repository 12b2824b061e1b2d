import keras
import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from keras_attn import layers
from keras_attn.conversion import cbam_resnet_weights
from keras_attn.models import CBAMResNet
from tests import golden
from tests.backend import few
from tests.backend import run


class ChannelGate(nn.Module):
    """Channel attention with the names of the authors' program."""

    def __init__(self, channels, ratio):
        super().__init__()
        self.mlp = nn.Sequential(
            nn.Flatten(),
            nn.Linear(channels, channels // ratio),
            nn.ReLU(),
            nn.Linear(channels // ratio, channels),
        )

    def forward(self, x):
        gates = self.mlp(x.mean((2, 3))) + self.mlp(x.amax((2, 3)))
        return x * gates.sigmoid()[:, :, None, None]


class SpatialGate(nn.Module):
    """Spatial attention with the names of the authors' program."""

    def __init__(self):
        super().__init__()
        self.spatial = nn.Module()
        self.spatial.conv = nn.Conv2d(2, 1, 7, padding=3, bias=False)
        self.spatial.bn = nn.BatchNorm2d(1)

    def forward(self, x):
        pools = [x.amax(1, keepdim=True), x.mean(1, keepdim=True)]
        gates = self.spatial.bn(self.spatial.conv(torch.cat(pools, 1)))
        return x * gates.sigmoid()


class Block(nn.Module):
    """Residual block: two convolutions, or three of which two are narrow."""

    def __init__(self, inputs, width, stride, is_bottleneck, ratio=16):
        super().__init__()
        sizes = (1, 3, 1) if is_bottleneck else (3, 3)
        outputs = 4 * width if is_bottleneck else width
        widths = (inputs, *[width] * (len(sizes) - 1), outputs)
        self.depth = len(sizes)
        for i, size in enumerate(sizes):
            # the stride is in the first 3x3 convolution
            step = stride if i == is_bottleneck else 1
            conv = nn.Conv2d(
                *widths[i : i + 2], size, step, size // 2, bias=False
            )
            setattr(self, f"conv{i + 1}", conv)
            setattr(self, f"bn{i + 1}", nn.BatchNorm2d(widths[i + 1]))
        self.downsample = None
        if stride != 1 or inputs != outputs:
            self.downsample = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False),
                nn.BatchNorm2d(outputs),
            )
        self.cbam = nn.Sequential()
        self.cbam.add_module("ChannelGate", ChannelGate(outputs, ratio))
        self.cbam.add_module("SpatialGate", SpatialGate())

    def forward(self, x):
        y = x
        for i in range(1, self.depth + 1):
            y = getattr(self, f"bn{i}")(getattr(self, f"conv{i}")(y))
            y = y.relu() if i < self.depth else self.cbam(y)
        x = x if self.downsample is None else self.downsample(x)
        return (x + y).relu()


class ResNet(nn.Module):
    """ResNet with CBAM for ImageNet, with the names of the authors' program."""

    def __init__(self, lengths, is_bottleneck, classes):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        inputs = 64
        for stage, length in enumerate(lengths):
            width = 64 * 2**stage
            blocks = nn.Sequential()
            for position in range(length):
                stride = 2 if stage > 0 and position == 0 else 1
                blocks.append(Block(inputs, width, stride, is_bottleneck))
                inputs = 4 * width if is_bottleneck else width
            setattr(self, f"layer{stage + 1}", blocks)
        self.fc = nn.Linear(inputs, classes)

    def forward(self, x):
        x = self.bn1(self.conv1(x)).relu()
        x = functional.max_pool2d(x, 3, 2, 1)
        for stage in range(1, 5):
            x = getattr(self, f"layer{stage}")(x)
        return self.fc(x.mean((2, 3)))


def randomize(module):
    """Random weights, and moments of batches that the network could see."""
    torch.manual_seed(0)
    for name, weight in module.state_dict().items():
        if weight.ndim > 1:
            nn.init.normal_(weight, std=weight[0].numel() ** -0.5)
        elif weight.ndim == 1:
            nn.init.normal_(weight, std=0.1)
            weight += "var" in name or "weight" in name
    return module.eval()


@pytest.mark.parametrize("name", few(golden.names("cbam_resnet_*")))
def test_the_original_here_is_that_of_the_authors(name):
    data = golden.load(name)
    x = torch.from_numpy(data["input.x"])
    block = Block(
        x.shape[1],
        len(data["weight.conv1.weight"]),
        int(data["option.stride"]),
        "bottleneck" in name,
        int(data["option.reduction_ratio"]),
    )
    weights = {
        name.removeprefix("weight."): torch.from_numpy(array)
        for name, array in data.items()
        if name.startswith("weight.")
    }
    missing, unexpected = block.load_state_dict(weights, strict=False)
    assert not unexpected
    assert all(name.endswith("num_batches_tracked") for name in missing)
    with torch.no_grad():
        output = block.eval()(x).numpy()
    np.testing.assert_allclose(output, data["expected.out"], atol=2e-5)


@pytest.fixture(scope="module")
def theirs():
    return randomize(ResNet((2, 2, 2, 2), False, classes=7))


@pytest.fixture(scope="module")
def ours(theirs):
    # without a head, for which there are weights all the same
    model = CBAMResNet(18, include_top=False, data_format="channels_last")
    model.set_weights(cbam_resnet_weights(theirs.state_dict(), model))
    return model


def check(ours, theirs, x):
    actual = run(ours, x)
    with torch.no_grad():
        expected = theirs(torch.from_numpy(x.transpose(0, 3, 1, 2))).numpy()
    if expected.ndim == 4:
        expected = expected.transpose(0, 2, 3, 1)
    assert expected.std() > 0.1  # or else anything would do
    tolerance = 1e-4 * np.abs(expected).max()
    np.testing.assert_allclose(actual, expected, rtol=0, atol=tolerance)


def images(*shape):
    return np.random.default_rng(0).normal(size=shape).astype("float32")


# the same arrays in more layers, which have tests of their own
@pytest.mark.parametrize("part", few(["block", "network"]))
def test_equals_the_original(part, theirs, ours):
    if part == "block":
        ours = keras.Model(
            ours.get_layer("layer1_1_relu").output,
            ours.get_layer("layer2_0_relu").output,
        )
        check(ours, theirs.layer2[0], images(2, 8, 5, 64))
        return
    theirs = randomize(ResNet((3, 4, 6, 3), True, classes=7))
    state_dict = {f"module.{k}": x for k, x in theirs.state_dict().items()}
    ours = CBAMResNet(
        50,
        classes=7,
        classifier_activation=None,
        data_format="channels_last",
    )
    ours.set_weights(cbam_resnet_weights(state_dict, ours, "module."))
    check(ours, theirs, images(2, 64, 33, 3))


def test_networks_of_other_kinds_are_refused(theirs, ours):
    theirs = theirs.state_dict()
    smaller = {k: x for k, x in theirs.items() if "layer1.1." not in k}
    with pytest.raises(ValueError, match="no weight 'layer1.1.conv1.weight'"):
        cbam_resnet_weights(smaller, ours)
    larger = {**theirs, "layer1.2.conv1.weight": np.ones(1)}
    with pytest.raises(ValueError, match=r"no place .*\['layer1.2.conv1"):
        cbam_resnet_weights(larger, ours)
    other = {**theirs, "bn1.bias": np.ones(9)}
    with pytest.raises(ValueError, match=r"'bn1.bias'.*\(9,\).*\(64,\)"):
        cbam_resnet_weights(other, ours)
    with pytest.raises(ValueError, match="`CBAMResNet` for argument `model`"):
        cbam_resnet_weights(theirs, keras.Sequential())
    unknown = CBAMResNet(18, layers.CBAM(identity_init=True))
    with pytest.raises(ValueError, match="of no others.*layer1_0_attention"):
        cbam_resnet_weights(theirs, unknown)
