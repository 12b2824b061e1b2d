"""Sliding window attention, from section 3.1 of the Longformer paper."""

import numpy as np


def window_mask(length, left, right, dilation_rate=1):
    """Tells of each pair `(T, T)` whether the query sees the key."""
    mask = np.zeros((length, length), bool)
    for t in range(length):
        for i in range(-left, right + 1):
            s = t + i * dilation_rate
            if 0 <= s < length:
                mask[t, s] = True
    return mask


def window_masks(length, left, right, dilation_rates):
    """The masks `(N, T, T)` of heads with dilation rates of their own."""
    return np.stack(
        [window_mask(length, left, right, rate) for rate in dilation_rates]
    )
