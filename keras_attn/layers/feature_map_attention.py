"""Base class of the layers that weigh the parts of a feature map."""

import keras
from keras import ops

from keras_attn.layers.adaptation import enable_lora
from keras_attn.layers.adaptation import quantized_dtype
from keras_attn.utils import check_choice
from keras_attn.utils import clone_initializer


class FeatureMapAttention(keras.layers.Layer):
    """Base class of the layers that weigh the parts of a feature map.

    It holds what these layers share: arguments, checks, the attention to
    padding, and the gates. Not meant to be used by itself.

    Args:
        gate_activation: Activation that turns a number into a gate, such as
            `"sigmoid"` or `"hard_sigmoid"` (which Keras 3 defines as
            `relu6(x + 3) / 6`).
        identity_init: Whether a new layer returns its input unchanged. Gates
            start near 0.5, so that an attention layer put into a trained
            network would break it. With this option they are
            `1 + strength * (gate - 1)`, where `strength` is one more trainable
            number, which starts at 0.
        data_format: `"channels_last"` or `"channels_first"`. Defaults to the
            `image_data_format` of your Keras configuration.
        kernel_initializer: Initializer of the kernels.
        bias_initializer: Initializer of the biases.
        kernel_regularizer: Regularizer of the kernels.
        bias_regularizer: Regularizer of the biases.
        kernel_constraint: Constraint on the kernels.
        bias_constraint: Constraint on the biases.
        **kwargs: Arguments of `keras.layers.Layer`, such as `name` or `dtype`.

    Call arguments:
        inputs: Floating-point tensor of shape `(B, *space, F)`, or
            `(B, F, *space)` with `data_format="channels_first"`, where `space`
            is one, two or three axes of any size, unknown sizes included.
        mask: Boolean or integer tensor of shape `(B, *space)`, true where
            there is no padding. Keras passes the mask of the input itself.
            Padding takes no part in any average, maximum, convolution or batch
            statistic, may hold anything, and is 0 in the output, which carries
            the mask on.
        return_attention_scores: Whether to return the gates too.

    Returns:
        Tensor of the shape of `inputs`; with `return_attention_scores`, a tuple
        of it and the gates.
    """

    def __init__(
        self,
        gate_activation="sigmoid",
        identity_init=False,
        data_format=None,
        kernel_initializer="glorot_uniform",
        bias_initializer="zeros",
        kernel_regularizer=None,
        bias_regularizer=None,
        kernel_constraint=None,
        bias_constraint=None,
        **kwargs,
    ):
        super().__init__(**kwargs)
        if data_format is None:
            data_format = keras.config.image_data_format()
        check_choice(
            self,
            ("channels_last", "channels_first"),
            data_format=data_format,
        )
        self.gate_activation = keras.activations.get(gate_activation)
        self.identity_init = identity_init
        self.data_format = data_format
        self.kernel_initializer = keras.initializers.get(kernel_initializer)
        self.bias_initializer = keras.initializers.get(bias_initializer)
        self.kernel_regularizer = keras.regularizers.get(kernel_regularizer)
        self.bias_regularizer = keras.regularizers.get(bias_regularizer)
        self.kernel_constraint = keras.constraints.get(kernel_constraint)
        self.bias_constraint = keras.constraints.get(bias_constraint)
        self.supports_masking = True

    def build(self, input_shape):
        if self.identity_init:
            self.strength = self.add_weight(
                name="strength", shape=(), initializer="zeros", autocast=False
            )

    @property
    def _channel_axis(self):
        return 1 if self.data_format == "channels_first" else -1

    def _check_shape(self, input_shape, needs_channels=True):
        """Raises unless this is a feature map, and holds later ones to it."""
        shape = tuple(input_shape)
        if len(shape) not in (3, 4, 5):
            raise ValueError(
                f"`{type(self).__name__}` needs feature maps: argument "
                "`inputs` must have a batch axis, a channel axis and 1, 2 or 3 "
                "axes of space, so rank 3, 4 or 5. Reshape it, or give the "
                f"layer something else. Received: inputs.shape={shape}"
            )
        channels = shape[self._channel_axis]
        if channels is None and needs_channels:
            raise ValueError(
                f"`{type(self).__name__}` has weights for each channel: "
                "argument `inputs` must have a known number of channels. Give "
                "it in `keras.Input`, or check `data_format`. Received: "
                f"inputs.shape={shape}, data_format={self.data_format!r}"
            )
        self.input_spec = keras.layers.InputSpec(
            ndim=len(shape),
            axes={} if channels is None else {self._channel_axis: channels},
        )

    def _check_call(self, inputs, mask=None):
        name = type(self).__name__
        dtype = keras.backend.standardize_dtype(inputs.dtype)
        if not keras.backend.is_float_dtype(dtype):
            raise ValueError(
                f"`{name}` multiplies with fractions: argument `inputs` must "
                "be of a floating-point dtype. Convert images first, for "
                "example with `keras.layers.Rescaling(1 / 255)`. "
                f"Received: inputs.dtype={dtype}"
            )
        if mask is None:
            return
        dtype = keras.backend.standardize_dtype(mask.dtype)
        if keras.backend.is_float_dtype(dtype):
            raise ValueError(
                f"`{name}` does not take weights for a mask: argument `mask` "
                "must be boolean or integer, true where there is no padding. "
                f"Cast it to `bool`. Received: mask.dtype={dtype}"
            )
        expected = list(inputs.shape)
        expected.pop(self._channel_axis)
        sizes = list(zip(mask.shape, expected, strict=False))
        if len(mask.shape) != len(expected) or any(
            None not in pair and pair[0] != pair[1] for pair in sizes
        ):
            raise ValueError(
                f"`{name}` needs one value for each position: argument `mask` "
                f"must have the shape {tuple(expected)}. "
                f"Received: mask.shape={tuple(mask.shape)}, "
                f"inputs.shape={tuple(inputs.shape)}, "
                f"data_format={self.data_format!r}"
            )

    def _add_sublayer(self, cls, *args, **kwargs):
        """Makes a sub-layer that computes in the dtype of the weights.

        Under a mixed policy that is float32. A sub-layer sees little data, so
        that half precision would save nothing, while a sum of squares soon
        leaves its range.
        """
        policy = self.dtype_policy
        if isinstance(policy, keras.dtype_policies.DTypePolicyMap):
            # of a quantized layer, which says what its sub-layers are
            policy = keras.dtype_policies.DTypePolicyMap(
                self.variable_dtype, dict(policy)
            )
        else:
            policy = self.variable_dtype
        return cls(*args, **kwargs, dtype=policy)

    def _weight_arguments(self):
        """The shared arguments that say what to do with weights."""
        return {
            "kernel_initializer": clone_initializer(self.kernel_initializer),
            "bias_initializer": clone_initializer(self.bias_initializer),
            "kernel_regularizer": self.kernel_regularizer,
            "bias_regularizer": self.bias_regularizer,
            "kernel_constraint": self.kernel_constraint,
            "bias_constraint": self.bias_constraint,
        }

    def _gates(self, logits):
        """Turns numbers into gates."""
        gates = self.gate_activation(logits)
        if not self.identity_init:
            return gates
        return 1 + ops.cast(self.strength, gates.dtype) * (gates - 1)

    def _channel_gates_shape(self, shape):
        return shape[0], shape[self._channel_axis]

    def _spatial_gates_shape(self, shape):
        shape = list(shape)
        shape.pop(self._channel_axis)
        return tuple(shape)

    def compute_output_shape(self, input_shape):
        return tuple(input_shape)

    def compute_output_spec(
        self, inputs, mask=None, training=None, return_attention_scores=False
    ):
        self._check_call(inputs, mask)
        output = keras.KerasTensor(inputs.shape, dtype=inputs.dtype)
        if not return_attention_scores:
            return output
        dtype = keras.backend.result_type(inputs.dtype, "float32")
        shapes = self._gate_shapes(inputs.shape)
        return output, *(keras.KerasTensor(s, dtype=dtype) for s in shapes)

    enable_lora = enable_lora

    def get_config(self):
        config = {
            "gate_activation": keras.activations.serialize(
                self.gate_activation
            ),
            "identity_init": self.identity_init,
            "data_format": self.data_format,
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
            "kernel_constraint": keras.constraints.serialize(
                self.kernel_constraint
            ),
            "bias_constraint": keras.constraints.serialize(
                self.bias_constraint
            ),
        }
        return {**super().get_config(), **config, **quantized_dtype(self)}
