"""Which attention should I use? All mechanisms on three tasks, on your machine.

    pip install keras_attn[jax,examples]
    KERAS_BACKEND=jax python examples/which_attention.py
    KERAS_BACKEND=torch python examples/which_attention.py --length 512

    digits  a handwritten digit, read pixel by pixel: what matters is spread out
    copy    a string, to be said again: each position has its one source
    recall  a question, and somewhere far off its answer among others

A small Transformer is trained on each task with each mechanism. For `recall`
the windows are too short, and that they fail is expected: what they cannot see
they cannot tell. Each mechanism has a process of its own, so that its peak of
memory can be told from that of others. The last column is the time of a token
of text, written by `generate()` with a state.

A table and a picture come out. They tell of these tasks at this size, of which
none needs a long training. How well your own data does is another matter.
"""

import argparse
import dataclasses
import json
import math
import os
import pathlib
import subprocess
import sys
import tempfile
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

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

from benchmarks.backends import peak_of_process
from image_classification_cbam import mnist_digits
from keras_attn import layers
from keras_attn import models

WIDTH, HEADS, DEPTH = 64, 4, 2
SIZE = WIDTH // HEADS
BATCH_SIZE = 32
TASKS = ("digits", "copy", "recall")
SYMBOLS = 16  # of the string to copy, and keys to recall
VALUES = 8
LEVELS = 8  # shades of gray


@dataclasses.dataclass(frozen=True)
class Task:
    """Sequences and what to say of them; the last ones are for testing."""

    inputs: np.ndarray
    targets: np.ndarray
    vocabulary_size: int
    classes: int = None  # or a token at each position
    weights: np.ndarray = None  # 0 for targets that do not count
    pooling: str = "first"
    tests: int = 512
    learning_rate: float = 2e-3

    @property
    def length(self):
        return self.inputs.shape[1]


def digits(length, steps):
    """Images of `side * side` shades of gray, and which digit each shows."""
    images, labels = mnist_digits()  # (5000, 14, 14)
    side = 7 if length < 196 else 14
    step = 14 // side
    images = images.reshape(-1, side, step, side, step).mean(axis=(2, 4))
    tokens = (images * (LEVELS - 1e-3)).astype("int32")
    tokens = tokens.reshape(len(images), -1)
    tests = 500
    # the training images come again and again, those for testing last
    count = steps * BATCH_SIZE
    order = np.resize(np.arange(len(tokens) - tests), count)
    order = np.append(order, np.arange(len(tokens) - tests, len(tokens)))
    return Task(
        tokens[order],
        labels[order],
        LEVELS,
        classes=10,
        pooling="mean",
        tests=tests,
    )


def copy(length, steps):
    """A string and itself again; the next token is asked for in the latter."""
    half = length // 2
    rng = np.random.default_rng(0)
    count = steps * BATCH_SIZE + 512
    string = rng.integers(1, SYMBOLS + 1, (count, half))
    tokens = np.concatenate([np.zeros((count, 1)), string, string], axis=1)
    tokens = tokens.astype("int32")
    weights = np.zeros((count, 2 * half), "float32")
    weights[:, half:] = 1.0
    return Task(tokens[:, :-1], tokens[:, 1:], SYMBOLS + 1, weights=weights)


