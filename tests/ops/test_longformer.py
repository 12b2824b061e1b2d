import keras
import numpy as np
import pytest
from keras import ops

from keras_attn.ops import dot_product_attention
from keras_attn.ops import global_token_positions
from keras_attn.ops import longformer_attention
from keras_attn.ops import longformer_attention_step
from keras_attn.ops import sliding_window_attention
from tests import memory
from tests.backend import compiled
from tests.backend import gradients
from tests.backend import run
from tests.backend import to_numpy
from tests.reference import longformer
from tests.reference.sliding_window import window_masks


def heads(length, size=5, value_size=5, seed=0):
    """Query, key and value of windows, and then those of global tokens."""
    rng = np.random.default_rng(seed)
    return [
        rng.normal(size=(2, length, 3, n)).astype("float32")
        for n in (size, size, value_size) * 2
    ]


def close(actual, expected, tolerance=2e-5):
    np.testing.assert_allclose(actual, expected, rtol=0, atol=tolerance)


def take(x, positions):
    return np.take_along_axis(x, np.maximum(positions, 0)[..., None, None], 1)


def mask_of(positions, length):
    return (positions[:, :, None] == np.arange(length)).any(axis=1)


@pytest.fixture(autouse=True)
def short_blocks(monkeypatch):
    """Lets sequences that are short enough for a test span many blocks."""
    module = "keras_attn.ops.sliding_window.SMALLEST_BLOCK"
    monkeypatch.setattr(module, 2)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("length", "window_size", "dilation_rate", "positions", "value_size"),
    [
        (1, (1, 1), 1, [[0], [-1]], 5),
        (9, (1, 1), 1, [[0, 4], [8, -1]], 5),
        (9, (2, 1), (1, 3, 1), [[7, 2, 3], [-1, -1, -1]], 7),
        (9, (1, 1), 1, [range(9), range(8, -1, -1)], 5),  # all are global
        (9, (9, 9), 2, [[5, -1], [6, 0]], 5),  # 6 is padding
        (4, (1, 1), 1, [[0, -1, 2, -1, -1], [3, 2, 1, 0, -1]], 5),
    ],
)
def test_matches_dense_reference(
    length, window_size, dilation_rate, positions, value_size, causal
):
    inputs = heads(length, value_size=value_size)
    positions = np.array(positions, "int32")
    padding = np.arange(length) < [[length], [max(length - 3, 1)]]

    def attend(query, key, value, *others):
        options = {
            "window_size": window_size,
            "global_positions": ops.convert_to_tensor(positions),
            "dilation_rate": dilation_rate,
            "global_query": others[0],
            "global_key": others[1],
            "global_value": others[2],
            "padding_mask": ops.convert_to_tensor(padding),
            "use_causal_mask": causal,
        }
        # the fused kernel and the path that has weights to return
        return longformer_attention(
            query, key, value, **options
        ), longformer_attention(
            query, key, value, **options, return_attention_scores=True
        )

    plain, (output, scores) = run(
        attend, *inputs[:3], take(inputs[3], positions), *inputs[4:]
    )
    expected, weights = longformer.attend(
        *inputs[:3],
        window_masks(length, *window_size, np.broadcast_to(dilation_rate, 3)),
        mask_of(positions, length),
        padding,
        inputs[3:],
        causal,
    )
    close(plain, expected)
    close(output, expected)
    close(scores, weights)


def test_without_global_tokens_it_is_a_sliding_window():
    query, key, value = heads(length=9)[:3]

    def both(query, key, value):
        positions = -ops.ones((2, 2), dtype="int32")
        return longformer_attention(
            query, key, value, 4, positions, (1, 2, 1)
        ), sliding_window_attention(query, key, value, 4, (1, 2, 1))

    close(*run(both, query, key, value))


def test_with_global_tokens_alone_it_is_full_attention():
    query, key, value = heads(length=9)[:3]

    def both(query, key, value):
        positions = ops.stack([ops.arange(9, dtype="int32")] * 2)
        return longformer_attention(
            query, key, value, 2, positions
        ), dot_product_attention(query, key, value)

    close(*run(both, query, key, value))


def test_a_token_counts_once_by_hand():
    # uniform weights over values 1, 10, 100, ... tell who sees whom
    query = np.zeros((1, 6, 1, 1), "float32")
    value = (10.0 ** np.arange(6)).astype("float32").reshape(1, 6, 1, 1)
    output = run(
        lambda query, value: longformer_attention(
            query, query, value, 2, ops.convert_to_tensor([[2]], "int32")
        ),
        query,
        value,
    )
    seen = [111 / 3, 111 / 3, 111111 / 6, 11100 / 3, 111100 / 4, 110100 / 3]
    np.testing.assert_allclose(output[0, :, 0, 0], seen, rtol=1e-5)


