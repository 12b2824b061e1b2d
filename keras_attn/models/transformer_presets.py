"""Arguments of `Transformer` for the models of the papers."""

from keras_attn.layers import FixedSparseAttention
from keras_attn.layers import LengthProjection
from keras_attn.layers import LinearAttention
from keras_attn.layers import LinformerAttention
from keras_attn.layers import LongformerAttention
from keras_attn.layers import LSHAttention
from keras_attn.layers import SlidingWindowAttention

# the encoder of RoBERTa, from which Longformer and Linformer start
_ROBERTA_BASE = {
    "vocabulary_size": 50265,
    "hidden_dim": 768,
    "num_layers": 12,
    "num_token_types": 1,
    "embedding_norm": True,
    "norm": "post",
    "dropout": 0.1,
}
_HEADS = {"num_heads": 12, "key_dim": 64, "dropout": 0.1, "name": "attention"}


def _longformer_base():
    """Allenai's `longformer-base-4096`; `global_mask` marks the questions."""
    return {
        **_ROBERTA_BASE,
        "max_length": 4096,
        "attention": lambda depth: LongformerAttention(
            window_size=512, max_global_tokens=64, **_HEADS
        ),
    }


def _linformer_base():
    """Linformer of table 2: 512 positions, 256 slots, layerwise sharing."""
    return {
        **_ROBERTA_BASE,
        "max_length": 512,
        "attention": lambda depth: LinformerAttention(
            max_length=512,
            projected_length=256,
            sharing="layerwise",
            **_HEADS,
        ),
        "length_projection": LengthProjection(512, 256),
    }


def _linear_transformer(num_layers, max_length):
    """Pixel by pixel, section 4.2, but with a softmax over the 256 values."""
    return {
        "vocabulary_size": 256,
        "hidden_dim": 256,
        "num_layers": num_layers,
        "max_length": max_length,
        "attention": lambda depth: LinearAttention(
            num_heads=8, key_dim=32, name="attention"
        ),
        "norm": "post",
        "causal": True,
        "head": "tokens",
    }


def _sparse_transformer_enwik8():
    """Section 7.2: 30 layers, the fixed pattern, both parts in all heads."""
    return {
        "vocabulary_size": 256,
        "hidden_dim": 512,
        "num_layers": 30,
        "max_length": 12288,
        "attention": lambda depth: FixedSparseAttention(
            num_heads=8,
            key_dim=64,
            block_size=128,
            num_summary=32,
            num_subblocks=4,
            heads="merged",
            name="attention",
        ),
        "positions": "sinusoidal",
        "activation": "quick_gelu",
        "dropout": 0.4,
        "causal": True,
        "head": "tokens",
    }


def _reformer_enwik8():
    """Google's `reformer-enwik8`, as nearly as can be, of 65,536 positions.

    The residual connections are ordinary, not reversible; positions are
    sinusoidal, not two learned parts side by side; a position sees the 128
    before it where the published local attention sees its chunk and the one
    before.
    """

    def attention(depth):
        options = {
            "num_heads": 8,
            "key_dim": 128,
            "use_bias": False,
            "name": "attention",
        }
        if depth % 4 == 2:
            return LSHAttention(
                bucket_size=256, num_hashes=4, num_buckets=(16, 32), **options
            )
        return SlidingWindowAttention(window_size=(128, 0), **options)

    return {
        "vocabulary_size": 258,
        "hidden_dim": 1024,
        "num_layers": 12,
        "attention": attention,
        "positions": "sinusoidal",
        "norm_epsilon": 1e-12,
        "activation": "relu",
        "causal": True,
        "head": "tokens",
    }


PRESETS = {
    "linear_transformer_cifar10": lambda: _linear_transformer(16, 3072),
    "linear_transformer_mnist": lambda: _linear_transformer(8, 784),
    "linformer_base": _linformer_base,
    "longformer_base": _longformer_base,
    "reformer_enwik8": _reformer_enwik8,
    "sparse_transformer_enwik8": _sparse_transformer_enwik8,
}
