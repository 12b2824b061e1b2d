"""Guards of speed and memory, as ratios within one run."""

import math
from statistics import median

import keras
import pytest

import benchmark
from benchmarks import backends
from benchmarks import catalogue
from benchmarks import mechanisms
from benchmarks import worker

BACKEND = keras.backend.backend()
OURS = [name for name in catalogue.MECHANISMS if name != catalogue.PLAIN]
# what the exponent of the length may be, in theory and with some noise
SLOPES = {
    "linear": 1.2,
    "linformer": 1.2,
    "window": 1.2,
    "longformer": 1.2,
    "lsh": 1.3,
    "strided": 1.7,
    "fixed": 1.7,
}


def job(**options):
    return {
        "study": "core",
        "backend": BACKEND,
        "direction": "backward",
        "causal": False,
        "dtype": "float32",
        "device": "cpu",
        "batch_size": 1,
        "tokens": 32,
        "repetitions": 5,
        "seconds": 30,
        "memory_limit": 6e9,
        "measure": "time",
        **options,
    }


def cpu_seconds(names, lengths, **options):
    """Medians of what takes turns in one run."""
    entries = [(name, length) for name in names for length in lengths]
    seconds = [[] for _ in entries]

    def emit(event):
        assert "reason" not in event, event["reason"]
        if "cpu" in event:
            seconds[event["entry"]].append(event["cpu"])

    worker.measure_time(job(entries=entries, **options), emit)
    return dict(zip(entries, map(median, seconds), strict=True))


@pytest.mark.parametrize("name", OURS)
def test_no_program_grows_with_the_length(name):
    def count(length):
        contestant = mechanisms.core(name, mechanisms.Problem(length))
        program = backends.PROGRAMS[BACKEND](
            contestant.function, contestant.arrays, backward=True
        )
        return len(program.trace())

    # loops over positions or blocks would be written out; both lengths are
    # squares, and multiples of every block
    growth = count(4096) / count(1024)
    if name == "top_k" and BACKEND == "torch":
        assert growth <= 4  # where `ops.map` is a loop, once for each block
    else:
        assert growth <= 1


@pytest.mark.nightly
@pytest.mark.parametrize("name, bound", SLOPES.items())
def test_time_grows_as_promised(name, bound):
    lengths = (2048, 8192)
    short, long = cpu_seconds([name], lengths).values()
    assert math.log(long / short) / math.log(4) < bound


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["linear", "window"])
def test_tokens_take_the_same_time_after_any_context(name):
    seconds = cpu_seconds(
        [name], (1024, 16384), study="streaming", direction="forward"
    )
    short, long = seconds.values()
    assert long < 1.25 * short


@pytest.mark.nightly
@pytest.mark.parametrize("name", SLOPES)
@pytest.mark.parametrize(
    "direction, length", [("forward", 65536), ("backward", 16384)]
)
def test_long_sequences_fit(name, direction, length):
    _, (row,) = benchmark.run(
        job(measure="memory", direction=direction, entries=[(name, length)]),
        600,
        lambda *step: None,
    )
    assert "reason" not in row, row["reason"]
    assert row["peak"] < 6e9
