import numpy as np
import pytest

from keras_attn.layers import FixedSparseAttention
from keras_attn.layers import MultiHeadAttention
from keras_attn.layers import StridedSparseAttention
from tests.backend import to_numpy
from tests.reference import sparse_transformer

LENGTH = 11


def sequence():
    rng = np.random.default_rng(0)
    return rng.normal(size=(2, LENGTH, 6)).astype("float32")


@pytest.mark.parametrize("use_causal_mask", [False, True])
@pytest.mark.parametrize("heads", ["split", "merged", "local", "strided"])
def test_strided_equals_full_attention_under_its_mask(heads, use_causal_mask):
    layer = StridedSparseAttention(2, 5, stride=4, heads=heads)
    mask = sparse_transformer.strided_mask(LENGTH, 4, heads, 2, use_causal_mask)
    check(layer, mask, use_causal_mask)


@pytest.mark.parametrize("use_causal_mask", [False, True])
@pytest.mark.parametrize("heads", ["split", "merged", "local", "summary"])
def test_fixed_equals_full_attention_under_its_mask(heads, use_causal_mask):
    layer = FixedSparseAttention(
        2, 5, block_size=4, num_summary=1, num_subblocks=2, heads=heads
    )
    mask = sparse_transformer.fixed_mask(
        LENGTH, 4, 1, 2, heads, 2, use_causal_mask
    )
    check(layer, mask, use_causal_mask)


def check(layer, mask, use_causal_mask):
    x = sequence()
    full = MultiHeadAttention(2, 5)
    full.build(x.shape)
    layer.build(x.shape)
    layer.set_weights(full.get_weights())
    mask = np.broadcast_to(mask, (2, *mask.shape))
    np.testing.assert_allclose(
        to_numpy(layer(x, use_causal_mask=use_causal_mask)),
        to_numpy(full(x, attention_mask=mask)),
        rtol=1e-5,
        atol=1e-6,
    )


@pytest.mark.parametrize(
    ("cls", "arguments", "message"),
    [
        (StridedSparseAttention, {"stride": 0}, "stride=0"),
        (StridedSparseAttention, {"stride": 2, "heads": "summary"}, "summary"),
        (
            FixedSparseAttention,
            {"block_size": 4, "num_summary": 5},
            "num_summary=5",
        ),
        (
            FixedSparseAttention,
            {"block_size": 4, "num_summary": 1, "heads": "strided"},
            "strided",
        ),
        (
            FixedSparseAttention,
            {"block_size": 4, "num_summary": 2, "num_subblocks": 4},
            "FixedSparseAttention.*fit into block_size=4.*num_summary=2",
        ),
        (
            FixedSparseAttention,
            {"block_size": 9, "num_summary": 2, "num_subblocks": 3},
            "FixedSparseAttention.*divisor of num_heads=4.*num_subblocks=3",
        ),
        (
            FixedSparseAttention,
            {"block_size": 4, "num_summary": 0},
            "num_summary=0",
        ),
    ],
)
def test_impossible_arguments_are_refused(cls, arguments, message):
    with pytest.raises(ValueError, match=message):
        cls(num_heads=4, key_dim=5, **arguments)


@pytest.mark.parametrize(
    "layer",
    [
        lambda: StridedSparseAttention(1, 5, stride=4),
        lambda: FixedSparseAttention(1, 5, block_size=4, num_summary=1),
    ],
)
def test_a_single_head_cannot_be_split(layer):
    with pytest.raises(ValueError, match="num_heads=1, heads='split'"):
        layer()
