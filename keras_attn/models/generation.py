"""Generates text with a language model that carries a state."""

import codecs

import keras
import numpy as np
from keras import ops

_SEGMENT_LENGTH = 64  # positions of the prompt that are read at once
_TOKENS_PER_CALL = 32  # tokens that a call of the compiled loop makes


class Generator:
    """Continues texts with a model, in loops that are compiled once.

    The one public way to compile a function on every backend is `predict()`,
    so that the loops are models themselves. This is no layer, lest the model
    that owns it should own itself through it.

    Args:
        model: Model with a `vocabulary_size`, and a call `model(token_ids,
            state=state)` that returns logits and the new state.
    """

    def __init__(self, model):
        self.model = model
        self._reader = self._writer = None

    def __call__(
        self,
        prompt,
        max_new_tokens,
        make_state,
        temperature=1.0,
        top_k=None,
        top_p=None,
        seed=None,
        stream=None,
    ):
        """Continues a text, see `keras_attn.models.SHARNN.generate`.

        `make_state(batch_size, length)` returns the state from which texts of
        a length start.
        """
        if isinstance(prompt, str):
            return self._continue_text(
                prompt,
                max_new_tokens,
                make_state,
                temperature=temperature,
                top_k=top_k,
                top_p=top_p,
                seed=seed,
                stream=stream,
            )
        prompt = np.asarray(prompt)
        _check_arguments(prompt, max_new_tokens, temperature, top_k, top_p)
        tokens = np.atleast_2d(prompt).astype("int32")
        batch_size, length = tokens.shape

        def emit(new):
            if stream is not None and new.size:
                stream(new if prompt.ndim == 2 else new[0])

        state = make_state(batch_size, length + max_new_tokens)
        read, state = self._read(tokens, state)
        # the rest of the prompt is read by the loop that writes, token by
        # token, so that every program has one shape
        token, given = tokens[:, read], tokens[:, read + 1 :]
        options = self._sampling(temperature, top_k, top_p)
        random = np.random.default_rng(seed)
        pieces, missing = [tokens], max_new_tokens
        while missing > 0:
            now, given = np.split(given, [_TOKENS_PER_CALL], axis=1)
            start = now.shape[1]  # of what is new
            steps = min(start + missing, _TOKENS_PER_CALL)
            draws = np.zeros((_TOKENS_PER_CALL, batch_size), dtype="float32")
            draws[start:steps] = random.random(
                (steps - start, batch_size), dtype="float32"
            )
            new, state = self._write(
                {
                    "token_ids": token,
                    "given": np.pad(
                        now, [(0, 0), (0, _TOKENS_PER_CALL - start)]
                    ),
                    "given_length": np.int32(start),
                    "steps": np.int32(steps),
                    "state": state,
                    "random": draws,
                    **options,
                }
            )
            token, new = new[:, steps - 1], new[:, start:steps]
            emit(new)
            pieces.append(new)
            missing -= new.shape[1]
        tokens = np.concatenate(pieces, axis=1)
        return tokens if prompt.ndim == 2 else tokens[0]

    def _sampling(self, temperature, top_k, top_p):
        """The arguments of `sample()`, all of them numbers."""
        if top_k is None:
            top_k = self.model.vocabulary_size
        return {
            "temperature": np.float32(temperature or 1.0),
            "top_k": np.int32(top_k if temperature else 1),
            "top_p": np.float32(1.0 if top_p is None else top_p),
        }

    def _continue_text(
        self, prompt, max_new_tokens, make_state, stream, **arguments
    ):
        if self.model.vocabulary_size != 256:
            raise ValueError(
                "Only a model with a vocabulary of 256 bytes can continue a "
                "string. Pass a list of token ids. Received: "
                f"vocabulary_size={self.model.vocabulary_size}"
            )
        # a character may be cut in two by the end of a piece
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        tokens = self(
            list(prompt.encode()),
            max_new_tokens,
            make_state,
            stream=None
            if stream is None
            else lambda new: stream(decoder.decode(bytes(new.tolist()))),
            **arguments,
        )
        return bytes(tokens.tolist()).decode(errors="replace")

    def _read(self, tokens, state):
        """Carries the state past the whole segments of the prompt.

        Returns:
            The number of positions read, and the state after them. One token
            at least is left.
        """
        if self._reader is None:
            self._reader = _Reader(self.model)
        read = (tokens.shape[1] - 1) // _SEGMENT_LENGTH * _SEGMENT_LENGTH
        for start in range(0, read, _SEGMENT_LENGTH):
            segment = tokens[:, start : start + _SEGMENT_LENGTH]
            state = self._reader.predict_on_batch(
                {"token_ids": segment, "state": _to_numpy(state)}
            )
        return read, state

    def _write(self, inputs):
        if self._writer is None:
            self._writer = _Writer(self.model)
        return self._writer.predict_on_batch(
            {**inputs, "state": _to_numpy(inputs["state"])}
        )


