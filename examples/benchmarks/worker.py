"""Measures on one backend, in a process of its own.

Reads what to measure from standard input, and writes what it finds to standard
output, line by line, so that all is not lost if it has to be stopped.
"""

import gc
import json
import math
import os
import sys
import time

import keras
from keras import ops

from benchmarks import backends
from benchmarks import images
from benchmarks import mechanisms
from benchmarks import peers
from benchmarks.catalogue import PEERS

MIN_ROUNDS = 3
SHORTEST = 0.01  # seconds; quicker calls are repeated until it has passed
# arrays of the largest size that live at once, as seen in peaks of memory
ARRAYS_ALIVE = {"forward": 2, "backward": 4}


class TooLargeError(Exception):
    """What would not fit into memory."""


class Entry:
    """One contestant, ready to be called."""

    def __init__(self, name, length, job):
        self.name, self.length, self.job = name, length, job
        self.problem = mechanisms.Problem(
            length, job["batch_size"], job["causal"], job["dtype"]
        )
        self.fields = {}
        self.spent = self.rounds = self.latest = 0
        self.calls = 1

    def start(self):
        """Compiles and calls for the first time; returns what that tells."""
        start = time.perf_counter()
        self.call = self.prepare()
        self.call()
        self.fields["first"] = time.perf_counter() - start
        return self.fields

    def prepare(self):
        """Makes the function without arguments that is measured."""
        study, backend = self.job["study"], self.job["backend"]
        backward = self.job["direction"] == "backward"
        if self.name == "matmul":
            contestant = _matmul(self.job["dtype"])
            backward = False
        elif study == "cbam":
            return images.step(self.name, self.job)
        elif study == "streaming":
            contestant = mechanisms.stream(
                self.name, self.problem, self.job["tokens"]
            )
        else:
            contestant = _contestant(study, self.name, self.problem)
        program = backends.PROGRAMS[backend](
            contestant.function, contestant.arrays, backward
        )
        if contestant.is_traceable or backend != "torch":
            sizes = program.trace()
            if self.name != "matmul":
                self.describe(sizes)
        if study == "block" and self.name != "matmul":
            # tracing the layer has told whether the block will fit
            self.fields = {}
            return mechanisms.block(self.name, self.problem)
        self.fields["trace"] = program.trace_seconds
        if contestant.operations:
            # both factors of a product have a gradient
            passes = 3 if backward else 1
            self.fields["operations"] = passes * contestant.operations
        program.compile()
        return program

    def describe(self, sizes):
        """Notes how large arrays are, and raises if they would not fit."""
        itemsize = 4 if self.job["dtype"] == "float32" else 2
        largest = max(sizes) * itemsize
        self.fields |= {"largest": largest, "program": len(sizes)}
        needed = ARRAYS_ALIVE[self.job["direction"]] * largest
        if needed > self.job["memory_limit"]:
            raise TooLargeError(f"would need about {needed / 1e9:.2g} GB")

    def measure(self, before):
        """Seconds of a call, or `None` if it was too short to be measured.

        Args:
            before: Seconds that the contestant before took. What a longer one
                leaves behind, such as memory that is given back only after it
                has answered, is not counted here.
        """
        if self.latest < before:
            self.call()
        wall, cpu = backends.timed(self.call, self.calls)
        self.latest = wall
        if wall < SHORTEST and self.calls == 1:
            self.calls = math.ceil(SHORTEST / wall)
            return None
        self.spent += wall * self.calls
        self.rounds += 1
        return {"wall": wall, "cpu": cpu}

    def is_done(self, repetitions, seconds):
        if self.rounds < MIN_ROUNDS:
            return False
        return self.rounds >= repetitions or self.spent > seconds


def _contestant(study, name, problem):
    maker = mechanisms.core if study == "core" else mechanisms.layer
    if name not in PEERS:
        return maker(name, problem)
    model = PEERS[name].mechanism
    operations = mechanisms.core_operations(model, problem)
    if study == "core":
        return peers.core(name, problem, operations)
    operations += mechanisms.projection_operations(problem)
    return peers.layer(name, problem, operations)


def _matmul(dtype):
    """A product of matrices, the most that the machine can do."""
    size = 1024 if backends.accelerator() is None else 8192
    problem = mechanisms.Problem(size, dtype=dtype)
    arrays = [problem.draw(size, size, seed=seed) for seed in range(2)]
    return mechanisms.Contestant(ops.matmul, arrays, 2 * size**3)


def measure_time(job, emit):
    """Times the contestants in turns, so that the load weighs on all."""
    entries = []
    for index, (name, length) in enumerate(job["entries"]):
        emit({"entry": index})
        entry = Entry(name, length, job)
        try:
            emit({"entry": index, "fields": entry.start()})
        except Exception as error:
            emit({"entry": index, "reason": _reason(error)})
            entry = None
        entries.append(entry)
        gc.collect()
    before = 0
    for _ in range(job["repetitions"] + 1):
        for index, entry in enumerate(entries):
            if entry and not entry.is_done(job["repetitions"], job["seconds"]):
                emit({"entry": index})
                times = entry.measure(before)
                before = entry.latest
                if times is not None:
                    emit({"entry": index, **times})


def measure_memory(job, emit):
    """Finds the peak of memory of a process that does one thing only."""
    ((name, length),) = job["entries"]
    entry = Entry(name, length, job)
    emit({"entry": 0})
    base = backends.peak_memory()
    try:
        entry.start()
        entry.call()
    except Exception as error:
        emit({"entry": 0, "reason": _reason(error)})
        return
    peak = backends.peak_memory()
    emit({"entry": 0, "fields": {"peak": peak, "base": base}})


def _reason(error):
    if isinstance(error, TooLargeError):
        return str(error)
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:150]}"


def machine(job):
    """What the numbers depend on."""
    package = job["backend"].split("-")[0]
    module = sys.modules[package]
    return {
        "backend": job["backend"],
        "device": backends.accelerator() or f"{os.cpu_count()} CPU cores",
        "versions": {
            "keras": keras.__version__,
            package: module.__version__,
        },
    }


def main():
    # whatever else is printed must not mix with what is found
    output = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    job = json.load(sys.stdin)
    if job["device"] == "gpu" and backends.accelerator() is None:
        raise SystemExit(f"{job['backend']} finds no GPU")

    def emit(event):
        print(json.dumps(event), file=output)

    measures = {"time": measure_time, "memory": measure_memory}
    emit({"machine": machine(job)})
    measures[job["measure"]](job, emit)
    emit({"done": True})


if __name__ == "__main__":
    main()
