"""The tables of the README and of the page on quality equal the results in the repository."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest

from jsonl import read_json
from quality_tables import GROUPS, RESULTS, means, rungs, summary

README = Path(__file__).parents[2] / "README.md"
PAGE = README.parent / "docs/benchmarks/quality.md"


def row(arm: str, *values: float, labels: str = "500", minutes: float | None = 2.0) -> dict[str, Any]:
    mean = sum(values) / len(values)
    deviation = abs(values[0] - values[1]) / 2**0.5 if len(values) > 1 else None
    costs = {"cpu_minutes": minutes, "executed_flops": None if minutes is None else 1.84e13, "complete": True}
    score = {"test macro_f1": {"mean": mean, "deviation": deviation, "values": list(values)}}
    return {"arm": arm, "labels": labels, "seeds": [*range(1, len(values) + 1)], "is_baseline": minutes is None, "scores": score, **costs}


def results(labels: str = "500", **tasks: list[dict[str, Any]]) -> dict[str, Any]:
    """Return results of tasks with one number of labels and no pairs."""
    return {"tasks": {task: {labels: {"rows": rows, "pairs": []}} for task, rows in tasks.items()}}


def test_the_summary_has_means_and_the_number_of_tasks_on_which_tlm_is_better() -> None:
    few = functools.partial(row, labels="100")
    news = [few("tlm", 0.6), few("plm", 0.9), few("TF-IDF", 0.5, minutes=None), few("random", 0.6)]
    films = [few("tlm", 0.7), few("TF-IDF", 0.8, minutes=None), few("random", 0.5)]
    assert summary(results("100", news=news, films=films)).splitlines() == [
        "| mean of 2 tasks (tlm above on) | 100 labels |",
        "|---|---|",
        "| tlm | 65.0 |",
        "| random | 55.0 (1) |",
        "| TF-IDF | 65.0 (1) |",
    ]


@pytest.mark.skipif(not README.is_file(), reason="an installed package: the README is not beside it")
def test_the_tables_of_the_pages_equal_the_results() -> None:
    controls = read_json(RESULTS / "quality-2e13flops.json")
    models = read_json(RESULTS / "rungs-2e13flops.json")
    page = PAGE.read_text("utf-8")
    assert summary(controls) in page, "python benchmarks/quality_tables.py controls 2e13flops"
    assert rungs(models) in page, "python benchmarks/quality_tables.py rungs 2e13flops"
    for name in ("candidates", "trained", "unlabelled-trained"):
        table = rungs(read_json(RESULTS / f"rungs-{name}-2e13flops.json"))
        assert table in page, f"python benchmarks/quality_tables.py rungs {name}-2e13flops"
    present, linear = (read_json(RESULTS / f"rungs-{name}-2e13flops.json") for name in ("candidates", "linear"))
    assert means(models) in page, "python benchmarks/quality_tables.py means 2e13flops"
    assert means(linear) in page, "python benchmarks/quality_tables.py means linear-2e13flops"
    assert means(present) in README.read_text("utf-8"), "python benchmarks/quality_tables.py means candidates-2e13flops"


@pytest.mark.skipif(not README.is_file(), reason="an installed package: the README is not beside it")
def test_whole_commands_in_the_readme_are_those_of_the_results() -> None:
    readme = README.read_text("utf-8")
    select, fit = (read_json(RESULTS / f"{name}.json") for name in ("select", "fit"))
    ours, bm25s, lucene = (select["processes"][side]["cpu_seconds"] for side in ("cramlm", "bm25s", "Lucene"))
    assert f"best {select['top_k']} of {select['passages']:,} passages for all 4,169 texts, to disk, CPU seconds | {ours:.1f} |" in readme
    assert f"a script with bm25s {bm25s:.1f}, a program with Lucene {lucene:.1f} |" in readme
    assert f"{fit['cpu_seconds']:.0f} CPU seconds, {100 * fit['outside']:.0f} % are not training" in " ".join(readme.split())


ARMS = ["tfidf", "bayes", "static", "tlm-plain", "tlm", "tlm combined"]


def scored(labels: str, *runs: tuple[str, int, float]) -> dict[str, Any]:
    """Runs of a task as (arm, seed, macro-F1); micro-F1 is half of it."""
    tests = [{"test": {"macro_f1": score, "micro_f1": score / 2}} for _, _, score in runs]
    return {labels: {"cells": [{"arm": run[0], "seed": run[1], "scores": test} for run, test in zip(runs, tests, strict=True)]}}


def test_a_mean_over_a_group_of_tasks_needs_all_of_them() -> None:
    tasks = dict.fromkeys(GROUPS["confirmation"], scored("100", *((arm, 1, 0.5) for arm in ARMS)))
    lines = means({"tasks": tasks | {"sst2": scored("100", *((arm, 1, 0.9) for arm in ARMS))}}).splitlines()
    assert lines[0] == "| macro-F1 / micro-F1 | 4 confirmation tasks, 100 labels, 1 seed |"
    assert lines[2] == "| `tfidf` | 50.0 / 25.0 |"


def test_a_column_of_means_has_the_seeds_of_tlm_and_a_model_of_fewer_says_so() -> None:
    runs = [(arm, seed, 0.5 + seed / 10) for arm, seeds in (("tfidf", 1), ("static", 3), ("tlm", 2)) for seed in range(1, seeds + 1)]
    lines = means({"tasks": dict.fromkeys(GROUPS["confirmation"], scored("500", *runs))}).splitlines()
    assert lines[0] == "| macro-F1 / micro-F1 | 4 confirmation tasks, 500 labels, 2 seeds |"
    assert "| `tfidf` | 60.0 / 30.0 (1 seed) |" in lines
    assert "| `static` | 65.0 / 32.5 |" in lines
    assert not any("bayes" in line for line in lines), "measured nowhere"


def test_without_an_encoder_means_have_the_seeds_of_static_and_a_model_of_fewer_tasks_is_not_measured() -> None:
    runs = [(arm, seed, 0.5) for arm in ("tfidf", "static") for seed in (1, 2)]
    tasks = {**dict.fromkeys(GROUPS["confirmation"], scored("100", *runs)), "trec": scored("100", *runs, ("bayes", 1, 0.5))}
    lines = means({"tasks": tasks}).splitlines()
    assert lines[0] == "| macro-F1 / micro-F1 | 4 confirmation tasks, 100 labels, 2 seeds |"
    assert lines[2:] == ["| `tfidf` | 50.0 / 25.0 |", "| `bayes` | not measured |", "| `static` | 50.0 / 25.0 |"]


def test_the_table_of_models_has_means_over_seeds_and_omits_incomplete_tasks() -> None:
    news = [(arm, seed, 0.5 + 0.1 * rung + 0.02 * seed) for rung, arm in enumerate(ARMS) for seed in (1, 2)]
    films = [(arm, seed, score + 0.1) for arm, seed, score in news if (arm, seed) != ("tlm-plain", 2)]
    tasks = {"news": scored("100", *news), "films": scored("100", *films), "half": scored("100", *news[2:])}
    assert rungs({"tasks": tasks}).splitlines() == [
        "| 100 labels, 2 seeds | tfidf | bayes | static | tlm-plain | tlm | combined |",
        "|---|---|---|---|---|---|---|",
        "| news | 53.0 / 26.5 | 63.0 / 31.5 | 73.0 / 36.5 | 83.0 / 41.5 | 93.0 / 46.5 | 103.0 / 51.5 |",
        "| films | 63.0 / 31.5 | 73.0 / 36.5 | 83.0 / 41.5 | 92.0 / 46.0 (1 seed) | 103.0 / 51.5 | 113.0 / 56.5 |",
        "| mean of 2 | 58.0 / 29.0 | 68.0 / 34.0 | 78.0 / 39.0 | 87.5 / 43.8 | 98.0 / 49.0 | 108.0 / 54.0 |",
    ]
