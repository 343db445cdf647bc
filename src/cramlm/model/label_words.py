"""Words to stand for labels, chosen by the training texts where nobody gives any (the useful half of AutoPrompt, Shin et al. 2020).

Candidates are the tokens of the vocabulary that are whole words of letters. Of a word and a label, n texts of which k hold the word, and N
other texts of which K do:

    z  =  ( ln((k + 1/2) / (n - k + 1/2)) - ln((K + 1/2) / (N - K + 1/2)) )
          / sqrt( 1/(k + 1/2) + 1/(n - k + 1/2) + 1/(K + 1/2) + 1/(N - K + 1/2) )

the difference of their log-odds over its standard error (Monroe, Colaresi and Quinn 2008, with half a text as prior). A word goes to the
label for which its z is highest; each label takes its best. No chance in it: of equal words the one with the lower token id.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cramlm.errors import UsageError
from cramlm.model.prompts import word_id
from cramlm.model.tokenization import Tokenizer, Tokens
from cramlm.records import FloatArray, IntArray

_DECIMALS = 9  # of z, so that the last bits of a logarithm decide nothing


def choose_words(tokens: Tokens, label_ids: IntArray, labels: Sequence[str], tokenizer: Tokenizer, *, count: int) -> list[tuple[str, ...]]:
    """For each label the `count` words most associated with it (fewer if it has no more of its own), best first.

    tokens: of the training texts; label_ids: (n,), which label each has.

    Raises:
        UsageError: if a label is left without a word.
    """
    candidates, words = _candidates(tokenizer)
    z = association(tokens, label_ids, candidates, labels=len(labels))
    order = np.lexsort((np.broadcast_to(candidates, z.shape), -z), axis=1)
    best = z.argmax(axis=0)
    chosen: list[list[int]] = [[int(place) for place in row if best[place] == label][:count] for label, row in enumerate(order)]
    taken = {place for places in chosen for place in places}
    for label, row in enumerate(order):  # a label whose words all speak for others yet more has the best that nobody took
        if not chosen[label]:
            chosen[label] = [int(place) for place in row if place not in taken][:1]
            taken.update(chosen[label])
    if empty := [label for label, places in zip(labels, chosen, strict=True) if not places]:
        raise UsageError(
            f"head.prompt.words: the vocabulary has {len(words)} whole words, none of which is left for label {empty[0]!r}; give words, "
            "or raise tokenizer.vocab_size"
        )
    return [tuple(words[place] for place in places) for places in chosen]


def association(tokens: Tokens, label_ids: IntArray, candidates: IntArray, *, labels: int) -> FloatArray:
    """z of each label and candidate, (labels, candidates)."""
    texts = np.repeat(np.arange(len(tokens)), tokens.lengths)
    place = np.full(int(max(tokens.ids.max(initial=0), candidates.max(initial=0))) + 1, -1)
    place[candidates] = np.arange(len(candidates))
    at = place[tokens.ids]
    held = np.unique(texts[at >= 0] * len(candidates) + at[at >= 0])  # a text counts once, however often it says the word
    text, word = np.divmod(held, max(1, len(candidates)))
    with_word = np.zeros((labels, len(candidates)))
    np.add.at(with_word, (label_ids[text], word), 1.0)
    texts_of = np.bincount(label_ids, minlength=labels)[:, None].astype(np.float64)
    k, n = with_word, texts_of
    rest, others = with_word.sum(axis=0) - k, len(label_ids) - n
    cells = [cell + 0.5 for cell in (k, n - k, rest, others - rest)]
    z = (np.log(cells[0] / cells[1]) - np.log(cells[2] / cells[3])) / np.sqrt(sum(1 / cell for cell in cells))
    result: FloatArray = np.round(z, _DECIMALS)
    return result


def _candidates(tokenizer: Tokenizer) -> tuple[IntArray, list[str]]:
    """Token ids of whole words, rising, and the words."""
    ids, words = [], []
    shown = [tokenizer.decode([number]).strip() for number in range(tokenizer.vocab_size)]
    alone = tokenizer.encode([f" {word}" for word in shown])
    for number, word in enumerate(shown):
        whole = alone[number]
        if word.isalpha() and len(whole) == 1 and whole[0] == number and word_id(tokenizer, word) == number:
            ids.append(number)
            words.append(word)
    return np.array(ids, np.int64), words
