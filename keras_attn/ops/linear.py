"""Linear attention (https://arxiv.org/abs/2006.16236)."""

import functools
import math

from keras import ops

from keras_attn.ops.masks import at_least_float32
from keras_attn.ops.masks import check_equal_lengths
from keras_attn.ops.padding import pad_axis

# Pairs of positions are scored within a chunk of this size, and summed up
# beyond it. 64 and 128 are equally fast, and faster than 32 or 256.
CHUNK_SIZE = 64
# Causal sequences of so many positions are read in so many parts, one after
# the other. An array of 32 MiB or more is fresh memory from the operating
# system each time, which costs more than what is computed in it: at 32,768
# positions of 8 heads of 64, forward and backward in parts take 0.4 of the time
# on PyTorch, 0.7 on JAX and 0.9 on TensorFlow.
MANY_POSITIONS = 8192
PARTS = 8


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
    attend = functools.partial(
        _attend,
        feature_map=FEATURE_MAPS.get(feature_map, feature_map),
        epsilon=epsilon,
        is_causal=is_causal,
        return_attention_scores=return_attention_scores,
    )
    past = _join(state)
    length = query.shape[1]
    is_long = isinstance(length, int) and length >= MANY_POSITIONS
    if is_causal and is_long and not return_attention_scores:
        heads, total = _attend_in_parts(
            attend, past, query, key, value, padding_mask
        )
    else:
        heads, total, *scores = attend(query, key, value, padding_mask, past)
    results = [heads if dropout is None else dropout(heads)]
    if return_attention_scores:
        results += scores
    if state is not None:
        results.append(_split(total))
    return tuple(results) if len(results) > 1 else results[0]


def _attend_in_parts(attend, past, *tensors):
    """Attends causally, part after part of the tensors `(B, T, ...)`."""
    length = tensors[0].shape[1]
    size = length // PARTS // CHUNK_SIZE * CHUNK_SIZE
    whole = PARTS * size

    def cut(x):
        if x is None:
            return [None] * (PARTS + 1)
        # one split, since on PyTorch the gradient of each slice is as long as x
        parts = ops.split(x[:, :whole], PARTS, axis=1)
        return [*parts, x[:, whole:]]

    heads = []
    for part in zip(*(cut(x) for x in tensors), strict=True):
        if part[0].shape[1]:
            attended, past = attend(*part, past)
            heads.append(attended)
    return ops.concatenate(heads, axis=1), past


def _attend(
    query,
    key,
    value,
    padding_mask,
    past,
    feature_map,
    epsilon,
    is_causal,
    return_attention_scores,
):
    """Attends to the keys, and if causal to those summed up in `past`.

    Returns:
        Tuple of the heads `(B, T, N, V)` and the sum of the outer products of
        keys and values `(B, N, D, V + 1)`, `past` included. If asked for, of
        the weights `(B, N, T, S)`, too.
    """
    dtype = query.dtype
    query = feature_map(at_least_float32(query))
    key = feature_map(at_least_float32(key))
    if padding_mask is not None:
        # not of the key, for the features of a zero are not zero
        key = key * ops.cast(padding_mask, key.dtype)[:, :, None, None]
    # a column of ones sums up the normaliser along with the values
    value = at_least_float32(value)
    value = ops.concatenate([value, ops.ones_like(value[..., :1])], axis=-1)
    query, key, value = (
        ops.transpose(x, (0, 2, 1, 3)) for x in (query, key, value)
    )  # (B, N, T, ...)
    if is_causal:
        heads, total = _causal(query, key, value, past)
    else:
        total = _outer_sum(key, value)
        heads = ops.matmul(query, total)
    normalizer = heads[..., -1:] + epsilon
    heads = ops.transpose(heads[..., :-1] / normalizer, (0, 2, 1, 3))
    results = [ops.cast(heads, dtype), total]
    if return_attention_scores:
        scores = ops.matmul(query, ops.swapaxes(key, -1, -2))
        scores = ops.tril(scores) if is_causal else scores
        results.append(ops.cast(scores / normalizer, dtype))
    return tuple(results)


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
