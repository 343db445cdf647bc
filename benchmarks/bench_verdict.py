"""Rate of wrong recommendations of the verdict, over finished runs of `bench_quality.py`.

    python benchmarks/bench_verdict.py runs/quality/2e13flops

A recommendation is wrong if a cheaper model of the same run has a higher score on test (macro-F1). Two rules are
compared on the same runs: the highest score on dev, and the cross-fitted comparison of the verdict. Prints a table and, as the
last line, one JSON object.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

METRIC = "macro_f1"
RUNGS = ("combined", "encoder", "static", "bayes")


def main() -> None:
    """Read all finished runs below the folders and print the rates."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path, help="folders of runs")
    runs = [scores for folder in parser.parse_args().folders for scores in finished(folder)]
    rows = {
        "highest dev score": [by_dev(scores) for scores in runs],
        "cross-fitted": [scores["comparison"]["recommended"] for scores in runs],
    }
    print(f"| rule | runs | {' | wrongly | '.join(f'{rung} recommended' for rung in RUNGS)} | wrongly | wrong in all |")
    print("|---" * (3 + 2 * len(RUNGS)) + "|")
    result = {}
    for rule, names in rows.items():
        counts = count(runs, names)
        result[rule] = counts
        wrong = sum(counts[f"{rung}_wrong"] for rung in RUNGS)
        cells = [
            *(str(counts[f"{rung}{suffix}"]) for rung in RUNGS for suffix in ("", "_wrong")),
            f"{wrong} ({wrong / max(len(runs), 1):.0%})",
        ]
        print(f"| {rule} | {len(runs)} | {' | '.join(cells)} |")
    print(json.dumps({"benchmark": "verdict", "runs": len(runs), "rules": result}))


def finished(folder: Path) -> Iterator[Mapping[str, Any]]:
    """Yield the scores of every finished run below a folder that has test scores and cheaper models."""
    for path in sorted(folder.glob("**/evaluation/scores.json")):
        scores = json.loads(path.read_bytes())
        if len(scores["models"]) > 1 and all("test" in entry for entry in scores["models"].values()):
            yield scores


def cheapest_first(scores: Mapping[str, Any]) -> list[str]:
    """Return the names of a run's models in the order in which the verdict compares them."""
    return list(scores["comparison"]["cross_fitted"])


def by_dev(scores: Mapping[str, Any]) -> str:
    """Return the model with the highest dev score, the cheapest of equal ones."""
    return max(cheapest_first(scores), key=lambda name: float(scores["models"][name]["dev"][METRIC]))


def count(runs: list[Mapping[str, Any]], recommended: list[str]) -> dict[str, int]:
    """Count how often each kind of model is recommended, and how often a cheaper model is better on test."""
    counts = {f"{rung}{suffix}": 0 for rung in RUNGS for suffix in ("", "_wrong")}
    for scores, name in zip(runs, recommended, strict=True):
        if name == "tfidf":
            continue
        rung = name if name in RUNGS else "encoder"
        names = cheapest_first(scores)
        test = {each: scores["models"][each]["test"][METRIC] for each in names}
        counts[rung] += 1
        counts[f"{rung}_wrong"] += any(test[each] > test[name] for each in names[: names.index(name)])
    return counts


if __name__ == "__main__":
    main()
