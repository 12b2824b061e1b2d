"""What layers do with the layers inside them: adapters and quantization."""

import re

import keras

from keras_attn.utils import sublayers

# the layers of Keras that take an adapter
ADAPTABLE = (
    keras.layers.Dense,
    keras.layers.EinsumDense,
    keras.layers.Conv1D,
    keras.layers.Conv2D,
    keras.layers.Conv3D,
)


def enable_lora(
    layer,
    rank,
    lora_alpha=None,
    a_initializer="he_uniform",
    b_initializer="zeros",
):
    """Gives every projection a low-rank adapter, and freezes all else.

    The adapters are those of
    [LoRA](https://arxiv.org/abs/2106.09685) (Hu et al., 2021). Outputs stay as
    they are until the adapters are trained. The layer must be built, and the
    model not yet compiled. A saved model holds the kernels with their adapters
    added, and is trainable as a whole again.

    Args:
        rank: Rank of the adapters.
        lora_alpha: The adapters are multiplied by `lora_alpha / rank`.
            Defaults to `rank`.
        a_initializer: Initializer of the first factor of an adapter.
        b_initializer: Initializer of the second factor.
    """
    name = type(layer).__name__
    if not layer.built:
        raise ValueError(
            f"`{name}` has no projections before it is built. Call it, or "
            "`build()`, before `enable_lora()`."
        )
    projections = [x for x in sublayers(layer) if isinstance(x, ADAPTABLE)]
    if not projections:
        raise ValueError(
            f"`{name}` has no dense layer or convolution that `enable_lora()` "
            "could adapt."
        )
    for projection in projections:
        projection.enable_lora(
            rank,
            lora_alpha=lora_alpha,
            a_initializer=a_initializer,
            b_initializer=b_initializer,
        )
    adapters = {
        id(weight)
        for projection in projections
        for weight in (projection.lora_kernel_a, projection.lora_kernel_b)
    }
    for weight in layer.weights:
        weight.trainable = id(weight) in adapters
    for inner in sublayers(layer):
        if not inner.trainable_weights:
            inner.trainable = False  # statistics stand still as well


def quantized_dtype(layer):
    """The entry `dtype` of the config of a layer, if it is quantized.

    `model.quantize()` acts on the layers inside, of which the config of a
    layer says nothing: without this a saved model would not load.
    """
    policy = layer.dtype_policy
    if isinstance(policy, keras.dtype_policies.DTypePolicyMap):
        return {}  # lists all of them already
    policies = keras.dtype_policies.DTypePolicyMap(default_policy=policy.name)
    for inner in sublayers(layer):
        if inner.quantization_mode is not None:
            # wherever in a model the layer is
            path = inner.path.removeprefix(layer.path)
            pattern = f"(.*/)?{re.escape(layer.name + path)}"
            policies[pattern] = inner.dtype_policy
    if not len(policies):
        return {}
    return {"dtype": keras.saving.serialize_keras_object(policies)}
