"""The attention layers of the Sparse Transformer."""

import keras

from keras_attn.layers.attention_layer import AttentionLayer
from keras_attn.layers.streaming import append_state
from keras_attn.layers.streaming import empty_cache
from keras_attn.ops import fixed_sparse_attention
from keras_attn.ops import strided_sparse_attention
from keras_attn.ops import update_key_value_cache
from keras_attn.utils import check_choice
from keras_attn.utils import check_positive_integers
from keras_attn.utils import invalid


@keras.saving.register_keras_serializable(package="keras_attn")
class StridedSparseAttention(AttentionLayer):
    """Multi-head attention to the nearest keys and to every `stride`-th one.

    This is the strided pattern of the
    [Sparse Transformer](https://arxiv.org/abs/1904.10509) (Child et al., 2019,
    section 4.3). With a stride near the square root of the length `T`, time
    and memory grow as `T ** 1.5`, and any position can reach any other in two
    steps. It suits sequences with a period, such as images read row by row,
    with the length of a row as the stride; for text, the authors found
    `FixedSparseAttention` better.

    Query and key must be equally long, and may be of any length.

    Args:
        num_heads: Number of attention heads.
        key_dim: Size of each head of the query and key.
        stride: Positive integer `l`. The local set of position `t` holds the
            positions `s` with `|t - s| < l`, which are `l` in causal use; the
            strided set holds those with `(t - s) % l == 0`.
        heads: Which positions each head sees. `"split"` gives the local set to
            every other head, beginning with the first, and the strided set to
            the rest; `"merged"` gives all heads the union of both; `"local"`
            and `"strided"` give all heads that set, for layers that take
            turns.
        **kwargs: Further arguments of `keras_attn.layers.AttentionLayer`, such
            as `value_dim`, `dropout` or `use_bias`.

    Call arguments:
        query: Tensor of shape `(B, T, F)`.
        value: Tensor of shape `(B, T, F')`. Defaults to `query`.
        key: Tensor of shape `(B, T, F'')`. Defaults to `value`.
        use_causal_mask: Whether to hide the positions after the query's, as
            the paper always does.
        return_attention_scores: Whether to return the attention weights too, a
            tensor of shape `(B, N, T, T)`. This costs as much as full
            attention.
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

    rows = keras.Input((28, 28, 1))
    x = keras.layers.Reshape((28 * 28, 1))(rows)
    x = keras.layers.Dense(16)(x)
    x = x + keras_attn.layers.StridedSparseAttention(
        num_heads=2, key_dim=8, stride=28
    )(x, use_causal_mask=True)
    model = keras.Model(rows, keras.layers.Dense(256)(x))
    ```
    """

    def __init__(self, num_heads, key_dim, stride, heads="split", **kwargs):
        super().__init__(num_heads, key_dim, **kwargs)
        check_positive_integers(self, stride=stride)
        check_choice(self, ("split", "merged", "local", "strided"), heads=heads)
        _check_split(self, heads)
        self.stride = stride
        self.heads = heads

    def attend(
        self,
        query,
        key,
        value,
        padding_mask=None,
        use_causal_mask=False,
        dropout=None,
        return_attention_scores=False,
        state=None,
    ):
        def attend(key, value, **options):
            return strided_sparse_attention(
                query, key, value, self.stride, self.heads, **options
            )

        return _attend(
            attend,
            key,
            value,
            state,
            padding_mask=padding_mask,
            use_causal_mask=use_causal_mask,
            dropout=dropout,
            return_attention_scores=return_attention_scores,
        )

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
        config = {"stride": self.stride, "heads": self.heads}
        return {**super().get_config(), **config}


