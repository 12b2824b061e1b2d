import keras
import pytest

from examples import distributed_training as example

BACKEND = keras.backend.backend()


def test_backends_that_are_not_installed_are_left_out(monkeypatch):
    chosen = []

    def run_backend(backend, quick):
        chosen.append(backend)
        return []

    monkeypatch.setattr(example, "run_backend", run_backend)
    monkeypatch.setattr(
        example.importlib.util, "find_spec", lambda name: name == "torch"
    )
    assert example.main([]) == []
    assert chosen == ["torch"]


# JAX compiles for a minute
@pytest.mark.nightly if BACKEND == "jax" else lambda test: test
def test_every_split_trains_like_one_device():
    rows = example.main(["--quick", "--backends", BACKEND])
    assert len(rows) == (5 if BACKEND == "jax" else 1)
    for _, name, difference, *_ in rows:
        assert difference < 1e-3, name
    if BACKEND != "jax":
        return
    # the weights and activations of a device
    alone, batch, heads, long, sequence = (row[3:] for row in rows)
    assert batch[0] == alone[0] and batch[1] < alone[1] / 4
    assert heads[0] < 0.7 * alone[0] and heads[1] < alone[1] / 3
    assert sequence[0] == long[0] and sequence[1] < long[1] / 4
