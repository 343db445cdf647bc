"""The sections of a run's page as plain values and plots for the templates; `Neighbours` finds the passages nearest to a text.

If the data of a section is missing, its `data` is None and the template says so.
"""

from __future__ import annotations

import json
import math
import shlex
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path, PurePath
from typing import Any, Literal, TypeAlias, assert_never

import numpy as np
import numpy.typing as npt
from markupsafe import Markup

from cramlm.config.retriever import ElasticsearchConfig
from cramlm.config.run import CorpusConfig, RunConfig
from cramlm.data.corpus import Corpus, build_corpus
from cramlm.data.labels import RULES, number_text, number_texts
from cramlm.data.task import text_key
from cramlm.data.validation import count_repetitions
from cramlm.evaluation.combination import ENCODER
from cramlm.evaluation.confidence import FEWEST_TEXTS, Confidence, CoverageCurve
from cramlm.evaluation.kinds import KINDS, METRIC_NAMES, format_metric, is_percent, main_metric
from cramlm.records import COMBINED, Example, Task
from cramlm.reporting.charts import Estimate, Line, histogram, interval_chart, line_chart, reliability_chart
from cramlm.reporting.record import Json, RunRecord
from cramlm.retrieval.bm25.index import Bm25Index, build_index
from cramlm.retrieval.selection import read_selection
from cramlm.storage.arrays import evenly
from cramlm.text.words import count_words

Data: TypeAlias = dict[str, Any]
"""Values for a template by name; a template that reads a missing one raises UndefinedError."""

_LOSS_CHARTS = {
    "mlm": "Masked language modeling",
    "causal": "Causal language modeling",
    "span_infilling": "Span infilling",
    "replaced_tokens": "Generator of replaced tokens",
    "detection": "Replaced-token detection",
    "shuffled_tokens": "Shuffled-token detection",
    "important_tokens": "Important words",
    "distil": "Soft labels of a teacher",
}
_ORIGINS = (("external", "retrieved"), ("task", "task text"))
_CROSS_ENTROPY = "Cross-entropy in nats"
_LOSSES = {f"{text}_{origin}": name for text in _LOSS_CHARTS for origin, name in _ORIGINS} | {"classify_task": "labels"}
_MAX_LABELS = 30  # of a confusion matrix; with more labels, the most frequent confusions are listed
_MAX_PAIRS = 40
_MAX_CARDS = 10
_MAX_MISTAKES = 200
_MAX_ROWS = 200
_PASSAGES = 12
_CONFIDENCE_BINS = 10
_WANTED_ACCURACIES = (0.8, 0.9, 0.95, 0.98, 0.99)
_HISTOGRAM_BINS = 20
_PASSAGE_WORDS = 1_000_000  # so that passages are not split again
_MAX_TERMS = 12
_MIN_SHARE = 0.3  # of the largest weight of a shared word; words with less weight are not marked


@dataclass(frozen=True, slots=True)
class Section:
    """A part of the page with an entry in the navigation. data: input of `<id>.html.jinja`, in addition to the run record."""

    id: str
    heading: str
    data: Any


def sections_of(run: RunRecord, neighbours: Neighbours | None) -> list[Section]:
    """Return the sections of the page in order."""
    sections = [
        Section("scores", "Scores", None if run.scores is None else _scores(run)),
        Section("settings", "Settings and cost", _settings(run)),
        Section("data", "Labelled data", None if run.task is None else _labelled_data(run.task)),
        Section("retrieved", "Retrieved text", None if run.selection is None else _retrieved(run, run.selection, neighbours)),
    ]
    if run.config.model == "encoder":
        sections.append(Section("learning", "Training curves", _learning(run)))
    if run.split is None:
        sections.append(Section("errors", "Errors", None))
    else:
        sections.append(Section("errors", f"Errors on {run.split}", _errors(run, run.split, neighbours)))
    sections.append(Section("confidence", "Confidence", _confidence(run)))
    return [*sections, Section("provenance", "Provenance", _provenance(run))]


def day_of(run: RunRecord) -> str:
    """Return the time of the last event; empty without a log."""
    return datetime.fromtimestamp(float(run.events[-1]["time"]), UTC).strftime("%d %B %Y, %H:%M UTC") if run.events else ""


