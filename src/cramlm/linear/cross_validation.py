"""Cross-validation of linear models: folds of the training texts, and the predictions for a fold by a model fitted without it.

Settings are chosen on dev. On a small dev set the best of hundreds of settings is best by chance, so candidates are also scored on training
texts that are predicted out of fold (docs/log.md).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np

from cramlm.linear.files import Setting
from cramlm.linear.solvers import Solver
from cramlm.records import BoolArray, Example, FloatArray, IntArray

FOLDS: Final = 5
SMALL_DEV: Final = 200
"""With fewer dev texts, training texts are predicted out of fold; with 250, cross-validation chose no better models (docs/log.md)."""
DECIDING_TEXTS: Final = 500
"""Texts of dev and folds together; as many folds are predicted as are needed to reach this number."""
_FOLD_STREAM: Final = 0x666F  # separates these folds from other random choices with the same seed


def folds(texts: Sequence[str], strata: IntArray, seed: int) -> IntArray:
    """Return a random fold for every text; every fold has its share of every stratum.

    Texts with equal letters and digits (one sentence in which other entities are marked) are in the same fold, because one would reveal
    the label of the other.
    """
    numbers: dict[str, int] = {}
    groups = [numbers.setdefault("".join(filter(str.isalnum, text.casefold())), len(numbers)) for text in texts]
    stratum_of = np.zeros(len(numbers), dtype=np.int64)
    stratum_of[groups] = strata
    order = np.random.Generator(np.random.Philox(key=[seed, _FOLD_STREAM])).permutation(len(numbers))
    order = order[np.argsort(stratum_of[order], kind="stable")]
    fold = np.empty(len(numbers), dtype=np.int64)
    fold[order] = np.arange(len(numbers)) % FOLDS
    return fold[groups]


def held_out_folds(train: Sequence[Example], strata: IntArray, *, dev_texts: int) -> list[IntArray]:
    """Return the indices of the training texts of each fold that is scored together with dev; empty if dev is not small.

    The folds are the same with every seed of a run, so that runs of several seeds share their linear models.
    """
    if dev_texts >= SMALL_DEV or len(train) < FOLDS:
        return []
    fold = folds([example.divided_text for example in train], strata, seed=0)
    needed = min(FOLDS, -(-(DECIDING_TEXTS - dev_texts) * FOLDS // len(train)))
    each = [np.flatnonzero(fold == number) for number in range(needed)]
    return [rows for rows in each if 0 < len(rows) < len(train)]  # equal texts share a fold, which may be all of them


def fold_predictor(
    solver: Solver, rows: Any, targets: Any, inside: BoolArray, setting: Setting, weights: FloatArray | None = None
) -> Callable[[float], FloatArray]:
    """Return a function from C to the logits, (fold, outputs), of the rows `inside` a fold by a model that was fitted on the other rows.

    The prior odds of the others are replaced by those of all rows. Removing a fold makes the labels that are frequent in it rarer among the
    others. The intercepts follow these frequencies, which lowers the probability of each text's own label; with strong regularization this
    effect is larger than that of the words.

    rows: a matrix (n, features), dense or CSR. targets: of all rows. inside: (n,). setting: its C is not read. weights: of the rows, (n,);
    None = 1.
    """
    outside = None if weights is None else weights[~inside]
    fitter = solver.fitter(rows[~inside], targets[~inside], setting, outside)
    correction = np.zeros(solver.outputs, dtype=np.float32)
    if setting.class_weights == "uniform":
        whole, others = solver.prior_odds(targets, weights), solver.prior_odds(targets[~inside], outside)
        ratio = np.divide(whole, others, out=np.ones(len(whole)), where=(whole > 0) & (others > 0))
        correction = np.log(ratio).astype(np.float32)
    return lambda c: solver.logits(setting.scheme, fitter(c).scores(rows[inside])) + correction
