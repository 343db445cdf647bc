"""Table, fit and plot of the results of bench_growth.py."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from scipy.optimize import nnls

FURTHER: Final = (10**8, 10**9)
MEASURED: Final = {
    "seconds": ("seconds", ("read", "index", "search", "select")),
    "memory": ("peak_bytes", ("read", "index", "search", "select")),
    "disk": ("bytes", ("read", "index", "select")),
}
NAMES: Final = {
    "read": "reading the corpus",
    "index": "building the index",
    "search": "searching with all texts, K = 500",
    "select": "selecting (search, held-out text, texts written)",
}
OUTPUTS: Final = {"read": "corpus", "index": "index", "select": "selection"}
COLOURS: Final = {"read": "#0072B2", "index": "#D55E00", "search": "#009E73", "select": "#CC79A7"}
MARKERS: Final = {"read": "o", "index": "s", "search": "^", "select": "D"}


def fit(sizes: Sequence[float], values: Sequence[float]) -> tuple[float, float, float]:
    """Return (a, b, largest relative error) of the fit a + b * N, a and b >= 0, by least squares of the relative error."""
    size, value = np.asarray(sizes, float), np.asarray(values, float)
    (a, b), _ = nnls(np.stack((1 / value, size / value), axis=1), np.ones(len(value)))
    return float(a), float(b), float(np.abs((a + b * size) / value - 1).max())


def fit_all(rows: list[dict[str, Any]]) -> dict[str, dict[str, dict[str, float]]]:
    """Return for every kind and step the fit to the three largest sizes and its extrapolations; empty with fewer sizes."""
    if len(rows) < 3:
        return {}
    rows = rows[-3:]
    sizes = [row["passages"] for row in rows]
    fits: dict[str, dict[str, dict[str, float]]] = {}
    for kind, (name, steps) in MEASURED.items():
        for step in steps:
            a, b, error = fit(sizes, [row["steps"][step][name] for row in rows])
            further = {f"at_{size:.0e}": a + b * size for size in FURTHER}
            fits.setdefault(kind, {})[step] = {"a": a, "b": b, "largest_error": error, **further}
    return fits


def write(rows: list[dict[str, Any]], folder: Path) -> None:
    """Print the tables; write growth.md, growth.svg and growth.png to `folder`."""
    page = "\n".join(_page(rows)) + "\n"
    print(page)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "growth.md").write_text(page, "utf-8")
    try:
        _draw(rows, folder)
    except ModuleNotFoundError as error:
        print(f"no plot: {error}; run pip install 'cramlm[bench]'", file=sys.stderr)


def _page(rows: list[dict[str, Any]]) -> list[str]:
    machine, settings = rows[-1]["machine"], rows[-1]["settings"]
    first, last = (f"{rows[end]['passages']:,}" for end in (0, -1))
    reach = f"from {first} to {last}" if first != last else f"at {last}"
    grown = [f"{step}: {_time(rows[-1]['steps'][step]['seconds'])}" for step in MEASURED["seconds"][1]]
    alt = (
        f"Three charts with logarithmic axes, {reach} passages: seconds, peak memory and disk of each step, with the lines fitted. "
        f"At {last} passages, {'; '.join(grown)}."
    )
    kind = "bootstrapped from real text" if settings["source"]["kind"] == "bootstrap" else "of invented words"
    cores = f"{settings['workers']} core{'s' if settings['workers'] > 1 else ''}"
    lines = ["# How cost grows with the corpus", "", f"![{alt}](growth.svg)", ""]
    lines += [
        f"Synthetic passages of 158 words, {kind}; training texts of {settings['task']} as queries, K = {settings['limit']}; {cores} of "
        f"{machine['processor']}, {machine['memory_gigabytes']} GB. Written by `python benchmarks/bench_growth.py`.",
        "",
        "| passages | " + " | ".join(f"{step}, s / MB of memory" for step in MEASURED["seconds"][1]) + " | corpus / index, GB |",
        "|---" * (len(MEASURED["seconds"][1]) + 2) + "|",
    ]
    for row in rows:
        steps = row["steps"]
        cells = [f"{steps[step]['seconds']:,.1f} / {steps[step]['peak_bytes'] / 1e6:,.0f}" for step in MEASURED["seconds"][1]]
        disk = f"{steps['read']['bytes'] / 1e9:.2f} / {steps['index']['bytes'] / 1e9:.2f}"
        lines.append(f"| {row['passages']:,} | {' | '.join(cells)} | {disk} |")
    return lines + _outlook(rows)


def _outlook(rows: list[dict[str, Any]]) -> list[str]:
    fits = fit_all(rows)
    if not fits:
        return ["", "Fewer than three sizes: nothing is fitted."]
    lines = [
        "",
        "## Extrapolation",
        "",
        f"| what | per million passages | {' | '.join(_power(size) for size in FURTHER)} | largest error of the fit |",
    ]
    lines.append("|---" * (3 + len(FURTHER)) + "|")
    units: dict[str, Callable[[float], str]] = {"seconds": _time, "memory": _size, "disk": _size}
    for kind, steps in fits.items():
        for step, fitted in steps.items():
            format_value, name = units[kind], OUTPUTS[step] if kind == "disk" else NAMES[step]
            cells = " | ".join(format_value(fitted[f"at_{size:.0e}"]) for size in FURTHER)
            lines.append(f"| {kind}: {name} | {format_value(1e6 * fitted['b'])} | {cells} | {fitted['largest_error']:.0%} |")
    lines += [
        "",
        "Calculated, not measured: a + b * N through the three largest sizes, on the same cores. It assumes that cost stays linear,",
        "that the disk is as fast when files no longer fit into memory, that passages stay as long, and that the vocabulary keeps",
        "growing as the synthetic one does (exponent 0.5). The lines are too high where growth is slower: terms in memory grow as",
        "the vocabulary does, and a fixed task finds at most queries * K documents.",
    ]
    return lines


def _draw(rows: list[dict[str, Any]], folder: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams["svg.hashsalt"] = "growth"
    from matplotlib import pyplot

    sizes = np.array([row["passages"] for row in rows], float)
    fits, scale = fit_all(rows), {"seconds": 1.0, "memory": 1e9, "disk": 1e9}
    figure, panels = pyplot.subplots(1, 3, figsize=(12, 4), layout="constrained")
    for panel, (kind, (name, steps)) in zip(panels, MEASURED.items(), strict=True):
        for step in steps:
            values = np.array([row["steps"][step][name] for row in rows]) / scale[kind]
            label = OUTPUTS[step] if kind == "disk" else NAMES[step].partition(" (")[0]
            panel.loglog(sizes, values, MARKERS[step], color=COLOURS[step], label=label)
            if fits:
                line = np.geomspace(sizes[-3], sizes[-1], 100)
                panel.loglog(line, (fits[kind][step]["a"] + fits[kind][step]["b"] * line) / scale[kind], color=COLOURS[step], linewidth=1)
        unit = {"seconds": "seconds", "memory": "peak memory, GB", "disk": "disk, GB"}[kind]
        panel.set(xlabel="passages", ylabel=unit)
        panel.grid(which="major", alpha=0.3)
        panel.spines[["top", "right"]].set_visible(False)
        panel.legend(frameon=False, fontsize=8)
    figure.savefig(folder / "growth.svg", metadata={"Date": None})
    figure.savefig(folder / "growth.png", dpi=150)
    pyplot.close(figure)


def _time(seconds: float) -> str:
    for unit, size in (("days", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:,.1f} {unit}"
    return f"{seconds:,.1f} s"


def _size(count: float) -> str:
    for unit, size in (("TB", 1e12), ("GB", 1e9)):
        if count >= size:
            return f"{count / size:,.1f} {unit}"
    return f"{count / 1e6:,.0f} MB"


def _power(size: int) -> str:
    return f"10^{len(str(size)) - 1} passages"
