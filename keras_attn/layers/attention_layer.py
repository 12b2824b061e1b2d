"""The base class of the sequence attention layers."""

import inspect

import keras
from keras import ops

from keras_attn.layers.adaptation import enable_lora
from keras_attn.layers.adaptation import quantized_dtype
from keras_attn.layers.padding import AttachedMask
from keras_attn.layers.padding import differ
from keras_attn.layers.padding import merge_masks
from keras_attn.layers.padding import to_boolean
from keras_attn.layers.padding import zero_padding
from keras_attn.layers.streaming import state_spec
from keras_attn.utils import check_positive_integers
from keras_attn.utils import check_rates
from keras_attn.utils import check_shards
from keras_attn.utils import clone_initializer


class AttentionLayer(keras.layers.Layer):
    """Base class of the layers in which one sequence attends to another.

    The base class projects `query`, `key` and `value` into heads, resolves the
    padding masks, and projects the attended heads to the output. A subclass
    adds the one thing in which mechanisms differ, by implementing `attend()`:

    ```python
    import keras_attn
    from keras import ops


    class QuadraticAttention(keras_attn.layers.AttentionLayer):
        def attend(self, query, key, value, padding_mask=None):
            weights = ops.square(ops.einsum("btnh,bsnh->bnts", query, key))
            if padding_mask is not None:
                mask = ops.cast(padding_mask, weights.dtype)
                weights = weights * mask[:, None, None, :]
            weights = weights / (1e-6 + ops.sum(weights, -1, keepdims=True))
            return ops.einsum("bnts,bsnv->btnv", weights, value)
    ```

    The signature of `attend()` states what the mechanism supports. It gets
    tensors of shape `(B, T, N, H)`, `(B, S, N, H)` and `(B, S, N, V)` and a
    `padding_mask` of shape `(B, S)` or `None`, and returns a tensor of shape
    `(B, T, N, V)`. The options that it may name besides are these; calling the
    layer with one that it does not name is an error.

    * `attention_mask`: Boolean tensor that broadcasts to `(B, T, S)`, or to
      `(B, N, T, S)` if it has four axes.
    * `use_causal_mask`: `True`.
    * `dropout`: A callable that drops out attention weights. It is passed in
      training only, and only if the rate is not 0.
    * `return_attention_scores`: `True` asks for `(heads, scores)`.
    * `state`: What `initial_state()` or the previous call returned. It asks
      for the new state as a last element, `(heads, new_state)`.
    * Any other: a call argument of the mechanism's own.

    Args:
        num_heads: Number of attention heads.
        key_dim: Size of each head of the query and key.
        value_dim: Size of each head of the value. Defaults to `key_dim`.
        dropout: Dropout rate of the attention weights, from 0 to below 1.
        use_bias: Whether the projections have a bias.
        output_shape: Features of the output. Defaults to those of `query`.
        kernel_initializer: Initializer of the projection kernels.
        bias_initializer: Initializer of the projection biases.
        kernel_regularizer: Regularizer of the projection kernels.
        bias_regularizer: Regularizer of the projection biases.
        activity_regularizer: Regularizer of the output.
        kernel_constraint: Constraint on the projection kernels.
        bias_constraint: Constraint on the projection biases.
        seed: Integer seed of the dropout.
        **kwargs: Arguments of `keras.layers.Layer`, such as `name` or `dtype`.

    Call arguments:
        query: Tensor of shape `(B, T, F)`.
        value: Tensor of shape `(B, S, F')`. Defaults to `query`, which makes
            the layer one of self-attention.
        key: Tensor of shape `(B, S, F'')`. Defaults to `value`.
        mask: Boolean tensor of shape `(B, T)`, the padding mask of a lone
            `query`. `True`, or a non-zero integer, marks what is not padding.
        query_mask: Boolean tensor of shape `(B, T)`, the padding mask of
            `query`. A masked query attends to nothing.
        value_mask: Boolean tensor of shape `(B, S)`, the padding mask of
            `value`. What it masks is not attended.
        key_mask: Boolean tensor of shape `(B, S)`, the padding mask of `key`.
            What it masks is not attended.
        attention_mask: Boolean tensor of shape `(B, T, S)` or `(B, N, T, S)`,
            `True` where a query may attend a key. Axes of size 1 broadcast.
            One of shape `(B, 1, S)` masks keys, as `value_mask` does, and is
            taken by every mechanism.
        return_attention_scores: Whether to return the attention weights too.
        training: Whether to apply dropout.
        use_causal_mask: Whether to hide the keys after a query's position,
            which needs `T == S`.
        state: Streaming state from `initial_state()` or the previous call. The
            call then takes the next positions of a sequence, one or more, and
            attends causally to all up to them.

    The masks that Keras attaches to tensors are combined with the explicit
    ones, and the output carries the mask of `query`. What padding holds, even
    NaN, has no effect on any output or gradient.

    Returns:
        Tensor of shape `(B, T, output_shape)`. With `return_attention_scores`,
        `(output, scores)`, the scores of shape `(B, N, T, S)`. With `state`,
        the new state comes last: `(output, new_state)`.

    Raises:
        ValueError: For what the mechanism cannot honour.
    """

    # The inputs that are projected into heads; `attend()` gets `None` for
    # those that a subclass leaves out.
    projections = ("query", "key", "value")

    def __init__(
        self,
        num_heads,
        key_dim,
        value_dim=None,
        dropout=0.0,
        use_bias=True,
        output_shape=None,
        kernel_initializer="glorot_uniform",
        bias_initializer="zeros",
        kernel_regularizer=None,
        bias_regularizer=None,
        activity_regularizer=None,
        kernel_constraint=None,
        bias_constraint=None,
        seed=None,
        **kwargs,
    ):
        # Keras would cast float32 states to half precision on their way in
        super().__init__(autocast=False, **kwargs)
        value_dim = key_dim if value_dim is None else value_dim
        check_positive_integers(
            self, num_heads=num_heads, key_dim=key_dim, value_dim=value_dim
        )
        check_rates(self, dropout=dropout)
        if isinstance(output_shape, (tuple, list)) and len(output_shape) == 1:
            (output_shape,) = output_shape
        if output_shape is not None:
            check_positive_integers(self, output_shape=output_shape)
        self._options = tuple(inspect.signature(self.attend).parameters)
        if dropout and "dropout" not in self._options:
            raise ValueError(
                f"`{type(self).__name__}` has no dropout. "
                f"Received: dropout={dropout}"
            )
        self.num_heads = num_heads
        self.key_dim = key_dim
        self.value_dim = value_dim
        self.dropout = dropout
        self.use_bias = use_bias
        self.output_dim = output_shape
        self.kernel_initializer = keras.initializers.get(kernel_initializer)
        self.bias_initializer = keras.initializers.get(bias_initializer)
        self.kernel_regularizer = keras.regularizers.get(kernel_regularizer)
        self.bias_regularizer = keras.regularizers.get(bias_regularizer)
        # not Keras' own attribute, which would regularize states and scores
        self.output_regularizer = keras.regularizers.get(activity_regularizer)
        self.kernel_constraint = keras.constraints.get(kernel_constraint)
        self.bias_constraint = keras.constraints.get(bias_constraint)
        self.seed = seed
        self.supports_masking = True
        self.dropout_layer = keras.layers.Dropout(
            dropout, seed=seed, dtype=self.dtype_policy
        )
        self.attached_mask = AttachedMask()

    def build(self, query_shape, value_shape=None, key_shape=None):
        value_shape = query_shape if value_shape is None else value_shape
        key_shape = value_shape if key_shape is None else key_shape
        self._check_shapes(query_shape, value_shape, key_shape)
        check_shards(
            self, "attention_output/kernel", 0, num_heads=self.num_heads
        )
        self.query_dense = self._add_heads("query", query_shape, self.key_dim)
        self.key_dense = self._add_heads("key", key_shape, self.key_dim)
        self.value_dense = self._add_heads("value", value_shape, self.value_dim)
        self.output_dense = self._add_dense(
            "btnv,nve->bte",
            (None, self.num_heads, self.value_dim),
            output_shape=(None, self.output_dim or query_shape[-1]),
            bias_axes="e",
            name="attention_output",
            activity_regularizer=self.output_regularizer,
        )

    def _add_heads(self, name, input_shape, size):
        """Adds the projection of an input into heads, if there is one."""
        if name not in self.projections:
            return None
        return self._add_dense(
            "btf,fnh->btnh",
            input_shape[1:],
            output_shape=(None, self.num_heads, size),
            bias_axes="nh",
            name=name,
        )

    def _add_dense(self, equation, input_shape, bias_axes, **kwargs):
        dense = keras.layers.EinsumDense(
            equation,
            bias_axes=bias_axes if self.use_bias else None,
            kernel_initializer=clone_initializer(self.kernel_initializer),
            bias_initializer=clone_initializer(self.bias_initializer),
            kernel_regularizer=self.kernel_regularizer,
            bias_regularizer=self.bias_regularizer,
            kernel_constraint=self.kernel_constraint,
            bias_constraint=self.bias_constraint,
            dtype=self.dtype_policy,
            **kwargs,
        )
        dense.build((None, *input_shape))
        return dense

    def attend(self, query, key, value, padding_mask=None):
        """Attends to `value`; the hook that a subclass implements."""
        raise NotImplementedError(
            f"`{type(self).__name__}` must implement `attend()`."
        )

    def initial_state(self, batch_size, max_length=None):
        """Creates the state from which streaming starts.

        Args:
            batch_size: Number of sequences.
            max_length: Number of positions that will be streamed at most, for
                the mechanisms that must keep all of them.

        Returns:
            Dictionary of tensors, for the call argument `state`.
        """
        raise ValueError(f"`{type(self).__name__}` has no streaming form.")

    def call(
        self,
        query,
        value=None,
        key=None,
        mask=None,
        query_mask=None,
        value_mask=None,
        key_mask=None,
        attention_mask=None,
        return_attention_scores=False,
        training=None,
        use_causal_mask=False,
        state=None,
        **kwargs,
    ):
        options = self._check_call(
            query,
            value,
            key,
            mask=mask,
            attention_mask=attention_mask,
            return_attention_scores=return_attention_scores,
            use_causal_mask=use_causal_mask,
            state=state,
            **kwargs,
        )
        if self.dropout and training:
            options["dropout"] = self.dropout_layer
        query_mask = merge_masks(
            self,
            query.shape[:2],
            mask=mask,
            query_mask=query_mask,
            attached_mask=self.attached_mask(query),
        )
        if value is None:
            value, attached_mask = query, query_mask
        else:
            attached_mask = self.attached_mask(value)
        padding_mask = merge_masks(
            self,
            value.shape[:2],
            value_mask=value_mask,
            key_mask=key_mask,
            attention_mask=self._masks_keys(attention_mask),
            attached_mask=attached_mask,
            attached_key_mask=None if key is None else self.attached_mask(key),
        )
        key = value if key is None else key
        seen_mask = padding_mask
        if "attention_mask" in options:
            attention_mask = self._to_attention_mask(
                attention_mask, query, value
            )
            options["attention_mask"] = attention_mask
            seen_mask = _is_seen(attention_mask)
            if padding_mask is not None:
                seen_mask = ops.logical_and(seen_mask, padding_mask)

        # what padding holds must not even meet the kernels: their gradients
        # would multiply it with 0, which does not make NaN vanish
        query = zero_padding(query, query_mask)
        key = zero_padding(key, seen_mask)
        value = zero_padding(value, seen_mask)
        query, key, value = self.project(query, key, value)
        results = self.attend(
            query, key, value, padding_mask=padding_mask, **options
        )
        heads, *extras = results if isinstance(results, tuple) else (results,)
        heads = zero_padding(heads, query_mask)
        if return_attention_scores and query_mask is not None:
            scores = extras[0]  # (B, N, T, S)
            visible = query_mask[:, None, :, None]
            extras[0] = ops.where(visible, scores, ops.zeros_like(scores))
        output = self.output_dense(ops.cast(heads, self.compute_dtype))
        return (output, *extras) if extras else output

    def project(self, query, key, value):
        """Projects the inputs into heads, in compute dtype."""
        return tuple(
            None if dense is None else ops.cast(dense(x), self.compute_dtype)
            for dense, x in (
                (self.query_dense, query),
                (self.key_dense, key),
                (self.value_dense, value),
            )
        )

    def _check_call(
        self,
        query,
        value,
        key,
        mask=None,
        return_attention_scores=False,
        use_causal_mask=False,
        **options,
    ):
        """Raises for what cannot be honoured; returns the options in use."""
        name = type(self).__name__
        if mask is not None and value is not None:
            raise ValueError(
                f"`{name}` cannot tell whether `mask` is that of `query` or of "
                "`value`. Pass `query_mask` and `value_mask` instead."
            )
        if key is not None and "key" not in self.projections:
            raise ValueError(
                f"`{name}` has no keys of its own. Leave out the argument "
                f"`key`. Received: key={key}"
            )
        options = {k: v for k, v in options.items() if v is not None}
        if "state" in options and "attention_mask" in options:
            raise ValueError(
                f"`{name}` cannot combine `attention_mask` with `state`. Mask "
                "padding with `mask` instead."
            )
        if self._masks_keys(options.get("attention_mask")) is not None:
            del options["attention_mask"]
        if return_attention_scores:
            options["return_attention_scores"] = True
        if use_causal_mask:
            options["use_causal_mask"] = True
        for option in options:
            if option not in self._options:
                raise ValueError(
                    f"`{name}` does not support `{option}`. "
                    f"Received: {option}={options[option]}"
                )
        value_shape = (query if value is None else value).shape
        key_shape = value_shape if key is None else key.shape
        self._check_shapes(query.shape, value_shape, key_shape)
        for option in ("use_causal_mask", "state"):
            if option in options and differ(query.shape[1], value_shape[1]):
                raise ValueError(
                    f"`{name}` needs as many keys as queries for `{option}`. "
                    f"Received: query.shape={tuple(query.shape)}, "
                    f"value.shape={tuple(value_shape)}"
                )
        return options

    def _masks_keys(self, attention_mask):
        """Reads an `attention_mask` that is the same for all queries.

        Returns:
            Tensor of shape `(B, S)`, or `None` if the mask is of another kind,
            or `attend()` takes it as it is.
        """
        if attention_mask is None or "attention_mask" in self._options:
            return None
        shape = attention_mask.shape
        is_padding = len(shape) == 3 and shape[1] == 1
        return attention_mask[:, 0] if is_padding else None

    def _check_shapes(self, query_shape, value_shape, key_shape):
        shapes = {"query": query_shape, "value": value_shape, "key": key_shape}
        for name, shape in shapes.items():
            if len(shape) != 3 or shape[-1] is None:
                raise ValueError(
                    f"`{type(self).__name__}` needs a `{name}` of shape "
                    "(batch, length, features), with a known number of "
                    f"features. Received: {name}.shape={tuple(shape)}"
                )
        if differ(value_shape[1], key_shape[1]):
            raise ValueError(
                f"The lengths of `value` and `key` of `{type(self).__name__}` "
                f"must be equal. Received: value.shape={tuple(value_shape)}, "
                f"key.shape={tuple(key_shape)}"
            )

    def _to_attention_mask(self, mask, query, value):
        mask = ops.convert_to_tensor(mask)
        shape = (query.shape[0], query.shape[1], value.shape[1])
        if len(mask.shape) == 2:
            mask = mask[None]
        elif len(mask.shape) == 4:
            shape = (shape[0], self.num_heads, *shape[1:])
        return to_boolean(self, "attention_mask", mask, shape, broadcast=True)

    def attention_scores_shape(self, query_shape, value_shape, state=None):
        """Shape of the scores that the layer returns on request.

        If the state is a key/value cache, they are over its positions. A layer
        whose streaming scores are over others overrides it.
        """
        if state is not None and "padding_mask" in state:
            value_shape = state["padding_mask"].shape
        return (query_shape[0], self.num_heads, query_shape[1], value_shape[1])

    def compute_output_shape(
        self, query_shape, value_shape=None, key_shape=None
    ):
        value_shape = query_shape if value_shape is None else value_shape
        key_shape = value_shape if key_shape is None else key_shape
        self._check_shapes(query_shape, value_shape, key_shape)
        return (*query_shape[:-1], self.output_dim or query_shape[-1])

    def compute_output_spec(
        self,
        query,
        value=None,
        key=None,
        mask=None,
        query_mask=None,
        value_mask=None,
        key_mask=None,
        training=None,
        **options,
    ):
        options = self._check_call(query, value, key, mask=mask, **options)
        value = query if value is None else value
        outputs = [
            keras.KerasTensor(
                self.compute_output_shape(query.shape, value.shape),
                dtype=self.compute_dtype,
            )
        ]
        if "return_attention_scores" in options:
            shape = self.attention_scores_shape(
                query.shape, value.shape, options.get("state")
            )
            outputs.append(keras.KerasTensor(shape, dtype=self.compute_dtype))
        if "state" in options:
            outputs.append(state_spec(options["state"]))
        return tuple(outputs) if len(outputs) > 1 else outputs[0]

    enable_lora = enable_lora

    def get_config(self):
        config = {
            "num_heads": self.num_heads,
            "key_dim": self.key_dim,
            "value_dim": self.value_dim,
            "dropout": self.dropout,
            "use_bias": self.use_bias,
            "output_shape": self.output_dim,
            "kernel_initializer": keras.initializers.serialize(
                self.kernel_initializer
            ),
            "bias_initializer": keras.initializers.serialize(
                self.bias_initializer
            ),
            "kernel_regularizer": keras.regularizers.serialize(
                self.kernel_regularizer
            ),
            "bias_regularizer": keras.regularizers.serialize(
                self.bias_regularizer
            ),
            "activity_regularizer": keras.regularizers.serialize(
                self.output_regularizer
            ),
            "kernel_constraint": keras.constraints.serialize(
                self.kernel_constraint
            ),
            "bias_constraint": keras.constraints.serialize(
                self.bias_constraint
            ),
            "seed": self.seed,
        }
        return {**super().get_config(), **config, **quantized_dtype(self)}


def _is_seen(attention_mask):
    """Tells of each key, in shape `(B, S)`, whether any query may see it."""
    axes = tuple(range(1, len(attention_mask.shape) - 1))
    return ops.any(attention_mask, axis=axes)
