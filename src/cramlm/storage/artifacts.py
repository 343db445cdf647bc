"""Publishing and verifying of result folders; all results are written by this module.

A published folder is complete or absent. `publish` writes into a temporary sibling, fsyncs every file, writes `manifest.json` last (size
and sha256 of each file, kind, format version, stage key), fsyncs the folder and renames it. An existing folder of that name is replaced by
one atomic exchange, so that the name always refers to the old folder or the new one. `open_artifact` rejects a folder without a valid
manifest.

Results are plain folders without symbolic links, so that `cp -r run/export` works (docs/decisions/0001-publish-by-exchange.md).
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import json
import os
import re
import shutil
import stat
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

from cramlm.errors import ArtifactError, CramError, EnvironmentFault, UsageError
from cramlm.storage.locks import (
    environment_faults,
    fsync,
    make_folder,
    remove_abandoned_files,
    temporary_file,
    temporary_name,
)

MANIFEST = "manifest.json"
CATALOG: Final = "catalog.json"  # of an index folder, which retrieval/index.py writes
_RUN: Final = "run.toml"  # of the folder of a run, which pipeline/run_folder.py writes
RESULT_FILES: Final = (MANIFEST, CATALOG, _RUN)  # one of them is in every folder of results
FORMAT = 1
SMALL_FILE = 1 << 20  # bytes; hashes of files up to this size are checked whenever the folder is opened
CHECKING: Final[ContextVar[bool]] = ContextVar("checking", default=False)
"""True inside `stages.checking`, where nothing may be published."""
_URL: Final = re.compile(r"([a-zA-Z][a-zA-Z0-9+.-]+):/+")  # also as a `Path`, which has one slash


@dataclass(frozen=True, slots=True)
class Artifact:
    """A published folder, its manifest read and the sizes of its files checked."""

    path: Path
    kind: str
    key: Mapping[str, Any]
    files: Mapping[str, Mapping[str, Any]]

    @property
    def fingerprint(self) -> str:
        """Hash of the contents of all files: equal results have equal fingerprints."""
        return hash_json({"kind": self.kind, "files": self.files})


def hash_json(value: Any) -> str:
    """Return the sha256 of the canonical JSON (sorted keys, no spaces) of plain data, in hex."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()).hexdigest()


def write_json(path: Path, value: Any) -> None:
    """Write plain data as indented JSON; numbers must be finite."""
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n", "utf-8")


