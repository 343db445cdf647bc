"""Statistics of a selection: how it differs from a random sample of the same amount of text from the same corpus.

Similarity to the task: KL(task || random) - KL(task || selection) over hashed words and pairs of words, the "KL reduction" of Xie et al.
2023, who found a correlation of 0.82 with the accuracy after training. It compares words only.

Over-represented words: log-odds of a word in the selection against the random sample, with the pooled counts as a prior worth `PRIOR_WORDS`
words, ordered by z-score (Monroe, Colaresi and Quinn 2008); words at least twice as likely as in the sample come first.

Both use at most `MOST_PASSAGES` of the selection, evenly over its ranks, and `MOST_TEXTS` of the task; the error of the reduction is then
about 0.005.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from cramlm.data.corpus import Corpus
from cramlm.records import IntArray
from cramlm.storage.arrays import evenly, offsets_of, separated
from cramlm.text.ngrams import BUCKETS, count, divergence, hash_texts, hash_utf8
from cramlm.text.words import WordHashes, hash_block, segment_utf8

MOST_PASSAGES: Final = 2000
MOST_TEXTS: Final = 5000
PRIOR_WORDS: Final = 1000.0
_SHOWN_WORDS: Final = 20
_SAMPLE_BATCH: Final = 512


def compare_with_corpus(corpus: Corpus, selected: IntArray, task_texts: Sequence[str]) -> dict[str, Any]:
    """Return JSON data for report.json: task_likeness and over_represented. selected: positions, best first, at least one."""
    chosen = corpus.gather(selected[evenly(len(selected), MOST_PASSAGES)])
    ngrams = hash_utf8(separated(*chosen))
    sample, sample_counts = _sample(corpus, len(ngrams.buckets))
    target = _count_ngrams([task_texts[number] for number in evenly(len(task_texts), MOST_TEXTS).tolist()])
    random, own = divergence(target, sample_counts), divergence(target, count(ngrams))
    likeness = {"kl_random": round(random, 4), "kl_selection": round(own, 4), "kl_reduction": round(random - own, 4)}
    sizes = {"buckets": BUCKETS, "passages": len(chosen[1]) - 1, "random_passages": len(sample[1]) - 1}
    return {"task_likeness": likeness | sizes, "over_represented": over_represented(WordCounts.of(*chosen), WordCounts.of(*sample))}


@dataclass(frozen=True, slots=True)
class WordCounts:
    """The words of texts (as of `segment_utf8`), counted by their hashes. keys: distinct hashes, ascending; counts: int64, of each."""

    text: npt.NDArray[np.uint8]
    offsets: IntArray
    words: WordHashes
    keys: npt.NDArray[np.uint64]
    counts: IntArray

    @staticmethod
    def of(text: npt.NDArray[np.uint8], offsets: IntArray) -> WordCounts:
        """Count the words of texts text[offsets[i]:offsets[i + 1]] (UTF-8)."""
        words = hash_block(text, offsets)
        return WordCounts(text, offsets, words, *np.unique(words.hashes, return_counts=True))

    def count(self, keys: npt.NDArray[np.uint64]) -> IntArray:
        """Return how often words with these hashes occur, int64."""
        if not len(self.keys):
            return np.zeros(len(keys), np.int64)
        found = np.minimum(np.searchsorted(self.keys, keys), len(self.keys) - 1)
        return np.where(self.keys[found] == keys, self.counts[found], 0)

    def word(self, key: np.uint64) -> str:
        """Return a word that occurs by its hash."""
        position = int(np.argmax(self.words.hashes == key))
        number = int(np.searchsorted(self.words.offsets, position, side="right")) - 1
        text = self.text[self.offsets[number] : self.offsets[number + 1]].tobytes()
        return segment_utf8(text).split()[position - int(self.words.offsets[number])].decode("utf-8", "surrogatepass")


def over_represented(own: WordCounts, other: WordCounts) -> list[dict[str, Any]]:
    """Return the words that are over-represented in `own`: word, log_odds (natural), z, and both counts. Words that are at least twice as
    likely come first, then by z; numbers are left out.
    """
    keys = np.union1d(own.keys, other.keys)
    counts = own.count(keys), other.count(keys)
    totals = [int(each.sum()) + PRIOR_WORDS for each in counts]
    share = PRIOR_WORDS / max(int(counts[0].sum() + counts[1].sum()), 1)
    prior = share * (counts[0] + counts[1])
    odds = [np.log((each + prior) / np.maximum(total - each - prior, 1.0)) for each, total in zip(counts, totals, strict=True)]
    log_odds = odds[0] - odds[1]  # of words in all texts finite, too
    z = log_odds / np.sqrt(1 / (counts[0] + prior) + 1 / (counts[1] + prior))
    rows: list[tuple[bool, float, str, int]] = []
    for is_less_likely in (False, True):
        group = np.flatnonzero((log_odds > 0) & ((log_odds < math.log(2)) == is_less_likely))
        for index in group[np.argsort(-z[group], kind="stable")].tolist():
            if len(rows) >= _SHOWN_WORDS and (is_less_likely, -z[index]) > rows[-1][:2]:
                break
            word = (own if counts[0][index] else other).word(keys[index])
            if not word.isnumeric():
                rows.append((is_less_likely, -float(z[index]), word, index))
    return [
        {
            "word": word,
            "log_odds": round(float(log_odds[index]), 3),
            "z": round(-minus_z, 1),
            "selection": int(counts[0][index]),
            "random": int(counts[1][index]),
        }
        for _, minus_z, word, index in sorted(rows)[:_SHOWN_WORDS]
    ]


def _count_ngrams(texts: Sequence[str]) -> IntArray:
    """Return the number of n-grams in each bucket; every distinct text is hashed once."""
    distinct = Counter(texts)
    ngrams = hash_texts(list(distinct))
    repeats = np.repeat(np.fromiter(distinct.values(), np.int64), np.diff(ngrams.offsets))
    return np.bincount(ngrams.buckets, repeats, minlength=BUCKETS).astype(np.int64)


def _sample(corpus: Corpus, size: int) -> tuple[tuple[npt.NDArray[np.uint8], IntArray], IntArray]:
    """Return random texts (the same for every call) with `size` n-grams together, or the whole corpus; and their counts per bucket."""
    texts: list[npt.NDArray[np.uint8]] = []
    sizes: list[IntArray] = []
    counts = np.zeros(BUCKETS, np.int64)
    for batch in random_batches(len(corpus)):
        text, offsets = corpus.gather(np.array(batch))
        corpus.release()
        ngrams = hash_utf8(separated(text, offsets))
        enough = int(np.searchsorted(ngrams.offsets, size)) if ngrams.offsets[-1] >= size else len(batch)
        texts.append(text[: offsets[enough]])
        sizes.append(np.diff(offsets[: enough + 1]))
        counts += np.bincount(ngrams.buckets[: ngrams.offsets[enough]], minlength=BUCKETS)
        size -= int(ngrams.offsets[enough])
        if size <= 0:
            break
    return (np.concatenate(texts), offsets_of(np.concatenate(sizes))), counts


def random_batches(size: int) -> Iterator[list[int]]:
    """Yield the positions 0 to size - 1 in a random order, the same for every call. Memory: 8 bytes per position."""
    order = np.random.default_rng(0x424C494E44).permutation(size)
    for start in range(0, size, _SAMPLE_BATCH):
        yield order[start : start + _SAMPLE_BATCH].tolist()
