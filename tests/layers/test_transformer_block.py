import keras
import numpy as np
import pytest
from keras import ops

import keras_attn
from keras_attn import layers
from tests.backend import run
from tests.backend import to_numpy
from tests.backend import weight_gradients

LENGTH = 7
FEATURES = 6


def sequence(length=LENGTH, seed=0, features=FEATURES):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(2, length, features)).astype("float32")


def padding(length=LENGTH):
    return np.arange(length) < [[length], [length - 2]]


def close(actual, expected, tolerance=1e-5):
    np.testing.assert_allclose(
        to_numpy(actual), to_numpy(expected), rtol=tolerance, atol=tolerance
    )


def ours(**kwargs):
    return layers.MultiHeadAttention(num_heads=2, key_dim=3, **kwargs)


def keras_multi_head(**kwargs):
    return keras.layers.MultiHeadAttention(2, 3, **kwargs)


def keras_grouped(**kwargs):
    return keras.layers.GroupQueryAttention(3, 2, 1, **kwargs)


def shuffle(block, x, *context):
    """Builds a block, and gives it weights that are not the initial ones."""
    block.build(*(y.shape for y in (x, *context)))
    rng = np.random.default_rng(0)
    for weight in block.trainable_weights:
        weight.assign(0.5 * rng.normal(size=weight.shape))
    return block


@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize("down", ["dense", "sum"])
def test_order_of_the_parts(norm, down):
    """Against section 3.1 of the paper, put together by hand."""
    x, context = sequence(), sequence(5, seed=1, features=4)
    block = layers.TransformerBlock(
        ours(),
        12,
        cross_attention=ours(),
        norm=norm,
        down=down,
        activation="relu",
    )
    shuffle(block, x, context)

    def by_hand(x, context):
        feed_forward = block.feed_forward
        for norm_layer, part in (
            (block.attention_norm, block.attention),
            (
                block.cross_attention_norm,
                lambda x: block.cross_attention(x, context),
            ),
            (block.feed_forward_norm, feed_forward),
        ):
            if norm == "pre":
                x = x + part(norm_layer(x))
            else:
                x = norm_layer(x + part(x))
        return x

    close(run(block, x, context), run(by_hand, x, context))
    hidden = ops.relu(block.feed_forward.up_dense(x))
    if down == "sum":
        expected = hidden[..., :6] + hidden[..., 6:]
    else:
        expected = block.feed_forward.down_dense(hidden)
    close(block.feed_forward(x), expected)


@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize("make", [ours, keras_multi_head, keras_grouped])
def test_padding_is_invisible(make, norm):
    """Whatever the attention, also in gradients and in what is attended to."""
    x, context = sequence(), sequence(LENGTH, seed=1)
    block = layers.TransformerBlock(
        make(), 8, cross_attention=make(), norm=norm
    )
    shuffle(block, x, context)
    mask = padding()
    poisoned = [np.where(mask[..., None], y, np.nan) for y in (x, context)]
    poisoned = [y.astype("float32") for y in poisoned]

    def call(x, context, mask):
        return block(x, context, inputs_mask=mask, context_mask=mask)

    actual = run(call, *poisoned, mask)
    close(actual[0], run(call, x, context, mask)[0])
    close(
        actual[1:, : LENGTH - 2],
        run(block, x[1:, : LENGTH - 2], context[1:, : LENGTH - 2]),
    )
    tensors = [ops.convert_to_tensor(y) for y in (*poisoned, mask)]
    gradients = weight_gradients(
        lambda: ops.sum(call(*tensors)[:, : LENGTH - 2]),
        block.trainable_weights,
    )
    assert all(np.isfinite(gradient).all() for gradient in gradients)


def test_attached_masks_are_used_and_kept():
    """Keras' layer takes masks off; a second block must find them."""
    tokens = keras.Input((None,), dtype="int32")
    others = keras.Input((None,), dtype="int32")
    embedding = keras.layers.Embedding(9, FEATURES, mask_zero=True)
    x, context = embedding(tokens), embedding(others)
    for _ in range(2):
        x = layers.TransformerBlock(
            keras_multi_head(), 8, cross_attention=keras_multi_head()
        )(x, context)
    model = keras.Model([tokens, others], x)
    ids, other_ids = np.array([[1, 2, 3, 0]]), np.array([[4, 5, 0, 0, 0]])
    short = model([ids[:, :3], other_ids[:, :2]])
    for _ in range(2):
        close(model([ids, other_ids])[:, :3], short)


@pytest.mark.parametrize("make", [ours, keras_multi_head, keras_grouped])
def test_causality(make):
    block = shuffle(layers.TransformerBlock(make(), 8), sequence())
    x, changed = sequence(), sequence()
    changed[:, 4:] += 1
    a, b = (
        run(lambda x: block(x, use_causal_mask=True), y) for y in (x, changed)
    )
    close(a[:, :4], b[:, :4])
    assert np.abs(a - b)[:, 4:].max() > 0.1


def test_streaming():
    block = layers.TransformerBlock(layers.SlidingWindowAttention(2, 3, 4), 8)
    shuffle(block, sequence())
    x, mask = sequence(), padding()
    expected = run(lambda x, m: block(x, mask=m, use_causal_mask=True), x, mask)
    state, outputs = block.initial_state(2), []
    for chunk in (slice(0, 3), slice(3, 4), slice(4, 7)):
        output, state = block(x[:, chunk], mask=mask[:, chunk], state=state)
        outputs.append(output)
    actual = to_numpy(ops.concatenate(outputs, axis=1))
    close(actual[mask], expected[mask])


