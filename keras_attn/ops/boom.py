"""The Boom layer of SHA-RNN (https://arxiv.org/abs/1911.11423)."""

import keras
from keras import ops


@keras.saving.register_keras_serializable(package="keras_attn")
def quick_gelu(x):
    """The approximation `x * sigmoid(1.702 * x)` of the GELU.

    It differs from the exact GELU by at most 0.021.

    Args:
        x: Tensor.

    Returns:
        Tensor of the shape of `x`.
    """
    return x * ops.sigmoid(1.702 * x)


def boom(x, size):
    """Adds up the chunks of `size` features that the last axis consists of.

    Feature `i` is added to output feature `i % size`. Features beyond the last
    whole chunk are left out.

    Args:
        x: Tensor of shape `(..., F)`.
        size: Positive integer, at most `F`.

    Returns:
        Tensor of shape `(..., size)`.
    """
    chunks = x.shape[-1] // size
    if chunks == 0:
        raise ValueError(
            "`boom` needs at least one whole chunk of features. "
            f"Received: x.shape={tuple(x.shape)}, size={size}"
        )
    x = x[..., : chunks * size]
    x = ops.reshape(x, (*ops.shape(x)[:-1], chunks, size))
    return ops.sum(x, axis=-2)
