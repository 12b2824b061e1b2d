"""Random shapes, masks, options and dtypes against the float64 references.

Each test draws 20 cases, the same ones in every run, and 200 new ones with
`--nightly`.
"""

import functools

import hypothesis
import keras
import numpy as np
import pytest
from hypothesis import strategies as st
from keras import ops as keras_ops

from keras_attn import ops
from tests import reference
from tests.backend import run
from tests.ops.test_lsh import count_visits
from tests.reference import cbam
from tests.reference import linear
from tests.reference import linformer
from tests.reference import longformer
from tests.reference import low_rank
from tests.reference import lsh
from tests.reference import sparse_transformer
from tests.reference import synthesizer
from tests.reference import top_k
from tests.reference.sliding_window import window_masks

TOLERANCES = {"float32": 3e-5, "bfloat16": 6e-2, "float16": 1e-2}
DRAWS = [
    pytest.param(
        {"max_examples": 20, "derandomize": True, "database": None}, id="20"
    ),
    pytest.param({"max_examples": 200}, id="200", marks=pytest.mark.nightly),
]


@pytest.fixture(autouse=True)
def short_blocks(monkeypatch):
    """Lets short sequences span many blocks."""
    module = "keras_attn.ops.sliding_window.SMALLEST_BLOCK"
    monkeypatch.setattr(module, 2)


class Draw:
    """Draws what the tests of several mechanisms have in common."""

    def __init__(self, data):
        self.data = data
        self.random = np.random.default_rng(self.integer(0, 999))
        self.batch = self.integer(1, 3)
        self.length = self.integer(1, 17)
        self.heads = self.integer(1, 4)

    def integer(self, low, high):
        return self.data.draw(st.integers(low, high))

    def choice(self, *values):
        return self.data.draw(st.sampled_from(values))

    def array(self, *shape):
        """Numbers that every dtype holds exactly."""
        x = np.clip(self.random.normal(size=shape), -4, 4)
        return (np.round(x * 16) / 16).astype("float32")

    def qkv(self, keys=None):
        """Query, key and value, of as many keys as queries by default."""
        keys = self.length if keys is None else keys
        size, value_size = self.integer(1, 6), self.integer(1, 6)
        return [
            self.array(self.batch, self.length, self.heads, size),
            self.array(self.batch, keys, self.heads, size),
            self.array(self.batch, keys, self.heads, value_size),
        ]

    def kind_of_heads(self, other):
        """What the heads of the Sparse Transformer see."""
        kinds = ("merged", "local", other)
        return (
            self.choice(*kinds, "split")
            if self.heads > 1
            else self.choice(*kinds)
        )

    def padding(self, length=None):
        """A mask that may have holes, and leave rows empty."""
        shape = (self.batch, self.length if length is None else length)
        share = self.choice(0.0, 0.5, 0.9, 1.0)
        return self.random.random(shape) < share


def agree(fn, arrays, expected, dtype="float32"):
    """Compares `fn(*arrays)`, both in a dtype, with what is expected."""

    def cast(*tensors):
        return fn(
            *(
                keras_ops.cast(x, dtype)
                if keras.backend.is_float_dtype(x.dtype)
                else x
                for x in tensors
            )
        )

    actual = run(cast, *arrays)
    tolerance = TOLERANCES[dtype]
    for ours, theirs in zip(actual, expected, strict=True):
        scale = max(1.0, np.abs(theirs).max())
        np.testing.assert_allclose(
            ours.astype("float64"), theirs, rtol=0, atol=tolerance * scale
        )


def with_and_without_scores(op, *tensors, **options):
    """The output on the path without scores, then output and scores."""
    output = op(*tensors, **options)
    return output, *op(*tensors, **options, return_attention_scores=True)


def check_heads(draw, op, arrays, expected, dtype=None, **options):
    """Compares both paths of an op; the last of the arrays is the padding."""
    if dtype is None:
        dtype = draw.choice("float32", *TOLERANCES)
    agree(
        lambda *x: with_and_without_scores(
            op, *x[:-1], padding_mask=x[-1], **options
        ),
        arrays,
        (expected[0], *expected),
        dtype,
    )


