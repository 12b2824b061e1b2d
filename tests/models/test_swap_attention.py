import functools

import keras
import numpy as np
import pytest

import keras_attn
from keras_attn import swap_attention
from keras_attn.models.swap_attention import _Holder
from keras_attn.models.swap_attention import _register
from tests.backend import few
from tests.backend import run
from tests.backend import to_numpy

FEATURES = 12


def randomize(model):
    rng = np.random.default_rng(0)
    for weight in model.weights:
        weight.assign(weight + 0.3 * rng.normal(size=weight.shape))
    return model


def sequence(length=7, seed=0):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(2, length, FEATURES)).astype("float32")


def output(model, *inputs):
    # a function of its own each time, for JAX would take old weights again
    return run(lambda *x: model(list(x)), *inputs)


def attention(name, **options):
    return keras.layers.MultiHeadAttention(3, 4, name=name, **options)


def network(**options):
    """A model of a sequence, of one that it attends to, and of a mask."""
    x = inputs = keras.Input((None, FEATURES), name="inputs")
    context = keras.Input((None, FEATURES), name="context")
    mask = keras.Input((None, None), dtype="bool", name="mask")
    x = x + attention("self", **options)(x, x, x, use_causal_mask=True)
    x = keras.layers.LayerNormalization(name="norm")(x)
    x = (
        x
        + attention("cross")(
            x, context, attention_mask=mask, return_attention_scores=True
        )[0]
    )
    inner = keras.Input((None, FEATURES))
    grouped = keras.layers.GroupQueryAttention(4, 6, 2, name="grouped")
    nested = keras.Model(inner, grouped(inner, value=inner), name="nested")
    x = nested(nested(x))
    return randomize(keras.Model([inputs, context, mask], x))


def test_a_network_computes_what_it_did():
    old = network()
    new, report = swap_attention(old, keras_attn.MultiHeadAttention)
    mask = np.random.default_rng(3).random((2, 7, 5)) < 0.7
    inputs = sequence(), sequence(5, seed=1), mask
    expected = output(old, *inputs)
    np.testing.assert_allclose(output(new, *inputs), expected, atol=2e-4)
    assert [swap.path for swap in report] == ["self", "cross", "nested/grouped"]
    assert all(swap.carried and not swap.dropped for swap in report)
    assert not any(swap.fresh for swap in report)
    # the networks share nothing
    before = old.get_weights()
    for weight in new.weights:
        weight.assign(np.zeros(weight.shape))
    for array, same in zip(old.get_weights(), before, strict=True):
        np.testing.assert_array_equal(array, same)


def test_only_what_is_selected_is_replaced():
    old = network(value_dim=5)
    new, report = swap_attention(
        old,
        functools.partial(
            keras_attn.LongformerAttention, window_size=4, num_global_tokens=1
        ),
        select=lambda path: path.endswith("self"),
    )
    (swap,) = report
    layer = new.get_layer("self")
    assert isinstance(layer, keras_attn.LongformerAttention)
    assert layer.value_dim == 5
    kept = new.get_layer("nested").get_layer("grouped")
    assert isinstance(kept, keras.layers.GroupQueryAttention)
    # global tokens start like the others
    for dense in (layer.query_dense, layer.query_global_dense):
        np.testing.assert_array_equal(
            to_numpy(dense.kernel.value),
            to_numpy(old.get_layer("self").query_dense.kernel.value),
        )
    assert "query_global/kernel" in swap.carried


def test_the_report_tells_what_is_lost():
    x = inputs = keras.Input((None, FEATURES))
    # the key is that of the value, which those without keys may ignore
    old = keras.Model(inputs, attention("a")(x, x, x))
    _, report = swap_attention(old, keras_attn.LSHAttention)
    assert str(report[0]) == (
        "a: MultiHeadAttention -> LSHAttention; carried: query/kernel, "
        "query/bias, value/kernel, value/bias, attention_output/kernel, "
        "attention_output/bias; fresh: rotations; "
        "dropped: key/kernel, key/bias"
    )
    _, report = swap_attention(
        old,
        lambda num_heads, key_dim, **shared: keras_attn.MultiHeadAttention(
            num_heads, key_dim=5, **{**shared, "value_dim": 4}
        ),
    )
    assert report[0].fresh == report[0].dropped
    assert report[0].fresh == (
        "query/kernel",
        "query/bias",
        "key/kernel",
        "key/bias",
    )


@keras.saving.register_keras_serializable("tests")
class Encoder(keras.layers.Layer):
    """A layer that makes its attention in its own time."""

    def __init__(self, early=True, deep=False, **kwargs):
        super().__init__(**kwargs)
        self.early, self.deep = early, deep
        self.attention = attention("attention") if early else None
        self.dense = keras.layers.Dense(FEATURES, name="dense")
        self.inner = [Encoder()] if deep else []

    def build(self, input_shape):
        if not self.early:
            self.attention = attention("attention")
        self.attention.build(input_shape, input_shape)
        self.dense.build(input_shape)

    def call(self, inputs):
        x = self.dense(self.attention(inputs, inputs))
        for layer in self.inner:
            x = layer(x)
        return x

    def get_config(self):
        config = {"early": self.early, "deep": self.deep}
        return {**super().get_config(), **config}


