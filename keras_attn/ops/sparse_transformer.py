"""Sparse Transformer attention (https://arxiv.org/abs/1904.10509)."""

import functools
import math

import keras
from keras import ops

from keras_attn.ops.dot_product import dot_product_attention
from keras_attn.ops.masks import at_least_float32
from keras_attn.ops.masks import check_equal_lengths
from keras_attn.ops.masks import masked_softmax
from keras_attn.ops.padding import pad_axis
from keras_attn.ops.parts import attend_by_heads

# So many blocks of queries take so many turns within heads, too: XLA holds the
# scores of many heads at a time, at 65,536 positions gigabytes.
MANY_BLOCKS, TURNS = 192, 16
# Those of fixed attention have more keys: half as many turns pay from here on.
MANY_FIXED_BLOCKS = 160


def strided_sparse_attention(
    query,
    key,
    value,
    stride,
    heads="split",
    padding_mask=None,
    use_causal_mask=False,
    start=None,
    dropout=None,
    return_attention_scores=False,
):
    """Softmax attention to the nearest positions and to every `stride`-th one.

    There are two sets of keys (section 4.3 of the paper). The *local* set of
    query `t` holds the keys `s` with `|t - s| < stride`, the *strided* set
    those with `(t - s) % stride == 0`; with `use_causal_mask` only those with
    `s <= t`. Time and memory grow as `T * (stride + T / stride)`, which is
    `T ** 1.5` for a stride near `T ** 0.5`: positions are written row by row
    into a table of `stride` columns, in which the local set lies in adjacent
    rows, and the strided set is a column.

    Args:
        query: Tensor of shape `(B, T, N, H)`.
        key: Tensor of shape `(B, S, N, H)`, with `S == T` unless there is a
            `start`.
        value: Tensor of shape `(B, S, N, V)`.
        stride: Positive integer, the number of keys in the causal local set
            and the distance between those in the strided one.
        heads: Which keys each head sees: `"split"` gives the local set to
            every other head, beginning with the first, and the strided set to
            the rest; `"merged"` gives all heads the union of both; `"local"`
            and `"strided"` give all heads that set.
        padding_mask: Boolean tensor of shape `(B, S)`, `True` for the keys
            that may be attended.
        use_causal_mask: Whether to hide the keys after a query's position.
        start: Integer or scalar integer tensor, the position of the first
            query among the keys, which are then those of a cache. It implies
            `use_causal_mask`.
        dropout: Callable applied to the attention weights.
        return_attention_scores: Whether to return the attention weights too,
            as they are before dropout. This scores all pairs, at the cost of
            full attention.

    Returns:
        Tensor of shape `(B, T, N, V)`. A query that sees no key gets zeros.
        With `return_attention_scores`, a tuple of it and of the weights, of
        shape `(B, N, T, S)`.
    """
    _check_heads(heads, ("split", "merged", "local", "strided"), query)
    if isinstance(key.shape[1], int):
        # no two positions are further apart than this
        stride = min(stride, key.shape[1])
    options = {
        "padding_mask": padding_mask,
        "use_causal_mask": use_causal_mask or start is not None,
        "start": start,
        "dropout": dropout,
        "return_attention_scores": return_attention_scores,
    }
    if heads == "split":
        return _split_heads(
            lambda kind, *tensors: strided_sparse_attention(
                *tensors, stride, kind, **options
            ),
            ("local", "strided"),
            (query, key, value),
        )
    rows = _rows_per_block(query, stride)

    def is_local(queries, keys, _):
        return ops.abs(queries - keys) < stride

    def is_strided(queries, keys, _):
        return (queries - keys) % stride == 0

    def to_neighbours(keys, queries, _):
        if start is None:
            both_sides = not use_causal_mask
            return [
                _with_neighbours(_to_blocks(x, stride), both_sides)
                for x in keys
            ]
        reach = ops.arange(1 - stride, rows, dtype="int32")
        return _take_keys(keys, queries[0, :, :1] + reach)

    def to_columns(keys, queries, _):
        if start is None:
            return [_to_blocks(x, stride) for x in keys]
        num_blocks = (ops.shape(key)[1] + stride - 1) // stride
        first = ops.arange(num_blocks, dtype="int32")[:, None] * stride
        return _take_keys(keys, first + queries[0, 0] % stride)

    sets = {
        "local": ("bcknh", is_local, to_neighbours),
        "strided": ("bkwnh", is_strided, to_columns),
    }
    return _attend(
        query,
        key,
        value,
        sets,
        heads,
        rows,
        masks_differ=False,
        many_blocks=MANY_BLOCKS,
        **options,
    )


