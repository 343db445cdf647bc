"""Publish, verify, lock: the only way results reach the disk.

A published folder is whole or absent. `publish` writes into a temporary sibling, fsyncs every file, writes `manifest.json` last
(size and sha256 of each file, kind, format version, stage key), fsyncs the folder and renames it into place; an older folder of
that name is swapped out in one atomic exchange, so that at any moment the name holds the old folder or the new one. Readers go
through `open_artifact`: a folder without a valid manifest does not exist. A stage is fresh when its key (inputs, settings, code
format) equals the one in the manifest, so caching and resuming are one thing.

Results stay plain folders (no symbolic links), so that `cp -r run/export` does what a user expects; the reasons are in
docs/decisions/0001-publish-by-exchange.md.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import hashlib
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from cramlm.errors import ArtifactError, CramError, EnvironmentFault, LockedError, UsageError
from cramlm.records import Emit, Event
from cramlm.storage.locks import environment_faults as environment_faults
from cramlm.storage.locks import fsync, leftovers, make_folder, remove_abandoned_files, temporary_file, temporary_name
from cramlm.storage.locks import lock as lock
from cramlm.storage.locks import raise_if_refused as raise_if_refused
from cramlm.storage.locks import remove_leftovers as remove_leftovers
from cramlm.storage.locks import wait_while_locked as wait_while_locked

MANIFEST = "manifest.json"
FORMAT = 1
SMALL_FILE = 1 << 20  # bytes; the hashes of files up to this size are checked at every opening
_CHUNK = 1 << 20
_POOL: Final[ContextVar[StagePool | None]] = ContextVar("pool", default=None)
_CONFIRM: Final[ContextVar[Callable[[Artifact], None] | None]] = ContextVar("confirm", default=None)
_CHECKING: Final[ContextVar[bool]] = ContextVar("checking", default=False)


@dataclass(frozen=True, slots=True)
class Artifact:
    """A published folder whose manifest was read and whose files have the promised sizes."""

    path: Path
    kind: str
    key: Mapping[str, Any]
    files: Mapping[str, Mapping[str, Any]]

    @property
    def fingerprint(self) -> str:
        """Hash of every file's content: equal results have equal fingerprints, wherever and whenever they were made."""
        return hash_json({"kind": self.kind, "files": self.files})


def hash_json(value: Any) -> str:
    """sha256 of the canonical JSON (sorted keys, no spaces) of plain data, in hex."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()).hexdigest()


def hash_file(path: Path) -> str:
    """sha256 of a file's bytes, in hex, read in chunks."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def publish(target: Path, *, kind: str, key: Mapping[str, Any], write: Callable[[Path], None]) -> Artifact:
    """Make `target` a folder with what `write(folder)` puts there, whole or not at all.

    Raises:
        EnvironmentFault: if the disk is full, read-only or broken; the temporary folder is removed, `target` is as before.
    """
    assert not _CHECKING.get(), f"{target}: a check publishes nothing"
    with environment_faults(target):
        make_folder(target.parent)
        temporary = temporary_name(target)
        try:
            temporary.mkdir()
            write(temporary)
            files = {}
            for path in sorted(path for path in temporary.rglob("*") if path.is_file()):
                fsync(path)
                files[path.relative_to(temporary).as_posix()] = {
                    "bytes": path.stat().st_size,
                    "sha256": hash_file(path),
                }
            manifest = {"format": FORMAT, "kind": kind, "key": dict(key), "files": files}
            manifest["sha256"] = hash_json(manifest)
            (temporary / MANIFEST).write_text(json.dumps(manifest, indent=1, sort_keys=True, ensure_ascii=False) + "\n", "utf-8")
            fsync(temporary / MANIFEST)
            for folder in [path for path in temporary.rglob("*") if path.is_dir()] + [temporary]:
                fsync(folder)
            if target.exists():
                _exchange(temporary, target)
            else:
                temporary.rename(target)
            fsync(target.parent)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    return Artifact(target, kind, dict(key), files)


def publish_file(target: Path, content: bytes) -> None:
    """Write one file whole or not at all (temporary file, fsync, rename, fsync of the folder)."""
    assert not _CHECKING.get(), f"{target}: a check publishes nothing"
    with environment_faults(target):
        make_folder(target.parent)
        remove_abandoned_files(target)
        with temporary_file(target) as (temporary, handle):
            with open(handle, "wb", closefd=False) as file:
                file.write(content)
            os.fsync(handle)
            temporary.replace(target)
            fsync(target.parent)


