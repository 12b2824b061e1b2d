import functools

import numpy as np
import pytest
from keras import ops

from keras_attn.ops import linear_attention
from keras_attn.ops import positive_random_features
from tests import golden
from tests import memory
from tests import reference
from tests.backend import compiled
from tests.backend import gradients
from tests.backend import run
from tests.backend import to_numpy
from tests.reference import linear as definitions

FEATURE_MAPS = {
    "elu_plus_one": "elu",
    "relu": "relu",
    "square": ops.square,
}


def heads(length, keys=None, size=5, value_size=7, seed=0):
    rng = np.random.default_rng(seed)
    keys = length if keys is None else keys
    shapes = [(length, 3, size), (keys, 3, size), (keys, 3, value_size)]
    return [rng.normal(size=(2, *shape)).astype("float32") for shape in shapes]


def padding(length):
    """A mask with a gap, and one that begins and ends with padding."""
    positions = np.arange(length)
    return np.stack([positions % 5 != 3, (positions > 1) & (positions < 70)])


def relative_error(actual, expected):
    return np.linalg.norm(actual - expected) / np.linalg.norm(expected)


@pytest.mark.parametrize(
    ("length", "keys", "feature_map", "use_causal_mask"),
    [
        (1, 1, "elu", True),
        (7, 11, "elu", False),
        (11, 7, "squared_relu", False),
        (64, 64, "elu", True),  # one chunk
        (65, 65, "relu", True),  # one position in the second
        (130, 130, "squared_relu", True),
    ],
)
def test_matches_reference(length, keys, feature_map, use_causal_mask):
    query, key, value = heads(length, keys)
    mask = padding(keys)
    output, scores = run(
        lambda query, key, value, mask: linear_attention(
            query,
            key,
            value,
            feature_map=feature_map,
            padding_mask=mask,
            use_causal_mask=use_causal_mask,
            return_attention_scores=True,
        ),
        *(query, key, value, mask),
    )
    visible = mask[:, None, None, :]
    if use_causal_mask:
        visible = visible & np.tril(np.ones((length, length), bool))
    expected = definitions.linear_attention(
        query, key, value, feature_map, visible
    )
    np.testing.assert_allclose(output, expected[0], rtol=1e-5, atol=2e-6)
    np.testing.assert_allclose(scores, expected[1], rtol=1e-5, atol=2e-6)


def test_weights_leave_what_lies_on_earlier_positions():
    def attend(query, key, value):
        _, expected = linear_attention(
            query,
            key,
            value,
            use_causal_mask=True,
            return_attention_scores=True,
        )
        state = {
            "key_value_sum": ops.zeros((2, 3, 5, 7)),
            "key_sum": ops.zeros((2, 3, 5)),
        }
        query, key, value = ([x[:, :4], x[:, 4:]] for x in (query, key, value))
        for part in zip(query, key, value, strict=True):
            _, actual, state = linear_attention(
                *part, state=state, return_attention_scores=True
            )
        return actual, expected[:, :, 4:, 4:]

    actual, expected = run(attend, *heads(11))
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-7)


def test_weights_of_a_case_worked_by_hand():
    # the features of 0, 1 and -1 are 1, 2 and 1/e
    query = np.zeros((1, 3, 1, 1), "float32")
    key = np.array([0.0, 1.0, -1.0], "float32").reshape(1, 3, 1, 1)
    value = np.array([6.0, 3.0, 9.0], "float32").reshape(1, 3, 1, 1)
    output = run(
        lambda *x: linear_attention(*x, use_causal_mask=True), query, key, value
    )
    last = (12 + 9 / np.e) / (3 + 1 / np.e)
    np.testing.assert_allclose(output[0, :, 0, 0], [6.0, 4.0, last], rtol=1e-5)