def capital(name: str) -> str:
    """Return the name with a capital letter."""
    return name[0].upper() + name[1:]


def estimate_of(name: str, scores: Json, metric: str, *, emphasised: bool) -> Estimate:
    """Return a score with its interval, of the scores of a model on a split."""
    low, high = scores["intervals"][metric]
    return Estimate(name, scores[metric], low, high, emphasised=emphasised)


def score_chart(title: str, metric: str, rows: Sequence[Estimate]) -> Markup:
    """Return an interval chart of scores, whose description lists them."""
    shown = partial(format_metric, metric)
    description = "; ".join(f"{row.name} {shown(row.value)} ({shown(row.low)} to {shown(row.high)})" for row in rows)
    return interval_chart(title, description, rows, percent=is_percent(metric))


def duration(seconds: float) -> str:
    """Format seconds as 12 s, 3 min 05 s or 2 h 10 min."""
    if seconds < 90:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def _scores(run: RunRecord) -> Data:
    """main: metric of the plots. metrics: of the test columns. choice: of the cross-fitted scores. has_prior: of the kind of task."""
    split = "test" if "test" in run.predictor_scores else "dev"
    kind = run.config.task.kind
    main = main_metric(kind)
    charts = [_score_chart(run, split, main, f"{capital(METRIC_NAMES[main])} on {split}, with 95 % intervals")]
    if leak_free := run.predictor_scores.get("test_leak_free"):
        charts.append(_score_chart(run, "test_leak_free", main, f"The same on the {leak_free['rows']:,} test rows not in train"))
    rules = KINDS[kind]
    return {
        "main": main,
        "metrics": rules.table_metrics,
        "choice": run.config.metric,
        "has_prior": rules.has_prior,
        "charts": charts,
    }


def _score_chart(run: RunRecord, split: str, metric: str, title: str) -> Markup:
    rows = []
    for name, entry in run.models.items():
        if split in entry:
            predicts = name == run.predictor
            rows.append(estimate_of(f"{name} (predicts)" if predicts else name, entry[split], metric, emphasised=predicts))
    return score_chart(title, metric, rows)


def _settings(run: RunRecord) -> Data:
    warnings = dict.fromkeys(str(event.get("message", "")) for event in run.events if event["kind"] == "warning")
    seconds = run.config.limit.seconds
    return {
        "raw_text": _raw_text(run.config),
        "retriever": _retriever(run),
        "model": _model(run),
        "machine": _machine(run),
        "budget": run.config.budget if seconds is None else duration(seconds),
        "stages": list(run.seconds),
        "warnings": list(warnings)[:30],
    }


def _raw_text(config: RunConfig) -> str:
    if isinstance(config.retriever, ElasticsearchConfig):
        return f"{config.retriever.url}/{config.retriever.index}"
    return ", ".join(config.corpus.files) if config.corpus else "none"


def _retriever(run: RunRecord) -> str:
    settings = (run.plan or {}).get("retriever") or (None if run.config.retriever is None else run.config.retriever.model_dump(mode="json"))
    return "none: labels only" if settings is None else _of_retriever(settings)


def _of_retriever(settings: Json) -> str:
    """Return the kind and the settings that are set; of a union also those of its members."""
    members = [_of_retriever(member) for member in settings.get("retrievers", ())]
    own = [f"{name} {value}" for name, value in settings.items() if value is not None and name not in ("kind", "retrievers")]
    return ", ".join([str(settings["kind"]), *own, *(f"({member})" for member in members)])


def _model(run: RunRecord) -> str:
    size = (run.provenance or {}).get("parameters")
    shown = "" if size is None else f", {size / 1e6:.1f}M parameters" if size >= 1e6 else f", {size:,} parameters"
    match run.config.model:
        case "encoder":
            encoder = run.config.encoder
            return f"encoder: {encoder.shape}, {encoder.layers} layers of width {encoder.hidden}{shown}"
        case "static":
            return f"linear: n-grams and averaged word vectors{shown}"
        case "bayes":
            return f"linear: naive Bayes on labelled and retrieved texts{shown}"
        case "tfidf":
            return f"linear: n-grams{shown}"
        case other:
            assert_never(other)


