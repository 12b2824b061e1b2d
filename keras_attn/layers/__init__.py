"""Attention mechanisms as Keras layers."""

from keras_attn.layers.attention_layer import AttentionLayer
from keras_attn.layers.lama import LAMA
from keras_attn.layers.linear_attention import LinearAttention
from keras_attn.layers.linformer_attention import LengthProjection
from keras_attn.layers.linformer_attention import LinformerAttention
from keras_attn.layers.multi_head_attention import MultiHeadAttention

__all__ = [
    "AttentionLayer",
    "LAMA",
    "LengthProjection",
    "LinearAttention",
    "LinformerAttention",
    "MultiHeadAttention",
]
