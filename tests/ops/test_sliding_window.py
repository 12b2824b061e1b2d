import json

import keras
import numpy as np
import pytest
from keras import ops

from keras_attn.ops import dot_product_attention
from keras_attn.ops import sliding_window_attention
from tests import golden
from tests import memory
from tests import reference
from tests.backend import compiled
from tests.backend import gradients
from tests.backend import run
from tests.backend import to_numpy
from tests.reference.sliding_window import window_masks


def heads(length, size=5, value_size=5, seed=0):
    rng = np.random.default_rng(seed)
    return [
        rng.normal(size=(2, length, 3, n)).astype("float32")
        for n in (size, size, value_size)
    ]


def close(actual, expected, tolerance=2e-5):
    np.testing.assert_allclose(actual, expected, rtol=0, atol=tolerance)


@pytest.fixture(autouse=True)
def short_blocks(monkeypatch):
    """Lets sequences that are short enough for a test span many blocks."""
    module = "keras_attn.ops.sliding_window.SMALLEST_BLOCK"
    monkeypatch.setattr(module, 2)


@pytest.mark.parametrize(
    ("length", "window_size", "dilation_rate", "value_size"),
    [
        (1, (1, 1), 1, 5),
        (7, (1, 1), 1, 7),
        (8, (2, 2), 1, 5),  # the blocks fill exactly
        (9, (2, 2), 1, 5),  # one position is left over
        (9, (3, 0), 1, 5),  # causal
        (9, (0, 3), 1, 5),
        (17, (4, 1), 1, 5),
        (9, (0, 0), 1, 5),  # a position sees itself alone
        (16, (3, 3), 2, 5),
        (17, (3, 2), 3, 7),
        (17, (1, 2), (1, 2, 4), 5),
        (17, (2, 0), (3, 1, 3), 7),  # heads of one rate are not neighbours
        (5, (10, 10), 1, 5),  # the window is wider than the sequence
        (6, (1, 0), 7, 5),  # the dilation is wider than the sequence
    ],
)
def test_matches_dense_reference(
    length, window_size, dilation_rate, value_size
):
    query, key, value = heads(length, value_size=value_size)
    padding = np.arange(length) < [[length], [max(length - 3, 1)]]

    def attend(query, key, value, padding):
        options = (window_size, dilation_rate, padding)
        # the fused kernel and the path that has weights to return
        return sliding_window_attention(
            query, key, value, *options
        ), sliding_window_attention(
            query, key, value, *options, return_attention_scores=True
        )

    plain, (output, scores) = run(attend, query, key, value, padding)
    rates = np.broadcast_to(dilation_rate, 3)
    mask = window_masks(length, *window_size, rates)
    mask = mask & padding[:, None, None, :]
    expected, weights = reference.attend(query, key, value, mask)
    close(plain, expected)
    close(output, expected)
    close(scores, weights)


def test_matches_dense_reference_at_full_block_size(monkeypatch):
    monkeypatch.undo()
    query, key, value = heads(length=131)
    actual = run(
        lambda *x: sliding_window_attention(*x, 34, (1, 2, 1)),
        query,
        key,
        value,
    )
    mask = window_masks(131, 17, 17, (1, 2, 1))
    close(actual, reference.attend(query, key, value, mask)[0])


@pytest.mark.parametrize("name", golden.names("longformer_*loopref"))
def test_golden_outputs_and_gradients(name):
    data = golden.load(name)
    meta = json.loads(str(data["meta_json"]))
    mask, weight = data["key_padding_mask"], data["loss_weight_R"]
    # the reference puts zeros where the query is padding
    weight = weight * mask[:, :, None, None]

    def attend(query, key, value):
        return sliding_window_attention(
            query,
            key,
            value,
            window_size=2 * meta["one_sided_window_w"],
            dilation_rate=meta["dilation_per_head"],
            padding_mask=mask,
            use_causal_mask=meta["causal"],
        )

    inputs = [data[name] for name in ("query", "key", "value")]
    close(run(attend, *inputs) * mask[:, :, None, None], data["output"])
    actual = gradients(lambda *x: ops.multiply(attend(*x), weight), *inputs)
    for name, gradient in zip(("query", "key", "value"), actual, strict=True):
        close(gradient, data[f"grad_{name}"], tolerance=2e-4)


def test_counts_of_keys_are_those_of_the_golden_data():
    data = golden.load("longformer_dilated_loopref")
    query = np.zeros_like(data["query"])
    _, scores = run(
        lambda *x: sliding_window_attention(
            *x, 6, (1, 2, 3), return_attention_scores=True
        ),
        query,
        query,
        query,
    )
    # uniform weights, so that each row holds as many of them as it sees keys
    counts = (scores > 0).sum(axis=-1)
    mask = (
        window_masks(30, 3, 3, (1, 2, 3))
        & data["key_padding_mask"][:, None, None]
    )
    expected = np.moveaxis(data["keys_per_query"], 1, 2)
    np.testing.assert_array_equal(mask.sum(axis=-1), expected)
    full = window_masks(30, 3, 3, (1, 2, 3)).sum(axis=-1)
    np.testing.assert_array_equal(counts, np.stack([full, full]))


