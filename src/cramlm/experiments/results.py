"""Results of an experiment: read from the folders of its runs, averaged over seeds, compared in pairs, shown as Markdown and as a plot.

A row of the table is an arm with a number of training rows. Each group of rows also has one for each linear model, `tfidf`, `bayes` and
`static`, which a run of the group fitted on the same data. The resources that a run used (`Usage`) are recorded while it runs.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path, PurePath
from typing import Any, Final

from cramlm.config.retriever import Bm25Config
from cramlm.config.run import RunConfig
from cramlm.data.labels import format_labels, format_number
from cramlm.errors import ArtifactError, counted
from cramlm.evaluation.comparison import compare_predictions, holm
from cramlm.evaluation.kinds import KINDS, METRIC_NAMES, format_metric, is_percent, main_metric
from cramlm.experiments.grid import ALL, Cell
from cramlm.pipeline.run_folder import USAGE, read_record
from cramlm.records import COMBINED, LINEAR_NAMES, TaskKind
from cramlm.reporting.charts import Seeds, seeds_chart
from cramlm.storage.artifacts import MANIFEST, hash_json, publish_file

LINEAR_MODELS: Final = tuple(reversed(LINEAR_NAMES))
"""Names of the linear models that the scores of a run may include, in the order of a table's rows."""
_OF_COMBINED: Final = f" {COMBINED}"  # after the name of an arm: the combination of its encoder with the linear models
SPLITS: Final = ("test", "test_leak_free", "dev")


@dataclass(slots=True)
class Usage:
    """Resources of a run, summed over its starts since it was last trained from the beginning.

    borrowed_seconds: time of stages that another run made. kwh: energy, measured if codecarbon is installed. complete: False if a start was
    killed, so that its time is missing.
    """

    seconds: float = 0.0
    borrowed_seconds: float = 0.0
    cpu_seconds: float = 0.0
    kwh: float | None = None
    complete: bool = True
    starts: int = 0
    running: bool = False

    def add(self, earlier: Usage) -> None:
        """Add earlier starts of the same run."""
        self.seconds += earlier.seconds
        self.borrowed_seconds += earlier.borrowed_seconds
        self.cpu_seconds += earlier.cpu_seconds
        self.kwh = None if self.kwh is None and earlier.kwh is None else (self.kwh or 0.0) + (earlier.kwh or 0.0)
        self.complete, self.starts = earlier.complete and not earlier.running, self.starts + earlier.starts


def read_usage(run: Path, config: RunConfig) -> Usage | None:
    """Return the resources that the run in this folder used with these settings; None if no experiment ran it."""
    entry = _read_usages(run).get(_settings_of(config))
    return None if entry is None else Usage(**entry)


@contextlib.contextmanager
def measure_usage(run: Path, config: RunConfig) -> Iterator[Usage]:
    """Measure a start of a run, also if it fails; the caller adds `borrowed_seconds`.

    Starts with other settings are measured separately, and so are those before a finished run was trained again because its texts or the
    code changed; if they left stages, the usage is not complete.
    """
    earlier, phases = read_usage(run, config), _finished_phases(run)
    usage = Usage(complete=not any(run.glob(f"*/{MANIFEST}")), running=True, starts=1)
    if earlier is not None and phases is None:
        usage.add(earlier)
    _write_usage(run, config, usage)
    began, cpu = time.monotonic(), time.process_time()
    meter = _start_meter()
    try:
        yield usage
    finally:
        usage.seconds += time.monotonic() - began
        usage.cpu_seconds += time.process_time() - cpu
        usage.running = False
        if meter is not None:
            meter.stop()
            if (measured := getattr(meter, "final_emissions_data", None)) is not None:  # None if codecarbon failed; it logs the reason
                usage.kwh = (usage.kwh or 0.0) + float(measured.energy_consumed)
        if earlier is not None and phases and _finished_phases(run) == phases:  # only later stages were made again
            usage.add(earlier)
        _write_usage(run, config, usage)


