"""The paper's tables: what each row changes, at the paper's size and in the twin that runs on two cores, and the figures it reports.

Source of the figures: Yao et al. 2022 (arXiv 2111.04130), tables 1 to 7; the ablations are by all signs dev scores.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from cramlm.config import load_config, to_toml
from cramlm.experiments.grid import Arm
from cramlm.options import resolve_run

TWIN_SCALE: Final = 0.02
FOLDERS: Final[Mapping[str, str]] = {"chemprot": "chemprot", "scierc": "sciie", "acl-arc": "citation_intent", "agnews": "agnews_small"}
"""Where the paper's tasks lie here; agnews is a part of it. The other four are not here."""
TASKS: Final = ("agnews", "hyperpartisan", "helpfulness", "imdb", "acl-arc", "scierc", "chemprot", "rct")
METRIC: Final[Mapping[str, str]] = dict.fromkeys(TASKS, "macro_f1") | {"chemprot": "micro_f1", "rct": "micro_f1"}
NO_STAGE_2: Final = "without-stage-2.toml"


@dataclass(frozen=True, slots=True)
class Line:
    """A row. paper, twin: its settings, as `--set` writes them. figures: task -> what the paper reports, in percent."""

    name: str
    figures: Mapping[str, float]
    paper: tuple[str, ...] = ()
    twin: tuple[str, ...] = ()
    source: str = "tlm-small"


@dataclass(frozen=True, slots=True)
class Table:
    """title: what is compared. split: whose scores are shown. tasks: the paper's, in its order."""

    number: str
    title: str
    split: str
    tasks: tuple[str, ...]
    lines: tuple[Line, ...]

    @property
    def here(self) -> tuple[str, ...]:
        """The tasks whose data are here."""
        return tuple(task for task in self.tasks if task in FOLDERS)


def _figures(tasks: tuple[str, ...], values: tuple[float, ...]) -> dict[str, float]:
    return dict(zip(tasks, values, strict=True))


def _varied(key: str, names: Mapping[str, tuple[float, ...]], tasks: tuple[str, ...], twin: tuple[int, ...]) -> tuple[Line, ...]:
    """A line for each value of a setting; the value is the last word of its name."""
    lines = []
    for (name, values), small in zip(names.items(), twin, strict=True):
        value = name.rpartition(" ")[2] if name[-1].isdigit() else "0"
        lines.append(Line(name, _figures(tasks, values), (f"{key}={value}",), (f"{key}={small}",)))
    return tuple(lines)


_MAIN = {
    "BERT-base (plm)": ("plm", (93.50, 91.93, 69.11, 93.77, 69.45, 80.98, 81.94, 87.00)),
    "TLM small": ("tlm-small", (93.74, 93.53, 70.54, 93.08, 69.84, 80.51, 81.99, 86.99)),
    "TLM medium": ("tlm-medium", (93.96, 94.05, 70.90, 93.97, 72.37, 81.88, 83.24, 87.28)),
    "TLM large": ("tlm-large", (94.34, 95.16, 72.49, 95.77, 72.19, 83.29, 85.12, 87.50)),
}
_R, _K, _RHO_1, _RHO_2 = (
    ("imdb", "scierc", "chemprot"),
    ("agnews", "scierc", "chemprot"),
    ("helpfulness", "scierc", "chemprot"),
    ("rct", "scierc"),
)
_S2 = ("chemprot", "acl-arc", "imdb", "agnews")
_BLIND, _ONE, _ALL = (
    "retriever.kind=random",
    'corpus.files=["{data}/corpus/general-0000.jsonl.zst"]',
    'corpus.files=["{data}/corpus/*.jsonl.zst"]',
)
_PLM_TWIN = "budget=2e13flops"
"""A checkpoint has no twin with fewer steps: it is fine-tuned for as many operations as a twin of TLM takes."""
_MUCH, _LITTLE = "retriever.max_documents=1000000", "retriever.max_documents=20000"

