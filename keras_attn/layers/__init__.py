"""Attention mechanisms as Keras layers."""

from keras_attn.layers.attention_layer import AttentionLayer
from keras_attn.layers.boom import Boom
from keras_attn.layers.cbam import CBAM
from keras_attn.layers.cbam import ChannelAttention
from keras_attn.layers.cbam import SpatialAttention
from keras_attn.layers.lama import LAMA
from keras_attn.layers.linear_attention import LinearAttention
from keras_attn.layers.linformer_attention import LengthProjection
from keras_attn.layers.linformer_attention import LinformerAttention
from keras_attn.layers.longformer_attention import LongformerAttention
from keras_attn.layers.lsh_attention import LSHAttention
from keras_attn.layers.multi_head_attention import MultiHeadAttention
from keras_attn.layers.sharnn_block import SHARNNBlock
from keras_attn.layers.single_head_attention import SingleHeadAttention
from keras_attn.layers.sliding_window_attention import SlidingWindowAttention
from keras_attn.layers.sparse_transformer import FixedSparseAttention
from keras_attn.layers.sparse_transformer import StridedSparseAttention
from keras_attn.layers.synthesizer import Synthesizer
from keras_attn.layers.top_k_attention import TopKAttention
from keras_attn.layers.transformer_block import TransformerBlock

__all__ = [
    "AttentionLayer",
    "Boom",
    "CBAM",
    "ChannelAttention",
    "FixedSparseAttention",
    "LAMA",
    "LSHAttention",
    "LengthProjection",
    "LinearAttention",
    "LinformerAttention",
    "LongformerAttention",
    "MultiHeadAttention",
    "SHARNNBlock",
    "SingleHeadAttention",
    "SlidingWindowAttention",
    "SpatialAttention",
    "StridedSparseAttention",
    "Synthesizer",
    "TopKAttention",
    "TransformerBlock",
]
