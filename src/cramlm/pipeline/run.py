"""The whole method in order: `run(config, out=...)`. The only file that knows the order.

    task -> baseline -> plan -> corpus -> index -> selection -> tokenizer -> tokens -> prompt -> embedding -> static -> schedule -> teacher
    -> phases -> logit adjustment -> evaluation -> export -> report

A run of a linear model (`config.model`) leaves out what only an encoder needs.

Every arrow is a folder that is published whole and keyed by what made it (artifacts.py), so that the same call again finishes what a
killed one began, says "up to date" where nothing changed, and names the setting that makes a stage run again. Corpus and index are shared
between runs and live in the store; everything else is in the run's folder.
"""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from cramlm.config.base import Budget, parse_budget
from cramlm.config.run import RunConfig, load_config
from cramlm.data.task import read_task
from cramlm.errors import CramError, Stopped
from cramlm.model.huggingface.pretrained import start_from
from cramlm.model.tokenizer import Tokenizer
from cramlm.pipeline import trackers
from cramlm.pipeline.context import Clock, Context
from cramlm.pipeline.run_folder import EventLog, Recorder, folder_for, read_record, refuse_other_task
from cramlm.pipeline.stages import evaluate, linear, text, train
from cramlm.pipeline.stages.ranks import dismiss, follow
from cramlm.pipeline.stages.teacher import needs_linear_teacher, teach
from cramlm.planning.plan import available_cores
from cramlm.planning.plan import plan as plan_stage
from cramlm.planning.schedule import schedule
from cramlm.planning.speed import describe_machine
from cramlm.records import Emit, Event, silent
from cramlm.reporting.page import refresh_report
from cramlm.storage.artifacts import Artifact, StaleStage, checking, confirming, lock
from cramlm.storage.artifacts import default_store as default_store
from cramlm.training.distributed import ALONE, Ranks
from cramlm.training.loop import never
from cramlm.training.memory import trim


@dataclass(frozen=True, slots=True)
class Run:
    """A finished run: its folder, the config as planned, and the scores (evaluation/scores.json)."""

    path: Path
    config: RunConfig
    scores: Mapping[str, Any]

    @property
    def export(self) -> Path:
        """The plain Hugging Face folder."""
        return self.path / "export"


def run(
    config: RunConfig,
    *,
    out: str | Path | None = None,
    overwrite: bool = False,
    track: str | None = None,
    store: str | Path | None = None,
    emit: Emit = silent,
    stop: Callable[[], int | None] = never,
    began: float | None = None,
    ranks: Ranks = ALONE,
) -> Run:
    """Do everything that `config` asks and is not already done in `out`.

    out: the run's folder; None = runs/TASK-RECIPE-N, where an equal call has left off, or a new one. overwrite: replace a run on another
    task. track: the experiment tracker to follow it with (pipeline/trackers.py). `stop` is asked between training steps; an exit code ends
    the run resumably. `began`: when a time budget began to run, as `time.monotonic` tells it; None = now. PyTorch's number of threads is
    afterwards what it was. `ranks`: those that train together (training/distributed.py), each of which makes this call; the first does all
    the rest, and all get the same answer.

    Raises:
        UsageError: if `out` holds a run on another task. CramError: one of its kinds (errors.py); what was published before stays, and the
        same call continues from there.
    """
    began = time.monotonic() if began is None else began
    stop = ranks.watch(stop)
    if ranks.index > 0:
        with _thread_count_kept():
            told = follow(ranks, stop=stop)
        return Run(Path(told["folder"]), load_config(told["config"]), told["scores"])
    ranks.lead()
    log = EventLog()
    early = _interruptible(log.around(emit), stop)
    config, pretrained = start_from(config)
    task = read_task(config.task, seed=config.seed, emit=early)
    folder = folder_for(config, task, emit=early) if out is None else Path(out)
    with lock(folder / "run"), _thread_count_kept():
        if not overwrite:
            refuse_other_task(folder, config, task)
        with _traceback_to(folder / "error.log"), trackers.follow(track, folder, config, emit) as heard:
            recorder = Recorder.begin(folder, config)
            log.begin(folder)
            emit = _interruptible(log.around(heard), stop)
            emit(Event("note", "machine", describe_machine()))
            clock = Clock(began, Budget() if config.budget is None else parse_budget(config.budget))
            context = Context(config, task, folder, _store(store), clock, emit, stop, ranks, pretrained)
            with confirming(recorder.confirm):
                config, evaluation = _run_stages(context)
            refresh_report(folder, emit=emit)
    trim()
    scores = json.loads((evaluation.path / "scores.json").read_bytes())
    dismiss(ranks, {"folder": str(folder), "config": config.model_dump(mode="json"), "scores": scores})
    return Run(folder, config, scores)


