"""The term important_tokens for selective masking (Gu et al. 2020): which words of a labelled text matter to its label, and a score for
other text.

    fine-tuned model, labelled text ─► label_words ─► term important_tokens trains the token head ─► score_tokens ─► masks `scored`

Only texts that the model classifies correctly get labels. Two rules, with P(y | .) the model's probability of the text's own label:

    auxiliary   The paper's. Go through the text s with an auxiliary text s', empty at first. A word w is important if
                P(y | s) - P(y | s' w) < delta: with it, s' is as good as the whole text. Important words are left out of s', others kept.
                One forward pass per word of s.
    gradient    One backward pass per text. A word's score is the sum over its tokens of (e - e_[MASK]) . d ln P(y | s) / d e, with e the
                embedding: to first order, what the label loses when the word is masked. (With 0 for e_[MASK] the score vanishes where a
                norm follows the embedding.) The best `share` of the words, at least one, are important if their score is above 0.

Stop words are never important and never in s'. They are found by counting: words in at least three tenths of the training texts, and in at
least three.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, assert_never

import numpy as np
import numpy.typing as npt
import torch

from cramlm.config.terms import ImportantTokens
from cramlm.model.encoder import Rows
from cramlm.model.model import Model, PackedBatch, Precision, autocast
from cramlm.model.operations import no_dropout
from cramlm.records import Batch, BoolArray, FloatArray, IntArray
from cramlm.training.masking import SpecialIds
from cramlm.training.sequences import TokenPool, pack_by_length, word_hashes
from cramlm.training.terms.base import Random, Sampled, TokenHeadTerm, implements

STOP_SHARE: Final = 0.3
_LEAST_STOP_TEXTS: Final = 3
_BATCH_TOKENS: Final = 8192
UNLABELLED, UNIMPORTANT, IMPORTANT = 0, 1, 2
"""Values of a pool's `token_labels`."""


@implements(ImportantTokens)
class TokenImportance(TokenHeadTerm):
    """The token head learns the token labels of training/terms/important_tokens.py."""

    def batch(self, sampled: Sampled, special: SpecialIds, *, step: int, random: Random) -> Batch:
        """Nothing is masked; `mlm_labels` are 1 for important tokens, 0 for others."""
        batch, values = sampled.packed(self.phase, special), sampled.packed_values(self.phase)
        assert values is not None, f"phase {self.phase.name}: its texts come without token labels"
        labelled = np.flatnonzero(values)
        return replace(batch, masked=labelled, mlm_labels=values[labelled].astype(np.int64) - 1)

    @property
    def positive_weight(self) -> float:
        """The weight of important tokens."""
        weight: float = self.configs["task"].positive_weight
        return weight


def label_words(
    model: Model, pool: TokenPool, config: ImportantTokens, special: SpecialIds, *, precision: Precision
) -> npt.NDArray[np.uint8]:
    """Label every token of a pool that has labels and word begins: `IMPORTANT`, `UNIMPORTANT`, or `UNLABELLED` (special tokens, and all
    tokens of a text that has no label or is not classified correctly).
    """
    words = _Words.of(pool, special)
    probabilities, correct = _confidence(model, [pool.sequence(number) for number in range(len(pool))], pool.labels, precision=precision)
    texts = np.flatnonzero(correct & (pool.labels >= 0))
    match config.rule:
        case "auxiliary":
            important = _by_auxiliary_text(model, words, texts, probabilities, delta=config.delta, precision=precision)
        case "gradient":
            important = _by_gradient(model, words, texts, share=config.share, mask_id=special.mask)
        case _:
            assert_never(config.rule)
    labels = np.full(len(pool.ids), UNLABELLED, dtype=np.uint8)
    labelled = np.repeat(np.isin(np.arange(len(pool)), texts), np.diff(pool.offsets)) & (words.number >= 0)
    labels[labelled] = UNIMPORTANT
    labels[labelled & important] = IMPORTANT
    return labels


def score_tokens(model: Model, pool: TokenPool, *, precision: Precision) -> FloatArray:
    """Return the token head's logit of every token of a pool: > 0 where it predicts that the token is important."""
    scores = np.zeros(len(pool.ids), dtype=np.float32)
    for batch in _batches(model, [pool.sequence(number) for number in range(len(pool))]):
        with torch.no_grad(), autocast(model.device, precision):
            real = (batch.sequence.flatten() >= 0).nonzero().squeeze(1)
            logits = model.place_head(model.hidden(batch).index_select(0, real)).float().cpu().numpy()
        owner, position = (array.flatten()[real].cpu().numpy() for array in (batch.sequence, batch.position))
        scores[pool.offsets[batch.task_labels.cpu().numpy()[owner]] + position] = logits
    return scores


