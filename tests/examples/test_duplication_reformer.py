import importlib.util
import pathlib

from tests.backend import nightly_but_on

ROOT = pathlib.Path(__file__).parent.parent.parent


def load(name):
    """Imports a program of the folder `examples`."""
    path = ROOT / "examples" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@nightly_but_on("torch")
def test_more_rounds_find_more(capsys):
    table = load("duplication_reformer").main(["--quick"])
    (row,) = table.values()
    # one symbol in 15 is right by chance
    assert row[1] > 0.2
    assert row[1] + 0.05 < row[2] < row[4] + 0.05
    assert row[4] > 0.9 and row[8] > 0.9
    assert capsys.readouterr().out.count("\n") == 3
