"""The page's head (what came out, at a glance), what was asked and what it cost, and where everything came from."""

from __future__ import annotations

import html
import shlex
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import PurePath
from typing import Any

from cramlm.config import parse_budget
from cramlm.deploy.report.facts import RunFacts
from cramlm.deploy.report.markup import Cell, clean, facts, inline, missing, note, number, passage, power, section, table
from cramlm.evaluation.kinds import NAMES, figure, metric_of

_STAGES = ("task", "baseline", "plan", "corpus", "index", "selection", "tokenizer", "schedule", "evaluation", "export")


def head(run: RunFacts) -> str:
    """Title, verdict and the figures that matter most."""
    day = _day(run)
    parts = [
        f"<p class=kicker>cramlm run{f' · {day}' if day else ''}</p>",
        f"<h1>{inline(run.config.name)} <span class=quiet>{inline(PurePath(run.path.resolve()).name)}</span></h1>",
    ]
    if run.scores is not None:
        parts.append(f"<p class=verdict>{inline(run.scores['verdict'], limit=400)}</p>")
    if not run.finished:
        done = ", ".join(run.stages) or "nothing"
        parts.append(missing(f"This run is not finished. Published so far: {done}. Run `cramlm fit` again with the same flags to go on."))
    parts.append(facts(_glance(run)))
    return "<header>" + "\n".join(parts) + "</header>\n"


def asked_and_spent(run: RunFacts) -> str:
    """The request in words, seconds per stage, and a line for each phase."""
    config = run.config
    files = [
        ("training texts", config.task.train),
        ("dev", config.task.dev or "split off from train"),
        ("test", config.task.test or "none"),
    ]
    asked = [
        ("recipe", inline(config.name)),
        ("budget", inline(config.budget or "none: as long as it takes")),
        ("seed", str(config.seed)),
        *((name, inline(str(value), limit=60)) for name, value in files),
        ("raw text", inline(", ".join(config.corpus.files), limit=60) if config.corpus else "none"),
        ("retriever", inline(_retriever(run), limit=90)),
        ("encoder", _encoder(run)),
        ("machine", inline(_machine(run), limit=200)),
    ]
    warned = dict.fromkeys(str(event.get("message", "")) for event in run.events if event["kind"] == "warning")
    warnings = "".join(f"<li>{passage(text)}</li>" for text in list(warned)[:30])
    return section(
        "asked",
        "Asked and spent",
        facts(asked),
        _stage_table(run),
        _phase_table(run),
        f"<h3>Warnings</h3><ul class=warnings>{warnings}</ul>" if warnings else note("The run warned of nothing."),
    )


def provenance(run: RunFacts) -> str:
    """Files and hashes, versions, the command to repeat, and every knob."""
    parts = []
    told = run.provenance or {}
    if rows := list(_files(run)):
        parts.append(table("What went in", ["file", "what", "rows used", "sha256"], rows, text_columns=(0, 1, 3)))
    hashes: list[list[Cell | str]] = [
        [name, artifact.kind, Cell(f"<code>{artifact.fingerprint[:16]}</code>")] for name, artifact in run.stages.items()
    ]
    if hashes:
        parts.append(
            table(
                "What came out: published stages and their fingerprints", ["folder", "kind", "fingerprint"], hashes, text_columns=(0, 1, 2)
            )
        )
    if versions := told.get("versions"):
        parts.append(facts((name, inline(str(version))) for name, version in versions.items()))
    command = f"cramlm fit --config {shlex.quote(str(run.path / 'run.toml'))} --out {shlex.quote(str(run.path) + '-again')}"
    parts.append(f"<h3>The command to repeat it</h3><pre><code><bdi>{html.escape(command)}</bdi></code></pre>")
    parts.append(
        note(
            f"Equal config, data, threads ({_threads(run)}) and versions give equal bits, unless a budget lets the clock choose the steps."
        )
    )
    knobs = html.escape(clean(run.config_text))
    parts.append(f"<details><summary>Every knob (run.toml)</summary><pre><code><bdi>{knobs}</bdi></code></pre></details>")
    return section("provenance", "Provenance", *parts)


def chosen_baseline(run: RunFacts) -> str | None:
    """The name of the baseline that dev chose."""
    return None if run.baselines is None else str(run.baselines["chosen"])


def capital(name: str) -> str:
    """As it begins a sentence."""
    return name[0].upper() + name[1:]


def score_text(scores: Mapping[str, Any], metric: str) -> str:
    """A score, shares in percent, with its interval where one is known."""
    if metric not in scores["intervals"]:
        return figure(metric, scores[metric])
    low, high = (figure(metric, end) for end in scores["intervals"][metric])
    return f"{figure(metric, scores[metric])} <span class=interval>{low}–{high}</span>"


def duration(seconds: float) -> str:
    """Readable time."""
    if seconds < 90:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def stage_seconds(run: RunFacts) -> dict[str, float]:
    """Seconds from the beginning of each stage to its last word, over all starts of the run; from the log."""
    began: dict[str, float] = {}
    spent: dict[str, float] = {}
    for event in run.events:
        stage, when = str(event["stage"]), float(event["time"])
        if event["kind"] == "start":
            if stage == "task":
                began.clear()
            began[stage] = when
        elif stage in began:
            spent[stage] = spent.get(stage, 0.0) + when - began[stage]
            began[stage] = when
    return spent


