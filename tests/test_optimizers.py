import keras
import numpy as np
import pytest
from keras import ops

from keras_attn.optimizers import MinTrustLamb
from tests.backend import to_numpy

SHAPES = [(3, 5), (5,), (2, 3)]


def reference(weights, gradients, learning_rates, **options):
    """The definition, weight by weight and step by step, in float64."""
    options = {
        "beta_1": 0.9,
        "beta_2": 0.999,
        "epsilon": 1e-6,
        "weight_decay": 0.0,
        "min_trust": 0.25,
        "max_norm": 10.0,
        **options,
    }
    results = []
    for weight, steps in zip(weights, gradients, strict=True):
        w = weight.astype("float64")
        m, v = np.zeros_like(w), np.zeros_like(w)
        for g, rate in zip(steps, learning_rates, strict=True):
            m = options["beta_1"] * m + (1 - options["beta_1"]) * g
            v = options["beta_2"] * v + (1 - options["beta_2"]) * g**2
            step = m / (np.sqrt(v) + options["epsilon"])
            step = step + options["weight_decay"] * w
            w_norm = min(np.linalg.norm(w), options["max_norm"])
            step_norm = np.linalg.norm(step)
            trust = w_norm / step_norm if w_norm and step_norm else 1.0
            if options["min_trust"] is not None:
                trust = max(trust, options["min_trust"])
            w = w - rate * trust * step
        results.append(w)
    return results


def problem(steps=4):
    rng = np.random.default_rng(0)
    weights = [rng.normal(size=shape) for shape in SHAPES]
    weights[0] *= 30.0  # its norm is cut
    weights[1] *= 0.0  # it has none
    gradients = [rng.normal(size=(steps, *shape)) for shape in SHAPES]
    gradients[2][0] = 0.0  # it makes no first step
    weights = [weight.astype("float32") for weight in weights]
    return weights, [gradient.astype("float32") for gradient in gradients]


def optimize(optimizer, weights, gradients):
    variables = [keras.Variable(weight) for weight in weights]
    for step in zip(*gradients, strict=True):
        step = [ops.convert_to_tensor(gradient) for gradient in step]
        optimizer.apply(step, variables)
    return to_numpy([variable.value for variable in variables])


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"weight_decay": 0.1},
        {"min_trust": None},
        {"min_trust": 2.0, "max_norm": 1.0},
        {"beta_1": 0.5, "beta_2": 0.8, "epsilon": 0.1},
    ],
)
def test_matches_reference(options):
    weights, gradients = problem()
    actual = optimize(MinTrustLamb(0.05, **options), weights, gradients)
    expected = reference(weights, gradients, [0.05] * 4, **options)
    for weight, result in zip(actual, expected, strict=True):
        np.testing.assert_allclose(weight, result, rtol=1e-5, atol=1e-6)


def test_first_step_of_a_weight_by_hand():
    # m = 0.1 g and v = 0.001 g ** 2, whatever g is, so that the step is
    # 0.1 / sqrt(0.001) = 3.162, its norm 4.472, and the trust 5 / 4.472
    weight = np.array([3.0, 4.0], "float32")
    gradient = np.array([[7.0, 7.0]], "float32")
    (result,) = optimize(MinTrustLamb(0.1, epsilon=0.0), [weight], [gradient])
    np.testing.assert_allclose(result, weight - 0.1 * 5 / 2**0.5, rtol=1e-5)


def test_warm_up_schedule_of_keras():
    schedule = keras.optimizers.schedules.CosineDecay(
        0.0, decay_steps=1, alpha=1.0, warmup_target=0.1, warmup_steps=3
    )
    weights, gradients = problem(steps=6)
    rates = [0.0, 0.1 / 3, 0.2 / 3, 0.1, 0.1, 0.1]
    actual = optimize(MinTrustLamb(schedule), weights, gradients)
    expected = reference(weights, gradients, rates)
    for weight, result in zip(actual, expected, strict=True):
        np.testing.assert_allclose(weight, result, rtol=1e-5, atol=1e-6)


def test_clips_the_norm_of_all_gradients():
    weights, gradients = problem(steps=1)
    norm = np.sqrt(sum(np.sum(g**2) for g in gradients))
    optimizer = MinTrustLamb(0.05, global_clipnorm=0.25, epsilon=0.1)
    expected = reference(
        weights, [g * 0.25 / norm for g in gradients], [0.05], epsilon=0.1
    )
    for weight, result in zip(
        optimize(optimizer, weights, gradients), expected, strict=True
    ):
        np.testing.assert_allclose(weight, result, rtol=1e-5, atol=1e-6)


def test_config_round_trip():
    optimizer = MinTrustLamb(
        0.1,
        beta_1=0.5,
        beta_2=0.6,
        epsilon=0.7,
        weight_decay=0.8,
        min_trust=0.9,
        max_norm=2.0,
        global_clipnorm=0.25,
        name="other",
    )
    config = keras.optimizers.serialize(optimizer)
    again = keras.optimizers.deserialize(config)
    assert isinstance(again, MinTrustLamb)
    assert again.get_config() == optimizer.get_config()
    assert again.get_config()["weight_decay"] == 0.8
    weights, gradients = problem()
    for actual, expected in zip(
        optimize(again, weights, gradients),
        optimize(optimizer, weights, gradients),
        strict=True,
    ):
        np.testing.assert_array_equal(actual, expected)
