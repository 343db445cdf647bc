"""The methods, as data. From drawn weights unless said otherwise; what `--init` makes of their phases is in phases.from_checkpoint."""

from __future__ import annotations

from typing import Final

from cramlm.config.run import Bm25Config, RandomConfig
from cramlm.config.terms import Mlm
from cramlm.recipes.phases import (
    MLM_ON_TASK,
    TAPT_PASSES,
    finetune_phase,
    joint_phase,
    on_task_text,
    text_phase,
    with_terms,
    without_teacher,
)
from cramlm.recipes.recipe import Recipe

_DAPT: Final = text_phase("dapt", external=1, task=0, terms=(Mlm(on="external"),), max_passes=1.0)
_TAPT: Final = text_phase("tapt", external=0, task=1, terms=(Mlm(on="task"),), max_passes=TAPT_PASSES)

tlm = Recipe(
    "tlm",
    "retrieve with every training text, learn language and labels together, then the labels",
    (joint_phase(), finetune_phase()),
    Bm25Config(),
)
tlm_plain = Recipe(
    "tlm-plain",
    "tlm with what the paper has alone: no teacher, no co-occurrence embeddings, no label smoothing, no logit adjustment",
    (without_teacher(joint_phase()), without_teacher(finetune_phase())),
    Bm25Config(),
    embedding_init="random",
    logit_adjustment="none",
)
# The controls: one change each from tlm (docs/recipes.md).
random_retrieval = Recipe(
    "random-retrieval",
    "control: tlm on random passages in place of retrieved ones; what retrieval adds",
    (joint_phase(), finetune_phase()),
    RandomConfig(),
)
external_only = Recipe(
    "external-only",
    "control: tlm without task text in the joint phase; what joint learning adds",
    (with_terms(joint_phase(), lambda term: term.on == "external").model_copy(update={"task": 0}), finetune_phase()),
    Bm25Config(),
)
task_text_only = Recipe(
    "task-text-only",
    "control: tlm without external text in the joint phase; what external text adds",
    (on_task_text(joint_phase()), finetune_phase()),
)
no_stage_2 = Recipe(
    "no-stage-2",
    "control: tlm without the fine-tuning phase; what it adds",
    (joint_phase(),),
    Bm25Config(),
)
labels_only = Recipe(
    "labels-only",
    "control: tlm without the joint phase; what it adds",
    (finetune_phase(),),
)
plm = Recipe(
    "plm",
    "fine-tune a checkpoint",
    (finetune_phase(),),
    start="pretrained",
)
dapt = Recipe(
    "dapt",
    "go on pretraining a checkpoint on the domain's corpus, then fine-tune",
    (_DAPT, finetune_phase()),
    RandomConfig(),
    start="pretrained",
)
tapt = Recipe(
    "tapt",
    "go on pretraining a checkpoint on the task's own text, then fine-tune",
    (_TAPT, finetune_phase()),
    start="pretrained",
)
dapt_tapt = Recipe(
    "dapt+tapt",
    "the domain's corpus, then the task's text, then fine-tune a checkpoint",
    (_DAPT, _TAPT, finetune_phase()),
    RandomConfig(),
    start="pretrained",
)
knn_tapt = Recipe(
    "knn-tapt",
    "go on pretraining a checkpoint on the training texts and their neighbours in the corpus, then fine-tune",
    (text_phase("knn-tapt", external=4, task=1, terms=(Mlm(on="external"), MLM_ON_TASK)), finetune_phase()),
    Bm25Config(top_k=50),
    start="pretrained",
)
