"""The grid of an experiment: arms x numbers of labelled rows x seeds. Each cell is a complete config with its own folder.

An arm is a recipe (`tlm`; `tlm@init` starts from the checkpoint), a config file (`mine.toml`), or one of them with its own settings. Data,
budget and subsamples of the training rows are the same for all arms.
"""

from __future__ import annotations

import itertools
import json
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cramlm.cli.options import resolve_run
from cramlm.config.run import RunConfig, TaskConfig, load_config, read_toml
from cramlm.data.labels import RULES
from cramlm.data.task import RowFormat, read_examples
from cramlm.errors import UsageError, counted
from cramlm.pipeline.run_folder import RUNS, name_of_task, train_path
from cramlm.recipes import RECIPES
from cramlm.recipes.recipe import on_task_text
from cramlm.records import Example, TaskKind
from cramlm.storage.artifacts import hash_json, publish_file

ALL = "all"
ON_INIT = "@init"
_NO_RETRIEVAL = "retriever.top_k=0"
_SUBSAMPLE_STREAM = 0xD4A3
_READ_BY = {"kind", "text_column", "label_column", "text_pair_column", "label_separator", "max_record_bytes", "on_bad_row"}
"""Settings of a task that say how the rows of a file are read."""


@dataclass(frozen=True, slots=True)
class Arm:
    """A row of the table. source: recipe or config file. settings: overrides of this arm, in the form of `--set`."""

    name: str
    source: str
    settings: tuple[str, ...] = ()

    @property
    def folder(self) -> str:
        """Folder name, unique for every arm, of characters that every file system accepts."""
        plain = re.sub(r"[^\w.+=-]+", "-", self.name)
        return plain if plain == self.name else f"{plain}-{hash_json(self.name)[:6]}"


@dataclass(frozen=True, slots=True)
class Grid:
    """An experiment. labels: numbers of training rows, or "all". task: fields of `TaskConfig`. settings: overrides of every arm.

    rest_unlabelled: True if the training rows that a subsample leaves out are unlabelled texts.
    """

    arms: tuple[Arm, ...]
    seeds: tuple[int, ...]
    labels: tuple[str, ...]
    task: Mapping[str, Any]
    corpus: tuple[str, ...] = ()
    init: str | None = None
    budget: str | None = None
    preset: str | None = None
    settings: tuple[str, ...] = ()
    rest_unlabelled: bool = False

    def __post_init__(self) -> None:
        """Raise UsageError if no training row can be left out, so that there are no unlabelled ones."""
        if self.rest_unlabelled and set(self.labels) == {ALL}:
            raise UsageError(
                "--rest-unlabelled: with all labels no training row is left; pass a number of labels (--labels 100), or drop it"
            )

    def as_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        arms = [{"name": arm.name, "source": arm.source, "settings": list(arm.settings)} for arm in self.arms]
        lists = {"seeds": list(self.seeds), "labels": list(self.labels), "corpus": list(self.corpus), "settings": list(self.settings)}
        return {"arms": arms, **lists, "task": dict(self.task), "init": self.init, "budget": self.budget, "preset": self.preset} | (
            {"rest_unlabelled": True} if self.rest_unlabelled else {}
        )


@dataclass(frozen=True, slots=True)
class Cell:
    """A run of the experiment."""

    arm: Arm
    labels: str
    seed: int
    config: RunConfig
    folder: Path

    @property
    def name(self) -> str:
        labels = "" if self.labels == ALL else f", {self.labels} labels"
        return f"{self.arm.name}{labels}, seed {self.seed}"


def read_seeds(text: str) -> tuple[int, ...]:
    """Return the seeds: "3" is 1, 2, 3; "7,11" is 7 and 11; "7," is seed 7.

    Raises:
        UsageError: for any other text.
    """
    compact = text.replace(" ", "")
    numbers = _different_numbers(compact.removesuffix(","))
    is_list = "," in compact
    if numbers is None or (not is_list and numbers == [0]):
        raise UsageError(f'--seeds {text!r}: expected a number of seeds, like 5, or a list, like 7,11,13 (one seed: "7,")')
    return tuple(numbers) if is_list else tuple(range(1, numbers[0] + 1))


