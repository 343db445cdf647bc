"""The cost of training: parameters and floating-point operations.

Two counts of operations. The paper's, 6 x padded tokens x parameters, includes the embedding table and leaves attention out; it is for
comparison with the paper's table. The executed count is of the matrix products that run, a multiply-add as two operations, the backward
pass as twice the forward pass.
"""

from __future__ import annotations

from dataclasses import dataclass

from cramlm.config.phase import PhaseConfig
from cramlm.model.model import Model, PackedBatch
from cramlm.records import Batch
from cramlm.training.objective import objective_of

BACKWARD_AND_FORWARD = 3  # backward is two products for every one of forward


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
        embedding=model.vocab_size * model.encoder_config.embedding_width,
        encoder=sum(matrix.numel() for name, matrix in model.parameter_groups().matrix.items() if name.startswith("encoder.")),
    )


def paper_flops(parameters: int, *, padded_tokens: int) -> float:
    """6 x padded tokens x parameters (Yao et al. 2022, section 4.1, whose table counts padding)."""
    return 6.0 * padded_tokens * parameters


def executed_flops(model: Model, batch: Batch | PackedBatch, phase: PhaseConfig) -> float:
    """Operations of the matrix products of one update on this batch, the optimizer's own left out.

    Encoder matrices and attention run on all positions, with padding; the vocabulary head on masked positions, the classifier once per
    sequence.
    """
    rows, length = batch.token_ids.shape
    hidden, layers = model.encoder_config.hidden, model.encoder_config.layers
    encoder = 2.0 * model.matmul_parameters * rows * length
    attention = 2.0 * 2 * layers * rows * length * length * hidden
    times = BACKWARD_AND_FORWARD if phase.trains == "all" else BACKWARD_AND_FORWARD - 1  # no gradients of weights
    return times * (encoder + attention + objective_of(phase).flops(model, batch))
