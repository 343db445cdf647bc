"""Weighted counts of terms as features of text, in several variants, fitted on training texts and stored as plain data.

    words        1- and 2-grams of words, lower case; a word keeps its combining marks (Yoruba's tones)
    tokens       1- and 2-grams of the strings between white space, as written; markup such as `<<` and `[[` is kept
    characters   2- to 5-grams of characters inside words, lower case
    union        tokens and characters side by side, each scaled by sqrt(1/2)
    marked       tokens, and beside them words and word pairs of the segments between the task's markers (text/markers.py), if it has any
    unigrams     the terms of BM25 (retrieval/bm25/terms.py) alone, for naive Bayes

In scripts without spaces each grapheme cluster is a word or token of its own. Texts are normalized to Unicode NFC. A term counts
1 + ln tf, times its weight, and rows are scaled to length 1. Weights are idf = ln((1 + n) / (1 + df)) + 1, as in scikit-learn's
`TfidfVectorizer(sublinear_tf=True)`, or, where labels are given, the terms' associations with these (`associations`).
Character n-grams depend on the word alone: they are counted once per distinct word and multiplied with the counts of words, which gives
the same matrix in a fraction of the time.
"""

from __future__ import annotations

import functools
import itertools
import unicodedata
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias, assert_never

import numpy as np
import numpy.typing as npt
import scipy.sparse

from cramlm.records import PAIR_BOUNDARY, BoolArray, FloatArray, Int32Array, IntArray
from cramlm.retrieval.bm25.terms import split_terms
from cramlm.storage.arrays import offsets_of
from cramlm.text.markers import Markers
from cramlm.text.words import split_runs, split_words

if TYPE_CHECKING:
    from cramlm.linear.character_ngrams import NgramTable

Variant: TypeAlias = Literal["words", "tokens", "characters", "union", "marked", "unigrams"]
Terms: TypeAlias = Literal["words", "tokens", "characters", "segments", "unigrams"]

VARIANTS: Final[tuple[Variant, ...]] = ("words", "tokens", "characters", "union", "marked")
"""Those that logistic regression chooses from; `marked` only in a task with markers."""
MAX_FEATURES: Final = 300_000
MIN_DOCUMENTS: Final = 2
"""Terms in fewer training texts are dropped if there are at least `MANY_TEXTS` training texts."""
MANY_TEXTS: Final = 1000
CHARACTER_NGRAMS: Final = range(2, 6)
_COUNTS_AT_ONCE: Final = 4_000_000  # of terms by label: 16 MB
_PLAIN_CHARACTERS: Final = 20_000  # of texts that are counted in plain Python; for more, importing numba (0.4 CPU seconds) or a table pays
PARTS: Final[Mapping[Variant, tuple[Terms, ...]]] = {
    "words": ("words",),
    "tokens": ("tokens",),
    "characters": ("characters",),
    "union": ("tokens", "characters"),
    "marked": ("tokens", "segments"),
    "unigrams": ("unigrams",),
}
"""The vocabularies of each variant, in the order of their columns."""


