"""Runs every Python example of the docstrings and of the documentation."""

import importlib.util
import inspect
import os
import pathlib
import re
import subprocess
import sys
import textwrap

import keras
import pytest

import keras_attn

ROOT = pathlib.Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]


# what a block needs is said in a comment in front of it, which is not shown
BLOCK = re.compile(
    r"(?:<!-- runs"
    r"(?: on (?P<backend>\w+))?"
    r"(?: with (?:(?P<devices>\d+) devices|(?P<packages>[\w, ]+)))?"
    r" -->\n)?"
    r"```python\n(?P<code>.*?)```",
    re.DOTALL,
)


def examples(text):
    """The code of a text that can run here, and on how many devices."""
    for match in BLOCK.finditer(text):
        backend, packages = match["backend"], match["packages"] or ""
        if backend in (None, keras.backend.backend()) and all(
            importlib.util.find_spec(x) for x in packages.split(", ") if x
        ):
            yield textwrap.dedent(match["code"]), match["devices"]


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
                yield pytest.param(*example, id=f"{name}-{i}")
    for page in PAGES:
        for i, example in enumerate(examples(page.read_text())):
            yield pytest.param(*example, id=f"{page.stem}-{i}")


# tf2onnx asks NumPy for names that will mean something else
@pytest.mark.filterwarnings("ignore:.*np.object:FutureWarning")
@pytest.mark.parametrize(("code", "devices"), all_examples())
def test_example_runs(code, devices, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if devices:
        flag = f"--xla_force_host_platform_device_count={devices}"
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        environment["XLA_FLAGS"] = f"{environment.get('XLA_FLAGS', '')} {flag}"
        command = [sys.executable, "-c", code]
        subprocess.run(command, env=environment, check=True)
        return
    with keras.saving.CustomObjectScope({}):
        exec(compile(code, "example", "exec"), {"__name__": "example"})


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_blocks_say_what_they_are(page):
    text = page.read_text()
    known = ("python", "bash", "text", "{toctree}", "{eval-rst}")
    for label in re.findall(r"^```(.*)$", text, re.MULTILINE)[::2]:
        assert label in known
    # none is left out because of a comment that is not understood
    comments = len(re.findall(r"<!-- runs?\b.*-->\n```python", text))
    blocks = list(BLOCK.finditer(text))
    assert comments == sum(match[0].startswith("<!--") for match in blocks)
    assert len(blocks) == text.count("```python")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_name_programs_and_options_that_exist(page):
    for name, rest in re.findall(
        r"(examples/\w+\.py)((?: +[^\s`]+| *\\\n)*)", page.read_text()
    ):
        program = (ROOT / name).read_text()
        for option in re.findall(r"--[\w-]+", rest):
            option = option.replace("--no-peers", "--peers")
            assert f'"{option}"' in program or option == "--help", (
                name,
                option,
            )


@pytest.mark.parametrize("name", keras_attn.layers.__all__)
def test_every_layer_shows_an_example(name):
    assert any(examples(inspect.getdoc(getattr(keras_attn.layers, name))))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_to_files_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
        if "://" not in link:
            assert (page.parent / link).exists(), link
