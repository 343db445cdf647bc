"""The phases that recipes are lists of, for an encoder that starts from drawn weights and for one that starts from a checkpoint."""

from __future__ import annotations

from typing import Any

from cramlm.config import EncoderConfig, MaskingConfig, OptimizerConfig, PhaseConfig, ScheduleConfig

BERT_MASKS = MaskingConfig(rate=0.15, mask_share=0.8, random_share=0.1)  # Devlin et al. 2019
TAPT_PASSES = 100.0  # over the task's own text (Gururangan et al. 2020)
TUNING_PASSES = 10.0  # over the labels, from a checkpoint; as there for tasks of fewer than 5,000 labels (3 for larger ones)


def joint_phase() -> PhaseConfig:
    """External and task text side by side in every batch; the paper's stage 1 with a task weight that is felt, and a teacher's labels on
    external text.
    """
    return PhaseConfig(
        name="joint",
        external=4,
        task=1,
        mixing="blended",
        mlm_weight=0.25,
        task_weight=0.25,
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
        external=0,
        task=1,
        mlm_weight=0.0,
        task_weight=1.0,
        batch_size=32,
        batch_unit="sequences",
        optimizer=OptimizerConfig(kind="muon", learning_rate=1e-3, muon_learning_rate=2e-3),
        schedule=ScheduleConfig(kind="linear", warmup_fraction=0.1),
        keep="best",
    )


def vectors_phase() -> PhaseConfig:
    """The vectors of a soft prompt, on labels only; AdamW at a rate that would be ruinous for weights (Lester et al. 2021: 0.3)."""
    tuned = {"name": "tune", "trains": "vectors", "teacher_weight": 0.0, "dropout": 0.0, "most_passes": None}
    optimizer = OptimizerConfig(kind="adamw", learning_rate=1e-2, weight_decay=0.0)
    return finetune_phase().model_copy(update={**tuned, "optimizer": optimizer})


def distil_phase(*, teacher: str, start: str) -> PhaseConfig:
    """Language, labels and the pseudo-labels that the phase `teacher` gives external text, from the weights of the phase `start`."""
    named = {"name": "distil", "teacher_from": teacher, "teacher_weight": 1.0, "start_from": start, "keep": "best"}
    return joint_phase().model_copy(update=named)


def text_phase(name: str, *, external: int, task: int, mlm_weight: float, most_passes: float | None = None) -> PhaseConfig:
    """Masked language modeling alone, with the masks, batches and rates of `joint_phase`: no label is looked at, no teacher asked."""
    text = {"external": external, "task": task, "mlm_weight": mlm_weight, "task_weight": 0.0, "teacher_weight": 0.0}
    return joint_phase().model_copy(update={"name": name, "most_passes": most_passes, **text})


def from_checkpoint(phase: PhaseConfig, encoder: EncoderConfig) -> PhaseConfig:
    """The phase as it is run on pretrained weights: AdamW at the rates of the literature, BERT's masks, dropout 0.1, no linear teacher.

    Continued MLM at 1e-4, fine-tuning at 2e-5 in batches of 16, warm-up over 6 % of the steps (Gururangan et al. 2020); encoders
    narrower than 768 are tuned at 1e-4, as small ones stand and need more (docs/log.md).
    """
    if phase.trains == "vectors":
        return phase
    common: dict[str, Any] = {"schedule": ScheduleConfig(kind="linear", warmup_fraction=0.06), "dropout": 0.1}
    common["teacher_weight"] = 0.0 if phase.teacher_from is None else phase.teacher_weight
    if phase.uses_mlm and phase.objective != "marks":
        masks = phase.masking.model_copy(update=BERT_MASKS.model_dump(include={"rate", "mask_share", "random_share"}))
        return phase.model_copy(update={**common, "masking": masks, "optimizer": OptimizerConfig(kind="adamw", learning_rate=1e-4)})
    rate = 2e-5 if encoder.hidden >= 768 else 1e-4
    tuned = {"optimizer": OptimizerConfig(kind="adamw", learning_rate=rate), "most_passes": TUNING_PASSES}
    return phase.model_copy(update={**common, **tuned, "batch_size": 16})
