"""How good the model is and where it errs: scores beside the baselines, each label, confusion, calibration, the surest mistakes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial

from cramlm.data.task import text_key
from cramlm.deploy.report.charts import Estimate, interval_chart, reliability_chart
from cramlm.deploy.report.facts import Json, RunFacts
from cramlm.deploy.report.markup import Cell, inline, missing, note, number, passage, percent, section, table
from cramlm.deploy.report.neighbours import Near, Neighbours
from cramlm.deploy.report.overview import capital, chosen_baseline, score_text
from cramlm.evaluation.kinds import KINDS, NAMES, figure, is_percent, metric_of

_MOST_LABELS = 30  # of a confusion matrix; beyond, the pairs confused most often are listed
_MOST_PAIRS = 40
_CARDS = 10
_ROWS = 200
_BINS = 10
_CONFUSION_KEY = note("Rows are the true labels, columns what the model said; shading is the share of the row.")


def scores(run: RunFacts) -> str:
    """Dev and test scores of the model and of every baseline."""
    if run.scores is None:
        return section("scores", "Scores", missing("The model is not evaluated yet."))
    split = "test" if "test" in run.own_scores else "dev"
    chosen, models = chosen_baseline(run), run.scores["models"]
    name = NAMES[metric_of(run.config.task.kind)]
    charts = [_score_chart(run, models, split, f"{capital(name)} on {split}, with 95 % intervals")]
    if leak_free := run.own_scores.get("test_leak_free"):
        charts.append(_score_chart(run, models, "test_leak_free", f"The same on the {leak_free['rows']:,} test rows not in train"))
    words = (
        "Intervals are bootstraps over rows: how much a score would move with other texts of the same kind. Variants and settings were "
        "chosen on dev; test was scored once."
    )
    told = f"{_leaks(run)}{note(words)}"
    side = (
        f'<div class="pair">{"".join(charts)}</div>{told}' if len(charts) > 1 else f'<div class="pair">{charts[0]}<div>{told}</div></div>'
    )
    parts = [side, _score_table(run, models, chosen)]
    if len(models) == 1:
        parts.append(missing("No baseline was fitted to compare with."))
    return section("scores", "Scores", *parts)


def errors(run: RunFacts, neighbours: Neighbours | None) -> str:
    """Labels, confusion, calibration and mistakes on test (dev, where there is no test)."""
    split = run.split
    if split is None:
        return section("errors", "Where it errs", missing("There are no predictions yet."))
    own = run.own_scores[split]
    return section(
        "errors",
        f"Where it errs, on {split}",
        _label_table(run, split) if "per_class" in own else "",
        *_one_label_errors(run, split, own, neighbours),
    )


def _one_label_errors(run: RunFacts, split: str, own: Json, neighbours: Neighbours | None) -> Iterator[str]:
    if (kind := run.config.task.kind) != "classification":
        yield missing(f"Confusion, calibration and the surest mistakes are shown where texts have one label; this is a {kind} task.")
        return
    yield from (
        '<div class="pair">',
        _confusion(list(own["per_class"]), own["confusion"]),
        _calibration(run.predictions[split], own.get("calibration_error")),
        "</div>",
        _mistakes(run, split, neighbours),
    )


def _name(run: RunFacts, name: str) -> str:
    if name == run.config.name:
        return f"{name} (this run)"
    return f"{name} (chosen on dev)" if name == chosen_baseline(run) else name


def _score_chart(run: RunFacts, models: Mapping[str, Json], split: str, title: str) -> str:
    metric = metric_of(run.config.task.kind)
    shown = partial(figure, metric)
    rows = []
    for name, entry in models.items():
        if split in entry:
            low, high = entry[split]["intervals"][metric]
            rows.append(Estimate(_name(run, name), entry[split][metric], low, high, emphasised=name == run.config.name))
    told = "; ".join(f"{row.name} {shown(row.value)} ({shown(row.low)} to {shown(row.high)})" for row in rows)
    return interval_chart(title, told, rows, percent=is_percent(metric))


def _leaks(run: RunFacts) -> str:
    leak_free = run.own_scores.get("test_leak_free")
    if leak_free is None:
        return ""
    metric, rows = metric_of(run.config.task.kind), run.own_scores["test"]["rows"]
    told, instead = (figure(metric, scores[metric]) for scores in (leak_free, run.own_scores["test"]))
    return note(
        f"{rows - leak_free['rows']:,} of {rows:,} test rows stand in train as well. On the other {leak_free['rows']:,} the model's "
        f"{NAMES[metric]} is {told} instead of {instead}."
    )


def _score_table(run: RunFacts, models: Mapping[str, Json], chosen: str | None) -> str:
    kind = run.config.task.kind
    main, metrics = metric_of(kind), KINDS[kind].metrics
    has_test = any("test" in entry for entry in models.values())
    rows: list[list[Cell | str]] = []
    for name, entry in models.items():
        own = f"<b>{inline(_name(run, name))}</b>" if name in (run.config.name, chosen) else inline(name)
        rows.append([Cell(own), *_figures(entry, "dev", (main,)), *(_figures(entry, "test", metrics) if has_test else ())])
        if "test_leak_free" in entry:
            label = f"<span class=sub>{inline(name)}, {entry['test_leak_free']['rows']:,} rows not in train</span>"
            rows.append([Cell(label), Cell(""), *_figures(entry, "test_leak_free", metrics)])
    header = ["model", f"dev {NAMES[main]}", *((f"test {NAMES[metric]}" for metric in metrics) if has_test else ())]
    return table("Every model" if kind == "regression" else "Every model, in percent", header, rows)


def _figures(entry: Json, split: str, metrics: Sequence[str]) -> Iterator[Cell]:
    found = entry.get(split)
    for metric in metrics:
        yield Cell("–") if found is None else Cell(score_text(found, metric), order=found[metric])


def _label_table(run: RunFacts, split: str) -> str:
    rival = chosen_baseline(run)
    theirs = None if rival is None or run.scores is None else run.scores["models"].get(rival, {}).get(split, {}).get("per_class")
    rows = []
    for label, row in run.own_scores[split]["per_class"].items():
        cells = [percent(row["f1"], bar=True), percent(row["precision"]), percent(row["recall"]), number(row["support"])]
        other = [] if theirs is None else [percent(theirs[label]["f1"]) if label in theirs else Cell("–")]
        rows.append([label, *cells, *other])
    header = ["label", "F1", "precision", "recall", "texts", *([] if theirs is None else [f"F1 of {rival}"])]
    rare = sum(row["support"] < 10 for row in run.own_scores[split]["per_class"].values())
    told = note(f"{rare} labels have fewer than 10 texts here; their figures say little.") if rare else ""
    return table("Label by label", header, rows) + told


def _confusion(labels: Sequence[str], counts: Sequence[Sequence[int]]) -> str:
    if len(labels) > _MOST_LABELS:
        return _confused_pairs(labels, counts)
    head = "".join(f'<th scope="col"><div>{inline(label, limit=24)}</div></th>' for label in labels)
    body = []
    for place, (label, row) in enumerate(zip(labels, counts, strict=True)):
        total = sum(row)
        cells = "".join(
            f'<td class="{"hit" if place == column else "miss"}" style="--share:{value / total if total else 0:.3f}">{value or ""}</td>'
            for column, value in enumerate(row)
        )
        body.append(f'<tr><th scope="row">{inline(label, limit=24)}</th>{cells}<td class="sum">{total:,}</td></tr>')
    head = f'<thead><tr><td></td>{head}<th scope="col" class="sum"><div>texts</div></th></tr></thead>'
    return (
        '<div class="scroll" tabindex="0" role="region" aria-label="confusion matrix"><table class="confusion">'
        f"<caption>Confusion of labels</caption>{head}<tbody>{''.join(body)}</tbody></table>{_CONFUSION_KEY}</div>"
    )


def _confused_pairs(labels: Sequence[str], counts: Sequence[Sequence[int]]) -> str:
    pairs = [
        (value, true, said)
        for row, true in zip(counts, labels, strict=True)
        for value, said in zip(row, labels, strict=True)
        if value and true != said
    ]
    pairs.sort(key=lambda pair: (-pair[0], pair[1], pair[2]))
    rows: list[list[Cell | str]] = [[true, said, number(value)] for value, true, said in pairs[:_MOST_PAIRS]]
    return table(
        f"The labels confused most often ({len(labels)} labels: too many for a matrix)",
        ["true", "said", "texts"],
        rows,
        text_columns=(0, 1),
    )


def _calibration(predictions: Sequence[Json], error: float | None) -> str:
    bins: list[list[tuple[float, bool]]] = [[] for _ in range(_BINS)]
    for line in predictions:
        confidence = line["probabilities"][line["predicted"]]
        bins[min(int(confidence * _BINS), _BINS - 1)].append((confidence, line["predicted"] == line["label"]))
    points = [(sum(c for c, _ in each) / len(each), sum(right for _, right in each) / len(each), len(each)) for each in bins if each]
    sure = sum(c * rows for c, _, rows in points) / len(predictions)
    right = sum(a * rows for _, a, rows in points) / len(predictions)
    words = f"On average it is {100 * sure:.0f} % sure and {100 * right:.0f} % right: " + (
        "about as sure as it should be."
        if abs(sure - right) < 0.03
        else "too sure of itself."
        if sure > right
        else "less sure than it could be."
    )
    words += "" if error is None else f" Expected calibration error {100 * error:.1f} points (15 bins)."
    told = words + " " + " ".join(f"Where {100 * c:.0f} % sure, {100 * a:.0f} % right ({rows} texts)." for c, a, rows in points)
    chart = reliability_chart("Calibration: sure and right", told, points)
    return f'<div class="above">{chart}{note(words)}{note("A dot is a tenth of the scale, its area the number of texts.")}</div>'


def _mistakes(run: RunFacts, split: str, neighbours: Neighbours | None) -> str:
    wrong = [line for line in run.predictions[split] if line["predicted"] != line["label"]]
    wrong.sort(key=lambda line: (-line["probabilities"][line["predicted"]], line["id"]))
    if not wrong:
        return missing("There is no mistake to show.")
    examples = run.examples()
    if not examples:
        return missing(f"The mistaken texts are not shown: {run.task_trouble}.")
    shown = [line for line in wrong if line["id"] in examples]
    texts = [examples[line["id"]].whole_text for line in shown[:_CARDS]]
    near = neighbours.nearest(texts, limit=3) if neighbours is not None else [[] for _ in texts]
    known = {text_key(example): str(example.label) for example in run.task.train} if run.task is not None else {}
    cards = "\n".join(
        _card(run, line, text, known.get(text_key(examples[line["id"]])), found)
        for line, text, found in zip(shown, texts, near, strict=False)
    )
    rows: list[list[Cell | str]] = [
        [
            Cell(passage(examples[line["id"]].whole_text, limit=140, most=1000)),
            str(line["label"]),
            line["predicted"],
            percent(line["probabilities"][line["predicted"]], 0),
            line["id"],
        ]
        for line in shown[:_ROWS]
    ]
    caption = f"The {len(rows):,} surest of {len(wrong):,} mistakes ({len(run.predictions[split]):,} texts)"
    everything = table(caption, ["text", "true", "said", "sure", "row"], rows, text_columns=(0, 1, 2, 4))
    told = "Each with the retrieved passages nearest to it (BM25 over the selection); shared words are marked."
    return (
        f"<h3>The surest mistakes</h3>{note(told) if neighbours else ''}"
        f'<div class="cards">{cards}</div><details class=wide><summary>All in one table</summary>{everything}</details>'
    )


def _card(run: RunFacts, line: Json, text: str, in_train: str | None, near: Sequence[Near]) -> str:
    said = line["predicted"]
    sure = 100 * line["probabilities"][said]
    own = 100 * line["probabilities"].get(line["label"], 0.0)
    wrong = f"<span class=wrong>said {inline(said)}</span> {sure:.0f} %"
    right = f"<span class=right>true {inline(str(line['label']))}</span> {own:.0f} %"
    again = f"<p class=meta>The same text stands in train, as {inline(in_train)}.</p>" if in_train is not None else ""
    found = []
    for passage_near in near:
        there = run.passages[passage_near.place]
        told = f"score {passage_near.score:.3g} · rank {there['rank'] + 1:,} · {inline(there['source'])}"
        found.append(f"<li><p class=meta>{told}</p>{passage(there['text'], terms=passage_near.terms, limit=220)}</li>")
    below = (
        f"<details><summary>{len(found)} nearest retrieved passages</summary><ul class=near>{''.join(found)}</ul></details>"
        if found
        else ""
    )
    terms = {term for passage_near in near for term in passage_near.terms}
    return f"<article><p class=meta>{wrong} · {right} · {inline(line['id'])}</p><p>{passage(text, terms=terms)}</p>{again}{below}</article>"
