"""Every layer, small, for what must work with all of them."""

import dataclasses
import functools
import inspect

import keras
import numpy as np
import pytest

from keras_attn import layers
from tests.layers.cases import FIRST_CASES

LENGTH = 11
WIDTH = 5  # of feature maps, whose first axis of space is the length
FEATURES = 13
LONGEST = 97  # PyTorch traces an unknown length as 83 and 89


@dataclasses.dataclass(frozen=True)
class Example:
    """A layer, the arguments to try it with, and inputs that it takes.

    `parts` are functions that make the layers inside of it, `is_map` tells
    whether the inputs are feature maps instead of sequences.
    `idle` names weights that one step of training need not move. `sorts` tells
    whether rounding decides what a position sees.
    """

    cls: type
    kwargs: dict = dataclasses.field(default_factory=dict)
    parts: dict = dataclasses.field(default_factory=dict)
    is_map: bool = False
    idle: tuple = ()
    sorts: bool = False

    def __str__(self):
        return self.cls.__name__

    def layer(self, **kwargs):
        """A new layer, with room for sequences of `LONGEST` positions."""
        room = {"max_length": LONGEST} if "max_length" in self.kwargs else {}
        dtype = {"dtype": kwargs["dtype"]} if "dtype" in kwargs else {}
        parts = {name: make(**dtype) for name, make in self.parts.items()}
        return self.cls(**{**self.kwargs, **parts, **room, **kwargs})

    def built(self, **kwargs):
        layer = self.layer(**kwargs)
        layer.build(self.shape(LENGTH))
        return layer

    def model(self, length=None, batch=None, layer=None):
        """A model of nothing but the layer."""
        inputs = keras.Input(batch_shape=self.shape(length, batch))
        layer = self.layer() if layer is None else layer
        return keras.Model(inputs, layer(inputs))

    def shape(self, length, batch=None):
        width = (WIDTH,) if self.is_map else ()
        return (batch, length, *width, FEATURES)

    def inputs(self, length=LENGTH, batch=2, seed=0):
        rng = np.random.default_rng(seed)
        return rng.normal(size=self.shape(length, batch)).astype("float32")

    @property
    def takes_mask(self):
        return "mask" in inspect.signature(self.cls.call).parameters

    def mask(self, *lengths, length=LENGTH):
        """A mask under which each sequence ends after so many positions."""
        mask = np.arange(length) < np.array(lengths)[:, None]
        if self.is_map:
            mask = np.repeat(mask[:, :, None], WIDTH, axis=2)
        return mask


EXAMPLES = [
    *(
        Example(
            case.cls,
            {"num_heads": 3, "key_dim": 5, **case.kwargs},
            idle=case.idle,
            sorts=case.sorts,
        )
        for case in FIRST_CASES
    ),
    Example(layers.SingleHeadAttention),
    Example(layers.SHARNNBlock, {"intermediate_dim": 26, "memory_length": 7}),
    Example(layers.Boom, {"intermediate_dim": 26}),
    Example(
        layers.TransformerBlock,
        {"intermediate_dim": 26},
        parts={"attention": functools.partial(layers.MultiHeadAttention, 3, 5)},
        idle=("key/bias",),
    ),
    Example(layers.LAMA, {"num_heads": 3, "rank": 2, "hidden_dim": 7}),
    Example(layers.ChannelAttention, {"reduction_ratio": 3}, is_map=True),
    Example(layers.SpatialAttention, {"kernel_size": 3}, is_map=True),
    Example(layers.CBAM, {"reduction_ratio": 3, "kernel_size": 3}, is_map=True),
]

every_layer = pytest.mark.parametrize("example", EXAMPLES, ids=str)


def nightly_but(*names):
    """Every layer, but in the ordinary run those of these names alone."""
    return pytest.mark.parametrize(
        "example",
        [
            pytest.param(
                example,
                marks=[] if str(example) in names else pytest.mark.nightly,
            )
            for example in EXAMPLES
        ],
        ids=str,
    )
