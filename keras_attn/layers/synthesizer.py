"""Synthesizer layer."""

import math

import keras
from keras import ops

from keras_attn.layers.attention_layer import AttentionLayer
from keras_attn.layers.streaming import append_state
from keras_attn.ops import dense_scores
from keras_attn.ops import dot_product_scores
from keras_attn.ops import factorized_dense_scores
from keras_attn.ops import factorized_random_scores
from keras_attn.ops import key_value_cache
from keras_attn.ops import key_value_cache_mask
from keras_attn.ops import mix_scores
from keras_attn.ops import random_scores
from keras_attn.ops import synthesizer
from keras_attn.ops import update_key_value_cache
from keras_attn.utils import check_choice
from keras_attn.utils import check_positive_integers
from keras_attn.utils import clone_initializer
from keras_attn.utils import invalid

KINDS = (
    "random",
    "fixed_random",
    "factorized_random",
    "dense",
    "factorized_dense",
    "dot_product",
)


@keras.saving.register_keras_serializable(package="keras_attn")
class Synthesizer(AttentionLayer):
    """Multi-head attention whose scores need no keys.

    This is the attention of
    [Synthesizer](https://arxiv.org/abs/2005.00743) (Tay et al., 2020). A score
    tells how much one position attends to another by their places in the
    sequence: it is a weight, or a prediction of the query alone, which never
    meets the key. Time and memory grow as `T * S`, as in usual attention, less
    the product of queries and keys. It fits sequences whose positions mean
    something by themselves, and mixes well with usual scores.

    The kinds, with the number of weights that their scores take in a layer of
    `N` heads of size `H` over `F` features, biases aside:

    * `"random"`: A trainable matrix of scores for each head,
      `N * max_length ** 2`.
    * `"fixed_random"`: The same, but never trained.
    * `"factorized_random"`: The product of two matrices of rank `rank`,
      `2 * N * max_length * rank`.
    * `"dense"`: `relu(x @ W1) @ W2` of each query `x`,
      `N * hidden_dim * (F + max_length)`.
    * `"factorized_dense"`: The products of `I` and `J` predictions of each
      query, `N * hidden_dim * (F + I + J)`, where `factors=(I, J)`.
    * `"dot_product"`: Usual attention, to mix with others, `2 * F * N * H`.

    Several kinds make a mixture, the mean of their scores under weights that
    are trained. All of them start alike.

    Query and value may be of any lengths up to `max_length`, and differ in
    them. Longer ones are an error.

    Args:
        num_heads: Number of attention heads.
        key_dim: Size of each head of the query and key in `"dot_product"`, and
            the default of `value_dim` and `hidden_dim`.
        max_length: Number of positions in the longest sequence.
        kind: Where scores come from: a string from the list above, or a tuple
            of them for a mixture.
        rank: Rank of the matrices of `"factorized_random"`.
        factors: Pair of integers, the numbers of predictions of
            `"factorized_dense"`. Their product must be `max_length` or more.
            Defaults to the smallest pair of about equal numbers.
        hidden_dim: Size, in each head, of the hidden layer of `"dense"` and of
            that of `"factorized_dense"`. Defaults to `key_dim`. With 0,
            `"factorized_dense"` predicts without a hidden layer.
        tiling: How `"factorized_dense"` multiplies the predictions `a` and `b`
            into the score of key `s`. `"outer"` takes `a[s // J] * b[s % J]`,
            so that all products differ. `"tile"` repeats both end to end, as
            the paper writes it: `a[s % I] * b[s % J]`. Keys then share a
            score if `I` and `J` have a common divisor.
        random_initializer: Initializer of the random scores, or of their
            factors. Defaults to normal draws under which the scores have a
            variance of 1.
        **kwargs: Further arguments of `keras_attn.layers.AttentionLayer`, such
            as `value_dim`, `dropout` or `use_bias`.

    Call arguments:
        query: Tensor of shape `(B, T, F)`.
        value: Tensor of shape `(B, S, F')`. Defaults to `query`.
        key: Tensor of shape `(B, S, F'')`, with `"dot_product"` only. Defaults
            to `value`.
        attention_mask: Boolean tensor of shape `(B, T, S)` or `(B, N, T, S)`,
            `True` where a query may attend a key. Axes of size 1 broadcast.
        use_causal_mask: Whether to hide the keys after a query's position.
        return_attention_scores: Whether to return the attention weights too, a
            tensor of shape `(B, N, T, S)`.
        state: Streaming state, a cache of the values, and of the keys with
            `"dot_product"`. Scores of a streaming call have shape
            `(B, N, T, max_length)`.

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
    x = x + keras_attn.layers.Synthesizer(
        num_heads=4, key_dim=16, max_length=128, kind=("random", "dense")
    )(x, use_causal_mask=True)
    model = keras.Model(tokens, keras.layers.Dense(10_000)(x))
    ```
    """

    def __init__(
        self,
        num_heads,
        key_dim,
        max_length,
        kind="dense",
        rank=8,
        factors=None,
        hidden_dim=None,
        tiling="outer",
        random_initializer=None,
        **kwargs,
    ):
        super().__init__(num_heads, key_dim, **kwargs)
        check_positive_integers(self, max_length=max_length, rank=rank)
        check_choice(self, ("outer", "tile"), tiling=tiling)
        if hidden_dim not in (None, 0):
            check_positive_integers(self, hidden_dim=hidden_dim)
        is_mixture = isinstance(kind, (tuple, list))
        self.max_length = max_length
        self.kind = tuple(kind) if is_mixture else kind
        self.rank = rank
        self.factors = tuple(factors) if factors else None
        self.hidden_dim = hidden_dim
        self.tiling = tiling
        self.random_initializer = keras.initializers.get(random_initializer)
        self._kinds = self.kind if is_mixture else (kind,)
        self._check_kinds()
        self._check_factors()
        if "dot_product" not in self._kinds:
            self.projections = ("value",)

    def _check_kinds(self):
        for kind in self._kinds:
            check_choice(self, KINDS, kind=kind)
        if not self._kinds or len(set(self._kinds)) < len(self._kinds):
            raise invalid(self, "kind", self.kind, "different kinds")
        if "dense" in self._kinds and self.hidden_dim == 0:
            wanted = 'positive, for the hidden layer of kind "dense"'
            raise invalid(self, "hidden_dim", self.hidden_dim, wanted)

    def _check_factors(self):
        if self.factors is None:
            return
        for size in self.factors:
            check_positive_integers(self, factors=size)
        is_enough = math.prod(self.factors) >= self.max_length
        if len(self.factors) != 2 or not is_enough:
            wanted = f"two, whose product reaches max_length={self.max_length}"
            raise invalid(self, "factors", self.factors, wanted)

    def build(self, query_shape, value_shape=None, key_shape=None):
        super().build(query_shape, value_shape, key_shape)
        length, heads = self.max_length, self.num_heads
        if "random" in self._kinds:
            self.random_kernel = self._add_random_weight(
                "random_kernel", (heads, length, length)
            )
        if "fixed_random" in self._kinds:
            self.fixed_random_kernel = self._add_random_weight(
                "fixed_random_kernel",
                (heads, length, length),
                seed=self.seed,
                trainable=False,
            )
        if "factorized_random" in self._kinds:
            shape, stddev = (heads, length, self.rank), self.rank**-0.25
            self.query_factors = self._add_random_weight(
                "query_factors", shape, stddev
            )
            self.key_factors = self._add_random_weight(
                "key_factors", shape, stddev
            )
        if "dense" in self._kinds:
            self._build_dense(query_shape)
        if "factorized_dense" in self._kinds:
            self._build_factorized_dense(query_shape)
        if len(self._kinds) > 1:
            self.mixture_logits = self.add_weight(
                name="mixture_logits",
                shape=(len(self._kinds),),
                initializer="zeros",
            )

    def _add_random_weight(
        self, name, shape, stddev=1.0, seed=None, trainable=True
    ):
        if self.random_initializer is None:
            initializer = keras.initializers.RandomNormal(0.0, stddev, seed)
        else:
            initializer = clone_initializer(self.random_initializer)
        return self.add_weight(
            name=name, shape=shape, initializer=initializer, trainable=trainable
        )

    def _build_dense(self, query_shape):
        self.hidden_dense = self._add_hidden("hidden", query_shape)
        size = self.hidden_dim or self.key_dim
        # not a dense layer, which could not leave out unused positions
        self.dense_kernel = self.add_weight(
            name="dense_kernel",
            shape=(self.num_heads, size, self.max_length),
            initializer=_per_head(self.kernel_initializer),
            regularizer=self.kernel_regularizer,
            constraint=self.kernel_constraint,
        )
        self.dense_bias = None
        if self.use_bias:
            self.dense_bias = self.add_weight(
                name="dense_bias",
                shape=(self.num_heads, self.max_length),
                initializer=clone_initializer(self.bias_initializer),
                regularizer=self.bias_regularizer,
                constraint=self.bias_constraint,
            )

    def _build_factorized_dense(self, query_shape):
        if self.hidden_dim == 0:
            self.factorized_hidden_dense = None
            equation, shape = "btf,fnh->btnh", query_shape[1:]
            prefix = "query_"
        else:
            self.factorized_hidden_dense = self._add_hidden(
                "factorized_hidden", query_shape
            )
            size = self.hidden_dim or self.key_dim
            equation, shape = "btnf,nfh->btnh", (None, self.num_heads, size)
            prefix = ""
        left, right = self.factors or _default_factors(
            self.max_length, self.tiling
        )
        for name, size in (("left", left), ("right", right)):
            dense = self._add_dense(
                equation,
                shape,
                output_shape=(None, self.num_heads, size),
                bias_axes="nh",
                name=prefix + name,
            )
            setattr(self, f"{name}_dense", dense)

    def _add_hidden(self, name, query_shape):
        """Adds the hidden layer of a kind, in each head one of its own."""
        return self._add_dense(
            "btf,fnh->btnh",
            query_shape[1:],
            output_shape=(
                None,
                self.num_heads,
                self.hidden_dim or self.key_dim,
            ),
            bias_axes="nh",
            name=name,
            activation="relu",
        )

    def project(self, query, key, value):
        """Projects the inputs, `query` into what each kind needs of it."""
        heads, key, value = super().project(query, key, value)
        needed = {"length": ops.shape(query)[1], "dot_product": heads}
        if "dense" in self._kinds:
            needed["dense"] = self.hidden_dense(query)
        if "factorized_dense" in self._kinds:
            if self.factorized_hidden_dense is not None:
                query = self.factorized_hidden_dense(query)
            needed["factorized_dense"] = (
                self.left_dense(query),
                self.right_dense(query),
            )
        return needed, key, value

    def attend(
        self,
        query,
        key,
        value,
        padding_mask=None,
        attention_mask=None,
        use_causal_mask=False,
        dropout=None,
        return_attention_scores=False,
        state=None,
    ):
        start = None
        if state is not None:
            start = state["length"]
            chunks = {"value": value}
            if key is not None:
                chunks["key"] = key
            state = update_key_value_cache(state, padding_mask, **chunks)
            key, value = state.get("key"), state["value"]
            padding_mask = state["padding_mask"]
            attention_mask = key_value_cache_mask(state, query["length"])
        lengths = query["length"], ops.shape(value)[1]
        if getattr(value, "is_meta", False):
            # PyTorch infers shapes, from lengths that may exceed all bounds
            scores = ops.zeros((1, self.num_heads, *lengths), "float32")
        else:
            self._check_lengths(query=lengths[0], value=lengths[1])
            scores = self._scores(query, key, *lengths, start)
        results = synthesizer(
            scores,
            value,
            padding_mask=padding_mask,
            attention_mask=attention_mask,
            use_causal_mask=use_causal_mask and state is None,
            dropout=dropout,
            return_attention_scores=return_attention_scores,
        )
        return append_state(results, state)

    def _scores(self, query, key, query_length, key_length, start):
        """Scores of shape `(B, N, T, S)` or `(1, N, T, S)`."""
        scores = {}
        lengths = query_length, key_length, start
        for kind in self._kinds:
            if kind == "random":
                scores[kind] = random_scores(self.random_kernel, *lengths)
            elif kind == "fixed_random":
                scores[kind] = random_scores(self.fixed_random_kernel, *lengths)
            elif kind == "factorized_random":
                scores[kind] = factorized_random_scores(
                    self.query_factors, self.key_factors, *lengths
                )
            elif kind == "dense":
                scores[kind] = dense_scores(
                    query[kind], self.dense_kernel, key_length, self.dense_bias
                )
            elif kind == "factorized_dense":
                scores[kind] = factorized_dense_scores(
                    *query[kind], key_length, self.tiling
                )
            else:
                scores[kind] = dot_product_scores(query[kind], key)
        scores = list(scores.values())
        if len(scores) == 1:
            return scores[0]
        return mix_scores(scores, self.mixture_logits)

    def compute_output_shape(
        self, query_shape, value_shape=None, key_shape=None
    ):
        value_shape = query_shape if value_shape is None else value_shape
        self._check_lengths(query=query_shape[1], value=value_shape[1])
        return super().compute_output_shape(query_shape, value_shape, key_shape)

    def _check_lengths(self, **lengths):
        for name, length in lengths.items():
            if isinstance(length, int) and length > self.max_length:
                raise ValueError(
                    f"`{type(self).__name__}` takes up to `max_length` "
                    f"positions. Received: a `{name}` of {length} positions, "
                    f"with max_length={self.max_length}"
                )

    def initial_state(self, batch_size, max_length=None):
        """Creates an empty cache of values, and of keys if there are any.

        Args:
            batch_size: Number of sequences.
            max_length: Number of positions that the cache can hold. Defaults
                to `max_length` of the layer, and may not exceed it.

        Returns:
            Dictionary of tensors, for the call argument `state`. See
            `keras_attn.ops.key_value_cache`.
        """
        max_length = self.max_length if max_length is None else max_length
        check_positive_integers(
            self, batch_size=batch_size, max_length=max_length
        )
        self._check_lengths(state=max_length)
        shapes = {"value": (self.num_heads, self.value_dim)}
        if "key" in self.projections:
            shapes["key"] = (self.num_heads, self.key_dim)
        return key_value_cache(
            batch_size, max_length, self.compute_dtype, **shapes
        )

    def get_config(self):
        config = {
            "max_length": self.max_length,
            "kind": self.kind,
            "rank": self.rank,
            "factors": self.factors,
            "hidden_dim": self.hidden_dim,
            "tiling": self.tiling,
            "random_initializer": keras.initializers.serialize(
                self.random_initializer
            ),
        }
        return {**super().get_config(), **config}


def _default_factors(length, tiling):
    """The smallest pair of about equal sizes whose product is enough."""
    right = math.isqrt(length - 1) + 1
    left = -(-length // right)
    # tiles of equal size would repeat together
    return left, right + (tiling == "tile" and left == right)


def _per_head(initializer):
    """Clones an initializer for kernels of shape `(N, inputs, outputs)`."""
    config = initializer.get_config()
    if isinstance(initializer, keras.initializers.VarianceScaling):
        # Keras would take the heads for positions of a convolution
        config = {**config, "input_axes": (1,), "output_axes": (2,)}
    return initializer.__class__.from_config(config)
