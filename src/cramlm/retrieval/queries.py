"""Query texts: the whole training text, its first words, or its key phrases.

    text ─► tokens (as for n-grams) ─► runs of content words between stop words and punctuation ─► scored ─► the best third ─► query

Key phrases are those of RAKE (Rose, Engel, Cramer and Cowley 2010): the score of a word is degree / frequency, where its frequency counts
its occurrences in candidate phrases and its degree the words of those phrases (including itself); the score of a phrase is the sum over its
words; of n different content words the n / 3 best phrases are kept. A hyphen or an apostrophe inside a word does not end a phrase.

**Stop words are counted, not listed**, so that any language works: words in at least a tenth of 2,000 passages sampled evenly from the
corpus, and words in at least three tenths of the training texts (whose spelling may differ from the corpus, as in Yoruba with and without
tone marks). In the English corpus these are 129 words, nearly all function words.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import Final

from cramlm.config.retriever import QueriesOf
from cramlm.data.corpus import Corpus
from cramlm.storage.arrays import evenly
from cramlm.text.ngrams import Token, cut_into_tokens

STOP_SHARE_OF_CORPUS: Final = 0.1
STOP_SHARE_OF_TASK: Final = 0.3
_SAMPLE: Final = 2000
_FEWEST: Final = 3
_JOINING: Final = frozenset("-'’‐‑")


def query_texts(texts: Sequence[str], corpus: Corpus, *, source: QueriesOf, max_words: int | None) -> list[str]:
    """Return a query for every text, in order. max_words: longer queries are truncated; key phrases are dropped whole, except the first. A
    text without a key phrase is its own query, truncated, too.
    """
    if source == "text":
        return [first_words(text, max_words) for text in texts]
    stop = stop_words(corpus, texts)
    queries = {
        text: ", ".join(_truncated(key_phrases(text, stop), max_words)) or first_words(text, max_words) for text in dict.fromkeys(texts)
    }
    return [queries[text] for text in texts]


def stop_words(corpus: Corpus, texts: Sequence[str]) -> frozenset[str]:
    """Return the words that are frequent in the corpus or the training texts, lower-cased."""
    common = _common((corpus.text(position) for position in evenly(len(corpus), _SAMPLE).tolist()), STOP_SHARE_OF_CORPUS)
    return frozenset(common | _common(texts, STOP_SHARE_OF_TASK))


def key_phrases(text: str, stop: Collection[str]) -> list[str]:
    """Return the distinct key phrases, best first (ties: the earlier), lower-cased; none if every word is a stop word."""
    candidates = _candidates(text.lower(), stop)
    frequency: Counter[str] = Counter()
    degree: Counter[str] = Counter()
    for _, words in candidates:
        frequency.update(words)
        degree.update({word: count * len(words) for word, count in Counter(words).items()})
    scores: dict[str, float] = {}
    for phrase, words in candidates:
        scores.setdefault(phrase, sum(degree[word] / frequency[word] for word in words))
    best = sorted(scores, key=lambda phrase: -scores[phrase])
    return best[: max(1, len(frequency) // 3)]


def first_words(text: str, most: int | None) -> str:
    """Return the text up to its `most`-th word, None = all of it; punctuation does not count."""
    if most is None:
        return text
    tokens = cut_into_tokens(text)
    words = [number for number, token in enumerate(tokens) if token.is_word]
    return text if len(words) <= most else "".join(token.text + token.space for token in tokens[: words[most]]).rstrip()


def _truncated(phrases: list[str], max_words: int | None) -> list[str]:
    if max_words is None:
        return phrases
    kept: list[str] = []
    remaining = max_words
    for phrase in phrases:
        remaining -= sum(token.is_word for token in cut_into_tokens(phrase))
        if kept and remaining < 0:
            break
        kept.append(phrase)
    return kept


def _candidates(text: str, stop: Collection[str]) -> list[tuple[str, list[str]]]:
    """Return (phrase as in the text, its words) of every run of content words, in order."""
    phrases: list[tuple[str, list[str]]] = []
    run: list[Token] = []
    tokens = cut_into_tokens(text)
    for number, token in enumerate(tokens):
        if (token.is_word and token.text not in stop) or (run and _joins(tokens, number, stop)):
            run.append(token)
        elif run:
            phrases.append(_phrase(run))
            run = []
    return [*phrases, _phrase(run)] if run else phrases


def _joins(tokens: Sequence[Token], number: int, stop: Collection[str]) -> bool:
    """Return True for a hyphen or apostrophe between two content words, without spaces."""
    if tokens[number].text not in _JOINING or number + 1 == len(tokens):
        return False
    following = tokens[number + 1]
    return not tokens[number - 1].space and not tokens[number].space and following.is_word and following.text not in stop


def _phrase(run: Sequence[Token]) -> tuple[str, list[str]]:
    text = "".join(token.text + (" " if token.space else "") for token in run).strip()
    return text, [token.text for token in run if token.is_word]


def _common(texts: Iterable[str], share: float) -> set[str]:
    """Return the words in at least this share of the texts and in at least `_FEWEST` of them."""
    frequency: Counter[str] = Counter()
    total = 0
    for text in texts:
        frequency.update({token.text for token in cut_into_tokens(text.lower()) if token.is_word})
        total += 1
    return {word for word, count in frequency.items() if count >= max(share * total, _FEWEST)}
