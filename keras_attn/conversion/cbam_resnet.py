"""Weights of the authors' ResNet with CBAM."""

import re

import keras

from keras_attn.conversion.state_dict import StateDict
from keras_attn.layers import CBAM
from keras_attn.layers import ChannelAttention
from keras_attn.layers import SpatialAttention
from keras_attn.models import CBAMResNet


def cbam_resnet_weights(state_dict, model, prefix=""):
    """Converts a ResNet of the authors of CBAM, or a plain one.

    Args:
        state_dict: The weights by their names, NumPy arrays or what
            `numpy.asarray` takes: the state dict of a `ResNet` of the authors'
            program `attention-module`, in which `layer1.0.cbam` is the CBAM of
            the first block, or for a model without attention that of a ResNet
            of torchvision.
        model: The `keras_attn.models.CBAMResNet` that is to have the weights.
        prefix: What the names begin with, such as `"module."` in the
            checkpoints of several GPUs.

    Returns:
        List of NumPy arrays for `model.set_weights()`.

    Raises:
        ValueError: For a network of another depth, width or attention.

    Example:

    ```python
    import keras_attn
    from keras_attn.conversion import cbam_resnet_weights


    def convert(state_dict):  # such as torch.load(path)["state_dict"]
        model = keras_attn.models.CBAMResNet(depth=50)
        model.set_weights(cbam_resnet_weights(state_dict, model, "module."))
        return model
    ```
    """
    weights = StateDict("cbam_resnet_weights", state_dict, prefix)
    if not isinstance(model, CBAMResNet):
        raise ValueError(
            "`cbam_resnet_weights` needs a `CBAMResNet` for argument `model`. "
            f"Received: model={model}"
        )
    arrays, used = [], set()
    for layer in model.layers:
        if not layer.weights:
            continue
        named = _layer_arrays(weights, layer, _torch_name(layer.name))
        if len(named) != len(layer.weights):
            raise _unknown(layer)
        for (name, array), weight in zip(named, layer.weights, strict=True):
            if array.shape != tuple(weight.shape):
                raise ValueError(
                    f"`cbam_resnet_weights` finds weight {prefix + name!r}, "
                    f"in the layout of Keras, of shape {array.shape}, where "
                    f"`{weight.path}` of `model` is of shape "
                    f"{tuple(weight.shape)}. Make a model of the same `depth` "
                    "and options."
                )
            arrays.append(array)
            used.add(prefix + name)
    _check_all_used(weights, used, model.options["include_top"])
    return arrays


def _torch_name(name):
    """`layer1_0_shortcut_bn` of ours is `layer1.0.downsample.1` of theirs."""
    block = re.fullmatch(r"(layer\d)_(\d+)_(.+)", name)
    if not block:
        return {"predictions": "fc"}.get(name, name)
    parts = {
        "attention": "cbam",
        "shortcut_conv": "downsample.0",
        "shortcut_bn": "downsample.1",
    }
    stage, position, part = block.groups()
    return f"{stage}.{position}.{parts.get(part, part)}"


def _layer_arrays(weights, layer, name):
    """Pairs of a name and an array, for each weight of a layer in turn."""
    if isinstance(layer, keras.layers.Conv2D):
        return _convolution(weights, name)
    if isinstance(layer, keras.layers.BatchNormalization):
        return _normalization(weights, name)
    if isinstance(layer, keras.layers.Dense):
        return _dense(weights, name)
    if isinstance(layer, ChannelAttention):
        return _channel_attention(weights, name)
    if isinstance(layer, SpatialAttention):
        return _spatial_attention(weights, name)
    if isinstance(layer, CBAM):
        return _channel_attention(weights, name) + _spatial_attention(
            weights, name
        )
    raise _unknown(layer)


def _unknown(layer):
    return ValueError(
        "`cbam_resnet_weights` knows the weights of the attention layers of "
        "the authors, and of no others. "
        f"Received: layer `{layer.name}` of `model`, {layer}"
    )


def _convolution(weights, name):
    kernel = weights[f"{name}.weight"]
    # from (out, in, height, width)
    return [(f"{name}.weight", kernel.transpose(2, 3, 1, 0))]


def _normalization(weights, name):
    names = (
        f"{name}.{part}"
        for part in ("weight", "bias", "running_mean", "running_var")
    )
    return [(name, weights[name]) for name in names]


def _dense(weights, name):
    return [
        (f"{name}.weight", weights[f"{name}.weight"].T),
        (f"{name}.bias", weights[f"{name}.bias"]),
    ]


def _channel_attention(weights, name):
    return _dense(weights, f"{name}.ChannelGate.mlp.1") + _dense(
        weights, f"{name}.ChannelGate.mlp.3"
    )


def _spatial_attention(weights, name):
    name = f"{name}.SpatialGate.spatial"
    return _convolution(weights, f"{name}.conv") + _normalization(
        weights, f"{name}.bn"
    )


def _check_all_used(weights, used, include_top):
    """Raises if the original has layers that `model` has not."""
    top = "" if include_top else f"{weights.prefix}fc."
    left = [
        name
        for name in weights.arrays
        if name not in used
        and name.startswith(weights.prefix)
        and not name.endswith(".num_batches_tracked")
        and not (top and name.startswith(top))
    ]
    if left:
        raise ValueError(
            "`cbam_resnet_weights` finds no place in `model` for "
            f"{left[:3]}, {len(left)} weights in all. Make a model of the same "
            "`depth` and `attention`."
        )
