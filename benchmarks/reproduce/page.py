"""docs/reproduction.md from the paper's figures and from what was run here: `python benchmarks/reproduce/page.py`."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from reproduce.tables import FOLDERS, METRIC, TABLES, TWIN_SCALE, Line, Table, command

RESULTS = Path(__file__).parents[1] / "results" / "reproduce"
PAGE = Path(__file__).parents[2] / "docs" / "reproduction.md"
NOT_RUN, NO_DATA = "not run", "no data here"
HEAD = f"""# The paper's tables, and their twins here

Each cell: the paper's figure / ours. Ours is the *twin* of the paper's run ([recipes.md](recipes.md)): the same phases, ratios and rates,
a BERT of 2 layers of 128 (large: 4 of 256), batches of 16 texts, {TWIN_SCALE:g} of the paper's steps unless a table says otherwise, over
another and smaller corpus (421,140 passages). That is about five orders of magnitude less compute: what can hold here is the order of the
rows and the direction of a difference, not a figure. Mean ± standard deviation over seeds, in percent; micro-F1 for chemprot and rct,
macro-F1 elsewhere. `acl-arc` is the released split, of which over a third of test is in train; `agnews` is 4,999 of its articles.
hyperpartisan, helpfulness, imdb and rct are not here.

`python benchmarks/reproduce/run.py TABLE` runs a table's twins and writes this page; `--paper` runs the paper's size; `--print` says the
commands that stand below, to which come `--train`, `--dev`, `--test`, `--corpus`, `--seeds` and `--out`. Table 1 is the cost of the
methods: FLOPs are in every table of `cramlm compare`. Which heads are positional and vertical (the paper shows pictures) is told by
`cramlm attention`. GLUE is not here. How the commands work: [experiments.md](experiments.md).
"""


def page() -> str:
    """The whole page as Markdown."""
    return "\n".join([HEAD, *map(_section, TABLES.values())])


def _section(table: Table) -> str:
    found = {task: result for task in table.here if (result := _read(table, task)) is not None}
    columns = ["", *(["in the twin"] if any(line.twin for line in table.lines) else []), *table.tasks]
    lines = [f"## Table {table.number}: {table.title} ({table.split})", ""]
    lines += [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for line in table.lines:
        cells = [line.name, *([_setting(line)] if len(columns) > len(table.tasks) + 1 else [])]
        cells += [f"{line.figures[task]:.2f} / {_ours(table, line, task, found)}" for task in table.tasks]
        lines.append(f"| {' | '.join(cells)} |")
    scales = sorted({result["scale"] for result in found.values() if result["scale"] not in (None, TWIN_SCALE)})
    lines += [f"\nScale of the twins: {', '.join(map(str, scales))}."] if scales else []
    lines += ["", "```", *(f"{command(table, table.here[-1], twin=twin)}" for twin in (None, TWIN_SCALE)), "```", ""]
    return "\n".join(lines)


def _setting(line: Line) -> str:
    shown = [setting for setting in line.twin if "corpus" not in setting]
    return ", ".join(f"`{setting.replace('retriever.', '')}`" for setting in shown) or "the same"


def _ours(table: Table, line: Line, task: str, found: Mapping[str, Any]) -> str:
    if task not in FOLDERS:
        return NO_DATA
    rows = found.get(task, {"rows": []})["rows"]
    score = next((row["scores"].get(f"{table.split} {METRIC[task]}") for row in rows if row["arm"] == line.name), None)
    if score is None:
        return NOT_RUN
    spread = "" if score["deviation"] is None else f" ± {100 * score['deviation']:.1f}"
    return f"**{100 * score['mean']:.1f}**{spread}"


def _read(table: Table, task: str) -> Any:
    path = RESULTS / f"table-{table.number}-{task}.json"
    return json.loads(path.read_bytes()) if path.is_file() else None


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
    print(PAGE)
