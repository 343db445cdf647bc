"""Validation of labelled files before training: one finding per line, with its file and line.

    problem   makes a score wrong: a held-out text in another split, one text with two labels, a label that is not in train, a bad row
    notice    makes a score worse or less reliable: repeated and similar texts, rare labels, long or empty texts, another script, a corpus
              that contains held-out text or has other words than the task

Two texts are the same if their `task.text_key` is equal; near-repetitions are those that `decontamination.HeldOut` finds.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np

from cramlm.data.corpus import Corpus
from cramlm.data.decontamination import HeldOut
from cramlm.data.labels import RULES, WRITTEN_LIST, folded, number_texts, range_of, spelling_difference
from cramlm.data.task import RowFormat, read_examples, text_key
from cramlm.errors import DataError, brief, counted
from cramlm.io.rows import Rejected
from cramlm.records import Event, Example, Task, TaskKind
from cramlm.text.characters import count_scripts, main_script
from cramlm.text.words import count_words, segment

Severity: TypeAlias = Literal["problem", "notice"]

LONG_WORDS = 380  # about 512 tokens, an encoder's default length
RARE = 5  # training examples of a label
UNEVEN = 20.0  # rows of the largest label over those of the smallest
_MANY_NUMBERS = 20  # labels
_MISSING_VALUES = frozenset({"<NA>", "N/A", "NA", "NULL", "NaN", "NaT", "None", "n/a", "nan", "null"})
"""How pandas, R and databases write that a cell has no value."""
FAR_SCRIPT = 0.02  # share of the training rows below which a script is unusual
SAMPLE = 5_000  # passages of the corpus whose words and scripts are counted
KNOWN_WORDS = 0.5  # share of the training texts' words that should occur in this sample
OWN_SCRIPT = 0.1  # share of its letters that should be of the training texts' script


@dataclass(frozen=True, slots=True)
class Finding:
    """location: file and line. rule: name of the check."""

    location: str
    severity: Severity
    rule: str
    message: str

    def __str__(self) -> str:
        return f"{self.location}: {self.severity}: {self.rule}: {self.message}"


@dataclass(frozen=True, slots=True)
class LabelledFile:
    """A file of labelled rows; the examples' ids are their locations (file and line)."""

    name: str
    examples: tuple[Example, ...]
    rejected: tuple[Rejected, ...] = ()
    kind: TaskKind = "classification"

    def names(self) -> Iterator[tuple[Example, str]]:
        """Yield every row with each of its labels; nothing for numbers."""
        for example in self.examples:
            yield from ((example, name) for name in RULES[self.kind].names(str(example.label)))


def read_labelled(path: str, row_format: RowFormat) -> LabelledFile:
    """Read a file; bad rows go to `rejected`.

    Raises:
        UsageError: the path is missing. DataError: no row is valid, or the file is damaged.
    """
    rejected: list[Rejected] = []

    def collect(event: Event) -> None:
        rejected.extend(Rejected(**row) for row in event.data.get("rejected", ()))

    examples = read_examples(path, row_format, on_bad_row="skip", emit=collect)
    located = (Example(f"{path}:{example.id}", example.text, example.text_pair, example.label) for example in examples)
    return LabelledFile(path, tuple(located), tuple(rejected), row_format.kind)


def files_of_task(task: Task) -> tuple[LabelledFile, list[LabelledFile]]:
    """Return train and the held-out splits of a task; locations are the examples' ids ("train:17")."""
    held_out = [LabelledFile(name, split, kind=task.kind) for name, split in (("dev", task.dev), ("test", task.test)) if split]
    return LabelledFile("train", task.train, kind=task.kind), held_out


def describe(file: LabelledFile) -> dict[str, Any]:
    """Return the statistics of a file as JSON data.

    labels: rows per label, most frequent first, empty for numbers. words: 5th, 50th, 95th and 100th percentile. scripts: shares of the
    letters. numbers: minimum, median and maximum.
    """
    lengths = [count_words(example.whole_text) for example in file.examples]
    quantiles = [int(value) for value in np.percentile(lengths, (5, 50, 95, 100), method="lower")]
    scripts = count_scripts(example.whole_text for example in file.examples)
    letters = max(1, scripts.total())
    values = [float(str(example.label)) for example in file.examples] if file.kind == "regression" else []
    numbers = tuple(float(value) for value in np.percentile(values, (0, 50, 100))) if values else ()
    shares = {name: count / letters for name, count in scripts.most_common() if count / letters >= 0.001}
    return {
        "name": file.name,
        "rows": len(file.examples),
        "labels": dict(Counter(name for _, name in file.names()).most_common()),
        "words": quantiles,
        "scripts": shares,
        "numbers": numbers,
    }