def _machine(run: RunRecord) -> str:
    described = next((str(event["message"]) for event in reversed(run.events) if event["stage"] == "machine"), "")
    speed = (run.plan or {}).get("speed")
    measured = f"{speed['joint']:,.0f} tokens/s measured with the vocabulary head" if speed else ""
    precision = (run.provenance or {}).get("precision")
    threads = "1 thread" if _threads(run) == "1" else f"{_threads(run)} threads"
    return "; ".join(part for part in (described, threads, precision and str(precision), measured) if part)


def _threads(run: RunRecord) -> str:
    return str((run.provenance or {}).get("threads") or run.config.threads or "all")


def _labelled_data(task: Task) -> Data:
    """labels: None for a regression, numbers for others. lengths: five percentiles of words for each split."""
    repetitions = count_repetitions(task)
    splits = {name: examples for name, examples in (("train", task.train), ("dev", task.dev), ("test", task.test)) if examples}
    words = {name: [count_words(example.whole_text) for example in examples] for name, examples in splits.items()}
    in_train = {"dev": repetitions.dev_in_train, "test": repetitions.test_in_train}
    return {
        "splits": {name: len(examples) for name, examples in splits.items()},
        "labels": None if task.kind == "regression" else _labels(task, splits),
        "numbers": _numbers(task) if task.kind == "regression" else None,
        "length_chart": _length_chart(words["train"]),
        "lengths": {name: np.percentile(words[name], (0, 10, 50, 90, 100)).round().tolist() for name in splits},
        "repetitions": repetitions,
        "in_train": {name: counts for name, counts in in_train.items() if name in splits},
    }


def _labels(task: Task, splits: Mapping[str, Sequence[Example]]) -> list[Data]:
    """Return the labels by decreasing number of training texts, of which each has a share."""
    names_of = RULES[task.kind].names
    counts = {split: Counter(name for each in examples for name in names_of(str(each.label))) for split, examples in splits.items()}
    names = [*task.labels, *sorted({label for each in counts.values() for label in each} - set(task.labels))]
    names.sort(key=lambda name: -counts["train"][name])
    return [
        {
            "label": name,
            "counts": {split: counts[split][name] for split in splits},
            "share": counts["train"][name] / len(task.train),
        }
        for name in names[:_MAX_ROWS]
    ]


def _numbers(task: Task) -> tuple[Markup, str]:
    """Return a histogram of the training numbers, and its summary."""
    values = np.array([float(str(example.label)) for example in task.train])
    least, most, mean = number_texts([float(values.min()), float(values.max()), task.scale.mean], task.scale.spread)
    words = f"From {least} to {most}, mean {mean}, standard deviation {number_text(task.scale.spread, 4)}."
    whole = bool((values == np.round(values)).all())
    return _histogram("Numbers of the training texts", words, values, task.labels[0], whole=whole), words


def _length_chart(words: Sequence[int]) -> Markup:
    half, most = np.median(words), np.percentile(words, 90)
    return _histogram(
        "Length of the training texts",
        f"Half of the {len(words):,} training texts have at most {half:.0f} words, 90 % at most {most:.0f}.",
        np.minimum(words, np.ceil(np.percentile(words, 99))).astype(np.float64),
        "words (last bar: and more)",
        whole=True,
    )


def _retrieved(run: RunRecord, report: Json, neighbours: Neighbours | None) -> Data:
    """rank_chart: None if all ranks are equal. odds: odds ratio of a word in the selection and in random text."""
    kept = read_selection(run.path / "selection")
    rank, score = kept.rank.astype(np.float64), kept.score.astype(np.float64)
    has_queries = report["queries"]["texts"] > 0
    best = int((kept.rank == 0).sum())
    ranks = f"{best:,} of {len(kept):,} passages have rank 1 for some query; half of them have rank {np.median(rank) + 1:.0f} or better."
    scores = f"Scores: median {np.median(score):.3g}, minimum {score.min():.3g}, maximum {score.max():.3g}."
    shows_ranks = has_queries and len(np.unique(rank)) > 1
    axis = "best rank over all queries, 1 = first"
    sources = list(_sources(report))
    return {
        "sources": sources,
        "more_sources": len(report["sources"]) - len(sources) + report.get("other_sources", {}).get("sources", 0),
        "rank_chart": _histogram("Best rank of each passage", ranks, rank + 1, axis, whole=True) if shows_ranks else None,
        "ranks": ranks if has_queries else None,
        "score_chart": _histogram(
            "Score of each passage", scores, score, "score for the query with the best rank" if has_queries else "score"
        ),
        "scores": scores,
        "words": [{**row, "odds": math.exp(min(row["log_odds"], 20))} for row in report.get("over_represented", ())],
        "cards": list(_passages(run, neighbours)),
    }