def _finished_phases(run: Path) -> Mapping[str, str] | None:
    """Return the keys of the phases of a run that is finished, None of one that is not."""
    with contextlib.suppress(ArtifactError):  # a damaged record is written again
        if (record := read_record(run)) is not None and record.finished:
            return {name: key for name, key in record.stages.items() if name.startswith("phase-")}
    return None


def _read_usages(run: Path) -> dict[str, dict[str, Any]]:
    """Return usages by hash of the settings."""
    path = run / USAGE
    return json.loads(path.read_bytes()) if path.is_file() else {}


def _write_usage(run: Path, config: RunConfig, usage: Usage) -> None:
    publish_file(run / USAGE, (json.dumps({**_read_usages(run), _settings_of(config): asdict(usage)}) + "\n").encode())


def _settings_of(config: RunConfig) -> str:
    """Return a hash of all settings, with files by name only, so that a moved experiment keeps its usage."""
    data = config.model_dump(mode="json", exclude={"task": {"train", "dev", "test"}, "corpus": {"files"}, "init": True})
    data["task"]["unlabelled"] = [PurePath(file).name for file in config.task.unlabelled]
    files = [config.task.train, config.task.dev, config.task.test, config.init, *(config.corpus.files if config.corpus else ())]
    return hash_json([data, [file and PurePath(file).name for file in files]])[:16]


def _start_meter() -> Any:
    """Return codecarbon's offline energy meter, None if it is not installed. The country affects emissions only, which are not shown."""
    if importlib.util.find_spec("codecarbon") is None:
        return None
    from codecarbon import OfflineEmissionsTracker

    meter = OfflineEmissionsTracker(country_iso_code="USA", save_to_file=False, log_level="critical", allow_multiple_runs=True)
    meter.start()
    return meter


@dataclass(frozen=True, slots=True)
class CellResult:
    """A run, or a linear model of one.

    scores: split -> the metrics of the kind's tables. flops: "paper" and "executed", sums over phases; empty for a linear model. passages,
    tokens: size of the selected raw text, tokens are estimated. true, predictions: labels of the test rows as `Example` holds them.
    kind: of the task.
    """

    arm: str
    labels: str
    seed: int
    scores: Mapping[str, Mapping[str, float]]
    usage: Usage | None
    flops: Mapping[str, float]
    parameters: int | None
    passages: int
    tokens: float
    true: tuple[str, ...] = ()
    predictions: tuple[str, ...] = ()
    kind: TaskKind = "classification"

    @property
    def is_baseline(self) -> bool:
        """Return True for a linear model that a run fitted beside its own."""
        return not self.flops

    def as_dict(self) -> dict[str, Any]:
        """Return plain JSON values, without `true` and `predictions`."""
        values = asdict(self)
        del values["true"], values["predictions"]
        return values


@dataclass(frozen=True, slots=True)
class Summary:
    """Mean, sample standard deviation (None for one seed) and the values over seeds."""

    mean: float
    deviation: float | None
    values: tuple[float, ...]

    @classmethod
    def of(cls, values: Sequence[float]) -> Summary:
        """Summarize values; raise StatisticsError if there are none."""
        return cls(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None, tuple(values))


@dataclass(frozen=True, slots=True)
class Row:
    """A row of the table; figures are means over seeds.

    scores: "test macro_f1" and so on -> summary. minutes: wall-clock time, including stages made by other runs. cpu_minutes: without them.
    kwh: None if not measured. complete: False if the time of a killed start is missing.
    """

    arm: str
    labels: str
    seeds: tuple[int, ...]
    is_baseline: bool
    scores: Mapping[str, Summary]
    minutes: float | None
    cpu_minutes: float | None
    kwh: float | None
    complete: bool
    paper_flops: float | None
    executed_flops: float | None
    parameters: int | None
    passages: float
    tokens: float
    kind: TaskKind = "classification"

    @property
    def metrics(self) -> tuple[str, str]:
        """The metric by which models are compared, and another one."""
        other, main = KINDS[self.kind].table_metrics[-2:]
        return main, other


