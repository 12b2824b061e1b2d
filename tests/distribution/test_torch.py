"""`torch.nn.parallel.DistributedDataParallel` in two processes."""

import subprocess
import sys

import keras
import numpy as np
import torch

from keras_attn.layers import LinearAttention
from keras_attn.layers import LongformerAttention
from keras_attn.layers import MultiHeadAttention


def make_model():
    keras.utils.set_random_seed(0)
    inputs = keras.Input((11, 13))
    x = inputs
    for layer in (
        MultiHeadAttention(3, 5),
        LinearAttention(3, 5),
        LongformerAttention(3, 5, window_size=4, num_global_tokens=2),
    ):
        x = x + layer(x)
    return keras.Model(inputs, x)


def batch():
    x = np.random.default_rng(0).normal(size=(4, 11, 13))
    return torch.tensor(x, dtype=torch.float32)


def gradients(model, parameters, x):
    """Gradients with respect to all parameters, as one vector."""
    torch.mean(torch.square(model(x))).backward()
    return np.concatenate([p.grad.numpy().ravel() for p in parameters])


def run_replica(rank, folder):
    """Runs one of two processes, each with half of the batch."""
    torch.distributed.init_process_group(
        "gloo", f"file://{folder}/rendezvous", rank=rank, world_size=2
    )
    model = make_model()
    parallel = torch.nn.parallel.DistributedDataParallel(model)
    x = batch()[2 * rank : 2 * rank + 2]
    parameters = [v.value for v in model.trainable_variables]
    np.save(f"{folder}/{rank}.npy", gradients(parallel, parameters, x))
    torch.distributed.destroy_process_group()


def test_two_processes_share_the_gradients_of_one(tmp_path):
    program = "import sys; from tests.distribution.test_torch import *; "
    program += "run_replica(int(sys.argv[1]), sys.argv[2])"
    replicas = [
        subprocess.Popen([sys.executable, "-c", program, str(rank), tmp_path])
        for rank in range(2)
    ]
    model = make_model()
    parameters = [v.value for v in model.trainable_variables]
    expected = gradients(model, parameters, batch())
    assert np.abs(expected).max() > 1e-3
    for rank, replica in enumerate(replicas):
        assert replica.wait(timeout=300) == 0
        actual = np.load(tmp_path / f"{rank}.npy")
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)
