import json

from tests.backend import nightly_but_on
from tests.examples.test_duplication_reformer import load


@nightly_but_on("torch")
def test_compares_mechanisms_on_tasks(tmp_path, capsys):
    arguments = ["--quick", "--outputs", str(tmp_path)]
    arguments += ["--mechanisms", "linear", "--tasks", "copy", "recall"]
    (row,) = load("which_attention").main(arguments)
    assert set(row["accuracy"]) == {"copy", "recall"}
    assert all(0 <= x <= 1 for x in row["accuracy"].values())
    assert min(row["milliseconds"].values()) > 0
    assert row["megabytes"] > 0 and row["decode"] > 0
    assert json.loads((tmp_path / "which_attention.json").read_text()) == [row]
    assert (tmp_path / "which_attention.png").stat().st_size > 10_000
    assert "linear" in capsys.readouterr().out
