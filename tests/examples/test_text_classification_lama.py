import numpy as np

from examples import text_classification_lama as example


def test_words_of_an_article():
    source = (
        "{{Infobox|{{a}}}} '''Alice''' saw a [[White Rabbit|rabbit]]&lt;ref "
        'name="x"&gt;A source&lt;/ref&gt; at [[noon]].\n== See also ==\nBob'
    )
    assert example.to_words(source) == "alice saw a rabbit at noon".split()


def test_articles_are_trained_or_tested_on():
    for first, second in example.CLASSES.values():
        assert not set(first.split("|")) & set(second.split("|"))


def test_quick_run_learns_and_draws(tmp_path):
    accuracies = example.main(["--quick", "--outputs", str(tmp_path / "new")])
    picture = tmp_path / "new" / "text_classification_lama.png"
    assert picture.stat().st_size > 10_000
    # chance is about a quarter
    assert np.mean(accuracies["LAMA"]) > 0.4
