"""Block of a Transformer, around any attention layer."""

import inspect

import keras
from keras import ops

from keras_attn.layers.adaptation import enable_lora
from keras_attn.layers.adaptation import quantized_dtype
from keras_attn.layers.boom import Boom
from keras_attn.layers.padding import AttachedMask
from keras_attn.layers.padding import merge_masks
from keras_attn.layers.padding import zero_padding
from keras_attn.utils import check_choice
from keras_attn.utils import check_rates
from keras_attn.utils import serialize_sublayer


@keras.saving.register_keras_serializable(package="keras_attn")
class TransformerBlock(keras.layers.Layer):
    """Attention of any kind and a feed-forward layer, with norms around them.

    This is the block of [Attention Is All You
    Need](https://arxiv.org/abs/1706.03762) (Vaswani et al., 2017, section
    3.1), with whatever attention it is given: a sequence layer of this
    package, `keras.layers.MultiHeadAttention`,
    `keras.layers.GroupQueryAttention`, or another layer that is called alike.
    It is an encoder block; with `use_causal_mask` or a state the block of a
    language model; and with `cross_attention` also that of a decoder.

    Each of the parts has a residual connection around it:
    `x + dropout(part(norm(x)))`, or `norm(x + dropout(part(x)))` with
    `norm="post"`. What padding holds, even NaN, stays where it is.

    Args:
        attention: The layer of self-attention, which belongs to this block
            alone. `None` for a block without.
        intermediate_dim: Number of features inside the feed-forward layer.
        cross_attention: The layer that attends to the call argument
            `context`. `None` for a block without.
        norm: `"pre"` normalizes what goes into each part, `"post"`, as in the
            paper, what comes out of the sum.
        norm_epsilon: Small number added to the variance in the norms.
        activation: Activation in the feed-forward layer, see `Boom`.
        down: `"dense"` for an ordinary feed-forward layer, `"sum"` for that of
            SHA-RNN, see `Boom`.
        dropout: Dropout rate of the output of each part. That of the
            attention weights is an argument of the attention layer.
        kernel_initializer: Initializer of the feed-forward kernels.
        seed: Integer seed of the dropout.
        **kwargs: Arguments of `keras.layers.Layer`, such as `name` or `dtype`.
            The attention layers keep their own dtype.

    Call arguments:
        inputs: Tensor of shape `(B, T, F)`.
        context: Tensor of shape `(B, S, F')`, for `cross_attention`.
        mask: Boolean tensor of shape `(B, T)`, `False` for padding.
        inputs_mask: The same, by the name that Keras gives it if there is a
            `context`.
        context_mask: Boolean tensor of shape `(B, S)`, `False` for padding.
        use_causal_mask: Whether to hide the positions after each position.
        state: Streaming state of the attention, from `initial_state()` or the
            previous call. The call then takes the next positions, one or more.
        return_attention_scores: Whether to return the attention weights too.
        training: Whether to apply dropout.
        **kwargs: Further call arguments of the attention layer, such as
            `attention_mask` or `global_mask`.

    Returns:
        Tensor of shape `(B, T, F)`. With `return_attention_scores`, also the
        weights of the attention and then those of the cross-attention, if the
        block has them. With `state`, the new state comes last.

    Raises:
        ValueError: For what the attention layer cannot honour.

    Example:

    ```python
    import keras
    import keras_attn

    x = inputs = keras.Input((None, 16))
    for _ in range(2):
        x = keras_attn.TransformerBlock(
            keras_attn.LinearAttention(num_heads=2, key_dim=8),
            intermediate_dim=64,
        )(x, use_causal_mask=True)
    model = keras.Model(inputs, x)
    ```
    """

    def __init__(
        self,
        attention,
        intermediate_dim,
        cross_attention=None,
        norm="pre",
        norm_epsilon=1e-5,
        activation="gelu",
        down="dense",
        dropout=0.0,
        kernel_initializer="glorot_uniform",
        seed=None,
        **kwargs,
    ):
        # the state must stay as it is on its way in
        super().__init__(autocast=False, **kwargs)
        self._check_layers(attention=attention, cross_attention=cross_attention)
        check_choice(self, ("pre", "post"), norm=norm)
        check_rates(self, dropout=dropout)
        self.attention = attention
        self.intermediate_dim = intermediate_dim
        self.cross_attention = cross_attention
        self.norm = norm
        self.norm_epsilon = norm_epsilon
        self.activation = activation
        self.down = down
        self.dropout = dropout
        self.kernel_initializer = keras.initializers.get(kernel_initializer)
        self.seed = seed
        self.supports_masking = True
        self.attached_mask = AttachedMask()
        self.feed_forward = Boom(
            intermediate_dim,
            down=down,
            activation=activation,
            kernel_initializer=self.kernel_initializer,
            dtype=self.dtype_policy,
            name="feed_forward",
        )
        (
            self.attention_dropout_layer,
            self.cross_attention_dropout_layer,
            self.feed_forward_dropout_layer,
        ) = (
            keras.layers.Dropout(
                dropout,
                seed=None if seed is None else seed + offset,
                dtype=self.dtype_policy,
            )
            for offset in range(3)
        )

    def _check_layers(self, **layers):
        for name, layer in layers.items():
            if layer is not None and not isinstance(layer, keras.layers.Layer):
                raise ValueError(
                    f"`{type(self).__name__}` needs a Keras layer or `None` "
                    f"for `{name}`. Received: {name}={layer!r}"
                )

    def build(self, inputs_shape, context_shape=None):
        shape = tuple(inputs_shape)
        self._check_context(context_shape)
        if self.attention is not None:
            self.attention_norm = self._add_norm("attention_norm", shape)
            _build_once(self.attention, shape, shape)
        if self.cross_attention is not None:
            self.cross_attention_norm = self._add_norm(
                "cross_attention_norm", shape
            )
            _build_once(self.cross_attention, shape, tuple(context_shape))
        self.feed_forward_norm = self._add_norm("feed_forward_norm", shape)
        self.feed_forward.build(shape)

    def _add_norm(self, name, shape):
        norm = keras.layers.LayerNormalization(
            epsilon=self.norm_epsilon, dtype=self.dtype_policy, name=name
        )
        norm.build(shape)
        return norm

    def initial_state(self, batch_size, max_length=None):
        """Creates the state from which streaming starts.

        Args:
            batch_size: Number of sequences.
            max_length: Number of positions that will be streamed at most, for
                the mechanisms that must keep all of them.

        Returns:
            The state of the attention layer, for the call argument `state`; an
            empty dictionary without attention.
        """
        if self.attention is None:
            return {}
        if not hasattr(self.attention, "initial_state"):
            raise ValueError(
                f"The attention of this `{type(self).__name__}`, "
                f"`{type(self.attention).__name__}`, has no streaming form."
            )
        return self.attention.initial_state(batch_size, max_length)

    def call(
        self,
        inputs,
        context=None,
        mask=None,
        inputs_mask=None,
        context_mask=None,
        use_causal_mask=False,
        state=None,
        return_attention_scores=False,
        training=None,
        **kwargs,
    ):
        self._check_context(context)
        options = self._options(
            use_causal_mask, state, return_attention_scores, **kwargs
        )
        mask = merge_masks(
            self,
            inputs.shape[:2],
            mask=mask,
            inputs_mask=inputs_mask,
            attached_mask=self.attached_mask(inputs),
        )
        x = zero_padding(ops.cast(inputs, self.compute_dtype), mask)
        extras, new_state = [], state
        if self.attention is not None:
            y = self._enter(x, self.attention_norm)
            results = self.attention(
                y,
                y,
                query_mask=mask,
                value_mask=mask,
                training=training,
                **options,
            )
            if isinstance(results, tuple):
                results, *extras = results
                if state is not None:
                    new_state = extras.pop()
            results = self.attention_dropout_layer(results, training=training)
            x = self._leave(x, results, self.attention_norm)
        if self.cross_attention is not None:
            context_mask = merge_masks(
                self,
                context.shape[:2],
                context_mask=context_mask,
                attached_mask=self.attached_mask(context),
            )
            # a tensor of its own, because Keras' layer takes the masks off
            # those that it is given
            context = zero_padding(context, context_mask)
            results = self.cross_attention(
                self._enter(x, self.cross_attention_norm),
                context,
                query_mask=mask,
                value_mask=context_mask,
                training=training,
                **_scores(return_attention_scores),
            )
            if return_attention_scores:
                results, scores = results
                extras.append(scores)
            results = self.cross_attention_dropout_layer(
                results, training=training
            )
            x = self._leave(x, results, self.cross_attention_norm)
        y = self.feed_forward(self._enter(x, self.feed_forward_norm))
        y = self.feed_forward_dropout_layer(y, training=training)
        outputs = [self._leave(x, y, self.feed_forward_norm), *extras]
        if state is not None:
            outputs.append(new_state)
        return tuple(outputs) if len(outputs) > 1 else outputs[0]

    def _enter(self, x, norm):
        """What goes into a part."""
        return norm(x) if self.norm == "pre" else x

    def _leave(self, x, y, norm):
        """Adds the output `y` of a part to what went around it."""
        x = x + ops.cast(y, self.compute_dtype)
        return x if self.norm == "pre" else norm(x)

    def _options(
        self, use_causal_mask, state, return_attention_scores, **kwargs
    ):
        """The call arguments of the attention layer that are in use."""
        options = {k: v for k, v in kwargs.items() if v is not None}
        if use_causal_mask:
            options["use_causal_mask"] = True
        options.update(_scores(return_attention_scores))
        if self.attention is None:
            if kwargs:
                raise ValueError(
                    f"This `{type(self).__name__}` has no attention that "
                    f"could take {sorted(kwargs)}."
                )
            return {}
        if state is not None:
            options["state"] = state
        return options

    def _check_context(self, context):
        if (context is None) == (self.cross_attention is None):
            return
        received = "nothing" if context is None else "a context"
        raise ValueError(
            f"`{type(self).__name__}` needs the call argument `context` if it "
            "has a `cross_attention`, and takes none otherwise. Received: "
            f"{received}, cross_attention={self.cross_attention}"
        )

    def compute_output_shape(self, inputs_shape, context_shape=None):
        return tuple(inputs_shape)

    def compute_output_spec(
        self,
        inputs,
        context=None,
        mask=None,
        inputs_mask=None,
        context_mask=None,
        use_causal_mask=False,
        state=None,
        return_attention_scores=False,
        training=None,
        **kwargs,
    ):
        self._check_context(context)
        options = self._options(
            use_causal_mask, state, return_attention_scores, **kwargs
        )
        outputs = [keras.KerasTensor(inputs.shape, dtype=self.compute_dtype)]
        if self.attention is not None:
            spec = self.attention.compute_output_spec(inputs, inputs, **options)
            outputs += spec[1:] if isinstance(spec, tuple) else ()
        new_state = outputs.pop() if "state" in options else state
        if self.cross_attention is not None and return_attention_scores:
            outputs.append(
                self.cross_attention.compute_output_spec(
                    inputs, context, return_attention_scores=True
                )[1]
            )
        if state is not None:
            outputs.append(new_state)
        return tuple(outputs) if len(outputs) > 1 else outputs[0]

    enable_lora = enable_lora

    def get_config(self):
        config = {
            name: getattr(self, name)
            for name in inspect.signature(TransformerBlock).parameters
            if name != "kwargs"
        }
        for name in ("attention", "cross_attention"):
            config[name] = serialize_sublayer(config[name])
        config["activation"] = self.feed_forward.get_config()["activation"]
        config["kernel_initializer"] = keras.initializers.serialize(
            self.kernel_initializer
        )
        return {**super().get_config(), **config, **quantized_dtype(self)}

    @classmethod
    def from_config(cls, config):
        layers = {
            name: keras.saving.deserialize_keras_object(config[name])
            for name in ("attention", "cross_attention")
        }
        return cls(**{**config, **layers})


def _build_once(attention, query_shape, value_shape):
    """Builds an attention layer that does not hold weights already."""
    if not attention.built:
        attention.build(query_shape, value_shape)


def _scores(return_attention_scores):
    """The call argument, only if it is asked for."""
    return {"return_attention_scores": True} if return_attention_scores else {}
