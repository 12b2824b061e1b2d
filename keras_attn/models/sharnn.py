"""The SHA-RNN language model."""

import inspect

import keras
from keras import ops

from keras_attn.layers.padding import AttachMask
from keras_attn.layers.sharnn_block import SHARNNBlock
from keras_attn.models.generation import Generator
from keras_attn.models.generation import power_of_two
from keras_attn.utils import check_positive_integers
from keras_attn.utils import check_rates

_PAPER = {
    "vocabulary_size": 205,
    "hidden_dim": 1024,
    "intermediate_dim": 4096,
    "num_layers": 4,
    "memory_length": 5000,
    "dropout": 0.1,
    "lstm_initializer": "paper",
}


@keras.saving.register_keras_serializable(package="keras_attn")
class SHARNN(keras.Model):
    """Language model of LSTMs with a single head of attention.

    This is the whole model of [Single Headed Attention
    RNN](https://arxiv.org/abs/1911.11423) (Merity, 2019): an embedding, a
    stack of `keras_attn.layers.SHARNNBlock`, and a softmax that shares its
    weights with the embedding. It gives the logits of the next token at every
    position, and has no positional encoding, for the LSTMs know the order.

    A text is read in segments of any length. What is carried from segment to
    segment is the state, see `SHARNNBlock`. It may be handled in three ways:

    * `model(tokens)` starts from zeros, and forgets.
    * `logits, state = model(tokens, state=state)` takes the state and returns
      the next one. The first one is `model.initial_state(batch_size)`.
    * `SHARNN(..., stateful=True)` keeps it in variables from batch to batch,
      which makes `fit()` on consecutive segments, such as those of
      `keras_attn.data.TokenSegments`, truncated backpropagation through time.

    Args:
        vocabulary_size: Number of different tokens.
        hidden_dim: Number of features of each position, `F`.
        intermediate_dim: Number of features inside the Boom layers. Defaults
            to four times `hidden_dim`.
        num_layers: Number of blocks.
        attention_layers: The blocks that attend: `"penultimate"`, the last
            but one (or the only one), `"all"`, `"none"`, or a list of
            indices.
        memory_length: Number of positions that can be attended from the last
            position of a segment. The weights do not depend on it.
        tie_weights: Whether the output layer uses the embedding's weights.
        dropout: Rate of every dropout below that is not set.
        embedding_dropout: Dropout rate of the embedded tokens.
        lstm_dropout: Dropout rate of the output of each LSTM.
        query_dropout: Dropout rate of the query of the attention.
        value_dropout: Dropout rate of its values.
        attention_dropout: Dropout rate of its weights.
        attention_output_dropout: Dropout rate of its output.
        boom_dropout: Dropout rate of the features inside Boom.
        boom_output_dropout: Dropout rate of the output of Boom.
        output_dropout: Dropout rate of the features that logits are made of.
        residual: See `SHARNNBlock`.
        num_heads: Number of attention heads.
        value_gate: See `keras_attn.layers.SingleHeadAttention`.
        use_key_projection: See `keras_attn.layers.SingleHeadAttention`.
        use_value_projection: See `keras_attn.layers.SingleHeadAttention`.
        output_mixing: See `keras_attn.layers.SingleHeadAttention`.
        down: See `keras_attn.layers.Boom`.
        activation: See `keras_attn.layers.Boom`.
        lstm_initializer: See `SHARNNBlock`.
        stateful: Whether to keep the state in variables. The first call, or
            `build()`, then fixes the batch size. Training and inference have
            a state each, so that validation does not disturb training.
        seed: Integer seed of the dropout.
        **kwargs: Arguments of `keras.Model`, such as `name` or `dtype`.

    Call arguments:
        inputs: Integer tensor of shape `(B, T)`, or a dictionary of it as
            `token_ids`, and of `padding_mask` and `reset` where needed.
        padding_mask: Boolean tensor of shape `(B, T)`, `False` for padding,
            which enters neither memory nor state, and neither loss nor
            metrics if it comes in the dictionary. It may be anywhere.
        state: What `initial_state()` or the previous call returned.
        reset: Boolean tensor of shape `(B,)`, `True` for the samples that
            start anew, from a state of zeros.
        return_attention_scores: Whether to return the attention weights.

    Returns:
        Logits of shape `(B, T, vocabulary_size)`, in float32. With
        `return_attention_scores`, also a list of the weights of each block
        that attends, of shape `(B, num_heads, T, M + T)`. With `state`, also
        the new state, a list with an entry per block.

    Example:

    ```python
    import keras
    import keras_attn

    model = keras_attn.models.SHARNN(
        vocabulary_size=256, hidden_dim=16, num_layers=2, memory_length=100
    )
    tokens = keras.random.randint((2, 11), 0, 256)
    logits = model(tokens)  # (2, 11, 256)

    state = model.initial_state(batch_size=2)
    logits, state = model(tokens, state=state)
    logits, state = model(tokens, state=state)
    ```
    """

    presets = {
        "sha_lstm": {**_PAPER, "attention_layers": "none"},
        "sha_rnn_single_head": {**_PAPER, "attention_layers": "penultimate"},
        "sha_rnn_head_per_layer": {**_PAPER, "attention_layers": "all"},
    }

    def __init__(
        self,
        vocabulary_size,
        hidden_dim,
        intermediate_dim=None,
        num_layers=4,
        attention_layers="penultimate",
        memory_length=5000,
        tie_weights=True,
        dropout=0.0,
        embedding_dropout=None,
        lstm_dropout=None,
        query_dropout=None,
        value_dropout=None,
        attention_dropout=None,
        attention_output_dropout=None,
        boom_dropout=None,
        boom_output_dropout=None,
        output_dropout=None,
        residual=False,
        num_heads=1,
        value_gate="overparam",
        use_key_projection=False,
        use_value_projection=False,
        output_mixing=False,
        down="sum",
        activation="quick_gelu",
        lstm_initializer="keras",
        stateful=False,
        seed=None,
        **kwargs,
    ):
        # the state must stay float32 on its way in
        super().__init__(autocast=False, **kwargs)
        if intermediate_dim is None:
            intermediate_dim = 4 * hidden_dim
        check_positive_integers(
            self,
            vocabulary_size=vocabulary_size,
            hidden_dim=hidden_dim,
            intermediate_dim=intermediate_dim,
            num_layers=num_layers,
        )
        self.vocabulary_size = vocabulary_size
        self.hidden_dim = hidden_dim
        self.intermediate_dim = intermediate_dim
        self.num_layers = num_layers
        self.attention_layers = attention_layers
        self.memory_length = memory_length
        self.tie_weights = tie_weights
        self.dropout = dropout
        self.embedding_dropout = embedding_dropout
        self.lstm_dropout = lstm_dropout
        self.query_dropout = query_dropout
        self.value_dropout = value_dropout
        self.attention_dropout = attention_dropout
        self.attention_output_dropout = attention_output_dropout
        self.boom_dropout = boom_dropout
        self.boom_output_dropout = boom_output_dropout
        self.output_dropout = output_dropout
        self.residual = residual
        self.num_heads = num_heads
        self.value_gate = value_gate
        self.use_key_projection = use_key_projection
        self.use_value_projection = use_value_projection
        self.output_mixing = output_mixing
        self.down = down
        self.activation = activation
        self.lstm_initializer = lstm_initializer
        self.stateful = stateful
        self.seed = seed
        self.supports_masking = True
        self.attach_mask = AttachMask()

        attending = self._attending_layers()
        self.embedding = keras.layers.ReversibleEmbedding(
            vocabulary_size,
            hidden_dim,
            tie_weights=tie_weights,
            embeddings_initializer=keras.initializers.RandomNormal(
                stddev=0.1 * hidden_dim**-0.5
            ),
            reverse_dtype="float32",
            dtype=self.dtype_policy,
            name="embedding",
        )
        self.embedding_dropout_layer = self._add_dropout(
            "embedding_dropout", seed
        )
        # far enough apart for the dropouts of a block to count on
        seeds = [
            None if seed is None else seed + 16 * (index + 1)
            for index in range(num_layers + 1)
        ]
        self.blocks = [
            SHARNNBlock(
                intermediate_dim,
                attention=index in attending,
                memory_length=memory_length,
                residual=residual,
                num_heads=num_heads,
                value_gate=value_gate,
                use_key_projection=use_key_projection,
                use_value_projection=use_value_projection,
                output_mixing=output_mixing,
                down=down,
                activation=activation,
                lstm_dropout=self._rate("lstm_dropout"),
                query_dropout=self._rate("query_dropout"),
                value_dropout=self._rate("value_dropout"),
                attention_dropout=self._rate("attention_dropout"),
                attention_output_dropout=self._rate("attention_output_dropout"),
                boom_dropout=self._rate("boom_dropout"),
                boom_output_dropout=self._rate("boom_output_dropout"),
                lstm_initializer=lstm_initializer,
                stateful=stateful,
                seed=seeds[index],
                dtype=self.dtype_policy,
                name=f"block_{index}",
            )
            for index in range(num_layers)
        ]
        self.output_dropout_layer = self._add_dropout(
            "output_dropout", seeds[-1]
        )
        self._generator = Generator(self)
        if not stateful:  # nothing depends on the shape of the input
            self.build((None, None))

    @classmethod
    def from_preset(cls, name, **overrides):
        """Creates one of the paper's models, with fresh weights.

        Args:
            name: `"sha_lstm"` (no attention), `"sha_rnn_single_head"` or
                `"sha_rnn_head_per_layer"`, as trained on enwik8.
            **overrides: Arguments of the constructor that differ, such as
                `vocabulary_size`.

        Returns:
            A `SHARNN`.
        """
        if name not in cls.presets:
            raise ValueError(
                f"`{cls.__name__}` has the presets {tuple(cls.presets)}. "
                f"Received: name={name!r}"
            )
        return cls(**{**cls.presets[name], **overrides})

    def _attending_layers(self):
        """The indices of the blocks that attend."""
        layers = range(self.num_layers)
        named = {"penultimate": layers[-2:][:1], "all": layers, "none": ()}
        chosen = self.attention_layers
        if isinstance(chosen, str) and chosen in named:
            return set(named[chosen])
        if isinstance(chosen, (list, tuple)) and set(chosen) <= set(layers):
            return set(chosen)
        raise ValueError(
            f"`{type(self).__name__}` needs `attention_layers` to be one of "
            f"{tuple(named)}, or a list of indices below num_layers="
            f"{self.num_layers}. Received: attention_layers={chosen!r}"
        )

    def _rate(self, name):
        rate = getattr(self, name)
        rate = self.dropout if rate is None else rate
        check_rates(self, **{name: rate})
        return rate

    def _add_dropout(self, name, seed):
        return keras.layers.Dropout(
            self._rate(name), seed=seed, dtype=self.dtype_policy
        )

    def build(self, input_shape):
        if isinstance(input_shape, dict):
            input_shape = input_shape["token_ids"]
        self.embedding.build(input_shape)
        for block in self.blocks:
            block.build((input_shape[0], None, self.hidden_dim))
        self.output_bias = self.add_weight(
            shape=(self.vocabulary_size,),
            initializer="zeros",
            name="output_bias",
        )

    def initial_state(self, batch_size, memory_length=None):
        """Creates the state from which the first segment starts, of zeros.

        Args:
            batch_size: Number of sequences.
            memory_length: Size of the memory. Defaults to that of the model,
                but may differ from it, in training as in inference.

        Returns:
            List with a dictionary of tensors per block, for the call argument
            `state`.
        """
        return [
            block.initial_state(batch_size, memory_length)
            for block in self.blocks
        ]

    def reset_state(self):
        """Sets the states of a stateful model back to zeros."""
        for block in self.blocks:
            block.reset_state()

    def call(
        self,
        inputs,
        padding_mask=None,
        state=None,
        reset=None,
        return_attention_scores=False,
        training=None,
    ):
        token_ids, padding_mask, reset = _unpack(inputs, padding_mask, reset)
        self._check_call(token_ids, state, return_attention_scores)
        mask = order = None
        if padding_mask is not None:
            mask, order = _padding_last(padding_mask)
            token_ids = ops.where(
                mask, _reorder(token_ids, order), ops.zeros_like(token_ids)
            )
        x = self.embedding(token_ids)
        x = self.embedding_dropout_layer(x, training=training)
        all_scores, new_state = [], []
        for index, block in enumerate(self.blocks):
            results = block(
                x,
                mask=mask,
                state=None if state is None else state[index],
                reset=reset,
                return_attention_scores=(
                    return_attention_scores and block.attention
                ),
                training=training,
            )
            results = results if isinstance(results, tuple) else (results,)
            x, *extras = results
            if state is not None:
                new_state.append(extras.pop())
            all_scores += extras
        x = self.output_dropout_layer(x, training=training)
        if order is not None:
            inverse = ops.argsort(order, axis=1)
            x = _reorder(x, inverse)
            all_scores = [_reorder_scores(s, inverse) for s in all_scores]
        logits = self.embedding(x, reverse=True)
        logits = logits + ops.cast(self.output_bias, logits.dtype)
        if padding_mask is not None:
            padding_mask = ops.cast(padding_mask, "bool")
            logits = self.attach_mask(logits, mask=padding_mask)
        outputs = [logits]
        if return_attention_scores:
            outputs.append(all_scores)
        if state is not None:
            outputs.append(new_state)
        return tuple(outputs) if len(outputs) > 1 else outputs[0]

    def _check_call(self, token_ids, state, return_attention_scores):
        name = type(self).__name__
        is_float = keras.backend.is_float_dtype(token_ids.dtype)
        if len(token_ids.shape) != 2 or is_float:
            raise ValueError(
                f"`{name}` needs integer tokens of shape (batch, length). "
                f"Received: shape={tuple(token_ids.shape)}, "
                f"dtype={token_ids.dtype}"
            )
        if return_attention_scores and not self._attending_layers():
            raise ValueError(f"No layer of this `{name}` attends to anything.")
        if state is not None and len(state) != self.num_layers:
            raise ValueError(
                f"`{name}` needs a `state` with an entry for each of its "
                f"{self.num_layers} layers. Received: {len(state)} entries"
            )

    def compute_mask(self, inputs, previous_mask=None):
        if isinstance(inputs, dict) and "padding_mask" in inputs:
            return ops.cast(inputs["padding_mask"], "bool")
        return None

    def compute_output_spec(
        self,
        inputs,
        padding_mask=None,
        state=None,
        reset=None,
        return_attention_scores=False,
        training=None,
    ):
        token_ids, *_ = _unpack(inputs, padding_mask, reset)
        self._check_call(token_ids, state, return_attention_scores)
        batch_size, length = token_ids.shape
        shape = (batch_size, length, self.hidden_dim)
        outputs = [
            keras.KerasTensor((batch_size, length, self.vocabulary_size))
        ]
        specs = [
            block.compute_output_spec(
                keras.KerasTensor(shape, dtype=self.compute_dtype),
                state=None if state is None else state[index],
                return_attention_scores=(
                    return_attention_scores and block.attention
                ),
            )
            for index, block in enumerate(self.blocks)
        ]
        if return_attention_scores:
            outputs.append(
                [
                    spec[1]
                    for spec, block in zip(specs, self.blocks, strict=True)
                    if block.attention
                ]
            )
        if state is not None:
            outputs.append([spec[-1] for spec in specs])
        return tuple(outputs) if len(outputs) > 1 else outputs[0]

    def collapse(self):
        """Folds the over-parameterised value gates into vectors.

        Returns:
            A `SHARNN` that computes the same, with `value_gate="vector"` and
            `2 * hidden_dim * (hidden_dim + 1)` parameters fewer for each layer
            that attends. It is not stateful.
        """
        if self.value_gate != "overparam":
            raise ValueError(
                'Only a model with `value_gate="overparam"` can collapse. '
                f"Received: value_gate={self.value_gate!r}"
            )
        config = {
            **self.get_config(),
            "value_gate": "vector",
            "stateful": False,
        }
        model = type(self).from_config(config)
        pairs = [
            (ours.attention_layer, theirs.attention_layer)
            for ours, theirs in zip(self.blocks, model.blocks, strict=True)
            if ours.attention
        ]
        folded = {
            id(w) for ours, _ in pairs for w in ours.value_gate_dense.weights
        }
        kept = [w for w in self.trainable_weights if id(w) not in folded]
        for weight, value in zip(model.weights, kept, strict=True):
            weight.assign(value)
        for ours, theirs in pairs:
            theirs.value_vector.assign(ours.compute_value_gate())
        return model

    def generate(
        self,
        prompt,
        max_new_tokens,
        temperature=1.0,
        top_k=None,
        top_p=None,
        seed=None,
        stream=None,
        memory_length=None,
    ):
        """Continues a text, token by token.

        The loop over tokens is compiled on TensorFlow and JAX, and eager on
        PyTorch. It neither uses nor changes the variables of a stateful model.

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
            memory_length: Size of the memory. Defaults to that of the model.

        Returns:
            Prompt and new tokens together: a string for a string, otherwise an
            integer array of shape `(T + max_new_tokens,)` or
            `(B, T + max_new_tokens)`.
        """
        if memory_length is None:
            memory_length = self.memory_length

        def make_state(batch_size, length):
            # what the memory can never hold need not be scored
            size = min(memory_length, power_of_two(length))
            return self.initial_state(batch_size, size)

        return self._generator(
            prompt,
            max_new_tokens,
            make_state,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            seed=seed,
            stream=stream,
        )

    def get_config(self):
        config = {
            name: getattr(self, name)
            for name in inspect.signature(SHARNN).parameters
            if name != "kwargs"
        }
        config["activation"] = self.blocks[0].get_config()["activation"]
        return {**super().get_config(), **config}


