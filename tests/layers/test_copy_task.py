"""Whether a layer learns to carry symbols from one place to another.

The input is a string of random symbols, and as many blanks; the target of each
blank is the symbol at the same place of the string. Nothing but attention can
bring it there, so that a mechanism which is dead stays at chance.
"""

import keras
import numpy as np
import pytest
from keras import ops

from keras_attn import layers

SYMBOLS = 8
LENGTH = 8
CHANCE = np.log(SYMBOLS)


class Copier(keras.layers.Layer):
    """Adds what is where, lets it attend, and names a symbol."""

    def __init__(self, attention, **options):
        super().__init__()
        self.token_embedding = keras.layers.Embedding(SYMBOLS + 1, 32)
        self.position_embedding = keras.layers.Embedding(2 * LENGTH, 32)
        self.attention = attention
        self.options = options
        self.classifier = keras.layers.Dense(SYMBOLS)

    def build(self, input_shape):
        self.token_embedding.build(input_shape)
        self.position_embedding.build(input_shape)
        if not self.attention.built:
            self.attention.build((*input_shape, 32))
        self.classifier.build((None, LENGTH, 32))

    def call(self, tokens):
        positions = ops.arange(2 * LENGTH, dtype="int32")
        x = self.token_embedding(tokens)
        x = x + self.position_embedding(positions[None])
        x = self.attention(x, **self.options)
        return self.classifier(x[:, LENGTH:])

    def compute_output_shape(self, input_shape):
        return (input_shape[0], LENGTH, SYMBOLS)


def loss_after_training(attention, steps=200, **options):
    keras.utils.set_random_seed(0)
    rng = np.random.default_rng(0)
    symbols = rng.integers(SYMBOLS, size=(64 * steps + 256, LENGTH))
    blanks = np.full_like(symbols, SYMBOLS)
    tokens = np.concatenate([symbols, blanks], axis=1).astype("int32")
    symbols = symbols.astype("int32")
    inputs = keras.Input((2 * LENGTH,), dtype="int32")
    model = keras.Model(inputs, Copier(attention, **options)(inputs))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.02), loss)
    # every sequence is seen once, and the last ones never
    model.fit(
        tokens[:-256], symbols[:-256], batch_size=64, shuffle=False, verbose=0
    )
    return model.evaluate(
        tokens[-256:], symbols[-256:], batch_size=256, verbose=0
    )


def test_linear_attention_copies_like_softmax_attention():
    causal = {"use_causal_mask": True}
    full = loss_after_training(layers.MultiHeadAttention(2, 16), **causal)
    linear = loss_after_training(layers.LinearAttention(2, 16), **causal)
    assert full < 0.05
    assert linear < full + 0.1


@pytest.mark.parametrize(
    "attention",
    [
        layers.LinearAttention(2, 16, "favor", seed=0),
        layers.LinearAttention(2, 32, "relu"),
        layers.LinformerAttention(2, 16, 2 * LENGTH, 12),
        layers.TopKAttention(2, 16, top_k=2),
        layers.SlidingWindowAttention(2, 16, window_size=2 * LENGTH),
    ],
    ids=["favor", "relu", "linformer", "top_k", "window"],
)
def test_mechanisms_copy(attention):
    assert loss_after_training(attention, steps=300) < 0.3


def test_a_dead_mechanism_stays_at_chance():
    attention = layers.LinearAttention(2, 16)
    attention.build((None, 2 * LENGTH, 32))
    attention.output_dense.kernel.assign(np.zeros((2, 16, 32)))
    attention.trainable = False
    assert loss_after_training(attention) > CHANCE - 0.05