def check_files(train: LabelledFile, held_out: Sequence[LabelledFile]) -> Iterator[Finding]:
    """Yield every finding in the files, in this order: bad rows, repetitions, labels, lengths, scripts."""
    files = [train, *held_out]
    for file in files:
        for rejected in file.rejected:
            yield Finding(f"{rejected.file}:{rejected.line}", "problem", "bad-row", rejected.reason)
    yield from _repetitions(files)
    yield from _near_repetitions(train, held_out)
    yield from _labels(train, held_out)
    for file in files:
        yield from _lengths(file)
    yield from _scripts(train, files)


def check_corpus(train: LabelledFile, held_out: Sequence[LabelledFile], corpus: Corpus) -> Iterator[Finding]:
    """Yield findings on held-out text in the corpus (retrieval drops those passages), and on the corpus's words and script."""
    prepared = HeldOut([example for file in held_out for example in file.examples])
    texts = ((position, corpus.data(position)) for position in range(len(corpus)))
    for overlap in prepared.find(texts):
        document = corpus.document(overlap.position)
        what = "shares 13 words with this text" if overlap.reason == "shares 13 words" else "contains this text"
        message = f"passage {document.id} {what} ({brief(overlap.match, 60)}); retrieval drops it"
        yield Finding(overlap.split_example_id, "notice", "in-corpus", message)
    corpus.release()
    sample = [corpus.text(int(position)) for position in np.unique(np.linspace(0, len(corpus) - 1, SAMPLE).astype(np.int64))]
    corpus_words = {word for text in sample for word in segment(text)}
    words = Counter(word for example in train.examples for word in segment(example.whole_text))
    share = sum(count for word, count in words.items() if word in corpus_words) / max(1, words.total())
    if share < KNOWN_WORDS:
        message = f"{share:.0%} of the training words occur in {len(sample):,} of its passages; it may be in another language"
        yield Finding(corpus.file_names, "notice", "foreign-corpus", message)
    scripts, own = count_scripts(sample), main_script(example.whole_text for example in train.examples)
    if scripts and own is not None and scripts[own] < OWN_SCRIPT * scripts.total():
        (theirs, _), *_ = scripts.most_common(1)
        message = f"mostly {theirs} letters, but the training texts are in {own}; retrieval will find little"
        yield Finding(corpus.file_names, "problem", "corpus-script", message)


def summarize_findings(findings: Iterable[Finding]) -> list[str]:
    """Return a line for each rule: the number of findings, and the first."""
    by_rule: dict[str, list[Finding]] = {}
    for finding in findings:
        by_rule.setdefault(finding.rule, []).append(finding)
    return [_summary(rule, of_rule) for rule, of_rule in by_rule.items()]


def _summary(rule: str, findings: Sequence[Finding]) -> str:
    first = f"{findings[0].location}: {findings[0].message}"
    return f"{rule}: {first}" if len(findings) == 1 else f"{rule}: {len(findings):,} findings, first {first}"


@dataclass(frozen=True, slots=True)
class Repetition:
    """A row with the text of an earlier row. in_file, other_file: numbers of their files.

    other: of the first file that has the text, the first row with the same label (if that is an earlier file) or with another label (if it
    is the same file), if there is one; else the first row.
    """

    example: Example
    in_file: int
    other: Example
    other_file: int

    @property
    def has_same_label(self) -> bool:
        return self.example.label == self.other.label


def find_repetitions(files: Sequence[Sequence[Example]]) -> Iterator[Repetition]:
    """Yield one repetition for each row that repeats the text of an earlier row, in the same file or an earlier one."""
    found: dict[str, tuple[int, dict[str | None, Example]]] = {}  # the first file with a text, and its first row of each label
    for number, examples in enumerate(files):
        for example in examples:
            first, rows = found.setdefault(text_key(example), (number, {}))
            if rows:
                others = (row for label, row in rows.items() if label != example.label)
                preferred = rows.get(example.label) if first < number else next(others, None)
                yield Repetition(example, number, preferred or next(iter(rows.values())), first)
            if first == number:
                rows.setdefault(example.label, example)


