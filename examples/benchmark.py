"""Time and memory of the attention mechanisms, next to plain attention.

    pip install keras_attn[benchmark]
    python examples/benchmark.py core --backends jax torch
    python examples/benchmark.py layer --mechanisms window linear --peers
    python examples/benchmark.py streaming --lengths 1024 16384 65536

What can be measured:

    core       the mechanism alone, on 8 heads of 64
    layer      with its projections, as `keras.layers.MultiHeadAttention`
    block      a step of training of a `TransformerBlock` with it
    streaming  the time of a token after a context of some length
    cbam       a ResNet-50 with CBAM, in both layouts of images

Every backend is a process of its own, in which all contestants take turns at
all lengths, so that what else the machine does weighs on all of them alike; CPU
time beside wall time tells how much that was. Peaks of memory are those of
fresh processes that do one thing only. What would not fit into memory is not
run, and the table says so. On a GPU, calls are waited for, and memory is that
of the GPU.

Tables are printed, and written with everything that was measured, and with a
picture of time and memory by length, to `outputs/`.
"""

import argparse
import itertools
import json
import os
import pathlib
import platform
import queue
import subprocess
import sys
import tempfile
import threading

from rich.console import Console
from rich.progress import BarColumn
from rich.progress import MofNCompleteColumn
from rich.progress import Progress
from rich.progress import TextColumn
from rich.progress import TimeElapsedColumn
from rich.progress import TimeRemainingColumn

from benchmarks import catalogue
from benchmarks import report

EXAMPLES = pathlib.Path(__file__).parent
DIRECTIONS = ("forward", "backward")  # the latter with the former


def parse(arguments):
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("study", nargs="?", choices=catalogue.STUDIES, default="core")
    add(
        "--mechanisms",
        nargs="+",
        choices=catalogue.MECHANISMS,
        default=list(catalogue.MECHANISMS),
        help="all by default; plain attention, `keras`, is always there",
    )
    add(
        "--peers",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="whether other implementations that are installed take part",
    )
    add("--backends", nargs="+", choices=catalogue.BACKENDS)
    add("--lengths", nargs="+", type=int, help="of sequences, or of contexts")
    add(
        "--directions",
        nargs="+",
        choices=DIRECTIONS,
        help="backward is forward and backward, or a step of training",
    )
    add("--causal", action="store_true", help="hide what follows a position")
    add("--dtype", choices=("float32", "bfloat16", "float16"))
    add("--device", choices=("auto", "cpu", "gpu"), default="auto")
    add("--batch-size", type=int, default=1)
    add("--image-size", type=int, default=224)
    add("--tokens", type=int, default=32, help="of a stream that are timed")
    add("--repetitions", type=int, default=7)
    add(
        "--seconds",
        type=float,
        default=20,
        help="after which a contestant is not repeated more than 3 times",
    )
    add(
        "--timeout",
        type=float,
        default=300,
        help="seconds after which a contestant that does not answer is out",
    )
    add("--memory-limit", type=float, help="GB; default 60 %% of what is free")
    add(
        "--clock",
        choices=("wall", "cpu"),
        default="wall",
        help="what is compared; cpu if the machine has other things to do",
    )
    add(
        "--measures",
        nargs="+",
        choices=("time", "memory"),
        help="by default both for core and layer, time for the rest; memory "
        "takes a process for each contestant and length",
    )
    add("--quick", action="store_true", help="small sizes, to see it work")
    add("--outputs", type=pathlib.Path, default="outputs")
    args = parser.parse_args(arguments)
    quick, study = args.quick, args.study
    args.backends = args.backends or [
        name
        for name in ("tensorflow", "jax", "torch")
        if catalogue.is_installed(name)
    ]
    if study == "cbam":
        args.lengths = [0]
    args.lengths = sorted(
        args.lengths or ([64, 128] if quick else catalogue.LENGTHS[study])
    )
    if study == "block":
        args.directions = ["backward"]
    elif study == "streaming":
        args.directions = ["forward"]
    args.directions = args.directions or list(DIRECTIONS)
    weighs = study in ("core", "layer") and not quick
    args.measures = args.measures or (
        ["time", "memory"] if weighs else ["time"]
    )
    args.dtype = args.dtype or "float32"
    if args.memory_limit is None:
        args.memory_limit = 0.6 * free_memory()
    if quick:
        args.repetitions, args.image_size, args.tokens = 3, 32, 4
    return args


def free_memory():
    """GB that other programs do not use."""
    status = pathlib.Path("/proc/meminfo")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) / 1e6
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2e9


def plan(args):
    """The processes to run: what each measures, and with what."""
    jobs = []
    for backend, direction in itertools.product(args.backends, args.directions):
        names = catalogue.contestants(
            args.study,
            backend,
            args.mechanisms,
            args.causal,
            direction == "backward",
            args.peers,
        )
        entries = list(itertools.product(names, args.lengths))
        shared = {
            "study": args.study,
            "backend": backend,
            "direction": direction,
            "causal": args.causal,
            "dtype": args.dtype,
            "device": args.device,
            "batch_size": args.batch_size,
            "image_size": args.image_size,
            "tokens": args.tokens,
            "repetitions": args.repetitions,
            "seconds": args.seconds,
            "memory_limit": args.memory_limit * 1e9,
        }
        if "time" in args.measures:
            group = [("matmul", 0), *entries]
            jobs.append({**shared, "measure": "time", "entries": group})
        if "memory" in args.measures:
            jobs += [
                {**shared, "measure": "memory", "entries": [entry]}
                for entry in entries
            ]
    return jobs


