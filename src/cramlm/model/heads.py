"""What sits on the encoder: the vocabulary head for masked places, and the classifier; each equal to its native class in transformers.

    bert, roberta    vocabulary: dense, GELU, norm, token embedding + bias   classifier: [CLS], dense, tanh (BERT's pooler), linear
    albert           the same, the dense to the width of its embedding           the same
    modernbert, moe  the same without the dense's and the norm's bias            classifier: [CLS] or mean, dense, GELU, norm, linear

The mean is over all tokens of a sequence, [CLS] and [SEP] included, as transformers takes it.
"""

from __future__ import annotations

from typing import TypeAlias, assert_never

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor, nn

from cramlm.config import EncoderConfig, HeadConfig
from cramlm.model.dropout import Dropout
from cramlm.model.encoder import Norm

Classifier: TypeAlias = "BertClassifier | ModernBertClassifier"


class MlmHead(nn.Module):
    """Hidden states (M, D) -> logits (M, V); the last matrix is the token embedding, handed in."""

    def __init__(self, config: EncoderConfig, vocab_size: int) -> None:
        super().__init__()
        biases, width = not config.is_modern, config.embedding_width
        self.dense = nn.Linear(config.hidden, width, bias=biases)
        self.norm = Norm(width, config.norm_eps, bias=biases)
        self.decoder_bias = nn.Parameter(torch.empty(vocab_size))

    def forward(self, x: Tensor, embedding: Tensor) -> Tensor:
        return F.linear(self.transformed(x), embedding, self.decoder_bias)

    def transformed(self, x: Tensor) -> Tensor:
        """What the embeddings of tokens are multiplied with: (M, D) -> (M, width of the embedding)."""
        states: Tensor = self.norm(F.gelu(self.dense(x)))
        return states


class BertClassifier(nn.Module):
    """[CLS] states (S, D) -> logits (S, labels)."""

    def __init__(self, config: EncoderConfig, labels: int) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden, config.hidden)
        self.classifier = nn.Linear(config.hidden, labels)

    def forward(self, pooled: Tensor, *, dropout: Dropout) -> Tensor:
        logits: Tensor = self.classifier(dropout(torch.tanh(self.dense(pooled))))
        return logits


class ModernBertClassifier(nn.Module):
    """Pooled states (S, D) -> logits (S, labels)."""

    def __init__(self, config: EncoderConfig, labels: int) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden, config.hidden, bias=False)
        self.norm = Norm(config.hidden, config.norm_eps, bias=False)
        self.classifier = nn.Linear(config.hidden, labels)

    def forward(self, pooled: Tensor, *, dropout: Dropout) -> Tensor:
        logits: Tensor = self.classifier(dropout(self.norm(F.gelu(self.dense(pooled)))))
        return logits


def build_classifier(config: EncoderConfig, labels: int) -> Classifier:
    """The classifier of `config`'s shape, with uninitialised weights."""
    match config.shape:
        case "bert" | "roberta" | "albert":
            return BertClassifier(config, labels)
        case "modernbert" | "moe":
            return ModernBertClassifier(config, labels)
        case _:
            assert_never(config.shape)


def pool(hidden: Tensor, first: Tensor, sequence: Tensor, config: HeadConfig) -> Tensor:
    """One vector per sequence: flat hidden states (R * L, D), first places (S,), flat sequence ids (R * L,), -1 = padding -> (S, D)."""
    match config.pooling:
        case "cls":
            return hidden.index_select(0, first)
        case "mean":
            real = (sequence >= 0).nonzero().squeeze(1)
            owner = sequence.index_select(0, real)
            sums = torch.zeros(len(first), hidden.shape[1], dtype=torch.float32, device=hidden.device)
            sums = sums.index_add(0, owner, hidden.index_select(0, real).float())
            return sums / torch.bincount(owner, minlength=len(first))[:, None]
        case _:
            assert_never(config.pooling)
