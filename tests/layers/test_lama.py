import json

import keras
import numpy as np
import pytest
from keras import ops

from keras_attn import layers
from tests import golden
from tests.backend import compiled
from tests.backend import gradients
from tests.backend import to_numpy
from tests.reference import low_rank as definitions

VARIANTS = [
    {},
    {"context": "mean", "rank": 2},
    {"num_heads": 1},
    {"hidden_dim": 5, "use_bias": True, "temperature": 0.2},
    {"normalize": False, "activation": "linear"},
]
every_variant = pytest.mark.parametrize("kwargs", VARIANTS, ids=str)


def build(**kwargs):
    return layers.LAMA(**{"num_heads": 3, **kwargs})


def sequence(length=11, batch=2, seed=0):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(batch, length, 13)).astype("float32")


def close(actual, expected, tolerance=1e-5):
    np.testing.assert_allclose(
        to_numpy(actual), to_numpy(expected), rtol=tolerance, atol=tolerance
    )


@pytest.mark.parametrize("name", golden.names("lama_*"))
def test_matches_golden_data(name):
    data = golden.load(name)
    context = "learned" if data["context"].item() == "learned" else "mean"
    rank = int(data.get("rank", 1))
    layer = layers.LAMA(
        data["P"].shape[1] // rank,
        rank=rank,
        context=context,
        normalize=bool(data.get("l2_normalize", True)),
        activation=data.get("activation", np.array("tanh")).item(),
        hidden_dim=data["W_u"].shape[1] if "W_u" in data else None,
        use_bias="bias" in data,
    )
    layer.build(data["x"].shape)
    names = ["c", "P", "Q", "bias", "W_u", "b_u"]
    layer.set_weights([data[name] for name in names if name in data])
    output, scores = layer(
        data["x"], mask=data.get("keep_mask"), return_attention_scores=True
    )
    close(output, data["sentence_matrix"], 2e-5)
    close(scores, data["attention"], 2e-5)


def test_arguments_reach_the_definition():
    x, context = sequence(), sequence(1, seed=1)[:, 0, :7]
    mask = np.arange(11) < [[11], [6]]
    layer = build(
        rank=2, use_bias=True, temperature=0.5, bias_initializer="normal"
    )
    output, scores = layer(x, context, mask=mask, return_attention_scores=True)
    assert [w.shape for w in layer.weights] == [(7, 6), (13, 6), (3,)]
    context_kernel, input_kernel, bias = layer.get_weights()
    expected = definitions.lama(
        x, context, context_kernel, input_kernel, 2, bias, True, 0.5, mask
    )
    close(output, expected[0])
    close(scores, expected[1])


def test_number_of_weights():
    for kwargs, shapes in [
        ({}, [(13,), (13, 3), (13, 3)]),
        ({"context": "mean", "rank": 2}, [(13, 6), (13, 6)]),
        (
            {"hidden_dim": 5, "use_bias": True},
            [(13,), (13, 3), (5, 3), (3,), (13, 5), (5,)],
        ),
    ]:
        layer = build(**kwargs)
        layer.build((None, None, 13))
        assert [w.shape for w in layer.weights] == shapes


@every_variant
def test_symbolic_and_real_outputs_agree(kwargs):
    layer, x = build(**kwargs), sequence()
    symbolic = layer(
        keras.KerasTensor((2, 11, 13)), return_attention_scores=True
    )
    real = layer(x, return_attention_scores=True)
    for a, b in zip(symbolic, real, strict=True):
        assert a.shape == tuple(b.shape)
    close(layer(x), real[0])


@pytest.mark.support("Masks", "padding is invisible", layers=["LAMA"])
@every_variant
def test_padding_is_invisible(kwargs):
    layer, x = build(**kwargs), sequence()
    mask = np.arange(11) < [[11], [6]]
    expected = to_numpy(layer(x, mask=mask))
    close(layer(x[1:, :6]), expected[1:])
    close(layer(x[1:], mask=mask[1:]), expected[1:])
    for content in (1e3, np.nan, np.inf):
        x[~mask] = content
        close(layer(x, mask=mask), expected)
        close(layer(x, inputs_mask=mask.astype("int32")), expected)
    (gradient,) = gradients(
        lambda x: layer(x, mask=ops.convert_to_tensor(mask)), x
    )
    assert np.isfinite(gradient).all() and (gradient[~mask] == 0).all()


