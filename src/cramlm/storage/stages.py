"""Stages: a published folder is built if it is missing or was made from something else.

A stage is up to date if its key (inputs, settings, code format) equals the key in the manifest of its folder (artifacts.py); caching and
resuming are the same. Runs share stages with equal keys by a pool of folders whose files they link.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

from cramlm.errors import ArtifactError, EnvironmentFault, LockedError
from cramlm.records import Emit, Event
from cramlm.storage.artifacts import CHECKING, MANIFEST, Artifact, check_file, hash_json, open_artifact, publish, publish_file
from cramlm.storage.locks import LOCK_SUFFIX, leftovers, lock, lock_file, raise_if_refused, temporary_name, wait_while_locked

_EDITABLE: Final = (".json", ".jsonl", ".txt")  # endings of files that are text
_POOL: Final[ContextVar[StagePool | None]] = ContextVar("pool", default=None)
_CONFIRM: Final[ContextVar[Callable[[Artifact], None] | None]] = ContextVar("confirm", default=None)
_Value = TypeVar("_Value")


def default_store() -> Path:
    """Return the folder of corpora and indexes for all runs: $CRAMLM_STORE, else in the user's cache folder.

    Raises:
        EnvironmentFault: if the user has no home folder.
    """
    if chosen := os.environ.get("CRAMLM_STORE"):
        return Path(os.path.expanduser(chosen))  # noqa: PTH111 - as a shell does; Path.expanduser raises an error for unknown users
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cramlm"
    except RuntimeError as error:
        raise EnvironmentFault("this user has no home folder for the store; pass --store DIR, or set CRAMLM_STORE") from error


def stage(
    target: Path,
    *,
    kind: str,
    key: Mapping[str, Any],
    write: Callable[[Path], None],
    emit: Emit,
    name: str | None = None,
    shared_key: Mapping[str, Any] | None = None,
) -> Artifact:
    """Return the published folder of a stage. If it is missing or has another key, build it first, under the folder's lock.

    shared_key: the part of the key that the content depends on, by which runs share it (`pooled`); None = the whole key.

    Emits that the stage is up to date, or why it runs again; `write` emits its own start, progress and done. No other function decides
    whether a stage is up to date. Inside `checking` nothing is built; inside `confirming` a callback receives every stage.

    Raises:
        LockedError: if another process builds the same folder.
        ArtifactError: if the existing folder is damaged.
        StaleStage: inside `checking`, if the stage is not up to date.
    """
    key = json.loads(json.dumps(key))  # as read back from the manifest: tuples become lists
    write = shared_write(name or kind, kind=kind, key=key if shared_key is None else shared_key, write=write, emit=emit)
    artifact = _open_or_build(target, name or kind, kind=kind, key=key, write=write, emit=emit)
    if (confirm := _CONFIRM.get()) is not None:
        confirm(artifact)
    return artifact


def _open_or_build(target: Path, name: str, *, kind: str, key: Mapping[str, Any], write: Callable[[Path], None], emit: Emit) -> Artifact:
    if (target / MANIFEST).exists() and not explain_difference((artifact := open_artifact(target, kind=kind)).key, key):
        emit(Event("up_to_date", name, "up to date"))
        if next(leftovers(target), None) is not None:  # a builder was killed while it removed its temporary folder
            with contextlib.suppress(LockedError), lock(target):
                pass
        return artifact
    if CHECKING.get():
        old = open_artifact(target, kind=kind).key if (target / MANIFEST).exists() else None
        raise StaleStage(name, ["it is missing"] if old is None else explain_difference(old, key))
    with lock(target):
        if (target / MANIFEST).exists():
            artifact = open_artifact(target, kind=kind)
            reasons = explain_difference(artifact.key, key)
            if not reasons:
                return artifact  # another process built it before this one had the lock
            emit(Event("stale", name, "runs again: " + "; ".join(reasons[:6])))
        return publish(target, kind=kind, key=key, write=write)


def shared_write(name: str, *, kind: str, key: Mapping[str, Any], write: Callable[[Path], None], emit: Emit) -> Callable[[Path], None]:
    """Return a `write`, of a stage or of a part of it, that takes files of an equal key from the pool, if there is one for this kind."""
    pool = _POOL.get()
    return write if pool is None or kind not in pool.kinds else partial(pool.fill, name=name, kind=kind, key=key, write=write, emit=emit)


def shared_stage(target: Path, *, kind: str, key: Mapping[str, Any], write: Callable[[Path], None], emit: Emit) -> Artifact:
    """As `stage`, for a folder that runs share: wait while another process builds it (`wait_while_locked`)."""
    return wait_while_locked(lambda: stage(target, kind=kind, key=key, write=write, emit=emit), stage=kind, emit=emit)


@dataclass(slots=True)
class StagePool:
    """Stages that runs share: the first run that needs a stage builds it here, the others link its files (or copy them: `_link_files`).

    folder: NAME/ of every stage, NAME.json with its build time. kinds: of the stages that are shared. environment: what results depend on
    besides the key, such as versions of libraries. most_bytes: size of the folder; stages that were not used for the longest time are
    removed. borrowed_seconds: the build time of the stages that were linked; a run with a budget of time counts it as its own.
    """

    folder: Path
    kinds: frozenset[str]
    environment: Mapping[str, Any]
    most_bytes: int
    borrowed_seconds: float = 0.0

    def fill(self, folder: Path, *, name: str, kind: str, key: Mapping[str, Any], write: Callable[[Path], None], emit: Emit) -> None:
        """Link the files of the pool's folder for this key into `folder`; build that folder by `write` first if it is missing."""
        entry = self.folder / f"{kind}-{hash_json({'key': key, 'environment': self.environment})[:24]}"

        def build(target: Path) -> None:
            began = time.monotonic()
            write(target)
            publish_file(_cost_of(entry), json.dumps({"seconds": time.monotonic() - began}).encode())

        def link_or_build() -> bool:
            with lock(entry):
                if built := not self._link(entry, folder, name, kind, emit):
                    _link_files(publish(entry, kind=kind, key=key, write=build), folder)
                os.utime(entry / MANIFEST)  # when it was used
            return built

        if wait_while_locked(link_or_build, stage=name, emit=emit):
            remove_least_recently_used(self.folder, self.most_bytes)

    def _link(self, entry: Path, folder: Path, name: str, kind: str, emit: Emit) -> bool:
        """Link the files of a stage that is there and undamaged; return False if there is none."""
        if not (entry / MANIFEST).exists():
            return False
        try:
            artifact = open_artifact(entry, kind=kind)
            for file, expected in artifact.files.items():
                check_file(entry / file, expected, whole=True)
            seconds = float(json.loads(_cost_of(entry).read_bytes())["seconds"])
        except (ArtifactError, OSError, ValueError, KeyError, TypeError) as error:
            raise_if_refused(error, entry)
            emit(Event("warning", name, f"{error if isinstance(error, ArtifactError) else f'{_cost_of(entry)}: damaged'}: built again"))
            return False
        _link_files(artifact, folder)
        self.borrowed_seconds += seconds
        emit(Event("note", name, f"reused from another run with equal inputs ({seconds:.1f} s, which count towards a budget of time)"))
        return True


