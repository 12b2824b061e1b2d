import keras
import numpy as np
import pytest
from keras import ops

import keras_attn
from keras_attn import layers
from tests.backend import quick
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


@pytest.mark.parametrize(("norm", "down"), [("pre", "sum"), ("post", "dense")])
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


@pytest.mark.parametrize(
    ("make", "norm"),
    [(ours, "post"), (keras_multi_head, "pre"), (keras_grouped, "post")],
)
def test_padding_is_invisible(make, norm):
    """Whatever the attention, and to both kinds of it."""
    x, context = sequence(), sequence(LENGTH, seed=1)
    block = layers.TransformerBlock(
        make(), 8, cross_attention=make(), norm=norm
    )
    shuffle(block, x, context)
    mask = padding()
    x, context = (
        np.where(mask[..., None], y, np.nan).astype("float32")
        for y in (x, context)
    )

    def call(x, context, mask):
        return block(x, context, inputs_mask=mask, context_mask=mask)

    actual = run(call, x, context, mask)
    assert np.isfinite(actual[0]).all()
    short = slice(0, LENGTH - 2)
    close(actual[1:, short], run(block, x[1:, short], context[1:, short]))
    if make is ours:
        tensors = [ops.convert_to_tensor(y) for y in (x, context, mask)]
        gradients = weight_gradients(
            lambda: ops.sum(call(*tensors)[:, short]), block.trainable_weights
        )
        assert all(np.isfinite(gradient).all() for gradient in gradients)


def test_attached_masks_are_used_and_kept():
    """Keras' layer takes masks off; a second block must find them."""
    tokens, others = (keras.Input((None,), dtype="int32") for _ in range(2))
    embedding = keras.layers.Embedding(9, FEATURES, mask_zero=True)
    x, context = embedding(tokens), embedding(others)
    for _ in range(2):
        x = layers.TransformerBlock(
            keras_multi_head(), 8, cross_attention=keras_multi_head()
        )(x, context)
    model = keras.Model([tokens, others], x)
    ids, other_ids = np.array([[1, 2, 3, 0]]), np.array([[4, 5, 0, 0, 0]])
    long, short = (
        run(lambda *x: model(x), ids[:, :a], other_ids[:, :b])
        for a, b in ((4, 5), (3, 2))
    )
    close(long[:, :3], short)


@pytest.mark.parametrize("make", [keras_multi_head, keras_grouped])
def test_causality(make):
    block = shuffle(layers.TransformerBlock(make(), 8), sequence())
    call = quick(lambda x: block(x, use_causal_mask=True))
    x, changed = sequence(), sequence()
    changed[:, 4:] += 1
    a, b = (to_numpy(call(ops.convert_to_tensor(y))) for y in (x, changed))
    close(a[:, :4], b[:, :4])
    assert np.abs(a - b)[:, 4:].max() > 0.1


@pytest.mark.parametrize("dtype", ["mixed_bfloat16"])
def test_scores_states_and_symbolic_outputs(dtype):
    x, context = sequence(), sequence(5, seed=1)
    plain, block = (
        layers.TransformerBlock(
            ours(dtype=policy), 8, ours(dtype=policy), dtype=policy
        )
        for policy in ("float32", dtype)
    )
    shuffle(plain, x, context)
    block.build(x.shape, context.shape)
    block.set_weights(plain.get_weights())
    state = block.initial_state(2, max_length=9)

    def call(x, context, state):
        return block(x, context, state=state, return_attention_scores=True)

    results = quick(call)(
        *keras.tree.map_structure(ops.convert_to_tensor, (x, context, state))
    )
    symbols = [keras.KerasTensor(y.shape) for y in (x, context)]
    assert len(results) == 4
    assert results[1].shape == (2, 2, LENGTH, 9)
    assert results[2].shape == (2, 2, LENGTH, 5)
    keras.tree.map_structure(
        lambda a, b: np.testing.assert_equal(
            (tuple(a.shape), keras.backend.standardize_dtype(a.dtype)),
            (tuple(b.shape), b.dtype),
        ),
        results,
        call(*symbols, state),
    )
    assert block(*symbols, use_causal_mask=True).shape == x.shape
    expected = run(lambda *x: plain(*x, use_causal_mask=True), x, context)
    close(ops.cast(results[0], "float32"), expected, 0.1)


def test_dropout_of_each_part():
    x = sequence()
    block = layers.TransformerBlock(
        ours(), 8, cross_attention=ours(), dropout=0.5, seed=1
    )
    rates = [
        getattr(block, f"{part}_dropout_layer").rate
        for part in ("attention", "cross_attention", "feed_forward")
    ]
    assert rates == [0.5] * 3
    shuffle(block, x, x)
    dropped = to_numpy(block(x, x, training=True)) - x
    # all three at once, one time in eight
    assert 0.02 < (np.abs(dropped) < 1e-6).mean() < 0.25


def test_saving(tmp_path):
    x, context = sequence(), sequence(5, seed=1)
    inputs = [keras.Input((None, FEATURES)) for _ in range(2)]
    block = layers.TransformerBlock(
        ours(dropout=0.1, name="sparse"),
        8,
        cross_attention=keras_multi_head(),
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
    actual, expected = (
        run(lambda *x, m=m: m(x), x, context) for m in (loaded, model)
    )
    close(actual, expected)
    revived = loaded.layers[-1]
    assert revived.get_config() == block.get_config()
    assert revived.attention.dropout == 0.1
    assert isinstance(revived.cross_attention, keras.layers.MultiHeadAttention)
    paths = [weight.path for weight in block.weights]
    assert [weight.path for weight in revived.weights] == paths
    assert len(set(paths)) == len(paths)


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
    block = layers.TransformerBlock(layers.LinearAttention(2, 3), 8)
    with pytest.raises(ValueError, match="`LinearAttention`.*`attention_mask"):
        block(x, attention_mask=np.ones((2, LENGTH, LENGTH), bool))
    with pytest.raises(ValueError, match="boolean `mask`"):
        layers.TransformerBlock(ours(), 8)(x, mask=np.ones((2, LENGTH)))
