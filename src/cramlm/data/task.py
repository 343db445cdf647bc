"""The labelled task: read its files, check them, split off dev if there is no dev file, and save the task with a run.

An example's id is its location: "train:17" is line 17 of the training file (row 17 of a parquet file). An example that is split off for dev
keeps its "train:" id. Labels are strings; a label's number is its index in the sorted list of the training labels.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import floor
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np

from cramlm.config.run import OPTIONAL_ID, OnBadRow, TaskConfig
from cramlm.data.labels import RULES, LabelRules, spelled_otherwise
from cramlm.errors import DataError, UsageError, brief, counted
from cramlm.io.paths import STDIN, stamp_input
from cramlm.io.readers import MAX_RECORD_BYTES, Reader
from cramlm.io.rows import Column, Row, has_remedy
from cramlm.records import Emit, Event, Example, Scale, Split, Task, TaskKind, silent
from cramlm.storage.artifacts import Artifact, hash_json, open_artifact, verify
from cramlm.storage.locks import damage_named
from cramlm.storage.stages import stage
from cramlm.text.markers import Markers
from cramlm.text.words import spaced_name

KIND: Final = "task"
_SPLITS: Final[tuple[Split, ...]] = ("train", "dev", "test")
_UNLABELLED: Final = "unlabelled"
_DESCRIPTION: Final = "task.json"
_SPLIT_STREAM: Final = 0x5D17  # this purpose's own random stream


@dataclass(frozen=True, slots=True)
class RowFormat:
    """Columns of a file of labelled texts. label_column: None = there are no labels. kind: what a label is (labels.py). id_column: of the
    examples' ids, which are lines if it is None; only the default column of a corpus may be missing. ids: whether an id may repeat. like:
    the file that the columns are those of, if it is another one.
    """

    text_column: str = "text"
    label_column: str | None = "label"
    text_pair_column: str | None = None
    kind: TaskKind = "classification"
    label_separator: str = "|"
    id_column: str | None = None
    ids: Literal["distinct", "any"] = "distinct"
    like: str = ""

    @staticmethod
    def of(config: TaskConfig) -> RowFormat:
        """Return the format of a task's files."""
        return RowFormat(config.text_column, config.label_column, config.text_pair_column, config.kind, config.label_separator)

    def columns(self, text_column: str | None) -> dict[str, Column]:
        """Return the columns to read by field of `Example`. text_column: read in place of the format's, if it is not None.

        Raises:
            UsageError: two of them have the same name.
        """
        columns = {"text": Column(text_column or self.text_column, like=self.like)}
        if self.label_column is not None:
            kind = RULES[self.kind].column
            columns["label"] = Column(self.label_column, kind, flag="--label-column", separator=self.label_separator, like=self.like)
        if self.text_pair_column is not None:
            columns["text_pair"] = Column(self.text_pair_column, flag="--text-pair-column", like=self.like)
        if self.id_column is not None:
            columns["id"] = Column(self.id_column, "name", required=self.id_column != OPTIONAL_ID, flag="--id-column")
        flags: dict[str, str] = {}
        for column in columns.values():
            if (other := flags.setdefault(column.name, column.flag)) != column.flag:
                raise UsageError(f"{other} and {column.flag} name the same column, {column.name!r}; pass different ones")
        return columns


