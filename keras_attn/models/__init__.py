"""Whole models of the papers."""

from keras_attn.models.cbam_resnet import CBAMResNet
from keras_attn.models.insert_cbam import insert_cbam
from keras_attn.models.sharnn import SHARNN
from keras_attn.models.swap_attention import AttentionSwap
from keras_attn.models.swap_attention import swap_attention
from keras_attn.models.transformer import Transformer

__all__ = [
    "AttentionSwap",
    "CBAMResNet",
    "SHARNN",
    "Transformer",
    "insert_cbam",
    "swap_attention",
]
