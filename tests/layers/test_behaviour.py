"""What holds for every sequence attention layer, whatever its mechanism."""

import functools
import inspect
import itertools
import json

import keras
import numpy as np
import pytest
from keras import ops

from tests.backend import compiled
from tests.backend import gradients
from tests.backend import quick
from tests.backend import run
from tests.backend import to_numpy
from tests.layers.cases import CASES
from tests.layers.cases import FIRST_CASES

LENGTH = 11
FEATURES = 13

every_case = pytest.mark.parametrize("case", CASES, ids=str)
# what has to do with the base class more than with options of the mechanism
every_class = pytest.mark.parametrize("case", FIRST_CASES, ids=str)


def cases_with(*options, among=CASES):
    """The cases whose mechanism supports all of the options."""
    return pytest.mark.parametrize(
        "case", [c for c in among if c.options.issuperset(options)], ids=str
    )


def classes_with(*options):
    """The first cases of the layers that support all of the options."""
    return cases_with(*options, among=FIRST_CASES)


def sequence(length=LENGTH, batch=2, seed=0):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(batch, length, FEATURES)).astype("float32")


def padding(length=LENGTH):
    """A mask under which the second sequence ends two positions early."""
    return np.arange(length) < [[length], [length - 2]]


def close(actual, expected, tolerance=1e-5):
    np.testing.assert_allclose(
        to_numpy(actual), to_numpy(expected), rtol=tolerance, atol=tolerance
    )


def all_options(case):
    """The combinations of options under which a layer must stay causal."""
    scores = [False, True] if "return_attention_scores" in case.options else [0]
    masks = [None, padding()]
    for return_attention_scores, mask in itertools.product(scores, masks):
        options = {"use_causal_mask": True, "mask": mask}
        if return_attention_scores:
            options["return_attention_scores"] = True
        yield options


def built(case, **kwargs):
    layer = case.layer(**kwargs)
    layer.build((None, LENGTH, FEATURES))
    return layer


def output_of(results):
    return results[0] if isinstance(results, tuple) else results


