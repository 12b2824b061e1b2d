"""Puts other attention layers into a network that exists already."""

import dataclasses
import inspect

import keras
import numpy as np

from keras_attn.layers import AttentionLayer
from keras_attn.models.insert_cbam import functional_graph


def swap_attention(model, factory, select=None):
    """Puts other attention layers in the place of those of a network.

    It replaces `keras.layers.MultiHeadAttention`,
    `keras.layers.GroupQueryAttention` and the `CachedMultiHeadAttention` of
    KerasHub, wherever they are: in the graph of the model, in models nested in
    it, or inside of a layer that holds one as an attribute, such as the
    `TransformerEncoder` of KerasHub. Projections keep their weights where
    shapes allow, all other layers keep theirs, and what remains is trained.

    The new network shares no weights with the old one, which stays as it is,
    and comes uncompiled. It can be saved and loaded; import `keras_attn`
    before, and the package of the layers in it. What a call asks of a layer,
    such as `use_causal_mask=True` or an `attention_mask`, is asked of the new
    one too, which raises if it cannot do that.

    Args:
        model: Functional or sequential `keras.Model`, built.
        factory: Callable that makes a layer, such as
            `keras_attn.LinearAttention` or
            `functools.partial(keras_attn.SlidingWindowAttention,
            window_size=128)`. It is called for each layer with the arguments
            of the old one as keywords, those that all layers of `keras_attn`
            share: `num_heads`, `key_dim`, `value_dim`, `dropout`, `use_bias`,
            `output_shape`, the initializers, regularizers and constraints,
            `seed`, `name`, `dtype` and `trainable`. A `sliding_window` of the
            old layer is not among them, for which keys are seen is the affair
            of the new one.
        select: Callable that says of a layer whether to replace it, by its
            path, such as `lambda path: "encoder_1" in path`. Defaults to all.

    Returns:
        A `keras.Model` with the inputs and outputs of the old one, and a list
        of what was replaced, an `AttentionSwap` for each layer, which can be
        printed.

    Raises:
        ValueError: For what cannot be replaced. Layers of subclasses of those
            above are left alone, for they may do something else.

    Example:

    ```python
    import keras
    import keras_attn

    x = inputs = keras.Input((None, 8))
    for _ in range(2):
        x = x + keras.layers.MultiHeadAttention(num_heads=2, key_dim=4)(x, x)
    model = keras.Model(inputs, x)

    model, report = keras_attn.swap_attention(
        model, keras_attn.LinearAttention
    )
    print(*report, sep="\\n")
    ```
    """
    if not callable(factory):
        raise ValueError(
            "`swap_attention` needs a callable that makes a layer for argument "
            f"`factory`. Received: factory={factory!r}"
        )
    graph = functional_graph(model, "swap_attention")
    swap = _Swap(factory, select)
    result = swap.clone_graph(graph, "")
    if not swap.pairs:
        chosen = "" if select is None else " for which `select` returns `True`"
        raise ValueError(
            f"`swap_attention` found no attention layer{chosen} in model "
            f"`{model.name}`. It replaces `MultiHeadAttention` and "
            "`GroupQueryAttention` of Keras, and `CachedMultiHeadAttention` "
            "of KerasHub"
        )
    swap.carry_weights()
    return result, swap.report()


@dataclasses.dataclass(frozen=True)
class AttentionSwap:
    """What `swap_attention` did to a layer.

    Args:
        path: Names of the models and layers around it, and its own.
        old: Class of the old layer.
        new: Class of the new one.
        carried: Names of the weights that the new layer has from the old one.
        fresh: Names of those that start anew.
        dropped: Names of the weights of the old layer that have no place.
    """

    path: str
    old: str
    new: str
    carried: tuple = ()
    fresh: tuple = ()
    dropped: tuple = ()

    def __str__(self):
        parts = [f"{self.path}: {self.old} -> {self.new}"]
        for part in ("carried", "fresh", "dropped"):
            names = getattr(self, part)
            if names:
                parts.append(f"{part}: {', '.join(names)}")
        return "; ".join(parts)


