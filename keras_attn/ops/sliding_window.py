"""Sliding window attention (Longformer, https://arxiv.org/abs/2004.05150)."""

import numpy as np
from keras import ops

from keras_attn.ops.dot_product import dot_product_attention
from keras_attn.ops.masks import check_equal_lengths
from keras_attn.ops.padding import pad_axis

# narrow windows share blocks, for many tiny products are slow
SMALLEST_BLOCK = 32


def sliding_window_attention(
    query,
    key,
    value,
    window_size,
    dilation_rate=1,
    padding_mask=None,
    use_causal_mask=False,
    dropout=None,
    return_attention_scores=False,
    state=None,
):
    """Softmax attention in which a query sees only the keys around it.

    With a window of `left` and `right`, query `t` attends key
    `t + i * dilation_rate` for every integer `i` from `-left` to `right`; with
    `use_causal_mask` or a `state`, from `-left` to 0. Time and memory grow as
    `T * (left + right)`: positions are cut into blocks, and the queries of a
    block are scored against that block and the keys just beside it.

    Args:
        query: Tensor of shape `(B, T, N, H)`.
        key: Tensor of shape `(B, T, N, H)`.
        value: Tensor of shape `(B, T, N, V)`.
        window_size: Number of keys in a window without the query's own
            position: an even integer, half of which lie on either side, or a
            pair `(left, right)`.
        dilation_rate: Distance between neighbouring keys of a window: a
            positive integer, or a sequence with one for each head.
        padding_mask: Boolean tensor of shape `(B, T)`, `True` for the keys
            that may be attended.
        use_causal_mask: Whether to hide the keys after a query's position.
        dropout: Callable applied to the attention weights.
        return_attention_scores: Whether to return the weights as well. They
            are spread over all pairs of positions, in time and memory that
            grow as `T * T`.
        state: What came before, for streaming: dictionary of `key`
            `(B, M, N, H)`, `value` `(B, M, N, V)` and `padding_mask` `(B, M)`
            of the last `M = left * max(dilation_rate)` positions.

    Returns:
        Tensor of shape `(B, T, N, V)`. A query that sees no key gets zeros.
        With `return_attention_scores`, also the weights `(B, N, T, T)` before
        dropout, or `(B, N, T, M + T)` with `state`. With `state`, the new state
        comes last.
    """
    check_equal_lengths("`sliding_window_attention`", query, key)
    if padding_mask is None:
        padding_mask = ops.ones(ops.shape(key)[:2], dtype="bool")
    positions = {"key": key, "value": value, "padding_mask": padding_mask}
    heads, scores, _ = attend_in_windows(
        query,
        positions,
        window_size,
        dilation_rate,
        use_causal_mask=use_causal_mask,
        past=state,
        dropout=dropout,
        return_attention_scores=return_attention_scores,
    )
    results = [heads]
    if return_attention_scores:
        results.append(scores)
    if state is not None:
        results.append(slide(state, positions))
    return tuple(results) if len(results) > 1 else heads


def slide(past, positions):
    """Appends new positions to the past ones, of which it drops as many."""
    length = ops.shape(positions["key"])[1]

    def append(x, new):
        return ops.concatenate([x, ops.cast(new, x.dtype)], axis=1)[:, length:]

    return {name: append(x, positions[name]) for name, x in past.items()}


