"""The scores of https://arxiv.org/abs/2005.00743, one key at a time."""

import numpy as np


def dense(hidden, kernel, bias, key_length):
    """Scores `(B, N, T, S)` of `(B, T, N, H)` under `(N, H, L)`, `(N, L)`."""
    batch, length, heads, _ = hidden.shape
    scores = np.zeros((batch, heads, length, key_length))
    for n in range(heads):
        for s in range(key_length):
            column = kernel[n, :, s].astype("float64")
            scores[:, n, :, s] = hidden[:, :, n] @ column + bias[n, s]
    return scores


def factorized_random(query_factors, key_factors, positions, key_length):
    """Scores `(N, T, S)` of the factors `(N, L, R)` at query positions."""
    left, right = query_factors.astype("float64"), key_factors
    scores = [
        [[row[t] @ column[s] for s in range(key_length)] for t in positions]
        for row, column in zip(left, right, strict=True)
    ]
    return np.array(scores)


def factorized_dense(left, right, key_length, tiling):
    """Scores `(B, N, T, S)` of predictions `(B, T, N, I)`, `(B, T, N, J)`."""
    sizes = left.shape[-1], right.shape[-1]
    left = left.astype("float64")
    scores = []
    for s in range(key_length):
        i = s // sizes[1] if tiling == "outer" else s % sizes[0]
        scores.append(left[..., i] * right[..., s % sizes[1]])
    return np.moveaxis(np.stack(scores, axis=-1), 1, 2)
