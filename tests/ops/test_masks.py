import numpy as np
import pytest

from keras_attn.ops import dense_mask
from keras_attn.ops import masked_softmax
from tests import reference
from tests.backend import gradients
from tests.backend import run


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_an_empty_row_has_zero_weights_and_gradients(dtype):
    scores = np.array([[1.0, 2.0, 3.0], [1.0, 2.0, 3.0]], dtype)
    mask = np.array([[True, True, False], [False, False, False]])
    weights = run(masked_softmax, scores, mask)
    assert weights.dtype == dtype
    e = np.exp(1.0)
    expected = [[1 / (1 + e), e / (1 + e), 0.0], [0.0, 0.0, 0.0]]
    np.testing.assert_allclose(weights, expected, rtol=1e-3)
    (grad,) = gradients(lambda x: masked_softmax(x, mask)[:, 0], scores)
    slope = e / (1 + e) ** 2
    expected = [[slope, -slope, 0.0], [0.0, 0.0, 0.0]]
    np.testing.assert_allclose(grad, expected, rtol=1e-2)


@pytest.mark.parametrize("hidden", [np.nan, np.inf, -np.inf, 6e4])
def test_what_is_masked_may_be_anything(hidden):
    scores = np.array([[1.0, hidden, 3.0]], "float32")
    mask = np.array([[True, False, True]])
    expected = reference.softmax(np.array([[1.0, 0.0, 3.0]]), mask)
    np.testing.assert_allclose(run(masked_softmax, scores, mask), expected)
    (grad,) = gradients(lambda x: masked_softmax(x, mask)[:, 0], scores)
    assert np.isfinite(grad).all() and grad[0, 1] == 0


def test_large_scores_of_half_precision():
    scores = np.array([[6e4, -6e4, 6e4], [-6e4, -6e4, -6e4]], "float16")
    mask = np.array([[True, True, False], [False, True, True]])
    np.testing.assert_array_equal(
        run(masked_softmax, scores, mask), [[1, 0, 0], [0, 0.5, 0.5]]
    )


def test_a_single_score_gets_all_the_weight_and_a_gradient_of_zero():
    scores = np.array([[7.0], [-3.0]], "float32")
    np.testing.assert_array_equal(run(masked_softmax, scores), [[1], [1]])
    (grad,) = gradients(masked_softmax, scores)
    np.testing.assert_array_equal(grad, [[0], [0]])


def test_dense_mask_is_the_conjunction_of_its_parts():
    rng = np.random.default_rng(0)
    x = np.zeros((2, 3, 1), "float32")
    padding = rng.random((2, 3)) < 0.7
    by_batch = rng.random((2, 3, 3)) < 0.7
    by_head = rng.random((2, 5, 3, 3)) < 0.7
    causal = np.array([[1, 0, 0], [1, 1, 0], [1, 1, 1]], bool)
    assert dense_mask(x, x) is None
    for attention, expected in (
        (None, padding[:, None, None] & causal),
        (by_batch, by_batch[:, None] & padding[:, None, None] & causal),
        (by_head, by_head & padding[:, None, None] & causal),
    ):
        mask = run(lambda x, a=attention: dense_mask(x, x, padding, a, True), x)
        np.testing.assert_array_equal(mask, expected)


def test_causal_masks_need_equal_lengths():
    x, y = np.zeros((2, 3, 1)), np.zeros((2, 4, 1))
    with pytest.raises(ValueError, match="3 queries and 4 keys"):
        dense_mask(x, y, use_causal_mask=True)
