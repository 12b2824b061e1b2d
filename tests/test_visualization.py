import sys

import keras
import matplotlib
import numpy as np
import pytest

import keras_attn
from keras_attn import visualization
from tests.backend import to_numpy

matplotlib.use("agg")


@pytest.fixture(autouse=True)
def closed_figures():
    yield
    matplotlib.pyplot.close("all")


def sequence(length=6, features=8):
    rng = np.random.default_rng(0)
    return rng.normal(size=(2, length, features)).astype("float32")


class Nested(keras.layers.Layer):
    """Two calls of one layer, which hides in a list, one with its scores."""

    def __init__(self):
        super().__init__()
        self.inner = [keras_attn.SlidingWindowAttention(2, 4, window_size=2)]

    def build(self, input_shape):
        self.inner[0].build(input_shape)

    def call(self, inputs):
        x, scores = self.inner[0](inputs, return_attention_scores=True)
        return self.inner[0](x * scores[0, 0, 0, 0])


def test_maps_are_the_scores_of_every_layer_of_a_model():
    x = keras.Input((6, 8))
    ours = keras_attn.MultiHeadAttention(2, 4, name="ours")
    theirs = keras.layers.MultiHeadAttention(2, 4, name="theirs")
    y = ours(x, use_causal_mask=True)
    model = keras.Model(x, theirs(y, y))
    expected = model(sequence())

    maps = visualization.attention_maps(model, sequence())

    assert list(maps) == ["ours", "theirs"]
    y, scores = ours(
        sequence(), use_causal_mask=True, return_attention_scores=True
    )
    np.testing.assert_allclose(maps["ours"], to_numpy(scores), atol=1e-6)
    _, scores = theirs(y, y, return_attention_scores=True)
    np.testing.assert_allclose(maps["theirs"], to_numpy(scores), atol=1e-6)
    # and the model is as it was
    np.testing.assert_array_equal(
        to_numpy(model(sequence())), to_numpy(expected)
    )


def test_maps_of_nested_and_repeated_layers():
    layer = Nested()
    maps = visualization.attention_maps(layer, sequence())
    (first, second) = maps
    assert second == f"{first}:2"
    assert maps[first].shape == (2, 2, 6, 6)


def test_blocks_without_attention_have_no_maps():
    model = keras_attn.models.Transformer(
        vocabulary_size=10,
        hidden_dim=8,
        num_layers=2,
        attention=[None, keras_attn.LinearAttention(2, 4, name="second")],
        max_length=6,
    )
    maps = visualization.attention_maps(model, np.ones((2, 6), "int32"))
    (path,) = maps
    assert path.endswith("second")


def test_maps_leave_the_model_whole_after_an_error():
    layer = keras_attn.MultiHeadAttention(2, 4)
    with pytest.raises(ValueError, match="needs a `query` of shape"):
        visualization.attention_maps(layer, np.ones((2, 3)))
    assert "call" not in vars(layer)


def test_maps_of_a_cbam_are_those_of_its_parts():
    layer = keras_attn.CBAM(reduction_ratio=2, kernel_size=3)
    maps = visualization.attention_maps(layer, np.ones((2, 5, 4, 6)))
    channel, spatial = maps.values()
    assert channel.shape == (2, 6)
    assert spatial.shape == (2, 5, 4)


def test_pattern_of_a_causal_window():
    layer = keras_attn.SlidingWindowAttention(1, 4, window_size=4)
    (pattern,) = visualization.attention_pattern(layer, 5, use_causal_mask=True)
    t, s = np.arange(5)[:, None], np.arange(5)
    np.testing.assert_array_equal(pattern, (s <= t) & (s >= t - 2))
    assert not layer.built


def test_pattern_takes_the_features_of_a_built_layer():
    layer = keras_attn.TopKAttention(2, 4, top_k=3)
    layer.build((None, None, 10))
    pattern = visualization.attention_pattern(layer, 7)
    np.testing.assert_array_equal(pattern.sum(axis=-1), np.full((2, 7), 3))


