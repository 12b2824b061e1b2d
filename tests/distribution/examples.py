"""Every layer, in sizes that can be split over four devices."""

import numpy as np

from keras_attn import layers
from tests.layers.every_layer import EXAMPLES

FEATURES = 16
LENGTH = 12
SIZES = {
    layers.LongformerAttention: {"dilation_rate": 2},
    layers.SHARNNBlock: {"intermediate_dim": 32},
    layers.Boom: {"intermediate_dim": 32},
    layers.TransformerBlock: {"intermediate_dim": 32},
    layers.LAMA: {"hidden_dim": 8},
    layers.ChannelAttention: {"reduction_ratio": 4},
    layers.CBAM: {"reduction_ratio": 4},
}


def make(example, **kwargs):
    """Builds the layer of an example, with four heads if it has heads."""
    sizes = dict(SIZES.get(example.cls, {}))
    if "num_heads" in example.kwargs:
        sizes["num_heads"] = 4
    if example.cls is layers.TransformerBlock:
        sizes["attention"] = layers.MultiHeadAttention(4, 5)
    layer = example.layer(**{**sizes, **kwargs})
    layer.build((None, *inputs(example).shape[1:]))
    return layer


def inputs(example, batch=8, seed=0):
    width = (4,) if example.is_map else ()
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(batch, LENGTH, *width, FEATURES))
    return x.astype("float32")


__all__ = ["EXAMPLES", "inputs", "make"]
