"""Small helpers shared by layers and ops."""

import keras
import numpy as np
from keras import ops


def check_positive_integers(owner, **arguments):
    """Raises `ValueError` unless each argument is a positive integer."""
    for name, value in arguments.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise invalid(owner, name, value, "a positive integer")


def check_rates(owner, **arguments):
    """Raises `ValueError` unless each argument is a rate in `[0, 1)`."""
    for name, value in arguments.items():
        is_number = isinstance(value, (int, float))
        if isinstance(value, bool) or not is_number or not 0 <= value < 1:
            raise invalid(owner, name, value, "a number in [0, 1)")


def check_choice(owner, choices, **arguments):
    """Raises `ValueError` unless each argument is one of `choices`."""
    for name, value in arguments.items():
        if value not in choices:
            raise invalid(owner, name, value, f"one of {tuple(choices)}")


def invalid(owner, name, value, wanted):
    """The error that says which argument of which layer is wrong, and why."""
    return ValueError(
        f"Invalid `{name}` of `{type(owner).__name__}`: argument `{name}` must "
        f"be {wanted}. Received: {name}={value!r}"
    )


def sublayers(layer):
    """All layers inside a layer or model, each once, outermost first."""
    found, waiting = {}, [layer]
    while waiting:
        for value in keras.tree.flatten(list(vars(waiting.pop(0)).values())):
            if isinstance(value, keras.layers.Layer) and value is not layer:
                if id(value) not in found:
                    found[id(value)] = value
                    waiting.append(value)
    return list(found.values())


def check_shards(layer, weight, axis, **sizes):
    """Raises `ValueError` if a layout map cannot split an axis equally.

    Args:
        layer: The layer that is being built.
        weight: Path of one of its weights.
        axis: Axis of that weight.
        **sizes: Size of the axis, by the name of the argument that sets it.
    """
    distribution = keras.distribution.distribution()
    if distribution is None:
        return
    layout = distribution.get_tensor_layout(f"{layer.path}/{weight}")
    mesh_axis = None
    if layout is not None and axis < len(layout.axes):
        mesh_axis = layout.axes[axis]
    if mesh_axis is None:
        return
    mesh = layout.device_mesh
    count = mesh.shape[mesh.axis_names.index(mesh_axis)]
    for name, size in sizes.items():
        if size % count:
            raise ValueError(
                f"`{type(layer).__name__}` {layer.path!r} cannot split "
                f"{name}={size} over the {count} devices of the mesh axis "
                f"{mesh_axis!r}. Choose a multiple of {count}, or leave the "
                "layer whole: name it in the argument `replicated` of "
                "`keras_attn.distribution.layout_map`."
            )


def clone_initializer(initializer):
    """Copies an initializer, because one instance always draws one value."""
    return initializer.__class__.from_config(initializer.get_config())


def serialize_sublayer(layer):
    """The configuration of a layer, or `None`, that its owner will build.

    Keras would have it built on its own, and so its weights named without
    their owner.
    """
    config = keras.saving.serialize_keras_object(layer)
    return config and {k: v for k, v in config.items() if k != "build_config"}


def concrete_integer(x):
    """The value of a scalar tensor, or `None` while a compiler traces it."""
    try:
        return ops.convert_to_numpy(x).item()
    except Exception:  # each backend has an error of its own
        return None


def numpy_generator(seed):
    """A generator whose numbers, for one seed, are those on every backend."""
    if seed is None:
        # what `keras.utils.set_random_seed()` has a say in
        seed = np.random.randint(2**31)
    return np.random.default_rng(seed)
