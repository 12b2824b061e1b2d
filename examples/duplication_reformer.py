"""The duplication task of the Reformer: what do rounds of hashing buy?

    python examples/duplication_reformer.py           # the table below
    python examples/duplication_reformer.py --quick   # one short row of it

A sequence is `0 w 0 w`, where `w` is random, and the model has to foretell the
second `w`, as in https://arxiv.org/abs/2001.04451. One layer of
attention suffices if each position finds its counterpart in the first half,
and a hash that misses it loses the symbol. The model is trained with one
number of rounds and evaluated with others.
"""

import argparse

import keras
import numpy as np

from keras_attn.layers import LSHAttention

SYMBOLS = 16
FEATURES = 64
ROUNDS = (1, 2, 4, 8)


class Positions(keras.layers.Layer):
    """Adds a learned vector to each position."""

    def build(self, input_shape):
        self.vectors = self.add_weight(
            name="vectors",
            shape=input_shape[1:],
            initializer=keras.initializers.RandomNormal(stddev=0.5),
        )

    def call(self, inputs):
        return inputs + self.vectors


def sequences(count, word_length, rng, symbols=SYMBOLS):
    """Draws inputs and targets; a target of -1 cannot be foretold."""
    words = rng.integers(1, symbols, size=(count, word_length))
    zeros = np.zeros((count, 1), "int64")
    whole = np.concatenate([zeros, words, zeros, words], axis=1)
    inputs, targets = whole[:, :-1], whole[:, 1:].copy()
    targets[:, : word_length + 1] = -1
    return inputs.astype("int32"), targets.astype("int32")


def models(length, attention, rounds):
    """Builds models that share their weights, one for each of `rounds`."""
    embedding = keras.layers.Embedding(
        SYMBOLS,
        FEATURES,
        embeddings_initializer=keras.initializers.RandomNormal(stddev=0.5),
    )
    positions = Positions()
    norms = [keras.layers.LayerNormalization() for _ in range(3)]
    widen = keras.layers.Dense(2 * FEATURES, activation="relu")
    narrow = keras.layers.Dense(FEATURES)
    classify = keras.layers.Dense(SYMBOLS)

    def build(num_hashes):
        tokens = keras.Input((length,), dtype="int32")
        x = positions(embedding(tokens))
        x = x + attention(
            norms[0](x), use_causal_mask=True, num_hashes=num_hashes
        )
        x = x + narrow(widen(norms[1](x)))
        return keras.Model(tokens, classify(norms[2](x)))

    return {num_hashes: build(num_hashes) for num_hashes in rounds}


def accuracy(model, inputs, targets):
    predicted = model.predict(inputs, batch_size=64, verbose=0).argmax(-1)
    return float((predicted == targets)[targets >= 0].mean())


def run(word_length, bucket_size, num_hashes, steps, seed=0, **options):
    """Trains with some rounds; returns the accuracies with `ROUNDS`."""
    keras.utils.set_random_seed(seed)
    rng = np.random.default_rng(seed)
    attention = LSHAttention(
        num_heads=4,
        key_dim=FEATURES // 4,
        bucket_size=bucket_size,
        num_hashes=num_hashes,
        seed=seed,
        **options,
    )
    by_rounds = models(2 * word_length + 1, attention, ROUNDS)
    rate = keras.optimizers.schedules.CosineDecay(
        0.0, steps, warmup_target=2e-3, warmup_steps=steps // 4
    )
    model = by_rounds[num_hashes]
    model.compile(
        keras.optimizers.Adam(rate),
        keras.losses.SparseCategoricalCrossentropy(
            from_logits=True, ignore_class=-1
        ),
    )
    inputs, targets = sequences(32 * steps, word_length, rng)
    model.fit(inputs, targets, batch_size=32, verbose=0)
    inputs, targets = sequences(256, word_length, rng)
    return {n: accuracy(by_rounds[n], inputs, targets) for n in ROUNDS}


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args(argv)
    if arguments.quick:
        sizes = {"word_length": 15, "bucket_size": 4, "steps": 240}
        trained, forms = (4,), ("prefix_consistent",)
    else:
        sizes = {"word_length": 31, "bucket_size": 8, "steps": 1000}
        trained, forms = (4, 2, 1), ("chunks", "prefix_consistent")
    table = {}
    print("| keys | trained with |", *(f"{n} |" for n in ROUNDS))
    print("|---|---|" + "---|" * len(ROUNDS))
    for form in forms:
        for num_hashes in trained:
            row = run(
                num_hashes=num_hashes,
                num_buckets=8,
                prefix_consistent=form == "prefix_consistent",
                seed=arguments.seed,
                **sizes,
            )
            table[form, num_hashes] = row
            cells = (f"{100 * row[n]:.1f} |" for n in ROUNDS)
            print(f"| {form} | {num_hashes} |", *cells, flush=True)
    return table


if __name__ == "__main__":
    main()
