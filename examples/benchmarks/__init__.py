"""The parts of `examples/benchmark.py`."""
