import keras
import numpy as np
import pytest

from keras_attn.layers import LSHAttention
from tests import golden
from tests.backend import run
from tests.backend import to_numpy


def sequence(length=24, features=6):
    rng = np.random.default_rng(0)
    return rng.normal(size=(2, length, features)).astype("float32")


def weights_of(layer, x):
    return run(lambda x: layer(x, return_attention_scores=True)[1], x)


def test_outputs_are_those_of_the_dense_oracle():
    data = golden.load("reformer_lsh_nowrap_padmask_ref")
    layer = LSHAttention(
        2, 6, bucket_size=8, num_buckets=[4, 2], chunks_after=1
    )
    x = data["hidden_states"]
    layer.build(x.shape)
    kernels = [
        data["query_key_kernel"].reshape(-1, 2, 6),
        np.zeros((2, 6)),
        data["value_kernel"].reshape(-1, 2, 6),
        np.zeros((2, 6)),
        data["output_kernel"].reshape(2, 6, -1),
        data["output_bias"],
    ]
    rotations = to_numpy(layer.rotations).copy()
    rotations[:, :, :2] = data["random_rotations"]
    layer.set_weights([rotations, *kernels])
    real = data["key_padding_mask"]
    output = run(lambda x: layer(x, mask=real), x)
    np.testing.assert_allclose(output[real], data["output"][real], atol=2e-5)


def test_a_call_may_ask_for_more_rounds_than_the_layer_has():
    """Rounds are added to those before, and each shows more of the keys."""
    x = sequence()
    layer = LSHAttention(2, 5, bucket_size=2, num_hashes=1, seed=1)
    layer.build(x.shape)
    seen = [
        weights_of(lambda x, n=n, **k: layer(x, num_hashes=n, **k), x) > 0
        for n in (1, 2, 8)
    ]
    np.testing.assert_array_equal(weights_of(layer, x) > 0, seen[0])
    # a position sees itself only while it sees nothing else
    others = ~np.eye(24, dtype=bool)
    for fewer, more in zip(seen, seen[1:], strict=False):
        assert (more | ~fewer)[:, :, others].all()
        assert more.sum() > fewer.sum()
    with pytest.raises(ValueError, match="max_num_hashes=8.*num_hashes=9"):
        layer(x, num_hashes=9)


def test_rounds_of_a_layer_with_more_begin_with_those_of_one_with_fewer():
    few = LSHAttention(2, 5, max_num_hashes=2, seed=3)
    many = LSHAttention(2, 5, max_num_hashes=6, seed=3)
    few.build((2, 24, 6))
    many.build((2, 24, 6))
    np.testing.assert_array_equal(
        to_numpy(few.rotations), to_numpy(many.rotations)[:, :, :2]
    )


def test_rotations_follow_the_seed_and_are_not_trained():
    layers = [LSHAttention(2, 5, seed=seed) for seed in (3, 3, 4)]
    for layer in layers:
        layer.build((2, 24, 6))
    one, same, other = (to_numpy(layer.rotations) for layer in layers)
    np.testing.assert_array_equal(one, same)
    assert (one != other).any()
    assert layers[0].rotations.path in [
        w.path for w in layers[0].non_trainable_weights
    ]
    # the same on every backend
    expected = np.random.default_rng(3).normal(size=(8, 2, 5, 64))
    np.testing.assert_allclose(one, expected.transpose(1, 2, 0, 3), rtol=1e-6)


def test_buckets_follow_the_length_of_each_input():
    """What was called first must not decide for what comes later."""
    layer = LSHAttention(2, 5, bucket_size=2, seed=0)
    fresh = LSHAttention(2, 5, bucket_size=2, seed=0)
    layer.build((2, 4, 6))
    run(layer, sequence(4))
    fresh.build((2, 64, 6))
    fresh.set_weights(layer.get_weights())
    x = sequence(64)
    np.testing.assert_allclose(run(layer, x), run(fresh, x), atol=1e-6)


def test_any_length_and_number_of_buckets_works():
    layer = LSHAttention(1, 2, bucket_size=4)
    layer.build(sequence().shape)
    outputs = [run(layer, sequence(length)) for length in range(1, 14)]
    assert [output.shape[1] for output in outputs] == list(range(1, 14))


@pytest.mark.parametrize("num_buckets", [None, 4])
@pytest.mark.parametrize("num_hashes", [1, 4])
def test_a_stream_may_ask_for_more_rounds(num_hashes, num_buckets):
    x = sequence()
    layer = LSHAttention(2, 5, bucket_size=3, num_buckets=num_buckets)
    layer.build(x.shape)
    whole = run(
        lambda x: layer(x, use_causal_mask=True, num_hashes=num_hashes), x
    )
    state = layer.initial_state(2, max_length=30)
    outputs = []
    for chunk in (x[:, :9], x[:, 9:10], x[:, 10:]):
        output, state = run(
            lambda x, state: layer(x, state=state, num_hashes=num_hashes),
            chunk,
            state,
        )
        outputs.append(output)
    np.testing.assert_allclose(
        np.concatenate(outputs, axis=1), whole, atol=1e-5
    )


def test_chunks_are_for_those_who_ask_for_them():
    """The programs that wrap around have chunks in causal use as well."""
    assert LSHAttention(2, 5).prefix_consistent
    for arguments in (
        {"wrap": True},
        {"chunks_after": 1},
        {"chunks_before": 0},
        {"prefix_consistent": False},
    ):
        assert not LSHAttention(2, 5, **arguments).prefix_consistent


def test_causal_outputs_do_not_depend_on_the_length():
    layer, x = LSHAttention(2, 5, bucket_size=3), sequence()
    layer.build(x.shape)

    def attend(x):
        return run(lambda x: layer(x, use_causal_mask=True), x)

    whole = attend(x)
    for length in (1, 5, 17):
        np.testing.assert_allclose(
            attend(x[:, :length]), whole[:, :length], atol=1e-5
        )


def test_chunks_do_not_stream():
    layer = LSHAttention(2, 5, prefix_consistent=False)
    with pytest.raises(ValueError, match="`prefix_consistent`"):
        layer.initial_state(2, max_length=30)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_buckets": 3}, "num_buckets=3"),
        ({"num_buckets": [4, 3]}, r"num_buckets=\[4, 3\]"),
        ({"num_buckets": []}, r"num_buckets=\[\]"),
        ({"num_buckets": 0}, "num_buckets=0"),
        ({"num_hashes": 4, "max_num_hashes": 2}, "num_hashes=4"),
        ({"num_hashes": 0}, "num_hashes=0"),
        ({"bucket_size": 2.0}, "bucket_size=2.0"),
        ({"chunks_before": -1}, "chunks_before"),
        ({"prefix_consistent": True, "wrap": True}, "wrap=True"),
        ({"prefix_consistent": True, "chunks_after": 1}, "chunks_after=1"),
        ({"prefix_consistent": True, "chunks_before": 0}, "chunks_before=0"),
    ],
)
def test_impossible_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        LSHAttention(2, 5, **arguments)


def test_keys_cannot_differ_from_queries():
    layer = LSHAttention(2, 5)
    with pytest.raises(ValueError, match="`LSHAttention` has no keys"):
        layer(sequence(), sequence(), sequence())


def test_loaded_models_hash_as_before(tmp_path):
    inputs = keras.Input((None, 6))
    layer = LSHAttention(2, 5, bucket_size=3, num_buckets=(2, 4))
    model = keras.Model(inputs, layer(inputs))
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    x = sequence()
    np.testing.assert_allclose(
        loaded.predict(x, verbose=0), model.predict(x, verbose=0), atol=1e-6
    )