@dataclass(frozen=True, slots=True)
class Pair:
    """Test score of `arm` by the main metric minus that of `other`, over common seeds. p_holm: Holm-corrected for all arms compared with
    `other`.
    """

    arm: str
    other: str
    labels: str
    seeds: int
    difference: float
    low: float
    high: float
    p: float
    p_holm: float
    kind: TaskKind = "classification"


def read_results(cells: Sequence[Cell], *, predictions: bool = True) -> list[CellResult]:
    """Read the results of finished cells. predictions: with those of the test rows, for `pairs_of`.

    The linear models of a group (training rows, seed) follow the first cell that fitted them, unless they are arms themselves.
    """
    results: list[CellResult] = []

    def add(result: CellResult, file: Path) -> None:
        true, predicted = _predictions(file, result.kind) if predictions else ((), ())
        results.append(replace(result, true=true, predictions=predicted))

    arms = {cell.arm.name for cell in cells}
    has_bm25 = any(_retrieves_by_bm25(cell) for cell in cells)
    seen = set()
    for cell in cells:
        evaluation = cell.folder / "evaluation"
        scores = json.loads((evaluation / "scores.json").read_bytes())
        own = _result(cell, scores)
        add(own, evaluation / "predictions-test.jsonl")
        if COMBINED in scores["models"]:  # its costs are those of the run
            combined = replace(own, arm=f"{own.arm}{_OF_COMBINED}", scores=_scores(scores["models"][COMBINED], own.kind))
            add(combined, evaluation / f"predictions-test-{COMBINED}.jsonl")
        for name in LINEAR_MODELS:
            group = (cell.labels, cell.seed, name)
            is_new = name in scores["models"] and name not in arms and group not in seen
            if is_new and (name == "tfidf" or not has_bm25 or _retrieves_by_bm25(cell)):
                seen.add(group)
                add(_linear_result(cell, scores, name), evaluation / f"predictions-test-{name}.jsonl")
    return results


def _retrieves_by_bm25(cell: Cell) -> bool:
    return isinstance(cell.config.retriever, Bm25Config)


def rows_of(results: Sequence[CellResult]) -> list[Row]:
    """Return rows by number of training rows and arm, with the linear models at the end of their group."""
    groups: dict[str, dict[str, list[CellResult]]] = {}
    for result in results:
        groups.setdefault(result.labels, {}).setdefault(result.arm, []).append(result)
    rows = []
    for by_arm in groups.values():
        arms = [arm for arm, (first, *_) in by_arm.items() if not first.is_baseline]
        rows += [_row(by_arm[arm]) for arm in (*arms, *(name for name in LINEAR_MODELS if name in by_arm and name not in arms))]
    return rows


def pairs_of(results: Sequence[CellResult]) -> list[Pair]:
    """Compare every two arms of a group that have predictions of the same test rows; the later arm minus the earlier."""
    pairs = []
    kind = results[0].kind if results else "classification"
    for labels in dict.fromkeys(result.labels for result in results):
        arms: dict[str, dict[int, CellResult]] = {}
        for result in results:
            if result.labels == labels and result.predictions:
                arms.setdefault(result.arm, {})[result.seed] = result
        differences = {}
        for other, arm in itertools.combinations(arms, 2):
            seeds = sorted(set(arms[arm]) & set(arms[other]))
            true = {each.true for name in (arm, other) for each in (arms[name][seed] for seed in seeds)}
            if seeds and len(true) == 1:
                predictions = [[arms[name][seed].predictions for seed in seeds] for name in (arm, other)]
                differences[arm, other] = len(seeds), compare_predictions(next(iter(true)), *predictions, kind=kind)
        for other in arms:
            family = {arm: difference for (arm, compared), (_, difference) in differences.items() if compared == other}
            corrected = holm({arm: difference.p for arm, difference in family.items()})
            for arm, each in family.items():
                count = differences[arm, other][0]
                pairs.append(Pair(arm, other, labels, count, each.value, each.low, each.high, each.p, corrected[arm], kind))
    return pairs