def causal(length, is_causal):
    """Which pairs `(T, T)` causality allows."""
    pairs = np.ones((length, length), bool)
    return np.tril(pairs) if is_causal else pairs


def property_test(test):
    """Runs a test on what hypothesis draws."""

    @pytest.mark.parametrize("options", DRAWS)
    def draw_and_test(options):
        drawn = hypothesis.given(st.data())(lambda data: test(Draw(data)))
        hypothesis.settings(deadline=None, **options)(drawn)()

    draw_and_test.__name__ = test.__name__
    return draw_and_test


@property_test
def test_dot_product_attention(draw):
    is_causal = draw.choice(False, True)
    keys = draw.length if is_causal else draw.integer(1, 17)
    arrays, padding = draw.qkv(keys), draw.padding(keys)
    allowed = draw.random.random((draw.batch, draw.length, keys)) < 0.8
    mask = padding[:, None, None] & allowed[:, None]
    if is_causal:
        mask = mask & causal(keys, True)
    check_heads(
        draw,
        functools.partial(
            ops.dot_product_attention,
            attention_mask=allowed,
            use_causal_mask=is_causal,
        ),
        (*arrays, padding),
        reference.attend(*arrays, mask),
    )


@property_test
def test_linear_attention(draw):
    arrays, padding = draw.qkv(), draw.padding()
    is_causal = draw.choice(False, True)
    feature_map = draw.choice(*linear.FEATURE_MAPS)
    mask = padding[:, None, None] & causal(draw.length, is_causal)
    check_heads(
        draw,
        ops.linear_attention,
        (*arrays, padding),
        linear.linear_attention(*arrays, feature_map, mask),
        # a normaliser near 0 magnifies what half precision rounds away
        dtype=None if feature_map == "elu" else "float32",
        feature_map=feature_map,
        use_causal_mask=is_causal,
    )


@property_test
def test_linformer_attention(draw):
    keys = draw.integer(1, 17)
    arrays, padding = draw.qkv(keys), draw.padding(keys)
    shape = (keys + draw.integer(0, 3), draw.integer(1, 6))
    if draw.choice(False, True):
        shape = (draw.heads, *shape)
    projections = [draw.array(*shape) / 4 for _ in range(2)]
    expected = linformer.linformer_attention(*arrays, projections, padding)
    check_heads(
        draw,
        ops.linformer_attention,
        (*arrays, *projections, padding),
        expected,
        dtype=draw.choice("float32", "float16"),
    )


@property_test
def test_sliding_window_attention(draw):
    arrays, padding = draw.qkv(), draw.padding()
    left, right = draw.integer(0, 5), draw.integer(0, 5)
    is_causal = draw.choice(False, True)
    rates = tuple(draw.integer(1, 3) for _ in range(draw.heads))
    mask = window_masks(draw.length, left, right, rates)
    mask = mask & causal(draw.length, is_causal) & padding[:, None, None]
    check_heads(
        draw,
        ops.sliding_window_attention,
        (*arrays, padding),
        reference.attend(*arrays, mask),
        window_size=(left, right),
        dilation_rate=rates,
        use_causal_mask=is_causal,
    )


@property_test
def test_longformer_attention(draw):
    arrays, padding = draw.qkv(), draw.padding()
    others = [draw.array(*x.shape) for x in arrays]
    left, right = draw.integer(0, 4), draw.integer(0, 4)
    is_causal = draw.choice(False, True)
    slots = draw.integer(1, 4)
    positions = np.full((draw.batch, slots), -1, "int32")
    for row in positions:
        count = draw.integer(0, min(slots, draw.length))
        row[:count] = draw.random.permutation(draw.length)[:count]
    is_global = (positions[:, :, None] == np.arange(draw.length)).any(axis=1)
    query = np.take_along_axis(
        others[0], np.maximum(positions, 0)[..., None, None], 1
    )
    expected = longformer.attend(
        *arrays,
        window_masks(draw.length, left, right, [1] * draw.heads),
        is_global,
        padding,
        others,
        is_causal,
    )

    def op(query, key, value, *others, **options):
        names = ("global_query", "global_key", "global_value")
        return ops.longformer_attention(
            query,
            key,
            value,
            (left, right),
            keras_ops.convert_to_tensor(positions),
            use_causal_mask=is_causal,
            **dict(zip(names, others, strict=True)),
            **options,
        )

    check_heads(draw, op, (*arrays, query, *others[1:], padding), expected)


