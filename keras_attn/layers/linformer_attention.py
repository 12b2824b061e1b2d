"""Linformer attention layer, and the projection that layers can share."""

import keras
from keras import ops

from keras_attn.layers.attention_layer import AttentionLayer
from keras_attn.ops import linformer_attention
from keras_attn.ops import linformer_window_attention
from keras_attn.utils import check_choice
from keras_attn.utils import check_positive_integers
from keras_attn.utils import check_shards
from keras_attn.utils import clone_initializer
from keras_attn.utils import invalid
from keras_attn.utils import numpy_generator


@keras.saving.register_keras_serializable(package="keras_attn")
class LengthProjection(keras.layers.Layer):
    """The matrix with which Linformer shortens sequences, as a layer.

    Its output goes to the call argument `length_projection` of any number of
    `keras_attn.layers.LinformerAttention` layers, which then share one matrix
    for all heads, keys and values. This is the layerwise sharing of
    [Linformer](https://arxiv.org/abs/2006.04768) (Wang et al., 2020, section
    4). The matrix is one weight of the model, before and after it is saved.

    Args:
        max_length: Length of the longest sequence, the rows of the matrix.
        projected_length: Length after the projection, its columns.
        projection: `"linear"` for a trained matrix, `"random"` for one that is
            drawn from a normal distribution of variance `1 / max_length`, and
            kept.
        num_heads: Number of matrices, one for each head. Defaults to one
            matrix for all heads.
        initializer: Initializer of a trained matrix.
        regularizer: Regularizer of the matrix.
        constraint: Constraint on the matrix.
        seed: Integer seed of a random matrix.
        **kwargs: Arguments of `keras.layers.Layer`, such as `name` or `dtype`.

    Call arguments:
        inputs: Tensor of shape `(B, S, F)`, the sequence to be shortened. What
            it holds does not matter; its length must not exceed `max_length`.

    Returns:
        Tensor of shape `(max_length, projected_length)`, or with `num_heads`
        `(num_heads, max_length, projected_length)`.

    Example:

    ```python
    import keras
    import keras_attn

    x = inputs = keras.Input((None, 64))
    projection = keras_attn.layers.LengthProjection(512, 32)(x)
    for _ in range(2):
        x = x + keras_attn.layers.LinformerAttention(
            num_heads=4,
            key_dim=16,
            max_length=512,
            projected_length=32,
            sharing="layerwise",
        )(x, length_projection=projection)
    model = keras.Model(inputs, x)
    ```
    """

    def __init__(
        self,
        max_length,
        projected_length,
        projection="linear",
        num_heads=None,
        initializer="glorot_uniform",
        regularizer=None,
        constraint=None,
        seed=None,
        **kwargs,
    ):
        super().__init__(**kwargs)
        check_positive_integers(
            self, max_length=max_length, projected_length=projected_length
        )
        if num_heads is not None:
            check_positive_integers(self, num_heads=num_heads)
        check_choice(self, ("linear", "random"), projection=projection)
        self.max_length = max_length
        self.projected_length = projected_length
        self.projection = projection
        self.num_heads = num_heads
        self.initializer = keras.initializers.get(initializer)
        self.regularizer = keras.regularizers.get(regularizer)
        self.constraint = keras.constraints.get(constraint)
        self.seed = seed
        self.supports_masking = True

    @property
    def matrix_shape(self):
        """Shape of the output."""
        heads = () if self.num_heads is None else (self.num_heads,)
        return (*heads, self.max_length, self.projected_length)

    def build(self, input_shape):
        self._check_length(input_shape)
        if self.num_heads is not None:
            check_shards(self, "head_kernel", 0, num_heads=self.num_heads)
        is_random = self.projection == "random"
        initializer = _per_head(self.initializer, self.num_heads, [-2], [-1])
        self.kernel = self.add_weight(
            name=_kernel_name(self.num_heads),
            shape=self.matrix_shape,
            initializer=self._draw if is_random else initializer,
            regularizer=None if is_random else self.regularizer,
            constraint=None if is_random else self.constraint,
            trainable=not is_random,
        )

    def _draw(self, shape, dtype=None):
        generator = numpy_generator(self.seed)
        matrix = generator.normal(scale=self.max_length**-0.5, size=shape)
        return ops.convert_to_tensor(matrix, dtype=dtype)

    def _check_length(self, input_shape):
        length = input_shape[1]
        if isinstance(length, int) and length > self.max_length:
            raise _too_long(self, length)

    def call(self, inputs):
        self._check_length(inputs.shape)
        return ops.cast(self.kernel, self.compute_dtype)

    def compute_mask(self, inputs, previous_mask):
        return None

    def compute_output_shape(self, input_shape):
        self._check_length(input_shape)
        return self.matrix_shape

    def get_config(self):
        config = {
            "max_length": self.max_length,
            "projected_length": self.projected_length,
            "projection": self.projection,
            "num_heads": self.num_heads,
            "initializer": keras.initializers.serialize(self.initializer),
            "regularizer": keras.regularizers.serialize(self.regularizer),
            "constraint": keras.constraints.serialize(self.constraint),
            "seed": self.seed,
        }
        return {**super().get_config(), **config}


