"""From what users name as input to stamps of single files: paths, folders, globs and URLs.

    name ─► stamp_inputs ─► FileStamp (path or RemoteFile, size, time or version)

URLs and their versions are in remote.py.
"""

from __future__ import annotations

import difflib
import errno
import glob
import os
import stat
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Final

from cramlm.errors import EnvironmentFault, UsageError, brief
from cramlm.io.formats import ARCHIVES, COMPRESSIONS, FORMATS, READABLE, is_data_file
from cramlm.io.remote import RemoteFile, find_files, find_hub_files, is_remote, scheme
from cramlm.storage.artifacts import RESULT_FILES, is_result_folder
from cramlm.storage.locks import environment_faults

STDIN = "-"
_LONGEST_PATH: Final = 4096


def stamp_inputs(names: Iterable[str]) -> list[FileStamp]:
    """Return the stamp of every file that the names refer to, once: local files sorted by path, then remote files sorted by URL.

    Raises:
        UsageError: if something is missing or has no data file. EnvironmentFault: if access is denied or the network fails.
    """
    named = list(names)
    stamps = [stamp_file(path) for path in expand_files(name for name in named if not is_remote(name))]
    remote = {stamp for name in named if is_remote(name) for stamp in _stamp_remote(name)}
    return stamps + sorted(remote, key=lambda stamp: str(stamp.path))


def stamp_input(name: str | Path) -> list[FileStamp]:
    """Return the stamp of a path or of `-`, or those of all files of a URL. Raises as `stamp_inputs`."""
    if str(name) == STDIN:
        return [FileStamp(Path(STDIN), 0, 0)]
    return _stamp_remote(str(name)) if is_remote(str(name)) else [stamp_file(name)]


def _stamp_remote(name: str) -> list[FileStamp]:
    files = find_hub_files(name) if scheme(name) == "hf" else find_files(name)
    return [FileStamp(file, file.bytes, 0) for file in files]


@dataclass(frozen=True, slots=True)
class FileStamp:
    """Size and time of a file before it is read, to detect changes while it is read. A `RemoteFile` has its own version."""

    path: Path | RemoteFile
    bytes: int
    mtime_ns: int

    @property
    def text_column(self) -> str | None:
        """The column after `#` in the user's URL."""
        return self.path.text_column if isinstance(self.path, RemoteFile) else None

    @property
    def identity(self) -> list[str | int | None]:
        """Plain JSON for stage keys, different if the content is different."""
        if isinstance(self.path, RemoteFile):
            return [self.path.origin, self.bytes, self.path.version, self.path.text_column]
        return [str(self.path.absolute()), self.bytes, self.mtime_ns]


def looks_like_path(text: str) -> bool:
    """Return True if a string is an existing path, a URL, or one word that names a data file or files in a folder (`corpus/*`)."""
    if len(text) > _LONGEST_PATH or "\0" in text or "\n" in text:
        return False
    if os.path.lexists(_expanded(text)) or is_remote(text):
        return bool(text)
    return text.split() == [text] and (is_data_file(PurePath(PurePath(text).name)) or ("/" in text and "*" in text))


def looks_like_misspelt_path(text: str) -> bool:
    """Return True if a string is one word with a slash or with an ending like that of a data file (`.jsnl`)."""
    if len(text) > _LONGEST_PATH or text.split() != [text]:
        return False
    endings = (*FORMATS, *COMPRESSIONS, *ARCHIVES)
    return "/" in text or bool(difflib.get_close_matches(PurePath(text).suffix.lower(), endings, n=1, cutoff=0.75))


def require_paths(names: Iterable[str], *, remedy: str) -> None:
    """Raise UsageError, which ends with `remedy`, for the first local path or glob that names no file and no folder."""
    for name in names:
        path = _expanded(name)
        if not (is_remote(name) or os.path.lexists(path) or next(glob.iglob(path, recursive=True), None)):  # noqa: PTH207
            shown = name if name.isprintable() and len(name) <= 200 else brief(name)
            raise UsageError(f"{shown}: no such file or folder{_near_names(Path(path))}; {remedy}")


def require_folder(path: Path, *, remedy: str) -> None:
    """Raise UsageError, which ends with `remedy`, unless a user's path is a folder."""
    if not path.exists():
        raise UsageError(f"{path}: no such folder{_near_names(path, Path.is_dir)}; {remedy}")
    if not path.is_dir():
        raise UsageError(f"{path}: is a file; {remedy}")


def _expanded(name: str) -> str:
    return os.path.expanduser(name) if name.startswith("~/") else name  # noqa: PTH111 - a text is no path


def at_home(name: str | Path) -> Path:
    """Return a path whose `~` or `~user` is replaced by the home folder, if there is such a user."""
    return Path(os.path.expanduser(name))  # noqa: PTH111 - Path.expanduser raises an error for others, like ~$a.csv


def stamp_file(name: str | Path) -> FileStamp:
    """Return the stamp of a local file.

    Raises:
        UsageError: if it is missing (similar names are listed), a folder, or not a regular file, or its absolute path is not UTF-8.
        EnvironmentFault: if access is denied.
    """
    path = at_home(name)
    absolute = str(path.absolute())
    try:
        absolute.encode()  # keys and reports hold it as UTF-8
    except UnicodeEncodeError as error:
        shown = absolute.encode(errors="backslashreplace").decode().replace(r"\udc", r"\x")  # Python decodes the byte FF as U+DCFF
        raise UsageError(f"{shown}: the name is not UTF-8; rename it") from error
    try:
        status = path.stat()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise UsageError(f"{path}: no such file{_near_names(path)}; check the path") from error
    except OSError as error:
        if isinstance(error, PermissionError):
            raise EnvironmentFault(f"{path}: {error.strerror}; give this user the right to read it") from error
        raise UsageError(f"{path}: {error.strerror}; pass a regular file") from error
    if stat.S_ISDIR(status.st_mode):
        raise UsageError(f"{path}: is a folder; pass a file in it")
    if not stat.S_ISREG(status.st_mode):
        raise UsageError(f"{path}: not a regular file; write its content to a file first")
    return FileStamp(path, status.st_size, status.st_mtime_ns)


