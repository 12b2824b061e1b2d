"""The mechanisms, spelled out in NumPy from the definitions in the papers.

Nothing here is fast, shared with the package, or run on a backend: a reference
decides pair by pair which keys a query sees, then takes one dense softmax, all
in float64.
"""

import numpy as np


def softmax(scores, mask=True):
    """Softmax over the last axis, in which masked entries get weight 0."""
    mask = np.broadcast_to(mask, scores.shape)
    scores = np.where(mask, scores.astype("float64"), -np.inf)
    highest = scores.max(axis=-1, keepdims=True)
    weights = np.exp(scores - np.where(np.isfinite(highest), highest, 0.0))
    total = weights.sum(axis=-1, keepdims=True)
    return np.divide(weights, total, out=weights, where=total > 0)


def attend(query, key, value, mask=True):
    """Softmax attention under a mask that broadcasts to `(B, N, T, S)`.

    Returns the attended heads `(B, T, N, V)` and the weights `(B, N, T, S)`.
    """
    query, key, value = (x.astype("float64") for x in (query, key, value))
    scores = np.einsum("btnh,bsnh->bnts", query, key)
    weights = softmax(scores / np.sqrt(query.shape[-1]), mask)
    return np.einsum("bnts,bsnv->btnv", weights, value), weights
