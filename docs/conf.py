"""Sphinx builds the site: `sphinx-build -W docs docs/_build`."""

import os
import pathlib
import re
import sys

os.environ.setdefault("KERAS_BACKEND", "jax")
sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))

import keras_attn  # noqa: E402

project = "keras_attn"
author = "the keras_attn authors"
copyright = author
version = release = keras_attn.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.mathjax",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
]
exclude_patterns = ["_build"]
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3
napoleon_custom_sections = [("Call arguments", "params_style")]
napoleon_use_rtype = False
autodoc_member_order = "bysource"
autodoc_typehints = "none"

html_theme = "furo"
html_title = f"keras_attn {version}"
html_static_path = ["_static"]
html_css_files = ["custom.css"]


def to_rst(app, what, name, obj, options, lines):
    """Turns the Markdown of our docstrings into what autodoc reads."""
    text = "\n".join(lines)
    text = re.sub(r"```python\n(.*?)```", _to_code_block, text, flags=re.DOTALL)
    text = re.sub(r"\[([^\]]+)\]\((https?://[^)]+)\)", _to_link, text)
    text = re.sub(r"(?<![`:>])`([^`<\n]+)`(?!`|_)", r"``\1``", text)
    lines[:] = text.split("\n")


def _to_code_block(match):
    code = match[1].replace("\n", "\n    ")
    return f".. code-block:: python\n\n    {code}"


def _to_link(match):
    words = re.sub(r"\s+", " ", match[1])
    return f"`{words} <{match[2]}>`__"


def setup(app):
    # before napoleon, whose priority is 500
    app.connect("autodoc-process-docstring", to_rst, priority=400)
