"""The state of an LSTM in the middle of a sequence."""

from keras import ops


def lstm_cell_state(
    inputs, outputs, lengths, hidden, cell, kernel, recurrent_kernel, bias
):
    """Cell state that an LSTM had after the first steps of a sequence.

    An LSTM gives its output at every step, but its cell state only after the
    last one, which is of no use if the sequence ends in padding. Masking the
    padding would do, but turns the fused kernels of the backends off. From the
    outputs, though, the gates of all steps follow at once, and with the gates
    the cell state is a sum:

    `c_n = c_0 * f_1 ... f_n + sum_t (i_t * g_t * f_(t+1) ... f_n)`

    Args:
        inputs: Tensor of shape `(B, T, F)`, what went into the LSTM.
        outputs: Tensor of shape `(B, T, H)`, what came out at every step.
        lengths: Integer tensor of shape `(B,)`, the steps to take.
        hidden: Tensor of shape `(B, H)`, the initial output.
        cell: Tensor of shape `(B, H)`, the initial cell state.
        kernel: Tensor of shape `(F, 4H)`, gates in the order of Keras.
        recurrent_kernel: Tensor of shape `(H, 4H)`.
        bias: Tensor of shape `(4H,)`.

    Returns:
        Tensor of shape `(B, H)`.
    """
    previous = ops.concatenate([hidden[:, None], outputs[:, :-1]], axis=1)
    gates = ops.matmul(inputs, kernel)
    gates = gates + ops.matmul(previous, recurrent_kernel) + bias
    enter, keep, candidate, _ = ops.split(gates, 4, axis=-1)
    steps = ops.arange(ops.shape(inputs)[1], dtype="int32")
    taken = (steps < lengths[:, None])[:, :, None]
    log_keep = ops.where(taken, ops.log_sigmoid(keep), 0.0)
    # summed from the end, since differences of a running sum lose digits
    kept_after = ops.flip(ops.cumsum(ops.flip(log_keep, 1), axis=1), 1)
    kept_after = ops.concatenate(
        [kept_after, ops.zeros_like(kept_after[:, :1])], axis=1
    )
    entered = ops.where(taken, ops.sigmoid(enter) * ops.tanh(candidate), 0.0)
    steps = ops.concatenate([cell[:, None], entered], axis=1)
    return ops.sum(steps * ops.exp(kept_after), axis=1)
