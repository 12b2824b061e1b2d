"""Buffers of fixed shape that hold the past of a causal mechanism."""

from keras import ops

from keras_attn.utils import concrete_integer


def key_value_cache(batch_size, max_length, dtype, **shapes):
    """Creates an empty cache, the streaming state of many mechanisms.

    Args:
        batch_size: Number of sequences.
        max_length: Number of positions that the cache can hold.
        dtype: Data type of the buffers.
        **shapes: For each buffer by its name, the shape of one position, such
            as `key=(num_heads, key_dim)`.

    Returns:
        Dictionary of tensors: a buffer of shape `(B, max_length, *shape)` for
        each name, `"padding_mask"` of shape `(B, max_length)`, which is `True`
        for the positions that may be attended, and `"length"`, the number of
        positions written so far, a scalar.
    """
    buffers = {
        name: ops.zeros((batch_size, max_length, *shape), dtype=dtype)
        for name, shape in shapes.items()
    }
    return {
        **buffers,
        "padding_mask": ops.zeros((batch_size, max_length), dtype="bool"),
        "length": ops.zeros((), dtype="int32"),
    }


def update_key_value_cache(cache, padding_mask=None, **chunks):
    """Appends the next positions to a cache.

    Args:
        cache: What `key_value_cache()` or this function has returned.
        padding_mask: Boolean tensor of shape `(B, T)`, `True` for the new
            positions that may be attended. Defaults to all of them.
        **chunks: For each buffer by its name, its values at the new positions,
            a tensor of shape `(B, T, ...)`.

    Returns:
        The new cache. `ValueError` is raised if the positions do not fit;
        compiled code cannot raise, and fills the buffers with NaN instead.
    """
    length = cache["length"]
    max_length = ops.shape(cache["padding_mask"])[1]
    chunk = next(iter(chunks.values()))
    chunk_length = ops.shape(chunk)[1]
    if padding_mask is None:
        padding_mask = ops.ones(ops.shape(chunk)[:2], dtype="bool")
    written = concrete_integer(length)
    if written is not None and written + chunk_length > max_length:
        raise ValueError(
            f"The streaming state holds {max_length} positions, of which "
            f"{written} are taken, and cannot take {chunk_length} more. "
            "Create it with a larger `max_length`."
        )

    # a gather, because `ops.slice_update` has no gradient on TensorFlow
    offset = ops.arange(max_length, dtype="int32") - length
    is_new = ops.logical_and(offset >= 0, offset < chunk_length)
    source = ops.clip(offset, 0, chunk_length - 1)

    def write(buffer, chunk):
        rank = len(buffer.shape)
        mask = ops.reshape(is_new, (1, max_length) + (1,) * (rank - 2))
        chunk = ops.cast(ops.take(chunk, source, axis=1), buffer.dtype)
        return ops.where(mask, chunk, buffer)

    updated = {name: write(cache[name], chunks[name]) for name in chunks}
    if written is None:
        fits = length + chunk_length <= max_length
        updated = {
            name: ops.where(fits, buffer, ops.full_like(buffer, float("nan")))
            for name, buffer in updated.items()
        }
    return {
        **updated,
        "padding_mask": write(
            cache["padding_mask"], ops.cast(padding_mask, "bool")
        ),
        "length": length + chunk_length,
    }


def key_value_cache_mask(cache, chunk_length):
    """Tells which positions of a cache its last positions may attend.

    Args:
        cache: What `update_key_value_cache()` has returned.
        chunk_length: Number `T` of positions that it appended.

    Returns:
        Boolean tensor of shape `(1, T, max_length)`: causal, and blind to the
        positions that are not written yet. It leaves out the padding mask of
        the cache.
    """
    rows = ops.arange(chunk_length, dtype="int32")[:, None]
    max_length = ops.shape(cache["padding_mask"])[1]
    columns = ops.arange(max_length, dtype="int32")
    return (columns <= cache["length"] - chunk_length + rows)[None]
