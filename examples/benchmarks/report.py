"""What was measured, as tables and as a picture."""

import dataclasses
import itertools
import pathlib
import platform
from statistics import median

import numpy as np
from rich.table import Table

from benchmarks.catalogue import PEERS
from benchmarks.catalogue import PLAIN

WORDS = {"forward": "forward", "backward": "forward + backward"}


@dataclasses.dataclass
class Lines:
    """A table: a title, the names of its columns, and rows of text."""

    title: str
    columns: list
    rows: list


def tables(results):
    """All tables of a run, two for each backend and direction."""
    made = []
    study, clock = (results["arguments"][key] for key in ("study", "clock"))
    for (backend, direction), rows in _grouped(
        results["rows"], "backend", "direction"
    ):
        title = f"{study}, {backend}, {WORDS[direction]}"
        if study in ("block", "cbam"):
            kind = "training" if direction == "backward" else "inference"
            title = f"{study}, {backend}, a step of {kind}"
        if study == "streaming":
            title = f"streaming, {backend}, a token by length of context"
            tokens = results["arguments"]["tokens"]
            rows = [_per_token(row, tokens) for row in rows]
        if study == "cbam":
            made.append(Lines(title, *_images(rows, clock)))
            continue
        made.append(Lines(title, *_details(rows, _baseline(study), clock)))
        growth = _growth(rows, _baseline(study), clock)
        summary = Lines(f"{title}: growth", *growth)
        if len({row["length"] for row in rows}) > 1:
            made.append(summary)
            made += _by_length(title, rows, _baseline(study), clock)
    made.append(Lines("machine", ["", ""], _machine(results)))
    return made


def _by_length(title, rows, baseline, clock):
    """What matters most, with a column for each length."""
    plain = {row["length"]: row for row in rows if row["name"] == baseline}
    values = {
        f"{clock} ms": lambda row: (
            row.get(clock) and _short(1000 * median(row[clock]))
        ),
        f"times faster than {baseline}": lambda row: _ratio(
            plain.get(row["length"]), row, clock
        ),
        "peak MB of the process": lambda row: _memory(row)[0],
    }
    lengths = sorted({row["length"] for row in rows})
    for what, value in values.items():
        lines = []
        for (name,), own in _grouped(rows, "name"):
            cells = {row["length"]: value(row) or "" for row in own}
            lines.append([name, *(cells.get(x, "") for x in lengths)])
        if any(any(line[1:]) for line in lines):
            columns = ["", *(f"{length:,}" for length in lengths)]
            yield Lines(f"{title}: {what}", columns, lines)


def _baseline(study):
    return "multi_head" if study == "streaming" else PLAIN


def _per_token(row, tokens):
    times = {
        clock: [seconds / tokens for seconds in row.get(clock, [])]
        for clock in ("wall", "cpu")
    }
    return {**row, **times}


def _grouped(rows, *keys):
    """Pairs of values of the keys and of the rows that have them, in order."""
    groups = {}
    for row in rows:
        groups.setdefault(tuple(row[key] for key in keys), []).append(row)
    return groups.items()


def _details(rows, baseline, clock):
    columns = [
        "",
        "length",
        "wall ms",
        "spread",
        "CPU ms",
        "times faster",
        "of matmul",
        "peak MB",
        "of that own",
        "largest MB",
        "first call s",
        "operations",
        "",
    ]
    plain = {
        row["length"]: row
        for row in rows
        if row["name"] == baseline and row.get("wall")
    }
    lines = []
    for row in sorted(rows, key=lambda row: row["length"]):
        against = plain.get(row["length"])
        lines.append(
            [
                row["name"],
                f"{row['length']:,}",
                *_times(row),
                _ratio(against, row, clock),
                f"{row['share']:.0%}" if "share" in row else "",
                *_memory(row),
                f"{row['first']:.1f}" if "first" in row else "",
                f"{row['program']}" if "program" in row else "",
                _note(row),
            ]
        )
    return _filled(columns, lines)


def _filled(columns, lines):
    """Leaves out the columns that are empty."""
    used = [
        index
        for index, _ in enumerate(columns)
        if index < 3 or any(line[index] for line in lines)
    ]
    return [columns[index] for index in used], [
        [line[index] for index in used] for line in lines
    ]


