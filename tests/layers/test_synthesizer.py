import math

import keras
import numpy as np
import pytest
from keras import ops

from keras_attn import layers
from tests import golden
from tests.backend import compiled
from tests.backend import gradients
from tests.backend import run
from tests.backend import to_numpy
from tests.backend import weight_gradients


def close(actual, expected, tolerance=1e-5):
    np.testing.assert_allclose(
        to_numpy(actual), to_numpy(expected), rtol=tolerance, atol=tolerance
    )


def draw(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype("float32")


def weights(layer):
    """The weights of a layer by their paths within it."""
    return {w.path.split("/", 1)[1]: w for w in layer.weights}


# What the papers' programs computed

# where the golden arrays go; the dense kinds of a file share W1 and b1
PATHS = {
    "query/kernel": "W_q",
    "query/bias": "b_q",
    "key/kernel": "W_k",
    "key/bias": "b_k",
    "value/kernel": "W_v",
    "value/bias": "b_v",
    "attention_output/kernel": "W_o",
    "attention_output/bias": "b_o",
    "random_kernel": "R_scores",
    "query_factors": "R1",
    "key_factors": "R2",
    "hidden/kernel": "W1",
    "hidden/bias": "b1",
    "dense_kernel": "W2",
    "dense_bias": "b2",
    "factorized_hidden/kernel": "W1",
    "factorized_hidden/bias": "b1",
    "left/kernel": "W_A",
    "left/bias": "b_A",
    "right/kernel": "W_B",
    "right/bias": "b_B",
    "query_left/kernel": "W_A",
    "query_left/bias": "b_A",
    "query_right/kernel": "W_B",
    "query_right/bias": "b_B",
    "mixture_logits": "mix_logits",
}
QUERY = ("query_left/", "query_right/")


def from_definitions(data):
    """The layer of a file that was computed from the paper's equations."""
    names = str(data["kinds"]).split("+")
    kinds = tuple(
        name.replace("dot", "dot_product")
        .removesuffix("_direct")
        .removesuffix("_tile")
        for name in names
    )
    data = {
        **data,
        "W_A": data.get("W_A", data.get("W_A_direct")),
        "W_B": data.get("W_B", data.get("W_B_direct")),
    }
    arguments = {"kind": kinds}
    if "W1" in data:
        arguments["hidden_dim"] = data["W1"].shape[-1]
    if "factorized_dense_direct" in names:
        arguments["hidden_dim"] = 0
    if "factorized_dense_tile" in names:
        arguments["tiling"] = "tile"
    if data["W_A"] is not None:
        sizes = data["W_A"].shape[-1], data["W_B"].shape[-1]
        arguments["factors"] = sizes
    if "R1" in data:
        arguments["rank"] = data["R1"].shape[-1]
    # the factors may be of the query itself
    absent = ("left/", "right/") if arguments.get("hidden_dim") == 0 else QUERY
    values = {
        path: data[name]
        for path, name in PATHS.items()
        if data.get(name) is not None and not path.startswith(absent)
    }
    return arguments, values


def from_mesh_tensorflow(data):
    """The layer of a file that mesh_tensorflow computed.

    That program does not divide dot products by the square root of the size of
    a head, takes their query for the hidden layer of the dense kind, and gives
    that kind one matrix for all heads. It adds scores, or mixes them as in
    `(1 - a) * dot_product + a * other`.
    """
    name, *mixture = str(data["mode"]).removesuffix("_minus").split("_")
    heads, size = data["W_v"].shape[1:]
    values = {
        "value/kernel": data["W_v"],
        "attention_output/kernel": data["W_o"],
    }
    factor = 2.0 if mixture == ["plus"] else 1.0  # a mean, made a sum
    if name == "random":
        values["random_kernel"] = factor * data["R_scores"]
    else:
        values["hidden/kernel"] = data["W_q"]
        kernel = np.repeat(data["W_pi"][None], heads, axis=0)
        values["dense_kernel"] = factor * kernel
    if not mixture:
        return {"kind": name, "use_bias": False}, values
    values["query/kernel"] = factor * math.sqrt(size) * data["W_q"]
    values["key/kernel"] = data["W_k"]
    alpha = data["alpha_logit"][0] if "alpha" in mixture else 0.0
    values["mixture_logits"] = np.array([0.0, alpha])
    return {"kind": ("dot_product", name), "use_bias": False}, values


@pytest.mark.parametrize("name", golden.names("synth_*"))
def test_equals_golden_data(name):
    data = golden.load(name)
    is_paper = "kinds" in data
    convert = from_definitions if is_paper else from_mesh_tensorflow
    arguments, values = convert(data)
    _, heads, size = data["W_v"].shape
    layer = layers.Synthesizer(
        num_heads=heads,
        key_dim=size,
        max_length=int(data["max_length"]),
        **arguments,
    )
    x = data["x"]
    layer.build(x.shape)
    # all arrays find their place, W1 one or both of two
    assert set(weights(layer)) <= set(values)
    unused = set(values) - set(weights(layer))
    assert all("hidden/" in path for path in unused), unused
    for path, weight in weights(layer).items():
        weight.assign(values[path])
    options = {
        "mask": data.get("keep_mask"),
        "use_causal_mask": bool(data["causal"]),
    }
    if options["mask"] is not None:
        # there, padding attends like any other query
        options["value_mask"] = options.pop("mask")
    output, scores = layer(x, return_attention_scores=True, **options)
    close(output, data["out"], 2e-5)
    close(scores, data["attention_weights"], 2e-5)

    def loss(x):
        return ops.multiply(layer(x, **options), data["R"])

    close(run(lambda x: layer(x, **options), x), data["out"], 2e-5)
    (gradient,) = gradients(loss, x)
    close(gradient, data["grad_x"], 2e-4)
    paths = [
        path
        for path in weights(layer)
        if is_paper and f"grad_{PATHS[path]}" in data
    ]
    if not paths:
        return
    found = weight_gradients(
        lambda: loss(ops.convert_to_tensor(x)),
        [weights(layer)[path] for path in paths],
    )
    for path, gradient in zip(paths, found, strict=True):
        close(gradient, data[f"grad_{PATHS[path]}"], 2e-4)


# Weights


@pytest.mark.parametrize(
    ("arguments", "count"),
    [
        ({"kind": "random"}, 3 * 16 * 16),
        ({"kind": "fixed_random"}, 0),
        ({"kind": "factorized_random", "rank": 2}, 2 * 3 * 16 * 2),
        ({"kind": "dense"}, 15 * 15 + 15 * 16),
        ({"kind": "factorized_dense"}, 15 * 15 + 15 * (4 + 4)),
        (
            {"kind": "factorized_dense", "factors": (2, 8)},
            15 * 15 + 15 * (2 + 8),
        ),
        ({"kind": "factorized_dense", "hidden_dim": 0}, 15 * 3 * (4 + 4)),
        ({"kind": "dot_product"}, 2 * 15 * 15),
        (
            {"kind": ("random", "dense", "dot_product")},
            3 * 16 * 16 + 15 * 15 + 15 * 16 + 2 * 15 * 15 + 3,
        ),
    ],
)
def test_scores_take_as_many_weights_as_in_the_paper(arguments, count):
    # table 1 of the paper, where d is 15 and N is 16
    layer = layers.Synthesizer(
        num_heads=3, key_dim=5, max_length=16, use_bias=False, **arguments
    )
    layer.build((None, 11, 15))
    of_values = 2 * 15 * 15
    trainable = sum(math.prod(w.shape) for w in layer.trainable_weights)
    assert trainable == of_values + count
    fixed = sum(math.prod(w.shape) for w in layer.non_trainable_weights)
    kinds = arguments["kind"]
    assert fixed == (3 * 16 * 16 if kinds == "fixed_random" else 0)


@pytest.mark.parametrize("kind", ["random", "fixed_random"])
def test_scores_do_not_depend_on_the_input(kind):
    layer = layers.Synthesizer(3, 5, max_length=16, kind=kind)
    options = {"return_attention_scores": True}
    one, other = draw(2, 11, 13), draw(4, 11, 13, seed=1)
    _, expected = layer(one, **options)
    _, scores = layer(other, **options)
    close(scores, np.broadcast_to(to_numpy(expected)[:1], (4, 3, 11, 11)))
    kernel = to_numpy(getattr(layer, f"{kind}_kernel").value)
    assert kernel.shape == (3, 16, 16)
    close(scores[0], ops.softmax(kernel[:, :11, :11]))


def test_fixed_scores_come_from_the_seed():
    def kernel(seed):
        layer = layers.Synthesizer(
            3, 5, max_length=64, kind="fixed_random", seed=seed
        )
        layer.build((None, 11, 13))
        assert not layer.fixed_random_kernel.trainable
        return to_numpy(layer.fixed_random_kernel.value)

    np.testing.assert_array_equal(kernel(3), kernel(3))
    assert (kernel(3) != kernel(4)).any()
    assert 0.95 < kernel(3).std() < 1.05


@pytest.mark.parametrize("rank", [1, 16])
def test_factorized_scores_start_with_a_variance_of_one(rank):
    layer = layers.Synthesizer(
        16, 5, max_length=64, kind="factorized_random", rank=rank, seed=3
    )
    layer.build((None, 11, 13))
    left, right = (
        to_numpy(w.value) for w in (layer.query_factors, layer.key_factors)
    )
    assert (left != right).any()
    assert 0.85 < (left @ np.swapaxes(right, 1, 2)).std() < 1.15


def test_random_scores_take_an_initializer():
    layer = layers.Synthesizer(
        3,
        5,
        max_length=4,
        kind=("random", "factorized_random", "fixed_random"),
        random_initializer=keras.initializers.Constant(0.5),
    )
    layer.build((None, 4, 13))
    for name in ("random_kernel", "query_factors", "fixed_random_kernel"):
        assert (to_numpy(getattr(layer, name).value) == 0.5).all()
    revived = layers.Synthesizer.from_config(layer.get_config())
    assert revived.random_initializer.value == 0.5
    assert revived.kind == layer.kind


def test_score_kernels_start_like_those_of_one_head():
    layer = layers.Synthesizer(16, 32, max_length=64)
    layer.build((None, 11, 13))
    limit = math.sqrt(6 / (32 + 64))
    kernel = np.abs(to_numpy(layer.dense_kernel.value))
    assert 0.95 * limit < kernel.max() <= limit


@pytest.mark.parametrize(
    ("max_length", "tiling", "sizes"),
    [
        (1, "outer", (1, 1)),
        (6, "outer", (2, 3)),
        (7, "outer", (3, 3)),
        (16, "outer", (4, 4)),
        (16, "tile", (4, 5)),
        (12, "tile", (3, 4)),
        (509, "outer", (23, 23)),
    ],
)
def test_default_factors_reach_every_position(max_length, tiling, sizes):
    layer = layers.Synthesizer(
        1,
        2,
        max_length=max_length,
        kind="factorized_dense",
        hidden_dim=0,
        tiling=tiling,
    )
    x = draw(1, max_length, 3)
    _, scores = layer(x, return_attention_scores=True)
    built = (
        layer.left_dense.kernel.shape[-1],
        layer.right_dense.kernel.shape[-1],
    )
    assert built == sizes
    # all keys have scores of their own, but for the rounding of a few
    assert len(np.unique(to_numpy(scores)[0, 0, 0])) >= 0.99 * max_length


# Mixtures


def test_a_mixture_can_be_one_of_its_kinds():
    kinds = ("dense", "dot_product", "factorized_random")
    x = draw(2, 11, 13)
    mixture = layers.Synthesizer(3, 5, max_length=16, kind=kinds)
    mixture.build(x.shape)
    for i, kind in enumerate(kinds):
        single = layers.Synthesizer(3, 5, max_length=16, kind=kind)
        single.build(x.shape)
        for path, weight in weights(single).items():
            weight.assign(weights(mixture)[path].value)
        mixture.mixture_logits.assign(np.where(np.arange(3) == i, 0.0, -1e4))
        close(mixture(x), single(x))


def test_dot_products_alone_are_multi_head_attention():
    x, value = draw(2, 11, 13), draw(2, 7, 13, seed=1)
    layer = layers.Synthesizer(3, 5, max_length=16, kind="dot_product")
    full = layers.MultiHeadAttention(3, 5)
    layer.build(x.shape)
    full.build(x.shape)
    layer.set_weights(full.get_weights())
    mask = np.arange(7) < [[7], [4]]
    close(layer(x, value, value_mask=mask), full(x, value, value_mask=mask))
    close(layer(x, use_causal_mask=True), full(x, use_causal_mask=True))


def test_a_tuple_of_one_kind_is_that_kind():
    layer = layers.Synthesizer(3, 5, max_length=16, kind=["dense"])
    layer.build((None, 11, 13))
    assert "mixture_logits" not in weights(layer)


# Lengths


@pytest.mark.parametrize(
    "kind", ["random", "factorized_random", "dense", "factorized_dense"]
)
def test_lengths_up_to_the_longest(kind):
    layer = layers.Synthesizer(3, 5, max_length=7, kind=kind)
    x = draw(2, 7, 13)
    for length in (1, 6, 7):
        _, scores = layer(x[:, :length], return_attention_scores=True)
        close(to_numpy(scores).sum(axis=-1), np.ones((2, 3, length)))
    assert tuple(layer(x, x[:, :2]).shape) == (2, 7, 13)
    assert tuple(layer(x[:, :2], x).shape) == (2, 2, 13)
    longer = draw(2, 8, 13)
    for make in (lambda x: x, lambda x: keras.KerasTensor(x.shape)):
        with pytest.raises(ValueError, match="`query` of 8.*max_length=7"):
            layer(make(longer))
        with pytest.raises(ValueError, match="`query` of 8.*max_length=7"):
            layer(make(longer), make(x))
        with pytest.raises(ValueError, match="`value` of 8.*max_length=7"):
            layer(make(x), make(longer))


@pytest.mark.parametrize("kind", ["random", "dense", "factorized_dense"])
def test_compiled_for_unknown_lengths(kind):
    layer = layers.Synthesizer(3, 5, max_length=6, kind=kind)
    layer.build((None, None, 13))
    functions, errors = [compiled(lambda x: layer(x))], (ValueError,)
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        spec = tf.TensorSpec((None, None, 13))
        functions += [
            tf.function(layer, input_signature=[spec], jit_compile=jit_compile)
            for jit_compile in (False, True)
        ]
        errors += (tf.errors.InvalidArgumentError,)
    for fn in functions:
        for length in (2, 6):
            x = ops.convert_to_tensor(draw(2, length, 13))
            close(fn(x), layer(x))
        with pytest.raises(errors):
            fn(ops.convert_to_tensor(draw(2, 9, 13)))


def test_streaming_holds_what_it_needs():
    plain = layers.Synthesizer(3, 5, max_length=7)
    assert set(plain.initial_state(2)) == {"value", "padding_mask", "length"}
    assert plain.initial_state(2)["value"].shape == (2, 7, 3, 5)
    assert plain.initial_state(2, max_length=4)["value"].shape[1] == 4
    mixture = layers.Synthesizer(
        3, 5, max_length=7, kind=("dot_product", "dense"), value_dim=4
    )
    assert mixture.initial_state(2)["value"].shape == (2, 7, 3, 4)
    assert mixture.initial_state(2)["key"].shape == (2, 7, 3, 5)
    with pytest.raises(ValueError, match="`state` of 8.*max_length=7"):
        plain.initial_state(2, max_length=8)


@pytest.mark.parametrize("kind", ["random", "factorized_random", "dense"])
def test_streaming_beyond_the_state_is_refused(kind):
    layer = layers.Synthesizer(3, 5, max_length=7, kind=kind)
    x = draw(2, 5, 13)
    _, state = layer(x, state=layer.initial_state(2))
    with pytest.raises(ValueError, match="holds 7 positions"):
        layer(x, state=state)


# Refusals


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_length": 0}, "max_length=0"),
        ({"kind": "vanilla"}, "kind='vanilla'"),
        ({"kind": ()}, r"kind=\(\)"),
        ({"kind": ("dense", "dense")}, "different kinds.*'dense', 'dense'"),
        ({"kind": None}, "kind=None"),
        ({"rank": 0}, "rank=0"),
        ({"hidden_dim": -1}, "hidden_dim=-1"),
        ({"hidden_dim": 0}, "hidden layer.*hidden_dim=0"),
        ({"factors": (3, 5)}, r"max_length=16.*factors=\(3, 5\)"),
        ({"factors": (2, 2, 4)}, r"two.*factors=\(2, 2, 4\)"),
        ({"factors": (2.0, 8)}, "factors=2.0"),
        ({"tiling": "both"}, "tiling='both'"),
    ],
)
def test_bad_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=f"`Synthesizer`.*{message}"):
        layers.Synthesizer(3, 5, **{"max_length": 16, **arguments})


@pytest.mark.parametrize(
    "kind",
    [
        "random",
        "factorized_random",
        "dense",
        "factorized_dense",
        ("fixed_random", "dot_product"),
    ],
)
def test_learns_to_look_at_the_previous_position(kind):
    rng = np.random.default_rng(0)
    content = rng.normal(size=(64, 8, 4)).astype("float32")
    positions = np.broadcast_to(np.eye(8, dtype="float32"), (64, 8, 8))
    layer = layers.Synthesizer(2, 8, max_length=8, kind=kind, output_shape=4)
    model = keras.Sequential([keras.Input((8, 12)), layer])
    model.compile(keras.optimizers.Adam(0.1), "mse")
    x, y = np.concatenate([content, positions], -1), np.roll(content, 1, axis=1)
    history = model.fit(x, y, batch_size=64, epochs=40, verbose=0).history[
        "loss"
    ]

    assert history[-1] < 0.1 < 0.5 < history[0]
