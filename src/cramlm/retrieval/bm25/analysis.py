"""Analysis for BM25: from a text to its terms, the same for documents and queries.

terms.py defines the terms of a text. An `Analyzer` may then leave out stop words and stem the other terms.

`analyze` is this definition in plain Python. `Vocabulary.tokenize` gives the same terms as numbers, from bytes: ASCII documents use a byte
table, others a table over code points; documents in which characters combine or reorder are first normalised by Python's unicodedata.
"""

from __future__ import annotations

import functools
import itertools
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias, TypeVar, get_args

import numpy as np
import numpy.typing as npt

from cramlm.errors import EnvironmentFault, UsageError, brief
from cramlm.records import Diacritics, Int32Array, IntArray
from cramlm.retrieval.bm25 import analysis_kernels as kernels
from cramlm.retrieval.bm25.terms import ANALYZER, PAIRS, kind_of, split_terms
from cramlm.storage.arrays import cached_on_disk, joined, offsets_of, read_only
from cramlm.storage.artifacts import hash_json
from cramlm.text import characters
from cramlm.text.characters import is_unknown, normalise, remove_diacritics

ByteArray: TypeAlias = npt.NDArray[np.uint8]
_Scalar = TypeVar("_Scalar", bound=np.generic)
_Table: TypeAlias = tuple[npt.NDArray[np.uint32], npt.NDArray[np.int32]]

_LOW, _TAGS = 0x40000, 0xE0000  # code points between them, and above 0xE1000, are unassigned or private
# Large blocks without compatibility forms or combining characters: the table needs no look-up in unicodedata for them.
_PLAIN = (
    (0x3400, 0x4DBF), (0x4E00, 0x9FFC), (0xAC00, 0xD7A3), (0x17000, 0x187F7), (0x20000, 0x2A6DD), (0x2A700, 0x2B734), (0x2B740, 0x2B81D),
    (0x2B820, 0x2CEA1), (0x2CEB0, 0x2EBE0), (0x30000, 0x3134A),
)  # fmt: skip


ENGLISH_STOP_WORDS: Final = (
    "a", "an", "and", "are", "as", "at", "be", "but", "by", "for", "if", "in", "into", "is", "it", "no", "not", "of", "on", "or", "such",
    "that", "the", "their", "then", "there", "these", "they", "this", "to", "was", "will", "with",
)  # fmt: skip
"""Those of Lucene's EnglishAnalyzer, which Pyserini and bm25s use."""
_STOP_WORDS: Final[dict[str, tuple[str, ...]]] = {"none": (), "english": ENGLISH_STOP_WORDS}


@dataclass(frozen=True, slots=True)
class Analyzer:
    """The analysis of texts and queries for an index: terms that are stop words are dropped, the others are stemmed.

    stop_words: terms, sorted. stemmer: a Snowball algorithm, like "english" or "porter" (needs PyStemmer); "none" = no stemming. A term
    whose stem is not one term is kept as it is. diacritics: "remove" = before stemming (text/characters.py).
    """

    stop_words: tuple[str, ...] = ()
    stemmer: str = "none"
    diacritics: Diacritics = "keep"

    @staticmethod
    def of(stop_words: str | Iterable[str] = "none", stemmer: str = "none", diacritics: Diacritics = "keep") -> Analyzer:
        """Return the analyzer with these stop words ("none", "english", or the words themselves), stemmer and diacritics.

        Raises:
            UsageError: there is no such list, stemmer or choice. EnvironmentFault: PyStemmer is missing.
        """
        if diacritics not in (choices := get_args(Diacritics)):
            raise UsageError(f"diacritics {brief(diacritics)}: use {' or '.join(choices)}")
        if isinstance(stop_words, str):
            if stop_words not in _STOP_WORDS:
                raise UsageError(f"no list of stop words {brief(stop_words)}; use {' or '.join(_STOP_WORDS)}, or pass the words")
            stop_words = _STOP_WORDS[stop_words]
        if stemmer != "none" and stemmer not in (known := _pystemmer().algorithms()):
            raise UsageError(f"no stemmer {brief(stemmer)}; use none, {', '.join(known)}")
        return Analyzer(tuple(sorted({term for word in stop_words for term in analyze(word)})), stemmer, diacritics)

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Analyzer:
        """Return the analyzer whose `as_dict` is this JSON data."""
        diacritics: Diacritics = "remove" if data.get("diacritics") == "remove" else "keep"
        return Analyzer(tuple(map(str, data.get("stop_words", ()))), str(data.get("stemmer", "none")), diacritics)

    def as_dict(self) -> dict[str, Any]:
        """Return JSON data: the settings that are not the defaults."""
        settings: dict[str, Any] = {"stop_words": list(self.stop_words)} if self.stop_words else {}
        settings |= {"stemmer": self.stemmer} if self.stemmer != "none" else {}
        return settings | ({"diacritics": self.diacritics} if self.diacritics != "keep" else {})

    @property
    def name(self) -> str:
        """Name for stage keys; equal for analyzers that give the same terms.

        Raises:
            EnvironmentFault: PyStemmer is missing.
        """
        parts = [ANALYZER]
        if self.stop_words:
            parts.append(f"stop-{hash_json(list(self.stop_words))[:12]}")
        if self.diacritics == "remove":
            parts.append("no-diacritics")
        if self.stemmer != "none":
            parts.append(f"{self.stemmer}-snowball-{_pystemmer().version()}")
        return " ".join(parts)

    def stem(self, terms: Sequence[str]) -> list[str]:
        """Return the stem of each term, without diacritics if these are removed; the term itself if its stem is not one term."""
        stems = [remove_diacritics(term) for term in terms] if self.diacritics == "remove" else list(terms)
        if self.stemmer != "none":
            stems = _pystemmer().Stemmer(self.stemmer).stemWords(stems)
        return [stem if stem == term or split_terms(stem) == [stem] else term for term, stem in zip(terms, stems, strict=True)]


