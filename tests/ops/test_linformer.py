import numpy as np
import pytest
from keras import ops

from keras_attn.ops import dot_product_attention
from keras_attn.ops import linformer_attention
from keras_attn.ops import linformer_window_attention
from tests import golden
from tests import memory
from tests import reference
from tests.backend import gradients
from tests.backend import run
from tests.reference import linformer as definitions


def heads(length, keys=None, size=5, value_size=7, seed=0):
    rng = np.random.default_rng(seed)
    keys = length if keys is None else keys
    shapes = [(length, 3, size), (keys, 3, size), (keys, 3, value_size)]
    return [rng.normal(size=(2, *shape)).astype("float32") for shape in shapes]


def projections(shape, seed=1):
    rng = np.random.default_rng(seed)
    return [rng.normal(size=shape).astype("float32") / 3 for _ in range(2)]


def padding(length):
    positions = np.arange(length)
    return np.stack([positions % 5 != 3, (positions > 1) & (positions < 8)])


def close(actual, expected, tolerance=2e-6):
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=tolerance)


@pytest.mark.parametrize(
    ("length", "keys", "shape"),
    [
        (1, 3, (3, 1)),
        (11, 11, (13, 4)),  # shorter than the matrices
        (7, 11, (3, 11, 4)),  # a matrix for each head
        (7, 5, (3, 13, 17)),  # more slots than keys
    ],
)
def test_matches_reference(length, keys, shape):
    inputs = (*heads(length, keys), *projections(shape), padding(keys))
    output, scores = run(
        lambda query, key, value, key_projection, value_projection, mask: (
            linformer_attention(
                query,
                key,
                value,
                key_projection,
                value_projection,
                padding_mask=mask,
                return_attention_scores=True,
            )
        ),
        *inputs,
    )
    expected = definitions.linformer_attention(
        *inputs[:3], inputs[3:5], inputs[5]
    )
    close(output, expected[0])
    close(scores, expected[1])


def test_identity_projections_give_full_attention():
    query, key, value = heads(7, 11)
    eye = np.eye(11, dtype="float32")
    expected, _ = reference.attend(query, key, value)
    close(run(linformer_attention, query, key, value, eye), expected)


def test_keys_and_values_share_a_lone_projection():
    inputs = heads(7)
    matrix, _ = projections((7, 3))
    close(
        run(linformer_attention, *inputs, matrix),
        run(linformer_attention, *inputs, matrix, matrix),
        0,
    )


def test_padding_at_the_end_changes_nothing():
    query, key, value = heads(7, 11)
    matrices = projections((13, 4))
    mask = np.broadcast_to(np.arange(11) < 6, (2, 11))
    padded = run(
        lambda *x: linformer_attention(*x[:-1], padding_mask=x[-1]),
        *(query, key, value, *matrices, mask),
    )
    bare = run(linformer_attention, query, key[:, :6], value[:, :6], *matrices)
    close(padded, bare, 1e-6)


