"""Weights of the attention of PyTorch."""

import numpy as np

from keras_attn.conversion.state_dict import StateDict


def torch_attention_weights(state_dict, num_heads, prefix=""):
    """Converts a `torch.nn.MultiheadAttention`.

    Args:
        state_dict: The weights by their names, NumPy arrays or what
            `numpy.asarray` takes: the state dict of a
            `torch.nn.MultiheadAttention`, or of a module that holds one.
        num_heads: Number of attention heads.
        prefix: What the names begin with. In a `torch.nn.TransformerEncoder`,
            such as `"layers.0.self_attn."`.

    Returns:
        List of NumPy arrays for `set_weights()` of a
        `keras_attn.MultiHeadAttention`, or of any layer with its weights, that
        has `use_bias` as the original has `bias`.

    Raises:
        ValueError: For the learned key and value of `add_bias_kv=True`, which
            our layers do not have.

    Example:

    ```python
    import numpy as np
    import keras_attn
    from keras_attn.conversion import torch_attention_weights

    state_dict = {  # or `module.state_dict()`
        "in_proj_weight": np.ones((24, 8)),
        "in_proj_bias": np.zeros(24),
        "out_proj.weight": np.ones((8, 8)),
        "out_proj.bias": np.zeros(8),
    }
    layer = keras_attn.MultiHeadAttention(num_heads=2, key_dim=4)
    layer.build((None, None, 8))
    layer.set_weights(torch_attention_weights(state_dict, num_heads=2))
    ```
    """
    weights = StateDict("torch_attention_weights", state_dict, prefix)
    for name in ("bias_k", "bias_v"):
        if name in weights:
            raise ValueError(
                "`torch_attention_weights` cannot convert the learned key and "
                "value of `add_bias_kv=True`. "
                f"Received: a weight {prefix + name!r}"
            )
    if "q_proj_weight" in weights:  # the inputs differ in features
        kernels = [weights[f"{name}_proj_weight"] for name in "qkv"]
    else:
        kernels = np.split(weights["in_proj_weight"], 3)
    bias = weights.get("in_proj_bias")
    biases = [None] * 3 if bias is None else np.split(bias, 3)
    arrays = []
    for kernel, bias in zip(kernels, biases, strict=True):
        arrays += weights.split_heads(kernel.T, bias, num_heads)
    return arrays + weights.output("out_proj", num_heads)
