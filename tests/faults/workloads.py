"""The commands that faults interrupt: each stage of a tiny run alone, from inputs that exist already, and the whole run.

`World.build` makes the inputs once; the commands run in forked children, for a few dozen milliseconds each.
"""

from __future__ import annotations

import functools
import gc
import json
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from figures import Figure

import cramlm.pipeline.run
from cramlm.config.retriever import Bm25Config
from cramlm.config.run import RunConfig, to_toml
from cramlm.data.task import read_task
from cramlm.errors import CramError, UsageError
from cramlm.pipeline.context import Process
from cramlm.records import Task
from cramlm.retrieval.index import Index, build_catalog
from cramlm.retrieval.retrievers import RetrievalContext
from cramlm.retrieval.selection import select_documents
from cramlm.storage.artifacts import MANIFEST, hash_json, verify
from tiny_task import tiny_config, write_task

Action: TypeAlias = Callable[[Path], object]
TIMED = ("fit.json", "phase.json", "plan.json", "scores.json", "provenance.json", "README.md")  # contain seconds: equal runs differ


@dataclass(frozen=True, slots=True)
class States:
    """allowed: the hashes that each published folder may have at any time. end: the hashes after the command."""

    allowed: Mapping[str, set[str]]
    end: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Workload:
    """do: runs the stage in a folder. older: makes an earlier version that the stage replaces. before: makes the inputs of the stage.
    until: the first result that another workload covers. is_finished: whether other commands take a folder for a finished run of `do`.
    """

    name: str
    do: Action
    older: Action | None = None
    before: Action | None = None
    until: str | None = None
    is_finished: Callable[[Path], bool] | None = None

    @property
    def ways(self) -> tuple[bool, ...]:
        """Return the values of `replacing` that apply."""
        return (False,) if self.older is None else (False, True)

    def prepare(self, folder: Path, *, replacing: bool = False) -> None:
        """Make `folder` as it is before the stage."""
        folder.mkdir()
        for make in (self.before, self.older if replacing else None):
            if make is not None:
                assert run_child(functools.partial(make, folder)) == 0

    def body(self, folder: Path) -> Callable[[], int]:
        """Return a function for a child that runs the stage and returns the exit code."""
        return in_child(functools.partial(self.do, folder))

    def run(self, folder: Path) -> int:
        """Run the stage in a child; return its exit code."""
        return run_child(functools.partial(self.do, folder))

    def states(self, folder: Path) -> States:
        """Run the stage in every way without a fault."""
        allowed: dict[str, set[str]] = {}
        folder.mkdir()
        for name in ("older", "end") if self.older else ("end",):
            self.prepare(folder / name, replacing=name == "older")
            assert name == "older" or self.run(folder / name) == 0, self.name
            for published, value in results(folder / name).items():
                allowed.setdefault(published, set()).add(value)
        return States(allowed, results(folder / "end"))

    def check_readers(self, figure: Figure, where: str, folder: Path, states: States) -> None:
        """Check that no other command takes older results for those of this one."""
        if self.is_finished is not None and self.is_finished(folder):
            figure.check(states.end.items() <= results(folder).items(), f"{where}: old results are taken for those of the new settings")

    def check_next_run(self, figure: Figure, where: str, folder: Path, states: States) -> None:
        """Check that the same command finishes with the undisturbed results."""
        code = self.run(folder)
        figure.check(code == 0, f"{where}: the next run exits {code}")
        figure.check(states.end.items() <= results(folder).items(), f"{where}: the end differs from the undisturbed one")
        figure.check(not (left := leftovers(folder)), f"{where}: left behind {left}")


