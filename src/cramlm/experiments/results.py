"""From the folders of runs to rows: mean and spread of scores over seeds, what it took, who differs from whom.

A row is an arm with a number of labels. Every group of rows has one of the baseline (the variant of TF-IDF + logistic regression that is
best on dev), fitted once per seed and draw of labels, on the same rows as the arms.
"""

from __future__ import annotations

import itertools
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cramlm.evaluation.significance import compare_predictions, holm
from cramlm.experiments.grid import Cell
from cramlm.experiments.lanes import is_done
from cramlm.experiments.spending import Spent, read_spent

BASELINE = "TF-IDF + LR"
SPLITS = ("test", "test_leak_free", "dev")


@dataclass(frozen=True, slots=True)
class CellResult:
    """One run (or one baseline). scores: split -> macro_f1, micro_f1, accuracy. answers: to the test rows, with `true` beside them.

    flops: as the paper counts them and as executed, all phases. passages, tokens: of the raw text that was selected, tokens estimated.
    """

    arm: str
    labels: str
    seed: int
    scores: Mapping[str, Mapping[str, float]]
    spent: Spent | None
    flops: Mapping[str, float]
    parameters: int | None
    passages: int
    tokens: float
    true: tuple[str, ...] = ()
    answers: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values, without the answers."""
        values = asdict(self)
        del values["true"], values["answers"]
        return values


@dataclass(frozen=True, slots=True)
class Summary:
    """Mean and sample standard deviation (None with one seed) over seeds, and the values themselves."""

    mean: float
    deviation: float | None
    values: tuple[float, ...]

    @classmethod
    def of(cls, values: Sequence[float]) -> Summary:
        """Raises StatisticsError for no values."""
        return cls(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None, tuple(values))


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the table. scores: "test macro_f1" and so on -> summary. minutes: a run's, with what it has from others; cpu_minutes:
    its own. Means over seeds. kwh: None where it was not measured. whole: False if a killed start's time is missing.
    """

    arm: str
    labels: str
    seeds: tuple[int, ...]
    is_baseline: bool
    scores: Mapping[str, Summary]
    minutes: float | None
    cpu_minutes: float | None
    kwh: float | None
    whole: bool
    paper_flops: float | None
    executed_flops: float | None
    parameters: int | None
    passages: float
    tokens: float


@dataclass(frozen=True, slots=True)
class Pair:
    """Test macro-F1 of `arm` minus that of `other`, over the seeds that both have. p_holm: corrected for all arms beside this `other`."""

    arm: str
    other: str
    labels: str
    seeds: int
    difference: float
    low: float
    high: float
    p: float
    p_holm: float


def read_results(cells: Sequence[Cell]) -> list[CellResult]:
    """Every finished cell, and after the first arm of each group its baseline."""
    found: list[CellResult] = []
    with_baseline = set()
    for cell in cells:
        if not is_done(cell):
            continue
        scores = json.loads((cell.folder / "evaluation" / "scores.json").read_bytes())
        found.append(_result(cell, scores))
        if (cell.labels, cell.seed) not in with_baseline and (baseline := _baseline(cell, scores)) is not None:
            with_baseline.add((cell.labels, cell.seed))
            found.append(baseline)
    return found


def rows_of(results: Sequence[CellResult]) -> list[Row]:
    """In the order of numbers of labels and arms, the baseline last in its group."""
    groups: dict[str, dict[str, list[CellResult]]] = {}
    for result in results:
        groups.setdefault(result.labels, {}).setdefault(result.arm, []).append(result)
    rows = []
    for by_arm in groups.values():
        rows += [_row(by_arm[arm]) for arm in sorted(by_arm, key=lambda arm: arm == BASELINE)]
    return rows


def pairs_of(results: Sequence[CellResult]) -> list[Pair]:
    """Every two arms of a group whose runs have answers to the same test rows; the later arm beside the earlier."""
    pairs = []
    for labels in dict.fromkeys(result.labels for result in results):
        arms: dict[str, dict[int, CellResult]] = {}
        for result in results:
            if result.labels == labels and result.answers:
                arms.setdefault(result.arm, {})[result.seed] = result
        found = {}
        for other, arm in itertools.combinations(arms, 2):
            seeds = sorted(set(arms[arm]) & set(arms[other]))
            true = {each.true for name in (arm, other) for each in (arms[name][seed] for seed in seeds)}
            if seeds and len(true) == 1:
                answers = [[arms[name][seed].answers for seed in seeds] for name in (arm, other)]
                found[arm, other] = len(seeds), compare_predictions(next(iter(true)), answers[0], answers[1])
        for other in arms:
            family = {arm: difference for (arm, beside), (_, difference) in found.items() if beside == other}
            corrected = holm({arm: difference.p for arm, difference in family.items()})
            for arm, each in family.items():
                count = found[arm, other][0]
                pairs.append(Pair(arm, other, labels, count, each.value, each.low, each.high, each.p, corrected[arm]))
    return pairs


