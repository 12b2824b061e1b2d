import functools

import keras
import numpy as np
import pytest
from keras import ops

from keras_attn import layers
from tests import golden
from tests.backend import compiled
from tests.backend import gradients
from tests.backend import run
from tests.backend import to_numpy
from tests.backend import weight_gradients
from tests.golden.sharnn import load_weights

FILES = [
    "sharnn_block_attention_memory",
    "sharnn_block_no_attention_residual",
]


def golden_case(name):
    """The block with the golden weights, inputs, and the golden arrays."""
    arrays = golden.load(name)
    attention = bool(arrays["option.attention"])
    block = layers.SHARNNBlock(
        intermediate_dim=len(arrays["weight.ff.linear1.bias"]),
        attention=attention,
        memory_length=20,
        residual=bool(arrays["option.residual"]),
    )
    inputs = [
        np.swapaxes(arrays["input.x"], 0, 1),
        arrays["input.hidden_h"][0],
        arrays["input.hidden_c"][0],
    ]
    block.build(inputs[0].shape)
    load_weights(block, arrays)
    if attention:
        memory = np.zeros((2, 20, 16), "float32")
        memory[:, -5:] = np.swapaxes(arrays["input.memory"], 0, 1)
        inputs.append(memory)
    return block, inputs, arrays


def call(block, x, hidden, cell, memory=None):
    state = {"hidden": hidden, "cell": cell}
    if memory is not None:
        used = ops.full((x.shape[0],), 5, dtype="int32")
        state |= {"memory": memory, "memory_used": used}
    return block(x, state=state)


@pytest.mark.parametrize("name", FILES)
def test_golden_outputs(name):
    block, inputs, arrays = golden_case(name)
    output, state = run(lambda *x: call(block, *x), *inputs)
    close = {"rtol": 2e-5, "atol": 2e-5}
    expected = np.swapaxes(arrays["expected.out"], 0, 1)
    np.testing.assert_allclose(output, expected, **close)
    for name, letter in (("hidden", "h"), ("cell", "c")):
        np.testing.assert_allclose(
            state[name], arrays[f"expected.hidden_{letter}"][0], **close
        )
    if block.attention:
        expected = np.swapaxes(arrays["expected.memory"], 0, 1)
        np.testing.assert_array_equal(state["memory_used"], 11)
        np.testing.assert_allclose(state["memory"][:, -11:], expected, **close)


@pytest.mark.parametrize("name", FILES)
def test_golden_gradients_of_the_inputs(name):
    block, inputs, arrays = golden_case(name)
    weights = np.swapaxes(arrays["loss_R"], 0, 1)
    actual = gradients(
        lambda *x: ops.multiply(call(block, *x)[0], weights), *inputs
    )
    expected = [
        np.swapaxes(arrays["grad.x"], 0, 1),
        arrays["grad.hidden_h"][0],
        arrays["grad.hidden_c"][0],
    ]
    if block.attention:
        expected.append(np.swapaxes(arrays["grad.memory"], 0, 1))
        assert not actual[-1][:, :-5].any()
        actual[-1] = actual[-1][:, -5:]
    for gradient, array in zip(actual, expected, strict=True):
        tolerance = 1e-4 * np.abs(array).max()
        np.testing.assert_allclose(gradient, array, atol=tolerance)