def test_options_of_the_mechanism_reach_it():
    x = sequence()
    block = layers.TransformerBlock(
        layers.LongformerAttention(2, 3, 2, max_global_tokens=1), 8
    )
    shuffle(block, x)
    is_global = np.arange(LENGTH)[None] == 0
    a, b = block(x, global_mask=is_global), block(x)
    seen = np.abs(to_numpy(a) - to_numpy(b)).max(axis=(0, 2))
    assert seen[2:].min() > 1e-2  # also outside of the window
    with pytest.raises(ValueError, match="`LongformerAttention`.*`attention"):
        block(x, attention_mask=np.ones((2, LENGTH, LENGTH), bool))


def test_scores_and_symbolic_outputs():
    x, context = sequence(), sequence(5, seed=1)
    block = layers.TransformerBlock(ours(), 8, cross_attention=ours())
    shuffle(block, x, context)
    state = block.initial_state(2, max_length=9)
    symbol, other = (keras.KerasTensor(y.shape) for y in (x, context))
    for options, length in (
        ({"use_causal_mask": True}, LENGTH),
        ({"state": state}, 9),
    ):
        options["return_attention_scores"] = True
        results = block(x, context, **options)
        specs = block(symbol, other, **options)
        assert len(results) == 3 + ("state" in options)
        assert results[1].shape == (2, 2, LENGTH, length)
        assert results[2].shape == (2, 2, LENGTH, 5)
        keras.tree.map_structure(
            lambda a, b: (
                np.testing.assert_equal(tuple(a.shape), tuple(b.shape)),
                np.testing.assert_equal(
                    keras.backend.standardize_dtype(a.dtype), b.dtype
                ),
            ),
            results,
            specs,
        )
    assert block(symbol, other).shape == x.shape


def test_dropout_of_each_part():
    x = sequence()
    plain = shuffle(layers.TransformerBlock(ours(), 8), x)
    block = layers.TransformerBlock(ours(), 8, dropout=0.5, seed=1)
    block.build(x.shape)
    block.set_weights(plain.get_weights())
    close(block(x), plain(x))
    rates = [
        getattr(block, f"{part}_dropout_layer").rate
        for part in ("attention", "cross_attention", "feed_forward")
    ]
    assert rates == [0.5] * 3
    # without attention, the feed-forward layer alone is dropped out
    for attention in (None, ours()):
        block = layers.TransformerBlock(attention, 8, dropout=0.5, seed=1)
        shuffle(block, x)
        dropped = to_numpy(block(x, training=True)) - to_numpy(x)
        zeros = (np.abs(dropped) < 1e-6).mean()
        expected = 0.5 if attention is None else 0.25
        assert abs(zeros - expected) < 0.2


@pytest.mark.parametrize("make", [ours, keras_multi_head, keras_grouped])
def test_saving(make, tmp_path):
    x, context = sequence(), sequence(5, seed=1)
    inputs = [keras.Input((None, FEATURES)) for _ in range(2)]
    block = layers.TransformerBlock(
        make(dropout=0.1, name="sparse"),
        8,
        cross_attention=make(),
        norm="post",
        norm_epsilon=1e-3,
        activation="quick_gelu",
        down="sum",
        dropout=0.2,
        kernel_initializer="he_normal",
        seed=3,
    )
    model = keras.Model(inputs, block(*inputs))
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    close(loaded([x, context]), model([x, context]))
    revived = loaded.layers[-1]
    assert revived.get_config() == block.get_config()
    assert type(revived.attention) is type(block.attention)
    assert revived.attention.name == "sparse"
    paths = [weight.path for weight in block.weights]
    assert len(set(paths)) == len(paths)


def test_half_precision():
    x = sequence()
    with_float32 = shuffle(layers.TransformerBlock(ours(), 8), x)
    block = layers.TransformerBlock(
        ours(dtype="mixed_bfloat16"), 8, dtype="mixed_bfloat16"
    )
    block.build(x.shape)
    block.set_weights(with_float32.get_weights())
    output = block(x)
    assert keras.backend.standardize_dtype(output.dtype) == "bfloat16"
    close(ops.cast(output, "float32"), with_float32(x), 0.1)


def test_block_without_attention():
    x = sequence()
    block = shuffle(layers.TransformerBlock(None, 8), x)
    assert block.initial_state(2) == {}
    output, state = block(x, use_causal_mask=True, state={})
    assert state == {}
    expected = block.feed_forward(block.feed_forward_norm(x))
    close(output, x + to_numpy(expected))
    with pytest.raises(ValueError, match="no attention.*global_mask"):
        block(x, global_mask=np.ones((2, LENGTH), bool))


def test_bad_use_is_refused():
    x = sequence()
    with pytest.raises(ValueError, match="layer or `None`.*attention='sparse"):
        layers.TransformerBlock("sparse", 8)
    with pytest.raises(ValueError, match="norm='around'"):
        layers.TransformerBlock(ours(), 8, norm="around")
    with pytest.raises(ValueError, match="dropout=1.5"):
        layers.TransformerBlock(ours(), 8, dropout=1.5)
    with pytest.raises(ValueError, match="`context`"):
        layers.TransformerBlock(ours(), 8)(x, x)
    with pytest.raises(ValueError, match="`context`"):
        layers.TransformerBlock(ours(), 8, cross_attention=ours())(x)
    block = keras_attn.TransformerBlock(keras_multi_head(), 8)
    with pytest.raises(ValueError, match="`MultiHeadAttention`.*streaming"):
        block.initial_state(2)
    with pytest.raises(ValueError, match="boolean `mask`"):
        layers.TransformerBlock(ours(), 8)(x, mask=np.ones((2, LENGTH)))
