"""Labels as words that fill in a mask, from drawn weights and from a checkpoint (docs/prompts.md)."""

from __future__ import annotations

from typing import Final

from cramlm.config.run import Bm25Config
from cramlm.config.terms import Mlm
from cramlm.recipes.phases import MLM_ON_TASK, distil_phase, finetune_phase, joint_phase, text_phase, vectors_phase, without_teacher
from cramlm.recipes.recipe import Recipe

prompt = Recipe(
    "prompt",
    "tlm with labels as words that fill in a mask; from a checkpoint fine-tuning alone",
    (joint_phase(), finetune_phase()),
    Bm25Config(),
    phases_on_checkpoint=(finetune_phase(),),
    head="prompt",
)
_LABELS: Final = without_teacher(finetune_phase())
pet = Recipe(
    "pet",
    "prompt without a linear teacher, then once more with its own pseudo-labels of the retrieved text",
    (without_teacher(joint_phase()), _LABELS, distil_phase(teacher="finetune", start="joint")),
    Bm25Config(),
    phases_on_checkpoint=(_LABELS, distil_phase(teacher="finetune", start="start")),
    head="prompt",
)
soft_prompt = Recipe(
    "soft-prompt",
    "language alone, then vectors before the text that learn the labels, the encoder frozen; from a checkpoint these alone",
    (text_phase("joint", external=4, task=1, terms=(Mlm(on="external"), MLM_ON_TASK)), vectors_phase()),
    Bm25Config(),
    phases_on_checkpoint=(vectors_phase(),),
    head="soft-prompt",
)