class _Swap:
    """Clones models and layers, with other attention in them.

    Args:
        factory: See `swap_attention`.
        select: See `swap_attention`.
    """

    def __init__(self, factory, select):
        self.factory = factory
        self.select = select
        self.pairs = {}  # the old and the new attention by path
        self.copies = []  # the old layers and the new ones that hold them

    def clone_graph(self, graph, path):
        """Clones a functional model."""
        replaced = {}

        def clone(layer):
            here = _path(*([path] if path else []), layer.name)
            if is_attention(layer) and self._is_selected(here):
                new = self._replace(layer, here)
                replaced[id(new)] = layer
                return new
            return self._clone_layer(layer, here)

        def call(layer, *args, **kwargs):
            if id(layer) in replaced:
                old = replaced[id(layer)]
                args, kwargs = (), _bind(old, *args, **kwargs)
            return layer(*args, **kwargs)

        return keras.models.clone_model(
            graph, clone_function=clone, call_function=call
        )

    def _clone_layer(self, layer, path):
        """Clones a layer that is not attention, but may hold some."""
        if not isinstance(layer, keras.layers.Layer):
            return type(layer).from_config(layer.get_config())
        held = {
            names: attention
            for names, attention in _find_attention(layer, ())
            if self._is_selected(_path(path, *names))
        }
        if not held:
            new = type(layer).from_config(layer.get_config())
            self.copies.append((layer, new))
            return new
        if isinstance(layer, keras.Model):
            graph = functional_graph(layer, "swap_attention")
            return self.clone_graph(graph, path)
        for names in held:
            if len(names) > 1:
                raise ValueError(
                    "`swap_attention` reaches the attention that a layer of a "
                    "model holds as an attribute, and no deeper. Received: "
                    f"layer `{_path(path, *names)}`. Leave it out with "
                    "argument `select`"
                )
        attention = {
            name: self._replace(old, _path(path, name))
            for (name,), old in held.items()
        }
        new = _hold(type(layer), layer.get_config(), attention)
        self.copies.append((layer, new))
        return new

    def _is_selected(self, path):
        return self.select is None or self.select(path)

    def _replace(self, layer, path):
        new = self.factory(**_shared_arguments(layer, path))
        is_new = isinstance(new, keras.layers.Layer) and not new.built
        if not is_new or any(new is other for _, other in self.pairs.values()):
            raise ValueError(
                "`swap_attention` needs a `factory` that returns a new layer "
                f"in each call. Received: {new!r} for layer `{path}`"
            )
        self.pairs[path] = layer, new
        return new

    def carry_weights(self):
        """Copies all weights of layers that are not attention themselves."""
        olds = {id(w) for old, _ in self.pairs.values() for w in old.weights}
        news = {id(w) for _, new in self.pairs.values() for w in new.weights}
        for old, new in self.copies:
            sources = [w for w in old.weights if id(w) not in olds]
            targets = [w for w in new.weights if id(w) not in news]
            for source, target in zip(sources, targets, strict=True):
                target.assign(source)

    def report(self):
        """Copies the weights of attention, and tells what was replaced."""
        return [
            AttentionSwap(
                path,
                type(old).__name__,
                type(new).__name__,
                *_carry_projections(old, new),
            )
            for path, (old, new) in self.pairs.items()
        ]


def _path(*names):
    return "/".join(name.lstrip("_") for name in names)


def is_attention(layer):
    """Whether this is a layer that `swap_attention` replaces."""
    if type(layer) in (
        keras.layers.MultiHeadAttention,
        keras.layers.GroupQueryAttention,
    ):
        return True
    # without an import of KerasHub, which imports TensorFlow
    return (
        isinstance(layer, keras.layers.MultiHeadAttention)
        and type(layer).__name__ == "CachedMultiHeadAttention"
        and type(layer).__module__.startswith("keras_hub.")
    )


def _find_attention(layer, names, seen=None):
    """Pairs of the names of attributes that lead to attention, and of it."""
    seen = set() if seen is None else seen
    for name, value in _sublayers(layer):
        if id(value) in seen:
            continue
        seen.add(id(value))
        if is_attention(value):
            yield (*names, name), value
        else:
            yield from _find_attention(value, (*names, name), seen)


def _sublayers(layer):
    """Pairs of a name and a layer, those in lists last."""
    if isinstance(layer, keras.Model):
        yield from ((inner.name, inner) for inner in layer.layers)
        return
    # dir() knows the layers that PyTorch keeps elsewhere than in `__dict__`
    names = set(dir(layer)) - set(dir(type(layer)))
    names = sorted(names, key=lambda name: (name.startswith("_"), name))
    values = {name: getattr(layer, name) for name in names}
    for name, value in values.items():
        if isinstance(value, keras.layers.Layer):
            yield name, value
    for name, value in values.items():
        if isinstance(value, (list, tuple)):
            for index, inner in enumerate(value):
                if isinstance(inner, keras.layers.Layer):
                    yield f"{name}[{index}]", inner


