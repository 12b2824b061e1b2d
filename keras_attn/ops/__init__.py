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

from keras_attn.ops.dot_product import dot_product_attention
from keras_attn.ops.key_value_cache import key_value_cache
from keras_attn.ops.key_value_cache import key_value_cache_mask
from keras_attn.ops.key_value_cache import update_key_value_cache
from keras_attn.ops.linear import linear_attention
from keras_attn.ops.linear import positive_random_features
from keras_attn.ops.linformer import linformer_attention
from keras_attn.ops.linformer import linformer_window_attention
from keras_attn.ops.low_rank import lama
from keras_attn.ops.low_rank import orthogonality_penalty
from keras_attn.ops.masks import dense_mask
from keras_attn.ops.masks import masked_softmax

__all__ = [
    "dense_mask",
    "dot_product_attention",
    "key_value_cache",
    "key_value_cache_mask",
    "lama",
    "linear_attention",
    "linformer_attention",
    "linformer_window_attention",
    "masked_softmax",
    "orthogonality_penalty",
    "positive_random_features",
    "update_key_value_cache",
]
