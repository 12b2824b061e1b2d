"""Boom layer."""

import keras

from keras_attn.layers.adaptation import enable_lora
from keras_attn.layers.adaptation import quantized_dtype
from keras_attn.ops.boom import boom
from keras_attn.ops.boom import quick_gelu
from keras_attn.utils import check_choice
from keras_attn.utils import check_positive_integers
from keras_attn.utils import check_rates
from keras_attn.utils import check_shards
from keras_attn.utils import clone_initializer


@keras.saving.register_keras_serializable(package="keras_attn")
class Boom(keras.layers.Layer):
    """Feed-forward layer whose second matrix is a sum.

    This is the Boom layer of [SHA-RNN](https://arxiv.org/abs/1911.11423)
    (Merity, 2019, section 6.3). Like the feed-forward layer of a Transformer
    it widens each position to `intermediate_dim` features. Instead of a second
    matrix it then cuts them into chunks as wide as the input and adds these
    up, which halves the parameters and the multiplications. Inputs may have
    any number of axes.

    Args:
        intermediate_dim: Number of features in between, at least as many as
            the input has. With `down="sum"`, features beyond a multiple of
            those of the input go unused.
        down: `"sum"` adds up chunks: feature `i` of those in between is
            added to feature `i % F` of the output. `"dense"` multiplies by a
            second matrix, as an ordinary feed-forward layer does.
        activation: Activation in between. `"quick_gelu"` is
            `x * sigmoid(1.702 * x)`, as in the author's program; otherwise
            any activation that Keras knows.
        dropout: Dropout rate of the features in between.
        kernel_initializer: Initializer of the kernels. `None` is that of the
            author, normal of standard deviation `0.1 / sqrt(F)`.
        bias_initializer: Initializer of the biases.
        seed: Integer seed of the dropout.
        **kwargs: Arguments of `keras.layers.Layer`, such as `name` or `dtype`.

    Call arguments:
        inputs: Tensor of shape `(..., F)`.

    Returns:
        Tensor of shape `(..., F)`.

    Example:

    ```python
    import keras
    import keras_attn

    x = keras.random.normal((2, 11, 16))
    y = keras_attn.layers.Boom(intermediate_dim=64)(x)  # (2, 11, 16)
    ```
    """

    def __init__(
        self,
        intermediate_dim,
        down="sum",
        activation="quick_gelu",
        dropout=0.0,
        kernel_initializer=None,
        bias_initializer="zeros",
        seed=None,
        **kwargs,
    ):
        super().__init__(**kwargs)
        check_positive_integers(self, intermediate_dim=intermediate_dim)
        check_choice(self, ("sum", "dense"), down=down)
        check_rates(self, dropout=dropout)
        self.intermediate_dim = intermediate_dim
        self.down = down
        if activation == "quick_gelu":
            activation = quick_gelu
        self.activation = keras.activations.get(activation)
        self.dropout = dropout
        self.kernel_initializer = keras.initializers.get(kernel_initializer)
        self.bias_initializer = keras.initializers.get(bias_initializer)
        self.seed = seed
        self.supports_masking = True
        self.dropout_layer = keras.layers.Dropout(
            dropout, seed=seed, dtype=self.dtype_policy
        )

    def build(self, input_shape):
        units = input_shape[-1]
        if self.down == "sum" and self.intermediate_dim < units:
            raise ValueError(
                '`Boom` with `down="sum"` needs an `intermediate_dim` of at '
                "least the features of its input. Received: "
                f"intermediate_dim={self.intermediate_dim}, "
                f"input_shape={tuple(input_shape)}"
            )
        check_shards(
            self, "up/kernel", 1, intermediate_dim=self.intermediate_dim
        )
        initializer = self.kernel_initializer
        if initializer is None:
            initializer = keras.initializers.RandomNormal(
                stddev=0.1 * units**-0.5
            )
        self.up_dense = self._add_dense(
            "up", units, self.intermediate_dim, initializer
        )
        self.down_dense = None
        if self.down == "dense":
            self.down_dense = self._add_dense(
                "down", self.intermediate_dim, units, initializer
            )

    def _add_dense(self, name, features, units, kernel_initializer):
        dense = keras.layers.Dense(
            units,
            kernel_initializer=clone_initializer(kernel_initializer),
            bias_initializer=clone_initializer(self.bias_initializer),
            dtype=self.dtype_policy,
            name=name,
        )
        dense.build((None, features))
        return dense

    def call(self, inputs):
        x = self.dropout_layer(self.activation(self.up_dense(inputs)))
        if self.down_dense is None:
            return boom(x, inputs.shape[-1])
        return self.down_dense(x)

    def compute_output_shape(self, input_shape):
        return input_shape

    enable_lora = enable_lora

    def get_config(self):
        if self.activation is quick_gelu:
            activation = "quick_gelu"
        else:
            activation = keras.activations.serialize(self.activation)
        config = {
            "intermediate_dim": self.intermediate_dim,
            "down": self.down,
            "activation": activation,
            "dropout": self.dropout,
            "kernel_initializer": keras.initializers.serialize(
                self.kernel_initializer
            ),
            "bias_initializer": keras.initializers.serialize(
                self.bias_initializer
            ),
            "seed": self.seed,
        }
        return {**super().get_config(), **config, **quantized_dtype(self)}
