"""What a run took: wall-clock and CPU seconds, and energy where codecarbon is installed; added up over every start of the run.

From the folders of runs to rows: mean and spread of scores over seeds, what it took, who differs from whom.

A row is an arm with a number of labels. Every group of rows also has one for each linear model, `tfidf` and `static`, from the run of one
arm per seed and number of labels: fitted on the same rows as the arms.

The table of an experiment as Markdown: for a terminal, a README and a paper's draft alike; and its plot as SVG.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import json
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path, PurePath
from typing import Any, Final

from cramlm.config.retriever import Bm25Config
from cramlm.config.run import RunConfig
from cramlm.evaluation.significance import compare_predictions, holm
from cramlm.experiments.grid import ALL, Cell
from cramlm.reporting.charts import Seeds, seeds_chart
from cramlm.storage.artifacts import MANIFEST, hash_json, publish_file

FILE = "spent.json"


@dataclass(slots=True)
class Spent:
    """borrowed_seconds: of stages that another run made and this one uses. kwh: None where energy is not measured. whole: False if a start
    was killed, so that its part is missing.
    """

    seconds: float = 0.0
    borrowed_seconds: float = 0.0
    cpu_seconds: float = 0.0
    kwh: float | None = None
    whole: bool = True
    starts: int = 0
    running: bool = False


def read_spent(run: Path, config: RunConfig) -> Spent | None:
    """What the run in this folder took under these settings; None if no experiment ran it so."""
    entry = _read(run).get(_settings_of(config))
    return None if entry is None else Spent(**entry)


@contextlib.contextmanager
def spending(run: Path, config: RunConfig) -> Iterator[Spent]:
    """Count this start, however it ends; whoever uses it adds `borrowed_seconds`. Starts with other settings are counted apart; where
    they left stages, the count is not whole.
    """
    spent = read_spent(run, config) or Spent(whole=not any(run.glob(f"*/{MANIFEST}")))
    spent.whole, spent.running, spent.starts = spent.whole and not spent.running, True, spent.starts + 1
    _write(run, config, spent)
    began, cpu = time.monotonic(), time.process_time()
    meter = _start_meter()
    try:
        yield spent
    finally:
        spent.seconds += time.monotonic() - began
        spent.cpu_seconds += time.process_time() - cpu
        spent.running = False
        if meter is not None:
            meter.stop()
            if (told := getattr(meter, "final_emissions_data", None)) is not None:  # it logs what goes wrong in it, and goes on
                spent.kwh = (spent.kwh or 0.0) + float(told.energy_consumed)
        _write(run, config, spent)


def _read(run: Path) -> dict[str, dict[str, Any]]:
    """By settings; of an earlier version, which did not tell them apart, nothing."""
    path = run / FILE
    entries: dict[str, Any] = json.loads(path.read_bytes()) if path.is_file() else {}
    return {settings: entry for settings, entry in entries.items() if isinstance(entry, dict)}


def _write(run: Path, config: RunConfig, spent: Spent) -> None:
    publish_file(run / FILE, (json.dumps({**_read(run), _settings_of(config): asdict(spent)}) + "\n").encode())


def _settings_of(config: RunConfig) -> str:
    """A hash of all settings, with files by their names alone, so that a moved experiment keeps its costs."""
    data = config.model_dump(mode="json", exclude={"task": {"train", "dev", "test"}, "corpus": {"files"}, "init": True})
    files = [config.task.train, config.task.dev, config.task.test, config.init, *(config.corpus.files if config.corpus else ())]
    return hash_json([data, [file and PurePath(file).name for file in files]])[:16]


def _start_meter() -> Any:
    """codecarbon's tracker of this machine, which asks no network; the country only matters for emissions, which are not told."""
    if importlib.util.find_spec("codecarbon") is None:
        return None
    from codecarbon import OfflineEmissionsTracker

    meter = OfflineEmissionsTracker(country_iso_code="USA", save_to_file=False, log_level="critical", allow_multiple_runs=True)
    meter.start()
    return meter


LINEAR_MODELS: Final = ("static", "tfidf")
"""Names of the linear models that a run's scores may hold beside its own model, in the order of a table's rows."""
SPLITS: Final = ("test", "test_leak_free", "dev")


