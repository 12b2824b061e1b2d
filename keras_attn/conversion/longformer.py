"""Weights of the Longformer of Hugging Face."""

from keras_attn.conversion.state_dict import StateDict
from keras_attn.conversion.state_dict import identity_output
from keras_attn.conversion.state_dict import in_order
from keras_attn.layers import LongformerAttention
from keras_attn.models import Transformer


def longformer_weights(state_dict, num_heads, prefix=""):
    """Converts the attention of a Hugging Face Longformer.

    Args:
        state_dict: The weights by their names, NumPy arrays or what
            `numpy.asarray` takes: the state dict of a `LongformerSelfAttention`
            of `transformers`, or of the `LongformerAttention` around it, or of
            a whole model.
        num_heads: Number of attention heads, `num_attention_heads` there.
        prefix: What the names begin with. In a whole model, such as
            `"longformer.encoder.layer.0.attention."`.

    Returns:
        List of NumPy arrays for `set_weights()` of a `LongformerAttention` with
        biases and global projections of its own. A `LongformerSelfAttention`
        has no output projection, and gets the identity for one, so that the
        outputs are the same; that of a `LongformerAttention` is `output.dense`.
        What follows it there, a dropout, the residual and a normalization, is
        not part of attention.

    Example:

    ```python
    import numpy as np
    import keras_attn
    from keras_attn.conversion import longformer_weights

    state_dict = {}  # or `module.state_dict()`
    for name in ("query", "key", "value"):
        for suffix in ("", "_global"):
            state_dict[f"{name}{suffix}.weight"] = np.ones((8, 8))
            state_dict[f"{name}{suffix}.bias"] = np.zeros(8)
    layer = keras_attn.LongformerAttention(
        num_heads=2, key_dim=4, window_size=16, max_global_tokens=4
    )
    layer.build((None, None, 8))
    layer.set_weights(longformer_weights(state_dict, num_heads=2))
    ```
    """
    weights = StateDict("longformer_weights", state_dict, prefix)
    attention = weights.inside("self.", "query.weight")
    query, key, value, *global_projections = (
        attention.heads(name + suffix, num_heads)
        for suffix in ("", "_global")
        for name in ("query", "key", "value")
    )
    if attention is weights:
        output = identity_output(value)
    else:
        output = weights.output("output.dense", num_heads)
    return [
        array
        for arrays in (query, key, value, output, *global_projections)
        for array in arrays
    ]


def longformer_model_weights(state_dict, model, pad_token_id=1, prefix=""):
    """Converts a whole Longformer of Hugging Face.

    The `Transformer` needs the options of the original: `norm="post"`,
    `embedding_norm=True`, `norm_epsilon=layer_norm_eps`,
    `num_token_types=type_vocab_size`, `activation="gelu"`, `max_length=
    max_position_embeddings - pad_token_id - 1`, and a `LongformerAttention`
    with `window_size=attention_window` in each block. Then the features of all
    positions are the same, if padding is at the end.

    Args:
        state_dict: The weights by their names, NumPy arrays or what
            `numpy.asarray` takes: the state dict of a `LongformerModel` of
            `transformers`, or of a model that holds one.
        model: The `keras_attn.models.Transformer` that is to have the weights.
            With `head="classes"`, it gets those of the head of a
            `LongformerForSequenceClassification`; where there is none, its
            `pooler` gets those of the original's, and its `classifier` is left
            as it is.
        pad_token_id: The token of padding. The original has no vectors for
            positions up to this number.
        prefix: What the names begin with. In a model with a head,
            `"longformer."`.

    Returns:
        List of NumPy arrays for `model.set_weights()`.

    Raises:
        ValueError: For a model with other layers, sizes or options.

    Example:

    ```python
    import keras_attn
    from keras_attn.conversion import longformer_model_weights


    def convert(state_dict):  # such as `model.state_dict()`
        model = keras_attn.models.Transformer.from_preset("longformer_base")
        model.set_weights(longformer_model_weights(state_dict, model))
        return model
    ```
    """
    owner = "longformer_model_weights"
    weights = StateDict(owner, state_dict, prefix)
    _check_model(weights, model)
    pairs = [
        *_embeddings(weights, model, pad_token_id),
        *_head(weights, model),
    ]
    for depth, block in enumerate(model.blocks):
        pairs += _block(weights, block, f"encoder.layer.{depth}.")
    return in_order(owner, model, pairs)


def _check_model(weights, model):
    """Raises for a model of another kind."""
    if not isinstance(model, Transformer):
        raise ValueError(
            f"`{weights.owner}` needs a `Transformer` for argument `model`. "
            f"Received: model={model}"
        )
    for name, wanted in (("norm", "post"), ("embedding_norm", True)):
        if getattr(model, name) != wanted:
            raise ValueError(
                f"`{weights.owner}` needs a model with `{name}={wanted!r}`. "
                f"Received: {name}={getattr(model, name)!r}"
            )
    if model.head == "tokens":
        raise ValueError(
            f"`{weights.owner}` cannot convert the head of a masked language "
            "model, which has a layer of its own. Received: head='tokens'"
        )
    start = f"{weights.prefix}encoder.layer."
    layers = {
        name.removeprefix(start).split(".")[0]
        for name in weights.arrays
        if name.startswith(start)
    }
    if layers and len(layers) != model.num_layers:
        raise ValueError(
            f"`{weights.owner}` finds {len(layers)} layers. "
            f"Received: a model with `num_layers={model.num_layers}`"
        )
    for block in model.blocks:
        attention = block.attention
        if not (
            isinstance(attention, LongformerAttention)
            and attention.separate_global_projections
            and attention.use_bias
        ):
            raise ValueError(
                f"`{weights.owner}` needs a `LongformerAttention` with biases "
                "and global projections of its own in each block. "
                f"Received: {attention} in `{block.name}`"
            )


def _embeddings(weights, model, pad_token_id):
    tables = {
        name: weights[f"embeddings.{name}_embeddings.weight"]
        for name in ("word", "position", "token_type")
    }
    tables["position"] = tables["position"][pad_token_id + 1 :]
    yield model.token_embedding.embeddings, tables["word"]
    for name, layer in (
        ("position", model.position_embedding),
        ("token_type", model.token_type_embedding),
    ):
        if layer is None:
            raise ValueError(
                f"`{weights.owner}` finds vectors for each {name}, which "
                "`model` has not. Set `positions='learned'` and "
                "`num_token_types`."
            )
        yield layer.embeddings, tables[name]
    yield from weights.norm(model.embedding_norm_layer, "embeddings.LayerNorm")


def _head(weights, model):
    if model.head != "classes":
        return
    classifier = StateDict(weights.owner, weights.arrays, "classifier.")
    if "dense.weight" in classifier:
        yield from classifier.dense(model.pooler, "dense")
        yield from classifier.dense(model.classifier, "out_proj")
    else:
        yield from weights.dense(model.pooler, "pooler.dense")


def _block(weights, block, name):
    attention = block.attention
    arrays = longformer_weights(
        weights.arrays,
        attention.num_heads,
        f"{weights.prefix}{name}attention.",
    )
    yield from zip(attention.weights, arrays, strict=True)
    yield from weights.norm(
        block.attention_norm, f"{name}attention.output.LayerNorm"
    )
    feed_forward = block.feed_forward
    yield from weights.dense(feed_forward.up_dense, f"{name}intermediate.dense")
    yield from weights.dense(feed_forward.down_dense, f"{name}output.dense")
    yield from weights.norm(block.feed_forward_norm, f"{name}output.LayerNorm")