@dataclass(frozen=True, slots=True)
class RepetitionCounts:
    """Repeated texts in a task.

    train: training rows that repeat the text of an earlier row. conflicting: training texts with more than one label. dev_in_train,
    test_in_train: numbers of rows (with the same label, with another label only).
    """

    train: int
    conflicting: int
    dev_in_train: tuple[int, int]
    test_in_train: tuple[int, int]


def count_repetitions(task: Task) -> RepetitionCounts:
    """Count texts that are repeated within train, or that dev or test share with train."""
    found = [each for each in find_repetitions([task.train, task.dev, task.test]) if each.other_file == 0]
    count = Counter((each.in_file, each.has_same_label) for each in found)
    conflicting = {text_key(each.example) for each in found if each.in_file == 0 and not each.has_same_label}
    of_split = {number: (count[number, True], count[number, False]) for number in range(3)}
    return RepetitionCounts(sum(of_split[0]), len(conflicting), of_split[1], of_split[2])


def _repetitions(files: Sequence[LabelledFile]) -> Iterator[Finding]:
    for each in find_repetitions([file.examples for file in files]):
        message = f"the text of {each.other.id}{_compare_labels(each.example, each.other)}"
        if each.in_file != each.other_file:
            yield Finding(each.example.id, "problem", "leak", message)
        elif each.has_same_label:
            yield Finding(each.example.id, "notice", "duplicate", message)
        else:
            yield Finding(each.example.id, "problem", "conflict", message)


def _compare_labels(example: Example, other: Example) -> str:
    if example.label == other.label:
        return ", same label"
    return f", label {brief(str(example.label), 30)} here and {brief(str(other.label), 30)} there"


def _near_repetitions(train: LabelledFile, held_out: Sequence[LabelledFile]) -> Iterator[Finding]:
    keys: dict[str, str] = {example.id: text_key(example) for file in held_out for example in file.examples}
    prepared = HeldOut([example for file in held_out for example in file.examples])
    for overlap in prepared.find(enumerate(example.whole_text.encode() for example in train.examples)):
        example = train.examples[overlap.position]
        if keys[overlap.split_example_id] != text_key(example):
            what = "shares 13 words with" if overlap.reason == "shares 13 words" else "contains the whole text of"
            message = f"{what} {overlap.split_example_id} ({brief(overlap.match, 60)})"
            yield Finding(example.id, "notice", "near-leak", message)


def _similar_labels(counts: Counter[str], first: Mapping[str, Example]) -> Iterator[Finding]:
    """Labels that are equal when `folded`: usually one label, spelled in two ways.

    counts: training rows of each label. first: its first row.
    """
    frequent: dict[str, str] = {}
    for label, _ in counts.most_common():
        if (other := frequent.setdefault(folded(label), label)) != label:
            message = f"label {spelling_difference(label, other)}; rename one if they are one label"
            yield Finding(first[label].id, "notice", "similar-labels", message)


def _joined_labels(counts: Counter[str], first: Mapping[str, Example]) -> Iterator[Finding]:
    """Labels of a multi-label task that are labels of it in one, as of a table that separates them by another character."""
    for separator in ("|", ";", ","):
        for label in counts:
            parts = {part.strip() for part in label.split(separator)}
            if len(parts) > 1 and not parts.isdisjoint(counts):
                message = f"label {brief(label, 40)} seems to be several; if the file is a table, pass --label-separator {separator!r}"
                yield Finding(first[label].id, "notice", "other-kind", message)
                return


def _other_kind(counts: Counter[str], first: Mapping[str, Example]) -> Iterator[Finding]:
    """Labels of a classification that look like several labels, with a part in common, or like numbers that are no ids of classes."""
    for separator, option in (("|", ""), (";", " --label-separator ';'")):
        parts_of = {label: {part.strip() for part in label.split(separator)} for label in counts}
        shared = Counter(part for parts in parts_of.values() for part in parts)
        if label := next((label for label, parts in parts_of.items() if len(parts) > 1 and max(shared[part] for part in parts) > 1), None):
            message = f"label {brief(label, 40)} seems to be several labels of one text; pass --task-type multi-label{option}"
            yield Finding(first[label].id, "notice", "other-kind", message)
    if label := next(filter(WRITTEN_LIST.fullmatch, counts), None):
        message = f"label {brief(label, 40)} is a list written as text; write a|b, or lists in .jsonl, and pass --task-type multi-label"
        yield Finding(first[label].id, "notice", "other-kind", message)
    numbers = [label for label in counts if re.fullmatch(r"[-+]?\d*\.?\d+", label)]
    if len(numbers) == len(counts) > _MANY_NUMBERS and any(float(label) % 1 for label in numbers):
        message = f"the labels are {len(counts)} different numbers; to predict a number pass --task-type regression"
        yield Finding(first[numbers[0]].id, "notice", "other-kind", message)


