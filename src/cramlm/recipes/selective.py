"""Selective masking (Gu et al. 2020): mask the words that matter to the task, found by a scorer that learnt them from the labelled texts.

    general MLM ─► tuned on the labels ─► scorer: learns which words the tuned model needs
         └──────► MLM on the retrieved text, masking what the scorer finds ─► fine-tuned

Masks, passes of the scorer and its positive weight are the paper's. Its general corpus and its in-domain corpus are one here, the retrieved
text; on a checkpoint the general phase is the checkpoint. The control hides as many tokens, at random.
"""

from __future__ import annotations

from typing import Final, Literal

from cramlm.config.run import Bm25Config, PhaseConfig
from cramlm.config.terms import ImportantTokens, Mlm
from cramlm.recipes.phases import BERT_MASKS, finetune_phase, text_phase
from cramlm.recipes.recipe import Recipe

SCORER_PASSES: Final = 10.0


def _recipe(name: str, summary: str, kind: Literal["scored", "scored-control"]) -> Recipe:
    text = text_phase("genept", external=1, task=0, terms=(Mlm(on="external"),)).model_copy(update={"masking": BERT_MASKS})
    tune = finetune_phase().model_copy(update={"name": "tune"})
    learns = {"terms": (ImportantTokens(),), "passes": SCORER_PASSES, "keep": "last"}
    scorer = finetune_phase().model_copy(update={"name": "scorer", **learns})
    masks = BERT_MASKS.model_copy(update={"kind": kind, "scores_of": "scorer"})

    def selective(start_from: str) -> PhaseConfig:
        return text.model_copy(update={"name": "taskpt", "start_from": start_from, "masking": masks})

    return Recipe(
        name,
        summary,
        (text, tune, scorer, selective("genept"), finetune_phase()),
        Bm25Config(),
        phases_on_checkpoint=(tune, scorer, selective("start"), finetune_phase()),
    )


selective_masking = _recipe("selective-masking", "pretrain with masks on the words that matter to the labels, then fine-tune", "scored")
selective_masking_random = _recipe(
    "selective-masking-random", "control: selective-masking with as many masks at random; what the choice adds", "scored-control"
)
