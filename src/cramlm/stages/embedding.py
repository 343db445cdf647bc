"""Token embeddings to start from, counted out of the selection and the task's training text, where the encoder asks for them."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from cramlm.arrays import save_array
from cramlm.artifacts import Artifact, stage
from cramlm.config import RunConfig
from cramlm.data.task import task_fingerprint
from cramlm.evaluation.evaluate import sequences_of
from cramlm.model.tokenization import UNCUT, Tokenizer
from cramlm.records import Emit, Event, Task
from cramlm.stages.common import Chosen, fingerprint
from cramlm.training.cooccurrence import token_embeddings


def embedding(
    config: RunConfig, task: Task, selection: Chosen | None, tokenizer: Tokenizer, folder: Path, *, emit: Emit
) -> Artifact | None:
    """embedding.npy, (vocabulary, width) float32, NaN in rows of tokens without company; None where the embedding is drawn at random."""
    encoder = config.encoder
    if encoder.embedding_init == "drawn":
        return None

    def write(target: Path) -> None:
        emit(Event("start", "embedding"))
        texts = [sequences_of(tokenizer, task.train, max_length=UNCUT)]
        texts += [tokenizer.sequences(selection.texts(), max_length=UNCUT, cut="split")] if selection else []
        values = token_embeddings(
            texts, vocab_size=tokenizer.vocab_size, width=encoder.embedding_width, std=encoder.embedding_std, seed=config.seed
        )
        save_array(target / "embedding.npy", values)
        known, total = int(np.isfinite(values[:, 0]).sum()), sum(len(each.ids) for each in texts)
        emit(
            Event(
                "done",
                "embedding",
                f"{known:,} of {tokenizer.vocab_size:,} tokens placed by the company they keep in {total:,} tokens of text",
            )
        )

    inputs = {"tokenizer": tokenizer.fingerprint, "selection": fingerprint(selection), "task": task_fingerprint(task)["train"]}
    key = {"format": 1, "width": encoder.embedding_width, "std": encoder.embedding_std, "seed": config.seed, **inputs}
    return stage(folder / "embedding", kind="embedding", key=key, write=write, emit=emit)
