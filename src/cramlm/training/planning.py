"""What training costs: parameters, floating-point operations, and the speed of this machine. What to do with a budget is decided
in budget.py.

Two counts of operations. The paper's, 6 x places x parameters, counts padding and the embedding table and leaves attention out;
it compares with the paper's table. The executed one counts the matrix products that really run, a multiply-add as two, backward
as twice forward.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from cramlm.config import EncoderConfig, HeadConfig, PhaseConfig
from cramlm.model.device import Precision
from cramlm.model.model import Model, PackedBatch, build_model
from cramlm.records import Batch
from cramlm.training.batching import Batches, TokenPool
from cramlm.training.masking import SpecialIds
from cramlm.training.optimization import build_optimizer
from cramlm.training.randomness import generator
from cramlm.training.update import deterministic, update

BACKWARD_AND_FORWARD = 3  # backward is two products for every one of forward
_TRIAL_LABELS = 8


@dataclass(frozen=True, slots=True)
class ParameterCount:
    """embedding: the token embedding, shared with the vocabulary head. encoder: the matrices of the layers. other: all the rest."""

    total: int
    embedding: int
    encoder: int

    @property
    def other(self) -> int:
        return self.total - self.embedding - self.encoder


def count_parameters(model: Model) -> ParameterCount:
    """Every parameter once, tied ones too."""
    return ParameterCount(
        total=sum(parameter.numel() for parameter in model.parameters()),
        embedding=model.vocab_size * model.encoder_config.hidden,
        encoder=model.matmul_parameters,
    )


def paper_flops(parameters: int, *, places: int) -> float:
    """6 x places x parameters; `places` counts padding (Yao et al. 2022, section 4.1, as their table's figures follow)."""
    return 6.0 * places * parameters


def executed_flops(model: Model, batch: Batch | PackedBatch, phase: PhaseConfig) -> float:
    """Operations of the matrix products of one update on this batch, the optimizer's own left out.

    Encoder matrices and attention run on all places, padding too; the vocabulary head on masked ones, the classifier once per sequence.
    """
    rows, length = batch.token_ids.shape
    hidden, layers = model.encoder_config.hidden, model.encoder_config.layers
    encoder = 2.0 * model.matmul_parameters * rows * length
    attention = 2.0 * 2 * layers * rows * length * length * hidden
    head = 2.0 * len(batch.masked) * hidden * (hidden + model.vocab_size) if phase.uses_mlm else 0.0
    classifier = 2.0 * len(batch.first) * hidden * (hidden + model.labels) if phase.uses_labels else 0.0
    return BACKWARD_AND_FORWARD * (encoder + attention + head + classifier)


def measure_speed(
    encoder: EncoderConfig,
    head: HeadConfig,
    phase: PhaseConfig,
    *,
    vocab_size: int,
    precision: Precision,
    seconds: float = 3.0,
) -> float:
    """Real (non-padding) tokens per second of training `phase` on this machine, before any text is read.

    Runs real updates of a model of that size on made-up sequences of mixed lengths, for about `seconds` after one step that warms up;
    never fewer than two steps. Seeds torch's global generator.
    """
    model = build_model(encoder, head, vocab_size=vocab_size, labels=_TRIAL_LABELS, seed=0)
    special = SpecialIds(pad=0, unk=1, cls=2, sep=3, mask=4, vocab_size=vocab_size)
    pools = [_made_up_pool(phase, special, origin) for origin in ("external", "task")]
    batches = Batches(phase, pools[0], pools[1], seed=0, phase_index=0, special=special)
    optimizer = build_optimizer(model, phase.optimizer)
    tokens, timed_steps, started = 0, -1, 0.0
    with deterministic():
        while True:
            if timed_steps <= 0:
                tokens, started = 0, time.perf_counter()
            elapsed = time.perf_counter() - started
            if timed_steps >= 2 and elapsed >= seconds:
                return tokens / elapsed
            batch = batches.batch(timed_steps + 1)
            update(
                model,
                PackedBatch.of(batch),
                phase,
                optimizer=optimizer,
                factor=1e-3,  # a speed, not a training: too small to diverge
                precision=precision,
                dropout_seed=0,
                step=timed_steps + 1,
            )
            tokens += batch.tokens
            timed_steps += 1


def _made_up_pool(phase: PhaseConfig, special: SpecialIds, origin: str) -> TokenPool:
    """Random tokens in sequences of a quarter to a whole row, [CLS] first and [SEP] last."""
    rng = generator(0, phase_index=0, purpose=f"trial {origin}", index=0)
    lengths = rng.integers(max(3, phase.row_length // 4), phase.row_length + 1, size=1000)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    ids = rng.integers(len(special.all), special.vocab_size, size=offsets[-1]).astype(np.uint16)
    ids[offsets[:-1]], ids[offsets[1:] - 1] = special.cls, special.sep
    return TokenPool(ids, offsets, rng.integers(0, _TRIAL_LABELS, size=len(lengths)))
