"""What is compared: arms x numbers of labels x seeds, each cell a complete config in a folder of its own.

An arm is a recipe (`tlm`; `tlm@init` for one that also runs without, started from the checkpoint), a config file (`mine.toml`), or either
of them with settings of its own. Everything else, the data, the budget and the draws of labels, is the same for all arms.
"""

from __future__ import annotations

import itertools
import json
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cramlm.cli.options import resolve_run
from cramlm.config.run import RunConfig, load_config, read_toml
from cramlm.data.task import RowFormat, read_examples
from cramlm.errors import UsageError
from cramlm.evaluation.kinds import require_single_label
from cramlm.pipeline.run_folder import RUNS, name_of_task
from cramlm.recipes import RECIPES
from cramlm.recipes.phases import on_task_text
from cramlm.records import Example
from cramlm.storage.artifacts import hash_json, publish_file

ALL = "all"
ON_INIT = "@init"
_NO_RETRIEVAL = "retriever.top_k=0"


@dataclass(frozen=True, slots=True)
class Arm:
    """A row of the table. source: a recipe or a config file; settings: what `--set` would say, for this arm alone."""

    name: str
    source: str
    settings: tuple[str, ...] = ()

    @property
    def folder(self) -> str:
        """A name that every file system takes, different for different arms."""
        plain = re.sub(r"[^\w.+=-]+", "-", self.name)
        return plain if plain == self.name else f"{plain}-{hash_json(self.name)[:6]}"


@dataclass(frozen=True, slots=True)
class Question:
    """Everything that is asked. labels: "all" or a count, of training rows. task: fields of `TaskConfig`. settings: for every arm."""

    arms: tuple[Arm, ...]
    seeds: tuple[int, ...]
    labels: tuple[str, ...]
    task: Mapping[str, Any]
    corpus: tuple[str, ...] = ()
    init: str | None = None
    budget: str | None = None
    preset: str | None = None
    settings: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        arms = [{"name": arm.name, "source": arm.source, "settings": list(arm.settings)} for arm in self.arms]
        lists = {"seeds": list(self.seeds), "labels": list(self.labels), "corpus": list(self.corpus), "settings": list(self.settings)}
        return {"arms": arms, **lists, "task": dict(self.task), "init": self.init, "budget": self.budget, "preset": self.preset}


@dataclass(frozen=True, slots=True)
class Cell:
    """One run of the experiment."""

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
    """A number means so many, from 1 on; numbers with commas are the seeds themselves, "7," is seed 7 alone.

    Raises:
        UsageError: if it is neither.
    """
    given = text.replace(" ", "")
    parts = given.removesuffix(",").split(",")
    if not all(part.isascii() and part.isdigit() for part in parts) or len(set(parts)) < len(parts) or parts == ["0"]:
        raise UsageError(f'--seeds {text!r}: give how many, like 5, or which, like 7,11,13, or one, like "7,"')
    return tuple(map(int, parts)) if "," in given else tuple(range(1, int(parts[0]) + 1))


def read_counts(text: str) -> tuple[str, ...]:
    """Numbers of labels, with commas.

    Raises:
        UsageError: if one is neither a number nor "all".
    """
    parts = text.replace(" ", "").split(",")
    if not all(part == ALL or (part.isascii() and part.isdigit()) for part in parts) or len(set(parts)) < len(parts):
        raise UsageError(f"--labels {text!r}: give numbers of training rows or all, like 100,500,all")
    return tuple(parts)


def arms_of(names: Sequence[str]) -> tuple[Arm, ...]:
    """An arm for each recipe or config file.

    Raises:
        UsageError: if one is named twice, or none.
    """
    arms = tuple(Arm(Path(name).stem if name.endswith(".toml") else name, name) for name in names)
    if not arms or len({arm.name for arm in arms}) < len(arms):
        raise UsageError(f"--recipes {','.join(names) or '(none)'}: name each once, like tlm,labels-only,random-retrieval")
    return arms


def arms_over(source: str, over: Sequence[str]) -> tuple[Arm, ...]:
    """An arm for every value of a setting, like retriever.top_k=0,50,500; of several settings, for every combination of their values.

    `select.` means `retriever.`. top_k = 0 stands for no retrieved text at all.

    Raises:
        UsageError: if one is no KEY=VALUE,VALUE,...
    """
    choices = []
    for each in over:
        key, equals, values = each.partition("=")
        listed = _split_values(values)
        if not equals or not key.strip() or not all(listed) or len(set(listed)) < len(listed):
            raise UsageError(f"--over {each!r} is not KEY=VALUE,VALUE,...; write it like retriever.top_k=0,50,500, each value once")
        key = re.sub(r"^select\.", "retriever.", key.strip())
        choices.append([f"{key}={value}" for value in listed])
    if not choices:
        raise UsageError("nothing to vary; pass --over KEY=VALUE,VALUE,..., like retriever.top_k=0,50,500")
    shown = [re.sub(r"^retriever\.", "", chosen[0].partition("=")[0]) for chosen in choices]
    arms = []
    for settings in itertools.product(*choices):
        name = ", ".join(f"{key}={setting.partition('=')[2]}" for key, setting in zip(shown, settings, strict=True))
        arms.append(Arm(name, source, settings))
    return tuple(arms)


