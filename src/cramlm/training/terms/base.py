"""The interface of a loss term: the tokens it predicts, the counts its means are over, its loss.

At a step a phase has at most one text term (`TextTerm`), which makes the input of the encoder, and any number of label terms (`LabelTerm`),
which share the classifier's logits. The settings of one kind for external and for task text are one object, so that their positions go
through a head together.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, TypeVar, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from cramlm.config.phase import PhaseConfig
from cramlm.config.terms import Origin, TermConfig
from cramlm.model.model import Model, PackedBatch
from cramlm.model.operations import Dropout, weighted_cross_entropy
from cramlm.records import Batch, BoolArray, FloatArray, IntArray
from cramlm.training.masking import SpecialIds, mask
from cramlm.training.sequences import TokenPool, lay_out, pack

Random: TypeAlias = Callable[[str], np.random.Generator]
"""A generator for each purpose, a function of (seed, phase, step, purpose)."""
_T = TypeVar("_T", bound="type[Term]")
_IMPLEMENTATIONS: dict[str, type[Term]] = {}
_OTHERS = 4  # a step has at least one candidate more for so many tokens to predict
_MULTIPLE = 64  # of candidates, so that few shapes of matrices occur


def implements(config: type[TermConfig]) -> Callable[[_T], _T]:
    """Register the decorated class as the implementation of these settings."""

    def register(implementation: _T) -> _T:
        _IMPLEMENTATIONS[config.model_fields["kind"].default] = implementation
        return implementation

    return register


def terms_of(phase: PhaseConfig) -> Iterator[Term]:
    """The terms of a phase, one object for each kind, in the order of the config."""
    for kind in dict.fromkeys(term.kind for term in phase.terms):
        yield _IMPLEMENTATIONS[kind](phase, {term.on: term for term in phase.terms if term.kind == kind})


def on(origin: Origin, external: Any) -> Any:
    """Return True for what is of this origin. external: array or tensor, True for external text."""
    return external if origin == "external" else ~external


def token_values_of(phase: PhaseConfig, pool: TokenPool, index: int) -> npt.NDArray[Any] | None:
    """Return the token labels, scores or word begins of a sequence of the pool, whichever the phase needs; None if none."""
    if phase.needs_token_labels:
        values: npt.NDArray[Any] | None = pool.token_labels
    elif phase.needs_scores:
        values = pool.scores
    elif phase.needs_words:
        values = pool.begins
    else:
        return None
    assert values is not None, f"phase {phase.name}: the pool lacks the token labels, scores or word begins that it needs"
    return values[pool.offsets[index] : pool.offsets[index + 1]]


@dataclass(frozen=True, slots=True)
class Counts:
    """The number of positions or sequences of each mean of a whole step, by its name.

    divisors: the same numbers as scalars on a device, read while the loss is computed; None = `numbers`. A CUDA graph reads numbers that
    change from step to step from memory.
    """

    numbers: Mapping[str, int]
    divisors: Mapping[str, Tensor] | None = None

    def __getitem__(self, name: str) -> int:
        return self.numbers.get(name, 0)

    def divisor(self, name: str) -> Tensor | int:
        """Return the number, at least 1, to divide a sum by."""
        return max(self[name], 1) if self.divisors is None or name not in self.divisors else self.divisors[name]


@dataclass(frozen=True, slots=True)
class Sampled:
    """The sequences of a step. token_values: `token_values_of` each sequence; empty if the phase needs none. The rest as in `Batch`."""

    sequences: Sequence[npt.NDArray[Any]]
    token_values: Sequence[npt.NDArray[Any]]
    labels: IntArray
    external: BoolArray
    soft_labels: FloatArray
    targets: FloatArray

    def packed(self, phase: PhaseConfig, special: SpecialIds, *, sequences: Sequence[npt.NDArray[Any]] | None = None) -> Batch:
        """Return the sequences, or others in their place, side by side in rows."""
        return pack(
            self.sequences if sequences is None else sequences,
            labels=self.labels,
            external=self.external,
            soft_labels=self.soft_labels,
            targets=self.targets,
            row_length=phase.row_length,
            pad_id=special.pad,
        )

    def packed_values(self, phase: PhaseConfig) -> npt.NDArray[Any] | None:
        """`token_values` flat, as `packed` arranges the tokens; None where there are none."""
        return lay_out(self.token_values, row_length=phase.row_length) if self.token_values else None


@dataclass(frozen=True, slots=True)
class TermLoss:
    """weighted: the part of the total, with its gradient. means: detached, in nats, before weights."""

    weighted: Tensor
    means: Mapping[str, Tensor]


class Term(ABC):
    """All settings of one kind in a phase, by origin."""

    def __init__(self, phase: PhaseConfig, configs: Mapping[Origin, Any]) -> None:
        self.phase, self.configs = phase, configs

    @property
    def kind(self) -> str:
        """The name of the term."""
        name: str = next(iter(self.configs.values())).kind
        return name

    @property
    def weights(self) -> Mapping[str, float]:
        """The weight of each mean in the total, by its name."""
        return {f"{self.kind}_{origin}": config.weight for origin, config in self.configs.items()}

    @abstractmethod
    def counts(self, batch: Batch | PackedBatch) -> Mapping[str, int]:
        """Return the number of positions or sequences of each mean, by its name."""


class LabelTerm(Term):
    """A term on the classifier's logits."""

    @abstractmethod
    def loss(self, model: Model, logits: Tensor, batch: PackedBatch, counts: Counts, *, scale: float) -> TermLoss:
        """logits: (S, labels), float32. scale: factor of every weight (`loss_scale`)."""


