import keras
import numpy as np
import pytest

from keras_attn import layers
from keras_attn.models import CBAMResNet
from keras_attn.models import insert_cbam
from tests import backend


def images(*shape, seed=0):
    rng = np.random.default_rng(seed)
    return rng.normal(size=shape).astype("float32")


def network():
    """A functional network with a residual branch, and a layer used twice."""
    inputs = keras.Input((6, 5, 4), name="images")
    conv = keras.layers.Conv2D(4, 3, padding="same", name="conv")
    x = conv(keras.layers.ReLU(name="relu")(conv(inputs)))
    x = keras.layers.BatchNormalization(name="norm")(x)
    x = keras.layers.Add(name="add")([x, inputs])
    x = keras.layers.GlobalAveragePooling2D(name="pool")(x)
    return keras.Model(inputs, keras.layers.Dense(3, name="dense")(x))


def randomize(model):
    for seed, weight in enumerate(model.weights):
        value = 0.3 * images(*weight.shape, seed=seed)
        weight.assign(1 + np.abs(value) if "variance" in weight.path else value)
    return model


def output(model, x):
    # a function of its own each time, for JAX would take old weights again
    return backend.run(lambda x: model(x), x)


def inserted(model):
    kinds = layers.CBAM, layers.ChannelAttention, layers.SpatialAttention
    return [x.name for x in model.layers if isinstance(x, kinds)]


def test_a_network_of_keras_applications_computes_what_it_did():
    old = keras.applications.MobileNetV3Small(
        input_shape=(32, 32, 3), weights=None, classes=5
    )
    randomize(old)
    new = insert_cbam(old, lambda layer: layer.name.endswith("project_bn"))
    assert len(inserted(new)) == 11
    x = 100 * images(2, 32, 32, 3)
    expected = output(old, x)
    assert expected.std() > 1e-3  # or else anything would do
    np.testing.assert_allclose(output(new, x), expected, rtol=1e-5)
    assert new.input_shape == old.input_shape
    assert set(x.name for x in old.layers) <= set(x.name for x in new.layers)


@pytest.mark.parametrize(
    ("after", "names"),
    [
        ("norm", ["norm_attention"]),
        (["add", "relu"], ["relu_attention", "add_attention"]),
        (lambda layer: layer.name == "conv", ["conv_attention"]),
    ],
)
def test_attention_follows_the_chosen_layers(after, names):
    old = randomize(network())
    new = insert_cbam(old, after)
    assert inserted(new) == names
    x = images(2, 6, 5, 4)
    np.testing.assert_allclose(output(new, x), output(old, x), rtol=1e-6)
    # and is in the way of what follows
    for layer in new.layers:
        if layer.name in names:
            layer.channel_attention.strength.assign(1.0)
    assert np.abs(output(new, x) - output(old, x)).max() > 1e-3


def test_no_weight_is_shared_with_the_old_network():
    old = randomize(network())
    before = old.get_weights()
    new = insert_cbam(old, "norm")
    new.compile(keras.optimizers.SGD(0.1), "mse")
    new.fit(images(4, 6, 5, 4), images(4, 3), verbose=0)
    for a, b in zip(old.get_weights(), before, strict=True):
        np.testing.assert_array_equal(a, b)
    assert np.abs(new.get_layer("conv").get_weights()[0] - before[0]).max() > 0
    assert new.get_layer("norm_attention").channel_attention.strength != 0


@pytest.mark.parametrize(
    "attention",
    [
        layers.SpatialAttention(identity_init=True),
        layers.SpatialAttention,
        lambda: layers.ChannelAttention(2),
    ],
)
def test_other_attention(attention):
    new = insert_cbam(network(), ["norm", "add"], attention)
    assert inserted(new) == ["norm_attention", "add_attention"]
    assert not any(isinstance(x, layers.CBAM) for x in new.layers)


def test_sequential_models_and_subclasses():
    x = images(2, 8, 8, 3)
    sequential = keras.Sequential(
        [keras.Input((8, 8, 3)), keras.layers.Conv2D(4, 3, name="conv")]
    )
    resnet = CBAMResNet(18, attention=None, stem="cifar", classes=3)
    for old, name in ((sequential, "conv"), (resnet, "layer1_0_bn2")):
        new = insert_cbam(old, name)
        assert inserted(new) == [f"{name}_attention"]
        np.testing.assert_allclose(output(new, x), output(old, x), rtol=1e-5)


def test_the_new_network_can_be_saved(tmp_path):
    model = randomize(insert_cbam(network(), "norm"))
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    x = images(2, 6, 5, 4)
    np.testing.assert_allclose(output(loaded, x), output(model, x), rtol=1e-5)


def test_unknown_layers_are_refused():
    for after in ("nrom", ["add", "nrom"]):
        with pytest.raises(ValueError, match="`nrom`.*Did you mean norm"):
            insert_cbam(network(), after)
    with pytest.raises(ValueError, match="`images`"):
        insert_cbam(network(), "images")
    with pytest.raises(ValueError, match="at least one"):
        insert_cbam(network(), [])
    with pytest.raises(ValueError, match="no layer for which"):
        insert_cbam(network(), lambda layer: False)


def test_layers_without_a_feature_map_are_refused():
    with pytest.raises(ValueError, match="rank 3, 4 or 5"):
        insert_cbam(network(), "dense")
    inputs = keras.Input((8, 3))
    rnn = keras.layers.GRU(4, return_state=True, name="rnn")
    with pytest.raises(ValueError, match="`after`.*`rnn`"):
        insert_cbam(keras.Model(inputs, rnn(inputs)), "rnn")


def test_models_without_a_graph_are_refused():
    class Subclass(keras.Model):
        def call(self, x):
            return x

    for model in (Subclass(), keras.Sequential(), layers.CBAM()):
        with pytest.raises(ValueError, match="functional model.*`model`"):
            insert_cbam(model, "conv")
    with pytest.raises(ValueError, match="insert_cbam.*`attention`"):
        insert_cbam(network(), "norm", attention="cbam")
