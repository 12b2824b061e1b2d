"""What the layers that keep all keys for streaming have in common."""

import keras

from keras_attn.ops import key_value_cache
from keras_attn.utils import check_positive_integers


def empty_cache(layer, batch_size, max_length):
    """Creates the key/value cache of an attention layer, its first state."""
    check_positive_integers(layer, batch_size=batch_size, max_length=max_length)
    return key_value_cache(
        batch_size,
        max_length,
        layer.compute_dtype,
        key=(layer.num_heads, layer.key_dim),
        value=(layer.num_heads, layer.value_dim),
    )


def append_state(results, state):
    """Appends the new state, if there is one, to what attention returns."""
    if state is None:
        return results
    results = results if isinstance(results, tuple) else (results,)
    return (*results, state)


def state_spec(state):
    """Shapes and dtypes of the new state, which are those of the old one."""
    return keras.tree.map_structure(
        lambda x: keras.KerasTensor(x.shape, dtype=x.dtype), state
    )