def recall(length, steps):
    """A key, and among many positions the pair of it and its value."""
    rng = np.random.default_rng(0)
    count = steps * BATCH_SIZE + 512
    filler = 0
    tokens = np.full((count, length), filler, "int32")
    values = rng.integers(VALUES, size=(count, SYMBOLS))
    # far from the question, which is the first token
    places = rng.permuted(
        np.tile(np.arange(length // 2, length), (count, 1)), axis=1
    )[:, :SYMBOLS]
    pairs = 1 + np.arange(SYMBOLS) * VALUES + values
    np.put_along_axis(tokens, places, pairs, axis=1)
    asked = rng.integers(SYMBOLS, size=count)
    tokens[:, 0] = 1 + SYMBOLS * VALUES + asked
    answers = values[np.arange(count), asked].astype("int32")
    vocabulary_size = 1 + SYMBOLS * VALUES + SYMBOLS
    return Task(tokens, answers, vocabulary_size, classes=VALUES)


def mechanisms(length):
    """Each mechanism: how to make it, and whether it has a causal form."""
    heads = {"num_heads": HEADS, "key_dim": SIZE}
    window = max(4, length // 8)
    block = max(4, round(math.sqrt(length)))
    longest = {"max_length": length}
    return {
        "full": lambda: layers.MultiHeadAttention(**heads),
        "linear": lambda: layers.LinearAttention(**heads),
        "window": lambda: layers.SlidingWindowAttention(
            **heads, window_size=window
        ),
        "longformer": lambda: layers.LongformerAttention(
            **heads, window_size=window, num_global_tokens=1
        ),
        "strided": lambda: layers.StridedSparseAttention(**heads, stride=block),
        "fixed": lambda: layers.FixedSparseAttention(
            **heads, block_size=block, num_summary=2
        ),
        "lsh": lambda: layers.LSHAttention(
            **heads, bucket_size=max(4, window // 2), num_hashes=4, seed=0
        ),
        "linformer": lambda: layers.LinformerAttention(
            **heads, **longest, projected_length=max(4, length // 4)
        ),
        "dense synthesizer": lambda: layers.Synthesizer(**heads, **longest),
        "random synthesizer": lambda: layers.Synthesizer(
            **heads, **longest, kind="random"
        ),
        "top-k": lambda: layers.TopKAttention(**heads, top_k=8),
        "single head": lambda: layers.SingleHeadAttention(),
    }


NOT_CAUSAL = ("linformer",)


def transformer(name, task, causal):
    make = mechanisms(task.length)[name]
    return models.Transformer(
        vocabulary_size=task.vocabulary_size,
        hidden_dim=WIDTH,
        intermediate_dim=2 * WIDTH,
        num_layers=DEPTH,
        attention=lambda depth: make(),
        max_length=task.length,
        causal=causal,
        head="classes" if task.classes else "tokens",
        num_classes=task.classes,
        pooling=task.pooling,
        seed=0,
    )


class Clock(keras.callbacks.Callback):
    """Times the steps, and reports progress."""

    def __init__(self, report):
        super().__init__()
        self.report = report
        self.starts = []

    def on_train_batch_end(self, batch, logs=None):
        self.starts.append(time.perf_counter())
        if batch % 10 == 9:
            self.report(10)

    @property
    def milliseconds(self):
        return 1000 * float(np.median(np.diff(self.starts)))


def train(name, task_name, args, report):
    """Trains on a task; returns accuracy, time of a step, and the model."""
    steps = args.steps
    task = {"digits": digits, "copy": copy, "recall": recall}[task_name](
        args.length, steps
    )
    keras.utils.set_random_seed(args.seed)
    model = transformer(name, task, causal=task_name == "copy")
    schedule = keras.optimizers.schedules.CosineDecay(
        0.0, steps, warmup_target=task.learning_rate, warmup_steps=steps // 10
    )
    model.compile(
        keras.optimizers.Adam(schedule),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        weighted_metrics=["accuracy"],
        jit_compile=keras.backend.backend() != "torch",
    )
    clock = Clock(report)
    parts = (task.inputs, task.targets, task.weights)
    known = [None if x is None else x[: -task.tests] for x in parts]
    model.fit(
        *known[:2],
        sample_weight=known[2],
        batch_size=BATCH_SIZE,
        shuffle=False,
        verbose=0,
        callbacks=[clock],
    )
    new = [None if x is None else x[-task.tests :] for x in parts]
    results = model.evaluate(
        *new[:2],
        sample_weight=new[2],
        batch_size=BATCH_SIZE,
        verbose=0,
        return_dict=True,
    )
    return results["accuracy"], clock.milliseconds, model


def decode(model, length, tokens):
    """Milliseconds of a token that is written after half of the context."""
    prompt = np.ones((1, length // 2), "int32")
    model.generate(prompt, tokens)  # which compiles
    start = time.perf_counter()
    model.generate(prompt, tokens)
    return 1000 * (time.perf_counter() - start) / tokens


def study(name, args):
    """All tasks with one mechanism, in a process of its own."""

    def report(steps):
        print(json.dumps({"steps": steps}), flush=True)

    before = peak_of_process()
    row = {"mechanism": name, "accuracy": {}, "milliseconds": {}}
    for task in args.tasks:
        if task == "copy" and name in NOT_CAUSAL:
            report(args.steps)
            continue
        accuracy, milliseconds, model = train(name, task, args, report)
        row["accuracy"][task] = accuracy
        row["milliseconds"][task] = milliseconds
        row["megabytes"] = (peak_of_process() - before) / 1e6
        if task == "copy":
            tokens = min(32, args.length // 4)
            row["decode"] = decode(model, args.length, tokens)
    print(json.dumps(row), flush=True)


def run_child(name, arguments, advance):
    """Runs `study()` in a fresh process, and returns its row."""
    command = [sys.executable, __file__, *arguments, "--child", name]
    environment = {**os.environ, "KERAS_BACKEND": keras.backend.backend()}
    row = None
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=environment,
        ) as process,
    ):
        for line in process.stdout:
            if line.startswith("{"):
                message = json.loads(line)
                if "steps" in message:
                    advance(message["steps"])
                else:
                    row = message
        if process.wait() or row is None:
            errors.seek(0)
            raise SystemExit(
                f"The process of `{name}` failed:\n{errors.read()}"
            )
    return row


def table(rows, args):
    result = Table(
        title=f"{keras.backend.backend()}, {args.length} positions, "
        f"{args.steps} steps of {BATCH_SIZE} sequences, seed {args.seed}"
    )
    result.add_column("mechanism")
    for task in args.tasks:
        result.add_column(f"{task}\naccuracy", justify="right")
    for task in args.tasks:
        result.add_column(f"{task}\nms/step", justify="right")
    result.add_column("peak\nMB", justify="right")
    result.add_column("ms per token\nwritten", justify="right")
    for row in rows:
        result.add_row(
            row["mechanism"],
            *(_number(row["accuracy"].get(task), 3) for task in args.tasks),
            *(_number(row["milliseconds"].get(task), 0) for task in args.tasks),
            _number(row.get("megabytes"), 0),
            _number(row.get("decode"), 2),
        )
    return result


def _number(value, digits):
    return "-" if value is None else f"{value:.{digits}f}"


def draw(rows, args, path):
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    names = [row["mechanism"] for row in rows]
    figure, axes = plt.subplots(
        1,
        len(args.tasks) + 1,
        figsize=(3.2 * len(args.tasks) + 4.2, 0.36 * len(rows) + 1.6),
        layout="constrained",
        sharey=True,
    )
    places = np.arange(len(rows))
    colors = plt.get_cmap("tab10").colors
    chances = {"digits": 1 / 10, "copy": 1 / SYMBOLS, "recall": 1 / VALUES}
    for axis, task, color in zip(axes, args.tasks, colors, strict=False):
        values = [row["accuracy"].get(task, 0.0) for row in rows]
        axis.barh(places, values, color=color, height=0.7)
        for place, row in zip(places, rows, strict=True):
            if task not in row["accuracy"]:
                axis.text(0.1, place, "no causal form", va="center")
        axis.axvline(chances[task], color="black", ls=":", lw=1)
        axis.text(
            chances[task],
            -0.75,
            " chance",
            fontsize="small",
            va="bottom",
        )
        axis.set_xlim(0, 1.02)
        axis.set_title(f"{task}: accuracy")
    last = axes[-1]
    for i, (task, color) in enumerate(zip(args.tasks, colors, strict=False)):
        values = [row["milliseconds"].get(task, 0.0) for row in rows]
        height = 0.8 / len(args.tasks)
        offset = (i - (len(args.tasks) - 1) / 2) * height
        last.barh(
            places + offset, values, height=height, color=color, label=task
        )
    last.set_title("milliseconds per step")
    last.legend(frameon=False)
    axes[0].set_yticks(places, names)
    axes[0].set_ylim(len(rows) - 0.4, -0.8)
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle(
        f"{keras.backend.backend()}, {args.length} positions", fontsize="medium"
    )
    figure.savefig(path, dpi=130)
    plt.close(figure)


def parse(arguments):
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    add("--mechanisms", nargs="+", choices=mechanisms(8))
    add("--length", type=int, default=256, help="of the sequences, at least 64")
    add("--steps", type=int, default=600, help="of training for each task")
    add("--seed", type=int, default=0)
    add("--quick", action="store_true", help="a few steps, to see it work")
    add("--outputs", type=pathlib.Path, default="outputs")
    add("--child", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.quick:
        args.length, args.steps = 64, 20
    if args.length < 64:
        parser.error(f"`--length` must be at least 64. Received: {args.length}")
    args.mechanisms = args.mechanisms or list(mechanisms(8))
    return args


def main(arguments=None):
    arguments = sys.argv[1:] if arguments is None else arguments
    args = parse(arguments)
    if args.child:
        return study(args.child, args)
    rows = []
    with Progress(
        TextColumn("{task.description:20}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("steps"),
        TimeElapsedColumn(),
        TextColumn("left:"),
        TimeRemainingColumn(),
    ) as progress:
        total = len(args.mechanisms) * len(args.tasks) * args.steps
        bar = progress.add_task("", total=total)
        for name in args.mechanisms:
            progress.update(bar, description=name)
            rows.append(
                run_child(name, arguments, lambda n: progress.advance(bar, n))
            )
    Console(width=None if sys.stdout.isatty() else 120).print(table(rows, args))
    args.outputs.mkdir(parents=True, exist_ok=True)
    path = args.outputs / "which_attention.png"
    draw(rows, args, path)
    path.with_suffix(".json").write_text(json.dumps(rows, indent=1))
    print(f"Wrote {path} and {path.with_suffix('.json')}")
    return rows


if __name__ == "__main__":
    main()
