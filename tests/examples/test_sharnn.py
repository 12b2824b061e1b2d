import os
import pathlib
import subprocess
import sys

from tests.backend import nightly_but_on

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"


def run_quickly(name, tmp_path):
    """Runs an example with `--quick`; returns the lines that it prints."""
    result = subprocess.run(
        [sys.executable, EXAMPLES / name, "--quick", "--outputs", tmp_path],
        env={
            **os.environ,
            "MPLBACKEND": "agg",
            "PYTHONPATH": str(EXAMPLES.parent),
        },
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    picture = (tmp_path / name).with_suffix(".png")
    assert picture.stat().st_size > 10_000
    return result.stdout.splitlines()


@nightly_but_on("tensorflow")
def test_memory_decides_how_much_is_recalled(tmp_path):
    lines = run_quickly("memory_probe_sharnn.py", tmp_path)
    rows = [line.split() for line in lines]
    accuracy = {
        int(row[0]): float(row[1])
        for row in rows
        if len(row) == 3 and row[0].isdigit()
    }
    assert accuracy[13] > 0.95
    assert accuracy[0] < 0.15
    assert abs(accuracy[6] - 0.5) < 0.08


@nightly_but_on("tensorflow")
def test_language_model_learns(tmp_path):
    lines = run_quickly("language_model_sharnn.py", tmp_path)
    rows = [line.split() for line in lines]
    bits = {
        row[0]: float(row[1])
        for row in rows
        if len(row) == 2 and row[0] in ("SHA-RNN", "LSTM")
    }
    # a uniform model of bytes has 8, and one of single letters 5.19
    assert bits["SHA-RNN"] < 5.6
    assert bits["LSTM"] < 5.8
    assert any(line.startswith("The '''history'''") for line in lines)
