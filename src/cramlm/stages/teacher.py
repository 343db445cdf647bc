"""What the linear baseline makes of every retrieved passage and every training text, for phases that learn from it."""

from __future__ import annotations

import json
from pathlib import Path

from cramlm.arrays import save_array
from cramlm.artifacts import Artifact, stage
from cramlm.config import RunConfig
from cramlm.data.task import task_fingerprint
from cramlm.evaluation.baselines import fit_baselines
from cramlm.evaluation.teacher import soft_labels
from cramlm.records import Emit, Event, Task
from cramlm.stages.common import Chosen, fingerprint
from cramlm.training.budget import with_teacher


def teach(
    config: RunConfig, task: Task, baseline: Artifact | None, selection: Chosen | None, folder: Path, *, emit: Emit
) -> Artifact | None:
    """A teacher's probabilities, (texts, labels) float32: passages.npy in the selection's order, task.npy in that of the training texts,
    each as far as a phase learns from it; None where none does.

    The teacher is the baseline that is best on dev, fitted anew; without a baseline stage the variants are tried here.
    """
    taught = [phase for phase in (with_teacher(phase, examples=len(task.train)) for phase in config.phases) if phase.uses_teacher]
    about_task = any(not phase.external for phase in taught)
    passages = selection if any(phase.external for phase in taught) else None
    if not about_task and passages is None:
        return None

    def write(target: Path) -> None:
        emit(Event("start", "teacher"))
        if baseline is None:
            tried = fit_baselines(task, config.baseline, seed=config.seed).as_dict()
        else:
            tried = json.loads((baseline.path / "baselines.json").read_bytes())
        chosen, texts = tried["chosen"], passages.texts() if passages else []
        answers = soft_labels(
            task, texts, own=about_task, variant=chosen.removeprefix("tfidf-"), settings=tried["variants"][chosen], seed=config.seed
        )
        save_array(target / "passages.npy", answers.asked)
        save_array(target / "task.npy", answers.own)
        told = [
            f"{len(rows):,} {what}, {float(rows.max(axis=1).mean()):.0%} sure on the mean"
            for rows, what in ((answers.asked, "passages"), (answers.own, "training texts that it had not seen"))
            if len(rows)
        ]
        emit(Event("done", "teacher", f"{chosen} labelled {'; '.join(told)}"))

    inputs = {"selection": fingerprint(passages), "task": task_fingerprint(task)["train"]}
    inputs["baseline"] = None if baseline is None else baseline.fingerprint
    key = {"format": 2, "config": config.baseline.model_dump(mode="json"), "seed": config.seed, "own": about_task, **inputs}
    return stage(folder / "teacher", kind="teacher", key=key, write=write, emit=emit)