def read_counts(text: str) -> tuple[str, ...]:
    """Return numbers of training rows, or "all", from a list with commas.

    Raises:
        UsageError: for any other text.
    """
    parts = text.replace(" ", "").split(",")
    numbers = [part for part in parts if part != ALL]
    if len(parts) - len(numbers) > 1 or (numbers and _different_numbers(",".join(numbers)) is None):
        raise UsageError(f"--labels {text!r}: expected numbers of training rows or all, like 100,500,all")
    return tuple(part if part == ALL else str(int(part)) for part in parts)


def _different_numbers(text: str) -> list[int] | None:
    """Return the whole numbers of a list with commas; None if it holds something else, or a number twice."""
    parts = text.split(",")
    if not all(part.isascii() and part.isdigit() for part in parts):
        return None
    numbers = list(map(int, parts))
    return numbers if len(set(numbers)) == len(numbers) else None


def arms_of(names: Sequence[str]) -> tuple[Arm, ...]:
    """Return an arm for each recipe or config file.

    Raises:
        UsageError: if a name is repeated, or there is none.
    """
    arms = tuple(Arm(Path(name).stem if name.endswith(".toml") else name, name) for name in names)
    if not arms or len({arm.name for arm in arms}) < len(arms):
        raise UsageError(f"--recipes {','.join(names) or '(none)'}: expected different names, like tlm,labels-only,random-retrieval")
    return arms


def arms_over(source: str, over: Sequence[str]) -> tuple[Arm, ...]:
    """Return an arm for every combination of the values of settings, like retriever.top_k=0,50,500.

    The prefix `select.` is an alias of `retriever.`. top_k = 0 trains without retrieved text.

    Raises:
        UsageError: if an item is not of the form KEY=VALUE,VALUE,... or lists a value twice.
    """
    choices = []
    for each in over:
        key, equals, values = each.partition("=")
        listed = _split_values(values)
        if not equals or not key.strip() or not all(listed):
            raise UsageError(f"--over {each!r} is not KEY=VALUE,VALUE,...; write it like retriever.top_k=0,50,500")
        if repeated := next((value for value in listed if listed.count(value) > 1), None):
            raise UsageError(f"--over {each!r}: the value {repeated} is listed twice; list each value once")
        key = re.sub(r"^select\.", "retriever.", key.strip())
        choices.append([f"{key}={value}" for value in listed])
    if not choices:
        raise UsageError("no setting to vary; pass --over KEY=VALUE,VALUE,..., like retriever.top_k=0,50,500")
    shown = [re.sub(r"^retriever\.", "", chosen[0].partition("=")[0]) for chosen in choices]
    arms = []
    for settings in itertools.product(*choices):
        name = ", ".join(f"{key}={setting.partition('=')[2]}" for key, setting in zip(shown, settings, strict=True))
        arms.append(Arm(name, source, settings))
    return tuple(arms)


def default_folder(train: str, command: str) -> Path:
    """Return runs/TASK-COMMAND, so that experiments on the same task share their runs."""
    return RUNS / f"{name_of_task(train)}-{command}"


def check_arms(grid: Grid) -> None:
    """Check that every arm fits the data; write nothing. The checkpoint is for the arms that start from one, the preset for the others.

    Raises:
        UsageError, DataError: if an arm does not fit the data. UsageError: if two arms have equal settings, the arms have tasks of several
        kinds, or no arm uses the checkpoint or the preset.
    """
    configs = [_config(grid, arm, dict(grid.task), grid.seeds[0]) for arm in grid.arms]
    if len(kinds := sorted({config.task.kind for config in configs})) > 1:
        raise UsageError(f"the arms have tasks of several kinds ({', '.join(kinds)}), which have no score in common; choose one kind")
    first: dict[str, str] = {}
    for arm, config in zip(grid.arms, configs, strict=True):
        same = first.setdefault(hash_json(config.model_dump(mode="json", exclude={"name"})), arm.name)
        if same != arm.name:
            raise UsageError(f"the arms {same!r} and {arm.name!r} have equal settings and would run twice; leave one out")
    if grid.init is not None and all(config.init is None for config in configs):
        raise UsageError(f"no arm starts from --base-model {grid.init}; name one that does, like tlm{ON_INIT} or plm, or drop it")
    if grid.preset is not None and all(config.init is not None for config in configs):
        raise UsageError(f"--preset {grid.preset}: every arm starts from weights that have a size; drop --preset or --base-model")