@pytest.mark.parametrize("name", golden.names("linear_core_*"))
def test_matches_the_papers_program(name):
    data = golden.load(name)
    if "omega" in data:
        feature_map = functools.partial(
            positive_random_features,
            directions=ops.convert_to_tensor(data["omega"]),
        )
        features = run(feature_map, data["q"])
        np.testing.assert_allclose(features, data["phi_q"], rtol=1e-5)
    else:
        feature_map = FEATURE_MAPS[data["feature_map"].item()]
    attend = functools.partial(
        linear_attention,
        feature_map=feature_map,
        epsilon=float(data["eps"]),
        padding_mask=ops.convert_to_tensor(data["key_keep_mask"]),
        use_causal_mask=bool(data.get("causal", False)),
    )
    inputs = [data[x] for x in "qkv"]
    np.testing.assert_allclose(run(attend, *inputs), data["out"], atol=2e-5)
    weights = ops.convert_to_tensor(data["R"])
    actual = gradients(lambda *x: attend(*x) * weights, *inputs)
    for x, gradient in zip("qkv", actual, strict=True):
        np.testing.assert_allclose(gradient, data[f"grad_{x}"], atol=2e-4)
    if "final_state_S" in data:
        empty = {
            "key_value_sum": ops.zeros(data["final_state_S"].shape),
            "key_sum": ops.zeros(data["final_state_Z"].shape),
        }
        _, state = run(lambda *x: attend(*x, state=empty), *inputs)
        for x, expected in (("key_value_sum", "S"), ("key_sum", "Z")):
            np.testing.assert_allclose(
                state[x], data[f"final_state_{expected}"], rtol=1e-5, atol=1e-5
            )


def test_gradients_match_the_quadratic_form():
    inputs = heads(70)
    mask = ops.convert_to_tensor(padding(70))

    def quadratic(query, key, value):
        query, key = (ops.elu(x) + 1 for x in (query, key))
        weights = ops.tril(ops.einsum("btnd,bsnd->bnts", query, key))
        weights = weights * ops.cast(mask, "float32")[:, None, None, :]
        total = ops.sum(weights, axis=-1, keepdims=True) + 1e-6
        return ops.square(ops.einsum("bnts,bsnv->btnv", weights / total, value))

    def chunked(query, key, value):
        return ops.square(
            linear_attention(
                query, key, value, padding_mask=mask, use_causal_mask=True
            )
        )

    for actual, expected in zip(
        gradients(chunked, *inputs), gradients(quadratic, *inputs), strict=True
    ):
        np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5)


def test_any_split_of_a_sequence_gives_the_same():
    query, key, value = heads(150)
    mask = padding(150)
    attend = compiled(
        lambda query, key, value, mask, state=None: linear_attention(
            query,
            key,
            value,
            padding_mask=mask,
            use_causal_mask=True,
            state=state,
        )
    )
    tensors = [ops.convert_to_tensor(x) for x in (query, key, value, mask)]
    expected = to_numpy(attend(*tensors))
    for sizes in ([70, 1, 1, 78], [64, 86]):
        state = {
            "key_value_sum": ops.zeros((2, 3, 5, 7)),
            "key_sum": ops.zeros((2, 3, 5)),
        }
        start = 0
        for size in sizes:
            output, state = attend(
                *(x[:, start : start + size] for x in tensors), state
            )
            np.testing.assert_allclose(
                to_numpy(output),
                expected[:, start : start + size],
                rtol=1e-5,
                atol=2e-6,
            )
            start += size
        np.testing.assert_allclose(
            to_numpy(state["key_sum"]),
            np.einsum(
                "btnd,bt->bnd", np.where(key > 0, key + 1, np.exp(key)), mask
            ),
            rtol=1e-5,
        )


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [("float32", 1e-5), ("bfloat16", 2e-2), ("float16", 2e-3)],
)
def test_long_sequences_keep_their_precision(dtype, tolerance):
    # a matrix of all pairs would take 16 GB here
    length = 65_536
    rng = np.random.default_rng(0)
    query, key, value, weights = (
        rng.normal(size=(1, length, 1, 2)).astype("float32") for _ in range(4)
    )
    value += 0.5

    def attend(query, key, value):
        query, key, value = (ops.cast(x, dtype) for x in (query, key, value))
        heads = linear_attention(query, key, value, use_causal_mask=True)
        return ops.cast(heads, "float32")

    output = run(attend, query, key, value)
    (gradient,) = gradients(
        lambda value: (
            attend(
                ops.convert_to_tensor(query), ops.convert_to_tensor(key), value
            )
            * ops.convert_to_tensor(weights)
        ),
        value,
    )
    expected = definitions.long_causal_linear_attention(
        query, key, value, weights
    )
    for a, b in zip((output, gradient), expected, strict=True):
        assert relative_error(a, b) < tolerance
        assert relative_error(a[:, -1000:], b[:, -1000:]) < tolerance


