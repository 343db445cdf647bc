"""The methods, as data. From drawn weights unless said otherwise; what `--init` makes of their phases is in phases.from_checkpoint."""

from __future__ import annotations

from typing import Final

from cramlm.config import Bm25Config, RandomConfig
from cramlm.recipes.phases import TAPT_PASSES, finetune_phase, joint_phase, text_phase
from cramlm.recipes.recipe import Recipe

_DAPT: Final = text_phase("dapt", external=1, task=0, mlm_weight=0.0, most_passes=1.0)
_TAPT: Final = text_phase("tapt", external=0, task=1, mlm_weight=1.0, most_passes=TAPT_PASSES)

tlm = Recipe(
    "tlm",
    "retrieve with every training text, learn language and labels together, then the labels",
    (joint_phase(), finetune_phase()),
    Bm25Config(),
)
random_retrieval = Recipe(
    "random-retrieval",
    "control: tlm on as much text drawn blindly; what retrieval adds",
    (joint_phase(), finetune_phase()),
    RandomConfig(),
)
labels_only = Recipe(
    "labels-only",
    "control: the labels alone; what the raw text adds",
    (finetune_phase(),),
)
external_only = Recipe(
    "external-only",
    "control: tlm with no task batch before the fine-tuning; what joint learning adds",
    (text_phase("external", external=1, task=0, mlm_weight=0.0), finetune_phase()),
    Bm25Config(),
)
no_stage_2 = Recipe(
    "no-stage-2",
    "control: tlm without the fine-tuning; what it adds",
    (joint_phase(),),
    Bm25Config(),
)
task_text_only = Recipe(
    "task-text-only",
    "control: tlm without external text; the task's own text and labels",
    (joint_phase().model_copy(update={"external": 0, "mlm_weight": 1.0, "most_passes": TAPT_PASSES}), finetune_phase()),
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
    (text_phase("knn-tapt", external=4, task=1, mlm_weight=0.25), finetune_phase()),
    Bm25Config(top_k=50),
    start="pretrained",
)
