"""Recipes: a method is a list of phases over the one training loop, and nothing else (docs/recipes.md).

    tlm                                          Yao et al. 2022, with the best settings found here
    tlm_plain                                    the paper's two stages, with none of what tlm adds to them
    tlm_small, tlm_medium, tlm_large             the paper's own settings
    random_retrieval, external_only, task_text_only, no_stage_2, labels_only      controls, one change each from tlm
    plm, dapt, tapt, dapt_tapt, knn_tapt         from a checkpoint, Gururangan et al. 2020
    selective_masking, selective_masking_random  Gu et al. 2020, and its control
    static, tfidf                                linear models, without an encoder
    prompt, pet, soft_prompt                     Schick and Schuetze 2021, Lester et al. 2021

Each is called with the data and gives a complete `RunConfig`: it counts the training texts and their labels and writes numbers that
suit them (weight of the linear teacher, label smoothing, distribution alignment). Numbers that a recipe leaves open (steps, row length,
size of the selection) are set by the planner (planning/budget.py) from the budget and the sizes of the data; every one can be fixed by
hand, like `--set phases[0].steps=500`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

from cramlm.errors import UsageError
from cramlm.recipes.linear import LinearRecipe
from cramlm.recipes.linear import static as static
from cramlm.recipes.linear import tfidf as tfidf
from cramlm.recipes.methods import dapt as dapt
from cramlm.recipes.methods import dapt_tapt as dapt_tapt
from cramlm.recipes.methods import external_only as external_only
from cramlm.recipes.methods import knn_tapt as knn_tapt
from cramlm.recipes.methods import labels_only as labels_only
from cramlm.recipes.methods import no_stage_2 as no_stage_2
from cramlm.recipes.methods import plm as plm
from cramlm.recipes.methods import random_retrieval as random_retrieval
from cramlm.recipes.methods import tapt as tapt
from cramlm.recipes.methods import task_text_only as task_text_only
from cramlm.recipes.methods import tlm as tlm
from cramlm.recipes.methods import tlm_plain as tlm_plain
from cramlm.recipes.paper import PaperRecipe, paper_recipe
from cramlm.recipes.phases import finetune_phase as finetune_phase
from cramlm.recipes.phases import joint_phase as joint_phase
from cramlm.recipes.prompting import pet as pet
from cramlm.recipes.prompting import prompt as prompt
from cramlm.recipes.prompting import soft_prompt as soft_prompt
from cramlm.recipes.recipe import Recipe
from cramlm.recipes.recipe import on_checkpoint as on_checkpoint
from cramlm.recipes.selective import selective_masking as selective_masking
from cramlm.recipes.selective import selective_masking_random as selective_masking_random
from cramlm.recipes.sizes import DEFAULT_BUDGET as DEFAULT_BUDGET
from cramlm.recipes.sizes import PRESETS as PRESETS
from cramlm.recipes.sizes import encoder_for_budget as encoder_for_budget
from cramlm.recipes.sizes import with_preset as with_preset

AnyRecipe: TypeAlias = Recipe | PaperRecipe | LinearRecipe

tlm_small, tlm_medium, tlm_large = paper_recipe("small"), paper_recipe("medium"), paper_recipe("large")

_ALL: tuple[AnyRecipe, ...] = (
    *(tlm, tlm_plain, tlm_small, tlm_medium, tlm_large),
    *(random_retrieval, external_only, task_text_only, no_stage_2, labels_only),
    *(plm, dapt, tapt, dapt_tapt, knn_tapt),
    *(selective_masking, selective_masking_random),
    *(prompt, pet, soft_prompt),
    *(static, tfidf),
)
RECIPES: Mapping[str, AnyRecipe] = {recipe.name: recipe for recipe in _ALL}
"""By the name that `--recipe` takes."""


def find(name: str) -> tuple[AnyRecipe, dict[str, Any]]:
    """The recipe that a user names, and what stands behind colons: tlm-small:chemprot, or for its twin tlm-small:chemprot:0.001.

    Raises:
        UsageError: if there is none of this name, or it takes no such arguments.
    """
    plain, *given = name.split(":")
    if plain not in RECIPES:
        raise UsageError(f"--recipe {name!r} is not one of {', '.join(RECIPES)}")
    recipe = RECIPES[plain]
    if not given:
        return recipe, {}
    if not isinstance(recipe, PaperRecipe) or len(given) > 2:
        raise UsageError(f"--recipe {name!r}: only tlm-small, -medium and -large take :TASK and :SCALE, like tlm-small:chemprot:0.001")
    try:
        shrink = {"shrink": float(given[1])} if len(given) == 2 else {}
    except ValueError as error:
        raise UsageError(f"--recipe {name!r}: the scale {given[1]!r} is not a number, like 0.001") from error
    return recipe, {"like": given[0] or None, **shrink}
