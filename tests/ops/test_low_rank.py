import functools

import numpy as np
import pytest
from keras import ops

from keras_attn.ops import lama
from keras_attn.ops import orthogonality_penalty
from tests import golden
from tests.backend import gradients
from tests.backend import run
from tests.reference import low_rank as definitions


def arrays(length, heads=3, rank=1, size=5, context_size=7, seed=0):
    rng = np.random.default_rng(seed)
    shapes = [
        (2, length, size),
        (2, context_size),
        (context_size, heads * rank),
        (size, heads * rank),
    ]
    return [rng.normal(size=shape).astype("float32") for shape in shapes]


def close(actual, expected, tolerance=2e-6):
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=tolerance)


@pytest.mark.parametrize(
    ("length", "heads", "rank", "normalize", "temperature"),
    [
        (1, 3, 1, True, 1.0),
        (11, 3, 1, True, 0.1),
        (11, 3, 2, True, 1.0),
        (7, 3, 4, False, 2.0),
        (7, 1, 2, False, 1.0),
    ],
)
def test_matches_reference(length, heads, rank, normalize, temperature):
    inputs = arrays(length, heads, rank)
    bias = np.linspace(-0.5, 0.5, heads).astype("float32")
    mask = np.arange(length) < [[length], [max(length - 2, 1)]]
    actual = run(
        lambda *x: lama(
            *x[:4],
            bias=x[4],
            rank=rank,
            normalize=normalize,
            temperature=temperature,
            padding_mask=x[5],
            return_attention_scores=True,
        ),
        *(*inputs, bias, mask),
    )
    expected = definitions.lama(
        *inputs, rank, bias, normalize, temperature, mask
    )
    close(actual[0], expected[0])
    close(actual[1], expected[1])


def test_a_case_worked_by_hand():
    # two heads read the two features; rows have norm 1 after tanh and division
    inputs = np.array([[[2.0, 0.0], [0.0, 1.0]]], "float32")
    eye = np.eye(2, dtype="float32")
    context = np.ones((1, 2), "float32")
    output, scores = run(
        lambda *x: lama(*x, return_attention_scores=True),
        *(inputs, context, eye, eye),
    )
    high, low = np.e / (np.e + 1), 1 / (np.e + 1)
    close(scores, [[[high, low], [low, high]]])
    close(output, [[[2 * high, low], [2 * low, high]]])


@pytest.mark.parametrize("name", golden.names("lama_*"))
def test_matches_golden_data(name):
    data = golden.load(name)
    is_mean = data["context"].item() != "learned"
    mask = data.get("keep_mask")
    mask = None if mask is None else ops.convert_to_tensor(mask)
    activation = ops.tanh
    if data.get("activation", np.array("tanh")).item() == "linear":
        activation = lambda x: x  # noqa: E731

    def pool(x, context_kernel, input_kernel, context=None):
        if is_mean:
            keep = ops.ones(x.shape[:2]) if mask is None else mask
            keep = ops.cast(keep, x.dtype)[..., None]
            context = ops.sum(x * keep, axis=1) / ops.sum(keep, axis=1)
        else:
            context = context[None]
        hidden = None
        if "W_u" in data:
            hidden = ops.tanh(
                ops.matmul(x, ops.convert_to_tensor(data["W_u"]))
                + ops.convert_to_tensor(data["b_u"])
            )
        bias = data.get("bias")
        return lama(
            x,
            context,
            context_kernel,
            input_kernel,
            hidden=hidden,
            rank=int(data.get("rank", 1)),
            bias=None if bias is None else ops.convert_to_tensor(bias),
            activation=activation,
            normalize=bool(data.get("l2_normalize", True)),
            padding_mask=mask,
            return_attention_scores=True,
        )

    def loss(*inputs):
        output, _ = pool(*inputs)
        if "W_out" in data:
            output = ops.reshape(output, (output.shape[0], -1))
            output = ops.matmul(output, ops.convert_to_tensor(data["W_out"]))
        return output * ops.convert_to_tensor(data["R"])

    names = ["x", "P", "Q"] if is_mean else ["x", "P", "Q", "c"]
    inputs = [data[name] for name in names]
    output, scores = run(pool, *inputs)
    close(output, data["sentence_matrix"], 2e-5)
    close(scores, data["attention"], 2e-5)
    for name, gradient in zip(names, gradients(loss, *inputs), strict=True):
        close(gradient, data[f"grad_{name}"], 2e-4)
    if "frobenius_penalty_per_sentence" in data:
        penalty = run(orthogonality_penalty, scores)
        close(penalty, data["frobenius_penalty_per_sentence"], 2e-5)


def test_equal_scores_give_the_mean():
    inputs, context, *kernels = arrays(7)
    output = run(lama, inputs, context * 0, *kernels)
    mean = np.broadcast_to(inputs.mean(axis=1, keepdims=True), output.shape)
    close(output, mean)


def test_padding_gives_zeros_and_finite_gradients():
    inputs, *rest = arrays(7)
    inputs[:, 5:] = 0.0  # where the norm of the scores has no slope
    mask = ops.convert_to_tensor(np.arange(7) < [[5], [0]])
    pool = functools.partial(
        lama, padding_mask=mask, return_attention_scores=True
    )
    for x in run(pool, inputs, *rest):
        np.testing.assert_array_equal(x[1], 0)
        assert (x[0] != 0).any()
    for gradient in gradients(lambda *x: pool(*x)[0], inputs, *rest):
        assert np.isfinite(gradient).all()
        assert (gradient != 0).any()


def test_scores_are_float32_in_half_precision():
    inputs, context, *kernels = arrays(700)

    def pool(*x, dtype, compute_dtype):
        x = (ops.cast(ops.cast(y, dtype), compute_dtype) for y in x)
        output, scores = lama(*x, return_attention_scores=True)
        return ops.cast(output, "float32"), ops.cast(scores, "float32")

    args = (inputs, context, *kernels)
    for dtype, tolerance in (("bfloat16", 2**-8), ("float16", 2**-11)):
        half, full = (
            run(functools.partial(pool, dtype=dtype, compute_dtype=x), *args)
            for x in (dtype, "float32")
        )
        # nothing but the result is rounded
        np.testing.assert_allclose(half[1], full[1], rtol=tolerance)
        np.testing.assert_allclose(half[0], full[0], atol=4 * tolerance)


def test_penalty_is_least_if_heads_attend_apart():
    apart = np.eye(3, 7, dtype="float32")[None]
    together = np.ones((1, 3, 7), "float32") * np.eye(1, 7, dtype="float32")
    close(run(orthogonality_penalty, apart), [0.0])
    close(run(orthogonality_penalty, together), [6.0])
