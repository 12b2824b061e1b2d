import keras
import numpy as np
import pytest
from keras import ops

import keras_attn
from keras_attn import models
from tests.backend import compiled
from tests.backend import quick
from tests.backend import run
from tests.backend import to_numpy
from tests.layers.cases import FIRST_CASES

TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}


def multi_head(depth):
    return keras_attn.MultiHeadAttention(2, 3)


def make_model(**kwargs):
    """A small model whose weights are not the initial ones."""
    arguments = {
        "vocabulary_size": 11,
        "hidden_dim": 6,
        "num_layers": 2,
        "attention": multi_head,
        "intermediate_dim": 8,
        "max_length": 12,
    }
    model = models.Transformer(**{**arguments, **kwargs})
    rng = np.random.default_rng(0)
    for weight in model.trainable_weights:
        weight.assign(0.5 * rng.normal(size=weight.shape))
    return model


def language_model(**kwargs):
    return make_model(causal=True, head="tokens", **kwargs)


def tokens(*shape, seed=0, size=11):
    return np.random.default_rng(seed).integers(size, size=shape, dtype="int32")


def close(actual, expected, **tolerance):
    np.testing.assert_allclose(
        to_numpy(actual), to_numpy(expected), **{**TOLERANCE, **tolerance}
    )


# Embedding


def test_embedded_tokens_positions_and_types():
    model = make_model(num_token_types=2, embedding_norm=True)
    x, types = tokens(2, 5), tokens(2, 5, seed=1, size=2)

    def by_hand(x, types):
        y = ops.take(
            ops.convert_to_tensor(model.token_embedding.embeddings), x, 0
        )
        y = y + ops.convert_to_tensor(model.position_embedding.embeddings)[:5]
        table = ops.convert_to_tensor(model.token_type_embedding.embeddings)
        y = model.embedding_norm_layer(y + ops.take(table, types, axis=0))
        for block in model.blocks:
            y = block(y)
        return model.output_norm_layer(y)

    close(
        run(lambda x, t: model(x, token_types=t), x, types),
        run(by_hand, x, types),
    )


def test_sinusoids_by_hand():
    model = make_model(
        positions="sinusoidal", attention=[None] * 2, norm="post", hidden_dim=4
    )
    place = np.arange(7)[:, None]
    expected = np.concatenate(
        [
            np.sin(place),
            np.cos(place),
            np.sin(place / 100),
            np.cos(place / 100),
        ],
        axis=1,
    )
    x = tokens(1, 7)
    embedded = to_numpy(model.token_embedding.embeddings)[x[0]]
    actual = to_numpy(model._embed(ops.convert_to_tensor(x), None, None))[0]
    np.testing.assert_allclose(actual - 2 * embedded, expected, atol=1e-5)


# Masks


@pytest.mark.parametrize(
    "options",
    [{}, {"head": "classes", "num_classes": 3, "pooling": "mean"}],
    ids=["features", "classes"],
)
def test_padding_is_invisible(options):
    model = make_model(**options)
    x = tokens(2, 7)
    mask = np.arange(7) < [[7], [5]]
    changed = np.where(mask, x, -1)  # not even a token
    output = run(lambda x, m: model(x, padding_mask=m), changed, mask)
    alone = run(model, x[1:, :5])
    if options:
        close(output[1:], alone)
    else:
        close(output[1:, :5], alone)