def test_window_of_two_averages_three_neighbours():
    query = np.zeros((1, 4, 1, 1), "float32")
    value = np.array([3.0, 6.0, 9.0, 12.0], "float32").reshape(1, 4, 1, 1)
    output = run(
        lambda *x: sliding_window_attention(*x, 2), query, query, value
    )
    close(output[0, :, 0, 0], [4.5, 6.0, 9.0, 10.5])


@pytest.mark.parametrize("use_causal_mask", [False, True])
def test_window_over_everything_is_full_attention(use_causal_mask):
    query, key, value = heads(length=9)
    padding = np.arange(9) != [[4], [0]]
    options = {"padding_mask": padding, "use_causal_mask": use_causal_mask}

    def both(query, key, value):
        return sliding_window_attention(
            query, key, value, 16, **options
        ), dot_product_attention(query, key, value, **options)

    close(*run(both, query, key, value))


@pytest.mark.parametrize("return_attention_scores", [False, True])
def test_gradients_match_dense_attention(return_attention_scores):
    query, key, value = heads(length=9)
    padding = np.arange(9) < [[9], [2]]
    mask = window_masks(9, 2, 1, (2, 1, 2)) & padding[:, None, None]

    def windowed(query, key, value):
        results = sliding_window_attention(
            query,
            key,
            value,
            (2, 1),
            (2, 1, 2),
            padding_mask=padding,
            return_attention_scores=return_attention_scores,
        )
        heads = results[0] if return_attention_scores else results
        return ops.square(heads)

    def dense(query, key, value):
        return ops.square(
            dot_product_attention(query, key, value, attention_mask=mask)
        )

    for actual, expected in zip(
        gradients(windowed, query, key, value),
        gradients(dense, query, key, value),
        strict=True,
    ):
        close(actual, expected, tolerance=1e-4)


def test_query_without_keys_gets_zeros():
    query, key, value = heads(length=9)
    padding = np.arange(9) < [[9], [3]]

    def attend(query, key, value):
        return sliding_window_attention(
            query, key, value, 4, padding_mask=padding
        )

    output = run(attend, query, key, value)
    np.testing.assert_array_equal(output[1, 5:], 0)
    assert (output[1, :5] != 0).all()
    for gradient in gradients(attend, query, key, value):
        assert np.isfinite(gradient).all()


def test_dropout_acts_on_the_weights():
    def attend(*inputs):
        plain = sliding_window_attention(*inputs, 4, (1, 2, 1))
        dropped = sliding_window_attention(
            *inputs, 4, (1, 2, 1), dropout=lambda weights: 0.5 * weights
        )
        return plain, dropped

    plain, dropped = run(attend, *heads(length=9))
    close(dropped, 0.5 * plain)


@pytest.mark.parametrize(
    ("sizes", "dilation_rate"),
    [
        ([17], 1),
        ([1] * 17, 3),
        ([1] * 17, (2, 1, 2)),
        ([5, 1, 9, 2], (2, 1, 2)),
    ],
)
def test_streaming_equals_one_causal_pass(sizes, dilation_rate):
    query, key, value = heads(length=17, value_size=7)
    padding = np.arange(17) != [[3], [14]]
    left, longest = 4, 4 * np.max(dilation_rate)
    expected, weights = reference.attend(
        query,
        key,
        value,
        window_masks(17, left, 0, np.broadcast_to(dilation_rate, 3))
        & padding[:, None, None],
    )
    state = {
        "key": np.zeros((2, longest, 3, 5), "float32"),
        "value": np.zeros((2, longest, 3, 7), "float32"),
        "padding_mask": np.zeros((2, longest), bool),
    }
    step = compiled(
        lambda query, key, value, padding, state: sliding_window_attention(
            query,
            key,
            value,
            (left, 2),  # the right side has not come yet
            dilation_rate,
            padding,
            return_attention_scores=True,
            state=state,
        )
    )
    weights = np.pad(weights, [(0, 0), (0, 0), (0, 0), (longest, 0)])
    start = 0
    for size in sizes:
        chunk = slice(start, start + size)
        start += size
        inputs = [x[:, chunk] for x in (query, key, value, padding)]
        inputs = [ops.convert_to_tensor(x) for x in inputs]
        state = keras.tree.map_structure(ops.convert_to_tensor, state)
        output, scores, state = step(*inputs, state)
        close(to_numpy(output), expected[:, chunk])
        seen = weights[:, :, chunk, start - size : start + longest]
        close(to_numpy(scores), seen)


def test_unequal_lengths_are_refused():
    query, key, value = heads(length=6)
    with pytest.raises(ValueError, match="as many keys.*4 queries and 6 keys"):
        sliding_window_attention(query[:, :4], key, value, window_size=2)


@pytest.mark.parametrize("dilation_rate", [1, (1, 3)])
def test_memory_grows_with_the_length(dilation_rate):
    def inputs(length):
        x = np.ones((1, length, 2, 4), "float32")
        return [x, x, x, np.arange(length)[None] < length - 3]

    def attend(query, key, value, padding):
        options = {"padding_mask": padding}
        return sliding_window_attention(
            query, key, value, 32, dilation_rate, **options
        ) + sliding_window_attention(
            query, key, value, 32, dilation_rate, use_causal_mask=True
        )

    assert max(memory.growth(attend, inputs, length=512)) <= 4.5