def _sources(report: Json) -> Iterator[Data]:
    """ratio: the source's share of the selection divided by its share of the corpus."""
    total, corpus = report["documents"]["selected"], report["corpus_documents"]
    for source, count in list(report["sources"].items())[:_MAX_ROWS]:
        share, corpus_share = count / total, report["corpus_sources"][source] / corpus
        shares = {"share": share, "corpus_share": corpus_share, "ratio": share / corpus_share}
        yield {"name": source, "count": count, "words": report["source_words"][source], **shares}


def _histogram(title: str, description: str, values: npt.NDArray[np.float64], x_name: str, *, whole: bool = False) -> Markup:
    """Return a histogram of up to 20 bars. whole: the values are integers, and each bar covers the same number of them."""
    low, high = float(values.min()), float(values.max())
    bins = _HISTOGRAM_BINS
    if whole:
        width = int(np.ceil((high - low + 1) / _HISTOGRAM_BINS))
        bins = int(np.ceil((high - low + 1) / width))
        high = low + bins * width
    counts, edges = np.histogram(values, bins=bins, range=(low, high if high > low else low + 1))
    places = 0 if whole else max(0, 1 - math.floor(math.log10(edges[1] - edges[0])))

    def shown(edge: float) -> str:
        return f"{edge:,.{places}f}" if abs(edge) < 1e12 else f"{edge:.4g}"

    return histogram(title, description, edges.tolist(), counts.tolist(), x_name=x_name, x_format=shown, whole=whole)


def _passages(run: RunRecord, neighbours: Neighbours | None) -> Iterator[Data]:
    """Yield passages evenly spaced over the ranks, the text that retrieved each, and the words that both share."""
    if not run.passages:
        return
    queries = run.task.queries if run.task is not None else ()
    for row in evenly(len(run.passages), _PASSAGES).tolist():
        passage = run.passages[row]
        number = int(passage["query"])
        query = queries[number] if 0 <= number < len(queries) else None
        terms = neighbours.shared(query, row) if neighbours is not None and query is not None else ()
        yield {"passage": passage, "query": query, "terms": terms}


def _learning(run: RunRecord) -> list[Data]:
    stages = dict.fromkeys(str(event["stage"]) for event in run.events if event["kind"] == "step") | dict.fromkeys(run.phases)
    return [_curves(run, stage) for stage in stages]


def _curves(run: RunRecord, stage: str) -> Data:
    """has_steps: False if the log has none. only_score: the dev score if there is just one."""
    steps, evaluations = run.events_of(stage, "step"), run.events_of(stage, "evaluation")
    of_labels = "Squared error, in standard deviations," if run.config.task.kind == "regression" else _CROSS_ENTROPY
    charts = [
        *(
            _loss_chart(title, (f"{text}_external", f"{text}_task"), steps, of_labels if text == "distil" else _CROSS_ENTROPY)
            for text, title in _LOSS_CHARTS.items()
        ),
        _loss_chart("Labels", ("classify_task",), steps, of_labels),
        _dev_chart(run.config.metric, evaluations),
    ]
    shown = partial(format_metric, run.config.metric)
    report = run.phases.get(stage)
    return {
        "stage": stage,
        "has_steps": bool(steps),
        "charts": [chart for chart in charts if chart is not None],
        "report": report,
        "best_score": None if report is None or report["best_step"] is None else shown(report["best_score"]),
        "only_score": shown(evaluations[0]["scores"][run.config.metric]) if len(evaluations) == 1 else None,
    }


