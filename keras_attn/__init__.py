"""Attention mechanisms as Keras 3 layers, on TensorFlow, JAX and PyTorch."""

from keras_attn import conversion
from keras_attn import data
from keras_attn import distribution
from keras_attn import layers
from keras_attn import models
from keras_attn import ops
from keras_attn import optimizers
from keras_attn import visualization
from keras_attn.layers import *  # noqa: F403
from keras_attn.models import swap_attention

__version__ = "0.1.0"
__all__ = [
    "conversion",
    "data",
    "distribution",
    "layers",
    "models",
    "ops",
    "optimizers",
    "swap_attention",
    "visualization",
    *layers.__all__,
]