def read_task(config: TaskConfig, *, seed: int, emit: Emit = silent) -> Task:
    """Read a task. Without a dev file, dev is split off from train (see `split_dev`), with a note.

    Raises:
        UsageError: a path is missing. DataError: a bad row (unless skipped); too few rows or labels; more labels than half the rows; a dev
        or test label that is not in train (unless ignored).
    """
    emit(Event("start", KIND, f"reading {config.train}"))
    rules = RULES[config.kind]
    train = _read_train(config, emit)
    dev = _read_split("dev", config.dev, config, emit) if config.dev else []
    test = _read_split("test", config.test, config, emit) if config.test else []
    labels = rules.task_labels([_label(example) for example in train], config.label_column)
    for split, path, examples in (("dev", config.dev, dev), ("test", config.test, test)):
        _check_unseen(split, path, examples, labels, config, emit)
    if config.dev is None:
        train, dev = _split_train(train, config, seed=seed)
        message = f"no dev file: {len(dev):,} of {len(train) + len(dev):,} training rows split off for dev (seed {seed})"
        emit(Event("note", KIND, message, data={"dev": [example.id for example in dev]}))
    train_labels = [_label(example) for example in train]
    for label, count in sorted(Counter(name for each in train_labels for name in rules.names(each)).items()):
        if count == 1:
            emit(Event("warning", KIND, f"{config.train}: label {brief(label)} has 1 training example; too few to learn it"))
    unlabelled = _read_unlabelled(config, (*train, *dev, *test), emit)
    counts = f"{len(train):,} train, {len(dev):,} dev, {len(test):,} test examples"
    counts += f", {counted(len(unlabelled), 'unlabelled text')}" if config.unlabelled else ""
    emit(Event("done", KIND, f"{counts}, {rules.summarize(train_labels, labels)}"))
    return Task(
        tuple(train),
        tuple(dev),
        tuple(test),
        labels,
        dev_is_split_from_train=config.dev is None,
        kind=config.kind,
        scale=rules.scale(train_labels),
        unlabelled=tuple(unlabelled),
        label_texts=texts_of_labels(labels) if config.label_names and config.kind == "classification" else (),
    )


def texts_of_labels(labels: Sequence[str]) -> tuple[Example, ...]:
    """Return a text of the words of each label's name ("rec.sport.hockey": "rec sport hockey"), without names that have no letters."""
    texts = [(label, spaced_name(label)) for label in labels]
    return tuple(Example(f"label:{label}", text, None, label) for label, text in texts if any(map(str.isalpha, text)))


def _read_unlabelled(config: TaskConfig, labelled: Sequence[Example], emit: Emit) -> list[Example]:
    """Read the distinct texts of `config.unlabelled` that are not those of labelled rows.

    Labelled texts are left out because a training text counts already, and one of dev or test must not be learned from.
    """
    row_format = replace(RowFormat.of(config), label_column=None, like=_named(config.train))
    kept: list[Example] = []
    keys, read = set(map(text_key, labelled)), 0
    for path in config.unlabelled:
        if path == STDIN:
            raise UsageError("unlabelled texts cannot come from standard input; pass a file")
        examples = read_examples(path, row_format, max_record_bytes=config.max_record_bytes, on_bad_row=config.on_bad_row, emit=emit)
        read += len(examples)
        for example in examples:
            if (key := text_key(example)) not in keys:
                keys.add(key)
                kept.append(Example(f"unlabelled:{len(kept) + 1}", example.text, example.text_pair, None))
    if read and not kept:
        raise DataError(f"{config.unlabelled[0]}: all {read:,} unlabelled texts are those of labelled rows; leave the file out")
    if read > len(kept):
        emit(Event("note", KIND, f"{read - len(kept):,} of {read:,} unlabelled texts left out: repeated, or texts of labelled rows"))
    return kept


@dataclass(frozen=True, slots=True)
class LabelledSize:
    """Training texts, without those that are split off for dev, and labels. marked: the texts are single and have markers
    (text/markers.py). paired: all are pairs.
    """

    texts: int
    labels: int
    marked: bool = False
    paired: bool = False


def count_training(config: TaskConfig, *, seed: int) -> LabelledSize:
    """Return the size of the training split that `read_task` returns, and if it has markers or pairs. Reads only the training file.

    Raises:
        UsageError, DataError: as `read_task` for the training file.
    """
    rules = RULES[config.kind]
    train = _read_train(config, silent)
    labels = rules.task_labels([_label(example) for example in train], config.label_column)
    if config.dev is None:
        train, _ = _split_train(train, config, seed=seed)
    marked = Markers.of_single([(example.text, example.text_pair) for example in train]) is not None
    return LabelledSize(len(train), len(labels), marked, paired=all(example.text_pair is not None for example in train))


