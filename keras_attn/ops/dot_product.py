"""Scaled dot-product attention (https://arxiv.org/abs/1706.03762)."""

import math

import keras
from keras import ops

from keras_attn.ops.masks import at_least_float32
from keras_attn.ops.masks import check_equal_lengths
from keras_attn.ops.masks import dense_mask
from keras_attn.ops.masks import masked_softmax
from keras_attn.ops.query_blocks import attend_in_blocks
from keras_attn.ops.query_blocks import is_long


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

    Unless the weights are asked for or dropped out, long sequences take
    memory that grows as `T + S`: on PyTorch by its fused kernel, elsewhere
    because blocks of queries take turns. Short ones run on the kernel of the
    backend, `keras.ops.dot_product_attention`, where that gives the same
    numbers.

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
    if dropout is None and not return_attention_scores:
        if _kernel_serves(query, key, value):
            return _fused_attention(query, key, value, *masks)
        if is_long(query, key):
            return attend_in_blocks(masked_softmax, query, key, value, *masks)
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


def _kernel_serves(query, key, value):
    """Whether the kernel of the backend is exact, and lean with memory.

    The kernels of JAX and TensorFlow hold all scores. At 4,096 positions on a
    CPU, blocks of queries take half of the time of JAX' and a twentieth of its
    memory, but several times the time of PyTorch's, which holds none.
    """
    dtype = keras.backend.standardize_dtype(query.dtype)
    if dtype == "float64":
        return False  # PyTorch halves it
    if keras.config.backend() == "torch":
        return True
    if query.shape[-1] != value.shape[-1]:
        return False  # which JAX does not know
    return not is_long(query, key) or _has_flash_attention(dtype)


def _has_flash_attention(dtype):
    """Whether JAX has a kernel for this that holds no scores."""
    is_jax = keras.config.backend() == "jax" and dtype == "bfloat16"
    return is_jax and not keras.distribution.list_devices()[0].startswith("cpu")


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