@dataclass(frozen=True, slots=True, eq=False)
class World:
    """Inputs and results of undisturbed commands, in `folder`: data/, run.toml, run/, store/, catalog/. They do not change."""

    folder: Path
    config: RunConfig
    task: Task

    @staticmethod
    def build(folder: Path) -> World:
        """Build them in an empty folder."""
        torch.set_num_threads(1)
        paths = write_task(folder / "data", train=24, held_out=8, documents=60)
        config = RunConfig.model_validate(fault_config(paths))
        (folder / "run.toml").write_text(to_toml(config), "utf-8")
        cramlm.pipeline.run.run(config, out=folder / "run", store=folder / "store")
        torch.set_num_threads(1)
        build_catalog(config.corpus, folder / "catalog", workers=1)
        gc.collect()
        gc.freeze()  # garbage collection in a child would copy every page of this process: two thirds of its time
        return World(folder, config, read_task(config.task, seed=config.seed))

    def workloads(self) -> dict[str, Workload]:
        """Return the workloads by name, in the order of a run. `train` and `finish` continue a run whose earlier stages are done."""
        fewer = self.config.corpus.model_copy(update={"passage_words": 20})
        after_training = ("logit-adjustment", "evaluation", "export", "report.html")
        all_ = (
            Workload("index", self.index, older=lambda folder: build_catalog(fewer, folder, workers=1)),
            Workload("select", self.select, older=functools.partial(self.select, top_k=5)),
            Workload(
                "train", self.fit, before=functools.partial(self.copy_run, without=("phase-*", *after_training)), until=after_training[0]
            ),
            Workload("finish", self.fit, before=functools.partial(self.copy_run, without=after_training)),
            Workload("fit", self.fit_anew),
            Workload("fit with other settings", self.fit_longer, older=self.copy_run, is_finished=self.longer_is_finished),
        )
        return {workload.name: workload for workload in all_}

    def some_workloads(self, names: Sequence[str] | None) -> list[Workload]:
        """Return the workloads of these names, or all."""
        return [workload for name, workload in self.workloads().items() if names is None or name in names]

    def index(self, folder: Path) -> None:
        """`cramlm index`."""
        build_catalog(self.config.corpus, folder, workers=1)

    def select(self, folder: Path, top_k: int = 20) -> None:
        """`cramlm select`."""
        index = Index.open(self.folder / "catalog")
        context = RetrievalContext(index.corpus.store, 3, index.bm25)
        select_documents(Bm25Config(top_k=top_k), index.corpus, self.task, out=folder / "selection", context=context)

    def fit(self, folder: Path, stop: Callable[[], int | None] = lambda: None) -> None:
        """`cramlm fit` with a store that holds corpus and index."""
        cramlm.pipeline.run.run(self.config, out=folder / "run", store=self.folder / "store", process=Process(stop))

    def fit_anew(self, folder: Path) -> None:
        """`cramlm fit` with an empty store."""
        cramlm.pipeline.run.run(self.config, out=folder / "run", store=folder / "store")

    @property
    def longer(self) -> RunConfig:
        """The config with one more step of the joint phase."""
        joint, finetune = self.config.phases
        assert joint.steps is not None
        return self.config.model_copy(update={"phases": (joint.model_copy(update={"steps": joint.steps + 1}), finetune)})

    def fit_longer(self, folder: Path) -> None:
        """`cramlm fit` with other settings than those of `copy_run`, in a child."""
        os.environ["CRAMLM_STAGES_GB"] = "0"  # no links to files of the store, which is not in the folder
        cramlm.pipeline.run.run(self.longer, out=folder / "run", store=self.folder / "store")

    def longer_is_finished(self, folder: Path) -> bool:
        """Whether `cramlm compare` takes the folder for a finished run of `fit_longer`."""

        def request() -> None:
            if reason := cramlm.pipeline.run.unfinished(self.longer, out=folder / "run", store=self.folder / "store"):
                raise UsageError(reason)

        return run_child(request) == 0

    def copy_run(self, folder: Path, without: tuple[str, ...] = ()) -> None:
        """Copy the finished run to `folder`, without the names that match these patterns."""
        shutil.copytree(self.folder / "run", folder / "run", ignore=shutil.ignore_patterns(*without, "*.lock", ".work"))


def fault_config(paths: dict[str, str]) -> dict[str, Any]:
    """`tiny_config`, smaller still: 6 + 4 steps with a checkpoint at every second."""
    config = tiny_config(paths, tokens_per_second=1e6, baseline={"c": [1.0]})
    config["encoder"] |= {"hidden": 16, "intermediate": 16}
    for phase, steps in zip(config["phases"], (6, 4), strict=True):
        phase |= {"steps": steps, "checkpoint_every": 2, "batch_size": 64}
    config["phases"][1]["evaluate_every"] = 2
    config["retriever"] = {"kind": "bm25", "top_k": 10}
    return config


def in_child(action: Callable[[], object]) -> Callable[[], int]:
    """Return a function that runs `action` and returns the exit code of the command line (1, with a traceback, for other errors)."""

    def body() -> int:
        try:
            action()
            return 0
        except CramError as error:
            return error.exit_code
        except OSError:
            return 4  # as in cli.main
        except BaseException:
            traceback.print_exc()
            return 1

    return body


def start(body: Callable[[], int]) -> int:
    """Run `body` in a forked child; return its pid."""
    if (pid := os.fork()) == 0:
        code = 99
        try:
            code = body()
        finally:
            sys.stderr.flush()
            os._exit(code)
    return pid


def finish(pid: int, *, within: float = 600.0) -> int:
    """Wait for a child, and kill it after `within` seconds; return its exit code, or minus the signal that ended it."""
    deadline = time.monotonic() + within
    while not (ended := os.waitpid(pid, os.WNOHANG))[0]:
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.002)
    return os.waitstatus_to_exitcode(ended[1])


def run_child(action: Callable[[], object]) -> int:
    """Run `action` in a forked child; return its exit code, or minus the signal."""
    return finish(start(in_child(action)))


def results(folder: Path) -> dict[str, str]:
    """Return a hash of each published folder below a folder, without its files with times, and of the pair that a catalog names."""
    published = {}
    for manifest in sorted(folder.rglob(MANIFEST)):
        if ".tmp-" in str(manifest.relative_to(folder)) or ".work" in manifest.parts:
            continue
        files = json.loads(manifest.read_bytes())["files"]
        name = manifest.parent.relative_to(folder).as_posix()
        published[name] = hash_json({file: entry["sha256"] for file, entry in files.items() if file not in TIMED})
    if (catalog := folder / "catalog.json").exists():
        published["catalog.json"] = hash_json(json.loads(catalog.read_bytes()))
    return published


def check_states(figure: Figure, where: str, folder: Path, states: States) -> None:
    """Check a folder after a fault with `verify`, and that each result is old or new."""
    if any(".tmp-" not in str(path) for path in folder.rglob(MANIFEST)):
        try:
            verify(folder)
        except CramError as error:
            figure.check("/.work/" in str(error), f"{where}: {error}")  # a damaged checkpoint is allowed: the newest whole one is used
    for name, value in results(folder).items():
        figure.check(value in states.allowed.get(name, set()), f"{where}: {name} is neither old nor new")


def leftovers(folder: Path) -> list[str]:
    """Return the temporary files and folders below a folder."""
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.tmp-*"))


@contextmanager
def scratch() -> Iterator[Path]:
    """Yield a temporary folder, in memory if the machine has /dev/shm: a figure makes thousands of syncs."""
    shm = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(prefix="cramlm-faults-", dir=shm if os.access(shm, os.W_OK) else None))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