def unfinished(config: RunConfig, *, out: Path, store: str | Path | None = None, overwrite: bool = False) -> str | None:
    """Return what `run` would still do in `out` for this config, or why it would fail; None if every stage is up to date.

    Goes through the stages of a run without building any, so that it decides as a run does.

    Raises:
        UsageError: if `out` holds a run on another task, unless `overwrite`.
    """
    if not out.is_dir():
        return "it has not begun"
    try:
        config, pretrained = start_from(config)
        task = read_task(config.task, seed=config.seed)
    except CramError as error:
        return str(error)
    if not overwrite:
        refuse_other_task(out, config, task)
    clock = Clock(time.monotonic(), Budget() if config.budget is None else parse_budget(config.budget))
    try:
        with lock(out / "run"), _thread_count_kept(), checking():
            if (record := read_record(out)) is None or not record.finished:
                return "it was stopped before its end"
            _run_stages(Context(config, task, out, _store(store), clock, pretrained=pretrained))
    except (StaleStage, CramError) as reason:
        return str(reason)
    return None


def _run_stages(run: Context) -> tuple[RunConfig, Artifact]:
    """All stages in order: each one that is up to date is kept, each other one is built. Writes nothing but stages. Returns the config with
    the phases as they were run, and the evaluation.
    """
    run = replace(run, config=_on_its_share_of_the_cores(run.config, run.ranks))
    text.check_prompt(run)
    text.report_task(run)
    baseline = linear.fit_baseline(run)
    return (run.config, _run_linear(run, baseline)) if run.config.model != "encoder" else _run_encoder(run, baseline)


def _run_encoder(run: Context, baseline: Artifact | None) -> tuple[RunConfig, Artifact]:
    """The config with the phases as they were run, and the evaluation."""
    config = run.config
    plan = plan_stage(run)
    torch.set_num_threads(plan.threads)
    corpus = text.corpus(run)
    selection = text.selection(run, plan, corpus)
    texts = text.tokens(run, selection, text.tokenizer(run, selection))
    texts = replace(texts, prompt=text.prompt(run, texts.tokenizer))
    has_teacher = needs_linear_teacher(config.phases)
    has_static = has_teacher or (baseline is not None and selection is not None)
    from_cooccurrence = config.encoder.embedding_init == "cooccurrence"
    vectors = linear.embedding(run, texts) if has_static or from_cooccurrence else None
    static = linear.fit_static(run, texts, vectors, baseline) if has_static and vectors is not None else None
    planned = schedule(run, plan, texts)
    teacher = teach(run, texts, static, planned.phases) if has_teacher and static is not None else None
    if texts.selection is not None:
        texts.selection.forget_texts()
    trained = train.train(run, plan, planned, texts, teacher=teacher, embedding=vectors if from_cooccurrence else None)
    trained = evaluate.adjust_logits(run, plan, trained, texts.tokenizer)
    rungs = {name: model for name, model in (("tfidf", baseline), ("static", static)) if model is not None and config.baseline.enabled}
    evaluation = evaluate.evaluate_encoder(run, plan, trained, texts.tokenizer, rungs)
    evaluate.export_encoder(run, plan, trained, texts, corpus, evaluation)
    return config.model_copy(update={"phases": trained.phases}), evaluation


def _run_linear(run: Context, baseline: Artifact | None) -> Artifact:
    """The evaluation of a run whose model is TF-IDF or `static`."""
    corpus = selection = None
    tokenizer: Tokenizer | None = None
    rungs: dict[str, Artifact] = {} if baseline is None else {"tfidf": baseline}
    if run.config.model == "static":
        corpus = text.corpus(run)
        selection = text.selection(run, linear.plan_linear(run.config), corpus)
        texts = text.tokens(run, selection, text.tokenizer(run, selection))
        tokenizer = texts.tokenizer
        rungs["static"] = linear.fit_static(run, texts, linear.embedding(run, texts), baseline)
    evaluation = evaluate.evaluate_linear(run, rungs, tokenizer=tokenizer)
    evaluate.export_linear(run, rungs[run.config.model], corpus, selection, evaluation)
    return evaluation


def _store(store: str | Path | None) -> Path:
    return Path(store) if store is not None else default_store()


def _on_its_share_of_the_cores(config: RunConfig, ranks: Ranks) -> RunConfig:
    """The config with threads for one of the ranks on this machine, where it leaves them open."""
    if config.threads is not None or ranks.local_count == 1:
        return config
    return config.model_copy(update={"threads": max(1, available_cores() // ranks.local_count)})


@contextmanager
def _thread_count_kept() -> Iterator[None]:
    """The threads of a run are those of its plan; the caller's number comes back afterwards."""
    before = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _interruptible(emit: Emit, stop: Callable[[], int | None]) -> Emit:
    """`emit`, and an end at the next sign of progress once `stop` asks for it; training stops by itself, at a step that it saves."""

    def checked(event: Event) -> None:
        emit(event)
        if event.kind == "progress" and event.unit != "steps" and (code := stop()) is not None:
            raise Stopped("stopped; run the same command again to continue", exit_code=code)

    return checked


@contextmanager
def _traceback_to(path: Path) -> Iterator[None]:
    """Keep the traceback of whatever fails in the run's folder."""
    try:
        yield
    except Exception:
        if path.parent.is_dir():
            path.write_text(traceback.format_exc(), "utf-8")
        raise
