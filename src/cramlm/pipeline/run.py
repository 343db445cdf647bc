"""The whole method in order: `run(config, out=...)`.

    task -> baseline -> plan -> corpus -> index -> selection -> tokenizer -> tokens -> prompt -> word vectors -> embedding
    -> bayes -> static -> teacher -> schedule -> phases -> logit adjustment -> evaluation -> export -> report

A linear model (`config.model`) skips the stages that only an encoder needs; what imports torch is imported where it is used, since a run of
a linear model needs none.

Every stage publishes a folder under a key of its inputs and settings (context.py, storage/artifacts.py). The same call again continues an
interrupted run, keeps what is up to date, and names the setting that makes a stage run again. Corpus and index are in the store, shared
between runs; everything else is in the run's folder, linked from the store if another run has built an equal stage (`shared_stages`).
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

from threadpoolctl import threadpool_limits

from cramlm.config.run import RunConfig, load_config
from cramlm.data.decontamination import without_overlap
from cramlm.data.task import read_task
from cramlm.errors import CramError, Stopped, UsageError, brief
from cramlm.io.machine import available_cores, describe_machine
from cramlm.io.paths import at_home
from cramlm.model.huggingface.pretrained import start_from
from cramlm.pipeline import trackers
from cramlm.pipeline.context import Process, RunContext, shared_stages
from cramlm.pipeline.run_folder import EventLog, begin_record, folder_for, read_record, refuse_other_folder, refuse_other_task
from cramlm.pipeline.stages import evaluate, linear, text
from cramlm.records import Emit, Event, silent
from cramlm.reporting.page import refresh_report
from cramlm.storage.artifacts import Artifact
from cramlm.storage.locks import lock
from cramlm.storage.stages import StaleStage, checking, confirming, default_store
from cramlm.training.ranks import Ranks


@dataclass(frozen=True, slots=True)
class Run:
    """A finished run: its folder, the config with its final phases, and the scores (evaluation/scores.json)."""

    path: Path
    config: RunConfig
    scores: Mapping[str, Any]

    @property
    def export(self) -> Path:
        """The exported folder."""
        return self.path / "export"


def run(
    config: RunConfig,
    *,
    out: str | Path | None = None,
    overwrite: bool = False,
    track: str | None = None,
    store: str | Path | None = None,
    emit: Emit = silent,
    process: Process = Process(),  # noqa: B008 - frozen
) -> Run:
    """Build every stage of `config` that is not up to date in `out`.

    out: the run's folder; None = runs/TASK-RECIPE-N, the last one with this config and task, else a new one. overwrite: replace a run on
    another task. track: an experiment tracker (trackers.py). store: folder of corpora, indexes and shared stages. process: signals, start
    time, ranks; each rank makes this call, and all return the same. PyTorch's number of threads is restored at the end.

    Raises:
        UsageError: if `config` is no RunConfig, or `out` holds a run on another task, or other files and no run. CramError: one of its
        kinds (errors.py); published stages stay, and the same call continues from there.
    """
    if not isinstance(config, RunConfig):
        raise UsageError(f"the config is {brief(config)}, not a RunConfig; make one by a recipe, like cramlm.recipes.tlm(train=FILE)")
    began = time.monotonic() if process.began is None else process.began
    ranks, stop = process.ranks, process.ranks.watch(process.stop)
    if ranks.index > 0:
        result = _follow(config, ranks, stop)
        return Run(Path(result["folder"]), load_config(result["config"]), result["scores"])
    ranks.lead()
    log = EventLog()
    early = _interruptible(log.around(emit), stop)
    config, pretrained = start_from(config)
    if config.model == "encoder":
        from cramlm.model.model import resolve_device

        resolve_device(config.device)  # refuses a device that is not there before anything is written
    if out is not None:
        refuse_other_folder(at_home(out))
    task = without_overlap(read_task(config.task, seed=config.seed, emit=early), emit=early)
    folder = folder_for(config, task, emit=early) if out is None else at_home(out)
    with lock(folder / "run"):
        if not overwrite:
            refuse_other_task(folder, config, task)
        with _traceback_to(folder / "error.log"), trackers.follow(track, folder, config, emit) as tracked:
            confirm = begin_record(folder, config)  # before the log, whose lines of earlier calls it counts
            log.begin(folder)
            emit = _interruptible(log.around(tracked), stop)
            emit(Event("note", "machine", describe_machine()))
            config = _with_threads_per_rank(config, ranks)
            context = RunContext(config, task, folder, _store(store), began, emit, stop, ranks, pretrained)
            with confirming(confirm), shared_stages(context.store, config, emit=emit):
                config, evaluation = _run_stages(context)
            refresh_report(folder, emit=emit)
    scores = json.loads((evaluation.path / "scores.json").read_bytes())
    # Ends `train.follow` on the other ranks.
    ranks.on_leader(lambda: {"result": {"folder": str(folder), "config": config.model_dump(mode="json"), "scores": scores}})
    return Run(folder, config, scores)


def unfinished(config: RunConfig, *, out: Path, store: str | Path | None = None, overwrite: bool = False) -> str | None:
    """Return the first stage that `run` would build in `out` with its reason, or the error that it would raise; None if all are up to date.

    Runs through the stages without building any, so that the decision is that of a run.

    Raises:
        UsageError: if `out` holds a run on another task, unless `overwrite`.
    """
    if not out.is_dir():
        return "not started"
    try:
        config, pretrained = start_from(config)
        task = without_overlap(read_task(config.task, seed=config.seed))
    except CramError as error:
        return str(error)
    if not overwrite:
        refuse_other_task(out, config, task)
    try:
        with lock(out / "run"), checking():
            if (record := read_record(out)) is None or not record.finished:
                return "stopped before its end"
            _run_stages(RunContext(config, task, out, _store(store), time.monotonic(), pretrained=pretrained))
    except (StaleStage, CramError) as reason:
        return str(reason)
    return None


def _run_stages(run: RunContext) -> tuple[RunConfig, Artifact]:
    """Build all stages in order; return the config with its final phases, and the evaluation."""
    text.check_settings(run.config, run.task, None if run.pretrained is None else run.pretrained.tokenizer)
    text.report_task(run)
    config = run.config
    if config.model == "encoder":
        from cramlm.planning.plan import refuse_small_budget

        refuse_small_budget(run)
    scored = config.baseline.enabled
    with threadpool_limits(limits=run.threads, user_api="blas"):  # the bits of a product depend on the number of threads
        baseline = linear.fit_baseline(run) if scored or "tfidf" in config.teaching else None
        if config.model != "encoder":
            return config, _run_linear(run, baseline)
        from cramlm.planning.speed import restored_threads

        with restored_threads():
            return _run_encoder(run, baseline)


def _run_encoder(run: RunContext, baseline: Artifact | None) -> tuple[RunConfig, Artifact]:
    """Build the stages of an encoder; return the config with its final phases, and the evaluation."""
    import torch

    from cramlm.pipeline.stages import train
    from cramlm.pipeline.stages.teacher import teach_by_linear_models
    from cramlm.planning.plan import phases_in_rows, schedule
    from cramlm.planning.plan import plan as plan_stage

    config = run.config
    plan = plan_stage(run)
    torch.set_num_threads(plan.threads)
    corpus = text.corpus(run)
    selection = text.selection(run, plan.retriever, corpus, threads=plan.threads)
    texts = text.tokens(run, selection, text.tokenizer(run, selection))
    selection = texts.selection  # the only one from here on: it holds the passages until `release_texts`
    texts = replace(texts, prompt=text.prompt(run, texts.tokenizer))
    scored, teaching = config.baseline.enabled, config.teaching
    start, fits_static = config.encoder.embedding_init, scored or "static" in teaching
    words = linear.word_vectors(run, corpus) if corpus is not None and (fits_static or start == "words") else None
    embedding = None if start == "random" else linear.embedding(run, texts, words if start == "words" else None)
    bayes = linear.fit_naive_bayes(run, selection) if selection is not None and (scored or "bayes" in teaching) else None
    static = linear.fit_static(run, words, baseline, bayes) if words is not None and fits_static else None
    linear_models = _present(tfidf=baseline, bayes=bayes, static=static)
    teachers: dict[str, Artifact] = {name: model for name, model in linear_models.items() if name in teaching}
    teacher = teach_by_linear_models(run, texts, teachers, phases_in_rows(run, texts)) if teachers else None
    planned = schedule(run, plan, texts)  # the last stage before training, so that it knows the time that is left
    if selection is not None:
        selection.release_texts()
    trained = train.Training(run, plan, planned, texts, teacher=teacher, embedding=embedding).train()
    trained = evaluate.adjust_logits(run, trained)
    scored_models = linear_models if scored else {}
    final = linear.refit_on_dev(run, scored_models)
    evaluation = evaluate.evaluate(run, scored_models, final, trained)
    evaluate.export_encoder(run, plan, trained, texts, corpus, evaluation, final)
    return config.model_copy(update={"phases": trained.phases}), evaluation


def _follow(config: RunConfig, ranks: Ranks, stop: Callable[[], int | None]) -> dict[str, Any]:
    """Train with rank 0 until it has finished the run; return its result."""
    from cramlm.model.model import resolve_device
    from cramlm.pipeline.stages import train
    from cramlm.planning.speed import restored_threads

    with restored_threads():
        return train.follow(ranks, device=resolve_device(config.device), stop=stop)


def _run_linear(run: RunContext, baseline: Artifact | None) -> Artifact:
    """Build the stages of a linear model; return the evaluation."""
    corpus = selection = bayes = static = None
    if run.config.model != "tfidf":
        corpus = text.corpus(run)
        selection = text.selection(run, linear.retriever_of_linear(run.config), corpus, threads=run.threads)
        bayes = linear.fit_naive_bayes(run, selection) if selection is not None and run.config.baseline.enabled else None
    if run.config.model == "static" and corpus is not None:
        static = linear.fit_static(run, linear.word_vectors(run, corpus), baseline, bayes)
    linear_models = _present(tfidf=baseline, bayes=bayes, static=static)
    final = linear.refit_on_dev(run, linear_models)
    evaluation = evaluate.evaluate(run, linear_models, final)
    evaluate.export_linear(run, final[run.config.model], corpus, selection, evaluation)
    return evaluation


def _present(**models: Artifact | None) -> dict[str, Artifact]:
    """Return the linear models that were fitted, cheapest first."""
    return {name: model for name, model in models.items() if model is not None}


def _store(store: str | Path | None) -> Path:
    return at_home(store) if store is not None else default_store()


def _with_threads_per_rank(config: RunConfig, ranks: Ranks) -> RunConfig:
    """Set the number of threads to one rank's share of the cores, unless the config sets it."""
    if config.threads is not None or ranks.local_count == 1:
        return config
    return config.model_copy(update={"threads": max(1, available_cores() // ranks.local_count)})


def _interruptible(emit: Emit, stop: Callable[[], int | None]) -> Emit:
    """Return an `emit` that raises Stopped at a progress event after a signal; training itself stops at a step that it saves."""

    def checked(event: Event) -> None:
        emit(event)
        if event.kind == "progress" and event.unit != "steps" and (code := stop()) is not None:
            raise Stopped("stopped; run the same command again to continue", exit_code=code)

    return checked


@contextmanager
def _traceback_to(path: Path) -> Iterator[None]:
    """Write the traceback of an exception to `path`; without one, remove that of an earlier call."""
    try:
        yield
    except Exception:
        if path.parent.is_dir():
            path.write_text(traceback.format_exc(), "utf-8")
        raise
    path.unlink(missing_ok=True)
