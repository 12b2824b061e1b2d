"""The Transformer, with attention of any kind."""

import inspect

import keras
import numpy as np
from keras import ops

from keras_attn.layers.padding import AttachMask
from keras_attn.layers.padding import to_boolean
from keras_attn.layers.padding import zero_padding
from keras_attn.layers.transformer_block import TransformerBlock
from keras_attn.models.generation import Generator
from keras_attn.models.generation import power_of_two
from keras_attn.models.transformer_presets import PRESETS
from keras_attn.utils import check_choice
from keras_attn.utils import check_positive_integers
from keras_attn.utils import check_rates
from keras_attn.utils import concrete_integer
from keras_attn.utils import serialize_sublayer


@keras.saving.register_keras_serializable(package="keras_attn")
class Transformer(keras.Model):
    """Encoder or language model with any attention, depth by depth.

    This is the model of [Attention Is All You
    Need](https://arxiv.org/abs/1706.03762) (Vaswani et al., 2017) without its
    division into two: embedded tokens and positions, a stack of
    `keras_attn.layers.TransformerBlock`, and a head. Which attention a block
    has is told by a function of its depth, so that layers may alternate or
    grow:

    ```python
    import keras_attn

    model = keras_attn.models.Transformer(
        vocabulary_size=1000,
        hidden_dim=32,
        num_layers=4,
        attention=lambda depth: keras_attn.SlidingWindowAttention(
            num_heads=2, key_dim=16, window_size=16 * 2**depth
        ),
        max_length=512,
        head="classes",
        num_classes=3,
    )
    ```

    With `causal=True` and attention that streams, the model takes and returns
    a state, and `generate()` continues texts.

    Args:
        vocabulary_size: Number of different tokens.
        hidden_dim: Number of features of each position, `F`.
        num_layers: Number of blocks.
        attention: A function of the depth, from 0 to `num_layers - 1`, that
            returns a new attention layer, or `None` for a block without. Or a
            list of these layers.
        intermediate_dim: Number of features inside the feed-forward layers.
            Defaults to four times `hidden_dim`.
        max_length: Number of positions that are learned. Needed for learned
            positions alone.
        positions: What tells the order. `"learned"` vectors; `"sinusoidal"`
            ones, as in the paper, where the embedded tokens are multiplied by
            the square root of `hidden_dim` too; or `None`.
        causal: Whether a position is blind to those after it.
        head: What is made of the features of the last block. `None` returns
            them; `"tokens"` returns the logits of a token at each position,
            which share the weights of the embedding; `"classes"` returns the
            logits of a class of the whole.
        num_classes: Number of classes, for `head="classes"`.
        pooling: What the class is decided from. `"first"` is the first
            position, `"mean"` the mean of all that are not padding.
        num_token_types: Number of types of tokens, such as those of question
            and answer. They are embedded and added. 0 for none.
        embedding_norm: Whether to normalize the embedded tokens.
        norm: See `TransformerBlock`. With `"pre"`, the features of the last
            block are normalized as well.
        norm_epsilon: See `TransformerBlock`.
        activation: See `TransformerBlock`.
        down: See `TransformerBlock`.
        dropout: Dropout rate of the embedded tokens, of each part of the
            blocks, and in the head for classes. That of attention weights is
            an argument of the attention layers.
        length_projection: A `keras_attn.layers.LengthProjection` whose matrix
            all layers of `LinformerAttention` take, which is the layerwise
            sharing of Linformer.
        seed: Integer seed of the dropout.
        **kwargs: Arguments of `keras.Model`, such as `name` or `dtype`. The
            attention layers keep their own dtype.

    Call arguments:
        inputs: Integer tensor of shape `(B, T)`, or a dictionary of it as
            `token_ids`, and of the call arguments below that are tensors.
        padding_mask: Boolean tensor of shape `(B, T)`, `False` for padding,
            which has no effect on anything else. In the dictionary it also
            keeps padding out of losses and metrics.
        token_types: Integer tensor of shape `(B, T)`. Defaults to zeros.
        state: What `initial_state()` or the previous call returned. The call
            then takes the next positions, one or more.
        return_attention_scores: Whether to return the attention weights.
        training: Whether to apply dropout.
        **kwargs: Call arguments of the attention layers, such as
            `global_mask`. Each goes to all layers that have it.

    Returns:
        Features of shape `(B, T, hidden_dim)`, logits of tokens `(B, T,
        vocabulary_size)` or of classes `(B, num_classes)`; logits are in
        float32. With `return_attention_scores`, also a list of the weights of
        each block that attends. With `state`, also the new state.

    Example:

    ```python
    import keras
    import keras_attn

    model = keras_attn.models.Transformer(
        vocabulary_size=256,
        hidden_dim=16,
        num_layers=2,
        attention=lambda depth: keras_attn.LinearAttention(2, 8),
        positions="sinusoidal",
        causal=True,
        head="tokens",
    )
    logits = model(keras.Input((None,), dtype="int32"))  # (B, T, 256)
    ```
    """

    presets = PRESETS

    def __init__(
        self,
        vocabulary_size,
        hidden_dim,
        num_layers,
        attention,
        intermediate_dim=None,
        max_length=None,
        positions="learned",
        causal=False,
        head=None,
        num_classes=None,
        pooling="first",
        num_token_types=0,
        embedding_norm=False,
        norm="pre",
        norm_epsilon=1e-5,
        activation="gelu",
        down="dense",
        dropout=0.0,
        length_projection=None,
        seed=None,
        **kwargs,
    ):
        # the state must stay as it is on its way in
        super().__init__(autocast=False, **kwargs)
        if intermediate_dim is None:
            intermediate_dim = 4 * hidden_dim
        check_positive_integers(
            self,
            vocabulary_size=vocabulary_size,
            hidden_dim=hidden_dim,
            num_layers=num_layers,
            intermediate_dim=intermediate_dim,
            # 0 types are none, but -1 would be a mistake
            num_token_types=num_token_types + 1,
        )
        check_choice(self, ("learned", "sinusoidal", None), positions=positions)
        if positions == "learned":
            check_positive_integers(self, max_length=max_length)
        if positions == "sinusoidal" and hidden_dim % 2:
            raise ValueError(
                f"`{type(self).__name__}` needs an even `hidden_dim` for "
                f"sinusoidal positions. Received: hidden_dim={hidden_dim}"
            )
        check_choice(self, (None, "tokens", "classes"), head=head)
        check_choice(self, ("first", "mean"), pooling=pooling)
        if head == "classes":
            check_positive_integers(self, num_classes=num_classes)
        check_rates(self, dropout=dropout)
        self.vocabulary_size = vocabulary_size
        self.hidden_dim = hidden_dim
        self.num_layers = num_layers
        self.intermediate_dim = intermediate_dim
        self.max_length = max_length
        self.positions = positions
        self.causal = causal
        self.head = head
        self.num_classes = num_classes
        self.pooling = pooling
        self.num_token_types = num_token_types
        self.embedding_norm = embedding_norm
        self.norm = norm
        self.norm_epsilon = norm_epsilon
        self.activation = activation
        self.down = down
        self.dropout = dropout
        self.length_projection = length_projection
        self.seed = seed
        self.supports_masking = True
        self.attach_mask = AttachMask()

        self.token_embedding = keras.layers.ReversibleEmbedding(
            vocabulary_size,
            hidden_dim,
            embeddings_initializer=self._embeddings_initializer(),
            reverse_dtype="float32",
            dtype=self.dtype_policy,
            name="token_embedding",
        )
        # features that carry a mask come back to it for logits
        self.token_embedding.supports_masking = True
        self.position_embedding = self.token_type_embedding = None
        if positions == "learned":
            self.position_embedding = self._add_embedding(
                "position_embedding", max_length
            )
        if num_token_types:
            self.token_type_embedding = self._add_embedding(
                "token_type_embedding", num_token_types
            )
        self.embedding_norm_layer = self.output_norm_layer = None
        if embedding_norm:
            self.embedding_norm_layer = self._add_norm("embedding_norm")
        if norm == "pre":
            self.output_norm_layer = self._add_norm("output_norm")
        self.embedding_dropout_layer = self._add_dropout(0)
        self.blocks = [
            TransformerBlock(
                layer,
                intermediate_dim,
                norm=norm,
                norm_epsilon=norm_epsilon,
                activation=activation,
                down=down,
                dropout=dropout,
                # far enough apart for the dropouts of a block to count on
                seed=None if seed is None else seed + 16 * (depth + 1),
                dtype=self.dtype_policy,
                name=f"block_{depth}",
            )
            for depth, layer in enumerate(self._attention_layers(attention))
        ]
        self.pooler = self.classifier = None
        if head == "classes":
            self.pooler = keras.layers.Dense(
                hidden_dim,
                activation="tanh",
                dtype=self.dtype_policy,
                name="pooler",
            )
            self.pooler_dropout_layer = self._add_dropout(1)
            self.classifier_dropout_layer = self._add_dropout(2)
            self.classifier = keras.layers.Dense(
                num_classes, dtype="float32", name="classifier"
            )
        if length_projection is not None:
            self._check_option("length_projection")
        self._generator = Generator(self)
        self.build((None, None))  # nothing depends on the shape of the input

    @classmethod
    def from_preset(cls, name, **overrides):
        """Creates one of the models of the papers, with fresh weights.

        Args:
            name: One of `Transformer.presets`, which
                `keras_attn/models/transformer_presets.py` and
                `docs/transformer.md` describe.
            **overrides: Arguments of the constructor that differ, such as
                `head` or `num_classes`.

        Returns:
            A `Transformer`.
        """
        if name not in cls.presets:
            raise ValueError(
                f"`{cls.__name__}` has the presets {tuple(cls.presets)}. "
                f"Received: name={name!r}"
            )
        return cls(**{**cls.presets[name](), **overrides})

    def _attention_layers(self, attention):
        """The attention layer of each block, from the function or the list."""
        name = type(self).__name__
        if callable(attention) and not isinstance(attention, keras.Layer):
            layers = [attention(depth) for depth in range(self.num_layers)]
        elif isinstance(attention, (list, tuple)):
            layers = list(attention)
        else:
            raise ValueError(
                f"`{name}` needs a function of the depth that returns a new "
                "attention layer, or a list of layers, for `attention`. "
                f"Received: attention={attention!r}"
            )
        if len(layers) != self.num_layers:
            raise ValueError(
                f"`{name}` needs an attention layer, or `None`, for each of "
                f"its num_layers={self.num_layers} blocks. Received: "
                f"{len(layers)} of them in `attention`"
            )
        ids = [id(layer) for layer in layers if layer is not None]
        if len(set(ids)) < len(ids):
            raise ValueError(
                f"`{name}` needs a layer of its own for each block, since "
                "shared ones come apart when the model is saved. Create them "
                "inside of the function `attention`."
            )
        return layers

    def _embeddings_initializer(self):
        # tokens as large as sinusoids, once they are scaled
        sinusoidal = self.positions == "sinusoidal"
        return keras.initializers.RandomNormal(
            stddev=self.hidden_dim**-0.5 if sinusoidal else 0.02
        )

    def _add_embedding(self, name, size):
        return keras.layers.Embedding(
            size,
            self.hidden_dim,
            embeddings_initializer=self._embeddings_initializer(),
            dtype=self.dtype_policy,
            name=name,
        )

    def _add_norm(self, name):
        return keras.layers.LayerNormalization(
            epsilon=self.norm_epsilon, dtype=self.dtype_policy, name=name
        )

    def _add_dropout(self, offset):
        return keras.layers.Dropout(
            self.dropout,
            seed=None if self.seed is None else self.seed + offset,
            dtype=self.dtype_policy,
        )

    def build(self, input_shape):
        shape = (None, None, self.hidden_dim)
        for layer in (
            self.token_embedding,
            self.position_embedding,
            self.token_type_embedding,
        ):
            if layer is not None:
                layer.build((None, None))
        for layer in (
            self.embedding_norm_layer,
            self.length_projection,
            *self.blocks,
            self.output_norm_layer,
        ):
            if layer is not None:
                layer.build(shape)
        if self.head == "tokens":
            self.output_bias = self.add_weight(
                shape=(self.vocabulary_size,),
                initializer="zeros",
                name="output_bias",
            )
        if self.head == "classes":
            self.pooler.build((None, self.hidden_dim))
            self.classifier.build((None, self.hidden_dim))

    def initial_state(self, batch_size, max_length=None):
        """Creates the state from which streaming starts.

        Args:
            batch_size: Number of sequences.
            max_length: Number of positions that will be streamed at most, for
                the mechanisms that must keep all of them. Defaults to
                `max_length` of the model.

        Returns:
            Dictionary of the number of positions read, `"length"`, and the
            states of the blocks, a list, for the call argument `state`.
        """
        self._check_streaming()
        if max_length is None:
            max_length = self.max_length
        return {
            "length": ops.zeros((), dtype="int32"),
            "blocks": [
                block.initial_state(batch_size, max_length)
                for block in self.blocks
            ],
        }

    def call(
        self,
        inputs,
        padding_mask=None,
        token_types=None,
        state=None,
        return_attention_scores=False,
        training=None,
        **kwargs,
    ):
        token_ids, padding_mask, token_types, options = _unpack(
            inputs, padding_mask, token_types, kwargs
        )
        self._check_call(token_ids, token_types, state, options)
        if padding_mask is not None:
            padding_mask = to_boolean(
                self, "padding_mask", padding_mask, token_ids.shape
            )
            token_ids = zero_padding(token_ids, padding_mask)
        start = None if state is None else state["length"]
        x = self._embed(token_ids, token_types, start)
        x = self.embedding_dropout_layer(x, training=training)
        if self.length_projection is not None:
            options["length_projection"] = self.length_projection(x)
        x, scores, states = self._through_blocks(
            x,
            state,
            return_attention_scores,
            options,
            mask=padding_mask,
            training=training,
        )
        if self.output_norm_layer is not None:
            x = self.output_norm_layer(x)
        outputs = [self._apply_head(x, padding_mask, training)]
        if return_attention_scores:
            outputs.append(scores)
        if state is not None:
            length = ops.cast(state["length"], "int32")
            length = length + ops.shape(token_ids)[1]
            outputs.append({"length": length, "blocks": states})
        return tuple(outputs) if len(outputs) > 1 else outputs[0]

    def _through_blocks(
        self,
        x,
        state,
        return_attention_scores,
        options,
        symbolic=False,
        **kwargs,
    ):
        """Calls the blocks, or only asks them for what they would return.

        Returns:
            The features `(B, T, F)`, the scores of each block that attends,
            and the new state of each block if there is a state.
        """
        all_scores, states = [], []
        for index, block in enumerate(self.blocks):
            call = block.compute_output_spec if symbolic else block
            attends = return_attention_scores and block.attention is not None
            results = call(
                x,
                use_causal_mask=self.causal and state is None,
                state=None if state is None else state["blocks"][index],
                return_attention_scores=attends,
                **_options_of(block.attention, options),
                **kwargs,
            )
            results = results if isinstance(results, tuple) else (results,)
            x, *extras = results
            if state is not None:
                states.append(extras.pop())
            all_scores += extras
        return x, all_scores, states

    def _embed(self, token_ids, token_types, start):
        """Adds up tokens, positions from `start` on, and types of tokens."""
        length = ops.shape(token_ids)[1]
        x = self.token_embedding(token_ids)
        if self.positions is not None:
            places = ops.arange(length, dtype="int32")
            if start is not None:
                places = places + ops.cast(start, "int32")
            if self.positions == "learned":
                vectors = self._learned_positions(places, start)
            else:
                x = x * self.hidden_dim**0.5
                vectors = _sinusoids(places, self.hidden_dim)
            x = x + ops.cast(vectors, x.dtype)
        if self.token_type_embedding is not None:
            if token_types is None:
                token_types = ops.zeros((1, 1), dtype="int32")
            x = x + self.token_type_embedding(token_types)
        if self.embedding_norm_layer is not None:
            x = self.embedding_norm_layer(x)
        return x

    def _learned_positions(self, places, start):
        """Vectors `(T, F)` of positions; NaN after the last that is learned."""
        end = concrete_integer(places[-1]) if start is not None else None
        self._check_length(None if end is None else end + 1)
        known = ops.minimum(places, self.max_length - 1)
        vectors = self.position_embedding(known)
        return ops.where((places == known)[:, None], vectors, float("nan"))

    def _apply_head(self, x, padding_mask, training):
        if self.head == "classes":
            x = _first(x) if self.pooling == "first" else _mean(x, padding_mask)
            x = self.pooler(self.pooler_dropout_layer(x, training=training))
            x = self.classifier_dropout_layer(x, training=training)
            return self.classifier(x)
        if self.head == "tokens":
            x = self.token_embedding(x, reverse=True)
            x = x + ops.cast(self.output_bias, x.dtype)
        if padding_mask is None:
            return x
        return self.attach_mask(x, mask=padding_mask)

    def _check_streaming(self):
        if not self.causal or self.head == "classes":
            raise ValueError(
                f"A `{type(self).__name__}` has a streaming form, and takes a "
                "`state`, if it is causal and has no head for classes. "
                f"Received: causal={self.causal}, head={self.head!r}"
            )

    def _check_length(self, length):
        too_long = isinstance(length, int) and self.positions == "learned"
        if too_long and length > self.max_length:
            raise ValueError(
                f"`{type(self).__name__}` has learned max_length="
                f"{self.max_length} positions. Received: {length} of them"
            )

    def _check_option(self, option):
        if not any(_takes(block.attention, option) for block in self.blocks):
            raise ValueError(
                f"`{type(self).__name__}` has no attention layer that takes "
                f"the call argument `{option}`."
            )

    def _check_call(self, token_ids, token_types, state, options):
        name = type(self).__name__
        is_float = keras.backend.is_float_dtype(token_ids.dtype)
        if len(token_ids.shape) != 2 or is_float:
            raise ValueError(
                f"`{name}` needs integer tokens of shape (batch, length). "
                f"Received: shape={tuple(token_ids.shape)}, "
                f"dtype={token_ids.dtype}"
            )
        self._check_length(token_ids.shape[1])
        if token_types is not None and not self.num_token_types:
            raise ValueError(
                f"`{name}` needs `num_token_types` to take `token_types`. "
                f"Received: num_token_types={self.num_token_types}"
            )
        for option in options:
            self._check_option(option)
        if state is not None:
            self._check_streaming()
            if len(state["blocks"]) != self.num_layers:
                raise ValueError(
                    f"`{name}` needs a `state` with an entry for each of its "
                    f"{self.num_layers} blocks. Received: "
                    f"{len(state['blocks'])} entries"
                )

    def compute_mask(self, inputs, previous_mask=None):
        is_sequence = self.head != "classes" and isinstance(inputs, dict)
        if is_sequence and inputs.get("padding_mask") is not None:
            return ops.cast(inputs["padding_mask"], "bool")
        return None

    def compute_output_spec(
        self,
        inputs,
        padding_mask=None,
        token_types=None,
        state=None,
        return_attention_scores=False,
        training=None,
        **kwargs,
    ):
        token_ids, padding_mask, token_types, options = _unpack(
            inputs, padding_mask, token_types, kwargs
        )
        self._check_call(token_ids, token_types, state, options)
        batch_size, length = token_ids.shape
        shape = (batch_size, length, self.hidden_dim)
        if self.length_projection is not None:
            options["length_projection"] = keras.KerasTensor(
                self.length_projection.compute_output_shape(shape),
                dtype=self.length_projection.compute_dtype,
            )
        x, scores, states = self._through_blocks(
            keras.KerasTensor(shape, dtype=self.compute_dtype),
            state,
            return_attention_scores,
            options,
            symbolic=True,
        )
        if self.head == "tokens":
            x = keras.KerasTensor((batch_size, length, self.vocabulary_size))
        if self.head == "classes":
            x = keras.KerasTensor((batch_size, self.num_classes))
        outputs = [x]
        if return_attention_scores:
            outputs.append(scores)
        if state is not None:
            length = keras.KerasTensor((), dtype="int32")
            outputs.append({"length": length, "blocks": states})
        return tuple(outputs) if len(outputs) > 1 else outputs[0]

    def generate(
        self,
        prompt,
        max_new_tokens,
        temperature=1.0,
        top_k=None,
        top_p=None,
        seed=None,
        stream=None,
    ):
        """Continues a text, token by token.

        The model must be causal, have the head for tokens, and attention that
        streams. The loop over tokens is compiled on TensorFlow and JAX, and
        eager on PyTorch.

        Args:
            prompt: Text to continue: a list of token ids, an integer array of
                shape `(T,)` or, for several texts, `(B, T)`. For a model of
                bytes, with a vocabulary of 256, also a string.
            max_new_tokens: Number of tokens to add.
            temperature: Divides the logits. `0` always takes the likeliest
                token.
            top_k: Number of likeliest tokens to choose from.
            top_p: Choose from the fewest likeliest tokens that together have
                at least this probability.
            seed: Integer seed of the choice. The same seed gives the same
                text, on every backend.
            stream: Callable that gets the new tokens as they come: pieces of
                text for a string, else integer arrays of shape `(n,)` or
                `(B, n)`.

        Returns:
            Prompt and new tokens together: a string for a string, otherwise an
            integer array of shape `(T + max_new_tokens,)` or
            `(B, T + max_new_tokens)`.
        """
        if self.head != "tokens":
            raise ValueError(
                f'A `{type(self).__name__}` needs `head="tokens"` to '
                f"generate. Received: head={self.head!r}"
            )
        return self._generator(
            prompt,
            max_new_tokens,
            self._make_state,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            seed=seed,
            stream=stream,
        )

    def _make_state(self, batch_size, length):
        """The state for texts of a length, in one of a few sizes."""
        self._check_length(length)
        size = power_of_two(length)
        if self.max_length is not None and length <= self.max_length:
            size = min(size, self.max_length)
        return self.initial_state(batch_size, size)

    def get_config(self):
        config = {
            name: getattr(self, name)
            for name in inspect.signature(Transformer).parameters
            if name not in ("attention", "kwargs")
        }
        config["attention"] = [
            serialize_sublayer(block.attention) for block in self.blocks
        ]
        config["length_projection"] = serialize_sublayer(self.length_projection)
        config["activation"] = self.blocks[0].get_config()["activation"]
        return {**super().get_config(), **config}

    @classmethod
    def from_config(cls, config):
        deserialize = keras.saving.deserialize_keras_object
        layers = {
            "attention": [deserialize(layer) for layer in config["attention"]],
            "length_projection": deserialize(config["length_projection"]),
        }
        return cls(**{**config, **layers})


