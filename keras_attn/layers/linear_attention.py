"""Linear attention layer."""

import keras
import numpy as np
from keras import ops

from keras_attn.layers.attention_layer import AttentionLayer
from keras_attn.ops import linear_attention
from keras_attn.ops import positive_random_features
from keras_attn.ops.linear import FEATURE_MAPS
from keras_attn.utils import check_choice
from keras_attn.utils import check_positive_integers
from keras_attn.utils import invalid
from keras_attn.utils import numpy_generator


@keras.saving.register_keras_serializable(package="keras_attn")
class LinearAttention(AttentionLayer):
    """Multi-head attention without a softmax, in linear time.

    This is the attention of
    [Transformers are RNNs](https://arxiv.org/abs/2006.16236) (Katharopoulos et
    al., 2020). The weight of a key is a product of features of query and key,
    `phi(q) . phi(k)`, so that keys and values can be summed up before any
    query is looked at. Time and memory grow linearly with the length, causal
    or not, and a causal layer can run as an RNN whose state does not grow at
    all. Use it for long sequences and fast generation; its weights are
    smoother than those of a softmax, which costs accuracy where a query must
    single out one key.

    Query and value may be of any lengths, and differ in them. Sums are float32
    or better under half-precision policies.

    Args:
        num_heads: Number of attention heads.
        key_dim: Size of each head of the query and key.
        feature_map: The map `phi`. One of

            * `"elu"`: `elu(x) + 1`, that of the paper;
            * `"relu"` and `"squared_relu"`, which can give weights of zero;
            * `"favor"`: positive random features, with which the weights are
              estimates of those of softmax attention. The directions are drawn
              once, when the layer is built, and saved with it;
            * a callable, which maps float32 tensors of shape `(B, T, N, H)` to
              non-negative ones of shape `(B, T, N, D)`. Register a function
              with `keras.saving.register_keras_serializable` to save the
              layer. A Keras layer is tracked and trained.
        num_directions: Number of random directions of `"favor"`, each of which
            gives two features. Defaults to `2 * key_dim`.
        epsilon: Number added to the normaliser, which makes the output zero
            where all weights are.
        **kwargs: Further arguments of `keras_attn.layers.AttentionLayer`, such
            as `value_dim` or `use_bias`. `dropout` acts on the attended heads,
            since the weights are never computed. `seed` also determines the
            random directions.

    Call arguments:
        query: Tensor of shape `(B, T, F)`.
        value: Tensor of shape `(B, S, F')`. Defaults to `query`.
        key: Tensor of shape `(B, S, F'')`. Defaults to `value`.
        use_causal_mask: Whether to hide the keys after a query's position.
        return_attention_scores: Whether to return the weights too, a tensor of
            shape `(B, N, T, S)`. This costs time and memory in `T * S`.
        state: Streaming state, two sums of a size that does not depend on the
            length. Scores of a streaming call are the weights of its own keys,
            of shape `(B, N, T, T)`; what remains to 1 lies on earlier ones.

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
    x = x + keras_attn.layers.LinearAttention(num_heads=4, key_dim=16)(
        x, use_causal_mask=True
    )
    model = keras.Model(tokens, keras.layers.Dense(10_000)(x))
    ```

    Token by token, with a state of fixed size:

    ```python
    import keras
    import keras_attn

    layer = keras_attn.layers.LinearAttention(num_heads=4, key_dim=16)
    x = keras.random.normal((1, 100, 64))
    state = layer.initial_state(batch_size=1)
    for t in range(100):
        output, state = layer(x[:, t : t + 1], state=state)
    ```
    """

    def __init__(
        self,
        num_heads,
        key_dim,
        feature_map="elu",
        num_directions=None,
        epsilon=1e-6,
        **kwargs,
    ):
        super().__init__(num_heads, key_dim, **kwargs)
        if isinstance(feature_map, dict):
            feature_map = keras.saving.deserialize_keras_object(feature_map)
        if not callable(feature_map):
            choices = (*FEATURE_MAPS, "favor", "a callable")
            check_choice(self, choices, feature_map=feature_map)
        if num_directions is None:
            num_directions = 2 * key_dim
        check_positive_integers(self, num_directions=num_directions)
        if not epsilon > 0:
            raise invalid(self, "epsilon", epsilon, "a positive number")
        self.feature_map = feature_map
        self.num_directions = num_directions
        self.epsilon = epsilon

    def build(self, query_shape, value_shape=None, key_shape=None):
        super().build(query_shape, value_shape, key_shape)
        if isinstance(self.feature_map, keras.layers.Layer):
            if not self.feature_map.built:
                heads = (None, None, self.num_heads, self.key_dim)
                self.feature_map.build(heads)
        elif self.feature_map == "favor":
            self.random_features = _RandomFeatures(
                self.num_directions, seed=self.seed, name="random_features"
            )
            self.random_features.build((None, None, None, self.key_dim))

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
    ):
        feature_map = self.feature_map
        if feature_map == "favor":
            feature_map = self.random_features
        return linear_attention(
            query,
            key,
            value,
            feature_map=feature_map,
            epsilon=self.epsilon,
            padding_mask=padding_mask,
            use_causal_mask=use_causal_mask,
            dropout=dropout,
            return_attention_scores=return_attention_scores,
            state=state,
        )

    def initial_state(self, batch_size, max_length=None):
        """Creates the sums over no positions at all.

        Args:
            batch_size: Number of sequences.
            max_length: Not needed, since the state does not grow.

        Returns:
            Dictionary of float32 tensors, for the call argument `state`:
            `"key_value_sum"` of shape `(B, N, D, V)` and `"key_sum"` of shape
            `(B, N, D)`, where `D` is the number of features.
        """
        check_positive_integers(self, batch_size=batch_size)
        size = self.key_dim
        if self.feature_map == "favor":
            size = 2 * self.num_directions
        elif callable(self.feature_map):
            x = ops.zeros((1, 1, self.num_heads, self.key_dim))
            size = self.feature_map(x).shape[-1]
        dtype = keras.backend.result_type(self.compute_dtype, "float32")
        shape = (batch_size, self.num_heads, size)
        return {
            "key_value_sum": ops.zeros((*shape, self.value_dim), dtype=dtype),
            "key_sum": ops.zeros(shape, dtype=dtype),
        }

    def get_config(self):
        feature_map = self.feature_map
        if callable(feature_map):
            feature_map = keras.saving.serialize_keras_object(feature_map)
        config = {
            "feature_map": feature_map,
            "num_directions": self.num_directions,
            "epsilon": self.epsilon,
        }
        return {**super().get_config(), **config}


class _RandomFeatures(keras.layers.Layer):
    """Positive random features along directions drawn once, and saved."""

    def __init__(self, num_directions, seed=None, **kwargs):
        super().__init__(autocast=False, **kwargs)
        self.num_directions = num_directions
        self.seed = seed

    def build(self, input_shape):
        self.directions = self.add_weight(
            name="directions",
            shape=(input_shape[-1], self.num_directions),
            initializer=self._draw,
            trainable=False,
        )

    def _draw(self, shape, dtype=None):
        """Draws normal vectors, in groups that are orthogonal."""
        size, count = shape
        generator = numpy_generator(self.seed)
        groups = generator.normal(size=(-(-count // size), size, size))
        orthogonal, _ = np.linalg.qr(groups)
        directions = np.concatenate(list(orthogonal), axis=1)[:, :count]
        lengths = np.linalg.norm(generator.normal(size=shape), axis=0)
        return ops.convert_to_tensor(directions * lengths, dtype=dtype)

    def call(self, x):
        directions = ops.convert_to_tensor(self.directions)
        return positive_random_features(x, directions)
