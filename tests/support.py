"""Writes `docs/support.md` from what the tests find: `python -m tests.support`.

A test that is marked `@pytest.mark.support("Export", "ONNX")` decides the
column "ONNX" of the table "Export", each of its cases in the row of its layer.
The layer is that of the parameter of the test, or those named as `layers=`.
Tests of what does not work use the fixture `unsupported`.

    python -m tests.support                    # all, on all three backends
    python -m tests.support --backends jax     # and the rest as it was
    python -m tests.support -k onnx            # with options of pytest
"""

import argparse
import inspect
import json
import pathlib
import sys
import tempfile
from xml.etree import ElementTree

import keras
import pytest

import keras_attn
from tests.__main__ import BACKENDS
from tests.__main__ import ROOT
from tests.__main__ import add_backends
from tests.__main__ import run

PAGE = ROOT / "docs" / "support.md"
OUTCOMES = ROOT / ".support"  # what the last runs have found, not in git
CELLS = pytest.StashKey()  # all cells that the collected tests decide
LAYERS = [
    name
    for name in keras_attn.layers.__all__
    if name not in ("AttentionLayer", "LengthProjection")
]
HEAD = """\
# Support

What works where. This page is written by `python -m tests.support`, which runs
the tests that each cell stands for, and is not edited by hand.

A cell tells of TensorFlow, JAX and PyTorch, in this order: ✓ if the tests pass,
✗ if they assert that it does not work, for the reason under that number, ? if
they have not been run, and · if there is nothing to test.
"""
NOT_RUN = "not run"


def cells_of(item):
    """The cells, as text, that a test decides: table, column and layer."""
    return [
        " | ".join((*mark.args, layer))
        for mark in item.iter_markers("support")
        for layer in mark.kwargs.get("layers") or layers_of(item)
    ]


def layers_of(item):
    """Names of the layers that the parameters of a test stand for."""
    callspec = getattr(item, "callspec", None)
    for value in callspec.params.values() if callspec else ():
        cls = value if inspect.isclass(value) else getattr(value, "cls", None)
        if cls is not None and issubclass(cls, keras.Layer):
            return [cls.__name__]
    raise ValueError(f"{item.nodeid} does not tell which layer it supports.")


def main():
    parser = argparse.ArgumentParser(
        prog="python -m tests.support",
        description="Writes docs/support.md from what the tests find.",
        epilog="Further arguments go to pytest, and leave the outcomes of "
        "other tests as they were.",
    )
    add_backends(parser)
    options, pytest_arguments = parser.parse_known_args()
    OUTCOMES.mkdir(exist_ok=True)
    clean = True
    for backend in options.backends:
        with tempfile.TemporaryDirectory() as folder:
            report = pathlib.Path(folder) / "report.xml"
            arguments = ["-m", "support", "--nightly", *pytest_arguments]
            status = run(backend, arguments, report)
            outcomes = read(report)
        clean = clean and status == 0
        if pytest_arguments:
            outcomes = {**load(backend), **outcomes}
        text = json.dumps(outcomes, indent=1)
        (OUTCOMES / f"{backend}.json").write_text(text)
    found = []
    for backend in BACKENDS:
        known = cells(load(backend))
        all_cells = collect(backend)
        found.append({cell: known.get(cell, {NOT_RUN}) for cell in all_cells})
    PAGE.write_text(page(found))
    sys.exit(0 if clean else 1)


def collect(backend):
    """All cells that some test decides, run or not."""
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "cells.json"
        arguments = ["--collect-only", "--nightly", "-qq", f"--cells={path}"]
        run(backend, ["-n0", *arguments], path.with_name("report.xml"))
        return json.loads(path.read_text())


def read(report):
    """What each test found: its cells, and "✓", "failed" or a reason."""
    outcomes = {}
    for test in ElementTree.parse(report).iter("testcase"):
        properties = [
            (p.get("name"), p.get("value")) for p in test.iter("property")
        ]
        reasons = [v for name, v in properties if name == "unsupported"]
        result = reasons[0] if reasons else "✓"
        if any(test.find(tag) is not None for tag in ("failure", "error")):
            result = "failed"
        outcomes[f"{test.get('classname')}.{test.get('name')}"] = {
            "cells": [v for name, v in properties if name == "support"],
            "result": result,
        }
    return outcomes


def load(backend):
    path = OUTCOMES / f"{backend}.json"
    return json.loads(path.read_text()) if path.exists() else {}


def cells(outcomes):
    """The set of results of each cell, by cell, in the order of the tests."""
    results = {}
    for outcome in outcomes.values():
        for cell in outcome["cells"]:
            results.setdefault(cell, set()).add(outcome["result"])
    return results


def page(backends):
    """The page, from the cells on each of the backends."""
    tables = {}
    for results in backends:
        for cell in results:
            table, column, _ = cell.split(" | ")
            tables.setdefault(table, {})[column] = None
    parts = [HEAD]
    for table in sorted(tables):
        parts.append(f"\n## {table}\n\n")
        columns = list(tables[table])
        notes = {}
        lines = [["layer", *columns], ["---"] * (1 + len(columns))]
        for layer in LAYERS:
            cells = (f"{table} | {column} | {layer}" for column in columns)
            lines.append(
                [f"`{layer}`"]
                + [
                    " ".join(symbol(b.get(cell), notes) for b in backends)
                    for cell in cells
                ]
            )
        parts += [f"| {' | '.join(line)} |\n" for line in lines]
        if notes:
            parts.append("\n")
        parts += [f"{n}. {reason}\n" for reason, n in notes.items()]
    return "".join(parts)


def symbol(results, notes):
    """What a cell shows for a backend; notes get a number when needed."""
    if results is None:
        return "·"
    if results == {NOT_RUN}:
        return "?"
    reasons = sorted(results - {"✓"})
    if not reasons:
        return "✓"
    return "✗" + ",".join(
        str(notes.setdefault(reason, len(notes) + 1)) for reason in reasons
    )


def cells_of_page(text, backend):
    """The cells that say something of a backend."""
    place = BACKENDS.index(backend)
    cells, table, columns = set(), None, []
    for line in text.splitlines():
        if line.startswith("## "):
            table = line.removeprefix("## ")
        elif line.startswith("| layer"):
            columns = [part.strip() for part in line.split("|")[2:-1]]
        elif line.startswith("| `"):
            layer, *symbols = (part.strip() for part in line.split("|")[1:-1])
            cells |= {
                f"{table} | {column} | {layer.strip('`')}"
                for column, symbol in zip(columns, symbols, strict=True)
                if symbol.split()[place] != "·"
            }
    return cells


if __name__ == "__main__":
    main()
