"""Pictures of what attends to what, and the arrays behind them.

The functions that draw need matplotlib, `pip install "keras-attn[viz]"`, take
the axes to draw on, or make some, and return them. The others return NumPy
arrays.
"""

import inspect

import keras
import numpy as np
from keras import ops

from keras_attn import layers
from keras_attn import utils
from keras_attn.ops import lsh

__all__ = [
    "attention_by_distance",
    "attention_maps",
    "attention_pattern",
    "lsh_buckets",
    "plot_attention_by_distance",
    "plot_attention_maps",
    "plot_attention_pattern",
    "plot_gates",
    "plot_lsh_buckets",
]


def attention_maps(model, inputs, **call_arguments):
    """Collects the weights of every attention layer of a model for an input.

    The model runs once, eagerly. Each layer in it that can return its attention
    weights is asked for them, those of Keras included; the model sees nothing
    of it.

    Args:
        model: Keras model or layer.
        inputs: What to call it with.
        **call_arguments: Further arguments of the call, such as `state`.

    Returns:
        Dictionary from the path of each layer, in the order of the calls, to
        its weights, a NumPy array: `(B, N, T, S)` of a sequence layer, or the
        gates of a layer for feature maps. Calls of a layer after the first add
        `:2`, `:3` to the path.

    Example:

    ```python
    import keras
    import numpy as np
    import keras_attn

    x = keras.Input((None, 8))
    attention = keras_attn.SlidingWindowAttention(2, 4, window_size=4)
    model = keras.Model(x, attention(x))
    maps = keras_attn.visualization.attention_maps(model, np.ones((1, 6, 8)))
    (weights,) = maps.values()
    assert weights.shape == (1, 2, 6, 6)
    ```
    """
    if not model.built:
        model(inputs, **call_arguments)  # which makes the layers inside
    maps = {}
    observed = [x for x in (model, *utils.sublayers(model)) if _has_scores(x)]
    # of those inside each other, the innermost is what attends
    observed = [
        layer
        for layer in observed
        if not any(_has_scores(inner) for inner in utils.sublayers(layer))
    ]
    for layer in observed:
        layer.call = _Observer(layer, maps)
    try:
        model(inputs, **call_arguments)
    finally:
        for layer in observed:
            del layer.call
    return maps


class _Observer:
    """Stands for the `call()` of a layer, and notes the weights."""

    def __init__(self, layer, maps):
        self.layer, self.maps, self.call = layer, maps, layer.call

    def __call__(self, *args, return_attention_scores=False, **kwargs):
        results = self.call(*args, return_attention_scores=True, **kwargs)
        output, scores, *state = results
        path, count = self.layer.path, 1
        while path in self.maps:
            count += 1
            path = f"{self.layer.path}:{count}"
        self.maps[path] = _to_numpy(scores)
        if return_attention_scores:
            return results
        return (output, *state) if state else output


def _has_scores(layer):
    """Whether a layer attends by itself and can return its weights."""
    if isinstance(
        layer, (keras.Model, layers.SHARNNBlock, layers.TransformerBlock)
    ):
        return False  # what attends, if anything, is inside
    call = (
        layer.attend if isinstance(layer, layers.AttentionLayer) else layer.call
    )
    return "return_attention_scores" in inspect.signature(call).parameters


def attention_pattern(layer, query, **call_arguments):
    """Finds which keys each query of a layer attends.

    Args:
        layer: Layer of self-attention that can return its weights. One that is
            not built stays so.
        query: Tensor of shape `(B, T, F)`, or the length of a random sequence.
        **call_arguments: Further arguments of the call, such as
            `use_causal_mask=True`.

    Returns:
        Boolean array of shape `(N, T, S)`, that of the first sequence, `True`
        where the weight of a key is not 0.

    Example:

    ```python
    import keras_attn

    layer = keras_attn.SlidingWindowAttention(1, 4, window_size=2)
    pattern = keras_attn.visualization.attention_pattern(layer, 5)
    assert pattern.sum() == 2 + 3 + 3 + 3 + 2
    ```
    """
    if not layer.built:
        layer = type(layer).from_config(layer.get_config())
    if isinstance(query, int):
        query = _random_sequence(layer, query)
    results = layer(query, return_attention_scores=True, **call_arguments)
    return _to_numpy(results[1])[0] > 0


def _random_sequence(layer, length):
    features = 16
    if layer.built:
        features = keras.tree.flatten(layer.get_build_config())[-1]
    shape = (1, length, features)
    return np.random.default_rng(0).normal(size=shape).astype("float32")