def fixed_sparse_attention(
    query,
    key,
    value,
    block_size,
    num_summary,
    num_subblocks=1,
    heads="split",
    padding_mask=None,
    use_causal_mask=False,
    start=None,
    dropout=None,
    return_attention_scores=False,
):
    """Softmax attention to the own block and to the summaries of all blocks.

    Positions are cut into blocks of `block_size`, the last `num_summary` of
    each being its *summary*. There are two sets of keys (section 4.3 of the
    paper): the *local* set of a query holds the keys of its own block, the
    *summary* set the summaries of all blocks; with `use_causal_mask` only
    those that do not come after the query. Time and memory grow as
    `T * (block_size + T / block_size * num_summary)`.

    With `num_subblocks`, heads differ in their summaries: the last
    `num_subblocks * num_summary` positions of a block are dealt out, a head's
    summary being the last `num_summary` of them, that of the next head the
    `num_summary` before those, and so on, in turns. All heads take their turn,
    even where `heads="split"` leaves a head without use for it.

    Args:
        query: Tensor of shape `(B, T, N, H)`.
        key: Tensor of shape `(B, S, N, H)`, with `S == T` unless there is a
            `start`.
        value: Tensor of shape `(B, S, N, V)`.
        block_size: Positive integer, the number of positions in a block.
        num_summary: Positive integer, how many positions summarize a block
            for a head.
        num_subblocks: Positive integer, how many different summaries of a
            block there are among the heads.
        heads: Which keys each head sees: `"split"` gives the local set to
            every other head, beginning with the first, and the summary set to
            the rest; `"merged"` gives all heads the union of both; `"local"`
            and `"summary"` give all heads that set.
        padding_mask: Boolean tensor of shape `(B, S)`, `True` for the keys
            that may be attended.
        use_causal_mask: Whether to hide the keys after a query's position.
        start: Integer or scalar integer tensor, the position of the first
            query among the keys, which are then those of a cache. It implies
            `use_causal_mask`.
        dropout: Callable applied to the attention weights.
        return_attention_scores: Whether to return the attention weights too,
            as they are before dropout. This scores all pairs, at the cost of
            full attention.

    Returns:
        Tensor of shape `(B, T, N, V)`. A query that sees no key gets zeros,
        as do those before the first summary in heads that see summaries only.
        With `return_attention_scores`, a tuple of it and of the weights, of
        shape `(B, N, T, S)`.
    """
    _check_heads(heads, ("split", "merged", "local", "summary"), query)
    options = {
        "padding_mask": padding_mask,
        "use_causal_mask": use_causal_mask or start is not None,
        "start": start,
        "dropout": dropout,
        "return_attention_scores": return_attention_scores,
    }
    # where in a block the summary of a head begins
    starts = [
        block_size - (head % num_subblocks + 1) * num_summary
        for head in range(query.shape[2])
    ]
    sizes = (block_size, num_summary)
    if heads == "split":
        return _split_heads(
            lambda kind, *tensors: _fixed_sparse_attention(
                *tensors, *sizes, starts[1::2], kind, **options
            ),
            ("local", "summary"),
            (query, key, value),
        )
    return _fixed_sparse_attention(
        query, key, value, *sizes, starts, heads, **options
    )


