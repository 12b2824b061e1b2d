"""CBAM in float64, channels last, from equations 2 and 3 of the paper.

Each sample is handled alone and without its padding; the convolution is a sum
over the offsets of its kernel.
"""

import itertools

import numpy as np

POOLS = {
    "avg": lambda x: x.mean(axis=0),
    "max": lambda x: x.max(axis=0),
    "lp": lambda x: np.sqrt((x**2).sum(axis=0)),
    "lse": lambda x: np.log(np.exp(x).sum(axis=0)),
}


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def channel_gates(x, weights, pooling=("avg", "max"), mask=None):
    """Gates `(B, F)`; `weights` are kernel, bias, kernel, bias of the MLP."""
    kernel_0, bias_0, kernel_1, bias_1 = (w.astype("float64") for w in weights)
    gates = np.zeros((x.shape[0], x.shape[-1]))
    for sample, row in enumerate(x.astype("float64")):
        seen = np.ones(row.shape[:-1], bool) if mask is None else mask[sample]
        positions = row[seen]
        for kind in pooling:
            if len(positions):
                pool = POOLS[kind](positions)
            else:
                pool = np.zeros(x.shape[-1])
            hidden = np.maximum(pool @ kernel_0 + bias_0, 0)
            gates[sample] += hidden @ kernel_1 + bias_1
    return sigmoid(gates)


def spatial_logits(x, kernel, mask=None):
    """Convolved map `(B, *space)`, before any normalization."""
    x, kernel = x.astype("float64"), kernel.astype("float64")
    mask = np.ones(x.shape[:-1], bool) if mask is None else mask
    logits = np.zeros(x.shape[:-1])
    sizes = kernel.shape[:-2]
    for sample in range(len(x)):
        for place in np.ndindex(*x.shape[1:-1]):
            for tap in itertools.product(*map(range, sizes)):
                there = tuple(
                    p + t - (size - 1) // 2
                    for p, t, size in zip(place, tap, sizes, strict=True)
                )
                if any(
                    p < 0 or p >= n
                    for p, n in zip(there, x.shape[1:-1], strict=True)
                ):
                    continue
                if not mask[(sample, *there)]:
                    continue
                seen = x[(sample, *there)]
                logits[(sample, *place)] += seen.max() * kernel[(*tap, 0, 0)]
                logits[(sample, *place)] += seen.mean() * kernel[(*tap, 1, 0)]
    return logits


def spatial_gates(x, kernel, norm=None, mask=None, epsilon=1e-5):
    """Gates `(B, *space)`, 0 at padding.

    `norm` holds gamma, beta, mean and variance of a batch normalization; with
    gamma and beta alone, mean and variance are those of the batch.
    """
    mask = np.ones(x.shape[:-1], bool) if mask is None else mask
    logits = spatial_logits(x, kernel, mask)
    if norm is not None:
        gamma, beta, *moments = norm
        mean, variance = moments or (logits[mask].mean(), logits[mask].var())
        logits = (logits - mean) / np.sqrt(variance + epsilon) * gamma + beta
    return sigmoid(logits) * mask