def expand_files(patterns: Iterable[str]) -> list[Path]:
    """Return every local file that the files, folders and globs name, once, sorted by path; folders include the data files below them.
    Results of cramlm below a folder, or below where `**` begins, are left out.

    Raises:
        UsageError: if something is missing, a folder has no data file, or a glob matches no file. EnvironmentFault: if a folder cannot be
        read.
    """
    files: set[Path] = set()
    for pattern in patterns:
        path = at_home(pattern)
        if path.is_dir():
            files |= _files_below(path)[0]
        elif any(character in pattern for character in "*?[") and not os.path.lexists(path):
            matches = {Path(match) for match in glob.glob(str(path), recursive=True)}  # noqa: PTH207 - takes absolute patterns, Path.glob does not
            if not matches:
                raise UsageError(f"{pattern}: no file matches{_near_names(path)}; check the pattern")
            matched = {match for match in matches if not match.is_dir()}
            if not matched:
                raise UsageError(f"{pattern}: matches only folders; pass the folder, or {pattern.rstrip('/')}/*.jsonl")
            chosen = _without_results(matched, path)
            if not chosen:
                raise UsageError(
                    f"{pattern}: matches only results of cramlm, like {min(matched)}, which are read if they are passed by name"
                )
            files |= chosen
        else:
            stamp_file(path)
            files.add(path)
    # Of several names of a file the first is kept.
    unique = {os.path.realpath(path): path for path in sorted(files, reverse=True)}
    return sorted(unique.values())


def files_left_out(names: Iterable[str]) -> list[Path]:
    """Return the files below the local folders among these names that are not read, because their names are not those of data.

    Raises:
        UsageError, EnvironmentFault: as `expand_files`.
    """
    local = [name for name in names if not is_remote(name)]
    others = {file for name in local if (path := at_home(name)).is_dir() for file in _files_below(path)[1]}
    return sorted(others.difference(expand_files(local))) if others else []


def _files_below(folder: Path) -> tuple[set[Path], set[Path]]:
    """Return the data files in and below a folder, and the other ones, without hidden files and without results of cramlm below it.

    Raises as `expand_files`.
    """
    files: set[Path] = set()
    others: set[Path] = set()
    results: list[Path] = []

    def fail(error: OSError) -> None:
        raise error

    with environment_faults(folder):
        for name, subfolders, names in os.walk(folder, onerror=fail):
            here = Path(name)
            if here != folder and not set(names).isdisjoint(RESULT_FILES) and is_result_folder(here):
                results.append(here)
                subfolders.clear()
                continue
            subfolders[:] = [each for each in subfolders if not each.startswith(".")]
            for path in (here / each for each in names if not each.startswith(".")):
                if not is_data_file(PurePath(path.name)):
                    others.add(path)
                elif _is_regular(path):
                    files.add(path)
    if not files:
        described = [path for path in others if path.suffix.lower() == ".json"]
        found = f"results of cramlm, like {min(results)}," if results else f".json files, like {min(described)}," if described else ""
        also = f" ({found} are read if they are passed by name)" if found else ""
        raise UsageError(f"{folder}: no data file in this folder{also}; {READABLE}")
    return files, others


def _without_results(files: set[Path], pattern: Path) -> set[Path]:
    """Return the files that are in no results of cramlm below where `**` begins in the pattern."""
    if "**" not in pattern.parts:
        return files
    begin = pattern.parts.index("**")
    folders = {folder for file in files for folder in file.parents if len(folder.parts) > begin}
    results = {folder for folder in folders if is_result_folder(folder)}
    return {file for file in files if results.isdisjoint(file.parents)}


def _is_regular(path: Path) -> bool:
    """Return True for a regular file or a link to one; raise OSError if access is denied."""
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            return False
        raise


def check_unchanged(stamp: FileStamp) -> None:
    """Raise EnvironmentFault if the file no longer has the size and time (or version) of its stamp."""
    if str(stamp.path) == STDIN:
        return
    if isinstance(stamp.path, RemoteFile):
        unchanged = stamp.path.now() == stamp.path
    else:
        with environment_faults(stamp.path):
            now = stamp.path.stat()
        unchanged = (now.st_size, now.st_mtime_ns) == (stamp.bytes, stamp.mtime_ns)
    if not unchanged:
        raise EnvironmentFault(f"{stamp.path}: changed during reading; run again when nothing writes to it")


def name_files(paths: Sequence[Path | RemoteFile]) -> list[str]:
    """Return a short unique name of each file: its name, or if names repeat, its path below the common folder (its URL if remote)."""
    names = [path.name for path in paths]
    if len(set(names)) == len(names):
        return names
    local = [path.absolute() for path in paths if isinstance(path, Path)]
    folder = os.path.commonpath([path.parent for path in local]) if local else ""
    return [path.absolute().relative_to(folder).as_posix() if isinstance(path, Path) else path.origin for path in paths]


def _near_names(path: Path, usable: Callable[[Path], bool] = os.path.lexists) -> str:
    try:
        names = sorted(entry.name for entry in path.parent.iterdir() if usable(entry))
    except (OSError, ValueError):
        return ""
    near = difflib.get_close_matches(path.name, names, n=3)
    return f" (near: {', '.join(near)})" if near else ""
