"""Truncated backpropagation through time by `fit()`."""

import keras
import numpy as np
import pytest
from keras import ops

from keras_attn import models
from keras_attn.data import ResumeSegments
from keras_attn.data import TokenSegments
from keras_attn.optimizers import MinTrustLamb
from tests.backend import to_numpy

TEXT = np.arange(400) ** 2 % 11


def make_model(**kwargs):
    keras.utils.set_random_seed(0)
    model = models.SHARNN(
        11, 6, 12, num_layers=2, memory_length=20, stateful=True, **kwargs
    )
    model.build((2, None))
    model.compile(
        MinTrustLamb(0.05, global_clipnorm=0.25),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


def make_segments(**kwargs):
    return TokenSegments(
        TEXT, batch_size=2, segment_length=16, steps_per_epoch=5, **kwargs
    )


def fit(model, epochs, callbacks=(), random_lengths=True, **kwargs):
    segments = make_segments(random_lengths=random_lengths)
    return model.fit(
        segments,
        epochs=epochs,
        shuffle=False,
        verbose=0,
        callbacks=[ResumeSegments(segments), *callbacks],
        **kwargs,
    )


def test_loss_is_that_of_the_state_carried_on():
    """Compares `fit()` at learning rate 0 with a loop by hand."""
    model = make_model()
    weights = [to_numpy(weight.value) for weight in model.trainable_weights]
    model.optimizer.learning_rate = 0.0
    history = fit(model, epochs=2).history
    for weight, before in zip(model.trainable_weights, weights, strict=False):
        np.testing.assert_array_equal(to_numpy(weight.value), before)

    segments = make_segments(random_lengths=True)
    state = model.initial_state(2)
    for epoch in range(2):
        ResumeSegments(segments).on_epoch_begin(epoch)
        losses, hits = [], []
        for index in range(5):
            inputs, targets = segments[index]
            mask = inputs["padding_mask"]
            logits, state = model(inputs, state=state)
            loss = keras.losses.sparse_categorical_crossentropy(
                targets, logits, from_logits=True
            )
            losses.append(to_numpy(loss)[mask].mean())
            hits.append((to_numpy(logits).argmax(-1) == targets)[mask])
        segments.on_epoch_end()
        np.testing.assert_allclose(
            history["loss"][epoch], np.mean(losses), rtol=1e-4
        )
        # on JAX, Keras 3.15 loses the mask between the loss and the metrics
        if keras.backend.backend() != "jax":
            np.testing.assert_allclose(
                history["accuracy"][epoch],
                np.concatenate(hits).mean(),
                rtol=1e-4,
            )
    for block, entry in zip(model.blocks, state, strict=True):
        for name, value in entry.items():
            np.testing.assert_allclose(
                to_numpy(block.training_state[name].value),
                to_numpy(value),
                rtol=1e-4,
                atol=1e-5,
            )


def test_training_learns_and_validation_does_not_disturb_it():
    plain = make_model()
    losses = fit(plain, epochs=3, random_lengths=False).history["loss"]
    assert losses[-1] < losses[0] - 0.05
    checked = make_model()
    validation = TokenSegments(TEXT[:101], batch_size=2, segment_length=16)
    history = fit(
        checked, epochs=3, random_lengths=False, validation_data=validation
    ).history
    np.testing.assert_allclose(history["loss"], losses, rtol=1e-5)
    assert len(history["val_loss"]) == 3
    # each validation starts anew, and so tells the same of the same weights
    np.testing.assert_allclose(
        checked.evaluate(validation, verbose=0)[0],
        history["val_loss"][-1],
        rtol=1e-5,
    )


def test_interrupted_training_resumes_where_it_stopped(tmp_path):
    def backup():
        return keras.callbacks.BackupAndRestore(
            tmp_path, delete_checkpoint=False
        )

    class Interrupt(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 2:
                raise KeyboardInterrupt

    whole = make_model()
    expected = fit(whole, epochs=3).history["loss"]
    with pytest.raises(KeyboardInterrupt):
        fit(make_model(), epochs=3, callbacks=[backup(), Interrupt()])
    resumed = make_model()
    losses = fit(resumed, epochs=3, callbacks=[backup()]).history["loss"]
    np.testing.assert_allclose(losses, expected[2:], rtol=1e-5)
    for actual, weight in zip(
        resumed.get_weights(), whole.get_weights(), strict=True
    ):
        np.testing.assert_allclose(actual, weight, rtol=1e-4, atol=1e-6)


def test_compiled_step_is_reused_for_all_lengths():
    """Counts how often the model is traced, where it is."""
    calls = []

    class Counting(models.SHARNN):
        def call(self, inputs, **kwargs):
            calls.append(1)
            return super().call(inputs, **kwargs)

    keras.utils.set_random_seed(0)
    model = Counting(11, 6, 12, num_layers=1, memory_length=20, stateful=True)
    model.build((2, None))
    model.compile(
        "sgd",
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        jit_compile=keras.backend.backend() != "torch",
    )
    counts = []
    segments = make_segments(random_lengths=True)
    for _ in range(2):
        model.fit(segments, shuffle=False, verbose=0)
        counts.append(len(calls))
    if keras.backend.backend() != "torch":
        assert counts[1] == counts[0]
    assert all(np.isfinite(w).all() for w in model.get_weights())


def test_functional_training_step():
    """The state passes through a training loop of one's own, too."""
    model = make_model()
    state = model.initial_state(2, memory_length=3)
    x = ops.convert_to_tensor(TEXT[:32].reshape(2, 16))
    _, state = model(x, state=state, training=True)
    logits, state = model(x, state=state, training=True)
    assert tuple(logits.shape) == (2, 16, 11)
    assert to_numpy(state[0]["memory_used"]).tolist() == [3, 3]
