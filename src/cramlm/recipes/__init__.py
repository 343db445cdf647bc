"""Recipes: each makes a complete `RunConfig` of one method from the data and the budget (docs/concepts/recipes.md).

    tlm                                          Yao et al. 2022, with the best settings found here
    tlm_plain                                    the paper's two stages without the parts that tlm adds to them
    tlm_small, tlm_medium, tlm_large             the paper's own settings
    random_retrieval, external_only, task_text_only, no_stage_2, labels_only      controls: tlm with one change
    plm, dapt, tapt, dapt_tapt, knn_tapt         from a checkpoint, Gururangan et al. 2020
    selective_masking, selective_masking_random  Gu et al. 2020, and its control
    static, bayes, tfidf                         linear models, without an encoder
    prompt, pet, soft_prompt                     Schick and Schuetze 2021, Lester et al. 2021

A recipe counts the training texts and their labels and sets the numbers that depend on them (the terms of a linear teacher, label
smoothing, distribution alignment). It leaves open the steps, the row length and the size of the selection: the planner
(planning/budget.py) sets them from the budget and the sizes of the data. Every setting can be fixed, like `--set phases[0].steps=500`.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any, Final, Literal

from cramlm.config.phase import PhaseConfig
from cramlm.config.retriever import Bm25Config, RandomConfig
from cramlm.config.terms import ImportantTokens, Mlm
from cramlm.errors import UsageError
from cramlm.recipes.paper import PaperRecipe, paper_recipe
from cramlm.recipes.recipe import (
    BERT_MASKS,
    MLM_ON_TASK,
    TAPT_PASSES,
    distil_phase,
    on_task_text,
    text_phase,
    vectors_phase,
    with_terms,
    without_teacher,
)
from cramlm.recipes.recipe import PRESETS as PRESETS
from cramlm.recipes.recipe import EncoderRecipe as EncoderRecipe
from cramlm.recipes.recipe import LinearRecipe as LinearRecipe
from cramlm.recipes.recipe import Recipe as Recipe
from cramlm.recipes.recipe import finetune_phase as finetune_phase
from cramlm.recipes.recipe import joint_phase as joint_phase
from cramlm.recipes.recipe import with_preset as with_preset

SCORER_PASSES: Final = 10.0
STATIC_TOKENS: Final = 3_000_000
"""Tokens of the selection of `static`: about what tlm retrieves with a budget of four minutes on two cores."""

_DAPT: Final = text_phase("dapt", external=1, task=0, terms=(Mlm(on="external"),), max_passes=1.0)
_TAPT: Final = text_phase("tapt", external=0, task=1, terms=(Mlm(on="task"),), max_passes=TAPT_PASSES)

tlm = EncoderRecipe(
    "tlm",
    "retrieve with every training text, learn language and labels together, then the labels",
    (joint_phase(), finetune_phase()),
    Bm25Config(),
)
tlm_plain = EncoderRecipe(
    "tlm-plain",
    "tlm with only the parts of the paper: no teacher, random initial weights, no label smoothing, no logit adjustment",
    (without_teacher(joint_phase()), without_teacher(finetune_phase())),
    Bm25Config(),
    embedding_init="random",
    layer_init="random",
    logit_adjustment="none",
)
tlm_small, tlm_medium, tlm_large = paper_recipe("small"), paper_recipe("medium"), paper_recipe("large")
# Controls: one change each from tlm (docs/concepts/recipes.md).
random_retrieval = EncoderRecipe(
    "random-retrieval",
    "control for retrieval: tlm on random passages",
    (joint_phase(), finetune_phase()),
    RandomConfig(),
)
external_only = EncoderRecipe(
    "external-only",
    "control for joint learning: tlm without task text in the joint phase",
    (with_terms(joint_phase(), lambda term: term.on == "external").model_copy(update={"task": 0}), finetune_phase()),
    Bm25Config(),
)
task_text_only = EncoderRecipe(
    "task-text-only",
    "control for external text: tlm without it in the joint phase",
    (on_task_text(joint_phase()), finetune_phase()),
)
no_stage_2 = EncoderRecipe(
    "no-stage-2",
    "control for fine-tuning: tlm without that phase",
    (joint_phase(),),
    Bm25Config(),
)
labels_only = EncoderRecipe(
    "labels-only",
    "control for the joint phase: tlm without it",
    (finetune_phase(),),
)
# From a checkpoint: phases get the settings of `from_checkpoint`.
plm = EncoderRecipe(
    "plm",
    "fine-tune a checkpoint",
    (finetune_phase(),),
    start="checkpoint",
)
dapt = EncoderRecipe(
    "dapt",
    "continue pretraining a checkpoint on the corpus of the domain, then fine-tune it",
    (_DAPT, finetune_phase()),
    RandomConfig(),
    start="checkpoint",
)
tapt = EncoderRecipe(
    "tapt",
    "continue pretraining a checkpoint on the texts of the task, then fine-tune it",
    (_TAPT, finetune_phase()),
    start="checkpoint",
)
dapt_tapt = EncoderRecipe(
    "dapt+tapt",
    "continue pretraining a checkpoint on the corpus, then on the texts of the task, then fine-tune it",
    (_DAPT, _TAPT, finetune_phase()),
    RandomConfig(),
    start="checkpoint",
)
knn_tapt = EncoderRecipe(
    "knn-tapt",
    "continue pretraining a checkpoint on the training texts and the passages that they retrieve, then fine-tune it",
    (text_phase("knn-tapt", external=4, task=1, terms=(Mlm(on="external"), MLM_ON_TASK)), finetune_phase()),
    Bm25Config(top_k=50),
    start="checkpoint",
)


def _selective_masking(name: str, summary: str, kind: Literal["scored", "scored-control"]) -> EncoderRecipe:
    """Selective masking (Gu et al. 2020): mask the words that matter to the labels, found by a scorer that was trained on the labels.

        general MLM -> tuned on the labels -> scorer: learns which words the tuned model needs
             `-------> MLM on the retrieved text, masking what the scorer finds -> fine-tuned

    Masks, passes of the scorer and its positive weight are the paper's. Its general and its in-domain corpus are both the retrieved text;
    from a checkpoint, the checkpoint takes the place of the general phase. The control masks as many tokens at random.
    """
    text = text_phase("genept", external=1, task=0, terms=(Mlm(on="external"),)).model_copy(update={"masking": BERT_MASKS})
    tune = finetune_phase().model_copy(update={"name": "tune"})
    learns = {"terms": (ImportantTokens(),), "passes": SCORER_PASSES, "keep": "last"}
    scorer = finetune_phase().model_copy(update={"name": "scorer", **learns})
    masks = BERT_MASKS.model_copy(update={"kind": kind, "scores_of": "scorer"})

    def masked(start_from: str) -> PhaseConfig:
        return text.model_copy(update={"name": "taskpt", "start_from": start_from, "masking": masks})

    return EncoderRecipe(
        name,
        summary,
        (text, tune, scorer, masked("genept"), finetune_phase()),
        Bm25Config(),
        phases_on_checkpoint=(tune, scorer, masked("start"), finetune_phase()),
    )


selective_masking = _selective_masking(
    "selective-masking", "pretrain with masks on the tokens that are important for the labels, then fine-tune", "scored"
)
selective_masking_random = _selective_masking(
    "selective-masking-random", "control for the choice of masks: selective-masking with as many random masks", "scored-control"
)
# Labels as words that fill in a mask (docs/guides/prompts.md).
prompt = EncoderRecipe(
    "prompt",
    "tlm with labels as words that fill in a mask; from a checkpoint only the fine-tuning phase",
    (joint_phase(), finetune_phase()),
    Bm25Config(),
    phases_on_checkpoint=(finetune_phase(),),
    head="prompt",
)
_LABELS: Final = without_teacher(finetune_phase())
pet = EncoderRecipe(
    "pet",
    "prompt without a linear teacher, then trained again on its own pseudo-labels of the retrieved text",
    (without_teacher(joint_phase()), _LABELS, distil_phase(teacher="finetune", start="joint")),
    Bm25Config(),
    phases_on_checkpoint=(_LABELS, distil_phase(teacher="finetune", start="start")),
    head="prompt",
)
soft_prompt = EncoderRecipe(
    "soft-prompt",
    "train the encoder on text without labels, then a soft prompt on the labels with the encoder frozen; from a checkpoint only the prompt",
    (text_phase("joint", external=4, task=1, terms=(Mlm(on="external"), MLM_ON_TASK)), vectors_phase()),
    Bm25Config(),
    phases_on_checkpoint=(vectors_phase(),),
    head="soft-prompt",
)
# Linear models.
static = LinearRecipe(
    "static",
    "logistic regression on weighted n-grams and averaged word vectors of the corpus; no encoder",
    "static",
    Bm25Config(max_tokens=STATIC_TOKENS),
)
bayes = LinearRecipe(
    "bayes",
    "naive Bayes on labelled and retrieved texts, by expectation-maximization; no encoder",
    "bayes",
    Bm25Config(max_tokens=STATIC_TOKENS),
)
tfidf = LinearRecipe("tfidf", "logistic regression on weighted n-grams alone; no raw text, no encoder", "tfidf")

_ALL: tuple[Recipe, ...] = (
    *(tlm, tlm_plain, tlm_small, tlm_medium, tlm_large),
    *(random_retrieval, external_only, task_text_only, no_stage_2, labels_only),
    *(plm, dapt, tapt, dapt_tapt, knn_tapt),
    *(selective_masking, selective_masking_random),
    *(prompt, pet, soft_prompt),
    *(static, bayes, tfidf),
)
RECIPES: Mapping[str, Recipe] = {recipe.name: recipe for recipe in _ALL}
"""By the name that `--recipe` takes."""


def find(name: str) -> tuple[Recipe, dict[str, Any]]:
    """Return the recipe of this name and the arguments after its colons, as in tlm-small:chemprot or tlm-small:chemprot:0.001.

    Raises:
        UsageError: if there is no such recipe, or it takes no such arguments.
    """
    plain, *arguments = name.split(":")
    if plain not in RECIPES:
        near = difflib.get_close_matches(plain, RECIPES, n=1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise UsageError(f"--recipe {name!r} is not one of {', '.join(RECIPES)}{hint}")
    recipe = RECIPES[plain]
    if not arguments:
        return recipe, {}
    if not isinstance(recipe, PaperRecipe) or len(arguments) > 2:
        raise UsageError(f"--recipe {name!r}: only tlm-small, -medium and -large take :TASK and :SCALE, like tlm-small:chemprot:0.001")
    try:
        shrink = {"shrink": float(arguments[1])} if len(arguments) == 2 else {}
    except ValueError as error:
        raise UsageError(f"--recipe {name!r}: the scale {arguments[1]!r} is not a number, like 0.001") from error
    return recipe, {"like": arguments[0] or None, **shrink}