@keras.saving.register_keras_serializable(package="keras_attn")
class LinformerAttention(AttentionLayer):
    """Multi-head attention to a fixed number of mixtures of the keys.

    This is the attention of [Linformer](https://arxiv.org/abs/2006.04768)
    (Wang et al., 2020). Keys and values of any length up to `max_length` are
    multiplied along the length into `projected_length` slots, and a query
    scores these. Time and memory grow linearly with the length. Use it for
    encoders of sequences of a bounded length. There is no causal form, since
    every slot mixes all positions, and no streaming.

    Query and value may be of different lengths; that of the value is limited.
    Sequences shorter than `max_length` use the first rows of the matrices, so
    that padding at the end does not change anything, while padding at the
    start moves a sequence to other rows.

    Args:
        num_heads: Number of attention heads.
        key_dim: Size of each head of the query and key.
        max_length: Length of the longest value.
        projected_length: Number of slots.
        sharing: Which of keys, values and heads share a projection.

            * `"none"`: each head has one for keys and one for values;
            * `"headwise"`: all heads share one for keys and one for values;
            * `"key_value"`: all share one;
            * `"layerwise"`: the layer has none, and takes that of a
              `keras_attn.layers.LengthProjection` with every call.
        projection: How positions become slots.

            * `"linear"`: a trained matrix;
            * `"random"`: a matrix that is drawn from `seed` and kept;
            * `"mean"`: the mean over windows of equal size;
            * `"convolution"`: a convolution whose kernel and stride are such a
              window, and which mixes the features of a head.
        projection_initializer: Initializer of what is trained of that.
        **kwargs: Further arguments of `keras_attn.layers.AttentionLayer`, such
            as `value_dim`, `dropout` or `use_bias`. `kernel_regularizer` and
            `kernel_constraint` act on the projections of the length, too.

    Call arguments:
        query: Tensor of shape `(B, T, F)`.
        value: Tensor of shape `(B, S, F')`. Defaults to `query`.
        key: Tensor of shape `(B, S, F'')`. Defaults to `value`.
        return_attention_scores: Whether to return the attention weights too, a
            tensor of shape `(B, N, T, projected_length)`.
        length_projection: Tensor of shape `(max_length, projected_length)`,
            the output of a `keras_attn.layers.LengthProjection`. It takes the
            place of the matrices of the layer.

    See `keras_attn.layers.AttentionLayer` for the padding masks.

    Returns:
        Tensor of shape `(B, T, F)`, and the scores if they were asked for.

    Example:

    ```python
    import keras
    import keras_attn

    tokens = keras.Input((None,), dtype="int32")
    x = keras.layers.Embedding(10_000, 64, mask_zero=True)(tokens)
    x = x + keras_attn.layers.LinformerAttention(
        num_heads=4, key_dim=16, max_length=512, projected_length=32
    )(x)
    x = keras.layers.GlobalAveragePooling1D()(x)
    model = keras.Model(tokens, keras.layers.Dense(2)(x))
    ```
    """

    def __init__(
        self,
        num_heads,
        key_dim,
        max_length,
        projected_length,
        sharing="headwise",
        projection="linear",
        projection_initializer="glorot_uniform",
        **kwargs,
    ):
        super().__init__(num_heads, key_dim, **kwargs)
        check_positive_integers(
            self, max_length=max_length, projected_length=projected_length
        )
        check_choice(
            self,
            ("none", "headwise", "key_value", "layerwise"),
            sharing=sharing,
        )
        check_choice(
            self,
            ("linear", "random", "mean", "convolution"),
            projection=projection,
        )
        if sharing == "layerwise" and projection != "linear":
            wanted = "'linear' if `sharing` is 'layerwise'"
            raise invalid(self, "projection", projection, wanted)
        is_one_kernel = sharing == "key_value" and projection == "convolution"
        if is_one_kernel and self.key_dim != self.value_dim:
            wanted = f"that of `key_dim`, {key_dim}, to share a convolution"
            raise invalid(self, "value_dim", self.value_dim, wanted)
        self.max_length = max_length
        self.projected_length = projected_length
        self.sharing = sharing
        self.projection = projection
        self.projection_initializer = keras.initializers.get(
            projection_initializer
        )

    @property
    def window_size(self):
        """Positions that a slot pools, for `"mean"` and `"convolution"`."""
        return -(-self.max_length // self.projected_length)

    def build(self, query_shape, value_shape=None, key_shape=None):
        super().build(query_shape, value_shape, key_shape)
        self.key_projection = self.value_projection = None
        if self.sharing == "layerwise" or self.projection == "mean":
            return
        self.key_projection = self._add_projection("key", self.key_dim)
        if self.sharing != "key_value":
            self.value_projection = self._add_projection(
                "value", self.value_dim
            )

    def _add_projection(self, name, size):
        num_heads = self.num_heads if self.sharing == "none" else None
        options = {
            "initializer": clone_initializer(self.projection_initializer),
            "regularizer": self.kernel_regularizer,
            "constraint": self.kernel_constraint,
            "dtype": self.dtype_policy,
            "name": f"{name}_projection",
        }
        if self.projection == "convolution":
            projection = _Convolution(
                self.window_size, size, num_heads, **options
            )
        else:
            seed = self.seed
            if seed is not None and name == "value":
                seed = seed + 1
            projection = LengthProjection(
                self.max_length,
                self.projected_length,
                projection=self.projection,
                num_heads=num_heads,
                seed=seed,
                **options,
            )
        projection.build((None, None, None))
        return projection

    def attend(
        self,
        query,
        key,
        value,
        padding_mask=None,
        dropout=None,
        return_attention_scores=False,
        length_projection=None,
    ):
        options = {
            "padding_mask": padding_mask,
            "dropout": dropout,
            "return_attention_scores": return_attention_scores,
        }
        kernels = [
            None if layer is None else ops.convert_to_tensor(layer.kernel)
            for layer in (
                self.key_projection,
                self.value_projection or self.key_projection,
            )
        ]
        if self.projection in ("mean", "convolution"):
            if length_projection is not None:
                raise ValueError(
                    f"`{type(self).__name__}` with projection="
                    f"{self.projection!r} does not support `length_projection`."
                )
            return linformer_window_attention(
                query,
                key,
                value,
                self.projected_length,
                self.window_size,
                *kernels,
                **options,
            )
        if length_projection is not None:
            self._check_projection(length_projection)
            kernels = [length_projection]
        elif self.sharing == "layerwise":
            raise ValueError(
                f"`{type(self).__name__}` with sharing='layerwise' needs the "
                "output of a `LengthProjection` as call argument "
                "`length_projection`. Received: length_projection=None"
            )
        return linformer_attention(query, key, value, *kernels, **options)

    def _check_projection(self, projection):
        shape = (self.max_length, self.projected_length)
        if tuple(projection.shape) not in (shape, (self.num_heads, *shape)):
            raise ValueError(
                f"`{type(self).__name__}` needs a `length_projection` of shape "
                f"(max_length, projected_length) = {shape}. Received: "
                f"length_projection.shape={tuple(projection.shape)}"
            )

    def _check_shapes(self, query_shape, value_shape, key_shape):
        super()._check_shapes(query_shape, value_shape, key_shape)
        length = value_shape[1]
        if isinstance(length, int) and length > self.max_length:
            raise _too_long(self, length)

    def attention_scores_shape(self, query_shape, value_shape, state=None):
        """Shape of the scores, one for each slot."""
        return (
            query_shape[0],
            self.num_heads,
            query_shape[1],
            self.projected_length,
        )

    def get_config(self):
        config = {
            "max_length": self.max_length,
            "projected_length": self.projected_length,
            "sharing": self.sharing,
            "projection": self.projection,
            "projection_initializer": keras.initializers.serialize(
                self.projection_initializer
            ),
        }
        return {**super().get_config(), **config}


class _Convolution(keras.layers.Layer):
    """Holds the kernel of a convolution over windows of the length."""

    def __init__(
        self,
        window_size,
        size,
        num_heads,
        initializer,
        regularizer,
        constraint,
        **kwargs,
    ):
        super().__init__(**kwargs)
        self.shape = (window_size, size, size)
        self.num_heads = num_heads
        self.initializer = initializer
        self.regularizer = regularizer
        self.constraint = constraint

    def build(self, input_shape):
        heads = () if self.num_heads is None else (self.num_heads,)
        self.kernel = self.add_weight(
            name=_kernel_name(self.num_heads),
            shape=(*heads, *self.shape),
            initializer=_per_head(
                self.initializer, self.num_heads, [-3, -2], [-3, -1]
            ),
            regularizer=self.regularizer,
            constraint=self.constraint,
        )


def _kernel_name(num_heads):
    """Tells kernels with an axis for the heads, which layout maps split."""
    return "kernel" if num_heads is None else "head_kernel"


def _per_head(initializer, num_heads, input_axes, output_axes):
    """Keeps the heads of a kernel out of its fans."""
    config = initializer.get_config()
    if num_heads is None or "input_axes" not in config:
        return initializer
    if config["input_axes"] is None and config["output_axes"] is None:
        config.update(input_axes=input_axes, output_axes=output_axes)
    return initializer.__class__.from_config(config)


def _too_long(layer, length):
    """The error of a sequence longer than what a layer was made for."""
    return ValueError(
        f"`{type(layer).__name__}` has weights for max_length="
        f"{layer.max_length} positions. Received a sequence of {length}. "
        "Create the layer with a larger `max_length`."
    )
