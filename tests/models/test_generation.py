import numpy as np
import pytest
from keras import ops

from keras_attn import models
from keras_attn.models.generation import sample
from tests.backend import quick
from tests.backend import run
from tests.backend import to_numpy


def make_model(vocabulary_size=11, **kwargs):
    model = models.SHARNN(
        vocabulary_size, 6, 12, num_layers=2, memory_length=200, **kwargs
    )
    if model.stateful:
        model.build((3, None))
    rng = np.random.default_rng(0)
    for weight in model.trainable_weights:
        weight.assign(0.7 * rng.normal(size=weight.shape))
    return model


@pytest.fixture(scope="module")
def model():
    return make_model()


@pytest.mark.parametrize("prompt_length", [1, 70])
def test_text_is_that_of_full_evaluation(model, prompt_length):
    prompt = np.random.default_rng(0).integers(11, size=(2, prompt_length))
    evaluate = quick(lambda x: model(x))

    def logits_of(text):
        logits = evaluate(ops.convert_to_tensor(text[:, :-1].astype("int32")))
        return to_numpy(logits)[:, prompt_length - 1 :]

    text = model.generate(prompt, 40, temperature=0)
    assert text.shape == (2, prompt_length + 40)
    np.testing.assert_array_equal(text[:, :prompt_length], prompt)
    np.testing.assert_array_equal(
        logits_of(text).argmax(axis=-1), text[:, prompt_length:]
    )
    alone = model.generate(prompt[1].tolist(), 40, temperature=0)
    np.testing.assert_array_equal(alone, text[1])

    # greedy texts are monotonous, and would look the same with another past
    text = model.generate(prompt, 40, temperature=8.0, seed=0)
    new = text[:, prompt_length:]
    assert len(np.unique(new)) > 5
    draws = np.random.default_rng(0).random((40, 2), dtype="float32")
    expected = run(
        sample,
        logits_of(text).reshape(-1, 11),
        draws.T.reshape(-1),
        np.float32(8.0),
        np.int32(11),
        np.float32(1.0),
    )
    np.testing.assert_array_equal(new, expected.reshape(2, 40))


def test_seeds_and_streaming(model):
    pieces = []
    text = model.generate([1, 2], 40, seed=3, stream=pieces.append)
    np.testing.assert_array_equal(np.concatenate(pieces), text[2:])
    assert len(pieces) > 1
    np.testing.assert_array_equal(model.generate([1, 2], 40, seed=3), text)
    assert (model.generate([1, 2], 40, seed=4) != text).any()
    # a text of another length begins alike
    np.testing.assert_array_equal(model.generate([1, 2], 7, seed=3), text[:9])
    np.testing.assert_array_equal(model.generate([1, 2], 0), [1, 2])


def test_top_k_and_low_temperature_are_greedy(model):
    greedy = model.generate([1, 2], 40, temperature=0)
    for options in ({"top_k": 1}, {"top_p": 1e-6}, {"temperature": 1e-4}):
        np.testing.assert_array_equal(
            model.generate([1, 2], 40, seed=0, **options), greedy
        )


def test_strings_are_bytes():
    model = make_model(256)
    pieces = []
    text = model.generate("grün", 40, seed=0, stream=pieces.append)
    assert text.startswith("grün")
    tokens = model.generate(list("grün".encode()), 40, seed=0)
    assert bytes(tokens.tolist()).decode(errors="replace") == text
    assert all(isinstance(piece, str) for piece in pieces)


def test_variables_of_a_stateful_model_are_left_alone():
    model = make_model(stateful=True)
    x = np.random.default_rng(0).integers(11, size=(3, 5), dtype="int32")
    model(x)
    before = [to_numpy(weight.value) for weight in model.weights]
    text = model.generate([1, 2], 5, temperature=0)  # and of another batch
    for weight, value in zip(model.weights, before, strict=True):
        np.testing.assert_array_equal(to_numpy(weight.value), value)
    expected = make_model().generate([1, 2], 5, temperature=0)
    np.testing.assert_array_equal(text, expected)


def draw(logits, random, temperature=1.0, top_k=4, top_p=1.0):
    logits = np.repeat([logits], len(random), axis=0).astype("float32")
    options = [np.float32(temperature), np.int32(top_k), np.float32(top_p)]
    return run(
        lambda x, r: sample(x, r, *options),
        logits,
        np.asarray(random, "float32"),
    ).tolist()


def test_sampling_by_hand():
    # the likeliest first: token 2 with 0.5, 0 with 0.25, 3 with 0.15, 1
    logits = np.log([0.25, 0.1, 0.5, 0.15])
    random = [0.0, 0.49, 0.51, 0.74, 0.76, 0.89, 0.91, 0.9999]
    assert draw(logits, random) == [2, 2, 0, 0, 3, 3, 1, 1]
    # the first two share the line as 2 : 1
    expected = [2, 2, 2, 0, 0, 0, 0, 0]
    assert draw(logits, random, top_k=2) == expected
    # 0.5 is not enough, 0.75 is
    assert draw(logits, random, top_p=0.6) == expected
    assert draw(logits, random, top_p=0.5 - 1e-3) == [2] * 8
    # squared, 0.5 grows to 0.25 / 0.345 = 0.725
    assert draw(logits, [0.72, 0.73], temperature=0.5) == [2, 0]


def test_bad_arguments_are_refused(model):
    for prompt in ([], [0.5], [[[1]]]):
        with pytest.raises(ValueError, match="`prompt`"):
            model.generate(prompt, 5)
    with pytest.raises(ValueError, match="vocabulary_size=11"):
        model.generate("text", 5)
    for options, name in (
        ({"max_new_tokens": -1}, "max_new_tokens"),
        ({"temperature": -0.1}, "temperature"),
        ({"top_k": 0}, "top_k"),
        ({"top_p": 0.0}, "top_p"),
    ):
        with pytest.raises(ValueError, match=name):
            model.generate([1], **{"max_new_tokens": 5, **options})
