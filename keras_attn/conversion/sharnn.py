"""Weights of the author's SHA-RNN."""

import re

import numpy as np

from keras_attn.conversion.state_dict import StateDict
from keras_attn.conversion.state_dict import in_order
from keras_attn.layers import Boom
from keras_attn.layers import SHARNNBlock
from keras_attn.layers import SingleHeadAttention
from keras_attn.models import SHARNN


def sharnn_weights(state_dict, model, prefix=""):
    """Converts a SHA-RNN of the author's program, or a part of one.

    Args:
        state_dict: The weights by their names, NumPy arrays or what
            `numpy.asarray` takes: the state dict of a `SHARNN` of the author's
            program `sha-rnn`, or of an `Attention`, a `Boom` or a `Block` of
            it.
        model: What is to have the weights: a `keras_attn.models.SHARNN`, or a
            built `SingleHeadAttention`, `Boom` or `SHARNNBlock`.
        prefix: What the names begin with, such as `"blocks.2.attn."` for a part
            of the state dict of a whole model.

    Returns:
        List of NumPy arrays for `model.set_weights()`. The state of a stateful
        model is left as it is.

    Raises:
        ValueError: For a model with other layers, sizes or options.

    Example:

    ```python
    import numpy as np
    import keras_attn
    from keras_attn.conversion import sharnn_weights

    state_dict = {  # or `model.state_dict()`
        "linear1.weight": np.ones((32, 8)),
        "linear1.bias": np.zeros(32),
    }
    layer = keras_attn.Boom(32)
    layer.build((None, None, 8))
    layer.set_weights(sharnn_weights(state_dict, layer))
    ```
    """
    weights = StateDict("sharnn_weights", state_dict, prefix)
    if isinstance(model, SHARNN):
        _check_depth(weights, model)
    return in_order("sharnn_weights", model, named_weights(model, weights))


def named_weights(layer, weights):
    """Pairs of a variable and the array that belongs into it.

    Args:
        layer: A built `SHARNN`, or a part of one.
        weights: `StateDict` of the original.
    """
    for cls, pairs in (
        (SHARNN, _model),
        (SHARNNBlock, _block),
        (SingleHeadAttention, _attention),
        (Boom, _boom),
    ):
        if isinstance(layer, cls):
            return list(pairs(layer, weights, ""))
    raise ValueError(
        f"`{weights.owner}` needs a `SHARNN`, or a part of one, for argument "
        f"`model`. Received: model={layer}"
    )


def _check_depth(weights, model):
    """Raises if the original has more layers, or attends in others."""
    pattern = re.compile(
        re.escape(weights.prefix) + r"blocks\.(\d+)\.(attn\.)?"
    )
    found = [pattern.match(name) for name in weights.arrays]
    blocks = {int(match[1]) for match in found if match}
    attending = {int(match[1]) for match in found if match and match[2]}
    ours = {i for i, block in enumerate(model.blocks) if block.attention}
    if blocks and (len(blocks) != len(model.blocks) or attending != ours):
        raise ValueError(
            f"`sharnn_weights` finds {len(blocks)} blocks, of which "
            f"{sorted(attending)} attend. Received: a model with `num_layers="
            f"{len(model.blocks)}`, of which {sorted(ours)} attend"
        )


def _attention(layer, weights, prefix):
    if layer.value_gate != "overparam":
        raise ValueError(
            f"`{weights.owner}` needs a model with `value_gate='overparam'`, "
            "which can `collapse()` afterwards. "
            f"Received: value_gate={layer.value_gate!r}"
        )
    yield from weights.dense(layer.query_dense, f"{prefix}q")
    yield from weights.norm(layer.query_norm, f"{prefix}qln")
    vectors = {"qs": layer.query_vector, "ks": layer.key_vector}
    vectors["vs"] = layer.value_vector
    yield from weights.dense(layer.value_gate_dense, f"{prefix}vq.l1")
    if layer.use_key_projection:
        yield from weights.dense(layer.key_dense, f"{prefix}k")
    if layer.use_value_projection:
        yield from weights.dense(layer.value_dense, f"{prefix}v")
    if layer.output_mixing:
        yield from weights.dense(layer.mixing_dense, f"{prefix}r")
        vectors["r_gate"] = layer.mixing_vector
    for name, vector in vectors.items():
        yield vector, weights[f"{prefix}{name}"][0, 0]


def _boom(layer, weights, prefix):
    yield from weights.dense(layer.up_dense, f"{prefix}linear1")
    if layer.down == "dense":
        yield from weights.dense(layer.down_dense, f"{prefix}linear2")


def _block(block, weights, prefix):
    yield from weights.norm(block.input_norm, f"{prefix}lnstart")
    yield from weights.norm(block.residual_norm, f"{prefix}lnff")
    yield from weights.norm(block.boom_norm, f"{prefix}lnxff")
    yield from _boom(block.boom, weights, f"{prefix}ff.")
    cell = block.lstm.cell
    yield cell.kernel, weights[f"{prefix}rnn.weight_ih_l0"].T
    yield cell.recurrent_kernel, weights[f"{prefix}rnn.weight_hh_l0"].T
    # PyTorch has two biases, which only ever occur as a sum
    biases = [weights[f"{prefix}rnn.bias_{x}h_l0"] for x in "ih"]
    yield cell.bias, np.add(*biases)
    if block.attention:
        yield from weights.norm(block.attention_norm, f"{prefix}lnmid")
        yield from weights.norm(block.memory_norm, f"{prefix}lnmem")
        yield from _attention(block.attention_layer, weights, f"{prefix}attn.")


def _model(model, weights, prefix):
    yield model.embedding.embeddings, weights[f"{prefix}encoder.weight"]
    yield model.output_bias, weights[f"{prefix}decoder.bias"]
    if not model.tie_weights:
        yield (
            model.embedding.reverse_embeddings,
            weights[f"{prefix}decoder.weight"].T,
        )
    for index, block in enumerate(model.blocks):
        yield from _block(block, weights, f"{prefix}blocks.{index}.")
