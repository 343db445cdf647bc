"""Labels as words that fill in a mask, from drawn weights and from a checkpoint (docs/prompts.md)."""

from __future__ import annotations

from cramlm.config import Bm25Config
from cramlm.recipes.phases import finetune_phase, joint_phase, text_phase, vectors_phase
from cramlm.recipes.recipe import Recipe

prompt = Recipe(
    "prompt",
    "tlm with labels as words that fill in a mask; from a checkpoint fine-tuning alone",
    (joint_phase(), finetune_phase()),
    Bm25Config(top_k=50),
    phases_on_checkpoint=(finetune_phase(),),
    head="prompt",
)
soft_prompt = Recipe(
    "soft-prompt",
    "language alone, then vectors before the text that learn the labels, the encoder frozen; from a checkpoint these alone",
    (text_phase("joint", external=4, task=1, mlm_weight=0.25), vectors_phase()),
    Bm25Config(top_k=50),
    phases_on_checkpoint=(vectors_phase(),),
    head="soft-prompt",
)
