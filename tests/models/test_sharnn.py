import keras
import numpy as np
import pytest
from keras import ops

from keras_attn import models
from tests import golden
from tests.backend import run
from tests.backend import to_numpy
from tests.backend import weight_gradients
from tests.golden.sharnn import load_weights
from tests.golden.sharnn import named_gradients

FILES = ["sharnn_lm_segments", "sharnn_lm_untied_two_segments"]
TOLERANCE = {"rtol": 1e-4, "atol": 1e-4}


def golden_case(name):
    """The model with the golden weights, its segments, and the arrays."""
    arrays = golden.load(name)
    vocabulary_size, width = arrays["weight.encoder.weight"].shape
    model = models.SHARNN(
        vocabulary_size,
        width,
        num_layers=int(arrays["option.layers"]),
        attention_layers=arrays["option.attention_layers"].tolist(),
        memory_length=int(arrays["option.max_positions"])
        if "lm_seg" in name
        else 20,
        tie_weights=bool(arrays["option.tied"]),
    )
    load_weights(model, arrays)
    segments = [
        {
            key.removeprefix(f"segment{index}."): np.swapaxes(value, -3, -2)
            if value.ndim == 3 and "hidden" not in key
            else value.T
            if value.ndim == 2
            else value
            for key, value in arrays.items()
            if key.startswith(f"segment{index}.")
        }
        for index in range(int(arrays["option.segments"]))
    ]
    return model, segments, arrays


def advance(model, token_ids, state, **kwargs):
    """Calls the model, compiled on JAX, and returns NumPy arrays."""
    return run(lambda x: model(x, state=state, **kwargs), token_ids)


def cross_entropy(targets, logits):
    return keras.losses.sparse_categorical_crossentropy(
        targets, logits, from_logits=True
    )


@pytest.mark.parametrize("name", FILES)
def test_golden_segments(name):
    model, segments, arrays = golden_case(name)
    attending = int(arrays["option.attention_layers"][0])
    state = model.initial_state(len(segments[0]["input.tokens"]))
    for segment in segments:
        logits, state = advance(model, segment["input.tokens"], state)
        np.testing.assert_allclose(
            logits, segment["expected.logits"], **TOLERANCE
        )
        loss = np.mean(
            to_numpy(cross_entropy(segment["input.targets"], logits))
        )
        np.testing.assert_allclose(
            loss, segment["expected.mean_cross_entropy"], rtol=1e-5
        )
        for index, entry in enumerate(state):
            for part, letter in (("hidden", "h"), ("cell", "c")):
                np.testing.assert_allclose(
                    entry[part],
                    segment[f"expected.hidden_{letter}{index}"][0],
                    **TOLERANCE,
                )
        memory = segment[f"expected.memory{attending}"]
        kept = memory.shape[1]
        np.testing.assert_array_equal(state[attending]["memory_used"], kept)
        np.testing.assert_allclose(
            state[attending]["memory"][:, -kept:], memory, **TOLERANCE
        )


@pytest.mark.parametrize("name", FILES)
def test_golden_gradients(name):
    model, segments, arrays = golden_case(name)
    pairs = named_gradients(model, arrays, "grad.weight.")
    assert len(pairs) >= 10
    total = sum(segment["input.tokens"].size for segment in segments)

    def loss():
        state = model.initial_state(len(segments[0]["input.tokens"]))
        losses = []
        for segment in segments:
            logits, state = model(segment["input.tokens"], state=state)
            losses.append(
                ops.sum(cross_entropy(segment["input.targets"], logits))
            )
        return sum(losses) / total

    actual = weight_gradients(loss, [weight for weight, _ in pairs])
    for gradient, (weight, expected) in zip(actual, pairs, strict=True):
        tolerance = 1e-4 * np.abs(expected).max()
        np.testing.assert_allclose(
            gradient, expected, atol=tolerance, rtol=0, err_msg=weight.path
        )


def make_model(**kwargs):
    """A small model whose weights are not the initial ones."""
    arguments = {
        "vocabulary_size": 11,
        "hidden_dim": 6,
        "intermediate_dim": 12,
        "num_layers": 2,
        "memory_length": 40,
    }
    model = models.SHARNN(**{**arguments, **kwargs})
    if model.stateful:
        model.build((2, None))
    rng = np.random.default_rng(0)
    for weight in model.trainable_weights:
        weight.assign(0.5 * rng.normal(size=weight.shape))
    return model


def tokens(*shape, seed=0, size=11):
    return np.random.default_rng(seed).integers(size, size=shape, dtype="int32")


