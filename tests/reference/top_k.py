"""The choice of https://arxiv.org/abs/1912.11637, one query at a time."""

import fractions
import math

import numpy as np


def chosen(scores, top_k, mask=True):
    """Tells which of the scores `(..., S)` are chosen (equation 6).

    A float `top_k` is a share of those that the mask lets through.
    """
    mask = np.broadcast_to(mask, scores.shape)
    result = np.zeros(scores.shape, bool)
    for row in np.ndindex(scores.shape[:-1]):
        visible = sorted(scores[row][mask[row]], reverse=True)
        count = top_k
        if isinstance(top_k, float):
            exact = fractions.Fraction(str(top_k))
            count = math.ceil(exact * len(visible))
        if visible:
            threshold = visible[min(count, len(visible)) - 1]
            result[row] = mask[row] & (scores[row] >= threshold)
    return result
