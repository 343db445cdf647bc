"""The phases that recipes are lists of, for an encoder that starts from drawn weights and for one that starts from a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from cramlm.config.phase import linear_teachers
from cramlm.config.run import EncoderConfig, MaskingConfig, OptimizerConfig, PhaseConfig, ScheduleConfig
from cramlm.config.terms import Classify, Distil, ImportantTokens, Mlm, Term
from cramlm.data.task import LabelledSize
from cramlm.records import TaskKind

BERT_MASKS = MaskingConfig(rate=0.15, mask_share=0.8, random_share=0.1)  # Devlin et al. 2019
TAPT_PASSES = 100.0  # over the task's own text (Gururangan et al. 2020)
TUNING_PASSES = 10.0  # over the labels, from a checkpoint; as there for tasks of fewer than 5,000 labels (3 for larger ones)
MLM_ON_TASK: Final = Mlm(on="task", weight=0.25)
FEW_TEXTS_PER_LABEL, FEW_SMOOTHING = 30, 0.2  # docs/log.md


def joint_phase() -> PhaseConfig:
    """External and task text side by side in every batch; the paper's stage 1 with a task weight that is felt, and a teacher's labels on
    external text.
    """
    return PhaseConfig(
        name="joint",
        terms=(Mlm(on="external"), MLM_ON_TASK, Classify(weight=0.25), Distil(on="external")),
        external=4,
        task=1,
        mixing="blended",
        masking=MaskingConfig(rate=0.2, mask_share=1.0, random_share=0.0),
        batch_size=4096,
        optimizer=OptimizerConfig(kind="muon"),
        schedule=ScheduleConfig(kind="wsd", warmup_fraction=0.03, decay_fraction=0.4),
        keep="last",
    )


def finetune_phase() -> PhaseConfig:
    """Labels only, no vocabulary head; the paper's stage 2. The encoder is young, so it is trained on with Muon rather than tuned."""
    return PhaseConfig(
        name="finetune",
        terms=(Classify(), Distil(on="task")),
        external=0,
        task=1,
        batch_size=32,
        batch_unit="sequences",
        optimizer=OptimizerConfig(kind="muon", learning_rate=1e-3, muon_learning_rate=2e-3),
        schedule=ScheduleConfig(kind="linear", warmup_fraction=0.1),
        keep="best",
    )


def with_terms(phase: PhaseConfig, keep: Callable[[Term], bool]) -> PhaseConfig:
    """The phase with those of its terms that `keep` accepts."""
    return phase.model_copy(update={"terms": tuple(term for term in phase.terms if keep(term))})


def without_teacher(phase: PhaseConfig) -> PhaseConfig:
    """The phase without the linear teacher."""
    return with_terms(phase, lambda term: term not in linear_teachers(phase))


def smoothed(phase: PhaseConfig, label_smoothing: float) -> PhaseConfig:
    """The phase with this label smoothing."""
    terms = (term.model_copy(update={"label_smoothing": label_smoothing}) if isinstance(term, Classify) else term for term in phase.terms)
    return phase.model_copy(update={"terms": tuple(terms)})


def on_task_text(phase: PhaseConfig) -> PhaseConfig:
    """The phase on the task's text alone: its terms on external text, where it has no others of their kind, are on task text."""
    if not phase.external:
        return phase
    own = [term for term in phase.terms if term.on == "task"]
    kinds = {term.kind for term in own}
    moved = [term.model_copy(update={"on": "task"}) for term in phase.terms if term.on == "external" and term.kind not in kinds]
    return phase.model_copy(update={"external": 0, "task": max(1, phase.task), "terms": (*own, *moved)})


def is_few(size: LabelledSize) -> bool:
    """Return True if a label has fewer than `FEW_TEXTS_PER_LABEL` training texts on the mean."""
    return size.texts < FEW_TEXTS_PER_LABEL * size.labels


def for_task(phase: PhaseConfig, kind: TaskKind, size: LabelledSize) -> PhaseConfig:
    """The phase with the terms that suit the labelled texts; one without a linear teacher is unchanged.

    The linear teacher exists for texts of one label. A phase on labels alone learns from its probabilities of held-out training texts; with
    few texts a label these are poor, and label smoothing replaces them.
    """
    if not linear_teachers(phase):
        return phase
    if kind != "classification":
        return without_teacher(phase)
    if is_few(size) and not phase.text_terms:
        return smoothed(without_teacher(phase), FEW_SMOOTHING)
    return phase


def vectors_phase() -> PhaseConfig:
    """The vectors of a soft prompt, on labels only; AdamW at a rate that would be ruinous for weights (Lester et al. 2021: 0.3)."""
    tuned = {"name": "tune", "terms": (Classify(),), "trains": "vectors", "dropout": 0.0, "max_passes": None}
    optimizer = OptimizerConfig(kind="adamw", learning_rate=1e-2, weight_decay=0.0)
    return finetune_phase().model_copy(update={**tuned, "optimizer": optimizer})


def distil_phase(*, teacher: str, start: str) -> PhaseConfig:
    """Language, labels and the pseudo-labels that the phase `teacher` gives external text, from the weights of the phase `start`."""
    terms = (*without_teacher(joint_phase()).terms, Distil(on="external", teacher=teacher))
    return joint_phase().model_copy(update={"name": "distil", "terms": terms, "start_from": start, "keep": "best"})


def text_phase(name: str, *, external: int, task: int, terms: tuple[Mlm, ...], max_passes: float | None = None) -> PhaseConfig:
    """Masked language modeling alone, with the masks, batches and rates of `joint_phase`: no labels, no teacher."""
    text = {"name": name, "terms": terms, "external": external, "task": task, "max_passes": max_passes}
    return joint_phase().model_copy(update=text)


def from_checkpoint(phase: PhaseConfig, encoder: EncoderConfig) -> PhaseConfig:
    """The phase as it is run on pretrained weights: AdamW at the rates of the literature, BERT's masks and dropout, no linear teacher
    and none of the label smoothing that may replace it.

    Continued MLM at 1e-4, fine-tuning at 2e-5 in batches of 16, warm-up over 6 % of the steps (Gururangan et al. 2020); encoders
    narrower than 768 are tuned at 1e-4, as small ones stand and need more (docs/log.md).
    """
    if phase.trains == "vectors":
        return phase
    common: dict[str, Any] = {"schedule": ScheduleConfig(kind="linear", warmup_fraction=0.06), "dropout": 0.1, "attention_dropout": 0.1}
    phase = smoothed(without_teacher(phase), 0.0)
    if phase.text_terms and not phase.terms_of(ImportantTokens):
        masks = phase.masking.model_copy(update=BERT_MASKS.model_dump(include={"rate", "mask_share", "random_share"}))
        return phase.model_copy(update={**common, "masking": masks, "optimizer": OptimizerConfig(kind="adamw", learning_rate=1e-4)})
    rate = 2e-5 if encoder.hidden >= 768 else 1e-4
    tuned = {"optimizer": OptimizerConfig(kind="adamw", learning_rate=rate), "max_passes": TUNING_PASSES}
    return phase.model_copy(update={**common, **tuned, "batch_size": 16})
