"""R1, R8, R9: commands that are killed, stopped or held at any moment, and the state in which the next command finds their folder."""

from __future__ import annotations

import functools
import os
import random
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from figures import Figure, measured
from syscalls import KILL, Call, supervise
from workloads import States, Workload, World, check_states, finish, results, scratch, start

from cramlm.cli import app as cli


def counted(folder: Path, at: int, what: Callable[[Call], int | None]) -> tuple[Callable[[Call], int | None], list[Call]]:
    """Return a `decide` that calls `what` at call number `at` of those that change something in `folder`, and the list of calls so far."""
    root, seen = str(folder), list[Call]()

    def decide(call: Call) -> int | None:
        if not (call.changes and (call.path.startswith(root) or call.other.startswith(root))):
            return None
        seen.append(call)
        return what(call) if len(seen) == at + 1 else None

    return decide, seen


@measured("R1", "kill -9 before a call that changes files, then the same command again")
def kills(figure: Figure, world: World, scratch: Path, *, most: int, workloads: Sequence[str] | None = None, seed: int = 11) -> None:
    """Kill before a sample of the calls that change files. workloads: default all."""
    cases: list[tuple[Workload, bool, int]] = []
    ends = {}
    for workload in world.some_workloads(workloads):
        ends[workload.name] = workload.states(scratch / f"{workload.name}-end")
        for replacing in workload.ways:
            folder = scratch / f"{workload.name}-count"
            workload.prepare(folder, replacing=replacing)
            decide, seen = counted(folder, 10**9, lambda call: None)
            assert supervise(workload.body(folder), decide) == 0
            shutil.rmtree(folder)
            cases += [(workload, replacing, number) for number in range(len(seen))]
    figure.notes.append(f"of {len(cases)} moments in {len(ends)} commands")
    for workload, replacing, number in cases if len(cases) <= most else random.Random(seed).sample(cases, most):
        with figure.trial(scratch) as folder:
            workload.prepare(folder, replacing=replacing)
            decide, seen = counted(folder, number, lambda call: KILL)
            code = supervise(workload.body(folder), decide)
            where = f"{workload.name}{' replacing' if replacing else ''}, call {number} ({seen[-1].name} {Path(seen[-1].path).name})"
            figure.check(code == -signal.SIGKILL, f"{where}: exit {code}")
            check_states(figure, where, folder, ends[workload.name])
            workload.check_readers(figure, where, folder, ends[workload.name])
            workload.check_next_run(figure, where, folder, ends[workload.name])


def command(arguments: Sequence[str | Path], folder: Path) -> Callable[[], int]:
    """Return a function for a child that runs `cramlm ARGUMENTS` with its output in `folder`/stdout and `folder`/stderr."""

    def body() -> int:
        for number, name in ((1, "stdout"), (2, "stderr")):
            descriptor = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(descriptor, number)
        sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
        sys.argv = ["cramlm", *map(str, arguments)]
        try:
            cli.main()
        except SystemExit as leaving:
            sys.stdout.flush()
            return leaving.code if isinstance(leaving.code, int) else 1
        return 0

    return body


def without_waiting(body: Callable[[], int]) -> Callable[[], int]:
    """Return `body` with exit code 7 at once if another process holds a lock: that process continues only after this one has ended."""

    def set_limit() -> int:
        os.environ["CRAMLM_WAIT"] = "0"
        return body()

    return set_limit


@measured("R8", "SIGTERM to `cramlm fit`: exit 75 within 30 s, then the same command to the same end")
def stops(figure: Figure, world: World, scratch: Path, *, times: int) -> None:
    _signals(figure, signal.SIGTERM, world, scratch, times)


@measured("R1", "kill -9 to `cramlm fit` at a random moment, then the same command to the same end")
def random_kills(figure: Figure, world: World, scratch: Path, *, times: int) -> None:
    """Also between calls on files."""
    _signals(figure, signal.SIGKILL, world, scratch, times)


def fit(world: World, folder: Path) -> Callable[[], int]:
    """Return a function for a child that runs `cramlm fit` into `folder`, with an empty store."""
    return command(["fit", "--config", world.folder / "run.toml", "--out", folder / "run", "--store", folder / "store"], folder)


