"""Attention mechanisms as Keras layers."""

from keras_attn.layers.attention_layer import AttentionLayer
from keras_attn.layers.longformer_attention import LongformerAttention
from keras_attn.layers.multi_head_attention import MultiHeadAttention
from keras_attn.layers.sliding_window_attention import SlidingWindowAttention

__all__ = [
    "AttentionLayer",
    "LongformerAttention",
    "MultiHeadAttention",
    "SlidingWindowAttention",
]