def _fixed_sparse_attention(
    query, key, value, block_size, num_summary, starts, heads, **options
):
    """Attends to one of the sets, or to their union, with all heads.

    Args:
        query: Tensor of shape `(B, T, N, H)`.
        key: Tensor of shape `(B, S, N, H)`.
        value: Tensor of shape `(B, S, N, V)`.
        block_size: Number of positions in a block.
        num_summary: Number of them in a summary.
        starts: Where in a block the summary of each head begins.
        heads: `"local"`, `"summary"` or `"merged"`.
        **options: Further arguments of `_attend()`.

    Returns:
        As `fixed_sparse_attention()`.
    """
    rows = _rows_per_block(query, block_size)
    start = options["start"]

    def is_local(queries, keys, _):
        return queries // block_size == keys // block_size

    def is_summary(queries, keys, heads):
        first = ops.convert_to_tensor(
            _shared_start(starts[heads]), dtype="int32"
        )
        offsets = keys % block_size - ops.reshape(first, (-1, 1, 1, 1))
        return (offsets >= 0) & (offsets < num_summary)

    def to_own_block(keys, queries, _):
        if start is None:
            return [_to_blocks(x, block_size) for x in keys]
        # rows that begin inside a block reach into the next one
        size = min(2 * block_size, block_size + rows - 1)
        first = queries[0, :, :1] // block_size * block_size
        return _take_keys(keys, first + ops.arange(size, dtype="int32"))

    def to_summaries(keys, _, heads):
        return [
            _slice_summaries(
                _to_blocks(x, block_size), starts[heads], num_summary
            )
            for x in keys
        ]

    sets = {
        "local": ("bcknh", is_local, to_own_block),
        "summary": ("bknh", is_summary, to_summaries),
    }
    masks_differ = heads != "local" and len(set(starts)) > 1
    return _attend(
        query,
        key,
        value,
        sets,
        heads,
        rows,
        masks_differ=masks_differ,
        many_blocks=MANY_FIXED_BLOCKS,
        **options,
    )


def _attend(
    query,
    key,
    value,
    sets,
    heads,
    rows,
    masks_differ,
    many_blocks,
    padding_mask,
    use_causal_mask,
    start,
    dropout,
    return_attention_scores,
):
    """Softmax attention to sets of keys that are scored block by block.

    Args:
        query: Tensor of shape `(B, T, N, H)`.
        key: Tensor of shape `(B, S, N, H)`.
        value: Tensor of shape `(B, S, N, V)`.
        sets: Dictionary that gives for each set of keys the letters of their
            layout in `ops.einsum`, a function `is_in_set(queries, keys,
            heads)` of positions, and a function
            `arrange(keys, queries, heads)` that brings the tensors of the keys
            of these heads into the layout.
        heads: The name of a set, or `"merged"` for the union of all.
        rows: Number of queries in a block.
        masks_differ: Whether heads see different keys of a set.
        many_blocks: Number of blocks from which on they take turns.
        padding_mask: As in the functions above, and so are the others.
        use_causal_mask: Whether to hide the keys after a query's position.
        start: Position of the first query, or `None`.
        dropout: Callable applied to the attention weights.
        return_attention_scores: Whether to return the weights too.

    Returns:
        As the functions above.
    """
    if start is None:
        check_equal_lengths("Sparse attention", query, key)
    if heads != "merged":
        sets = {heads: sets[heads]}
    rules = [is_in_set for _, is_in_set, _ in sets.values()]
    length = ops.shape(query)[1]
    queries = ops.arange(length, dtype="int32")[None]
    queries = queries if start is None else queries + start
    places = ops.arange(ops.shape(key)[1], dtype="int32")[None]
    all_heads = slice(0, query.shape[2])
    if return_attention_scores:
        mask = _is_visible(
            rules,
            queries[:, None, None, :, None],
            places[:, None, None, None],
            all_heads,
            use_causal_mask,
        )
        return dot_product_attention(
            query,
            key,
            value,
            padding_mask=padding_mask,
            attention_mask=mask[:, :, 0],  # (1, N, T, S)
            dropout=dropout,
            return_attention_scores=True,
        )
    if padding_mask is None:
        padding_mask = ops.ones_like(places, dtype="bool")
    positions = places, ops.cast(padding_mask, "bool")
    blocks = _to_blocks(queries, rows)

    def mask_of(heads):
        masks = []
        for index, (layout, _, arrange) in enumerate(sets.values()):
            keys, mask = arrange(positions, blocks, heads)
            pairs = blocks[:, None, :, :, None], _align(keys, layout), heads
            is_new = _is_visible(
                rules[index : index + 1], *pairs, use_causal_mask
            )
            if index:
                # a key weighs once, be it in many sets
                is_old = _is_visible(rules[:index], *pairs, use_causal_mask)
                is_new = is_new & ops.logical_not(is_old)
            masks.append(is_new & _align(mask, layout))
        return _concatenate_masks(masks)  # (B, N, C, W, K)

    # made once, unless it would be as large as the scores of all heads
    shared_mask = None if masks_differ else mask_of(all_heads)

    def attend(heads, query, key, value):
        query = at_least_float32(query) / math.sqrt(query.shape[-1])
        query = _to_blocks(query, rows)
        mask = mask_of(heads) if shared_mask is None else shared_mask
        mask = ops.swapaxes(mask, 1, 2)
        # the keys that each block has of its own, and those for all blocks
        own, shared = {}, {}
        for name, (layout, _, arrange) in sets.items():
            _, _, *arranged = arrange((*positions, key, value), blocks, heads)
            (own if "c" in layout else shared)[name] = arranged

        def attend_blocks(query, mask, own):
            tensors = {**own, **shared}
            scores = [
                ops.einsum(
                    f"bcwnh,{layout}->bncwk",
                    query,
                    at_least_float32(tensors[name][0]),
                )
                for name, (layout, _, _) in sets.items()
            ]
            weights = masked_softmax(
                ops.concatenate(scores, axis=-1), ops.swapaxes(mask, 1, 2)
            )
            weights = ops.cast(weights, value.dtype)
            weights = weights if dropout is None else dropout(weights)
            output, end = 0, 0
            for score, (name, (layout, _, _)) in zip(
                scores, sets.items(), strict=True
            ):
                begin, end = end, end + ops.shape(score)[-1]
                output = output + ops.einsum(
                    f"bncwk,{layout.replace('h', 'v')}->bcwnv",
                    weights[..., begin:end],
                    tensors[name][1],
                )
            return output

        if dropout is None:
            output = _in_turns(attend_blocks, query, mask, own, many_blocks)
        else:  # whose random numbers cannot be drawn in turns
            output = attend_blocks(query, mask, own)
        return _from_blocks(output)[:, :length]

    return attend_by_heads(attend, (query, key, value), (2, 2, 2))


