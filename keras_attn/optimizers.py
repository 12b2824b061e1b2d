"""Optimizers of the papers that Keras does not have."""

import keras
from keras import ops

__all__ = ["MinTrustLamb"]


@keras.saving.register_keras_serializable(package="keras_attn")
class MinTrustLamb(keras.optimizers.Optimizer):
    """LAMB with a trust ratio that is bounded from below.

    This is the optimizer that [SHA-RNN](https://arxiv.org/abs/1911.11423)
    (Merity, 2019) was trained with. Like
    [LAMB](https://arxiv.org/abs/1904.00962), it takes the step of Adam in each
    weight, rescaled to the norm of that weight:

    ```
    m = beta_1 * m + (1 - beta_1) * g
    v = beta_2 * v + (1 - beta_2) * g ** 2
    step = m / (sqrt(v) + epsilon) + weight_decay * w
    trust = max(min(norm(w), max_norm) / norm(step), min_trust)
    w = w - learning_rate * trust * step
    ```

    where `norm(w) / norm(step)` is 1 if either is 0. Three things differ from
    `keras.optimizers.Lamb`: `trust` is at least `min_trust`, so that small
    weights, such as biases and gates, are not stuck; the moments are not
    corrected for their bias; and the weight decay is part of the step.

    Args:
        learning_rate: Float, a schedule of `keras.optimizers.schedules`, or a
            callable.
        beta_1: Decay rate of the mean of the gradients.
        beta_2: Decay rate of the mean of the squares of the gradients.
        epsilon: Small constant for numerical stability.
        weight_decay: Factor of the weight in the step.
        min_trust: Lower bound of the trust ratio. `None` for no bound.
        max_norm: Upper bound of the norm of the weight in the trust ratio.
        **kwargs: Further arguments of `keras.optimizers.Optimizer`, such as
            `global_clipnorm`.

    Example:

    ```python
    import keras
    import keras_attn

    # the recipe of the paper: 800 steps of warm-up, then a constant rate
    schedule = keras.optimizers.schedules.CosineDecay(
        0.0, decay_steps=1, alpha=1.0, warmup_target=2e-3, warmup_steps=800
    )
    optimizer = keras_attn.optimizers.MinTrustLamb(
        schedule, weight_decay=1.2e-6, global_clipnorm=0.25
    )
    ```
    """

    def __init__(
        self,
        learning_rate=0.002,
        beta_1=0.9,
        beta_2=0.999,
        epsilon=1e-6,
        weight_decay=0.0,
        min_trust=0.25,
        max_norm=10.0,
        name="min_trust_lamb",
        **kwargs,
    ):
        # Keras would apply a weight decay of its own, outside of the step
        super().__init__(learning_rate=learning_rate, name=name, **kwargs)
        self.beta_1 = beta_1
        self.beta_2 = beta_2
        self.epsilon = epsilon
        self.coupled_weight_decay = weight_decay
        self.min_trust = min_trust
        self.max_norm = max_norm

    def build(self, variables):
        if self.built:
            return
        super().build(variables)
        self.momentums, self.velocities = self.add_optimizer_variables(
            variables, ["momentum", "velocity"]
        )

    def update_step(self, gradient, variable, learning_rate):
        gradient = ops.cast(gradient, variable.dtype)
        learning_rate = ops.cast(learning_rate, variable.dtype)
        weight = ops.convert_to_tensor(variable)
        index = self._get_variable_index(variable)
        m, v = self.momentums[index], self.velocities[index]
        self.assign(m, self.beta_1 * m + (1 - self.beta_1) * gradient)
        self.assign(
            v, self.beta_2 * v + (1 - self.beta_2) * ops.square(gradient)
        )
        step = m / (ops.sqrt(v) + self.epsilon)
        step = step + self.coupled_weight_decay * weight

        weight_norm = ops.minimum(_norm(weight), self.max_norm)
        step_norm = _norm(step)
        has_norms = ops.logical_and(weight_norm > 0, step_norm > 0)
        trust = ops.where(
            has_norms,
            weight_norm / ops.where(has_norms, step_norm, 1.0),
            1.0,
        )
        if self.min_trust is not None:
            trust = ops.maximum(trust, self.min_trust)
        self.assign_sub(variable, learning_rate * trust * step)

    def get_config(self):
        config = {
            "beta_1": self.beta_1,
            "beta_2": self.beta_2,
            "epsilon": self.epsilon,
            "weight_decay": self.coupled_weight_decay,
            "min_trust": self.min_trust,
            "max_norm": self.max_norm,
        }
        return {**super().get_config(), **config}


def _norm(x):
    return ops.sqrt(ops.sum(ops.square(x)))