def plot_attention_pattern(layer, query, axes=None, **call_arguments):
    """Draws which keys each query of a layer attends, as papers do.

    Heads that attend the same keys share a color; where colors meet, they mix.

    Args:
        layer: See `attention_pattern()`.
        query: See `attention_pattern()`.
        axes: Matplotlib axes to draw on.
        **call_arguments: See `attention_pattern()`.

    Returns:
        Matplotlib axes.

    Example:

    ```python
    import keras_attn

    layer = keras_attn.StridedSparseAttention(2, 4, stride=4)
    axes = keras_attn.visualization.plot_attention_pattern(
        layer, 16, use_causal_mask=True
    )
    axes.figure.savefig("strided.png")
    ```
    """
    pattern = attention_pattern(layer, query, **call_arguments)
    axes = _axes(axes)
    kinds = {}
    for head, seen in enumerate(pattern):
        kinds.setdefault(seen.tobytes(), (seen, []))[1].append(head)
    colors = _colors(len(kinds))
    total = np.zeros((*pattern.shape[1:], 3))
    count = np.zeros((*pattern.shape[1:], 1))
    for color, (seen, _) in zip(colors, kinds.values(), strict=True):
        total += seen[..., None] * color
        count += seen[..., None]
    image = np.where(count > 0, total / np.maximum(count, 1), 1.0)
    axes.imshow(image, interpolation="nearest")
    _draw_grid(axes, *pattern.shape[1:])
    axes.set_xlabel("key")
    axes.set_ylabel("query")
    if len(kinds) > 1:
        for color, (_, heads) in zip(colors, kinds.values(), strict=True):
            word = "head" if len(heads) == 1 else "heads"
            label = f"{word} {', '.join(map(str, heads))}"
            axes.plot([], [], "s", color=color, label=label)
        axes.legend(
            loc="upper center",
            bbox_to_anchor=(0.5, -0.14),
            ncols=2,
            frameon=False,
        )
    return axes


def plot_attention_maps(
    weights, queries=None, keys=None, titles=None, axes=None
):
    """Draws the attention weights of each head of a layer.

    Args:
        weights: Array of shape `(N, T, S)`, or `(B, N, T, S)`, of which the
            first sequence is drawn.
        queries: Labels of the queries, such as tokens, at most 60.
        keys: Labels of the keys. Defaults to `queries` if there are as many.
        titles: Titles of the heads.
        axes: A matplotlib axes per head.

    Returns:
        Array of matplotlib axes, one per head.

    Example:

    ```python
    import numpy as np
    import keras_attn

    x = np.random.normal(size=(1, 3, 8))
    layer = keras_attn.MultiHeadAttention(num_heads=2, key_dim=4)
    _, weights = layer(x, return_attention_scores=True)
    axes = keras_attn.visualization.plot_attention_maps(
        weights, queries=["to", "be", "or"]
    )
    assert len(axes) == 2
    ```
    """
    weights = _to_numpy(weights)
    if weights.ndim == 4:
        weights = weights[0]
    if weights.ndim != 3:
        raise ValueError(
            "`weights` must have the shape (heads, queries, keys) or (batch, "
            f"heads, queries, keys). Received: weights.shape={weights.shape}"
        )
    num_heads, num_queries, num_keys = weights.shape
    if keys is None and queries is not None and num_queries == num_keys:
        keys = queries
    for name, labels, size in (
        ("queries", queries, num_queries),
        ("keys", keys, num_keys),
        ("titles", titles, num_heads),
    ):
        if labels is not None and len(labels) != size:
            raise ValueError(
                f"`{name}` must have {size} labels. Received: {len(labels)}"
            )
    axes = _axes(axes, num_heads)
    for head in range(num_heads):
        image = axes[head].imshow(
            weights[head], cmap="Blues", vmin=0, interpolation="nearest"
        )
        axes[head].set_title(f"head {head}" if titles is None else titles[head])
        _label(axes[head].set_xticks, keys, rotation=90)
        _label(axes[head].set_yticks, queries)
        axes[head].figure.colorbar(image, ax=axes[head], shrink=0.7)
    axes[0].set_xlabel("key")
    axes[0].set_ylabel("query")
    return axes