@dataclass(frozen=True, slots=True)
class _Words:
    """The words of a pool. number: (tokens,), the word of each token, rising over the pool; -1 for special tokens. candidates: (tokens,),
    True for tokens of words that are no stop words.
    """

    pool: TokenPool
    number: IntArray
    candidates: BoolArray

    @classmethod
    def of(cls, pool: TokenPool, special: SpecialIds) -> _Words:
        assert pool.begins is not None, "word importance needs to know where words begin"
        number = np.cumsum(pool.begins) - 1
        number[np.isin(pool.ids, special.all)] = -1
        is_stop_word = _stop_words(pool, number, word_hashes(pool.ids, np.flatnonzero(pool.begins)))
        return cls(pool, number, (number >= 0) & ~is_stop_word[np.maximum(number, 0)])

    def of_text(self, text: int) -> list[IntArray]:
        """Return the positions in the pool of each candidate word of a text, in order."""
        positions = np.arange(self.pool.offsets[text], self.pool.offsets[text + 1])
        positions = positions[self.candidates[positions]]
        return np.split(positions, np.flatnonzero(np.diff(self.number[positions])) + 1) if len(positions) else []


def _stop_words(pool: TokenPool, number: IntArray, hashes: npt.NDArray[np.uint64]) -> BoolArray:
    """For each word, True if it is in `STOP_SHARE` of the texts and in `_LEAST_STOP_TEXTS`."""
    distinct, which = np.unique(hashes, return_inverse=True)
    text = np.repeat(np.arange(len(pool)), np.diff(pool.offsets))
    real = number >= 0
    pairs = np.unique(np.stack([which[number[real]], text[real]]), axis=1)
    texts = np.bincount(pairs[0], minlength=len(distinct))
    return (texts >= max(STOP_SHARE * len(pool), _LEAST_STOP_TEXTS))[which]


def _by_auxiliary_text(
    model: Model, words: _Words, texts: IntArray, probabilities: FloatArray, *, delta: float, precision: Precision
) -> BoolArray:
    """All texts go side by side: round r tries the r-th word of each."""
    pool = words.pool
    important = np.zeros(len(pool.ids), dtype=np.bool_)
    kept = words.number < 0  # special tokens are always in s'
    remaining = {int(text): words.of_text(int(text)) for text in texts}
    while remaining := {text: rest for text, rest in remaining.items() if rest}:
        tried = {text: rest.pop(0) for text, rest in remaining.items()}
        auxiliary = []
        for text, positions in tried.items():
            shown = kept[pool.offsets[text] : pool.offsets[text + 1]].copy()
            shown[positions - pool.offsets[text]] = True
            auxiliary.append(pool.sequence(text)[shown])
        confidence, _ = _confidence(model, auxiliary, pool.labels[list(tried)], precision=precision)
        for (text, positions), probability in zip(tried.items(), confidence, strict=True):
            is_important = probabilities[text] - probability < delta
            important[positions], kept[positions] = is_important, not is_important
    return important


def _by_gradient(model: Model, words: _Words, texts: IntArray, *, share: float, mask_id: int) -> BoolArray:
    pool = words.pool
    important = np.zeros(len(pool.ids), dtype=np.bool_)
    for batch in _batches(model, [pool.sequence(int(text)) for text in texts]):
        of_batch = texts[batch.task_labels.cpu().numpy()]
        embedded = model.encoder.word_embeddings.detach()[batch.token_ids.flatten()].requires_grad_()
        numbers = torch.arange(batch.token_ids.numel(), device=embedded.device).view(batch.token_ids.shape)
        states = model.encoder(Rows(numbers, batch.sequence, batch.position), dropout=no_dropout(), words=embedded)
        hidden = (states[0] if isinstance(states, tuple) else states).flatten(0, 1)
        own = torch.from_numpy(pool.labels[of_batch]).to(hidden.device)
        total = torch.log_softmax(model.task_logits(hidden, batch).float(), -1).gather(1, own[:, None]).sum()
        (gradient,) = torch.autograd.grad(total, embedded)
        masked = model.encoder.word_embeddings.detach()[mask_id]
        token_scores = (gradient * (embedded.detach() - masked)).sum(1).cpu().numpy()
        for first, text in zip(batch.first.tolist(), of_batch.tolist(), strict=True):
            of_text = words.of_text(text)
            scores = [float(token_scores[positions - pool.offsets[text] + first].sum()) for positions in of_text]
            most = max(1, round(share * len(of_text)))
            for index in np.argsort(-np.array(scores), kind="stable")[:most]:
                important[of_text[index]] = scores[index] > 0
    return important


def _confidence(model: Model, texts: Sequence[npt.NDArray[Any]], labels: IntArray, *, precision: Precision) -> tuple[FloatArray, BoolArray]:
    """Return the probability of each text's own label, and whether that label is the most probable."""
    own_probability, correct = np.zeros(len(texts), dtype=np.float32), np.zeros(len(texts), dtype=np.bool_)
    for batch in _batches(model, texts):
        with torch.no_grad(), autocast(model.device, precision):
            probabilities = torch.softmax(model.task_logits(model.hidden(batch), batch).float(), -1).cpu().numpy()
        numbers = batch.task_labels.cpu().numpy()
        own = np.maximum(labels[numbers], 0)
        own_probability[numbers] = probabilities[np.arange(len(own)), own]
        correct[numbers] = probabilities.argmax(1) == own
    return own_probability, correct


def _batches(model: Model, texts: Sequence[npt.NDArray[Any]]) -> Iterator[PackedBatch]:
    """All texts, shortest first; `task_labels` are their numbers."""
    for batch in pack_by_length(texts, most=_BATCH_TOKENS, pad_id=model.pad_id):
        yield PackedBatch.of(batch, model.device)