@dataclass(frozen=True, slots=True)
class CellResult:
    """One run, or a linear model of one. scores: split -> macro_f1, micro_f1, accuracy. answers: to the test rows, with `true` beside them.

    flops: as the paper counts them and as executed, all phases; of a linear model none. passages, tokens: of the raw text that was
    selected, tokens estimated.
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

    @property
    def is_baseline(self) -> bool:
        """Return True for a linear model that a run fitted beside its own."""
        return not self.flops

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
    """Of cells whose runs are finished and up to date: each, and after it the linear models that it is the first of its group to have,
    except those that are arms.
    """
    found: list[CellResult] = []
    arms = {cell.arm.name for cell in cells}
    has_bm25 = any(_retrieves_by_bm25(cell) for cell in cells)
    seen = set()
    for cell in cells:
        scores = json.loads((cell.folder / "evaluation" / "scores.json").read_bytes())
        found.append(_result(cell, scores))
        for name in LINEAR_MODELS:
            place = (cell.labels, cell.seed, name)
            fits = name in scores["models"] and name not in arms and place not in seen
            if fits and (name != "static" or not has_bm25 or _retrieves_by_bm25(cell)):
                seen.add(place)
                found.append(_linear_result(cell, scores, name))
    return found


def _retrieves_by_bm25(cell: Cell) -> bool:
    return isinstance(cell.config.retriever, Bm25Config)


def rows_of(results: Sequence[CellResult]) -> list[Row]:
    """In the order of numbers of labels and arms, the linear models last in their group, the cheapest at the end."""
    groups: dict[str, dict[str, list[CellResult]]] = {}
    for result in results:
        groups.setdefault(result.labels, {}).setdefault(result.arm, []).append(result)
    rows = []
    for by_arm in groups.values():
        rows += [_row(by_arm[arm]) for arm in sorted(by_arm, key=lambda arm: _rank(by_arm[arm][0]))]
    return rows


def _rank(result: CellResult) -> int:
    return 1 + LINEAR_MODELS.index(result.arm) if result.is_baseline and result.arm in LINEAR_MODELS else int(result.is_baseline)


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
    runs = [result for result in results if not result.is_baseline]
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
    true, answers = _predictions(cell.folder / "evaluation" / "predictions-test.jsonl")
    own = _scores(scores["models"][cell.config.name])
    return CellResult(
        cell.arm.name,
        cell.labels,
        cell.seed,
        own,
        read_spent(cell.folder, cell.config),
        scores["flops"],
        parameters,
        passages,
        tokens,
        true,
        answers,
    )


def _linear_result(cell: Cell, scores: Mapping[str, Any], name: str) -> CellResult:
    """`name`: of `LINEAR_MODELS`, one that the cell's scores hold."""
    entry = scores["models"][name]
    spent = Spent(seconds=float(entry["fit"]["seconds"]))
    true, answers = _predictions(cell.folder / "evaluation" / f"predictions-test-{name}.jsonl")
    return CellResult(name, cell.labels, cell.seed, _scores(entry), spent, {}, None, 0, 0.0, true, answers)