def totals_of(results: Sequence[CellResult]) -> dict[str, float]:
    """Return the resources of all runs together, the cost of choosing among them. complete: 0 if those of a run are not all known."""
    runs = [result for result in results if not result.is_baseline and not result.arm.endswith(_OF_COMBINED)]
    usage = [result.usage for result in runs if result.usage is not None]
    return {
        "runs": len(runs),
        "complete": float(len(usage) == len(runs) and all(each.complete for each in usage)),
        "minutes": sum(each.seconds for each in usage) / 60,
        "cpu_minutes": sum(each.cpu_seconds for each in usage) / 60,
        "paper_flops": sum(result.flops["paper"] for result in runs),
        "executed_flops": sum(result.flops["executed"] for result in runs),
        **({"kwh": sum(each.kwh or 0.0 for each in usage)} if any(each.kwh is not None for each in usage) else {}),
    }


def _result(cell: Cell, scores: Mapping[str, Any]) -> CellResult:
    selection, provenance = cell.folder / "selection" / "report.json", cell.folder / "export" / "provenance.json"
    passages, tokens = 0, 0.0
    if cell.config.retriever is not None and selection.is_file():
        report = json.loads(selection.read_bytes())
        passages, tokens = report["documents"]["selected"], float(report["tokens"]["estimated"])
    parameters = json.loads(provenance.read_bytes()).get("parameters") if provenance.is_file() else None
    own = _scores(scores["models"][cell.config.name], scores["kind"])
    return CellResult(
        cell.arm.name,
        cell.labels,
        cell.seed,
        own,
        read_usage(cell.folder, cell.config),
        scores["flops"],
        parameters,
        passages,
        tokens,
        kind=scores["kind"],
    )


def _linear_result(cell: Cell, scores: Mapping[str, Any], name: str) -> CellResult:
    """name: one of `LINEAR_MODELS` that is in `scores`."""
    entry = scores["models"][name]
    usage = Usage(seconds=float(entry["fit"]["seconds"]))
    own = _scores(entry, scores["kind"])
    return CellResult(name, cell.labels, cell.seed, own, usage, {}, None, 0, 0.0, kind=scores["kind"])


def _scores(entry: Mapping[str, Any], kind: TaskKind) -> dict[str, dict[str, float]]:
    names = KINDS[kind].table_metrics[::-1]
    return {split: {name: float(entry[split][name]) for name in names} for split in SPLITS if split in entry}


