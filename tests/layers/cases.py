"""One line per layer; `test_behaviour.py` runs every test on every line."""

import dataclasses
import inspect

from keras_attn import layers


@dataclasses.dataclass(frozen=True)
class Case:
    """A layer and the arguments to try it with.

    `cross` tells whether query and value may differ in length, `idle` names
    weights that one step of training need not move, and `lacks` options that
    the arguments rule out. `blind` tells whether causal queries may be left
    without any key, and `is_consistent` whether a causal output depends on
    earlier positions alone. `sorts` tells whether positions are sorted by what
    they hold: then later ones decide which of the weights of earlier ones are
    dropped, and rounding which ones a position sees.
    """

    cls: type
    kwargs: dict = dataclasses.field(default_factory=dict)
    cross: bool = True
    idle: tuple = ()
    lacks: tuple = ()
    blind: bool = False
    is_consistent: bool = True
    sorts: bool = False

    def __str__(self):
        values = (f"{k}={v}" for k, v in self.kwargs.items())
        return f"{self.cls.__name__}({','.join(values)})"

    def layer(self, **kwargs):
        return self.cls(**{**self.arguments, **kwargs})

    @property
    def arguments(self):
        return {"num_heads": 3, "key_dim": 5, **self.kwargs}

    @property
    def options(self):
        """Names of the options that the layer supports."""
        options = set(inspect.signature(self.cls.attend).parameters)
        return options - set(self.lacks)


CASES = [
    # a key bias shifts all scores of a query alike, and so has no effect
    Case(
        layers.LongformerAttention,
        {"window_size": 4, "num_global_tokens": 2, "dilation_rate": (2, 1, 2)},
        cross=False,
        idle=("key/bias", "key_global/bias"),
    ),
    Case(
        layers.LongformerAttention,
        {"window_size": (1, 2), "max_global_tokens": 3, "value_dim": 7},
        cross=False,
        # no token is global unless a call says so
        idle=("key/bias", "global/kernel", "global/bias"),
        lacks=("state",),
    ),
    Case(
        layers.LongformerAttention,
        {
            "window_size": 2,
            "num_global_tokens": 4,
            "separate_global_projections": False,
        },
        cross=False,
        idle=("key/bias",),
    ),
    Case(layers.MultiHeadAttention, idle=("key/bias",)),
    Case(layers.MultiHeadAttention, {"value_dim": 7}, idle=("key/bias",)),
    Case(
        layers.SlidingWindowAttention,
        {"window_size": 4},
        cross=False,
        idle=("key/bias",),
    ),
    Case(
        layers.SlidingWindowAttention,
        {"window_size": (3, 1), "dilation_rate": (1, 2, 1), "value_dim": 7},
        cross=False,
        idle=("key/bias",),
    ),
    Case(
        layers.StridedSparseAttention,
        {"stride": 4},
        cross=False,
        idle=("key/bias",),
    ),
    Case(
        layers.StridedSparseAttention,
        {"stride": 3, "heads": "merged", "value_dim": 7},
        cross=False,
        idle=("key/bias",),
    ),
    Case(
        layers.FixedSparseAttention,
        {"block_size": 4, "num_summary": 2},
        cross=False,
        idle=("key/bias",),
        blind=True,
    ),
    Case(
        layers.FixedSparseAttention,
        {
            "block_size": 3,
            "num_summary": 1,
            "num_subblocks": 3,
            "heads": "merged",
            "value_dim": 7,
        },
        cross=False,
        idle=("key/bias",),
    ),
    Case(layers.LSHAttention, {"bucket_size": 3}, cross=False, sorts=True),
    Case(
        layers.LSHAttention,
        {"bucket_size": 3, "num_buckets": 4, "allow_duplicates": False},
        cross=False,
        sorts=True,
    ),
    Case(
        layers.LSHAttention,
        {
            "bucket_size": 3,
            "num_hashes": 3,
            "value_dim": 7,
            "prefix_consistent": False,
        },
        cross=False,
        sorts=True,
        lacks=("state",),
        is_consistent=False,
    ),
    Case(
        layers.LSHAttention,
        {
            "bucket_size": 2,
            "num_buckets": (2, 4),
            "chunks_after": 1,
            "wrap": True,
            "attend_across_buckets": False,
            "allow_duplicates": False,
        },
        cross=False,
        sorts=True,
        lacks=("state",),
        is_consistent=False,
    ),
    Case(layers.Synthesizer, {"max_length": 16, "kind": "random"}),
    Case(layers.Synthesizer, {"max_length": 13, "kind": "fixed_random"}),
    Case(layers.Synthesizer, {"max_length": 16, "kind": "factorized_random"}),
    Case(layers.Synthesizer, {"max_length": 16, "value_dim": 7}),
    Case(layers.Synthesizer, {"max_length": 16, "kind": "factorized_dense"}),
    Case(
        layers.Synthesizer,
        {
            "max_length": 16,
            "kind": ("factorized_dense", "dot_product", "random", "dense"),
            "hidden_dim": 7,
            "tiling": "tile",
        },
        idle=("key/bias",),
    ),
    Case(layers.TopKAttention, {"top_k": 3}, idle=("key/bias",)),
    Case(
        layers.TopKAttention,
        {"top_k": 0.4, "value_dim": 7},
        idle=("key/bias",),
    ),
    Case(layers.LinearAttention),
    Case(layers.LinearAttention, {"feature_map": "relu", "key_dim": 31}),
    Case(layers.LinearAttention, {"feature_map": "favor", "seed": 3}),
    Case(
        layers.LinformerAttention,
        {"max_length": 12, "projected_length": 4, "value_dim": 7},
        idle=("key/bias",),
    ),
    Case(
        layers.LinformerAttention,
        {"max_length": 13, "projected_length": 5, "sharing": "none"},
    ),
    Case(
        layers.LinformerAttention,
        {"max_length": 12, "projected_length": 5, "projection": "mean"},
        idle=("key/bias",),
    ),
    Case(
        layers.LinformerAttention,
        {"max_length": 13, "projected_length": 3, "projection": "convolution"},
    ),
    Case(
        layers.LinformerAttention,
        {"max_length": 12, "projected_length": 4, "projection": "random"},
    ),
]

# one case of each layer
FIRST_CASES = list({case.cls: case for case in reversed(CASES)}.values())[::-1]