PLAIN: Final = Analyzer()


def _pystemmer() -> Any:
    try:
        import Stemmer
    except ModuleNotFoundError as error:
        raise EnvironmentFault("stemming needs the package PyStemmer: pip install 'cramlm[search]'") from error
    return Stemmer


def analyze(text: str, analyzer: Analyzer = PLAIN) -> list[str]:
    """Return the terms of a text in order, with repeats."""
    terms = split_terms(text)
    if analyzer == PLAIN:
        return terms
    stop = set(analyzer.stop_words)
    return analyzer.stem([term for term in terms if term not in stop])


class Vocabulary:
    """Terms numbered in the order of their first occurrence; grows with every tokenized text.

    Exact: a term of up to 7 bytes is its own hash key; longer ones with equal 64-bit keys are compared by bytes.
    """

    def __init__(self, analyzer: Analyzer = PLAIN) -> None:
        self._words = None if analyzer == PLAIN else _Words(analyzer)
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

    def terms(self, first: int = 0) -> list[str]:
        """Return the terms from number `first` on as strings, in a fraction of the time of `term`."""
        content, bounds = self.term_bytes.tobytes(), self.term_offsets[first:].tolist()
        if content.isascii():
            text = content.decode()
            return [text[start:end] for start, end in itertools.pairwise(bounds)]
        return [content[start:end].decode() for start, end in itertools.pairwise(bounds)]

    def tokenize(self, text: ByteArray, offsets: IntArray) -> tuple[Int32Array, IntArray]:
        """Return the term numbers of documents text[offsets[i]:offsets[i + 1]] (valid UTF-8), and their offsets (documents + 1,)."""
        return self._split(text, offsets) if self._words is None else self._words.tokenize(text, offsets, self)

    def number(self, terms: Sequence[str]) -> tuple[Int32Array, IntArray]:
        """Return the numbers of terms, as `tokenize` does for documents; one that cannot be a term becomes several, or none."""
        return self._number(*joined([term.encode() for term in terms]))

    def add(self, other: Vocabulary) -> Int32Array:
        """Add the terms of another vocabulary in their order; return the number here of each of its terms."""
        return self._number(other.term_bytes, other.term_offsets)[0]

    def _number(self, text: ByteArray, offsets: IntArray) -> tuple[Int32Array, IntArray]:
        text, offsets, terms = read_only(text), read_only(offsets), len(offsets) - 1
        starts, term = np.zeros(terms + 1, np.int64), 0
        self._state[1] = 0
        while term < terms:
            term, reason = kernels.number_terms(
                text, offsets, term, _FOLD,
                self._keys, self._ids, self._bytes, self._offsets, self._state, self._tokens, starts,
            )  # fmt: skip
            self._make_room(reason)
        return self._tokens[: starts[-1]].copy(), starts

    def _split(self, text: ByteArray, offsets: IntArray) -> tuple[Int32Array, IntArray]:
        text, documents = read_only(text), len(offsets) - 1
        starts = np.zeros(documents + 1, np.int64)
        table = _no_table() if text.max(initial=0) < 128 else character_table()
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
            self._keys, self._ids, self._bytes, self._offsets, self._state, self._tokens, starts, self._scratch, read_only(self._scratch),
        )  # fmt: skip
        if reason == kernels.SCRATCH_FULL:
            needed = kernels.CANONICAL_GROWTH * int(offsets[document + 1] - offsets[document]) + 64
            self._scratch = np.empty(max(needed, 2 * len(self._scratch)), np.uint8)
        self._make_room(reason)
        return int(document), int(reason)

    def _make_room(self, reason: int) -> None:
        match reason:
            case kernels.TOKENS_FULL:
                self._tokens = _grown(self._tokens)
            case kernels.VOCABULARY_FULL:
                self._bytes, self._offsets = _grown(self._bytes), _grown(self._offsets)
                keys, ids = np.zeros(2 * len(self._keys), np.uint64), np.zeros(2 * len(self._ids), np.int32)
                kernels.rehash(self._keys, self._ids, keys, ids)
                self._keys, self._ids = keys, ids

    def keys(self) -> npt.NDArray[np.uint64]:
        """Return the hash key of each term, uint64 (terms,); equal for equal terms, nearly always distinct for different ones."""
        result = np.empty(len(self), np.uint64)
        used = self._keys != 0
        result[self._ids[used]] = self._keys[used]
        return result


