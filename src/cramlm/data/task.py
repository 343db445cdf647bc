"""The labelled data: read strictly, checked for what makes a classifier meaningless, and split if there is no dev file.

Ids of examples say where they are: "train:17" is line 17 of the training file (row 17 of a parquet file). An example that was split off
for dev keeps its "train:" id. Labels are strings; their ids are places in the sorted list of those that training shows.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from math import floor
from pathlib import Path
from typing import Any, Final

import numpy as np

from cramlm.config.run import OnBadRow, TaskConfig
from cramlm.data.labels import RULES
from cramlm.errors import ArtifactError, DataError, UsageError
from cramlm.io.paths import stamp_input
from cramlm.io.readers import MAX_RECORD_BYTES, Reader
from cramlm.io.rows import Column
from cramlm.io.streams import STDIN, brief
from cramlm.records import Emit, Event, Example, Scale, Split, Task, TaskKind, silent
from cramlm.storage.artifacts import Artifact, hash_json, open_artifact, stage, verify

STAGE = "task"
_SPLIT_STREAM = 0x5D17  # keeps the draw apart from others made with the same seed


def read_task(config: TaskConfig, *, seed: int, emit: Emit = silent) -> Task:
    """The task of these files; without a dev file, dev is split off from train (see `split_dev`) and a note says so.

    Raises:
        UsageError: a path is missing. DataError: a bad row (unless skipped); too few rows or labels to learn anything from; more labels
        than half the rows; a dev or test label that training lacks (unless ignored).
    """
    emit(Event("start", STAGE, f"reading {config.train}"))
    rules = RULES[config.kind]
    train = _read_train(config, emit)
    dev = _read_split("dev", config.dev, config, emit) if config.dev else []
    test = _read_split("test", config.test, config, emit) if config.test else []
    labels = rules.all_names([_label(example) for example in train], config.label_column)
    for split, path, examples in (("dev", config.dev, dev), ("test", config.test, test)):
        _check_unseen(split, path, examples, labels, config, emit)
    if config.dev is None:
        train, dev = split_dev(train, fraction=config.dev_fraction, seed=seed, stratum=rules.stratum)
        message = f"no dev file: {len(dev):,} of {len(train) + len(dev):,} training rows split off for dev (seed {seed})"
        emit(Event("note", STAGE, message, data={"dev": [example.id for example in dev]}))
    learnt = [_label(example) for example in train]
    for label, count in sorted(Counter(name for each in learnt for name in rules.names(each)).items()):
        if count == 1:
            emit(Event("warning", STAGE, f"{config.train}: label {brief(label)} has 1 training example; it can hardly be learnt"))
    emit(Event("done", STAGE, f"{len(train):,} train, {len(dev):,} dev, {len(test):,} test examples, {rules.sum_up(learnt, labels)}"))
    return Task(
        tuple(train),
        tuple(dev),
        tuple(test),
        labels,
        dev_is_split_from_train=config.dev is None,
        kind=config.kind,
        scale=rules.scale(learnt),
    )


@dataclass(frozen=True, slots=True)
class LabelledSize:
    """Training texts, without those that are split off for dev, and labels."""

    texts: int
    labels: int


def count_training(config: TaskConfig, *, seed: int) -> LabelledSize:
    """The size of the training split that `read_task` returns; reads the training file alone.

    Raises:
        UsageError, DataError: as `read_task` for the training file.
    """
    rules = RULES[config.kind]
    train = _read_train(config, silent)
    labels = rules.all_names([_label(example) for example in train], config.label_column)
    if config.dev is None:
        train, _ = split_dev(train, fraction=config.dev_fraction, seed=seed, stratum=rules.stratum)
    return LabelledSize(len(train), len(labels))


def read_examples(
    path: str,
    *,
    text_column: str = "text",
    label_column: str | None,
    text_pair_column: str | None = None,
    max_record_bytes: int = MAX_RECORD_BYTES,
    on_bad_row: OnBadRow = "fail",
    kind: TaskKind = "classification",
    label_separator: str = "|",
    emit: Emit = silent,
) -> list[Example]:
    """Rows to predict or to evaluate, in order; ids are "<line>", of a url that means several files "<file>:<line>". A .txt file and "-"
    (standard input, unless it holds JSON lines) have one text per line. kind: what a label is (data/labels.py).

    Raises:
        UsageError: the path is missing. DataError: a bad row (unless skipped), such as a blank text or, with `label_column`, what is no
        label.
    """
    stamps = stamp_input(path)
    examples: list[Example] = []
    read, why = 0, ""
    for stamp in stamps:
        columns = [Column(stamp.text_column or text_column)]
        columns += (
            [Column(label_column, RULES[kind].column, flag="--label-column", separator=label_separator)] if label_column is not None else []
        )
        columns += [Column(text_pair_column, flag="--text-pair-column")] if text_pair_column is not None else []
        _distinct(columns)
        limits: dict[str, Any] = {"max_record_bytes": max_record_bytes, "on_bad_row": on_bad_row}
        reader = Reader(path, columns, txt_rows="lines", stamp=stamp, stage="examples", emit=emit, **limits)
        prefix = f"{stamp.path.name}:" if len(stamps) > 1 else ""
        for row in reader:
            values = iter(row.values)
            text = next(values)
            label = next(values) if label_column is not None else None
            pair = next(values) if text_pair_column is not None else None
            if text is None or not text.strip():
                reader.reject(row, f"{columns[0].name!r} is blank")
            elif text_pair_column is not None and (pair is None or not pair.strip()):
                reader.reject(row, f"{text_pair_column!r} is blank")
            else:
                try:
                    read_label = None if label_column is None else RULES[kind].read(label, label_column)
                except ValueError as error:
                    reader.reject(row, str(error))
                    continue
                examples.append(Example(f"{prefix}{row.line}", text, pair, read_label))
        read += reader.rows_read
        why = why or "".join(f", line {row.line}: {row.reason}" for row in reader.rejected[:1])
    if not examples:
        where = "standard input" if path == STDIN else path
        if not read:
            raise DataError(f"{where}: no rows; pass a file with data")
        raise DataError(f"{where}: no rows left, all {read:,} were rejected{why}; fix them")
    return examples


def split_dev(
    examples: Sequence[Example], *, fraction: float, seed: int, stratum: Callable[[str], str] = str
) -> tuple[list[Example], list[Example]]:
    """(train, dev), each in file order: about `fraction` of every label's rows for dev, drawn from `seed` and the rows alone.

    Rows with the same text (lower-cased, white space folded) stay together, so that dev holds nothing that training shows; texts with
    several labels stay in train. A label with three or more such groups gets at least one in dev, and every label keeps one in train.
    stratum: what stands for a label in all this; if it is the same for all, the draw is a plain one.

    Raises:
        DataError: if no row can be spared.
    """
    groups: dict[str, list[int]] = {}
    for index, example in enumerate(examples):
        groups.setdefault(text_key(example), []).append(index)
    by_label: dict[str, list[list[int]]] = {}
    for group in groups.values():
        if len({stratum(_label(examples[index])) for index in group}) == 1:
            by_label.setdefault(stratum(_label(examples[group[0]])), []).append(group)
    rows = Counter(stratum(_label(example)) for example in examples)
    generator = np.random.Generator(np.random.Philox(key=[seed, _SPLIT_STREAM]))
    chosen: set[int] = set()
    for label in sorted(by_label):
        shuffled = [by_label[label][place] for place in generator.permutation(len(by_label[label]))]
        wanted = max(1 if len(shuffled) >= 3 else 0, floor(rows[label] * fraction + 0.5))
        taken = 0
        for group in shuffled[:-1]:  # one group stays, whatever the fraction
            if taken >= wanted:
                break
            if taken and taken + len(group) > wanted + 1:
                continue  # a text repeated many times would unbalance dev
            chosen.update(group)
            taken += len(group)
    if not chosen:
        spare = next((groups_of[0] for groups_of in by_label.values() if len(groups_of) > 1), None)
        if spare is None:
            raise DataError(f"{len(groups):,} distinct training texts are too few to split a dev set off; pass --dev, or add rows")
        chosen.update(spare)
    train = [example for index, example in enumerate(examples) if index not in chosen]
    return train, [examples[index] for index in sorted(chosen)]


def split_rows(task: Task) -> dict[Split, list[str]]:
    """The ids of every split's examples, in order: plain data, to be stored with the run."""
    return {
        "train": [example.id for example in task.train],
        "dev": [example.id for example in task.dev],
        "test": [example.id for example in task.test],
    }


