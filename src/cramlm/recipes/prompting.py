"""Labels as words that fill in a mask, from drawn weights and from a checkpoint (docs/prompts.md)."""

from __future__ import annotations

from typing import Final

from cramlm.config import Bm25Config
from cramlm.recipes.phases import distil_phase, finetune_phase, joint_phase, text_phase, vectors_phase
from cramlm.recipes.recipe import Recipe

prompt = Recipe(
    "prompt",
    "tlm with labels as words that fill in a mask; from a checkpoint fine-tuning alone",
    (joint_phase(), finetune_phase()),
    Bm25Config(),
    phases_on_checkpoint=(finetune_phase(),),
    head="prompt",
)
_UNTAUGHT: Final = {"teacher_weight": 0.0}
_LABELS: Final = finetune_phase().model_copy(update=_UNTAUGHT)
pet = Recipe(
    "pet",
    "prompt without a linear teacher, then once more with its own pseudo-labels of the retrieved text",
    (joint_phase().model_copy(update=_UNTAUGHT), _LABELS, distil_phase(teacher="finetune", start="joint")),
    Bm25Config(),
    phases_on_checkpoint=(_LABELS, distil_phase(teacher="finetune", start="start")),
    head="prompt",
)
soft_prompt = Recipe(
    "soft-prompt",
    "language alone, then vectors before the text that learn the labels, the encoder frozen; from a checkpoint these alone",
    (text_phase("joint", external=4, task=1, mlm_weight=0.25), vectors_phase()),
    Bm25Config(),
    phases_on_checkpoint=(vectors_phase(),),
    head="soft-prompt",
)
