"""ResNet with attention in every block, as in the CBAM paper."""

import os

import keras

from keras_attn.layers import CBAM
from keras_attn.layers import ChannelAttention
from keras_attn.layers import SpatialAttention
from keras_attn.models.insert_cbam import attention_template
from keras_attn.models.insert_cbam import copy_layer
from keras_attn.utils import check_choice
from keras_attn.utils import check_positive_integers

# kind of block, and how many of them each stage has
DEPTHS = {
    18: ("basic", (2, 2, 2, 2)),
    34: ("basic", (3, 4, 6, 3)),
    50: ("bottleneck", (3, 4, 6, 3)),
    101: ("bottleneck", (3, 4, 23, 3)),
    152: ("bottleneck", (3, 8, 36, 3)),
}
PRESETS = ("channel", "spatial", "cbam")


@keras.saving.register_keras_serializable(package="keras_attn")
class CBAMResNet(keras.Model):
    """ResNet with an attention layer at the end of every residual branch.

    This is the network of the ImageNet experiments of
    [CBAM](https://arxiv.org/abs/1807.06521) (Woo et al., 2018, section 4.1):
    the ResNet of [He et al., 2015](https://arxiv.org/abs/1512.03385), with the
    stride of a bottleneck in its 3x3 convolution, and CBAM after the last
    normalization of each block, before the addition. Paddings, initial values
    and numbers of parameters are those of the authors' program.

    Args:
        depth: `18`, `34`, `50`, `101` or `152`.
        attention: `"cbam"`, `"channel"`, `"spatial"`, or `None` for a plain
            ResNet; or a layer to put copies of into the blocks, such as
            `keras_attn.layers.CBAM(reduction_ratio=8)`; or a callable without
            arguments that makes one.
        stem: `"imagenet"`, a 7x7 convolution of stride 2 and a maximum over
            3x3 of stride 2, or `"cifar"`, a 3x3 convolution, for images that
            are as small as 32x32.
        include_top: Whether the network ends with a classifier.
        weights: Path of a file of weights to load, or `None`.
        input_shape: Shape of an image. Defaults to three channels and any size.
        pooling: What to do with the last feature map if `include_top=False`:
            `"avg"` or `"max"` over space, or `None`.
        classes: Number of classes of the classifier.
        classifier_activation: Activation of the classifier; `None` for logits.
        data_format: `"channels_last"` or `"channels_first"`. Defaults to the
            `image_data_format` of your Keras configuration.
        dtype: Dtype policy of the layers. Defaults to the global one.
        name: Name of the model.

    Call arguments:
        inputs: Images of shape `(B, height, width, 3)`, normalized as you like.

    Returns:
        Tensor of shape `(B, classes)`; with `include_top=False`, feature maps,
        or features `(B, F)` if they are pooled.

    Example:

    ```python
    import keras
    import keras_attn

    model = keras_attn.models.CBAMResNet(
        depth=18, stem="cifar", input_shape=(32, 32, 3), classes=10
    )
    model.compile("adam", "sparse_categorical_crossentropy")
    ```
    """

    def __init__(
        self,
        depth=50,
        attention="cbam",
        stem="imagenet",
        include_top=True,
        weights=None,
        input_shape=None,
        pooling=None,
        classes=1000,
        classifier_activation="softmax",
        data_format=None,
        dtype=None,
        name="cbam_resnet",
    ):
        if data_format is None:
            data_format = keras.config.image_data_format()
        check_choice(self, DEPTHS, depth=depth)
        check_choice(self, ("imagenet", "cifar"), stem=stem)
        check_choice(self, (None, "avg", "max"), pooling=pooling)
        check_choice(
            self, ("channels_last", "channels_first"), data_format=data_format
        )
        if isinstance(attention, str):
            check_choice(self, PRESETS, attention=attention)
        check_positive_integers(self, classes=classes)
        if weights is not None and not os.path.exists(weights):
            raise ValueError(
                "`CBAMResNet` needs the path of a file, or `None`, for "
                "argument `weights`. There are no published weights in the "
                f"format of Keras. Received: weights={weights!r}"
            )
        if input_shape is None:
            input_shape = (None, None, 3)
            if data_format == "channels_first":
                input_shape = (3, None, None)

        blocks = Blocks(attention, data_format, dtype)
        inputs = keras.Input(input_shape)
        x = blocks.stem(inputs, stem)
        kind, lengths = DEPTHS[depth]
        block = getattr(blocks, kind)
        for stage, length in enumerate(lengths):
            for position in range(length):
                x = block(
                    x,
                    filters=64 * 2**stage,
                    stride=2 if stage > 0 and position == 0 else 1,
                    name=f"layer{stage + 1}_{position}",
                )
        if include_top:
            x = blocks.top(x, classes, classifier_activation)
        elif pooling is not None:
            x = blocks.pool(x, pooling)
        super().__init__(inputs, x, name=name)
        self.options = {
            "depth": depth,
            "attention": blocks.attention_config(),
            "stem": stem,
            "include_top": include_top,
            "input_shape": tuple(input_shape),
            "pooling": pooling,
            "classes": classes,
            "classifier_activation": classifier_activation,
            "data_format": data_format,
            "dtype": blocks.dtype.name,
        }
        if weights is not None:
            self.load_weights(weights)

    def get_config(self):
        activation = self.options["classifier_activation"]
        return {
            **self.options,
            "weights": None,  # they travel with the model
            "classifier_activation": keras.activations.serialize(
                keras.activations.get(activation)
            ),
            "name": self.name,
        }

    @classmethod
    def from_config(cls, config, custom_objects=None):
        attention = config["attention"]
        if isinstance(attention, dict):
            attention = keras.saving.deserialize_keras_object(
                attention, custom_objects=custom_objects
            )
        return cls(**{**config, "attention": attention})


