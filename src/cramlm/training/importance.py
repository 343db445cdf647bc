"""Which words of a labelled text matter to its label, and which tokens of other text look like them: selective masking (Gu et al. 2020).

    fine-tuned model, labelled text ─► mark_words ─► term important_tokens trains the token head ─► score_tokens ─► masks `scored`

Only texts that the model labels correctly are marked. Two rules, P(y | .) being the model's probability of the text's own label:

    auxiliary   The paper's. Walk through the text s with an auxiliary text s', empty at first. A word w matters if
                P(y | s) - P(y | s' w) < delta: with it s' says as much as the whole text. It is then left out of s', else kept in it.
                One forward pass per word of s.
    gradient    One backward pass per text: a word's score is the sum over its tokens of (e - e_[MASK]) . d ln P(y | s) / d e, e being the
                embedding: what the label loses, to first order, when the word is masked. (Towards 0 instead of e_[MASK] it loses nothing at
                all where a norm follows the embedding.) The best `share` of the words matter, one at least, where the score is over 0.

Stop words are never marked and never in s'. They are counted, not listed: words in at least three tenths of the training texts, and in
three of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, assert_never

import numpy as np
import numpy.typing as npt
import torch

from cramlm.config.terms import ImportantTokens
from cramlm.model.device import Precision
from cramlm.model.kernels.dropout import no_dropout
from cramlm.model.model import Model, PackedBatch
from cramlm.records import BoolArray, FloatArray, IntArray
from cramlm.training.masking import SpecialIds
from cramlm.training.packing import pack
from cramlm.training.pools import TokenPool, word_names

STOP_SHARE = 0.3
_FEWEST = 3
_BATCH_TOKENS = 8192
NOT_ASKED, PLAIN, MARKED = 0, 1, 2  # what a pool's `token_labels` say of a token


def mark_words(
    model: Model, pool: TokenPool, config: ImportantTokens, special: SpecialIds, *, precision: Precision
) -> npt.NDArray[np.uint8]:
    """For each token of the pool, which knows its labels and where words begin: `MARKED`, `PLAIN`, or `NOT_ASKED` (special tokens, and all
    of a text that has no label or is not labelled correctly).
    """
    assert pool.begins is not None, "words are marked where it is known where they begin"
    texts = [pool.sequence(number) for number in range(len(pool))]
    probabilities, correct = _confidence(model, texts, pool.labels, precision=precision)
    word, names = _words(pool, special)
    candidates = (word >= 0) & ~_everywhere(pool, word, names)[np.maximum(word, 0)]
    chosen = np.flatnonzero(correct & (pool.labels >= 0))
    match config.rule:
        case "auxiliary":
            marked = _auxiliary(model, pool, word, candidates, chosen, probabilities, config.delta, precision=precision)
        case "gradient":
            marked = _by_gradient(model, pool, word, candidates, chosen, config.share, special)
        case _:
            assert_never(config.rule)
    marks = np.full(len(pool.ids), NOT_ASKED, dtype=np.uint8)
    of_chosen = np.repeat(np.isin(np.arange(len(pool)), chosen), np.diff(pool.offsets))
    marks[of_chosen & (word >= 0)] = PLAIN
    marks[of_chosen & (word >= 0) & marked] = MARKED
    return marks


def score_tokens(model: Model, pool: TokenPool, *, precision: Precision) -> FloatArray:
    """The place head's logit of every token of a pool: > 0 where it looks like those that were marked."""
    scores = np.zeros(len(pool.ids), dtype=np.float32)
    for batch in _batches(model, [pool.sequence(number) for number in range(len(pool))]):
        with torch.no_grad(), _cast(model, precision):
            real = (batch.sequence.flatten() >= 0).nonzero().squeeze(1)
            logits = model.place_head(model.hidden(batch).index_select(0, real)).float().cpu().numpy()
        owner, position = (array.flatten()[real].cpu().numpy() for array in (batch.sequence, batch.position))
        scores[pool.offsets[batch.task_labels.cpu().numpy()[owner]] + position] = logits
    return scores


def _words(pool: TokenPool, special: SpecialIds) -> tuple[IntArray, npt.NDArray[np.uint64]]:
    """The number of each token's word, rising over the pool, -1 for special tokens; and a name for each word, equal for equal words."""
    assert pool.begins is not None
    first = np.flatnonzero(pool.begins)
    word = np.cumsum(pool.begins) - 1
    word[np.isin(pool.ids, special.all)] = -1
    return word, word_names(pool.ids, first)


def _everywhere(pool: TokenPool, word: IntArray, names: npt.NDArray[np.uint64]) -> BoolArray:
    """Which words are stop words: in `STOP_SHARE` of the texts, and in `_FEWEST`."""
    kinds, kind = np.unique(names, return_inverse=True)
    text = np.repeat(np.arange(len(pool)), np.diff(pool.offsets))
    real = word >= 0
    seen = np.unique(np.stack([kind[word[real]], text[real]]), axis=1)
    texts = np.bincount(seen[0], minlength=len(kinds))
    return (texts >= max(STOP_SHARE * len(pool), _FEWEST))[kind]


