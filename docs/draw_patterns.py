"""Draws the patterns that the pages of the mechanisms show."""

import pathlib

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt  # noqa: E402
import numpy as np  # noqa: E402

import keras_attn  # noqa: E402
from keras_attn import visualization  # noqa: E402

FOLDER = pathlib.Path(__file__).parent / "images" / "patterns"
HEADS = {"num_heads": 2, "key_dim": 8, "seed": 0}
CAUSAL = {"use_causal_mask": True}

# by page: the title, the layer and the options of the call of each panel
PATTERNS = {
    "multi_head_attention": [
        ("every key", keras_attn.MultiHeadAttention(**HEADS), {}),
        ("causal", keras_attn.MultiHeadAttention(**HEADS), CAUSAL),
    ],
    "sliding_window": [
        (
            "window_size=6",
            keras_attn.SlidingWindowAttention(**HEADS, window_size=6),
            {},
        ),
        (
            "window_size=6, causal",
            keras_attn.SlidingWindowAttention(**HEADS, window_size=6),
            CAUSAL,
        ),
        (
            "window_size=4, dilation_rate=(1, 3)",
            keras_attn.SlidingWindowAttention(
                **HEADS, window_size=4, dilation_rate=(1, 3)
            ),
            {},
        ),
    ],
    "longformer": [
        (
            "window_size=4, num_global_tokens=2",
            keras_attn.LongformerAttention(
                **HEADS, window_size=4, num_global_tokens=2
            ),
            {},
        ),
        (
            "the same, causal",
            keras_attn.LongformerAttention(
                **HEADS, window_size=4, num_global_tokens=2
            ),
            CAUSAL,
        ),
        (
            "max_global_tokens=2, global_mask at 5 and 17",
            keras_attn.LongformerAttention(
                **HEADS, window_size=4, max_global_tokens=2
            ),
            {"global_mask": np.isin(np.arange(24), (5, 17))[None]},
        ),
    ],
    "sparse_transformer": [
        (
            "strided, stride=5",
            keras_attn.StridedSparseAttention(**HEADS, stride=5),
            CAUSAL,
        ),
        (
            "fixed, block_size=5, num_summary=1",
            keras_attn.FixedSparseAttention(
                **HEADS, block_size=5, num_summary=1
            ),
            CAUSAL,
        ),
    ],
    "top_k": [
        ("top_k=4", keras_attn.TopKAttention(1, 8, top_k=4, seed=0), {}),
        (
            "top_k=4, causal",
            keras_attn.TopKAttention(1, 8, top_k=4, seed=0),
            CAUSAL,
        ),
    ],
}


def draw_patterns(page):
    panels = PATTERNS[page]
    figure, axes = plt.subplots(
        1,
        len(panels),
        figsize=(3.8 * len(panels), 4.2),
        layout="constrained",
    )
    for axis, (title, layer, options) in zip(axes, panels, strict=True):
        visualization.plot_attention_pattern(layer, 24, axes=axis, **options)
        axis.set_title(title, fontsize="medium")
    return figure


def draw_lsh():
    x = np.random.default_rng(0).normal(size=(1, 32, 16)).astype("float32")
    layer = keras_attn.LSHAttention(
        1, 8, bucket_size=8, num_hashes=1, num_buckets=4, seed=1
    )
    layer.build(x.shape)
    before, _ = visualization.plot_lsh_buckets(layer, x)
    return before.figure


def main():
    FOLDER.mkdir(parents=True, exist_ok=True)
    for page in (*PATTERNS, "lsh"):
        figure = draw_lsh() if page == "lsh" else draw_patterns(page)
        figure.savefig(FOLDER / f"{page}.png", dpi=110)
        plt.close(figure)
        print(f"Wrote {FOLDER / page}.png")


if __name__ == "__main__":
    main()
