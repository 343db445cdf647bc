"""The plot of scores shows means over whole groups of tasks only."""

from __future__ import annotations

from typing import Any

import pytest

import quality_plot
from quality_tables import GROUPS


def scored(arm: str, score: float) -> dict[str, Any]:
    return {"arm": arm, "seed": 1, "scores": {"test": {"macro_f1": score, "micro_f1": score}}}


def test_a_point_of_a_curve_is_a_mean_over_all_tasks_of_its_group() -> None:
    few, every = [scored("tlm", 0.5), scored("static", 0.6)], [scored("tlm", 0.7)]
    tasks: dict[str, Any] = {task: {"100": {"cells": few}, "all": {"cells": every}} for task in GROUPS["confirmation"]}
    tasks["trec"]["100"] = {"cells": [scored("tlm", 0.9), scored("static", 0.6)]}
    del tasks["cr"]["all"]
    assert quality_plot.curves({"tasks": tasks}, "confirmation") == {
        "static": {"100": pytest.approx(60.0)},
        "tlm": {"100": pytest.approx(60.0)},
    }
