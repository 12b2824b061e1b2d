import pytest

from tests.mutants import MUTANTS
from tests.mutants import ROOT


@pytest.mark.parametrize("file", sorted({mutant[0] for mutant in MUTANTS}))
def test_mutants_change_what_is_there(file):
    text = (ROOT / "keras_attn" / file).read_text()
    for name, old, new, tests, *_ in MUTANTS:
        if name == file:
            assert old in text and old != new
            for test in tests.split(" -k ")[0].split():
                assert (ROOT / "tests" / test).exists(), test
