"""Multi-head attention layer."""

import keras
from keras import ops

from keras_attn.layers.attention_layer import AttentionLayer
from keras_attn.layers.streaming import append_state
from keras_attn.layers.streaming import empty_cache
from keras_attn.ops import dot_product_attention
from keras_attn.ops import key_value_cache_mask
from keras_attn.ops import update_key_value_cache


@keras.saving.register_keras_serializable(package="keras_attn")
class MultiHeadAttention(AttentionLayer):
    """Multi-head attention in which each query sees every key.

    This is the attention of
    [Attention Is All You Need](https://arxiv.org/abs/1706.03762) (Vaswani et
    al., 2017, section 3.2). Time grows as `T * S`. Memory grows as `T + S`
    unless dropout is active, scores are asked for, or there is a mask of pairs,
    such as PyTorch's kernel makes of padding and causality. It takes the place
    of `keras.layers.MultiHeadAttention`, whose weights fit, and gives
    the same answers wherever that layer has one answer: a query that may
    attend no key gets zeros on every path, explicit masks are combined with
    attached ones, and no tensor loses its mask.

    Query and value may be of any lengths, and differ in them.

    Args:
        num_heads: Number of attention heads.
        key_dim: Size of each head of the query and key.
        **kwargs: Further arguments of `keras_attn.layers.AttentionLayer`, such
            as `value_dim`, `dropout` or `use_bias`.

    Call arguments:
        query: Tensor of shape `(B, T, F)`.
        value: Tensor of shape `(B, S, F')`. Defaults to `query`.
        key: Tensor of shape `(B, S, F'')`. Defaults to `value`.
        attention_mask: Boolean tensor of shape `(B, T, S)` or `(B, N, T, S)`,
            `True` where a query may attend a key. Axes of size 1 broadcast.
        use_causal_mask: Whether to hide the keys after a query's position.
        return_attention_scores: Whether to return the attention weights too, a
            tensor of shape `(B, N, T, S)`.
        state: Streaming state, a key/value cache. Scores of a streaming call
            have shape `(B, N, T, max_length)`.

    See `keras_attn.layers.AttentionLayer` for the padding masks.

    Returns:
        Tensor of shape `(B, T, F)`, and the scores and the new state if they
        were asked for.

    Example:

    ```python
    import keras
    import keras_attn

    tokens = keras.Input((None,), dtype="int32")
    x = keras.layers.Embedding(10_000, 64, mask_zero=True)(tokens)
    x = x + keras_attn.layers.MultiHeadAttention(num_heads=4, key_dim=16)(
        x, use_causal_mask=True
    )
    model = keras.Model(tokens, keras.layers.Dense(10_000)(x))
    ```
    """

    def attend(
        self,
        query,
        key,
        value,
        padding_mask=None,
        attention_mask=None,
        use_causal_mask=False,
        dropout=None,
        return_attention_scores=False,
        state=None,
    ):
        if state is not None:
            state = update_key_value_cache(
                state, padding_mask, key=key, value=value
            )
            key, value = state["key"], state["value"]
            padding_mask = state["padding_mask"]
            attention_mask = key_value_cache_mask(state, ops.shape(query)[1])
        results = dot_product_attention(
            query,
            key,
            value,
            padding_mask=padding_mask,
            attention_mask=attention_mask,
            use_causal_mask=use_causal_mask and state is None,
            dropout=dropout,
            return_attention_scores=return_attention_scores,
        )
        return append_state(results, state)

    def initial_state(self, batch_size, max_length=None):
        """Creates an empty key/value cache.

        Args:
            batch_size: Number of sequences.
            max_length: Number of positions that the cache can hold.

        Returns:
            Dictionary of tensors, for the call argument `state`. See
            `keras_attn.ops.key_value_cache`.
        """
        return empty_cache(self, batch_size, max_length)
