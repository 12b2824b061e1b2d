import functools

import keras
import numpy as np
import pytest
from keras import ops

from keras_attn.ops import dot_product_attention
from keras_attn.ops import query_blocks
from keras_attn.ops import top_k_attention
from tests import memory
from tests.backend import gradients
from tests.backend import run
from tests.backend import to_numpy

B, T, N, H, V = 2, 11, 3, 4, 6


@pytest.fixture(autouse=True)
def few_are_long(monkeypatch):
    monkeypatch.setattr(query_blocks, "BLOCK_SIZE", 3)
    monkeypatch.setattr(query_blocks, "LONG_QUERY", 5)
    monkeypatch.setattr(query_blocks, "LONG_KEY", 5)
    monkeypatch.setattr(query_blocks, "CAUSAL_PARTS", 2)


def heads(length=T):
    rng = np.random.default_rng(0)
    shapes = ((B, length, N, H), (B, T, N, H), (B, T, N, V))
    return [rng.normal(size=shape).astype("float32") for shape in shapes]


def masks(*names):
    """Masks by name, of which those of pairs leave some rows empty."""
    rng = np.random.default_rng(1)
    pairs = rng.random((B, N, T, T)) < 0.3
    choices = {
        "padding": {"padding_mask": np.arange(T) < [[T - 2], [0]]},
        "causal": {"use_causal_mask": True},
        "by_batch": {"attention_mask": pairs[:, 0]},
        "by_head": {"attention_mask": pairs},
        "of_keys": {"attention_mask": pairs[:, 0, :1]},
        "of_queries": {"attention_mask": pairs[:1, :, :, :1]},
    }
    return {k: v for name in names for k, v in choices[name].items()}


def identity(weights):
    """Dropout that drops nothing, but scores all pairs at once."""
    return weights


def attend(op, options, query, key, value, dropout=None):
    return ops.square(op(query, key, value, dropout=dropout, **options))


def top_six_attention(query, key, value, **options):
    return top_k_attention(query, key, value, top_k=6, **options)


@pytest.mark.parametrize(
    ("op", "names"),
    [
        (dot_product_attention, ()),
        (dot_product_attention, ("padding", "by_batch")),
        (dot_product_attention, ("padding", "by_head", "causal")),
        (dot_product_attention, ("of_keys", "causal")),
        (dot_product_attention, ("of_queries",)),
        (top_six_attention, ("padding",)),
        (top_six_attention, ("causal",)),
    ],
    # the address of a function is another one in every process
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_blocks_agree_with_all_pairs_at_once(op, names):
    arrays = heads(T if "causal" in names else 7)
    options = masks(*names)
    if arrays[0].shape[1] != T and "attention_mask" in options:
        options["attention_mask"] = options["attention_mask"][..., :7, :]
    fn = functools.partial(attend, op, options)
    dense = functools.partial(fn, dropout=identity)
    for actual, expected in zip(
        gradients(fn, *arrays), gradients(dense, *arrays), strict=True
    ):
        np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5)


def with_gradients(fn):
    """`fn` and its gradients, on TensorFlow traced once for all lengths."""
    if keras.backend.backend() != "tensorflow":
        return [lambda *x: [run(fn, *x), *gradients(fn, *x)]]
    import tensorflow as tf

    shapes = [(B, None, N, H), (B, None, N, H), (B, None, N, V)]

    def traced(*tensors):
        with tf.GradientTape() as tape:
            tape.watch(tensors)
            output = fn(*tensors)
        return [output, *tape.gradient(output, tensors)]

    return [
        tf.function(
            traced,
            input_signature=[tf.TensorSpec(shape) for shape in shapes],
            jit_compile=jit_compile,
        )
        for jit_compile in (False, True)
    ]


def test_lengths_need_not_be_known():
    options = masks("padding", "by_batch", "causal")

    def fn(*arrays, dropout=None):
        length = ops.shape(arrays[0])[1]
        padding = ops.convert_to_tensor(options["padding_mask"])
        pairs = ops.convert_to_tensor(options["attention_mask"])
        cropped = {
            "padding_mask": padding[:, :length],
            "attention_mask": pairs[:, :length, :length],
            "use_causal_mask": True,
        }
        return attend(dot_product_attention, cropped, *arrays, dropout)

    functions = with_gradients(fn)
    dense = functools.partial(fn, dropout=identity)
    for length in (2, T):  # less than a block, and some of them
        arrays = [x[:, :length] for x in heads()]
        expected = [run(dense, *arrays), *gradients(dense, *arrays)]
        for function in functions:
            actual = to_numpy(function(*arrays))
            for x, y in zip(actual, expected, strict=True):
                np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["padding", "causal"])
def test_memory_grows_with_the_length(name, monkeypatch):
    monkeypatch.setattr(query_blocks, "BLOCK_SIZE", 16)

    def inputs(length):
        rng = np.random.default_rng(0)
        return list(rng.normal(size=(3, 1, length, 1, 64)).astype("float32"))

    def fn(query, key, value):
        options = {"use_causal_mask": True}
        if name == "padding":
            options = {"padding_mask": np.arange(key.shape[1])[None] > 2}
        return dot_product_attention(query, key, value, **options)

    assert max(memory.growth(fn, inputs, length=128)) <= 4.5


def test_a_kernel_without_an_array_of_scores_is_left_to_work(monkeypatch):
    """JAX has one on accelerators, for bfloat16."""
    monkeypatch.setattr(keras.distribution, "list_devices", lambda: ["gpu:0"])
    monkeypatch.setattr(query_blocks, "BLOCK_SIZE", 1)
    query, *_ = heads()
    query = np.concatenate([query] * 8, axis=1)
    blocks, kernel = (
        memory.largest_array(dot_product_attention, x, x, x)
        for x in (ops.cast(query, dtype) for dtype in ("float32", "bfloat16"))
    )
    is_jax = keras.backend.backend() == "jax"
    assert (kernel > 4 * blocks) == is_jax
