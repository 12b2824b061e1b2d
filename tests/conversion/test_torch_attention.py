import numpy as np
import pytest
import torch

import keras_attn
from keras_attn.conversion import torch_attention_weights
from tests.backend import few
from tests.backend import run

HEADS, SIZE = 3, 4
FEATURES = HEADS * SIZE


def original(**options):
    torch.manual_seed(0)
    theirs = torch.nn.MultiheadAttention(
        FEATURES, HEADS, batch_first=True, **options
    ).eval()
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    return theirs


def sequence(length, features, seed):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(2, length, features)).astype("float32")


@pytest.mark.parametrize(
    "options", few([{"kdim": 7, "vdim": 5}, {}, {"bias": False}]), ids=str
)
def test_equals_torch(options):
    theirs = original(**options)
    query = sequence(5, FEATURES, 0)
    value = sequence(6, options.get("vdim", FEATURES), 1)
    key = sequence(6, options.get("kdim", FEATURES), 2)
    padding = np.arange(6) < [[6], [4]]
    hidden = np.random.default_rng(3).random((5, 6)) < 0.3
    ours = keras_attn.MultiHeadAttention(
        HEADS, SIZE, use_bias=options.get("bias", True)
    )
    ours.build(query.shape, value.shape, key.shape)
    ours.set_weights(torch_attention_weights(theirs.state_dict(), HEADS))

    def attend(query, value, key, padding):
        return ours(
            query,
            value,
            key,
            value_mask=padding,
            attention_mask=~hidden,
            return_attention_scores=True,
        )

    output, scores = run(attend, query, value, key, padding)
    with torch.no_grad():
        expected, weights = theirs(
            *map(torch.from_numpy, (query, key, value)),
            key_padding_mask=torch.from_numpy(~padding),
            attn_mask=torch.from_numpy(hidden),
            average_attn_weights=False,
        )
    np.testing.assert_allclose(output, expected.numpy(), atol=2e-5)
    np.testing.assert_allclose(scores, weights.numpy(), atol=2e-5)


def test_a_layer_of_an_encoder():
    encoder = torch.nn.TransformerEncoderLayer(FEATURES, HEADS)
    theirs = encoder.state_dict()
    query, *_ = torch_attention_weights(theirs, HEADS, "self_attn.")
    expected = theirs["self_attn.in_proj_weight"][:FEATURES].T
    np.testing.assert_array_equal(query.reshape(FEATURES, -1), expected)
    with pytest.raises(ValueError, match="no weight .in_proj_weight"):
        torch_attention_weights(theirs, HEADS)
    with pytest.raises(ValueError, match="num_heads=5"):
        torch_attention_weights(theirs, 5, "self_attn.")


def test_a_learned_key_is_refused():
    theirs = original(add_bias_kv=True)
    with pytest.raises(ValueError, match="add_bias_kv=True.*'bias_k'"):
        torch_attention_weights(theirs.state_dict(), HEADS)
