"""Attention layer of the Reformer."""

import keras
import numpy as np
from keras import ops

from keras_attn.layers.attention_layer import AttentionLayer
from keras_attn.ops import key_value_cache
from keras_attn.ops import lsh_attention
from keras_attn.ops import lsh_buckets
from keras_attn.ops import update_key_value_cache
from keras_attn.ops.lsh import AUTOMATIC_COLUMNS
from keras_attn.utils import check_positive_integers

CAUSAL_BUCKETS = 16


@keras.saving.register_keras_serializable(package="keras_attn")
class LSHAttention(AttentionLayer):
    """Multi-head attention among positions whose queries are similar.

    This is the locality-sensitive hashing attention of the
    [Reformer](https://arxiv.org/abs/2001.04451) (Kitaev et al., 2020, section
    2). Queries are the keys as well, so the layer has no projection `key`.
    They are hashed into buckets, of which similar ones are likely to share
    one; positions are sorted by bucket and cut into chunks, and each attends
    to its chunk and the one before, in several rounds of hashing. Time and
    memory grow as `T * bucket_size * num_hashes`.

    A position sees itself only if it sees nothing else. Sequences may be of
    any length.

    In published programs, causal positions do not attend to later ones, but
    these move the borders of the chunks, and so what the earlier ones see. By
    default, this layer does without chunks in causal use: a position sees the
    last `chunks_before * bucket_size` members of its own bucket. It depends
    on earlier positions alone, at the same cost, and the layer can stream.

    Args:
        num_heads: Number of attention heads.
        key_dim: Size of each head of the query, which is the key as well.
        bucket_size: Positive integer, the number of positions in a chunk.
        num_hashes: Positive integer, the number of rounds of hashing. More
            rounds miss fewer of the similar positions, at more cost.
        num_buckets: Even integer, or a list of even factors, the number of
            buckets. By default it follows the length of each sequence without
            its padding: the largest power of two up to `2 * L / bucket_size`,
            factorized where it exceeds 128. In causal use it has to be the
            same at all lengths, and is 16 by default. A position then sees
            back to about `num_buckets * bucket_size` positions: give more for
            long sequences.
        chunks_before: How many chunks before its own a position sees.
        chunks_after: How many chunks after its own a position sees.
        wrap: Whether the chunks of all rounds lie on a ring, so that the first
            one has a chunk before it too. Published programs do that, the
            paper does not; padding then changes what others see.
        attend_across_buckets: Whether a position sees those of other buckets
            in its chunks.
        allow_duplicates: Whether a position that is met in several rounds
            counts as often. Otherwise it counts once, as in equation 16 of the
            paper.
        prefix_consistent: Whether causal positions see the last members of
            their bucket, and no other buckets, instead of chunks. Defaults to
            `True`, unless `wrap` or `chunks_after` ask for chunks.
        max_num_hashes: Positive integer, the most rounds that a call may ask
            for. Defaults to `num_hashes`, or to 8 if that is more.
        **kwargs: Further arguments of `keras_attn.layers.AttentionLayer`, such
            as `value_dim`, `dropout` or `use_bias`. `seed` also determines the
            random directions of the hash, which are a weight that is not
            trained.

    Call arguments:
        query: Tensor of shape `(B, T, F)`.
        value: Tensor of shape `(B, T, F')`. Defaults to `query`.
        use_causal_mask: Whether to hide the positions after the query's.
        num_hashes: Number of rounds in this call, up to `max_num_hashes`.
            Defaults to that of the layer.
        return_attention_scores: Whether to return the attention weights too, a
            tensor of shape `(B, N, T, T)`. This costs more than full
            attention.
        state: Streaming state of a `prefix_consistent` layer. Scores of a
            streaming call have shape `(B, N, T, max_length)`.

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
    x = x + keras_attn.layers.LSHAttention(
        num_heads=4, key_dim=16, bucket_size=32, num_hashes=4
    )(x)
    model = keras.Model(tokens, keras.layers.Dense(10_000)(x))
    ```
    """

    projections = ("query", "value")

    def __init__(
        self,
        num_heads,
        key_dim,
        bucket_size=64,
        num_hashes=2,
        num_buckets=None,
        chunks_before=1,
        chunks_after=0,
        wrap=False,
        attend_across_buckets=True,
        allow_duplicates=True,
        prefix_consistent=None,
        max_num_hashes=None,
        **kwargs,
    ):
        super().__init__(num_heads, key_dim, **kwargs)
        if max_num_hashes is None:
            max_num_hashes = max(num_hashes, 8)
        check_positive_integers(
            self,
            bucket_size=bucket_size,
            num_hashes=num_hashes,
            max_num_hashes=max_num_hashes,
            # 0 chunks are none, but -1 would be a mistake
            chunks_before=chunks_before + 1,
            chunks_after=chunks_after + 1,
        )
        self.bucket_size = bucket_size
        self.num_hashes = num_hashes
        self.num_buckets = self._check_buckets(num_buckets)
        self.chunks_before = chunks_before
        self.chunks_after = chunks_after
        self.wrap = wrap
        self.attend_across_buckets = attend_across_buckets
        self.allow_duplicates = allow_duplicates
        self.max_num_hashes = max_num_hashes
        needs_chunks = wrap or chunks_after > 0 or chunks_before == 0
        if prefix_consistent is None:
            prefix_consistent = not needs_chunks
        if prefix_consistent and needs_chunks:
            raise ValueError(
                f"`{type(self).__name__}` cannot be `prefix_consistent` with "
                f"chunks on a ring, after a position, or not before it. "
                f"Received: wrap={wrap}, chunks_after={chunks_after}, "
                f"chunks_before={chunks_before}"
            )
        self.prefix_consistent = prefix_consistent
        if not prefix_consistent:
            self._options = tuple(x for x in self._options if x != "state")
        self._check_num_hashes(num_hashes)

    def _check_buckets(self, num_buckets):
        """Checks the number of buckets, and makes factors a tuple."""
        if num_buckets is None:
            return None
        is_factorized = isinstance(num_buckets, (tuple, list))
        factors = num_buckets if is_factorized else (num_buckets,)
        for factor in factors:
            check_positive_integers(self, num_buckets=factor)
        if not factors or any(factor % 2 for factor in factors):
            raise ValueError(
                f"`{type(self).__name__}` needs an even number, or even "
                "factors, for `num_buckets`: half of the buckets lie opposite "
                f"to the others. Received: num_buckets={num_buckets}"
            )
        return tuple(num_buckets) if is_factorized else num_buckets

    def _check_num_hashes(self, num_hashes):
        check_positive_integers(self, num_hashes=num_hashes)
        if num_hashes > self.max_num_hashes:
            raise ValueError(
                f"`{type(self).__name__}` has directions for "
                f"`max_num_hashes={self.max_num_hashes}` rounds of hashing. "
                f"Received: num_hashes={num_hashes}"
            )

    def build(self, query_shape, value_shape=None, key_shape=None):
        super().build(query_shape, value_shape, key_shape)
        if self.num_buckets is None:
            columns = AUTOMATIC_COLUMNS
        elif isinstance(self.num_buckets, int):
            columns = self.num_buckets // 2
        else:
            columns = sum(self.num_buckets) // 2

        def draw(shape, dtype):
            # NumPy, so that all backends hash alike; rounds first, so that
            # those of a layer with fewer are the first of one with more
            heads, size, rounds, columns = shape
            seed = self.seed
            if seed is None:
                seed = np.random.randint(2**31)
            rotations = np.random.default_rng(seed).normal(
                size=(rounds, heads, size, columns)
            )
            rotations = rotations.transpose(1, 2, 0, 3)
            return ops.convert_to_tensor(rotations.astype("float32"), dtype)

        self.rotations = self.add_weight(
            name="rotations",
            shape=(
                self.num_heads,
                self.key_dim,
                self.max_num_hashes,
                columns,
            ),
            initializer=draw,
            trainable=False,
        )

    def attend(
        self,
        query,
        key,
        value,
        padding_mask=None,
        use_causal_mask=False,
        dropout=None,
        return_attention_scores=False,
        num_hashes=None,
        state=None,
    ):
        num_hashes = self.num_hashes if num_hashes is None else num_hashes
        self._check_num_hashes(num_hashes)
        is_causal = use_causal_mask or state is not None
        prefix_consistent = self.prefix_consistent and is_causal
        num_buckets = self.num_buckets
        if num_buckets is None and prefix_consistent:
            # a number that follows the length depends on later positions
            num_buckets = CAUSAL_BUCKETS
        # a stream remembers all rounds, for later calls may ask for more
        num_rounds = num_hashes if state is None else self.max_num_hashes
        buckets = lsh_buckets(
            query,
            ops.convert_to_tensor(self.rotations)[:, :, :num_rounds],
            num_buckets,
            self.bucket_size,
            padding_mask,
        )
        options = {
            "bucket_size": self.bucket_size,
            "chunks_before": self.chunks_before,
            "chunks_after": self.chunks_after,
            "wrap": self.wrap,
            "attend_across_buckets": self.attend_across_buckets,
            "allow_duplicates": self.allow_duplicates,
            "dropout": dropout,
            "return_attention_scores": return_attention_scores,
        }
        if state is None:
            return lsh_attention(
                query,
                value,
                buckets,
                padding_mask=padding_mask,
                use_causal_mask=use_causal_mask,
                prefix_consistent=prefix_consistent,
                **options,
            )
        chunk = {"query": query, "value": value}
        chunk["buckets"] = ops.transpose(buckets, (0, 3, 1, 2))
        start = state["length"]
        state = update_key_value_cache(state, padding_mask, **chunk)
        buckets = ops.cast(state["buckets"][..., :num_hashes], "int32")
        results = lsh_attention(
            query,
            state["value"],
            ops.transpose(buckets, (0, 2, 3, 1)),
            padding_mask=state["padding_mask"],
            use_causal_mask=True,
            prefix_consistent=True,
            key=state["query"],
            start=start,
            **options,
        )
        results = results if isinstance(results, tuple) else (results,)
        return (*results, state)

    def initial_state(self, batch_size, max_length=None):
        """Creates an empty cache of queries, values and buckets.

        Args:
            batch_size: Number of sequences.
            max_length: Number of positions that the cache can hold.

        Returns:
            Dictionary of tensors, for the call argument `state`. See
            `keras_attn.ops.key_value_cache`.
        """
        if not self.prefix_consistent:
            raise ValueError(
                f"`{type(self).__name__}` has no streaming form unless it is "
                "`prefix_consistent`: later positions would change what "
                "earlier ones see."
            )
        check_positive_integers(
            self, batch_size=batch_size, max_length=max_length
        )
        state = key_value_cache(
            batch_size,
            max_length,
            self.compute_dtype,
            query=(self.num_heads, self.key_dim),
            value=(self.num_heads, self.value_dim),
        )
        # half precision cannot count the buckets
        buckets = key_value_cache(
            batch_size,
            max_length,
            "float32",
            buckets=(self.num_heads, self.max_num_hashes),
        )
        return {**state, **buckets}

    def get_config(self):
        config = {
            "bucket_size": self.bucket_size,
            "num_hashes": self.num_hashes,
            "num_buckets": self.num_buckets,
            "chunks_before": self.chunks_before,
            "chunks_after": self.chunks_after,
            "wrap": self.wrap,
            "attend_across_buckets": self.attend_across_buckets,
            "allow_duplicates": self.allow_duplicates,
            "prefix_consistent": self.prefix_consistent,
            "max_num_hashes": self.max_num_hashes,
        }
        return {**super().get_config(), **config}
