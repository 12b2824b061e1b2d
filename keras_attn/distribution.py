"""How to split the layers over the devices of a mesh."""

import re

import keras

__all__ = ["layout_map"]

# projections of an input into heads: kernels `(F, N, H)`, biases `(N, H)`
_INTO_HEADS = (
    "query",
    "key",
    "value",
    "query_global",
    "key_global",
    "value_global",
    "hidden",
    "factorized_hidden",
    "query_left",
    "query_right",
    # of one head in all, and of `Boom`: their units stand in for heads
    "mixing",
    "up",
    "value_gate",
)
# weights whose first axis is that of the heads, or of the units of `Boom`
_HEADS_FIRST = (
    "attention_output/kernel",
    "left/kernel",
    "left/bias",
    "right/kernel",
    "right/bias",
    "dense_bias",
    "dense_kernel",
    "fixed_random_kernel",
    "head_kernel",
    "key_factors",
    "query_factors",
    "random_kernel",
    "rotations",
    "down/kernel",
)
# weights whose second axis is that of the heads
_HEADS_SECOND = ("context_kernel", "input_kernel")


def layout_map(device_mesh, model_axis="model", replicated=()):
    """Lays the heads of all layers out along an axis of a mesh of devices.

    Every weight that has an axis for the heads is split along it, those that
    the mechanisms add included. `SingleHeadAttention` and `Boom` are split
    along their units. All other weights are whole on every device, on purpose:
    what heads share, normalization, the LSTM of `SHARNNBlock`, and the layers
    of CBAM, which have no heads.

    The keys hold for layers by themselves and anywhere in a model. They name
    weights, such as `.../query/kernel`, and so hold for
    `keras.layers.MultiHeadAttention` as well. Add keys of your own for the
    other layers of a model, and for tensors: `map["embedding/output"]`, say.

    Args:
        device_mesh: The `keras.distribution.DeviceMesh`.
        model_axis: Name of the axis of the mesh to split the heads along. Its
            size must divide the number of heads of each layer.
        replicated: Names of layers to leave whole on every device, because
            their heads cannot be split equally, say.

    Returns:
        A `keras.distribution.LayoutMap`, for
        `keras.distribution.ModelParallel`.

    Raises:
        ValueError: If the mesh has no such axis.

    Example:

    ```python
    import keras
    import keras_attn

    devices = keras.distribution.DeviceMesh(
        (2, 4), ["batch", "model"], [f"cpu:{i}" for i in range(8)]
    )
    layouts = keras_attn.distribution.layout_map(devices)
    assert layouts["transformer/attention/query/kernel"].axes == (None, "model")
    assert layouts["transformer/normalization/gamma"] is None

    # before the model is made, on JAX with 8 devices:
    # keras.distribution.set_distribution(
    #     keras.distribution.ModelParallel(layout_map=layouts)
    # )
    ```
    """
    if model_axis not in device_mesh.axis_names:
        raise ValueError(
            f"`model_axis` must be an axis of the mesh, one of "
            f"{tuple(device_mesh.axis_names)}. Received: "
            f"model_axis={model_axis!r}"
        )
    kernels = [f"{name}/kernel" for name in _INTO_HEADS]
    biases = [f"{name}/bias" for name in _INTO_HEADS]
    layouts = keras.distribution.LayoutMap(device_mesh)
    layouts[_pattern(biases + list(_HEADS_FIRST), replicated)] = (model_axis,)
    layouts[_pattern(kernels + list(_HEADS_SECOND), replicated)] = (
        None,
        model_axis,
    )
    return layouts


def _pattern(weights, replicated):
    """The paths that end with one of `weights`, some layers left out."""
    parents = ".*"
    if replicated:
        parents = rf"(?!(.*/)?({_any_of(replicated)})/)" + parents
    return f"{parents}/({_any_of(weights)})"


def _any_of(names):
    return "|".join(re.escape(name) for name in names)
