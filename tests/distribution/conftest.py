"""Each backend has its own way to use many devices, and tests of its own."""

import keras

BACKENDS = ("jax", "tensorflow", "torch")
collect_ignore = [
    f"test_{name}.py" for name in BACKENDS if name != keras.backend.backend()
]
