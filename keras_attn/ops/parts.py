"""Parts of long sequences, attended one after the other.

An array of 32 MiB or more is fresh memory from the operating system each time,
which costs more than what is computed in it: smaller ones are worth some more
operations, on each of the backends.
"""

import keras
from keras import ops

# Sequences of so many positions are attended in up to so many parts.
MANY_POSITIONS, PARTS = 8192, 8


def has_many_positions(x):
    """Whether a tensor `(B, T, ...)` has so many positions that parts pay.

    They do not where the length is unknown, nor where arrays are distributed
    over devices, each of which has but a part of them anyway.
    """
    length = x.shape[1]
    if not isinstance(length, int) or length < MANY_POSITIONS:
        return False
    return keras.distribution.distribution() is None


def split_positions(*tensors, multiple=1):
    """Splits tensors `(B, T, ...)` along `T`, if that is long.

    Args:
        *tensors: Tensors of one length, or `None`, which every part gets.
        multiple: Integer that the length of each part is a multiple of, but
            for that of the last.

    Returns:
        List with a tuple for each part.
    """
    length = tensors[0].shape[1]
    if not has_many_positions(tensors[0]):
        return [tensors]
    size = length // PARTS // multiple * multiple
    count = PARTS if PARTS * size == length else PARTS + 1

    def split(x):
        if x is None:
            return [None] * count
        # not a slice for each, whose gradient on PyTorch is as long as x
        if count == PARTS:
            return ops.split(x, PARTS, axis=1)
        whole = PARTS * size
        return [*ops.split(x[:, :whole], PARTS, axis=1), x[:, whole:]]

    return list(zip(*map(split, tensors), strict=True))


def attend_by_heads(attend, tensors, axes, output_axis=2):
    """Attends with a few heads at a time, if sequences are long.

    Args:
        attend: Function of a `slice` of the heads, and of these heads of the
            tensors.
        tensors: Tensors, the first of shape `(B, T, N, H)`.
        axes: For each tensor the axis of its heads.
        output_axis: The axis of the heads in what `attend` returns.

    Returns:
        What `attend` returns, with all heads.
    """
    num_heads = tensors[0].shape[2]
    count = max(n for n in range(1, PARTS + 1) if num_heads % n == 0)
    if count == 1 or not has_many_positions(tensors[0]):
        return attend(slice(0, num_heads), *tensors)

    size = num_heads // count
    heads = [slice(i, i + size) for i in range(0, num_heads, size)]
    parts = [
        ops.split(x, count, axis) for x, axis in zip(tensors, axes, strict=True)
    ]
    outputs = [attend(*part) for part in zip(heads, *parts, strict=True)]
    return ops.concatenate(outputs, output_axis)
