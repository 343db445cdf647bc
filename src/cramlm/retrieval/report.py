"""Compare a selection with a random sample of the same amount of text from the same corpus.

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
from collections.abc import Iterable, Iterator, Sequence
from itertools import repeat
from typing import Any, Final

import numpy as np

from cramlm.data.corpus import Corpus
from cramlm.records import IntArray
from cramlm.text.ngrams import BUCKETS, count, divergence, hash_texts, hash_utf8
from cramlm.text.words import segment_utf8

MOST_PASSAGES: Final = 2000
MOST_TEXTS: Final = 5000
PRIOR_WORDS: Final = 1000.0
_SHOWN_WORDS: Final = 20
_SAMPLE_BATCH: Final = 512


def compare_with_corpus(corpus: Corpus, selected: IntArray, task_texts: Sequence[str]) -> dict[str, Any]:
    """Return JSON data for report.json: task_likeness and over_represented. selected: positions, best first, at least one."""
    chosen = [corpus.data(position) for position in selected[_evenly(len(selected), MOST_PASSAGES)].tolist()]
    ngrams = hash_utf8(chosen)
    sample, sample_counts = _sample(corpus, len(ngrams.buckets))
    target = _count_ngrams([task_texts[number] for number in _evenly(len(task_texts), MOST_TEXTS).tolist()])
    random, own = divergence(target, sample_counts), divergence(target, count(ngrams))
    likeness = {"kl_random": round(random, 4), "kl_selection": round(own, 4), "kl_reduction": round(random - own, 4)}
    sizes = {"buckets": BUCKETS, "passages": len(chosen), "random_passages": len(sample)}
    return {"task_likeness": likeness | sizes, "over_represented": over_represented(_count_words(chosen), _count_words(sample))}


def over_represented(own: Counter[str], other: Counter[str]) -> list[dict[str, Any]]:
    """Return the words that are over-represented in `own`: word, log_odds (natural), z, and both counts. Words that are at least twice as
    likely come first, then by z; numbers are left out.
    """
    totals = (own.total() + PRIOR_WORDS, other.total() + PRIOR_WORDS)
    share = PRIOR_WORDS / max(own.total() + other.total(), 1)
    rows = []
    for word in _promising([word for word in {**own, **other} if not word.isnumeric()], own, other, totals, share):
        both = own[word] + other[word]
        counts = (own[word] + share * both, other[word] + share * both)
        log_odds = _log_odds(counts[0], totals[0]) - _log_odds(counts[1], totals[1])
        if log_odds > 0:
            z = log_odds / math.sqrt(1 / counts[0] + 1 / counts[1])
            rows.append((log_odds < math.log(2), -z, word, log_odds))
    return [
        {"word": word, "log_odds": round(log_odds, 3), "z": round(-minus_z, 1), "selection": own[word], "random": other[word]}
        for _, minus_z, word, log_odds in sorted(rows)[:_SHOWN_WORDS]
    ]


def _promising(words: list[str], own: Counter[str], other: Counter[str], totals: tuple[float, float], share: float) -> list[str]:
    """Return all words that `over_represented` can show, and few others."""
    margin = 1e-6  # arithmetic in arrays differs from Python's by less
    counts = [np.fromiter(map(each.get, words, repeat(0)), np.float64, len(words)) for each in (own, other)]
    both = share * (counts[0] + counts[1])
    smoothed = [each + both for each in counts]
    odds = [np.log(each / np.maximum(total - each, 1.0)) for each, total in zip(smoothed, totals, strict=True)]
    log_odds = odds[0] - odds[1]
    z = log_odds / np.sqrt(1 / smoothed[0] + 1 / smoothed[1])
    surely = z[log_odds > math.log(2) + margin]  # shown before all words that are less likely
    if len(surely) < _SHOWN_WORDS:
        return words
    least = np.sort(surely)[-_SHOWN_WORDS] - margin
    return [words[number] for number in np.flatnonzero((log_odds > math.log(2) - margin) & (z >= least)).tolist()]


def _evenly(size: int, most: int) -> IntArray:
    """Return at most `most` of the indices 0 to size - 1, evenly spaced, including the first and the last."""
    return np.unique(np.linspace(0, size - 1, min(size, most)).round().astype(np.int64))


def _count_ngrams(texts: Sequence[str]) -> IntArray:
    """Return the number of n-grams in each bucket; every distinct text is hashed once."""
    distinct = Counter(texts)
    ngrams = hash_texts(list(distinct))
    repeats = np.repeat(np.fromiter(distinct.values(), np.int64), np.diff(ngrams.offsets))
    return np.bincount(ngrams.buckets, repeats, minlength=BUCKETS).astype(np.int64)


def _log_odds(count: float, total: float) -> float:
    return math.log(count / max(total - count, 1.0))  # finite even if the text has only this word


def _sample(corpus: Corpus, size: int) -> tuple[list[bytes], IntArray]:
    """Return random texts (the same for every call) with `size` n-grams together, or the whole corpus; and their counts per bucket."""
    texts: list[bytes] = []
    counts = np.zeros(BUCKETS, np.int64)
    for positions in random_batches(len(corpus)):
        batch = [corpus.data(position) for position in positions]
        corpus.release()
        ngrams = hash_utf8(batch)
        enough = int(np.searchsorted(ngrams.offsets, size)) if ngrams.offsets[-1] >= size else len(batch)
        texts += batch[:enough]
        counts += np.bincount(ngrams.buckets[: ngrams.offsets[enough]], minlength=BUCKETS)
        size -= int(ngrams.offsets[enough])
        if size <= 0:
            break
    return texts, counts


def random_batches(size: int) -> Iterator[list[int]]:
    """Yield the positions 0 to size - 1 in a random order, the same for every call. Memory: 8 bytes per position."""
    order = np.random.default_rng(0x424C494E44).permutation(size)
    for start in range(0, size, _SAMPLE_BATCH):
        yield order[start : start + _SAMPLE_BATCH].tolist()


def _count_words(texts: Iterable[bytes]) -> Counter[str]:
    words: Counter[bytes] = Counter()
    for text in texts:
        words.update(segment_utf8(text).split())
    return Counter({word.decode("utf-8", "surrogatepass"): number for word, number in words.items()})
