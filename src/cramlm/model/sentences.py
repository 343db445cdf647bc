"""Sentence embeddings by any encoder folder (BERT, RoBERTa, MPNet, ModernBERT, ...).

    text ─► its tokenizer, cut to `max_length` ─► last hidden states ─► mean over the tokens, or [CLS] ─► length 1

The folder is opened at the first text; `fingerprint` does not load it. Texts are encoded in batches of similar length; in fp32, 12 passages
of 256 tokens per second and core with 6 layers of 384.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from cramlm.config.retriever import DenseConfig, Pooling
from cramlm.errors import UsageError
from cramlm.model.huggingface.folder import open_native_encoder
from cramlm.model.model import resolve_device
from cramlm.records import FloatArray
from cramlm.storage.artifacts import hash_file, hash_json

_BATCH: Final = 32
_FILES: Final = ("config.json", "tokenizer.json", "tokenizer_config.json", "*.safetensors")  # that a vector depends on


class SentenceEncoder:
    """An encoder folder, opened when first used."""

    def __init__(self, folder: Path, *, max_length: int, pooling: Pooling, device: str = "auto") -> None:
        """device: as `resolve_device` reads it. Raises UsageError if there is no such folder, or if its config has another pooling."""
        if not folder.is_dir():
            raise UsageError(f"{folder}: no such folder; retriever.encoder is a folder with config.json, tokenizer.json, model.safetensors")
        _check_pooling(folder, pooling)
        self._folder, self._max_length, self._pooling, self._device = folder, max_length, pooling, device

    @functools.cached_property
    def fingerprint(self) -> str:
        """Hash of everything that a vector depends on: the folder's files and the settings."""
        files = sorted(path for pattern in _FILES for path in self._folder.glob(pattern))
        content = {path.name: hash_file(path) for path in files}
        return hash_json({"files": content, "max_length": self._max_length, "pooling": self._pooling})

    def encode(self, texts: Sequence[str]) -> FloatArray:
        """Return a vector of length 1 for every text, float32 (n, d).

        Raises:
            ArtifactError: if the folder cannot be read.
        """
        order = np.argsort([len(text) for text in texts], kind="stable")
        batches = np.split(order, range(_BATCH, len(order), _BATCH))
        vectors = [self._encode([texts[number] for number in batch.tolist()]) for batch in batches]
        return np.concatenate(vectors)[np.argsort(order)]

    @functools.cached_property
    def _opened(self) -> tuple[Any, Any]:
        model, tokenizer = open_native_encoder(self._folder)
        return model.to(resolve_device(self._device)), tokenizer

    @torch.inference_mode()
    def _encode(self, texts: Sequence[str]) -> FloatArray:
        model, tokenizer = self._opened
        longest = min(self._max_length, int(getattr(tokenizer, "model_max_length", self._max_length)))
        inputs = tokenizer(list(texts), padding=True, truncation=True, max_length=longest, return_tensors="pt").to(model.device)
        states = model(**inputs).last_hidden_state.float()
        if self._pooling == "cls":
            pooled = states[:, 0]
        else:
            mask = inputs["attention_mask"].unsqueeze(-1).to(states.dtype)
            pooled = (states * mask).sum(1) / mask.sum(1).clamp(min=1)
        return np.asarray(torch.nn.functional.normalize(pooled, dim=-1).cpu().numpy(), np.float32)


def _check_pooling(folder: Path, pooling: Pooling) -> None:
    """Refuse a pooling other than that of a sentence-transformers folder, which would silently give poor vectors."""
    path = folder / "1_Pooling" / "config.json"
    if not path.is_file():
        return
    try:
        modes = json.loads(path.read_bytes())
        trained = [name for name, key in (("mean", "pooling_mode_mean_tokens"), ("cls", "pooling_mode_cls_token")) if modes.get(key)]
    except (ValueError, AttributeError):
        return
    if trained and pooling not in trained:
        raise UsageError(f"{path}: the encoder pools by {trained[0]}; set retriever.pooling = {trained[0]!r}")


def open_sentence_encoder(config: DenseConfig, *, device: str = "auto") -> SentenceEncoder:
    """Return the encoder of a retriever's config."""
    return SentenceEncoder(Path(config.encoder), max_length=config.max_length, pooling=config.pooling, device=device)
