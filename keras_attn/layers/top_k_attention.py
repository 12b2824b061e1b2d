"""Explicit sparse attention layer."""

import keras
from keras import ops

from keras_attn.layers.attention_layer import AttentionLayer
from keras_attn.layers.streaming import append_state
from keras_attn.layers.streaming import empty_cache
from keras_attn.ops import key_value_cache_mask
from keras_attn.ops import top_k_attention
from keras_attn.ops import update_key_value_cache
from keras_attn.utils import check_positive_integers
from keras_attn.utils import invalid


@keras.saving.register_keras_serializable(package="keras_attn")
class TopKAttention(AttentionLayer):
    """Multi-head attention in which each query sees its best keys only.

    This is the attention of
    [Explicit Sparse Transformer](https://arxiv.org/abs/1912.11637) (Zhao et
    al., 2019, section 2). Each query keeps its `top_k` highest scores, and
    attends to nothing else. That concentrates attention, it does not save any
    of its time, which still grows as `T * S`, and the choice takes time of its
    own. Memory grows as `T + S` unless dropout is active or scores are asked
    for.

    Query and value may be of any lengths, and differ in them. Queries that may
    attend to `top_k` keys or fewer attend to all of them, as in
    `keras_attn.layers.MultiHeadAttention`.

    Args:
        num_heads: Number of attention heads.
        key_dim: Size of each head of the query and key.
        top_k: How many keys each query attends to in each head. A positive
            integer is their number. A float in `(0, 1]` is their share among
            those that the query may attend, rounded up: under a causal mask,
            0.5 stands for 1 of the first 2 positions and for 4 of the first
            8. `1.0` is all of them, `1` is one. Masks come before the choice.
            Keys whose scores tie with the lowest one chosen are chosen, too.
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
            tensor of shape `(B, N, T, S)` with zeros for the other keys.
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
    x = x + keras_attn.layers.TopKAttention(num_heads=4, key_dim=16, top_k=8)(
        x, use_causal_mask=True
    )
    model = keras.Model(tokens, keras.layers.Dense(10_000)(x))
    ```
    """

    def __init__(self, num_heads, key_dim, top_k, **kwargs):
        super().__init__(num_heads, key_dim, **kwargs)
        if not isinstance(top_k, float):
            check_positive_integers(self, top_k=top_k)
        elif not 0 < top_k <= 1:
            wanted = "a positive integer, or a float in (0, 1]"
            raise invalid(self, "top_k", top_k, wanted)
        self.top_k = top_k

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
        results = top_k_attention(
            query,
            key,
            value,
            self.top_k,
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

    def get_config(self):
        return {**super().get_config(), "top_k": self.top_k}