def remove_least_recently_used(folder: Path, most_bytes: int) -> None:
    """Remove stages of a pool, those that were used least recently first, until all have at most `most_bytes` together; also what killed
    processes left. Stages that another process builds or links at the moment stay.
    """
    present = {path.parent.name: path for path in folder.glob(f"[!.]*/{MANIFEST}")}  # others are about to be published or removed
    used: dict[str, tuple[int, int]] = {}
    for name, manifest in present.items():
        with contextlib.suppress(FileNotFoundError):  # another process removed it
            used[name] = (manifest.stat().st_mtime_ns, sum(file.stat().st_size for file in manifest.parent.rglob("*") if file.is_file()))
    obsolete = [path.name[1 : -len(LOCK_SUFFIX)] for path in folder.glob(f".*{LOCK_SUFFIX}")]
    obsolete = [name for name in obsolete if name not in present]
    total = sum(size for _, size in used.values())
    for name, (_, size) in sorted(used.items(), key=lambda item: (item[1], item[0])):
        if total <= most_bytes:
            break
        total -= size
        obsolete.append(name)
    for name in obsolete:
        _remove_from_pool(folder / name, since=used.get(name))


def _remove_from_pool(entry: Path, *, since: tuple[int, int] | None) -> None:
    """Remove a stage, its build time and its lock, unless it is locked or was used after `since` (None: unless it exists by now)."""
    manifest = entry / MANIFEST
    with contextlib.suppress(LockedError), lock(entry):
        stamp = manifest.stat().st_mtime_ns if manifest.exists() else None
        if stamp != (None if since is None else since[0]):
            return
        if entry.exists():
            moved = temporary_name(entry)
            entry.rename(moved)  # at once: nothing opens a part of it
            shutil.rmtree(moved, ignore_errors=True)
        _cost_of(entry).unlink(missing_ok=True)
        lock_file(entry).unlink(missing_ok=True)