def refuse_foreign(target: Path, *, kind: str) -> None:
    """Refuse a place that a user named for a folder of `kind` where something else lies: publishing there would replace it.

    Raises:
        UsageError: if it is a file, or a folder that is neither empty nor an earlier one of this kind.
    """
    with environment_faults(target):
        if not target.exists() or (target.is_dir() and not any(target.iterdir())):
            return
    try:
        found = _read_manifest(target).kind
    except CramError:
        found = "something else"
    if found != kind:
        raise UsageError(f"{target}: holds {found}, which would be replaced; choose another place, or remove it")


def open_artifact(path: Path, *, kind: str) -> Artifact:
    """Read and check a published folder: manifest whole, every file there with its size, small files with their hash.

    Raises:
        ArtifactError: naming the file that is damaged or missing, or the kind that was found instead.
    """
    artifact = _read_manifest(path)
    if artifact.kind != kind:
        raise ArtifactError(f"{path}: is a {artifact.kind!r} folder, expected {kind!r}; pass the right folder")
    for name, promised in artifact.files.items():
        _check_file(path / name, promised, whole=promised["bytes"] <= SMALL_FILE)
    return artifact


def check_files(path: Path, names: Iterable[str]) -> None:
    """If `path` is a published folder, check every byte of these files of it; a folder that was made by others has no promises to keep.

    Raises:
        ArtifactError: naming the file that is damaged or missing.
    """
    if not (path / MANIFEST).exists():
        return
    promised = _read_manifest(path).files
    for name in names:
        if name in promised:
            _check_file(path / name, promised[name], whole=True, remedy=f"export again; if you changed it yourself, remove {MANIFEST}")


def verify(path: Path) -> int:
    """Check every published folder at or below `path`, every file by its hash; returns how many folders were checked.

    Raises:
        ArtifactError: naming the first damaged, missing or unlisted file, or if there is nothing published here.
    """
    manifests = [path / MANIFEST] if (path / MANIFEST).is_file() else sorted(_manifests_below(path))
    if not manifests:
        raise ArtifactError(f"{path}: no published folder here (no {MANIFEST}); pass a run, a corpus, an index or an export")
    for manifest in manifests:
        artifact = _read_manifest(manifest.parent)
        for name, promised in artifact.files.items():
            _check_file(manifest.parent / name, promised, whole=True)
        present = {file.relative_to(manifest.parent).as_posix() for file in manifest.parent.rglob("*") if file.is_file()}
        if extra := sorted(present - set(artifact.files) - {MANIFEST}):
            raise ArtifactError(f"{manifest.parent / extra[0]}: not listed in the manifest; remove it or build the folder again")
    return len(manifests)