def _loss_chart(title: str, names: Sequence[str], steps: Sequence[Json], measure: str) -> Markup | None:
    lines = []
    styles: tuple[Literal["one", "two"], ...] = ("one", "two")
    for name, style in zip(names, styles, strict=False):
        points = [(float(data["step"]), float(data[name])) for data in steps if name in data]
        if len(points) > 1:
            lines.append(Line(_LOSSES[name], points, style))
    if not lines:
        return None
    ends = " ".join(f"{line.name}: from {line.points[0][1]:.2f} to {line.points[-1][1]:.2f}." for line in lines)
    description = f"{measure} over the steps. {ends}"
    return line_chart(f"{title}: loss", description, lines, x_name="step", y_format=lambda value: f"{value:g}")


def _dev_chart(metric: str, evaluations: Sequence[Json]) -> Markup | None:
    points = [(float(data["step"]), float(data["scores"][metric])) for data in evaluations]
    if len(points) < 2:
        return None
    best = max(points, key=lambda point: (point[1], -point[0]))
    first, last, highest = (format_metric(metric, value) for value in (points[0][1], points[-1][1], best[1]))
    description = f"Dev {METRIC_NAMES[metric]} over the steps: from {first} to {last}, best {highest} after step {best[0]:.0f}."
    line = Line(last, points, mark=(*best, f"best {highest}"))
    title = f"Score on dev: {METRIC_NAMES[metric]}"
    unit = 100 if is_percent(metric) else 1
    return line_chart(title, description, [line], x_name="step", y_format=lambda value: f"{unit * value:.4g}", largest=1)


def _errors(run: RunRecord, split: str, neighbours: Neighbours | None) -> Data:
    """Return the errors of the model that predicts by default.

    others: scores by label of the other models. matrix: confusion matrix, rows are the true labels; None with too many labels.
    """
    others = {name: entry[split]["per_class"] for name, entry in run.others.items() if "per_class" in entry.get(split, {})}
    if run.config.task.kind != "classification":
        return {"split": split, "others": others, "calibration": None}
    own = run.predictor_scores[split]
    labels, cells = list(own["per_class"]), own["confusions"]
    wrong = [line for line in run.predictions[split] if line["predicted"] != line["label"]]
    return {
        "split": split,
        "others": others,
        "labels": labels,
        "matrix": _matrix(cells, len(labels)) if len(labels) <= _MAX_LABELS else None,
        "pairs": _confused_pairs(labels, cells),
        "calibration": _calibration(run.predictions[split], own.get("calibration_error")),
        "wrong": len(wrong),
        "mistakes": _mistakes(run, wrong, neighbours),
        "cards": _MAX_CARDS,
    }


def _matrix(cells: Sequence[tuple[int, int, int]], labels: int) -> list[list[int]]:
    matrix = [[0] * labels for _ in range(labels)]
    for true, predicted, value in cells:
        matrix[true][predicted] = value
    return matrix


def _confused_pairs(labels: Sequence[str], cells: Sequence[tuple[int, int, int]]) -> list[tuple[str, str, int]]:
    """Return (true, predicted, texts) by decreasing number of texts."""
    pairs = [(labels[true], labels[predicted], value) for true, predicted, value in cells if true != predicted]
    return sorted(pairs, key=lambda pair: (-pair[2], pair[0], pair[1]))[:_MAX_PAIRS]


def _calibration(predictions: Sequence[Json], error: float | None) -> Data:
    bins: list[list[tuple[float, bool]]] = [[] for _ in range(_CONFIDENCE_BINS)]
    for line in predictions:
        confidence = line["probabilities"][line["predicted"]]
        bins[min(int(confidence * _CONFIDENCE_BINS), _CONFIDENCE_BINS - 1)].append((confidence, line["predicted"] == line["label"]))
    points = [(sum(c for c, _ in each) / len(each), sum(right for _, right in each) / len(each), len(each)) for each in bins if each]
    confidence = sum(c * rows for c, _, rows in points) / len(predictions)
    accuracy = sum(a * rows for _, a, rows in points) / len(predictions)
    if abs(confidence - accuracy) < 0.03:
        verdict = "well calibrated on average."
    elif confidence > accuracy:
        verdict = "overconfident."
    else:
        verdict = "underconfident."
    words = f"Mean confidence {100 * confidence:.0f} %, accuracy {100 * accuracy:.0f} %: {verdict}"
    words += "" if error is None else f" Expected calibration error {100 * error:.1f} points (15 bins)."
    rows = " ".join(f"Confidence {100 * c:.0f} %: accuracy {100 * a:.0f} % ({rows} texts)." for c, a, rows in points)
    return {"chart": reliability_chart("Calibration", f"{words} {rows}", points), "words": words}


