"""Runs the suite once for each backend: `python -m tests`.

Keras fixes its backend when it is imported, so that each backend needs a
process of its own. Arguments that are not known here go to pytest:

    python -m tests                                # everything
    python -m tests --backends jax torch           # on two backends
    python -m tests -k cbam -x                     # with options of pytest
"""

import argparse
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from xml.etree import ElementTree

BACKENDS = ("tensorflow", "jax", "torch")
ROOT = pathlib.Path(__file__).parent.parent


def main():
    parser = argparse.ArgumentParser(
        prog="python -m tests",
        description="Runs the suite once for each backend.",
        epilog="Further arguments go to pytest.",
    )
    add_backends(parser)
    options, pytest_arguments = parser.parse_known_args()

    passed = failed = skipped = 0
    clean = True
    for backend in options.backends:
        print(f"\n=== {backend} ===", flush=True)
        start = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            report = pathlib.Path(folder) / "report.xml"
            status = run(backend, pytest_arguments, report)
            counts = count(report)
        seconds = time.monotonic() - start
        print(f"{backend}: {describe(*counts)} in {seconds:.0f} s", flush=True)
        passed, failed, skipped = (
            a + b
            for a, b in zip((passed, failed, skipped), counts, strict=True)
        )
        clean = clean and status == 0
    print(f"\ntotal: {describe(passed, failed, skipped)}")
    sys.exit(0 if clean and passed else 1)


def add_backends(parser):
    """Adds the option that chooses backends."""
    parser.add_argument(
        "--backends",
        nargs="+",
        choices=BACKENDS,
        default=BACKENDS,
        help="the backends to run on (default: all three)",
    )


def run(backend, arguments, report):
    """Runs pytest on a backend; returns its exit status."""
    command = [sys.executable, "-m", "pytest", "-q", "-n", "auto"]
    command += [f"--junitxml={report}", *arguments]
    environment = {
        **os.environ,
        "KERAS_BACKEND": backend,
        "TF_CPP_MIN_LOG_LEVEL": "3",  # notices of TensorFlow's C++ code
        # each worker has a core of its own
        "OMP_NUM_THREADS": "1",
        "TF_NUM_INTRAOP_THREADS": "1",
        "TF_NUM_INTEROP_THREADS": "1",
        # a fifth less time on JAX, most of which is compilation; below level 1
        # XLA is wrong about the gradients of convolutions
        "XLA_FLAGS": "--xla_backend_optimization_level=1",
    }
    return subprocess.run(command, cwd=ROOT, env=environment).returncode


def count(report):
    """Numbers of tests that passed, failed and were skipped."""
    if not report.exists():
        return 0, 1, 0  # pytest itself has failed
    suite = ElementTree.parse(report).getroot().find("testsuite")
    total, failures, errors, skipped = (
        int(suite.get(name))
        for name in ("tests", "failures", "errors", "skipped")
    )
    failed = failures + errors
    return total - failed - skipped, failed, skipped


def describe(passed, failed, skipped):
    text = f"{passed} passed, {failed} failed"
    return f"{text}, {skipped} skipped" if skipped else text


if __name__ == "__main__":
    main()