def _shared_arguments(layer, path):
    """The arguments of a layer that all attention layers of ours share."""
    config = layer.get_config()
    if config.get("use_gate"):
        raise _refusal(layer, path, "use_gate", True)
    axes = config.get("attention_axes")
    if axes is not None and tuple(axes) != (1,):
        raise _refusal(layer, path, "attention_axes", axes)
    if isinstance(layer, keras.layers.GroupQueryAttention):
        config["num_heads"] = config["num_query_heads"]
        config["key_dim"] = config["head_dim"]
    names = [
        *inspect.signature(AttentionLayer).parameters,
        *("name", "dtype", "trainable"),
    ]
    return {name: config[name] for name in names if name in config}


def _refusal(layer, path, option, value):
    return ValueError(
        f"`swap_attention` cannot replace a `{type(layer).__name__}` with "
        f"`{option}={value}`, which layers of `keras_attn` do not have. "
        f"Received: layer `{path}`. Leave it out with argument `select`"
    )


def _bind(layer, *args, **kwargs):
    """The arguments of a call by their names, but for those left out."""
    arguments = inspect.signature(layer.call).bind(*args, **kwargs).arguments
    arguments = {k: v for k, v in arguments.items() if v is not None}
    if arguments.get("key") is arguments["value"]:
        del arguments["key"]  # what it is by default
    return arguments


def _carry_projections(old, new):
    """Copies weights of the same name and shape.

    Returns:
        Tuples of the names of the weights of `new` that are copied, of those
        that are not, and of the weights of `old` that are left.
    """
    sources = _named_arrays(old)
    carried, fresh, used = [], [], set()
    for weight in new.weights:
        name = _name(new, weight)
        # global tokens start with the projections of all others
        source = name.replace("_global/", "/")
        array = sources.get(source)
        if array is None or array.shape != tuple(weight.shape):
            fresh.append(name)
            continue
        weight.assign(array)
        carried.append(name)
        used.add(source)
    dropped = [name for name in sources if name not in used]
    return tuple(carried), tuple(fresh), tuple(dropped)


def _named_arrays(layer):
    """The weights of a layer by their names, with as many keys as queries."""
    arrays = {}
    for weight in layer.weights:
        name, array = _name(layer, weight), keras.ops.convert_to_numpy(weight)
        if isinstance(layer, keras.layers.GroupQueryAttention):
            if name.startswith(("key/", "value/")):
                repeats = layer.num_query_heads // layer.num_key_value_heads
                array = np.repeat(array, repeats, axis=-2)  # (F, N, H)
        arrays[name] = array
    return arrays


def _name(layer, weight):
    """The name of a weight within a layer, such as `query/kernel`."""
    return weight.path.removeprefix(f"{layer.path}/")


def _hold(cls, config, attention):
    """Makes a layer that holds other attention than its class makes.

    Args:
        cls: Class of the layer.
        config: Its configuration.
        attention: Dictionary of unbuilt layers by the attributes they are for.
    """
    namespace = {"_swap_pending": dict(attention), "_swap_names": (*attention,)}
    holder = type(cls.__name__, (_Holder, cls), namespace)
    _register(holder)
    return super(_Holder, holder).from_config(config)


_register = keras.saving.register_keras_serializable(
    "keras_attn", "AttentionHolder"
)


@_register
class _Holder:
    """What makes a layer hold other attention, before the class of the layer.

    There is a class for each instance, made by `_hold()`. It puts the new
    layers into the attributes as soon as the class of the layer assigns its
    own to them, so that those never become a part of it.
    """

    def __setattr__(self, name, value):
        is_layer = isinstance(value, keras.layers.Layer)
        if name in self._swap_pending and is_layer and is_attention(value):
            value = self._swap_pending.pop(name)
        super().__setattr__(name, value)

    def get_config(self):
        cls = type(self).__bases__[1]
        attention = {}
        for name in self._swap_names:
            layer = self._swap_pending.get(name) or getattr(self, name)
            attention[name] = keras.saving.serialize_keras_object(layer)
            # the layer around it builds it
            attention[name].pop("build_config", None)
        layer = cls.from_config(super().get_config())
        return {
            "layer": keras.saving.serialize_keras_object(layer),
            "attention": attention,
        }

    @classmethod
    def from_config(cls, config):
        layer, attention = (
            keras.saving.deserialize_keras_object(config[part])
            for part in ("layer", "attention")
        )
        return _hold(type(layer), layer.get_config(), attention)
