"""What is odd in labelled files before any compute is spent on them: a finding per line, with its file and line.

    problem   makes a score wrong: a held-out text in another split, one text with two labels, a label that training lacks, a bad row
    notice    makes it worse or harder to trust: repetitions, near-repetitions, rare labels, long or empty texts, another script, a corpus
              that holds held-out text or is in other words than the task

Two texts are the same if they are so lower-cased and with white space folded (`task.text_key`); near-repetitions are those that
`hygiene.HeldOut` finds (13 words in a row, or a whole short text). Nothing here reads a label of dev or test to learn from it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeAlias

import numpy as np

from cramlm.data.corpus import Corpus
from cramlm.data.decontamination import HeldOut
from cramlm.data.labels import RULES
from cramlm.data.task import RowFormat, read_examples, text_key
from cramlm.errors import brief
from cramlm.io.rows import Rejected
from cramlm.records import Event, Example, Task, TaskKind
from cramlm.text.characters import count_scripts, main_script
from cramlm.text.words import count_words, segment

Severity: TypeAlias = Literal["problem", "notice"]

COUNTED = frozenset({"duplicate", "conflict", "leak"})
"""Rules that `hygiene.check_task` counts too."""
LONG_WORDS = 380  # about the 512 tokens that an encoder reads by default
RARE = 5  # training examples of a label
UNEVEN = 20.0  # largest label over smallest
FAR_SCRIPT = 0.02  # rows in a script that fewer than this share of the training rows are in
SAMPLE = 5_000  # passages of the corpus whose words and scripts are looked at
KNOWN_WORDS = 0.5  # share of the training texts' words that such a sample should hold


@dataclass(frozen=True, slots=True)
class Finding:
    """`place`: file and line. `rule`: its kind in a word."""

    place: str
    severity: Severity
    rule: str
    message: str

    def __str__(self) -> str:
        return f"{self.place}: {self.severity}: {self.rule}: {self.message}"


@dataclass(frozen=True, slots=True)
class Labelled:
    """A file of labelled rows; the examples' ids are their places (file and line)."""

    name: str
    examples: tuple[Example, ...]
    rejected: tuple[Rejected, ...] = ()
    kind: TaskKind = "classification"

    def names(self) -> Iterator[tuple[Example, str]]:
        """Every label that a row has, with the row; no number."""
        for example in self.examples:
            yield from ((example, name) for name in RULES[self.kind].names(str(example.label)))


@dataclass(frozen=True, slots=True)
class Facts:
    """A file in figures. labels: most frequent first, empty where rows have numbers. words: 5, 50, 95 and 100 % of the rows have at most so
    many. scripts: shares of the letters. numbers: 0, 50 and 100 % of the rows have at most this.
    """

    name: str
    rows: int
    labels: dict[str, int]
    words: tuple[int, int, int, int]
    scripts: dict[str, float]
    numbers: tuple[float, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)


def read_labelled(path: str, row_format: RowFormat) -> Labelled:
    """Read a file; its bad rows are kept apart.

    Raises:
        UsageError: the path is missing. DataError: no row can be used, or the file cannot be read on.
    """
    rejected: list[Rejected] = []

    def collect(event: Event) -> None:
        rejected.extend(Rejected(**row) for row in event.data.get("rejected", ()))

    examples = read_examples(path, row_format, on_bad_row="skip", emit=collect)
    placed = (Example(f"{path}:{example.id}", example.text, example.text_pair, example.label) for example in examples)
    return Labelled(path, tuple(placed), tuple(rejected), row_format.kind)


def labelled_of(task: Task) -> tuple[Labelled, list[Labelled]]:
    """Train, and what is held out of it, of a task that was read; places are its examples' ids ("train:17")."""
    held_out = [Labelled(name, split, kind=task.kind) for name, split in (("dev", task.dev), ("test", task.test)) if split]
    return Labelled("train", task.train, kind=task.kind), held_out


