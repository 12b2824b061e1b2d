"""LSH attention (Reformer, section 2), pair by pair, from given buckets."""

import numpy as np

from tests import reference


def visits(buckets, real, bucket_size, before, after, wrap, same_bucket):
    """How often the window of each query holds each key, for one head.

    `buckets` has the shape `(R, T)`, and `real` tells which positions are not
    padding. Returns counts of shape `(T, T)`.
    """
    rounds, length = buckets.shape
    chunks = -(-length // bucket_size)
    slots = []  # what lies in each slot of all rounds: (round, position)
    for i in range(rounds):
        order = sorted(
            range(length),
            # padding has a bucket of its own, the last one
            key=lambda t, i=i: (not real[t], real[t] * buckets[i, t], t),
        )
        order += [None] * (chunks * bucket_size - length)
        slots += [(i, t) for t in order]
    count = np.zeros((length, length), int)
    for slot, (i, query) in enumerate(slots):
        if query is None or (same_bucket and not real[query]):
            continue
        for shift in range(-before, after + 1):
            chunk = slot // bucket_size + shift
            if wrap:
                chunk %= rounds * chunks
            elif not 0 <= chunk - i * chunks < chunks:
                continue
            for j, key in slots[chunk * bucket_size :][:bucket_size]:
                if key is None or not real[key]:
                    continue
                same = i == j and buckets[i, query] == buckets[j, key]
                count[query, key] += same or not same_bucket
    return count


def prefix_visits(buckets, real, reach):
    """The same, if a query sees the last members of its bucket."""
    rounds, length = buckets.shape
    count = np.zeros((length, length), int)
    for i in range(rounds):
        for query in range(length):
            members = [
                key
                for key in range(query + 1)
                if real[key] and buckets[i, key] == buckets[i, query]
            ]
            if real[query]:
                count[query, members[-1 - reach :]] += 1
    return count


def attend(query, value, count, causal, allow_duplicates=True):
    """Attention to keys that count as often as they are met.

    `count` has the shape `(B, N, T, T)`. Returns the attended heads
    `(B, T, N, V)` and the weights `(B, N, T, T)`.
    """
    query, value = query.astype("float64"), value.astype("float64")
    mean = np.mean(query**2, axis=-1, keepdims=True)
    key = query / np.sqrt(mean + 1e-6) / np.sqrt(query.shape[-1])
    scores = np.einsum("btnh,bsnh->bnts", query, key)
    positions = np.arange(query.shape[1])
    visible = (
        positions < positions[:, None]
        if causal
        else 1 - np.eye(len(positions)).astype(int)
    )
    visible = (visible > 0) & (count > 0)
    alone = ~visible.any(axis=-1, keepdims=True)
    visible = visible | (
        alone & np.eye(len(positions), dtype=bool) & (count > 0)
    )
    if allow_duplicates:
        scores = scores + np.log(np.maximum(count, 1))
    weights = reference.softmax(scores, visible)
    return np.einsum("bnts,bsnv->btnv", weights, value), weights
