"""Runs every Python example of the docstrings and of the documentation."""

import inspect
import pathlib
import re
import textwrap

import keras
import pytest

import keras_attn

ROOT = pathlib.Path(__file__).parent.parent


def examples(text):
    return [
        textwrap.dedent(example)
        for example in re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    ]


def all_examples():
    for module in (
        keras_attn.conversion,
        keras_attn.data,
        keras_attn.distribution,
        keras_attn.layers,
        keras_attn.models,
        keras_attn.ops,
        keras_attn.optimizers,
        keras_attn.visualization,
    ):
        for name in module.__all__:
            text = inspect.getdoc(getattr(module, name)) or ""
            for i, example in enumerate(examples(text)):
                yield pytest.param(example, id=f"{name}-{i}")
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))):
        for i, example in enumerate(examples(page.read_text())):
            yield pytest.param(example, id=f"{page.stem}-{i}")


@pytest.mark.parametrize("example", all_examples())
def test_example_runs(example, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with keras.saving.CustomObjectScope({}):
        exec(compile(example, "example", "exec"), {"__name__": "example"})


@pytest.mark.parametrize("name", keras_attn.layers.__all__)
def test_every_layer_shows_an_example(name):
    assert examples(inspect.getdoc(getattr(keras_attn.layers, name)))


@pytest.mark.parametrize(
    "page",
    [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))],
    ids=lambda page: page.stem,
)
def test_links_to_files_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
        if "://" not in link:
            assert (page.parent / link).exists(), link
