import keras
import numpy as np
import pytest
from keras import ops

from keras_attn import MultiHeadAttention
from keras_attn import SlidingWindowAttention
from tests.backend import compiled
from tests.backend import run
from tests.backend import to_numpy
from tests.reference.sliding_window import window_masks

HEADS, FEATURES = 3, 13


def sequence(length, batch=2):
    rng = np.random.default_rng(0)
    return rng.normal(size=(batch, length, FEATURES)).astype("float32")


def close(actual, expected, tolerance=2e-5):
    np.testing.assert_allclose(actual, expected, rtol=0, atol=tolerance)


@pytest.fixture
def short_blocks(monkeypatch):
    """Lets sequences that are short enough for a test span many blocks."""
    module = "keras_attn.ops.sliding_window.SMALLEST_BLOCK"
    monkeypatch.setattr(module, 2)


@pytest.mark.parametrize("use_causal_mask", [False, True])
@pytest.mark.parametrize(
    ("window_size", "dilation_rate"),
    [(4, 1), (4, [1, 2, 3]), ((1, 3), 2), ([2, 0], 1)],
)
def test_equals_full_attention_under_the_mask_of_a_window(
    window_size, dilation_rate, use_causal_mask, short_blocks
):
    layer = SlidingWindowAttention(HEADS, 5, window_size, dilation_rate)
    full = MultiHeadAttention(HEADS, 5)
    x, padding = sequence(11), np.arange(11) < [[11], [7]]
    for each in (layer, full):
        each.build(x.shape)
    layer.set_weights(full.get_weights())
    left, right = (2, 2) if window_size == 4 else window_size
    rates = np.broadcast_to(dilation_rate, HEADS)
    mask = window_masks(11, left, right, rates)[None]

    def both(x, padding, mask):
        options = {"mask": padding, "use_causal_mask": use_causal_mask}
        return layer(x, **options), full(x, attention_mask=mask, **options)

    close(*run(both, x, padding, mask))


def test_a_window_over_everything_is_what_keras_computes():
    layer = SlidingWindowAttention(HEADS, 5, window_size=20)
    theirs = keras.layers.MultiHeadAttention(HEADS, 5)
    x = sequence(11)
    theirs.build(x.shape, x.shape)
    layer.build(x.shape)
    layer.set_weights(theirs.get_weights())
    close(*run(lambda x: (layer(x), theirs(x, x)), x))
    causal = {"use_causal_mask": True}
    close(*run(lambda x: (layer(x, **causal), theirs(x, x, **causal)), x))


def test_a_query_sees_as_many_keys_as_the_documentation_says():
    layer = SlidingWindowAttention(1, 5, window_size=4)
    _, scores = layer(sequence(9), return_attention_scores=True)
    counts = (to_numpy(scores)[0, 0] > 0).sum(axis=-1)
    np.testing.assert_array_equal(counts, [3, 4, 5, 5, 5, 5, 5, 4, 3])


@pytest.mark.parametrize("length", [1, 32, 33, 64, 100])
def test_one_model_across_block_borders(length):
    # unknown lengths cannot tell whether one block is enough
    inputs = keras.Input((None, FEATURES))
    layer = SlidingWindowAttention(HEADS, 5, window_size=6)
    model = keras.Model(inputs, layer(inputs))
    full = MultiHeadAttention(HEADS, 5)
    full.build((None, None, FEATURES))
    full.set_weights(layer.get_weights())
    x = sequence(length)
    mask = window_masks(length, 3, 3, [1])[0]
    expected = run(lambda x: full(x, attention_mask=mask), x)
    close(model.predict(x, verbose=0), expected)


def test_the_state_does_not_grow():
    layer = SlidingWindowAttention(
        HEADS, 5, window_size=(4, 9), dilation_rate=(1, 3, 1), value_dim=7
    )
    x = sequence(40)
    expected = to_numpy(layer(x, use_causal_mask=True))
    state = layer.initial_state(2)
    shapes = {k: tuple(v.shape) for k, v in state.items()}
    assert shapes == {
        "key": (2, 12, HEADS, 5),
        "value": (2, 12, HEADS, 7),
        "padding_mask": (2, 12),
    }
    step = compiled(lambda x, state: layer(x, state=state))
    for t in range(40):
        output, state = step(ops.convert_to_tensor(x[:, t : t + 1]), state)
        close(to_numpy(output), expected[:, t : t + 1])
    assert {k: tuple(v.shape) for k, v in state.items()} == shapes


@pytest.mark.parametrize(
    "bad", [0, 3, -2, 2.0, True, (1,), (1, 2, 3), (-1, 2), (1, 2.0), "4", None]
)
def test_bad_windows_are_refused(bad):
    with pytest.raises(ValueError, match="SlidingWindow.*even.*window_size="):
        SlidingWindowAttention(HEADS, 5, window_size=bad)


@pytest.mark.parametrize("bad", [0, -1, 2.0, True, (1, 2), (1, 2, 0), None])
def test_bad_dilation_rates_are_refused(bad):
    with pytest.raises(ValueError, match="SlidingWindow.*dilation_rate="):
        SlidingWindowAttention(HEADS, 5, window_size=4, dilation_rate=bad)


def test_pairs_survive_a_round_trip():
    layer = SlidingWindowAttention(HEADS, 5, [3, 1], [1, 2, 1])
    twin = SlidingWindowAttention.from_config(layer.get_config())
    assert twin.window_size == (3, 1)
    assert twin.dilation_rate == (1, 2, 1)


def test_symbolic_inputs_of_unequal_lengths_are_refused():
    layer = SlidingWindowAttention(HEADS, 5, window_size=4)
    with pytest.raises(ValueError, match="SlidingWindow.*5, 13.*7, 13"):
        layer(
            keras.KerasTensor((2, 5, FEATURES)),
            keras.KerasTensor((2, 7, FEATURES)),
        )