def cells_of(grid: Grid, out: Path) -> list[Cell]:
    """Return the cells, seed by seed, so that early results compare all arms; write subsamples of the training rows to `out`.

    Raises:
        UsageError, DataError: as `check_arms`.
    """
    cells = []
    read_as = _tasks(grid) if set(grid.labels) != {ALL} else {}
    for seed in grid.seeds:
        for labels in grid.labels:
            sampled: dict[str, dict[str, Any]] = {}  # by how the rows are read: the files that differ from those of the grid
            for arm in grid.arms:
                task = dict(grid.task)
                if labels != ALL:
                    if (how := hash_json(read_as[arm.name])) not in sampled:
                        sampled[how] = _sampled_files(grid, read_as[arm.name], int(labels), seed, out / "subsamples")
                    task |= sampled[how]
                config = _config(grid, arm, task, seed)
                cells.append(Cell(arm, labels, seed, config, out / "runs" / labels / arm.folder / str(seed)))
    return cells


def _tasks(grid: Grid) -> dict[str, dict[str, Any]]:
    """Return for each arm how it reads the training rows: the task of the grid with the settings of the arm."""
    tasks = {arm.name: _config(grid, arm, dict(grid.task), grid.seeds[0]).task for arm in grid.arms}
    return {name: {**task.model_dump(include=_READ_BY), "train": grid.task["train"]} for name, task in tasks.items()}


def _sampled_files(grid: Grid, task: Mapping[str, Any], count: int, seed: int, folder: Path) -> dict[str, Any]:
    """Write a subsample; return the fields of the task that name its files."""
    sampled, rest = subsample(task, count=count, seed=seed, folder=folder)
    if grid.rest_unlabelled and rest is not None:
        return {"train": str(sampled), "unlabelled": [*(grid.task.get("unlabelled") or ()), str(rest)]}
    return {"train": str(sampled)}


def _config(grid: Grid, arm: Arm, task: dict[str, Any], seed: int) -> RunConfig:
    settings = [each for each in (*grid.settings, *arm.settings) if each.replace(" ", "") != _NO_RETRIEVAL]
    if fixed := next((each for each in settings if each.partition("=")[0].strip() == "seed"), None):
        raise UsageError(f"{fixed}: every arm runs with the seeds of --seeds, which this would replace; drop it, and pass --seeds 7,11")
    if fixed := next((each for each in settings if each.partition("=")[0].strip() == "task.train"), None):
        raise UsageError(f"{fixed}: every arm trains on rows of --train, which this would replace; drop it, and pass --train FILE")
    common: dict[str, Any] = {"task": task, "budget": grid.budget, "seed": seed}
    is_file, on_init = arm.source.endswith(".toml"), arm.source.endswith(ON_INIT)
    content = read_toml(Path(arm.source)) if is_file else {}
    reads = not is_file or "corpus" in content
    common["corpus"] = list(grid.corpus) if grid.corpus and reads else None
    recipe = arm.source.removesuffix(ON_INIT)
    if on_init and grid.init is None:
        raise UsageError(f"{arm.source}: no checkpoint to start from; pass --base-model FOLDER")
    if grid.init is not None and (on_init or _needs_checkpoint(recipe)):
        common["init"] = grid.init
    if "init" not in common and "init" not in content:  # weights that an arm starts from have a size
        common["preset"] = grid.preset
    config = resolve_run(None if is_file else recipe, Path(arm.source) if is_file else None, settings, **common)
    if len(settings) < len(grid.settings) + len(arm.settings):
        config = _without_retrieval(config)
    return load_config(config.model_dump(mode="json") | {"name": arm.name}, origin=arm.source)


def _needs_checkpoint(recipe: str) -> bool:
    """Return True if the recipe can only start from a checkpoint."""
    return getattr(RECIPES.get(recipe.partition(":")[0]), "start", "either") == "checkpoint"


def _without_retrieval(config: RunConfig) -> RunConfig:
    """Return the config with the same phases on the task text only, without unlabelled texts, which only retrieval reads.

    Raises:
        UsageError: if its model is one that reads raw text.
    """
    if config.model in ("static", "bayes"):
        raise UsageError(
            f"{_NO_RETRIEVAL}: model {config.model!r} learns from raw text, which this leaves out; leave out the value 0, or compare with "
            "the recipe tfidf"
        )
    task = config.task.model_copy(update={"unlabelled": ()})
    changed = {"task": task, "corpus": None, "retriever": None, "phases": tuple(map(on_task_text, config.phases))}
    return load_config(config.model_copy(update=changed).model_dump(mode="json"), origin=_NO_RETRIEVAL)


