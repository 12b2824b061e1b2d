"""Boolean masks over attention scores, `True` where a key may be attended."""

import functools

import keras
from keras import ops


def dense_mask(
    query, key, padding_mask=None, attention_mask=None, use_causal_mask=False
):
    """Merges the masks of a mechanism that scores every query and key.

    Args:
        query: Tensor of shape `(B, T, ...)`.
        key: Tensor of shape `(B, S, ...)`.
        padding_mask: Boolean tensor of shape `(B, S)`, or `None`.
        attention_mask: Boolean tensor of shape `(B, T, S)` or
            `(B, N, T, S)`, or `None`.
        use_causal_mask: Whether to hide the keys after a query's position.

    Returns:
        Boolean tensor that broadcasts to `(B, N, T, S)`, or `None` if there is
        nothing to mask.
    """
    masks = []
    if padding_mask is not None:
        masks.append(ops.cast(padding_mask, "bool")[:, None, None, :])
    if attention_mask is not None:
        mask = ops.cast(attention_mask, "bool")
        masks.append(mask if len(mask.shape) == 4 else mask[:, None])
    if use_causal_mask:
        check_equal_lengths("`use_causal_mask`", query, key)
        rows = ops.arange(ops.shape(query)[1], dtype="int32")
        columns = ops.arange(ops.shape(key)[1], dtype="int32")
        masks.append((rows[:, None] >= columns)[None, None])
    return functools.reduce(ops.logical_and, masks) if masks else None


def masked_softmax(scores, mask=None):
    """Softmax over the last axis, in which masked entries get weight 0.

    Args:
        scores: Attention scores of shape `(..., S)`. Whatever their dtype, the
            softmax is computed in float32 or better.
        mask: Boolean tensor that broadcasts to `scores`, or `None`.

    Returns:
        Weights of the shape and dtype of `scores`. They sum to 1 over the last
        axis, or are all 0 where the mask leaves no key at all.
    """
    dtype = keras.backend.standardize_dtype(scores.dtype)
    scores = at_least_float32(scores)
    if mask is None:
        return ops.cast(_softmax(scores), dtype)
    # a finite constant, since an empty row of -inf would pass through NaN
    lowest = ops.cast(-1e9, scores.dtype)
    weights = _softmax(ops.where(mask, scores, lowest))
    weights = ops.where(mask, weights, ops.zeros_like(weights))
    return ops.cast(weights, dtype)


def _softmax(scores):
    if scores.shape[-1] == 1:
        return ops.exp(scores - scores)  # Keras warns of an axis of size 1
    return ops.softmax(scores, axis=-1)


def at_least_float32(x):
    """Casts half precision to float32, in which scores and sums are kept."""
    dtype = keras.backend.standardize_dtype(x.dtype)
    return ops.cast(x, "float32") if dtype in ("float16", "bfloat16") else x


def check_equal_lengths(reason, query, key):
    """Raises `ValueError` if `query` and `key` are known to differ in length.

    Args:
        reason: What needs equal lengths, to begin the message with.
        query: Tensor of shape `(B, T, ...)`.
        key: Tensor of shape `(B, S, ...)`.
    """
    lengths = (query.shape[1], key.shape[1])
    known = all(isinstance(length, int) for length in lengths)
    if known and lengths[0] != lengths[1]:
        raise ValueError(
            f"{reason} needs as many keys as queries. Received: "
            f"{lengths[0]} queries and {lengths[1]} keys"
        )