def normalize(text: str) -> str:
    """`text` in Unicode NFC."""
    return unicodedata.normalize("NFC", text)


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """Terms of one kind in alphabetical order and their weights, float32 (terms,). markers: those between segments."""

    kind: Terms
    terms: tuple[str, ...]
    weights: FloatArray
    markers: Markers | None = None

    @classmethod
    def fit(cls, kind: Terms, texts: Sequence[str], markers: Markers | None = None, *, limit: int = MAX_FEATURES) -> tuple[Vocabulary, Any]:
        """Return the vocabulary of texts, at most the `limit` most frequent terms with idf as weights, and `frequencies` of these texts.

        markers: needed for segments, ignored otherwise.
        """
        markers = markers if kind == "segments" else None
        least = MIN_DOCUMENTS if len(texts) >= MANY_TEXTS else 1
        counts, terms = _count(kind, texts, None, markers, least=least)
        documents = np.bincount(counts.indices, minlength=len(terms))
        kept = np.flatnonzero(documents >= least)
        if len(kept) > limit:
            total = np.asarray(counts.sum(axis=0)).ravel()[kept]
            kept = np.sort(kept[np.argsort(-total, kind="stable")[:limit]])
        idf = np.log((1 + len(texts)) / (1 + documents[kept])) + 1
        vocabulary = cls(kind, tuple(terms[index] for index in kept.tolist()), idf.astype(np.float32), markers)
        return vocabulary, _sublinear(counts if len(kept) == len(terms) else counts[:, kept])

    def frequencies(self, texts: Sequence[str]) -> Any:
        """Return 1 + ln tf of the terms of texts, scipy CSR float32 (texts, terms)."""
        if not self.terms or not texts:
            return scipy.sparse.csr_matrix((len(texts), len(self.terms)), dtype=np.float32)
        return _sublinear(_count(self.kind, texts, self, self.markers)[0])

    def weigh(self, frequencies: Any) -> Any:
        """Return `frequencies` times the weights, scipy CSR float32 (texts, terms); rows have length 1, or 0 for a text without terms."""
        values = frequencies.data * self.weights[frequencies.indices]
        return unit_rows(scipy.sparse.csr_matrix((values, frequencies.indices, frequencies.indptr), shape=frequencies.shape))

    def transform(self, texts: Sequence[str]) -> Any:
        """Return the weighted matrix of texts, as `weigh`."""
        return self.weigh(self.frequencies(texts))

    def weighted_by_labels(self, frequencies: Any, labels: BoolArray, weights: FloatArray) -> Vocabulary:
        """Return the vocabulary with `associations` as weights."""
        return replace(self, weights=associations(frequencies, labels, weights))

    @functools.cached_property
    def columns(self) -> Mapping[str, int]:
        """The column of each term, in order."""
        return {term: column for column, term in enumerate(self.terms)}

    @functools.cached_property
    def words_and_pairs(self) -> WordsAndPairs:
        """The terms by the numbers of their words."""
        return WordsAndPairs.of(self.terms)

    @functools.cached_property
    def table(self) -> NgramTable:
        """The terms as n-grams that are counted by a compiled kernel."""
        from cramlm.linear.character_ngrams import NgramTable  # here: imports numba

        return NgramTable(CHARACTER_NGRAMS, self.terms)


@dataclass(frozen=True, slots=True, eq=False)
class WordsAndPairs:
    """The columns of words and pairs. A pair is found by the numbers of its words: few of a text's are terms, and none becomes a string.

    numbers: of the words that are terms or in a pair. of_words: the column of each, or -1; -1 also at the end. pairs: int64, sorted, number
    of the first word times the number of words, plus that of the second. of_pairs: their columns. width: number of columns.
    """

    numbers: Mapping[str, int]
    of_words: Int32Array
    pairs: IntArray
    of_pairs: Int32Array
    width: int

    @classmethod
    def of(cls, terms: Sequence[str]) -> WordsAndPairs:
        """terms: words, and pairs with a space between their words."""
        divided = [term.split(" ") for term in terms]
        numbers = {word: number for number, word in enumerate(dict.fromkeys(itertools.chain.from_iterable(divided)))}
        of_words = np.full(len(numbers) + 1, -1, dtype=np.int32)
        keys = np.full(len(terms), -1, dtype=np.int64)
        for column, (first, *second) in enumerate(divided):
            if second:
                keys[column] = numbers[first] * len(numbers) + numbers[second[0]]
            else:
                of_words[numbers[first]] = column
        order = np.argsort(keys, kind="stable")[np.count_nonzero(keys < 0) :]
        return cls(numbers, of_words, keys[order], order.astype(np.int32), len(terms))

    def count(self, texts: Iterable[Sequence[str]]) -> Any:
        """Return the counts of the terms of texts, each a sequence of words, CSR float32 (texts, width)."""
        numbers, offsets = array("i"), [0]
        for words in texts:
            numbers.extend(map(self.numbers.get, words, itertools.repeat(-1)))
            offsets.append(len(numbers))
        number, ends = np.frombuffer(numbers, dtype=np.int32), np.array(offsets)
        both = (number[:-1] >= 0) & (number[1:] >= 0)
        both[ends[(ends > 0) & (ends < len(number))] - 1] = False  # words of two texts
        start = np.flatnonzero(both)
        keys = number[start].astype(np.int64) * len(self.numbers) + number[start + 1]
        place = np.minimum(np.searchsorted(self.pairs, keys), len(self.pairs) - 1)
        columns = np.full(len(number), -1, dtype=np.int32)
        if len(self.pairs):
            columns[start] = np.where(self.pairs[place] == keys, self.of_pairs[place], -1)
        return count_columns(self.of_words[number], ends, self.width) + count_columns(columns, ends, self.width)