class TextTerm(Term):
    """A term on tokens."""

    def applies(self, random: Random) -> bool:
        """Return False at a step of another text term of the phase."""
        return True

    def of_origin(self, external: BoolArray) -> BoolArray:
        """Return True for the sequences whose origin the term is on."""
        return np.where(external, "external" in self.configs, "task" in self.configs)

    def mask_batch(self, sampled: Sampled, special: SpecialIds, *, step: int, random: Random) -> Batch:
        """Return the sampled sequences with the masks of a step."""
        batch, masking = sampled.packed(self.phase, special), self.phase.masking
        where, rate = self.of_origin(batch.external), masking.rate_at(step, self.phase.steps)
        return mask(batch, masking, random("masks"), special, where=where, token_values=sampled.packed_values(self.phase), rate=rate)

    @abstractmethod
    def batch(self, sampled: Sampled, special: SpecialIds, *, step: int, random: Random) -> Batch:
        """Return the batch of a step with the positions that predict tokens (`masked`, `mlm_labels`) and their replaced tokens."""

    def with_candidates(self, batch: Batch, special: SpecialIds, *, random: Random) -> Batch:
        """Return the batch with the candidates of the phase, where the term predicts tokens of the vocabulary."""
        return batch

    def tokens_read(self, pool: TokenPool, special: SpecialIds, *, random: Random) -> float:
        """Mean tokens of a pool's sequence in a batch."""
        return pool.mean_length

    def encoded(self, model: Model, batch: PackedBatch, *, dropout: Dropout | None) -> tuple[PackedBatch, Any]:
        """Return the batch as the encoder reads it, and the intermediate results that `loss` needs."""
        return batch, None

    @abstractmethod
    def loss(self, model: Model, hidden: Tensor, batch: PackedBatch, intermediate: Any, counts: Counts, *, scale: float) -> TermLoss:
        """batch, intermediate: from `encoded`. hidden: (R * L, hidden) of that batch. scale: factor of every weight."""

    @abstractmethod
    def flops(self, model: Model, batch: Batch | PackedBatch) -> float:
        """Operations of the matrix products of its head in a forward pass."""


class PositionTerm(TextTerm):
    """A text term with one loss per position of `masked`; positions of padding have weight 0."""

    def counts(self, batch: Batch | PackedBatch) -> Mapping[str, int]:
        """Positions, by origin."""
        external = batch.external[batch.sequence.reshape(-1)[batch.masked]]
        return {f"{self.kind}_{origin}": int(on(origin, external).sum()) for origin in self.configs}

    def position_weights(self, batch: PackedBatch, counts: Counts, *, scale: float) -> tuple[Tensor, Mapping[Origin, Tensor]]:
        """Return the weight of each position's loss in the total, (M,); and by origin whether each is of it, (M,)."""
        owner = batch.sequence.flatten()[batch.masked]
        is_external, is_real = batch.external[owner], owner >= 0
        of: dict[Origin, Tensor] = {origin: on(origin, is_external) & is_real for origin in get_args(Origin)}
        external, task = (scale * self.weights.get(f"{self.kind}_{origin}", 0.0) / counts.divisor(f"{self.kind}_{origin}") for origin in of)
        return torch.where(is_external, external, task) * is_real, of

    def means(self, each: Tensor, of: Mapping[Origin, Tensor], counts: Counts) -> dict[str, Tensor]:
        """Return the mean loss of each origin in the batch. of: from `position_weights`."""
        names: dict[Origin, str] = {origin: f"{self.kind}_{origin}" for origin in self.configs}
        return {name: (each * of[origin]).sum() / counts.divisor(name) for origin, name in names.items() if counts[name]}


