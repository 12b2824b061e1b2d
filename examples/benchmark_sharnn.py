"""Tokens per second of SHA-RNN, next to the same model in plain PyTorch.

    KERAS_BACKEND=jax python examples/benchmark_sharnn.py

The model in plain PyTorch is built on `torch.nn.LSTM`, and computes the same
function: both are given the same weights, and their logits are compared before
anything is timed. The two take turns, and the best of the turns counts, so
that what else the machine does weighs on both. Training is a step of `fit()`
with Adam in Keras, against a loop in PyTorch.
"""

import argparse
import time

import keras
import numpy as np
import torch
from torch.nn import functional

import keras_attn


class Gate(torch.nn.Module):
    """The over-parameterised value gate."""

    def __init__(self, width):
        super().__init__()
        self.vector = torch.nn.Parameter(torch.zeros(width))
        self.dense = torch.nn.Linear(width, 2 * width)

    def forward(self):
        candidate, scale = self.dense(torch.sigmoid(self.vector)).chunk(2)
        return torch.sigmoid(scale) * torch.tanh(candidate)


class Block(torch.nn.Module):
    """LSTM, attention to the segment and to the memory before it, and Boom."""

    def __init__(self, width, attention):
        super().__init__()

        def norm():
            return torch.nn.LayerNorm(width, eps=1e-12)

        self.lstm = torch.nn.LSTM(width, width, batch_first=True)
        self.start, self.residual, self.before = norm(), norm(), norm()
        self.up = torch.nn.Linear(width, 4 * width)
        self.attention = attention
        if attention:
            self.middle, self.remember, self.normed = norm(), norm(), norm()
            self.query = torch.nn.Linear(width, width)
            self.query_gate = torch.nn.Parameter(torch.zeros(width))
            self.key_gate = torch.nn.Parameter(torch.zeros(width))
            self.value_gate = Gate(width)

    def forward(self, x, state, memory, slots):
        x, state = self.lstm(self.start(x), state)
        if self.attention:
            own = self.remember(x)
            x = self.middle(x)
            past = memory[:, max(0, memory.shape[1] + x.shape[1] - slots) :]
            seen = torch.cat([past, own], dim=1)
            query = self.normed(self.query(x)) * torch.sigmoid(self.query_gate)
            query = query * torch.sigmoid(self.key_gate)
            mask = torch.ones(x.shape[1], seen.shape[1], dtype=torch.bool)
            attended = functional.scaled_dot_product_attention(
                query, seen, seen, mask.tril(past.shape[1])
            )
            x = x + attended * self.value_gate()
            memory = torch.cat([memory, own], dim=1)[:, -slots:].detach()
        boom = self.up(self.before(x))
        boom = boom * torch.sigmoid(1.702 * boom)
        boom = boom.unflatten(-1, (4, -1)).sum(-2)
        state = tuple(s.detach() for s in state)
        return self.residual(x) + boom, state, memory


class Model(torch.nn.Module):
    """The language model in plain PyTorch."""

    def __init__(self, vocabulary_size, width, num_layers, slots):
        super().__init__()
        self.embedding = torch.nn.Embedding(vocabulary_size, width)
        self.bias = torch.nn.Parameter(torch.zeros(vocabulary_size))
        self.blocks = torch.nn.ModuleList(
            Block(width, index == num_layers - 2) for index in range(num_layers)
        )
        self.slots = slots

    def initial_state(self, batch_size):
        width = self.embedding.embedding_dim
        return [
            (
                (torch.zeros(1, batch_size, width),) * 2,
                torch.zeros(batch_size, 0, width),
            )
            for _ in self.blocks
        ]

    def forward(self, tokens, state):
        x, new_state = self.embedding(tokens), []
        for block, (hidden, memory) in zip(self.blocks, state, strict=True):
            x, hidden, memory = block(x, hidden, memory, self.slots)
            new_state.append((hidden, memory))
        return x @ self.embedding.weight.T + self.bias, new_state


