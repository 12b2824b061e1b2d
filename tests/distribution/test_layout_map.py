"""Which weights `layout_map` splits, which needs no devices."""

import keras
import pytest

from keras_attn.distribution import layout_map
from keras_attn.layers import LengthProjection
from keras_attn.layers import LinformerAttention
from keras_attn.layers import Synthesizer
from tests.distribution.examples import EXAMPLES
from tests.distribution.examples import make
from tests.layers.cases import CASES
from tests.layers.cases import Case

# the weights that are split in layers without `AttentionLayer` for a base, by
# the axis that is split
SPLIT = {
    "Boom": {"up/kernel": 1, "up/bias": 0},
    "LAMA": {
        "context_kernel": 1,
        "input_kernel": 1,
        "hidden/kernel": 1,
        "hidden/bias": 0,
    },
    "SingleHeadAttention": {
        "query/kernel": 1,
        "query/bias": 0,
        "value_gate/kernel": 1,
        "value_gate/bias": 0,
    },
    "ChannelAttention": {},
    "SpatialAttention": {},
    "CBAM": {},
}
SPLIT["SHARNNBlock"] = {
    f"{parent}/{path}": axis
    for parent, cls in (("boom", "Boom"), ("attention", "SingleHeadAttention"))
    for path, axis in SPLIT[cls].items()
}


# what the options of `CASES` do not build
MORE_CASES = [
    Case(
        LinformerAttention,
        {
            "max_length": 13,
            "projected_length": 5,
            "sharing": "none",
            "projection": "convolution",
        },
    ),
    Case(
        Synthesizer,
        {"max_length": 16, "kind": "factorized_dense", "hidden_dim": 0},
    ),
]


def mesh():
    devices = [f"cpu:{i}" for i in range(8)]
    return keras.distribution.DeviceMesh((2, 4), ["batch", "model"], devices)


def split_axis(layouts, path):
    """The axis of a weight that is split, or `None`."""
    layout = layouts[path]
    if layout is None:
        return None
    assert layout.axes[-1] == "model" and not any(layout.axes[:-1])
    return len(layout.axes) - 1


@pytest.mark.parametrize("case", [*CASES, *MORE_CASES], ids=str)
def test_every_axis_of_heads_is_split(case):
    layouts, layer = layout_map(mesh()), case.layer()
    with keras.StatelessScope():  # without values for the weights
        layer.build((None, 11, 13))
    for weight in layer.weights:
        shape = tuple(weight.shape)
        expected = shape.index(3) if 3 in shape else None  # 3 heads
        for path in (weight.path, f"model/block_1/{weight.path}"):
            assert split_axis(layouts, path) == expected, path


@pytest.mark.parametrize(
    "example", [e for e in EXAMPLES if str(e) in SPLIT], ids=str
)
def test_other_layers_are_split_where_it_pays(example):
    layouts, layer = layout_map(mesh()), make(example)
    actual = {
        w.path.split("/", 1)[1]: split_axis(layouts, f"model/{w.path}")
        for w in layer.weights
    }
    expected = dict.fromkeys(actual)
    expected.update(SPLIT[str(example)])
    assert actual == expected


@pytest.mark.parametrize("num_heads", [None, 3])
def test_projections_of_the_length_are_split_if_heads_have_their_own(num_heads):
    layer = LengthProjection(11, 5, num_heads=num_heads)
    layer.build((None, 11, 13))
    (weight,) = layer.weights
    axis = None if num_heads is None else 0
    assert split_axis(layout_map(mesh()), weight.path) == axis


def test_layers_may_be_left_whole():
    layouts = layout_map(mesh(), replicated=["odd", "a+"])
    for path in ("odd", "model/odd", "odd/attention", "model/a+"):
        assert layouts[f"{path}/query/kernel"] is None
        assert layouts[f"{path}/query/bias"] is None
    for path in ("odd_1", "model/an_odd", "oddity/attention", "aa"):
        assert split_axis(layouts, f"{path}/query/kernel") == 1
        assert split_axis(layouts, f"{path}/query/bias") == 0


def test_axis_of_the_mesh_may_have_another_name():
    devices = keras.distribution.DeviceMesh((1,), ["heads"], ["cpu:0"])
    layouts = layout_map(devices, "heads")
    assert layouts["layer/query/kernel"].axes == (None, "heads")
    with pytest.raises(ValueError, match="'heads'.*model_axis='model'"):
        layout_map(devices)