def random(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype("float32")


def make_block(**kwargs):
    """A block whose weights are not the initial ones, which hide much."""
    arguments = {"intermediate_dim": 12, "memory_length": 8, **kwargs}
    block = layers.SHARNNBlock(**arguments)
    block.build((2, 5, 6))
    for seed, weight in enumerate(block.trainable_weights):
        weight.assign(0.5 * random(*weight.shape, seed=seed))
    return block


def _step(block, x, mask, state):
    return block(x, mask=mask, state=state)


def stream(block, x, cuts, mask=None, state=None):
    """Feeds a sequence in segments; returns all outputs and the last state."""
    if state is None:
        state = block.initial_state(len(x))
    step = functools.partial(_step, block)
    if keras.backend.backend() == "jax":
        step = compiled(step)
    outputs = []
    for start, stop in zip(cuts[:-1], cuts[1:], strict=True):
        piece = None if mask is None else mask[:, start:stop]
        output, state = step(x[:, start:stop], piece, state)
        outputs.append(to_numpy(output))
    return np.concatenate(outputs, axis=1), to_numpy(state)


@pytest.mark.support("Sequences", "streaming", layers=["SHARNNBlock"])
def test_every_cut_gives_the_numbers_of_one_pass():
    x = random(2, 8, 6)
    block = make_block()
    whole, state = stream(block, x, [0, 8])
    # without a state there is no memory to score, but the same output
    np.testing.assert_allclose(run(block, x), whole, rtol=1e-5, atol=1e-5)
    for cuts in ([0, 3, 8], range(9)):
        parts, last = stream(block, x, cuts)
        np.testing.assert_allclose(parts, whole, rtol=1e-5, atol=1e-5)
        for name in state:
            np.testing.assert_allclose(
                last[name], state[name], rtol=1e-5, atol=1e-5, err_msg=name
            )


def test_memory_is_cut_to_its_length():
    x = random(2, 16, 6)
    block = make_block(memory_length=4)
    state = block.initial_state(2)
    shapes = []
    for start, stop in ((0, 3), (3, 6), (6, 7), (7, 12), (12, 16)):
        _, scores, state = run(
            lambda x, state: block(
                x, state=state, return_attention_scores=True
            ),
            x[:, start:stop],
            state,
        )
        shapes.append(tuple((scores > 0).sum(axis=-1)[0, 0]))
    # the last position sees as many as fit, or those of its long segment
    assert shapes == [
        (1, 2, 3),
        (2, 3, 4),
        (4,),
        (1, 2, 3, 4, 5),
        (1, 2, 3, 4),
    ]
    assert state["memory_used"].tolist() == [4, 4]


def test_memory_may_be_empty_or_of_another_length():
    x = random(2, 8, 6)
    block = make_block()
    _, none = stream(block, x, [0, 5], state=block.initial_state(2, 0))
    assert none["memory"].shape == (2, 0, 6)
    short, _ = stream(block, x, [0, 5, 8], state=block.initial_state(2, 5))
    cut = make_block(memory_length=5)
    np.testing.assert_allclose(
        short, stream(cut, x, [0, 5, 8])[0], rtol=1e-5, atol=1e-6
    )
    long, _ = stream(block, x, [0, 5, 8], state=block.initial_state(2, 99))
    whole, _ = stream(block, x, [0, 8])
    np.testing.assert_allclose(long, whole, rtol=1e-5, atol=1e-5)


@pytest.mark.support("Masks", "padding is invisible", layers=["SHARNNBlock"])
@pytest.mark.parametrize("residual", [False, True])
def test_padding_enters_neither_memory_nor_state(residual):
    block = make_block(residual=residual)
    history, x = random(3, 5, 6, seed=1), random(3, 5, 6)
    _, before = stream(block, history, [0, 5])
    mask = np.arange(5) < [[5], [3], [0]]
    padded = np.where(mask[:, :, None], x, np.nan)
    output, after = run(
        lambda x, mask: block(x, mask=mask, state=before), padded, mask
    )
    for row, length in enumerate((5, 3)):
        alone = {name: x[row : row + 1] for name, x in before.items()}
        expected, state = stream(
            block, x[row : row + 1, :length], [0, length], state=alone
        )
        np.testing.assert_allclose(
            output[row, :length], expected[0], rtol=1e-5, atol=1e-5
        )
        for name in state:
            np.testing.assert_allclose(
                after[name][row], state[name][0], rtol=1e-5, atol=1e-5
            )
    for name in before:  # nothing came in
        np.testing.assert_array_equal(after[name][2], before[name][2])
    assert np.isfinite(output).all()


def test_padding_of_single_steps():
    block = make_block()
    x = random(2, 5, 6)
    _, before = stream(block, x, [0, 5])
    mask = np.array([[True], [False]])
    _, after = stream(block, x[:, :1], [0, 1], mask=mask, state=before)
    _, full = stream(block, x[:, :1], [0, 1], state=before)
    for name in before:
        np.testing.assert_allclose(after[name][0], full[name][0], atol=1e-6)
        np.testing.assert_array_equal(after[name][1], before[name][1])


@pytest.mark.support("Masks", "padding has no gradient", layers=["SHARNNBlock"])
def test_gradients_with_padding_are_finite_and_blind_to_it():
    block = make_block()
    x = random(2, 5, 6)
    mask = np.array([[True, True, True, False, False], [False] * 5])
    x[~mask] = np.nan
    visible = mask[:, :, None].astype("float32")

    def loss(x):
        return block(x, mask=mask) * ops.convert_to_tensor(visible)

    gradient = gradients(loss, x)[0]
    assert np.abs(gradient[mask]).min() > 0
    assert not gradient[~mask].any()
    for gradient in weight_gradients(
        lambda: loss(ops.convert_to_tensor(x)), block.trainable_weights
    ):
        assert np.isfinite(gradient).all()


def test_gradients_stop_at_the_border_of_a_segment():
    block = make_block()
    first, second = random(2, 5, 6), random(2, 5, 6, seed=1)

    def loss(first, second):
        _, state = block(first, state=block.initial_state(2))
        # the product tells PyTorch of a zero rather than an unused tensor
        return block(second, state=state)[0] + 0.0 * first

    into_first, into_second = gradients(loss, first, second)
    assert not into_first.any()
    assert np.abs(into_second).min() > 0


@pytest.mark.support("Sequences", "causal", layers=["SHARNNBlock"])
def test_no_position_sees_the_future():
    block = make_block()
    x = random(2, 5, 6)
    changed = x.copy()
    changed[:, 3, 0] += 1  # a shift of all would be normalized away
    before, after = run(block, x), run(block, changed)
    np.testing.assert_array_equal(after[:, :3], before[:, :3])
    assert np.abs(after[:, 3:] - before[:, 3:]).min() > 0


def test_reset_starts_samples_anew():
    block = make_block()
    x = random(2, 5, 6)
    _, state = stream(block, x, [0, 5])
    state["memory"][0, 0] = np.nan  # reset forgets even that
    reset = np.array([True, False])
    output, _ = block(x, state=state, reset=reset)
    fresh = block(x)
    carried, _ = block(x, state=state)
    output, fresh, carried = to_numpy((output, fresh, carried))
    np.testing.assert_allclose(output[0], fresh[0], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(output[1], carried[1], rtol=1e-5, atol=1e-6)
    assert np.abs(fresh[1] - carried[1]).max() > 1e-3


def test_stateful_equals_functional():
    x = random(2, 8, 6)
    block = make_block()
    keeping = make_block(stateful=True)
    expected, state = stream(block, x, [0, 3, 8])
    for _ in range(2):
        parts = [to_numpy(keeping(x[:, :3])), to_numpy(keeping(x[:, 3:]))]
        np.testing.assert_allclose(
            np.concatenate(parts, axis=1), expected, rtol=1e-5, atol=1e-6
        )
        for name, value in keeping.inference_state.items():
            np.testing.assert_allclose(
                to_numpy(value.value), state[name], rtol=1e-5, atol=1e-6
            )
        keeping.reset_state()
    # training has a state of its own
    keeping(x[:, :3])
    in_training = to_numpy(keeping(x[:, :3], training=True))
    np.testing.assert_allclose(
        in_training, expected[:, :3], rtol=1e-5, atol=1e-6
    )
    # a given state overrides the variables, and does not change them
    before = to_numpy(keeping.inference_state["hidden"].value)
    given, _ = keeping(x[:, :3], state=block.initial_state(2))
    np.testing.assert_allclose(
        to_numpy(given), expected[:, :3], rtol=1e-5, atol=1e-6
    )
    np.testing.assert_array_equal(
        to_numpy(keeping.inference_state["hidden"].value), before
    )


def test_state_is_float32_in_half_precision():
    x = random(2, 5, 6)
    block = make_block(dtype="mixed_bfloat16")
    output, state = block(x, state=block.initial_state(2))
    assert keras.backend.standardize_dtype(output.dtype) == "bfloat16"
    for name, value in state.items():
        dtype = keras.backend.standardize_dtype(value.dtype)
        assert dtype == ("int32" if name == "memory_used" else "float32")
    expected, full = stream(make_block(), x, [0, 5])
    np.testing.assert_allclose(
        to_numpy(ops.cast(output, "float32")), expected, rtol=0.1, atol=0.1
    )
    np.testing.assert_allclose(
        to_numpy(state["cell"]), full["cell"], rtol=0.02, atol=0.02
    )


@pytest.mark.support("Sequences", "any length", layers=["SHARNNBlock"])
def test_functional_model_with_free_lengths():
    inputs = keras.Input((None, 6))
    block = layers.SHARNNBlock(12)
    outputs = block(inputs, return_attention_scores=True)
    assert outputs[0].shape == (None, None, 6)
    model = keras.Model(inputs, outputs)
    for length in (1, 4):
        output, scores = model(random(2, length, 6))
        assert tuple(output.shape) == (2, length, 6)
        assert tuple(scores.shape) == (2, 1, length, length)


@pytest.mark.support("Masks", "attached masks", layers=["SHARNNBlock"])
def test_implicit_masks_are_honoured():
    block = make_block()
    x = random(2, 5, 6)
    x[:, 3:] = 0
    masked = keras.layers.Masking()(x)
    expected = to_numpy(block(x[:, :3], state=block.initial_state(2)))
    for actual in (
        block(masked, state=block.initial_state(2)),
        (block(masked), expected[1]),
    ):
        output, state = to_numpy(tuple(actual))
        np.testing.assert_allclose(output[:, :3], expected[0], atol=1e-5)
        np.testing.assert_allclose(
            state["cell"], expected[1]["cell"], atol=1e-5
        )


def test_each_dropout_acts_in_training_alone():
    x = random(2, 5, 6)
    plain = to_numpy(make_block()(x))
    for rate in (
        "lstm_dropout",
        "query_dropout",
        "value_dropout",
        "attention_dropout",
        "attention_output_dropout",
        "boom_dropout",
        "boom_output_dropout",
    ):
        block = make_block(**{rate: 0.5}, seed=1)
        np.testing.assert_allclose(to_numpy(block(x)), plain, atol=1e-6)
        difference = to_numpy(block(x, training=True)) - plain
        assert np.abs(difference).max() > 1e-3, rate


def test_initializers():
    block = layers.SHARNNBlock(64, lstm_initializer="paper")
    block.build((None, None, 64))
    for weight in block.lstm.get_weights()[:2]:
        assert 0.95 / 8 < np.abs(weight).max() <= 1 / 8
    assert np.abs(block.boom.up_dense.get_weights()[0]).std() < 0.1 / 8
    block = layers.SHARNNBlock(64)
    block.build((None, None, 64))
    bias = block.lstm.get_weights()[2]
    np.testing.assert_array_equal(bias[64:128], 1)  # the forget bias of Keras


def test_config_round_trip():
    arguments = {
        "intermediate_dim": 24,
        "attention": True,
        "memory_length": 7,
        "residual": True,
        "num_heads": 2,
        "value_gate": "sigmoid",
        "use_key_projection": True,
        "use_value_projection": True,
        "output_mixing": True,
        "down": "dense",
        "activation": "relu",
        "lstm_dropout": 0.1,
        "query_dropout": 0.2,
        "value_dropout": 0.3,
        "attention_dropout": 0.4,
        "attention_output_dropout": 0.5,
        "boom_dropout": 0.6,
        "boom_output_dropout": 0.7,
        "lstm_initializer": "paper",
        "stateful": True,
        "seed": 5,
    }
    config = layers.SHARNNBlock(**arguments).get_config()
    assert {name: config[name] for name in arguments} == arguments
    assert layers.SHARNNBlock.from_config(config).get_config() == config


def test_bad_use_is_refused():
    x = random(2, 5, 6)
    block = make_block()
    with pytest.raises(ValueError, match="memory_length=-1"):
        layers.SHARNNBlock(12, memory_length=-1)
    with pytest.raises(ValueError, match="boom_output_dropout=2"):
        layers.SHARNNBlock(12, boom_output_dropout=2)
    with pytest.raises(ValueError, match="batch of 3"):
        block(x, state=block.initial_state(3))
    with pytest.raises(ValueError, match="batch of 2"):
        make_block(stateful=True)(x[:1])
    with pytest.raises(ValueError, match="fixed batch"):
        layers.SHARNNBlock(12, stateful=True).build((None, None, 6))
    with pytest.raises(ValueError, match="keeps a state"):
        block.reset_state()
    with pytest.raises(ValueError, match="boolean `mask`"):
        block(x, mask=np.ones((2, 5), "float32"))
    with pytest.raises(ValueError, match="no attention scores"):
        make_block(attention=False)(x, return_attention_scores=True)
