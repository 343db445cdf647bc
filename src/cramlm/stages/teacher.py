"""What the linear baseline makes of every retrieved passage, for phases that learn from it."""

from __future__ import annotations

import json
from dataclasses import replace
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


def teach(config: RunConfig, task: Task, baseline: Artifact | None, selection: Chosen | None, folder: Path, *, emit: Emit) -> Chosen | None:
    """The selection with a teacher's probabilities beside it (soft_labels.npy, (passages, labels) float32), where a phase asks for them.

    The teacher is the baseline that is best on dev, fitted anew; without a baseline stage the variants are tried here.
    """
    if selection is None or not any(with_teacher(phase, examples=len(task.train)).uses_teacher for phase in config.phases):
        return selection

    def write(target: Path) -> None:
        emit(Event("start", "teacher"))
        if baseline is None:
            tried = fit_baselines(task, config.baseline, seed=config.seed).as_dict()
        else:
            tried = json.loads((baseline.path / "baselines.json").read_bytes())
        chosen, texts = tried["chosen"], selection.texts()
        probabilities = soft_labels(
            task, texts, variant=chosen.removeprefix("tfidf-"), settings=tried["variants"][chosen], seed=config.seed
        )
        save_array(target / "soft_labels.npy", probabilities)
        sure = float(probabilities.max(axis=1).mean())
        emit(Event("done", "teacher", f"{chosen} labelled {len(texts):,} passages, {sure:.0%} sure on the mean"))

    inputs = {"selection": fingerprint(selection), "task": task_fingerprint(task)["train"]}
    inputs["baseline"] = None if baseline is None else baseline.fingerprint
    key = {"format": 1, "config": config.baseline.model_dump(mode="json"), "seed": config.seed, **inputs}
    artifact = stage(folder / "teacher", kind="teacher", key=key, write=write, emit=emit)
    return replace(selection, teacher=artifact)