def _predictions(path: Path, kind: TaskKind) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return true and predicted labels of the test rows, as `Example` holds them; empty without a test file."""
    if not path.is_file():
        return (), ()
    label_of: Mapping[TaskKind, Callable[[Any], str]] = {"classification": str, "multi-label": format_labels, "regression": format_number}
    with path.open(encoding="utf-8") as file:
        pairs = [(label_of[kind](row["label"]), label_of[kind](row["predicted"])) for row in map(json.loads, file)]
    return tuple(true for true, _ in pairs), tuple(predicted for _, predicted in pairs)


def _row(results: Sequence[CellResult]) -> Row:
    first = results[0]
    is_baseline = first.is_baseline
    scores = {
        f"{split} {name}": Summary.of([result.scores[split][name] for result in results])
        for split in SPLITS
        if all(split in result.scores for result in results)
        for name in first.scores[split]
    }
    usage = [result.usage for result in results if result.usage is not None]
    energy = [each.kwh for each in usage if each.kwh is not None]
    return Row(
        first.arm,
        first.labels,
        tuple(result.seed for result in results),
        is_baseline,
        scores,
        _mean([(each.seconds + each.borrowed_seconds) / 60 for each in usage]),
        None if is_baseline else _mean([each.cpu_seconds / 60 for each in usage]),
        _mean(energy),
        all(each.complete for each in usage),
        None if is_baseline else _mean([result.flops["paper"] for result in results]),
        None if is_baseline else _mean([result.flops["executed"] for result in results]),
        first.parameters,
        statistics.fmean(result.passages for result in results),
        statistics.fmean(result.tokens for result in results),
        first.kind,
    )


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None


def markdown(rows: Sequence[Row], pairs: Sequence[Pair], totals: Mapping[str, float], failed: Mapping[str, str]) -> str:
    """Return the table (mean ± sample standard deviation over seeds) with a legend, totals and failed runs."""
    columns = _columns(rows)
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    first = {row.labels: row.arm for row in reversed(rows) if not row.is_baseline}
    compared = {(pair.labels, pair.arm): pair for pair in pairs if pair.other == first.get(pair.labels)}
    for row in rows:
        cells = _cells(row, compared.get((row.labels, row.arm)), columns)
        lines.append(f"| {' | '.join(cells[column] for column in columns)} |")
    notes = [
        _legend(
            columns,
            next(iter(first.values()), ""),
            rows[0].kind if rows else "classification",
            linear=any(row.is_baseline for row in rows),
            combined=any(row.arm.endswith(_OF_COMBINED) for row in rows),
        )
    ]
    if totals.get("runs"):
        energy = f", {totals['kwh']:.3f} kWh" if "kwh" in totals else ""
        trained = f", {totals['paper_flops']:.2e} FLOPs by the paper's formula, {totals['executed_flops']:.2e} executed"
        flops = trained if totals["executed_flops"] else ""
        at_least = "" if totals["complete"] else "≥ "  # some were measured with other settings, such as --jobs, or not to their end
        notes.append(
            f"{counted(round(totals['runs']), 'run')} in all, the cost of choosing among them: {at_least}{totals['minutes']:.1f} minutes, "
            f"{at_least}{totals['cpu_minutes']:.1f} CPU minutes{energy}{flops}."
        )
    notes += [f"Failed: {name}: {reason}" for name, reason in failed.items()]
    return "\n".join([*lines, "", *notes]) + "\n"


def scores_plot(rows: Sequence[Row], *, title: str) -> str:
    """Return an SVG of the main score on test (on dev without test scores); "" without rows. Linear models are dashed lines."""
    if not rows:
        return ""
    main = main_metric(rows[0].kind)
    split = "test" if any(f"test {main}" in row.scores for row in rows) else "dev"
    score = f"{split} {main}"
    shown = [row for row in rows if score in row.scores]
    if not shown:
        return ""
    groups = [(labels, list(group)) for labels, group in itertools.groupby(shown, key=lambda row: row.labels)]
    named = len(groups) > 1 or groups[0][0] != ALL
    description = "; ".join(f"{row.arm} ({row.labels} labels) {score_text(row.scores[score], main)}" for row in shown)
    return seeds_chart(
        title,
        description,
        [(_group_name(labels) if named else "", [_seeds(row, row.scores[score], main) for row in group]) for labels, group in groups],
        x_name=f"{METRIC_NAMES[main]} on {split}{', percent' if is_percent(main) else ''}",
        largest=100 if is_percent(main) else 1,
    )


def _group_name(labels: str) -> str:
    return "all labels" if labels == ALL else f"{labels} labels"


def _seeds(row: Row, summary: Summary, metric: str) -> Seeds:
    scale = 100 if is_percent(metric) else 1
    return Seeds(
        row.arm,
        [(scale * value, f"seed {seed}: {format_metric(metric, value)}") for value, seed in zip(summary.values, row.seeds, strict=True)],
        mean=scale * summary.mean,
        deviation=None if summary.deviation is None else scale * summary.deviation,
        figure=score_text(summary, metric),
        reference=row.is_baseline,
    )


def score_text(summary: Summary | None, metric: str = "macro_f1") -> str:
    """Format a score as `format_metric` does, with its standard deviation if there are several seeds."""
    if summary is None:
        return ""
    spread = "" if summary.deviation is None else f" ± {format_metric(metric, summary.deviation)}"
    return f"{format_metric(metric, summary.mean)}{spread}"


def _columns(rows: Sequence[Row]) -> list[str]:
    scored = {name for row in rows for name in row.scores}
    columns = ["arm"]
    if any(row.labels != ALL for row in rows):
        columns.append("labels")
    columns.append("seeds")
    metrics = rows[0].metrics if rows else ("macro_f1", "micro_f1")
    main, other = (METRIC_NAMES[name] for name in metrics)
    if f"test {metrics[0]}" in scored:
        columns += [f"test {main}", f"test {other}"]
        columns += [f"{main}, rows not in train"] if f"test_leak_free {metrics[0]}" in scored else []
        columns += ["difference to the first (95 %), p"] if sum(not row.is_baseline for row in rows) > 1 else []
    columns += [f"dev {main}", "minutes", "CPU minutes", "FLOPs (paper)", "FLOPs executed", "raw text", "parameters"]
    return columns + (["kWh"] if any(row.kwh is not None for row in rows) else [])


def _cells(row: Row, pair: Pair | None, columns: Sequence[str]) -> dict[str, str]:
    scores, (main, other) = row.scores, row.metrics
    at_least = "" if row.complete else "≥ "
    values = {
        "arm": row.arm.replace("|", "\\|"),  # of a value such as a pattern; it would end the cell
        "labels": row.labels,
        "seeds": str(len(row.seeds)),
        f"test {METRIC_NAMES[main]}": score_text(scores.get(f"test {main}"), main),
        f"test {METRIC_NAMES[other]}": score_text(scores.get(f"test {other}"), other),
        f"{METRIC_NAMES[main]}, rows not in train": score_text(scores.get(f"test_leak_free {main}"), main),
        "difference to the first (95 %), p": "" if pair is None else pair_text(pair),
        f"dev {METRIC_NAMES[main]}": score_text(scores.get(f"dev {main}"), main),
        "minutes": "" if row.minutes is None else f"{at_least}{row.minutes:.1f}",
        "CPU minutes": "" if row.cpu_minutes is None else f"{at_least}{row.cpu_minutes:.1f}",
        "FLOPs (paper)": f"{row.paper_flops:.1e}" if row.paper_flops else "",
        "FLOPs executed": f"{row.executed_flops:.1e}" if row.executed_flops else "",
        "raw text": f"{row.passages:,.0f} passages, {row.tokens / 1e6:.1f}M tokens" if row.passages else "",
        "parameters": "" if row.parameters is None else _millions(row.parameters),
        "kWh": "" if row.kwh is None else f"{row.kwh:.4f}",
    }
    return {column: values[column] for column in columns}


def _millions(parameters: int) -> str:
    return f"{parameters / 1e6:.1f}M" if parameters >= 1e6 else f"{parameters / 1e3:.0f}k"


def pair_text(pair: Pair) -> str:
    """Format difference and interval in percentage points, or of correlations as they are, and the Holm-corrected p."""
    p = "< 0.001" if pair.p_holm < 0.001 else f"{pair.p_holm:.3f}"
    scale, places = (100, 1) if is_percent(main_metric(pair.kind)) else (1, 3)
    difference, low, high = (f"{scale * value:+.{places}f}" for value in (pair.difference, pair.low, pair.high))
    return f"{difference} ({low} to {high}), p {p}"


def _legend(columns: Sequence[str], first: str, kind: TaskKind, *, linear: bool, combined: bool) -> str:
    main = METRIC_NAMES[main_metric(kind)]
    scores = "Scores in percent" if is_percent(main_metric(kind)) else f"Scores are correlations ({main}'s first)"
    words = [f"{scores}, mean ± standard deviation over seeds."]
    if linear:
        words.append(
            "Rows tfidf, bayes and static without FLOPs are linear models fitted on the same data as the arms: n-grams alone, naive Bayes "
            "on labelled and retrieved texts, and n-grams with averaged word vectors of the corpus. Their settings are chosen on "
            "dev; their minutes are those of the fit."
        )
    if combined:
        words.append("Rows named combined: weighted average of the calibrated predictions of the arm's encoder and linear models.")
    if "difference to the first (95 %), p" in columns:
        words.append(
            f"Difference to the first: {main} on test minus that of {first}, with a paired bootstrap interval over rows and seeds; p by "
            "approximate randomization, Holm-corrected for the number of arms."
        )
    words.append(
        "Minutes: wall-clock time of a run, including stages shared with other runs; CPU minutes: without them. FLOPs: all phases of a "
        "run, by the paper's formula (6 x tokens x parameters) and executed (matrix products). Raw text: tokens are estimated."
    )
    return " ".join(words)
