import functools

import numpy as np
import pytest
from keras import ops

from keras_attn.ops import apply_gates
from keras_attn.ops import channel_attention
from keras_attn.ops import masked_moments
from keras_attn.ops import spatial_attention
from keras_attn.ops.cbam import POOLING
from tests import backend
from tests.reference import cbam as reference

FEATURES = 5
SHAPES = {1: (3, 7, FEATURES), 2: (3, 2, 4, FEATURES), 3: (3, 3, 4, 2, 5)}


def normal(*shape, seed=0):
    rng = np.random.default_rng(seed)
    return rng.normal(size=shape).astype("float32")


def padding(shape):
    """A sample with three positions left, one with all, and one with none."""
    mask = np.zeros(shape, bool)
    mask.reshape(shape[0], -1)[0, [0, 2, 3]] = True
    mask[1] = True
    return mask


def perceptron():
    return [
        normal(FEATURES, 3, seed=1),
        normal(3, seed=2),
        normal(3, FEATURES, seed=3),
        normal(FEATURES, seed=4),
    ]


def apply_perceptron(pools, weights):
    kernel_0, bias_0, kernel_1, bias_1 = weights
    hidden = ops.relu(ops.matmul(pools, kernel_0) + bias_0)
    return ops.matmul(hidden, kernel_1) + bias_1


def gates_of_channels(x, mask=None, **kwargs):
    mlp = functools.partial(
        apply_perceptron, weights=[ops.array(w) for w in perceptron()]
    )
    return channel_attention(x, mlp, padding_mask=mask, **kwargs)


def gates_of_positions(x, kernel, mask=None, **kwargs):
    return spatial_attention(
        x,
        lambda pools: ops.conv(pools, ops.array(kernel), padding="same"),
        padding_mask=mask,
        **kwargs,
    )


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("pooling", [*((kind,) for kind in POOLING), POOLING])
def test_channel_gates_equal_the_reference(pooling, masked):
    x = normal(*SHAPES[2])
    mask = padding(x.shape[:-1])
    arrays = (x, mask) if masked else (x,)
    actual = backend.run(
        functools.partial(gates_of_channels, pooling=pooling), *arrays
    )
    expected = reference.channel_gates(
        x, perceptron(), pooling, mask if masked else None
    )
    assert actual.shape == (3, FEATURES)
    np.testing.assert_allclose(actual, expected, atol=1e-6)


@pytest.mark.parametrize("rank", [1, 3])
def test_channel_gates_of_maps_of_any_rank(rank):
    x = normal(*SHAPES[rank])
    np.testing.assert_allclose(
        backend.run(gates_of_channels, x),
        reference.channel_gates(x, perceptron()),
        atol=1e-6,
    )


@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("masked", [False, True])
def test_spatial_gates_equal_the_reference(rank, masked):
    x = normal(*SHAPES[rank])
    mask = padding(x.shape[:-1])
    kernel = normal(*(3, 4, 2)[:rank], 2, 1, seed=1)
    arrays = (x, mask) if masked else (x,)
    actual = backend.run(
        lambda x, *mask: gates_of_positions(x, kernel, *mask), *arrays
    )
    expected = reference.spatial_gates(x, kernel, mask=mask if masked else None)
    np.testing.assert_allclose(actual, expected, atol=1e-6)


def test_gates_multiply_channels_and_positions():
    x = np.array([[[1.0, 2.0], [3.0, 4.0], [5.0, np.nan]]], "float32")
    channel = np.array([[10.0, 100.0]], "float32")
    spatial = np.array([[1.0, 2.0, 3.0]], "float32")
    mask = np.array([[True, True, False]])
    actual = backend.run(
        lambda *arrays: apply_gates(*arrays), x, channel, spatial, mask
    )
    np.testing.assert_array_equal(actual, [[[10, 200], [60, 800], [0, 0]]])


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_data_formats_agree(rank):
    x = normal(*SHAPES[rank])
    kernel = normal(*(3, 3, 3)[:rank], 2, 1, seed=1)
    mask = padding(x.shape[:-1])

    def both(x, mask, data_format):
        channel = gates_of_channels(x, mask, data_format=data_format)
        spatial = gates_of_positions(x, kernel, mask, data_format=data_format)
        options = {"padding_mask": mask, "data_format": data_format}
        return channel, spatial, apply_gates(x, channel, spatial, **options)

    last = backend.run(
        functools.partial(both, data_format="channels_last"), x, mask
    )
    first = backend.run(
        functools.partial(both, data_format="channels_first"),
        np.moveaxis(x, -1, 1),
        mask,
    )
    for a, b in zip(last[:2], first[:2], strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)
    np.testing.assert_allclose(last[2], np.moveaxis(first[2], 1, -1), atol=1e-6)


def test_moments_leave_padding_out():
    x = np.array([[[1.0], [3.0], [np.nan]], [[5.0], [7.0], [9.0]]], "float32")
    mask = np.array([[1, 1, 0], [1, 0, 0]], bool)
    mean, variance, count = backend.run(masked_moments, x, mask)
    np.testing.assert_allclose(mean, [3])
    np.testing.assert_allclose(variance, [8 / 3], rtol=1e-6)
    assert count == 3
    for nothing in backend.run(masked_moments, x, np.zeros_like(mask)):
        assert not nothing.any()


@pytest.mark.parametrize("pooling", POOLING)
def test_gradients_are_finite_where_nothing_is_left(pooling):
    x = normal(*SHAPES[2])
    x[0] = 0.0  # the root of the sum of squares has no gradient here
    x[1, 1:] = np.nan
    mask = np.ones(x.shape[:-1], bool)
    mask[1] = False

    def total(x):
        gates = gates_of_channels(x, mask, pooling=(pooling,))
        spatial = gates_of_positions(x, np.ones((3, 3, 2, 1), "float32"), mask)
        return apply_gates(x, gates, spatial, mask)

    (gradient,) = backend.gradients(total, x)
    assert np.isfinite(gradient).all()
    assert not gradient[1].any()
    assert gradient[0].any()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("pooling", POOLING)
def test_large_maps_of_half_floats_do_not_overflow(pooling, dtype):
    x = np.full((1, 300, 300, 1), 2.0, "float32")

    def pool(x):
        seen = []
        channel_attention(
            ops.cast(x, dtype),
            lambda pools: seen.append(pools) or pools,
            pooling=(pooling,),
        )
        return seen[0]

    expected = reference.POOLS[pooling](x.reshape(-1, 1).astype("float64"))
    actual = backend.run(pool, x)
    assert actual.dtype == "float32"
    np.testing.assert_allclose(actual[0, 0], expected, rtol=1e-4)