def _auxiliary(
    model: Model,
    pool: TokenPool,
    word: IntArray,
    candidates: BoolArray,
    chosen: IntArray,
    probabilities: FloatArray,
    delta: float,
    *,
    precision: Precision,
) -> BoolArray:
    """All texts walk side by side: in round r each asks about its r-th word."""
    marked = np.zeros(len(pool.ids), dtype=np.bool_)
    kept = word < 0  # special tokens stay in s', or it would be no text
    waiting = {int(text): _word_places(pool, int(text), word, candidates) for text in chosen}
    while waiting := {text: places for text, places in waiting.items() if places}:
        texts, asked = list(waiting), [places.pop(0) for places in waiting.values()]
        tried = []
        for text, places in zip(texts, asked, strict=True):
            shown = kept[pool.offsets[text] : pool.offsets[text + 1]].copy()
            shown[places - pool.offsets[text]] = True
            tried.append(pool.sequence(text)[shown])
        confident, _ = _confidence(model, tried, pool.labels[texts], precision=precision)
        for text, places, probability in zip(texts, asked, confident, strict=True):
            matters = probabilities[text] - probability < delta
            marked[places], kept[places] = matters, not matters
    return marked


def _by_gradient(
    model: Model, pool: TokenPool, word: IntArray, candidates: BoolArray, chosen: IntArray, share: float, special: SpecialIds
) -> BoolArray:
    marked = np.zeros(len(pool.ids), dtype=np.bool_)
    for batch in _batches(model, [pool.sequence(int(text)) for text in chosen]):
        texts = chosen[batch.task_labels.cpu().numpy()]
        embedded = model.encoder.word_embeddings.detach()[batch.token_ids.flatten()].requires_grad_()
        numbers = torch.arange(batch.token_ids.numel(), device=embedded.device).view(batch.token_ids.shape)
        states = model.encoder(numbers, batch.sequence, batch.position, dropout=no_dropout(), words=embedded)
        hidden = (states[0] if isinstance(states, tuple) else states).flatten(0, 1)
        own = torch.from_numpy(pool.labels[texts]).to(hidden.device)
        total = torch.log_softmax(model.task_logits(hidden, batch).float(), -1).gather(1, own[:, None]).sum()
        (gradient,) = torch.autograd.grad(total, embedded)
        masked = model.encoder.word_embeddings.detach()[special.mask]
        worth = (gradient * (embedded.detach() - masked)).sum(1).cpu().numpy()
        for place, text in zip(batch.first.tolist(), texts.tolist(), strict=True):
            words = _word_places(pool, text, word, candidates)
            scores = [float(worth[places - pool.offsets[text] + place].sum()) for places in words]
            most = max(1, round(share * len(words)))
            for index in np.argsort(-np.array(scores), kind="stable")[:most]:
                marked[words[index]] = scores[index] > 0
    return marked


def _word_places(pool: TokenPool, text: int, word: IntArray, candidates: BoolArray) -> list[IntArray]:
    """The places in the pool of each word of a text that may be marked, in order."""
    places = np.arange(pool.offsets[text], pool.offsets[text + 1])
    places = places[candidates[places]]
    return np.split(places, np.flatnonzero(np.diff(word[places])) + 1) if len(places) else []


def _confidence(model: Model, texts: Sequence[npt.NDArray[Any]], labels: IntArray, *, precision: Precision) -> tuple[FloatArray, BoolArray]:
    """The probability of each text's own label, and whether that label is the most probable."""
    probabilities, correct = np.zeros(len(texts), dtype=np.float32), np.zeros(len(texts), dtype=np.bool_)
    for batch in _batches(model, texts):
        with torch.no_grad(), _cast(model, precision):
            answers = torch.softmax(model.task_logits(model.hidden(batch), batch).float(), -1).cpu().numpy()
        numbers = batch.task_labels.cpu().numpy()
        own = np.maximum(labels[numbers], 0)
        probabilities[numbers] = answers[np.arange(len(own)), own]
        correct[numbers] = answers.argmax(1) == own
    return probabilities, correct


def _batches(model: Model, texts: Sequence[npt.NDArray[Any]]) -> Iterator[PackedBatch]:
    """All texts, shortest first; `task_labels` are their numbers."""
    lengths = np.array([len(text) for text in texts], dtype=np.int64)
    order = np.argsort(lengths, kind="stable")
    for part in np.split(order, np.flatnonzero(np.diff(np.cumsum(lengths[order]) // _BATCH_TOKENS)) + 1):
        if len(part):
            nothing = np.zeros(len(part), dtype=np.bool_)
            chosen = [texts[number] for number in part]
            batch = pack(chosen, labels=part, external=nothing, row_length=int(lengths[part].max()), pad_id=model.pad_id)
            yield PackedBatch.of(batch, next(model.parameters()).device)


def _cast(model: Model, precision: Precision) -> Any:
    return torch.autocast(next(model.parameters()).device.type, dtype=torch.bfloat16, enabled=precision == "bf16")
