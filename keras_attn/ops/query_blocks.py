"""Attention that scores a block of queries at a time."""

import math

import keras
from keras import ops

from keras_attn.ops.masks import at_least_float32
from keras_attn.ops.masks import check_equal_lengths
from keras_attn.ops.masks import dense_mask
from keras_attn.ops.padding import pad_axis

# Queries in a block. 64 to 512 are equally fast; the more, the more memory.
BLOCK_SIZE = 128
# The shortest sequences of queries and of keys that are worth a loop.
LONG_QUERY, LONG_KEY = 1024, 512
# Causal queries take turns in so many parts, which do not score the keys after
# them: of all pairs, five in eight are scored.
CAUSAL_PARTS = 4


def is_long(query, key):
    """Whether the scores of all pairs are, or could be, many.

    Args:
        query: Tensor of shape `(B, T, ...)`.
        key: Tensor of shape `(B, S, ...)`.
    """

    def reaches(length, least):
        return not isinstance(length, int) or length >= least

    query_length, key_length = query.shape[1], key.shape[1]
    return reaches(query_length, LONG_QUERY) and reaches(key_length, LONG_KEY)


def attend_in_blocks(
    weigh,
    query,
    key,
    value,
    padding_mask=None,
    attention_mask=None,
    use_causal_mask=False,
):
    """Scores every pair of positions, but never holds all of the scores.

    Blocks of queries meet all keys one after the other, and once more in the
    backward pass, which keeps no scores either. So memory grows as `T + S`,
    and time as `T * S`.

    Args:
        weigh: Function of scores `(B, N, W, S)` and of a boolean mask that
            broadcasts to them, or `None`, that returns attention weights.
        query: Tensor of shape `(B, T, N, H)`.
        key: Tensor of shape `(B, S, N, H)`.
        value: Tensor of shape `(B, S, N, V)`.
        padding_mask: Boolean tensor of shape `(B, S)`, or `None`.
        attention_mask: Boolean tensor of shape `(B, T, S)` or
            `(B, N, T, S)`, or `None`. Axes of size 1 broadcast.
        use_causal_mask: Whether to hide the keys after a query's position.

    Returns:
        Tensor of shape `(B, T, N, V)`, computed in float32 or better.
    """
    masks = (padding_mask, attention_mask)
    if not use_causal_mask:
        return _attend(weigh, query, key, value, *masks)
    check_equal_lengths("`use_causal_mask`", query, key)
    length = ops.shape(query)[1]
    rows = ops.arange(length, dtype="int32")
    if not isinstance(length, int):
        return _attend(weigh, query, key, value, *masks, rows)
    parts, begin = [], 0
    for part in range(1, CAUSAL_PARTS + 1):
        end = length * part // CAUSAL_PARTS
        tensors = query[:, begin:end], key[:, :end], value[:, :end]
        masks = (
            None if padding_mask is None else padding_mask[:, :end],
            _crop(attention_mask, begin, end),
        )
        parts.append(_attend(weigh, *tensors, *masks, rows[begin:end]))
        begin = end
    return ops.concatenate(parts, axis=1)


def _crop(mask, begin, end):
    """Takes rows, and the keys up to their end, of an attention mask."""
    if mask is None:
        return None
    mask = mask if mask.shape[-1] == 1 else mask[..., :end]
    return mask if mask.shape[-2] == 1 else mask[..., begin:end, :]


def _attend(weigh, query, key, value, padding_mask, attention_mask, rows=None):
    """Lets blocks of queries take turns; `rows` are their positions."""
    dtype, length = value.dtype, ops.shape(query)[1]
    size = BLOCK_SIZE
    if ops.is_tensor(length):  # only known when TensorFlow runs
        size = ops.minimum(size, length)
    query = at_least_float32(query) / math.sqrt(query.shape[-1])
    blocks = {"query": _to_blocks(ops.swapaxes(query, 1, 2), size)}
    shared = {
        "key": ops.transpose(at_least_float32(key), (0, 2, 3, 1)),
        "value": ops.swapaxes(at_least_float32(value), 1, 2),
    }
    # integers, for TensorFlow does not recompute with booleans
    if padding_mask is not None:
        shared["padding_mask"] = ops.cast(padding_mask, "int8")
    if attention_mask is not None:
        mask = ops.cast(attention_mask, "int8")
        mask = mask if len(mask.shape) == 4 else mask[:, None]
        if mask.shape[2] == 1:
            shared["attention_mask"] = mask
        else:
            batch, heads, _, keys = ops.shape(mask)
            mask = ops.broadcast_to(mask, (batch, heads, length, keys))
            blocks["attention_mask"] = _to_blocks(mask, size)
    if rows is not None:
        blocks["rows"] = _to_blocks(rows[None, None, :, None], size)
    names = (*blocks, *shared)

    def attend(*tensors):
        x = dict(zip(names, tensors, strict=True))
        scores = ops.matmul(x["query"], x["key"])  # (B, N, W, S)
        return ops.matmul(weigh(scores, _mask_of_block(x)), x["value"])

    attend = keras.remat(attend)
    heads = ops.map(
        lambda block: attend(*block, *shared.values()), tuple(blocks.values())
    )  # (C, B, N, W, V)
    return ops.cast(_from_blocks(heads)[:, :length], dtype)


def _mask_of_block(x):
    """Merges the masks of a block of queries."""
    masks = [x.get("padding_mask"), x.get("attention_mask")]
    if "rows" in x:
        columns = ops.arange(ops.shape(x["key"])[3], dtype="int32")
        masks[1] = _both(masks[1], x["rows"] >= columns)
    return dense_mask(x["query"], x["key"], *masks)


def _both(mask, other):
    if mask is None:
        return other
    return ops.logical_and(ops.cast(mask, "bool"), other)


def _to_blocks(x, size):
    """Cuts `(B, N, T, H)` into `(C, B, N, W, H)`, padded with zeros."""
    batch, heads, length, features = ops.shape(x)
    count = (length + size - 1) // size
    x = pad_axis(x, 0, count * size - length, axis=2)
    x = ops.reshape(x, (batch, heads, count, size, features))
    return ops.transpose(x, (2, 0, 1, 3, 4))


def _from_blocks(x):
    """Joins `(C, B, N, W, V)` into `(B, C * W, N, V)`."""
    count, batch, heads, size, features = ops.shape(x)
    x = ops.transpose(x, (1, 0, 3, 2, 4))
    return ops.reshape(x, (batch, count * size, heads, features))