def _cost_of(entry: Path) -> Path:
    return entry.with_name(f"{entry.name}.json")


def _link_files(artifact: Artifact, folder: Path) -> None:
    """Link the files into a folder, but copy text, about 1 of 50 MB: an editor that writes in place would change it in all runs. Deleting
    or replacing a link leaves the others.
    """
    for file in artifact.files:
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        try:
            (shutil.copyfile if file.endswith(_EDITABLE) else os.link)(artifact.path / file, folder / file)
        except OSError:  # another disk, or a file system without hard links
            shutil.copyfile(artifact.path / file, folder / file)


@contextlib.contextmanager
def pooled(pool: StagePool) -> Iterator[StagePool]:
    """Inside the block, share the stages of a pool (this thread's context); a pool that is already shared stays."""
    if (outer := _POOL.get()) is not None:
        yield outer
        return
    with _bound(_POOL, pool):
        yield pool


def borrowed_seconds() -> float:
    """Return the build time of the stages that this run linked from a pool, in seconds."""
    pool = _POOL.get()
    return 0.0 if pool is None else pool.borrowed_seconds


class StaleStage(Exception):  # noqa: N818 - the result of a check, not a failure
    """Raised inside `checking`: this stage is not up to date, and why."""

    def __init__(self, name: str, reasons: Sequence[str]) -> None:
        super().__init__(f"{name}: {'; '.join(reasons[:6])}")


@contextlib.contextmanager
def _bound(variable: ContextVar[_Value], value: _Value) -> Iterator[None]:
    """Give a variable of this thread's context a value inside the block."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def checking() -> AbstractContextManager[None]:
    """Inside the block, build nothing: a stage of this thread that is not up to date raises `StaleStage`."""
    return _bound(CHECKING, True)


def raise_if_checking(name: str, reason: str) -> None:
    """Raise `StaleStage` inside `checking`; for work outside of `stage`."""
    if CHECKING.get():
        raise StaleStage(name, [reason])


def confirming(confirm: Callable[[Artifact], None]) -> AbstractContextManager[None]:
    """Inside the block, call `confirm` with every stage of this thread once it is up to date."""
    return _bound(_CONFIRM, confirm)


def explain_difference(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Return one 'retriever.k1 1.2 -> 1.5' per field in which two stage keys differ; 'task.train changed' where both are hashes."""
    reasons = []
    for field in sorted(set(old) | set(new)):
        before, after, where = old.get(field), new.get(field), f"{prefix}{field}"
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            reasons += explain_difference(before, after, f"{where}.")
        elif before != after and _is_hash(before) and _is_hash(after):
            reasons.append(f"{where} changed")
        elif before != after:
            reasons.append(f"{where} {_brief(before)} -> {_brief(after)}")
    return reasons


def _is_hash(value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch(r"[0-9a-f]{64}", value) is not None


def _brief(value: Any) -> str:
    text = "unset" if value is None else json.dumps(value, ensure_ascii=False) if not isinstance(value, str) else value
    return text if len(text) <= 40 else text[:12] + "…" + text[-12:]
