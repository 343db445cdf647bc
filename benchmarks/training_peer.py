"""The released TLM loop, reimplemented from its description, for the comparison in bench_training.py.

Every batch is 32 texts padded to 128 positions; the collator masks in Python; transformers' BERT and the vocabulary head run on all
positions, also in task batches; dropout is BERT's 0.1; AdamW with warm-up and linear decay. Unlike the released loop it uses bf16
autocast, the CPU counterpart of its fp16 on a GPU.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

LENGTH = 128


class ReleasedModel(nn.Module):
    """BERT of transformers with both heads, from BertForMaskedLM and BertForSequenceClassification."""

    def __init__(self, masked: Any, classified: Any) -> None:
        super().__init__()
        self.bert = classified.bert
        self.dropout = classified.dropout
        self.classifier = classified.classifier
        self.cls = masked.cls
        self.cls.predictions.decoder.weight = self.bert.embeddings.word_embeddings.weight

    @classmethod
    def load(cls, mlm: Path, classifier: Path) -> ReleasedModel:
        """From two exported folders of one cramlm model."""
        from transformers import BertForMaskedLM, BertForSequenceClassification

        return cls(BertForMaskedLM.from_pretrained(mlm), BertForSequenceClassification.from_pretrained(classifier))

    def losses(self, token_ids: Tensor, attention_mask: Tensor, mlm_labels: Tensor, labels: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return the MLM loss over positions whose label is not -100, and the task loss if there are labels."""
        out = self.bert(token_ids, attention_mask=attention_mask)
        scores = self.cls(out.last_hidden_state)  # all positions
        mlm = nn.functional.cross_entropy(scores.view(-1, scores.shape[-1]), mlm_labels.view(-1), ignore_index=-100)
        if labels is None:
            return mlm, None
        return mlm, nn.functional.cross_entropy(self.classifier(self.dropout(out.pooler_output)), labels)


class ReleasedLoop:
    """Alternating external and task batches; a step is one batch."""

    def __init__(
        self,
        model: ReleasedModel,
        external: Sequence[Sequence[int]],
        task: Sequence[tuple[Sequence[int], int]],
        *,
        special: dict[str, int],
        vocab_size: int,
        batch: int,
        external_per_task: int,
        mlm_weight: float = 20.0,
        learning_rate: float = 1e-4,
        steps: int = 100_000,
        seed: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        self.device = torch.device(device)
        self.model, self.external, self.task = model.train(), external, task
        self.special, self.vocab_size, self.batch, self.external_per_task = special, vocab_size, batch, external_per_task
        self.mlm_weight, self.rng, self.done = mlm_weight, random.Random(seed), 0
        decayed = [parameter for parameter in model.parameters() if parameter.dim() > 1]
        rest = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
        groups: list[dict[str, Any]] = [{"params": decayed, "weight_decay": 0.01}, {"params": rest, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=learning_rate)
        warmup = steps // 10
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: min((step + 1) / warmup, (steps - step) / (steps - warmup))
        )

    def step(self) -> int:
        """Run an update; return the number of real tokens."""
        turn = self.done % (self.external_per_task + 1)
        self.done += 1
        labels = None
        if turn < self.external_per_task:
            texts = self.rng.sample(self.external, self.batch)
        else:
            rows = self.rng.sample(self.task, self.batch)
            texts = [text for text, _ in rows]
            labels = torch.tensor([label for _, label in rows]).to(self.device)
        token_ids, attention_mask, mlm_labels = (each.to(self.device) for each in self.collate(texts))
        with torch.autocast(self.device.type, dtype=torch.bfloat16):
            mlm, task = self.model.losses(token_ids, attention_mask, mlm_labels, labels)
            loss = mlm if task is None else (self.mlm_weight * mlm + task) / (self.mlm_weight + 1)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        return int(attention_mask.sum())

    def collate(self, texts: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor, Tensor]:
        """Pad, and mask 15 % of the tokens as Devlin et al. 2019: 80 % [MASK], 10 % random, 10 % unchanged."""
        padded, attention, targets = [], [], []
        kept = {self.special["cls"], self.special["sep"], self.special["pad"]}
        for text in texts:
            ids = list(text) + [self.special["pad"]] * (LENGTH - len(text))
            wanted = [-100] * LENGTH
            for position, token in enumerate(ids):
                if token not in kept and self.rng.random() < 0.15:
                    wanted[position] = token
                    chance = self.rng.random()
                    if chance < 0.8:
                        ids[position] = self.special["mask"]
                    elif chance < 0.9:
                        ids[position] = self.rng.randrange(self.vocab_size)
            padded.append(ids)
            attention.append([1] * len(text) + [0] * (LENGTH - len(text)))
            targets.append(wanted)
        return torch.tensor(padded), torch.tensor(attention), torch.tensor(targets)