def _scores(entry: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    names = ("macro_f1", "micro_f1", "accuracy")
    return {split: {name: float(entry[split][name]) for name in names} for split in SPLITS if split in entry}


def _predictions(path: Path) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """True and predicted labels of the test rows; none without a test file."""
    if not path.is_file():
        return (), ()
    with path.open(encoding="utf-8") as file:
        lines = [json.loads(line) for line in file]
    return tuple(str(line["label"]) for line in lines), tuple(str(line["predicted"]) for line in lines)


def _row(results: Sequence[CellResult]) -> Row:
    first = results[0]
    is_baseline = first.is_baseline
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


NOT_RUN = "not run"


def markdown(rows: Sequence[Row], pairs: Sequence[Pair], totals: Mapping[str, float], failed: Mapping[str, str]) -> str:
    """Scores in percent, mean ± sample standard deviation over seeds; below, what the columns mean, the price of all runs, what failed."""
    columns = _columns(rows)
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    first = {row.labels: row.arm for row in reversed(rows) if not row.is_baseline}
    beside = {(pair.labels, pair.arm): pair for pair in pairs if pair.other == first.get(pair.labels)}
    for row in rows:
        cells = _cells(row, beside.get((row.labels, row.arm)), columns)
        lines.append(f"| {' | '.join(cells[column] for column in columns)} |")
    notes = [_legend(columns, next(iter(first.values()), ""), linear=any(row.is_baseline for row in rows))]
    if totals.get("runs"):
        energy = f", {totals['kwh']:.3f} kWh" if "kwh" in totals else ""
        notes.append(
            f"All {totals['runs']:.0f} runs together, which is what choosing among them costs: {totals['minutes']:.1f} minutes, "
            f"{totals['cpu_minutes']:.1f} CPU minutes{energy}, {totals['paper_flops']:.2e} FLOPs as the paper counts them, "
            f"{totals['executed_flops']:.2e} executed."
        )
    notes += [f"Failed: {name}: {reason}" for name, reason in failed.items()]
    return "\n".join([*lines, "", *notes]) + "\n"


def draw(rows: Sequence[Row], *, title: str) -> str:
    """SVG of macro-F1 on test, or on dev without test scores; "" without rows. Linear models are dashed lines through their group."""
    metric = "test macro_f1" if any("test macro_f1" in row.scores for row in rows) else "dev macro_f1"
    shown = [row for row in rows if metric in row.scores]
    if not shown:
        return ""
    groups = [(labels, list(group)) for labels, group in itertools.groupby(shown, key=lambda row: row.labels)]
    named = len(groups) > 1 or groups[0][0] != ALL
    description = "; ".join(f"{row.arm} ({row.labels} labels) {score_text(row.scores[metric])}" for row in shown)
    return seeds_chart(
        title,
        description,
        [(_group_name(labels) if named else "", [_seeds(row, row.scores[metric]) for row in group]) for labels, group in groups],
        x_name=f"macro-F1 on {metric.partition(' ')[0]}, percent",
    )


def _group_name(labels: str) -> str:
    return "all labels" if labels == ALL else f"{labels} labels"


def _seeds(row: Row, summary: Summary) -> Seeds:
    return Seeds(
        row.arm,
        [(100 * value, f"seed {seed}: {100 * value:.1f}") for value, seed in zip(summary.values, row.seeds, strict=True)],
        mean=100 * summary.mean,
        deviation=None if summary.deviation is None else 100 * summary.deviation,
        figure=score_text(summary),
        reference=row.is_baseline,
    )


def score_text(summary: Summary | None) -> str:
    """In percent, with the spread where there are several seeds."""
    if summary is None:
        return ""
    spread = "" if summary.deviation is None else f" ± {100 * summary.deviation:.1f}"
    return f"{100 * summary.mean:.1f}{spread}"


def _columns(rows: Sequence[Row]) -> list[str]:
    scored = {name for row in rows for name in row.scores}
    columns = ["arm"]
    if any(row.labels != ALL for row in rows):
        columns.append("labels")
    columns.append("seeds")
    if "test macro_f1" in scored:
        columns += ["test macro-F1", "test micro-F1"]
        columns += ["macro-F1, rows not in train"] if "test_leak_free macro_f1" in scored else []
        columns += ["beside the first (95 %), p"] if sum(not row.is_baseline for row in rows) > 1 else []
    columns += ["dev macro-F1", "minutes", "CPU minutes", "FLOPs (paper)", "FLOPs executed", "raw text", "parameters"]
    return columns + (["kWh"] if any(row.kwh is not None for row in rows) else [])


def _cells(row: Row, pair: Pair | None, columns: Sequence[str]) -> dict[str, str]:
    scores = row.scores
    at_least = "" if row.whole else "≥ "
    values = {
        "arm": row.arm,
        "labels": row.labels,
        "seeds": str(len(row.seeds)),
        "test macro-F1": score_text(scores.get("test macro_f1")),
        "test micro-F1": score_text(scores.get("test micro_f1")),
        "macro-F1, rows not in train": score_text(scores.get("test_leak_free macro_f1")),
        "beside the first (95 %), p": "" if pair is None else pair_text(pair),
        "dev macro-F1": score_text(scores.get("dev macro_f1")),
        "minutes": "" if row.minutes is None else f"{at_least}{row.minutes:.1f}",
        "CPU minutes": "" if row.cpu_minutes is None else f"{at_least}{row.cpu_minutes:.1f}",
        "FLOPs (paper)": "" if row.paper_flops is None else f"{row.paper_flops:.1e}",
        "FLOPs executed": "" if row.executed_flops is None else f"{row.executed_flops:.1e}",
        "raw text": f"{row.passages:,.0f} passages, {row.tokens / 1e6:.1f}M tokens" if row.passages else "",
        "parameters": "" if row.parameters is None else f"{row.parameters / 1e6:.1f}M",
        "kWh": "" if row.kwh is None else f"{row.kwh:.4f}",
    }
    return {column: values[column] for column in columns}


def pair_text(pair: Pair) -> str:
    """Difference, interval and p corrected by Holm, in percentage points."""
    p = "< 0.001" if pair.p_holm < 0.001 else f"{pair.p_holm:.3f}"
    return f"{100 * pair.difference:+.1f} ({100 * pair.low:+.1f} to {100 * pair.high:+.1f}), p {p}"


def _legend(columns: Sequence[str], first: str, *, linear: bool) -> str:
    words = ["Scores in percent, mean ± standard deviation over seeds."]
    if linear:
        words.append(
            "tfidf and static without FLOPs are linear models that were fitted beside an arm, on TF-IDF alone and on TF-IDF with averaged "
            "token vectors from the retrieved text; dev chooses their settings; their minutes are those of the fit alone."
        )
    if "beside the first (95 %), p" in columns:
        words.append(
            f"Beside the first: macro-F1 on test less that of {first}, with a paired bootstrap interval over rows and seeds; p by "
            "approximate randomisation, corrected by Holm for the number of arms."
        )
    words.append(
        "Minutes are a run's, with what it shares with others counted in full; CPU minutes are its own. FLOPs: all phases of a run, as the "
        "paper counts them (6 x tokens x parameters) and the matrix products that ran. Raw text: tokens are estimated."
    )
    return " ".join(words)