def read_examples(
    path: str,
    row_format: RowFormat,
    *,
    max_record_bytes: int = MAX_RECORD_BYTES,
    on_bad_row: OnBadRow | None = None,
    emit: Emit = silent,
) -> list[Example]:
    """Read the rows of a file in order. Ids are those of the id column, else "<line>", or "<file>:<line>" if the path is a URL of several
    files. A .txt file and "-" (standard input, unless it holds JSON lines) have one text per line.

    Raises:
        UsageError: the path is missing. DataError: a bad row (unless skipped), such as a blank text, an invalid label or a repeated id; no
        row has a label.
    """
    rules, distinct = RULES[row_format.kind], row_format.id_column is not None and row_format.ids == "distinct"
    stamps = stamp_input(path)
    examples: list[Example] = []
    rows_read, unlabelled, first_reason = 0, 0, ""
    lines_of_ids: dict[str, str] = {}
    for stamp in stamps:
        columns = row_format.columns(stamp.text_column)
        reader = Reader(
            path,
            tuple(columns.values()),
            max_record_bytes=max_record_bytes,
            on_bad_row=on_bad_row,
            txt_rows="lines",
            stamp=stamp,
            stage="examples",
            emit=emit,
        )
        prefix = f"{stamp.path.name}:" if len(stamps) > 1 else ""
        rows = iter(reader)
        for row in rows:
            line = f"{prefix}{row.line}"
            try:
                example = _example(dict(zip(columns, row.values, strict=False)), columns, rules, line)
            except ValueError as error:
                if lacks_label := _lacks_label(row, columns):
                    unlabelled += 1
                if lacks_label and not examples and on_bad_row != "skip" and all(_lacks_label(other, columns) for other in rows):
                    raise DataError(_no_labels(str(reader.path), columns["label"])) from error
                reader.reject(row, str(error))
                continue
            if distinct and (first := lines_of_ids.setdefault(example.id, line)) != line:
                reader.reject(row, f"id {brief(example.id)} is already used in line {first}")
            else:
                examples.append(example)
        rows_read += reader.counts.rows_read
        first_reason = first_reason or "".join(f", line {row.line}: {row.reason}" for row in reader.counts.rejected[:1])
    where = "standard input" if path == STDIN else path
    if not examples:
        if not rows_read:
            raise DataError(f"{where}: no rows; pass a file with data")
        if unlabelled == rows_read:
            raise DataError(_no_labels(where, columns["label"]))
        rejected = f"the only one was rejected{first_reason}" if rows_read == 1 else f"all {rows_read:,} were rejected{first_reason}"
        raise DataError(f"{where}: no rows left, {rejected}{'' if has_remedy(first_reason) else '; fix it'}")
    if row_format.kind == "multi-label" and "label" in columns and not any(rules.names(_label(example)) for example in examples):
        raise DataError(_no_labels(where, columns["label"]))
    return examples


def _lacks_label(row: Row, columns: Mapping[str, Column]) -> bool:
    """Return True if the label is the value of a column, and blank in this row."""
    value = dict(zip(columns, row.values, strict=False)).get("label", "none")
    return value is None or not value.strip()


def _no_labels(path: str, column: Column) -> str:
    """Return the message for a file without a label in any row."""
    other = f"leave the file out, or rename the column of its labels to {column.name!r}" if column.like else f"pass {column.flag}"
    return f"{path}: no row has a label in column {column.name!r}; {other}"


def _example(values: Mapping[str, str | None], columns: Mapping[str, Column], rules: LabelRules, line: str) -> Example:
    """Return the example of a row's values by field; raise ValueError with the reason if one is not valid. line: the id without another."""
    text, pair = values["text"], values.get("text_pair")
    if text is None or not text.strip():
        raise ValueError(f"{columns['text'].name!r} is blank")
    if "text_pair" in values and (pair is None or not pair.strip()):
        raise ValueError(f"{columns['text_pair'].name!r} is blank")
    label = rules.read(values["label"], columns["label"].name) if "label" in values else None
    return Example(values.get("id") or line, text, pair, label)


def unlabelled_task(
    queries: str, dev: str | None, test: str | None, row_format: RowFormat, *, on_bad_row: OnBadRow | None = None, emit: Emit = silent
) -> Task:
    """Read texts without labels as a task that can only retrieve: the queries are its training texts.

    Raises:
        UsageError: a path is missing. DataError: a bad row.
    """
    assert row_format.label_column is None

    def read(path: str | None, row_format: RowFormat) -> tuple[Example, ...]:
        return tuple(read_examples(path, row_format, on_bad_row=on_bad_row, emit=emit)) if path else ()

    held_out = replace(row_format, like=f"the queries ({queries})")
    train, dev_texts, test_texts = read(queries, row_format), read(dev, held_out), read(test, held_out)
    emit(Event("done", KIND, f"{len(train):,} queries, {len(dev_texts):,} dev, {len(test_texts):,} test texts, without labels"))
    return Task(train, dev_texts, test_texts, (), dev_is_split_from_train=False)