def describe(file: Labelled) -> Facts:
    """Rows, labels, lengths and scripts."""
    lengths = [count_words(example.whole_text) for example in file.examples]
    quantiles = [int(value) for value in np.percentile(lengths, (5, 50, 95, 100), method="lower")]
    scripts = count_scripts(example.whole_text for example in file.examples)
    letters = max(1, scripts.total())
    labels = dict(Counter(name for _, name in file.names()).most_common())
    values = [float(str(example.label)) for example in file.examples] if file.kind == "regression" else []
    numbers = tuple(float(value) for value in np.percentile(values, (0, 50, 100))) if values else ()
    shares = {name: count / letters for name, count in scripts.most_common() if count / letters >= 0.001}
    return Facts(file.name, len(file.examples), labels, (quantiles[0], quantiles[1], quantiles[2], quantiles[3]), shares, numbers)


def check_files(train: Labelled, held_out: Sequence[Labelled]) -> Iterator[Finding]:
    """Every finding in the files, in this order of rules: bad rows, repetitions, labels, lengths, scripts."""
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


def check_corpus(train: Labelled, held_out: Sequence[Labelled], corpus: Corpus) -> Iterator[Finding]:
    """Held-out text in the corpus (retrieval drops those passages), and whether it is in the task's words and script."""
    prepared = HeldOut([example for file in held_out for example in file.examples])
    texts = ((position, corpus.data(position)) for position in range(len(corpus)))
    for overlap in prepared.find(texts):
        document = corpus.document(overlap.position)
        message = f"passage {document.id} {overlap.reason} ({brief(overlap.match, 60)}); it will not be trained on"
        yield Finding(overlap.split_example_id, "notice", "in-corpus", message)
    corpus.release()
    sample = [corpus.text(int(position)) for position in np.unique(np.linspace(0, len(corpus) - 1, SAMPLE).astype(np.int64))]
    known = {word for text in sample for word in segment(text)}
    words = Counter(word for example in train.examples for word in segment(example.whole_text))
    share = sum(count for word, count in words.items() if word in known) / max(1, words.total())
    if share < KNOWN_WORDS:
        message = f"{share:.0%} of the training words occur in {len(sample):,} passages of it: another language? It will help little"
        yield Finding(str(corpus.path), "notice", "foreign-corpus", message)
    scripts = count_scripts(sample).most_common(1)
    own = _main_script(train)
    if scripts and own is not None and scripts[0][0] != own:
        message = f"mostly {scripts[0][0]} letters, the training texts are in {own}; retrieval will find little"
        yield Finding(str(corpus.path), "problem", "corpus-script", message)


def short_form(findings: Iterable[Finding], *, without: frozenset[str] = frozenset()) -> list[str]:
    """A line for each rule: how many findings, and the first."""
    by_rule: dict[str, list[Finding]] = {}
    for finding in findings:
        if finding.rule not in without:
            by_rule.setdefault(finding.rule, []).append(finding)
    return [_short(rule, found) for rule, found in by_rule.items()]


def _short(rule: str, found: Sequence[Finding]) -> str:
    first = f"{found[0].place}: {found[0].message}"
    return f"{rule}: {first}" if len(found) == 1 else f"{rule}: {len(found):,} of them, first {first}"


def _repetitions(files: Sequence[Labelled]) -> Iterator[Finding]:
    """Rows whose text stood before, in the same file or in an earlier one; each is told once, with the earliest row of the nearest kind."""
    known: dict[str, list[tuple[int, Example]]] = {}
    for number, file in enumerate(files):
        for example in file.examples:
            before = known.setdefault(text_key(example), [])
            elsewhere = next((earlier for place, earlier in before if place != number), None)
            here = [earlier for place, earlier in before if place == number]
            if elsewhere is not None:
                yield Finding(example.id, "problem", "leak", f"the text of {elsewhere.id}{_against(example, elsewhere)}")
            elif here:
                other = next((earlier for earlier in here if earlier.label != example.label), None)
                if other is not None:
                    yield Finding(example.id, "problem", "conflict", f"the text of {other.id}{_against(example, other)}")
                else:
                    yield Finding(example.id, "notice", "duplicate", f"the text of {here[0].id}, same label")
            before.append((number, example))


