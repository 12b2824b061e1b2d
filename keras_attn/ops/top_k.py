"""Explicit sparse attention (https://arxiv.org/abs/1912.11637)."""

import fractions
import functools
import math

from keras import ops

from keras_attn.ops.dot_product import dot_product_attention
from keras_attn.ops.masks import at_least_float32
from keras_attn.ops.masks import dense_mask
from keras_attn.ops.masks import masked_softmax
from keras_attn.ops.padding import pad_axis
from keras_attn.ops.query_blocks import attend_in_blocks
from keras_attn.ops.query_blocks import is_long


def top_k_attention(
    query,
    key,
    value,
    top_k,
    padding_mask=None,
    attention_mask=None,
    use_causal_mask=False,
    dropout=None,
    return_attention_scores=False,
):
    """Softmax attention over the highest scores of each query.

    Masks come first: the choice is among the keys that a query may attend. No
    gradient flows through the choice.

    Args:
        query: Tensor of shape `(B, T, N, H)`.
        key: Tensor of shape `(B, S, N, H)`.
        value: Tensor of shape `(B, S, N, V)`.
        top_k: Number of keys that each query attends to in each head. A
            positive integer, or a float in `(0, 1]`, the share of the keys
            that the query may attend, rounded up. Keys that tie with the last
            of these are attended, too.
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
    length = ops.shape(key)[1]
    is_count = not isinstance(top_k, float)
    if isinstance(length, int) and is_count and top_k >= length:
        return dot_product_attention(
            query,
            key,
            value,
            *masks,
            dropout=dropout,
            return_attention_scores=return_attention_scores,
        )
    weigh = functools.partial(_weigh, top_k=top_k)
    if dropout is None and not return_attention_scores and is_long(query, key):
        return attend_in_blocks(weigh, query, key, value, *masks)
    scores = ops.einsum(
        "btnh,bsnh->bnts",
        at_least_float32(query) / math.sqrt(query.shape[-1]),
        at_least_float32(key),
    )
    weights = weigh(scores, dense_mask(query, key, *masks))
    weights = ops.cast(weights, value.dtype)
    dropped = weights if dropout is None else dropout(weights)
    heads = ops.einsum("bnts,bsnv->btnv", dropped, value)
    return (heads, weights) if return_attention_scores else heads


def _weigh(scores, mask, top_k):
    """Softmax over the highest of the scores `(B, N, T, S)` of each query."""
    candidates = ops.stop_gradient(scores)
    if mask is not None:
        # nothing is computed with -inf, it only ranks below all scores
        lowest = ops.full_like(candidates, float("-inf"))
        candidates = ops.where(mask, candidates, lowest)
    if isinstance(top_k, float):
        threshold = _threshold_of_share(candidates, top_k)
    else:
        threshold = _threshold(candidates, top_k)
    # equation 6, but a score of NaN must not vanish
    chosen = ops.logical_not(candidates < threshold)
    if mask is not None:
        chosen = ops.logical_and(chosen, mask)
    return masked_softmax(scores, chosen)


def _threshold(candidates, top_k):
    """The `top_k`-th highest score of each query, -inf if there are fewer."""
    length = ops.shape(candidates)[-1]
    missing = max(top_k - length, 0) if isinstance(length, int) else top_k
    if missing:
        # keeps `top_k` a constant, whatever the length turns out to be
        candidates = pad_axis(candidates, 0, missing, axis=3, value=-math.inf)
    highest, _ = ops.top_k(candidates, top_k, sorted=False)
    return ops.min(highest, axis=-1, keepdims=True)


def _threshold_of_share(candidates, share):
    """The lowest score within the highest share of those above -inf."""
    # in integers, for the float 0.1 of 30 would round up to 4
    share = fractions.Fraction(share).limit_denominator(10_000)

    def part(count):
        return -(-count * share.numerator // share.denominator)

    highest, _ = ops.top_k(candidates, part(ops.shape(candidates)[-1]))
    visible = ops.cast(candidates > float("-inf"), "int32")
    count = part(ops.sum(visible, axis=-1, keepdims=True))
    return ops.take_along_axis(highest, ops.maximum(count - 1, 0), axis=-1)