@pytest.mark.parametrize("name", golden.names("linformer_paper_*"))
def test_matches_linformer_pytorch(name):
    data = golden.load(name)

    def attend(x, context, key_projection, value_projection):
        """Takes what the program calls a bias for one more position.

        A bias is added to every feature of a slot, as a key and value of ones
        would be, in a last row of the projection.
        """
        query, key, value = (
            ops.einsum("btf,fnh->btnh", x, ops.convert_to_tensor(data[kernel]))
            for x, kernel in ((x, "W_q"), (context, "W_k"), (context, "W_v"))
        )
        mask = data.get("key_keep_mask")
        if mask is not None:
            mask = np.concatenate([mask, np.ones((len(mask), 1), bool)], axis=1)
        key, value = (
            ops.concatenate([x, ops.ones_like(x[:, :1])], axis=1)
            for x in (key, value)
        )
        output = linformer_attention(
            query,
            key,
            value,
            with_bias(key_projection, "E_bias"),
            with_bias(value_projection, "F_bias"),
            padding_mask=None if mask is None else ops.convert_to_tensor(mask),
        )
        kernel = ops.convert_to_tensor(data["W_o"])
        return ops.einsum("btnv,nve->bte", output, kernel)

    def with_bias(projection, bias):
        bias = ops.convert_to_tensor(data[bias][:, None])
        projection = ops.swapaxes(projection, 1, 2)
        return ops.concatenate([projection, bias], axis=1)

    own = data["E"].shape[0] > 1
    context = data.get("x_context", data["x"])
    inputs = [data["x"], context, data["E"], data["F"]]
    if not own:  # one matrix for all heads
        inputs[2:] = [
            np.broadcast_to(x, (data["W_q"].shape[1], *x.shape[1:])).copy()
            for x in inputs[2:]
        ]
        data["E_bias"], data["F_bias"] = (
            np.broadcast_to(
                data[x], (data["W_q"].shape[1], *data[x].shape[1:])
            ).copy()
            for x in ("E_bias", "F_bias")
        )
    close(run(attend, *inputs) + data["b_o"], data["out"], 2e-5)
    weights = ops.convert_to_tensor(data["R"])
    of_x, of_context, of_keys, of_values = gradients(
        lambda *x: attend(*x) * weights, *inputs
    )
    if "x_context" in data:
        close(of_x, data["grad_x"], 2e-4)
        close(of_context, data["grad_x_context"], 2e-4)
    else:
        close(of_x + of_context, data["grad_x"], 2e-4)
    if own:
        close(of_keys[0], data["grad_E_head0"], 2e-4)
    elif data["sharing"].item() == "headwise":
        close(of_keys.sum(axis=0), data["grad_E_head0"], 2e-4)
    else:
        total = (of_keys + of_values).sum(axis=0)
        close(total, data["grad_E_head0"], 2e-4)


def test_gradients_match_attention_to_slots():
    query, key, value = heads(7)
    matrices = projections((3, 9, 4))
    mask = ops.convert_to_tensor(padding(7))

    def slots(query, key, value, *matrices):
        key, value = (
            ops.einsum(
                "bsnh,nsk,bs->bknh", x, matrix[:, :7], ops.cast(mask, x.dtype)
            )
            for x, matrix in zip((key, value), matrices, strict=True)
        )
        return ops.square(dot_product_attention(query, key, value))

    def linformer(*inputs):
        return ops.square(linformer_attention(*inputs, padding_mask=mask))

    inputs = (query, key, value, *matrices)
    for actual, expected in zip(
        gradients(linformer, *inputs), gradients(slots, *inputs), strict=True
    ):
        np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("keys", "slots", "window_size"),
    [
        (11, 4, 3),  # one position short of the last window
        (5, 4, 3),  # two windows beyond the sequence
        (1, 2, 1),
        (12, 1, 12),
    ],
)
def test_means_match_reference(keys, slots, window_size):
    query, key, value = heads(7, keys)
    mask = padding(keys)
    output, scores = run(
        lambda query, key, value, mask: linformer_window_attention(
            query,
            key,
            value,
            slots,
            window_size,
            padding_mask=mask,
            return_attention_scores=True,
        ),
        *(query, key, value, mask),
    )
    key, visible = definitions.window_means(key, slots, window_size, mask)
    value, _ = definitions.window_means(value, slots, window_size, mask)
    expected = reference.attend(query, key, value, visible[:, None, None])
    close(output, expected[0])
    close(scores, expected[1])


def test_means_without_a_mask_leave_out_what_lies_beyond_the_sequence():
    query, key, value = heads(5)
    output = run(
        lambda *x: linformer_window_attention(*x, 3, 3), query, key, value
    )
    mask = np.ones((2, 5), bool)
    key, visible = definitions.window_means(key, 3, 3, mask)
    value, _ = definitions.window_means(value, 3, 3, mask)
    expected, _ = reference.attend(query, key, value, visible[:, None, None])
    close(output, expected)