def task_fingerprint(task: Task) -> dict[str, str]:
    """sha256 of each split's content in order (texts, pairs, labels; not ids), and of the list of labels."""
    splits = {"train": task.train, "dev": task.dev, "test": task.test}
    hashes = {name: hash_json([[example.text, example.text_pair, example.label] for example in split]) for name, split in splits.items()}
    return {**hashes, "labels": hash_json(list(task.labels)), **({} if task.kind == "classification" else {"kind": task.kind})}


def text_key(example: Example) -> str:
    """What makes two examples the same text: both halves, lower-cased, white space folded. Punctuation counts: it may be markup that
    matters.
    """
    halves = [example.text] if example.text_pair is None else [example.text, example.text_pair]
    return "\n".join(" ".join(half.lower().split()) for half in halves)


def _read_train(config: TaskConfig, emit: Emit) -> list[Example]:
    """The training file's rows, checked for labels that can be learnt."""
    train = _read_split("train", config.train, config, emit)
    RULES[config.kind].check([_label(example) for example in train], config.train)
    return train


def _read_split(split: Split, path: str, config: TaskConfig, emit: Emit) -> list[Example]:
    if path == STDIN:
        raise UsageError(f"the {split} set cannot come from standard input; pass a file")
    examples = read_examples(
        path,
        text_column=config.text_column,
        label_column=config.label_column,
        text_pair_column=config.text_pair_column,
        max_record_bytes=config.max_record_bytes,
        on_bad_row=config.on_bad_row,
        kind=config.kind,
        label_separator=config.label_separator,
        emit=lambda event: emit(Event(event.kind, STAGE, event.message, data={**event.data, "split": split})),
    )
    return [Example(f"{split}:{example.id}", example.text, example.text_pair, example.label) for example in examples]