def _unpack(inputs, padding_mask, token_types, options):
    """Tokens and call arguments, out of a dictionary where there is one."""
    options = dict(options)
    if isinstance(inputs, dict):
        options = {**inputs, **options}
        inputs = options.pop("token_ids")
        in_dictionary = options.pop("padding_mask", None)
        padding_mask = in_dictionary if padding_mask is None else padding_mask
        in_dictionary = options.pop("token_types", None)
        token_types = in_dictionary if token_types is None else token_types
    options = {k: v for k, v in options.items() if v is not None}
    return inputs, padding_mask, token_types, options


def _takes(attention, option):
    """Whether the signature of an attention layer has a call argument."""
    if attention is None:
        return False
    hook = getattr(attention, "attend", attention.call)
    return option in inspect.signature(hook).parameters


def _options_of(attention, options):
    """The call arguments that are for an attention layer."""
    return {k: v for k, v in options.items() if _takes(attention, k)}


def _sinusoids(places, size):
    """Sines and cosines `(T, size)` of positions, as in section 3.5."""
    rates = 10_000.0 ** (-np.arange(0, size, 2) / size)
    rates = ops.convert_to_tensor(rates, dtype="float32")
    angles = ops.cast(places, "float32")[:, None] * rates
    waves = ops.stack([ops.sin(angles), ops.cos(angles)], axis=-1)
    return ops.reshape(waves, (-1, size))


def _first(x):
    return x[:, 0]


def _mean(x, mask):
    """The mean of the positions of `(B, T, F)` that are not padding."""
    if mask is None:
        return ops.mean(x, axis=1)
    count = ops.sum(ops.cast(mask, x.dtype), axis=1, keepdims=True)
    return ops.sum(zero_padding(x, mask), axis=1) / ops.maximum(count, 1)
