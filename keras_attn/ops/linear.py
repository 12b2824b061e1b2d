"""Linear attention (https://arxiv.org/abs/2006.16236)."""

import math

from keras import ops

from keras_attn.ops.masks import at_least_float32
from keras_attn.ops.masks import check_equal_lengths
from keras_attn.ops.padding import pad_axis
from keras_attn.ops.parts import split_positions

# Pairs of positions are scored within a chunk of this size, and summed up
# beyond it. 64 and 128 are equally fast, and faster than 32 or 256.
CHUNK_SIZE = 64


def _elu_feature_map(x):
    # `elu(x) + 1`, without losing what is left of it far below zero
    positive = ops.relu(x)
    return positive + ops.exp(x - positive)


def _squared_relu_feature_map(x):
    return ops.square(ops.relu(x))


FEATURE_MAPS = {
    "elu": _elu_feature_map,
    "relu": ops.relu,
    "squared_relu": _squared_relu_feature_map,
}


def positive_random_features(x, directions):
    """Positive random features, whose products estimate the softmax kernel.

    For directions drawn from a standard normal distribution, the expectation
    of `phi(q) . phi(k)` is `exp(q . k / sqrt(H))`, the weight of softmax
    attention before it is normalised. These are the features FAVOR+ of
    [Performer](https://arxiv.org/abs/2009.14794) (Choromanski et al., 2020,
    lemma 1), in the form with two features for each direction.

    Args:
        x: Tensor of shape `(..., H)`, queries or keys.
        directions: Tensor of shape `(H, D)`. Directions that are orthogonal to
            each other estimate better than independent ones.

    Returns:
        Tensor of shape `(..., 2 * D)`, of positive numbers.
    """
    size, count = directions.shape
    x = x / math.sqrt(math.sqrt(size))
    offset = ops.sum(ops.square(x), axis=-1, keepdims=True) / 2
    offset = offset + math.log(2 * count) / 2
    x = ops.matmul(x, ops.cast(directions, x.dtype))
    return ops.exp(ops.concatenate([x - offset, -x - offset], axis=-1))


def linear_attention(
    query,
    key,
    value,
    feature_map="elu",
    epsilon=1e-6,
    padding_mask=None,
    use_causal_mask=False,
    dropout=None,
    return_attention_scores=False,
    state=None,
):
    """Attention whose weights are products of features, in linear time.

    A key weighs `phi(q) . phi(k)`, divided by the sum of that over all keys
    which the query sees. Without a softmax, keys and values can be summed up
    before any query is looked at:

        output[t] = phi(q[t]) @ sum_s(phi(k[s]) v[s]^T)
                    / (phi(q[t]) . sum_s(phi(k[s])) + epsilon)

    Time and memory grow as `T + S`. The causal form sums up chunks of 64
    positions, takes a cumulative sum over the chunks, and scores pairs of
    positions only within a chunk. Features and sums are float32 or better,
    whatever the dtype of the inputs.

    Args:
        query: Tensor of shape `(B, T, N, H)`.
        key: Tensor of shape `(B, S, N, H)`.
        value: Tensor of shape `(B, S, N, V)`.
        feature_map: `"elu"` for `elu(x) + 1`, `"relu"`, `"squared_relu"`, or
            a callable `phi` that takes queries or keys in float32 and returns
            tensors of non-negative numbers, of shape `(B, T, N, D)`.
        epsilon: Number added to the normaliser.
        padding_mask: Boolean tensor of shape `(B, S)`, `True` for the keys
            that may be attended.
        use_causal_mask: Whether to hide the keys after a query's position,
            which needs `T == S`.
        dropout: Callable applied to the attended heads, since the weights are
            never computed.
        return_attention_scores: Whether to return the weights as well, at a
            cost in time and memory of `T * S`.
        state: Dictionary of the sums over all earlier positions, from which to
            go on causally: `"key_value_sum"` of shape `(B, N, D, V)` and
            `"key_sum"` of shape `(B, N, D)`. With it, the weights are those of
            the new keys; what remains to 1 lies on the earlier ones.

    Returns:
        Tensor of shape `(B, T, N, V)`. A query that sees no key gets zeros.
        With `return_attention_scores`, also the weights `(B, N, T, S)`. With
        `state`, also the new state.
    """
    is_causal = use_causal_mask or state is not None
    if is_causal:
        check_equal_lengths("`use_causal_mask`", query, key)
    phi = FEATURE_MAPS.get(feature_map, feature_map)
    past = total = _join(state)
    queries = split_positions(query, multiple=CHUNK_SIZE)
    queries = (_query_features(*part, phi) for part in queries)
    keys = split_positions(key, value, padding_mask, multiple=CHUNK_SIZE)
    keys = (_key_features(*part, phi) for part in keys)
    parts = []
    if is_causal:
        for query_part, key_part in zip(queries, keys, strict=True):
            heads, total = _causal(query_part, *key_part, total)
            parts.append(_normalize(heads, epsilon, query.dtype))
    else:
        total = sum(_outer_sum(*part) for part in keys)
        for part in queries:
            heads = ops.matmul(part, total)
            parts.append(_normalize(heads, epsilon, query.dtype))
    heads = ops.concatenate(parts, axis=1) if len(parts) > 1 else parts[0]
    results = [heads if dropout is None else dropout(heads)]
    if return_attention_scores:
        features = _query_features(query, phi)
        key, _ = _key_features(key, value, padding_mask, phi)
        scores = _scores(features, key, past, epsilon, is_causal)
        results.append(ops.cast(scores, query.dtype))
    if state is not None:
        results.append(_split(total))
    return tuple(results) if len(results) > 1 else results[0]


