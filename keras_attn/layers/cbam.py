"""Channel attention, spatial attention, and the two in a row (CBAM)."""

import keras
from keras import ops

from keras_attn.layers.feature_map_attention import FeatureMapAttention
from keras_attn.ops import apply_gates
from keras_attn.ops import channel_attention
from keras_attn.ops import masked_moments
from keras_attn.ops import spatial_attention
from keras_attn.ops.cbam import POOLING
from keras_attn.utils import check_choice
from keras_attn.utils import check_positive_integers
from keras_attn.utils import check_rates
from keras_attn.utils import clone_initializer
from keras_attn.utils import invalid

CONVOLUTIONS = {
    3: keras.layers.Conv1D,
    4: keras.layers.Conv2D,
    5: keras.layers.Conv3D,
}


@keras.saving.register_keras_serializable(package="keras_attn")
class ChannelAttention(FeatureMapAttention):
    """Weighs the channels of a feature map: what to look at.

    This is the channel attention of [CBAM](https://arxiv.org/abs/1807.06521)
    (Woo et al., 2018, section 3.1). Space is pooled away, by default into the
    mean and the maximum of each channel; one shared two-layer perceptron sees
    each of them; the sigmoid of the sum of its outputs multiplies the channels.
    With `pooling=("avg",)` it is a squeeze-and-excitation block. The cost is
    that of reading the map, and `2 * F * (F // reduction_ratio)` weights.

    Feature maps may have one, two or three axes of space, of any size. The
    order of positions makes no difference to the gates.

    Args:
        reduction_ratio: Positive integer, how many times fewer units the hidden
            layer has than there are channels. Never less than one unit is left.
        pooling: Tuple of `"avg"`, `"max"`, `"lp"` (root of the sum, not the
            mean, of squares) and `"lse"` (logarithm of the sum of
            exponentials). The last two grow with the size of the map.
        activation: Activation of the hidden layer.
        use_bias: Whether the perceptron has biases.
        gate_activation: Activation that turns a number into a gate, such as
            `"sigmoid"` or `"hard_sigmoid"`.
        identity_init: Whether a new layer returns its input unchanged, for use
            in trained networks; see `docs/cbam.md`.
        data_format: `"channels_last"` or `"channels_first"`. Defaults to the
            `image_data_format` of your Keras configuration.
        **kwargs: `kernel_initializer`, `bias_initializer`,
            `kernel_regularizer`, `bias_regularizer`, `kernel_constraint` and
            `bias_constraint` of the perceptron, and the arguments of
            `keras.layers.Layer`, such as `name` or `dtype`.

    Call arguments:
        inputs: Floating-point tensor of shape `(B, *space, F)`, or
            `(B, F, *space)` with `data_format="channels_first"`.
        mask: Boolean or integer tensor of shape `(B, *space)`, true where there
            is no padding. The mask that Keras attaches to an input is used by
            itself.
        return_attention_scores: Whether to return the gates too.

    Returns:
        Tensor of the shape of `inputs`. With `return_attention_scores`, a tuple
        of it and the gates `(B, F)`.

    Example:

    ```python
    import keras
    import keras_attn

    images = keras.Input((None, None, 3))
    x = keras.layers.Conv2D(64, 3)(images)
    x = keras_attn.layers.ChannelAttention(reduction_ratio=8)(x)
    model = keras.Model(images, x)
    ```
    """

    def __init__(
        self,
        reduction_ratio=16,
        pooling=("avg", "max"),
        activation="relu",
        use_bias=True,
        **kwargs,
    ):
        super().__init__(**kwargs)
        check_positive_integers(self, reduction_ratio=reduction_ratio)
        self.reduction_ratio = reduction_ratio
        self.pooling = _check_pooling(self, pooling)
        self.activation = keras.activations.get(activation)
        self.use_bias = use_bias

    def build(self, input_shape):
        self._check_shape(input_shape)
        channels = input_shape[self._channel_axis]
        hidden = max(1, channels // self.reduction_ratio)
        self.reduce_dense = self._add_sublayer(
            keras.layers.Dense,
            hidden,
            activation=self.activation,
            use_bias=self.use_bias,
            **self._weight_arguments(),
            name="reduce",
        )
        self.expand_dense = self._add_sublayer(
            keras.layers.Dense,
            channels,
            use_bias=self.use_bias,
            **self._weight_arguments(),
            name="expand",
        )
        self.reduce_dense.build((None, None, channels))
        self.expand_dense.build((None, None, hidden))
        super().build(input_shape)

    def call(
        self, inputs, mask=None, training=None, return_attention_scores=False
    ):
        self._check_call(inputs, mask)
        gates = channel_attention(
            inputs,
            lambda pools: self.expand_dense(self.reduce_dense(pools)),
            pooling=self.pooling,
            activation=self._gates,
            padding_mask=mask,
            data_format=self.data_format,
        )
        output = apply_gates(
            inputs,
            channel_gates=gates,
            padding_mask=mask,
            data_format=self.data_format,
        )
        return (output, gates) if return_attention_scores else output

    def _gate_shapes(self, shape):
        return (self._channel_gates_shape(shape),)

    def get_config(self):
        config = {
            "reduction_ratio": self.reduction_ratio,
            "pooling": self.pooling,
            "activation": keras.activations.serialize(self.activation),
            "use_bias": self.use_bias,
        }
        return {**super().get_config(), **config}


@keras.saving.register_keras_serializable(package="keras_attn")
class SpatialAttention(FeatureMapAttention):
    """Weighs the positions of a feature map: where to look.

    This is the spatial attention of [CBAM](https://arxiv.org/abs/1807.06521)
    (Woo et al., 2018, section 3.2). The maximum and the mean over the channels,
    in this order, make a map of two channels. One wide convolution, a batch
    normalization and the sigmoid turn it into a gate for each position. The
    cost is that of reading the map; a 7x7 window has 98 weights, however many
    channels there are.

    Feature maps may have one, two or three axes of space, of any size, smaller
    than the window included. The order of channels makes no difference.

    Args:
        kernel_size: Positive integer, or one for each axis of space: the window
            of the convolution. An even window reaches one position further
            after a position than before it.
        use_normalization: Whether to normalize the convolved map, as the
            authors' program does.
        momentum: Momentum of the moving statistics of the normalization. The
            default is the authors'. It takes hundreds of steps to settle; for a
            shorter training use 0.9.
        epsilon: Small number added to the variance in the normalization.
        use_bias: Whether the convolution has a bias. The normalization brings
            its own.
        gamma_initializer: Initializer of the scale of the normalization. With
            `"zeros"`, as in the authors' ResNet, all gates start at 0.5.
        gate_activation: Activation that turns a number into a gate, such as
            `"sigmoid"` or `"hard_sigmoid"`.
        identity_init: Whether a new layer returns its input unchanged, for use
            in trained networks; see `docs/cbam.md`.
        data_format: `"channels_last"` or `"channels_first"`. Defaults to the
            `image_data_format` of your Keras configuration.
        **kwargs: `kernel_initializer`, `bias_initializer`,
            `kernel_regularizer`, `bias_regularizer`, `kernel_constraint` and
            `bias_constraint` of the convolution, and the arguments of
            `keras.layers.Layer`, such as `name` or `dtype`.

    Call arguments:
        inputs: Floating-point tensor of shape `(B, *space, F)`, or
            `(B, F, *space)` with `data_format="channels_first"`.
        mask: Boolean or integer tensor of shape `(B, *space)`, true where there
            is no padding. The mask that Keras attaches to an input is used by
            itself.
        return_attention_scores: Whether to return the gates too.

    Returns:
        Tensor of the shape of `inputs`. With `return_attention_scores`, a tuple
        of it and the gates `(B, *space)`, which are 0 at padding.

    Example:

    ```python
    import keras
    import keras_attn

    sound = keras.Input((None, 32))
    x, gates = keras_attn.layers.SpatialAttention(kernel_size=9)(
        sound, return_attention_scores=True
    )
    model = keras.Model(sound, [x, gates])
    ```
    """

    def __init__(
        self,
        kernel_size=7,
        use_normalization=True,
        momentum=0.99,
        epsilon=1e-5,
        use_bias=False,
        gamma_initializer="ones",
        **kwargs,
    ):
        super().__init__(**kwargs)
        self.kernel_size = _check_kernel_size(self, kernel_size)
        check_rates(self, momentum=momentum)
        _check_positive(self, epsilon=epsilon)
        self.use_normalization = use_normalization
        self.momentum = momentum
        self.epsilon = epsilon
        self.use_bias = use_bias
        self.gamma_initializer = keras.initializers.get(gamma_initializer)

    def build(self, input_shape):
        self._check_shape(input_shape, needs_channels=False)
        rank = len(input_shape)
        sizes = self.kernel_size
        if isinstance(sizes, tuple) and len(sizes) != rank - 2:
            raise invalid(
                self,
                "kernel_size",
                sizes,
                f"an integer, or a tuple of {rank - 2} for inputs of shape "
                f"{tuple(input_shape)}",
            )
        self.conv = self._add_sublayer(
            CONVOLUTIONS[rank],
            1,
            sizes,
            padding="same",
            data_format="channels_last",
            use_bias=self.use_bias,
            **self._weight_arguments(),
            name="conv",
        )
        self.conv.build((None,) * (rank - 1) + (2,))
        if self.use_normalization:
            self.norm = self._add_sublayer(
                keras.layers.BatchNormalization,
                momentum=self.momentum,
                epsilon=self.epsilon,
                gamma_initializer=clone_initializer(self.gamma_initializer),
                name="norm",
            )
            self.norm.build((None,) * (rank - 1) + (1,))
        super().build(input_shape)

    def call(
        self, inputs, mask=None, training=None, return_attention_scores=False
    ):
        self._check_call(inputs, mask)
        gates = spatial_attention(
            inputs,
            lambda pools: self._convolve(pools, mask, training),
            activation=self._gates,
            padding_mask=mask,
            data_format=self.data_format,
        )
        output = apply_gates(
            inputs,
            spatial_gates=gates,
            padding_mask=mask,
            data_format=self.data_format,
        )
        return (output, gates) if return_attention_scores else output

    def _convolve(self, pools, mask, training):
        """Reduces `(B, *space, 2)` to a normalized `(B, *space, 1)`."""
        x = self.conv(pools)
        if not self.use_normalization:
            return x
        norm = self.norm
        if mask is None or not (training and norm.trainable):
            return norm(x, training=training)
        # keras 3.15 fails on a mask with a single channel on two backends
        x = ops.cast(x, pools.dtype)
        mean, variance, count = masked_moments(x, mask)
        weight = ops.where(count > 0, 1 - self.momentum, 0.0)
        for moving, batch in (
            (norm.moving_mean, mean),
            (norm.moving_variance, variance),
        ):
            old = ops.cast(moving, batch.dtype)
            moving.assign(old + weight * (batch - old))
        return ops.batch_normalization(
            x,
            mean,
            variance,
            axis=-1,
            offset=ops.cast(norm.beta, x.dtype),
            scale=ops.cast(norm.gamma, x.dtype),
            epsilon=self.epsilon,
        )

    def _gate_shapes(self, shape):
        return (self._spatial_gates_shape(shape),)

    def get_config(self):
        config = {
            "kernel_size": self.kernel_size,
            "use_normalization": self.use_normalization,
            "momentum": self.momentum,
            "epsilon": self.epsilon,
            "use_bias": self.use_bias,
            "gamma_initializer": keras.initializers.serialize(
                self.gamma_initializer
            ),
        }
        return {**super().get_config(), **config}


@keras.saving.register_keras_serializable(package="keras_attn")
class CBAM(FeatureMapAttention):
    """Weighs first the channels, then the positions of a feature map.

    This is the convolutional block attention module
    [CBAM](https://arxiv.org/abs/1807.06521) (Woo et al., 2018): a
    `ChannelAttention` and a `SpatialAttention` in a row, for use after a
    convolution, or at the end of the branch of a residual block, before the
    addition. It costs little next to the convolutions around it: on a ResNet-50
    10% more weights and 0.2% more multiplications.

    Feature maps may have one, two or three axes of space, of any size.

    Args:
        reduction_ratio: Positive integer, how many times fewer units the hidden
            layer of the channel attention has than there are channels. Never
            less than one unit is left.
        pooling: Tuple of `"avg"`, `"max"`, `"lp"` and `"lse"`, how the channel
            attention pools; see `ChannelAttention`.
        kernel_size: Positive integer, or one for each axis of space: the window
            of the convolution of the spatial attention.
        order: `"channel_first"`, the best in the paper (section 4.1),
            `"spatial_first"`, or `"parallel"`, in which both see the input, and
            the output is the input times both gates.
        activation: Activation of the hidden layer of the channel attention.
        use_bias: Whether the perceptron of the channel attention has biases.
            The convolution of the spatial attention has none.
        use_normalization: Whether to normalize the convolved map.
        momentum: Momentum of the moving statistics of the normalization. The
            default is the authors'. It takes hundreds of steps to settle; for a
            shorter training use 0.9.
        epsilon: Small number added to the variance in the normalization.
        gamma_initializer: Initializer of the scale of the normalization.
        spatial_kernel_initializer: Initializer of the kernel of the
            convolution. Defaults to `kernel_initializer`.
        gate_activation: Activation that turns a number into a gate, such as
            `"sigmoid"` or `"hard_sigmoid"`.
        identity_init: Whether a new layer returns its input unchanged, for use
            in trained networks; see `docs/cbam.md`. Otherwise its output starts
            near a quarter of its input.
        data_format: `"channels_last"` or `"channels_first"`. Defaults to the
            `image_data_format` of your Keras configuration.
        **kwargs: `kernel_initializer`, `bias_initializer`,
            `kernel_regularizer`, `bias_regularizer`, `kernel_constraint` and
            `bias_constraint` of both, and the arguments of
            `keras.layers.Layer`, such as `name` or `dtype`.

    Call arguments:
        inputs: Floating-point tensor of shape `(B, *space, F)`, or
            `(B, F, *space)` with `data_format="channels_first"`.
        mask: Boolean or integer tensor of shape `(B, *space)`, true where there
            is no padding. The mask that Keras attaches to an input is used by
            itself.
        return_attention_scores: Whether to return the gates too.

    Returns:
        Tensor of the shape of `inputs`. With `return_attention_scores`, a tuple
        of it, the channel gates `(B, F)` and the spatial gates `(B, *space)`.

    Example:

    ```python
    import keras
    import keras_attn

    images = keras.Input((32, 32, 3))
    x = keras.layers.Conv2D(64, 3, padding="same", activation="relu")(images)
    y = keras.layers.Conv2D(64, 3, padding="same")(x)
    x = keras.layers.ReLU()(x + keras_attn.layers.CBAM()(y))
    x = keras.layers.GlobalAveragePooling2D()(x)
    model = keras.Model(images, keras.layers.Dense(10)(x))
    ```
    """

    def __init__(
        self,
        reduction_ratio=16,
        pooling=("avg", "max"),
        kernel_size=7,
        order="channel_first",
        activation="relu",
        use_bias=True,
        use_normalization=True,
        momentum=0.99,
        epsilon=1e-5,
        gamma_initializer="ones",
        spatial_kernel_initializer=None,
        **kwargs,
    ):
        super().__init__(**kwargs)
        check_positive_integers(self, reduction_ratio=reduction_ratio)
        check_choice(
            self, ("channel_first", "spatial_first", "parallel"), order=order
        )
        check_rates(self, momentum=momentum)
        _check_positive(self, epsilon=epsilon)
        self.reduction_ratio = reduction_ratio
        self.pooling = _check_pooling(self, pooling)
        self.kernel_size = _check_kernel_size(self, kernel_size)
        self.order = order
        self.activation = keras.activations.get(activation)
        self.use_bias = use_bias
        self.use_normalization = use_normalization
        self.momentum = momentum
        self.epsilon = epsilon
        self.gamma_initializer = keras.initializers.get(gamma_initializer)
        self.spatial_kernel_initializer = keras.initializers.get(
            spatial_kernel_initializer
        )

    def build(self, input_shape):
        self._check_shape(input_shape)
        shared = {
            "gate_activation": self.gate_activation,
            "identity_init": self.identity_init,
            "data_format": self.data_format,
            "dtype": self.dtype_policy,
        }
        self.channel_attention = ChannelAttention(
            self.reduction_ratio,
            pooling=self.pooling,
            activation=self.activation,
            use_bias=self.use_bias,
            **{**self._weight_arguments(), **shared},
            name="channel_attention",
        )
        weights = self._weight_arguments()
        if self.spatial_kernel_initializer is not None:
            weights["kernel_initializer"] = clone_initializer(
                self.spatial_kernel_initializer
            )
        self.spatial_attention = SpatialAttention(
            self.kernel_size,
            use_normalization=self.use_normalization,
            momentum=self.momentum,
            epsilon=self.epsilon,
            gamma_initializer=clone_initializer(self.gamma_initializer),
            **weights,
            **shared,
            name="spatial_attention",
        )
        self.channel_attention.build(input_shape)
        self.spatial_attention.build(input_shape)

    def call(
        self, inputs, mask=None, training=None, return_attention_scores=False
    ):
        self._check_call(inputs, mask)
        options = {"mask": mask, "training": training}
        options["return_attention_scores"] = True
        if self.order == "channel_first":
            x, channel = self.channel_attention(inputs, **options)
            x, spatial = self.spatial_attention(x, **options)
        elif self.order == "spatial_first":
            x, spatial = self.spatial_attention(inputs, **options)
            x, channel = self.channel_attention(x, **options)
        else:
            x, channel = self.channel_attention(inputs, **options)
            _, spatial = self.spatial_attention(inputs, **options)
            x = apply_gates(
                x, spatial_gates=spatial, data_format=self.data_format
            )
        return (x, channel, spatial) if return_attention_scores else x

    def _gate_shapes(self, shape):
        return self._channel_gates_shape(shape), self._spatial_gates_shape(
            shape
        )

    def get_config(self):
        config = {
            "reduction_ratio": self.reduction_ratio,
            "pooling": self.pooling,
            "kernel_size": self.kernel_size,
            "order": self.order,
            "activation": keras.activations.serialize(self.activation),
            "use_bias": self.use_bias,
            "use_normalization": self.use_normalization,
            "momentum": self.momentum,
            "epsilon": self.epsilon,
            "gamma_initializer": keras.initializers.serialize(
                self.gamma_initializer
            ),
            "spatial_kernel_initializer": keras.initializers.serialize(
                self.spatial_kernel_initializer
            ),
        }
        return {**super().get_config(), **config}


def _check_pooling(owner, pooling):
    """Returns ways of pooling as a tuple, or raises `ValueError`."""
    kinds = tuple(pooling) if isinstance(pooling, (list, tuple)) else ()
    known = all(kind in POOLING for kind in kinds)
    if not kinds or not known or len(set(kinds)) < len(kinds):
        wanted = f"a tuple of one or more of {POOLING}, each once"
        raise invalid(owner, "pooling", pooling, wanted)
    return kinds


def _check_kernel_size(owner, kernel_size):
    """Returns an integer or a tuple of them, or raises `ValueError`."""
    if not isinstance(kernel_size, (list, tuple)):
        check_positive_integers(owner, kernel_size=kernel_size)
        return kernel_size
    for size in kernel_size:
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            wanted = "a positive integer, or one for each axis of space"
            raise invalid(owner, "kernel_size", kernel_size, wanted)
    return tuple(kernel_size)


def _check_positive(owner, **arguments):
    """Raises `ValueError` unless each argument is a positive number."""
    for name, value in arguments.items():
        is_number = isinstance(value, (int, float))
        if isinstance(value, bool) or not is_number or not value > 0:
            raise invalid(owner, name, value, "a positive number")
