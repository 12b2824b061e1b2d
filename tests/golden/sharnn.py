"""Copies the golden weights of SHA-RNN into the layers."""

import numpy as np

from keras_attn import conversion
from keras_attn.conversion.sharnn import named_weights
from keras_attn.conversion.state_dict import StateDict


def load_weights(layer, arrays, prefix="weight."):
    """Gives a built layer or a model the golden weights."""
    layer.set_weights(conversion.sharnn_weights(arrays, layer, prefix))


def named_gradients(layer, arrays, prefix="grad.weight."):
    """Pairs of a Keras variable and its golden gradient, where there is one."""
    start = prefix.replace("grad.", "")
    filled = {
        name: arrays.get(
            prefix + name.removeprefix(start), np.full_like(array, np.nan)
        )
        for name, array in arrays.items()
        if name.startswith(start)
    }
    pairs = named_weights(layer, StateDict("golden", filled, start))
    return [pair for pair in pairs if not np.isnan(pair[1]).any()]