TABLES: Final[Mapping[str, Table]] = {
    table.number: table
    for table in (
        Table(
            "2",
            "TLM at three scales beside a pretrained model",
            "test",
            TASKS,
            tuple(
                Line(name, _figures(TASKS, values), twin=(_PLM_TWIN,) if source == "plm" else (), source=source)
                for name, (source, values) in _MAIN.items()
            ),
        ),
        Table(
            "3",
            "how the text is chosen, from a small corpus and one ten times as large",
            "dev",
            _R,
            (
                Line("random, small corpus", _figures(_R, (93.65, 83.80, 80.65)), (_BLIND, _MUCH, _ONE), (_BLIND, _LITTLE, _ONE)),
                Line("random, 10x corpus", _figures(_R, (94.04, 83.10, 80.73)), (_BLIND, _MUCH, _ALL), (_BLIND, _LITTLE, _ALL)),
                Line("BM25, small corpus", _figures(_R, (94.40, 86.07, 83.64)), (_ONE,), (_LITTLE, _ONE)),
                Line("BM25, 10x corpus", _figures(_R, (94.90, 87.41, 84.99)), (_ALL,), (_LITTLE, _ALL)),
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
                (1, 3, 19, 99),
            ),
        ),
        Table(
            "6",
            "weight of MLM on task text, rho2",
            "dev",
            _RHO_2,
            _varied(
                "phases[0].mlm_weight",
                {"rho2 = 0": (85.75, 83.31), "rho2 = 20": (88.08, 86.07), "rho2 = 100": (88.16, 85.48), "rho2 = 1000": (88.02, 85.29)},
                _RHO_2,
                (0, 20, 100, 1000),
            ),
        ),
        Table(
            "7",
            "with and without the second stage",
            "dev",
            _S2,
            (
                Line("two stages", _figures(_S2, (83.64, 76.37, 94.40, 94.51))),
                Line("stage 1 only", _figures(_S2, (69.30, 57.00, 92.23, 93.98)), source=NO_STAGE_2),
            ),
        ),
    )
}


def arms_of_table(table: Table, task: str, *, twin: float | None, data: Path, out: Path, init: str | None) -> tuple[Arm, ...]:
    """The rows as arms of one task. twin: the scale, None = at the paper's size. Without `init` the row that starts from it is left out."""
    arms = []
    for line in table.lines:
        settings = tuple(each.replace("{data}", str(data)) for each in (line.paper if twin is None else line.twin))
        scaled = "" if twin is None else f":{twin:g}"
        if line.source == NO_STAGE_2:
            arms.append(Arm(line.name, str(_without_stage_2(f"tlm-small:{task}{scaled}", data, out)), settings))
        elif line.source != "plm":
            arms.append(Arm(line.name, f"{line.source}:{task}{scaled}", settings))
        elif init is not None:
            arms.append(Arm(line.name, line.source, settings))
    return tuple(arms)


def _without_stage_2(recipe: str, data: Path, out: Path) -> Path:
    """The recipe's first phase as a config file; it hands on its best weights on dev."""
    task: dict[str, Any] = {"train": str(data / "tasks" / "chemprot" / "train.jsonl")}  # replaced when it is run
    config = resolve_run(recipe, None, None, task=task, corpus=[f"{data}/corpus/*.jsonl.zst"], budget=None, seed=None)
    alone = load_config(config.model_dump(mode="json") | {"phases": [config.phases[0].model_dump(mode="json") | {"keep": "best"}]})
    out.mkdir(parents=True, exist_ok=True)
    path = out / NO_STAGE_2
    path.write_text(to_toml(alone), "utf-8")
    return path


def command(table: Table, task: str, *, twin: float | None) -> str:
    """The same as a command line, without the files, `--seeds` and `--out`."""
    recipe = f"tlm-small:{task}{'' if twin is None else f':{twin:g}'}"
    if table.number == "2":
        names = (line.source for line in table.lines)
        sources = (name if name == "plm" else recipe.replace("tlm-small", name) for name in names)
        return f"cramlm compare --recipes {','.join(sources)} --init CHECKPOINT"
    if table.number == "7":
        return f"cramlm compare --recipes {recipe},{NO_STAGE_2}"
    if table.number == "3":
        bound = _MUCH if twin is None else _LITTLE
        over = """--over retriever.kind=random,bm25 --over 'corpus.files=["SMALL"],["LARGE"]'"""
        return f"cramlm ablate --recipe {recipe} {over} --set {bound}"
    settings = [(line.paper if twin is None else line.twin)[0].partition("=") for line in table.lines]
    return f"cramlm ablate --recipe {recipe} --over {settings[0][0]}={','.join(value for _, _, value in settings)}"
