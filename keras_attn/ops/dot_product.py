"""Scaled dot-product attention (https://arxiv.org/abs/1706.03762)."""

import math

import keras
from keras import ops

from keras_attn.ops.masks import at_least_float32
from keras_attn.ops.masks import check_equal_lengths
from keras_attn.ops.masks import dense_mask
from keras_attn.ops.masks import masked_softmax


def dot_product_attention(
    query,
    key,
    value,
    padding_mask=None,
    attention_mask=None,
    use_causal_mask=False,
    dropout=None,
    return_attention_scores=False,
):
    """Softmax attention over every key.

    Runs on the fused kernel of the backend, `keras.ops.dot_product_attention`,
    where that gives the same numbers: unless the weights are asked for or
    dropped out, values are of another size than keys, or dtype is float64.

    Args:
        query: Tensor of shape `(B, T, N, H)`.
        key: Tensor of shape `(B, S, N, H)`.
        value: Tensor of shape `(B, S, N, V)`.
        padding_mask: Boolean tensor of shape `(B, S)`, `True` for the keys
            that may be attended.
        attention_mask: Boolean tensor of shape `(B, T, S)` or
            `(B, N, T, S)`, `True` where a query may attend a key.
        use_causal_mask: Whether to hide the keys after a query's position,
            which needs `T == S`.
        dropout: Callable applied to the attention weights.
        return_attention_scores: Whether to return the weights as well.

    Returns:
        Tensor of shape `(B, T, N, V)`. A query that sees no key gets zeros.
        With `return_attention_scores`, also the weights `(B, N, T, S)` before
        dropout.
    """
    masks = (padding_mask, attention_mask, use_causal_mask)
    is_fusible = (
        dropout is None
        and not return_attention_scores
        # JAX wants values of the size of keys, PyTorch halves float64
        and query.shape[-1] == value.shape[-1]
        and keras.backend.standardize_dtype(query.dtype) != "float64"
    )
    if is_fusible:
        return _fused_attention(query, key, value, *masks)
    scores = ops.einsum(
        "btnh,bsnh->bnts",
        at_least_float32(query) / math.sqrt(query.shape[-1]),
        at_least_float32(key),
    )
    mask = dense_mask(query, key, *masks)
    weights = ops.cast(masked_softmax(scores, mask), value.dtype)
    dropped = weights if dropout is None else dropout(weights)
    heads = ops.einsum("bnts,bsnv->btnv", dropped, value)
    return (heads, weights) if return_attention_scores else heads


def _fused_attention(
    query, key, value, padding_mask, attention_mask, use_causal_mask
):
    """Runs the kernel of the backend, which does not know empty rows."""
    dtype = keras.backend.standardize_dtype(value.dtype)
    if dtype == "float16":
        # TensorFlow's scores would overflow, JAX does not compile it on CPU
        query, key, value = (
            ops.cast(x, "float32") for x in (query, key, value)
        )
    is_causal, mask = False, None
    if padding_mask is None and attention_mask is None and use_causal_mask:
        check_equal_lengths("`use_causal_mask`", query, key)
        is_causal = True  # spares the kernel a mask of shape (T, S)
    else:
        mask = dense_mask(
            query, key, padding_mask, attention_mask, use_causal_mask
        )
    heads = ops.dot_product_attention(
        query, key, value, mask=mask, is_causal=is_causal
    )
    heads = ops.cast(heads, dtype)
    if mask is None:
        return heads
    visible = ops.moveaxis(ops.any(mask, axis=-1), 1, 2)[..., None]
    return ops.where(visible, heads, ops.zeros_like(heads))
