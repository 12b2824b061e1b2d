"""The page of what works where, `docs/support.md`, is that of these tests."""

import keras

from tests.layers.every_layer import EXAMPLES
from tests.support import CELLS
from tests.support import LAYERS
from tests.support import NOT_RUN
from tests.support import PAGE
from tests.support import cells_of_page
from tests.support import page


def test_every_layer_has_an_example():
    assert sorted(str(example) for example in EXAMPLES) == sorted(LAYERS)


def test_page_shows_what_each_backend_found():
    cell, other = "Export | ONNX | LAMA", "Masks | padding | Boom"
    found = [{cell: {"✓"}, other: {NOT_RUN}}, {cell: {"✓", "a bug"}}, {}]
    text = page(found)
    assert "| `LAMA` | ✓ ✗1 · |" in text and "\n1. a bug\n" in text
    assert "| `Boom` | ? · · |" in text
    assert cells_of_page(text, "tensorflow") == {cell, other}
    assert cells_of_page(text, "jax") == {cell}


def test_page_has_the_cells_of_the_tests(request):
    page_cells = cells_of_page(PAGE.read_text(), keras.backend.backend())
    collected = request.config.stash[CELLS]
    hint = "run `python -m tests.support`"
    assert collected <= page_cells, hint
    if request.config.invocation_params.dir == request.config.rootpath and (
        request.config.args == request.config.getini("testpaths")
    ):
        assert collected == page_cells, hint
