"""R3: record the calls of a command, and simulate the disk after a power loss between any two of them.

    record ─► [Step, ...] ─► Disk of the first k ─► images ─► a folder: is each result old or new? does the next run finish?

After the loss a file or a folder has at least its content of the last sync. Three images of every prefix: only what was synced; all names
but only synced content; names up to a random moment since the last sync, with content that is whole, cut or synced at random.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from figures import Figure, measured
from syscalls import Call, supervise
from workloads import Workload, World, check_states, results

IMAGES = ("synced", "names", "random")


@dataclass(frozen=True, slots=True)
class Step:
    """One change to the disk. data: of a write."""

    what: str
    path: str
    other: str = ""
    offset: int = 0
    data: bytes = b""


@dataclass(slots=True)
class Node:
    """A file (entries is None) or a folder, as it is and as it was at its last sync."""

    entries: dict[str, Node] | None
    data: bytes = b""
    synced: bytes = b""
    synced_entries: dict[str, Node] = field(default_factory=dict)


class Disk:
    """What the steps so far made of a folder."""

    def __init__(self, root: Path, steps: Sequence[Step], before: Node) -> None:
        self.root, self.top = str(root), _copy(before)
        for step in steps:
            self._apply(step)

    def _find(self, path: str) -> tuple[Node, str]:
        """The folder that holds the name, and the name."""
        node = self.top
        *folders, name = Path(path).relative_to(self.root).parts
        for folder in folders:
            node = node.entries[folder]
        return node, name

    def _apply(self, step: Step) -> None:
        if step.path == self.root:
            self.top.synced_entries = dict(self.top.entries or {})
            return
        parent, name = self._find(step.path)
        entries = parent.entries
        match step.what:
            case "mkdir":
                entries[name] = Node({})
            case "create":
                entries.setdefault(name, Node(None))
            case "empty":
                entries[name].data = b""
            case "write":
                held = entries[name].data.ljust(step.offset, b"\0")
                entries[name].data = held[: step.offset] + step.data + held[step.offset + len(step.data) :]
            case "resize":
                entries[name].data = entries[name].data[: step.offset].ljust(step.offset, b"\0")
            case "sync":
                node = entries[name]
                node.synced, node.synced_entries = node.data, dict(node.entries or {})
            case "rename" | "exchange":
                to, to_name = self._find(step.other)
                moved, replaced = entries.pop(name), to.entries.get(to_name)
                to.entries[to_name] = moved
                if step.what == "exchange" and replaced is not None:
                    entries[name] = replaced
            case "link":
                to, to_name = self._find(step.other)
                to.entries[to_name] = entries[name]
            case "remove":
                del entries[name]

    def write(self, folder: Path, *, names_synced: bool, content: Callable[[Node], bytes]) -> None:
        """Write an image of the disk to a new folder."""

        def put(node: Node, path: Path) -> None:
            if node.entries is None:
                path.write_bytes(content(node))
                return
            path.mkdir()
            for name, child in (node.synced_entries if names_synced else node.entries).items():
                put(child, path / name)

        put(self.top, folder)


def read(folder: Path) -> Node:
    """Return an existing folder, with all of it synced."""
    if folder.is_file():
        content = folder.read_bytes()
        return Node(None, content, content)
    entries = {path.name: read(path) for path in folder.iterdir()}
    return Node(entries, synced_entries=dict(entries))


def record(workload: Workload, folder: Path) -> list[Step]:
    """Return every change that the command makes in `folder`."""
    steps: list[Step] = []

    def note(call: Call) -> None:
        if call.path.startswith(str(folder)):
            steps.extend(_steps(call))

    code = supervise(workload.body(folder), note)
    assert code == 0, f"{workload.name} exits {code}"
    return steps


def _steps(call: Call) -> list[Step]:
    match call.name:
        case "open" | "openat" | "creat":
            if not call.changes:
                return []
            flags = call.arguments[1 if call.name == "open" else 2]
            steps = [] if os.path.exists(call.path) or not flags & os.O_CREAT else [Step("create", call.path)]  # noqa: PTH110
            return [*steps, Step("empty", call.path)] if flags & os.O_TRUNC else steps
        case "write" | "pwrite64" | "sendfile":
            offset, data = call.written()
            return [Step("write", call.path, offset=offset, data=data)]
        case "ftruncate":
            return [Step("resize", call.path, offset=call.arguments[1])]
        case "fsync" | "fdatasync":
            return [Step("sync", call.path)]
        case "mkdir" | "mkdirat":
            return [] if os.path.exists(call.path) else [Step("mkdir", call.path)]  # noqa: PTH110
        case "unlink" | "unlinkat" | "rmdir":
            return [Step("remove", call.path)] if os.path.lexists(call.path) else []
        case "rename" | "renameat" | "renameat2":
            return [Step("exchange" if call.exchange else "rename", call.path, call.other)]
        case "link":
            return [Step("link", call.path, call.other)]
    raise AssertionError(f"{call.name} is not recorded")


@measured("R3", "power lost after any change: each result old or new, what was published stays, the same command finishes")
def losses(
    figure: Figure, world: World, scratch: Path, *, most: int, rerun_every: int, workloads: Sequence[str] | None = None, seed: int = 17
) -> None:
    """rerun_every: the command is run again after one in so many images. workloads: default all."""
    generator = random.Random(seed)
    reruns = 0
    cases: list[tuple[Workload, bool, int, str]] = []
    recorded = {}
    for workload in world.some_workloads(workloads):
        states = workload.states(scratch / f"{workload.name}-states")
        for replacing in workload.ways:
            folder = scratch / f"{workload.name}-{replacing}"
            workload.prepare(folder, replacing=replacing)
            before = read(folder)
            steps = record(workload, folder)
            whole = Disk(folder, steps, before)
            figure.check(_same(whole.top, read(folder)), f"{workload.name}: the recorded disk differs from the folder")
            recorded[workload.name, replacing] = (folder, before, steps, states)
            cases += [(workload, replacing, count, image) for count in range(len(steps) + 1) for image in IMAGES]
    figure.notes.append(f"of {len(cases)} images of {len(cases) // len(IMAGES)} prefixes")
    for workload, replacing, count, image in cases if len(cases) <= most else generator.sample(cases, most):
        folder, before, steps, states = recorded[workload.name, replacing]
        last = f"after {steps[count - 1].what} {Path(steps[count - 1].path).name}" if count else "before all"
        where = f"{workload.name}{' replacing' if replacing else ''}, step {count} ({last}), {image}"
        with figure.trial(scratch) as trial:
            _write_image(image, folder, steps[:count], before, trial, generator)
            check_states(figure, where, trial, states)
            if count == len(steps):  # the command has reported success
                figure.check(states.end.items() <= results(trial).items(), f"{where}: what was published is lost")
            if figure.trials % rerun_every == 0 or count == len(steps):
                reruns += 1
                workload.check_next_run(figure, where, trial, states)
    figure.notes.append(f"{reruns} of them run again")


def _write_image(image: str, root: Path, steps: Sequence[Step], before: Node, target: Path, generator: random.Random) -> None:
    if image == "random":
        synced = max((number for number, step in enumerate(steps, 1) if step.what == "sync"), default=0)
        names = Disk(root, steps[: generator.randint(synced, len(steps))], before)
        names.write(target, names_synced=False, content=lambda node: _at_random(node, generator))
        return
    Disk(root, steps, before).write(target, names_synced=image == "synced", content=lambda node: node.synced)


def _at_random(node: Node, generator: random.Random) -> bytes:
    if node.data == node.synced:
        return node.data
    cut = generator.randrange(len(node.data) + 1)
    return generator.choice((node.data, node.synced, node.data[:cut], node.data[:cut].ljust(len(node.data), b"\0")))


def _same(one: Node, other: Node) -> bool:
    if one.entries is None or other.entries is None:
        return one.entries is other.entries and one.data == other.data
    return one.entries.keys() == other.entries.keys() and all(_same(one.entries[name], other.entries[name]) for name in one.entries)


def _copy(node: Node) -> Node:
    copies: dict[int, Node] = {}

    def copy(original: Node) -> Node:
        if id(original) not in copies:
            made = copies[id(original)] = Node(None, original.data, original.synced)
            if original.entries is not None:
                made.entries = {name: copy(child) for name, child in original.entries.items()}
                made.synced_entries = {name: copy(child) for name, child in original.synced_entries.items()}
        return copies[id(original)]

    return copy(node)