def _in_turns(attend, query, mask, own, many_blocks):
    """Attends with all blocks, or if they are many with some at a time.

    Args:
        attend: Function of the following that returns `(B, C, W, N, V)`.
        query: Tensor of shape `(B, C, W, N, H)`.
        mask: Boolean tensor of shape `(B, C, N, W, K)`.
        own: Dictionary of lists of tensors `(B, C, ...)`.
        many_blocks: As in `_attend`.

    Returns:
        What `attend` returns, perhaps with more blocks, of padding.
    """
    num_blocks = query.shape[1]
    if not isinstance(num_blocks, int) or num_blocks < many_blocks:
        return attend(query, mask, own)
    count = TURNS if num_blocks >= MANY_BLOCKS else TURNS // 2
    size = (num_blocks + count - 1) // count

    def split(x):
        batch, _, *rest = ops.shape(x)
        x = pad_axis(x, 0, count * size - num_blocks, axis=1)
        return ops.moveaxis(ops.reshape(x, (batch, count, size, *rest)), 1, 0)

    turns = keras.tree.map_structure(split, (query, mask, own))
    output = ops.moveaxis(ops.map(lambda turn: attend(*turn), turns), 0, 1)
    return _from_blocks(output)


def _is_visible(rules, queries, keys, heads, use_causal_mask):
    """Whether keys are in one of the sets, and not in the future."""
    keys = keys + ops.zeros_like(queries)
    visible = functools.reduce(
        ops.logical_or, (is_in_set(queries, keys, heads) for is_in_set in rules)
    )
    return visible & (keys <= queries) if use_causal_mask else visible


