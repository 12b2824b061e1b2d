"""Reads the golden data: what the papers' own programs computed."""

import pathlib

import numpy as np

FOLDER = pathlib.Path(__file__).parent


def names(pattern):
    """Names of the golden files that match a pattern, without suffix."""
    found = sorted(path.stem for path in FOLDER.glob(f"{pattern}.npz"))
    assert found, f"no golden data matches {pattern}"
    return found


def load(name):
    """The arrays of a golden file by their names."""
    with np.load(FOLDER / f"{name}.npz") as file:
        return dict(file)
