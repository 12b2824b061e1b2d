"""Low-rank factored attention (LAMA, https://arxiv.org/abs/1912.00835)."""

from keras import ops

from keras_attn.ops.masks import at_least_float32
from keras_attn.ops.masks import masked_softmax


def lama(
    inputs,
    context,
    context_kernel,
    input_kernel,
    hidden=None,
    rank=1,
    bias=None,
    activation=ops.tanh,
    normalize=True,
    temperature=1.0,
    padding_mask=None,
    return_attention_scores=False,
):
    """Pools a sequence into one vector for each of several heads.

    A head scores a position by a bilinear form of the context and the
    position, of low rank; `P` and `Q` are the kernels of context and inputs:

        score[n, t] = activation(sum_r (P^T context)[n, r] (Q^T x[t])[n, r])

    The scores of a position are divided by their norm over the heads. Their
    softmax over the positions weighs the inputs. Time grows as
    `T * F * N * rank`, and no pair of positions is ever scored.

    Args:
        inputs: Tensor of shape `(B, T, F)`.
        context: Tensor of shape `(B, C)`, or `(1, C)`, where `C` is the size
            of the context.
        context_kernel: Tensor of shape `(C, N * rank)`, in which the columns
            of one head lie next to each other.
        input_kernel: Tensor of shape `(U, N * rank)`, the same.
        hidden: Tensor of shape `(B, T, U)`, what is scored in place of the
            inputs. Defaults to `inputs`.
        rank: Rank of the bilinear form of a head.
        bias: Tensor of shape `(N,)`, added before the activation.
        activation: Callable applied to the scores.
        normalize: Whether to divide the scores of a position by their norm.
        temperature: Number by which the scores are divided before the softmax.
            Normalised scores lie within 1 of zero, so that over long sequences
            only a temperature below 1 makes weights that stand out.
        padding_mask: Boolean tensor of shape `(B, T)`, `True` for the
            positions that may be attended.
        return_attention_scores: Whether to return the weights as well.

    Returns:
        Tensor of shape `(B, N, F)`, zeros for a sequence that is all padding.
        With `return_attention_scores`, also the weights `(B, N, T)`.
    """
    hidden = inputs if hidden is None else hidden
    context, context_kernel, hidden, input_kernel = (
        at_least_float32(x)
        for x in (context, context_kernel, hidden, input_kernel)
    )
    context = ops.matmul(context, context_kernel)[:, None]
    scores = context * ops.matmul(hidden, input_kernel)  # (B, T, N * rank)
    if rank > 1:
        batch, length, size = ops.shape(scores)
        scores = ops.reshape(scores, (batch, length, size // rank, rank))
        scores = ops.sum(scores, axis=-1)
    if bias is not None:
        scores = scores + at_least_float32(bias)
    scores = activation(scores)
    if normalize:
        # the slope of a norm is not finite at zero
        squares = ops.sum(ops.square(scores), axis=-1, keepdims=True)
        scores = scores / ops.sqrt(squares + 1e-12)
    scores = ops.transpose(scores, (0, 2, 1)) / temperature  # (B, N, T)
    if padding_mask is not None:
        padding_mask = ops.cast(padding_mask, "bool")[:, None]
    weights = ops.cast(masked_softmax(scores, padding_mask), inputs.dtype)
    outputs = ops.einsum("bnt,btf->bnf", weights, inputs)
    return (outputs, weights) if return_attention_scores else outputs


def orthogonality_penalty(scores):
    """How far the heads of a sequence are from attending apart.

    This is the penalty of
    [Lin et al., 2017](https://arxiv.org/abs/1703.03130), the squared Frobenius
    norm of `A A^T - I`. It is least if each head attends to a position of its
    own.

    Args:
        scores: Attention weights of shape `(B, N, T)`.

    Returns:
        Tensor of shape `(B,)`.
    """
    scores = at_least_float32(scores)
    products = ops.matmul(scores, ops.transpose(scores, (0, 2, 1)))
    products = products - ops.eye(scores.shape[1], dtype=products.dtype)
    return ops.sum(ops.square(products), axis=(1, 2))
