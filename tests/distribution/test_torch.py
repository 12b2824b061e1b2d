"""`torch.nn.parallel.DistributedDataParallel` in two processes."""

import datetime
import subprocess
import sys
import warnings

import keras
import numpy as np
import pytest
import torch
from keras import ops

from tests.distribution.examples import EXAMPLES
from tests.distribution.examples import inputs
from tests.distribution.examples import make


def make_model(example):
    keras.utils.set_random_seed(0)
    tensors = keras.Input(inputs(example).shape[1:])
    return keras.Model(tensors, make(example)(tensors))


def gradients(model, example, batch, parallelize=lambda model: model):
    """Gradients with respect to all weights of a model, as one vector."""
    x = ops.convert_to_tensor(inputs(example)[batch])
    module = parallelize(model)
    torch.mean(torch.square(module(x))).backward()
    weights = [v.value for v in model.trainable_variables]
    return np.concatenate([w.grad.numpy().ravel() for w in weights])


def replica(rank, folder):
    """The gradients that one of two processes gets, given half of the batch."""
    torch.distributed.init_process_group(
        "gloo",
        f"file://{folder}/rendezvous",
        rank=rank,
        world_size=2,
        timeout=datetime.timedelta(minutes=1),
    )
    half = slice(4 * rank, 4 * rank + 4)
    parallelize = torch.nn.parallel.DistributedDataParallel
    with warnings.catch_warnings():
        # of the kernels of convolutions, about speed
        warnings.filterwarnings("ignore", "Grad strides do not match")
        results = {
            str(e): gradients(make_model(e), e, half, parallelize)
            for e in EXAMPLES
        }
    torch.distributed.destroy_process_group()
    return results


@pytest.fixture(scope="module")
def of_two_processes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("processes")
    program = "import sys; from tests.distribution.test_torch import replica; "
    program += "replica(1, sys.argv[1])"
    command = [sys.executable, "-c", program, folder]
    with subprocess.Popen(command) as other:
        results = replica(0, folder)
    assert other.returncode == 0
    return results


@pytest.mark.support("Scale", "`DistributedDataParallel`")
@pytest.mark.parametrize("example", EXAMPLES, ids=str)
def test_two_processes_share_the_gradients_of_one(example, of_two_processes):
    expected = gradients(make_model(example), example, slice(None))
    actual = of_two_processes[str(example)]
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-6)
    assert np.abs(expected).max() > 1e-5
