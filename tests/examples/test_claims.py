import pytest

from tests.backend import nightly_but_on
from tests.examples.test_duplication_reformer import load


def cells(table):
    """The rows of a table, as lists of text without the first, by it."""
    columns = [list(column.cells) for column in table.columns]
    return {row[0]: row[1:] for row in zip(*columns, strict=True)}


def test_two_layers_reach_everything(capsys):
    rows = cells(load("claims").main(["reach", "--length", "64"])["reach"])
    for name in (
        "strided, heads split",
        "strided, layers in turns",
        "fixed, heads split",
        "fixed, layers in turns",
    ):
        keys, one, two, three, outputs = rows[name]
        assert float(one) < 40
        assert two == three == outputs == "100.0"
    keys, one, two, three, outputs = rows["window of as many keys"]
    assert outputs == two and float(three) < 95
    assert "strided" in capsys.readouterr().out


@nightly_but_on("torch")
@pytest.mark.parametrize("study", ["copy", "rank", "synthesizers", "sparsity"])
def test_studies_fill_their_tables(study):
    rows = cells(load("claims").main([study, "--quick"])[study])
    assert len(rows) >= 4
    for name, row in rows.items():
        for cell in row:
            if not cell:
                assert name == "softmax, not trained" or study == "rank"
                continue
            assert float(cell.replace(",", "").rstrip(" %")) >= 0


def test_refuses_what_it_does_not_know(capsys):
    with pytest.raises(SystemExit):
        load("claims").main(["nonsense"])
    assert "`study` must be one of" in capsys.readouterr().err
