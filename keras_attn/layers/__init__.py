"""Attention mechanisms as Keras layers."""

from keras_attn.layers.attention_layer import AttentionLayer
from keras_attn.layers.cbam import CBAM
from keras_attn.layers.cbam import ChannelAttention
from keras_attn.layers.cbam import SpatialAttention
from keras_attn.layers.lama import LAMA
from keras_attn.layers.linear_attention import LinearAttention
from keras_attn.layers.linformer_attention import LengthProjection
from keras_attn.layers.linformer_attention import LinformerAttention
from keras_attn.layers.lsh_attention import LSHAttention
from keras_attn.layers.multi_head_attention import MultiHeadAttention
from keras_attn.layers.sparse_transformer import FixedSparseAttention
from keras_attn.layers.sparse_transformer import StridedSparseAttention
from keras_attn.layers.synthesizer import Synthesizer
from keras_attn.layers.top_k_attention import TopKAttention

__all__ = [
    "AttentionLayer",
    "CBAM",
    "ChannelAttention",
    "FixedSparseAttention",
    "LAMA",
    "LSHAttention",
    "LengthProjection",
    "LinearAttention",
    "LinformerAttention",
    "MultiHeadAttention",
    "SpatialAttention",
    "StridedSparseAttention",
    "Synthesizer",
    "TopKAttention",
]
