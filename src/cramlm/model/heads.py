"""The heads: vocabulary head and classifier, each equal to its native class in transformers; generator, token head, prompt head.

    bert, roberta    vocabulary: dense, GELU, norm, token embedding + bias   classifier: [CLS], dense, tanh (BERT's pooler), linear
    albert           the same, the dense to the width of its embedding           the same
    modernbert, moe  the same without the dense's and the norm's bias            classifier: [CLS] or mean, dense, GELU, norm, linear

The mean is over all tokens of a sequence, [CLS] and [SEP] included, as in transformers.

The generator of replaced-token detection (ELECTRA, Clark et al. 2020) is an encoder of the same shape and depth, but narrower. Its word
embedding, at the input and at the vocabulary head, is a linear map of the encoder's, so that both train one table; ELECTRA found sharing to
help, and a quarter to half of the width best. Generator and token head are not exported.

The prompt head scores labels with the vocabulary head at the masks of a pattern, and holds the learned vectors of a soft prompt.

    score of a label  =  sum over slots of the mean, over its words there, of their vocabulary logits

The normaliser of the vocabulary's softmax is the same for all labels of a text, so that a softmax over the labels equals one over sums of
log-probabilities: PET's score for one slot (Schick and Schütze 2021), PTR's product of sub-prompts for several (Han et al. 2021). A mean of
logits is one product with the mean of the words' embeddings, so that the number of words does not matter for speed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeAlias, assert_never

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor, nn

from cramlm.config.head import HeadConfig
from cramlm.config.run import EncoderConfig
from cramlm.model.encoder import Norm, Rows, build_encoder
from cramlm.model.operations import Dropout
from cramlm.model.prompts import Prompt

Classifier: TypeAlias = "BertClassifier | ModernBertClassifier"


class MlmHead(nn.Module):
    """Hidden states (M, D) -> logits (M, V); the last matrix is the token embedding, an argument."""

    def __init__(self, config: EncoderConfig, vocab_size: int) -> None:
        super().__init__()
        biases, width = not config.is_modern, config.embedding_width
        self.dense = nn.Linear(config.hidden, width, bias=biases)
        self.norm = Norm(width, config.norm_eps, bias=biases)
        self.decoder_bias = nn.Parameter(torch.empty(vocab_size))

    def forward(self, x: Tensor, embedding: Tensor, bias: Tensor | None = None) -> Tensor:
        """bias: of the tokens whose embeddings are given, if these are not the whole vocabulary."""
        return F.linear(self.transformed(x), embedding, self.decoder_bias if bias is None else bias)

    def transformed(self, x: Tensor) -> Tensor:
        """The states before the product with the token embeddings: (M, D) -> (M, width of the embedding)."""
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
    """Return a classifier of the config's shape, with uninitialised weights."""
    match config.shape:
        case "bert" | "roberta" | "albert":
            return BertClassifier(config, labels)
        case "modernbert" | "moe":
            return ModernBertClassifier(config, labels)
        case _:
            assert_never(config.shape)


def pool(hidden: Tensor, first: Tensor, sequence: Tensor, config: HeadConfig) -> Tensor:
    """One vector per sequence: flat hidden states (R * L, D), first positions (S,), flat sequence ids (R * L,), -1 = padding -> (S, D)."""
    match config.pooling:
        case "cls":
            return hidden.index_select(0, first)
        case "mean":
            owner = sequence + 1  # padding is added to row 0, so that no shape depends on values: a CUDA graph has fixed shapes
            sums = torch.zeros(1 + len(first), hidden.shape[1], dtype=torch.float32, device=hidden.device)
            sums = sums.index_add(0, owner, hidden.float())
            lengths = torch.zeros(1 + len(first), device=hidden.device).index_add(0, owner, torch.ones(len(owner), device=hidden.device))
            return sums[1:] / lengths[1:, None]
        case _:
            assert_never(config.pooling)


class Generator(nn.Module):
    """Packed rows with masks -> logits (M, V) at the masked positions."""

    def __init__(self, config: EncoderConfig, width: int, vocab_size: int, *, pad_id: int) -> None:
        super().__init__()
        heads = width * config.heads // config.hidden
        assert heads * config.hidden == width * config.heads, "checked by the config"
        sizes = {"hidden": width, "heads": heads, "intermediate": max(16, config.intermediate * width // config.hidden)}
        shape = "modernbert" if config.shape == "moe" else config.shape
        narrow = config.model_copy(update={**sizes, "shape": shape, "embedding": min(config.embedding, width)})
        self.narrowed = nn.Linear(config.embedding_width, narrow.embedding_width, bias=False)
        self.encoder = build_encoder(narrow, vocab_size=vocab_size, pad_id=pad_id)
        del self.encoder.word_embeddings  # it uses the other encoder's
        self.head = MlmHead(narrow, vocab_size)

    def forward(self, embedding: Tensor, rows: Rows, masked: Tensor, *, dropout: Dropout) -> Tensor:
        """embedding: the encoder's table, (V, D)."""
        words = self.narrowed(embedding).float()
        hidden = self.encoder(rows, dropout=dropout, words=words).flatten(0, 1)
        logits: Tensor = self.head(hidden.index_select(0, masked), words)
        return logits


class TokenHead(nn.Module):
    """Hidden states (N, D) -> one logit per token, (N,), float32."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden, config.hidden)
        self.answer = nn.Linear(config.hidden, 1)

    def forward(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.answer(F.gelu(self.dense(hidden))).squeeze(1).float()
        return logits


class PromptHead(nn.Module):
    """vectors: (vectors, width of word embeddings), with token ids after the vocabulary; None if there are none."""

    def __init__(self, prompt: Prompt, config: EncoderConfig) -> None:
        super().__init__()
        self.prompt = prompt
        self.vectors = nn.Parameter(torch.empty(prompt.vectors, config.embedding_width)) if prompt.vectors else None
        self._tables: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def words(self, embedding: Tensor) -> Tensor | None:
        """Return the word embeddings followed by the vectors; None if there are no vectors."""
        return None if self.vectors is None else torch.cat([embedding, self.vectors])

    def forward(self, states: Tensor, embedding: Tensor, bias: Tensor) -> Tensor:
        """Transformed states of all masks, (S * slots, E), grouped by sequence -> scores (S, labels)."""
        ids, shares = self._table(embedding.device)
        words = torch.einsum("klw,we->kle", shares, embedding.index_select(0, ids))
        biases = torch.einsum("klw,w->l", shares, bias.index_select(0, ids))
        slots = states.view(-1, self.prompt.slots, states.shape[1])
        return torch.einsum("ske,kle->sl", slots, words) + biases + torch.tensor(self.prompt.shift or 0.0, device=states.device)

    def add_to_scores(self, values: Sequence[float]) -> None:
        """Add a constant to the score of each label."""
        before = self.prompt.shift or (0.0,) * len(values)
        self.prompt = replace(self.prompt, shift=tuple(one + other for one, other in zip(before, values, strict=True)))

    def _table(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the distinct tokens (W,), and their weights in the means, (slots, labels, W)."""
        if device not in self._tables:
            ids = sorted({number for slots in self.prompt.ids for slot in slots for number in slot})
            shares = torch.zeros(self.prompt.slots, len(self.prompt.ids), len(ids))
            for label, slots in enumerate(self.prompt.ids):
                for slot, numbers in enumerate(slots):
                    for number in numbers:
                        shares[slot, label, ids.index(number)] += 1 / len(numbers)
            self._tables[device] = torch.tensor(ids, device=device), shares.to(device)
        return self._tables[device]