def default_store() -> Path:
    """Where corpora and indexes are kept for all runs: $CRAMLM_STORE, else the user's cache folder."""
    if chosen := os.environ.get("CRAMLM_STORE"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cramlm"


def stage(
    target: Path,
    *,
    kind: str,
    key: Mapping[str, Any],
    write: Callable[[Path], None],
    emit: Emit,
    name: str | None = None,
) -> Artifact:
    """The published folder for `key`: the one that is there if it is fresh, else built now (under the folder's lock).

    Says through `emit` that the stage is fresh, or why it runs again. `write` emits its own start, progress and done. Whether a stage is up
    to date is decided here and nowhere else; `checking` asks without building, `confirming` hears of every stage.

    Raises:
        LockedError: if another process builds the same folder.
        ArtifactError: if the folder that is there is damaged (delete it, or `cramlm verify` it).
        StaleStage: in a check, if it would be built.
    """
    key = json.loads(json.dumps(key))  # as it will read back from the manifest: tuples become lists
    artifact = _fresh_or_built(target, name or kind, kind=kind, key=key, write=write, emit=emit)
    if (confirm := _CONFIRM.get()) is not None:
        confirm(artifact)
    return artifact


def _fresh_or_built(target: Path, name: str, *, kind: str, key: Mapping[str, Any], write: Callable[[Path], None], emit: Emit) -> Artifact:
    if (target / MANIFEST).exists() and not explain_difference((artifact := open_artifact(target, kind=kind)).key, key):
        emit(Event("up_to_date", name, "up to date"))
        if next(leftovers(target), None) is not None:  # of a builder that was killed while it tidied up
            with contextlib.suppress(LockedError), lock(target):
                pass
        return artifact
    if _CHECKING.get():
        there = open_artifact(target, kind=kind).key if (target / MANIFEST).exists() else None
        raise StaleStage(name, ["it is missing"] if there is None else explain_difference(there, key))
    with lock(target):
        if (target / MANIFEST).exists():
            artifact = open_artifact(target, kind=kind)
            reasons = explain_difference(artifact.key, key)
            if not reasons:
                return artifact  # another process built it while this one waited to look
            emit(Event("stale", name, "runs again: " + "; ".join(reasons[:6])))
        pool = _POOL.get()
        if pool is not None and kind in pool.kinds:
            write = pool.obtain(name, kind=kind, key=key, write=write, emit=emit)
        return publish(target, kind=kind, key=key, write=write)


def shared_stage(
    target: Path, *, kind: str, key: Mapping[str, Any], write: Callable[[Path], None], emit: Emit, name: str | None = None
) -> Artifact:
    """`stage` for a folder that several runs share: another process that builds it now is waited for (`wait_while_locked`)."""
    return wait_while_locked(lambda: stage(target, kind=kind, key=key, write=write, emit=emit, name=name), stage=name or kind, emit=emit)


@dataclass(slots=True)
class StagePool:
    """Stages that several runs have in common: the first run that needs one makes it here, the others link its files.

    borrowed_seconds: what the stages that were there already took to make; whoever is given a budget of time is to count them as its own.
    """

    folder: Path
    kinds: frozenset[str]
    borrowed_seconds: float = 0.0

    def obtain(self, name: str, *, kind: str, key: Mapping[str, Any], write: Callable[[Path], None], emit: Emit) -> Callable[[Path], None]:
        """A `write` that links the files of the pool's folder for this key, made now if it is not there."""
        shared = self.folder / f"{kind}-{hash_json(key)[:16]}"
        cost = shared.with_name(f"{shared.name}.json")

        def build() -> bool:
            with lock(shared):
                if (shared / MANIFEST).exists():
                    return False
                began = time.monotonic()
                publish(shared, kind=kind, key=key, write=write)
                publish_file(cost, json.dumps({"seconds": time.monotonic() - began}).encode())
                return True

        made = wait_while_locked(build, stage=name, emit=emit)
        if not made:
            seconds = float(json.loads(cost.read_bytes())["seconds"]) if cost.is_file() else 0.0
            self.borrowed_seconds += seconds
            emit(Event("note", name, f"as another run made it; its {seconds:.1f} s count here too"))
        files = open_artifact(shared, kind=kind).files

        def link(folder: Path) -> None:
            for file in files:
                (folder / file).parent.mkdir(parents=True, exist_ok=True)
                try:
                    os.link(shared / file, folder / file)
                except OSError:  # a file system without links
                    shutil.copyfile(shared / file, folder / file)

        return link


@contextlib.contextmanager
def pooled(folder: Path, kinds: frozenset[str]) -> Iterator[StagePool]:
    """Until the block ends, stages of these kinds are shared with whoever uses the same folder (in this thread's context)."""
    pool = StagePool(folder, kinds)
    token = _POOL.set(pool)
    try:
        yield pool
    finally:
        _POOL.reset(token)


def borrowed_seconds() -> float:
    """What the stages that this run took from a pool had cost when they were made."""
    pool = _POOL.get()
    return 0.0 if pool is None else pool.borrowed_seconds


class StaleStage(Exception):  # noqa: N818 - the answer of a check, not a failure
    """In a check: this stage would be built, and why."""

    def __init__(self, name: str, reasons: Sequence[str]) -> None:
        super().__init__(f"{name}: {'; '.join(reasons[:6])}")


@contextlib.contextmanager
def checking() -> Iterator[None]:
    """Until the block ends, nothing is built: a stage of this thread that is not up to date raises `StaleStage`."""
    token = _CHECKING.set(True)
    try:
        yield
    finally:
        _CHECKING.reset(token)


def raise_if_checking(name: str, reason: str) -> None:
    """Raise `StaleStage` in a check; for work that is done outside of `stage`."""
    if _CHECKING.get():
        raise StaleStage(name, [reason])


@contextlib.contextmanager
def confirming(confirm: Callable[[Artifact], None]) -> Iterator[None]:
    """Until the block ends, `confirm` is called with every stage of this thread, once it is up to date."""
    token = _CONFIRM.set(confirm)
    try:
        yield
    finally:
        _CONFIRM.reset(token)


def explain_difference(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Why a stage must run again, one 'retriever.k1 1.2 -> 1.5' per field that differs; empty if the keys are equal."""
    reasons = []
    for field in sorted(set(old) | set(new)):
        before, after, where = old.get(field), new.get(field), f"{prefix}{field}"
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            reasons += explain_difference(before, after, f"{where}.")
        elif before != after:
            reasons.append(f"{where} {_brief(before)} -> {_brief(after)}")
    return reasons


def _read_manifest(path: Path) -> Artifact:
    file = path / MANIFEST
    try:
        manifest = json.loads(file.read_bytes())
    except FileNotFoundError as error:
        what = "no such folder" if not path.exists() else f"not a cramlm folder (no {MANIFEST})"
        raise ArtifactError(f"{path}: {what}; check the path, or build it again") from error
    except OSError as error:
        raise EnvironmentFault(f"{file}: {error.strerror}; check the path and its permissions") from error
    except (ValueError, RecursionError) as error:
        raise ArtifactError(f"{file}: damaged, not JSON; delete the folder and build it again") from error
    try:
        promised = manifest.pop("sha256")
        whole = promised == hash_json(manifest)
        artifact = Artifact(path, manifest["kind"], manifest["key"], manifest["files"])
    except (AttributeError, KeyError, TypeError) as error:
        raise ArtifactError(f"{file}: damaged, fields are missing; delete the folder and build it again") from error
    if not whole:
        raise ArtifactError(f"{file}: damaged, its own hash does not match; delete the folder and build it again")
    if manifest["format"] != FORMAT:
        raise ArtifactError(f"{file}: format {manifest['format']}, this cramlm reads {FORMAT}; build the folder again")
    return artifact


def _check_file(path: Path, promised: Mapping[str, Any], *, whole: bool, remedy: str = "delete the folder and build it again") -> None:
    try:
        size = path.stat().st_size
        if size != promised["bytes"]:
            raise ArtifactError(f"{path}: damaged, {size} bytes instead of {promised['bytes']}; {remedy}")
        if whole and hash_file(path) != promised["sha256"]:
            raise ArtifactError(f"{path}: damaged, content differs from its hash; {remedy}")
    except FileNotFoundError as error:
        raise ArtifactError(f"{path}: missing; {remedy}") from error
    except OSError as error:
        raise EnvironmentFault(f"{path}: {error.strerror}; check the disk and permissions") from error


def _manifests_below(path: Path) -> Iterator[Path]:
    """Published folders under `path`; temporaries of builders are not published, and nothing is published inside a published folder."""
    for folder, subfolders, files in os.walk(path):
        if MANIFEST in files:
            subfolders.clear()
            yield Path(folder) / MANIFEST
        subfolders[:] = [name for name in subfolders if ".tmp-" not in name]


def _exchange(new: Path, old: Path) -> None:
    """Swap two folders' names in one atomic step; where the system has no such call, the old one steps aside first."""
    libc = ctypes.CDLL(None, use_errno=True)
    exchange_flag, here = 2, -100  # RENAME_EXCHANGE, AT_FDCWD in linux/fs.h and fcntl.h
    if sys.platform == "linux" and hasattr(libc, "renameat2"):
        if libc.renameat2(here, os.fsencode(new), here, os.fsencode(old), exchange_flag) == 0:
            return
        code = ctypes.get_errno()
        if code not in (errno.EINVAL, errno.ENOSYS):
            raise OSError(code, os.strerror(code), str(old))
    aside = temporary_name(old)
    old.rename(aside)
    new.rename(old)
    shutil.rmtree(aside, ignore_errors=True)


def _brief(value: Any) -> str:
    text = "unset" if value is None else json.dumps(value, ensure_ascii=False) if not isinstance(value, str) else value
    return text if len(text) <= 40 else text[:12] + "…" + text[-12:]
