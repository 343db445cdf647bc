"""After training: how much the frequency of labels counts in the answers of the model that is scored and exported."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from cramlm.artifacts import stage
from cramlm.config import RunConfig
from cramlm.data.task import task_fingerprint
from cramlm.evaluation.label_prior import shift_on_dev
from cramlm.model.tokenization import Tokenizer
from cramlm.records import Emit, Event, Task
from cramlm.stages.common import Plan, write_json
from cramlm.stages.model import Trained, chooses_prior


def settle_label_prior(
    config: RunConfig, plan: Plan, trained: Trained, tokenizer: Tokenizer, task: Task, folder: Path, *, emit: Emit
) -> Trained:
    """The model with the shift that dev chose in its classifier's bias; as it came where the config keeps what was trained."""
    if not chooses_prior(config) or not any(phase.uses_labels for phase in trained.phases):
        return trained

    def write(target: Path) -> None:
        emit(Event("start", "label-prior"))
        asked: dict[str, Any] = {"max_length": trained.max_length, "precision": plan.precision, "choose_by": config.dev_metric}
        chosen = shift_on_dev(trained.model, tokenizer, task, **asked)
        shift = dict(zip(task.labels, map(float, chosen.shift), strict=True))
        facts = {"share": chosen.share, "before": chosen.before, "after": chosen.after}
        write_json(target / "label-prior.json", {**facts, "choose_by": config.dev_metric, "shift": shift})
        scores = f"dev {config.dev_metric} {chosen.before:.4f} -> {chosen.after:.4f}"
        emit(Event("done", "label-prior", f"{chosen.share:g} of how rare a label is counts for it: {scores}", data=facts))

    inputs = {"model": trained.fingerprint, "task": task_fingerprint(task)}
    key = {"format": 1, **inputs, "precision": plan.precision, "choose_by": config.dev_metric}
    artifact = stage(folder / "label-prior", kind="label-prior", key=key, write=write, emit=emit)
    shift = json.loads((artifact.path / "label-prior.json").read_bytes())["shift"]
    trained.model.shift_labels(np.array([shift[label] for label in task.labels], dtype=np.float32))
    return replace(trained, fingerprint=f"{trained.fingerprint} {artifact.fingerprint}")