def _split_values(values: str) -> list[str]:
    """Split at commas outside of brackets and quotes."""
    parts, depth, quoted = [""], 0, ""
    for character in values:
        if quoted:
            quoted = "" if character == quoted else quoted
        elif character in "\"'":
            quoted = character
        depth += (character in "[{") - (character in "]}") if not quoted else 0
        if character == "," and not depth and not quoted:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts]


def subsample(task: Mapping[str, Any], *, count: int, seed: int, folder: Path) -> tuple[Path, Path | None]:
    """Write a sample of about `count` rows of `task["train"]` to `folder`, with the same column names; stratified if texts have one label.

    Return the file, and that of the other rows without their labels (None if there are none). Every label has at least one row. With
    equal seeds, a smaller sample is a subset of a larger one. Each training file has its own folder, and after a change of that file its
    samples are replaced, so that runs on them are made again as runs on the file itself are.

    Raises:
        UsageError: if `count` is smaller than any run accepts or larger than the number of rows. DataError: for a bad row.
    """
    config = TaskConfig.model_validate({name: value for name, value in task.items() if value is not None and name in {"train", *_READ_BY}})
    kind, pair = config.kind, config.text_pair_column
    row_format = RowFormat.of(config)
    examples = read_examples(config.train, row_format, max_record_bytes=config.max_record_bytes, on_bad_row=config.on_bad_row)
    sampled = set(_sample(examples, count, seed, config.train, kind))
    rows: tuple[list[str], list[str]] = [], []
    for index, example in enumerate(examples):
        row = {config.text_column: example.text, **({} if pair is None else {pair: example.text_pair})}
        row |= {config.label_column: RULES[kind].plain(str(example.label))} if index in sampled else {}
        rows[index not in sampled].append(json.dumps(row, ensure_ascii=False) + "\n")
    source = folder / hash_json([train_path(config), config.model_dump(include=_READ_BY)])[:8]
    files = []
    for name, lines in zip(("train", "rest"), rows, strict=True):
        content, target = "".join(lines).encode(), source / f"{name}-{count}-{seed}.jsonl"
        if lines and not (target.is_file() and target.read_bytes() == content):
            publish_file(target, content)
        files.append(target if lines else None)
    assert files[0] is not None, "a sample has at least one row"
    return files[0], files[1]


def _sample(examples: list[Example], count: int, seed: int, origin: str, kind: TaskKind) -> list[int]:
    """Ascending indices."""
    rules, by_stratum, labels = RULES[kind], defaultdict[str, list[int]](list), set[str]()
    for index, example in enumerate(examples):
        by_stratum[rules.stratum(str(example.label))].append(index)
        labels.update(rules.names(str(example.label)))
    least = max(2, len(labels) * (2 if kind == "classification" else 1))  # a classification has at least two rows per label
    if not least <= count <= len(examples):
        what = f" of {counted(len(labels), 'label')}" if labels else ""
        raise UsageError(
            f"--labels {count}: {origin} has {len(examples):,} rows{what}; expected a number from {least} to {len(examples):,}, or all"
        )
    generator = np.random.Generator(np.random.Philox(key=[seed, _SUBSAMPLE_STREAM]))
    sampled: list[int] = []
    for stratum in sorted(by_stratum):
        share = max(1, round(count * len(by_stratum[stratum]) / len(examples)))
        # The whole stratum is permuted, so that a smaller sample is the beginning of a larger one.
        order = generator.permutation(by_stratum[stratum]).tolist()
        sampled += _new_labels_first(order, examples, kind)[:share]
    return sorted(sampled)


def _new_labels_first(order: list[int], examples: list[Example], kind: TaskKind) -> list[int]:
    """Return the rows that have a label which no earlier row has, then the others; of rows with one common label the order is unchanged."""
    seen, first, others = set[str](), list[int](), list[int]()
    for index in order:
        names = set(RULES[kind].names(str(examples[index].label)))
        (others if names <= seen else first).append(index)
        seen |= names
    return first + others
