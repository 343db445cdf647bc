"""Analysis for BM25: from a text to its terms, the same for documents and queries.

A text is normalised by NFKC and casefold; its words are runs of letters, digits and marks. Runs of scripts without spaces become
overlapping character n-grams: pairs for Han, kana, hangul and related scripts, triples for Thai, Lao, Khmer, Myanmar and related ones (a
shorter run is one term). Invisible characters (joiners, variation selectors, soft hyphens) are removed without ending a word; a zero-width
space ends it. There are no stop words and no stemming. A term is cut before the first character that starts at its 64th byte or later,
which bounds its size.

`analyze` is this definition in plain Python. `Vocabulary.tokenize` gives the same terms as numbers, from bytes: ASCII documents use a byte
table, others a table over code points; documents in which characters combine or reorder are first normalised by Python's unicodedata.
"""

from __future__ import annotations

import functools
import unicodedata
from collections.abc import Sequence
from typing import TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from cramlm.records import Int32Array, IntArray
from cramlm.retrieval.bm25 import analysis_kernels as kernels
from cramlm.text.characters import CUT_INTO_PAIRS, CUT_INTO_TRIPLES, is_invisible, is_letter, is_mark, is_unknown, normalise, within

ANALYZER = f"words-ngrams-1 unicode-{unicodedata.unidata_version}"
MAX_TERM_BYTES = kernels.MAX_TERM_BYTES

ByteArray: TypeAlias = npt.NDArray[np.uint8]
_Scalar = TypeVar("_Scalar", bound=np.generic)
_Table: TypeAlias = tuple[npt.NDArray[np.uint32], npt.NDArray[np.int32]]

# Large blocks without compatibility forms or combining characters: the table needs no look-up in unicodedata for them.
_PLAIN = (
    (0x3400, 0x4DBF), (0x4E00, 0x9FFC), (0xAC00, 0xD7A3), (0x17000, 0x187F7), (0x20000, 0x2A6DD), (0x2A700, 0x2B734), (0x2B740, 0x2B81D),
    (0x2B820, 0x2CEA1), (0x2CEB0, 0x2EBE0), (0x30000, 0x3134A),
)  # fmt: skip


def analyze(text: str) -> list[str]:
    """Return the terms of a text in order, with repeats."""
    terms: list[str] = []
    run: list[str] = []
    kind = kernels.SEPARATOR
    for character in normalise(text):
        here = _kind(character)
        if here == kernels.IGNORED:
            continue
        if here == kernels.MARK:
            here = kind or kernels.WORD
        if here != kind:
            terms += _terms_of_run(run, kind)
            run, kind = [], here
        if here != kernels.SEPARATOR:
            run.append(character)
    return terms + _terms_of_run(run, kind)


class Vocabulary:
    """Terms numbered in the order of their first occurrence; grows with every tokenized text.

    Exact: a term of up to 7 bytes is its own hash key; longer ones with equal 64-bit keys are compared by bytes.
    """

    def __init__(self) -> None:
        self._keys = np.zeros(1 << 16, np.uint64)
        self._ids = np.zeros(1 << 16, np.int32)
        self._bytes = np.empty(1 << 18, np.uint8)
        self._offsets = np.zeros(1 << 15, np.int64)
        self._tokens = np.empty(1 << 16, np.int32)
        self._scratch = np.empty(1 << 16, np.uint8)
        self._state = np.zeros(2, np.int64)  # terms, tokens

    def __len__(self) -> int:
        return int(self._state[0])

    @property
    def term_offsets(self) -> IntArray:
        """Offsets of the terms in `term_bytes`, int64 (terms + 1,)."""
        return self._offsets[: len(self) + 1]

    @property
    def term_bytes(self) -> ByteArray:
        """UTF-8 of all terms, concatenated."""
        return self._bytes[: self._offsets[len(self)]]

    def term(self, number: int) -> str:
        """Return a term as a string."""
        return self._bytes[self._offsets[number] : self._offsets[number + 1]].tobytes().decode()

    def tokenize(self, text: ByteArray, offsets: IntArray) -> tuple[Int32Array, IntArray]:
        """Return the term numbers of documents text[offsets[i]:offsets[i + 1]] (valid UTF-8), and their offsets (documents + 1,)."""
        documents = len(offsets) - 1
        starts = np.zeros(documents + 1, np.int64)
        table = _no_table() if kernels.is_ascii(text) else character_table()
        self._state[1] = 0
        document = 0
        while document < documents:
            document, reason = self._run(text, offsets, document, documents, starts, table)
            if reason == kernels.NEEDS_NORMALISING:
                source = bytes(text[offsets[document] : offsets[document + 1]]).decode("utf-8")
                self._tokenize_normalised(normalise(source), document, starts)
                document += 1
        return self._tokens[: starts[-1]].copy(), starts

    def _tokenize_normalised(self, text: str, document: int, starts: IntArray) -> None:
        content = np.frombuffer(text.encode("utf-8"), np.uint8)
        own = np.zeros(2, np.int64)
        ends = np.array([0, len(content)], np.int64)
        while self._run(content, ends, 0, 1, own, character_table(), normalised=True)[0] == 0:
            pass
        starts[document + 1] = own[1]

    def _run(
        self, text: ByteArray, offsets: IntArray, first: int, last: int, starts: IntArray, table: _Table, *, normalised: bool = False
    ) -> tuple[int, int]:
        codes, expansions = table
        document, reason = kernels.tokenize(
            text, offsets, first, last, normalised, codes, expansions, _FOLD,
            self._keys, self._ids, self._bytes, self._offsets, self._state, self._tokens, starts, self._scratch,
        )  # fmt: skip
        match reason:
            case kernels.TOKENS_FULL:
                self._tokens = _grown(self._tokens)
            case kernels.SCRATCH_FULL:
                needed = kernels.CANONICAL_GROWTH * int(offsets[document + 1] - offsets[document]) + 64
                self._scratch = np.empty(max(needed, 2 * len(self._scratch)), np.uint8)
            case kernels.VOCABULARY_FULL:
                self._bytes, self._offsets = _grown(self._bytes), _grown(self._offsets)
                keys, ids = np.zeros(2 * len(self._keys), np.uint64), np.zeros(2 * len(self._ids), np.int32)
                kernels.rehash(self._keys, self._ids, keys, ids)
                self._keys, self._ids = keys, ids
        return int(document), int(reason)

    def keys(self) -> npt.NDArray[np.uint64]:
        """Return the hash key of each term, uint64 (terms,); equal for equal terms, nearly always distinct for different ones."""
        result = np.empty(len(self), np.uint64)
        used = self._keys != 0
        result[self._ids[used]] = self._keys[used]
        return result


