import os
import pathlib
import re
import subprocess
import sys

import keras
import matplotlib.image
import numpy as np
import pytest

import keras_attn
from tests.backend import nightly_but_on
from tests.examples.test_duplication_reformer import load

PROGRAM = pathlib.Path(__file__).parents[2] / "examples"
PROGRAM = PROGRAM / "image_classification_cbam.py"


def run(folder, *arguments, check=True):
    return subprocess.run(
        [sys.executable, PROGRAM, "--verbose", "0", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(PROGRAM.parents[1])},
        capture_output=True,
        text=True,
        check=check,
    )


def check_picture(path):
    picture = matplotlib.image.imread(path)
    assert picture.shape[0] > 500 and picture.shape[1] > 1000
    assert picture[..., :3].std() > 0.1


def test_marked_digits(tmp_path):
    printed = run(tmp_path, "--quick").stdout
    rows = re.findall(
        r"^(none|channel|spatial|CBAM) +([\d,]+) +([\d.]+) +([\d.]+) ",
        printed,
        re.MULTILINE,
    )
    parameters = {name: count for name, count, *_ in rows}
    assert parameters == {
        "none": "7,946",
        "channel": "9,158",
        "spatial": "8,048",
        "CBAM": "9,260",
    }
    assert all(float(milliseconds) > 0 for _, _, milliseconds, _ in rows)
    # three short epochs suffice to beat chance, and to find the mark
    assert all(float(accuracy) > 0.2 for *_, accuracy in rows)
    sides = re.search(r"marked half in ([\d.]+)% of the test images", printed)
    assert float(sides[1]) > 75
    assert len(re.findall(r"attention against none", printed)) == 3
    assert "predicts the same when reloaded" in printed
    check_picture(tmp_path / "outputs" / "image_classification_cbam.png")
    model = keras.saving.load_model(
        tmp_path / "outputs" / "image_classification_cbam.keras"
    )
    assert isinstance(model.get_layer("attention"), keras_attn.CBAM)
    assert f"{model.count_params():,}" == parameters["CBAM"]


@nightly_but_on("torch")
def test_cluttered_digits(tmp_path):
    printed = run(tmp_path, "--dataset", "cluttered", "--quick").stdout
    rows = re.findall(r"^(none|channel|spatial|CBAM) +[\d,]+ ", printed, re.M)
    assert len(rows) == 4
    gates = r"spatial gates: [01]\.\d+ on the digit, [01]\.\d+ elsewhere"
    assert len(re.findall(gates, printed)) == 1
    check_picture(tmp_path / "outputs" / "image_classification_cbam.png")


def test_clutter_lies_around_and_over_a_digit():
    digits = np.ones((3, 14, 14)) * [[[0.2]], [[0.3]], [[0.4]]]
    images, labels, places = load(PROGRAM.stem).clutter_digits(
        digits, np.array([2, 3, 4]), count=20, seed=0
    )
    assert images.shape == (20, 28, 28, 1) and places.shape == (20, 28, 28)
    for image, label, place in zip(images, labels, places, strict=True):
        rows, columns = place.any(axis=1), place.any(axis=0)
        assert rows.sum() == columns.sum() == 14
        assert (place == rows[:, None] & columns).all()
        # pieces of other digits lie over it only where they are brighter
        assert np.float32(label / 10) == image[place].min()
        elsewhere = image[~place]
        assert 0 < (elsewhere > 0).sum() <= 8 * 36


@nightly_but_on("torch")
def test_a_folder_of_images(tmp_path):
    rng = np.random.default_rng(0)
    for name, level in (("dark", 60), ("light", 190)):
        (tmp_path / "images" / name).mkdir(parents=True)
        for index in range(20):
            image = rng.normal(level, 20, size=(20, 24, 3)).clip(0, 255)
            keras.utils.save_img(
                tmp_path / "images" / name / f"{index}.png",
                image,
                data_format="channels_last",
            )
    printed = run(
        tmp_path,
        *("--dataset", "images", "--image-size", "16"),
        *("--epochs", "1", "--seeds", "1", "--outputs", "results"),
    ).stdout
    assert re.search(r"^images; seeds: 1", printed, re.MULTILINE)
    assert len(re.findall(r"attention against none", printed)) == 1
    assert "marked half" not in printed
    check_picture(tmp_path / "results" / "image_classification_cbam.png")
    model = keras.saving.load_model(
        tmp_path / "results" / "image_classification_cbam.keras"
    )
    assert isinstance(model.layers[-1], keras_attn.models.CBAMResNet)
    assert model.output_shape == (None, 2)


@pytest.mark.parametrize("layout", ["missing", "one class"])
def test_other_folders_are_refused(layout, tmp_path):
    if layout == "one class":
        (tmp_path / "images" / "cats").mkdir(parents=True)
    result = run(tmp_path, "--dataset", "images", check=False)
    assert result.returncode == 1
    words = {"missing": "nor a folder", "one class": "Found: cats"}
    assert words[layout] in result.stderr
    assert "Traceback" not in result.stderr
