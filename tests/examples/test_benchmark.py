import json
import os
import pathlib
import subprocess
import sys
import time

import keras
import pytest

import benchmark
from benchmarks import report
from benchmarks import worker

PROGRAM = pathlib.Path(benchmark.__file__)


def run(folder, *arguments):
    """Runs the program on the backend of the tests; returns its rows."""
    result = subprocess.run(
        [
            *(sys.executable, PROGRAM, "--quick", "--no-peers"),
            *("--backends", keras.backend.backend()),
            *("--outputs", folder),
            *arguments,
        ],
        env={**os.environ, "PYTHONPATH": str(PROGRAM.parents[1])},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    (path,) = folder.glob("*.json")
    assert path.with_suffix(".png").stat().st_size > 10_000
    markdown = path.with_suffix(".md").read_text()
    rows = json.loads(path.read_text())["rows"]
    return {(row["name"], row["length"]): row for row in rows}, markdown


def test_time_of_a_mechanism(tmp_path):
    rows, markdown = run(
        tmp_path,
        *("core", "--mechanisms", "linear", "--directions", "backward"),
        *("--lengths", "32", "64", "256", "--memory-limit", "1.5e-3"),
    )
    assert sorted(rows) == [
        (name, length)
        for name in ("keras", "linear")
        for length in (32, 64, 256)
    ]
    for (name, length), row in rows.items():
        if length == 256:
            assert row["reason"].startswith("would need about 0.00")
            assert not row["wall"]
            continue
        assert len(row["wall"]) == len(row["cpu"]) == 3
        assert min(row["wall"]) > 0 and min(row["cpu"]) >= 0
        assert row["first"] > row["trace"] >= 0
        assert row["largest"] >= length * 512 * 4
        assert row["program"] == rows[name, 32]["program"] > 1
        # pairs of positions, or outer products
        products = length * (length if name == "keras" else min(length, 64))
        assert row["operations"] == 3 * 4 * 512 * products
        assert row["share"] > 0
    assert "**core, " in markdown
    assert "not run: would need" in markdown
    assert "| linear | 32 - 64 |" in markdown


@pytest.mark.nightly
@pytest.mark.parametrize(
    "study", ["layer", "block", "streaming", "cbam", "core --causal"]
)
def test_everything_runs(study, tmp_path):
    rows, _ = run(tmp_path, *study.split(), "--peers")
    failed = {
        key: row["reason"] for key, row in rows.items() if "reason" in row
    }
    if study == "cbam" and keras.backend.backend() == "tensorflow":
        # no convolutions of channels first on a CPU
        failed = {key: 0 for key in failed if "channels_first" not in key[0]}
    assert not failed
    assert len(rows) >= 4


@pytest.mark.nightly
def test_memory_of_a_process(tmp_path):
    rows, _ = run(
        tmp_path,
        *("core", "--measures", "memory", "--directions", "forward"),
        *("--mechanisms", "top_k", "--lengths", "256", "4096"),
    )
    short, long = rows["top_k", 256], rows["top_k", 4096]
    own = long["peak"] - long["base"]
    # scores, and not much beside
    assert 4 * 8 * 4096**2 < own < 10 * 4 * 8 * 4096**2
    assert short["peak"] - short["base"] < own / 2
    assert "wall" not in long or not long["wall"]


class FakeWorker:
    """A process that does not survive a contestant."""

    jobs = []

    def __init__(self, job):
        self.job = job
        self.jobs.append(job)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def events(self, timeout):
        yield {"machine": "a machine"}
        for index, (name, _) in enumerate(self.job["entries"]):
            yield {"entry": index}
            if name == "hungry":
                raise benchmark.FailedError("killed")
            yield {"entry": index, "wall": 2.0, "cpu": 1.0}


def test_a_process_that_dies_is_started_again(monkeypatch):
    monkeypatch.setattr(benchmark, "Worker", FakeWorker)
    job = {
        "study": "core",
        "backend": "jax",
        "direction": "forward",
        "entries": [("a", 1), ("hungry", 1), ("b", 1)],
        "repetitions": 7,
    }
    steps = []
    machine, rows = benchmark.run(job, 1, lambda *step: steps.append(step))
    assert machine == "a machine"
    assert FakeWorker.jobs[-1]["entries"] == [("a", 1), ("b", 1)]
    assert [row["wall"] for row in rows] == [[2.0], [], [2.0]]
    assert [row.get("reason") for row in rows] == [None, "killed", None]
    assert steps[0] == (0, ("a", 1)) and steps[1] == (1 / 8, ("a", 1))


def test_a_silent_process_is_stopped(monkeypatch):
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    popen = subprocess.Popen
    monkeypatch.setattr(
        subprocess, "Popen", lambda _, **kwargs: popen(command, **kwargs)
    )
    with pytest.raises(benchmark.FailedError, match="took more than 0 s"):
        with benchmark.Worker({"backend": "jax", "device": "cpu"}) as worker:
            list(worker.events(0.1))
    assert worker.process.returncode < 0


def _rows(name, seconds):
    return [
        {"name": name, "length": length, "wall": [second], "cpu": [second]}
        for length, second in seconds.items()
    ]


def test_slopes():
    rows = _rows("x", {1000: 1.0, 2000: 2.0**1.5, 4000: 4.0**1.5})
    assert report.slope(rows, lambda row: row["wall"][0]) == "1.50"
    assert report.slope(rows[:1], lambda row: row["wall"][0]) == ""


@pytest.mark.parametrize(
    "seconds, words",
    [
        ({1000: 0.5, 4000: 4.0}, "from 1,000 or less"),
        ({1000: 2.0, 4000: 17.0}, "not up to 4,000"),
        # gains of 1/2 and 2 are equally far from 1
        ({1000: 2.0, 4000: 8.0}, "from 2,000"),
        ({500: 1.0}, ""),
    ],
)
def test_crossover(seconds, words):
    plain = _rows("keras", {1000: 1.0, 4000: 16.0})
    assert report.crossover(plain, _rows("x", seconds), "cpu") == words


def test_what_a_longer_call_leaves_behind_is_not_charged_to_the_next():
    job = {"batch_size": 1, "causal": False, "dtype": "float32"}
    entry = worker.Entry("linear", 32, job)
    calls = []
    entry.call = lambda: calls.append(time.sleep(2 * worker.SHORTEST))
    assert entry.measure(before=1.0)["wall"] < 1.0
    assert len(calls) == 2  # of which the first is not timed
    entry.measure(before=worker.SHORTEST / 2)
    assert len(calls) == 3