def _mistakes(run: RunRecord, wrong: Sequence[Json], neighbours: Neighbours | None) -> list[Data] | None:
    """Return mistakes by decreasing confidence, the first `_MAX_CARDS` with their nearest passages; None without the task.

    in_train: the label of the same text in train. terms: the words that the text shares with its nearest passages.
    """
    examples = run.examples()
    if run.task is None or not examples:
        return None
    ordered = sorted(wrong, key=lambda line: (-line["probabilities"][line["predicted"]], line["id"]))
    shown = [line for line in ordered if line["id"] in examples][:_MAX_MISTAKES]
    wrong_examples = [examples[line["id"]] for line in shown]
    queries = [example.whole_text for example in wrong_examples[:_MAX_CARDS]]
    near = [] if neighbours is None else neighbours.nearest(queries, top_k=3)
    in_train = {text_key(example): str(example.label) for example in run.task.train}
    mistakes = []
    for number, (line, example) in enumerate(zip(shown, wrong_examples, strict=True)):
        passages = near[number] if number < len(near) else []
        mistakes.append(
            {
                "line": line,
                "texts": (example.text,) if example.text_pair is None else (example.text, example.text_pair),
                "predicted": line["predicted"],
                "confidence": line["probabilities"][line["predicted"]],
                "true_probability": line["probabilities"].get(line["label"], 0.0),
                "in_train": in_train.get(text_key(example)),
                "near": passages,
                "terms": {term for passage in passages for term in passage.terms},
            }
        )
    return mistakes


def _confidence(run: RunRecord) -> Data | None:
    """Return the curve of the model that predicts by default; None before the evaluation, and unless each text has one label.

    texts: number of dev and test texts.
    """
    if run.confidence is None:
        return None
    own = ENCODER if run.config.model == "encoder" else run.config.model
    name = COMBINED if COMBINED in run.confidence.models else own
    confidence = run.confidence.models[name]
    dev, test = confidence.dev, confidence.test
    rows = [_wanted_accuracy(confidence, accuracy) for accuracy in _WANTED_ACCURACIES]
    lines = [Line("dev", _points(dev), "one"), *([] if test is None else [Line("test", _points(test), "two")])]
    reached = "; ".join(
        f"{100 * row['accuracy']:.0f} % for {100 * row['dev'][0] / int(dev.texts[-1]):.0f} % of the texts"
        for row in rows
        if row["threshold"] is not None
    )
    description = f"Share of right labels over the share of texts with a label, most confident first. On dev: {reached or 'none reached'}."
    chart = line_chart(
        "Accuracy over coverage", description, lines, x_name="coverage in %", y_format=lambda value: f"{round(value, 2):g} %", largest=100
    )
    counts = int(dev.texts[-1]), 0 if test is None else int(test.texts[-1])
    return {"model": run.config.name if name == ENCODER else name, "chart": chart, "rows": rows, "texts": counts}


def _points(curve: CoverageCurve) -> list[tuple[float, float]]:
    """Return (coverage, accuracy) in percent, without the first few texts, of which the accuracy says little."""
    enough = curve.texts >= min(FEWEST_TEXTS, int(curve.texts[-1]))
    return list(zip((100 * curve.coverage[enough]).tolist(), (100 * curve.accuracy[enough]).tolist(), strict=True))


