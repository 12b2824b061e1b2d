"""Data sets for models that carry a state from batch to batch."""

import keras
import numpy as np

__all__ = ["ResumeSegments", "TokenSegments"]


class TokenSegments(keras.utils.PyDataset):
    """Cuts a text into the segments of truncated backpropagation through time.

    The text is divided into `batch_size` rows, which are read side by side.
    Segment `i + 1` of a row continues segment `i`, and the targets are the
    tokens that come next, so that a stateful model, such as
    `keras_attn.models.SHARNN(..., stateful=True)`, reads each row as one text.
    `reset` tells it where a row starts over.

    The batches must come in order, which Keras has to be told of:
    `model.fit(segments, shuffle=False)`.

    By default the text is read in segments of `segment_length`. As the recipe
    of [SHA-RNN](https://arxiv.org/abs/1911.11423) has it, `random_lengths`
    varies them, so that segments begin at other positions in every pass:
    lengths are normal with standard deviation 5 around `segment_length`, or
    with a probability of 5 % around half of it, and at most `segment_length`.
    Shorter segments are padded to `segment_length`, so that nothing is
    compiled anew, and `padding_mask` marks the padding. So that each pass has
    as many segments as the one before, it starts at a random position.

    Args:
        tokens: One-dimensional integer array, the text.
        batch_size: Number of rows.
        segment_length: Length of the batches, and at most of the segments.
        random_lengths: Whether to draw the lengths of the segments.
        steps_per_epoch: Number of batches that make an epoch. Defaults to the
            number of them in the text. The next epoch goes on where this one
            ended, and the text starts over where it ends.
        seed: Integer seed of the lengths.

    Every batch is a function of `seed`, the number of the epoch, and its own
    number in the epoch. `ResumeSegments` tells the data set the epoch.

    Example:

    ```python
    import keras
    import numpy as np
    import keras_attn

    text = np.frombuffer(b"so it goes, and so it went. " * 40, dtype="uint8")
    segments = keras_attn.data.TokenSegments(
        text, batch_size=4, segment_length=32, random_lengths=True
    )
    model = keras_attn.models.SHARNN(
        256, hidden_dim=8, num_layers=2, memory_length=64, stateful=True
    )
    model.build((4, None))  # a state needs to know the number of rows
    model.compile(
        keras_attn.optimizers.MinTrustLamb(),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    model.fit(segments, epochs=2, shuffle=False, verbose=0)
    ```
    """

    def __init__(
        self,
        tokens,
        batch_size,
        segment_length,
        random_lengths=False,
        steps_per_epoch=None,
        seed=0,
    ):
        # more workers would fetch batches out of order
        super().__init__(workers=1, use_multiprocessing=False)
        tokens = np.asarray(tokens)
        length = (tokens.size - 1) // batch_size
        if tokens.ndim != 1 or length < segment_length:
            raise ValueError(
                f"`{type(self).__name__}` needs one-dimensional `tokens` that "
                "fill at least one segment of every row. Received: "
                f"tokens.shape={tokens.shape}, batch_size={batch_size}, "
                f"segment_length={segment_length}"
            )
        size = batch_size * length
        self.inputs = tokens[:size].reshape(batch_size, length)
        self.targets = tokens[1 : size + 1].reshape(batch_size, length)
        self.batch_size = batch_size
        self.segment_length = segment_length
        self.random_lengths = random_lengths
        self.segments_per_pass = (
            length // segment_length
            if random_lengths
            else -(-length // segment_length)
        )
        self.steps_per_epoch = steps_per_epoch or self.segments_per_pass
        self.seed = seed
        self.epoch = 0
        self._cuts_of_pass = (None, None)
        self._last_index = -1

    def __len__(self):
        return self.steps_per_epoch

    def on_epoch_end(self):
        """Starts over with the next batch."""
        self._last_index = -1

    def __getitem__(self, index):
        if index > self._last_index + 1:
            raise ValueError(
                f"The batches of `{type(self).__name__}` were asked for out of "
                "order, but the state is carried from one to the next. Pass "
                "`shuffle=False` to `fit()`. Received: "
                f"index={index} after {self._last_index}"
            )
        self._last_index = index
        step = self.epoch * self.steps_per_epoch + index
        number, segment = divmod(step, self.segments_per_pass)
        cuts = self._cuts(number)
        start, stop = cuts[segment], cuts[segment + 1]
        padding = [(0, 0), (0, self.segment_length - (stop - start))]
        inputs = {
            "token_ids": np.pad(self.inputs[:, start:stop], padding),
            "reset": np.full((self.batch_size,), segment == 0),
        }
        if self.random_lengths or self.inputs.shape[1] % self.segment_length:
            mask = np.ones((self.batch_size, stop - start), dtype=bool)
            inputs["padding_mask"] = np.pad(mask, padding)
        targets = np.pad(self.targets[:, start:stop], padding)
        inputs["token_ids"] = inputs["token_ids"].astype("int32")
        return inputs, targets.astype("int32")

    def _cuts(self, number):
        """Where the segments of a pass over the text start and end."""
        if self._cuts_of_pass[0] != number:
            self._cuts_of_pass = (number, self._draw_cuts(number))
        return self._cuts_of_pass[1]

    def _draw_cuts(self, number):
        count, longest = self.segments_per_pass, self.segment_length
        length = self.inputs.shape[1]
        if not self.random_lengths:
            return np.minimum(np.arange(count + 1) * longest, length)
        random = np.random.default_rng((self.seed, number))
        center = np.where(random.random(count) < 0.05, longest / 2, longest)
        lengths = np.rint(random.normal(center, 5.0)).astype(int)
        lengths = np.clip(lengths, min(5, longest), longest)
        start = random.integers(length - lengths.sum() + 1)
        return start + np.concatenate([[0], np.cumsum(lengths)])


class ResumeSegments(keras.callbacks.Callback):
    """Tells a `TokenSegments` which epoch begins.

    `fit()` then reads the part of the text that belongs to the epoch, also if
    `keras.callbacks.BackupAndRestore` or `initial_epoch` let it begin with
    another one than the first.

    Args:
        segments: The `TokenSegments` that the model is trained on.

    Example:

    ```python
    import numpy as np
    import keras_attn

    segments = keras_attn.data.TokenSegments(
        np.arange(1000) % 7, batch_size=4, segment_length=32, steps_per_epoch=5
    )
    callback = keras_attn.data.ResumeSegments(segments)
    callback.on_epoch_begin(3)
    inputs, targets = segments[0]  # the 15th batch
    ```
    """

    def __init__(self, segments):
        super().__init__()
        self.segments = segments

    def on_epoch_begin(self, epoch, logs=None):
        self.segments.epoch = epoch