def default_folder(train: str, command: str) -> Path:
    """Return runs/TASK-COMMAND: the experiments on a task share their runs, those on different tasks do not."""
    return RUNS / f"{name_of_task(train)}-{command}"


def cells_of(question: Question, out: Path) -> list[Cell]:
    """Every cell, seed by seed (so that early results compare all arms); draws of labels are written to `out`.

    Raises:
        UsageError, DataError: if an arm cannot be run on this data; UsageError, if its texts do not have one label each.
    """
    for arm in question.arms:
        kind = _config(question, arm, dict(question.task), question.seeds[0]).task.kind
        require_single_label(
            kind, "an experiment of several runs", "run cramlm fit for each recipe and look at them with cramlm report RUN RUN"
        )
    return list(_cells(question, out))


def _cells(question: Question, out: Path) -> Iterator[Cell]:
    for seed in question.seeds:
        for labels in question.labels:
            task = dict(question.task)
            if labels != ALL:
                task["train"] = str(draw_labels(task, count=int(labels), seed=seed, folder=out / "draws"))
            for arm in question.arms:
                config = _config(question, arm, task, seed)
                yield Cell(arm, labels, seed, config, out / "runs" / labels / arm.folder / str(seed))


def _config(question: Question, arm: Arm, task: dict[str, Any], seed: int) -> RunConfig:
    settings = [each for each in (*question.settings, *arm.settings) if each.replace(" ", "") != _NO_RETRIEVAL]
    common: dict[str, Any] = {"task": task, "budget": question.budget, "seed": seed, "preset": question.preset}
    is_file, on_init = arm.source.endswith(".toml"), arm.source.endswith(ON_INIT)
    reads = not is_file or "corpus" in read_toml(Path(arm.source))
    common["corpus"] = list(question.corpus) if question.corpus and reads else None
    recipe = arm.source.removesuffix(ON_INIT)
    if on_init and question.init is None:
        raise UsageError(f"{arm.source}: there is no checkpoint to start from; pass --init FOLDER")
    if question.init is not None and (on_init or _needs_checkpoint(recipe)):
        common["init"] = question.init
    config = resolve_run(None if is_file else recipe, Path(arm.source) if is_file else None, settings, **common)
    if len(settings) < len(question.settings) + len(arm.settings):
        config = _without_retrieval(config)
    return load_config(config.model_dump(mode="json") | {"name": arm.name}, origin=arm.source)


def _needs_checkpoint(recipe: str) -> bool:
    """Whether it starts from nothing else; the others run from scratch unless told otherwise."""
    return getattr(RECIPES.get(recipe.partition(":")[0]), "start", "either") == "pretrained"


def _without_retrieval(config: RunConfig) -> RunConfig:
    """The same phases on the task's text alone."""
    changed = {"corpus": None, "retriever": None, "phases": tuple(map(on_task_text, config.phases))}
    return load_config(config.model_copy(update=changed).model_dump(mode="json"), origin=_NO_RETRIEVAL)


def _split_values(values: str) -> list[str]:
    """At commas that are not inside brackets or quotes."""
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


_DRAW_STREAM = 0xD4A3


def draw_labels(task: Mapping[str, Any], *, count: int, seed: int, folder: Path) -> Path:
    """A file of about `count` rows of `task["train"]`, under the same column names; at least one row of every label.

    Of one seed, a smaller draw is part of a larger one.

    Raises:
        UsageError: if there are not so many rows, or fewer asked for than labels. DataError: a bad row.
    """
    columns = {name: task.get(f"{name}_column") or default for name, default in (("text", "text"), ("label", "label"))}
    pair = task.get("text_pair_column")
    row_format = RowFormat(columns["text"], columns["label"], pair)
    examples = read_examples(task["train"], row_format, on_bad_row=task.get("on_bad_row") or "fail")
    rows = []
    for example in _drawn(examples, count, seed, str(task["train"])):
        halves = {columns["text"]: example.text, **({} if pair is None else {pair: example.text_pair})}
        rows.append(json.dumps({**halves, columns["label"]: example.label}, ensure_ascii=False) + "\n")
    content = "".join(rows)
    target = folder / f"train-{count}-{seed}-{hash_json(content)[:8]}.jsonl"
    if not target.is_file():
        publish_file(target, content.encode())
    return target


def _drawn(examples: list[Example], count: int, seed: int, origin: str) -> list[Example]:
    by_label: dict[str, list[int]] = defaultdict(list)
    for index, example in enumerate(examples):
        by_label[str(example.label)].append(index)
    if not len(by_label) <= count <= len(examples):
        raise UsageError(
            f"--labels {count}: {origin} has {len(examples):,} rows of {len(by_label)} labels; ask for a number between, or all"
        )
    generator = np.random.Generator(np.random.Philox(key=[seed, _DRAW_STREAM]))
    chosen: list[int] = []
    for label in sorted(by_label):
        share = max(1, round(count * len(by_label[label]) / len(examples)))
        chosen += generator.permutation(by_label[label])[:share].tolist()
    return [examples[index] for index in sorted(chosen)]