def test_gradients_match_dense_attention():
    length, positions = 9, np.array([[0, 4], [2, -1]], "int32")
    inputs = heads(length)
    padding = np.arange(length) < [[length], [7]]
    is_global = mask_of(positions, length)
    window = window_masks(length, 1, 1, (1, 2, 1))
    visible = window | is_global[:, None, None] | is_global[:, None, :, None]
    visible = visible & padding[:, None, None]

    def sparse(query, key, value, *others):
        return ops.square(
            longformer_attention(
                query,
                key,
                value,
                2,
                ops.convert_to_tensor(positions),
                (1, 2, 1),
                take_rows(others[0]),
                *others[1:],
                padding_mask=ops.convert_to_tensor(padding),
            )
        )

    def take_rows(x):
        indices = np.maximum(positions, 0)[..., None, None]
        return ops.take_along_axis(x, ops.convert_to_tensor(indices), axis=1)

    def dense(*inputs):
        mask = ops.convert_to_tensor(visible)
        rows = ops.convert_to_tensor(is_global[:, :, None, None])
        return ops.square(
            ops.where(
                rows,
                dot_product_attention(*inputs[3:], attention_mask=mask),
                dot_product_attention(*inputs[:3], attention_mask=mask),
            )
        )

    for actual, expected in zip(
        gradients(sparse, *inputs), gradients(dense, *inputs), strict=True
    ):
        assert np.abs(expected).max() > 0.01
        close(actual, expected, tolerance=1e-4)


@pytest.mark.parametrize("positions", [[[0, 4], [2, -1]], [[-1], [-1]]])
def test_dropout_acts_on_all_weights(positions):
    def attend(*inputs):
        options = {
            "window_size": 2,
            "global_positions": ops.convert_to_tensor(positions, "int32"),
        }
        plain = longformer_attention(*inputs, **options)
        dropped = longformer_attention(
            *inputs, **options, dropout=lambda weights: 0.5 * weights
        )
        return plain, dropped

    plain, dropped = run(attend, *heads(length=9)[:3])
    close(dropped, 0.5 * plain)


@pytest.mark.parametrize(
    ("sizes", "count"),
    [([17], 3), ([1] * 17, 1), ([1] * 17, 20), ([2, 5, 1, 9], 4)],
)
def test_streaming_equals_one_causal_pass(sizes, count):
    length, rates = 17, (2, 1, 2)
    inputs = heads(length, value_size=7)
    padding = np.arange(length) != [[1], [14]]
    is_global = np.stack([np.arange(length) < count] * 2)
    expected, weights = longformer.attend(
        *inputs[:3],
        window_masks(length, 4, 0, rates),
        is_global,
        padding,
        inputs[3:],
        causal=True,
    )
    shapes = {"key": (3, 5), "value": (3, 7), "padding_mask": ()}
    zeros = {
        name: np.zeros(shape, bool if name == "padding_mask" else "float32")
        for name, shape in shapes.items()
    }
    state = {
        "past": {
            name: np.stack([np.stack([x] * 8)] * 2) for name, x in zeros.items()
        },
        "prefix": {
            name: np.stack([np.stack([zeros[like]] * count)] * 2)
            for name, like in (
                ("key", "key"),
                ("value", "value"),
                ("global_key", "key"),
                ("global_value", "value"),
                ("padding_mask", "padding_mask"),
            )
        },
        "length": np.zeros((), "int32"),
    }
    state = _to_tensors(state)
    step = compiled(
        lambda inputs, padding, state: longformer_attention_step(
            *inputs[:3],
            window_size=(4, 2),  # the right side has not come yet
            state=state,
            dilation_rate=rates,
            global_query=inputs[3][:, :count],
            global_key=inputs[4],
            global_value=inputs[5],
            padding_mask=padding,
            return_attention_scores=True,
        )
    )
    start = 0
    for size in sizes:
        chunk = slice(start, start + size)
        output, scores, state = step(
            _to_tensors([x[:, chunk] for x in inputs]),
            ops.convert_to_tensor(padding[:, chunk]),
            state,
        )
        close(to_numpy(output), expected[:, chunk])
        scores, rows = to_numpy(scores), weights[:, :, chunk]
        seen = min(count, start + size)
        close(scores[..., :seen], rows[..., :seen])
        assert (scores[..., seen:count] == 0).all()
        others = np.pad(rows, [(0, 0), (0, 0), (0, 0), (8, 0)])
        others[..., 8 : 8 + count] = 0
        close(scores[..., count:], others[..., start : start + 8 + size])
        start += size
    assert int(state["length"]) == length


def _to_tensors(structure):
    return keras.tree.map_structure(ops.convert_to_tensor, structure)


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (1, [[1], [-1], [0]]),
        (2, [[1, 3], [-1, -1], [0, 1]]),
        (6, [[1, 3, -1, -1, -1, -1], [-1] * 6, [0, 1, 2, 3, -1, -1]]),
    ],
)
def test_positions_of_global_tokens(size, expected):
    mask = np.array([[0, 1, 0, 1], [0, 0, 0, 0], [1, 1, 1, 1]], bool)
    actual = run(lambda mask: global_token_positions(mask, size), mask)
    np.testing.assert_array_equal(actual, expected)


def test_unequal_lengths_are_refused():
    query, key, value = heads(length=6)[:3]
    positions = np.zeros((2, 1), "int32")
    with pytest.raises(ValueError, match="as many keys.*4 queries and 6 keys"):
        longformer_attention(query[:, :4], key, value, 2, positions)


def test_memory_grows_with_the_length():
    def inputs(length):
        x = np.ones((1, length, 2, 4), "float32")
        return [x, x, x, np.arange(length)[None] % 97 == 3]

    def attend(query, key, value, global_mask):
        return longformer_attention(
            query, key, value, 32, global_token_positions(global_mask, 16)
        )

    assert max(memory.growth(attend, inputs, length=512)) <= 4.5
