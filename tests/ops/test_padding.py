import numpy as np
import pytest

from keras_attn.ops.padding import pad_axis
from tests.backend import run


@pytest.mark.parametrize("edges", [(0, 0), (2, 0), (0, 3), (1, 2)])
@pytest.mark.parametrize("value", [0, -np.inf])
def test_pads_one_axis(edges, value):
    x = np.arange(6, dtype="float32").reshape(1, 2, 3)
    expected = np.pad(x, [(0, 0), edges, (0, 0)], constant_values=value)
    actual = run(lambda x: pad_axis(x, *edges, axis=1, value=value), x)
    np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize("dtype", ["bool", "int32", "float16"])
def test_keeps_the_dtype(dtype):
    x = np.ones((2, 3), dtype)
    actual = run(lambda x: pad_axis(x, 1, 0, axis=1), x)
    assert actual.dtype == dtype
    np.testing.assert_array_equal(actual, np.pad(x, [(0, 0), (1, 0)]))
