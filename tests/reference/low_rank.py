"""LAMA by its definition, one head at one position at a time."""

import numpy as np

from tests import reference


def lama(
    inputs,
    context,
    context_kernel,
    input_kernel,
    rank,
    bias,
    normalize,
    temperature,
    mask,
):
    """Pools `(B, T, F)`; returns `(B, N, F)` and the weights `(B, N, T)`."""
    inputs, context = inputs.astype("float64"), context.astype("float64")
    batch, length, _ = inputs.shape
    heads = input_kernel.shape[-1] // rank
    scores = np.zeros((batch, heads, length))
    for b, n, t in np.ndindex(batch, heads, length):
        for r in range(n * rank, (n + 1) * rank):
            of_context = context[b] @ context_kernel[:, r]
            scores[b, n, t] += of_context * (inputs[b, t] @ input_kernel[:, r])
        scores[b, n, t] = np.tanh(scores[b, n, t] + bias[n])
    if normalize:
        scores /= np.linalg.norm(scores, axis=1, keepdims=True)
    weights = reference.softmax(scores / temperature, mask[:, None])
    return np.einsum("bnt,btf->bnf", weights, inputs), weights