class TextMatrices:
    """Texts, and the frequencies of terms in them in NFC, each counted once: several models have the same vocabulary."""

    def __init__(self, texts: Sequence[str]) -> None:
        self.texts = texts
        self._texts = [normalize(text) for text in texts]
        self._known: list[tuple[Vocabulary, Any]] = []

    def frequencies(self, vocabulary: Vocabulary) -> Any:
        """As `Vocabulary.frequencies`. The matrix must not be changed."""
        for known, frequencies in self._known:
            if (known.kind, known.markers, known.terms) == (vocabulary.kind, vocabulary.markers, vocabulary.terms):
                return frequencies
        frequencies = vocabulary.frequencies(self._texts)
        self._known.append((vocabulary, frequencies))
        return frequencies


@dataclass(frozen=True, slots=True, eq=False)
class Ngrams:
    """A variant fitted on training texts."""

    variant: Variant
    parts: tuple[Vocabulary, ...]

    def transform(self, texts: TextMatrices) -> Any:
        """Return the matrix of texts, scipy CSR float32 (texts, features)."""
        return join([part.weigh(texts.frequencies(part)) for part in self.parts])

    @property
    def markers(self) -> Markers | None:
        """The markers that divide texts into segments; None in the other variants."""
        return next((part.markers for part in self.parts if part.markers is not None), None)

    @property
    def width(self) -> int:
        """Number of features."""
        return sum(len(part.terms) for part in self.parts)


def join(parts: Sequence[Any]) -> Any:
    """Matrices of unit rows side by side, scaled so that a row has length 1 again."""
    return parts[0] if len(parts) == 1 else scipy.sparse.hstack(parts, format="csr", dtype=np.float32) * np.float32(len(parts) ** -0.5)


def unit_rows(matrix: Any) -> Any:
    """Return a CSR matrix with rows scaled to length 1, in place; empty rows stay."""
    squares = np.asarray(matrix.multiply(matrix).sum(axis=1)).ravel()
    lengths = np.where(squares > 0, np.sqrt(squares), 1).astype(np.float32)
    matrix.data /= np.repeat(lengths, np.diff(matrix.indptr))
    return matrix


