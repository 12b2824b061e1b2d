"""Shows what the memory of SHA-RNN is good for.

A small SHA-RNN learns to repeat a random string of symbols. After training it
reads a string in one segment, and must say it again in the next one, with
nothing but the carried state to go by. How much it can say depends on how many
positions the memory carries over; the weights are the same throughout.

    python examples/memory_probe_sharnn.py

It draws `outputs/memory_probe_sharnn.png`.
"""

import argparse
import pathlib
import string

import keras
import matplotlib.pyplot as plt
import numpy as np

import keras_attn

ALPHABET = 40
SEPARATOR = ALPHABET
NAMES = string.ascii_uppercase + string.ascii_lowercase[: ALPHABET - 26] + "|"
LENGTH = 12  # symbols of a string; a segment has one more, the separator


def draw_strings(count, random):
    """Strings of different symbols, each after a separator: `(count, 13)`."""
    symbols = np.tile(np.arange(ALPHABET, dtype="int32"), (count, 1))
    strings = random.permuted(symbols, axis=1)[:, :LENGTH]
    return np.pad(strings, [(0, 0), (1, 0)], constant_values=SEPARATOR)


class RepeatedStrings(keras.utils.PyDataset):
    """Batches of a string, and the same string once more."""

    def __init__(self, steps, seed, batch_size=128):
        super().__init__()
        self.steps = steps
        self.batch_size = batch_size
        self.random = np.random.default_rng(seed)

    def __len__(self):
        return self.steps

    def __getitem__(self, index):
        strings = draw_strings(self.batch_size, self.random)
        tokens = np.concatenate([strings, strings], axis=1)
        # what comes is known from the second separator on
        weights = np.zeros((self.batch_size, 2 * LENGTH + 1), "float32")
        weights[:, LENGTH + 1 :] = 1.0
        return tokens[:, :-1], tokens[:, 1:], weights


class StopWhenLearnt(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        # the known half of the targets is what the loss is made of
        self.model.stop_training = logs["loss"] < 0.01


def train(attention_layers, max_steps, seed, verbose=1):
    """Trains a model to repeat; returns it and the number of steps."""
    keras.utils.set_random_seed(seed)
    model = keras_attn.models.SHARNN(
        ALPHABET + 1,
        hidden_dim=64,
        intermediate_dim=128,
        num_layers=2,
        attention_layers=attention_layers,
    )
    model.compile(
        keras.optimizers.Adam(4e-3),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    steps = 20
    history = model.fit(
        RepeatedStrings(steps, seed),
        epochs=max_steps // steps,
        callbacks=[StopWhenLearnt()],
        verbose=verbose,
    )
    return model, steps * len(history.epoch)


def recall(model, slots, strings, keep_lstm=True):
    """Reads strings in a segment, and says them again in the next one.

    Args:
        model: The trained model.
        slots: Number of positions that the memory carries over.
        strings: What to read and to say again.
        keep_lstm: Whether the LSTMs carry their state over as well.

    Returns:
        The accuracy, and the attention weights if there are any.
    """
    # the length of a memory counts the positions of the segment too
    memory_length = slots + strings.shape[1] if slots else 0
    state = model.initial_state(len(strings), memory_length)
    _, state = model(strings, state=state)
    if not keep_lstm:
        for block in state:
            for name in ("hidden", "cell"):
                block[name] = keras.ops.zeros_like(block[name])
    attends = model.attention_layers != "none"
    logits, *scores, _ = model(
        strings, state=state, return_attention_scores=attends
    )
    said = keras.ops.convert_to_numpy(logits)[:, :-1].argmax(axis=-1)
    if attends:
        scores = keras.ops.convert_to_numpy(scores[0][0])
    return (said == strings[:, 1:]).mean(), scores


def main(quick, seed, outputs):
    strings = draw_strings(300, np.random.default_rng(seed + 1))
    model, steps = train("penultimate", 600, seed)
    print(f"\nLearnt to repeat within a segment in {steps} steps.\n")
    print("positions carried over   accuracy   without the LSTMs' state")
    all_slots = [0, 6, 13] if quick else [0, 2, 4, 6, 8, 10, 13, 32, 64]
    results = {}
    for slots in all_slots:
        accuracy, _ = recall(model, slots, strings)
        alone, _ = recall(model, slots, strings, keep_lstm=False)
        results[slots] = (accuracy, alone)
        print(f"{slots:22}   {accuracy:8.3f}   {alone:8.3f}")
    _, scores = recall(model, 13, strings[:1])
    bare, steps = train("none", steps, seed, verbose=0)
    without, _ = recall(bare, 0, strings)
    print(
        f"\nThe same model without attention, after {steps} steps: "
        f"{without:.3f}. Chance is {1 / ALPHABET:.3f}."
    )
    draw(results, without, scores[0, 0], strings[0], outputs)


def draw(results, without, scores, symbols, outputs):
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(11, 4.4), width_ratios=[1, 1.2], layout="constrained"
    )
    positions = np.arange(len(results))
    accuracies, alone = zip(*results.values(), strict=True)
    left.bar(positions, accuracies, color="#9ecae1", label="SHA-RNN")
    left.plot(
        positions,
        alone,
        "o",
        color="#08519c",
        label="SHA-RNN, its LSTMs set to zero in between",
    )
    left.axhline(
        without,
        color="#d94801",
        ls="--",
        label="without attention, after equal training",
    )
    left.axhline(1 / ALPHABET, color="gray", ls=":", label="chance")
    left.set_xticks(positions, results)
    left.set_ylim(0, 1.42)
    left.set_yticks(np.linspace(0, 1, 6))
    left.set_xlabel("positions that the memory carries over")
    left.set_ylabel("symbols said again correctly")
    left.set_title("The memory decides how much is recalled")
    left.legend(loc="upper left", frameon=False, fontsize=9)
    left.spines[["top", "right"]].set_visible(False)

    names = [NAMES[symbol] for symbol in symbols]
    image = right.imshow(scores, cmap="Blues", vmin=0, aspect="auto")
    right.axvline(len(names) - 0.5, color="#d94801", lw=1.2)
    right.set_xticks(range(2 * len(names)), names * 2, fontsize=8)
    right.set_yticks(range(len(names)), names, fontsize=8)
    right.set_xlabel("memory of the last segment  |  this segment")
    right.set_ylabel("position that looks back")
    right.set_title("What the head attends to while it recalls")
    figure.colorbar(image, ax=right, label="attention weight", shrink=0.9)
    outputs.mkdir(parents=True, exist_ok=True)
    path = outputs / "memory_probe_sharnn.png"
    figure.savefig(path, dpi=150)
    plt.close(figure)
    print(f"Wrote {path}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer numbers")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--outputs", type=pathlib.Path, default="outputs")
    arguments = parser.parse_args()
    main(arguments.quick, arguments.seed, arguments.outputs)