def _unpack(inputs, padding_mask, reset):
    """Token ids, mask and reset, out of a dictionary where there is one."""
    if isinstance(inputs, dict):
        if padding_mask is None:
            padding_mask = inputs.get("padding_mask")
        reset = inputs.get("reset") if reset is None else reset
        inputs = inputs["token_ids"]
    return inputs, padding_mask, reset


def _padding_last(mask):
    """Sorts the padding to the end, for blocks want it there.

    Returns:
        The mask after sorting, and the order, both of shape `(B, T)`.
    """
    mask = ops.cast(mask, "bool")
    length = ops.shape(mask)[1]
    places = ops.arange(length, dtype="int32")
    order = ops.argsort(ops.where(mask, places, places + length), axis=1)
    return _reorder(mask, order), order


def _reorder(x, order):
    """Puts the positions of `(B, T, ...)` into an order `(B, T)`."""
    order = ops.reshape(order, (*ops.shape(order), *[1] * (len(x.shape) - 2)))
    return ops.take_along_axis(x, order, axis=1)


def _reorder_scores(scores, order):
    """Puts queries and keys of `(B, N, T, M + T)` into an order `(B, T)`."""
    memory = ops.shape(scores)[3] - ops.shape(scores)[2]
    scores = ops.take_along_axis(scores, order[:, None, :, None], axis=2)
    own = ops.take_along_axis(
        scores[..., memory:], order[:, None, None, :], axis=3
    )
    return ops.concatenate([scores[..., :memory], own], axis=3)