def associations(frequencies: Any, labels: BoolArray, weights: FloatArray) -> FloatArray:
    """Return how much each term says about the labels, float32 (terms,).

    It is the root of the Kullback-Leibler divergence, in nats, between the labels of the texts that have the term and those of all texts.
    To the former one text is added with the labels of all texts, so that a term of one text says less than one of several. With few texts
    these weights are better than idf (docs/log.md).

    frequencies: CSR (n, terms). labels: which texts have which, (n, labels); a text without one counts as one of a further label. weights:
    of the texts, (n,).
    """
    without = ~labels.any(axis=1, keepdims=True)
    of_texts = (np.hstack([labels, without]) if without.any() else labels) * weights[:, None]
    prior = of_texts.sum(axis=0) / of_texts.sum()
    of_texts, prior = of_texts[:, prior > 0], prior[prior > 0]
    present = scipy.sparse.csr_matrix((np.ones_like(frequencies.data), frequencies.indices, frequencies.indptr), shape=frequencies.shape)
    present, result = present.tocsc(), np.zeros(frequencies.shape[1], dtype=np.float32)
    at_once = max(1, _COUNTS_AT_ONCE // len(prior))
    for first in range(0, len(result), at_once):
        shares = present[:, first : first + at_once].T @ of_texts + prior
        shares /= shares.sum(axis=1, keepdims=True)
        divergence = (shares * np.log(shares / prior)).sum(axis=1)
        result[first : first + at_once] = np.sqrt(np.maximum(divergence, 0))
    return result


def _sublinear(counts: Any) -> Any:
    frequencies = scipy.sparse.csr_matrix(counts, dtype=np.float32)
    frequencies.data = np.log(frequencies.data) + 1
    return frequencies


def _count(
    kind: Terms, texts: Sequence[str], vocabulary: Vocabulary | None, markers: Markers | None, *, least: int = 1
) -> tuple[Any, Sequence[str]]:
    """Counts of terms, CSR (texts, terms), and the terms in column order. vocabulary: the terms that are counted; None = all of the texts.

    markers: those between segments. least: terms in fewer texts may be left out.
    """
    match kind:
        case "unigrams":
            return count_words(texts, _columns(vocabulary))
        case "characters":
            of_words, words = count_terms((text.lower().split() for text in texts), None)
            of_ngrams, ngrams = _count_ngrams(words, vocabulary)
            return of_words @ of_ngrams, ngrams
        case "words":
            return _count_with_pairs(texts, lambda text: split_words(text.lower()), vocabulary, least=least)
        case "tokens":
            return _count_with_pairs(texts, split_runs, vocabulary, least=least)
        case "segments":
            assert markers is not None, "segments lie between markers"
            return count_terms((_segment_terms(markers, text) for text in texts), _columns(vocabulary), least=least)
        case _:
            assert_never(kind)


def _columns(vocabulary: Vocabulary | None) -> Mapping[str, int] | None:
    return None if vocabulary is None else vocabulary.columns


def _count_with_pairs(
    texts: Sequence[str], split: Callable[[str], list[str]], vocabulary: Vocabulary | None, *, least: int
) -> tuple[Any, Sequence[str]]:
    """As `_count`, of the words that `split` gives and of pairs of neighbours."""
    words = map(split, texts)
    if vocabulary is None or sum(map(len, texts)) <= _PLAIN_CHARACTERS:
        return count_terms(map(_with_pairs, words), _columns(vocabulary), least=least)
    return vocabulary.words_and_pairs.count(words), vocabulary.terms


def _count_ngrams(words: Sequence[str], vocabulary: Vocabulary | None) -> tuple[Any, Sequence[str]]:
    """As `_count`, of the character n-grams of words."""
    if sum(map(len, words)) <= _PLAIN_CHARACTERS:
        return count_terms(map(character_ngrams, words), _columns(vocabulary))
    from cramlm.linear.character_ngrams import NgramTable  # here: imports numba

    if vocabulary is not None:
        return count_columns(*vocabulary.table.count(words, grow=False), len(vocabulary.terms)), vocabulary.terms
    table = NgramTable(CHARACTER_NGRAMS)
    ids, offsets = table.count(words, grow=True)
    return _in_alphabetical_order(count_columns(ids, offsets, len(table.ngrams)), table.ngrams)


def count_words(texts: Sequence[str], columns: Mapping[str, int] | None) -> tuple[Any, Sequence[str]]:
    """As `count_terms`, of the terms of BM25 in texts."""
    if sum(map(len, texts)) <= _PLAIN_CHARACTERS:
        return count_terms(map(split_terms, texts), columns)
    from cramlm.retrieval.bm25.search import tokenize_texts  # here: imports numba

    tokens = tokenize_texts(texts)
    terms = tokens.vocabulary.terms()
    columns = {term: column for column, term in enumerate(sorted(terms))} if columns is None else columns
    column_of = np.array([columns.get(term, -1) for term in terms], np.int32)
    return count_columns(column_of[tokens.token], tokens.starts, len(columns)), list(columns)


def count_columns(columns: npt.NDArray[np.int32], offsets: npt.NDArray[np.int64], width: int) -> Any:
    """Counts of the columns of each text, CSR float32 (texts, width).

    columns: those of the words of text i at [offsets[i]:offsets[i + 1]]; -1 for a word that is not counted.
    """
    kept = columns >= 0
    ends = offsets_of(kept)
    entries = (np.ones(int(ends[-1]), dtype=np.float32), columns[kept], ends[offsets])
    counts = scipy.sparse.csr_matrix(entries, shape=(len(offsets) - 1, width))
    counts.sum_duplicates()
    return counts


def count_terms(texts: Iterable[Sequence[str]], columns: Mapping[str, int] | None, *, least: int = 1) -> tuple[Any, Sequence[str]]:
    """Counts of the terms of each text, CSR float32 (texts, terms), and the terms in column order.

    columns: the columns of the terms that are counted, in order; None = all terms that are in at least `least` texts, in alphabetical
    order. Equal to the matrix of scikit-learn's CountVectorizer, which takes longer to import than a prediction takes.
    """
    known: defaultdict[str, int] = defaultdict(itertools.count().__next__)
    ids, offsets = array("i"), [0]
    for terms in texts:
        ids.extend(map(known.__getitem__, terms) if columns is None else map(columns.get, terms, itertools.repeat(-1)))
        offsets.append(len(ids))
    width = len(known if columns is None else columns)
    counts = count_columns(np.frombuffer(ids, dtype=np.int32), np.array(offsets), width)
    if columns is not None:
        return counts, list(columns)
    found = list(known)
    if least > 1:  # before sorting: most pairs of words are in one text
        kept = np.flatnonzero(np.bincount(counts.indices, minlength=width) >= least)
        counts, found = counts[:, kept], [found[index] for index in kept.tolist()]
    return _in_alphabetical_order(counts, found)


def _in_alphabetical_order(counts: Any, terms: Sequence[str]) -> tuple[Any, Sequence[str]]:
    """Counts and terms with the columns in the order of their terms. The order of the entries of a row stays."""
    order = sorted(range(len(terms)), key=terms.__getitem__)
    column_of = np.empty(len(terms), dtype=np.int32)
    column_of[order] = np.arange(len(terms), dtype=np.int32)
    counts.indices, counts.has_sorted_indices = column_of[counts.indices], False
    return counts, [terms[column] for column in order]


def _with_pairs(tokens: Sequence[str]) -> list[str]:
    return [*tokens, *map(" ".join, itertools.pairwise(tokens))]


def _segment_terms(markers: Markers, text: str) -> list[str]:
    """Words, pairs of words and the number of words of each segment, each with the markers around it."""
    terms: list[str] = []
    for between in markers.segments(text):
        around, words = f"{between.before} … {between.after}", [word.lower() for word in between.words]
        count = len(words)
        terms += [f"{around} {term}" for term in _with_pairs(words)]
        terms.append(f"{around} {min(count // 4 * 4, 12) if count >= 4 else count} words")
    return [*terms, *_shared_terms(markers, text)] if markers.pairs else terms


def _shared_terms(markers: Markers, text: str) -> list[str]:
    """Return the words that both texts of a pair have, and which tenth of the words of the shorter one they are."""
    first, _, second = text.lower().partition(PAIR_BOUNDARY)
    one, other = (set(markers.without_markers(each)) for each in (first, second))
    share = 10 * len(one & other) // max(1, min(len(one), len(other)))
    return [*(f"both {word}" for word in sorted(one & other)), f"both {share}0 %"]


def character_ngrams(word: str) -> list[str]:
    """Return the n-grams of a word with a space on either side, as scikit-learn's analyzer `char_wb` counts them.

    A word that is shorter than n is counted once, whole.
    """
    padded = f" {word} "
    ngrams: list[str] = []
    for size in CHARACTER_NGRAMS:
        ngrams += [padded[start : start + size] for start in range(max(1, len(padded) - size + 1))]
        if size >= len(padded):
            break
    return ngrams