class _Words:
    """The distinct words of the texts so far, and the term of each: its stem, or none for a stop word. Every word is stemmed once."""

    def __init__(self, analyzer: Analyzer) -> None:
        self._analyzer, self._stop = analyzer, set(analyzer.stop_words)
        self._words = Vocabulary()
        self._term_of = np.empty(0, np.int32)  # -1 for a stop word

    def tokenize(self, text: ByteArray, offsets: IntArray, terms: Vocabulary) -> tuple[Int32Array, IntArray]:
        """As `Vocabulary.tokenize`, with the numbers of `terms`."""
        words, starts = self._words.tokenize(text, offsets)
        new = self._words.terms(len(self._term_of))
        self._term_of = np.concatenate((self._term_of, self._terms_of(new, terms)))
        found = self._term_of[words]
        kept = found >= 0
        return found[kept], offsets_of(kept)[starts]

    def _terms_of(self, words: Sequence[str], terms: Vocabulary) -> Int32Array:
        result = np.full(len(words), -1, np.int32)
        kept = np.array([number for number, word in enumerate(words) if word not in self._stop], np.int64)
        numbers, starts = terms.number(self._analyzer.stem([words[number] for number in kept.tolist()]))
        assert (np.diff(starts) == 1).all(), "every term is one term"
        result[kept] = numbers
        return result


@functools.cache
def character_table() -> _Table:
    """Return the kernel's table of code points, uint32 (0x110000,), and the folded forms, int32; see `_character_table`."""
    low, tags, expansions = _character_table()
    codes = np.zeros(0x110000, np.uint32)
    codes[: len(low)], codes[_TAGS : _TAGS + len(tags)] = low, tags
    return codes, expansions


@cached_on_disk(__file__, characters.__file__)
def _character_table() -> tuple[npt.NDArray[Any], ...]:
    """Return the table below 0x40000, from `_TAGS` on, and the folded forms. Entries: kind, flags and the index of the folded form.

    Flags mark characters that cannot be folded alone: those that may join with the previous one (NEEDS_CONTEXT), and those that start or
    end in a combining class other than 0, since two such neighbours may be reordered (STARTS_COMBINED, ENDS_COMBINED). Folded forms:
    length, then code points.
    """
    codes = np.zeros(0x110000, np.uint32)
    expansions: list[int] = []
    for first, last in _PLAIN:
        codes[first : last + 1] = PAIRS
    plain = codes != 0
    joins = _second_characters()
    for code in [*range(_LOW), *range(_TAGS, _TAGS + 0x1000)]:
        if plain[code]:
            continue
        character = chr(code)
        if is_unknown(character):
            continue
        entry = kind_of(character)
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
    return codes[:_LOW], codes[_TAGS : _TAGS + 0x1000], np.array(expansions, np.int32)


def _second_characters() -> frozenset[int]:
    """Return all code points that may join with a previous character under NFC."""
    canonical = (unicodedata.decomposition(chr(code)).split() for code in range(0xC0, 0x30000))
    pairs = {int(parts[1], 16) for parts in canonical if len(parts) == 2 and not parts[0].startswith("<")}
    return frozenset(pairs | set(range(0x1161, 0x1176)) | set(range(0x11A8, 0x11C3)))


def _grown(array: npt.NDArray[_Scalar]) -> npt.NDArray[_Scalar]:
    return np.concatenate([array, np.empty_like(array)])


@functools.cache
def _no_table() -> _Table:
    return np.zeros(1, np.uint32), np.zeros(1, np.int32)


_FOLD: Final = np.array([ord(chr(code).lower()) if chr(code).isalnum() else 0 for code in range(128)] + list(range(128, 256)), np.uint8)
"""Of each byte: lower case for letters, 0 for ASCII that separates words, and bytes beyond ASCII as they are."""
