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
from keras_attn.ops.lsh import lsh_attention
from keras_attn.ops.lsh import lsh_buckets
from keras_attn.ops.masks import dense_mask
from keras_attn.ops.masks import masked_softmax
from keras_attn.ops.sparse_transformer import fixed_sparse_attention
from keras_attn.ops.sparse_transformer import strided_sparse_attention

__all__ = [
    "dense_mask",
    "dot_product_attention",
    "fixed_sparse_attention",
    "key_value_cache",
    "key_value_cache_mask",
    "lsh_attention",
    "lsh_buckets",
    "masked_softmax",
    "strided_sparse_attention",
    "update_key_value_cache",
]
