"""Token embeddings from co-occurrence in the selection and the task's training text: for `static`, and for the encoder to start from."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from cramlm.data.task import task_fingerprint
from cramlm.evaluation.evaluate import sequences_of
from cramlm.linear.cooccurrence import token_embeddings
from cramlm.model.tokenizer import UNCUT
from cramlm.pipeline.stages.common import Context, Text, fingerprint
from cramlm.records import Event
from cramlm.storage.arrays import save_array
from cramlm.storage.artifacts import Artifact


def embedding(run: Context, text: Text) -> Artifact:
    """embedding.npy, (vocabulary, width) float32 from token co-occurrence, NaN in rows of tokens without neighbours."""
    encoder = run.config.encoder

    def write(target: Path) -> None:
        run.emit(Event("start", "embedding"))
        texts = [sequences_of(text.tokenizer, run.task.train, max_length=UNCUT)]
        texts += [text.tokenizer.cut(text.selection.ids, max_length=UNCUT, cut="split")] if text.selection else []
        values = token_embeddings(
            texts, vocab_size=text.tokenizer.vocab_size, width=encoder.embedding_width, std=encoder.embedding_std, seed=run.config.seed
        )
        save_array(target / "embedding.npy", values)
        known, total = int(np.isfinite(values[:, 0]).sum()), sum(len(each.ids) for each in texts)
        run.emit(
            Event(
                "done",
                "embedding",
                f"{known:,} of {text.tokenizer.vocab_size:,} tokens have an embedding from co-occurrence in {total:,} tokens of text",
            )
        )

    inputs = {
        "tokenizer": text.tokenizer.fingerprint,
        "selection": fingerprint(text.selection),
        "task": task_fingerprint(run.task)["train"],
    }
    key = {"format": 1, "width": encoder.embedding_width, "std": encoder.embedding_std, "seed": run.config.seed, **inputs}
    return run.stage("embedding", key=key, write=write)
