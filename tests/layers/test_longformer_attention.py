import json

import keras
import numpy as np
import pytest
from keras import ops

from keras_attn import LongformerAttention
from keras_attn import MultiHeadAttention
from keras_attn import SlidingWindowAttention
from keras_attn.conversion import longformer_weights
from tests import golden
from tests.backend import compiled
from tests.backend import gradients
from tests.backend import run
from tests.backend import to_numpy
from tests.backend import weight_gradients

NAMES = ("query", "key", "value", "query_global", "key_global", "value_global")
HEADS, FEATURES = 3, 13


def sequence(length=11, seed=0):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(2, length, FEATURES)).astype("float32")


def close(actual, expected, tolerance=2e-5):
    np.testing.assert_allclose(actual, expected, rtol=0, atol=tolerance)


def hugging_face_cases():
    for name in golden.names("longformer_hf_*"):
        meta = json.loads(str(golden.load(name)["meta_json"]))
        for window in meta["attention_window"]:
            several = len(meta["attention_window"]) > 1
            yield name, window, f"_window{window}" if several else ""


@pytest.mark.parametrize(("name", "window", "suffix"), hugging_face_cases())
def test_golden_outputs_and_gradients_of_hugging_face(name, window, suffix):
    data = golden.load(name)
    meta = json.loads(str(data["meta_json"]))
    x, weight = data["hidden_states"], data["loss_weight_R"]
    heads, size = meta["num_heads"], meta["head_dim"]
    is_global = data["global_attention_mask"]
    layer = LongformerAttention(
        heads, size, window, max_global_tokens=int(is_global.sum(1).max()) + 1
    )
    layer.build(x.shape)
    state_dict = {}
    for projection in NAMES:
        kernel = data[f"{projection}_weight"]  # stored as (in, out)
        state_dict[f"{projection}.weight"] = kernel.T
        state_dict[f"{projection}.bias"] = data[f"{projection}_bias"]
    layer.set_weights(longformer_weights(state_dict, heads))

    def attend(x):
        return layer(x, mask=data["key_padding_mask"], global_mask=is_global)

    close(run(attend, x), data[f"output{suffix}"])

    def loss(x):
        return ops.multiply(attend(x), weight)

    (gradient,) = gradients(loss, x)
    close(gradient, data[f"grad_hidden_states{suffix}"], tolerance=2e-4)
    if f"grad_query_weight{suffix}" not in data:
        return
    layers = [getattr(layer, f"{projection}_dense") for projection in NAMES]
    weights = [w for dense in layers for w in (dense.kernel, dense.bias)]
    actual = weight_gradients(lambda: loss(ops.convert_to_tensor(x)), weights)
    names = [f"{p}_{kind}" for p in NAMES for kind in ("weight", "bias")]
    for name, gradient in zip(names, actual, strict=True):
        expected = data[f"grad_{name}{suffix}"]
        close(gradient.reshape(expected.shape), expected, tolerance=2e-4)


def test_golden_outputs_and_gradients_with_dilation():
    data = golden.load("longformer_global_dilated_layer_ref")
    meta = json.loads(str(data["meta_json"]))
    x = data["hidden_states"]
    heads, size = meta["num_heads"], meta["head_dim"]
    layer = LongformerAttention(
        heads,
        size,
        window_size=2 * meta["one_sided_window_w"],
        dilation_rate=meta["dilation_per_head"],
        max_global_tokens=5,
    )
    layer.build(x.shape)
    for name in (*NAMES, "output"):
        dense = getattr(layer, f"{name}_dense")
        for variable, kind in ((dense.kernel, "kernel"), (dense.bias, "bias")):
            variable.assign(data[f"{name}_{kind}"].reshape(variable.shape))

    def attend(x):
        return layer(
            x,
            mask=data["key_padding_mask"],
            global_mask=data["global_attention_mask"],
        )

    close(run(attend, x), data["output"])
    (gradient,) = gradients(
        lambda x: ops.multiply(attend(x), data["loss_weight_R"]), x
    )
    close(gradient, data["grad_hidden_states"], tolerance=2e-4)


