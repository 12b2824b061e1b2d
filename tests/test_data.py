import numpy as np
import pytest

from keras_attn.data import ResumeSegments
from keras_attn.data import TokenSegments


def read(segments, epoch=0):
    """The batches of an epoch."""
    ResumeSegments(segments).on_epoch_begin(epoch)
    batches = [segments[i] for i in range(len(segments))]
    segments.on_epoch_end()
    return batches


def test_rows_continue_from_batch_to_batch():
    segments = TokenSegments(np.arange(25), batch_size=3, segment_length=4)
    assert len(segments) == 2
    (first, after_first), (second, _) = read(segments)
    np.testing.assert_array_equal(
        first["token_ids"], [[0, 1, 2, 3], [8, 9, 10, 11], [16, 17, 18, 19]]
    )
    np.testing.assert_array_equal(after_first, first["token_ids"] + 1)
    np.testing.assert_array_equal(second["token_ids"], first["token_ids"] + 4)
    assert first["reset"].all() and not second["reset"].any()
    assert "padding_mask" not in first  # nothing to pad


def test_the_last_segment_is_padded():
    segments = TokenSegments(np.arange(23), batch_size=2, segment_length=4)
    batches = read(segments)
    assert len(batches) == 3
    inputs, targets = batches[-1]
    np.testing.assert_array_equal(
        inputs["padding_mask"], [[True, True, True, False]] * 2
    )
    read_tokens = np.concatenate(
        [x["token_ids"][x["padding_mask"]] for x, _ in batches]
    )
    assert sorted(read_tokens) == list(range(22))
    assert targets[inputs["padding_mask"]].max() == 22


def test_random_lengths():
    segments = TokenSegments(
        np.arange(20_001), batch_size=2, segment_length=50, random_lengths=True
    )
    starts = set()
    for epoch in range(3):
        batches = read(segments, epoch)
        assert len(batches) == 200
        lengths = [x["padding_mask"][0].sum() for x, _ in batches]
        assert min(lengths) >= 5 and max(lengths) == 50
        assert 3 <= sum(length < 35 for length in lengths) <= 25
        assert {x["token_ids"].shape for x, _ in batches} == {(2, 50)}
        assert [bool(x["reset"][0]) for x, _ in batches] == [True] + [
            False
        ] * 199
        row = np.concatenate(
            [x["token_ids"][0][x["padding_mask"][0]] for x, _ in batches]
        )
        np.testing.assert_array_equal(np.diff(row), 1)  # nothing is left out
        for x, y in batches:
            mask = x["padding_mask"]
            np.testing.assert_array_equal(y[mask], x["token_ids"][mask] + 1)
        starts.add(row[0])
    assert len(starts) == 3


def test_epochs_of_any_length_go_on_where_the_last_one_ended():
    text = np.arange(241)
    whole = read(
        TokenSegments(text, 2, 20, random_lengths=True, steps_per_epoch=12)
    )
    short = TokenSegments(text, 2, 20, random_lengths=True, steps_per_epoch=4)
    assert short.segments_per_pass == 6
    parts = sum((read(short, epoch) for epoch in range(3)), [])
    for (x, y), (u, v) in zip(whole, parts, strict=True):
        np.testing.assert_array_equal(y, v)
        for name in x:
            np.testing.assert_array_equal(x[name], u[name])
    assert [bool(x["reset"][0]) for x, _ in parts] == ([True] + 5 * [False]) * 2
    # a part can be had without those before it
    again = read(
        TokenSegments(text, 2, 20, random_lengths=True, steps_per_epoch=4), 2
    )
    for (x, _), (u, _) in zip(again, parts[8:], strict=True):
        np.testing.assert_array_equal(x["token_ids"], u["token_ids"])


def test_other_orders_are_refused():
    segments = TokenSegments(np.arange(241), 2, 20)
    segments[0]
    segments[1]
    with pytest.raises(ValueError, match="shuffle=False"):
        segments[3]
    segments[0]  # starting over is fine


def test_short_texts_are_refused():
    with pytest.raises(ValueError, match="segment_length=20"):
        TokenSegments(np.arange(40), 2, 20)
    with pytest.raises(ValueError, match="one-dimensional"):
        TokenSegments(np.zeros((2, 50)), 2, 20)
