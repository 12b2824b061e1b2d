"""Trains SHA-RNN on the bytes of real text, and lets it write.

    python examples/language_model_sharnn.py
    python examples/language_model_sharnn.py --text FILE

By default the text is the excerpt of English Wikipedia, in the format of
enwik8, that comes with the package gensim: nothing is downloaded. Any other
file will do. It is split as enwik8 is (90 % for training, 5 % for validation,
5 % for the test), which for `--text enwik8` is the split of the literature.

An LSTM with as many parameters is trained next to it, on the same batches, with
Adam. What differs between the two is more than attention, so do not read its
gain off their results: the paper's took a day on a graphics card to show.
`memory_probe_sharnn.py` shows in half a minute what the memory does.

The program prints bits per character, continues a text, and draws
`outputs/language_model_sharnn.png`. Interrupted, it goes on where it stopped
if it was started with `--backup FOLDER`.
"""

import argparse
import bz2
import functools
import importlib.util
import pathlib

import keras
import matplotlib.pyplot as plt
import numpy as np

import keras_attn

WIKIPEDIA = (
    "test/test_data/"
    "enwiki-latest-pages-articles1.xml-p000000010p000030302-shortened.bz2"
)


def read_text(path):
    """The bytes of a file, by default of the excerpt of Wikipedia."""
    if path is None:
        # found without an import, which would want what gensim depends on
        package = importlib.util.find_spec("gensim")
        if package is None:
            raise SystemExit(
                "Install the text with `pip install --no-deps gensim`, or pass "
                "a file of your own with `--text`."
            )
        folder = pathlib.Path(package.submodule_search_locations[0])
        data = bz2.decompress((folder / WIKIPEDIA).read_bytes())
    else:
        data = pathlib.Path(path).read_bytes()
    return np.frombuffer(data, dtype="uint8")


def split(text):
    """The three parts of enwik8: 90 %, 5 % and 5 %."""
    cuts = [round(len(text) * share) for share in (0.9, 0.95)]
    return np.split(text, cuts)


def bits(targets, logits):
    """Bits per character."""
    return keras.losses.sparse_categorical_crossentropy(
        targets, logits, from_logits=True
    ) / np.log(2)


def compile_model(model, optimizer):
    model.compile(
        optimizer,
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=[keras.metrics.MeanMetricWrapper(bits, name="bpc")],
    )


def paper_optimizer(learning_rate, warmup_steps):
    """The recipe of the paper."""
    schedule = keras.optimizers.schedules.CosineDecay(
        0.0,
        decay_steps=1,
        alpha=1.0,
        warmup_target=learning_rate,
        warmup_steps=warmup_steps,
    )
    return keras_attn.optimizers.MinTrustLamb(
        schedule, weight_decay=1.2e-6, global_clipnorm=0.25
    )


@keras.saving.register_keras_serializable("language_model_sharnn")
class StatefulLSTM(keras.Model):
    """The baseline: LSTMs of Keras, with carried state.

    Like `SHARNN`, it keeps a state for training and one for inference.
    """

    def __init__(self, vocabulary_size, units, num_layers, batch_size):
        super().__init__()
        # of unit size, for no norm follows that would make up for less
        self.embedding = keras.layers.Embedding(
            vocabulary_size,
            units,
            embeddings_initializer=keras.initializers.RandomNormal(stddev=1.0),
        )
        self.dense = keras.layers.Dense(vocabulary_size)
        self.lstms = [
            keras.layers.LSTM(units, return_sequences=True, return_state=True)
            for _ in range(num_layers)
        ]
        self.states = [
            [
                [
                    self.add_weight(
                        shape=(batch_size, units),
                        initializer="zeros",
                        trainable=False,
                    )
                    for _ in range(2)
                ]
                for _ in range(num_layers)
            ]
            for _ in range(2)
        ]

    def call(self, inputs, training=False):
        x = self.embedding(inputs["token_ids"])
        keep = 1.0 - keras.ops.cast(inputs["reset"], x.dtype)[:, None]
        for lstm, state in zip(
            self.lstms, self.states[bool(training)], strict=True
        ):
            x, *new = lstm(x, initial_state=[keep * value for value in state])
            for variable, value in zip(state, new, strict=True):
                variable.assign(keras.ops.stop_gradient(value))
        return self.dense(x)


def width_of_equal_size(count, num_layers, vocabulary_size):
    """Width with which the baseline has about `count` parameters."""

    def size(width):
        lstms = num_layers * (8 * width**2 + 4 * width)
        return lstms + vocabulary_size * (2 * width + 1)

    return min(range(8, 4096), key=lambda width: abs(size(width) - count))


def count_trainable(model):
    return sum(int(np.prod(weight.shape)) for weight in model.trainable_weights)


def train(model, train_set, validation_set, epochs, backup):
    callbacks = [keras_attn.data.ResumeSegments(train_set)]
    if backup is not None:
        callbacks.append(
            keras.callbacks.BackupAndRestore(pathlib.Path(backup) / model.name)
        )
    return model.fit(
        train_set,
        epochs=epochs,
        shuffle=False,  # a segment continues the one before
        validation_data=validation_set,
        callbacks=callbacks,
    ).history


