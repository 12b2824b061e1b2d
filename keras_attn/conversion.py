"""Weights of published models, in the order of our layers."""

import numpy as np

__all__ = ["longformer_weights"]


def longformer_weights(state_dict, num_heads, prefix=""):
    """Converts the attention of a Hugging Face Longformer.

    Args:
        state_dict: The weights by their names, NumPy arrays or what
            `numpy.asarray` takes: the state dict of a `LongformerSelfAttention`
            of `transformers`, or of the `LongformerAttention` around it, or of
            a whole model.
        num_heads: Number of attention heads, `num_attention_heads` there.
        prefix: What the names begin with. In a whole model, such as
            `"longformer.encoder.layer.0.attention."`.

    Returns:
        List of NumPy arrays for `set_weights()` of a `LongformerAttention` with
        biases and global projections of its own. A `LongformerSelfAttention`
        has no output projection, and gets the identity for one, so that the
        outputs are the same; that of a `LongformerAttention` is `output.dense`.
        What follows it there, a dropout, the residual and a normalization, is
        not part of attention.

    Example:

    ```python
    import numpy as np
    import keras_attn
    from keras_attn.conversion import longformer_weights

    state_dict = {}  # or `module.state_dict()`
    for name in ("query", "key", "value"):
        for suffix in ("", "_global"):
            state_dict[f"{name}{suffix}.weight"] = np.ones((8, 8))
            state_dict[f"{name}{suffix}.bias"] = np.zeros(8)
    layer = keras_attn.LongformerAttention(
        num_heads=2, key_dim=4, window_size=16, max_global_tokens=4
    )
    layer.build((None, None, 8))
    layer.set_weights(longformer_weights(state_dict, num_heads=2))
    ```
    """
    inner = f"{prefix}self."
    is_whole = f"{inner}query.weight" in state_dict
    if not is_whole:
        inner = prefix
    if f"{inner}query.weight" not in state_dict:
        found = [name for name in state_dict if name.endswith("query.weight")]
        raise ValueError(
            "`longformer_weights` finds no weight "
            f"'{prefix}self.query.weight' or '{prefix}query.weight'. "
            f"Received: prefix={prefix!r}, and of such names {found}"
        )

    def weight(name):
        return np.asarray(state_dict[name])

    features = weight(f"{inner}query.weight").shape[1]
    if features % num_heads:
        raise ValueError(
            "`longformer_weights` needs a `num_heads` that divides the "
            f"{features} features. Received: num_heads={num_heads}"
        )
    shape = (num_heads, features // num_heads)

    def heads(name):
        kernel = weight(f"{inner}{name}.weight").T  # from (out, in)
        bias = weight(f"{inner}{name}.bias")
        return [kernel.reshape(features, *shape), bias.reshape(shape)]

    if is_whole:
        kernel = weight(f"{prefix}output.dense.weight").T
        bias = weight(f"{prefix}output.dense.bias")
    else:
        kernel, bias = np.eye(features), np.zeros(features)
    output = [kernel.reshape(*shape, features), bias]
    return [
        *heads("query"),
        *heads("key"),
        *heads("value"),
        *output,
        *heads("query_global"),
        *heads("key_global"),
        *heads("value_global"),
    ]
