"""The paper's tables: the settings of each row, at the paper's size and in our small-scale run (its "twin"), and the reported figures.

The twin of a row makes the same change to this repository's recipe `tlm`, with a budget for two cores. A scaled-down version of the
paper's recipe (`tlm-small:chemprot:0.005`) learns nothing with this budget: it predicts the most frequent label in every row (docs/log.md).

Source of the figures: Yao et al. 2022 (arXiv 2111.04130), tables 1 to 7; the ablations are apparently dev scores.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from cramlm.cli.options import resolve_run
from cramlm.config.run import load_config, to_toml
from cramlm.experiments.grid import Arm

TWIN_BUDGET: Final = "1e13flops"
FOLDERS: Final[Mapping[str, str]] = {"chemprot": "chemprot", "scierc": "sciie", "acl-arc": "citation_intent", "agnews": "agnews_small"}
"""Folders of the paper's tasks; agnews is a sample. The other four are not available."""
TASKS: Final = ("agnews", "hyperpartisan", "helpfulness", "imdb", "acl-arc", "scierc", "chemprot", "rct")
METRIC: Final[Mapping[str, str]] = dict.fromkeys(TASKS, "macro_f1") | {"chemprot": "micro_f1", "rct": "micro_f1"}
NO_STAGE_2: Final = "without-stage-2.toml"


@dataclass(frozen=True, slots=True)
class Line:
    """A row. figures: task -> the paper's figure in percent. paper, twin: overrides, in the form of `--set`, of the recipes `source` and
    `twin_source`. note: description of the twin, if its overrides do not suffice.
    """

    name: str
    figures: Mapping[str, float]
    paper: tuple[str, ...] = ()
    twin: tuple[str, ...] = ()
    source: str = "tlm-small"
    twin_source: str = "tlm"
    note: str = ""


@dataclass(frozen=True, slots=True)
class Table:
    """title: what is compared. split: of the scores. tasks: in the paper's order."""

    number: str
    title: str
    split: str
    tasks: tuple[str, ...]
    lines: tuple[Line, ...]

    @property
    def here(self) -> tuple[str, ...]:
        """The tasks with available data."""
        return tuple(task for task in self.tasks if task in FOLDERS)


def _figures(tasks: tuple[str, ...], values: tuple[float, ...]) -> dict[str, float]:
    return dict(zip(tasks, values, strict=True))


def _varied(
    key: str, names: Mapping[str, tuple[float, ...]], tasks: tuple[str, ...], twin: tuple[float, ...], *, default: float
) -> tuple[Line, ...]:
    """Return a line for each value of a setting; the value is the last word of its name. default: the value that the twin has anyway."""
    lines = []
    for (name, values), small in zip(names.items(), twin, strict=True):
        value = name.rpartition(" ")[2] if name[-1].isdigit() else "0"
        setting = f"{key}={small:g}"
        note = setting.removeprefix("retriever.").removeprefix("phases[0].")
        lines.append(Line(name, _figures(tasks, values), (f"{key}={value}",), () if small == default else (setting,), note=note))
    return tuple(lines)


_R, _K, _RHO_1, _RHO_2 = (
    ("imdb", "scierc", "chemprot"),
    ("agnews", "scierc", "chemprot"),
    ("helpfulness", "scierc", "chemprot"),
    ("rct", "scierc"),
)
_S2 = ("chemprot", "acl-arc", "imdb", "agnews")
_ONE, _ALL = 'corpus.files=["{data}/corpus/general-0001.jsonl.zst"]', 'corpus.files=["{data}/corpus/*.jsonl.zst"]'
_RANDOM_TEXT, _MUCH = "retriever.kind=random", "retriever.max_documents=1000000"
_RANDOM = "random-retrieval"