class Opaque(keras.layers.Layer):
    """A layer whose output shape Keras can only find by tracing its call."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def build(self, input_shape):
        self.layer.build(input_shape)

    def call(self, inputs):
        return self.layer(inputs)


# Weights and configuration


@every_case
def test_built_by_shape_alone(case):
    layer = case.layer()
    layer.build((None, LENGTH, FEATURES))
    called = case.layer()
    called(sequence())
    assert layer.weights
    for ours, theirs in zip(layer.weights, called.weights, strict=True):
        assert ours.path.split("/")[1:] == theirs.path.split("/")[1:]
        assert ours.shape == theirs.shape


@every_class
def test_shared_weights_are_those_of_keras(case):
    layer = case.layer()
    layer.build((None, LENGTH, FEATURES))
    paths = [w.path.split("/", 1)[1] for w in layer.weights]
    theirs = ("query", "key", "value", "attention_output")
    expected = [
        f"{name}/{weight}"
        for name in theirs
        for weight in ("kernel", "bias")
        if name in (*layer.projections, "attention_output")
    ]
    # Keras lists the weights of a layer's own before those of its sublayers
    assert [p for p in paths if p.split("/")[0] in theirs] == expected
    assert len(set(paths)) == len(paths)


@every_case
def test_no_two_kernels_start_alike(case):
    layer = case.layer()
    layer.build((None, LENGTH, FEATURES))
    kernels = [to_numpy(w.value) for w in layer.weights if "kernel" in w.path]
    for a, b in itertools.combinations(kernels, 2):
        assert a.shape != b.shape or (a != b).any()


@every_class
def test_config_round_trip(case):
    kwargs = {
        "use_bias": False,
        "output_shape": 4,
        "kernel_initializer": "he_normal",
        "kernel_regularizer": keras.regularizers.L2(0.1),
        "activity_regularizer": keras.regularizers.L1(0.2),
        "kernel_constraint": "max_norm",
        "bias_constraint": "non_neg",
        "bias_regularizer": "l2",
        "bias_initializer": "ones",
        "seed": 3,
        "dtype": "mixed_bfloat16",
        "name": "attention",
    }
    if "dropout" in case.options:
        kwargs["dropout"] = 0.1
    layer = case.layer(**kwargs)
    config = layer.get_config()
    json.dumps(config)
    assert config["output_shape"] == 4
    assert case.cls.from_config(config).get_config() == config
    serialized = keras.saving.serialize_keras_object(layer)
    assert serialized["registered_name"] == f"keras_attn>{case.cls.__name__}"
    revived = keras.saving.deserialize_keras_object(serialized)
    assert revived.get_config() == config


@every_case
def test_every_argument_is_in_the_config(case):
    arguments = set()
    for cls in case.cls.__mro__[: case.cls.__mro__.index(keras.Layer)]:
        arguments |= set(inspect.signature(cls.__init__).parameters)
    arguments -= {"self", "args", "kwargs"}
    layer = case.layer()
    assert arguments <= set(layer.get_config())
    for name, value in case.arguments.items():
        if isinstance(value, (int, str, float)):
            assert layer.get_config()[name] == value


@every_class
def test_initializers_and_regularizers_reach_the_weights(case):
    layer = case.layer(
        bias_initializer="ones",
        kernel_regularizer="l2",
        bias_regularizer="l2",
        activity_regularizer="l1",
        kernel_constraint="non_neg",
        bias_constraint="non_neg",
    )
    layer(sequence())
    for name in (*layer.projections, "output"):
        dense = getattr(layer, f"{name}_dense")
        close(dense.bias.value, np.ones(dense.bias.shape))
        assert dense.kernel.regularizer is not None
        assert dense.bias.regularizer is not None
        assert isinstance(dense.kernel.constraint, keras.constraints.NonNeg)
        assert isinstance(dense.bias.constraint, keras.constraints.NonNeg)
    # one loss for each regularized weight, and one for the output
    regularized = [w for w in layer.weights if w.regularizer is not None]
    assert len(layer.losses) == len(regularized) + 1


@every_class
@pytest.mark.parametrize("name", ["num_heads", "key_dim", "value_dim"])
@pytest.mark.parametrize("bad", [0, -1, 2.0, True])
def test_sizes_must_be_positive_integers(case, name, bad):
    message = f"`{name}` of `{case.cls.__name__}`.*integer.*{name}={bad}"
    with pytest.raises(ValueError, match=message):
        case.layer(**{name: bad})


@every_class
@pytest.mark.parametrize("bad", [-0.1, 1.0, "0.5"])
def test_dropout_must_be_a_rate(case, bad):
    with pytest.raises(
        ValueError, match=f"{case.cls.__name__}.*dropout={bad!r}"
    ):
        case.layer(dropout=bad)


@every_class
def test_seed_reproduces_the_dropout(case):
    if "dropout" not in case.options:
        with pytest.raises(ValueError, match="has no dropout"):
            case.layer(dropout=0.5)
        return
    layer, x = case.layer(dropout=0.5, seed=3), sequence()
    first = layer(x, training=True)
    revived = case.cls.from_config(layer.get_config())
    revived.build(x.shape)
    revived.set_weights(layer.get_weights())
    close(revived(x, training=True), first)


# Shapes and structure


@every_case
def test_symbolic_and_real_outputs_agree(case):
    options = [{}]
    if "return_attention_scores" in case.options:
        options.append({"return_attention_scores": True})
    if "state" in case.options:
        options += [{**option, "state": True} for option in options]
    for option in options:
        layer = case.layer(output_shape=7)
        if "state" in option:
            state = layer.initial_state(2, max_length=LENGTH + 2)
            symbolic_state = keras.tree.map_structure(
                lambda x: keras.KerasTensor(x.shape, x.dtype), state
            )
            symbolic_option = {**option, "state": symbolic_state}
            option = {**option, "state": state}
        else:
            symbolic_option = option
        symbolic = layer(
            keras.KerasTensor((2, LENGTH, FEATURES)), **symbolic_option
        )
        real = quick(functools.partial(layer, **option))(sequence())
        keras.tree.assert_same_structure(symbolic, real)
        for a, b in zip(
            keras.tree.flatten(symbolic), keras.tree.flatten(real), strict=True
        ):
            assert a.shape == tuple(b.shape)
            assert a.dtype == keras.backend.standardize_dtype(b.dtype)


@every_class
def test_value_and_key_default_to_query(case):
    layer, x = case.layer(), sequence()
    close(layer(x), layer(x, x))
    if "key" in layer.projections:
        close(layer(x), layer(x, x, x))
    else:
        with pytest.raises(ValueError, match=f"{case.cls.__name__}.*`key`"):
            layer(x, x, x)


@pytest.mark.support("Sequences", "any length")
@every_case
def test_one_model_takes_any_length(case):
    inputs = keras.Input((None, FEATURES))
    model = keras.Model(inputs, case.layer()(inputs))
    assert model.output_shape == (None, None, FEATURES)
    for length in (1, 5, LENGTH):
        x = sequence(length)
        close(model.predict(x, verbose=0), run(model, x))


@pytest.mark.support("Compilation", "compiled = eager")
@every_case
def test_compiled_equals_eager(case):
    layer = case.layer()
    layer.build((None, LENGTH, FEATURES))
    x, mask = sequence(), padding()
    fast = compiled(lambda x, mask: layer(x, mask=mask))
    x, mask = ops.convert_to_tensor(x), ops.convert_to_tensor(mask)
    close(fast(x, mask), layer(x, mask=mask))


@pytest.mark.support("Sequences", "traced with unknown length")
@every_class
def test_traced_with_unknown_length(case):
    inputs = keras.Input((None, FEATURES))
    # PyTorch traces an unknown length as 83 and 89
    room = {"max_length": 97} if "max_length" in case.kwargs else {}
    layer = Opaque(case.layer(**room))
    model = keras.Model(inputs, layer(inputs))
    assert model.output_shape[-1] == FEATURES
    x = sequence(5)
    close(model.predict(x, verbose=0), run(layer.layer, x))


@every_case
def test_batch_of_one_equals_batch_of_many(case):
    layer, x, mask = built(case), sequence(batch=3), np.ones((3, LENGTH), bool)
    mask[1, -3:] = False
    together, alone = (
        run(lambda x, mask: layer(x, mask=mask), *inputs)
        for inputs in ((x, mask), (x[1:2], mask[1:2]))
    )
    close(alone, together[1:2])


@every_class
def test_query_and_value_may_differ_in_length(case):
    layer = case.layer()
    if case.cross:
        assert tuple(layer(sequence(5), sequence(7)).shape) == (2, 5, FEATURES)
    else:
        with pytest.raises(ValueError, match="5.*7"):
            layer(sequence(5), sequence(7))


@pytest.mark.support("Saving", "clones and wrappers")
@every_class
def test_wrappers_and_clones(case):
    x = sequence()
    layer = case.layer()
    sequential = keras.Sequential([layer])
    close(sequential(x), layer(x))
    distributed = keras.layers.TimeDistributed(layer)
    close(distributed(np.stack([x, x], axis=1))[:, 1], layer(x))
    inputs = keras.Input((LENGTH, FEATURES))
    model = keras.Model(inputs, layer(inputs))
    clone = keras.models.clone_model(model)
    clone.set_weights(model.get_weights())
    close(clone(x), model(x))


@every_class
@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ([(2, 13)], "query.*batch, length, features"),
        ([(2, 3, 11, 13)], "query.*batch, length, features"),
        ([(2, 11, 13), (2, 13)], "value.*batch, length, features"),
    ],
)
def test_wrong_ranks_are_refused(case, shapes, message):
    for make in (np.ones, keras.KerasTensor):
        with pytest.raises(ValueError, match=f"{case.cls.__name__}.*{message}"):
            case.layer()(*(make(shape) for shape in shapes))


@every_class
def test_unknown_features_are_refused(case):
    with pytest.raises(ValueError, match="known number of features"):
        case.layer()(keras.KerasTensor((None, 11, None)))


@every_class
def test_key_and_value_of_different_lengths_are_refused(case):
    layer = case.layer()
    if "key" in layer.projections:
        with pytest.raises(ValueError, match="must be equal"):
            layer(sequence(5), sequence(7), sequence(6))


# Masks


@pytest.mark.support("Masks", "padding is invisible")
@every_case
def test_padding_is_invisible(case):
    layer, x = built(case), sequence(7)
    mask = np.arange(7) < [[7], [4]]
    whole = run(lambda x: layer(x), x)

    def every_way(x, mask):
        return (
            layer(x, mask=mask),
            layer(x, query_mask=ops.cast(mask, "int32")),
            layer(x, value_mask=mask),
            layer(x, x, value_mask=mask),
        )

    expected = run(every_way, x, mask)
    # a padded sequence gives what the bare sequence gives
    bare = run(lambda x: layer(x), x[1:, :4])
    for output in expected:
        close(output[0], whole[0])
        close(output[1:, :4], bare)
    for content in (1e3, np.nan, np.inf):
        x[~mask] = content
        for output, same in zip(run(every_way, x, mask), expected, strict=True):
            close(output[0], same[0])
            close(output[1, :4], same[1, :4])


@pytest.mark.support("Masks", "attached masks")
@every_class
def test_attached_masks_reach_a_saved_model(case, tmp_path):
    tokens = keras.Input((None,), dtype="int32")
    x = keras.layers.Embedding(9, FEATURES, mask_zero=True)(tokens)
    model = keras.Model(tokens, case.layer()(x))
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    ids = np.array([[5, 3, 8, 1, 0, 0, 0]])
    expected = model.predict(ids[:, :4], verbose=0)
    for embedding in (model.layers[1], loaded.layers[1]):
        table = to_numpy(embedding.embeddings.value)
        table[0] = 1e3  # of the tokens that are padding
        embedding.set_weights([table])
    for m in (model, loaded):
        close(m.predict(ids, verbose=0)[:, :4], expected)


@every_case
def test_padding_on_the_left_is_invisible(case):
    layer, x = built(case), sequence()
    mask = np.arange(LENGTH) >= [[0], [4]]
    changed = x.copy()
    changed[~mask] = np.nan
    actual, expected = (
        run(lambda x, mask: layer(x, mask=mask), inputs, mask)
        for inputs in (changed, x)
    )
    close(actual[:, 4:], expected[:, 4:])


@pytest.mark.support("Masks", "padding has no gradient")
@every_case
def test_padding_has_no_part_in_gradients(case):
    layer, x, mask = case.layer(), sequence(), padding()
    layer.build(x.shape)

    def loss(x, kernels):
        scope = keras.StatelessScope(
            state_mapping=list(zip(layer.variables, kernels, strict=True))
        )
        with scope:
            return ops.sum(ops.square(layer(x, mask=mask)[:, :-2]))

    def all_gradients(x):
        kernels = [v.numpy() for v in layer.variables]
        trainable = [v.trainable for v in layer.variables]
        floats = [k for k, t in zip(kernels, trainable, strict=True) if t]

        def fn(x, *floats):
            given = iter(floats)
            return loss(
                x,
                [
                    next(given) if t else ops.convert_to_tensor(k)
                    for k, t in zip(kernels, trainable, strict=True)
                ],
            )

        return gradients(fn, x, *floats)

    expected = all_gradients(x)
    assert (expected[0][~mask] == 0).all()
    x[~mask] = np.nan
    for actual, gradient in zip(all_gradients(x), expected, strict=True):
        close(actual, gradient, tolerance=1e-4)


@every_class
def test_explicit_and_attached_masks_combine(case):
    tokens = np.array([[5, 3, 8, 1, 2, 7, 0], [5, 3, 8, 1, 6, 0, 0]])
    attached, explicit = tokens != 0, np.arange(7) != [[2], [0]]
    visible = attached & explicit
    embedding = keras.layers.Embedding(9, FEATURES, mask_zero=True)
    embedding.build()
    layer = built(case)

    def outputs(tokens, explicit, attached, visible):
        x = embedding(tokens)
        bare = ops.take(embedding.embeddings, tokens, axis=0)
        return (
            layer(bare, mask=visible),
            layer(x, mask=explicit),
            layer(x, query_mask=explicit),
            layer(x, value_mask=explicit),
            layer(bare, bare, query_mask=attached, value_mask=visible),
            layer(x, x, value_mask=explicit),
        )

    expected, both, queries, values, expected_values, passed_twice = run(
        outputs, tokens, explicit, attached, visible
    )
    close(both, expected)
    close(queries, expected)
    close(values[1, 1:], expected[1, 1:])
    close(passed_twice, expected_values)


@every_class
def test_masks_of_keys_combine(case):
    layer, x = case.layer(), sequence()
    positions = np.broadcast_to(np.arange(LENGTH), (2, LENGTH))
    one, other = positions != 4, positions != 7
    expected = layer(x, x, value_mask=one & other)
    if "key" in layer.projections:
        close(layer(x, x, x, value_mask=one, key_mask=other), expected)
        close(layer(x, x, x, value_mask=other, key_mask=one), expected)
        close(layer(x, x, x, key_mask=one & other), expected)
    # what KerasHub makes of a padding mask
    pairs = (one & other)[:, None]
    close(layer(x, x, attention_mask=pairs), expected)
    spec = keras.KerasTensor(pairs.shape, "int32")
    symbolic = layer(keras.KerasTensor(x.shape), attention_mask=spec)
    assert symbolic.shape == x.shape
    assert np.abs(to_numpy(expected) - to_numpy(layer(x))).max() > 1e-4


@every_class
def test_masks_stay_where_they_were(case):
    tokens = np.array([[5, 3, 0, 0]])
    x = keras.layers.Embedding(9, FEATURES, mask_zero=True)(tokens)
    layer = case.layer()
    for output in (layer(x), layer(x, x), layer(x, mask=tokens != 0)):
        for tensor in (output, x):
            np.testing.assert_array_equal(
                to_numpy(tensor._keras_mask), tokens != 0
            )


@every_class
def test_masked_queries_attend_to_nothing(case):
    layer, x = case.layer(bias_initializer="ones"), sequence()
    mask = np.arange(LENGTH) != [[3], [0]]
    for output in (layer(x, mask=mask), layer(x, x, query_mask=mask)):
        close(to_numpy(output)[~mask], np.ones((2, FEATURES)))


@pytest.mark.support("Masks", "empty rows")
@every_case
def test_a_sequence_of_padding_gives_zeros_and_trains(case):
    x, mask = sequence(), np.arange(LENGTH) < [[LENGTH], [0]]
    layer = built(case, use_bias=False)
    output = run(lambda x, mask: layer(x, x, value_mask=mask), x, mask)
    close(output[1], np.zeros((LENGTH, FEATURES)))
    inputs = keras.Input((LENGTH, FEATURES)), keras.Input((LENGTH,), dtype=bool)
    model = keras.Model(inputs, layer(inputs[0], mask=inputs[1]))
    model.compile(keras.optimizers.SGD(1.0), "mse")
    model.fit([x, mask], sequence(seed=1), verbose=0)
    for weight in model.weights:
        assert np.isfinite(to_numpy(weight.value)).all(), weight.path


@every_class
def test_bad_masks_are_refused(case):
    layer, x = case.layer(), sequence()
    name = case.cls.__name__
    with pytest.raises(ValueError, match=rf"{name}.*`mask` that has.*\(2, 7\)"):
        layer(x, mask=np.ones((2, 7), bool))
    with pytest.raises(ValueError, match=rf"{name}.*`value_mask`.*\(2, 7\)"):
        layer(x, value_mask=np.ones((2, 7), bool))
    with pytest.raises(ValueError, match=rf"{name}.*`key_mask`.*\(1, {LENGTH}"):
        layer(x, key_mask=np.ones((1, LENGTH), bool))
    with pytest.raises(ValueError, match=f"{name}.*boolean `mask`"):
        layer(x, mask=np.ones((2, LENGTH), "float32"))
    with pytest.raises(
        ValueError, match=f"{name}.*`query_mask` and `value_mask"
    ):
        layer(x, x, mask=np.ones((2, LENGTH), bool))


@classes_with("attention_mask")
def test_attention_masks_of_every_shape_and_kind(case):
    layer, x = case.layer(), sequence()
    mask = np.random.default_rng(1).random((LENGTH, LENGTH)) < 0.6
    expected = layer(x, attention_mask=np.stack([mask, mask]))
    assert np.abs(to_numpy(expected) - to_numpy(layer(x))).max() > 1e-3
    for same in (
        mask,
        mask[None],
        np.broadcast_to(mask, (2, 3, LENGTH, LENGTH)),
        mask[None, None],
        mask.astype("int32"),
        mask.astype("uint8") * 2,
    ):
        close(layer(x, attention_mask=same), expected)
    for shape in [(LENGTH, 7), (3, LENGTH, LENGTH), (2, 2, LENGTH, LENGTH)]:
        with pytest.raises(
            ValueError, match="`attention_mask` that broadcasts"
        ):
            layer(x, attention_mask=np.ones(shape, bool))
    with pytest.raises(ValueError, match="boolean `attention_mask`"):
        layer(x, attention_mask=mask.astype("float32"))


@classes_with("attention_mask")
def test_keys_that_no_query_may_see_may_hold_anything(case):
    layer, x = case.layer(), sequence()
    mask = np.ones((2, 1, LENGTH), bool)
    mask[:, :, 4] = False
    expected = layer(x, x, attention_mask=mask)
    value = x.copy()
    value[:, 4] = np.nan
    close(layer(x, value, attention_mask=mask), expected)


@every_class
@pytest.mark.parametrize(
    "option",
    ["attention_mask", "use_causal_mask", "return_attention_scores", "state"],
)
def test_unsupported_options_are_refused(case, option):
    value = {
        "attention_mask": np.ones((2, LENGTH, LENGTH), bool),
        "state": {"length": np.zeros((), "int32")},
    }.get(option, True)
    layer, name = case.layer(), case.cls.__name__
    if option not in case.options:
        for x in (sequence(), keras.KerasTensor((2, LENGTH, FEATURES))):
            with pytest.raises(ValueError, match=f"{name}.*`{option}`"):
                layer(x, **{option: value})
    if option == "state" and option not in case.options:
        with pytest.raises(ValueError, match=f"{name}.*streaming"):
            layer.initial_state(2, max_length=LENGTH)
    with pytest.raises(ValueError, match=f"{name}.*`no_such_option`"):
        layer(sequence(), no_such_option=1)


# Causality and streaming


@pytest.mark.support("Sequences", "causal")
@cases_with("use_causal_mask", among=[c for c in CASES if c.is_consistent])
def test_no_position_sees_the_future(case):
    layer, x = built(case), sequence()
    changed = x.copy()
    changed[:, 6:] += 1.0
    for options in all_options(case):
        a, b = (
            run(lambda x, o=options: output_of(layer(x, **o)), inputs)
            for inputs in (x, changed)
        )
        close(a[:, :6], b[:, :6])
        assert np.abs(a - b)[0, 6:].max(axis=-1).min() > 0


@cases_with(
    "use_causal_mask", "dropout", among=[c for c in FIRST_CASES if not c.sorts]
)
def test_no_position_sees_the_future_in_training(case):
    x = sequence()
    changed = x.copy()
    changed[:, 6:] += 1.0
    layer = case.layer(dropout=0.3, seed=3)
    twin = case.layer(dropout=0.3, seed=3)
    twin.build(x.shape)
    layer.build(x.shape)
    twin.set_weights(layer.get_weights())
    options = {"use_causal_mask": True, "training": True}
    close(layer(x, **options)[:, :6], twin(changed, **options)[:, :6])


@classes_with("use_causal_mask")
def test_causal_attention_needs_equal_lengths(case):
    layer = case.layer()
    for make in (sequence, lambda n: keras.KerasTensor((2, n, FEATURES))):
        with pytest.raises(ValueError, match=f"{case.cls.__name__}.*5.*7"):
            layer(make(5), make(7), use_causal_mask=True)


@pytest.mark.support("Sequences", "streaming")
@cases_with("state")
@pytest.mark.parametrize("sizes", [[11], [1] * 11, [4, 1, 6], [2, 7, 2]])
def test_streaming_equals_one_causal_pass(case, sizes):
    layer, x = built(case), sequence()
    mask = padding()
    mask[0, 5] = False
    expected = run(
        lambda x, mask: layer(x, mask=mask, use_causal_mask=True), x, mask
    )
    step = quick(lambda x, mask, state: layer(x, mask=mask, state=state))
    state = layer.initial_state(2, max_length=LENGTH)
    shapes = keras.tree.map_structure(lambda x: (x.shape, x.dtype), state)
    outputs, start = [], 0
    for size in sizes:
        chunk = slice(start, start + size)
        output, state = step(
            ops.convert_to_tensor(x[:, chunk]),
            ops.convert_to_tensor(mask[:, chunk]),
            state,
        )
        outputs.append(output)
        start += size
    close(ops.concatenate(outputs, axis=1), expected)
    assert shapes == keras.tree.map_structure(
        lambda x: (x.shape, x.dtype), state
    )


@cases_with("state")
def test_streaming_compiled(case):
    layer, x = built(case), sequence()
    expected = run(lambda x: layer(x, use_causal_mask=True), x)
    step = compiled(lambda x, state: layer(x, state=state))
    state = layer.initial_state(2, max_length=LENGTH)
    for t in range(LENGTH):
        output, state = step(ops.convert_to_tensor(x[:, t : t + 1]), state)
        close(output, expected[:, t : t + 1])


@cases_with("state")
def test_what_padding_holds_leaves_no_trace_in_the_state(case):
    layer, x, mask = built(case), sequence(), padding()
    changed = x.copy()
    changed[~mask] = np.nan
    step = quick(lambda x, mask, state: layer(x, mask=mask, state=state)[1])
    expected, actual = (
        step(
            ops.convert_to_tensor(inputs),
            ops.convert_to_tensor(mask),
            layer.initial_state(2, LENGTH),
        )
        for inputs in (x, changed)
    )
    keras.tree.map_structure(close, actual, expected)


@classes_with("state")
def test_streaming_refuses_what_it_cannot_honour(case):
    layer, x = case.layer(), sequence()
    state = layer.initial_state(2, max_length=LENGTH)
    if case.cross:
        with pytest.raises(ValueError, match="as many keys as queries"):
            layer(x, sequence(5), state=state)
    if "attention_mask" in case.options:
        with pytest.raises(ValueError, match="cannot combine"):
            mask = np.ones((2, LENGTH, LENGTH), bool)
            layer(x, attention_mask=mask, state=state)
    with pytest.raises(ValueError, match="batch_size=0"):
        layer.initial_state(0, max_length=LENGTH)


# Scores


@cases_with("return_attention_scores")
def test_scores_are_weights_and_change_nothing(case):
    layer, x, mask = built(case), sequence(), padding()
    mask[1] = False
    options = [{}, {"use_causal_mask": True}]
    for option in options[: 1 + ("use_causal_mask" in case.options)]:
        option["mask"] = mask
        plain = run(lambda x, o=option: layer(x, **o), x)
        output, scores = run(
            lambda x, o=option: layer(x, return_attention_scores=True, **o), x
        )
        close(output, plain)
        assert scores.shape == layer.attention_scores_shape(x.shape, x.shape)
        total = scores.sum(axis=-1)
        seen = np.broadcast_to(mask[0], total[0].shape)
        if "use_causal_mask" in option and case.blind:
            seen = seen & (total[0] > 0)
        close(total[0], seen, 1e-4)
        assert (scores[1] == 0).all()
        if "use_causal_mask" in option and scores.shape[-1] == LENGTH:
            assert (np.triu(scores, 1) == 0).all()


# Training


@every_case
def test_gradients_reach_every_weight(case):
    inputs = keras.Input((LENGTH, FEATURES))
    model = keras.Model(inputs, case.layer()(inputs))
    before = [to_numpy(w.value) for w in model.trainable_weights]
    model.compile(keras.optimizers.SGD(1.0), "mse")
    model.fit(sequence(), sequence(seed=1), verbose=0)
    for old, weight in zip(before, model.trainable_weights, strict=True):
        new = to_numpy(weight.value)
        assert np.isfinite(new).all(), weight.path
        if not weight.path.endswith(case.idle):
            assert (new != old).any(), weight.path


@classes_with("dropout")
def test_dropout_acts_in_training_only(case):
    layer, x = case.layer(dropout=0.5), sequence()
    plain = case.layer()
    plain.build(x.shape)
    layer.build(x.shape)
    plain.set_weights(layer.get_weights())
    close(layer(x), plain(x))
    close(layer(x, training=False), plain(x))
    difference = to_numpy(layer(x, training=True)) - to_numpy(layer(x))
    assert np.abs(difference).max() > 1e-3


@every_class
def test_inference_is_deterministic(case):
    inputs = keras.Input((LENGTH, FEATURES))
    model = keras.Model(inputs, case.layer()(inputs))
    x = sequence()
    np.testing.assert_array_equal(
        model.predict(x, verbose=0), model.predict(x, verbose=0)
    )


@every_case
@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_half_precision(case, policy):
    layer, x = case.layer(dtype=policy), ops.convert_to_tensor(sequence())
    mask = ops.convert_to_tensor(np.arange(LENGTH) < [[LENGTH], [0]])
    layer.build(x.shape)
    output = compiled(lambda x, mask: layer(x, mask=mask))(x, mask)
    close(
        *(ops.cast(y, "float32") for y in (output, layer(x, mask=mask))), 0.02
    )
    dtype = keras.backend.standardize_dtype(output.dtype)
    assert dtype == layer.compute_dtype
    for weight in layer.weights:
        assert weight.dtype in ("float32", "int32"), weight.path
    full = case.layer()
    full.build(x.shape)
    full.set_weights(layer.get_weights())
    if case.sorts:
        assert np.isfinite(to_numpy(ops.cast(output, "float32"))).all()
        return  # rounding decides what a position sees
    expected = quick(lambda x, mask: full(x, mask=mask))(x, mask)
    close(ops.cast(output, "float32"), expected, tolerance=0.05)


# Saving


@pytest.mark.support("Saving", "`.keras`, `.weights.h5`")
@every_class
def test_saved_model_is_the_same_model(case, tmp_path):
    inputs = keras.Input((None, FEATURES))
    # two of a kind, so that neither takes the other's weights
    model = keras.Model(inputs, case.layer()(case.layer()(inputs)))
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    close(loaded(sequence()), model(sequence()))
    model.save_weights(tmp_path / "model.weights.h5")
    twin = keras.Model(inputs, case.layer()(case.layer()(inputs)))
    twin.load_weights(tmp_path / "model.weights.h5")
    close(twin(sequence()), model(sequence()))