def test_sums_of_many_equal_keys_do_not_stall_in_half_precision():
    def attend(x):
        x = ops.cast(x, "float16")
        causal = linear_attention(x, x, x, use_causal_mask=True)
        return causal[:, -1], linear_attention(x, x, x)[:, -1]

    x = np.full((1, 16_384, 1, 1), 1.2, "float32")
    for output in run(attend, x):
        np.testing.assert_allclose(output, [[[1.2]]], rtol=1e-2)


def test_random_features_estimate_softmax_attention():
    query, key, value = heads(9)
    query, key = query / 2, key / 2  # far from zero, estimates vary more
    directions = np.random.default_rng(1).normal(size=(5, 20_000))
    feature_map = functools.partial(
        positive_random_features,
        directions=ops.convert_to_tensor(directions.astype("float32")),
    )
    output = run(
        lambda *x: linear_attention(*x, feature_map=feature_map),
        *(query, key, value),
    )
    expected, _ = reference.attend(query, key, value)
    assert relative_error(output, expected) < 0.02


def test_the_default_features_keep_what_is_left_of_small_numbers():
    x = np.array([[[[-12.0]], [[-15.0]]]], "float32")
    value = np.array([[[[0.0]], [[1.0]]]], "float32")
    output = run(lambda x, v: linear_attention(x, x, v, epsilon=0.0), x, value)
    expected = np.exp(-15.0) / (np.exp(-12.0) + np.exp(-15.0))
    np.testing.assert_allclose(output, np.full_like(value, expected), rtol=1e-5)


def test_the_default_features_have_a_slope_at_zero():
    def phi(x):
        ones = ops.ones((1, 1, 1, 1))
        # phi(x) * phi(1) / (phi(x) * phi(1) + epsilon), epsilon very large
        return linear_attention(x, ones, ones, epsilon=2e6) * 1e6

    (slope,) = gradients(phi, np.zeros((1, 1, 1, 1), "float32"))
    np.testing.assert_allclose(slope, [[[[1.0]]]], rtol=1e-4)


@pytest.mark.parametrize("use_causal_mask", [False, True])
@pytest.mark.parametrize("feature_map", ["relu", "squared_relu"])
def test_queries_without_features_give_zeros(feature_map, use_causal_mask):
    query, key, value = heads(6)
    query[0] = -np.abs(query[0])
    key[1] = -np.abs(key[1])

    def attend(query, key, value):
        return linear_attention(
            query,
            key,
            value,
            feature_map=feature_map,
            use_causal_mask=use_causal_mask,
        )

    np.testing.assert_array_equal(run(attend, query, key, value), 0)
    for gradient in gradients(attend, query, key, value):
        assert np.isfinite(gradient).all()


@pytest.mark.parametrize("use_causal_mask", [False, True])
def test_queries_without_keys_give_zeros(use_causal_mask):
    inputs = heads(70)
    mask = np.stack([np.arange(70) > 66, np.zeros(70, bool)])

    def attend(query, key, value):
        return linear_attention(
            query,
            key,
            value,
            padding_mask=ops.convert_to_tensor(mask),
            use_causal_mask=use_causal_mask,
            return_attention_scores=True,
        )

    output, scores = run(attend, *inputs)
    np.testing.assert_array_equal(output[1], 0)
    np.testing.assert_array_equal(scores[1], 0)
    if use_causal_mask:  # padding on the left
        np.testing.assert_array_equal(output[0, :67], 0)
        assert (output[0, 67:] != 0).all()
    for gradient in gradients(lambda *x: attend(*x)[0], *inputs):
        assert np.isfinite(gradient).all()


def test_dropout_acts_on_the_heads():
    query, key, value = heads(4)
    attend = functools.partial(linear_attention, use_causal_mask=True)
    np.testing.assert_allclose(
        run(lambda *x: attend(*x, dropout=lambda x: 2 * x), query, key, value),
        run(lambda *x: 2 * attend(*x), query, key, value),
        rtol=1e-6,
    )


def test_causal_attention_of_unequal_lengths_is_refused():
    with pytest.raises(ValueError, match="5 queries and 7 keys"):
        linear_attention(*heads(5, 7), use_causal_mask=True)


@pytest.mark.parametrize("use_causal_mask", [False, True])
def test_memory_grows_with_the_length(use_causal_mask):
    def attend(query, key, value):
        return linear_attention(
            query, key, value, use_causal_mask=use_causal_mask
        )

    def inputs(length):
        return [np.ones((1, length, 2, 8), "float32")] * 3

    assert max(memory.growth(attend, inputs, length=512)) <= 4.5