class _Reader(keras.Model):
    """Reads a segment and returns the state after it."""

    def __init__(self, model):
        super().__init__(autocast=False, name="reader")
        self.model = model
        self.built = True

    def call(self, inputs):
        token_ids = ops.cast(inputs["token_ids"], "int32")
        _, state = self.model(token_ids, state=inputs["state"])
        return state


class _Writer(keras.Model):
    """Takes `steps` steps through a text, and returns tokens and the state.

    A step reads a token and yields the next, one of those that are given or,
    after them, a new one.
    """

    def __init__(self, model):
        super().__init__(autocast=False, name="writer")
        self.model = model
        self.built = True

    def call(self, inputs):
        steps, random = inputs["steps"], inputs["random"]
        given = ops.cast(inputs["given"], "int32")

        def write(step, token, tokens, state):
            logits, state = self.model(token[:, None], state=state)
            token = sample(
                logits[:, 0],
                ops.take(random, step, axis=0),
                inputs["temperature"],
                inputs["top_k"],
                inputs["top_p"],
            )
            token = ops.where(
                step < inputs["given_length"],
                ops.take(given, step, axis=1),
                token,
            )
            tokens = ops.slice_update(tokens, (0, step), token[:, None])
            return step + 1, token, tokens, state

        token = ops.cast(inputs["token_ids"], "int32")
        _, _, tokens, state = ops.while_loop(
            lambda step, *_: step < steps,
            write,
            (
                ops.zeros((), dtype="int32"),
                token,
                ops.zeros((ops.shape(token)[0], _TOKENS_PER_CALL), "int32"),
                inputs["state"],
            ),
        )
        return tokens, state


def sample(logits, random, temperature, top_k, top_p):
    """Draws a token from each row of logits.

    Args:
        logits: Float tensor of shape `(B, vocabulary_size)`.
        random: Tensor of shape `(B,)`, uniform in `[0, 1)`, which decides.
        temperature: Scalar that divides the logits.
        top_k: Scalar, the number of likeliest tokens to choose from.
        top_p: Scalar, the probability that the likeliest tokens to choose from
            have at least.

    Returns:
        Integer tensor of shape `(B,)`.
    """
    size = logits.shape[-1]
    logits, tokens = ops.top_k(logits / temperature, size)  # from the likeliest
    rank = ops.arange(size, dtype="int32")
    weights = ops.softmax(ops.where(rank < top_k, logits, -1e9), axis=-1)
    before = ops.cumsum(weights, axis=-1) - weights
    weights = ops.where((before < top_p) & (rank < top_k), weights, 0.0)
    reached = ops.cumsum(weights, axis=-1)
    threshold = random[:, None] * reached[:, -1:]
    chosen = ops.sum(ops.cast(reached <= threshold, "int32"), axis=-1)
    last = ops.sum(ops.cast(weights > 0, "int32"), axis=-1) - 1
    chosen = ops.minimum(chosen, last)  # rounding may reach past the end
    token = ops.take_along_axis(tokens, chosen[:, None], axis=-1)[:, 0]
    return ops.cast(token, "int32")


def _check_arguments(prompt, max_new_tokens, temperature, top_k, top_p):
    is_integer = np.issubdtype(prompt.dtype, np.integer)
    if prompt.ndim not in (1, 2) or prompt.size == 0 or not is_integer:
        raise ValueError(
            "`prompt` must have at least one token, in an integer array of "
            "shape (length,) or (batch, length). Received: "
            f"shape={prompt.shape}, dtype={prompt.dtype}"
        )
    for name, value, is_good in (
        ("max_new_tokens", max_new_tokens, max_new_tokens >= 0),
        ("temperature", temperature, temperature >= 0),
        ("top_k", top_k, top_k is None or top_k >= 1),
        ("top_p", top_p, top_p is None or 0 < top_p <= 1),
    ):
        if not is_good:
            raise ValueError(f"`{name}` is out of range. Received: {value}")


def power_of_two(size):
    """The smallest power of two not below `size`."""
    return 1 << (size - 1).bit_length()


def _to_numpy(state):
    return keras.tree.map_structure(ops.convert_to_numpy, state)