def _glance(run: RunFacts) -> Iterator[tuple[str, str]]:
    split = next((split for split in ("test", "dev") if split in run.own_scores), None)
    if split is not None and run.scores is not None:
        metric = metric_of(run.config.task.kind)
        yield f"{split} {NAMES[metric]}", f"<b>{score_text(run.own_scores[split], metric)}</b>"
        if (chosen := chosen_baseline(run)) in run.scores["models"]:
            yield f"{chosen}, {split}", score_text(run.scores["models"][chosen][split], metric)
        if leak_free := run.own_scores.get("test_leak_free"):
            yield "test rows not in train", score_text(leak_free, metric)
    if run.selection is not None:
        yield "passages retrieved", f"{run.selection['documents']['selected']:,}"
    if run.phases:
        yield "tokens trained on", f"{sum(report['tokens'] for report in run.phases.values()) / 1e6:.2f} M"
        yield "training FLOPs", power(sum(report["executed_flops"] for report in run.phases.values()))
    if spent := stage_seconds(run):
        yield "time, all stages", duration(sum(spent.values()))


def _stage_table(run: RunFacts) -> str:
    spent = stage_seconds(run)
    if not spent:
        return missing("The run left no log of its stages (events.jsonl), so their times are unknown.")
    total = sum(spent.values())
    order = [name for name in (*_STAGES[:8], *(name for name in spent if name not in _STAGES), *_STAGES[8:]) if name in spent]
    rows: list[list[Cell | str]] = [
        [name, Cell(duration(spent[name]), order=spent[name], bar=spent[name] / max(spent.values())), _share(spent[name] / total)]
        for name in order
    ]
    starts = sum(event["stage"] == "task" and event["kind"] == "start" for event in run.events)
    asked = "" if run.config.budget is None else f" The budget was {_amount(run.config.budget)}."
    began = f"{starts} starts" if starts > 1 else "one start"
    return table("Where the time went", ["stage", "seconds", "share"], rows) + note(f"{duration(total)} in {began}.{asked}")


def _amount(budget: str) -> str:
    seconds = parse_budget(budget).seconds
    return budget if seconds is None else duration(seconds)


def _share(share: float) -> Cell:
    return Cell(f"{100 * share:.0f} %", order=share)


def _phase_table(run: RunFacts) -> str:
    if not run.phases:
        return missing("No phase of training is finished.")
    rows = []
    for report in run.phases.values():
        seconds = max(report["seconds"], 1e-9)
        flops = [Cell(power(report[name]), order=report[name]) for name in ("executed_flops", "paper_flops")]
        cells = [
            number(report["steps"]),
            number(report["tokens"]),
            Cell(duration(seconds), order=seconds),
            number(report["tokens"] / seconds),
        ]
        rows.append([report["name"], *cells, *flops])
    header = ["phase", "steps", "tokens", "time", "tokens/s", "FLOPs executed", "FLOPs, paper's count"]
    return table("Training, phase by phase", header, rows) + note(
        "The paper counts 6 × tokens × parameters; executed are the matrix products that ran."
    )


def _retriever(run: RunFacts) -> str:
    chosen = (run.plan or {}).get("retriever") or (None if run.config.retriever is None else run.config.retriever.model_dump(mode="json"))
    if run.config.corpus is None or chosen is None:
        return "none: labels only"
    return ", ".join(
        f"{name} {value}" if name != "kind" else str(value) for name, value in chosen.items() if value is not None and name != "members"
    )


def _encoder(run: RunFacts) -> str:
    encoder, size = run.config.encoder, (run.provenance or {}).get("parameters")
    told = "" if size is None else f", {size / 1e6:.1f}M parameters"
    return html.escape(f"{encoder.shape}, {encoder.layers} layers of width {encoder.hidden}{told}")


def _machine(run: RunFacts) -> str:
    described = next((str(event["message"]) for event in reversed(run.events) if event["stage"] == "machine"), "")
    speed = (run.plan or {}).get("speed")
    measured = f"{speed['joint']:,.0f} tokens/s measured with the vocabulary head" if speed else ""
    precision = (run.provenance or {}).get("precision")
    threads = "1 thread" if _threads(run) == "1" else f"{_threads(run)} threads"
    return "; ".join(part for part in (described, threads, precision and str(precision), measured) if part)


def _threads(run: RunFacts) -> str:
    return str((run.provenance or {}).get("threads") or run.config.threads or "all")


def _files(run: RunFacts) -> Iterator[list[Cell | str]]:
    told = run.provenance or {}
    hashes = told.get("task", {}).get("fingerprint", {})
    for split in ("train", "dev", "test"):
        path = getattr(run.config.task, split)
        if path is not None and told.get("task"):
            yield [
                PurePath(path).name,
                f"{split}: texts and labels",
                number(told["task"][split]),
                Cell(f"<code>{hashes.get(split, '')[:16]}</code>"),
            ]
    for file in (told.get("corpus") or {}).get("files", [])[:200]:
        yield [PurePath(file["name"]).name, "raw text", number(file["rows_used"]), Cell(f"<code>{html.escape(file['sha256'][:16])}</code>")]


def _day(run: RunFacts) -> str:
    return datetime.fromtimestamp(float(run.events[-1]["time"]), UTC).strftime("%d %B %Y, %H:%M UTC") if run.events else ""