def plot_gates(images, gates, axes=None):
    """Draws spatial gates, as those of CBAM, over the images they belong to.

    Args:
        images: Array of shape `(B, height, width, channels)` or `(B, height,
            width)`, of any range.
        gates: Array of shape `(B, rows, columns)`, with a last axis of 1 or
            not, from 0 to 1: see `attention_maps()`.
        axes: A matplotlib axes per image.

    Returns:
        Array of matplotlib axes, one per image.

    Example:

    ```python
    import numpy as np
    import keras_attn

    images = np.random.uniform(size=(2, 12, 12, 3)).astype("float32")
    layer = keras_attn.SpatialAttention(kernel_size=3)
    _, gates = layer(images, return_attention_scores=True)
    axes = keras_attn.visualization.plot_gates(images, gates)
    ```
    """
    images, gates = _to_numpy(images), _to_numpy(gates)
    if gates.ndim == 4:
        gates = np.squeeze(gates, axis=-1)
    if gates.ndim != 3 or len(images) != len(gates):
        raise ValueError(
            "`gates` must have the shape (batch, rows, columns), one of each "
            f"image. Received: images.shape={images.shape}, "
            f"gates.shape={gates.shape}"
        )
    axes = _axes(axes, len(images))
    for axis, image, gate in zip(axes, images, gates, strict=True):
        height, width = image.shape[:2]
        gray = image.reshape(height, width, -1).mean(axis=-1)
        axis.imshow(gray, cmap="gray")
        drawn = axis.imshow(
            gate,
            extent=(-0.5, width - 0.5, height - 0.5, -0.5),
            cmap="viridis",
            alpha=0.6,
            vmin=0,
            vmax=1,
        )
        axis.set_axis_off()
    axes[0].figure.colorbar(drawn, ax=list(axes), label="gate", shrink=0.8)
    return axes


def attention_by_distance(weights):
    """Averages attention weights by how far back they reach.

    For SHA-RNN, whose keys begin in the memory, this is the use of the memory:
    the last query is the newest position, and its own key the last one.

    Args:
        weights: Array of shape `(B, N, T, S)` of causal attention, with
            `S >= T`. The last keys are those of the queries.

    Returns:
        Array of shape `(S,)`: the mean weight at distances `0` to `S - 1`,
        over the queries that have a key so far back.

    Example:

    ```python
    import numpy as np
    import keras_attn

    weights = np.array([[1.0, 0.0], [0.25, 0.75]])[None, None]
    mean = keras_attn.visualization.attention_by_distance(weights)
    np.testing.assert_allclose(mean, [0.875, 0.25])
    ```
    """
    weights = _to_numpy(weights)
    if weights.ndim != 4 or weights.shape[2] > weights.shape[3]:
        raise ValueError(
            "`weights` must have the shape (batch, heads, queries, keys), with "
            "at least as many keys as queries. Received: "
            f"weights.shape={weights.shape}"
        )
    num_queries, num_keys = weights.shape[2:]
    mean = weights.mean(axis=(0, 1))  # (T, S)
    query = np.arange(num_keys - num_queries, num_keys)[:, None]
    distance = query - np.arange(num_keys)
    seen = distance >= 0
    total = np.bincount(distance[seen], mean[seen], minlength=num_keys)
    return total / np.bincount(distance[seen], minlength=num_keys)


def plot_attention_by_distance(weights, label=None, axes=None):
    """Draws how much attention goes how far back.

    Args:
        weights: See `attention_by_distance()`. The part of the keys that comes
            before the queries, a memory, is shaded.
        label: Label of the curve.
        axes: Matplotlib axes to draw on.

    Returns:
        Matplotlib axes.

    Example:

    ```python
    import numpy as np
    import keras_attn

    block = keras_attn.SHARNNBlock(16, memory_length=20)
    block.build((1, 10, 8))
    state = block.initial_state(batch_size=1)
    for _ in range(3):
        x = np.random.normal(size=(1, 10, 8)).astype("float32")
        _, weights, state = block(
            x, state=state, return_attention_scores=True
        )
    keras_attn.visualization.plot_attention_by_distance(weights)
    ```
    """
    mean = attention_by_distance(weights)
    num_queries, num_keys = weights.shape[2:]
    axes = _axes(axes)
    axes.plot(mean, label=label)
    if num_keys > num_queries:
        axes.axvspan(num_queries, num_keys, color="black", alpha=0.06, lw=0)
        axes.text(
            num_queries,
            0.98,
            " always from the memory",
            transform=axes.get_xaxis_transform(),
            va="top",
            fontsize="small",
        )
    axes.set_xlim(0, max(num_keys - 1, 1))
    axes.set_ylim(bottom=0)
    axes.set_xlabel("positions back")
    axes.set_ylabel("mean attention weight")
    if label is not None:
        axes.legend(frameon=False)
    return axes


