"""The linear models of a run: `baseline` (TF-IDF alone) and `static` (TF-IDF and co-occurrence vectors from the selection).

Each stage publishes the model that is best on dev, what was tried (fit.json) and the dev predictions of all candidates, for the verdict.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np

from cramlm.config.run import RunConfig
from cramlm.data.task import task_fingerprint
from cramlm.evaluation.evaluate import sequences_of
from cramlm.io.executors import available_cores
from cramlm.linear.cooccurrence import TextSpace, token_embeddings
from cramlm.linear.fit import FEW_TEXTS, LinearFit, SearchSpace, fit_linear
from cramlm.linear.model import LinearModel, TextVectors
from cramlm.model.tokenizer import UNCUT
from cramlm.pipeline.context import Context, Plan, Text, fingerprint, write_json
from cramlm.planning.budget import Speed, plan_selection
from cramlm.records import Event, Task
from cramlm.storage.arrays import read_array, save_array
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


DEV_PREDICTIONS: Final = "dev-predictions.npy"
FIT_FILE: Final = "fit.json"
FIT_FACTS: Final = ("variant", "scheme", "class_weights", "c", "tau", "features", "train_texts", "seconds")
"""What a run's scores say of how a linear model was fitted."""
_FORMAT: Final = 1


def fit_baseline(run: Context) -> Artifact | None:
    """TF-IDF + a linear model; None where the config switches it off."""
    if not run.config.baseline.enabled:
        return None

    def write(target: Path) -> None:
        _save(fit_linear(run.task, search_space(run.config), stage="baseline", emit=run.emit), target)

    key = {"format": _FORMAT, "task": _task(run.task), "config": run.config.baseline.model_dump(mode="json"), "seed": run.config.seed}
    return run.stage("baseline", key={**key, "metric": run.config.metric}, write=write)


def fit_static(run: Context, text: Text, embedding: Artifact, baseline: Artifact | None) -> Artifact:
    """The same with averaged co-occurrence embeddings of the tokens beside TF-IDF.

    With more than `FEW_TEXTS` training texts the variant of TF-IDF is the baseline's, if there is one, to save time.
    """

    def write(target: Path) -> None:
        run.emit(Event("note", "static", "averaging token embeddings"))
        passages = text.tokenizer.encode([]) if text.selection is None else text.selection.ids
        texts = [
            sequences_of(text.tokenizer, run.task.train, max_length=UNCUT),
            text.tokenizer.cut(passages, max_length=UNCUT, cut="split"),
        ]
        space = TextSpace.of(texts, read_array(embedding.path / "embedding.npy"))
        searched = search_space(run.config)
        if baseline is not None and len(run.task.train) > FEW_TEXTS:
            searched = replace(searched, variants=(LinearModel.load(baseline.path).tfidf.variant,))
        vectors = TextVectors(space, text.tokenizer)
        _save(fit_linear(run.task, searched, stage="static", vectors=vectors, emit=run.emit), target)

    inputs = {
        "selection": fingerprint(text.selection),
        "task": _task(run.task),
        "embedding": embedding.fingerprint,
        "tokenizer": text.tokenizer.fingerprint,
    }
    inputs["baseline"] = None if baseline is None else baseline.fingerprint
    key = {
        "format": _FORMAT,
        "config": run.config.baseline.model_dump(mode="json"),
        "seed": run.config.seed,
        "metric": run.config.metric,
        **inputs,
    }
    return run.stage("static", key=key, write=write)


def search_space(config: RunConfig) -> SearchSpace:
    """The candidates of the run's linear models."""
    return SearchSpace(config.baseline.c, config.metric, config.seed)


def _task(task: Task) -> dict[str, str]:
    """Test is not read: another test file leaves the models as they are."""
    return {split: content for split, content in task_fingerprint(task).items() if split != "test"}


def _save(fit: LinearFit, target: Path) -> None:
    fit.model.save(target)
    write_json(target / FIT_FILE, fit.as_dict())
    save_array(target / DEV_PREDICTIONS, fit.predictions)


def plan_linear(config: RunConfig) -> Plan:
    """The plan of a run without training: a retriever without a bound of its own is bounded by documents."""
    retriever = None if config.retriever is None else plan_selection(config.retriever, amount=None, tokens_per_unit=0.0)
    return Plan(retriever, "fp32", config.threads or available_cores(), Speed(0.0, 0.0), operations=False)
