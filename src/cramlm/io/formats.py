"""What the name of a file says about its content: format and compression."""

from __future__ import annotations

from pathlib import PurePath
from typing import Protocol

from cramlm.errors import CramError, DataError, UsageError

FORMATS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl", ".csv": "csv", ".tsv": "tsv", ".txt": "txt", ".parquet": "parquet"}
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
READABLE = "use .jsonl, .csv, .tsv, .txt (also with .gz or .zst) or .parquet"
"""What an error about another format advises."""
ARCHIVES = (".zip", ".tar", ".tgz", ".7z", ".rar")


class Named(Protocol):
    """A path or a remote file, by its name; as text, what messages show."""

    @property
    def name(self) -> str: ...

    @property
    def suffixes(self) -> list[str]: ...


def file_format(path: Named) -> tuple[str, str | None]:
    """Return (jsonl | csv | tsv | txt | parquet, gzip | zstd | None) by the name.

    Raises:
        DataError: for archives. UsageError: for unknown extensions.
    """
    suffixes = [suffix.lower() for suffix in path.suffixes]
    compression = COMPRESSIONS.get(suffixes[-1]) if suffixes else None
    suffix = "".join(suffixes[-2:-1] if compression else suffixes[-1:])
    if suffix in ARCHIVES:
        raise DataError(f"{path}: archives are not opened; extract it and pass the files")
    if suffix not in FORMATS or (suffix == ".parquet" and compression):
        raise UsageError(f"{path}: unknown format {path.name!r}; {READABLE}")
    return FORMATS[suffix], compression


def names_data_file(text: str) -> bool:
    """Return True if a string is one word that ends as a file of a format that is read, whether it exists or not."""
    return text.split() == [text] and _has_format(PurePath(text))


def is_data_file(path: PurePath) -> bool:
    """Return True if a file is read that is not named itself, but found in a folder: of a format that is read, not hidden, no .json."""
    if any(part.startswith(".") for part in path.parts) or path.suffix.lower() == ".json":
        return False  # a .json beside data usually describes it; it is read if named itself
    return _has_format(path)


def _has_format(path: PurePath) -> bool:
    """Return True if the name is of a format that is read."""
    try:
        file_format(path)
    except CramError:
        return False
    return True
