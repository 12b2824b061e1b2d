"""Exported models give the numbers of their layers, at any length.

What stands in `LIMITS` does not, for a reason that is not in this package; the
tests assert that, too. They need the packages of the extra `export`.
"""

import dataclasses

import keras
import numpy as np
import pytest

from keras_attn import layers
from tests.backend import run
from tests.layers.every_layer import LENGTH
from tests.layers.every_layer import nightly_but

BACKEND = keras.backend.backend()
# one of each batch size; windows lie in blocks of 32 positions
LENGTHS = {33: 2, 1: 3, 7: 1, 32: 2, 70: 3}

# Exporters bring warnings of their own, of what is old or slow in them
pytestmark = pytest.mark.filterwarnings("ignore")


@dataclasses.dataclass(frozen=True)
class Limit:
    """What an exported model cannot do, or why there is none.

    `error` is a regular expression that the message matches. `fixed` tells
    whether a model of one length works.
    """

    reason: str
    error: str
    fixed: bool = True


def load_saved_model(path):
    import tensorflow as tf

    model = tf.saved_model.load(path)
    return lambda x: model.serve(x).numpy()


def load_onnx(path):
    import onnxruntime

    session = onnxruntime.InferenceSession(path)
    name = session.get_inputs()[0].name
    return lambda x: session.run(None, {name: x})[0]


def load_openvino(path):
    import openvino

    # by default it may compute in half precision
    options = {"INFERENCE_PRECISION_HINT": "f32"}
    model = openvino.Core().compile_model(path, "CPU", options)
    return lambda x: model(x)[0]


def load_litert(path):
    from ai_edge_litert.interpreter import Interpreter

    interpreter = Interpreter(path)
    index = interpreter.get_input_details()[0]["index"]

    def call(x):
        interpreter.resize_tensor_input(index, x.shape)
        interpreter.allocate_tensors()
        interpreter.set_tensor(index, x)
        interpreter.invoke()
        output = interpreter.get_output_details()[0]["index"]
        return interpreter.get_tensor(output)

    return call


def load_torch(path):
    import torch

    module = torch.export.load(path).module()
    return lambda x: module(torch.from_numpy(x)).detach().numpy()


FORMATS = {
    "tf_saved_model": ("model", load_saved_model),
    "onnx": ("model.onnx", load_onnx),
    "openvino": ("model.xml", load_openvino),
    "litert": ("model.tflite", load_litert),
    "torch": ("model.pt2", load_torch),
}


def export_to_torch(model, path, example, length):
    """Exports with the sizes of batch and length left open."""
    import torch
    from torch.fx.experimental import _config

    sizes = {0: torch.export.Dim.AUTO}
    if length is None:
        sizes[1] = torch.export.Dim.AUTO
    sample = keras.InputSpec(shape=example.shape(length or 70, 2))
    # otherwise this one gets the length of the sample
    oblivious = example.cls is layers.SingleHeadAttention
    with _config.patch(backed_size_oblivious=oblivious):
        model.export(
            path,
            format="torch",
            verbose=False,
            dynamic_shapes=sizes,
            input_signature=[sample],
        )


def check(example, format, folder, length=None):
    """Exports a model, and compares it with the layer.

    Without `length`, that of the model is left open; with it, the model has
    one length, and batches of one.
    """
    batch = None if length is None else 1
    model = example.model(length, batch)
    model(example.inputs(length or LENGTH, batch or 2))
    name, load = FORMATS[format]
    path = str(folder / name)
    options = {"format": format, "verbose": False}
    if BACKEND == "torch" and (format == "openvino" or length is not None):
        # otherwise what is traced is a sequence of one position, and ONNX takes
        # a batch of any size for a reason to avoid PyTorch's new exporter
        sample = keras.InputSpec(shape=example.shape(length or 70, batch or 2))
        options["input_signature"] = [sample]
    if BACKEND == "torch" and format == "torch":
        export_to_torch(model, path, example, length)
    else:
        model.export(path, **options)
    exported = load(path)
    sizes = LENGTHS if length is None else {length: batch}
    for length, batch in sizes.items():
        x = example.inputs(length, batch)
        actual = exported(x)
        np.testing.assert_allclose(actual, run(model, x), 1e-4, 1e-5)


def check_format(example, format, folder, unsupported):
    limits = LIMITS.get((BACKEND, format), {})
    limit = limits.get(str(example), limits.get("every layer"))
    if limit is None:
        check(example, format, folder)
        return
    with unsupported(limit.reason, match=limit.error):
        check(example, format, folder)
    if limit.fixed:
        check(example, format, folder, LENGTH)