def lsh_buckets(layer, query, head=0):
    """Finds the buckets of LSH attention in the first round of hashing.

    Args:
        layer: `keras_attn.layers.LSHAttention`, built.
        query: Tensor of shape `(B, T, F)`, of which the first sequence counts.
        head: Index of the head.

    Returns:
        Integer array of shape `(T,)`.

    Example:

    ```python
    import numpy as np
    import keras_attn

    x = np.random.normal(size=(1, 12, 8)).astype("float32")
    layer = keras_attn.LSHAttention(2, 4, bucket_size=4, num_buckets=4)
    layer.build(x.shape)
    buckets = keras_attn.visualization.lsh_buckets(layer, x)
    assert buckets.shape == (12,) and buckets.max() < 4
    ```
    """
    if not isinstance(layer, layers.LSHAttention):
        raise ValueError(
            "Only `LSHAttention` has buckets. Received: "
            f"layer of type {type(layer).__name__}"
        )
    heads, _, _ = layer.project(query, query, query)
    buckets = lsh.lsh_buckets(
        heads,
        ops.convert_to_tensor(layer.rotations)[:, :, :1],
        layer.num_buckets,
        layer.bucket_size,
    )
    return _to_numpy(buckets)[0, head, 0]


def plot_lsh_buckets(layer, query, head=0, axes=None):
    """Draws what LSH attention attends before and after it sorts by bucket.

    This is figure 2 of the Reformer paper: the colors along the axes are the
    buckets, and a pair that is attended has the color of the query's. Lines
    separate the chunks in which attention is computed.

    Args:
        layer: See `lsh_buckets()`.
        query: See `lsh_buckets()`.
        head: Index of the head.
        axes: Two matplotlib axes.

    Returns:
        Array of two matplotlib axes.

    Example:

    ```python
    import numpy as np
    import keras_attn

    x = np.random.normal(size=(1, 24, 8)).astype("float32")
    layer = keras_attn.LSHAttention(2, 4, bucket_size=4, num_buckets=4)
    layer.build(x.shape)
    before, after = keras_attn.visualization.plot_lsh_buckets(layer, x)
    before.figure.savefig("buckets.png")
    ```
    """
    buckets = lsh_buckets(layer, query, head)
    pattern = attention_pattern(layer, query, num_hashes=1)[head]
    colors = _colors(buckets.max() + 1)
    axes = _axes(axes, 2)
    order = np.argsort(buckets, kind="stable")
    for axis, positions, title in (
        (axes[0], np.arange(len(buckets)), "in the order of the sequence"),
        (axes[1], order, "sorted by bucket"),
    ):
        seen = pattern[np.ix_(positions, positions)][..., None]
        color = colors[buckets[positions]]
        image = np.where(seen, color[:, None], 1.0)
        # the first row and column show the buckets
        image = np.pad(image, [(1, 0), (1, 0), (0, 0)], constant_values=1.0)
        image[0, 1:] = image[1:, 0] = color
        edge = len(buckets) - 0.5
        axis.imshow(image, extent=(-1.5, edge, edge, -1.5))
        _draw_grid(axis, len(buckets), len(buckets))
        axis.axhline(-0.5, color="black", lw=2)
        axis.axvline(-0.5, color="black", lw=2)
        axis.set_title(title)
        axis.set_xlabel("key")
    axes[0].set_ylabel("query")
    for edge in range(0, len(buckets), layer.bucket_size):
        axes[1].axhline(edge - 0.5, color="black", lw=1)
        axes[1].axvline(edge - 0.5, color="black", lw=1)
    return axes


def _to_numpy(x):
    return np.array(ops.convert_to_numpy(x))


def _axes(axes, count=None):
    """Axes to draw on: new ones unless some are given, and as many as due."""
    if axes is None:
        try:
            from matplotlib import pyplot
        except ImportError as error:
            raise ImportError(
                "Drawing needs matplotlib: pip install 'keras-attn[viz]'"
            ) from error
        _, axes = pyplot.subplots(
            1,
            count or 1,
            figsize=(min(4.4 * (count or 1), 18), 4),
            layout="constrained",
            squeeze=False,
        )
        axes = axes[0] if count else axes[0, 0]
    if count is not None:
        axes = np.atleast_1d(np.asarray(axes, dtype=object)).ravel()
        if len(axes) != count:
            raise ValueError(f"`axes` must be {count}. Received: {len(axes)}")
    return axes


def _colors(count):
    """Colors that are told apart, an array of shape `(count, 3)`."""
    from matplotlib import colormaps

    if count <= 10:
        return np.array(colormaps["tab10"].colors)[:count]
    return colormaps["gist_rainbow"](np.linspace(0, 1, count))[:, :3]


def _draw_grid(axes, rows, columns):
    if max(rows, columns) > 64:
        return
    for draw, size in ((axes.axhline, rows), (axes.axvline, columns)):
        for edge in range(size + 1):
            draw(edge - 0.5, color="lightgray", lw=0.4)


def _label(set_ticks, labels, **kwargs):
    if labels is not None and len(labels) <= 60:
        set_ticks(range(len(labels)), labels, fontsize="small", **kwargs)
