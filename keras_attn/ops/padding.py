"""Padding along an axis."""

from keras import ops


def pad_axis(x, before, after, axis, value=0):
    """Puts positions of one value around those of a tensor.

    `keras.ops.pad` creates an operation with a name of its own at every call,
    for which `torch.compile` compiles anew every time.

    Args:
        x: Tensor of any shape.
        before: Number of positions in front. It, and the next, may be tensors.
        after: Number of positions at the end.
        axis: The axis that is padded, from 0 on.
        value: What the new positions hold.

    Returns:
        Tensor like `x` that is longer along `axis`.
    """
    shape = ops.shape(x)

    def fill(count):
        if isinstance(count, int) and count == 0:
            return []
        sizes = (*shape[:axis], count, *shape[axis + 1 :])
        if value == 0:  # TorchScript, and so OpenVINO, knows no `full` of bool
            return [ops.zeros(sizes, dtype=x.dtype)]
        return [ops.full(sizes, value, dtype=x.dtype)]

    parts = [*fill(before), x, *fill(after)]
    return ops.concatenate(parts, axis) if len(parts) > 1 else x