@pytest.mark.parametrize("early", few([False, True]))
def test_attention_inside_of_a_layer(early, tmp_path):
    old = keras.Sequential(
        [keras.Input((None, FEATURES)), Encoder(early, name="encoder")]
    )
    randomize(old)
    new, report = swap_attention(old, keras_attn.MultiHeadAttention)
    assert [swap.path for swap in report] == ["encoder/attention"]
    layer = new.get_layer("encoder")
    assert isinstance(layer, Encoder)
    assert isinstance(layer.attention, keras_attn.MultiHeadAttention)
    assert len(new.weights) == len(old.weights)
    x = sequence()
    expected = run(lambda x: old(x), x)
    np.testing.assert_allclose(run(lambda x: new(x), x), expected, atol=2e-5)
    # another process knows of no class that was made here
    new.save(tmp_path / "model.keras")
    _register(_Holder)
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    np.testing.assert_allclose(run(lambda x: loaded(x), x), expected, atol=2e-5)
    copy = keras.models.clone_model(loaded)
    attends = copy.get_layer("encoder").attention
    assert isinstance(attends, keras_attn.MultiHeadAttention)


def test_an_encoder_of_keras_hub(tmp_path):
    import keras_hub

    old = keras_hub.models.BertBackbone(
        vocabulary_size=11,
        num_layers=1,
        num_heads=3,
        hidden_dim=FEATURES,
        intermediate_dim=5,
        max_sequence_length=9,
    )
    randomize(old)
    new, report = swap_attention(
        old,
        functools.partial(keras_attn.SlidingWindowAttention, window_size=16),
    )
    assert report[0].path == "transformer_layer_0/self_attention_layer"
    encoder = new.get_layer("transformer_layer_0")
    assert isinstance(encoder, keras_hub.layers.TransformerEncoder)
    new.save(tmp_path / "model.keras")
    new = keras.saving.load_model(tmp_path / "model.keras")
    inputs = {
        "token_ids": np.random.default_rng(1).integers(11, size=(2, 9)),
        "segment_ids": np.zeros((2, 9), "int32"),
        "padding_mask": np.arange(9) < [[9], [6]],
    }
    # the window sees all, but for padding, which comes as `attention_mask`
    expected = run(lambda x: old(x), inputs)["sequence_output"]
    actual = run(lambda x: new(x), inputs)["sequence_output"]
    np.testing.assert_allclose(actual, expected, atol=2e-5)


def test_a_decoder_of_keras_hub():
    import keras_hub

    inputs = keras.Input((None, FEATURES))
    decoder = keras_hub.layers.TransformerDecoder(5, 3, name="decoder")
    old = randomize(keras.Model(inputs, decoder(inputs)))
    new, report = swap_attention(old, keras_attn.MultiHeadAttention)
    assert report[0].old == "CachedMultiHeadAttention"
    x = sequence()
    expected = run(lambda x: old(x), x)
    np.testing.assert_allclose(run(lambda x: new(x), x), expected, atol=2e-5)
    cache = np.zeros((2, 2, 7, 3, 4), "float32")
    with pytest.raises(ValueError, match="does not support `cache`"):
        new.get_layer("decoder")(
            x,
            self_attention_cache=cache,
            self_attention_cache_update_index=np.zeros((), "int32"),
        )
    # its causality is an `attention_mask` of all pairs
    new, _ = swap_attention(old, keras_attn.LinearAttention)
    with pytest.raises(ValueError, match="does not support `attention_mask`"):
        new(x)


def model_of(layer):
    inputs = keras.Input((None, FEATURES))
    x = layer(inputs) if isinstance(layer, Encoder) else layer(inputs, inputs)
    return keras.Model(inputs, x)


def test_what_cannot_be_replaced_is_refused():
    factory = keras_attn.MultiHeadAttention
    old = model_of(attention("a"))
    once = factory(3, 4)
    for model, arguments, message in [
        (old, {"factory": once.name}, "`factory`. Received: factory='multi"),
        (old, {"factory": lambda **_: None}, "new layer.*None for layer `a`"),
        (old, {"select": lambda path: False}, "`select` returns `True`"),
        (model_of(Encoder(deep=True, name="e")), {}, r"no deeper.*`e/inner\[0"),
        (model_of(attention("g", use_gate=True)), {}, "`use_gate=True`.*`g`"),
        (keras.Sequential(), {}, "functional model, or a sequential"),
    ]:
        with pytest.raises(ValueError, match=message):
            swap_attention(model, **{"factory": factory, **arguments})
    images = keras.Input((4, 5, FEATURES))
    axes = attention("axes", attention_axes=(2,))
    with pytest.raises(ValueError, match=r"`attention_axes=\(2,\)`.*`axes`"):
        swap_attention(keras.Model(images, axes(images, images)), factory)
    x = inputs = keras.Input((None, FEATURES))
    for name in "ab":
        x = attention(name)(x, x)
    twice = keras.Model(inputs, x)
    with pytest.raises(ValueError, match="in each call"):
        swap_attention(twice, lambda **_: once)
