"""Longformer attention (https://arxiv.org/abs/2004.05150)."""

from keras import ops

from keras_attn.ops.dot_product import dot_product_attention
from keras_attn.ops.masks import check_equal_lengths
from keras_attn.ops.padding import pad_axis
from keras_attn.ops.sliding_window import attend_in_windows
from keras_attn.ops.sliding_window import slide


def longformer_attention(
    query,
    key,
    value,
    window_size,
    global_positions,
    dilation_rate=1,
    global_query=None,
    global_key=None,
    global_value=None,
    padding_mask=None,
    use_causal_mask=False,
    dropout=None,
    return_attention_scores=False,
):
    """Sliding window attention with some tokens that see, and are seen, by all.

    A query that is not global takes one softmax over the keys of its window
    and the global keys, each counted once. A global query takes its softmax
    over all keys, and for that uses the projections `global_query`,
    `global_key` and `global_value`. With `use_causal_mask` both are blind to
    what follows the query: a global token is seen by itself and what comes
    after it. Time and memory grow as `T * (left + right + G)`.

    Args:
        query: Tensor of shape `(B, T, N, H)`.
        key: Tensor of shape `(B, T, N, H)`.
        value: Tensor of shape `(B, T, N, V)`.
        window_size: Number of keys in a window without the query's own
            position: an even integer, half of which lie on either side, or a
            pair `(left, right)`.
        global_positions: Integer tensor of shape `(B, G)`, the positions of
            the global tokens, no two alike, and -1 in places that are left
            over. `global_token_positions()` finds them in a mask.
        dilation_rate: Distance between neighbouring keys of a window: a
            positive integer, or a sequence with one for each head.
        global_query: Tensor of shape `(B, G, N, H)`, the queries of the global
            tokens. Defaults to those in `query`.
        global_key: Tensor of shape `(B, T, N, H)`, the keys that global tokens
            see. Defaults to `key`.
        global_value: Tensor of shape `(B, T, N, V)`, the values that global
            tokens see. Defaults to `value`.
        padding_mask: Boolean tensor of shape `(B, T)`, `True` for the keys
            that may be attended. A token that may not is not global.
        use_causal_mask: Whether to hide the keys after a query's position.
        dropout: Callable applied to the attention weights.
        return_attention_scores: Whether to return the weights as well. They
            are spread over all pairs of positions, in time and memory that
            grow as `T * T`.

    Returns:
        Tensor of shape `(B, T, N, V)`. A query that sees no key gets zeros.
        With `return_attention_scores`, also the weights `(B, N, T, T)` before
        dropout.
    """
    check_equal_lengths("`longformer_attention`", query, key)
    if padding_mask is None:
        padding_mask = ops.ones(ops.shape(key)[:2], dtype="bool")
    if global_query is None:
        global_query = take_positions(query, global_positions)
    global_key = key if global_key is None else global_key
    global_value = value if global_value is None else global_value

    places = ops.arange(ops.shape(key)[1], dtype="int32")
    is_slot = ops.logical_and(
        global_positions[:, :, None] == places, padding_mask[:, None]
    )  # (B, G, T)
    is_global = ops.any(is_slot, axis=1)
    # what queries see of the global tokens, and these of the others
    inwards = ops.any(is_slot, axis=2)[:, None]  # (B, 1, G)
    outwards = None
    if use_causal_mask:
        outwards = places <= global_positions[:, :, None]  # (B, G, T)
        later = places[:, None] >= global_positions[:, None]
        inwards = ops.logical_and(inwards, later)
    inwards = ops.broadcast_to(inwards, ops.shape(ops.swapaxes(is_slot, 1, 2)))

    windows = attend_in_windows(
        query,
        {
            "key": key,
            "value": value,
            # global keys would count twice
            "padding_mask": ops.logical_and(
                padding_mask, ops.logical_not(is_global)
            ),
        },
        window_size,
        dilation_rate,
        use_causal_mask=use_causal_mask,
        shared={
            "key": take_positions(key, global_positions),
            "value": take_positions(value, global_positions),
            "attention_mask": inwards,
        },
        dropout=dropout,
        return_attention_scores=return_attention_scores,
    )
    everything = dot_product_attention(
        global_query,
        global_key,
        global_value,
        padding_mask=padding_mask,
        attention_mask=outwards,
        dropout=dropout,
        return_attention_scores=return_attention_scores,
    )
    heads, scores, shared_scores = windows
    global_heads = everything[0] if return_attention_scores else everything
    is_slot = ops.cast(is_slot, heads.dtype)
    heads = ops.where(
        is_global[:, :, None, None],
        ops.einsum("bgt,bgnv->btnv", is_slot, global_heads),
        heads,
    )
    if not return_attention_scores:
        return heads
    scores = scores + ops.einsum("bntg,bgs->bnts", shared_scores, is_slot)
    scores = ops.where(
        is_global[:, None, :, None],
        ops.einsum("bgt,bngs->bnts", is_slot, everything[1]),
        scores,
    )
    return heads, scores


