"""Held-out text where it must not be: dev and test texts in the corpus, and repetitions within and across the splits of a task.

A document overlaps a held-out text if it shares 13 words in a row with it or, where the text has 4 to 12 words, contains it whole.
Words are those of `words.normal_words` (case, spacing and punctuation do not matter; one character is a word in scripts without
spaces). Texts of fewer than 4 words are not searched: "not bad" in a document is no evidence of anything. The halves of a text pair are
searched each on its own.

Rolling hashes of word windows over batches of documents, tested against a table of bits, leave few candidates; each is confirmed by
comparing the words themselves, so a collision costs time but never a document: about 4 million words per second on one core.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from cramlm.data.task import text_key
from cramlm.data.words import normal_words
from cramlm.records import BoolArray, Example, IntArray, Task

WINDOW = 13  # words; as the GPT-3 and PILE decontaminations, and the corpus's own
SHORTEST = 4
_BATCH_WORDS = 400_000
_PRIME = np.uint64(0x9E3779B97F4A7C15)  # odd, so that no word's bits are lost
_LEAST_BITS, _MOST_BITS = 20, 26  # of a table's index: 1 MB to 64 MB; under 3 % of foreign windows pass it, up to 2 million held-out ones

Words: TypeAlias = list[str]
_Hashes: TypeAlias = npt.NDArray[np.uint64]
Reason: TypeAlias = Literal["contains the whole text", "shares 13 words"]


@dataclass(frozen=True, slots=True)
class Overlap:
    """A document that must not be trained on. `match`: the words it shares, normalised."""

    position: int
    split_example_id: str
    match: str
    reason: Reason


class HeldOut:
    """Examples of dev and test, prepared to be looked for."""

    def __init__(self, examples: Sequence[Example]) -> None:
        self._tables = _tables(examples)

    def find(self, documents: Iterable[tuple[int, str]]) -> Iterator[Overlap]:
        """The documents (position, text) that hold held-out text, in the order given; of several matches the one that begins first in
        the document (on a tie the longer window, then the earlier example)."""
        if not self._tables:
            return
        positions: list[int] = []
        batch: list[Words] = []
        size = 0
        for position, text in documents:
            words = normal_words(text)
            positions.append(position)
            batch.append(words)
            size += len(words)
            if size >= _BATCH_WORDS:
                yield from _search(positions, batch, self._tables)
                positions, batch, size = [], [], 0
        yield from _search(positions, batch, self._tables)


@dataclass(frozen=True, slots=True)
class TaskCheck:
    """Repetitions in a task. Two examples are the same if their texts are, lower-cased and with white space folded.

    repeated_train: training rows whose text stood in an earlier row. conflicting_train: training texts with more than one label.
    dev_in_train, test_in_train: (with the same label, with another label only). leak_free_test: indices of the test rows not in train,
    int64.
    """

    repeated_train: int
    conflicting_train: int
    dev_in_train: tuple[int, int]
    test_in_train: tuple[int, int]
    leak_free_test: IntArray

    @property
    def warnings(self) -> list[str]:
        """One line for each kind of repetition that was found."""
        lines = []
        if self.repeated_train:
            lines.append(f"{self.repeated_train:,} training rows repeat the text of an earlier row")
        if self.conflicting_train:
            lines.append(f"{self.conflicting_train:,} training texts carry more than one label")
        for split, (same, other) in (("dev", self.dev_in_train), ("test", self.test_in_train)):
            if same + other:
                lines.append(f"{same + other:,} {split} rows are also in train ({other:,} with another label)")
        return lines


def check_task(task: Task) -> TaskCheck:
    """Count repetitions within train and from train to dev and test."""
    labels: dict[str, set[str | None]] = {}
    for example in task.train:
        labels.setdefault(text_key(example), set()).add(example.label)
    test_keys = [text_key(example) for example in task.test]
    return TaskCheck(
        repeated_train=len(task.train) - len(labels),
        conflicting_train=sum(1 for found in labels.values() if len(found) > 1),
        dev_in_train=_seen(task.dev, labels),
        test_in_train=_seen(task.test, labels),
        leak_free_test=np.array([index for index, key in enumerate(test_keys) if key not in labels], dtype=np.int64),
    )


def _seen(examples: Sequence[Example], labels: dict[str, set[str | None]]) -> tuple[int, int]:
    found = [(example.label, labels[key]) for example in examples if (key := text_key(example)) in labels]
    same = sum(1 for label, known in found if label in known)
    return same, len(found) - same


@dataclass(frozen=True, slots=True)
class _Table:
    """All windows of one length in the held-out texts: hashes sorted, with the text and place of each; `bits` says quickly what is not
    among them.
    """

    length: int
    hashes: _Hashes
    text: IntArray
    start: IntArray
    bits: npt.NDArray[np.bool_]
    texts: list[Words]
    ids: list[str]

    def holds(self, values: _Hashes) -> BoolArray:
        """Which of the hashes are in the table."""
        places = np.searchsorted(self.hashes, values)
        return np.equal(self.hashes[np.minimum(places, len(self.hashes) - 1)], values)

    def find(self, value: np.uint64, words: Words, start: int) -> str | None:
        """Id of the first held-out example with these very words, or None if only the hash is equal."""
        wanted = words[start : start + self.length]
        place = int(np.searchsorted(self.hashes, value))
        while place < len(self.hashes) and self.hashes[place] == value:
            text, begin = int(self.text[place]), int(self.start[place])
            if self.texts[text][begin : begin + self.length] == wanted:
                return self.ids[text]
            place += 1
        return None


def _tables(held_out: Sequence[Example]) -> dict[int, _Table]:
    """One table per window length that occurs."""
    texts: dict[int, list[Words]] = {}
    ids: dict[int, list[str]] = {}
    for example in held_out:
        for half in (example.text, example.text_pair):
            words = normal_words(half) if half is not None else []
            if len(words) >= SHORTEST:
                length = min(len(words), WINDOW)
                texts.setdefault(length, []).append(words)
                ids.setdefault(length, []).append(example.id)
    return {length: _table(length, texts[length], ids[length]) for length in texts}


def _table(length: int, texts: list[Words], ids: list[str]) -> _Table:
    hashes, text, start = [], [], []
    for number, words in enumerate(texts):
        ((_, windows),) = _windows(_hash_words(words), (length,))
        hashes.append(windows)
        text.append(np.full(len(windows), number, dtype=np.int64))
        start.append(np.arange(len(windows), dtype=np.int64))
    every = np.concatenate(hashes)
    order = np.argsort(every, kind="stable")  # equal windows in the order of the examples
    bits = np.zeros(1 << min(_MOST_BITS, max(_LEAST_BITS, len(every).bit_length() + 5)), dtype=np.bool_)
    bits[_slots(every, bits)] = True
    return _Table(length, every[order], np.concatenate(text)[order], np.concatenate(start)[order], bits, texts, ids)


def _search(positions: list[int], batch: list[Words], tables: dict[int, _Table]) -> Iterator[Overlap]:
    lengths = np.array([len(words) for words in batch], dtype=np.int64)
    ends = np.cumsum(lengths)
    found: dict[int, tuple[int, Overlap]] = {}  # document -> (where the match begins, the match)
    for length, windows in _windows(_hash_words(list(chain.from_iterable(batch))), tables):
        table = tables[length]
        candidates = np.flatnonzero(table.bits[_slots(windows, table.bits)])
        for candidate in candidates[table.holds(windows[candidates])].tolist():
            document = int(np.searchsorted(ends, candidate, side="right"))
            start = candidate - int(ends[document] - lengths[document])
            if start + length > lengths[document] or (document in found and found[document][0] < start):
                continue  # it runs into the next document, or one that begins before was found
            example_id = table.find(windows[candidate], batch[document], start)
            if example_id is not None:
                match = " ".join(batch[document][start : start + length])
                reason: Reason = "shares 13 words" if length == WINDOW else "contains the whole text"
                found[document] = (start, Overlap(positions[document], example_id, match, reason))
    for document in sorted(found):
        yield found[document][1]


def _hash_words(words: Words) -> _Hashes:
    return np.fromiter(map(hash, words), dtype=np.int64, count=len(words)).view(np.uint64)


def _windows(words: _Hashes, lengths: Collection[int]) -> Iterator[tuple[int, _Hashes]]:
    """(length, hash of every window of so many words, shape (n - length + 1,)), shortest first; lengths over n are left out.

    The hash is the sum of word * prime^(words after it), modulo 2^64: one multiplication turns the windows of a length into those of
    the next.
    """
    result = words
    for length in range(2, min(max(lengths), len(words)) + 1):
        result = result[:-1] * _PRIME + words[length - 1 :]
        if length in lengths:
            yield length, result


def _slots(hashes: _Hashes, bits: npt.NDArray[np.bool_]) -> _Hashes:
    """The upper bits, which every word of the window reaches."""
    return hashes >> np.uint64(65 - len(bits).bit_length())
