"""Single-headed attention of SHA-RNN (https://arxiv.org/abs/1911.11423)."""

from keras import ops

from keras_attn.ops.dot_product import dot_product_attention


def single_head_attention(
    query,
    key,
    value,
    query_gate=None,
    key_gate=None,
    value_gate=None,
    padding_mask=None,
    attention_mask=None,
    use_causal_mask=False,
    dropout=None,
    return_attention_scores=False,
):
    """Softmax attention in which a vector of gates stands for each projection.

    The gates multiply the features of query, key and value. Those of the key
    are applied to the query, and those of the value to the output, which gives
    the same numbers, so that the gated copies of a long memory never exist.
    There may be several heads.

    Args:
        query: Tensor of shape `(B, T, N, H)`.
        key: Tensor of shape `(B, S, N, H)`.
        value: Tensor of shape `(B, S, N, V)`.
        query_gate: Tensor of shape `(N, H)`, or `None` for no gate.
        key_gate: Tensor of shape `(N, H)`, or `None` for no gate.
        value_gate: Tensor of shape `(N, V)`, or `None` for no gate.
        padding_mask: Boolean tensor of shape `(B, S)`, `True` for the keys
            that may be attended.
        attention_mask: Boolean tensor of shape `(B, T, S)` or
            `(B, N, T, S)`, `True` where a query may attend a key.
        use_causal_mask: Whether to hide the keys after a query's position.
            The last `T` keys are taken for the positions of the queries, and
            those before them for a memory, which every query sees.
        dropout: Callable applied to the attention weights.
        return_attention_scores: Whether to return the weights as well.

    Returns:
        Tensor of shape `(B, T, N, V)`. A query that sees no key gets zeros.
        With `return_attention_scores`, also the weights `(B, N, T, S)` before
        dropout.
    """
    for gate in (query_gate, key_gate):
        query = query if gate is None else query * gate
    if use_causal_mask:
        mask = _causal_mask(ops.shape(query)[1], ops.shape(key)[1])
        if attention_mask is not None:
            mask = ops.logical_and(mask, ops.cast(attention_mask, "bool"))
        attention_mask = mask
    results = dot_product_attention(
        query,
        key,
        value,
        padding_mask=padding_mask,
        attention_mask=attention_mask,
        dropout=dropout,
        return_attention_scores=return_attention_scores,
    )
    heads, *scores = results if return_attention_scores else (results,)
    heads = heads if value_gate is None else heads * value_gate
    return (heads, *scores) if scores else heads


def _causal_mask(queries, keys):
    """Boolean `(1, T, S)`, in which the last query sees every key."""
    rows = ops.arange(queries, dtype="int32")[:, None] + (keys - queries)
    return (rows >= ops.arange(keys, dtype="int32"))[None]