@property_test
def test_strided_sparse_attention(draw):
    arrays, padding = draw.qkv(), draw.padding()
    stride, is_causal = draw.integer(1, 6), draw.choice(False, True)
    heads = draw.kind_of_heads("strided")
    mask = sparse_transformer.strided_mask(
        draw.length, stride, heads, draw.heads, is_causal
    )
    check_heads(
        draw,
        ops.strided_sparse_attention,
        (*arrays, padding),
        reference.attend(*arrays, mask & padding[:, None, None]),
        stride=stride,
        heads=heads,
        use_causal_mask=is_causal,
    )


@property_test
def test_fixed_sparse_attention(draw):
    arrays, padding = draw.qkv(), draw.padding()
    summary, subblocks = draw.integer(1, 2), draw.integer(1, 3)
    options = {
        "block_size": summary * subblocks * draw.integer(1, 3),
        "num_summary": summary,
        "num_subblocks": subblocks,
        "heads": draw.kind_of_heads("summary"),
    }
    is_causal = draw.choice(False, True)
    mask = sparse_transformer.fixed_mask(
        draw.length, **options, num_heads=draw.heads, causal=is_causal
    )
    check_heads(
        draw,
        ops.fixed_sparse_attention,
        (*arrays, padding),
        reference.attend(*arrays, mask & padding[:, None, None]),
        use_causal_mask=is_causal,
        **options,
    )


@property_test
def test_lsh_attention(draw):
    query, _, value = draw.qkv()
    padding = draw.padding()
    shape = (draw.batch, draw.heads, draw.integer(1, 3), draw.length)
    buckets = draw.random.integers(draw.integer(1, 4), size=shape)
    is_causal = draw.choice(False, True)
    options = {
        "bucket_size": draw.integer(1, 5),
        "allow_duplicates": draw.choice(False, True),
    }
    if is_causal and draw.choice(False, True):
        options.update(prefix_consistent=True, chunks_before=draw.integer(1, 2))
    else:
        options.update(
            chunks_before=draw.integer(0, 2),
            chunks_after=draw.integer(0, 1),
            wrap=draw.choice(False, True),
            attend_across_buckets=draw.choice(False, True),
        )
    count = count_visits(buckets, padding, **options)
    expected = lsh.attend(
        query, value, count, is_causal, options["allow_duplicates"]
    )
    check_heads(
        draw,
        ops.lsh_attention,
        (query, value, buckets.astype("int32"), padding),
        expected,
        dtype="float32",  # rounding would decide the buckets of a layer
        use_causal_mask=is_causal,
        **options,
    )


@property_test
def test_synthesizer(draw):
    keys = draw.integer(1, 17)
    _, _, value = draw.qkv(keys)
    padding, size = draw.padding(keys), draw.integer(1, 5)
    hidden = draw.array(draw.batch, draw.length, draw.heads, size)
    kernel = draw.array(draw.heads, size, keys + draw.integer(0, 4))
    bias = draw.array(draw.heads, kernel.shape[-1])
    scores = synthesizer.dense(hidden, kernel, bias, keys)
    weights = reference.softmax(scores, padding[:, None, None])
    heads = np.einsum("bnts,bsnv->btnv", weights, value)

    def op(hidden, kernel, bias, value, **options):
        scores = ops.dense_scores(hidden, kernel, keys, bias)
        return ops.synthesizer(scores, value, **options)

    arrays = (hidden, kernel, bias, value, padding)
    check_heads(draw, op, arrays, (heads, weights))


