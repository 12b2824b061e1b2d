"""Files that one backend writes are read by all, in a fresh process."""

import os
import subprocess
import sys

import keras
import numpy as np
import pytest

from keras_attn import layers
from keras_attn import models
from tests.__main__ import BACKENDS
from tests.__main__ import ROOT
from tests.layers.cases import CASES
from tests.layers.cases import FIRST_CASES
from tests.layers.every_layer import EXAMPLES

# another backend, the quickest to start
NEXT = "torch" if keras.backend.backend() == "tensorflow" else "tensorflow"


def examples():
    """Models of each layer with each of its options, their names and inputs."""
    x = np.random.default_rng(0).normal(size=(2, 11, 13)).astype("float32")
    for i, case in enumerate(CASES):
        inputs = keras.Input((None, 13))
        model = keras.Model(inputs, case.layer()(inputs))
        yield f"{case.cls.__name__}_{i}", model, x
    for example in EXAMPLES[len(FIRST_CASES) :]:
        yield str(example), example.model(), example.inputs()
    tokens = np.random.default_rng(0).integers(7, size=(2, 11))
    yield "SHARNN", models.SHARNN(7, 6, 12, num_layers=2), tokens
    transformer = models.Transformer(
        vocabulary_size=7,
        hidden_dim=6,
        num_layers=2,
        attention=lambda depth: layers.LinearAttention(2, 3),
        max_length=11,
        head="tokens",
    )
    yield "Transformer", transformer, tokens
    images = np.random.default_rng(0).normal(size=(2, 32, 32, 3))
    yield "CBAMResNet", models.CBAMResNet(18, classes=3), images


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder for `tests.checkpoint_reader`."""
    folder = tmp_path_factory.mktemp("checkpoints")
    for name, model, x in examples():
        output = model.predict(x, verbose=0)
        model.save(folder / f"{name}.keras")
        model.save_weights(folder / f"{name}.weights.h5")
        np.savez(folder / f"{name}.npz", x=x, output=output)
    return folder


@pytest.mark.support(
    "Saving",
    "`.keras`, `.weights.h5`: written here, read by every backend",
    layers=[str(example) for example in EXAMPLES],
)
@pytest.mark.parametrize(
    "reader",
    [
        pytest.param(name, marks=[] if name == NEXT else pytest.mark.nightly)
        for name in BACKENDS
    ],
)
def test_every_backend_reads_what_this_one_writes(folder, reader):
    subprocess.run(
        [sys.executable, "-m", "tests.checkpoint_reader", folder],
        env={**os.environ, "KERAS_BACKEND": reader},
        cwd=ROOT,
        check=True,
    )