def _against(example: Example, other: Example) -> str:
    if example.label == other.label:
        return ", same label"
    return f", label {brief(str(example.label), 30)} here and {brief(str(other.label), 30)} there"


def _near_repetitions(train: Labelled, held_out: Sequence[Labelled]) -> Iterator[Finding]:
    keys: dict[str, str] = {example.id: text_key(example) for file in held_out for example in file.examples}
    prepared = HeldOut([example for file in held_out for example in file.examples])
    for overlap in prepared.find(enumerate(example.whole_text.encode() for example in train.examples)):
        example = train.examples[overlap.position]
        if keys[overlap.split_example_id] != text_key(example):
            what = "shares 13 words with" if overlap.reason == "shares 13 words" else "contains the whole text of"
            message = f"{what} {overlap.split_example_id} ({brief(overlap.match, 60)})"
            yield Finding(example.id, "notice", "near-leak", message)


def _labels(train: Labelled, held_out: Sequence[Labelled]) -> Iterator[Finding]:
    counts = Counter(name for _, name in train.names())
    first = {name: example for example, name in reversed(list(train.names()))}
    answers = {str(example.label) for example in train.examples}
    if len(answers) < 2:
        message = f"every row has the label {brief(next(iter(answers)))}; there is nothing to tell apart"
        yield Finding(train.name, "problem", "one-label", message)
        return
    if not counts:
        yield from _numbers(train, held_out)
        return
    for label, count in counts.items():
        if count < RARE:
            rows = f"{count} training row{'s' if count > 1 else ''}"
            yield Finding(first[label].id, "notice", "rare-label", f"label {brief(label, 30)} has {rows}; it can hardly be learnt")
    (largest, most), (smallest, least) = counts.most_common(1)[0], counts.most_common()[-1]
    if most > UNEVEN * least:
        message = f"{brief(largest, 30)} has {most:,} rows and {brief(smallest, 30)} {least:,}; judge by macro-F1"
        yield Finding(train.name, "notice", "uneven-labels", message)
    for file in held_out:
        for example, name in file.names():
            if name not in counts:
                message = f"label {brief(name, 30)} is not among the training labels"
                yield Finding(example.id, "problem", "unseen-label", message)
        there = {name for _, name in file.names()}
        for label in sorted(set(counts) - there):
            yield Finding(file.name, "notice", "missing-label", f"no row has the label {brief(label, 30)}; nothing is said of it")


def _numbers(train: Labelled, held_out: Sequence[Labelled]) -> Iterator[Finding]:
    """Held-out numbers that training never comes near."""
    known = [float(str(example.label)) for example in train.examples]
    least, most = min(known), max(known)
    for file in held_out:
        for example in file.examples:
            if not least <= float(str(example.label)) <= most:
                message = f"number {example.label} is outside those of the training rows ({least:g} to {most:g})"
                yield Finding(example.id, "notice", "unseen-number", message)


def _lengths(file: Labelled) -> Iterator[Finding]:
    for example in file.examples:
        words = count_words(example.whole_text)
        if words > LONG_WORDS:
            yield Finding(example.id, "notice", "long", f"{words:,} words; a model of 512 tokens reads about the first {LONG_WORDS}")
        elif not any(map(str.isalnum, example.whole_text)):
            yield Finding(example.id, "notice", "no-words", f"no letter or digit in {brief(example.whole_text, 30)}")


def _scripts(train: Labelled, files: Sequence[Labelled]) -> Iterator[Finding]:
    counts = Counter(main_script(example.whole_text) for example in train.examples)
    usual = {script for script, count in counts.items() if count >= FAR_SCRIPT * len(train.examples)} | {None}
    named = ", ".join(sorted(script for script in usual if script is not None)) or "no"
    for file in files:
        for example in file.examples:
            if (script := main_script(example.whole_text)) not in usual:
                yield Finding(example.id, "notice", "script", f"mostly {script} letters; the training texts are in {named}")


def _main_script(file: Labelled) -> str | None:
    counts = count_scripts(example.whole_text for example in file.examples)
    return counts.most_common(1)[0][0] if counts else None
