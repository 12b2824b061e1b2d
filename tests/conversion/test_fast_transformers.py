import numpy as np
import pytest

import keras_attn
from keras_attn.conversion import fast_transformers_weights
from tests import golden
from tests.backend import few
from tests.backend import run

KINDS = {
    "fast_transformers_linear": keras_attn.LinearAttention,
    "fast_transformers_causal": keras_attn.LinearAttention,
    "fast_transformers_full": keras_attn.MultiHeadAttention,
}


@pytest.mark.parametrize("name", few(golden.names("fast_transformers_*")))
def test_equals_fast_transformers(name):
    """Data of `pytorch-fast-transformers` 0.4.0, with random weights."""
    data = golden.load(name)
    heads = int(data["heads"])
    key_dim, value_dim = (
        len(data[f"weight.{part}_projection.bias"]) // heads
        for part in ("key", "value")
    )
    layer = KINDS[name](heads, key_dim, value_dim=value_dim)
    layer.build(data["x"].shape)
    layer.set_weights(fast_transformers_weights(data, heads, "weight."))
    padding = np.arange(data["x"].shape[1]) < data["lengths"][:, None]
    output = run(
        lambda x: layer(x, mask=padding, use_causal_mask="causal" in name),
        data["x"],
    )
    # padding has queries too there
    np.testing.assert_allclose(
        output[padding], data["out"][padding], rtol=0, atol=2e-5
    )


def test_random_features_are_refused():
    data = golden.load("fast_transformers_linear")
    data["weight.inner_attention.feature_map.omega"] = np.ones((4, 8))
    with pytest.raises(ValueError, match="omega"):
        fast_transformers_weights(data, 3, "weight.")
