"""Trains one model on many devices, in every way that the backends offer.

    python examples/distributed_training.py           # all that is installed
    python examples/distributed_training.py --quick   # smaller, in seconds
    python examples/distributed_training.py --backends jax

A language model of sliding windows and linear attention learns the pages of
our documentation, byte by byte. Each row of the table is one way to split the
work, compared to the same training on one device: how far off the losses are,
and what lies on each device. All devices are simulated on the CPU. JAX splits
batches, heads and sequences over eight of them by `keras.distribution`, PyTorch
runs `DistributedDataParallel` in two processes, and TensorFlow
`MirroredStrategy` on two logical devices.
"""

import argparse
import importlib.util
import json
import multiprocessing
import os
import pathlib
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).parent.parent
SIZES = {"hidden": 64, "layers": 2, "heads": 4, "length": 256, "steps": 10}
QUICK_SIZES = {"hidden": 16, "layers": 2, "heads": 4, "length": 64, "steps": 4}
BATCH = 8
LONG = 16  # how many texts one long sequence replaces


def texts(count, length, steps):
    """Batches of tokens and of those that follow, `(steps * count, length)`."""
    import numpy as np

    pages = sorted((ROOT / "docs").glob("*.md"))
    data = b"".join(page.read_bytes() for page in pages)
    needed = steps * count * length + 1
    data = np.frombuffer(data, "uint8").astype("int32")
    data = np.tile(data, -(-needed // len(data)))[:needed]
    shape = (steps * count, length)
    return data[:-1].reshape(shape), data[1:].reshape(shape)


def make_model(sizes):
    import keras

    import keras_attn

    keras.utils.set_random_seed(0)
    heads, size = sizes["heads"], sizes["hidden"] // sizes["heads"]
    model = keras_attn.models.Transformer(
        vocabulary_size=256,
        hidden_dim=sizes["hidden"],
        num_layers=sizes["layers"],
        attention=lambda depth: (
            keras_attn.LinearAttention(heads, size)
            if depth % 2
            else keras_attn.SlidingWindowAttention(heads, size, window_size=32)
        ),
        positions="sinusoidal",
        causal=True,
        head="tokens",
    )
    # `MirroredStrategy` builds models on floats, unless an input has a dtype
    tokens = keras.Input((None,), dtype="int32")
    return keras.Model(tokens, model(tokens))


def train(sizes, batch=BATCH, length=None):
    """Trains by `fit()`; returns the model and the loss of each step."""
    import keras

    length = length or sizes["length"]
    model = make_model(sizes)
    model.compile(
        keras.optimizers.Adam(1e-3),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    x, y = texts(batch, length, sizes["steps"])
    losses = []
    model.fit(
        x,
        y,
        batch_size=batch,
        shuffle=False,
        verbose=0,
        callbacks=[
            keras.callbacks.LambdaCallback(
                on_train_batch_end=lambda step, logs: losses.append(
                    float(logs["loss"])
                )
            )
        ],
    )
    return model, losses


def difference(losses, expected):
    return max(abs(a - b) for a, b in zip(losses, expected, strict=True))


def run_jax(sizes):
    """Splits batches, heads and sequences over eight devices."""
    import keras

    import keras_attn

    def mesh(*shape, names):
        devices = keras.distribution.list_devices()
        return keras.distribution.DeviceMesh(shape, names, devices)

    heads = keras_attn.distribution.layout_map(
        mesh(2, 4, names=["batch", "model"])
    )
    # weights are whole on each device, and each has a part of the sequence
    sequence = keras.distribution.LayoutMap(
        mesh(1, 8, names=["batch", "sequence"])
    )
    sequence[".*token_embedding/output"] = ("batch", "sequence", None)
    ways = {
        "batch over 8": keras.distribution.DataParallel(),
        "batch over 2, heads over 4": keras.distribution.ModelParallel(
            layout_map=heads, batch_dim_name="batch"
        ),
        "one sequence over 8": keras.distribution.ModelParallel(
            layout_map=sequence, batch_dim_name="batch"
        ),
    }
    expected = {}
    for name, way in ways.items():
        is_long = name.startswith("one")
        shape = (1, LONG * sizes["length"]) if is_long else (BATCH, None)
        if shape not in expected:
            model, losses = train(sizes, *shape)
            expected[shape] = losses
            kind = "one long sequence" if is_long else "a batch"
            yield f"one device, {kind}", 0.0, *memory(model, sizes, shape)
        keras.distribution.set_distribution(way)
        model, losses = train(sizes, *shape)
        off = difference(losses, expected[shape])
        yield name, off, *memory(model, sizes, shape)
        keras.distribution.set_distribution(None)


def memory(model, sizes, shape):
    """Bytes on a device of the weights, and of a step's intermediate values.

    The weights include what Adam keeps of them.
    """
    import jax
    import keras

    def loss(trained, others, x, y):
        logits, _ = model.stateless_call(trained, others, x, training=True)
        return keras.ops.mean(
            keras.losses.sparse_categorical_crossentropy(
                y, logits, from_logits=True
            )
        )

    distribution = keras.distribution.distribution()
    inputs = []
    for x in texts(shape[0], shape[1] or sizes["length"], steps=1):
        if distribution is not None:
            layout = distribution.get_data_layout(x.shape)
            x = keras.distribution.distribute_tensor(x, layout)
        inputs.append(x)
    step = jax.jit(jax.grad(loss)).lower(
        [v.value for v in model.trainable_variables],
        [v.value for v in model.non_trainable_variables],
        *inputs,
    )
    variables = [*model.variables, *model.optimizer.variables]
    return (
        sum(v.value.addressable_shards[0].data.nbytes for v in variables),
        step.compile().memory_analysis().temp_size_in_bytes,
    )


def run_torch(sizes):
    """Gives each of two processes half of every batch."""
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.get_context("spawn")
        processes = [
            context.Process(target=replica, args=(sizes, rank, folder))
            for rank in range(2)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
            if process.exitcode:
                sys.exit(f"A replica failed with status {process.exitcode}.")
        losses = [
            json.loads((pathlib.Path(folder) / f"{rank}.json").read_text())
            for rank in range(2)
        ]
    both = [(a + b) / 2 for a, b in zip(*losses, strict=True)]
    expected = train_by_hand(sizes, slice(None))
    yield "two processes, half of a batch each", difference(both, expected)


def replica(sizes, rank, folder):
    import torch

    torch.distributed.init_process_group(
        "gloo", f"file://{folder}/rendezvous", rank=rank, world_size=2
    )
    half = slice(rank * BATCH // 2, (rank + 1) * BATCH // 2)
    parallelize = torch.nn.parallel.DistributedDataParallel
    losses = train_by_hand(sizes, half, parallelize)
    (pathlib.Path(folder) / f"{rank}.json").write_text(json.dumps(losses))
    torch.distributed.destroy_process_group()


def train_by_hand(sizes, part, parallelize=lambda model: model):
    """Trains on a part of every batch; returns the loss of each step."""
    import torch

    model = make_model(sizes)
    module = parallelize(model)
    optimizer = torch.optim.Adam(module.parameters(), 1e-3)
    inputs = (
        torch.tensor(x).reshape(sizes["steps"], BATCH, -1)[:, part]
        for x in texts(BATCH, sizes["length"], sizes["steps"])
    )
    losses = []
    for x, y in zip(*inputs, strict=True):
        optimizer.zero_grad()
        logits = module(x)
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), y.long().flatten()
        )
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def run_tensorflow(sizes):
    """Gives each of two logical devices half of every batch."""
    import tensorflow as tf

    device = tf.config.list_physical_devices("CPU")[0]
    half = tf.config.LogicalDeviceConfiguration()
    tf.config.set_logical_device_configuration(device, [half, half])
    _, expected = train(sizes)
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        _, losses = train(sizes)
    yield "two replicas, half of a batch each", difference(losses, expected)


PARTS = {"jax": run_jax, "torch": run_torch, "tensorflow": run_tensorflow}


def run_backend(backend, quick):
    """Runs the part of a backend in a process of its own; yields its rows."""
    command = [sys.executable, __file__, "--part", backend]
    if quick:
        command.append("--quick")
    environment = {
        **os.environ,
        "KERAS_BACKEND": backend,
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
    }
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, text=True
    ) as process:
        for line in process.stdout:
            yield json.loads(line)
    if process.returncode:
        sys.exit(f"The part of {backend} failed.")


def main(arguments=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="seconds only")
    parser.add_argument(
        "--backends",
        nargs="+",
        choices=PARTS,
        default=[name for name in PARTS if importlib.util.find_spec(name)],
        help="those that are installed, by default",
    )
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.part:
        sizes = QUICK_SIZES if options.quick else SIZES
        for row in PARTS[options.part](sizes):
            print(json.dumps(row), flush=True)
        return None
    print("| backend | split | losses off by | weights | activations |")
    print("|---|---|---|---|---|", flush=True)
    rows = []
    for backend in options.backends:
        for name, off, *sizes in run_backend(backend, options.quick):
            rows.append((backend, name, off, *sizes))
            columns = [f"{size / 1e6:.2f} MB" for size in sizes] or ["", ""]
            columns = [backend, name, f"{off:.1e}", *columns]
            print("|", " | ".join(columns), "|", flush=True)
    return rows


if __name__ == "__main__":
    main()
