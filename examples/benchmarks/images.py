"""A ResNet-50 with and without CBAM."""

import numpy as np

import keras_attn


def step(name, job):
    """A step of training or of prediction, of a kind in a layout."""
    kind, layout = name.split()
    size, batch_size = job["image_size"], job["batch_size"]
    shape = (size, size, 3) if layout == "channels_last" else (3, size, size)
    model = keras_attn.models.CBAMResNet(
        50,
        None if kind == "plain" else kind,
        input_shape=shape,
        data_format=layout,
    )
    model.compile(
        "sgd",
        "sparse_categorical_crossentropy",
        jit_compile=job["backend"] in ("jax", "tensorflow"),
    )
    random = np.random.default_rng(0)
    images = random.standard_normal((batch_size, *shape), "float32")
    labels = random.integers(1000, size=batch_size)
    if job["direction"] == "backward":
        return lambda: model.train_on_batch(images, labels)
    return lambda: model.predict_on_batch(images)