def _distinct(columns: Sequence[Column]) -> None:
    names = [column.name for column in columns]
    if len(set(names)) != len(names):
        raise UsageError(f"text, pair and label are different columns, got {names}; pass --text-column, --text-pair-column, --label-column")


def _check_unseen(split: str, path: str | None, examples: Sequence[Example], labels: Sequence[str], config: TaskConfig, emit: Emit) -> None:
    known, rules = set(labels), RULES[config.kind]
    foreign = [(example, [name for name in rules.names(_label(example)) if name not in known]) for example in examples]
    unseen = [(example, names[0]) for example, names in foreign if names]
    if not unseen:
        return
    line, label = unseen[0][0].id.removeprefix(f"{split}:"), brief(unseen[0][1])
    if config.unseen_labels == "fail":
        shown = ", ".join(brief(known_label, 30) for known_label in labels[:8]) + (", …" if len(labels) > 8 else "")
        raise DataError(
            f"{path}:{line}: label {label} is not among the training labels ({shown}), {len(unseen):,} such rows; fix them, add the label "
            f"to the training file, or pass --unseen-labels ignore"
        )
    emit(
        Event(
            "warning",
            STAGE,
            f"{path}: {len(unseen):,} rows have labels that training lacks (first {label}, line {line}); they are scored as wrong",
            data={"split": split, "unseen": len(unseen)},
        )
    )


def _label(example: Example) -> str:
    assert example.label is not None
    return example.label


KIND: Final = "task"
_SPLITS: Final[tuple[Split, ...]] = ("train", "dev", "test")
_FACTS: Final = "task.json"


def keep_task(task: Task, run: Path, *, emit: Emit) -> Artifact:
    """Publish the task at RUN/task."""

    facts = {"kind": task.kind, "labels": list(task.labels), "scale": asdict(task.scale), "dev_is_split": task.dev_is_split_from_train}

    def write(folder: Path) -> None:
        for split in _SPLITS:
            with (folder / f"{split}.jsonl").open("w", encoding="utf-8") as file:
                file.writelines(json.dumps(_row(example), ensure_ascii=False) + "\n" for example in getattr(task, split))
        (folder / _FACTS).write_text(json.dumps(facts, ensure_ascii=False) + "\n", "utf-8")

    key = {"format": 1, "task": task_fingerprint(task), "rows": hash_json([split_rows(task), facts])}
    return stage(run / KIND, kind=KIND, key=key, write=write, emit=emit)


def load_task(run: Path) -> Task:
    """Return the task that `keep_task` published for a run.

    Raises:
        ArtifactError: if there is none, or it is damaged.
    """
    folder = open_artifact(run / KIND, kind=KIND).path
    verify(folder)
    try:
        facts = json.loads((folder / _FACTS).read_bytes())
        train, dev, test = (tuple(_read(folder / f"{split}.jsonl")) for split in _SPLITS)
        labels, scale = tuple(facts["labels"]), Scale(**facts["scale"])
        return Task(train, dev, test, labels, bool(facts["dev_is_split"]), facts["kind"], scale)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ArtifactError(f"{folder}: damaged ({error}); delete the folder and run `cramlm fit` again") from error


def _row(example: Example) -> dict[str, Any]:
    return {name: value for name, value in asdict(example).items() if value is not None}


def _read(path: Path) -> list[Example]:
    with path.open(encoding="utf-8") as file:
        return [Example(row["id"], row["text"], row.get("text_pair"), row.get("label")) for row in map(json.loads, file)]