@keras.saving.register_keras_serializable(package="keras_attn")
class FixedSparseAttention(AttentionLayer):
    """Multi-head attention to the own block and to summaries of all blocks.

    This is the fixed pattern of the
    [Sparse Transformer](https://arxiv.org/abs/1904.10509) (Child et al., 2019,
    section 4.3). The sequence is cut into blocks, and the last positions of
    each are its summary, which all later positions see. Time and memory grow
    as `T * (block_size + T / block_size * num_summary)`, which is `T ** 1.5`
    for blocks near the square root of the length `T`. The authors used it for
    text, with blocks of 128 and summaries of 8, 16 or 32.

    Query and key must be equally long, and may be of any length. Blocks are
    counted from the first position, be it padding or not.

    Args:
        num_heads: Number of attention heads.
        key_dim: Size of each head of the query and key.
        block_size: Positive integer, the number of positions in a block.
        num_summary: Positive integer, how many positions of a block a head
            sees from elsewhere.
        num_subblocks: Positive integer, a divisor of `num_heads`: how many
            different summaries of a block there are. Head `h` sees the
            positions of a block from `block_size - (s + 1) * num_summary` up
            to, but not including, `block_size - s * num_summary`, where `s` is
            `h % num_subblocks`.
        heads: Which positions each head sees. `"split"` gives the own block to
            every other head, beginning with the first, and the summaries to
            the rest; `"merged"` gives all heads the union of both; `"local"`
            and `"summary"` give all heads that set, for layers that take
            turns. Positions before the first summary have nothing to see
            where there are summaries only, and get zeros.
        **kwargs: Further arguments of `keras_attn.layers.AttentionLayer`, such
            as `value_dim`, `dropout` or `use_bias`.

    Call arguments:
        query: Tensor of shape `(B, T, F)`.
        value: Tensor of shape `(B, T, F')`. Defaults to `query`.
        key: Tensor of shape `(B, T, F'')`. Defaults to `value`.
        use_causal_mask: Whether to hide the positions after the query's, as
            the paper always does.
        return_attention_scores: Whether to return the attention weights too, a
            tensor of shape `(B, N, T, T)`. This costs as much as full
            attention.
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
    x = keras.layers.Embedding(256, 64)(tokens)
    x = x + keras_attn.layers.FixedSparseAttention(
        num_heads=4, key_dim=16, block_size=32, num_summary=4, heads="merged"
    )(x, use_causal_mask=True)
    model = keras.Model(tokens, keras.layers.Dense(256)(x))
    ```
    """

    def __init__(
        self,
        num_heads,
        key_dim,
        block_size,
        num_summary,
        num_subblocks=1,
        heads="split",
        **kwargs,
    ):
        super().__init__(num_heads, key_dim, **kwargs)
        check_positive_integers(
            self,
            block_size=block_size,
            num_summary=num_summary,
            num_subblocks=num_subblocks,
        )
        check_choice(self, ("split", "merged", "local", "summary"), heads=heads)
        _check_split(self, heads)
        if num_summary * num_subblocks > block_size:
            wanted = (
                f"few enough for num_subblocks={num_subblocks} summaries to "
                f"fit into block_size={block_size}"
            )
            raise invalid(self, "num_summary", num_summary, wanted)
        if num_heads % num_subblocks:
            wanted = f"a divisor of num_heads={num_heads}"
            raise invalid(self, "num_subblocks", num_subblocks, wanted)
        self.block_size = block_size
        self.num_summary = num_summary
        self.num_subblocks = num_subblocks
        self.heads = heads

    def attend(
        self,
        query,
        key,
        value,
        padding_mask=None,
        use_causal_mask=False,
        dropout=None,
        return_attention_scores=False,
        state=None,
    ):
        def attend(key, value, **options):
            return fixed_sparse_attention(
                query,
                key,
                value,
                self.block_size,
                self.num_summary,
                self.num_subblocks,
                self.heads,
                **options,
            )

        return _attend(
            attend,
            key,
            value,
            state,
            padding_mask=padding_mask,
            use_causal_mask=use_causal_mask,
            dropout=dropout,
            return_attention_scores=return_attention_scores,
        )

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
        config = {
            "block_size": self.block_size,
            "num_summary": self.num_summary,
            "num_subblocks": self.num_subblocks,
            "heads": self.heads,
        }
        return {**super().get_config(), **config}


def _attend(attend, key, value, state, padding_mask, **options):
    """Attends to the keys, or to those of the cache that is the state."""
    if state is None:
        return attend(key, value, padding_mask=padding_mask, **options)
    start = state["length"]
    state = update_key_value_cache(state, padding_mask, key=key, value=value)
    results = attend(
        state["key"],
        state["value"],
        padding_mask=state["padding_mask"],
        start=start,
        **options,
    )
    return append_state(results, state)


def _check_split(layer, heads):
    if heads == "split" and layer.num_heads == 1:
        raise ValueError(
            f"`{type(layer).__name__}` cannot split a single head among two "
            "sets of positions. Choose another value for `heads`, such as "
            "'merged'. Received: num_heads=1, heads='split'"
        )
