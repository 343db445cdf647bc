"""What is disturbed: each stage of a tiny run alone, from inputs that were made before, and the whole run. A few dozen milliseconds each.

Only forked children work; this process imports torch, compiles kernels and builds the inputs once (`World.build`).
"""

from __future__ import annotations

import functools
import gc
import json
import os
import shutil
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch

import cramlm.pipeline.run
from cramlm.config.retriever import Bm25Config
from cramlm.config.run import RunConfig, to_toml
from cramlm.data.task import read_task
from cramlm.errors import CramError
from cramlm.pipeline.context import Process
from cramlm.records import Task
from cramlm.retrieval.catalog import build_catalog, open_catalog
from cramlm.retrieval.retrievers import RetrievalContext
from cramlm.retrieval.selection import select_documents
from cramlm.storage.artifacts import MANIFEST, hash_json, verify
from tiny_task import tiny_config, write_task

Action: TypeAlias = Callable[[Path], None]
TIMED = (
    "fit.json",
    "phase.json",
    "plan.json",
    "scores.json",
    "provenance.json",
    "README.md",
)  # hold seconds: equal runs differ in them


@dataclass(frozen=True, slots=True)
class Workload:
    """do: the stage, into a folder. older: makes an earlier version of the same, for it to replace. before: makes what it goes on from.
    until: the result with which another workload begins, which is disturbed there.
    """

    name: str
    do: Action
    older: Action | None = None
    before: Action | None = None
    until: str | None = None

    @property
    def ways(self) -> tuple[bool, ...]:
        """Whether it replaces an older version."""
        return (False,) if self.older is None else (False, True)

    def prepare(self, folder: Path, *, replacing: bool = False) -> None:
        """Make `folder` what the stage finds."""
        folder.mkdir()
        for make in (self.before, self.older if replacing else None):
            if make is not None:
                assert run_child(functools.partial(make, folder)) == 0

    def body(self, folder: Path) -> Callable[[], int]:
        """The stage as the body of a child."""
        return in_child(functools.partial(self.do, folder))

    def run(self, folder: Path) -> int:
        """The stage in a child, undisturbed; its exit code."""
        return run_child(functools.partial(self.do, folder))

    def states(self, folder: Path) -> tuple[dict[str, set[str]], dict[str, str]]:
        """(what each published folder may hold at any time, what the stage leaves in the end), from runs that nobody disturbs."""
        allowed: dict[str, set[str]] = {}
        folder.mkdir()
        for name in ("older", "end") if self.older else ("end",):
            self.prepare(folder / name, replacing=name == "older")
            assert name == "older" or self.run(folder / name) == 0, self.name
            for published, value in results(folder / name).items():
                allowed.setdefault(published, set()).add(value)
        return allowed, results(folder / "end")


