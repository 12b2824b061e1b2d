"""Linear attention by its definition: every weight, one pair at a time."""

import numpy as np

FEATURE_MAPS = {
    "elu": lambda x: np.where(x > 0, x + 1, np.exp(np.minimum(x, 0))),
    "relu": lambda x: np.maximum(x, 0),
    "squared_relu": lambda x: np.maximum(x, 0) ** 2,
}


def linear_attention(query, key, value, phi="elu", mask=True, epsilon=1e-6):
    """Attends under a mask that broadcasts to `(B, N, T, S)`.

    Returns the attended heads `(B, T, N, V)` and the weights `(B, N, T, S)`.
    """
    phi = FEATURE_MAPS.get(phi, phi)
    query, key, value = (x.astype("float64") for x in (query, key, value))
    weights = np.einsum("btnd,bsnd->bnts", phi(query), phi(key)) * mask
    weights = weights / (weights.sum(axis=-1, keepdims=True) + epsilon)
    return np.einsum("bnts,bsnv->btnv", weights, value), weights


def long_causal_linear_attention(query, key, value, weights):
    """The causal form as a sum over time, for sequences too long for pairs.

    Returns the attended heads, and the gradient with respect to `value` of
    their product with `weights`.
    """
    phi = FEATURE_MAPS["elu"]
    query, key, value, weights = (
        x.astype("float64") for x in (query, key, value, weights)
    )
    query, key = phi(query), phi(key)
    sums = np.cumsum(np.einsum("btnd,btnv->btndv", key, value), axis=1)
    total = np.einsum("btnd,btnd->btn", query, np.cumsum(key, axis=1)) + 1e-6
    heads = np.einsum("btnd,btndv->btnv", query, sums) / total[..., None]
    sums = np.einsum("btnd,btnv->btndv", query, weights / total[..., None])
    sums = np.cumsum(sums[:, ::-1], axis=1)[:, ::-1]
    return heads, np.einsum("btnd,btndv->btnv", key, sums)