TABLES: Final[Mapping[str, Table]] = {
    table.number: table
    for table in (
        Table(
            "2",
            "TLM at three scales beside a pretrained model",
            "test",
            TASKS,
            (
                Line(
                    "BERT-base (plm)",
                    _figures(TASKS, (93.50, 91.93, 69.11, 93.77, 69.45, 80.98, 81.94, 87.00)),
                    twin=("budget=2e13flops",),
                    source="plm",
                    twin_source="plm",
                    note="MiniLM fine-tuned, 2e13 operations",
                ),
                Line(
                    "TLM small",
                    _figures(TASKS, (93.74, 93.53, 70.54, 93.08, 69.84, 80.51, 81.99, 86.99)),
                    twin=("budget=5e12flops",),
                    note="5e12 operations",
                ),
                Line(
                    "TLM medium",
                    _figures(TASKS, (93.96, 94.05, 70.90, 93.97, 72.37, 81.88, 83.24, 87.28)),
                    source="tlm-medium",
                    note="1e13 operations",
                ),
                Line(
                    "TLM large",
                    _figures(TASKS, (94.34, 95.16, 72.49, 95.77, 72.19, 83.29, 85.12, 87.50)),
                    twin=("budget=3e13flops",),
                    source="tlm-large",
                    note="3e13 operations",
                ),
            ),
        ),
        Table(
            "3",
            "how the text is chosen, from a small corpus and one ten times as large",
            "dev",
            _R,
            (
                Line(
                    "random, small corpus",
                    _figures(_R, (93.65, 83.80, 80.65)),
                    (_RANDOM_TEXT, _MUCH, _ONE),
                    (_ONE,),
                    twin_source=_RANDOM,
                    note="`random-retrieval`, 1 of 13 files",
                ),
                Line(
                    "random, 10x corpus",
                    _figures(_R, (94.04, 83.10, 80.73)),
                    (_RANDOM_TEXT, _MUCH, _ALL),
                    twin_source=_RANDOM,
                    note="`random-retrieval`",
                ),
                Line("BM25, small corpus", _figures(_R, (94.40, 86.07, 83.64)), (_ONE,), (_ONE,), note="`tlm`, 1 of 13 files"),
                Line("BM25, 10x corpus", _figures(_R, (94.90, 87.41, 84.99)), (_ALL,), note="`tlm`"),
            ),
        ),
        Table(
            "4",
            "documents per query, K",
            "dev",
            _K,
            _varied(
                "retriever.top_k",
                {
                    "task text only": (93.41, 51.23, 55.05),
                    "K = 50": (94.51, 77.61, 77.21),
                    "K = 500": (94.32, 82.39, 81.44),
                    "K = 5000": (94.42, 86.07, 83.64),
                },
                _K,
                (0, 5, 50, 500),
                default=50,
            ),
        ),
        Table(
            "5",
            "external batches per task batch, rho1",
            "dev",
            _RHO_1,
            _varied(
                "phases[0].external",
                {
                    "rho1 = 1": (71.02, 80.72, 73.27),
                    "rho1 = 3": (70.41, 80.01, 79.43),
                    "rho1 = 99": (69.56, 84.95, 83.30),
                    "rho1 = 999": (69.35, 86.07, 83.64),
                },
                _RHO_1,
                (1, 4, 19, 99),
                default=4,
            ),
        ),
        Table(
            "6",
            "weight of MLM on task text, rho2",
            "dev",
            _RHO_2,
            _varied(
                "phases[0].terms[1].weight",
                {"rho2 = 0": (85.75, 83.31), "rho2 = 20": (88.08, 86.07), "rho2 = 100": (88.16, 85.48), "rho2 = 1000": (88.02, 85.29)},
                _RHO_2,
                (0, 0.25, 1, 4),
                default=0.25,
            ),
        ),
        Table(
            "7",
            "with and without the second stage",
            "dev",
            _S2,
            (
                Line("two stages", _figures(_S2, (83.64, 76.37, 94.40, 94.51)), note="`tlm`"),
                Line(
                    "stage 1 only",
                    _figures(_S2, (69.30, 57.00, 92.23, 93.98)),
                    source=NO_STAGE_2,
                    twin_source="no-stage-2",
                    note="`no-stage-2`",
                ),
            ),
        ),
    )
}