class Blocks:
    """Makes the parts of a ResNet, with attention in its residual blocks.

    Args:
        attention: What the blocks end with, as in `CBAMResNet`.
        data_format: `"channels_last"` or `"channels_first"`.
        dtype: Dtype policy of the layers.
    """

    def __init__(self, attention, data_format, dtype=None):
        self.data_format = data_format
        self.dtype = keras.dtype_policies.get(dtype)
        self.preset = attention if isinstance(attention, str) else None
        if self.preset is not None:
            attention = self._official_attention(attention)
        elif attention is not None:
            attention = attention_template(attention, "CBAMResNet")
        self.attention = attention

    def basic(self, x, filters, stride, name):
        """Two 3x3 convolutions beside a shortcut."""
        y = self._conv(x, filters, 3, stride, f"{name}_conv1")
        y = self._relu(self._norm(y, f"{name}_bn1"), f"{name}_relu1")
        y = self._conv(y, filters, 3, 1, f"{name}_conv2")
        y = self._norm(y, f"{name}_bn2")
        return self._join(x, y, filters, stride, name)

    def bottleneck(self, x, filters, stride, name):
        """A 3x3 convolution in between of two 1x1 ones, beside a shortcut."""
        y = self._conv(x, filters, 1, 1, f"{name}_conv1")
        y = self._relu(self._norm(y, f"{name}_bn1"), f"{name}_relu1")
        y = self._conv(y, filters, 3, stride, f"{name}_conv2")
        y = self._relu(self._norm(y, f"{name}_bn2"), f"{name}_relu2")
        y = self._conv(y, 4 * filters, 1, 1, f"{name}_conv3")
        y = self._norm(y, f"{name}_bn3")
        return self._join(x, y, 4 * filters, stride, name)

    def _join(self, x, y, filters, stride, name):
        """Adds the branch `y`, after attention, to a shortcut from `x`."""
        if self.attention is not None:
            y = copy_layer(self.attention, f"{name}_attention")(y)
        if stride != 1 or x.shape[self._axis] != filters:
            x = self._conv(
                x,
                filters,
                1,
                stride,
                f"{name}_shortcut_conv",
                initializer=torch_default(),
            )
            x = self._norm(x, f"{name}_shortcut_bn")
        x = self._layer(keras.layers.Add, name=f"{name}_add")([x, y])
        return self._relu(x, f"{name}_relu")

    def stem(self, x, kind):
        """What comes before the blocks."""
        size, stride = (7, 2) if kind == "imagenet" else (3, 1)
        x = self._conv(x, 64, size, stride, "conv1")
        x = self._relu(self._norm(x, "bn1"), "relu1")
        if kind == "cifar":
            return x
        # zeros pad like minus infinity, for after a ReLU nothing is smaller
        x = self._pad(x, 1, "pool1_pad")
        return self._layer(
            keras.layers.MaxPooling2D,
            3,
            strides=2,
            data_format=self.data_format,
            name="pool1",
        )(x)

    def pool(self, x, kind="avg"):
        """Mean or maximum over space."""
        pools = {
            "avg": keras.layers.GlobalAveragePooling2D,
            "max": keras.layers.GlobalMaxPooling2D,
        }
        return self._layer(
            pools[kind], data_format=self.data_format, name=f"{kind}_pool"
        )(x)

    def top(self, x, classes, activation):
        """The classifier."""
        return self._layer(
            keras.layers.Dense,
            classes,
            activation=activation,
            kernel_initializer=he_normal("fan_in"),
            name="predictions",
        )(self.pool(x))

    @property
    def _axis(self):
        return 1 if self.data_format == "channels_first" else -1

    def _official_attention(self, kind):
        """An attention layer with the initial values of the authors' ResNet."""
        shared = {"data_format": self.data_format, "dtype": self.dtype}
        if kind == "channel":
            return ChannelAttention(
                kernel_initializer=torch_default(), **shared
            )
        # all positions start at 0.5
        shared["gamma_initializer"] = "zeros"
        if kind == "spatial":
            return SpatialAttention(
                kernel_initializer=he_normal("fan_out"), **shared
            )
        return CBAM(
            kernel_initializer=torch_default(),
            spatial_kernel_initializer=he_normal("fan_out"),
            **shared,
        )

    def attention_config(self):
        """What `CBAMResNet.get_config()` says of `attention`."""
        if self.attention is None or self.preset is not None:
            return self.preset
        return keras.saving.serialize_keras_object(self.attention)

    def _layer(self, cls, *args, **kwargs):
        return cls(*args, dtype=self.dtype, **kwargs)

    def _conv(self, x, filters, size, stride, name, initializer=None):
        if size > 1:
            # "same" pads even maps unevenly where the stride is 2
            x = self._pad(x, size // 2, f"{name}_pad")
        return self._layer(
            keras.layers.Conv2D,
            filters,
            size,
            strides=stride,
            use_bias=False,
            kernel_initializer=initializer or he_normal("fan_out"),
            data_format=self.data_format,
            name=name,
        )(x)

    def _pad(self, x, width, name):
        return self._layer(
            keras.layers.ZeroPadding2D,
            width,
            data_format=self.data_format,
            name=name,
        )(x)

    def _norm(self, x, name):
        return self._layer(
            keras.layers.BatchNormalization,
            axis=self._axis,
            momentum=0.9,
            epsilon=1e-5,
            name=name,
        )(x)

    def _relu(self, x, name):
        return self._layer(keras.layers.ReLU, name=name)(x)


def he_normal(mode):
    """`kaiming_normal_` of PyTorch."""
    return keras.initializers.VarianceScaling(2.0, mode, "untruncated_normal")


def torch_default():
    """What PyTorch gives to kernels that nobody asks it to initialize."""
    return keras.initializers.VarianceScaling(1 / 3, "fan_in", "uniform")
