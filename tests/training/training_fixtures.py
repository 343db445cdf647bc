"""Tiny real objects for the training tests: token pools, phases, a two-layer model, a phase run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cramlm.config.head import HeadConfig
from cramlm.config.phase import PhaseConfig
from cramlm.config.run import EncoderConfig
from cramlm.model.model import Model, ModelSpec, PackedBatch, build_model
from cramlm.records import TaskKind
from cramlm.training.batching import Batches
from cramlm.training.loop import DevEvaluation, Evaluate, PhaseResult, TrainingJob, train_phase
from cramlm.training.masking import SpecialIds
from cramlm.training.sequences import TokenPool

VOCABULARY = 120
LABELS = 3
SPECIAL = SpecialIds(pad=0, unk=1, cls=2, sep=3, mask=4, vocab_size=VOCABULARY)
ENCODER = EncoderConfig(layers=2, hidden=32, heads=2, intermediate=48, max_positions=64, embedding=16)
FINGERPRINT = {"config": {"seed": 7, "phase": {"steps": 30}}, "data": "abc"}


def make_pool(sequences: int, *, shortest: int = 5, longest: int = 32, labelled: bool, seed: int = 0) -> TokenPool:
    """Sequences whose words depend on their label: label k prefers the k-th third of the vocabulary."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(shortest, longest + 1, size=sequences)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    labels = rng.integers(0, LABELS, size=sequences) if labelled else np.full(sequences, -1)
    third = (VOCABULARY - 5) // LABELS
    ids = rng.integers(5, VOCABULARY, size=offsets[-1])
    if labelled:
        topical = 5 + third * np.repeat(labels, lengths) + rng.integers(0, third, size=offsets[-1])
        ids = np.where(rng.random(offsets[-1]) < 0.7, topical, ids)
    ids[offsets[:-1]], ids[offsets[1:] - 1] = SPECIAL.cls, SPECIAL.sep
    return TokenPool(ids.astype(np.uint16), offsets, labels.astype(np.int64))


def make_phase(
    *,
    text: str = "mlm",
    text_weight: float = 2.0,
    label_weight: float = 1.0,
    teacher_weight: float = 0.0,
    label_smoothing: float = 0.0,
    of_text: Mapping[str, Any] | None = None,
    **changes: Any,
) -> PhaseConfig:
    """Weights of 0 leave a term out. text: the text term, on external text with weight 1, on task text with `text_weight`; of_text: its
    other settings."""
    values: dict[str, Any] = {"name": "joint", "steps": 30, "external": 2, "task": 1, "batch_size": 256, "max_length": 32} | changes
    settings = {"kind": text, **(of_text or {})}
    hybrid = [{"kind": "mlm"}] if text == "causal" and settings.get("share", 1.0) < 1 else []
    terms: list[dict[str, Any]] = []
    for on, weight in (("external", 1.0), ("task", text_weight)):
        if weight and values[on]:
            terms += [{**term, "on": on, "weight": weight} for term in (settings, *hybrid)]
    if label_weight and values["task"]:
        terms.append({"kind": "classify", "weight": label_weight, "label_smoothing": label_smoothing})
    if teacher_weight:
        terms.append({"kind": "distil", "on": "external" if values["external"] else "task", "weight": teacher_weight})
    return PhaseConfig.model_validate({"terms": terms, **values})


def make_batches(phase: PhaseConfig, *, seed: int = 7, external: int = 90, task: int = 40) -> Batches:
    pools = make_pool(external, labelled=False, seed=1), make_pool(task, labelled=True, seed=2)
    return Batches(phase, *pools, seed=seed, phase_index=0, special=SPECIAL)


def make_model(*, shape: str = "modernbert", seed: int = 7, labels: int = LABELS, kind: TaskKind = "classification", **head: Any) -> Model:
    """A model of two layers; head: settings of the head."""
    encoder = ENCODER.model_copy(update={"shape": shape})
    config = HeadConfig.model_validate({"pooling": "cls", **head})
    return build_model(ModelSpec(encoder, config, vocab_size=VOCABULARY, labels=labels, kind=kind), seed=seed)


def accuracy_on_dev(model: Model, step: int = 0) -> dict[str, float]:
    """Accuracy on eight labelled sequences, so coarse that ties happen."""
    phase = make_phase(external=0, text_weight=0.0, batch_size=8, batch_unit="sequences")
    batch = PackedBatch.of(make_batches(phase, seed=99).batch(0))
    with torch.no_grad():
        predicted = model.task_logits(model.hidden(batch), batch).argmax(-1)
    return {"accuracy": float((predicted == batch.task_labels).float().mean())}


def run_phase(
    model: Model,
    phase: PhaseConfig,
    work: Path,
    *,
    evaluate: Evaluate | None = accuracy_on_dev,
    initial: float | None = None,
    batches: Batches | None = None,
    **job: Any,
) -> PhaseResult:
    """Train a phase; job: other fields of the TrainingJob."""
    dev = evaluate and DevEvaluation(evaluate, "accuracy", initial=initial)
    settings = {"fingerprint": FINGERPRINT, "precision": "fp32"} | job
    return train_phase(model, TrainingJob(batches or make_batches(phase), work, dev=dev, **settings))


def stop_after(boundaries: int, *, exit_code: int = 75) -> Callable[[], int | None]:
    """A `stop` that returns the exit code after so many boundaries."""
    results = iter([None] * boundaries)
    return lambda: next(results, exit_code)


def weights_of(model: Model) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def assert_same_bits(left: Mapping[str, torch.Tensor], right: Mapping[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    differing = [name for name in left if not torch.equal(left[name], right[name])]
    assert not differing, f"differ: {differing}"