class Worker:
    """The process of a job, and what it says, line by line."""

    def __init__(self, job):
        folders = [EXAMPLES, EXAMPLES.parent, os.environ.get("PYTHONPATH")]
        environment = {
            **os.environ,
            "KERAS_BACKEND": job["backend"].split("-")[0],
            "PYTHONPATH": os.pathsep.join(str(x) for x in folders if x),
            "TF_CPP_MIN_LOG_LEVEL": "3",  # notices of TensorFlow's C++ code
        }
        if job["device"] == "cpu":
            environment |= {"CUDA_VISIBLE_DEVICES": "", "JAX_PLATFORMS": "cpu"}
        # a file, for a pipe that nobody reads would stop the process
        self.errors = tempfile.TemporaryFile("w+")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.worker"],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
        )
        self.process.stdin.write(json.dumps(job))
        self.process.stdin.close()
        self.lines = queue.Queue()
        self.reader = threading.Thread(target=self._read)
        self.reader.start()

    def _read(self):
        for line in self.process.stdout:
            self.lines.put(line)
        self.lines.put(None)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.process.kill()
        self.process.wait()
        self.reader.join()
        self.process.stdout.close()
        self.errors.close()

    def events(self, timeout):
        """Yields what the process finds; raises if it fails or hangs."""
        while True:
            try:
                line = self.lines.get(timeout=timeout)
            except queue.Empty:
                raise FailedError(f"took more than {timeout:.0f} s") from None
            if line is None:
                raise FailedError(self._last_words())
            event = json.loads(line)
            if event.get("done"):
                return
            yield event

    def _last_words(self):
        status = self.process.wait()
        if status < 0:
            return f"killed by signal {-status}, out of memory?"
        self.errors.seek(0)
        return (self.errors.read().strip().splitlines() or ["no message"])[-1]


class FailedError(Exception):
    """What a process did not survive."""


def run(job, timeout, advance):
    """Runs a job; what stops its process is left out of the next try.

    Args:
        job: What to measure.
        timeout: Seconds that a process may be silent.
        advance: Function of a part of an entry that is done, and of the entry
            that is next.

    Returns:
        What the numbers depend on, and a row for each entry.
    """
    rows = [
        {
            **{key: job[key] for key in ("study", "backend", "direction")},
            "name": name,
            "length": length,
        }
        for name, length in job["entries"]
    ]
    machine, left = None, list(range(len(rows)))
    while left:
        current = None
        for index in left:
            rows[index].update(wall=[], cpu=[])
        entries = [job["entries"][index] for index in left]
        try:
            with Worker({**job, "entries": entries}) as worker:
                for event in worker.events(timeout):
                    if "machine" in event:
                        machine = event["machine"]
                        continue
                    current = left[event["entry"]]
                    part = _note(event, rows[current]) / (
                        job["repetitions"] + 1
                    )
                    advance(part, job["entries"][current])
            break
        except FailedError as error:
            if current is None:
                raise SystemExit(f"{job['backend']}: {error}") from None
            rows[current]["reason"] = str(error)
            left.remove(current)
    return machine, rows


def _note(event, row):
    """Writes into a row what an event says; tells whether it was a step."""
    row.update(event.get("fields", {}))
    if "reason" in event:
        row["reason"] = event["reason"]
    for clock in {"wall", "cpu"} & event.keys():
        row[clock].append(event[clock])
    return "fields" in event or "wall" in event


def _title(job, entry):
    name, length = entry
    return (
        f"{job['backend']} {job['direction']} {job['measure']}: {name} {length}"
    )


def merge(rows):
    """Joins the rows of time and of memory, and the rate of the machine."""
    merged, rates = {}, {}
    for row in rows:
        key = tuple(row[k] for k in ("backend", "direction", "name", "length"))
        if row["name"] == "matmul":
            if row["wall"]:
                rate = row["operations"] / report.median(row["wall"])
                rates[key[:2]] = rate
            continue
        known = merged.setdefault(key, {})
        # a process that measures memory takes no time
        known.update({k: v for k, v in row.items() if v or k not in known})
    for key, row in merged.items():
        if "operations" in row and row["wall"] and key[:2] in rates:
            rate = row["operations"] / report.median(row["wall"])
            row["share"] = rate / rates[key[:2]]
    return list(merged.values())


def measure(jobs, timeout, progress, save):
    """Runs jobs one by one; returns the rows, and what they depend on.

    `save` is a function of both, called after every job.
    """
    rows, machines = [], {}
    total = sum(len(job["entries"]) for job in jobs)
    task, completed = progress.add_task("", total=total), 0
    for job in jobs:

        def advance(part, entry, job=job):
            progress.update(task, advance=part, description=_title(job, entry))

        machine, found = run(job, timeout, advance)
        machines[job["backend"]] = machine
        rows += found
        completed += len(job["entries"])
        progress.update(task, completed=completed)
        save(rows, list(machines.values()))
    progress.update(task, description="")


def main(arguments=None):
    args = parse(arguments)
    args.outputs.mkdir(parents=True, exist_ok=True)
    path = args.outputs / f"benchmark_{args.study}.json"
    results = {
        "arguments": {**vars(args), "outputs": str(args.outputs)},
        "processor": report.processor(),
        "platform": platform.platform(),
    }

    def save(rows, machines):
        # hours of measuring must not be lost
        results.update(machines=machines, rows=merge(rows))
        path.write_text(json.dumps(results, indent=1))

    console = Console()
    if not console.is_terminal:
        console.width = 160
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left:"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        measure(plan(args), args.timeout, progress, save)
    tables = report.tables(results)
    for table in tables:
        report.show(table, console)
    text = "\n\n".join(report.to_markdown(table) for table in tables)
    path.with_suffix(".md").write_text(text + "\n")
    report.draw(results, path.with_suffix(".png"))
    console.print(f"wrote {path}, and the same as .md and .png")
    return results


if __name__ == "__main__":
    main()
