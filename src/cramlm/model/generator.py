"""What replaced-token detection needs beside the encoder (ELECTRA, Clark et al. 2020): a generator that guesses masked tokens, and a head
that tells at every place whether the token was replaced. Neither is exported.

The generator is an encoder of the same shape and depth, but narrower. Its word embedding is the encoder's through a linear map, read at its
input and at its vocabulary head, so that both learn the one table; ELECTRA found sharing to help, and a quarter to half of the width best.
"""

from __future__ import annotations

import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor, nn

from cramlm.config import EncoderConfig
from cramlm.model.dropout import Dropout
from cramlm.model.encoder import build_encoder
from cramlm.model.heads import MlmHead


class Generator(nn.Module):
    """Packed rows with masks -> logits (M, V) at the masked places."""

    def __init__(self, config: EncoderConfig, width: int, vocab_size: int, *, pad_id: int) -> None:
        super().__init__()
        heads = width * config.heads // config.hidden
        assert heads * config.hidden == width * config.heads, "checked by the config"
        sizes = {"hidden": width, "heads": heads, "intermediate": max(16, config.intermediate * width // config.hidden)}
        shape = "modernbert" if config.shape == "moe" else config.shape
        narrow = config.model_copy(update={**sizes, "shape": shape, "embedding": min(config.embedding, width)})
        self.narrowed = nn.Linear(config.embedding_width, narrow.embedding_width, bias=False)
        self.encoder = build_encoder(narrow, vocab_size=vocab_size, pad_id=pad_id)
        del self.encoder.word_embeddings  # it reads the other encoder's
        self.head = MlmHead(narrow, vocab_size)

    def forward(
        self, embedding: Tensor, token_ids: Tensor, sequence: Tensor, position: Tensor, masked: Tensor, *, dropout: Dropout
    ) -> Tensor:
        """embedding: the encoder's table, (V, D)."""
        words = self.narrowed(embedding).float()
        hidden = self.encoder(token_ids, sequence, position, dropout=dropout, words=words).flatten(0, 1)
        logits: Tensor = self.head(hidden.index_select(0, masked), words)
        return logits


class PlaceHead(nn.Module):
    """Hidden states (N, D) -> one logit for each place, (N,), float32: > 0 means yes."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden, config.hidden)
        self.answer = nn.Linear(config.hidden, 1)

    def forward(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.answer(F.gelu(self.dense(hidden))).squeeze(1).float()
        return logits
