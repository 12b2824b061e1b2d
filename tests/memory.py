"""Counts the elements of the largest array that a function makes.

Sizes are those of the program that the backend is given, before it fuses
anything: the jaxpr on JAX, the graph on TensorFlow, and every operation that
is dispatched on PyTorch.
"""

import math

import keras
from keras import ops


def growth(fn, inputs, length, factor=4):
    """How the largest array grows when a sequence gets `factor` times longer.

    Args:
        fn: Function of tensors that returns a tensor.
        inputs: Function of a length that returns a list of arrays for `fn`.
        length: The shorter of the two lengths.
        factor: The longer length divided by the shorter.

    Returns:
        Pair of numbers, for the forward pass and for the gradients with
        respect to the float arrays.
    """
    short, long = inputs(length), inputs(factor * length)
    return tuple(
        largest_array(function, *long) / largest_array(function, *short)
        for function in (fn, _gradients(fn))
    )


def largest_array(fn, *arrays):
    """Number of elements of the largest array that `fn(*arrays)` makes."""
    backend = keras.backend.backend()
    if backend == "jax":
        import jax

        return _largest_in_jaxpr(jax.make_jaxpr(fn)(*arrays).jaxpr)
    tensors = [ops.convert_to_tensor(x) for x in arrays]
    if backend == "tensorflow":
        import tensorflow as tf

        graph = tf.function(fn).get_concrete_function(*tensors).graph
        return max(
            output.shape.num_elements() or 0  # `None` if only a run tells
            for operation in graph.get_operations()
            for output in operation.outputs
            if output.dtype != tf.resource and output.dtype != tf.variant
        )
    with _LargestTensor() as largest:
        fn(*tensors)
    return largest.size


def _gradients(fn):
    def gradients(*arrays):
        indices = [
            i
            for i, x in enumerate(arrays)
            if keras.backend.is_float_dtype(
                keras.backend.standardize_dtype(x.dtype)
            )
        ]

        def total(*floats):
            inputs = list(arrays)
            for i, x in zip(indices, floats, strict=True):
                inputs[i] = x
            return ops.sum(ops.square(fn(*inputs)))

        floats = [arrays[i] for i in indices]
        if keras.backend.backend() == "jax":
            import jax

            return jax.grad(total, range(len(floats)))(*floats)
        if keras.backend.backend() == "tensorflow":
            import tensorflow as tf

            with tf.GradientTape() as tape:
                tape.watch(floats)
                loss = total(*floats)
            return tape.gradient(loss, floats)
        import torch

        floats = [x.detach().requires_grad_() for x in floats]
        return torch.autograd.grad(total(*floats), floats)

    return gradients


def _largest_in_jaxpr(jaxpr):
    sizes = [0]
    for equation in jaxpr.eqns:
        sizes += [math.prod(x.aval.shape) for x in equation.outvars]
        for parameter in equation.params.values():
            for x in keras.tree.flatten(parameter):
                x = getattr(x, "jaxpr", x)
                if hasattr(x, "eqns"):
                    sizes.append(_largest_in_jaxpr(x))
    return max(sizes)


if keras.backend.backend() == "torch":
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    class _LargestTensor(TorchDispatchMode):
        """Watches every operation, those of the backward pass included."""

        size = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            results = func(*args, **(kwargs or {}))
            for x in keras.tree.flatten(results):
                if isinstance(x, torch.Tensor):
                    self.size = max(self.size, x.numel())
            return results