@pytest.mark.parametrize("use_causal_mask", [False, True])
def test_prefix_and_mask_are_the_same_globals(use_causal_mask):
    fixed = LongformerAttention(HEADS, 5, 4, (1, 2, 1), num_global_tokens=3)
    marked = LongformerAttention(HEADS, 5, 4, (1, 2, 1), max_global_tokens=4)
    x, padding = sequence(), np.arange(11) != [[1], [9]]
    is_global = np.stack([np.arange(11) < 3] * 2)
    for layer in (fixed, marked):
        layer.build(x.shape)
    marked.set_weights(fixed.get_weights())

    def both(x, padding, is_global):
        options = {"mask": padding, "use_causal_mask": use_causal_mask}
        return fixed(x, **options), marked(x, global_mask=is_global, **options)

    close(*run(both, x, padding, is_global))
    # a single mask serves the whole batch, and integers are masks
    single = is_global[:1].astype("int32")
    actual = run(lambda x, single: marked(x, global_mask=single), x, single)
    close(actual, run(fixed, x))


def test_without_a_mask_no_token_is_global():
    layer = LongformerAttention(HEADS, 5, 4, max_global_tokens=4)
    window = SlidingWindowAttention(HEADS, 5, 4)
    x = sequence()
    window.build(x.shape)
    layer.build(x.shape)
    window.set_weights(layer.get_weights()[:8])
    none = np.zeros((2, 11), bool)
    close(
        *run(lambda x, none: (layer(x, global_mask=none), window(x)), x, none)
    )
    close(to_numpy(layer(x)), to_numpy(window(x)))


def test_with_every_token_global_it_is_full_attention():
    layer = LongformerAttention(HEADS, 5, 4, num_global_tokens=20)
    full = MultiHeadAttention(HEADS, 5)
    x = sequence()
    full.build(x.shape)
    layer.build(x.shape)
    weights = layer.get_weights()
    full.set_weights([*weights[8:14], *weights[6:8]])
    close(*run(lambda x: (layer(x), full(x)), x))


def test_one_set_of_projections():
    layer = LongformerAttention(
        HEADS, 5, 2, num_global_tokens=2, separate_global_projections=False
    )
    full = MultiHeadAttention(HEADS, 5)
    x = sequence()
    full.build(x.shape)
    layer.build(x.shape)
    layer.set_weights(full.get_weights())
    places = np.arange(11)
    mask = (abs(places[:, None] - places) < 2) | (places < 2)
    mask = mask | (places[:, None] < 2)
    close(*run(lambda x: (layer(x), full(x, attention_mask=mask)), x))


def test_a_global_token_sees_all_and_is_seen_by_all():
    layer = LongformerAttention(HEADS, 5, 2, max_global_tokens=2)
    x, is_global = sequence(), np.stack([np.arange(11) == 6] * 2)
    _, scores = layer(x, global_mask=is_global, return_attention_scores=True)
    seen = to_numpy(scores)[0, 0] > 0
    places = np.arange(11)
    expected = abs(places[:, None] - places) <= 1
    expected[6] = expected[:, 6] = True
    np.testing.assert_array_equal(seen, expected)


def test_global_projections_get_gradients_from_global_tokens_alone():
    layer = LongformerAttention(HEADS, 5, 2, max_global_tokens=2)
    x, is_global = sequence(), np.stack([np.arange(11) == 6] * 2)
    layer.build(x.shape)
    weights = [
        getattr(layer, f"{name}_dense").kernel
        for name in ("query_global", "key_global", "value_global")
    ]
    x = ops.convert_to_tensor(x)
    for mask, is_zero in ((is_global, False), (is_global & False, True)):
        for gradient in weight_gradients(
            lambda mask=mask: ops.square(layer(x, global_mask=mask)), weights
        ):
            assert (np.abs(gradient).max() == 0) == is_zero


@pytest.mark.parametrize("mask_content", [1e3, np.nan])
def test_padding_is_never_global(mask_content):
    layer = LongformerAttention(HEADS, 5, 2, max_global_tokens=2)
    x, padding = sequence(), np.arange(11) < [[11], [8]]
    is_global = np.isin(np.arange(11), [1, 9])
    is_global = np.stack([is_global, is_global])
    changed = x.copy()
    changed[~padding] = mask_content
    options = {"mask": padding, "global_mask": is_global}
    output = to_numpy(layer(changed, **options))
    close(output, to_numpy(layer(x, **options)))
    # two of padding more do not crowd out the real one
    late = is_global | (np.arange(11) > 8)
    second = layer(x[1:], mask=padding[1:], global_mask=late[1:])
    close(to_numpy(second), output[1:])


