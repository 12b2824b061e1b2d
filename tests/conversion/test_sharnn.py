"""What the golden tests of the layers do not see of the converter."""

import numpy as np
import pytest

from keras_attn import layers
from keras_attn.conversion import sharnn_weights
from keras_attn.models import SHARNN
from tests import golden
from tests.backend import few
from tests.backend import to_numpy

ARRAYS = golden.load("sharnn_lm_segments")


def model(**options):
    options = {"num_layers": 4, "attention_layers": [2], **options}
    return SHARNN(23, 16, **options)


def test_a_part_of_a_model_and_the_state_of_a_stateful_one():
    block = layers.SHARNNBlock(64, attention=False, stateful=True)
    block.build((2, None, 16))
    states = [w for w in block.weights if not w.trainable]
    assert states
    for weight in states:
        weight.assign(3 * np.ones(weight.shape))
    block.set_weights(sharnn_weights(ARRAYS, block, "weight.blocks.3."))
    for weight in states:
        np.testing.assert_array_equal(to_numpy(weight.value), 3)
    part = layers.Boom(64)
    part.build((None, None, 16))
    part.set_weights(sharnn_weights(ARRAYS, part, "weight.blocks.3.ff."))
    np.testing.assert_array_equal(
        part.get_weights()[0], ARRAYS["weight.blocks.3.ff.linear1.weight"].T
    )


@pytest.mark.parametrize(
    ("options", "message"),
    few(
        [
            ({"num_layers": 3}, "finds 4 blocks.*num_layers=3"),
            (
                {"attention_layers": "all"},
                r"\[2\] attend.*\[0, 1, 2, 3\] attend",
            ),
            ({"attention_layers": "none"}, r"\[2\] attend.*\[\] attend"),
            ({"value_gate": "vector"}, "value_gate='overparam'"),
            (
                {"intermediate_dim": 32},
                r"shape \(16, 64\).*shape\s*\(16, 32\)",
            ),
            ({"tie_weights": False}, "no weight 'weight.decoder.weight'"),
        ]
    ),
)
def test_a_model_of_another_kind_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        sharnn_weights(ARRAYS, model(**options), "weight.")


def test_a_layer_of_another_paper_is_refused():
    layer = layers.LinearAttention(2, 3)
    with pytest.raises(ValueError, match="`SHARNN`.*LinearAttention"):
        sharnn_weights(ARRAYS, layer)