def copy_weights(ours, theirs):
    """Gives the model in PyTorch the weights of the one in Keras."""

    def fill(parameter, weight, transpose=False):
        value = np.array(keras.ops.convert_to_numpy(weight.value))
        with torch.no_grad():
            parameter.copy_(torch.tensor(value.T if transpose else value))

    def fill_dense(linear, dense):
        fill(linear.weight, dense.kernel, transpose=True)
        fill(linear.bias, dense.bias)

    def fill_norm(norm, layer):
        fill(norm.weight, layer.gamma)
        fill(norm.bias, layer.beta)

    fill(theirs.embedding.weight, ours.embedding.embeddings)
    fill(theirs.bias, ours.output_bias)
    for ou, th in zip(ours.blocks, theirs.blocks, strict=True):
        cell = ou.lstm.cell
        fill(th.lstm.weight_ih_l0, cell.kernel, transpose=True)
        fill(th.lstm.weight_hh_l0, cell.recurrent_kernel, transpose=True)
        fill(th.lstm.bias_ih_l0, cell.bias)
        torch.nn.init.zeros_(th.lstm.bias_hh_l0)
        fill_norm(th.start, ou.input_norm)
        fill_norm(th.residual, ou.residual_norm)
        fill_norm(th.before, ou.boom_norm)
        fill_dense(th.up, ou.boom.up_dense)
        if ou.attention:
            head = ou.attention_layer
            fill_norm(th.middle, ou.attention_norm)
            fill_norm(th.remember, ou.memory_norm)
            fill_norm(th.normed, head.query_norm)
            fill_dense(th.query, head.query_dense)
            fill_dense(th.value_gate.dense, head.value_gate_dense)
            fill(th.query_gate, head.query_vector)
            fill(th.key_gate, head.key_vector)
            fill(th.value_gate.vector, head.value_vector)


def best_of(turns, **contestants):
    """Runs functions in turns; returns the shortest seconds of each."""
    seconds = {name: [] for name in contestants}
    for turn in range(turns + 1):
        for name, function in contestants.items():
            start = time.perf_counter()
            function()
            if turn:  # the first one compiles
                seconds[name].append(time.perf_counter() - start)
    return {name: min(values) for name, values in seconds.items()}


def main(width, layers, slots, batch_size, length, turns, steps=5):
    ours = keras_attn.models.SHARNN(
        256, width, num_layers=layers, memory_length=slots, stateful=True
    )
    ours.build((batch_size, None))
    theirs = Model(256, width, layers, slots)
    copy_weights(ours, theirs)

    text = np.random.default_rng(0).integers(
        256, size=batch_size * length * steps + 1, dtype="int32"
    )
    segments = keras_attn.data.TokenSegments(text, batch_size, length)
    batches = [segments[i] for i in range(len(segments))]
    segments.on_epoch_end()
    state = theirs.initial_state(batch_size)
    with torch.no_grad():
        for inputs, _ in batches[:2]:
            expected, state = theirs(torch.tensor(inputs["token_ids"]), state)
            actual = keras.ops.convert_to_numpy(ours(inputs))
            np.testing.assert_allclose(
                actual, expected.numpy(), rtol=1e-3, atol=1e-4
            )

    ours.compile(
        "adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    )
    optimizer = torch.optim.Adam(theirs.parameters())

    def train_theirs():
        state = theirs.initial_state(batch_size)
        for inputs, targets in batches:
            logits, state = theirs(torch.tensor(inputs["token_ids"]), state)
            loss = functional.cross_entropy(
                logits.flatten(0, 1), torch.tensor(targets).long().flatten()
            )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    def train_ours():
        ours.fit(segments, shuffle=False, verbose=0)

    count = 64

    @torch.no_grad()
    def write_theirs():
        state, token = theirs.initial_state(1), torch.tensor([[1]])
        for _ in range(count):
            logits, state = theirs(token, state)
            token = torch.multinomial(logits[:, -1].softmax(-1), 1)

    def write_ours():
        ours.generate([1], count, seed=0)

    backend = keras.backend.backend()
    print(f"{backend}: width {width}, {layers} layers, {slots} positions")
    for name, amount, functions in (
        ("training", text.size - 1, (train_ours, train_theirs)),
        ("generation", count, (write_ours, write_theirs)),
    ):
        seconds = best_of(turns, ours=functions[0], theirs=functions[1])
        ours_rate, theirs_rate = (amount / s for s in seconds.values())
        print(
            f"{name:11} {ours_rate:9.0f} tokens/s, plain PyTorch "
            f"{theirs_rate:9.0f}, ratio {ours_rate / theirs_rate:.2f}",
            flush=True,
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--slots", type=int, default=512)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--turns", type=int, default=3)
    arguments = vars(parser.parse_args())
    main(arguments.pop("width"), **arguments)
