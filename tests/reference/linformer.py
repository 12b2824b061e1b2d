"""Linformer by its definition, one head of one sequence at a time."""

import numpy as np

from tests import reference


def linformer_attention(query, key, value, projections, mask):
    """Attends to slots; a projection has shape `(M, K)` or `(N, M, K)`.

    Returns the attended heads `(B, T, N, V)` and the weights `(B, N, T, K)`.
    """
    query, key, value = (x.astype("float64") for x in (query, key, value))
    batch, length, heads, _ = key.shape
    slots = [
        np.zeros((batch, projections[0].shape[-1], heads, x.shape[-1]))
        for x in (key, value)
    ]
    for b, s, n in np.ndindex(batch, length, heads):
        for x, projection, slot in zip(
            (key, value), projections, slots, strict=True
        ):
            matrix = projection if projection.ndim == 2 else projection[n]
            if mask[b, s]:
                slot[b, :, n] += np.outer(matrix[s], x[b, s, n])
    visible = mask.any(axis=1)[:, None, None, None]
    return reference.attend(query, *slots, visible)


def window_means(x, projected_length, window_size, mask):
    """The mean of each window of `(B, S, N, H)`, and which windows have one."""
    batch, length, heads, size = x.shape
    means = np.zeros((batch, projected_length, heads, size))
    visible = np.zeros((batch, projected_length), bool)
    for b, k in np.ndindex(batch, projected_length):
        window = range(k * window_size, (k + 1) * window_size)
        kept = [s for s in window if s < length and mask[b, s]]
        if kept:
            visible[b, k] = True
            means[b, k] = x[b, kept].astype("float64").mean(axis=0)
    return means, visible
