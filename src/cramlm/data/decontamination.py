"""Decontamination: find dev and test texts in a corpus, and repeated texts within and across the splits of a task.

A document overlaps a held-out text if the two share 13 consecutive words or, for texts of 4 to 12 words, if it contains the whole text.
Words are those of `words.segment`: case, spacing and punctuation do not matter. In scripts without spaces a word is two characters of Han
or kana, or four grapheme clusters of other scripts (`words.word_sizes`), so that 13 words are 26 or 52 of them. Texts of fewer than 4
words are not searched: "not bad" in a document is no evidence of contamination. The halves of a text pair are searched separately.

Hashes of word windows are looked up in bit tables; candidates are confirmed by comparing words, so a hash collision never drops a document.
About 70 million words per second on one core.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from cramlm.records import Emit, Event, Example, IntArray, Task, silent
from cramlm.storage.arrays import joined
from cramlm.text import kernels
from cramlm.text.words import QUARTERS, hash_block, hash_words, segment_text, segment_utf8

WINDOW = 13  # words, as in the decontamination of GPT-3 and The Pile
SHORTEST = 4
_MOST, _LEAST = WINDOW * QUARTERS, SHORTEST * QUARTERS
_BATCH_BYTES = 4_000_000
_LEAST_BITS, _MOST_BITS = 13, 29  # log2 of a table's size: 1 kB to 64 MB; for up to 4 million windows, under 1 % of others pass

_Hashes: TypeAlias = npt.NDArray[np.uint64]
Reason: TypeAlias = Literal["contains the whole text", "shares 13 words"]


@dataclass(frozen=True, slots=True)
class Overlap:
    """A document that overlaps a held-out text. match: the shared words, normalised."""

    position: int
    split_example_id: str
    match: str
    reason: Reason


class HeldOut:
    """Search index of dev and test examples: the hashes of all their word windows, sorted, with the text and first word of each."""

    def __init__(self, examples: Sequence[Example]) -> None:
        halves = [(example.id, half) for example in examples for half in (example.text, example.text_pair) if half is not None]
        self._ids = [name for name, _ in halves]
        self._texts = [segment_text(half) for _, half in halves]
        hashes, sizes, offsets = hash_words(*joined(self._texts))
        windows, whole = np.empty(len(hashes), np.uint64), np.empty(len(hashes), np.bool_)
        length, text, start = (np.empty(len(hashes), np.int64) for _ in range(3))
        count = kernels.collect_windows(hashes, sizes, offsets, _LEAST, _MOST, windows, length, whole, text, start)
        order = np.argsort(windows[:count], kind="stable")  # equal windows in the order of the examples
        self._windows, self._length, self._whole = windows[order], length[order], whole[order]
        self._text, self._start = text[order], start[order]
        # Every window has a run of `_anchor` words that begins at a multiple of `_stride` in the document, so that only these runs are
        # looked up in all of it. Longer runs are rarer in other text, longer strides (at most 8 words) take fewer look-ups.
        shortest = int(self._length.min(initial=WINDOW))
        self._anchor = max(SHORTEST, shortest - 7)
        self._stride = shortest - self._anchor + 1
        anchors = _runs_within(hashes, offsets, self._anchor)
        self._make_tables(
            np.concatenate((self._windows, anchors)),
            np.concatenate((np.where(self._whole, self._length, 0), np.full(len(anchors), _MOST))),
        )

    def _make_tables(self, windows: _Hashes, tables: IntArray) -> None:
        """Make a bit table of the windows with each table number: 0 for those of 13 words, n for whole texts of n words, `_MOST` for the
        anchors, which are looked up before.
        """
        self._first, self._shift = np.full(_MOST + 1, -1, np.int64), np.zeros(_MOST + 1, np.uint64)
        size = 0
        for table, count in zip(*(part.tolist() for part in np.unique(tables, return_counts=True)), strict=True):
            bits = min(_MOST_BITS, max(_LEAST_BITS, count.bit_length() + 7))
            self._first[table], self._shift[table] = size, 64 - bits
            size += 1 << (bits - 6)
        self._bits = np.zeros(size, np.uint64)
        kernels.set_bits(windows, tables, self._bits, self._first, self._shift)

    def find(self, documents: Iterable[tuple[int, bytes]]) -> Iterator[Overlap]:
        """Yield an overlap for each document (position, UTF-8) with held-out text, in the given order. Of several matches: the one that
        starts first in the document, then the longer window, then the earlier example.
        """
        positions: list[int] = []
        batch: list[bytes] = []
        size = 0
        for position, text in documents:
            positions.append(position)
            batch.append(text)
            size += len(text)
            if size >= _BATCH_BYTES:
                yield from self.find_in(positions, *joined(batch))
                positions, batch, size = [], [], 0
        yield from self.find_in(positions, *joined(batch))

    def find_in(self, positions: Sequence[int], text: npt.NDArray[np.uint8], offsets: IntArray) -> Iterator[Overlap]:
        """As `find`, for documents text[offsets[i]:offsets[i + 1]]."""
        first_document = 0
        while len(self._windows) and first_document < len(positions):  # in batches: the arrays of words are larger than the text
            end = int(np.searchsorted(offsets, offsets[first_document] + _BATCH_BYTES, side="right")) - 1
            end = min(max(end, first_document + 1), len(positions))
            part = offsets[first_document : end + 1]
            yield from self._search(positions[first_document:end], text[part[0] : part[-1]], part - part[0])
            first_document = end

    def _search(self, positions: Sequence[int], text: npt.NDArray[np.uint8], offsets: IntArray) -> Iterator[Overlap]:
        first: dict[int, tuple[int, Overlap]] = {}  # document -> (first word of the match, the match)
        read, all_words = -1, list[bytes]()
        for document, start, length, window in self._candidates(text, offsets):
            if document in first and first[document][0] < start:
                continue  # longer windows come later, earlier matches take precedence
            if document != read:
                read, all_words = document, segment_utf8(text[offsets[document] : offsets[document + 1]].tobytes()).split()
            words = all_words[start : start + length]
            if (held := self._window_of(window, words)) is not None:
                match = b" ".join(words).decode("utf-8", "surrogatepass")
                reason: Reason = "contains the whole text" if self._whole[held] else "shares 13 words"
                first[document] = (start, Overlap(positions[document], self._ids[int(self._text[held])], match, reason))
        for document in sorted(first):
            yield first[document][1]

    def _candidates(self, text: npt.NDArray[np.uint8], starts: IntArray) -> Iterator[tuple[int, int, int, np.uint64]]:
        """Return (document, first word, words, hash) of every window with the hash of a held-out one: by document, longer windows later."""
        hashes, sizes, offsets = hash_block(text, starts)
        tables = (_MOST, self._anchor, self._stride, self._bits, self._first, self._shift)
        capacity = 1024 + len(hashes) // 8
        while True:
            document, start, length = (np.empty(capacity, np.int64) for _ in range(3))
            window = np.empty(capacity, np.uint64)
            count = kernels.find_windows(hashes, sizes, offsets, *tables, document, start, length, window)
            if count <= capacity:
                break
            capacity = count
        index = np.searchsorted(self._windows, window[:count])
        same = np.flatnonzero(self._windows[np.minimum(index, len(self._windows) - 1)] == window[:count])
        return zip(document[same].tolist(), start[same].tolist(), length[same].tolist(), window[same], strict=True)

    def _window_of(self, window: np.uint64, words: list[bytes]) -> int | None:
        """Return the index of the first held-out window with exactly these words, or None."""
        index = int(np.searchsorted(self._windows, window))
        while index < len(self._windows) and self._windows[index] == window:
            text, start = int(self._text[index]), int(self._start[index])
            if self._texts[text].split()[start : start + int(self._length[index])] == words:
                return index
            index += 1
        return None


def _runs_within(hashes: _Hashes, offsets: IntArray, words: int) -> _Hashes:
    """Return the hash of every run of so many words within a text."""
    sums = np.concatenate((np.zeros(1, np.uint64), np.cumsum(hashes, dtype=np.uint64)))
    starts = np.arange(max(0, len(hashes) - words + 1))
    within = starts + words <= np.repeat(offsets[1:], np.diff(offsets))[: len(starts)]
    return sums[starts[within] + words] - sums[starts[within]]


def without_overlap(task: Task, *, emit: Emit = silent) -> Task:
    """Return the task without the unlabelled texts that overlap a dev or test text; the same rule as for passages of the corpus."""
    if not task.unlabelled:
        return task
    held_out = HeldOut([*task.dev, *task.test])
    found = {each.position: each for each in held_out.find((number, row.whole_text.encode()) for number, row in enumerate(task.unlabelled))}
    if not found:
        return task
    first = found[min(found)]
    message = f"{len(found):,} of {len(task.unlabelled):,} unlabelled texts left out, because they overlap dev or test texts"
    emit(Event("note", "task", f"{message} (first {task.unlabelled[first.position].id}: {first.reason} with {first.split_example_id})"))
    return replace(task, unlabelled=tuple(row for number, row in enumerate(task.unlabelled) if number not in found))
