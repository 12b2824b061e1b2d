"""Attention mechanisms as Keras layers."""

from keras_attn.layers.attention_layer import AttentionLayer
from keras_attn.layers.lsh_attention import LSHAttention
from keras_attn.layers.multi_head_attention import MultiHeadAttention
from keras_attn.layers.sparse_transformer import FixedSparseAttention
from keras_attn.layers.sparse_transformer import StridedSparseAttention

__all__ = [
    "AttentionLayer",
    "FixedSparseAttention",
    "LSHAttention",
    "MultiHeadAttention",
    "StridedSparseAttention",
]
