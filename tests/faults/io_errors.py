"""R2: each call on files fails once, as on a full or a broken disk; the command exits with 4, and the same command finishes.

The calls of a whole run are those of its stages in turn, each from the end of the previous one.
"""

from __future__ import annotations

import errno
import random
import shutil
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from figures import Figure, measured
from syscalls import CHANGES, READS, Call, supervise
from workloads import States, Workload, World, check_states, leftovers, results

NAMES = tuple(dict.fromkeys((*CHANGES, *READS)))


@measured("R2", "a call on a file fails once, with ENOSPC (if it writes) and with EIO: exit 4, then the same command again")
def failures(
    figure: Figure,
    world: World,
    scratch: Path,
    *,
    workloads: tuple[str, ...],
    most: int,
    concerning: Callable[[Call], bool] = lambda call: True,
    seed: int = 3,
) -> None:
    """ENOSPC at calls that write, EIO at every call, of the calls for which `concerning` is true."""
    outcomes: Counter[str] = Counter()
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
        with figure.trial(scratch) as folder:
            outcomes[f"exited {_one(figure, workload, ends, folder, number, code)}"] += 1
        if figure.trials % 100 == 0:  # thousands take an hour
            so_far = f"R2: {figure.trials:,} of {min(most, len(cases)):,} ({workload.name}), {len(figure.failures)} failures so far"
            print(so_far, file=sys.stderr, flush=True)
    figure.notes.append(", ".join(f"{count} {what}" for what, count in sorted(outcomes.items())))


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


def _one(figure: Figure, workload: Workload, states: States, folder: Path, number: int, code: int) -> int:
    """Let one call fail; return the exit code."""
    seen: list[Call] = []

    def decide(call: Call) -> int | None:
        before = len(seen)
        _note(call, folder, seen)
        return code if len(seen) == number + 1 and len(seen) > before else None

    workload.prepare(folder)
    exit_code = supervise(workload.body(folder), decide, names=NAMES)
    call = seen[min(number, len(seen) - 1)]
    where = f"{workload.name}, call {number} ({call.name} {Path(call.path).name}, {errno.errorcode[code]})"
    figure.check(exit_code in (0, 4), f"{where}: exit {exit_code}")
    check_states(figure, where, folder, states)
    figure.check(exit_code == 0 or workload.run(folder) == 0, f"{where}: the next run fails")
    figure.check(results(folder) == states.end, f"{where}: the end differs from the undisturbed one")
    figure.check(not (left := leftovers(folder)), f"{where}: left behind {left}")
    return exit_code