def main(arguments):
    quick = arguments.quick
    keras.utils.set_random_seed(arguments.seed)
    batch_size, length = 16, 64 if quick else 128
    width, memory_length = (48, 128) if quick else (192, 512)
    steps, epochs = (30, 3) if quick else (arguments.steps // 10, 10)
    held_out = 20_000 if quick else 120_000

    text = read_text(arguments.text)
    parts = split(text)
    print(
        f"Text of {len(text):,} bytes, of which {len(parts[0]):,} to train on"
    )
    segments = functools.partial(
        keras_attn.data.TokenSegments,
        batch_size=batch_size,
        segment_length=length,
    )
    train_set = segments(parts[0], steps_per_epoch=steps, seed=arguments.seed)
    validation_set, test_set = (segments(part[:held_out]) for part in parts[1:])

    model = keras_attn.models.SHARNN(
        256,
        width,
        num_layers=2,
        memory_length=memory_length,
        stateful=True,
        name="sharnn",
    )
    model.build((batch_size, None))
    count = count_trainable(model)
    units = width_of_equal_size(count, 2, 256)
    baseline = StatefulLSTM(256, units, 2, batch_size)
    histories, results = {}, {}
    for name, candidate, optimizer in (
        (
            "SHA-RNN",
            model,
            paper_optimizer(arguments.learning_rate, 3 * steps // 2),
        ),
        ("LSTM", baseline, keras.optimizers.Adam(5e-3, global_clipnorm=1.0)),
    ):
        if candidate is baseline:
            candidate(train_set[0][0])  # creates the weights
            train_set.on_epoch_end()
        print(f"\n{name} with {count_trainable(candidate):,} parameters")
        compile_model(candidate, optimizer)
        histories[name] = train(
            candidate, train_set, validation_set, epochs, arguments.backup
        )
        results[name] = candidate.evaluate(
            test_set, return_dict=True, verbose=0
        )["bpc"]
    print("\nBits per character of the test text")
    for name, result in results.items():
        print(f"{name:10} {result:.3f}")

    prompt = "The '''history''' of the city began "
    print(f"\nThe model writes:\n\n{prompt}", end="")
    model.generate(
        prompt,
        60 if quick else 400,
        temperature=0.7,
        seed=arguments.seed,
        stream=functools.partial(print, end="", flush=True),
    )
    print("\n")
    draw(model, parts[2], histories, results, steps, arguments.outputs)


def attention_on(model, text, length=48, before=160):
    """What the head attends to from `length` bytes with memory of others."""
    tokens = text[: before + length].astype("int32")[None]
    state = model.initial_state(1, before + length)
    _, state = model(tokens[:, :before], state=state)
    _, scores, _ = model(
        tokens[:, before:], state=state, return_attention_scores=True
    )
    return keras.ops.convert_to_numpy(scores[0])[0, 0], tokens[0]


def draw(model, text, histories, results, steps, outputs):
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(13, 4.6), width_ratios=[1, 1.7], layout="constrained"
    )
    for (name, history), color in zip(
        histories.items(), ("#08519c", "#d94801"), strict=True
    ):
        epochs = steps * (1 + np.arange(len(history["bpc"])))
        left.plot(epochs, history["bpc"], ":", color=color)
        left.plot(
            epochs,
            history["val_bpc"],
            "o-",
            ms=4,
            color=color,
            label=f"{name}, test {results[name]:.3f}",
        )
    left.plot([], [], "o-", ms=4, color="gray", label="validation")
    left.plot([], [], ":", color="gray", label="training")
    left.set_xlabel("steps")
    left.set_ylabel("bits per character")
    left.set_title("Equal parameters, equal batches")
    left.legend(frameon=False)
    left.spines[["top", "right"]].set_visible(False)

    scores, tokens = attention_on(model, text)
    queries, keys = scores.shape
    shown = 96  # the newest positions before, and the segment itself
    scores = scores[:, keys - queries - shown :]
    letters = [chr(t) if 32 < t < 127 else "·" for t in tokens]
    image = right.imshow(
        scores / scores.max(axis=1, keepdims=True), cmap="Blues", aspect="auto"
    )
    right.axvline(shown - 0.5, color="#d94801", lw=1.2)
    right.set_xticks(
        range(scores.shape[1]), letters[-scores.shape[1] :], fontsize=5
    )
    right.set_yticks(range(queries), letters[-queries:], fontsize=6)
    right.tick_params(length=0)
    right.set_xlabel("memory  |  this segment")
    right.set_ylabel("position that looks back")
    right.set_title("What the head attends to, relative to the most of a row")
    figure.colorbar(image, ax=right, shrink=0.9)
    outputs.mkdir(parents=True, exist_ok=True)
    path = outputs / "language_model_sharnn.png"
    figure.savefig(path, dpi=150)
    plt.close(figure)
    print(f"Wrote {path}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a small model")
    parser.add_argument("--text", help="file to train on")
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--learning-rate", type=float, default=4e-3)
    parser.add_argument("--backup", help="folder to resume from")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--outputs", type=pathlib.Path, default="outputs")
    main(parser.parse_args())
