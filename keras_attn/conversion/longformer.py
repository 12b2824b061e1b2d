"""Weights of the Longformer of Hugging Face."""

from keras_attn.conversion.state_dict import StateDict
from keras_attn.conversion.state_dict import identity_output


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
    weights = StateDict("longformer_weights", state_dict, prefix)
    attention = weights.inside("self.", "query.weight")
    query, key, value, *global_projections = (
        attention.heads(name + suffix, num_heads)
        for suffix in ("", "_global")
        for name in ("query", "key", "value")
    )
    if attention is weights:
        output = identity_output(value)
    else:
        output = weights.output("output.dense", num_heads)
    return [
        array
        for arrays in (query, key, value, output, *global_projections)
        for array in arrays
    ]
