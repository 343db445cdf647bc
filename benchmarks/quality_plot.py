"""Plot the README's mean scores over the number of labels: a panel per group of tasks, a line per model.

    python benchmarks/quality_plot.py candidates-2e13flops

Data: benchmarks/results/rungs-BUDGET.json of bench_quality.py, the means of `quality_tables.py means BUDGET`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).parent))

from quality_tables import COUNTS, GROUPS, RESULTS, RUNGS, group_mean

PLOT: Final = Path(__file__).parent.parent / "docs" / "pictures" / "quality.svg"
STYLES: Final = {
    "tfidf": ("#555555", "x", "--"),
    "static": ("#E69F00", "s", "-."),
    "tlm-plain": ("#56B4E9", "+", ":"),
    "tlm": ("#0072B2", "o", "-"),
    "tlm combined": ("#D55E00", "D", "-"),
}
"""Color, marker and line of each arm; `bayes` is far below the others and left out."""


def curves(measured: Mapping[str, Any], group: str) -> dict[str, dict[str, float]]:
    """Return the mean macro-F1 on test, in percent, of a group of tasks by arm and number of labels; only where every task was measured."""
    found = {
        arm: {labels: 100 * mean.macro for labels in COUNTS if (mean := group_mean(measured["tasks"], group, labels, arm)) is not None}
        for arm in STYLES
    }
    return {arm: of_labels for arm, of_labels in found.items() if of_labels}


def plot(measured: Mapping[str, Any], target: Path) -> None:
    """Write the SVG."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "quality"
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, len(GROUPS), figsize=(5 * len(GROUPS), 4), layout="constrained")
    for panel, group in zip(panels, GROUPS, strict=True):
        for arm, means in curves(measured, group).items():
            color, marker, line = STYLES[arm]
            positions = [COUNTS.index(labels) for labels in means]
            panel.plot(positions, list(means.values()), marker=marker, linestyle=line, color=color, label=RUNGS[arm])
        panel.set_xticks(range(len(COUNTS)), [f"{labels} labels" for labels in COUNTS])
        panel.set(title=f"mean of {len(GROUPS[group])} {group} tasks")
        panel.grid(alpha=0.3)
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].set(ylabel="macro-F1 on test, percent")
    panels[0].legend(frameon=False)
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, metadata={"Date": None})
    pyplot.close(figure)


if __name__ == "__main__":
    plot(json.loads((RESULTS / f"rungs-{sys.argv[1]}.json").read_bytes()), PLOT)
    print(PLOT)