@pytest.mark.parametrize(
    ("preset", "published"),
    [
        ("sha_lstm", None),
        ("sha_rnn_single_head", None),
        ("sha_rnn_head_per_layer", 63_272_141),
    ],
)
def test_number_of_parameters(preset, published):
    model = models.SHARNN.from_preset(preset)
    width, vocabulary, layers = 1024, 205, 4
    heads = {"sha_lstm": 0, "sha_rnn_single_head": 1}.get(preset, layers)
    lstm = 8 * width**2 + 4 * width
    boom = 4 * width**2 + 4 * width
    block = lstm + boom + 3 * 2 * width
    head = (width**2 + width) + 2 * width + 3 * width + 2 * 2 * width
    gate = 2 * width**2 + 2 * width
    expected = vocabulary * (width + 1) + layers * block + heads * head
    assert model.count_params() == expected + heads * gate
    if heads:
        assert model.collapse().count_params() == expected
    # The author's program has a second bias in each LSTM, which adds nothing,
    # and 24 vectors that it never uses.
    surplus = layers * 4 * width + 24 * width
    figures = {0: (50.64, 50.64), 1: (51.70, 53.80), 4: (54.88, 63.27)}[heads]
    for count, figure in zip(
        (expected, expected + heads * gate), figures, strict=True
    ):
        assert round((count + surplus) / 1e6, 2) == figure
    if published is not None:
        assert model.count_params() + surplus == published


def test_presets_can_be_changed():
    model = models.SHARNN.from_preset(
        "sha_rnn_single_head",
        vocabulary_size=11,
        hidden_dim=8,
        intermediate_dim=16,
    )
    assert [block.attention for block in model.blocks] == [0, 0, 1, 0]
    assert model(tokens(2, 3)).shape == (2, 3, 11)
    with pytest.raises(ValueError, match="sha_rnn_single_head"):
        models.SHARNN.from_preset("gpt")


@pytest.mark.parametrize(
    ("num_layers", "attention_layers", "expected"),
    [
        (3, "penultimate", [0, 1, 0]),
        (1, "penultimate", [1]),
        (3, "all", [1, 1, 1]),
        (3, "none", [0, 0, 0]),
        (3, [0, 2], [1, 0, 1]),
        (3, [], [0, 0, 0]),
    ],
)
def test_layers_that_attend(num_layers, attention_layers, expected):
    model = models.SHARNN(
        11, 6, num_layers=num_layers, attention_layers=attention_layers
    )
    assert [block.attention for block in model.blocks] == expected


def test_collapsed_model_gives_the_same_logits():
    model = make_model(attention_layers="all")
    x = tokens(2, 5)
    np.testing.assert_allclose(
        run(model.collapse(), x), run(model, x), rtol=1e-4, atol=1e-5
    )
    with pytest.raises(ValueError, match="can collapse"):
        model.collapse().collapse()


def test_padding_may_be_anywhere():
    model = make_model()
    x, history = tokens(2, 8), tokens(2, 5, seed=1)
    _, before = advance(model, history, model.initial_state(2))
    mask = np.array(
        [[0, 0, 1, 1, 1, 1, 1, 1], [1, 1, 0, 1, 0, 1, 0, 0]], dtype=bool
    )
    padded = np.where(mask, x, -1)
    logits, scores, state = advance(
        model, padded, before, padding_mask=mask, return_attention_scores=True
    )
    for row in range(2):
        alone = [
            {name: value[row : row + 1] for name, value in entry.items()}
            for entry in before
        ]
        expected, weights, after = advance(
            model,
            x[row : row + 1, mask[row]],
            alone,
            return_attention_scores=True,
        )
        np.testing.assert_allclose(
            logits[row, mask[row]], expected[0], **TOLERANCE
        )
        for ours, theirs in zip(state, after, strict=True):
            for name in theirs:
                np.testing.assert_allclose(
                    ours[name][row], theirs[name][0], **TOLERANCE
                )
        own = scores[0][row, 0][mask[row]][:, -8:][:, mask[row]]
        length = mask[row].sum()
        np.testing.assert_allclose(
            own, weights[0][0, 0, :, -length:], **TOLERANCE
        )
    assert np.isfinite(logits).all()


def test_tied_weights_occur_once_also_after_loading(tmp_path):
    x = tokens(2, 5)
    for tie_weights, count in ((True, 1), (False, 2)):
        model = make_model(tie_weights=tie_weights)
        path = tmp_path / f"{tie_weights}.keras"
        model.save(path)
        loaded = keras.saving.load_model(path)
        for candidate in (model, loaded):
            names = [weight.path for weight in candidate.weights]
            assert len(set(names)) == len(names)
            assert sum("embeddings" in name for name in names) == count
        np.testing.assert_allclose(
            to_numpy(loaded(x)), to_numpy(model(x)), rtol=1e-5, atol=1e-5
        )
    # a change of the embedding reaches both ends of the loaded model
    model = keras.saving.load_model(tmp_path / "True.keras")
    model.embedding.embeddings.assign(
        ops.zeros_like(ops.convert_to_tensor(model.embedding.embeddings))
    )
    np.testing.assert_allclose(
        to_numpy(model(x))[0, 0], to_numpy(model.output_bias.value), atol=1e-6
    )


