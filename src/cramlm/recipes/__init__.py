"""Recipes: each makes a complete `RunConfig` of one method from the data and the budget (docs/concepts/recipes.md).

    tlm                                          Yao et al. 2022, with the best settings found here
    tlm_plain                                    the paper's two stages without the parts that tlm adds to them
    tlm_small, tlm_medium, tlm_large             the paper's own settings
    random_retrieval, external_only, task_text_only, no_stage_2, labels_only      controls, one change each from tlm
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
from typing import Any

from cramlm.errors import UsageError
from cramlm.recipes.methods import bayes as bayes
from cramlm.recipes.methods import dapt as dapt
from cramlm.recipes.methods import dapt_tapt as dapt_tapt
from cramlm.recipes.methods import external_only as external_only
from cramlm.recipes.methods import knn_tapt as knn_tapt
from cramlm.recipes.methods import labels_only as labels_only
from cramlm.recipes.methods import no_stage_2 as no_stage_2
from cramlm.recipes.methods import pet as pet
from cramlm.recipes.methods import plm as plm
from cramlm.recipes.methods import prompt as prompt
from cramlm.recipes.methods import random_retrieval as random_retrieval
from cramlm.recipes.methods import selective_masking as selective_masking
from cramlm.recipes.methods import selective_masking_random as selective_masking_random
from cramlm.recipes.methods import soft_prompt as soft_prompt
from cramlm.recipes.methods import static as static
from cramlm.recipes.methods import tapt as tapt
from cramlm.recipes.methods import task_text_only as task_text_only
from cramlm.recipes.methods import tfidf as tfidf
from cramlm.recipes.methods import tlm as tlm
from cramlm.recipes.methods import tlm_plain as tlm_plain
from cramlm.recipes.paper import PaperRecipe, paper_recipe
from cramlm.recipes.recipe import DEFAULT_BUDGET as DEFAULT_BUDGET
from cramlm.recipes.recipe import PRESETS as PRESETS
from cramlm.recipes.recipe import EncoderRecipe as EncoderRecipe
from cramlm.recipes.recipe import LinearRecipe as LinearRecipe
from cramlm.recipes.recipe import Recipe as Recipe
from cramlm.recipes.recipe import encoder_for_budget as encoder_for_budget
from cramlm.recipes.recipe import finetune_phase as finetune_phase
from cramlm.recipes.recipe import joint_phase as joint_phase
from cramlm.recipes.recipe import on_checkpoint as on_checkpoint
from cramlm.recipes.recipe import with_preset as with_preset

tlm_small, tlm_medium, tlm_large = paper_recipe("small"), paper_recipe("medium"), paper_recipe("large")

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
    """Return the recipe of this name and the arguments after its colons, as in tlm-small:chemprot or tlm-small:chemprot:0.001 (a twin).

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
