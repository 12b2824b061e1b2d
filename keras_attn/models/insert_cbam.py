"""Puts attention into a network that exists already."""

import difflib

import keras

from keras_attn.layers import CBAM


def insert_cbam(model, after, attention=None):
    """Puts CBAM after some layers of a network, and keeps its weights.

    The default layer returns its input unchanged until it is trained, so that
    the new network computes exactly what the old one did, and can be fine-tuned
    from there. It shares no weights with the old network, which stays as it is,
    and comes uncompiled.

    Args:
        model: Functional or sequential `keras.Model`, built.
        after: Name of a layer, list of names, or a callable that says of a
            layer whether to put attention after it, such as
            `lambda layer: layer.name.endswith("_add")`. Each of these layers
            must return a single feature map. Layers inside of a nested model
            are out of reach: change the nested model first.
        attention: Layer to put copies of, such as
            `keras_attn.layers.SpatialAttention(identity_init=True)`, or a
            callable without arguments that makes one. Defaults to
            `keras_attn.layers.CBAM(identity_init=True)`. The copy after layer
            `"conv1"` is named `"conv1_attention"`.

    Returns:
        `keras.Model` with the inputs and outputs of the old one.

    Example:

    ```python
    import keras
    import keras_attn

    network = keras.applications.MobileNetV3Small(
        input_shape=(32, 32, 3), weights=None
    )
    network = keras_attn.models.insert_cbam(
        network, after=lambda layer: layer.name.endswith("_project_bn")
    )
    ```
    """
    graph = functional_graph(model, "insert_cbam")
    names = _chosen_names(graph, after)
    if attention is None:
        attention = CBAM(identity_init=True)
    attention = attention_template(attention, "insert_cbam")
    inserted = {}

    def call(layer, *args, **kwargs):
        output = layer(*args, **kwargs)
        if layer.name not in names:
            return output
        if not hasattr(output, "shape"):
            raise ValueError(
                "`insert_cbam` needs layers that return a single feature map "
                f"for argument `after`. Layer `{layer.name}` returns {output}"
            )
        if layer.name not in inserted:
            inserted[layer.name] = copy_layer(
                attention, f"{layer.name}_attention"
            )
        return inserted[layer.name](output)

    result = keras.models.clone_model(
        graph, input_tensors=graph.input, call_function=call
    )
    for layer in graph.layers:
        result.get_layer(layer.name).set_weights(layer.get_weights())
    return result


def functional_graph(model, owner):
    """The plain functional model that computes what another one does.

    A model of another class cannot be taken apart.
    """
    if not getattr(model, "inputs", None) or not getattr(model, "outputs", 0):
        raise ValueError(
            f"`{owner}` needs a functional model, or a sequential one that is "
            f"built, for argument `model`. Received: model={model}"
        )
    if isinstance(model, keras.Sequential):
        inputs, outputs = model.inputs[0], model.outputs[0]
    else:
        inputs, outputs = model.input, model.output  # may be dictionaries
    return keras.Model(inputs, outputs, name=model.name)


def _chosen_names(model, after):
    """Names of the layers of a model that `after` means."""
    known = [
        layer.name
        for layer in model.layers
        if not isinstance(layer, keras.layers.InputLayer)
    ]
    if callable(after):
        names = [name for name in known if after(model.get_layer(name))]
        if not names:
            raise ValueError(
                "`insert_cbam` found no layer for which argument `after` "
                f"returns `True`, among {', '.join(known)}"
            )
        return names
    names = [after] if isinstance(after, str) else list(after)
    if not names:
        raise ValueError(
            "`insert_cbam` needs the name of at least one layer for argument "
            f"`after`. Received: after={after}"
        )
    for name in names:
        if name not in known:
            close = difflib.get_close_matches(str(name), known)
            hint = f" Did you mean {' or '.join(close)}?" if close else ""
            raise ValueError(
                f"`insert_cbam` found no layer `{name}` in model "
                f"`{model.name}`.{hint} Received: after={after}"
            )
    return names


def attention_template(attention, owner):
    """Returns the layer that is given, or made by what is given."""
    if not isinstance(attention, keras.layers.Layer) and callable(attention):
        attention = attention()
    if not isinstance(attention, keras.layers.Layer):
        raise ValueError(
            f"`{owner}` needs a layer, or a callable without arguments that "
            f"makes one, for argument `attention`. Received: "
            f"attention={attention!r}"
        )
    return attention


def copy_layer(layer, name):
    """Makes a new layer of another name from the configuration of one."""
    return type(layer).from_config({**layer.get_config(), "name": name})
