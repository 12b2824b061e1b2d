"""Weights of published models, in the order of our layers."""

from keras_attn.conversion.cbam_resnet import cbam_resnet_weights
from keras_attn.conversion.fast_transformers import fast_transformers_weights
from keras_attn.conversion.longformer import longformer_model_weights
from keras_attn.conversion.longformer import longformer_weights
from keras_attn.conversion.reformer import reformer_local_weights
from keras_attn.conversion.reformer import reformer_lsh_weights
from keras_attn.conversion.sharnn import sharnn_weights
from keras_attn.conversion.torch_attention import torch_attention_weights

__all__ = [
    "cbam_resnet_weights",
    "fast_transformers_weights",
    "longformer_model_weights",
    "longformer_weights",
    "reformer_local_weights",
    "reformer_lsh_weights",
    "sharnn_weights",
    "torch_attention_weights",
]
