"""How training went: losses and dev scores of every phase, from the run's log."""

from __future__ import annotations

from collections.abc import Sequence

from cramlm.deploy.report.charts import Line, line_chart
from cramlm.deploy.report.facts import Json, RunFacts
from cramlm.deploy.report.markup import inline, missing, note, section
from cramlm.evaluation.kinds import NAMES, figure

_TEXT = {
    "mlm": "Guessing masked words",
    "clm": "Guessing the next word",
    "replaced": "Telling replaced words",
    "marks": "Finding words that matter",
}
_ORIGINS = (("external", "retrieved"), ("task", "task text"))
_LOSSES = {f"{text}_{origin}": name for text in _TEXT for origin, name in _ORIGINS} | {"task": "labels"}


def learning_curves(run: RunFacts) -> str:
    """Charts of each phase."""
    phases = dict.fromkeys(str(event["stage"]) for event in run.events if event["kind"] == "step")
    phases |= dict.fromkeys(run.phases)
    if not phases:
        return section("learning", "Learning", missing("No step of training is in the log (events.jsonl)."))
    return section("learning", "Learning", *(_phase(run, stage) for stage in phases))


def latest(run: RunFacts, stage: str, kind: str) -> list[Json]:
    """`data` of a phase's events of one kind, steps increasing. Where a phase went back to a checkpoint, or began again, its later words
    count."""
    kept: list[Json] = []
    for event in run.events:
        if event["stage"] == stage and event["kind"] == kind and "step" in event["data"]:
            while kept and kept[-1]["step"] >= event["data"]["step"]:
                kept.pop()
            kept.append(event["data"])
    return kept


def _phase(run: RunFacts, stage: str) -> str:
    steps, scores = latest(run, stage, "step"), latest(run, stage, "evaluation")
    charts = [
        *(_loss_chart(title, (f"{text}_external", f"{text}_task"), steps) for text, title in _TEXT.items()),
        _loss_chart("Learning the labels", ("task",), steps),
        _score_chart(run, scores),
    ]
    shown = [chart for chart in charts if chart]
    words = _words(run, stage, scores)
    if not steps:
        return (
            f"<h3>{inline(stage)}</h3>"
            + missing("The log holds no step of this phase; it was trained by a start whose log is gone.")
            + words
        )
    return f'<h3>{inline(stage)}</h3>{words}<div class="charts">{"".join(shown)}</div>'


def _words(run: RunFacts, stage: str, scores: Sequence[Json]) -> str:
    report = run.phases.get(stage)
    if report is None:
        return missing("This phase is not finished.")
    best = (
        ""
        if report["best_step"] is None
        else f"; best on dev after step {report['best_step']:,} ({figure(run.config.dev_metric, report['best_score'])})"
    )
    metric = run.config.dev_metric
    once = f"; dev {NAMES[metric]} {figure(metric, scores[0]['scores'][metric])}" if len(scores) == 1 else ""
    return note(f"{report['steps']:,} steps, {report['tokens']:,} tokens{best or once}.")


def _loss_chart(title: str, names: Sequence[str], steps: Sequence[Json]) -> str:
    lines = []
    for name, style in zip(names, ("one", "two"), strict=False):
        points = [(float(data["step"]), float(data[name])) for data in steps if name in data]
        if len(points) > 1:
            lines.append(Line(_LOSSES[name], points, style))
    if not lines:
        return ""
    told = " ".join(f"{line.name}: from {line.points[0][1]:.2f} to {line.points[-1][1]:.2f}." for line in lines)
    return line_chart(f"{title}: loss", f"Cross-entropy in nats over the steps. {told}", lines, x_name="step", y_format=_plain)


def _score_chart(run: RunFacts, scores: Sequence[Json]) -> str:
    metric = run.config.dev_metric
    points = [(float(data["step"]), float(data["scores"][metric])) for data in scores]
    if len(points) < 2:
        return ""
    best = max(points, key=lambda point: (point[1], -point[0]))
    first, last, highest = (figure(metric, value) for value in (points[0][1], points[-1][1], best[1]))
    told = f"Dev {NAMES[metric]} over the steps: from {first} to {last}, best {highest} after step {best[0]:.0f}."
    line = Line(last, points, "one", mark=(*best, f"best {highest}"))
    return line_chart(f"Score on dev: {NAMES[metric]}", told, [line], x_name="step", y_format=lambda value: figure(metric, value, places=0))


def _plain(value: float) -> str:
    return f"{value:g}"