@functools.lru_cache(maxsize=1)
def _undisturbed(world: World) -> tuple[dict[str, str], float]:
    """The results of `fit` and its seconds."""
    with scratch() as folder:
        began = time.monotonic()
        assert finish(start(fit(world, folder))) == 0, (folder / "stderr").read_text()
        return results(folder), time.monotonic() - began


def _signals(figure: Figure, number: signal.Signals, world: World, scratch: Path, times: int, seed: int = 5) -> None:
    generator = random.Random(seed)
    end, duration = _undisturbed(world)
    slowest, late = 0.0, 0
    while figure.trials < times:
        folder = scratch / "trial"
        folder.mkdir()
        for _ in range(2):
            pid = start(fit(world, folder))
            time.sleep(generator.uniform(0.0, 0.9) * duration)
            os.kill(pid, number)
            sent = time.monotonic()
            code = finish(pid)
            slowest = max(slowest, time.monotonic() - sent)
            lines = (folder / "stderr").read_text().strip().splitlines() if (folder / "stderr").exists() else []
            if code == 0:
                late += 1
                continue
            figure.trials += 1
            where = f"trial {figure.trials}"
            check_states(figure, where, folder, only(end))
            if code == -number and not lines and not (folder / "run").exists():
                continue  # before the command's first line
            if number == signal.SIGKILL:
                figure.check(code == -number, f"{where}: exit {code}")
            else:
                figure.check(code == 75, f"{where}: exit {code}")
                figure.check(lines and lines[-1].startswith("cramlm: error: "), f"{where}: last line {lines[-1:]}")
        figure.check(finish(start(fit(world, folder))) == 0, f"trial {figure.trials}: the next run fails")
        figure.check(results(folder) == end, f"trial {figure.trials}: the end differs from the undisturbed one")
        shutil.rmtree(folder)
    figure.check_time(slowest < 30, f"{slowest:.1f} s until one stopped")
    figure.notes.append(f"slowest {slowest:.2f} s; {late} finished before the signal")


@measured("R9", "two `cramlm index` on one path, the first held at a call until the second has ended")
def races(figure: Figure, world: World, scratch: Path, *, times: int, seed: int = 7) -> None:
    generator = random.Random(seed)
    arguments = ["index", world.folder / "data/corpus.jsonl", "--workers", "1", "--out"]
    outcomes: Counter[tuple[int, int]] = Counter()
    whole = scratch / "undisturbed"
    whole.mkdir()
    decide, seen = counted(whole, 10**9, lambda call: None)
    assert supervise(command([*arguments, whole / "index"], scratch), decide) == 0
    end, calls = results(whole / "index"), len([call for call in seen if "/index" in call.path])
    for _ in range(times):
        with figure.trial(scratch) as folder:
            (folder / "second").mkdir(parents=True)
            codes: list[int] = []

            def second(call: Call, folder: Path = folder, codes: list[int] = codes) -> None:
                codes.append(finish(start(without_waiting(command([*arguments, folder / "index"], folder / "second")))))

            decide, _ = counted(folder / "index", generator.randrange(calls), second)
            first = supervise(command([*arguments, folder / "index"], folder), decide)
            errors, where = (folder / "second/stderr").read_text() if codes else "", f"trial {figure.trials}"
            figure.check(first == 0 and codes in ([0], [7]), f"{where}: exits {first}, {codes}: {errors.strip()[-200:]}")
            figure.check(codes != [7] or "another process (" in errors, f"{where}: the message does not name the builder: {errors[-200:]}")
            figure.check(results(folder / "index") == end, f"{where}: the index differs from that of one builder")
            check_states(figure, where, folder / "index", only(end))
            outcomes[first, *codes[:1]] += 1
    figure.notes.append(f"{outcomes[0, 7]} times the second exited 7, {outcomes[0, 0]} times it was first or the index was complete")


def only(end: dict[str, str]) -> States:
    return States({name: {value} for name, value in end.items()}, end)