def test_drawn_pattern_has_a_color_for_each_kind_of_head():
    layer = keras_attn.SlidingWindowAttention(
        3, 4, window_size=2, dilation_rate=(1, 2, 1)
    )
    axes = visualization.plot_attention_pattern(layer, 6)
    texts = [text.get_text() for text in axes.get_legend().get_texts()]
    assert texts == ["heads 0, 2", "head 1"]
    image = axes.images[0].get_array()
    seen = visualization.attention_pattern(layer, 6)
    white = (image == 1).all(axis=-1)
    np.testing.assert_array_equal(white, ~seen.any(axis=0))
    assert len({tuple(c) for c in image[~white]}) == 3  # either, or both


def test_drawn_maps_are_labelled():
    weights = np.random.default_rng(0).uniform(size=(2, 3, 3))
    axes = visualization.plot_attention_maps(
        weights, ["a", "b", "c"], titles=["x", "y"]
    )
    assert [axis.get_title() for axis in axes] == ["x", "y"]
    labels = [label.get_text() for label in axes[1].get_xticklabels()]
    assert labels == ["a", "b", "c"]
    np.testing.assert_array_equal(axes[1].images[0].get_array(), weights[1])
    with pytest.raises(ValueError, match="`keys` must have 3 labels"):
        visualization.plot_attention_maps(weights, keys=["a"])
    with pytest.raises(ValueError, match="Received: weights.shape=\\(3, 3\\)"):
        visualization.plot_attention_maps(weights[0])
    with pytest.raises(ValueError, match="`axes` must be 2. Received: 1"):
        visualization.plot_attention_maps(weights, axes=axes[:1])


def test_drawn_gates_lie_over_their_images():
    gates = np.random.default_rng(0).uniform(size=(2, 3, 4, 1))
    axes = visualization.plot_gates(np.ones((2, 6, 8, 3)), gates)
    for axis, gate in zip(axes, gates, strict=True):
        below, above = axis.images
        np.testing.assert_array_equal(above.get_array(), gate[..., 0])
        assert above.get_extent() == below.get_extent()
    with pytest.raises(ValueError, match="one of each image"):
        visualization.plot_gates(np.ones((3, 6, 8)), gates)


def test_distance_counts_from_the_newest_key():
    # two queries, after a memory of one
    weights = np.array([[[[0.5, 0.5, 0.0], [0.2, 0.3, 0.5]]]])
    mean = visualization.attention_by_distance(weights)
    np.testing.assert_allclose(mean, [0.5, 0.4, 0.2])
    axes = visualization.plot_attention_by_distance(weights, label="block")
    np.testing.assert_allclose(axes.lines[0].get_ydata(), mean)
    with pytest.raises(ValueError, match="at least as many keys"):
        visualization.attention_by_distance(np.ones((1, 1, 3, 2)))


def test_sorted_buckets_make_blocks():
    x = sequence(length=16)
    layer = keras_attn.LSHAttention(2, 4, bucket_size=4, num_buckets=4)
    with pytest.raises(ValueError, match="Only `LSHAttention` has buckets"):
        visualization.lsh_buckets(keras_attn.MultiHeadAttention(2, 4), x)
    layer.build(x.shape)
    before, after = visualization.plot_lsh_buckets(layer, x, head=1)
    buckets = visualization.lsh_buckets(layer, x, head=1)
    images = [to_numpy(axes.images[0].get_array()) for axes in (before, after)]
    # the first row and column show the buckets, here in ascending order
    order = np.argsort(buckets, kind="stable")
    np.testing.assert_array_equal(images[1][0, 1:], images[0][0, 1:][order])
    white = (images[1][1:, 1:] == 1).all(axis=-1)
    chunk = np.arange(16) // 4
    reach = chunk[:, None] - chunk
    assert white[(reach < 0) | (reach > 1)].all()
    assert not white.all()


def test_drawing_without_matplotlib_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match="keras-attn\\[viz\\]"):
        visualization.plot_attention_by_distance(np.ones((1, 1, 2, 2)))
