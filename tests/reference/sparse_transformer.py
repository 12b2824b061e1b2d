"""Index sets of the Sparse Transformer, section 4.3, pair by pair."""

import numpy as np


def strided_mask(length, stride, heads, num_heads, causal):
    """Which keys each head sees, `(N, T, T)`."""

    def sees(head, query, key):
        local = abs(query - key) < stride
        strided = (query - key) % stride == 0
        return _choose(heads, head, local, strided, "strided")

    return _mask(length, num_heads, causal, sees)


def fixed_mask(
    length, block_size, num_summary, num_subblocks, heads, num_heads, causal
):
    """Which keys each head sees, `(N, T, T)`."""

    def sees(head, query, key):
        local = query // block_size == key // block_size
        end = block_size - head % num_subblocks * num_summary
        summary = end - num_summary <= key % block_size < end
        return _choose(heads, head, local, summary, "summary")

    return _mask(length, num_heads, causal, sees)


def _choose(heads, head, local, other, name):
    if heads == "merged":
        return local or other
    if heads == "split":
        return other if head % 2 else local
    return {"local": local, name: other}[heads]


def _mask(length, num_heads, causal, sees):
    mask = np.zeros((num_heads, length, length), bool)
    for head, query, key in np.ndindex(*mask.shape):
        if key <= query or not causal:
            mask[head, query, key] = sees(head, query, key)
    return mask