def attend_in_windows(
    query,
    positions,
    window_size,
    dilation_rate=1,
    use_causal_mask=False,
    past=None,
    shared=None,
    dropout=None,
    return_attention_scores=False,
):
    """Attends to windows, and to further keys that all windows share.

    Args:
        query: Tensor of shape `(B, T, N, H)`.
        positions: Dictionary of `key` `(B, T, N, H)`, `value` `(B, T, N, V)`
            and `padding_mask` `(B, T)`.
        window_size: Even integer, or a pair `(left, right)`.
        dilation_rate: Positive integer, or a sequence with one for each head.
        use_causal_mask: Whether to hide the keys after a query's position.
        past: Like `positions`, of the `M = left * max(dilation_rate)`
            positions before the first, or `None`. It implies causality.
        shared: Dictionary of `key` `(B, G, N, H)`, `value` `(B, G, N, V)` and
            `attention_mask` `(B, T, G)`, or `None`.
        dropout: Callable applied to the attention weights.
        return_attention_scores: Whether to return the weights as well.

    Returns:
        The heads, of shape `(B, T, N, V)`; the weights of the past and present
        positions, of shape `(B, N, T, M + T)`, or `None` if not asked for; and
        those of `shared`, of shape `(B, N, T, G)`, or `None`.
    """
    is_integer = isinstance(window_size, int)
    left, right = [window_size // 2] * 2 if is_integer else window_size
    if use_causal_mask or past is not None:
        right = 0
    num_heads = query.shape[2]
    if isinstance(dilation_rate, int):
        dilation_rate = [dilation_rate] * num_heads
    groups = {}
    for head, rate in enumerate(dilation_rate):
        groups.setdefault(rate, []).append(head)

    results = []
    for rate, heads in groups.items():
        inputs = (query, positions, past, shared)
        if len(groups) > 1:
            inputs = (_take_heads(x, heads) for x in inputs)
        results.append(
            _attend_at_one_rate(
                *inputs, left, right, rate, dropout, return_attention_scores
            )
        )
    if len(groups) == 1:
        return results[0]

    order = np.argsort([head for heads in groups.values() for head in heads])
    return tuple(
        None
        if parts[0] is None
        else _take_heads(ops.concatenate(parts, axis), order, axis)
        for parts, axis in zip(
            zip(*results, strict=True), (2, 1, 1), strict=True
        )
    )


def _take_heads(x, heads, axis=2):
    """Selects heads of a tensor, or of those in a dictionary that have any."""
    if isinstance(x, dict):
        return {name: _take_heads(value, heads) for name, value in x.items()}
    if x is None or len(x.shape) < 4:
        return x
    before = (slice(None),) * axis
    parts = [x[(*before, slice(head, head + 1))] for head in heads]
    return ops.concatenate(parts, axis)


def _attend_at_one_rate(
    query,
    positions,
    past,
    shared,
    left,
    right,
    rate,
    dropout,
    return_attention_scores,
):
    """Attends in windows whose keys lie `rate` apart, block by block."""
    length = ops.shape(query)[1]
    block_size = max(left, right, SMALLEST_BLOCK)
    before, after = left, right  # keys beside a block that its queries see
    if isinstance(length, int) and length <= block_size * rate:
        # all is one block, with nothing beside it but the past
        block_size = max((length + rate - 1) // rate, 1)
        before, after = 0 if past is None else left, 0

    query = _to_blocks(query, block_size, rate)
    keys = {}
    for name, x in positions.items():
        beside = None
        if past is not None and before:
            first = past[name].shape[1] - before * rate
            beside = _to_blocks(past[name][:, first:], before, rate)
        x = _to_blocks(x, block_size, rate)
        keys[name] = _with_neighbours(x, beside, before, after)
    key, value = keys["key"], keys["value"]  # (B * D, C, N, X, ...)
    offset = np.arange(before + block_size + after) - before
    offset = offset - np.arange(block_size)[:, None]
    mask = ops.logical_and(
        (offset >= -left) & (offset <= right),
        ops.swapaxes(keys["padding_mask"], 3, 4),
    )  # (B * D, C, 1, W, X)
    if shared is not None:
        count = ops.shape(query)[1]
        key, value = (
            ops.concatenate([x, _to_every_block(shared[name], count, rate)], 3)
            for name, x in (("key", key), ("value", value))
        )
        visible = _to_blocks(shared["attention_mask"], block_size, rate)
        mask = ops.concatenate([mask, visible], axis=4)

    results = dot_product_attention(
        *(ops.swapaxes(_merge(x), 1, 2) for x in (query, key, value)),
        attention_mask=_merge(mask),
        dropout=dropout,
        return_attention_scores=return_attention_scores,
    )
    shape = ops.shape(query)[:4]
    heads = results[0] if return_attention_scores else results
    heads = ops.reshape(ops.swapaxes(heads, 1, 2), (*shape, value.shape[4]))
    heads = _from_blocks(heads, rate)[:, :length]
    if not return_attention_scores:
        return heads, None, None

    scores = ops.reshape(results[1], (*shape, ops.shape(key)[3]))
    beside = before * rate
    dense = _to_dense(scores[..., : offset.shape[1]], rate)
    dense = dense[:, :, :length, : beside + length]
    if past is None:
        dense = dense[..., beside:]
    else:
        # other heads may look back further
        unseen = past["key"].shape[1] - beside
        dense = pad_axis(dense, unseen, 0, axis=3)
    if shared is None:
        return heads, dense, None
    scores = _from_blocks(scores[..., offset.shape[1] :], rate)[:, :length]
    return heads, dense, ops.swapaxes(scores, 1, 2)


def _to_blocks(x, block_size, rate):
    """Cuts `(B, T, N, H)` into `(B * D, C, N, W, H)`.

    The positions that windows of dilation `D` never mix become sequences of
    their own, in which the windows are plain ones. `T` is padded with zeros. A
    mask may lack the last two axes, or the last but one.
    """
    while len(x.shape) < 4:
        x = ops.expand_dims(x, 2)
    batch, length, heads, size = ops.shape(x)
    count = (length + block_size * rate - 1) // (block_size * rate)
    padding = count * block_size * rate - length
    x = pad_axis(x, 0, padding, axis=1)
    x = ops.reshape(x, (batch, count, block_size, rate, heads, size))
    x = ops.transpose(x, (0, 3, 1, 4, 2, 5))
    return ops.reshape(x, (batch * rate, count, heads, block_size, size))


def _from_blocks(x, rate):
    """Joins `(B * D, C, N, W, H)` into `(B, C * W * D, N, H)`."""
    folded, count, heads, block_size, size = ops.shape(x)
    x = ops.reshape(x, (folded // rate, rate, count, heads, block_size, size))
    x = ops.transpose(x, (0, 2, 4, 1, 3, 5))
    shape = (folded // rate, count * block_size * rate, heads, size)
    return ops.reshape(x, shape)


def _with_neighbours(x, past, before, after):
    """Puts beside each block the end of the last and the start of the next.

    Args:
        x: Tensor of shape `(B * D, C, N, W, H)`.
        past: Tensor of shape `(B * D, 1, N, before, H)`, what comes before the
            first block, or `None` for zeros.
        before: Number of positions before each block.
        after: Number of positions after each block.

    Returns:
        Tensor of shape `(B * D, C, N, before + W + after, H)`.
    """
    parts = [x]
    if before:
        if past is None:
            past = ops.zeros_like(x[:, :1, :, :before])
        if x.shape[1] != 1:
            last = x[:, :-1, :, x.shape[3] - before :]
            past = ops.concatenate([past, last], axis=1)
        parts.insert(0, past)
    if after:
        parts.append(pad_axis(x[:, 1:, :, :after], 0, 1, axis=1))
    return ops.concatenate(parts, axis=3)


def _to_every_block(x, count, rate):
    """Repeats `(B, G, N, H)` as `(B * D, C, N, G, H)`."""
    x = ops.repeat(ops.swapaxes(x, 1, 2), rate, axis=0)[:, None]
    shape = ops.shape(x)
    return ops.broadcast_to(x, (shape[0], count, *shape[2:]))


def _merge(x):
    """Merges the first two axes."""
    return ops.reshape(x, (-1, *ops.shape(x)[2:]))


def _to_dense(scores, rate):
    """Spreads the scores of blocks over all pairs of positions.

    Args:
        scores: Tensor of shape `(B * D, C, N, W, X)`, in which the keys of
            each block begin `W` after those of the block before.
        rate: The dilation `D`.

    Returns:
        Tensor of shape `(B, N, C * W * D, (C * W - W + X) * D)`.
    """
    folded, count, heads, block_size, keys = ops.shape(scores)
    width = (count - 1) * block_size + keys
    # in rows that are `W` too long, each begins `W` later than the one before
    x = ops.transpose(scores, (0, 2, 3, 1, 4))
    padding = width + block_size - keys
    x = pad_axis(x, 0, padding, axis=4)
    x = ops.reshape(x, (folded, heads, block_size, -1))[..., : count * width]
    x = ops.reshape(x, (folded, heads, block_size, count, width))
    # only positions a multiple of `rate` apart see one another
    x = ops.reshape(
        ops.transpose(x, (0, 1, 3, 2, 4)),
        (folded // rate, rate, heads, count * block_size, width, 1),
    )
    x = x * ops.reshape(ops.eye(rate, dtype=x.dtype), (rate, 1, 1, 1, rate))
    x = ops.transpose(x, (0, 2, 3, 1, 4, 5))
    shape = (folded // rate, heads, count * block_size * rate, width * rate)
    return ops.reshape(x, shape)
