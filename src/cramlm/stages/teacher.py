"""What a linear model, or the model of an earlier phase, makes of retrieved passages and training texts, for phases that learn from it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from cramlm.arrays import read_array, save_array
from cramlm.artifacts import Artifact, stage
from cramlm.config import PhaseConfig, RunConfig
from cramlm.data.task import task_fingerprint
from cramlm.evaluation.baselines import fit_baselines
from cramlm.evaluation.evaluate import outputs_of, predict_logits, sequences_of, sequences_of_texts
from cramlm.evaluation.teacher import Vectors, soft_labels
from cramlm.model.device import Precision
from cramlm.model.model import Model
from cramlm.model.tokenization import UNCUT, Tokenizer
from cramlm.records import Emit, Event, FloatArray, Task
from cramlm.stages.common import Chosen, fingerprint
from cramlm.training.budget import few, with_softness
from cramlm.training.cooccurrence import TextSpace

TEMPERATURE: Final = 2.0
"""What a model's logits are divided by before they teach (Schick and Schütze 2021)."""


def teach(
    config: RunConfig,
    task: Task,
    baseline: Artifact | None,
    selection: Chosen | None,
    tokenizer: Tokenizer,
    embedding: Artifact | None,
    folder: Path,
    *,
    emit: Emit,
) -> Artifact | None:
    """A teacher's probabilities, (texts, labels) float32: passages.npy in the selection's order, task.npy in that of the training texts;
    None where no phase learns from it.

    The teacher sees texts as the baseline that is best on dev does (without a baseline stage the variants are tried here), and, where token
    embeddings were counted, as their averages.
    """
    counted = len(task.train), len(task.labels)
    if not any(with_softness(phase, *counted).uses_teacher and phase.teacher_from is None for phase in config.phases):
        return None

    def write(target: Path) -> None:
        emit(Event("start", "teacher"))
        if baseline is None:
            tried = fit_baselines(task, config.baseline, seed=config.seed).as_dict()
        else:
            tried = json.loads((baseline.path / "baselines.json").read_bytes())
        chosen, texts = tried["chosen"], selection.texts() if selection else []
        given = {"variant": chosen.removeprefix("tfidf-"), **{name: tried["variants"][chosen][name] for name in ("weights", "c")}}
        vectors = None if embedding is None else _vectors(tokenizer, task, texts, read_array(embedding.path / "embedding.npy"))
        answers = soft_labels(task, texts, **given, vectors=vectors, seed=config.seed, align=few(*counted))
        save_array(target / "passages.npy", answers.asked)
        save_array(target / "task.npy", answers.own)
        told = [
            f"{len(rows):,} {what}, {float(rows.max(axis=1).mean()):.0%} sure on the mean"
            for rows, what in ((answers.asked, "passages"), (answers.own, "training texts that it had not seen"))
            if len(rows)
        ]
        facts = {"dev_macro_f1": answers.dev_macro_f1, "power": answers.power, "vectors": vectors is not None}
        seen_as = f"{chosen}{' with averaged embeddings' if vectors else ''}"
        message = f"{seen_as}, dev macro-F1 {100 * answers.dev_macro_f1:.1f}, labelled {'; '.join(told)}"
        emit(Event("done", "teacher", message, data=facts))

    task_files = task_fingerprint(task)
    inputs = {"selection": fingerprint(selection), "train": task_files["train"], "dev": task_files["dev"]}
    inputs |= {name: None if each is None else each.fingerprint for name, each in (("baseline", baseline), ("embedding", embedding))}
    key = {"format": 5, "config": config.baseline.model_dump(mode="json"), "seed": config.seed, **inputs}
    return stage(folder / "teacher", kind="teacher", key=key, write=write, emit=emit)


def ask_model(
    model: Model,
    selection: Chosen,
    tokenizer: Tokenizer,
    folder: Path,
    *,
    weights: Callable[[], None],
    key: Mapping[str, Any],
    phase: PhaseConfig,
    precision: Precision,
    emit: Emit,
) -> Artifact:
    """passages.npy as `teach` leaves it, but from a model of an earlier phase: what it makes of as much of each passage as a row of `phase`
    holds, at `TEMPERATURE`; with a prompt in all its patterns. weights: fills the model, called when it is needed.
    """
    name = f"teacher-of-{phase.name}"

    def write(target: Path) -> None:
        emit(Event("start", name))
        weights()
        sequences = sequences_of_texts(tokenizer, selection.texts(), None, max_length=phase.row_length, prompt=model.prompt)
        logits = predict_logits(model, sequences, precision=precision, pad_id=tokenizer.pad_id)
        answers = outputs_of(model.kind, logits / TEMPERATURE)
        save_array(target / "passages.npy", answers)
        told = f"{answers.max(1).mean():.0%} sure on the mean"
        emit(Event("done", name, f"{len(answers):,} passages labelled by the model of {phase.teacher_from}, {told}"))

    return stage(folder / name, kind="teacher", key={"format": 1, **key}, write=write, emit=emit, name=name)


def _vectors(tokenizer: Tokenizer, task: Task, texts: list[str], embeddings: FloatArray) -> Vectors:
    """What is learnt for them comes from training texts and passages alone."""
    train, dev = (sequences_of(tokenizer, split, max_length=UNCUT) for split in (task.train, task.dev))
    passages = tokenizer.sequences(texts, max_length=UNCUT, cut="split")
    space = TextSpace.of([train, passages], embeddings)
    return Vectors(space.vectors(train), space.vectors(dev), space.vectors(passages))
