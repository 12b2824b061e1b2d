"""Sliding window attention layer."""

import keras
from keras import ops

from keras_attn.layers.attention_layer import AttentionLayer
from keras_attn.ops import sliding_window_attention
from keras_attn.utils import check_positive_integers
from keras_attn.utils import invalid


@keras.saving.register_keras_serializable(package="keras_attn")
class SlidingWindowAttention(AttentionLayer):
    """Multi-head attention in which each position sees only its neighbours.

    This is the sliding window attention of
    [Longformer](https://arxiv.org/abs/2004.05150) (Beltagy et al., 2020,
    section 3.1), plain or dilated. Time and memory grow linearly with the
    length of the sequence, so that it serves where full attention is too
    expensive and what matters lies close by. Stacked layers see further: with
    `n` of them, information travels `n * window_size * dilation_rate / 2`
    positions each way. A window as wide as the sequence gives full attention,
    and the weights are those of `keras.layers.MultiHeadAttention`.

    Query and value must be equally long, and may be of any length, also one
    that is shorter than the window or no multiple of it. Padding may lie
    anywhere; a window that holds nothing else gives zeros.

    Args:
        num_heads: Number of attention heads.
        key_dim: Size of each head of the query and key.
        window_size: Number of positions that a position sees besides its own.
            A positive even integer puts half of them on either side, so that
            there are `window_size + 1` keys for each query; a pair
            `(left, right)` counts each side.
        dilation_rate: Distance between neighbouring positions of a window. `1`
            makes the window contiguous; larger values widen it at no further
            cost, but leave gaps. A positive integer, or a sequence with one
            for each head.
        **kwargs: Further arguments of `keras_attn.layers.AttentionLayer`, such
            as `value_dim`, `dropout` or `use_bias`.

    Call arguments:
        query: Tensor of shape `(B, T, F)`.
        value: Tensor of shape `(B, T, F')`. Defaults to `query`.
        key: Tensor of shape `(B, T, F'')`. Defaults to `value`.
        use_causal_mask: Whether to hide the positions after the query's, which
            leaves the left side of the window.
        return_attention_scores: Whether to return the attention weights too, a
            tensor of shape `(B, N, T, T)` that is 0 outside of the windows.
            It is for looking at: it costs time and memory that grow as
            `T * T`.
        state: Streaming state, the `M = left * max(dilation_rate)` positions
            before the next. Scores of a streaming call have shape
            `(B, N, T, M + T)`.

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
    x = x + keras_attn.layers.SlidingWindowAttention(
        num_heads=4, key_dim=16, window_size=128
    )(x, use_causal_mask=True)
    model = keras.Model(tokens, keras.layers.Dense(10_000)(x))
    ```
    """

    def __init__(
        self, num_heads, key_dim, window_size, dilation_rate=1, **kwargs
    ):
        super().__init__(num_heads, key_dim, **kwargs)
        self.window_size = to_window_size(self, window_size)
        self.dilation_rate = to_dilation_rate(self, dilation_rate)

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
        return sliding_window_attention(
            query,
            key,
            value,
            window_size=self.window_size,
            dilation_rate=self.dilation_rate,
            padding_mask=padding_mask,
            use_causal_mask=use_causal_mask,
            dropout=dropout,
            return_attention_scores=return_attention_scores,
            state=state,
        )

    def initial_state(self, batch_size, max_length=None):
        """Creates the state from which streaming starts: an empty past.

        Args:
            batch_size: Number of sequences.
            max_length: Not needed, for the state does not grow.

        Returns:
            Dictionary of tensors, for the call argument `state`.
        """
        check_positive_integers(self, batch_size=batch_size)
        return empty_past(self, batch_size)

    def _check_shapes(self, query_shape, value_shape, key_shape):
        super()._check_shapes(query_shape, value_shape, key_shape)
        check_lengths(self, query_shape, value_shape)

    def attention_scores_shape(self, query_shape, value_shape, state=None):
        batch, heads, length, keys = super().attention_scores_shape(
            query_shape, value_shape
        )
        if state is not None and keys is not None:
            keys = state["padding_mask"].shape[1] + keys
        return (batch, heads, length, keys)

    def get_config(self):
        config = {
            "window_size": self.window_size,
            "dilation_rate": self.dilation_rate,
        }
        return {**super().get_config(), **config}


def to_window_size(layer, window_size):
    """Checks the argument, and makes a tuple of what is not an integer."""
    if isinstance(window_size, (tuple, list)):
        sides = tuple(window_size)
        if len(sides) == 2 and all(_is_count(side) for side in sides):
            return sides
    elif _is_count(window_size) and window_size and window_size % 2 == 0:
        return window_size
    raise invalid(
        layer,
        "window_size",
        window_size,
        "a positive even integer, half of which lies on either side of a "
        "position, or a pair of integers `(left, right)` from 0 on",
    )


def _is_count(value):
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def to_dilation_rate(layer, dilation_rate):
    """Checks the argument, and makes a tuple of what is not an integer."""
    if not isinstance(dilation_rate, (tuple, list)):
        check_positive_integers(layer, dilation_rate=dilation_rate)
        return dilation_rate
    for rate in dilation_rate:
        check_positive_integers(layer, dilation_rate=rate)
    if len(dilation_rate) != layer.num_heads:
        wanted = f"one for all heads, or one for each of {layer.num_heads}"
        raise invalid(layer, "dilation_rate", dilation_rate, wanted)
    return tuple(dilation_rate)


def check_lengths(layer, query_shape, value_shape):
    """Raises `ValueError` if query and value are known to differ in length."""
    lengths = query_shape[1], value_shape[1]
    if None not in lengths and lengths[0] != lengths[1]:
        raise ValueError(
            f"`{type(layer).__name__}` needs a `value` as long as `query`, for "
            "its windows lie around the position of the query. Received: "
            f"query.shape={tuple(query_shape)}, "
            f"value.shape={tuple(value_shape)}"
        )


def empty_past(layer, batch_size):
    """The positions that windows look back to, before there are any."""
    window_size, rate = layer.window_size, layer.dilation_rate
    left = window_size // 2 if isinstance(window_size, int) else window_size[0]
    length = left * (rate if isinstance(rate, int) else max(rate))
    shape, dtype = (batch_size, length, layer.num_heads), layer.compute_dtype
    return {
        "key": ops.zeros((*shape, layer.key_dim), dtype=dtype),
        "value": ops.zeros((*shape, layer.value_dim), dtype=dtype),
        "padding_mask": ops.zeros((batch_size, length), dtype="bool"),
    }