def longformer_attention_step(
    query,
    key,
    value,
    window_size,
    state,
    dilation_rate=1,
    global_query=None,
    global_key=None,
    global_value=None,
    padding_mask=None,
    dropout=None,
    return_attention_scores=False,
):
    """Causal `longformer_attention` for the next positions of a sequence.

    The global tokens are the first `G` of the sequence. They come before all
    that they are seen by, so that a state of fixed size can hold them.

    Args:
        query: Tensor of shape `(B, T, N, H)`.
        key: Tensor of shape `(B, T, N, H)`.
        value: Tensor of shape `(B, T, N, V)`.
        window_size: As in `longformer_attention()`.
        state: What came before. Dictionary of `past`, the state of
            `sliding_window_attention()`; of `prefix`, a dictionary of what is
            known of the global tokens, `key` and `global_key`
            `(B, G, N, H)`, `value` and `global_value` `(B, G, N, V)` and
            `padding_mask` `(B, G)`; and of `length`, the number of positions
            so far, an integer scalar.
        dilation_rate: As in `longformer_attention()`.
        global_query: Tensor of shape `(B, min(T, G), N, H)`, the queries of
            the first positions in case they are global. Defaults to those in
            `query`.
        global_key: Tensor of shape `(B, T, N, H)`. Defaults to `key`.
        global_value: Tensor of shape `(B, T, N, V)`. Defaults to `value`.
        padding_mask: Boolean tensor of shape `(B, T)`, `True` for the keys
            that may be attended.
        dropout: Callable applied to the attention weights.
        return_attention_scores: Whether to return the weights as well.

    Returns:
        Tensor of shape `(B, T, N, V)`. With `return_attention_scores`, also
        the weights before dropout, of shape `(B, N, T, G + M + T)`, for the
        prefix, the `M` positions of the past, and the new ones. The new state
        comes last.
    """
    check_equal_lengths("`longformer_attention_step`", query, key)
    prefix, start = state["prefix"], state["length"]
    count, length = prefix["key"].shape[1], ops.shape(query)[1]
    if padding_mask is None:
        padding_mask = ops.ones(ops.shape(key)[:2], dtype="bool")
    chunk = {
        "key": key,
        "value": value,
        "global_key": key if global_key is None else global_key,
        "global_value": value if global_value is None else global_value,
        "padding_mask": padding_mask,
    }
    if global_query is None:
        global_query = query[:, :count]

    slots = ops.arange(count, dtype="int32")
    # places not reached yet are hidden until they are written again
    source = slots - start
    is_new = source >= 0
    source = ops.clip(source, 0, length - 1)
    prefix = {
        name: ops.where(
            ops.reshape(is_new, (1, count) + (1,) * (len(x.shape) - 2)),
            ops.cast(ops.take(chunk[name], source, axis=1), x.dtype),
            x,
        )
        for name, x in prefix.items()
    }
    places = start + ops.arange(length, dtype="int32")
    is_global = ops.logical_and(places < count, padding_mask)  # (B, T)
    inwards = ops.logical_and(
        slots <= places[:, None], prefix["padding_mask"][:, None]
    )  # (B, T, G)

    positions = {
        "key": key,
        "value": value,
        "padding_mask": ops.logical_and(
            padding_mask, ops.logical_not(is_global)
        ),
    }
    heads, scores, shared_scores = attend_in_windows(
        query,
        positions,
        window_size,
        dilation_rate,
        past=state["past"],
        shared={**prefix, "attention_mask": inwards},
        dropout=dropout,
        return_attention_scores=return_attention_scores,
    )
    first = ops.shape(global_query)[1]
    results = dot_product_attention(
        global_query,
        prefix["global_key"],
        prefix["global_value"],
        attention_mask=inwards[:, :first],
        dropout=dropout,
        return_attention_scores=return_attention_scores,
    )
    global_heads = results[0] if return_attention_scores else results
    padding = length - first
    heads = ops.where(
        is_global[:, :, None, None],
        pad_axis(global_heads, 0, padding, axis=1),
        heads,
    )
    state = {
        "past": slide(state["past"], positions),
        "prefix": prefix,
        "length": start + length,
    }
    if not return_attention_scores:
        return heads, state
    scores = ops.concatenate([shared_scores, scores], axis=3)
    others = ops.shape(scores)[3] - count
    scores = ops.where(
        is_global[:, None, :, None],
        pad_axis(pad_axis(results[1], 0, padding, axis=2), 0, others, axis=3),
        scores,
    )
    return heads, scores, state


def global_token_positions(global_mask, max_global_tokens):
    """Finds the positions of global tokens, in a number that is fixed.

    Args:
        global_mask: Boolean tensor of shape `(B, T)`, `True` for the tokens
            that are global.
        max_global_tokens: Number `G` of positions to return. Of more tokens
            than that, the first are taken.

    Returns:
        Integer tensor of shape `(B, G)` of the positions in order, and -1
        where there are fewer.
    """
    rank = ops.cumsum(ops.cast(global_mask, "int32"), axis=1)
    slots = 1 + ops.arange(max_global_tokens, dtype="int32")
    is_slot = ops.logical_and(
        global_mask[:, None], rank[:, None] == slots[:, None]
    )  # (B, G, T)
    places = ops.arange(ops.shape(global_mask)[1], dtype="int32")
    return ops.max(ops.where(is_slot, places, -1), axis=2)


def take_positions(x, positions):
    """Takes `(B, G)` positions from `(B, T, ...)`; anything for -1."""
    indices = ops.reshape(
        ops.maximum(positions, 0),
        (*ops.shape(positions), *(1 for _ in x.shape[2:])),
    )
    return ops.take_along_axis(x, indices, axis=1)
