"""Linformer attention (https://arxiv.org/abs/2006.04768)."""

from keras import ops

from keras_attn.ops.dot_product import dot_product_attention
from keras_attn.ops.padding import pad_axis


def linformer_attention(
    query,
    key,
    value,
    key_projection,
    value_projection=None,
    padding_mask=None,
    dropout=None,
    return_attention_scores=False,
):
    """Softmax attention over a fixed number of mixtures of the keys.

    The `S` keys and values are multiplied along the length with matrices of
    `S` rows and `K` columns (equation 7 of the paper), so that a query scores
    `K` slots instead of `S` keys. Time and memory grow as `(T + S) * K`. There
    is no causal form, since every slot mixes all positions.

    Args:
        query: Tensor of shape `(B, T, N, H)`.
        key: Tensor of shape `(B, S, N, H)`.
        value: Tensor of shape `(B, S, N, V)`.
        key_projection: Tensor of shape `(M, K)`, or `(N, M, K)` with a matrix
            for each head. The first `S` rows are used; `M` must not be less.
        value_projection: The same for the values. Defaults to
            `key_projection`.
        padding_mask: Boolean tensor of shape `(B, S)`, `True` for the keys
            that may be attended. The others count as zeros, so that padding
            at the end does not change anything.
        dropout: Callable applied to the attention weights.
        return_attention_scores: Whether to return the weights as well.

    Returns:
        Tensor of shape `(B, T, N, V)`. A query that sees no key gets zeros.
        With `return_attention_scores`, also the weights `(B, N, T, K)` before
        dropout.
    """
    if value_projection is None:
        value_projection = key_projection
    key, value = _zero_padding(padding_mask, key, value)
    key = _project_length(key, key_projection, "key_projection")
    value = _project_length(value, value_projection, "value_projection")
    if padding_mask is not None:
        # a slot holds something unless all keys are masked
        padding_mask = ops.any(padding_mask, axis=1, keepdims=True)
        padding_mask = ops.repeat(padding_mask, key.shape[1], axis=1)
    return dot_product_attention(
        query,
        key,
        value,
        padding_mask=padding_mask,
        dropout=dropout,
        return_attention_scores=return_attention_scores,
    )


def linformer_window_attention(
    query,
    key,
    value,
    projected_length,
    window_size,
    key_kernel=None,
    value_kernel=None,
    padding_mask=None,
    dropout=None,
    return_attention_scores=False,
):
    """Softmax attention over windows of keys, each pooled into one slot.

    These are the general projections of Linformer (section 4): a mean, or a
    convolution whose stride is the size of its window. Slot `i` pools the
    positions from `i * window_size` to below `(i + 1) * window_size`; a slot
    whose window lies beyond the sequence, or is padding only, is not attended.

    Args:
        query: Tensor of shape `(B, T, N, H)`.
        key: Tensor of shape `(B, S, N, H)`.
        value: Tensor of shape `(B, S, N, V)`.
        projected_length: Number of slots `K`.
        window_size: Positions in a window, `W`. `K * W` must not be less than
            `S`.
        key_kernel: Tensor of shape `(W, H, H)`, or `(N, W, H, H)` with a
            kernel for each head, of the convolution of the keys. `None` stands
            for the mean over the keys of a window that are not padding.
        value_kernel: Tensor of shape `(W, V, V)` or `(N, W, V, V)`, the same
            for the values.
        padding_mask: Boolean tensor of shape `(B, S)`, `True` for the keys
            that may be attended. The others count as zeros.
        dropout: Callable applied to the attention weights.
        return_attention_scores: Whether to return the weights as well.

    Returns:
        Tensor of shape `(B, T, N, V)`. A query that sees no key gets zeros.
        With `return_attention_scores`, also the weights `(B, N, T, K)` before
        dropout.
    """
    _check_length(
        "`projected_length * window_size`", key, projected_length * window_size
    )
    key, value = _zero_padding(padding_mask, key, value)
    if padding_mask is None:
        padding_mask = ops.ones(ops.shape(key)[:2], dtype="bool")
    key, value, padding_mask = (
        _to_windows(x, projected_length, window_size)
        for x in (key, value, padding_mask)
    )  # (B, K, W, ...)
    key = _pool(key, key_kernel, padding_mask)
    value = _pool(value, value_kernel, padding_mask)
    return dot_product_attention(
        query,
        key,
        value,
        padding_mask=ops.any(padding_mask, axis=2),
        dropout=dropout,
        return_attention_scores=return_attention_scores,
    )


def _zero_padding(padding_mask, key, value):
    """Puts zeros where the mask is `False`."""
    if padding_mask is None:
        return key, value
    mask = ops.cast(padding_mask, key.dtype)[:, :, None, None]
    return key * mask, value * mask


def _project_length(x, projection, name):
    """Multiplies `(B, S, N, H)` along the length into `(B, K, N, H)`."""
    _check_length(f"`{name}`", x, projection.shape[-2])
    projection = ops.cast(projection, x.dtype)
    length = ops.shape(x)[1]
    if isinstance(length, int):
        projection = projection[..., :length, :]
    else:
        # JAX would call the length of a slice the smaller of two unknowns
        places = ops.arange(length, dtype="int32")
        projection = ops.take(projection, places, axis=-2)
    if len(projection.shape) == 2:
        return ops.einsum("bsnh,sk->bknh", x, projection)
    return ops.einsum("bsnh,nsk->bknh", x, projection)


def _check_length(name, x, max_length):
    length = x.shape[1]
    if isinstance(length, int) and length > max_length:
        raise ValueError(
            f"{name} is made for {max_length} positions at most. "
            f"Received: {length} positions"
        )


def _to_windows(x, projected_length, window_size):
    """Cuts `(B, S, ...)` into `(B, K, W, ...)`, padded with zeros."""
    length = projected_length * window_size
    # padded by more than is needed, an amount known to every compiler
    x = pad_axis(x, 0, length, axis=1)[:, :length]
    batch, _, *sizes = ops.shape(x)
    return ops.reshape(x, (batch, projected_length, window_size, *sizes))


def _pool(x, kernel, mask):
    """Turns windows `(B, K, W, N, H)` into slots `(B, K, N, H)`."""
    if kernel is None:
        count = ops.sum(ops.cast(mask, x.dtype), axis=2)[:, :, None, None]
        return ops.sum(x, axis=2) / ops.maximum(count, 1)
    kernel = ops.cast(kernel, x.dtype)
    if len(kernel.shape) == 3:
        return ops.einsum("bkwnh,whv->bknv", x, kernel)
    return ops.einsum("bkwnh,nwhv->bknv", x, kernel)
