"""Compiles a function on each backend, counts its arrays, and runs it."""

import functools
import gc
import pathlib
import resource
import sys
import time

import keras
from keras import ops

from tests import memory


class Program:
    """A function of tensors, compiled for one set of arrays.

    Args:
        function: Function of tensors.
        arrays: The tensors to call it with.
        backward: Whether the gradients with respect to all of them are
            computed too, for a gradient of the output that is drawn once.
    """

    def __init__(self, function, arrays, backward):
        self.backward = backward
        self.arrays = list(arrays)
        self.function = function
        if backward:
            # the output has the shape of the first array
            self.arrays.append(ops.stop_gradient(arrays[0]) * 0.7)
            self.function = functools.partial(self.with_gradients, function)
        self.trace_seconds = 0.0

    def __call__(self):
        self.wait(self.compiled(*self.arrays))


class JaxProgram(Program):
    def trace(self):
        import jax

        start = time.perf_counter()
        self.traced = jax.jit(self.function).trace(*self.arrays)
        self.trace_seconds = time.perf_counter() - start
        return memory.jaxpr_sizes(self.traced.jaxpr.jaxpr)

    def compile(self):
        self.compiled = self.traced.lower().compile()

    @staticmethod
    def with_gradients(function, *arrays):
        import jax

        *arrays, gradient = arrays
        output, pull = jax.vjp(function, *arrays)
        return output, pull(gradient)

    @staticmethod
    def wait(results):
        import jax

        jax.block_until_ready(results)


class TensorFlowProgram(Program):
    use_xla = True

    def trace(self):
        import tensorflow as tf

        self.compiled = tf.function(
            self.function, autograph=False, jit_compile=self.use_xla
        )
        start = time.perf_counter()
        graph = self.compiled.get_concrete_function(*self.arrays).graph
        self.trace_seconds = time.perf_counter() - start
        return memory.graph_sizes(graph)

    def compile(self):
        """The first call compiles."""

    @staticmethod
    def with_gradients(function, *arrays):
        import tensorflow as tf

        *arrays, gradient = arrays
        with tf.GradientTape() as tape:
            tape.watch(arrays)
            output = function(*arrays)
        return output, tape.gradient(output, arrays, gradient)

    @staticmethod
    def wait(results):
        import tensorflow as tf

        tf.test.experimental.sync_devices()


class TensorFlowGraphProgram(TensorFlowProgram):
    use_xla = False


class TorchProgram(Program):
    def __init__(self, function, arrays, backward):
        # parameters of modules need gradients as they are
        arrays = [
            x.requires_grad_() if backward and x.is_floating_point() else x
            for x in arrays
        ]
        super().__init__(function, arrays, backward)

    def trace(self):
        """Runs the function on tensors without data."""
        from torch._subclasses.fake_tensor import FakeTensorMode

        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            arrays = [mode.from_tensor(x) for x in self.arrays]
            return memory.dispatched_sizes(self.function, *arrays)

    def compile(self):
        """There is nothing to compile."""

    def compiled(self, *arrays):
        import torch

        with torch.set_grad_enabled(self.backward):
            return self.function(*arrays)

    @staticmethod
    def with_gradients(function, *arrays):
        import torch

        *arrays, gradient = arrays
        output = function(*arrays)
        return output, torch.autograd.grad(
            output, arrays, gradient, allow_unused=True
        )

    @staticmethod
    def wait(results):
        import torch

        if torch.cuda.is_available():
            torch.cuda.synchronize()


PROGRAMS = {
    "jax": JaxProgram,
    "tensorflow": TensorFlowProgram,
    "tensorflow-graph": TensorFlowGraphProgram,
    "torch": TorchProgram,
}


def accelerator():
    """Name of the GPU that the backend uses, or `None`."""
    backend = keras.backend.backend()
    if backend == "jax":
        import jax

        device = jax.devices()[0]
        return None if device.platform == "cpu" else device.device_kind
    if backend == "tensorflow":
        import tensorflow as tf

        devices = tf.config.list_physical_devices("GPU")
        if not devices:
            return None
        details = tf.config.experimental.get_device_details(devices[0])
        return details.get("device_name", "GPU")
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def peak_memory():
    """The most memory so far, of the GPU if there is one, in bytes."""
    if accelerator() is None:
        return peak_of_process()
    backend = keras.backend.backend()
    if backend == "jax":
        import jax

        return jax.devices()[0].memory_stats()["peak_bytes_in_use"]
    if backend == "tensorflow":
        import tensorflow as tf

        return tf.config.experimental.get_memory_info("GPU:0")["peak"]
    import torch

    return torch.cuda.max_memory_allocated()


def peak_of_process():
    """Bytes that this process has held at most."""
    status = pathlib.Path("/proc/self/status")
    if status.exists():
        # `ru_maxrss` of Linux may be that of the process that started this one
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def timed(call, calls=1):
    """Wall and CPU seconds of a call, as the mean of some."""
    gc.collect()
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(calls):
        call()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return wall / calls, cpu / calls