def split_dev(
    examples: Sequence[Example], *, fraction: float, seed: int, stratum: Callable[[str], str] = str
) -> tuple[list[Example], list[Example]]:
    """Return (train, dev), each in file order, with about `fraction` of every label's rows in dev. Depends only on `seed` and the rows.

    Rows with the same text (`text_key`) stay together, so that no dev text is also in train; texts with several labels stay in train. A
    label with at least three distinct texts gets at least one in dev, and every label keeps one in train. stratum: maps a label to its
    stratum; a constant gives a plain random split.

    Raises:
        DataError: there are too few distinct texts.
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
        shuffled = [by_label[label][index] for index in generator.permutation(len(by_label[label]))]
        target = max(1 if len(shuffled) >= 3 else 0, floor(rows[label] * fraction + 0.5))
        size = 0
        for group in shuffled[:-1]:  # one group stays in train, whatever the fraction
            if size >= target:
                break
            if size and size + len(group) > target + 1:
                continue  # a text repeated many times would unbalance dev
            chosen.update(group)
            size += len(group)
    if not chosen:
        spare = next((groups_of[0] for groups_of in by_label.values() if len(groups_of) > 1), None)
        if spare is None:
            raise DataError(f"{counted(len(groups), 'distinct text')}, too few to split a dev set off")
        chosen.update(spare)
    train = [example for index, example in enumerate(examples) if index not in chosen]
    return train, [examples[index] for index in sorted(chosen)]


def task_fingerprint(task: Task) -> dict[str, str]:
    """Return the sha256 of each split's content in order (texts, pairs, labels; not ids), of the labels, and of any unlabelled and label
    texts.
    """
    splits: dict[str, Sequence[Example]] = {name: getattr(task, name) for name in _SPLITS}
    hashes = {name: hash_json([[example.text, example.text_pair, example.label] for example in split]) for name, split in splits.items()}
    optional: dict[str, str] = {} if task.kind == "classification" else {"kind": task.kind}
    if task.unlabelled:
        optional["unlabelled"] = hash_json([[example.text, example.text_pair] for example in task.unlabelled])
    if task.label_texts:
        optional["label_texts"] = hash_json([[example.text, example.label] for example in task.label_texts])
    return {**hashes, "labels": hash_json(list(task.labels)), **optional}


def text_key(example: Example) -> str:
    """Return a key that is equal for examples of the same text: lower-cased, with white space folded. Punctuation counts."""
    halves = [example.text] if example.text_pair is None else [example.text, example.text_pair]
    return "\n".join(" ".join(half.lower().split()) for half in halves)


def _read_train(config: TaskConfig, emit: Emit) -> list[Example]:
    """Read the training file and check its labels."""
    train = _read_split("train", config.train, config, emit)
    RULES[config.kind].check([_label(example) for example in train], config.train)
    return train


def _read_split(split: Split, path: str, config: TaskConfig, emit: Emit) -> list[Example]:
    if path == STDIN:
        raise UsageError(f"the {split} set cannot come from standard input; pass a file")
    examples = read_examples(
        path,
        replace(RowFormat.of(config), like="" if split == "train" else _named(config.train)),
        max_record_bytes=config.max_record_bytes,
        on_bad_row=config.on_bad_row,
        emit=lambda event: emit(Event(event.kind, KIND, event.message, data={**event.data, "split": split})),
    )
    return [Example(f"{split}:{example.id}", example.text, example.text_pair, example.label) for example in examples]


def _split_train(train: Sequence[Example], config: TaskConfig, *, seed: int) -> tuple[list[Example], list[Example]]:
    """As `split_dev`, of a training file without a dev file; its error names the file and the remedy."""
    try:
        return split_dev(train, fraction=config.dev_fraction, seed=seed, stratum=RULES[config.kind].stratum)
    except DataError as error:
        remedy = "pass --dev FILE, or add rows with other texts"
        least = ", of which one label needs at least 2" if config.kind == "classification" else ""
        raise DataError(f"{config.train}: {error}; {remedy}{least}") from error


def _named(train: str) -> str:
    return f"the training file ({train})"


def _check_unseen(split: str, path: str | None, examples: Sequence[Example], labels: Sequence[str], config: TaskConfig, emit: Emit) -> None:
    rules, seen = RULES[config.kind], set(labels)
    unseen_names = [(example, [name for name in rules.names(_label(example)) if name not in seen]) for example in examples]
    unseen = [(example, names[0]) for example, names in unseen_names if names]
    if not unseen:
        return
    line, label = unseen[0][0].id.removeprefix(f"{split}:"), brief(unseen[0][1])
    if config.unseen_labels == "fail":
        shown = ", ".join(brief(name, 30) for name in labels[:8]) + (", …" if len(labels) > 8 else "")
        where = f"in {counted(len(unseen), 'row')}{spelled_otherwise(unseen[0][1], labels)}"
        raise DataError(
            f"{path}:{line}: label {label} is not among the training labels ({shown}), {where}; fix the rows, add the label to the "
            "training file, or pass --set task.unseen_labels=ignore"
        )
    emit(
        Event(
            "warning",
            KIND,
            f"{path}: labels that training lacks in {counted(len(unseen), 'row')} (first {label}, line {line}); they are scored as wrong",
            data={"split": split, "unseen": len(unseen)},
        )
    )


def _label(example: Example) -> str:
    assert example.label is not None
    return example.label


def save_task(task: Task, run: Path, *, emit: Emit) -> Artifact:
    """Publish the task at RUN/task, so that commands that read the run need no other file.

    train.jsonl, dev.jsonl, test.jsonl, unlabelled.jsonl (if there are any): a JSON object per example, in order (id, text, label,
    text_pair if any). task.json: kind, labels, scale, whether dev was split off from train, and whether the labels' names are texts.
    """
    description = {
        "kind": task.kind,
        "labels": list(task.labels),
        "scale": asdict(task.scale),
        "dev_is_split": task.dev_is_split_from_train,
        "label_names": bool(task.label_texts),
    }

    files: dict[str, Sequence[Example]] = {name: getattr(task, name) for name in (*_SPLITS, *[_UNLABELLED] * bool(task.unlabelled))}

    def write(folder: Path) -> None:
        for name, examples in files.items():
            with (folder / f"{name}.jsonl").open("w", encoding="utf-8") as file:
                file.writelines(json.dumps(_row(example), ensure_ascii=False) + "\n" for example in examples)
        (folder / _DESCRIPTION).write_text(json.dumps(description, ensure_ascii=False) + "\n", "utf-8")

    ids = {name: [example.id for example in examples] for name, examples in files.items()}
    key = {"format": 2, "task": task_fingerprint(task), "rows": hash_json([ids, description])}
    return stage(run / KIND, kind=KIND, key=key, write=write, emit=emit)


def load_task(run: Path) -> Task:
    """Return the task that `save_task` published for a run.

    Raises:
        ArtifactError: it is missing or damaged.
    """
    folder = open_artifact(run / KIND, kind=KIND).path
    verify(folder)
    with damage_named(folder, "delete the folder and run `cramlm fit` again"):
        description = json.loads((folder / _DESCRIPTION).read_bytes())
        train, dev, test = (tuple(_read_saved(folder / f"{split}.jsonl")) for split in _SPLITS)
        labels, scale = tuple(description["labels"]), Scale(**description["scale"])
        unlabelled = tuple(_read_saved(folder / f"{_UNLABELLED}.jsonl")) if (folder / f"{_UNLABELLED}.jsonl").is_file() else ()
        label_texts = texts_of_labels(labels) if description["label_names"] else ()
        return Task(train, dev, test, labels, bool(description["dev_is_split"]), description["kind"], scale, unlabelled, label_texts)


def _row(example: Example) -> dict[str, Any]:
    return {name: value for name, value in asdict(example).items() if value is not None}


def _read_saved(path: Path) -> list[Example]:
    with path.open(encoding="utf-8") as file:
        return [Example(row["id"], row["text"], row.get("text_pair"), row.get("label")) for row in map(json.loads, file)]
