import functools

import keras
import numpy as np
import pytest
from keras import ops

from keras_attn.ops import fixed_sparse_attention
from keras_attn.ops import linear_attention
from keras_attn.ops import lsh_attention
from keras_attn.ops import lsh_buckets
from keras_attn.ops import parts
from keras_attn.ops import strided_sparse_attention
from tests import memory
from tests.backend import few
from tests.backend import gradients
from tests.backend import run

MASK = np.arange(600) % 7 != 3
STATE = {
    "key_value_sum": np.random.default_rng(1).random((2, 6, 5, 7), "float32"),
    "key_sum": np.random.default_rng(2).random((2, 6, 5), "float32"),
}


def masks(length):
    return np.stack([MASK[:length], np.arange(length) < length - 9])


def lsh(query, key, value, **options):
    value = value + 0 * ops.sum(key)  # which has a gradient, too
    rotations = np.random.default_rng(3).normal(size=(6, 5, 2, 4))
    buckets = lsh_buckets(query, rotations.astype("float32"), 8)
    return lsh_attention(query, value, buckets, 16, **options)


def linear_with_state(*tensors, **options):
    state = {name: ops.convert_to_tensor(x) for name, x in STATE.items()}
    return linear_attention(*tensors, state=state, **options)[0]


# eight parts of 600 positions leave a rest, those of 512 do not
ATTENTION = [
    pytest.param(linear_attention, 600, {}, id="linear"),
    pytest.param(
        linear_attention, 600, {"use_causal_mask": True}, id="linear-causal"
    ),
    pytest.param(linear_attention, 512, {}, id="linear-512"),
    pytest.param(linear_with_state, 512, {}, id="linear-with-state"),
    pytest.param(lsh, 90, {"wrap": True}, id="lsh"),
    pytest.param(
        lsh,
        90,
        {"prefix_consistent": True, "use_causal_mask": True},
        id="lsh-causal",
    ),
] + [
    pytest.param(
        functools.partial(op, **sizes),
        50,
        {"heads": heads, "use_causal_mask": causal},
        id=f"{name}-{heads}{'-causal' * causal}",
    )
    for name, op, sizes in (
        ("strided", strided_sparse_attention, {"stride": 7}),
        (
            "fixed",
            fixed_sparse_attention,
            {"block_size": 8, "num_summary": 2, "num_subblocks": 3},
        ),
    )
    for heads in (
        ("split", "merged", "local", "strided")
        if name == "strided"
        else ("split", "merged", "local", "summary")
    )
    for causal in (False, True)
]
in_parts = pytest.mark.parametrize(
    ("attend", "length", "options"), few(ATTENTION)
)


def arrays(length):
    rng = np.random.default_rng(0)
    return [
        rng.normal(size=(2, length, 6, size)).astype("float32")
        for size in (5, 5, 7)
    ]


@pytest.mark.parametrize(("attend", "length", "options"), ATTENTION)
def test_parts_give_the_same(attend, length, options, monkeypatch):
    def masked(*tensors):
        return attend(*tensors, padding_mask=masks(length), **options)

    # new functions at every call, for JAX remembers how it has traced one
    def both(*tensors):
        output = run(lambda *x: masked(*x), *tensors)
        slopes = gradients(lambda *x: ops.square(masked(*x)), *tensors)
        return output, *slopes

    def count():
        return len(memory.array_sizes(lambda *x: masked(*x), *arrays(length)))

    whole, operations = both(*arrays(length)), count()
    monkeypatch.setattr(parts, "MANY_POSITIONS", length)
    assert count() > 1.5 * operations  # there are parts
    for actual, expected in zip(both(*arrays(length)), whole, strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)


@in_parts
def test_arrays_are_smaller(attend, length, options, monkeypatch):
    def largest():
        return memory.largest_array(
            lambda *x: attend(*x, **options), *arrays(length)
        )

    whole = largest()
    monkeypatch.setattr(parts, "MANY_POSITIONS", length)
    # inputs and output count, too
    assert largest() <= max(whole / 2, np.prod((2, length, 6, 7)))


@in_parts
def test_all_parts_are_dropped_out(attend, length, options, monkeypatch):
    tensors = [ops.convert_to_tensor(x) for x in arrays(length)]
    result = attend(*tensors, dropout=ops.zeros_like, **options)
    np.testing.assert_array_equal(ops.convert_to_numpy(result), 0)
    monkeypatch.setattr(parts, "MANY_POSITIONS", length)
    result = attend(*tensors, dropout=ops.zeros_like, **options)
    np.testing.assert_array_equal(ops.convert_to_numpy(result), 0)


def test_weights_are_those_of_all_heads_and_positions(monkeypatch):
    for attend, length, options in (case.values for case in ATTENTION):
        if attend is linear_with_state:
            continue
        results = []
        for many in (length + 1, length):
            monkeypatch.setattr(parts, "MANY_POSITIONS", many)
            with_scores = functools.partial(
                attend, return_attention_scores=True, **options
            )
            results.append(run(with_scores, *arrays(length)))
        whole, actual = results
        assert actual[1].shape == (2, 6, length, length)
        for a, b in zip(actual, whole, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_no_parts_of_what_is_distributed(monkeypatch):
    x = keras.KerasTensor((None, 8192, 4, 4))
    assert parts.has_many_positions(x)
    assert not parts.has_many_positions(keras.KerasTensor((2, 8191, 4, 4)))
    assert not parts.has_many_positions(keras.KerasTensor((2, None, 4, 4)))
    monkeypatch.setattr(keras.distribution, "distribution", object)
    assert not parts.has_many_positions(x)


@pytest.mark.parametrize(("num_heads", "calls"), [(8, 8), (12, 6), (11, 1)])
def test_heads_are_split_equally(num_heads, calls, monkeypatch):
    monkeypatch.setattr(parts, "MANY_POSITIONS", 3)
    query = ops.reshape(ops.arange(3 * num_heads), (1, 3, num_heads, 1))
    own = ops.reshape(ops.arange(num_heads), (num_heads, 1))
    seen = []

    def attend(heads, query, own):
        seen.append((heads.start, heads.stop))
        return query + own

    output = parts.attend_by_heads(attend, (query, own), (2, 0))
    size = num_heads // calls
    assert seen == [(i, i + size) for i in range(0, num_heads, size)]
    np.testing.assert_array_equal(
        ops.convert_to_numpy(output), ops.convert_to_numpy(query + own)
    )