def arms_of(tables: Iterable[Table], task: str, *, paper: bool, data: Path, out: Path, init: str | None) -> tuple[Arm, ...]:
    """The rows of the tables as arms of one task, those that several tables share once. Without `init` the row that starts from it is left
    out.
    """
    arms: dict[str, Arm] = {}
    for line in (line for table in tables if task in table.here for line in table.lines):
        settings = tuple(each.replace("{data}", str(data)) for each in (line.paper if paper else line.twin))
        source = line.source if paper else line.twin_source
        if source == NO_STAGE_2:
            source = str(_without_stage_2(f"tlm-small:{task}", data, out))
        elif source.startswith("tlm-"):
            source = f"{source}:{task}"
        if source != "plm" or init is not None:
            arms.setdefault(arm_name(line, paper=paper), Arm(arm_name(line, paper=paper), source, settings))
    return tuple(arms.values())


def arm_name(line: Line, *, paper: bool) -> str:
    """Return the name of a row's run: its recipe and its settings, so that equal rows are one run."""
    settings = line.paper if paper else line.twin
    files = {_ONE: "1 file", _ALL: "all files"}
    return ", ".join((line.source if paper else line.twin_source, *(files.get(setting, setting) for setting in settings)))


def _without_stage_2(recipe: str, data: Path, out: Path) -> Path:
    """Write the first phase of the recipe as a config file; it keeps its best weights on dev."""
    task: dict[str, Any] = {"train": str(data / "tasks" / "chemprot" / "train.jsonl")}  # replaced when it is run
    config = resolve_run(recipe, None, None, task=task, corpus=[f"{data}/corpus/*.jsonl.zst"], budget=None, seed=None)
    alone = load_config(config.model_dump(mode="json") | {"phases": [config.phases[0].model_dump(mode="json") | {"keep": "best"}]})
    out.mkdir(parents=True, exist_ok=True)
    path = out / NO_STAGE_2
    path.write_text(to_toml(alone), "utf-8")
    return path


def command(table: Table, task: str, *, paper: bool) -> str:
    """Return the command lines of a table without the files, `--seeds` and `--out`."""
    recipe, budget = (f"tlm-small:{task}", "") if paper else ("tlm", f" --budget {TWIN_BUDGET}")
    if table.number == "2" and paper:
        sources = (line.source if line.source == "plm" else f"{line.source}:{task}" for line in table.lines)
        return f"cramlm compare --recipes {','.join(sources)} --base-model CHECKPOINT"
    if table.number == "2":
        budgets = [setting.partition("=")[2] for line in table.lines for setting in (line.twin or (f"budget={TWIN_BUDGET}",))]
        over = f"cramlm ablate --recipe tlm --over budget={','.join(budgets[1:])}{budget}"
        return f"cramlm fit --recipe plm --base-model CHECKPOINT --budget {budgets[0]}\n{over}"
    if table.number == "7":
        return f"cramlm compare --recipes {recipe},{NO_STAGE_2 if paper else 'no-stage-2'}{budget}"
    if table.number == "3":
        corpora = """--over 'corpus.files=["SMALL"],["LARGE"]'"""
        if paper:
            return f"cramlm ablate --recipe {recipe} --over retriever.kind=random,bm25 {corpora} --set {_MUCH}"
        return "\n".join(f"cramlm ablate --recipe {name} {corpora}{budget}" for name in (_RANDOM, recipe))
    settings = [setting.partition("=") for setting in (line.paper[0] for line in table.lines)]
    values = (value if paper else line.note.partition("=")[2] for (_, _, value), line in zip(settings, table.lines, strict=True))
    return f"cramlm ablate --recipe {recipe} --over {settings[0][0]}={','.join(values)}{budget}"
