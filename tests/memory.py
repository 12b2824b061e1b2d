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
    return max(array_sizes(fn, *arrays))


def array_sizes(fn, *arrays):
    """Numbers of elements of all arrays that `fn(*arrays)` makes.

    There is one for each result of each operation, so that their number tells
    how long the program is.
    """
    backend = keras.backend.backend()
    if backend == "jax":
        import jax

        return jaxpr_sizes(jax.make_jaxpr(fn)(*arrays).jaxpr)
    tensors = [ops.convert_to_tensor(x) for x in arrays]
    if backend == "tensorflow":
        import tensorflow as tf

        return graph_sizes(
            tf.function(fn).get_concrete_function(*tensors).graph
        )
    return dispatched_sizes(fn, *tensors)


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


def jaxpr_sizes(jaxpr):
    """As `array_sizes()`, of a program of JAX and of those inside of it."""
    sizes = []
    for equation in jaxpr.eqns:
        sizes += [math.prod(x.aval.shape) for x in equation.outvars]
        for parameter in equation.params.values():
            for x in keras.tree.flatten(parameter):
                x = getattr(x, "jaxpr", x)
                if hasattr(x, "eqns"):
                    sizes += jaxpr_sizes(x)
    return sizes


def graph_sizes(graph):
    """As `array_sizes()`, of a graph of TensorFlow."""
    import tensorflow as tf

    return [
        output.shape.num_elements() or 0  # `None` if only a run tells
        for operation in graph.get_operations()
        for output in operation.outputs
        if output.dtype != tf.resource and output.dtype != tf.variant
    ]


def dispatched_sizes(fn, *tensors):
    """As `array_sizes()`, of the operations that PyTorch runs."""
    with _Recorder() as recorder:
        fn(*tensors)
    return recorder.sizes


if keras.backend.backend() == "torch":
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    class _Recorder(TorchDispatchMode):
        """Watches every operation, those of the backward pass included."""

        def __init__(self):
            super().__init__()
            self.sizes = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            results = func(*args, **(kwargs or {}))
            for x in keras.tree.flatten(results):
                if isinstance(x, torch.Tensor):
                    self.sizes.append(x.numel())
            return results
