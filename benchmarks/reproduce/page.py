"""Write docs/benchmarks/reproduction.md from the paper's figures and our results: `python benchmarks/reproduce/page.py`."""

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
PAGE = Path(__file__).parents[2] / "docs" / "benchmarks" / "reproduction.md"
NOTES = Path(__file__).parent / "notes.md"
NOT_RUN, NO_DATA = "not run", "no data"
HEAD = f"""# The paper's tables, reproduced at small scale

Each cell: the paper's figure / ours. Ours is a small-scale run of the same comparison with this repository's recipe `tlm`
and {TWIN_BUDGET.removesuffix("flops")} operations of training per run (2 layers of width 192) unless a row says otherwise, on another
and smaller corpus (421,140 passages). This is over five orders of magnitude less compute than the paper's small scale, so only
the order of the rows and the sign of a difference can be compared. In percent, over several seeds mean ± standard deviation; micro-F1
for chemprot and rct, macro-F1 elsewhere. `acl-arc` is the released split, with over a third of test in train; `agnews` is a sample of
4,999 articles. hyperpartisan, helpfulness, imdb and rct are not available here.

`python benchmarks/reproduce/run.py TABLE` runs a table at small scale and writes this page; `--paper` runs the paper's recipe at its size;
`--print` prints the commands below (the paper's, then ours), to which `--train`, `--dev`, `--test`, `--corpus`,
`--seeds` and `--out` must be added. A row of several tables is one run. Table 1 is the cost of the methods: every table of
`cramlm compare` has FLOPs. `cramlm attention` counts positional and vertical heads, which the paper plots. GLUE is not included.
See [comparing methods](../guides/experiments.md) for the commands.
"""


def page() -> str:
    """Return the page as Markdown."""
    return "\n".join([HEAD, NOTES.read_text("utf-8"), *map(_section, TABLES.values())])


def _section(table: Table) -> str:
    lines = [f"## Table {table.number}: {table.title} ({table.split})", "", f"| | here | {' | '.join(table.tasks)} |"]
    lines.append("|---" * (len(table.tasks) + 2) + "|")
    for line in table.lines:
        cells = (f"{line.figures[task]:.2f} / {_ours(table, line, task)}" for task in table.tasks)
        lines.append(f"| {line.name} | {line.note} | {' | '.join(cells)} |")
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
    """Return the scores of each linear model by its name."""
    scores: dict[str, list[str]] = {}
    for task in table.here:
        for row in _rows(task):
            if row["is_baseline"]:
                scores.setdefault(row["arm"], []).append(f"{task} {_score(row, table, task)}")
    return scores


def _score(row: Mapping[str, Any], table: Table, task: str) -> str:
    mean, *spread = score_text(Summary(**row["scores"][f"{table.split} {METRIC[task]}"])).split(" ", 1)
    return " ".join([f"**{mean}**", *spread])


def _rows(task: str) -> Any:
    path = RESULTS / f"{task}-twin.json"
    return json.loads(path.read_bytes()) if path.is_file() else []


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
    print(PAGE)
