"""From what users name as input to stamps of single files: paths, folders, globs and urls."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from cramlm.io.hub import find_hub_files
from cramlm.io.remote import find_files, is_remote, scheme
from cramlm.io.streams import STDIN, FileStamp, expand_files, is_data_file, stamp_file


def stamp_inputs(names: Iterable[str]) -> list[FileStamp]:
    """Every file that the names mean, each once: local ones sorted by path, then remote ones by place and path.

    Raises:
        UsageError: something is missing, or holds no data file. EnvironmentFault: it may not be looked at, or the network fails.
    """
    named = list(names)
    stamps = [stamp_file(path) for path in expand_files(name for name in named if not is_remote(name))]
    remote = {stamp for name in named if is_remote(name) for stamp in _stamp_remote(name)}
    return stamps + sorted(remote, key=lambda stamp: str(stamp.path))


def stamp_input(name: str | Path) -> list[FileStamp]:
    """The one file of a path or of `-`; of a url, all that it names. Raises as `stamp_inputs`."""
    if str(name) == STDIN:
        return [FileStamp(Path(STDIN), 0, 0)]
    return _stamp_remote(str(name)) if is_remote(str(name)) else [stamp_file(name)]


def _stamp_remote(name: str) -> list[FileStamp]:
    files = find_hub_files(name) if scheme(name) == "hf" else find_files(name, is_data_file)
    return [FileStamp.of_remote(file) for file in files]