def hash_file(path: Path) -> str:
    """Return the sha256 of a file, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def publish(target: Path, *, kind: str, key: Mapping[str, Any], write: Callable[[Path], None]) -> Artifact:
    """Publish what `write(folder)` writes as the folder `target`, completely or not at all.

    Raises:
        EnvironmentFault: if the disk is full, read-only or broken; the temporary folder is removed and `target` is unchanged.
    """
    assert not CHECKING.get(), f"{target}: a check publishes nothing"
    named, target = target, _behind_links(target)
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
            try:
                shutil.rmtree(temporary, ignore_errors=True)
            except BaseException:  # Ctrl-C, or the end of a worker while another failure is cleaned up
                shutil.rmtree(temporary, ignore_errors=True)
                raise
    return Artifact(named, kind, dict(key), files)


def publish_file(target: Path, content: bytes) -> None:
    """Write one file, completely or not at all (temporary file, fsync, rename, fsync of the folder).

    What is no regular file, like a pipe or /dev/null, is written directly instead of being replaced.
    """
    publish_written(target, lambda file: file.write(content))


def publish_lines(target: Path, lines: Iterable[str]) -> None:
    """As `publish_file`, for lines of text, of which one at a time is in memory."""
    publish_written(target, lambda file: file.writelines(line.encode() for line in lines))


def publish_written(target: Path, write: Callable[[BinaryIO], object]) -> None:
    """As `publish_file`, for what `write` writes to a file."""
    assert not CHECKING.get(), f"{target}: a check publishes nothing"
    with environment_faults(target):
        if target.exists() and not target.is_file() and not target.is_dir():
            with target.open("wb") as file:
                write(file)
            return
        target = _behind_links(target)
        make_folder(target.parent)
        remove_abandoned_files(target)
        with temporary_file(target) as (temporary, handle):
            with open(handle, "wb", closefd=False) as file:
                write(file)
            os.fsync(handle)
            temporary.replace(target)
            fsync(target.parent)


def _behind_links(target: Path) -> Path:
    """Return the path that a symbolic link names, so that it is replaced and the link stays; any other path as it is."""
    return Path(os.path.realpath(target)) if target.is_symlink() else target


def refuse_url(path: Path, what: str) -> None:
    """Raise UsageError if a path is a URL: as a `Path` it names a local folder `s3:`. what: the path is for, in the message."""
    if match := _URL.match(str(path)):
        url = f"{match[1]}://{str(path)[match.end() :]}"
        raise UsageError(f"{url}: is a URL, and {what} is a path on this machine; pass such a path, and copy the files")


def refuse_output(target: Path, *inputs: str | Path | None, published: Sequence[Path] = ()) -> None:
    """Check that writing a file replaces no file that is read or printed to, and none of a published folder or an index folder.

    published: folders that the same command publishes.

    Raises:
        UsageError: if `target` is one of `inputs`, or the regular file that standard output or standard error goes to, lies in a published
        folder or an index folder, is a folder, is `-`, or is a URL.
    """
    refuse_url(target, "the output")
    if str(target) == "-":
        raise UsageError("-: standard output cannot be written here; pass the name of a file")
    with environment_faults(target):
        if target.is_dir():
            raise UsageError(f"{target}: is a folder; pass a file in it")
        if any(target.exists() and Path(each).exists() and target.samefile(each) for each in inputs if each is not None):
            raise UsageError(f"{target}: is the file to read, which would be replaced; pass another file to write")
        if any(_receives(target, descriptor) for descriptor in (1, 2)):
            raise UsageError(f"{target}: is the file that this command prints to, which would be replaced; pass another file to write")
        own = [Path(os.path.realpath(folder)) for folder in published]
        for folder in Path(os.path.realpath(target)).parents:
            if folder in own or ((folder / MANIFEST).is_file() and is_published(folder)):
                raise UsageError(f"{target}: is inside a folder whose files cramlm verifies; write the file outside of it")
            if is_index_folder(folder):
                raise UsageError(f"{target}: is inside the index folder {folder}; write the file outside of it")


def _receives(target: Path, descriptor: int) -> bool:
    """Return True if what is written to a descriptor goes to the regular file `target`, which may be named /dev/stdout."""
    try:
        own = os.fstat(descriptor)
        return stat.S_ISREG(own.st_mode) and os.path.samestat(target.stat(), own)
    except OSError:  # the descriptor is closed, or there is no such file
        return False


def is_published(folder: Path) -> bool:
    """Return True if a folder has an undamaged manifest."""
    try:
        _read_manifest(folder)
    except CramError:
        return False
    return True


def is_index_folder(folder: Path) -> bool:
    """Return True if a folder has the catalog of an index: an object in which `corpus` and `index` are strings."""
    catalog = _read_object(folder / CATALOG)
    return all(isinstance(catalog.get(name), str) for name in ("corpus", "index"))


def is_result_folder(folder: Path) -> bool:
    """Return True for a published folder, also a damaged one or one of another version, an index folder or the folder of a run."""
    published = {"format", "kind", "key", "files", "sha256"} <= _read_object(folder / MANIFEST).keys()
    return published or is_index_folder(folder) or is_run_folder(folder)


def is_run_folder(folder: Path) -> bool:
    """Return True for the folder of a run, not for one in which a user keeps a run.toml."""
    return (folder / _RUN).is_file() and any((folder / name).is_file() for name in ("stages.json", "events.jsonl"))


def _read_object(file: Path) -> dict[str, Any]:
    """Return the JSON object in a small file; an empty one if there is none."""
    if not file.is_file() or file.stat().st_size > SMALL_FILE:
        return {}
    try:
        value = json.loads(file.read_bytes())
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def refuse_foreign(target: Path, *, kind: str) -> None:
    """Check that publishing a folder of `kind` at `target` replaces nothing else.

    Raises:
        UsageError: if `target` is a file, or a folder that is neither empty nor of this kind, or a URL.
    """
    refuse_url(target, "the output")
    with environment_faults(target):
        if not target.exists() or (target.is_dir() and not any(target.iterdir())):
            return
    try:
        there = _read_manifest(target).kind
    except CramError:
        there = "something else"
    if there != kind:
        raise UsageError(f"{target}: holds {there}, which would be replaced; choose another folder, or remove it")


def refuse_other_files(folder: Path, *, own: Iterable[str], what: str, unfinished: Iterable[str] = ()) -> None:
    """Check that a folder that stages are written to holds nothing else. Hidden files do not count.

    own: names one of which is there if the folder is used for this already. what: it is used for, as users read it. unfinished: names that
    an interrupted call left; they do not count, either.

    Raises:
        UsageError: if it has files but none of `own`, or is a file or a URL.
    """
    refuse_url(folder, "the output")
    with environment_faults(folder):
        if not folder.exists() or any((folder / name).exists() for name in own):
            return
        if not folder.is_dir():
            raise UsageError(f"{folder}: is a file; pass a folder as --out")
        present = sorted({path.name for path in folder.iterdir() if not path.name.startswith(".")} - set(unfinished))
    if present:
        shown = f"{present[0]} and {len(present) - 1} more" if len(present) > 1 else present[0]
        raise UsageError(f"{folder}: holds other files ({shown}) and no {what}; pass a new or empty folder as --out")


def open_artifact(path: Path, *, kind: str) -> Artifact:
    """Open a published folder; check its manifest, the size of every file, and the hash of every small file.

    Raises:
        ArtifactError: naming the damaged or missing file, or the kind of the folder if it is another.
    """
    artifact = _read_manifest(path)
    if artifact.kind != kind:
        raise ArtifactError(f"{path}: is a {artifact.kind!r} folder, expected {kind!r}; pass the right folder")
    for name, expected in artifact.files.items():
        check_file(path / name, expected, whole=expected["bytes"] <= SMALL_FILE)
    return artifact


def kind_of_artifact(path: Path) -> str:
    """Return the kind of a published folder, by its manifest.

    Raises:
        ArtifactError: if it has none, or a damaged one.
    """
    return _read_manifest(path).kind


def check_files(path: Path, names: Iterable[str]) -> None:
    """If `path` is a published folder, check these files of it by their hashes. Other folders have no hashes to check.

    Raises:
        ArtifactError: naming the damaged or missing file.
    """
    if not (path / MANIFEST).exists():
        return
    expected = _read_manifest(path).files
    for name in names:
        if name in expected:
            check_file(path / name, expected[name], whole=True, remedy=f"export again; if you changed it yourself, remove {MANIFEST}")


def verify(path: Path) -> int:
    """Check every published folder at or below `path`, all files by their hashes; return the number of folders.

    Raises:
        ArtifactError: naming the first damaged, missing or unlisted file, or if there is nothing published here. EnvironmentFault: a folder
        cannot be read.
    """
    manifests = sorted(_manifests_below(path))
    if not manifests and not path.exists():
        raise ArtifactError(f"{path}: no such folder; check the path")
    if not manifests:
        raise ArtifactError(f"{path}: no published folder here (no {MANIFEST}); pass a run, a corpus, an index or an export")
    for manifest in manifests:
        artifact = _read_manifest(manifest.parent)
        for name, expected in artifact.files.items():
            check_file(manifest.parent / name, expected, whole=True)
        present = {file.relative_to(manifest.parent).as_posix() for file in manifest.parent.rglob("*") if file.is_file()}
        if extra := sorted(present - set(artifact.files) - {MANIFEST}):
            raise ArtifactError(f"{manifest.parent / extra[0]}: not listed in the manifest; remove it or build the folder again")
    return len(manifests)


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
        is_whole = manifest.pop("sha256") == hash_json(manifest)
        artifact = Artifact(path, manifest["kind"], manifest["key"], manifest["files"])
    except (AttributeError, KeyError, TypeError) as error:
        raise ArtifactError(f"{file}: damaged, fields are missing; delete the folder and build it again") from error
    if not is_whole:
        raise ArtifactError(f"{file}: damaged, its own hash does not match; delete the folder and build it again")
    if manifest["format"] != FORMAT:
        raise ArtifactError(f"{file}: format {manifest['format']}, this cramlm reads {FORMAT}; build the folder again")
    return artifact


def check_file(path: Path, expected: Mapping[str, Any], *, whole: bool, remedy: str = "delete the folder and build it again") -> None:
    try:
        size = path.stat().st_size
        if size != expected["bytes"]:
            raise ArtifactError(f"{path}: damaged, {size} bytes instead of {expected['bytes']}; {remedy}")
        if whole and hash_file(path) != expected["sha256"]:
            raise ArtifactError(f"{path}: damaged, content differs from its hash; {remedy}")
    except FileNotFoundError as error:
        raise ArtifactError(f"{path}: missing; {remedy}") from error
    except OSError as error:
        raise EnvironmentFault(f"{path}: {error.strerror}; check the disk and permissions") from error


def published_folders(path: Path, *, holding: str) -> list[Path]:
    """Return the published folders at or below `path` that hold a file of this name, sorted; temporary folders are skipped."""
    return sorted(manifest.parent for manifest in _manifests_below(path) if (manifest.parent / holding).exists())


def _manifests_below(path: Path) -> Iterator[Path]:
    """Yield the manifests at and below `path`, skipping temporary folders; published folders are not nested."""

    def fail(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError):  # removed meanwhile
            raise EnvironmentFault(f"{error.filename}: {error.strerror}; give this user the right to read it") from error

    for folder, subfolders, files in os.walk(path, onerror=fail):
        if MANIFEST in files and not _is_foreign(Path(folder) / MANIFEST):
            subfolders.clear()
            yield Path(folder) / MANIFEST
        subfolders[:] = [name for name in subfolders if ".tmp-" not in name]


def _is_foreign(manifest: Path) -> bool:
    """Return True for a file of the user: JSON without the fields of a manifest. A damaged manifest has some of them, or is not JSON."""
    try:
        value = json.loads(manifest.read_bytes())
    except (OSError, ValueError, RecursionError):
        return False
    return not isinstance(value, dict) or value.keys().isdisjoint(("kind", "sha256"))


def _exchange(new: Path, old: Path) -> None:
    """Exchange the names of two folders atomically; without such a system call, move the old one away first."""
    libc = ctypes.CDLL(None, use_errno=True)
    exchange_flag, at_fdcwd = 2, -100  # RENAME_EXCHANGE, AT_FDCWD in linux/fs.h and fcntl.h
    if sys.platform == "linux" and hasattr(libc, "renameat2"):
        if libc.renameat2(at_fdcwd, os.fsencode(new), at_fdcwd, os.fsencode(old), exchange_flag) == 0:
            return
        code = ctypes.get_errno()
        if code not in (errno.EINVAL, errno.ENOSYS):
            raise OSError(code, os.strerror(code), str(old))
    moved = temporary_name(old)
    old.rename(moved)
    new.rename(old)
    shutil.rmtree(moved, ignore_errors=True)
