"""What a selection is like, beside a blind draw of as much text from the same corpus.

Likeness to the task: KL(task || blind draw) - KL(task || selection) over hashed words and pairs of words, the "KL reduction" of
Xie et al. 2023, who found that it goes with the accuracy after training (r = 0.82 in their experiments). It costs a second where
training costs hours, and it is a measure of words: a selection can be as near and say less.

Over-represented words: log-odds of a word in the selection against the blind draw, with the pooled counts as a prior worth
`PRIOR_WORDS` words, ordered by their z-score (Monroe, Colaresi and Quinn 2008), so that a word seen twice by chance does not lead the
list; words at least twice as likely as in the draw come before the others.

Both look at no more than `MOST_PASSAGES` of the selection, evenly over its ranks, and `MOST_TEXTS` of the task; the reduction is then
right to about 0.005.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
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
_DRAWN_AT_ONCE: Final = 512


def compare_with_corpus(corpus: Corpus, selected: IntArray, task_texts: Sequence[str]) -> dict[str, Any]:
    """Plain JSON for report.json: task_likeness and over_represented. selected: positions, best first, at least one."""
    chosen = [corpus.data(position) for position in selected[_evenly(len(selected), MOST_PASSAGES)].tolist()]
    ngrams = hash_utf8(chosen)
    drawn, drawn_counts = _draw(corpus, len(ngrams.buckets))
    target = count(hash_texts([task_texts[number] for number in _evenly(len(task_texts), MOST_TEXTS).tolist()]))
    blind, own = divergence(target, drawn_counts), divergence(target, count(ngrams))
    likeness = {"kl_random": round(blind, 4), "kl_selection": round(own, 4), "kl_reduction": round(blind - own, 4)}
    sizes = {"buckets": BUCKETS, "passages": len(chosen), "random_passages": len(drawn)}
    return {"task_likeness": likeness | sizes, "over_represented": over_represented(_count_words(chosen), _count_words(drawn))}


def over_represented(own: Counter[str], other: Counter[str]) -> list[dict[str, Any]]:
    """The words that mark `own` off from `other`: word, log_odds (natural), z, and the two counts. Those at least twice as likely come
    first, each kind by z; numbers are left out.
    """
    totals, pooled = (own.total() + PRIOR_WORDS, other.total() + PRIOR_WORDS), own + other
    share = PRIOR_WORDS / max(pooled.total(), 1)
    rows = []
    for word, both in pooled.items():
        counts = (own[word] + share * both, other[word] + share * both)
        log_odds = _log_odds(counts[0], totals[0]) - _log_odds(counts[1], totals[1])
        if log_odds > 0 and not word.isnumeric():
            z = log_odds / math.sqrt(1 / counts[0] + 1 / counts[1])
            rows.append((log_odds < math.log(2), -z, word, log_odds))
    return [
        {"word": word, "log_odds": round(log_odds, 3), "z": round(-minus_z, 1), "selection": own[word], "random": other[word]}
        for _, minus_z, word, log_odds in sorted(rows)[:_SHOWN_WORDS]
    ]


def _evenly(size: int, most: int) -> IntArray:
    """At most so many of the places 0 to size - 1, the first and the last among them."""
    return np.unique(np.linspace(0, size - 1, min(size, most)).round().astype(np.int64))


def _log_odds(count: float, total: float) -> float:
    return math.log(count / max(total - count, 1.0))  # one word that is all the text stays finite


def _draw(corpus: Corpus, size: int) -> tuple[list[bytes], IntArray]:
    """Texts drawn blindly, the same at every call, until they hold `size` n-grams or the corpus ends; and their counts per bucket."""
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
    """The positions 0 to size - 1 in a random order, the same at every call; 8 bytes a position are held."""
    order = np.random.default_rng(0x424C494E44).permutation(size)
    for start in range(0, size, _DRAWN_AT_ONCE):
        yield order[start : start + _DRAWN_AT_ONCE].tolist()


def _count_words(texts: Iterable[bytes]) -> Counter[str]:
    words: Counter[bytes] = Counter()
    for text in texts:
        words.update(segment_utf8(text).split())
    return Counter({word.decode("utf-8", "surrogatepass"): number for word, number in words.items()})
