"""Whole models of the papers."""

from keras_attn.models.cbam_resnet import CBAMResNet
from keras_attn.models.insert_cbam import insert_cbam
from keras_attn.models.sharnn import SHARNN
from keras_attn.models.transformer import Transformer

__all__ = [
    "CBAMResNet",
    "SHARNN",
    "Transformer",
    "insert_cbam",
]