def test_too_many_global_tokens():
    layer = LongformerAttention(HEADS, 5, 2, max_global_tokens=2)
    x, places = sequence(), np.arange(11)
    many = np.stack([np.isin(places, [1, 4, 9]), places == 3])
    with pytest.raises(ValueError, match="`max_global_tokens=2`.* 3 of them"):
        layer(x, global_mask=many)
    # compiled code cannot raise: the first two are global, the rest is not
    if keras.backend.backend() != "torch":
        first = many & (places != 9)
        fast = compiled(lambda x, mask: layer(x, global_mask=mask))
        actual = fast(ops.convert_to_tensor(x), ops.convert_to_tensor(many))
        close(to_numpy(actual), to_numpy(layer(x, global_mask=first)))


def test_global_masks_in_a_model_of_any_length(tmp_path):
    inputs = keras.Input((None, FEATURES)), keras.Input((None,), dtype="bool")
    layer = LongformerAttention(HEADS, 5, 6, max_global_tokens=2)
    outputs, scores = layer(
        inputs[0], global_mask=inputs[1], return_attention_scores=True
    )
    model = keras.Model(inputs, outputs)
    assert scores.shape == (None, HEADS, None, None)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    for length in (1, 5, 70):
        x, is_global = sequence(length), np.zeros((2, length), bool)
        is_global[0, length // 2] = True
        expected = run(lambda x, m: layer(x, global_mask=m), x, is_global)
        close(model.predict([x, is_global], verbose=0), expected)
        close(loaded.predict([x, is_global], verbose=0), expected)


def test_bad_global_masks_are_refused():
    layer, x = LongformerAttention(HEADS, 5, 2, max_global_tokens=2), sequence()
    with pytest.raises(
        ValueError, match=r"Longformer.*`global_mask`.*\(2, 7\)"
    ):
        layer(x, global_mask=np.zeros((2, 7), bool))
    with pytest.raises(ValueError, match="Longformer.*boolean `global_mask`"):
        layer(x, global_mask=np.zeros((2, 11), "float32"))
    layer = LongformerAttention(HEADS, 5, 2, num_global_tokens=2)
    for make in (np.zeros, keras.KerasTensor):
        with pytest.raises(ValueError, match="`global_mask` with `num_global"):
            layer(make((2, 11, FEATURES)), global_mask=make((2, 11), bool))


@pytest.mark.parametrize("sizes", [{}, {"max_global_tokens": 2}])
def test_one_way_of_telling_what_is_global(sizes):
    if sizes:
        sizes["num_global_tokens"] = 1
    with pytest.raises(ValueError, match="either `max_global_tokens`"):
        LongformerAttention(HEADS, 5, 2, **sizes)


@pytest.mark.parametrize("name", ["max_global_tokens", "num_global_tokens"])
@pytest.mark.parametrize("bad", [0, -1, 2.0, True])
def test_counts_must_be_positive_integers(name, bad):
    with pytest.raises(ValueError, match=f"Longformer.*{name}={bad}"):
        LongformerAttention(HEADS, 5, 2, **{name: bad})


def test_streaming_is_refused_where_a_global_token_may_come_late():
    layer = LongformerAttention(HEADS, 5, 2, max_global_tokens=2)
    with pytest.raises(ValueError, match="at any time"):
        layer.initial_state(2)
    state = LongformerAttention(HEADS, 5, 2, num_global_tokens=2)
    state = state.initial_state(2)
    with pytest.raises(ValueError, match="at any time"):
        layer(sequence(), state=state)


def test_symbolic_inputs_of_unequal_lengths_are_refused():
    layer = LongformerAttention(HEADS, 5, 2, num_global_tokens=2)
    with pytest.raises(ValueError, match="Longformer.*5, 13.*7, 13"):
        layer(
            keras.KerasTensor((2, 5, FEATURES)),
            keras.KerasTensor((2, 7, FEATURES)),
        )