@functools.cache
def character_table() -> _Table:
    """Return the kernel's table of code points, uint32 (0x110000,): kind, flags and the index of the folded form in the second array.

    Flags mark characters that cannot be folded alone: those that may join with the previous one (NEEDS_CONTEXT), and those that start or
    end in a combining class other than 0, since two such neighbours may be reordered (STARTS_COMBINED, ENDS_COMBINED). Folded forms:
    length, then code points.
    """
    codes = np.zeros(0x110000, np.uint32)
    expansions: list[int] = []
    for first, last in _PLAIN:
        codes[first : last + 1] = kernels.PAIRS
    plain = codes != 0
    joins = _second_characters()
    for code in [*range(0x40000), *range(0xE0000, 0xE1000)]:
        if plain[code]:
            continue
        character = chr(code)
        if is_unknown(character):
            continue
        entry = _kind(character)
        if code >= 0x80:
            compatible = unicodedata.normalize("NFKC", character)
            folded = unicodedata.normalize("NFKC", compatible.casefold())
            forms = [unicodedata.normalize("NFKD", form) for form in (character, compatible.casefold(), folded)]
            combining = unicodedata.combining
            if any(ord(form[0]) in joins for form in forms) or (combining(forms[0][0]) and folded != character):
                entry |= kernels.NEEDS_CONTEXT
            if any(combining(form[0]) for form in forms):
                entry |= kernels.STARTS_COMBINED
            if any(combining(form[-1]) for form in forms):
                entry |= kernels.ENDS_COMBINED
            if folded != character:
                entry |= kernels.FOLDS | len(expansions) << kernels.EXPANSION_SHIFT
                expansions += [len(folded), *map(ord, folded)]
        codes[code] = entry
    return codes, np.array(expansions, np.int32)


def _kind(character: str) -> int:
    """Return the kind of a character of a folded text: separator, ignored, or part of a word or of a run that is cut into n-grams."""
    if is_invisible(character):
        return kernels.IGNORED
    if not (is_letter(character) or is_mark(character)):
        return kernels.SEPARATOR
    if within(ord(character), CUT_INTO_PAIRS):
        return kernels.PAIRS
    if within(ord(character), CUT_INTO_TRIPLES):
        return kernels.TRIPLES
    return kernels.MARK if is_mark(character) else kernels.WORD


def _terms_of_run(run: Sequence[str], kind: int) -> list[str]:
    if not run:
        return []
    if kind == kernels.WORD:
        pieces, length = [""], 0
        for character in run:
            if length >= MAX_TERM_BYTES:
                pieces.append("")
                length = 0
            pieces[-1] += character
            length += len(character.encode())
        return pieces
    size = 2 if kind == kernels.PAIRS else 3
    return ["".join(run[start : start + size]) for start in range(max(1, len(run) - size + 1))]


def _second_characters() -> frozenset[int]:
    """Return all code points that may join with a previous character under NFC."""
    canonical = (unicodedata.decomposition(chr(code)).split() for code in range(0xC0, 0x30000))
    pairs = {int(parts[1], 16) for parts in canonical if len(parts) == 2 and not parts[0].startswith("<")}
    return frozenset(pairs | set(range(0x1161, 0x1176)) | set(range(0x11A8, 0x11C3)))


def _grown(array: npt.NDArray[_Scalar]) -> npt.NDArray[_Scalar]:
    larger = np.empty(2 * len(array), array.dtype)
    larger[: len(array)] = array
    return larger


@functools.cache
def _no_table() -> _Table:
    return np.zeros(1, np.uint32), np.zeros(1, np.int32)


def _fold_table() -> ByteArray:
    table = np.arange(256, dtype=np.uint8)
    for code in range(128):
        table[code] = ord(chr(code).lower()) if chr(code).isalnum() else 0
    return table


_FOLD = _fold_table()
