"""What a test needs to know of its backend."""

import keras
import numpy as np
import pytest
from keras import ops


def nightly_but_on(backend):
    """Marks a long test, that the ordinary run tries on one backend alone."""
    if keras.backend.backend() == backend:
        return lambda test: test
    return pytest.mark.nightly


def to_numpy(tensors):
    """Copies a structure of tensors into NumPy arrays."""
    return keras.tree.map_structure(
        lambda x: np.array(ops.convert_to_numpy(x)), tensors
    )


def run(fn, *arrays):
    """Calls `fn` on tensors, compiled on JAX, and returns NumPy arrays."""
    arrays = keras.tree.map_structure(ops.convert_to_tensor, arrays)
    return to_numpy(quick(fn)(*arrays))


def quick(fn):
    """`fn` compiled on JAX, which else compiles each operation by itself."""
    if keras.backend.backend() == "jax":
        import jax

        return jax.jit(fn)
    return fn


def few(cases):
    """All cases on PyTorch, and the first elsewhere, which compiles long.

    For what does not depend on the backend.
    """
    return cases if keras.backend.backend() == "torch" else cases[:1]


def compiled(fn):
    """`fn` under XLA on TensorFlow and JAX, and as it is on PyTorch."""
    if keras.backend.backend() == "jax":
        import jax

        return jax.jit(fn)
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        return tf.function(fn, jit_compile=True)
    return fn


def gradients(fn, *arrays):
    """Gradients of the sum of `fn(*arrays)`, as a list of NumPy arrays."""
    if keras.backend.backend() == "jax":
        import jax

        def total(*arrays):
            return ops.sum(fn(*arrays))

        grads = jax.jit(jax.grad(total, argnums=range(len(arrays))))(*arrays)
    elif keras.backend.backend() == "torch":
        import torch

        tensors = [ops.convert_to_tensor(x).requires_grad_() for x in arrays]
        grads = torch.autograd.grad(ops.sum(fn(*tensors)), tensors)
    else:
        import tensorflow as tf

        tensors = [tf.constant(x) for x in arrays]
        with tf.GradientTape() as tape:
            tape.watch(tensors)
            total = ops.sum(fn(*tensors))
        grads = tape.gradient(total, tensors)
    return to_numpy(list(grads))


def weight_gradients(fn, weights):
    """Gradients of the sum of `fn()` with respect to Keras variables."""
    if keras.backend.backend() == "jax":
        import jax

        def total(values):
            scope = keras.StatelessScope(
                state_mapping=list(zip(weights, values, strict=True))
            )
            with scope:
                return ops.sum(fn())

        grads = jax.jit(jax.grad(total))([w.value for w in weights])
    elif keras.backend.backend() == "torch":
        import torch

        grads = torch.autograd.grad(ops.sum(fn()), [w.value for w in weights])
    else:
        import tensorflow as tf

        with tf.GradientTape() as tape:
            total = ops.sum(fn())
        grads = tape.gradient(total, [w.value for w in weights])
    return to_numpy([ops.convert_to_tensor(g) for g in grads])
