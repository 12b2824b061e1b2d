"""Runs the suite on one backend per process: `KERAS_BACKEND=jax pytest`."""

import contextlib
import json
import pathlib

import keras
import pytest

from tests.support import CELLS
from tests.support import cells_of

if keras.backend.backend() == "jax":
    import jax

    # eager JAX compiles every operation for every shape
    cache = pathlib.Path(__file__).parent.parent / ".jax_cache"
    jax.config.update("jax_compilation_cache_dir", str(cache))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    # of which all tests but those of distribution use the first
    jax.config.update("jax_num_cpu_devices", 8)
if keras.backend.backend() == "tensorflow":
    import tensorflow as tf

    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0],
        [tf.config.LogicalDeviceConfiguration()] * 2,
    )


@pytest.fixture(autouse=True)
def fresh_state():
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(0)


@pytest.fixture
def unsupported(request):
    """Asserts that something still fails, for a reason that the docs give.

    `docs/support.md` prints the reason. Once what fails is mended, the test
    fails, so that the page cannot go on saying so.
    """

    @contextlib.contextmanager
    def expect_failure(reason, error=Exception, match=None):
        request.node.user_properties.append(("unsupported", reason))
        with pytest.raises(error, match=match):
            yield

    return expect_failure


def pytest_addoption(parser):
    parser.addoption(
        "--nightly",
        action="store_true",
        help="run the tests marked `nightly`, which take minutes, as well",
    )
    parser.addoption(
        "--cells",
        type=pathlib.Path,
        help="file to write the cells of docs/support.md to that tests decide",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    config.stash[CELLS] = set()
    for item in items:
        cells = cells_of(item)
        config.stash[CELLS].update(cells)
        item.user_properties += [("support", cell) for cell in cells]
    if not config.getoption("--nightly"):
        slow = [item for item in items if item.get_closest_marker("nightly")]
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if item not in set(slow)]


def pytest_collection_finish(session):
    path = session.config.getoption("--cells")
    if path is not None:
        path.write_text(json.dumps(sorted(session.config.stash[CELLS])))


def pytest_report_header():
    return f"keras {keras.__version__} on {keras.backend.backend()}"