def test_weights_of_a_stateful_model_fit_other_batches(tmp_path):
    x = tokens(2, 5)
    model = make_model(stateful=True)
    model(x, training=True)
    path = tmp_path / "model.weights.h5"
    model.save_weights(path)

    same = make_model(stateful=True)
    same.load_weights(path)  # state included
    np.testing.assert_allclose(
        to_numpy(same(x, training=True)),
        to_numpy(model(x, training=True)),
        **TOLERANCE,
    )
    plain = make_model()
    plain.load_weights(path)
    model.reset_state()
    np.testing.assert_allclose(
        to_numpy(plain(x)), to_numpy(model(x)), **TOLERANCE
    )
    single = models.SHARNN(11, 6, 12, num_layers=2, stateful=True)
    single.build((1, None))
    single.load_weights(path)
    np.testing.assert_allclose(
        to_numpy(single(x[:1])), to_numpy(plain(x[:1])), **TOLERANCE
    )
    model.save(tmp_path / "model.keras")
    again = keras.saving.load_model(tmp_path / "model.keras")
    assert again.stateful
    np.testing.assert_allclose(
        to_numpy(again(x)), to_numpy(model(x)), **TOLERANCE
    )


def test_config_round_trip():
    model = models.SHARNN(
        11,
        6,
        intermediate_dim=18,
        num_layers=3,
        attention_layers=[0],
        memory_length=9,
        tie_weights=False,
        dropout=0.5,
        embedding_dropout=0.1,
        boom_dropout=0.2,
        output_dropout=0.3,
        num_heads=2,
        activation="relu",
        seed=1,
    )
    config = model.get_config()
    again = models.SHARNN.from_config(config)
    assert again.get_config() == config
    assert config["attention_layers"] == [0]
    rates = [
        again.embedding_dropout_layer.rate,
        again.blocks[0].boom_dropout,
        again.output_dropout_layer.rate,
        again.blocks[0].lstm_dropout,
    ]
    assert rates == [0.1, 0.2, 0.3, 0.5]


def test_dropout_of_embedding_and_output():
    x = tokens(2, 5)
    plain = to_numpy(make_model()(x))
    for rate in ("embedding_dropout", "output_dropout", "dropout"):
        model = make_model(**{rate: 0.5}, seed=1)
        np.testing.assert_allclose(to_numpy(model(x)), plain, **TOLERANCE)
        difference = to_numpy(model(x, training=True)) - plain
        assert np.abs(difference).max() > 1e-3, rate


def test_logits_and_state_are_float32_in_half_precision():
    x = tokens(2, 5)
    model = make_model(dtype="mixed_bfloat16")
    logits, state = model(x, state=model.initial_state(2))
    assert keras.backend.standardize_dtype(logits.dtype) == "float32"
    assert {
        keras.backend.standardize_dtype(leaf.dtype)
        for leaf in keras.tree.flatten(state)
    } == {"float32", "int32"}
    np.testing.assert_allclose(
        to_numpy(logits), to_numpy(make_model()(x)), rtol=0.1, atol=0.3
    )


def test_functional_model_around_it():
    inputs = keras.Input((None,), dtype="int32")
    model = make_model()
    outer = keras.Model(inputs, model(inputs))
    for length in (1, 4):
        x = tokens(2, length)
        np.testing.assert_allclose(
            to_numpy(outer(x)), to_numpy(model(x)), **TOLERANCE
        )


def test_bad_use_is_refused():
    model = make_model()
    x = tokens(2, 5)
    with pytest.raises(ValueError, match="hidden_dim=0"):
        models.SHARNN(11, 0)
    with pytest.raises(ValueError, match="attention_layers='some'"):
        models.SHARNN(11, 6, attention_layers="some")
    with pytest.raises(ValueError, match=r"attention_layers=\[4\]"):
        models.SHARNN(11, 6, attention_layers=[4])
    with pytest.raises(ValueError, match="output_dropout=1.5"):
        models.SHARNN(11, 6, output_dropout=1.5)
    with pytest.raises(ValueError, match="integer tokens"):
        model(x.astype("float32"))
    with pytest.raises(ValueError, match="entry for each"):
        model(x, state=model.initial_state(2)[:1])
    with pytest.raises(ValueError, match="batch of 3"):
        model(x, state=model.initial_state(3))
    with pytest.raises(ValueError, match="attends to anything"):
        make_model(attention_layers="none")(x, return_attention_scores=True)
