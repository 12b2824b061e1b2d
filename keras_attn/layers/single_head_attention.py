"""Single-headed attention layer."""

import keras
from keras import ops

from keras_attn.layers.adaptation import enable_lora
from keras_attn.layers.adaptation import quantized_dtype
from keras_attn.layers.padding import AttachedMask
from keras_attn.layers.padding import differ
from keras_attn.layers.padding import merge_masks
from keras_attn.layers.padding import to_boolean
from keras_attn.layers.padding import zero_padding
from keras_attn.layers.streaming import append_state
from keras_attn.layers.streaming import state_spec
from keras_attn.ops import key_value_cache
from keras_attn.ops import key_value_cache_mask
from keras_attn.ops import update_key_value_cache
from keras_attn.ops.boom import quick_gelu
from keras_attn.ops.single_head_attention import single_head_attention
from keras_attn.utils import check_choice
from keras_attn.utils import check_positive_integers
from keras_attn.utils import check_rates
from keras_attn.utils import check_shards
from keras_attn.utils import clone_initializer


@keras.saving.register_keras_serializable(package="keras_attn")
class SingleHeadAttention(keras.layers.Layer):
    """Attention with one head, one projection, and gates in place of others.

    This is the attention of [SHA-RNN](https://arxiv.org/abs/1911.11423)
    (Merity, 2019, sections 6.2 and 6.4). The only matrix product on the
    sequence is that of the query, which a layer normalization follows. A query
    gate, a key gate and a value gate, vectors with an entry per feature, do
    the rest:

    `output = gv * softmax(gq * norm(W x) * gk * memory / sqrt(F)) memory`

    Keys and values are the raw inputs, so that a long memory is neither
    projected nor copied, which makes the layer cheap where much is attended
    by little. All pairs are scored: time and memory grow as `T * S`.

    Inputs may be of any length. Padding masks are honoured wherever in the
    sequence the padding is, and whatever it holds.

    Args:
        num_heads: Number of attention heads, which share out the features.
        value_gate: What the value gate is made of. `"overparam"` is the
            over-parameterised gate of the paper, `sigmoid(f) * tanh(c)` with
            `c` and `f` from a dense layer on a learned vector, which
            `collapse()` folds into that vector after training. `"vector"` is
            such a vector, `"sigmoid"` the sigmoid of one, as the gates of
            query and key are, and `None` no gate.
        use_key_projection: Whether to multiply the key by a matrix.
        use_value_projection: Whether to multiply the value by a matrix.
        output_mixing: Whether to add a dense layer on output and query to the
            gated output.
        dropout: Dropout rate of the attention weights.
        query_dropout: Dropout rate of the query.
        value_dropout: Dropout rate of the value.
        kernel_initializer: Initializer of the kernels. `None` is that of the
            author, normal of standard deviation `0.1 / sqrt(F)`.
        seed: Integer seed of the dropout.
        **kwargs: Arguments of `keras.layers.Layer`, such as `name` or `dtype`.

    Call arguments:
        query: Tensor of shape `(B, T, F)`.
        value: Tensor of shape `(B, S, F)`. Defaults to `query`.
        key: Tensor of shape `(B, S, F)`. Defaults to `value`.
        mask: Boolean tensor of shape `(B, T)`, `False` for padding, if there
            is no `value`.
        query_mask: Boolean tensor of shape `(B, T)`.
        value_mask: Boolean tensor of shape `(B, S)`.
        key_mask: Boolean tensor of shape `(B, S)`.
        attention_mask: Boolean tensor of shape `(B, T, S)`, or
            `(B, T, M + S)` with a memory, `True` where a query may attend a
            key.
        memory: Tensor of shape `(B, M, F)` that precedes key and value.
        memory_mask: Boolean tensor of shape `(B, M)`, `False` for the empty
            slots of the memory.
        return_attention_scores: Whether to return the weights as well.
        use_causal_mask: Whether to hide the positions after a query's own.
            The memory precedes them all, and stays visible.
        state: Streaming state from `initial_state()` or the previous call, in
            place of a memory. The call then takes the next positions of a
            sequence, one or more, and attends causally to all up to them.

    Returns:
        Tensor of shape `(B, T, F)`. With `return_attention_scores`, also the
        weights, of shape `(B, num_heads, T, M + S)`, or with `state`
        `(B, num_heads, T, max_length)`. With `state`, the new state comes
        last.

    Example:

    ```python
    import keras
    import keras_attn

    layer = keras_attn.layers.SingleHeadAttention()
    x = keras.random.normal((2, 11, 16))
    memory = keras.random.normal((2, 100, 16))
    y = layer(x, memory=memory, use_causal_mask=True)  # (2, 11, 16)
    ```
    """

    def __init__(
        self,
        num_heads=1,
        value_gate="overparam",
        use_key_projection=False,
        use_value_projection=False,
        output_mixing=False,
        dropout=0.0,
        query_dropout=0.0,
        value_dropout=0.0,
        kernel_initializer=None,
        seed=None,
        **kwargs,
    ):
        super().__init__(**kwargs)
        check_positive_integers(self, num_heads=num_heads)
        check_choice(
            self,
            ("overparam", "vector", "sigmoid", None),
            value_gate=value_gate,
        )
        check_rates(
            self,
            dropout=dropout,
            query_dropout=query_dropout,
            value_dropout=value_dropout,
        )
        self.num_heads = num_heads
        self.value_gate = value_gate
        self.use_key_projection = use_key_projection
        self.use_value_projection = use_value_projection
        self.output_mixing = output_mixing
        self.dropout = dropout
        self.query_dropout = query_dropout
        self.value_dropout = value_dropout
        self.kernel_initializer = keras.initializers.get(kernel_initializer)
        self.seed = seed
        self.supports_masking = True
        self.attached_mask = AttachedMask()
        (
            self.dropout_layer,
            self.query_dropout_layer,
            self.value_dropout_layer,
        ) = (
            keras.layers.Dropout(
                rate,
                seed=None if seed is None else seed + offset,
                dtype=self.dtype_policy,
            )
            for offset, rate in enumerate(
                (dropout, query_dropout, value_dropout)
            )
        )

    def build(self, query_shape, value_shape=None, key_shape=None):
        value_shape = query_shape if value_shape is None else value_shape
        key_shape = value_shape if key_shape is None else key_shape
        self._check_shapes(query_shape, value_shape, key_shape)
        units = query_shape[-1]
        check_shards(self, "query/kernel", 1, features=units)
        self.query_dense = self._add_dense("query", units, units)
        self.query_norm = keras.layers.LayerNormalization(
            epsilon=1e-12, dtype=self.dtype_policy, name="query_norm"
        )
        self.query_norm.build((None, None, units))
        self.key_dense = self.value_dense = None
        self.value_gate_dense = self.mixing_dense = None
        if self.use_key_projection:
            self.key_dense = self._add_dense("key", units, units)
        if self.use_value_projection:
            self.value_dense = self._add_dense("value", units, units)
        if self.value_gate == "overparam":
            self.value_gate_dense = self._add_dense(
                "value_gate", units, 2 * units
            )
        if self.output_mixing:
            self.mixing_dense = self._add_dense(
                "mixing", units, units, inputs=2
            )
            self.mixing_vector = self._add_vector(
                "mixing_vector", units, "ones"
            )
        self.query_vector = self._add_vector("query_vector", units)
        self.key_vector = self._add_vector("key_vector", units)
        if self.value_gate is not None:
            self.value_vector = self._add_vector("value_vector", units)

    def _add_dense(self, name, features, units, inputs=1):
        initializer = self.kernel_initializer
        if initializer is None:
            initializer = keras.initializers.RandomNormal(
                stddev=0.1 * features**-0.5
            )
        dense = keras.layers.Dense(
            units,
            kernel_initializer=clone_initializer(initializer),
            dtype=self.dtype_policy,
            name=name,
        )
        dense.build((None, None, inputs * features))
        return dense

    def _add_vector(self, name, units, initializer="zeros"):
        return self.add_weight(
            shape=(units,), initializer=initializer, name=name
        )

    def initial_state(self, batch_size, max_length=None):
        """Creates an empty cache of what is attended.

        Args:
            batch_size: Number of sequences.
            max_length: Number of positions that the cache can hold.

        Returns:
            Dictionary of tensors, for the call argument `state`. See
            `keras_attn.ops.key_value_cache`. Keys have a buffer of their own
            only if there are projections.
        """
        check_positive_integers(
            self, batch_size=batch_size, max_length=max_length
        )
        shapes = {"value": self.query_vector.shape}
        if self._has_projections:
            shapes["key"] = self.query_vector.shape
        return key_value_cache(
            batch_size, max_length, self.compute_dtype, **shapes
        )

    @property
    def _has_projections(self):
        return self.use_key_projection or self.use_value_projection

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
        memory=None,
        memory_mask=None,
        return_attention_scores=False,
        training=None,
        use_causal_mask=False,
        state=None,
    ):
        self._check_call(query, value, key, memory, mask, use_causal_mask)
        self._check_state(state, query, value, key, memory, attention_mask)
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
            attached_mask=attached_mask,
            attached_key_mask=None if key is None else self.attached_mask(key),
        )
        # what padding holds, be it NaN, must not even be multiplied with 0
        query = zero_padding(query, query_mask)
        key = None if key is None else zero_padding(key, padding_mask)
        value = zero_padding(value, padding_mask)
        if memory is not None:
            memory_mask = merge_masks(
                self, memory.shape[:2], memory_mask=memory_mask
            )
            memory = zero_padding(memory, memory_mask)
            padding_mask = _join_masks(memory, memory_mask, value, padding_mask)
            key = None if key is None else _join(memory, key)
            value = _join(memory, value)
        key = value if key is None else key
        if attention_mask is not None:
            shape = (query.shape[0], query.shape[1], value.shape[1])
            if len(attention_mask.shape) == 4:
                shape = (shape[0], self.num_heads, *shape[1:])
            attention_mask = to_boolean(
                self, "attention_mask", attention_mask, shape, broadcast=True
            )

        query = self.query_norm(self.query_dense(query))
        query = self.query_dropout_layer(query, training=training)
        if self.key_dense is not None:
            key = self.key_dense(key)
        if self.value_dense is not None:
            value = self.value_dense(value)
        if state is not None:
            chunk = {"key": key, "value": value}
            chunk = {name: chunk[name] for name in chunk if name in state}
            state = update_key_value_cache(state, padding_mask, **chunk)
            value = state["value"]
            key = state.get("key", value)
            padding_mask = state["padding_mask"]
            attention_mask = key_value_cache_mask(state, ops.shape(query)[1])
        value = self.value_dropout_layer(value, training=training)
        query_gate = ops.sigmoid(self._cast(self.query_vector))
        results = single_head_attention(
            self._to_heads(query),
            self._to_heads(key),
            self._to_heads(value),
            query_gate=self._to_heads(query_gate),
            key_gate=self._to_heads(ops.sigmoid(self._cast(self.key_vector))),
            value_gate=self._to_heads(self.compute_value_gate()),
            padding_mask=padding_mask,
            attention_mask=attention_mask,
            use_causal_mask=use_causal_mask and state is None,
            dropout=self.dropout_layer if self.dropout and training else None,
            return_attention_scores=return_attention_scores,
        )
        heads, *scores = results if return_attention_scores else (results,)
        output = ops.reshape(heads, ops.shape(query))
        if self.mixing_dense is not None:
            mixed = ops.concatenate([output, query_gate * query], axis=-1)
            output = output * ops.sigmoid(self._cast(self.mixing_vector))
            output = output + quick_gelu(self.mixing_dense(mixed))
        output = zero_padding(output, query_mask)
        if scores and query_mask is not None:
            visible = query_mask[:, None, :, None]
            scores = [ops.where(visible, scores[0], ops.zeros_like(scores[0]))]
        return append_state((output, *scores) if scores else output, state)

    def _cast(self, vector):
        return ops.cast(vector, self.compute_dtype)

    def _to_heads(self, x):
        """Cuts the features of `(..., F)` into heads, `(..., N, H)`."""
        if x is None:
            return None
        size = x.shape[-1] // self.num_heads
        return ops.reshape(x, (*ops.shape(x)[:-1], self.num_heads, size))

    def compute_value_gate(self):
        """Computes the gate of shape `(F,)` of the value, or `None`."""
        if self.value_gate is None:
            return None
        vector = self._cast(self.value_vector)
        if self.value_gate == "vector":
            return vector
        gate = ops.sigmoid(vector)
        if self.value_gate == "sigmoid":
            return gate
        candidate, scale = ops.split(
            self.value_gate_dense(gate[None])[0], 2, axis=-1
        )
        return ops.sigmoid(scale) * ops.tanh(candidate)

    def collapse(self):
        """Folds the over-parameterised value gate into a vector.

        Returns:
            A layer that computes the same, with `value_gate="vector"`.
        """
        if self.value_gate != "overparam":
            raise ValueError(
                'Only a layer with `value_gate="overparam"` can collapse. '
                f"Received: value_gate={self.value_gate!r}"
            )
        config = {**self.get_config(), "value_gate": "vector"}
        layer = type(self).from_config(config)
        layer.build((None, None, self.query_vector.shape[0]))
        folded = {id(weight) for weight in self.value_gate_dense.weights}
        kept = [w for w in self.weights if id(w) not in folded]
        for weight, value in zip(layer.weights, kept, strict=True):
            weight.assign(value)
        layer.value_vector.assign(self.compute_value_gate())
        return layer

    def _check_shapes(self, query_shape, value_shape, key_shape):
        units = query_shape[-1]
        shapes = {"query": query_shape, "value": value_shape, "key": key_shape}
        for name, shape in shapes.items():
            if len(shape) != 3 or units is None or shape[-1] != units:
                raise ValueError(
                    f"`{type(self).__name__}` needs a `{name}` of shape "
                    "(batch, length, features), with the features of `query`. "
                    f"Received: query.shape={tuple(query_shape)}, "
                    f"{name}.shape={tuple(shape)}"
                )
        if units % self.num_heads:
            raise ValueError(
                f"`num_heads` of `{type(self).__name__}` must divide the "
                f"features of `query`. Received: num_heads={self.num_heads}, "
                f"query.shape={tuple(query_shape)}"
            )
        if differ(value_shape[1], key_shape[1]):
            raise ValueError(
                f"The lengths of `value` and `key` of `{type(self).__name__}` "
                f"must be equal. Received: value.shape={tuple(value_shape)}, "
                f"key.shape={tuple(key_shape)}"
            )

    def _check_call(self, query, value, key, memory, mask, use_causal_mask):
        name = type(self).__name__
        value_shape = (query if value is None else value).shape
        key_shape = value_shape if key is None else key.shape
        self._check_shapes(query.shape, value_shape, key_shape)
        if mask is not None and value is not None:
            raise ValueError(
                f"`{name}` cannot tell whether `mask` is that of `query` or of "
                "`value`. Pass `query_mask` and `value_mask` instead."
            )
        if use_causal_mask and differ(query.shape[1], value_shape[1]):
            raise ValueError(
                f"`{name}` needs as many keys as queries for "
                "`use_causal_mask`; what precedes them belongs into `memory`. "
                f"Received: query.shape={tuple(query.shape)}, "
                f"value.shape={tuple(value_shape)}"
            )
        if memory is not None and memory.shape[-1] != query.shape[-1]:
            raise ValueError(
                f"`{name}` needs a `memory` with the features of `query`. "
                f"Received: query.shape={tuple(query.shape)}, "
                f"memory.shape={tuple(memory.shape)}"
            )

    def _check_state(self, state, query, value, key, memory, attention_mask):
        if state is None:
            return
        name = type(self).__name__
        others = {
            "key": key,
            "memory": memory,
            "attention_mask": attention_mask,
        }
        for other, tensor in others.items():
            if tensor is not None:
                raise ValueError(
                    f"`{name}` cannot combine `{other}` with `state`."
                )
        value_shape = (query if value is None else value).shape
        if differ(query.shape[1], value_shape[1]):
            raise ValueError(
                f"`{name}` needs as many keys as queries for `state`. "
                f"Received: query.shape={tuple(query.shape)}, "
                f"value.shape={tuple(value_shape)}"
            )

    def compute_output_shape(
        self, query_shape, value_shape=None, key_shape=None
    ):
        value_shape = query_shape if value_shape is None else value_shape
        key_shape = value_shape if key_shape is None else key_shape
        self._check_shapes(query_shape, value_shape, key_shape)
        return query_shape

    def compute_output_spec(
        self,
        query,
        value=None,
        key=None,
        mask=None,
        attention_mask=None,
        memory=None,
        return_attention_scores=False,
        use_causal_mask=False,
        state=None,
        **kwargs,
    ):
        self._check_call(query, value, key, memory, mask, use_causal_mask)
        self._check_state(state, query, value, key, memory, attention_mask)
        outputs = [keras.KerasTensor(query.shape, dtype=self.compute_dtype)]
        if return_attention_scores:
            keys = (query if value is None else value).shape[1]
            if memory is not None:
                known = keys is not None and memory.shape[1] is not None
                keys = keys + memory.shape[1] if known else None
            if state is not None:
                keys = state["padding_mask"].shape[1]
            shape = (query.shape[0], self.num_heads, query.shape[1], keys)
            outputs.append(keras.KerasTensor(shape, dtype=self.compute_dtype))
        if state is not None:
            outputs.append(state_spec(state))
        return tuple(outputs) if len(outputs) > 1 else outputs[0]

    enable_lora = enable_lora

    def get_config(self):
        config = {
            "num_heads": self.num_heads,
            "value_gate": self.value_gate,
            "use_key_projection": self.use_key_projection,
            "use_value_projection": self.use_value_projection,
            "output_mixing": self.output_mixing,
            "dropout": self.dropout,
            "query_dropout": self.query_dropout,
            "value_dropout": self.value_dropout,
            "kernel_initializer": keras.initializers.serialize(
                self.kernel_initializer
            ),
            "seed": self.seed,
        }
        return {**super().get_config(), **config, **quantized_dtype(self)}


def _join(memory, x):
    """Puts the memory before `(B, S, F)`."""
    return ops.concatenate([ops.cast(memory, x.dtype), x], axis=1)


def _join_masks(memory, memory_mask, x, mask):
    """Puts the mask of the memory before that of `x`, if there is any."""
    if memory_mask is None and mask is None:
        return None
    memory_mask, mask = (
        ops.ones(ops.shape(y)[:2], dtype="bool") if y_mask is None else y_mask
        for y, y_mask in ((memory, memory_mask), (x, mask))
    )
    return ops.concatenate([memory_mask, mask], axis=1)
