"""Reads files of models, knowing nothing but the package.

    python -m tests.checkpoint_reader FOLDER

Each `x.keras` of the folder has an `x.weights.h5` of the same weights, and an
`x.npz` of an input and the output that belongs to it.
"""

import pathlib
import sys

import keras
import numpy as np

import keras_attn  # noqa: F401


def main(folder):
    paths = sorted(folder.glob("*.keras"))
    assert paths
    for path in paths:
        model = keras.saving.load_model(path)
        data = np.load(path.with_suffix(".npz"))
        output = model.predict(data["x"], verbose=0)
        np.testing.assert_allclose(
            output, data["output"], rtol=1e-4, atol=1e-4, err_msg=path.stem
        )
        twin = type(model).from_config(model.get_config())
        if not twin.built:
            twin.build(data["x"].shape)
        twin.load_weights(path.with_suffix(".weights.h5"))
        for ours, theirs in zip(twin.weights, model.weights, strict=True):
            np.testing.assert_array_equal(
                keras.ops.convert_to_numpy(ours),
                keras.ops.convert_to_numpy(theirs),
                err_msg=f"{path.stem}: {ours.path}",
            )


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
