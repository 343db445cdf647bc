"""What bench_quality.py knows of one task and number of labels, over several calls: other seeds and other arms of a question add up.

A run is kept with its answers to the test rows, a character for each, so that arms of different calls are compared row by row.
"""

from __future__ import annotations

import string
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final

from cramlm.experiments.compare import Experiment
from cramlm.experiments.results import CellResult, pairs_of, rows_of, totals_of
from cramlm.experiments.spending import Spent

CHARACTERS: Final = string.digits + string.ascii_letters
SAME: Final = ("labels", "budget", "preset", "settings")


def added(known: Mapping[str, Any] | None, experiment: Experiment) -> dict[str, Any]:
    """As plain JSON, `experiment` and the runs of `known` that it does not have; without these where budget or settings were others.

    A pair of arms without answers on both sides (they were not always kept) stays as it was found.

    Raises:
        ValueError: if the test rows were others, or have more labels than there are characters.
    """
    question, results, pairs = experiment.question.as_dict(), list(experiment.results), list(experiment.pairs)
    found = {(pair.arm, pair.other): asdict(pair) for pair in pairs}
    if known is not None and all(known["question"][name] == question[name] for name in SAME):
        have = {(result.arm, result.seed) for result in results}
        results += [result for result in _read(known, results) if (result.arm, result.seed) not in have]
        arms = [*dict.fromkeys([*(row["arm"] for row in known["rows"]), *(result.arm for result in results)])]
        results.sort(key=lambda result: (arms.index(result.arm), result.seed))
        pairs = pairs_of(results)
        found = {(pair["arm"], pair["other"]): pair for pair in known["pairs"]} | {(pair.arm, pair.other): asdict(pair) for pair in pairs}
        named = {arm["name"]: arm for arm in [*known["question"]["arms"], *question["arms"]]}
        question |= {"arms": [*named.values()], "seeds": sorted({*known["question"]["seeds"], *question["seeds"]})}
    names = sorted({name for result in results for name in (*result.true, *result.answers)})
    if len(names) > len(CHARACTERS):
        raise ValueError(f"{len(names)} labels; answers are kept for {len(CHARACTERS)} at the most")
    return {
        "question": question,
        "rows": [asdict(row) for row in rows_of(results)],
        "pairs": [*found.values()],
        "totals": totals_of(results),
        "failed": dict(experiment.failed),
        "names": names,
        "cells": [result.as_dict() | {"answers": _text(result.answers, names)} for result in results],
    }


def _text(answers: Sequence[str], names: Sequence[str]) -> str:
    character = dict(zip(names, CHARACTERS, strict=False))
    return "".join(character[answer] for answer in answers)


def _read(known: Mapping[str, Any], results: Sequence[CellResult]) -> Iterator[CellResult]:
    """The runs of an earlier call; what is true is the same for all, and is not kept."""
    true = next((result.true for result in results if result.true), ())
    for cell in known["cells"]:
        told = cell.get("answers", "")
        if told and true and len(told) != len(true):
            raise ValueError(f"{cell['arm']}, seed {cell['seed']}: {len(told)} test rows were answered; there are {len(true)} now")
        answers = tuple(known["names"][CHARACTERS.index(character)] for character in told)
        spent = None if cell["spent"] is None else Spent(**cell["spent"])
        yield CellResult(**cell | {"spent": spent, "answers": answers, "true": true if answers else ()})