@pytest.mark.support("Masks", "attached masks", layers=["LAMA"])
def test_attached_and_explicit_masks_combine():
    tokens = np.array([[5, 3, 8, 1, 2, 7, 0], [5, 3, 8, 1, 6, 0, 0]])
    x = keras.layers.Embedding(9, 13, mask_zero=True)(tokens)
    explicit = np.arange(7) != [[2], [0]]
    layer = build()
    expected = layer(to_numpy(x), mask=(tokens != 0) & explicit)
    close(layer(x, mask=explicit), expected)
    output = layer(x)
    close(output, layer(to_numpy(x), mask=tokens != 0))
    assert getattr(output, "_keras_mask", None) is None
    context = np.ones((2, 13), "float32")
    expected = layer(to_numpy(x), context, mask=tokens != 0)
    close(layer(x, context), expected)


@pytest.mark.support("Masks", "empty rows", layers=["LAMA"])
@every_variant
def test_an_empty_sequence_gives_zeros_and_trains(kwargs):
    inputs = keras.Input((11, 13)), keras.Input((11,), dtype="bool")
    layer = build(**kwargs)
    model = keras.Model(inputs, layer(inputs[0], mask=inputs[1]))
    x, mask = sequence(), np.arange(11) < [[11], [0]]
    close(model([x, mask])[1], np.zeros((layer.num_heads, 13)))
    model.compile(keras.optimizers.SGD(1.0), "mse")
    before = [to_numpy(w.value) for w in model.weights]
    model.fit([x, mask], sequence(layer.num_heads, seed=1), verbose=0)
    for old, weight in zip(before, model.weights, strict=True):
        new = to_numpy(weight.value)
        assert np.isfinite(new).all() and (new != old).any(), weight.path


@every_variant
def test_permuting_positions_permutes_the_weights(kwargs):
    layer, x = build(**kwargs), sequence()
    order = np.random.default_rng(1).permutation(11)
    output, scores = layer(x, return_attention_scores=True)
    output_2, scores_2 = layer(x[:, order], return_attention_scores=True)
    close(output_2, output)
    close(scores_2, to_numpy(scores)[:, :, order])
    close(to_numpy(scores).sum(axis=-1), np.ones((2, layer.num_heads)))


def test_one_position_is_all_there_is_to_read():
    x = sequence(1)
    close(build()(x), np.repeat(x, 3, axis=1))


def test_one_head_is_not_reduced_to_a_sign():
    x = sequence()
    layer = build(num_heads=1, kernel_initializer="ones")
    _, scores = layer(x, return_attention_scores=True)
    assert len(np.unique(to_numpy(scores)[0])) == 11
    literal = build(num_heads=1, normalize=True)
    literal.build(x.shape)
    literal.set_weights(layer.get_weights())
    _, scores = literal(x, return_attention_scores=True)
    assert len(np.unique(to_numpy(scores)[0].round(4))) == 2


def test_temperature_sharpens():
    x = sequence(200)
    layers_ = [
        build(temperature=t, kernel_initializer="ones") for t in (1, 0.1)
    ]
    peaks = []
    for layer in layers_:
        layer.build(x.shape)
        layer.set_weights(layers_[0].get_weights())
        _, scores = layer(x, return_attention_scores=True)
        peaks.append(to_numpy(scores).max())
    assert peaks[0] <= np.e**2 / (np.e**2 + 199) + 1e-6
    assert peaks[1] > peaks[0]


def test_given_context_decides_what_is_read():
    layer, x = build(), sequence()
    context = sequence(1, seed=1)[:, 0]
    output = layer(x, context)
    assert len(layer.weights) == 2
    assert np.abs(to_numpy(layer(x, -context) - output)).max() > 1e-3
    with pytest.raises(ValueError, match="built with a `context`"):
        layer(x)
    close(layer(x[:1], context[:1]), output[:1])