def totals_of(results: Sequence[CellResult]) -> dict[str, float]:
    """What all runs took together: the price of having searched among them."""
    runs = [result for result in results if result.arm != BASELINE]
    spent = [result.spent for result in runs if result.spent is not None]
    return {
        "runs": len(runs),
        "minutes": sum(each.seconds for each in spent) / 60,
        "cpu_minutes": sum(each.cpu_seconds for each in spent) / 60,
        "paper_flops": sum(result.flops["paper"] for result in runs),
        "executed_flops": sum(result.flops["executed"] for result in runs),
        **({"kwh": sum(each.kwh or 0.0 for each in spent)} if any(each.kwh is not None for each in spent) else {}),
    }


def _result(cell: Cell, scores: Mapping[str, Any]) -> CellResult:
    selection, provenance = cell.folder / "selection" / "report.json", cell.folder / "export" / "provenance.json"
    passages, tokens = 0, 0.0
    if cell.config.retriever is not None and selection.is_file():
        report = json.loads(selection.read_bytes())
        passages, tokens = report["documents"]["selected"], float(report["tokens"]["estimated"])
    parameters = json.loads(provenance.read_bytes()).get("parameters") if provenance.is_file() else None
    lines = _predictions(cell.folder / "evaluation")
    return CellResult(
        cell.arm.name,
        cell.labels,
        cell.seed,
        _scores(scores["models"][cell.config.name]),
        read_spent(cell.folder),
        scores["flops"],
        parameters,
        passages,
        tokens,
        tuple(str(line["label"]) for line in lines),
        tuple(str(line["predicted"]) for line in lines),
    )


def _baseline(cell: Cell, scores: Mapping[str, Any]) -> CellResult | None:
    file = cell.folder / "baseline" / "baselines.json"
    if not file.is_file():
        return None
    told = json.loads(file.read_bytes())
    chosen = scores["models"].get(told["chosen"])
    if chosen is None:
        return None
    spent = Spent(seconds=float(told["seconds"]))
    lines = _predictions(cell.folder / "baseline")
    return CellResult(
        BASELINE,
        cell.labels,
        cell.seed,
        _scores(chosen),
        spent,
        {},
        None,
        0,
        0.0,
        tuple(str(line["label"]) for line in lines),
        tuple(str(line["predicted"]) for line in lines),
    )


def _scores(entry: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    names = ("macro_f1", "micro_f1", "accuracy")
    return {split: {name: float(entry[split][name]) for name in names} for split in SPLITS if split in entry}


def _predictions(folder: Path) -> list[Mapping[str, Any]]:
    path = folder / "predictions-test.jsonl"
    if not path.is_file():
        return []
    with path.open(encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def _row(results: Sequence[CellResult]) -> Row:
    first = results[0]
    is_baseline = first.arm == BASELINE
    scores = {
        f"{split} {name}": Summary.of([result.scores[split][name] for result in results])
        for split in SPLITS
        if all(split in result.scores for result in results)
        for name in first.scores[split]
    }
    spent = [result.spent for result in results if result.spent is not None]
    energy = [each.kwh for each in spent if each.kwh is not None]
    return Row(
        first.arm,
        first.labels,
        tuple(result.seed for result in results),
        is_baseline,
        scores,
        _mean([(each.seconds + each.borrowed_seconds) / 60 for each in spent]),
        None if is_baseline else _mean([each.cpu_seconds / 60 for each in spent]),
        _mean(energy),
        all(each.whole for each in spent),
        None if is_baseline else _mean([result.flops["paper"] for result in results]),
        None if is_baseline else _mean([result.flops["executed"] for result in results]),
        first.parameters,
        statistics.fmean(result.passages for result in results),
        statistics.fmean(result.tokens for result in results),
    )


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None
