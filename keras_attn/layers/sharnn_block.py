"""Block of the SHA-RNN language model."""

import inspect
import itertools

import keras
from keras import ops

from keras_attn.layers.adaptation import enable_lora
from keras_attn.layers.adaptation import quantized_dtype
from keras_attn.layers.boom import Boom
from keras_attn.layers.padding import merge_masks
from keras_attn.layers.padding import zero_padding
from keras_attn.layers.single_head_attention import SingleHeadAttention
from keras_attn.layers.streaming import state_spec
from keras_attn.ops.lstm_state import lstm_cell_state
from keras_attn.utils import check_choice
from keras_attn.utils import check_positive_integers
from keras_attn.utils import check_rates


@keras.saving.register_keras_serializable(package="keras_attn")
class SHARNNBlock(keras.layers.Layer):
    """LSTM, attention over a memory that outlives the segment, and Boom.

    This is the block of [SHA-RNN](https://arxiv.org/abs/1911.11423) (Merity,
    2019, figure 1). A sequence is consumed in segments. What a segment leaves
    behind is the state: the output and the cell of the LSTM, and a memory of
    the `memory_length` newest positions, all of which the attention of the
    next segment sees. The layer is causal. Time grows as
    `T * (T + memory_length)`.

    Segments may be of any length, 1 included, and differ from call to call.
    The first position of a segment sees `memory_length - T` positions before
    it, and the last one `memory_length` with itself, so that the cut into
    segments matters once the memory is full, and not before. The memory is a
    tensor of fixed size with a count of the slots in use, so that nothing is
    compiled anew from segment to segment. No gradient flows from one segment
    into the one before it.

    Padding must come last in the segment. It enters neither memory nor state,
    whatever it holds. It is not passed to the LSTM as a mask, for that would
    turn the fused kernels of the backends off.

    Args:
        intermediate_dim: Number of features inside `Boom`.
        attention: Whether the block attends at all.
        memory_length: Number of positions that can be attended from the last
            position of a segment.
        residual: Whether to add the output of the LSTM to its (normalized)
            input, instead of replacing it.
        num_heads: Number of attention heads.
        value_gate: See `SingleHeadAttention`.
        use_key_projection: See `SingleHeadAttention`.
        use_value_projection: See `SingleHeadAttention`.
        output_mixing: See `SingleHeadAttention`.
        down: See `Boom`.
        activation: See `Boom`.
        lstm_dropout: Dropout rate of the output of the LSTM.
        query_dropout: Dropout rate of the query of the attention.
        value_dropout: Dropout rate of its values.
        attention_dropout: Dropout rate of its weights.
        attention_output_dropout: Dropout rate of its output.
        boom_dropout: Dropout rate of the features inside `Boom`.
        boom_output_dropout: Dropout rate of its output.
        lstm_initializer: `"keras"` initializes the LSTM as
            `keras.layers.LSTM` does, `"paper"` as the author's program does,
            uniformly in `+-1 / sqrt(F)` and without a forget bias.
        stateful: Whether to keep the state from call to call in variables, as
            the recurrent layers of Keras do, which needs a fixed batch size.
            Training and inference have a state each, so that validation does
            not disturb training.
        seed: Integer seed of the dropout.
        **kwargs: Arguments of `keras.layers.Layer`, such as `name` or `dtype`.

    Call arguments:
        inputs: Tensor of shape `(B, T, F)`.
        mask: Boolean tensor of shape `(B, T)`, `False` for padding.
        state: What `initial_state()` or the previous call returned. The size
            of its memory need not be `memory_length`.
        reset: Boolean tensor of shape `(B,)`, `True` for the samples that
            start anew, from a state of zeros.
        return_attention_scores: Whether to return the attention weights.

    Returns:
        Tensor of shape `(B, T, F)`. With `return_attention_scores`, also
        the weights, `(B, num_heads, T, M + T)`. With `state`, also the new
        state, a dictionary of float32 tensors: `hidden` and `cell`, both
        `(B, F)`, and in a block that attends `memory`, `(B, M, F)`, newest
        last, and the count `memory_used`, `(B,)`.

    Example:

    ```python
    import keras
    import keras_attn

    block = keras_attn.layers.SHARNNBlock(64, memory_length=100)
    x = keras.random.normal((2, 11, 16))
    block.build(x.shape)
    state = block.initial_state(batch_size=2)
    y, state = block(x, state=state)  # the first 11 positions
    y, state = block(x, state=state)  # the next 11
    ```
    """

    def __init__(
        self,
        intermediate_dim,
        attention=True,
        memory_length=5000,
        residual=False,
        num_heads=1,
        value_gate="overparam",
        use_key_projection=False,
        use_value_projection=False,
        output_mixing=False,
        down="sum",
        activation="quick_gelu",
        lstm_dropout=0.0,
        query_dropout=0.0,
        value_dropout=0.0,
        attention_dropout=0.0,
        attention_output_dropout=0.0,
        boom_dropout=0.0,
        boom_output_dropout=0.0,
        lstm_initializer="keras",
        stateful=False,
        seed=None,
        **kwargs,
    ):
        # the state must stay float32 on its way in
        super().__init__(autocast=False, **kwargs)
        if memory_length != 0:
            check_positive_integers(self, memory_length=memory_length)
        check_choice(
            self, ("keras", "paper"), lstm_initializer=lstm_initializer
        )
        check_rates(
            self,
            lstm_dropout=lstm_dropout,
            attention_output_dropout=attention_output_dropout,
            boom_output_dropout=boom_output_dropout,
        )
        self.intermediate_dim = intermediate_dim
        self.attention = attention
        self.memory_length = memory_length
        self.residual = residual
        self.num_heads = num_heads
        self.value_gate = value_gate
        self.use_key_projection = use_key_projection
        self.use_value_projection = use_value_projection
        self.output_mixing = output_mixing
        self.down = down
        self.activation = activation
        self.lstm_dropout = lstm_dropout
        self.query_dropout = query_dropout
        self.value_dropout = value_dropout
        self.attention_dropout = attention_dropout
        self.attention_output_dropout = attention_output_dropout
        self.boom_dropout = boom_dropout
        self.boom_output_dropout = boom_output_dropout
        self.lstm_initializer = lstm_initializer
        self.stateful = stateful
        self.seed = seed
        self.supports_masking = True
        # sums over a whole book do not belong into half precision
        is_double = self.compute_dtype == "float64"
        self.state_dtype = "float64" if is_double else "float32"
        seeds = (
            itertools.repeat(None) if seed is None else itertools.count(seed)
        )
        (
            self.lstm_dropout_layer,
            self.attention_output_dropout_layer,
            self.boom_output_dropout_layer,
        ) = (
            keras.layers.Dropout(
                rate, seed=next(seeds), dtype=self.dtype_policy
            )
            for rate in (
                lstm_dropout,
                attention_output_dropout,
                boom_output_dropout,
            )
        )
        self.boom = Boom(
            intermediate_dim,
            down=down,
            activation=activation,
            dropout=boom_dropout,
            kernel_initializer=None,
            seed=next(seeds),
            dtype=self.dtype_policy,
            name="boom",
        )
        self.attention_layer = None
        if attention:
            self.attention_layer = SingleHeadAttention(
                num_heads=num_heads,
                value_gate=value_gate,
                use_key_projection=use_key_projection,
                use_value_projection=use_value_projection,
                output_mixing=output_mixing,
                dropout=attention_dropout,
                query_dropout=query_dropout,
                value_dropout=value_dropout,
                seed=next(seeds),
                dtype=self.dtype_policy,
                name="attention",
            )

    def build(self, input_shape):
        units = input_shape[-1]
        self.input_norm = self._add_norm("input_norm", units)
        self.lstm = self._add_lstm(units)
        if self.attention:
            self.memory_norm = self._add_norm("memory_norm", units)
            self.attention_norm = self._add_norm("attention_norm", units)
            self.attention_layer.build((None, None, units))
        self.residual_norm = self._add_norm("residual_norm", units)
        self.boom_norm = self._add_norm("boom_norm", units)
        self.boom.build((None, None, units))
        if self.stateful:
            self._add_states(input_shape[0])

    def _add_norm(self, name, units):
        norm = keras.layers.LayerNormalization(
            epsilon=1e-12, dtype=self.dtype_policy, name=name
        )
        norm.build((None, None, units))
        return norm

    def _add_lstm(self, units):
        initializers = {}
        if self.lstm_initializer == "paper":
            limit = units**-0.5
            initializers = {
                name: keras.initializers.RandomUniform(-scale, scale)
                for name, scale in (
                    ("kernel_initializer", limit),
                    ("recurrent_initializer", limit),
                    # the author's program adds two biases
                    ("bias_initializer", 2**0.5 * limit),
                )
            }
            initializers["unit_forget_bias"] = False
        lstm = keras.layers.LSTM(
            units,
            return_sequences=True,
            return_state=True,
            dtype=self.state_dtype,
            name="lstm",
            **initializers,
        )
        lstm.build((None, None, units))
        return lstm

    def _add_states(self, batch_size):
        """Adds the variables that carry the state of a stateful block."""
        if batch_size is None:
            raise ValueError(
                f"A stateful `{type(self).__name__}` needs a fixed batch "
                "size. Build it with one, as in `model.build((batch_size, "
                "None))`, or call it first on a batch."
            )
        self.training_state, self.inference_state = (
            {
                name: self.add_weight(
                    shape=value.shape,
                    initializer="zeros",
                    dtype=keras.backend.standardize_dtype(value.dtype),
                    trainable=False,
                    name=f"{phase}_{name}",
                )
                for name, value in self.initial_state(batch_size).items()
            }
            for phase in ("training", "inference")
        )

    def initial_state(self, batch_size, memory_length=None):
        """Creates the state from which the first segment starts, of zeros.

        Args:
            batch_size: Number of sequences.
            memory_length: Size of the memory. Defaults to that of the block,
                but may differ from it, in training as in inference.

        Returns:
            Dictionary of tensors, for the call argument `state`.
        """
        if memory_length is None:
            memory_length = self.memory_length
        units = self.lstm.units
        state = {
            name: ops.zeros((batch_size, units), dtype=self.state_dtype)
            for name in ("cell", "hidden")
        }
        if self.attention:
            state["memory"] = ops.zeros(
                (batch_size, memory_length, units), dtype=self.state_dtype
            )
            state["memory_used"] = ops.zeros((batch_size,), dtype="int32")
        return state

    def reset_state(self):
        """Sets the states of a stateful block back to zeros."""
        if not self.stateful:
            raise ValueError(
                f"Only a stateful `{type(self).__name__}` keeps a state that "
                "could be reset."
            )
        if self.built:
            for state in (self.training_state, self.inference_state):
                for variable in state.values():
                    variable.assign(ops.zeros(variable.shape, variable.dtype))

    def call(
        self,
        inputs,
        mask=None,
        inputs_mask=None,
        state=None,
        reset=None,
        return_attention_scores=False,
        training=None,
    ):
        self._check_call(inputs, state, return_attention_scores)
        variables = self._state_variables(state, training)
        carried = variables if state is None else state
        carried = self._enter(ops.shape(inputs)[0], carried, reset)
        mask = merge_masks(
            self, inputs.shape[:2], mask=mask, inputs_mask=inputs_mask
        )
        lengths = None
        x = ops.cast(inputs, self.compute_dtype)
        if mask is not None:
            x = zero_padding(x, mask)
            lengths = ops.sum(ops.cast(mask, "int32"), axis=1)

        x = self.input_norm(x)
        y, new_state = self._recur(x, carried, lengths)
        y = self.lstm_dropout_layer(y, training=training)
        x = x + y if self.residual else y
        scores = []
        if self.attention:
            value = self.memory_norm(x)
            x = self.attention_norm(x)
            memory, memory_mask = self._recall(carried, value, lengths)
            results = self.attention_layer(
                x,
                value,
                query_mask=mask,
                value_mask=mask,
                memory=memory,
                memory_mask=memory_mask,
                use_causal_mask=True,
                return_attention_scores=return_attention_scores,
                training=training,
            )
            if return_attention_scores:
                results, *scores = results
            x = x + self.attention_output_dropout_layer(
                results, training=training
            )
            new_state.update(self._remember(carried, value, lengths))
        boom = self.boom(self.boom_norm(x), training=training)
        boom = self.boom_output_dropout_layer(boom, training=training)
        outputs = [self.residual_norm(x) + boom, *scores]

        new_state = keras.tree.map_structure(ops.stop_gradient, new_state)
        if state is not None:
            outputs.append(new_state)
        elif self.stateful:
            for name, value in new_state.items():
                variables[name].assign(value)
        return tuple(outputs) if len(outputs) > 1 else outputs[0]

    def _state_variables(self, state, training):
        """The variables of the phase in a stateful block, unless overridden."""
        if not self.stateful or state is not None:
            return None
        return self.training_state if training else self.inference_state

    def _enter(self, batch_size, carried, reset):
        """The state at the start of a segment, `reset` where samples end."""
        if carried is None:  # a memory without entries need not be scored
            carried = self.initial_state(batch_size, memory_length=0)
        carried = {
            name: ops.convert_to_tensor(value)
            for name, value in carried.items()
        }
        if reset is None:
            return carried
        keep = ops.logical_not(ops.cast(reset, "bool"))
        return {
            name: ops.where(
                ops.reshape(keep, (-1, *[1] * (len(value.shape) - 1))),
                value,
                ops.zeros_like(value),
            )
            for name, value in carried.items()
        }

    def _recur(self, x, carried, lengths):
        """Runs the LSTM; returns its outputs and its state after `lengths`."""
        inputs = ops.cast(x, self.state_dtype)
        hidden, cell = (
            ops.cast(carried[name], self.state_dtype)
            for name in ("hidden", "cell")
        )
        if x.shape[1] == 1:  # spares a loop of one step
            _, (new_hidden, new_cell) = self.lstm.cell(
                inputs[:, 0], [hidden, cell]
            )
            outputs = new_hidden[:, None]
            if lengths is not None:
                taken = lengths[:, None] > 0
                new_hidden = ops.where(taken, new_hidden, hidden)
                new_cell = ops.where(taken, new_cell, cell)
        else:
            outputs, new_hidden, new_cell = self.lstm(
                inputs, initial_state=[hidden, cell]
            )
            if lengths is not None:
                new_hidden = ops.concatenate([hidden[:, None], outputs], axis=1)
                new_hidden = ops.take_along_axis(
                    new_hidden, lengths[:, None, None], axis=1
                )[:, 0]
                new_cell = lstm_cell_state(
                    inputs,
                    outputs,
                    lengths,
                    hidden,
                    cell,
                    self.lstm.cell.kernel,
                    self.lstm.cell.recurrent_kernel,
                    self.lstm.cell.bias,
                )
        outputs = ops.cast(outputs, self.compute_dtype)
        return outputs, {"hidden": new_hidden, "cell": new_cell}

    def _recall(self, carried, value, lengths):
        """The part of the memory that this segment sees, and its mask."""
        memory, used = carried["memory"], carried["memory_used"]
        size = ops.shape(memory)[1]
        slots = ops.arange(size, dtype="int32")
        if lengths is None:
            length = ops.shape(value)[1]
            return memory[:, length:], slots[length:] >= size - used[:, None]
        oldest = ops.maximum(size - used, lengths)
        return memory, slots >= oldest[:, None]

    def _remember(self, carried, value, lengths):
        """The memory with the positions of this segment, newest last."""
        memory, used = carried["memory"], carried["memory_used"]
        length = ops.shape(value)[1]
        size = ops.shape(memory)[1]
        together = ops.concatenate(
            [memory, ops.cast(value, memory.dtype)], axis=1
        )
        if lengths is None:
            memory = together[:, length:]
            used = used + length
        else:
            slots = ops.arange(size, dtype="int32") + lengths[:, None]
            memory = ops.take_along_axis(together, slots[:, :, None], axis=1)
            used = used + lengths
        return {"memory": memory, "memory_used": ops.minimum(used, size)}

    def _check_call(self, inputs, state, return_attention_scores):
        name = type(self).__name__
        if len(inputs.shape) != 3:
            raise ValueError(
                f"`{name}` needs inputs of shape (batch, length, features). "
                f"Received: inputs.shape={tuple(inputs.shape)}"
            )
        if return_attention_scores and not self.attention:
            raise ValueError(
                f"`{name}` with `attention=False` has no attention scores."
            )
        if state is None:
            if not self.stateful:
                return
            state = self.training_state
        batch_size, expected = inputs.shape[0], state["hidden"].shape[0]
        if None not in (batch_size, expected) and batch_size != expected:
            raise ValueError(
                f"The state of `{name}` was made for a batch of {expected}. "
                f"Received: inputs.shape={tuple(inputs.shape)}"
            )

    def compute_output_shape(self, input_shape):
        return input_shape

    def compute_output_spec(
        self, inputs, state=None, return_attention_scores=False, **kwargs
    ):
        self._check_call(inputs, state, return_attention_scores)
        outputs = [keras.KerasTensor(inputs.shape, dtype=self.compute_dtype)]
        batch_size, length, _ = inputs.shape
        if return_attention_scores:
            shape = (batch_size, self.num_heads, length, None)
            if state is None and not self.stateful:
                shape = (batch_size, self.num_heads, length, length)
            outputs.append(keras.KerasTensor(shape, dtype=self.compute_dtype))
        if state is not None:
            outputs.append(state_spec(state))
        return tuple(outputs) if len(outputs) > 1 else outputs[0]

    def load_own_variables(self, store):
        # The block's own variables are the states. Those of another batch or
        # memory are of no use, and must not keep the weights from loading.
        if self.stateful:
            states = (self.training_state, self.inference_state)
            expected = [v.shape for state in states for v in state.values()]
            shapes = [store[str(i)].shape for i in range(len(store.keys()))]
            if shapes == expected:
                super().load_own_variables(store)

    enable_lora = enable_lora

    def get_config(self):
        config = {
            name: getattr(self, name)
            for name in inspect.signature(SHARNNBlock).parameters
            if name != "kwargs"
        }
        config["activation"] = self.boom.get_config()["activation"]
        return {**super().get_config(), **config, **quantized_dtype(self)}