def _concatenate_masks(masks):
    """Joins masks `(B, N, C, W, K)`, of which some hold for all heads."""
    num_heads = max(mask.shape[1] for mask in masks)
    masks = [
        ops.repeat(mask, num_heads // mask.shape[1], axis=1) for mask in masks
    ]
    return ops.concatenate(masks, axis=-1)


def _align(x, layout):
    """Brings a tensor in the layout of keys into `(B, N, C, W, K)`.

    Args:
        x: Tensor of the axes that a layout has in front of `nh`; in the layout
            `"bknh"` it may have an axis for the heads.
        layout: Letters of the axes of keys.
    """
    if layout == "bcknh":
        return x[:, None, :, None]
    if layout == "bkwnh":
        return ops.transpose(x, (0, 2, 1))[:, None, None]
    if len(x.shape) == 2:
        return x[:, None, None, None]
    return ops.transpose(x, (0, 2, 1))[:, :, None, None]


def _rows_per_block(query, block_size):
    """Number of queries in a block: fewer, if there are fewer in all."""
    length = query.shape[1]
    return min(block_size, length) if isinstance(length, int) else block_size


def _to_blocks(x, block_size):
    """Cuts `(B, T, ...)` into `(B, C, W, ...)`, padded with zeros."""
    batch, length, *rest = ops.shape(x)
    num_blocks = (length + block_size - 1) // block_size
    padding = num_blocks * block_size - length
    x = pad_axis(x, 0, padding, axis=1)
    return ops.reshape(x, (batch, num_blocks, block_size, *rest))


def _from_blocks(x):
    """Joins `(B, C, W, ...)` into `(B, C * W, ...)`."""
    batch, num_blocks, block_size, *rest = ops.shape(x)
    return ops.reshape(x, (batch, num_blocks * block_size, *rest))


def _with_neighbours(x, both_sides):
    """Joins each block of `(B, C, W, ...)` to the one before it, or to both."""
    x = pad_axis(x, 1, 1 if both_sides else 0, axis=1)
    blocks = [x[:, :-2], x[:, 1:-1], x[:, 2:]]
    return ops.concatenate(blocks if both_sides else [x[:, :-1], x[:, 1:]], 2)


def _take_keys(keys, positions):
    """Picks the keys at the given positions, which may be out of range."""
    _, mask, *tensors = keys
    last = ops.shape(mask)[1] - 1
    in_range = (positions >= 0) & (positions <= last)
    index = ops.clip(positions, 0, last)
    mask, *tensors = (ops.take(x, index, axis=1) for x in (mask, *tensors))
    return positions[None], mask & in_range, *tensors


def _slice_summaries(x, starts, size):
    """Takes from blocks `(B, C, W, ...)` their summaries, `(B, K, ...)`.

    If there is a start for each head, a tensor without heads gets them.
    """
    slices = [x[:, :, start : start + size] for start in _shared_start(starts)]
    if len(slices) > 1:
        if len(x.shape) > 3:
            slices = [s[:, :, :, head] for head, s in enumerate(slices)]
        slices = [ops.stack(slices, axis=3)]
    return _from_blocks(slices[0])


def _shared_start(starts):
    """A list of the one start of all heads, if they share it."""
    return starts[:1] if len(set(starts)) == 1 else starts


def _split_heads(attend, kinds, tensors):
    """Lets `attend` give one kind of set to every other head."""
    first, second = (
        attend(kind, *(x[:, :, index::2] for x in tensors))
        for index, kind in enumerate(kinds)
    )
    if isinstance(first, tuple):
        return tuple(
            _alternate(*pair, axis)
            for *pair, axis in zip(first, second, (2, 1), strict=True)
        )
    return _alternate(first, second, axis=2)


def _alternate(first, second, axis):
    """Interleaves the heads of two tensors, of which the first may have more.

    Args:
        first: Tensor with heads on `axis`.
        second: Tensor with as many of them, or with one fewer.
        axis: The axis of the heads.
    """
    num_heads = first.shape[axis] + second.shape[axis]
    order = [
        index // 2 + index % 2 * first.shape[axis] for index in range(num_heads)
    ]
    return ops.take(ops.concatenate([first, second], axis), order, axis)


def _check_heads(heads, choices, query):
    """Raises `ValueError` unless `heads` is a choice that is possible."""
    if heads not in choices:
        raise ValueError(
            f"`heads` must be one of {choices}. Received: heads={heads!r}"
        )
    if heads == "split" and query.shape[2] < 2:
        raise ValueError(
            "A single head cannot be split among two sets of keys. Choose "
            f"another value for `heads` than 'split' from {choices}."
        )
