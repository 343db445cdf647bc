"""R2: each call on files fails once, as on a full disk and on a broken one; the command says so, and the next one finishes.

The calls of a whole run are those of its stages one after the other, each begun where the one before has ended.
"""

from __future__ import annotations

import errno
import random
import shutil
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from figures import Figure
from syscalls import CHANGES, READS, Call, supervise
from workloads import Workload, World, check_states, leftovers, results

NAMES = tuple(dict.fromkeys((*CHANGES, *READS)))


def failures(
    world: World,
    scratch: Path,
    *,
    workloads: tuple[str, ...],
    most: int,
    concerning: Callable[[Call], bool] = lambda call: True,
    seed: int = 3,
) -> Figure:
    """ENOSPC where a call writes, EIO at every call; of the calls that are `concerning`."""
    figure = Figure("R2", "a call on a file fails once, with ENOSPC (if it writes) and with EIO: exit 4, then the same command again")
    outcomes: Counter[str] = Counter()
    with figure.timed():
        cases = []
        for name in workloads:
            workload = world.workloads()[name]
            ends = workload.states(scratch / f"{name}-end")
            calls = _calls(workload, scratch / "count")
            for number, call in enumerate(calls):
                codes = (errno.ENOSPC, errno.EIO) if call.changes else (errno.EIO,)
                cases += [(workload, ends, number, code) for code in codes if concerning(call)]
        figure.notes.append(f"of {len(cases)} in {', '.join(workloads)}")
        for workload, ends, number, code in cases if len(cases) <= most else random.Random(seed).sample(cases, most):
            _one(figure, outcomes, workload, ends, scratch / "trial", number, code)
            if figure.trials % 100 == 0:  # thousands take an hour
                so_far = f"R2: {figure.trials:,} of {min(most, len(cases)):,} ({workload.name}), {len(figure.failures)} failures so far"
                print(so_far, file=sys.stderr, flush=True)
    figure.notes.append(", ".join(f"{count} {what}" for what, count in sorted(outcomes.items())))
    return figure


def _calls(workload: Workload, folder: Path) -> list[Call]:
    seen: list[Call] = []
    workload.prepare(folder)
    assert supervise(workload.body(folder), lambda call: _note(call, folder, seen), names=NAMES) == 0
    shutil.rmtree(folder)
    if workload.until is None:
        return seen
    return seen[: next(number for number, call in enumerate(seen) if workload.until in call.path)]


def _note(call: Call, folder: Path, seen: list[Call]) -> None:
    if call.path.startswith(str(folder)):
        seen.append(call)


def _one(
    figure: Figure,
    outcomes: Counter[str],
    workload: Workload,
    ends: tuple[dict[str, set[str]], dict[str, str]],
    folder: Path,
    number: int,
    code: int,
) -> None:
    seen: list[Call] = []

    def decide(call: Call) -> int | None:
        before = len(seen)
        _note(call, folder, seen)
        return code if len(seen) == number + 1 and len(seen) > before else None

    workload.prepare(folder)
    allowed, end = ends
    left = supervise(workload.body(folder), decide, names=NAMES)
    call = seen[min(number, len(seen) - 1)]
    where = f"{workload.name}, call {number} ({call.name} {Path(call.path).name}, {errno.errorcode[code]})"
    outcomes[f"exited {left}"] += 1
    figure.check(left in (0, 4), f"{where}: exit {left}")
    figure.failures += [f"{where}: {wrong}" for wrong in check_states(folder, allowed)]
    figure.check(left == 0 or workload.run(folder) == 0, f"{where}: the next run fails")
    figure.check(results(folder) == end, f"{where}: the end differs from the undisturbed one")
    figure.check(not (rest := leftovers(folder)), f"{where}: left behind {rest}")
    figure.trials += 1
    shutil.rmtree(folder)
