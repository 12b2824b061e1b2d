"""Channel and spatial attention of CBAM (https://arxiv.org/abs/1807.06521).

Unlike the other mechanisms, these act on feature maps `x` of shape
`(B, *space, F)`, or `(B, F, *space)` with `data_format="channels_first"`, where
`space` stands for one, two or three axes. What is learned comes in as a
callable, so that any layer may take its place.
"""

from keras import ops

from keras_attn.ops.masks import at_least_float32

POOLING = ("avg", "max", "lp", "lse")


def channel_attention(
    x,
    mlp,
    pooling=("avg", "max"),
    activation=ops.sigmoid,
    padding_mask=None,
    data_format="channels_last",
):
    """Computes how much of each channel of a feature map to keep.

    Equation 2 of the paper: space is pooled away in more than one way, one
    shared `mlp` sees every result, and the sum of its outputs passes through
    `activation`. Everything after the pooling is in float32 or better.

    Args:
        x: Tensor of shape `(B, *space, F)` or `(B, F, *space)`.
        mlp: Callable from `(B, P, F)` to `(B, P, F)`, for `P` ways of pooling.
        pooling: Tuple of `"avg"` (mean), `"max"`, `"lp"` (root of the sum of
            squares) and `"lse"` (logarithm of the sum of exponentials).
        activation: Callable that turns sums into gates.
        padding_mask: Boolean tensor of shape `(B, *space)`, `True` for the
            positions that are pooled, or `None`.
        data_format: `"channels_last"` or `"channels_first"`.

    Returns:
        Gates of shape `(B, F)`, to be used with `apply_gates()`. Where a sample
        is padding throughout, they are those of a map of zeros.
    """
    axes = _space_axes(x, data_format)
    mask = _spread(padding_mask, data_format)
    pools = ops.stack([_pool(x, kind, axes, mask) for kind in pooling], axis=1)
    logits = mlp(pools)
    return activation(ops.sum(ops.cast(logits, pools.dtype), axis=1))


def spatial_attention(
    x,
    convolution,
    activation=ops.sigmoid,
    padding_mask=None,
    data_format="channels_last",
):
    """Computes how much of each position of a feature map to keep.

    Equation 3 of the paper: the maximum and the mean over the channels, in this
    order, make a map of two channels, which a `convolution` reduces to one. The
    small map has its channels last in either data format, for TensorFlow
    convolves nothing else on a CPU; `x` itself is never transposed.

    Args:
        x: Tensor of shape `(B, *space, F)` or `(B, F, *space)`.
        convolution: Callable from `(B, *space, 2)` to `(B, *space, 1)`.
        activation: Callable that turns the result into gates.
        padding_mask: Boolean tensor of shape `(B, *space)`, or `None`. To the
            convolution, positions where it is `False` are what lies outside of
            the map: zeros.
        data_format: `"channels_last"` or `"channels_first"`.

    Returns:
        Gates of shape `(B, *space)`, to be used with `apply_gates()`. They are
        0 at padding.
    """
    x = _zero_padding(x, padding_mask, data_format)
    axis = _channel_axis(data_format)
    pools = [ops.max(x, axis=axis), ops.mean(x, axis=axis)]
    pools = at_least_float32(ops.stack(pools, axis=-1))  # (B, *space, 2)
    logits = ops.squeeze(convolution(pools), axis=-1)
    gates = activation(ops.cast(logits, pools.dtype))
    return gates if padding_mask is None else _where(padding_mask, gates)


def apply_gates(
    x,
    channel_gates=None,
    spatial_gates=None,
    padding_mask=None,
    data_format="channels_last",
):
    """Multiplies a feature map by the gates of its channels and positions.

    Args:
        x: Tensor of shape `(B, *space, F)` or `(B, F, *space)`.
        channel_gates: Tensor of shape `(B, F)`, or `None`.
        spatial_gates: Tensor of shape `(B, *space)`, or `None`.
        padding_mask: Boolean tensor of shape `(B, *space)`, or `None`.
        data_format: `"channels_last"` or `"channels_first"`.

    Returns:
        Tensor of the shape and dtype of `x`, 0 at padding.
    """
    x = _zero_padding(x, padding_mask, data_format)
    if channel_gates is not None:
        axes = _space_axes(x, data_format)
        gates = ops.expand_dims(channel_gates, axis=axes)
        x = x * ops.cast(gates, x.dtype)
    if spatial_gates is not None:
        gates = _spread(spatial_gates, data_format)
        x = x * ops.cast(gates, x.dtype)
    return x


def masked_moments(x, padding_mask):
    """Mean and variance of each channel, over what is not padding.

    Args:
        x: Tensor of shape `(B, *space, F)`.
        padding_mask: Boolean tensor of shape `(B, *space)`.

    Returns:
        Mean and variance of shape `(F,)`, and how many positions they come
        from. All are 0 where there is nothing but padding.
    """
    mask = _spread(ops.cast(padding_mask, "bool"), "channels_last")
    axes = tuple(range(len(x.shape) - 1))
    count = ops.sum(ops.cast(mask, x.dtype))
    divisor = ops.maximum(count, 1.0)
    mean = ops.sum(_where(mask, x), axis=axes) / divisor
    variance = ops.sum(_where(mask, ops.square(x - mean)), axis=axes) / divisor
    return mean, variance, count


def _pool(x, kind, axes, mask=None):
    """Reduces space, to `(B, F)` in float32 or better."""
    # mean and maximum of half floats are safe, but sums of them overflow
    if mask is not None or kind in ("lp", "lse"):
        x = at_least_float32(x)
    if mask is None:
        shown = hidden = x
    else:
        mask = ops.cast(mask, "bool")
        shown, hidden = _where(mask, x), ops.where(mask, x, -3e38)
    if kind == "avg" and mask is None:
        pool = ops.mean(x, axis=axes)
    elif kind == "avg":
        count = ops.sum(ops.cast(mask, x.dtype), axis=axes)
        pool = ops.sum(shown, axis=axes) / ops.maximum(count, 1.0)
    elif kind == "lp":
        # the root has no gradient at zero
        square = ops.sum(ops.square(shown), axis=axes)
        pool = ops.sqrt(ops.maximum(square, 1e-24))
    elif kind == "max":
        pool = ops.max(hidden, axis=axes)
    else:
        pool = ops.logsumexp(hidden, axis=axes)
    if mask is not None:
        pool = _where(ops.any(mask, axis=axes), pool)
    return at_least_float32(pool)


def _zero_padding(x, padding_mask, data_format):
    """Replaces what is masked, even NaN, by zeros."""
    if padding_mask is None:
        return x
    return _where(_spread(padding_mask, data_format), x)


def _where(mask, x):
    return ops.where(ops.cast(mask, "bool"), x, ops.zeros_like(x))


def _spread(x, data_format):
    """Inserts the channel axis into `(B, *space)`."""
    if x is None:
        return None
    return ops.expand_dims(x, axis=_channel_axis(data_format))


def _channel_axis(data_format):
    return 1 if data_format == "channels_first" else -1


def _space_axes(x, data_format):
    """Axes of `x` that are neither the batch nor the channels."""
    rank = len(x.shape)
    first = 2 if data_format == "channels_first" else 1
    return tuple(range(first, first + rank - 2))