def _wanted_accuracy(confidence: Confidence, accuracy: float) -> Data:
    """threshold: None if none reaches the accuracy on dev. dev, test: (texts with a label, right labels); (0, 0) without such texts."""
    index = confidence.dev.at_accuracy(accuracy)
    if index is None:
        return {"accuracy": accuracy, "threshold": None, "dev": (0, 0), "test": (0, 0)}
    threshold = float(confidence.dev.thresholds[index])
    test = (0, 0) if confidence.test is None else confidence.test.at_threshold(threshold)
    dev = int(confidence.dev.texts[index]), int(confidence.dev.right[index])
    return {"accuracy": accuracy, "threshold": threshold, "dev": dev, "test": test}


def _provenance(run: RunRecord) -> Data:
    command = f"cramlm fit --config {shlex.quote(str(run.path / 'run.toml'))} --out {shlex.quote(str(run.path) + '-again')}"
    return {"files": list(_files(run)), "command": command, "threads": _threads(run)}


def _files(run: RunRecord) -> Iterator[Data]:
    """Yield the files that the run read, with the first 16 digits of their SHA-256."""
    provenance = run.provenance or {}
    task = provenance.get("task", {})
    hashes = task.get("fingerprint", {})
    for split in ("train", "dev", "test"):
        path = getattr(run.config.task, split)
        if path is not None and task:
            content, digest = f"{split}: texts and labels", hashes.get(split, "")[:16]
            yield {"name": PurePath(path).name, "content": content, "rows": task[split], "sha256": digest}
    if "unlabelled" in hashes and run.task is not None:  # of all files together
        name = ", ".join(PurePath(path).name for path in run.config.task.unlabelled)
        texts, digest = len(run.task.unlabelled), hashes["unlabelled"][:16]
        yield {"name": name, "content": "unlabelled: texts", "rows": texts, "sha256": digest}
    for file in (provenance.get("corpus") or {}).get("files", [])[:_MAX_ROWS]:
        yield {"name": PurePath(file["name"]).name, "content": "raw text", "rows": file["rows_used"], "sha256": file["sha256"][:16]}


@dataclass(frozen=True, slots=True)
class NearPassage:
    """A passage similar to a text. row: in the selection. terms: analyzed words that both share, with the largest weights."""

    row: int
    score: float
    terms: tuple[str, ...]


class Neighbours:
    """BM25 search over the passages of a selection."""

    def __init__(self, corpus: Corpus, index: Bm25Index) -> None:
        self._index = index
        self._rows = list(map(int, corpus.ids(range(len(corpus)))))
        self._positions = {row: position for position, row in enumerate(self._rows)}

    def nearest(self, texts: Sequence[str], *, top_k: int) -> list[list[NearPassage]]:
        """Return for every text at most `top_k` passages that share a word with it, best first."""
        if not texts:
            return []
        nearest: list[list[NearPassage]] = []
        for text, (positions, scores) in zip(texts, self._index.search(texts, limit=top_k), strict=True):
            pairs = zip(positions.tolist(), scores.tolist(), strict=True)
            nearest.append([NearPassage(self._rows[position], score, self._top_terms(text, position)) for position, score in pairs])
        return nearest

    def shared(self, text: str, row: int) -> tuple[str, ...]:
        """Return the words with the largest weights that a text shares with the passage in this row of the selection."""
        position = self._positions.get(row)
        return () if position is None else self._top_terms(text, position)

    def _top_terms(self, text: str, position: int) -> tuple[str, ...]:
        terms = self._index.explain(text, position)
        return tuple(term for term, weight in terms if weight >= _MIN_SHARE * terms[0][1])[:_MAX_TERMS]


@contextmanager
def open_neighbours(passages: Sequence[Mapping[str, Any]]) -> Iterator[Neighbours | None]:
    """Yield a search index over these rows of the selection, None if there are none; about a second for 10,000 passages."""
    if not passages:
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="cramlm-report-") as name:
        folder = Path(name)
        with (folder / "passages.jsonl").open("w", encoding="utf-8") as file:
            for row, passage in enumerate(passages):
                file.write(json.dumps({"id": str(row), "text": passage["text"]}) + "\n")
        config = CorpusConfig(files=(str(folder / "passages.jsonl"),), passage_words=_PASSAGE_WORDS)
        corpus = build_corpus(config, folder / "store", workers=1)
        yield Neighbours(corpus, build_index(corpus, folder / "store"))
