import numpy as np
import pytest
from keras import ops

from keras_attn.ops import dense_scores
from keras_attn.ops import dot_product_attention
from keras_attn.ops import dot_product_scores
from keras_attn.ops import factorized_dense_scores
from keras_attn.ops import factorized_random_scores
from keras_attn.ops import mix_scores
from keras_attn.ops import random_scores
from keras_attn.ops import synthesizer
from tests import reference
from tests.backend import gradients
from tests.backend import run
from tests.reference import synthesizer as definitions

BATCH, QUERIES, KEYS, HEADS, SIZE, VALUE, LENGTH = 2, 5, 7, 3, 4, 6, 11


def draw(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype("float32")


def close(actual, expected, tolerance=1e-5):
    np.testing.assert_allclose(actual, expected, rtol=tolerance, atol=tolerance)


def test_random_scores_are_the_corner_of_their_matrix():
    kernel = draw(HEADS, LENGTH, LENGTH)
    scores = run(lambda x: random_scores(x, QUERIES, KEYS), kernel)
    np.testing.assert_array_equal(scores, kernel[None, :, :QUERIES, :KEYS])
    rows = run(lambda x, t: random_scores(x, 2, KEYS, t), kernel, np.int32(3))
    np.testing.assert_array_equal(rows, kernel[None, :, 3:5, :KEYS])


@pytest.mark.parametrize("start", [0, 4])
def test_factorized_random_scores_match_the_definition(start):
    left, right = draw(HEADS, LENGTH, 2), draw(HEADS, LENGTH, 2, seed=1)
    scores = run(
        lambda x, y, t: factorized_random_scores(x, y, QUERIES, KEYS, t),
        left,
        right,
        np.int32(start),
    )
    positions = range(start, start + QUERIES)
    expected = definitions.factorized_random(left, right, positions, KEYS)
    close(scores[0], expected)
    if start == 0:
        without = run(
            lambda x, y: factorized_random_scores(x, y, QUERIES, KEYS),
            left,
            right,
        )
        close(without[0], expected)


def test_dense_scores_match_the_definition():
    hidden = draw(BATCH, QUERIES, HEADS, SIZE)
    kernel, bias = draw(HEADS, SIZE, LENGTH), draw(HEADS, LENGTH, seed=1)
    expected = definitions.dense(hidden, kernel, bias, KEYS)
    scores = run(
        lambda x, w, b: dense_scores(x, w, KEYS, b), hidden, kernel, bias
    )
    close(scores, expected)
    scores = run(lambda x, w: dense_scores(x, w, KEYS), hidden, kernel)
    close(scores, expected - bias[:, None, :KEYS])


@pytest.mark.parametrize("tiling", ["outer", "tile"])
@pytest.mark.parametrize("sizes", [(3, 4), (4, 2), (1, 7), (7, 1)])
def test_factorized_dense_scores_match_the_definition(sizes, tiling):
    left = draw(BATCH, QUERIES, HEADS, sizes[0])
    right = draw(BATCH, QUERIES, HEADS, sizes[1], seed=1)
    scores = run(
        lambda x, y: factorized_dense_scores(x, y, KEYS, tiling), left, right
    )
    expected = definitions.factorized_dense(left, right, KEYS, tiling)
    close(scores, expected)


def test_factors_by_hand():
    left, right = np.array([[[[2.0, 3.0]]]]), np.array([[[[5.0, 7.0, 11.0]]]])
    left, right = left.astype("float32"), right.astype("float32")

    def scores(tiling):
        fn = factorized_dense_scores
        return run(lambda x, y: fn(x, y, 6, tiling), left, right)[0, 0, 0]

    np.testing.assert_array_equal(scores("outer"), [10, 14, 22, 15, 21, 33])
    np.testing.assert_array_equal(scores("tile"), [10, 21, 22, 15, 14, 33])


def test_mixtures_are_weighted_means():
    one, other = (
        draw(1, HEADS, QUERIES, KEYS),
        draw(BATCH, HEADS, QUERIES, KEYS),
    )
    logits = np.log(np.array([1.0, 3.0], "float32"))
    mixed = run(lambda x, y, w: mix_scores([x, y], w), one, other, logits)
    close(mixed, 0.25 * one + 0.75 * other)


@pytest.mark.parametrize("use_causal_mask", [False, True])
@pytest.mark.parametrize("batch", [1, BATCH])
def test_attends_under_scores_and_masks(batch, use_causal_mask):
    length = KEYS if use_causal_mask else QUERIES
    scores = draw(batch, HEADS, length, KEYS)
    value = draw(BATCH, KEYS, HEADS, VALUE)
    padding = np.arange(KEYS) < [[KEYS], [0]]
    allowed = np.random.default_rng(1).random((BATCH, length, KEYS)) < 0.7
    for masks in ((None, None), (padding, None), (None, allowed)):
        seen = np.ones((1, 1, length, KEYS), bool)
        if use_causal_mask:
            seen = np.tril(seen)
        if masks[0] is not None:
            seen = seen & masks[0][:, None, None]
        if masks[1] is not None:
            seen = seen & masks[1][:, None]

        def attend(scores, value, masks=masks):
            return synthesizer(
                scores, value, *masks, use_causal_mask=use_causal_mask
            )

        def attend_with_scores(scores, value, masks=masks):
            return synthesizer(
                scores,
                value,
                *masks,
                use_causal_mask=use_causal_mask,
                return_attention_scores=True,
            )

        shape = (BATCH, HEADS, length, KEYS)
        weights = reference.softmax(np.broadcast_to(scores, shape), seen)
        expected = np.einsum("bnts,bsnv->btnv", weights, value)
        close(run(attend, scores, value), expected)
        heads, returned = run(attend_with_scores, scores, value)
        close(heads, expected)
        close(returned, weights)


def test_dropout_differs_between_sequences():
    scores, value = draw(1, HEADS, QUERIES, KEYS), draw(BATCH, KEYS, HEADS, 1)
    seen = []

    def dropout(weights):
        seen.append(tuple(weights.shape))
        return 2 * weights

    fn = synthesizer
    doubled = run(lambda x, y: fn(x, y, dropout=dropout), scores, value)
    assert seen == [(BATCH, HEADS, QUERIES, KEYS)]
    close(doubled, 2 * run(synthesizer, scores, value))


def test_dot_product_scores_give_dot_product_attention():
    query, key = (draw(BATCH, n, HEADS, SIZE, seed=n) for n in (QUERIES, KEYS))
    value = draw(BATCH, KEYS, HEADS, VALUE)
    close(
        run(
            lambda q, k, v: synthesizer(dot_product_scores(q, k), v),
            query,
            key,
            value,
        ),
        run(dot_product_attention, query, key, value),
    )


def test_gradients_stay_in_the_corner():
    kernel, value = draw(HEADS, LENGTH, LENGTH), draw(BATCH, KEYS, HEADS, VALUE)
    gradient, _ = gradients(
        lambda kernel, value: ops.square(
            synthesizer(random_scores(kernel, KEYS, KEYS), value)
        ),
        kernel,
        value,
    )
    assert (gradient[:, :KEYS, :KEYS] != 0).all()
    assert (gradient[:, KEYS:] == 0).all()
    assert (gradient[:, :, KEYS:] == 0).all()


def test_longer_sequences_are_refused():
    kernel, hidden = draw(HEADS, 4, 6), draw(BATCH, QUERIES, HEADS, 4)
    with pytest.raises(ValueError, match="reach 4 positions.*of 5"):
        random_scores(kernel, 5, 6)
    with pytest.raises(ValueError, match="reach 6 positions.*of 7"):
        dense_scores(hidden, kernel, 7)
    with pytest.raises(ValueError, match="reach 16 positions.*of 17"):
        factorized_dense_scores(hidden, hidden, 17)