@property_test
def test_top_k_attention(draw):
    is_causal = draw.choice(False, True)
    keys = draw.length if is_causal else draw.integer(1, 17)
    # no two scores tie, lest rounding decide what is chosen
    arrays = [draw.random.normal(size=x.shape) for x in draw.qkv(keys)]
    arrays, padding = [x.astype("float32") for x in arrays], draw.padding(keys)
    count = draw.choice(1, 2, 5, 40, 0.3, 0.5)
    mask = np.broadcast_to(padding[:, None, None], (draw.batch, 1, 1, keys))
    if is_causal:
        mask = mask & causal(keys, True)
    scores = np.einsum("btnh,bsnh->bnts", *arrays[:2]).astype("float64")
    mask = top_k.chosen(scores, count, mask)
    check_heads(
        draw,
        ops.top_k_attention,
        (*arrays, padding),
        reference.attend(*arrays, mask),
        dtype="float32",
        top_k=count,
        use_causal_mask=is_causal,
    )


@property_test
def test_single_head_attention(draw):
    memory = draw.integer(0, 5)
    keys = draw.length + memory
    arrays, padding = draw.qkv(keys), draw.padding(keys)
    gates = [draw.array(draw.heads, x.shape[-1]) for x in arrays]
    gated = [x * gate for x, gate in zip(arrays, gates, strict=True)]
    mask = np.tril(np.ones((draw.length, keys), bool), memory)
    check_heads(
        draw,
        functools.partial(ops.single_head_attention, use_causal_mask=True),
        (*arrays, *gates, padding),
        reference.attend(*gated, mask & padding[:, None, None]),
        dtype="float32",  # gated scores are large, and half precision coarse
    )


@property_test
def test_lama(draw):
    rank, size, context_size = (draw.integer(1, 4) for _ in range(3))
    arrays = (
        draw.array(draw.batch, draw.length, size),
        draw.array(draw.batch, context_size),
        draw.array(context_size, draw.heads * rank),
        draw.array(size, draw.heads * rank),
    )
    # without a bias all scores of a position may be 0, which has no direction
    bias = 0.5 + np.abs(draw.array(draw.heads))
    padding, temperature = draw.padding(), draw.choice(0.5, 1.0)
    normalize = draw.choice(False, True)
    agree(
        lambda *x: ops.lama(
            *x[:4],
            bias=x[4],
            rank=rank,
            normalize=normalize,
            temperature=temperature,
            padding_mask=x[5],
            return_attention_scores=True,
        ),
        (*arrays, bias, padding),
        low_rank.lama(*arrays, rank, bias, normalize, temperature, padding),
    )


@property_test
def test_channel_attention(draw):
    space = [draw.integer(1, 4) for _ in range(draw.integer(1, 3))]
    features, hidden = draw.integer(1, 5), draw.integer(1, 3)
    x = draw.array(draw.batch, *space, features)
    mask = draw.random.random(x.shape[:-1]) < draw.choice(0.0, 0.5, 1.0)
    weights = [
        draw.array(features, hidden),
        draw.array(hidden),
        draw.array(hidden, features),
        draw.array(features),
    ]
    pooling = draw.choice(("avg",), ("max",), ("avg", "max"))

    def gates(x, mask, kernel_0, bias_0, kernel_1, bias_1):
        def mlp(pools):
            hidden = keras_ops.relu(keras_ops.matmul(pools, kernel_0) + bias_0)
            return keras_ops.matmul(hidden, kernel_1) + bias_1

        return (ops.channel_attention(x, mlp, pooling, padding_mask=mask),)

    expected = cbam.channel_gates(x, weights, pooling, mask)
    agree(gates, (x, mask, *weights), (expected,))


@property_test
def test_spatial_attention(draw):
    space = [draw.integer(1, 5) for _ in range(draw.integer(1, 2))]
    x = draw.array(draw.batch, *space, draw.integer(1, 4))
    mask = draw.random.random(x.shape[:-1]) < draw.choice(0.0, 0.5, 1.0)
    kernel = draw.array(*(draw.choice(1, 3) for _ in space), 2, 1)

    def gates(x, mask, kernel):
        return (
            ops.spatial_attention(
                x,
                lambda pools: keras_ops.conv(pools, kernel, padding="same"),
                padding_mask=mask,
            ),
        )

    expected = cbam.spatial_gates(x, kernel, mask=mask)
    agree(gates, (x, mask, kernel), (expected,))
