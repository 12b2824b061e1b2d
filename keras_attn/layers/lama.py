"""Low-rank factored multi-head attention, which pools sequences."""

import keras
from keras import ops

from keras_attn.layers.adaptation import enable_lora
from keras_attn.layers.adaptation import quantized_dtype
from keras_attn.layers.padding import AttachedMask
from keras_attn.layers.padding import merge_masks
from keras_attn.layers.padding import zero_padding
from keras_attn.ops import lama
from keras_attn.ops import orthogonality_penalty
from keras_attn.utils import check_choice
from keras_attn.utils import check_positive_integers
from keras_attn.utils import check_shards
from keras_attn.utils import clone_initializer
from keras_attn.utils import invalid


@keras.saving.register_keras_serializable(package="keras_attn")
class LAMA(keras.layers.Layer):
    """Pools a sequence into one vector for each of several heads.

    This is the low-rank factored multi-head attention of
    [LAMA](https://arxiv.org/abs/1912.00835) (Mehta et al., 2019), which turns
    the states of an encoder into a structured embedding of a text: `num_heads`
    weighted means of the positions, each of which reads for an aspect of its
    own. A head scores a position by a bilinear form of rank `rank` of a
    context vector and the position. Time and memory grow linearly with the
    length, and parameters as `2 * F * num_heads * rank`. Use it in place of
    pooling where a classifier must find the words that matter, and to see
    which ones it found.

    Sequences may be of any length.

    Args:
        num_heads: Number of heads, the aspects of a sequence.
        rank: Rank of the bilinear form of a head.
        context: `"learned"` for one vector that is learned, `"mean"` for the
            mean of the positions that are not padding. Both give way to the
            call argument `context`.
        normalize: Whether the scores of a position are divided by their norm
            over the heads, as in the paper. Defaults to `True`, unless there
            is one head, of whose score nothing but the sign would be left.
        temperature: Number by which the scores are divided before the softmax.
            The scores of the paper lie within 1 of zero: no weight exceeds
            `e**2 / (e**2 + T - 1)`, which is 3.6 percent of 200 positions. A
            temperature below 1 makes sharper weights.
        activation: Activation of the scores.
        hidden_dim: Units of a layer with tanh, between the inputs and the
            scores. `None` stands for no such layer.
        use_bias: Whether the scores of a head have a bias.
        orthogonality_penalty: Weight of a loss which draws the heads apart,
            the mean over the batch of `keras_attn.ops.orthogonality_penalty`.
        kernel_initializer: Initializer of the kernels.
        bias_initializer: Initializer of the biases.
        context_initializer: Initializer of the learned context. Zeros would
            leave it without a gradient.
        kernel_regularizer: Regularizer of the kernels.
        bias_regularizer: Regularizer of the biases.
        kernel_constraint: Constraint on the kernels.
        bias_constraint: Constraint on the biases.
        **kwargs: Arguments of `keras.layers.Layer`, such as `name` or `dtype`.

    Call arguments:
        inputs: Tensor of shape `(B, T, F)`.
        context: Tensor of shape `(B, C)`, one context for each sequence. A
            layer that is built with it has no learned context.
        mask: Boolean tensor of shape `(B, T)`, `True` for what is not padding.
            It is combined with the mask that Keras has attached to `inputs`.
            What padding holds, even NaN, has no effect.
        inputs_mask: The same as `mask`.
        return_attention_scores: Whether to return the weights too, a tensor of
            shape `(B, num_heads, T)`.

    Returns:
        Tensor of shape `(B, num_heads, F)`, without a mask, and the scores if
        they were asked for. A sequence that is all padding gives zeros.

    Example:

    ```python
    import keras
    import keras_attn

    tokens = keras.Input((None,), dtype="int32")
    x = keras.layers.Embedding(10_000, 64, mask_zero=True)(tokens)
    x = keras.layers.Bidirectional(
        keras.layers.GRU(32, return_sequences=True)
    )(x)
    x = keras_attn.layers.LAMA(num_heads=8)(x)
    x = keras.layers.Flatten()(x)
    model = keras.Model(tokens, keras.layers.Dense(2)(x))
    ```
    """

    def __init__(
        self,
        num_heads,
        rank=1,
        context="learned",
        normalize=None,
        temperature=1.0,
        activation="tanh",
        hidden_dim=None,
        use_bias=False,
        orthogonality_penalty=0.0,
        kernel_initializer="glorot_uniform",
        bias_initializer="zeros",
        context_initializer="random_normal",
        kernel_regularizer=None,
        bias_regularizer=None,
        kernel_constraint=None,
        bias_constraint=None,
        **kwargs,
    ):
        super().__init__(**kwargs)
        check_positive_integers(self, num_heads=num_heads, rank=rank)
        check_choice(self, ("learned", "mean"), context=context)
        if hidden_dim is not None:
            check_positive_integers(self, hidden_dim=hidden_dim)
        if not temperature > 0:
            raise invalid(self, "temperature", temperature, "positive")
        if not orthogonality_penalty >= 0:
            raise invalid(
                self,
                "orthogonality_penalty",
                orthogonality_penalty,
                "zero or positive",
            )
        self.num_heads = num_heads
        self.rank = rank
        self.context = context
        self.normalize = normalize
        self.temperature = temperature
        self.activation = keras.activations.get(activation)
        self.hidden_dim = hidden_dim
        self.use_bias = use_bias
        self.orthogonality_penalty = orthogonality_penalty
        self.kernel_initializer = keras.initializers.get(kernel_initializer)
        self.bias_initializer = keras.initializers.get(bias_initializer)
        self.context_initializer = keras.initializers.get(context_initializer)
        self.kernel_regularizer = keras.regularizers.get(kernel_regularizer)
        self.bias_regularizer = keras.regularizers.get(bias_regularizer)
        self.kernel_constraint = keras.constraints.get(kernel_constraint)
        self.bias_constraint = keras.constraints.get(bias_constraint)
        self.supports_masking = True
        self.attached_mask = AttachedMask()

    def build(self, inputs_shape, context_shape=None):
        self._check_shapes(inputs_shape, context_shape)
        features = inputs_shape[-1]
        context_size = features if context_shape is None else context_shape[-1]
        check_shards(
            self, "input_kernel", 1, num_heads=self.num_heads * self.rank
        )
        if self.hidden_dim is not None:
            check_shards(self, "hidden/kernel", 1, hidden_dim=self.hidden_dim)
        self.context_vector = self.hidden_dense = self.bias = None
        if self.context == "learned" and context_shape is None:
            self.context_vector = self.add_weight(
                name="context",
                shape=(features,),
                initializer=clone_initializer(self.context_initializer),
            )
        self.context_kernel = self._add_kernel("context_kernel", context_size)
        self.input_kernel = self._add_kernel(
            "input_kernel", self.hidden_dim or features
        )
        if self.use_bias:
            self.bias = self.add_weight(
                name="bias",
                shape=(self.num_heads,),
                initializer=clone_initializer(self.bias_initializer),
                regularizer=self.bias_regularizer,
                constraint=self.bias_constraint,
            )
        if self.hidden_dim is not None:
            self.hidden_dense = keras.layers.Dense(
                self.hidden_dim,
                activation="tanh",
                kernel_initializer=clone_initializer(self.kernel_initializer),
                bias_initializer=clone_initializer(self.bias_initializer),
                kernel_regularizer=self.kernel_regularizer,
                bias_regularizer=self.bias_regularizer,
                kernel_constraint=self.kernel_constraint,
                bias_constraint=self.bias_constraint,
                dtype=self.dtype_policy,
                name="hidden",
            )
            self.hidden_dense.build(inputs_shape)

    def _add_kernel(self, name, size):
        return self.add_weight(
            name=name,
            shape=(size, self.num_heads * self.rank),
            initializer=clone_initializer(self.kernel_initializer),
            regularizer=self.kernel_regularizer,
            constraint=self.kernel_constraint,
        )

    def call(
        self,
        inputs,
        context=None,
        mask=None,
        inputs_mask=None,
        return_attention_scores=False,
    ):
        self._check_shapes(
            inputs.shape, None if context is None else context.shape
        )
        mask = merge_masks(
            self,
            inputs.shape[:2],
            mask=mask,
            inputs_mask=inputs_mask,
            attached_mask=self.attached_mask(inputs),
        )
        inputs = zero_padding(inputs, mask)
        if context is None:
            context = self._own_context(inputs, mask)
        hidden = None
        if self.hidden_dense is not None:
            hidden = self.hidden_dense(inputs)
        normalize = self.normalize
        outputs, scores = lama(
            inputs,
            context,
            ops.convert_to_tensor(self.context_kernel),
            ops.convert_to_tensor(self.input_kernel),
            hidden=hidden,
            rank=self.rank,
            bias=None
            if self.bias is None
            else ops.convert_to_tensor(self.bias),
            activation=self.activation,
            normalize=self.num_heads > 1 if normalize is None else normalize,
            temperature=self.temperature,
            padding_mask=mask,
            return_attention_scores=True,
        )
        if self.orthogonality_penalty:
            penalty = ops.mean(orthogonality_penalty(scores))
            self.add_loss(self.orthogonality_penalty * penalty)
        return (outputs, scores) if return_attention_scores else outputs

    def _own_context(self, inputs, mask):
        if self.context_vector is not None:
            return ops.convert_to_tensor(self.context_vector)[None]
        if self.context == "learned":
            raise ValueError(
                f"`{type(self).__name__}` was built with a `context` at call, "
                "and has learned none. Received: context=None"
            )
        total = ops.sum(ops.cast(inputs, "float32"), axis=1)
        if mask is None:
            count = ops.cast(ops.shape(inputs)[1], total.dtype)
        else:
            count = ops.sum(ops.cast(mask, total.dtype), axis=1, keepdims=True)
            count = ops.maximum(count, 1)
        return total / count

    def _check_shapes(self, inputs_shape, context_shape):
        if len(inputs_shape) != 3 or inputs_shape[-1] is None:
            raise ValueError(
                f"`{type(self).__name__}` needs `inputs` of shape (batch, "
                "length, features), with a known number of features. "
                f"Received: inputs.shape={tuple(inputs_shape)}"
            )
        if context_shape is not None and len(context_shape) != 2:
            raise ValueError(
                f"`{type(self).__name__}` needs a `context` of shape (batch, "
                f"features). Received: context.shape={tuple(context_shape)}"
            )

    def compute_mask(self, inputs, previous_mask):
        return None

    def compute_output_shape(self, inputs_shape, context_shape=None):
        self._check_shapes(inputs_shape, context_shape)
        return (inputs_shape[0], self.num_heads, inputs_shape[-1])

    def compute_output_spec(
        self,
        inputs,
        context=None,
        mask=None,
        inputs_mask=None,
        return_attention_scores=False,
    ):
        shape = self.compute_output_shape(
            inputs.shape, None if context is None else context.shape
        )
        outputs = keras.KerasTensor(shape, dtype=self.compute_dtype)
        if not return_attention_scores:
            return outputs
        shape = (shape[0], self.num_heads, inputs.shape[1])
        return outputs, keras.KerasTensor(shape, dtype=self.compute_dtype)

    enable_lora = enable_lora

    def get_config(self):
        config = {
            "num_heads": self.num_heads,
            "rank": self.rank,
            "context": self.context,
            "normalize": self.normalize,
            "temperature": self.temperature,
            "activation": keras.activations.serialize(self.activation),
            "hidden_dim": self.hidden_dim,
            "use_bias": self.use_bias,
            "orthogonality_penalty": self.orthogonality_penalty,
            "kernel_initializer": keras.initializers.serialize(
                self.kernel_initializer
            ),
            "bias_initializer": keras.initializers.serialize(
                self.bias_initializer
            ),
            "context_initializer": keras.initializers.serialize(
                self.context_initializer
            ),
            "kernel_regularizer": keras.regularizers.serialize(
                self.kernel_regularizer
            ),
            "bias_regularizer": keras.regularizers.serialize(
                self.bias_regularizer
            ),
            "kernel_constraint": keras.constraints.serialize(
                self.kernel_constraint
            ),
            "bias_constraint": keras.constraints.serialize(
                self.bias_constraint
            ),
        }
        return {**super().get_config(), **config, **quantized_dtype(self)}