ARGMAX = (
    "`keras.ops.argmax` on TensorFlow tells zeros apart by their bits, with "
    "operations that have no counterpart in this format."
)
LOOP = (
    "The loop of `keras.layers.LSTM` on TensorFlow has no counterpart in this "
    "format."
)
ONE_POSITION = (
    "Fixed batch and length only: for others, Keras on PyTorch traces a "
    "sequence of one position, with PyTorch's old exporter, which follows one "
    "path."
)
SQUEEZED = (
    "PyTorch writes a `squeeze` that onnxruntime refuses at fixed lengths, and "
    "no `ravel`, which `keras.ops.take` needs, at others."
)
CONVERTER = (
    "The converter of litert-torch fails: its own result does not pass its "
    "verification, or Keras asks for one of several lengths."
)
ARANGE = (
    "jax2onnx puts an `arange` in place of that of JAX which does not take one "
    "argument, as Keras gives it."
)
RAVEL = (
    "`keras.ops.take` on PyTorch needs `ravel`, which OpenVINO does not know."
)
LIMITS = {
    ("torch", "tf_saved_model"): {
        "every layer": Limit(
            "Keras passes PyTorch sizes in a structure that PyTorch 2.13 "
            "refuses, for any model.",
            "Detected mismatch between the structure",
            fixed=False,
        ),
    },
    ("torch", "onnx"): {
        "LongformerAttention": Limit(ONE_POSITION, "take_along_dim"),
        "SlidingWindowAttention": Limit(ONE_POSITION, "Concat"),
        "StridedSparseAttention": Limit(SQUEEZED, "aten::ravel", fixed=False),
        "FixedSparseAttention": Limit(SQUEEZED, "aten::ravel", fixed=False),
        "LSHAttention": Limit(
            "PyTorch's exporter has no stable sort for ONNX.",
            "Sort",
            fixed=False,
        ),
        "Synthesizer": Limit(ONE_POSITION, "Not equal"),
        "TopKAttention": Limit(
            "Fixed batch and length only: for others, PyTorch's exporter joins "
            "sizes of two integer types, which onnxruntime refuses.",
            "Concat",
        ),
        "LinformerAttention": Limit(ONE_POSITION, "aten::ravel"),
        "SingleHeadAttention": Limit(ONE_POSITION, "Gather"),
        "SHARNNBlock": Limit(ONE_POSITION, "Gather"),
        "TransformerBlock": Limit(ONE_POSITION, "Gather"),
        "LAMA": Limit(ONE_POSITION, "Not equal"),
    },
    ("torch", "openvino"): {
        "StridedSparseAttention": Limit(RAVEL, "aten::ravel", fixed=False),
        "FixedSparseAttention": Limit(RAVEL, "aten::ravel", fixed=False),
        "LinformerAttention": Limit(RAVEL, "aten::ravel", fixed=False),
        "SHARNNBlock": Limit(
            "Fixed lengths only: `keras.layers.LSTM` on PyTorch is a loop that "
            "tracing unrolls.",
            "Not equal|mismatch",
        ),
    },
    ("torch", "litert"): {
        **dict.fromkeys(
            (
                "LongformerAttention",
                "StridedSparseAttention",
                "FixedSparseAttention",
                "LSHAttention",
                "SHARNNBlock",
            ),
            Limit(CONVERTER, "convert|delegate", fixed=False),
        ),
        "TopKAttention": Limit(
            "LiteRT's interpreter for Python has no `STABLEHLO_SORT`.",
            "STABLEHLO_SORT|delegate",
            fixed=False,
        ),
        "SpatialAttention": None,
        "every layer": Limit("Fixed lengths only, says Keras of PyTorch.", "."),
    },
    ("torch", "torch"): {
        "LongformerAttention": Limit(
            "Batch and length are those of the sample: PyTorch specializes.",
            "Guard failed",
            fixed=False,
        ),
        **dict.fromkeys(
            (
                "SlidingWindowAttention",
                "StridedSparseAttention",
                "FixedSparseAttention",
            ),
            Limit(
                "Fixed lengths only: if the sample needed padding to whole "
                "blocks, PyTorch holds that all do.",
                "Guard failed",
            ),
        ),
        "SHARNNBlock": Limit(
            "Fixed lengths only: `keras.layers.LSTM` on PyTorch is a loop that "
            "PyTorch unrolls.",
            "Guard failed",
        ),
        "LSHAttention": Limit(
            "Fixed lengths only: Keras cannot convert PyTorch's symbolic "
            "integers to tensors.",
            "SymInt",
        ),
    },
    ("tensorflow", "onnx"): {
        "LSHAttention": Limit(ARGMAX, "INVALID_GRAPH", fixed=False),
        "SHARNNBlock": Limit(
            "tf2onnx writes a reshape, in the attention, that onnxruntime "
            "refuses.",
            "Reshape",
            fixed=False,
        ),
        "TransformerBlock": Limit(
            "tf2onnx writes the `Erfc` of TensorFlow's exact GELU, which ONNX "
            "does not know.",
            "Erfc",
            fixed=False,
        ),
    },
    ("tensorflow", "openvino"): {
        "LSHAttention": Limit(ARGMAX, "Bitcast", fixed=False),
        "SHARNNBlock": Limit(LOOP, "TensorList", fixed=False),
        **dict.fromkeys(
            (
                "MultiHeadAttention",
                "TopKAttention",
                "SingleHeadAttention",
                "TransformerBlock",
            ),
            Limit(
                "Fixed lengths only: OpenVINO knows no `TensorList`, in which "
                "TensorFlow collects blocks of queries of unknown length.",
                "TensorList",
            ),
        ),
    },
    ("tensorflow", "litert"): {
        "LSHAttention": Limit(
            "Needs operations of TensorFlow, `BitwiseAnd` among them, that "
            "LiteRT's interpreter for Python lacks.",
            "Flex delegate",
            fixed=False,
        ),
        **dict.fromkeys(
            (
                "LongformerAttention",
                "MultiHeadAttention",
                "TopKAttention",
                "SingleHeadAttention",
                "TransformerBlock",
            ),
            Limit(
                "Fixed lengths only: with others, LiteRT needs TensorFlow's "
                "own operations, which its interpreter for Python lacks.",
                "Flex delegate",
            ),
        ),
        "SHARNNBlock": Limit(
            "The loop of `keras.layers.LSTM` needs operations of TensorFlow "
            "that LiteRT's interpreter for Python lacks.",
            "Flex delegate",
            fixed=False,
        ),
    },
    ("tensorflow", "torch"): {
        "every layer": Limit(
            "Keras exports to PyTorch on PyTorch only.",
            "Torch export requires",
            fixed=False,
        )
    },
    ("jax", "tf_saved_model"): {
        "TopKAttention": Limit(
            "TensorFlow cannot load `top_k` as JAX exports it.",
            "Cannot deserialize",
            fixed=False,
        )
    },
    ("jax", "onnx"): {
        "LongformerAttention": Limit(ARANGE, "arange", fixed=False),
        "StridedSparseAttention": Limit(ARANGE, "arange", fixed=False),
        "FixedSparseAttention": Limit(ARANGE, "arange", fixed=False),
        "LSHAttention": Limit(ARANGE, "arange", fixed=False),
        "SHARNNBlock": Limit(ARANGE, "arange", fixed=False),
        "LinformerAttention": Limit(f"Fixed lengths only: {ARANGE}", "arange"),
        **dict.fromkeys(
            (
                "MultiHeadAttention",
                "TopKAttention",
                "SingleHeadAttention",
                "TransformerBlock",
            ),
            Limit(
                "Fixed lengths only: jax2onnx does not know the sizes that "
                "follow from a symbolic length.",
                "(?i)symbolic dim",
            ),
        ),
        "SlidingWindowAttention": Limit(
            "Fixed lengths only: jax2onnx takes equal symbolic lengths "
            "for different ones.",
            "non-concatenated dimensions",
        ),
        "Synthesizer": Limit(
            "Fixed lengths only: jax2onnx cannot reshape symbolic lengths.",
            "reshape with symbolic",
        ),
    },
    ("jax", "openvino"): {
        "every layer": Limit(
            "OpenVINO does not know `XlaCallModule`, into which JAX puts all.",
            "XlaCallModule",
            fixed=False,
        )
    },
    ("jax", "litert"): {
        "every layer": Limit(
            "Keras exports to LiteRT on TensorFlow and PyTorch only.",
            "LiteRT export requires",
            fixed=False,
        )
    },
    ("jax", "torch"): {
        "every layer": Limit(
            "Keras exports to PyTorch on PyTorch only.",
            "Torch export requires",
            fixed=False,
        )
    },
}


@pytest.mark.support("Export", "SavedModel")
@nightly_but("SlidingWindowAttention")
def test_saved_model(example, tmp_path, unsupported):
    check_format(example, "tf_saved_model", tmp_path, unsupported)


@pytest.mark.support("Export", "ONNX")
@nightly_but(*([] if BACKEND == "jax" else ["MultiHeadAttention"]))
def test_onnx(example, tmp_path, unsupported):
    check_format(example, "onnx", tmp_path, unsupported)


@pytest.mark.support("Export", "OpenVINO")
@nightly_but()
def test_openvino(example, tmp_path, unsupported):
    check_format(example, "openvino", tmp_path, unsupported)


@pytest.mark.support("Export", "LiteRT")
@nightly_but()
def test_litert(example, tmp_path, unsupported):
    check_format(example, "litert", tmp_path, unsupported)


@pytest.mark.support("Export", "PyTorch")
@nightly_but("LinearAttention")
def test_torch(example, tmp_path, unsupported):
    check_format(example, "torch", tmp_path, unsupported)