def _query_features(query, feature_map):
    """Features `(B, N, T, D)` of queries `(B, T, N, H)`."""
    return ops.transpose(feature_map(at_least_float32(query)), (0, 2, 1, 3))


def _key_features(key, value, padding_mask, feature_map):
    """Features `(B, N, S, D)` of keys, and values `(B, N, S, V + 1)`."""
    key = feature_map(at_least_float32(key))
    if padding_mask is not None:
        # not of the key, for the features of a zero are not zero
        key = key * ops.cast(padding_mask, key.dtype)[:, :, None, None]
    # a column of ones sums up the normaliser along with the values
    value = at_least_float32(value)
    value = ops.concatenate([value, ops.ones_like(value[..., :1])], axis=-1)
    return ops.transpose(key, (0, 2, 1, 3)), ops.transpose(value, (0, 2, 1, 3))


def _normalize(heads, epsilon, dtype):
    """Divides `(B, N, T, V + 1)` by its last column: `(B, T, N, V)`."""
    heads = heads[..., :-1] / (heads[..., -1:] + epsilon)
    return ops.cast(ops.transpose(heads, (0, 2, 1, 3)), dtype)


def _scores(query, key, past, epsilon, is_causal):
    """Weights `(B, N, T, S)` of features, beside what `past` sums up."""
    scores = ops.matmul(query, ops.swapaxes(key, -1, -2))
    scores = ops.tril(scores) if is_causal else scores
    normalizer = ops.sum(scores, axis=-1, keepdims=True) + epsilon
    if past is not None:
        normalizer = normalizer + ops.matmul(query, past[..., -1:])
    return scores / normalizer


def _causal(query, key, value, past=None):
    """Sums up, for each query, the values of the keys up to its position.

    Args:
        query: Features of shape `(B, N, T, D)`.
        key: Features of shape `(B, N, T, D)`.
        value: Tensor of shape `(B, N, T, V)`.
        past: Sum of the outer products of all earlier keys and values, of
            shape `(B, N, D, V)`, or `None`.

    Returns:
        Tuple of the weighted sums, of shape `(B, N, T, V)`, and of `past` with
        the outer products of all keys and values added to it.
    """
    length = query.shape[2]
    is_short = isinstance(length, int) and length < CHUNK_SIZE
    size = length if is_short else CHUNK_SIZE
    length = ops.shape(query)[2]
    query, key, value = (
        _to_chunks(x, size) for x in (query, key, value)
    )  # (B, N, C, W, ...)

    sums = _outer_sum(key, value)  # (B, N, C, D, V)
    past = ops.zeros_like(sums[:, :, 0]) if past is None else past
    # to subtract a chunk from the sum up to it would not leave an exact zero
    sums = ops.concatenate([past[:, :, None], sums], axis=2)
    sums = ops.cumsum(sums, axis=2)

    scores = ops.tril(ops.matmul(query, ops.swapaxes(key, -1, -2)))
    heads = ops.matmul(scores, value) + ops.matmul(query, sums[:, :, :-1])
    return _from_chunks(heads)[:, :, :length], sums[:, :, -1]


def _outer_sum(key, value):
    """Sums `(..., S, D)` times `(..., S, V)` up to `(..., D, V)`."""
    return ops.matmul(ops.swapaxes(key, -1, -2), value)


def _join(state):
    """Joins the sums of a state into one of shape `(B, N, D, V + 1)`."""
    if state is None:
        return None
    sums = (state["key_value_sum"], state["key_sum"][..., None])
    return ops.concatenate(sums, axis=-1)


def _split(total):
    """Splits `(B, N, D, V + 1)` into the sums of a state."""
    return {"key_value_sum": total[..., :-1], "key_sum": total[..., -1]}


def _to_chunks(x, size):
    """Cuts `(B, N, T, D)` into `(B, N, C, W, D)`, padded with zeros."""
    batch, heads, length, features = ops.shape(x)
    # of all ways to write this, one that JAX follows if `length` is unknown
    chunks = (length + size - 1) // size
    padding = chunks * size - length
    x = pad_axis(x, 0, padding, axis=2)
    return ops.reshape(x, (batch, heads, chunks, size, features))


def _from_chunks(x):
    """Joins `(B, N, C, W, D)` into `(B, N, C * W, D)`."""
    batch, heads, chunks, size, features = ops.shape(x)
    return ops.reshape(x, (batch, heads, chunks * size, features))
