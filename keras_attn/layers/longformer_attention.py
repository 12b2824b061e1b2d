"""Longformer attention layer."""

import keras
from keras import ops

from keras_attn.layers.attention_layer import AttentionLayer
from keras_attn.layers.padding import to_boolean
from keras_attn.layers.sliding_window_attention import check_lengths
from keras_attn.layers.sliding_window_attention import empty_past
from keras_attn.layers.sliding_window_attention import to_dilation_rate
from keras_attn.layers.sliding_window_attention import to_window_size
from keras_attn.ops import global_token_positions
from keras_attn.ops import longformer_attention
from keras_attn.ops import longformer_attention_step
from keras_attn.ops.longformer import take_positions
from keras_attn.utils import check_positive_integers
from keras_attn.utils import concrete_integer


@keras.saving.register_keras_serializable(package="keras_attn")
class LongformerAttention(AttentionLayer):
    """Sliding window attention with some tokens that see, and are seen by, all.

    This is the attention of
    [Longformer](https://arxiv.org/abs/2004.05150) (Beltagy et al., 2020,
    section 3.1). Most tokens attend to the window around them and to the few
    global tokens; a global token attends to all, with projections of its own.
    Time and memory grow linearly with the length of the sequence. It serves
    for long documents with a token that gathers the whole, such as a
    classification token, or with a question that every passage must see. It
    follows the program of the authors where that differs from the text: other
    tokens score the global ones with the projections of the window, in one
    softmax with the window.

    Which tokens are global is either fixed, the first `num_global_tokens` of
    each sequence, or told at each call by `global_mask`, which may mark up to
    `max_global_tokens` of them in each sequence, and none without the
    argument. If it marks more, the first `max_global_tokens` are global and
    the rest ordinary; this raises `ValueError` unless the call is compiled,
    when no program can raise. Padding is never global.

    Query and value must be equally long, and may be of any length.

    Args:
        num_heads: Number of attention heads.
        key_dim: Size of each head of the query and key.
        window_size: Number of positions that a position sees besides its own.
            A positive even integer puts half of them on either side, so that
            there are `window_size + 1` keys for each query; a pair
            `(left, right)` counts each side.
        dilation_rate: Distance between neighbouring positions of a window. A
            positive integer, or a sequence with one for each head.
        max_global_tokens: Largest number of tokens of a sequence that
            `global_mask` marks.
        num_global_tokens: Number of tokens at the start of each sequence that
            are global. Either this or `max_global_tokens` must be given.
        separate_global_projections: Whether global tokens attend with query,
            key and value projections of their own. They are the weights
            `query_global`, `key_global` and `value_global`.
        **kwargs: Further arguments of `keras_attn.layers.AttentionLayer`, such
            as `value_dim`, `dropout` or `use_bias`.

    Call arguments:
        query: Tensor of shape `(B, T, F)`.
        value: Tensor of shape `(B, T, F')`. Defaults to `query`.
        key: Tensor of shape `(B, T, F'')`. Defaults to `value`.
        global_mask: Boolean tensor of shape `(B, T)`, `True` for the tokens
            that are global. Only with `max_global_tokens`.
        use_causal_mask: Whether to hide the positions after the query's, also
            from and of global tokens: a global token is seen by itself and by
            what follows it, and sees itself and what comes before it.
        return_attention_scores: Whether to return the attention weights too, a
            tensor of shape `(B, N, T, T)`. It is for looking at: it costs time
            and memory that grow as `T * T`.
        state: Streaming state, only with `num_global_tokens`: the global
            tokens and the `M = left * max(dilation_rate)` positions before the
            next. Scores of a streaming call have shape
            `(B, N, T, num_global_tokens + M + T)`.

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
    is_question = keras.ops.equal(tokens, 1)
    x = x + keras_attn.layers.LongformerAttention(
        num_heads=4, key_dim=16, window_size=128, max_global_tokens=8
    )(x, global_mask=is_question)
    model = keras.Model(tokens, keras.layers.Dense(2)(x[:, 0]))
    ```
    """

    def __init__(
        self,
        num_heads,
        key_dim,
        window_size,
        dilation_rate=1,
        max_global_tokens=None,
        num_global_tokens=None,
        separate_global_projections=True,
        **kwargs,
    ):
        super().__init__(num_heads, key_dim, **kwargs)
        self.window_size = to_window_size(self, window_size)
        self.dilation_rate = to_dilation_rate(self, dilation_rate)
        if (max_global_tokens is None) == (num_global_tokens is None):
            raise ValueError(
                f"`{type(self).__name__}` needs either `max_global_tokens`, "
                "for global tokens that `global_mask` marks at each call, or "
                "`num_global_tokens`, for those at the start of a sequence. "
                f"Received: max_global_tokens={max_global_tokens}, "
                f"num_global_tokens={num_global_tokens}"
            )
        if max_global_tokens is None:
            check_positive_integers(self, num_global_tokens=num_global_tokens)
        else:
            check_positive_integers(self, max_global_tokens=max_global_tokens)
        self.max_global_tokens = max_global_tokens
        self.num_global_tokens = num_global_tokens
        self.separate_global_projections = separate_global_projections
        if separate_global_projections:
            self.projections = (
                *self.projections,
                "query_global",
                "key_global",
                "value_global",
            )

    def build(self, query_shape, value_shape=None, key_shape=None):
        super().build(query_shape, value_shape, key_shape)
        value_shape = query_shape if value_shape is None else value_shape
        key_shape = value_shape if key_shape is None else key_shape
        self.query_global_dense = self._add_heads(
            "query_global", query_shape, self.key_dim
        )
        self.key_global_dense = self._add_heads(
            "key_global", key_shape, self.key_dim
        )
        self.value_global_dense = self._add_heads(
            "value_global", value_shape, self.value_dim
        )

    def project(self, query, key, value):
        """Projects the inputs into pairs of heads, those of windows first.

        Only a few queries are global, so that the second of the pair of the
        query is the query itself, still to be projected.
        """
        heads = super().project(query, key, value)
        others = (query, None, None)
        if self.separate_global_projections:
            others = (
                query,
                self._to_heads(self.key_global_dense, key),
                self._to_heads(self.value_global_dense, value),
            )
        return tuple(zip(heads, others, strict=True))

    def _to_heads(self, dense, x):
        return ops.cast(dense(x), self.compute_dtype)

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
        global_mask=None,
    ):
        query, inputs = query
        key, global_key = key
        value, global_value = value
        options = {
            "window_size": self.window_size,
            "dilation_rate": self.dilation_rate,
            "global_key": global_key,
            "global_value": global_value,
            "padding_mask": padding_mask,
            "dropout": dropout,
            "return_attention_scores": return_attention_scores,
        }
        if state is None:
            positions = self._global_positions(
                inputs, padding_mask, global_mask
            )
            inputs = take_positions(inputs, positions)
        else:
            inputs = inputs[:, : self.num_global_tokens]
        if self.separate_global_projections:
            options["global_query"] = self._to_heads(
                self.query_global_dense, inputs
            )
        if state is not None:
            return longformer_attention_step(
                query, key, value, state=state, **options
            )
        return longformer_attention(
            query,
            key,
            value,
            global_positions=positions,
            use_causal_mask=use_causal_mask,
            **options,
        )

    def _global_positions(self, query, padding_mask, global_mask):
        """Finds the positions `(B, G)` of the tokens that are global."""
        batch, length = ops.shape(query)[:2]
        if self.num_global_tokens is not None:
            places = ops.arange(self.num_global_tokens, dtype="int32")[None]
            places = ops.where(places < length, places, -1)
            return ops.broadcast_to(places, (batch, self.num_global_tokens))
        if global_mask is None:
            return -ops.ones((batch, self.max_global_tokens), dtype="int32")
        global_mask = to_boolean(
            self,
            "global_mask",
            global_mask,
            query.shape[:2],
            broadcast=True,
        )
        global_mask = ops.broadcast_to(global_mask, (batch, length))
        if padding_mask is not None:
            global_mask = ops.logical_and(global_mask, padding_mask)
        count = ops.max(ops.sum(ops.cast(global_mask, "int32"), axis=1))
        count = concrete_integer(count)
        if count is not None and count > self.max_global_tokens:
            raise ValueError(
                f"`{type(self).__name__}` has room for `max_global_tokens="
                f"{self.max_global_tokens}` in a sequence. Received: "
                f"`global_mask` with {count} of them"
            )
        return global_token_positions(global_mask, self.max_global_tokens)

    def initial_state(self, batch_size, max_length=None):
        """Creates the state from which streaming starts: an empty past.

        Args:
            batch_size: Number of sequences.
            max_length: Not needed, for the state does not grow.

        Returns:
            Dictionary of tensors, for the call argument `state`.
        """
        self._check_streaming()
        check_positive_integers(self, batch_size=batch_size)
        past = empty_past(self, batch_size)

        def empty(name):
            shape = past[name].shape
            shape = (batch_size, self.num_global_tokens, *shape[2:])
            return ops.zeros(shape, dtype=past[name].dtype)

        return {
            "past": past,
            "prefix": {
                "key": empty("key"),
                "value": empty("value"),
                "global_key": empty("key"),
                "global_value": empty("value"),
                "padding_mask": empty("padding_mask"),
            },
            "length": ops.zeros((), dtype="int32"),
        }

    def _check_streaming(self):
        if self.num_global_tokens is None:
            raise ValueError(
                f"`{type(self).__name__}` has no streaming form, and takes no "
                "`state`, with `max_global_tokens`: a global token may come at "
                "any time, and attends to everything before it, which no state "
                "of fixed size holds. Use `num_global_tokens` instead."
            )

    def _check_call(self, query, value, key, **options):
        if options.get("state") is not None:
            self._check_streaming()
        if self.num_global_tokens is not None:
            if options.get("global_mask") is not None:
                raise ValueError(
                    f"`{type(self).__name__}` takes no `global_mask` with "
                    f"`num_global_tokens={self.num_global_tokens}`, which "
                    "tells what is global. Use `max_global_tokens` instead."
                )
        return super()._check_call(query, value, key, **options)

    def _check_shapes(self, query_shape, value_shape, key_shape):
        super()._check_shapes(query_shape, value_shape, key_shape)
        check_lengths(self, query_shape, value_shape)

    def attention_scores_shape(self, query_shape, value_shape, state=None):
        batch, heads, length, keys = super().attention_scores_shape(
            query_shape, value_shape
        )
        if state is not None and keys is not None:
            past = state["past"]["padding_mask"].shape[1]
            keys = self.num_global_tokens + past + keys
        return (batch, heads, length, keys)

    def get_config(self):
        config = {
            "window_size": self.window_size,
            "dilation_rate": self.dilation_rate,
            "max_global_tokens": self.max_global_tokens,
            "num_global_tokens": self.num_global_tokens,
            "separate_global_projections": self.separate_global_projections,
        }
        return {**super().get_config(), **config}
