"""The mechanisms of this package, as functions of arrays."""

import dataclasses
import functools
import math

import keras
import numpy as np
from keras import ops

import keras_attn
from benchmarks.catalogue import PLAIN
from keras_attn import layers
from keras_attn import ops as attention

HEADS, SIZE = 8, 64
WIDTH = HEADS * SIZE
WINDOW = 256  # keys beside the query, in all
GLOBAL_TOKENS = 64
BUCKET_SIZE, ROUNDS = 64, 2
PROJECTED_LENGTH = 256
TOP_K = 32
SUMMARY = 4


@dataclasses.dataclass(frozen=True)
class Problem:
    """The sequences that all contestants are given."""

    length: int
    batch_size: int = 1
    causal: bool = False
    dtype: str = "float32"

    def draw(self, *shape, seed=0):
        return _draw(shape, seed, self.dtype)

    @property
    def block_size(self):
        """Positions in a block of the Sparse Transformer, `T ** 0.5`."""
        return max(SUMMARY, round(math.sqrt(self.length)))

    @property
    def num_buckets(self):
        """Buckets of LSH attention, in factors if there are many."""
        if not self.causal:
            return None  # the layer's choice, by length
        bits = max(4, (self.length // BUCKET_SIZE).bit_length() - 1)
        if bits <= 7:
            return 2**bits
        return 2 ** (bits // 2), 2 ** (bits - bits // 2)

    def pairs(self, name):
        """Products of a query and a key that the definition needs, per head.

        Two vectors of the size of a head are multiplied for each: the query
        with the key, and the weight with the value. What is computed instead
        of pairs is counted as if it were.
        """
        length, block = self.length, self.block_size
        share = 0.5 if self.causal else 1.0
        keys = {
            "linear": SIZE,  # with the sum of outer products
            "linformer": 2 * PROJECTED_LENGTH,  # to project, and to attend
            "window": share * WINDOW,
            "longformer": share * (WINDOW + 2 * GLOBAL_TOKENS),
            "lsh": 2 * BUCKET_SIZE * ROUNDS,
            "strided": share * (2 * block + length / block),
            "fixed": share * (block + SUMMARY * length / block),
        }
        # nobody needs to score more than all pairs
        return length * min(keys.get(name, math.inf), share * length)


@functools.cache
def _draw(shape, seed, dtype):
    """Draws a tensor, once for all who are given the same."""
    x = np.random.default_rng(seed).standard_normal(shape, "float32")
    return ops.convert_to_tensor(x, dtype=dtype)


@dataclasses.dataclass
class Contestant:
    """A function of tensors, and what to give it.

    The output has the shape of the first array. Gradients are those with
    respect to all arrays.
    """

    function: callable
    arrays: list
    operations: float  # additions and multiplications, forward, if known
    is_traceable: bool = True  # whether its arrays can be counted by tracing


def core(name, problem):
    """An operation on heads, `(B, T, N, H)`."""
    shape = (problem.batch_size, problem.length, HEADS, SIZE)
    arrays = [problem.draw(*shape, seed=seed) for seed in range(3)]
    function, extra = CORES[name](problem)
    if name == "lsh":
        del arrays[1]  # queries are keys
    return Contestant(function, arrays + extra, core_operations(name, problem))


def core_operations(name, problem):
    return 4 * SIZE * HEADS * problem.batch_size * problem.pairs(name)


def _plain(problem):
    def attend(query, key, value):
        return ops.dot_product_attention(
            query, key, value, is_causal=problem.causal
        )

    return attend, []


def _masked(function, *sizes, **options):
    """Makes a core from an op with the usual arguments."""

    def make(problem):
        causal = {"use_causal_mask": True} if problem.causal else {}
        arguments = [s(problem) if callable(s) else s for s in sizes]

        def attend(query, key, value):
            return function(query, key, value, *arguments, **options, **causal)

        return attend, []

    return make


def _linformer(problem):
    projection = problem.draw(problem.length, PROJECTED_LENGTH, seed=3)
    return attention.linformer_attention, [projection / PROJECTED_LENGTH]


def _longformer(problem):
    count = min(GLOBAL_TOKENS, problem.length)
    positions = np.tile(np.arange(count), (problem.batch_size, 1))
    options = {"use_causal_mask": True} if problem.causal else {}

    def attend(query, key, value):
        return attention.longformer_attention(
            query,
            key,
            value,
            WINDOW,
            ops.convert_to_tensor(positions, dtype="int32"),
            **options,
        )

    return attend, []


def _lsh(problem):
    random = np.random.default_rng(4)
    rotations = random.standard_normal((HEADS, SIZE, ROUNDS, 64), "float32")
    causal = problem.causal

    def attend(query, value):
        hashed = attention.lsh_buckets(
            query, rotations, problem.num_buckets, bucket_size=BUCKET_SIZE
        )
        return attention.lsh_attention(
            query,
            value,
            hashed,
            BUCKET_SIZE,
            prefix_consistent=causal,
            use_causal_mask=causal,
        )

    return attend, []


def _synthesizer(problem):
    kernel = problem.draw(HEADS, SIZE, problem.length, seed=3)

    def attend(query, _, value, kernel):
        scores = attention.dense_scores(query, kernel, problem.length)
        return attention.synthesizer(
            scores, value, use_causal_mask=problem.causal
        )

    return attend, [kernel]


CORES = {
    PLAIN: _plain,
    "multi_head": _masked(attention.dot_product_attention),
    "linear": _masked(attention.linear_attention),
    "linformer": _linformer,
    "window": _masked(attention.sliding_window_attention, WINDOW),
    "longformer": _longformer,
    "lsh": _lsh,
    "strided": _masked(
        attention.strided_sparse_attention,
        lambda problem: problem.block_size,
        heads="merged",
    ),
    "fixed": _masked(
        attention.fixed_sparse_attention,
        lambda problem: problem.block_size,
        SUMMARY,
        heads="merged",
    ),
    "top_k": _masked(attention.top_k_attention, TOP_K),
    "synthesizer": _synthesizer,
}


def make_layer(name, problem):
    """A layer with projections, for sequences `(B, T, WIDTH)`."""
    length, block = problem.length, problem.block_size
    policy = problem.dtype
    if policy != "float32":
        policy = f"mixed_{policy}"
    if name == PLAIN:
        return keras.layers.MultiHeadAttention(HEADS, SIZE, dtype=policy)
    cls, options = {
        "multi_head": (layers.MultiHeadAttention, {}),
        "linear": (layers.LinearAttention, {}),
        "linformer": (
            layers.LinformerAttention,
            {"max_length": length, "projected_length": PROJECTED_LENGTH},
        ),
        "window": (layers.SlidingWindowAttention, {"window_size": WINDOW}),
        "longformer": (
            layers.LongformerAttention,
            {"window_size": WINDOW, "num_global_tokens": GLOBAL_TOKENS},
        ),
        "lsh": (
            layers.LSHAttention,
            {
                "bucket_size": BUCKET_SIZE,
                "num_hashes": ROUNDS,
                "num_buckets": problem.num_buckets,
            },
        ),
        "strided": (
            layers.StridedSparseAttention,
            {"stride": block, "heads": "merged"},
        ),
        "fixed": (
            layers.FixedSparseAttention,
            {"block_size": block, "num_summary": SUMMARY, "heads": "merged"},
        ),
        "top_k": (layers.TopKAttention, {"top_k": TOP_K}),
        "synthesizer": (layers.Synthesizer, {"max_length": length}),
    }[name]
    return cls(num_heads=HEADS, key_dim=SIZE, dtype=policy, **options)


def layer(name, problem):
    """A layer, as a function of its input and of its weights."""
    made = make_layer(name, problem)
    shape = (problem.batch_size, problem.length, WIDTH)
    made.build(shape, shape)
    variables = made.trainable_variables
    options = {"use_causal_mask": True} if problem.causal else {}

    def call(x, *weights):
        pairs = list(zip(variables, weights, strict=True))
        with keras.StatelessScope(state_mapping=pairs):
            return made(x, x, **options)

    weights = [ops.stop_gradient(v.value) for v in variables]
    operations = projection_operations(problem) + core_operations(name, problem)
    return Contestant(call, [problem.draw(*shape), *weights], operations)


def projection_operations(problem):
    return 8 * problem.batch_size * problem.length * WIDTH**2


def stream(name, problem, tokens):
    """Reads some tokens one by one, after a context of many."""
    problem = dataclasses.replace(problem, causal=True)
    context, batch_size = problem.length, problem.batch_size
    made = make_layer(name, problem)
    made.build((batch_size, None, WIDTH))
    state = made.initial_state(batch_size, max_length=context + tokens)
    if name == "multi_head":
        # to read all that would take hours; what is read makes no difference
        state = {
            "key": problem.draw(*state["key"].shape),
            "value": problem.draw(*state["value"].shape),
            "padding_mask": ops.ones_like(state["padding_mask"]),
            "length": ops.full_like(state["length"], context),
        }
    else:
        chunk = problem.draw(batch_size, min(context, 1024), WIDTH)
        for _ in range(context // chunk.shape[1]):
            _, state = made(chunk, state=state)
    flat = [ops.stop_gradient(x) for x in keras.tree.flatten(state)]

    def read(x, *flat):
        start = keras.tree.pack_sequence_as(state, list(flat))
        x, _ = ops.fori_loop(
            0,
            tokens,
            lambda _, carry: made(carry[0], state=carry[1]),
            (x, start),
        )
        return x

    token = problem.draw(batch_size, 1, WIDTH)
    return Contestant(read, [token, *flat], None, is_traceable=False)


def block(name, problem):
    """A step of training of a block of a Transformer."""
    inputs = keras.Input((problem.length, WIDTH), problem.batch_size)
    x = keras_attn.TransformerBlock(make_layer(name, problem), 4 * WIDTH)(
        inputs, use_causal_mask=problem.causal
    )
    model = keras.Model(inputs, x)
    backend = keras.backend.backend()
    model.compile("adam", "mse", jit_compile=backend != "torch")
    x = np.array(ops.convert_to_numpy(problem.draw(*inputs.shape)))
    return lambda: model.train_on_batch(x, x)
