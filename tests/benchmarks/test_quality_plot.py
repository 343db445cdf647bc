"""The plot of scores shows measured and comparable points only."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import quality_plot


def row(arm: str, labels: str, mean: float, minutes: float | None) -> dict[str, Any]:
    score = {"test macro_f1": {"mean": mean, "deviation": None, "values": [mean]}}
    return {"arm": arm, "labels": labels, "scores": score, "cpu_minutes": minutes, "is_baseline": minutes is None}


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """Two budgets of chemprot in the benchmark's files, a third among the twins, and a task that has one point."""
    few = [row("tlm", "100", 0.3, 4.0), row("plm", "100", 0.9, 4.0), row("static", "100", 0.25, None), row("tfidf", "100", 0.2, None)]
    every = [row("tlm", "all", 0.5, 4.1), row("tfidf", "all", 0.4, None)]
    measured = {
        "2e13flops": {"chemprot": {"100": {"rows": few}, "all": {"rows": every}}, "sst2": {"100": {"rows": [row("tlm", "100", 0.6, 4.0)]}}},
        "3e13flops": {"chemprot": {"all": {"rows": [row("tlm", "all", 0.55, 6.0)]}}},
    }
    for budget, tasks in measured.items():
        (tmp_path / f"quality-{budget}.json").write_text(json.dumps({"budget": budget, "tasks": tasks}), "utf-8")
    twins = [row("tlm, budget=5e12flops", "all", 0.35, 1.5), row("tlm, 1 file", "all", 0.1, 2.0), row("tfidf", "all", 0.4, None)]
    (tmp_path / "reproduce").mkdir()
    (tmp_path / "reproduce" / "chemprot-twin.json").write_text(json.dumps(twins), "utf-8")
    return tmp_path


def test_scores_over_labels_have_one_budget_and_the_baselines(results: Path) -> None:
    ((task, curves),) = quality_plot.over_labels(quality_plot.points(results), "2e13flops").items()
    assert task == "chemprot"
    assert set(curves) == {"tlm", "tfidf"}, "static was measured with one number of labels"
    assert [(point.labels, point.mean) for point in curves["tlm"]] == [("100", 30.0), ("all", 50.0)]
    assert [point.mean for point in curves["tfidf"]] == [20.0, 40.0]


def test_scores_over_minutes_have_all_budgets_of_the_default_settings(results: Path) -> None:
    ((task, curves),) = quality_plot.over_minutes(quality_plot.points(results)).items()
    assert task == "chemprot"
    assert [(point.minutes, point.mean) for point in curves["tlm"]] == [(1.5, 35.0), (4.1, 50.0), (6.0, pytest.approx(55.0))]
    assert [point.mean for point in curves["tfidf"]] == [40.0]
