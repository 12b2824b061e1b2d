"""Runs Keras' own tests of multi-head attention on ours.

They are part of the Keras wheel, though not of its public API, which is why no
other file refers to them.
"""

import fnmatch
import unittest

import keras
import pytest
from keras.src.layers.attention import multi_head_attention_test as theirs

from keras_attn import layers

# arguments of theirs that ours does not have
UNSHARED = {"attention_axes", "flash_attention", "sliding_window", "use_gate"}

LEFT_OUT = {
    "test_attention_axes_*": "has `attention_axes`",
    "test_high_dim_*": "has `attention_axes`",
    "test_causal_only_masks_non_4d_inputs": "has `attention_axes`",
    "test_compute_output_shape_high_dim_*": "inputs of more than three axes",
    "test_compute_output_shape_different_qv_*": "inputs of more than 3 axes",
    "test_compute_output_shape_with*_different_proj": "outputs of 4 axes",
    "test_multi_head_attention_output_shape_as_tuple": "outputs of 4 axes",
    "test_shape_mismatch_error_key_value_dim_mismatch_high_dim": "5 axes",
    "test_shape_mismatch_error_query_*": "keys of 1 axis: another message",
    "test_initializer": "has `use_gate`",
    "test_mha_constraints": "has `use_gate`",
    "test_lora": "has `use_gate`",
    "test_flash_attention_with_errors": "has `flash_attention`",
    "test_sliding_window*": "has `sliding_window`",
    "test_causal_only_skipped_for_subclass": "overrides a private method",
    "test_compute_attention_combines_*": "calls a private method",
    "test_dtype_policy_map": "reads private attributes",
    "test_quantize_int8": "reads private attributes, has `use_gate`",
    "test_masking_causal": "causal with T != S, which ours refuses",
    "test_masking_with_different_shapes": "float masks, which ours refuses",
}
NAMES = unittest.TestLoader().getTestCaseNames(theirs.MultiHeadAttentionTest)
KEPT = [
    name
    for name in NAMES
    if not any(fnmatch.fnmatch(name, pattern) for pattern in LEFT_OUT)
]


class KerasWithOurs:
    """`keras.layers` in which multi-head attention is ours."""

    MultiHeadAttention = layers.MultiHeadAttention

    def __getattr__(self, name):
        return getattr(keras.layers, name)


class SharedTests(theirs.MultiHeadAttentionTest):
    __test__ = False  # run by name, below

    def run_layer_test(self, layer_cls, init_kwargs, **kwargs):
        if not UNSHARED.intersection(init_kwargs):
            super().run_layer_test(layer_cls, init_kwargs, **kwargs)


@pytest.mark.parametrize("name", KEPT)
def test_passes(name, monkeypatch):
    monkeypatch.setattr(theirs, "layers", KerasWithOurs())
    result = unittest.TestResult()
    SharedTests(name).run(result)
    for _, message in result.failures + result.errors:
        pytest.fail(message)
    assert result.testsRun == 1


@pytest.mark.parametrize("pattern", LEFT_OUT)
def test_what_is_left_out_exists(pattern):
    assert fnmatch.filter(NAMES, pattern)