def _labels(train: LabelledFile, held_out: Sequence[LabelledFile]) -> Iterator[Finding]:
    counts = Counter(name for _, name in train.names())
    try:
        RULES[train.kind].check([str(example.label) for example in train.examples], train.name)
    except DataError as error:
        yield Finding(train.name, "problem", "unlearnable", str(error).removeprefix(f"{train.name}: "))
        return
    if not counts:
        yield from _numbers(train, held_out)
        return
    yield from _training_labels(train, counts)
    spelled = {folded(label): label for label in counts}
    for file in held_out:
        for example, name in file.names():
            if name not in counts:
                message = f"label {brief(name, 30)} is not among the training labels"
                if (near := spelled.get(folded(name))) is not None:
                    message += f"; {spelling_difference(name, near)}"
                yield Finding(example.id, "problem", "unseen-label", message)
        present = {name for _, name in file.names()}
        for label in sorted(set(counts) - present):
            yield Finding(file.name, "notice", "missing-label", f"no row has the label {brief(label, 30)}; it cannot be evaluated")


def _training_labels(train: LabelledFile, counts: Counter[str]) -> Iterator[Finding]:
    """counts: training rows of each label."""
    first = {name: example for example, name in reversed(list(train.names()))}
    for label, count in counts.items():
        if count < RARE:
            message = f"label {brief(label, 30)} has {counted(count, 'training row')}; too few to learn it"
            yield Finding(first[label].id, "notice", "rare-label", message)
    for label in sorted(_MISSING_VALUES.intersection(counts)):
        rows = counted(counts[label], "row")
        message = f"label {label!r} of {rows} may be a missing value, and is read as a class; drop rows without a label"
        yield Finding(first[label].id, "notice", "null-label", message)
    yield from _similar_labels(counts, first)
    yield from (_other_kind if train.kind == "classification" else _joined_labels)(counts, first)
    (largest, most), (smallest, least) = counts.most_common(1)[0], counts.most_common()[-1]
    if most > UNEVEN * least:
        message = f"{brief(largest, 30)} has {most:,} rows and {brief(smallest, 30)} {least:,}; compare macro-F1"
        yield Finding(train.name, "notice", "uneven-labels", message)


def _numbers(train: LabelledFile, held_out: Sequence[LabelledFile]) -> Iterator[Finding]:
    """Yield findings for held-out files of equal numbers, and for numbers outside the range of the training numbers."""
    least, most = range_of([str(example.label) for example in train.examples])
    shown = " to ".join(number_texts([least, most], most - least))
    for file in held_out:
        if len(distinct := {str(example.label) for example in file.examples}) == 1:
            message = f"every row has the number {distinct.pop()}; correlations and R² need different ones, and are 0"
            yield Finding(file.name, "notice", "equal-numbers", message)
        for example in file.examples:
            if not least <= float(str(example.label)) <= most:
                message = f"number {example.label} is outside those of the training rows ({shown})"
                yield Finding(example.id, "notice", "unseen-number", message)


def _lengths(file: LabelledFile) -> Iterator[Finding]:
    for example in file.examples:
        words = count_words(example.whole_text)
        if words > LONG_WORDS:
            message = f"{words:,} words; the encoder reads at most the first {LONG_WORDS} or so (512 tokens), the linear models all"
            yield Finding(example.id, "notice", "long", message)
        elif not any(map(str.isalnum, example.whole_text)):
            yield Finding(example.id, "notice", "no-words", f"no letter or digit in {brief(example.whole_text, 30)}")


def _scripts(train: LabelledFile, files: Sequence[LabelledFile]) -> Iterator[Finding]:
    counts = Counter(main_script([example.whole_text]) for example in train.examples)
    usual = {script for script, count in counts.items() if count >= FAR_SCRIPT * len(train.examples)} | {None}
    named = ", ".join(sorted(script for script in usual if script is not None)) or "no"
    for file in files:
        for example in file.examples:
            if (script := main_script([example.whole_text])) not in usual:
                yield Finding(example.id, "notice", "script", f"mostly {script} letters; the training texts are in {named}")
