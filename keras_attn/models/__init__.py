"""Whole models of the papers."""

from keras_attn.models.cbam_resnet import CBAMResNet
from keras_attn.models.insert_cbam import insert_cbam

__all__ = ["CBAMResNet", "insert_cbam"]