@pytest.mark.parametrize("per_head", [False, True])
def test_convolutions_match_reference(per_head):
    query, key, value = heads(7, 8)
    rng = np.random.default_rng(1)
    kernels = [
        rng.normal(size=((3,) * per_head + (3, size, size))).astype("float32")
        for size in (5, 7)
    ]
    mask = padding(8)
    output = run(
        lambda query, key, value, key_kernel, value_kernel, mask: (
            linformer_window_attention(
                query,
                key,
                value,
                4,
                3,
                key_kernel,
                value_kernel,
                padding_mask=mask,
            )
        ),
        *(query, key, value, *kernels, mask),
    )
    slots = []
    for x, kernel in zip((key, value), kernels, strict=True):
        pooled = np.zeros((2, 4, 3, x.shape[-1]))
        for b, s, n in np.ndindex(*x.shape[:3]):
            own = kernel[n] if per_head else kernel
            if mask[b, s]:
                pooled[b, s // 3, n] += x[b, s, n] @ own[s % 3]
        slots.append(pooled)
    _, visible = definitions.window_means(key, 4, 3, mask)
    expected, _ = reference.attend(query, *slots, visible[:, None, None])
    close(output, expected, 1e-5)


@pytest.mark.parametrize(
    "attend",
    [
        lambda *x, **k: linformer_attention(
            *x, ops.ones((7, 3)) / 3, **k, return_attention_scores=True
        ),
        lambda *x, **k: linformer_window_attention(
            *x, 3, 3, **k, return_attention_scores=True
        ),
    ],
    ids=["matrix", "mean"],
)
def test_queries_without_keys_give_zeros(attend):
    inputs = heads(7)
    mask = ops.convert_to_tensor(
        np.stack([np.ones(7, bool), np.zeros(7, bool)])
    )
    output, scores = run(lambda *x: attend(*x, padding_mask=mask), *inputs)
    for x in (output, scores):
        np.testing.assert_array_equal(x[1], 0)
        assert (x[0] != 0).any()
    for gradient in gradients(
        lambda *x: attend(*x, padding_mask=mask)[0], *inputs
    ):
        assert np.isfinite(gradient).all()


def test_dropout_acts_on_the_weights():
    inputs = heads(7)
    matrices = projections((7, 3))

    def drop_first_slot(weights):
        return weights * ops.convert_to_tensor(
            np.array([0.0, 1.0, 1.0], "float32")
        )

    def attend(*inputs, dropout=None):
        return linformer_attention(
            *inputs, *matrices, dropout=dropout, return_attention_scores=True
        )

    matrices = [ops.convert_to_tensor(x) for x in matrices]
    _, weights = run(attend, *inputs)
    output, _ = run(lambda *x: attend(*x, dropout=drop_first_slot), *inputs)
    slots = np.einsum("bsnv,sk->bknv", inputs[2], projections((7, 3))[1])
    expected = np.einsum("bntk,bknv->btnv", weights[..., 1:], slots[:, 1:])
    close(output, expected, 1e-5)


def test_sequences_longer_than_the_projection_are_refused():
    inputs = heads(7, 11)
    with pytest.raises(ValueError, match="key_projection.*10.*11"):
        linformer_attention(*inputs, np.ones((10, 3), "float32"))
    with pytest.raises(ValueError, match="value_projection.*10.*11"):
        linformer_attention(
            *inputs, np.ones((11, 3), "float32"), np.ones((10, 3), "float32")
        )
    with pytest.raises(ValueError, match="window_size.*10.*11"):
        linformer_window_attention(*inputs, 5, 2)


def test_memory_grows_with_the_length():
    def inputs(length):
        heads = [np.ones((1, length, 2, 8), "float32")] * 3
        return [*heads, np.ones((length, 16), "float32")]

    assert max(memory.growth(linformer_attention, inputs, length=512)) <= 4.5
