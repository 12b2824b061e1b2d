"""What the package shows to the outside, and what it imports."""

import ast
import inspect
import os
import pathlib
import re
import subprocess
import sys

import keras
import pytest

import keras_attn
from keras_attn.layers.feature_map_attention import FeatureMapAttention
from tests.layers.cases import CASES

PACKAGE = pathlib.Path(keras_attn.__file__).parent
MODULES = (
    keras_attn.conversion,
    keras_attn.data,
    keras_attn.distribution,
    keras_attn.layers,
    keras_attn.models,
    keras_attn.ops,
    keras_attn.optimizers,
    keras_attn.visualization,
)


def sequence_layers():
    """The layers that inherit from `AttentionLayer`."""
    base = keras_attn.layers.AttentionLayer
    for name in keras_attn.layers.__all__:
        layer = getattr(keras_attn.layers, name)
        if issubclass(layer, base) and layer is not base:
            yield layer


@pytest.mark.parametrize("module", MODULES, ids=lambda m: m.__name__)
def test_all_lists_what_is_public(module):
    assert module.__all__ == sorted(module.__all__)
    for name in module.__all__:
        assert inspect.getdoc(getattr(module, name)), name
    public = {
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and not inspect.ismodule(value)
    }
    assert public == set(module.__all__)


def test_layers_are_at_hand_at_the_top():
    for name in keras_attn.layers.__all__:
        assert getattr(keras_attn, name) is getattr(keras_attn.layers, name)
        assert name in keras_attn.__all__


def test_layers_are_registered():
    for name in keras_attn.layers.__all__:
        layer = getattr(keras_attn.layers, name)
        if layer is not keras_attn.layers.AttentionLayer:
            registered = keras.saving.get_registered_name(layer)
            assert registered == f"keras_attn>{name}"


def test_every_sequence_layer_is_a_case():
    assert {case.cls for case in CASES} == set(sequence_layers())


def test_layers_inherit_from_a_base_class_directly():
    for name in keras_attn.layers.__all__:
        layer = getattr(keras_attn.layers, name)
        bases = (
            keras.layers.Layer,
            keras_attn.layers.AttentionLayer,
            FeatureMapAttention,
        )
        assert layer.__bases__[0] in bases and len(layer.__bases__) == 1


@pytest.mark.parametrize(
    "path", sorted(PACKAGE.glob("**/*.py")), ids=lambda path: path.name
)
def test_files_import_public_keras_and_no_backend(path):
    arrows = {"ops": ("layers", "models"), "layers": ("models",)}
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module]
        for name in names:
            assert not name.startswith("keras.src"), name
            assert name.split(".")[0] not in ("tensorflow", "jax", "torch")
            for forbidden in arrows.get(path.parent.name, ()):
                assert not name.startswith(f"keras_attn.{forbidden}"), name


def test_import_is_quick_and_takes_no_other_backend():
    backends = {"tensorflow", "torch", "matplotlib"}
    backends -= {keras.backend.backend()}
    program = f"""
import sys, time, keras
before = set(sys.modules)
start = time.process_time()
import keras_attn
seconds = time.process_time() - start
new = {{name.split(".")[0] for name in set(sys.modules) - before}}
print(seconds, *sorted(new & {backends!r}))
"""
    result = subprocess.run(
        [sys.executable, "-c", program],
        env=dict(os.environ),
        capture_output=True,
        text=True,
        check=True,
    )
    seconds, *imported = result.stdout.split()
    assert not imported
    assert float(seconds) < 0.2


def test_version_is_that_of_the_changelog():
    changelog = (PACKAGE.parent / "docs" / "changelog.md").read_text()
    newest = re.search(r"## \[?(\d+\.\d+\.\d+)", changelog)[1]
    assert newest == keras_attn.__version__