def _times(row):
    """Median of wall time, its spread, and the median of CPU time."""
    if not row.get("wall"):
        return "", "", ""
    wall = np.array(row["wall"]) * 1000
    low, high = np.quantile(wall, [0.25, 0.75])
    return (
        _short(np.median(wall)),
        f"{_short(low)} - {_short(high)}",
        _short(median(row["cpu"]) * 1000),
    )


def _note(row):
    return f"not run: {row['reason']}" if "reason" in row else ""


def _memory(row):
    peak, own, largest = "", "", ""
    if "peak" in row:
        peak = f"{row['peak'] / 1e6:,.0f}"
        own = f"{(row['peak'] - row['base']) / 1e6:,.0f}"
    if "largest" in row:
        largest = f"{row['largest'] / 1e6:,.1f}"
    return peak, own, largest


def _ratio(plain, row, clock):
    """How much longer plain attention takes."""
    if not (plain and plain.get(clock) and row.get(clock)):
        return ""
    return _short(median(plain[clock]) / median(row[clock]))


def _short(number):
    """Three digits of a number."""
    return f"{number:.3g}" if number < 100 else f"{number:,.0f}"


def _growth(rows, baseline, clock):
    """How time and memory grow, and from where on plain attention is slower."""
    columns = [
        "",
        "lengths",
        "slope of wall",
        "slope of CPU",
        "slope of peak",
        "slope of largest",
        "slope of operations",
        "faster than plain",
        "against peers",
    ]
    plain = [row for row in rows if row["name"] == baseline]
    lines = []
    for (name,), own in _grouped(rows, "name"):
        own = sorted(own, key=lambda row: row["length"])
        done = [x["length"] for x in own if x.get("wall") or "peak" in x]
        if len(done) < 2:
            continue
        lines.append(
            [
                name,
                f"{done[0]:,} - {done[-1]:,}",
                slope(own, lambda row: _median(row, "wall")),
                slope(own, lambda row: _median(row, "cpu")),
                slope(own, _own_memory),
                slope(own, lambda row: row.get("largest")),
                slope(own, lambda row: row.get("program")),
                "" if name == baseline else crossover(plain, own, clock),
                _against_peers(rows, own, clock),
            ]
        )
    return _filled(columns, lines)


def _median(row, clock):
    return median(row[clock]) if row.get(clock) else None


def _own_memory(row):
    """What the process needs beyond its inputs; little is noise."""
    if "peak" not in row or row["peak"] - row["base"] < 20e6:
        return None
    return row["peak"] - row["base"]


def slope(rows, value):
    """Exponent of the length with which a value grows, by least squares."""
    points = [(row["length"], value(row)) for row in rows]
    points = np.array([(x, y) for x, y in points if y])
    if len(points) < 2:
        return ""
    exponent, _ = np.polyfit(*np.log(points).T, deg=1)
    return f"{round(exponent, 2) + 0:.2f}"


def crossover(plain, rows, clock):
    """From which length on plain attention takes more time."""
    plain = {row["length"]: _median(row, clock) for row in plain}
    gains = [
        (row["length"], plain[row["length"]] / _median(row, clock))
        for row in rows
        if plain.get(row["length"]) and _median(row, clock)
    ]
    if not gains:
        return ""
    if all(gain > 1 for _, gain in gains):
        return f"from {gains[0][0]:,} or less"
    if gains[-1][1] <= 1:
        return f"not up to {gains[-1][0]:,}"
    for (short, slower), (long, faster) in reversed(
        list(itertools.pairwise(gains))
    ):
        if slower <= 1:
            # a straight line in logarithms
            part = np.log(slower) / (np.log(slower) - np.log(faster))
            return f"from {short * (long / short) ** part:,.0f}"


def _against_peers(rows, own, clock):
    """How much longer the peers of a mechanism take, at the longest length."""
    texts = []
    for name, peer in PEERS.items():
        if peer.mechanism != own[0]["name"]:
            continue
        theirs = {row["length"]: row for row in rows if row["name"] == name}
        for row in reversed(own):
            ratio = _ratio(theirs.get(row["length"]), row, clock)
            if ratio:
                texts.append(f"{name} {ratio}")
                break
    return ", ".join(texts)


