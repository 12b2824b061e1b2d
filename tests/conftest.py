"""Runs the suite on one backend per process: `KERAS_BACKEND=jax pytest`."""

import pathlib

import keras
import pytest

if keras.backend.backend() == "jax":
    import jax

    # eager JAX compiles every operation for every shape
    cache = pathlib.Path(__file__).parent.parent / ".jax_cache"
    jax.config.update("jax_compilation_cache_dir", str(cache))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)


@pytest.fixture(autouse=True)
def fresh_state():
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(0)


def pytest_report_header():
    return f"keras {keras.__version__} on {keras.backend.backend()}"
