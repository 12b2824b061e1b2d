"""Attention mechanisms as pure functions of tensors.

Every function takes `query`, `key` and `value` already split into heads, keeps
no state, and builds on `keras.ops` alone. Shapes, and the einsum strings in
lower case, are spelled with the letters of `keras.ops.dot_product_attention`:

    B  batch                        N  heads
    T  query positions              H  size of a query or key head
    S  key and value positions      V  size of a value head
    F  features of a layer's input  C  blocks
    D  dilation                     W  positions in a block
"""

__all__ = []