def test_training_ignores_padding():
    model = language_model(num_layers=1)
    model.compile(
        keras.optimizers.Adam(0.1),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    x, y = tokens(2, 7), tokens(2, 7, seed=1)
    mask = np.arange(7) < [[7], [5]]
    logits = run(model, x)
    before = [to_numpy(weight.value) for weight in model.weights]
    inputs = {"token_ids": x, "padding_mask": mask}
    losses = model.fit(inputs, y, epochs=8, verbose=0).history["loss"]
    first = keras.losses.sparse_categorical_crossentropy(
        y, logits, from_logits=True
    )
    np.testing.assert_allclose(losses[0], to_numpy(first)[mask].mean(), 1e-4)
    assert losses[-1] < 0.7 * losses[0]
    for weight, value in zip(model.weights, before, strict=True):
        moved = np.abs(to_numpy(weight.value) - value).max()
        # softmax cannot see the bias of the key
        assert moved > 1e-3 or weight.path.endswith("key/bias"), weight.path


# Attention by depth


def test_attention_by_depth():
    model = make_model(
        num_layers=4,
        attention=lambda depth: (
            None
            if depth == 3
            else keras_attn.SlidingWindowAttention(2, 3, 2 * 2**depth)
        ),
    )
    sizes = [
        getattr(block.attention, "window_size", None) for block in model.blocks
    ]
    assert sizes == [2, 4, 8, None]


def test_options_go_to_the_layers_that_have_them():
    """Longformer and others mixed, global tokens marked at each call."""
    model = make_model(
        attention=lambda depth: (
            keras_attn.LongformerAttention(2, 3, 2, max_global_tokens=2)
            if depth
            else None
        ),
    )
    x, is_global = tokens(2, 9), np.zeros((2, 9), bool)
    call = quick(lambda x, g: model({"token_ids": x, "global_mask": g}))
    plain = to_numpy(call(x, is_global))
    is_global[:, 0] = True
    changed = np.abs(to_numpy(call(x, is_global)) - plain).max(axis=-1)
    assert changed[:, 2:].min() > 1e-3  # also outside of the window
    with pytest.raises(ValueError, match="no attention layer.*`num_hashes`"):
        model(x, num_hashes=2)


def linformer(depth):
    return keras_attn.LinformerAttention(2, 3, 12, 4, sharing="layerwise")


def test_layerwise_sharing_of_linformer(tmp_path):
    model = make_model(
        attention=linformer,
        length_projection=keras_attn.LengthProjection(12, 4),
    )
    x = tokens(2, 7)
    matrices = [w for w in model.weights if w.shape == (12, 4)]
    assert len(matrices) == 1
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert len(loaded.weights) == len(model.weights)
    close(run(loaded, x), run(model, x))
    matrices[0].assign(2 * matrices[0])
    moved = run(lambda x: model(x), x) - run(loaded, x)
    assert np.abs(moved).max() > 1e-3
    with pytest.raises(ValueError, match="`length_projection`"):
        make_model(length_projection=keras_attn.LengthProjection(12, 4))


# Streaming and generation


def streaming_layers():
    """A layer of each class that streams."""
    longer = {"max_length": 64}
    return [
        case.layer(**(longer if "max_length" in case.kwargs else {}))
        for case in FIRST_CASES
        if case.options.issuperset({"state", "use_causal_mask"})
    ] + [keras_attn.SingleHeadAttention(), None]


def test_streaming():
    model = language_model(positions="sinusoidal")
    x = tokens(2, 9)
    expected = run(model, x)
    step = quick(lambda x, state: model(x, state=state))
    state, outputs = model.initial_state(2), []
    for chunk in (slice(0, 4), slice(4, 5), slice(5, 9)):
        logits, state = step(ops.convert_to_tensor(x[:, chunk]), state)
        outputs.append(to_numpy(logits))
    close(np.concatenate(outputs, axis=1), expected)
    assert to_numpy(state["length"]) == 9


@pytest.mark.parametrize(
    ("layer", "grows"),
    [
        (keras_attn.LinearAttention(2, 3), False),
        (keras_attn.SlidingWindowAttention(2, 3, 4), False),
        (keras_attn.LongformerAttention(2, 3, 4, num_global_tokens=1), False),
        (keras_attn.MultiHeadAttention(2, 3), True),
    ],
    ids=lambda x: type(x).__name__,
)
def test_state_grows_with_the_context_only_where_it_must(layer, grows):
    """And so does time per token: it is one program for one state."""
    block = keras_attn.TransformerBlock(layer, 8)
    sizes = [
        sum(int(np.prod(x.shape)) for x in keras.tree.flatten(state))
        for state in (block.initial_state(1, n) for n in (16, 1024))
    ]
    assert (sizes[1] > sizes[0]) == grows


def test_greedy_text_is_that_of_full_evaluation():
    """One model with all the mechanisms that stream, for the sake of time."""
    attention = streaming_layers()
    assert len(attention) == 11
    model = language_model(attention=attention, num_layers=11, max_length=64)
    prompt = tokens(2, 3)
    text = model.generate(prompt, 12, temperature=0)
    np.testing.assert_array_equal(text[:, :3], prompt)
    logits = run(model, text[:, :-1].astype("int32"))
    np.testing.assert_array_equal(logits.argmax(axis=-1)[:, 2:], text[:, 3:])
    assert len(np.unique(text)) > 2  # it does not say the same all the time


def test_learned_positions_end():
    model = language_model(attention=[None, None])
    with pytest.raises(ValueError, match="max_length=12.*13"):
        model(tokens(2, 13))
    with pytest.raises(ValueError, match="max_length=12.*14"):
        model.generate([1, 2], 12)
    state = {**model.initial_state(2), "length": np.int32(11)}
    with pytest.raises(ValueError, match="max_length=12.*13"):
        model(tokens(2, 2), state=state)
    if keras.backend.backend() != "torch":  # compiled code cannot raise
        call = compiled(lambda x, state: model(x, state=state)[0])
        logits = to_numpy(
            call(
                *keras.tree.map_structure(
                    ops.convert_to_tensor, (tokens(2, 2), state)
                )
            )
        )
        assert np.isfinite(logits[:, 0]).all() and np.isnan(logits[:, 1]).all()


# Whole models


def test_half_precision_and_symbolic_outputs():
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        model = language_model(num_layers=1)
        others = [
            make_model(num_layers=1),
            make_model(num_layers=1, head="classes", num_classes=3),
        ]
    finally:
        keras.config.set_dtype_policy("float32")
    x, symbol = tokens(2, 5), keras.KerasTensor((2, 5), dtype="int32")
    call = quick(lambda x, state: model(x, state=state))
    state = model.initial_state(2)
    results = call(ops.convert_to_tensor(x), state)
    keras.tree.map_structure(
        lambda a, b: np.testing.assert_equal(
            (tuple(a.shape), keras.backend.standardize_dtype(a.dtype)),
            (tuple(b.shape), b.dtype),
        ),
        results,
        model(symbol, state=state),
    )
    close(results[0], run(language_model(num_layers=1), x), rtol=0.2, atol=0.2)
    specs = [candidate(symbol) for candidate in others]
    assert [(s.shape, s.dtype) for s in specs] == [
        ((2, 5, 6), "bfloat16"),
        ((2, 3), "float32"),
    ]
    assert len(model.generate([1, 2], 3)) == 5


def test_saved_model_is_the_same_model(tmp_path):
    model = language_model()
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    x = tokens(2, 5)
    inputs = keras.Input((None,), dtype="int32")
    outer = keras.Model(inputs, loaded(inputs))
    close(run(outer, x), run(model, x))


def test_config_round_trip():
    model = make_model(
        attention=[None, keras_attn.LinearAttention(2, 3, name="last")],
        positions="sinusoidal",
        causal=True,
        head="classes",
        num_classes=3,
        pooling="mean",
        num_token_types=2,
        embedding_norm=True,
        norm="post",
        norm_epsilon=1e-12,
        activation="quick_gelu",
        down="sum",
        dropout=0.1,
        seed=1,
    )
    config = model.get_config()
    again = models.Transformer.from_config(config)
    assert again.get_config() == config
    assert again.blocks[1].attention.name == "last"
    assert [w.path for w in again.weights] == [w.path for w in model.weights]
    paths = [weight.path for weight in model.weights]
    assert len(set(paths)) == len(paths)


# Presets


def sizes(name, **overrides):
    """Parameters of all and of the blocks; no weight is ever created."""
    with keras.StatelessScope(initialize_variables=False):
        model = models.Transformer.from_preset(name, **overrides)
        spec = model(keras.KerasTensor((2, 5), dtype="int32"))
    assert spec.shape[-1] in (2, 256, 258)
    return [
        sum(int(np.prod(weight.shape)) for weight in weights)
        for weights in (
            model.trainable_weights,
            [w for block in model.blocks for w in block.trainable_weights],
        )
    ]


def test_sizes_of_the_presets():
    # RoBERTa never uses two of its positions; our classifier has two classes
    padding, classifier = 2 * 768, 2 * 768 + 2
    # `allenai/longformer-base-4096` of Hugging Face, to the last parameter
    count, _ = sizes("longformer_base", head="classes", num_classes=2)
    assert count - classifier + padding == 148_659_456
    # `roberta-base` of Hugging Face, and one matrix
    count, _ = sizes("linformer_base", head="classes", num_classes=2)
    assert count - classifier + padding - 512 * 256 == 124_645_632
    # layers of `google/reformer-enwik8` of Hugging Face
    assert sizes("reformer_enwik8")[1] == 147_959_808
    # table 1 of the paper: 95M
    assert round(sizes("sparse_transformer_enwik8")[0] / 1e6) == 95
    matrices = 12 * 256**2
    vectors = (4 + 4 + 1 + 2 * 2) * 256  # biases and norms
    expected = 8 * (matrices + vectors) + (256 + 784) * 256 + 256
    assert sizes("linear_transformer_mnist")[0] == expected


def test_bad_use_is_refused():
    with pytest.raises(ValueError, match="hidden_dim=0"):
        make_model(hidden_dim=0)
    with pytest.raises(ValueError, match="max_length=None"):
        make_model(max_length=None)
    with pytest.raises(ValueError, match="num_classes=None"):
        make_model(head="classes")
    with pytest.raises(ValueError, match="even `hidden_dim`.*7"):
        make_model(positions="sinusoidal", hidden_dim=7)
    with pytest.raises(ValueError, match="function of the depth"):
        make_model(attention=multi_head(0))
    with pytest.raises(ValueError, match="num_layers=2.*3 of them"):
        make_model(attention=[None] * 3)
    with pytest.raises(ValueError, match="layer of its own"):
        make_model(attention=[multi_head(0)] * 2)
    with pytest.raises(ValueError, match="longformer_base"):
        models.Transformer.from_preset("gpt")
    model, x = make_model(), tokens(2, 5)
    with pytest.raises(ValueError, match="integer tokens"):
        model(x.astype("float32"))
    with pytest.raises(ValueError, match="num_token_types=0"):
        model(x, token_types=x)
    with pytest.raises(ValueError, match="boolean `padding_mask`"):
        model(x, padding_mask=np.ones((2, 5), "float32"))
    with pytest.raises(ValueError, match="causal=False"):
        model.initial_state(2)
    with pytest.raises(ValueError, match="head=None"):
        model.generate([1], 3)
    model = language_model()
    state = model.initial_state(2)
    with pytest.raises(ValueError, match="2 blocks.*1 entries"):
        model(x, state={**state, "blocks": state["blocks"][:1]})
