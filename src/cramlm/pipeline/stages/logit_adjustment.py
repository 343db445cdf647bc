"""After training: the logit adjustment of the model that is scored and exported, chosen on dev."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from cramlm.data.task import task_fingerprint
from cramlm.evaluation.kinds import NAMES, figure
from cramlm.evaluation.logit_adjustment import adjust_on_dev
from cramlm.model.tokenizer import Tokenizer
from cramlm.pipeline.stages.common import Context, Plan, write_json
from cramlm.pipeline.stages.model import Trained, adjusts_logits
from cramlm.records import Event


def adjust_logits(run: Context, plan: Plan, trained: Trained, tokenizer: Tokenizer) -> Trained:
    """The model with the adjustment that dev chose in its classifier's bias; unchanged where the config keeps the logits as trained."""
    if not adjusts_logits(run.config) or not any(phase.learns_labels for phase in trained.phases):
        return trained

    def write(target: Path) -> None:
        run.emit(Event("start", "logit-adjustment"))
        options: dict[str, Any] = {"max_length": trained.max_length, "precision": plan.precision, "choose_by": run.config.dev_metric}
        chosen = adjust_on_dev(trained.model, tokenizer, run.task, **options)
        values = dict(zip(run.task.labels, map(float, chosen.values), strict=True))
        facts = {"tau": chosen.tau, "before": chosen.before, "after": chosen.after}
        write_json(target / "logit-adjustment.json", {**facts, "choose_by": run.config.dev_metric, "values": values})
        name, before, after = (
            NAMES[run.config.dev_metric],
            *(figure(run.config.dev_metric, score) for score in (chosen.before, chosen.after)),
        )
        change = f"{before}, unchanged" if chosen.tau == 0 else f"{before} -> {after}"
        run.emit(Event("done", "logit-adjustment", f"logit adjustment: tau = {chosen.tau:.1f} (dev {name} {change})", data=facts))

    inputs = {"model": trained.fingerprint, "task": task_fingerprint(run.task)}
    key = {"format": 2, **inputs, "precision": plan.precision, "choose_by": run.config.dev_metric}
    artifact = run.stage("logit-adjustment", key=key, write=write)
    values = json.loads((artifact.path / "logit-adjustment.json").read_bytes())["values"]
    trained.model.shift_labels(np.array([values[label] for label in run.task.labels], dtype=np.float32))
    return replace(trained, fingerprint=f"{trained.fingerprint} {artifact.fingerprint}")