def _images(rows, clock):
    columns = ["", "wall ms", "spread", "CPU ms", "times that of plain"]
    columns += ["peak MB", "of that own", "first call s", ""]
    by_name = {row["name"]: row for row in rows}
    lines = []
    for name, row in by_name.items():
        layout = name.split()[1]
        lines.append(
            [
                name,
                *_times(row),
                _ratio(row, by_name.get(f"plain {layout}", {}), clock),
                *_memory(row)[:2],
                f"{row['first']:.1f}" if "first" in row else "",
                _note(row),
            ]
        )
    return _filled(columns, lines)


def _machine(results):
    rows = [["processor", results["processor"]]]
    for machine in results["machines"]:
        versions = machine["versions"].items()
        rows.append(
            [
                machine["backend"],
                ", ".join(f"{name} {version}" for name, version in versions)
                + f", on {machine['device']}",
            ]
        )
    settings = ("dtype", "batch_size", "causal", "repetitions", "clock")
    arguments = results["arguments"]
    rows.append(
        ["settings", ", ".join(f"{k}={arguments[k]}" for k in settings)]
    )
    return rows


def processor():
    """Name of the processor."""
    status = pathlib.Path("/proc/cpuinfo")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":")[1].strip()
    return platform.processor() or platform.machine()


def show(lines, console):
    """Prints a table."""
    table = Table(title=lines.title, title_justify="left")
    for index, column in enumerate(lines.columns):
        table.add_column(
            column, justify="right" if index and column else "left"
        )
    previous = None
    for row in lines.rows:
        # a line between lengths
        if previous and lines.columns[1] == "length" and row[1] != previous:
            table.add_section()
        previous = row[1]
        table.add_row(*row)
    console.print(table)


def to_markdown(lines):
    rows = [lines.columns, ["---"] * len(lines.columns), *lines.rows]
    rows = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([f"**{lines.title}**", "", *rows])


def draw(results, path):
    """Draws time and memory by length, for each backend and direction."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    groups = list(_grouped(results["rows"], "backend", "direction"))
    study = results["arguments"]["study"]
    clock = results["arguments"]["clock"]
    time = f"{clock} ms"
    if study == "cbam":
        panels = [(time, lambda row: _scaled(_median(row, clock), 1e3))]
    else:
        tokens = results["arguments"]["tokens"] if study == "streaming" else 1
        panels = [
            (time, lambda row: _scaled(_median(row, clock), 1e3 / tokens)),
            ("memory, MB", lambda row: _scaled(_own_memory(row), 1e-6)),
            (
                "largest array, MB",
                lambda row: _scaled(row.get("largest"), 1e-6),
            ),
        ]
        panels = [
            (label, value)
            for label, value in panels
            if any(value(row) for row in results["rows"])
        ]
    figure, axes = plt.subplots(
        len(panels),
        len(groups),
        figsize=(1.5 + 4.5 * len(groups), 1 + 3.6 * len(panels)),
        squeeze=False,
        layout="constrained",
        sharey="row",
    )
    names = list(dict.fromkeys(row["name"] for row in results["rows"]))
    for line, (label, value) in zip(axes, panels, strict=True):
        line[0].set_ylabel(label)
        for axis, ((backend, direction), rows) in zip(
            line, groups, strict=True
        ):
            axis.set_title(f"{backend}, {WORDS[direction]}")
            if study == "cbam":
                _draw_bars(axis, rows, value)
            else:
                _draw_curves(axis, rows, value, names)
    handles, labels = axes[0, 0].get_legend_handles_labels()
    known = dict(zip(labels, handles, strict=True))
    for axis in axes.flat:
        handles, labels = axis.get_legend_handles_labels()
        known |= dict(zip(labels, handles, strict=True))
    if known:
        figure.legend(known.values(), known.keys(), loc="outside right upper")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _scaled(value, factor):
    return None if value is None else value * factor


def _draw_curves(axis, rows, value, names):
    for name in names:
        points = [
            (row["length"], value(row)) for row in rows if row["name"] == name
        ]
        points = sorted((x, y) for x, y in points if y)
        if points:
            index = names.index(name)
            axis.plot(
                *zip(*points, strict=True),
                marker=".",
                color=f"C{index % 10}",
                linestyle=("-", "--", ":")[index // 10],
                label=name,
            )
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xlabel("length")
    axis.grid(alpha=0.3)


def _draw_bars(axis, rows, value):
    rows = [row for row in rows if value(row)]
    axis.bar([row["name"] for row in rows], [value(row) for row in rows])
    axis.tick_params(axis="x", rotation=30)
