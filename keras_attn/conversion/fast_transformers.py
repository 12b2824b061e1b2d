"""Weights of the attention layers of fast-transformers."""

from keras_attn.conversion.state_dict import StateDict


def fast_transformers_weights(state_dict, num_heads, prefix=""):
    """Converts an `AttentionLayer` of fast-transformers.

    This is the library of the authors of linear attention. Its layers hold the
    projections, whatever attention is inside: `LinearAttention` and
    `CausalLinearAttention` become a `keras_attn.LinearAttention`, and
    `FullAttention` a `keras_attn.MultiHeadAttention`.

    Args:
        state_dict: The weights by their names, NumPy arrays or what
            `numpy.asarray` takes: the state dict of an `AttentionLayer`, or of
            a model that holds one.
        num_heads: Number of attention heads, `n_heads` there.
        prefix: What the names begin with. In a `TransformerEncoder`, such as
            `"layers.0.attention."`.

    Returns:
        List of NumPy arrays for `set_weights()`.

    Raises:
        ValueError: For random features, which the original draws anew.

    Example:

    ```python
    import numpy as np
    import keras_attn
    from keras_attn.conversion import fast_transformers_weights

    state_dict = {}  # or `module.state_dict()`
    for name in ("query", "key", "value", "out"):
        state_dict[f"{name}_projection.weight"] = np.ones((8, 8))
        state_dict[f"{name}_projection.bias"] = np.zeros(8)
    layer = keras_attn.LinearAttention(num_heads=2, key_dim=4)
    layer.build((None, None, 8))
    layer.set_weights(fast_transformers_weights(state_dict, num_heads=2))
    ```
    """
    weights = StateDict("fast_transformers_weights", state_dict, prefix)
    for name in state_dict:
        if name.startswith(f"{prefix}inner_attention."):
            raise ValueError(
                "`fast_transformers_weights` converts projections, and cannot "
                f"convert weights of the attention itself. Received: {name!r}"
            )
    return [
        *weights.heads("query_projection", num_heads),
        *weights.heads("key_projection", num_heads),
        *weights.heads("value_projection", num_heads),
        *weights.output("out_projection", num_heads),
    ]
