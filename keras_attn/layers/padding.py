"""What the layers do with padding: masks in, zeros in its place."""

import functools

import keras
from keras import ops


class AttachedMask(keras.layers.Layer):
    """Returns the mask that Keras has attached to a tensor, or `None`.

    Keras passes it to a call only if no explicit mask takes its place, and its
    own function for reading it is private.
    """

    def __init__(self, **kwargs):
        super().__init__(autocast=False, **kwargs)
        self.supports_masking = True
        self.built = True  # even if nothing but shapes has been seen

    def call(self, inputs, mask=None):
        return mask

    def compute_mask(self, inputs, previous_mask):
        return None


class AttachMask(keras.layers.Layer):
    """Returns a tensor with a mask attached, as losses and metrics look for.

    `compute_mask()` of a model is not enough: the trainer of JAX does not ask
    for it.
    """

    def __init__(self, **kwargs):
        super().__init__(autocast=False, **kwargs)
        self.supports_masking = True
        self.built = True  # even if nothing but shapes has been seen

    def call(self, inputs, mask=None):
        return inputs


def merge_masks(owner, shape, **masks):
    """Combines the masks of a layer that are given, each by its name.

    Args:
        owner: The layer, to name in errors.
        shape: Shape of the masks.
        **masks: Boolean or integer tensors, or `None`.

    Returns:
        Boolean tensor, `True` where all masks are, or `None` without any.
    """
    masks = [
        to_boolean(owner, name, mask, shape)
        for name, mask in masks.items()
        if mask is not None
    ]
    return functools.reduce(ops.logical_and, masks) if masks else None


def to_boolean(owner, name, mask, shape, broadcast=False):
    """Checks the dtype and the shape of a mask, and casts it to boolean."""
    mask = ops.convert_to_tensor(mask)
    if keras.backend.is_float_dtype(mask.dtype):
        raise ValueError(
            f"`{type(owner).__name__}` needs a boolean `{name}`, `True` for "
            "what may be attended. Floats could mean that or a bias. "
            f"Received: {name}.dtype={mask.dtype}"
        )
    sizes = tuple(mask.shape)
    if len(sizes) != len(shape) or any(
        differ(size, expected) and not (broadcast and size == 1)
        for size, expected in zip(sizes, shape, strict=True)
    ):
        verb = "broadcasts to" if broadcast else "has the shape"
        raise ValueError(
            f"`{type(owner).__name__}` needs a `{name}` that {verb} "
            f"{tuple(shape)}. Received: {name}.shape={sizes}"
        )
    return ops.cast(mask, "bool")


def zero_padding(x, mask):
    """Puts zeros where a mask of the first axes of `x` is `False`."""
    if mask is None:
        return x
    ones = [1] * (len(x.shape) - len(mask.shape))
    mask = ops.reshape(mask, (*ops.shape(mask), *ones))
    return ops.where(mask, x, ops.zeros_like(x))


def differ(size, expected):
    """Whether two sizes are known, and not the same."""
    return (
        isinstance(size, int) and isinstance(expected, int) and size != expected
    )