@dataclass(frozen=True, slots=True)
class World:
    """Inputs and results of undisturbed commands, in `folder`: data/, run.toml, run/, store/, catalog/. Nothing there changes any more."""

    folder: Path
    config: RunConfig
    task: Task

    @staticmethod
    def build(folder: Path) -> World:
        """In a folder that is empty."""
        torch.set_num_threads(1)
        paths = write_task(folder / "data", train=24, held_out=8, documents=60)
        config = RunConfig.model_validate(fault_config(paths))
        (folder / "run.toml").write_text(to_toml(config), "utf-8")
        cramlm.pipeline.run.run(config, out=folder / "run", store=folder / "store")
        torch.set_num_threads(1)
        assert config.corpus is not None
        build_catalog(config.corpus, folder / "catalog", workers=1)
        gc.collect()
        gc.freeze()  # a child's collection would copy every page of this process: two thirds of its time
        return World(folder, config, read_task(config.task, seed=config.seed))

    def workloads(self) -> dict[str, Workload]:
        """By name, in the order of a run. `train` and `finish` go on from a run whose earlier stages are done."""
        assert self.config.corpus is not None
        fewer = self.config.corpus.model_copy(update={"passage_words": 20})
        after_training = ("logit-adjustment", "evaluation", "export", "report.html")
        all_ = (
            Workload("index", self.index, older=lambda folder: void(build_catalog(fewer, folder, workers=1))),
            Workload("select", self.select, older=functools.partial(self.select, top_k=5)),
            Workload(
                "train", self.fit, before=functools.partial(self.copy_run, without=("phase-*", *after_training)), until=after_training[0]
            ),
            Workload("finish", self.fit, before=functools.partial(self.copy_run, without=after_training)),
            Workload("fit", self.fit_anew),
        )
        return {workload.name: workload for workload in all_}

    def index(self, folder: Path) -> None:
        """`cramlm index`."""
        assert self.config.corpus is not None
        build_catalog(self.config.corpus, folder, workers=1)

    def select(self, folder: Path, top_k: int = 20) -> None:
        """`cramlm select`."""
        corpus, index = open_catalog(self.folder / "catalog")
        select_documents(
            Bm25Config(top_k=top_k), corpus, self.task, out=folder / "selection", context=RetrievalContext(corpus.store, 3, index)
        )

    def fit(self, folder: Path, stop: Callable[[], int | None] = lambda: None) -> None:
        """`cramlm fit` with a store that holds corpus and index."""
        cramlm.pipeline.run.run(self.config, out=folder / "run", store=self.folder / "store", process=Process(stop))

    def fit_anew(self, folder: Path) -> None:
        """`cramlm fit` with an empty store."""
        cramlm.pipeline.run.run(self.config, out=folder / "run", store=folder / "store")

    def copy_run(self, folder: Path, without: tuple[str, ...]) -> None:
        """The finished run, in `folder`, without what these patterns name."""
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


def void(value: object) -> None:
    """Forget a value, so that a call can stand in a lambda that returns nothing."""


def in_child(action: Callable[[], None]) -> Callable[[], int]:
    """`action` as the body of a child: 0, or the exit code of its error (1, with a traceback, if it is none of ours)."""

    def body() -> int:
        try:
            action()
            return 0
        except CramError as error:
            return error.exit_code
        except OSError:
            return 4  # as cli.main has it
        except BaseException:
            traceback.print_exc()
            return 1

    return body


def run_child(action: Callable[[], None]) -> int:
    """In a fork; its exit code, or minus the signal."""
    if (pid := os.fork()) == 0:
        code = 1
        try:
            code = in_child(action)()
        finally:
            sys.stderr.flush()
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def results(folder: Path) -> dict[str, str]:
    """What was published below a folder: a hash of each file that does not hold times, by its path; and which pair a catalog names."""
    found = {}
    for manifest in sorted(folder.rglob(MANIFEST)):
        if ".tmp-" in str(manifest.relative_to(folder)) or ".work" in manifest.parts:
            continue
        files = json.loads(manifest.read_bytes())["files"]
        name = manifest.parent.relative_to(folder).as_posix()
        found[name] = hash_json({file: facts["sha256"] for file, facts in files.items() if file not in TIMED})
    if (catalog := folder / "catalog.json").exists():
        found["catalog.json"] = hash_json(json.loads(catalog.read_bytes()))
    return found


def check_states(folder: Path, allowed: Mapping[str, set[str]]) -> list[str]:
    """What is wrong with a folder after a fault: damage that `verify` finds, or a result that is neither old nor new."""
    wrong = []
    if any(".tmp-" not in str(path) for path in folder.rglob(MANIFEST)):
        try:
            verify(folder)
        except CramError as error:
            if "/.work/" not in str(error):  # checkpoints: the newest whole one is used, whatever lies beside it
                wrong.append(str(error))
    for name, value in results(folder).items():
        if value not in allowed.get(name, set()):
            wrong.append(f"{name} is neither old nor new")
    return wrong


def leftovers(folder: Path) -> list[str]:
    """Temporary files and folders below a folder."""
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.tmp-*"))


@contextmanager
def scratch() -> Iterator[Path]:
    """A temporary folder in memory where there is such a place: thousands of syncs are made."""
    shm = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(prefix="cramlm-faults-", dir=shm if os.access(shm, os.W_OK) else None))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