def test_orthogonality_penalty_is_a_loss():
    layer, x = build(orthogonality_penalty=0.5), sequence()
    _, scores = layer(x, return_attention_scores=True)
    scores = to_numpy(scores)
    products = np.einsum("bnt,bmt->bnm", scores, scores) - np.eye(3)
    (loss,) = layer.losses
    close(loss, 0.5 * (products**2).sum(axis=(1, 2)).mean())
    plain = build()
    plain(x)
    assert plain.losses == []


@pytest.mark.support("Saving", "`.keras`, `.weights.h5`", layers=["LAMA"])
@every_variant
def test_configuration_and_saving(kwargs, tmp_path):
    layer = build(
        kernel_initializer="he_normal",
        bias_initializer="ones",
        context_initializer="ones",
        kernel_regularizer="l2",
        bias_regularizer="l1",
        kernel_constraint="max_norm",
        bias_constraint="non_neg",
        orthogonality_penalty=0.1,
        dtype="mixed_bfloat16",
        **kwargs,
    )
    config = layer.get_config()
    json.dumps(config)
    assert layers.LAMA.from_config(config).get_config() == config
    inputs = keras.Input((None, 13))
    model = keras.Model(inputs, build(**kwargs)(inputs))
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    close(loaded(sequence()), model(sequence()))
    for length in (1, 5):
        x = sequence(length)
        close(model.predict(x, verbose=0), model(x))


def test_a_model_with_a_given_context_is_saved(tmp_path):
    inputs = keras.Input((None, 13)), keras.Input((7,))
    model = keras.Model(inputs, build()(*inputs))
    x = [sequence(), sequence(1, seed=1)[:, 0, :7]]
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    close(loaded(x), model(x))


@pytest.mark.support("Compilation", "compiled = eager", layers=["LAMA"])
@every_variant
def test_compiled_equals_eager(kwargs):
    layer, x = build(**kwargs), ops.convert_to_tensor(sequence())
    layer.build(x.shape)
    mask = ops.convert_to_tensor(np.arange(11) < [[11], [6]])
    fast = compiled(lambda x, mask: layer(x, mask=mask))
    close(fast(x, mask), layer(x, mask=mask))


@every_variant
@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_half_precision(kwargs, policy):
    layer, x = build(**kwargs, dtype=policy), sequence()
    mask = np.arange(11) < [[11], [0]]
    output = layer(x, mask=mask)
    dtype = keras.backend.standardize_dtype(output.dtype)
    assert dtype == layer.compute_dtype
    full = build(**kwargs)
    full.build(x.shape)
    full.set_weights(layer.get_weights())
    close(ops.cast(output, "float32"), full(x, mask=mask), tolerance=0.05)


def test_bad_arguments_and_inputs_are_refused():
    for arguments, message in [
        ({"num_heads": 0}, "num_heads=0"),
        ({"rank": 1.5}, "rank=1.5"),
        ({"context": "none"}, "learned.*context='none'"),
        ({"temperature": 0}, "temperature=0"),
        ({"hidden_dim": -1}, "hidden_dim=-1"),
        ({"orthogonality_penalty": -1.0}, "orthogonality_penalty=-1.0"),
    ]:
        with pytest.raises(ValueError, match=message):
            build(**arguments)
    x = sequence()
    for arguments, message in [
        ((x[0],), r"\(batch, length, features\)"),
        ((x, x), r"\(batch, features\)"),
    ]:
        with pytest.raises(ValueError, match=f"LAMA.*{message}"):
            build()(*arguments)
    for mask, message in (
        (np.ones((2, 7), bool), r"`mask` that has the shape \(2, 11\)"),
        (np.ones((2, 11), "float32"), "boolean `mask`"),
    ):
        with pytest.raises(ValueError, match=f"LAMA.*{message}"):
            build()(x, mask=mask)
