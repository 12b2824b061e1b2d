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


def quick(study):
    return cells(load("claims").main([study, "--quick"])[study])


def numbers(row):
    return [float(cell.replace(",", "").rstrip(" %")) for cell in row]


@nightly_but_on("torch")
def test_copies_are_learned_with_the_steps():
    rows = {name: numbers(row) for name, row in quick("copy").items()}
    assert len(rows) == 4
    for row in rows.values():
        # of 10 symbols, after 5, 10 and 20 steps
        assert len(row) == 3 and 5 < row[0] < 30 and max(row) <= 100
    assert rows["LSH, 4 rounds"][2] > rows["LSH, 4 rounds"][0] + 10


@nightly_but_on("torch")
def test_rank_is_a_growing_share_of_the_singular_values():
    rows = quick("rank")
    untrained, trained = rows.pop("softmax, not trained"), rows.pop("softmax")
    for shares in numbers(untrained[1:]), numbers(trained[1:]):
        assert 0 < shares[0] < shares[1] < shares[2] < 100
    assert list(rows)[-1] == "no attention" and len(rows) == 5
    for right, *shares in [trained[:1], *rows.values()]:
        assert 0 <= float(right) <= 100 and not any(shares)


@nightly_but_on("torch")
def test_synthesizers_differ_in_parameters_and_in_bits():
    rows = {name: numbers(row) for name, row in quick("synthesizers").items()}
    assert len(rows) == 10
    # a byte has 8, and what little was learned by then is worth one
    assert all(4 < bits < 8 for _, bits in rows.values())
    assert rows["fixed random"][0] == rows["random"][0]
    # random scores of two layers of four heads, in place of query and key
    kernels = 2 * 2 * (64 * 64 + 64)
    more = rows["random"][0] - rows["dot product"][0]
    assert more == 2 * 4 * 32**2 - kernels


@nightly_but_on("torch")
def test_few_keys_have_the_weight_if_few_are_chosen():
    rows = {name: numbers(row) for name, row in quick("sparsity").items()}
    needed = {name: keys for name, (_, _, keys) in rows.items()}
    assert needed["top 1"] == 1
    assert 1 < needed["top 2"] <= 2 < needed["top 8"] <= 8 < needed["all keys"]


def test_refuses_what_it_does_not_know(capsys):
    with pytest.raises(SystemExit):
        load("claims").main(["nonsense"])
    assert "`study` must be one of" in capsys.readouterr().err
