"""Copies the golden weights of SHA-RNN into the layers."""

import numpy as np


def named_weights(layer, arrays, prefix="weight."):
    """Pairs of a Keras variable and the golden array that belongs into it.

    Args:
        layer: A built `SingleHeadAttention`, `Boom`, `SHARNNBlock` or
            `SHARNN`.
        arrays: The golden arrays by their names.
        prefix: What the names begin with.
    """
    pairs = _PAIRS[type(layer).__name__]
    return [
        (weight, array)
        for weight, array in pairs(layer, arrays, prefix)
        if array is not None
    ]


def load_weights(layer, arrays, prefix="weight."):
    for weight, array in named_weights(layer, arrays, prefix):
        weight.assign(array)


def _dense(dense, arrays, prefix):
    yield dense.kernel, _transposed(arrays, f"{prefix}.weight")
    yield dense.bias, arrays.get(f"{prefix}.bias")


def _norm(norm, arrays, prefix):
    yield norm.gamma, arrays.get(f"{prefix}.weight")
    yield norm.beta, arrays.get(f"{prefix}.bias")


def _attention(layer, arrays, prefix):
    vectors = {"qs": layer.query_vector, "ks": layer.key_vector}
    vectors["vs"] = layer.value_vector
    yield from _dense(layer.query_dense, arrays, f"{prefix}q")
    yield from _norm(layer.query_norm, arrays, f"{prefix}qln")
    yield from _dense(layer.value_gate_dense, arrays, f"{prefix}vq.l1")
    if layer.use_key_projection:
        yield from _dense(layer.key_dense, arrays, f"{prefix}k")
    if layer.use_value_projection:
        yield from _dense(layer.value_dense, arrays, f"{prefix}v")
    if layer.output_mixing:
        yield from _dense(layer.mixing_dense, arrays, f"{prefix}r")
        vectors["r_gate"] = layer.mixing_vector
    for name, vector in vectors.items():
        array = arrays.get(f"{prefix}{name}")
        yield vector, None if array is None else array[0, 0]


def _boom(layer, arrays, prefix):
    yield from _dense(layer.up_dense, arrays, f"{prefix}linear1")
    if layer.down == "dense":
        yield from _dense(layer.down_dense, arrays, f"{prefix}linear2")


def _block(block, arrays, prefix):
    yield from _norm(block.input_norm, arrays, f"{prefix}lnstart")
    yield from _norm(block.residual_norm, arrays, f"{prefix}lnff")
    yield from _norm(block.boom_norm, arrays, f"{prefix}lnxff")
    yield from _boom(block.boom, arrays, f"{prefix}ff.")
    cell = block.lstm.cell
    yield cell.kernel, _transposed(arrays, f"{prefix}rnn.weight_ih_l0")
    yield (
        cell.recurrent_kernel,
        _transposed(arrays, f"{prefix}rnn.weight_hh_l0"),
    )
    biases = [arrays.get(f"{prefix}rnn.bias_{x}h_l0") for x in "ih"]
    yield cell.bias, None if biases[0] is None else np.add(*biases)
    if block.attention:
        yield from _norm(block.attention_norm, arrays, f"{prefix}lnmid")
        yield from _norm(block.memory_norm, arrays, f"{prefix}lnmem")
        yield from _attention(block.attention_layer, arrays, f"{prefix}attn.")


def _model(model, arrays, prefix):
    yield model.embedding.embeddings, arrays.get(f"{prefix}encoder.weight")
    yield model.output_bias, arrays.get(f"{prefix}decoder.bias")
    if not model.tie_weights:
        yield (
            model.embedding.reverse_embeddings,
            _transposed(arrays, f"{prefix}decoder.weight"),
        )
    for index, block in enumerate(model.blocks):
        yield from _block(block, arrays, f"{prefix}blocks.{index}.")


def _transposed(arrays, name):
    return arrays[name].T if name in arrays else None


_PAIRS = {
    "SingleHeadAttention": _attention,
    "Boom": _boom,
    "SHARNNBlock": _block,
    "SHARNN": _model,
}
