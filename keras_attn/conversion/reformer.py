"""Weights of the attention layers of the Reformer of Hugging Face."""

from keras import ops

from keras_attn.conversion.state_dict import StateDict
from keras_attn.conversion.state_dict import identity_output


def reformer_lsh_weights(state_dict, num_heads, rotations, prefix=""):
    """Converts LSH attention of a Hugging Face Reformer.

    `LSHAttention` computes what that layer does if it gets its options,
    `bucket_size=lsh_attn_chunk_length`, `num_hashes`, `num_buckets`,
    `chunks_before=lsh_num_chunks_before`, `chunks_after=lsh_num_chunks_after`,
    and besides `use_bias=False, wrap=True, prefix_consistent=False`. Without
    the last two, padding and later positions do not change what a position
    sees; the weights are the same.

    Args:
        state_dict: The weights by their names, NumPy arrays or what
            `numpy.asarray` takes: the state dict of an `LSHSelfAttention` of
            `transformers`, or of the `ReformerAttention` around it, or of a
            whole model.
        num_heads: Number of attention heads, `num_attention_heads` there.
        rotations: The random directions of the hash, of shape `(N, H, rounds,
            columns)`. The original draws new ones in each call and keeps none,
            so that they are not in `state_dict`: give `layer.rotations` to
            leave those of your layer as they are.
        prefix: What the names begin with. In a whole model, such as
            `"reformer.encoder.layers.1.attention."`.

    Returns:
        List of NumPy arrays for `set_weights()` of an `LSHAttention` with
        `use_bias=False`. An `LSHSelfAttention` has no output projection, and
        gets the identity for one; that of a `ReformerAttention` is
        `output.dense`. The normalization before it is not part of attention.

    Example:

    ```python
    import numpy as np
    import keras_attn
    from keras_attn.conversion import reformer_lsh_weights

    state_dict = {  # or `module.state_dict()`
        "query_key.weight": np.ones((8, 6)),
        "value.weight": np.ones((8, 6)),
    }
    layer = keras_attn.LSHAttention(
        num_heads=2, key_dim=4, output_shape=8, use_bias=False
    )
    layer.build((None, None, 6))
    layer.set_weights(
        reformer_lsh_weights(state_dict, 2, rotations=layer.rotations)
    )
    ```
    """
    weights = StateDict("reformer_lsh_weights", state_dict, prefix)
    attention = weights.inside("self_attention.", "query_key.weight")
    value = attention.heads("value", num_heads)
    return [
        ops.convert_to_numpy(rotations),
        *attention.heads("query_key", num_heads),
        *value,
        *_output(weights, attention, value, num_heads),
    ]


def reformer_local_weights(state_dict, num_heads, prefix=""):
    """Converts local attention of a Hugging Face Reformer.

    That layer cuts a sequence into chunks, and lets each attend to itself and
    to some chunks before and after it, those of a ring. No layer of ours does
    this in linear time. `MultiHeadAttention` does it in quadratic time, given
    the chunks as `attention_mask`, see `docs/converting_weights.md`;
    `SlidingWindowAttention` takes the same weights, but shows each position
    equally many on its left.

    Args:
        state_dict: The weights by their names, NumPy arrays or what
            `numpy.asarray` takes: the state dict of a `LocalSelfAttention` of
            `transformers`, or of the `ReformerAttention` around it, or of a
            whole model.
        num_heads: Number of attention heads, `num_attention_heads` there.
        prefix: What the names begin with. In a whole model, such as
            `"reformer.encoder.layers.0.attention."`.

    Returns:
        List of NumPy arrays for `set_weights()` of a `MultiHeadAttention` or a
        `SlidingWindowAttention` with `use_bias=False`. A `LocalSelfAttention`
        has no output projection, and gets the identity for one.

    Example:

    ```python
    import numpy as np
    import keras_attn
    from keras_attn.conversion import reformer_local_weights

    names = ("query", "key", "value")
    state_dict = {f"{name}.weight": np.ones((8, 6)) for name in names}
    layer = keras_attn.MultiHeadAttention(
        num_heads=2, key_dim=4, output_shape=8, use_bias=False
    )
    layer.build((None, None, 6))
    layer.set_weights(reformer_local_weights(state_dict, num_heads=2))
    ```
    """
    weights = StateDict("reformer_local_weights", state_dict, prefix)
    attention = weights.inside("self_attention.", "query.weight")
    value = attention.heads("value", num_heads)
    return [
        *attention.heads("query", num_heads),
        *attention.heads("key", num_heads),
        *value,
        *_output(weights, attention, value, num_heads),
    ]


def _output(weights, attention, value, num_heads):
    if attention is weights:
        return identity_output(value)
    return weights.output("output.dense", num_heads)
