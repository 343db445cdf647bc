"""docs/reproduction.md from the paper's figures and from what was run here: `python benchmarks/reproduce/page.py`."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from cramlm.experiments.results import Summary, score_text
from reproduce.tables import FOLDERS, METRIC, TABLES, TWIN_BUDGET, Line, Table, arm_name, command

RESULTS = Path(__file__).parents[1] / "results" / "reproduce"
PAGE = Path(__file__).parents[2] / "docs" / "reproduction.md"
NOTES = Path(__file__).parent / "notes.md"
NOT_RUN, NO_DATA = "not run", "no data here"
HEAD = f"""# The paper's tables, and their twins here

Each cell: the paper's figure / ours. Ours is the *twin* of the paper's run: the same question asked of `tlm`, this repository's recipe,
with {TWIN_BUDGET.removesuffix("flops")} operations of training a run (2 layers of 192) where a row does not say otherwise, over another
and smaller corpus (421,140 passages). That is over five orders of magnitude less compute than the paper's small scale: what can hold here
is the order of the rows and the direction of a difference, not a figure. In percent, over several seeds mean ± standard deviation; micro-F1
for chemprot and rct, macro-F1 elsewhere. `acl-arc` is the released split, of which over a third of test is in train; `agnews` is 4,999 of
its articles. hyperpartisan, helpfulness, imdb and rct are not here.

`python benchmarks/reproduce/run.py TABLE` runs a table's twins and writes this page; `--paper` runs the paper's own recipe at its size;
`--print` says the commands that stand below (first the paper's, then the twin's), to which come `--train`, `--dev`, `--test`, `--corpus`,
`--seeds` and `--out`. A row that stands in several tables is one run. Table 1 is the cost of the methods: FLOPs are in every table of
`cramlm compare`. Which heads are positional and vertical (the paper shows pictures) is told by `cramlm attention`. GLUE is not here.
How the commands work: [experiments.md](experiments.md).
"""


def page() -> str:
    """The whole page as Markdown."""
    return "\n".join([HEAD, NOTES.read_text("utf-8"), *map(_section, TABLES.values())])


def _section(table: Table) -> str:
    lines = [f"## Table {table.number}: {table.title} ({table.split})", "", f"| | in the twin | {' | '.join(table.tasks)} |"]
    lines.append("|---" * (len(table.tasks) + 2) + "|")
    for line in table.lines:
        cells = (f"{line.figures[task]:.2f} / {_ours(table, line, task)}" for task in table.tasks)
        lines.append(f"| {line.name} | {line.told} | {' | '.join(cells)} |")
    linear = [f"best {name}: {', '.join(scores)}" for name, scores in _linear_models(table).items()]
    lines += ["", *linear, *([""] if linear else []), "```"]
    lines += [*(command(table, table.here[-1], paper=paper) for paper in (True, False)), "```", ""]
    return "\n".join(lines)


def _ours(table: Table, line: Line, task: str) -> str:
    if task not in FOLDERS:
        return NO_DATA
    name = arm_name(line, paper=False)
    return next((_score(row, table, task) for row in _rows(task) if row["arm"] == name), NOT_RUN)


def _linear_models(table: Table) -> dict[str, list[str]]:
    """Name of each linear model -> its score on each task."""
    found: dict[str, list[str]] = {}
    for task in table.here:
        for row in _rows(task):
            if row["is_baseline"]:
                found.setdefault(row["arm"], []).append(f"{task} {_score(row, table, task)}")
    return found


def _score(row: Mapping[str, Any], table: Table, task: str) -> str:
    mean, *spread = score_text(Summary(**row["scores"][f"{table.split} {METRIC[task]}"])).split(" ", 1)
    return " ".join([f"**{mean}**", *spread])


def _rows(task: str) -> Any:
    path = RESULTS / f"{task}-twin.json"
    return json.loads(path.read_bytes()) if path.is_file() else []


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
    print(PAGE)
