"""Attention mechanisms as pure functions of tensors.

Every function takes `query`, `key` and `value` already split into heads, keeps
no state, and builds on `keras.ops` alone. Shapes, and the einsum strings in
lower case, are spelled with the letters of `keras.ops.dot_product_attention`:

    B  batch                        N  heads
    T  query positions              H  size of a query or key head
    S  key and value positions      V  size of a value head
    F  features of a layer's input  C  blocks
    D  dilation                     W  positions in a block

What a masked position holds must be finite. The layers see to that.
"""

from keras_attn.ops.boom import boom
from keras_attn.ops.boom import quick_gelu
from keras_attn.ops.cbam import apply_gates
from keras_attn.ops.cbam import channel_attention
from keras_attn.ops.cbam import masked_moments
from keras_attn.ops.cbam import spatial_attention
from keras_attn.ops.dot_product import dot_product_attention
from keras_attn.ops.key_value_cache import key_value_cache
from keras_attn.ops.key_value_cache import key_value_cache_mask
from keras_attn.ops.key_value_cache import update_key_value_cache
from keras_attn.ops.linear import linear_attention
from keras_attn.ops.linear import positive_random_features
from keras_attn.ops.linformer import linformer_attention
from keras_attn.ops.linformer import linformer_window_attention
from keras_attn.ops.longformer import global_token_positions
from keras_attn.ops.longformer import longformer_attention
from keras_attn.ops.longformer import longformer_attention_step
from keras_attn.ops.low_rank import lama
from keras_attn.ops.low_rank import orthogonality_penalty
from keras_attn.ops.lsh import lsh_attention
from keras_attn.ops.lsh import lsh_buckets
from keras_attn.ops.lstm_state import lstm_cell_state
from keras_attn.ops.masks import dense_mask
from keras_attn.ops.masks import masked_softmax
from keras_attn.ops.single_head_attention import single_head_attention
from keras_attn.ops.sliding_window import sliding_window_attention
from keras_attn.ops.sparse_transformer import fixed_sparse_attention
from keras_attn.ops.sparse_transformer import strided_sparse_attention
from keras_attn.ops.synthesizer import dense_scores
from keras_attn.ops.synthesizer import dot_product_scores
from keras_attn.ops.synthesizer import factorized_dense_scores
from keras_attn.ops.synthesizer import factorized_random_scores
from keras_attn.ops.synthesizer import mix_scores
from keras_attn.ops.synthesizer import random_scores
from keras_attn.ops.synthesizer import synthesizer
from keras_attn.ops.top_k import top_k_attention

__all__ = [
    "apply_gates",
    "boom",
    "channel_attention",
    "dense_mask",
    "dense_scores",
    "dot_product_attention",
    "dot_product_scores",
    "factorized_dense_scores",
    "factorized_random_scores",
    "fixed_sparse_attention",
    "global_token_positions",
    "key_value_cache",
    "key_value_cache_mask",
    "lama",
    "linear_attention",
    "linformer_attention",
    "linformer_window_attention",
    "longformer_attention",
    "longformer_attention_step",
    "lsh_attention",
    "lsh_buckets",
    "lstm_cell_state",
    "masked_moments",
    "masked_softmax",
    "mix_scores",
    "orthogonality_penalty",
    "positive_random_features",
    "quick_gelu",
    "random_scores",
    "single_head_attention",
    "sliding_window_attention",
    "spatial_attention",
    "strided_sparse_attention",
    "synthesizer",
    "top_k_attention",
    "update_key_value_cache",
]
