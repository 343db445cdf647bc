"""The whole method in order: `run(config, out=...)`. The only file that knows the order.

    task -> baseline -> plan -> corpus -> index -> selection -> tokenizer -> prompt -> embedding -> teacher -> schedule -> phases
    -> label prior -> evaluation -> export -> report

Every arrow is a folder that is published whole and keyed by what made it (artifacts.py), so that the same call again finishes what a
killed one began, says "fresh" where nothing changed, and names the knob that makes a stage run again. Corpus and index are shared
between runs and live in the store; everything else is in the run's folder.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from cramlm.amounts import Budget, parse_budget
from cramlm.artifacts import default_store as default_store
from cramlm.artifacts import lock, publish_file
from cramlm.config import RunConfig, load_config, to_toml
from cramlm.data.task import read_task
from cramlm.deploy.report.machine import describe_machine
from cramlm.deploy.report.page import refresh_report
from cramlm.errors import Stopped
from cramlm.records import Emit, Event, silent
from cramlm.stages import model as model_stages
from cramlm.stages import text as text_stages
from cramlm.stages.common import Clock
from cramlm.stages.embedding import embedding
from cramlm.stages.label_prior import settle_label_prior
from cramlm.stages.plan import available_cores
from cramlm.stages.plan import plan as plan_stage
from cramlm.stages.prompt import check_prompt, prompt
from cramlm.stages.ranks import dismiss, follow
from cramlm.stages.schedule import schedule
from cramlm.stages.start import start_from
from cramlm.stages.teacher import teach
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
    out: str | Path = "runs/cramlm",
    store: str | Path | None = None,
    emit: Emit = silent,
    stop: Callable[[], int | None] = never,
    began: float | None = None,
    ranks: Ranks = ALONE,
) -> Run:
    """Do everything that `config` asks and is not already done in `out`.

    `stop` is asked between training steps; an exit code ends the run resumably. `began`: when a time budget began to run, as
    `time.monotonic` tells it; None = now. PyTorch's number of threads is afterwards what it was. `ranks`: those that train together
    (training/distributed.py), each of which makes this call; the first does all the rest, and all get the same answer.

    Raises:
        CramError: one of its kinds (errors.py); what was published before stays, and the same call continues from there.
    """
    folder, shared = Path(out), Path(store) if store is not None else default_store()
    stop = ranks.watched(stop)
    if ranks.index > 0:
        with _thread_count_kept():
            told = follow(ranks, stop=stop)
        return Run(folder, load_config(told["config"]), told["scores"])
    with lock(folder / "run"), _thread_count_kept():
        emit = _interruptible(_logged(folder / "events.jsonl", emit), stop)
        config, pretrained = start_from(config)
        publish_file(folder / "run.toml", to_toml(config).encode())
        config = _on_its_share_of_the_cores(config, ranks)
        clock = Clock(time.monotonic() if began is None else began, Budget() if config.budget is None else parse_budget(config.budget))
        emit(Event("note", "machine", describe_machine()))

        task = read_task(config.task, seed=config.seed, emit=emit)
        check_prompt(config, task, pretrained)
        text_stages.report_task(task, folder, emit=emit)
        baseline = text_stages.fit_baseline(config, task, folder, emit=emit)
        plan = plan_stage(config, task, folder, shared, clock=clock, emit=emit, ranks=ranks.count)
        torch.set_num_threads(plan.threads)
        corpus = text_stages.corpus(config, task, shared, emit=emit)
        selection = text_stages.selection(config, plan, corpus, task, folder, shared, emit=emit)
        tokenizer = text_stages.tokenizer(config, task, selection, folder, pretrained=pretrained, emit=emit)
        asked = prompt(config, task, tokenizer, folder, emit=emit)
        start = embedding(config, task, selection, tokenizer, folder, emit=emit)
        teacher = teach(config, task, baseline, selection, tokenizer, start, folder, emit=emit)
        planned = schedule(config, plan, task, selection, tokenizer, folder, prompt=asked, clock=clock, emit=emit)
        trained = model_stages.train(
            config,
            plan,
            planned,
            task,
            selection,
            teacher,
            tokenizer,
            start,
            folder,
            prompt=asked,
            pretrained=pretrained,
            clock=clock,
            emit=emit,
            stop=stop,
            ranks=ranks,
        )
        trained = settle_label_prior(config, plan, trained, tokenizer, task, folder, emit=emit)
        evaluation = model_stages.evaluate(config, plan, trained, tokenizer, task, baseline, folder, emit=emit)
        model_stages.export(config, plan, trained, tokenizer, task, corpus, selection, evaluation, folder, pretrained=pretrained, emit=emit)
        refresh_report(folder, emit=emit)
    trim()
    scores = json.loads((evaluation.path / "scores.json").read_bytes())
    config = config.model_copy(update={"phases": trained.phases})
    dismiss(ranks, {"config": config.model_dump(mode="json"), "scores": scores})
    return Run(folder, config, scores)


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


def _logged(path: Path, emit: Emit) -> Emit:
    """`emit`, and a JSON line per event (but not per progress tick) in the run's log."""
    path.parent.mkdir(parents=True, exist_ok=True)

    def both(event: Event) -> None:
        if event.kind != "progress":
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"time": round(time.time(), 3), **asdict(event)}, ensure_ascii=False) + "\n")
        emit(event)

    return both
