"""Attention under synthesized scores (https://arxiv.org/abs/2005.00743).

Scores that do not depend on the input have the shape `(1, N, T, S)`, the same
for every sequence of a batch; all others have the shape `(B, N, T, S)`.
"""

import math

from keras import ops

from keras_attn.ops.masks import at_least_float32
from keras_attn.ops.masks import dense_mask
from keras_attn.ops.masks import masked_softmax


def synthesizer(
    scores,
    value,
    padding_mask=None,
    attention_mask=None,
    use_causal_mask=False,
    dropout=None,
    return_attention_scores=False,
):
    """Softmax attention under given scores, wherever they come from.

    Args:
        scores: Tensor of shape `(B, N, T, S)`, or `(1, N, T, S)` for the same
            scores in every sequence. The functions of this module make them.
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
    mask = dense_mask(
        scores[:, 0], value, padding_mask, attention_mask, use_causal_mask
    )
    weights = ops.cast(
        masked_softmax(at_least_float32(scores), mask), value.dtype
    )
    if dropout is not None or return_attention_scores:
        shape = (ops.shape(value)[0], *ops.shape(weights)[1:])
        weights = ops.broadcast_to(weights, shape)
    dropped = weights if dropout is None else dropout(weights)
    if dropped.shape[0] == 1:
        heads = ops.einsum("nts,bsnv->btnv", dropped[0], value)
    else:
        heads = ops.einsum("bnts,bsnv->btnv", dropped, value)
    return (heads, weights) if return_attention_scores else heads


def random_scores(kernel, query_length, key_length, start=None):
    """Scores that are weights themselves, the Random Synthesizer.

    Args:
        kernel: Tensor of shape `(N, L, L)`, the score of each key for each
            query position, in sequences of up to `L` positions.
        query_length: Number `T` of query positions.
        key_length: Number `S` of key positions.
        start: Position of the first query, a scalar integer tensor. Defaults
            to 0.

    Returns:
        Tensor of shape `(1, N, T, S)`.
    """
    columns = _positions(kernel, key_length, axis=2)
    return _positions(columns, query_length, axis=1, start=start)[None]


def factorized_random_scores(
    query_factors, key_factors, query_length, key_length, start=None
):
    """Random scores of low rank, the Factorized Random Synthesizer.

    Args:
        query_factors: Tensor of shape `(N, L, R)`, the left factor of the
            matrix of scores, of rank `R`.
        key_factors: Tensor of shape `(N, L, R)`, the right factor.
        query_length: Number `T` of query positions.
        key_length: Number `S` of key positions.
        start: Position of the first query, a scalar integer tensor. Defaults
            to 0.

    Returns:
        Tensor of shape `(1, N, T, S)`.
    """
    rows = _positions(query_factors, query_length, axis=1, start=start)
    columns = _positions(key_factors, key_length, axis=1)
    return ops.einsum("ntr,nsr->nts", rows, columns)[None]


def dense_scores(hidden, kernel, key_length, bias=None):
    """Scores that each query predicts by itself, the Dense Synthesizer.

    Args:
        hidden: Tensor of shape `(B, T, N, H)`, features of the query
            positions, after their activation.
        kernel: Tensor of shape `(N, H, L)`, from features to the scores of `L`
            key positions.
        key_length: Number `S` of key positions.
        bias: Tensor of shape `(N, L)`, or `None`.

    Returns:
        Tensor of shape `(B, N, T, S)`.
    """
    scores = ops.einsum(
        "btnh,nhs->bnts",
        at_least_float32(hidden),
        _positions(kernel, key_length, axis=2),
    )
    if bias is not None:
        scores = scores + _positions(bias, key_length, axis=1)[:, None]
    return scores


def factorized_dense_scores(left, right, key_length, tiling="outer"):
    """Products of two short predictions, the Factorized Dense Synthesizer.

    Args:
        left: Tensor of shape `(B, T, N, I)`, predicted by the queries.
        right: Tensor of shape `(B, T, N, J)`, predicted by the queries.
        key_length: Number `S <= I * J` of key positions.
        tiling: `"outer"` scores key `s` with `left[s // J] * right[s % J]`,
            the outer product of the two. `"tile"` repeats both of them end to
            end, `left[s % I] * right[s % J]`, which has `I * J` different
            products only if `I` and `J` have no common divisor.

    Returns:
        Tensor of shape `(B, N, T, S)`.
    """
    left = ops.moveaxis(at_least_float32(left), 1, 2)  # (B, N, T, I)
    right = ops.moveaxis(at_least_float32(right), 1, 2)  # (B, N, T, J)
    size, other = left.shape[-1], right.shape[-1]
    if tiling == "outer":
        scores = left[..., :, None] * right[..., None, :]
        scores = ops.reshape(scores, (*ops.shape(left)[:3], size * other))
    else:
        left = ops.tile(left, (1, 1, 1, other))
        right = ops.tile(right, (1, 1, 1, size))
        scores = left * right
    return _positions(scores, key_length, axis=3)


def dot_product_scores(query, key):
    """The scores of usual attention, to mix with synthesized ones.

    Args:
        query: Tensor of shape `(B, T, N, H)`.
        key: Tensor of shape `(B, S, N, H)`.

    Returns:
        Tensor of shape `(B, N, T, S)`, divided by the square root of `H`.
    """
    query = at_least_float32(query) / math.sqrt(query.shape[-1])
    return ops.einsum("btnh,bsnh->bnts", query, at_least_float32(key))


def mix_scores(scores, logits):
    """Weighted mean of several scores, a mixture of Synthesizers.

    Args:
        scores: List of tensors of shape `(B, N, T, S)` or `(1, N, T, S)`.
        logits: Tensor of shape `(len(scores),)`, whose softmax is the weight
            of each.

    Returns:
        Tensor of shape `(B, N, T, S)` or `(1, N, T, S)`.
    """
    shares = ops.softmax(at_least_float32(ops.convert_to_tensor(logits)))
    return sum(shares[i] * score for i, score in enumerate(scores))


def _positions(x, length, axis, start=None):
    """Takes `length` positions of an axis, the first ones by default."""
    x = at_least_float32(ops.convert_to_tensor(x))
    if start is not None:
        positions = start + ops.arange(length, dtype="int32")
        return ops.take(x, positions, axis=axis)
    if isinstance(length, int) and length > x.shape[axis]:
        raise ValueError(
            f"Synthesized scores reach {x.shape[axis]} positions. "
            f"Received: a sequence of {length} positions"
        )
    index = (slice(None),) * axis + (slice(length),)
    shape = (*ops.shape(x)[:axis], length, *ops.shape(x)[axis + 1 :])
    # the reshape fails where a length unknown until now is too long
    return ops.reshape(x[index], shape)