class VocabularyTerm(PositionTerm):
    """A text term whose positions predict tokens through the vocabulary head.

    With `candidates` in the phase the softmax is an estimate (sampled softmax, Jean et al. 2015): the exponentials of all tokens to
    predict in the step, and a uniform sample of the others, each of which counts for as many as were not sampled. The tokens of a batch
    are a few hundred distinct ones, so that the product with the embeddings is several times smaller. Losses are estimates as well; they
    are lower than those of the whole vocabulary on the mean (Jensen's inequality), by less the larger the sample.
    """

    def with_candidates(self, batch: Batch, special: SpecialIds, *, random: Random) -> Batch:
        """Return the batch with as many candidates as the phase says, rounded up to multiples of 64; with more of them if four fifths of
        these were tokens to predict.
        """
        if self.phase.candidates is None:
            return batch
        is_label = np.zeros(special.vocab_size, dtype=np.bool_)
        is_label[batch.mlm_labels] = True
        others, labels = np.flatnonzero(~is_label), int(is_label.sum())
        size = max(self.phase.candidates, labels + labels // _OTHERS)
        size += -size % _MULTIPLE
        if size >= special.vocab_size:
            return batch
        sampled = random("candidates").choice(others, size - labels, replace=False, shuffle=False)
        candidates = np.sort(np.concatenate([np.flatnonzero(is_label), sampled]))
        stand_for = np.where(is_label[candidates], 1.0, len(others) / len(sampled)).astype(np.float32)
        return replace(batch, candidates=candidates, stand_for=stand_for)

    def loss(self, model: Model, hidden: Tensor, batch: PackedBatch, intermediate: Any, counts: Counts, *, scale: float) -> TermLoss:
        """Cross-entropy of the tokens."""
        weights, of = self.position_weights(batch, counts, scale=scale)
        if len(batch.candidates):
            logits = model.candidate_logits(hidden, batch)
            # Padding of a batch in a CUDA graph (capture.py) predicts a token that may be larger than all candidates, with weight 0.
            labels = torch.searchsorted(batch.candidates, batch.mlm_labels).clamp(max=len(batch.candidates) - 1)
        else:
            logits, labels = model.mlm_logits(hidden, batch.masked), batch.mlm_labels
        weighted, each = weighted_cross_entropy(logits, labels, weights)
        return TermLoss(weighted, self.means(each, of, counts))

    def flops(self, model: Model, batch: Batch | PackedBatch) -> float:
        """Return the operations of the vocabulary head on the predicted positions."""
        config, tokens = model.encoder_config, len(batch.candidates) or model.vocab_size
        return 2.0 * len(batch.masked) * config.embedding_width * (config.hidden + tokens)


class TokenHeadTerm(PositionTerm):
    """A text term whose positions have the token label 1 or 0 (`mlm_labels`), which the token head learns."""

    @property
    def positive_weight(self) -> float:
        """The weight of a position with the label 1."""
        return 1.0

    def loss(self, model: Model, hidden: Tensor, batch: PackedBatch, intermediate: Any, counts: Counts, *, scale: float) -> TermLoss:
        """Binary cross-entropy of the token labels."""
        weights, of = self.position_weights(batch, counts, scale=scale)
        labels = batch.mlm_labels.float()
        logits = model.place_head(hidden.index_select(0, batch.masked))
        each = functional.binary_cross_entropy_with_logits(logits, labels, reduction="none")
        each = each * (1.0 + (self.positive_weight - 1.0) * labels)
        return TermLoss((each * weights).sum(), self.means(each.detach(), of, counts))

    def flops(self, model: Model, batch: Batch | PackedBatch) -> float:
        """Return the operations of the token head."""
        hidden = model.encoder_config.hidden
        return 2.0 * len(batch.masked) * hidden * (hidden + 1)


def without_labels(batch: Batch) -> Batch:
    """Return the batch without labels and soft labels."""
    return replace(batch, task_labels=np.full_like(batch.task_labels, -1), soft_labels=np.full_like(batch.soft_labels, np.nan))
