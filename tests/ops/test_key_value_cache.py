import keras
import numpy as np
import pytest
from keras import ops

from keras_attn.ops import key_value_cache
from keras_attn.ops import key_value_cache_mask
from keras_attn.ops import update_key_value_cache
from tests.backend import compiled
from tests.backend import gradients
from tests.backend import to_numpy


def chunk(length, start=0):
    values = np.arange(start, start + length, dtype="float32") + 1
    return np.stack([values, -values])[..., None]


def test_chunks_are_written_one_after_the_other():
    cache = key_value_cache(2, 6, "float32", key=(1,))
    cache = update_key_value_cache(cache, key=chunk(2))
    mask = np.array([[True, True, False], [True, False, True]])
    cache = update_key_value_cache(cache, mask, key=chunk(3, start=2))
    cache = to_numpy(cache)
    np.testing.assert_array_equal(cache["key"][0, :, 0], [1, 2, 3, 4, 5, 0])
    np.testing.assert_array_equal(
        cache["key"][1, :, 0], [-1, -2, -3, -4, -5, 0]
    )
    np.testing.assert_array_equal(
        cache["padding_mask"],
        np.array([[1, 1, 1, 1, 0, 0], [1, 1, 1, 0, 1, 0]], bool),
    )
    assert cache["length"] == 5


def test_mask_is_causal_and_blind_to_what_is_not_written():
    cache = key_value_cache(2, 4, "float32", key=(1,))
    cache = update_key_value_cache(cache, key=chunk(1))
    cache = update_key_value_cache(cache, key=chunk(2))
    np.testing.assert_array_equal(
        to_numpy(key_value_cache_mask(cache, 2)),
        np.array([[[1, 1, 0, 0], [1, 1, 1, 0]]], bool),
    )


def test_one_program_takes_caches_of_several_sizes():
    """TensorFlow then traces it anew, with sizes that are not known."""

    def step(cache, x):
        cache = update_key_value_cache(cache, key=x)
        return cache["key"], key_value_cache_mask(cache, 2)

    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        step = tf.function(step, reduce_retracing=True)
    for size in (4, 6, 5):
        cache = key_value_cache(2, size, "float32", key=(1,))
        keys, mask = step(cache, ops.convert_to_tensor(chunk(2)))
        np.testing.assert_array_equal(
            to_numpy(keys)[0, :, 0], [1, 2] + [0] * (size - 2)
        )
        np.testing.assert_array_equal(
            to_numpy(mask), np.tril(np.ones((1, 2, size), bool))
        )


def test_gradients_reach_the_chunk():
    upstream = np.array([5.0, 7.0, 11.0, 13.0], "float32").reshape(1, 4, 1)

    def fn(x):
        cache = key_value_cache(2, 4, "float32", key=(1,))
        cache = update_key_value_cache(cache, key=chunk(1))
        cache = update_key_value_cache(cache, key=x)
        return ops.multiply(cache["key"], upstream)

    (grad,) = gradients(fn, chunk(2))
    np.testing.assert_array_equal(grad[0, :, 0], [7, 11])


def test_positions_that_do_not_fit_are_refused():
    cache = key_value_cache(2, 3, "float32", key=(1,))
    cache = update_key_value_cache(cache, key=chunk(2))
    with pytest.raises(ValueError, match="holds 3 positions, of which 2"):
        update_key_value_cache(cache, key=chunk(2))
    update_key_value_cache(cache, key=chunk(1))


def test_compiled_code_marks_an_overflow_with_nan():
    step = compiled(lambda cache, x: update_key_value_cache(cache, key=x))
    cache = key_value_cache(2, 3, "float32", key=(1,))
    x = ops.convert_to_tensor(chunk(2))
    cache = step(cache, x)
    assert np.isfinite(to_numpy(cache["key"])).all()
    try:
        cache = step(cache, x)
    except ValueError as error:  # PyTorch does not compile here, and raises
        assert "holds 3 positions" in str(error)
    else:
        assert np.isnan(to_numpy(cache["key"])).all()
