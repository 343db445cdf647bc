"""From what users name as input to stamps of single files: paths, folders, globs, URLs and data sets of the Hugging Face Hub.

    name ─► stamp_inputs ─► FileStamp (path or RemoteFile, size, time or version)

    hf://NAME[@REVISION][:CONFIG]/SPLIT[#COLUMN]    a split of a data set of the hub; NAME is OWNER/NAME or a bare name
    hf://datasets/OWNER/NAME/path/to/file.parquet   a file, folder/ or glob of a repository, as huggingface_hub writes it
    s3://, gs://, https:// and other schemes        what fsspec opens

Remote files are read as a stream, never copied first. A version is what the server states about the content: a hash, an entity tag, a
modification time. It is part of the key of what was read, as time and size are for a local file; a server that states none of them is
refused, because a changed file could not be noticed.

The files of a split are those that huggingface_hub's `datasets` would take: what the data set's card lists; else files or folders named
after the split; else the parquet files that the hub made of it (branch refs/convert/parquet), unless those are incomplete. Their URLs hold
the current commit. No code of a data set runs.
"""

from __future__ import annotations

import difflib
import errno
import glob
import io
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePath, PurePosixPath
from typing import Any, Final
from urllib.parse import urlsplit

from cramlm.errors import CramError, DataError, EnvironmentFault, UsageError, brief, first_line
from cramlm.storage.artifacts import RESULT_FILES, is_result_folder
from cramlm.storage.locks import environment_faults

STDIN = "-"
FORMATS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl", ".csv": "csv", ".tsv": "tsv", ".txt": "txt", ".parquet": "parquet"}
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
_NAMES = "use .jsonl, .csv, .tsv, .txt (also with .gz or .zst) or .parquet"
_LONGEST_PATH: Final = 4096
_ARCHIVES = (".zip", ".tar", ".tgz", ".7z", ".rar")
_SCHEME: Final = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]+://")
_EXTRAS: Final = {"hf": "hub", "http": "cloud", "https": "cloud", "s3": "cloud", "s3a": "cloud", "gs": "cloud", "gcs": "cloud"}
_LIBRARIES: Final = {"aiobotocore", "aiohttp", "botocore", "fsspec", "gcsfs", "google", "httpx", "httpx2", "huggingface_hub", "s3fs"}
_VERSIONS: Final = (
    *("ETag", "etag", "blob_id", "Content-MD5", "md5Hash", "Digest", "generation"),
    *("LastModified", "Last-Modified", "updated", "mtime", "created"),
)
_AHEAD: Final = 1 << 20  # bytes to read ahead; fsspec's 5 MB would fetch unneeded columns
_SEQUENTIAL: Final = {"hf", "http", "https"}  # schemes with sequential reads and a known size as options
CONVERTED: Final = "refs/convert/parquet"
_OWN_FORM: Final = re.compile(r"hf://(datasets|models|spaces|buckets)/")
_NAMED: Final = re.compile(
    r"hf://(?P<name>[\w.-]+(?:/[\w.-]+)??)(?:@(?P<revision>[^@:#]+?))?(?::(?P<config>[^/#]+))?/(?P<split>\w+(?:\.\w+)*)(?:#(?P<column>.+))?"
)
_SPLIT_WORDS: Final = {
    "train": "train|training",
    "validation": "validation|valid|val|dev",
    "test": "test|testing|eval|evaluation",
}


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


def names_data_file(text: str) -> bool:
    """Return True if a string is one word that ends as a file of a format that is read, whether it exists or not."""
    return text.split() == [text] and _has_format(PurePath(text))


def looks_like_misspelt_path(text: str) -> bool:
    """Return True if a string is one word with a slash or with an ending like that of a data file (`.jsnl`)."""
    if len(text) > _LONGEST_PATH or text.split() != [text]:
        return False
    endings = (*FORMATS, *COMPRESSIONS, *_ARCHIVES)
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
        raise UsageError(f"{folder}: no data file in this folder{also}; {_NAMES}")
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


def file_format(path: PurePath | RemoteFile) -> tuple[str, str | None]:
    """Return (jsonl | csv | tsv | txt | parquet, gzip | zstd | None) by the name.

    Raises:
        DataError: for archives. UsageError: for unknown extensions.
    """
    suffixes = [suffix.lower() for suffix in path.suffixes]
    compression = COMPRESSIONS.get(suffixes[-1]) if suffixes else None
    suffix = "".join(suffixes[-2:-1] if compression else suffixes[-1:])
    if suffix in _ARCHIVES:
        raise DataError(f"{path}: archives are not opened; extract it and pass the files")
    if suffix not in FORMATS or (suffix == ".parquet" and compression):
        raise UsageError(f"{path}: unknown format {path.name!r}; {_NAMES}")
    return FORMATS[suffix], compression


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


def is_data_file(path: PurePath) -> bool:
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


def _near_names(path: Path, usable: Callable[[Path], bool] = os.path.lexists) -> str:
    try:
        names = sorted(entry.name for entry in path.parent.iterdir() if usable(entry))
    except (OSError, ValueError):
        return ""
    near = difflib.get_close_matches(path.name, names, n=3)
    return f" (near: {', '.join(near)})" if near else ""


@dataclass(frozen=True, slots=True, order=True)
class RemoteFile:
    """A remote file with its size and version; used in place of a local file's `Path`.

    url: for fsspec; for hub repositories with the commit, so that its content cannot change. origin: the URL without the commit.
    version: changes with the content. text_column: the column after `#` in the user's URL.
    """

    url: str
    origin: str
    bytes: int
    version: str
    text_column: str | None = None

    def __str__(self) -> str:
        return self.url

    @property
    def _path(self) -> PurePosixPath:
        return PurePosixPath(urlsplit(self.origin).path or self.origin)

    @property
    def name(self) -> str:
        return self._path.name

    @property
    def suffixes(self) -> list[str]:
        return self._path.suffixes

    @property
    def pinned(self) -> bool:
        """True if the URL determines the version of the content."""
        return self.url != self.origin

    @property
    def where(self) -> str:
        """URL of the folder, with the commit if there is one; for messages and the log of a run."""
        return self.url.rpartition("/")[0] + "/"

    def open(self, mode: str = "rb") -> RemoteBytes:
        """Open for random access (parquet). Raises as `find_files`."""
        assert mode == "rb"
        return self._open(_AHEAD)

    def stream(self) -> RemoteBytes:
        """Open for reading from start to end, over one connection if the server supports it. Raises as `find_files`."""
        return self._open(0)

    def check_whole(self, read: int, sha256: str) -> None:
        """Raise EnvironmentFault unless the number of bytes read and their hash match the file."""
        if read != self.bytes:
            raise EnvironmentFault(f"{self}: ended after {read:,} of {self.bytes:,} bytes; run again")
        if self.version.startswith("sha256=") and self.version != f"sha256={sha256}":
            raise EnvironmentFault(f"{self}: damaged on the way, its hash is not {self.version}; run again")

    def now(self) -> RemoteFile:
        """Return the file with its current size and version. Raises as `find_files`."""
        return self if self.pinned else describe(self.url, self.text_column)

    def _open(self, block_size: int) -> RemoteBytes:
        options = {"size": self.bytes, "block_size": block_size} if scheme(self.url) in _SEQUENTIAL else {}
        with remote_faults(self.url):
            system, path = open_system(self.url)
            return RemoteBytes(self.url, system.open(path, "rb", **options))


class RemoteBytes(io.BufferedIOBase):
    """An open remote file for reading; errors of its library become `CramError`s."""

    def __init__(self, url: str, file: Any) -> None:
        self._url, self._file = url, file

    def read(self, size: int | None = -1) -> bytes:
        return bytes(self._call(lambda: self._file.read(size)))

    def seek(self, offset: int, whence: int = 0) -> int:
        return int(self._call(lambda: self._file.seek(offset, whence)))

    def tell(self) -> int:
        return int(self._file.tell())

    def close(self) -> None:
        self._file.close()
        super().close()

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return bool(self._file.seekable())

    def _call(self, function: Callable[[], Any]) -> Any:
        with remote_faults(self._url):
            return function()


def is_remote(name: str) -> bool:
    """Return True if a user's name of a file is a URL."""
    return _SCHEME.match(name) is not None


def scheme(url: str) -> str:
    return url.partition("://")[0].lower()


def find_files(url: str) -> list[RemoteFile]:
    """Return the files of a URL, sorted: the file itself, or the data files below a folder (`/` at the end) or of a glob.

    Raises:
        UsageError: if there is no such file, none of a known format, or the server does not state size or version.
        EnvironmentFault: if a package is missing, access is denied or the network fails.
    """
    bare, _, column = url.partition("#")
    parts = urlsplit(bare)
    if parts.password is not None:
        raise UsageError(f"{parts.scheme}://…@{parts.hostname}: a password in a URL would be stored in the run; pass it in the environment")
    many = bare.endswith("/") or any(character in parts.path for character in "*[")
    if not many:
        return [describe(bare, column or None)]
    if scheme(bare) in ("http", "https"):
        raise UsageError(f"{bare}: a web server does not list files; pass the URL of each file")
    with remote_faults(bare):
        system, path = open_system(bare)
        names = system.find(path) if bare.endswith("/") else system.glob(path)
    urls = [system.unstrip_protocol(name) for name in names if is_data_file(PurePosixPath(name))]
    if not urls:
        raise UsageError(f"{bare}: no data file there; {_NAMES}")
    return [describe(name, column or None) for name in sorted(urls)]


def describe(url: str, column: str | None) -> RemoteFile:
    """Request size and version of one file. Raises as `find_files`."""
    with remote_faults(url):
        system, path = open_system(url)
        system.invalidate_cache()
        info = system.info(path)
    if info.get("type") == "directory":
        raise UsageError(f"{url}: is a folder; end it with / to read the data files below it")
    version = next((f"{name}={info[name]}" for name in _VERSIONS if info.get(name)), None)
    if info.get("size") is None or version is None:
        missing = "its size" if info.get("size") is None else "an entity tag or a time of change"
        raise UsageError(f"{url}: the server does not state {missing}, so a change could not be noticed; download it and pass the file")
    return RemoteFile(url, url, int(info["size"]), version, column)


def open_system(url: str) -> tuple[Any, str]:
    """Return the fsspec file system of a URL, and the path in it; call it within `remote_faults`."""
    from fsspec.core import url_to_fs  # 0.1 s, and most corpora are local

    options = {"endpoint": os.environ["HF_ENDPOINT"]} if scheme(url) == "hf" and os.environ.get("HF_ENDPOINT") else {}
    system, path = url_to_fs(url, **options)
    return system, str(path)


@contextmanager
def remote_faults(url: str, *, instead: str = ", or download it and pass the file") -> Iterator[None]:
    """Turn errors of a server, the network or fsspec into one-line `CramError`s. instead: what else to do while there is no network."""
    try:
        yield
    except CramError:
        raise
    except Exception as error:
        explained = _explain(url, error, instead)
        if explained is None:
            raise
        raise explained from error


def _explain(url: str, error: Exception, instead: str) -> CramError | None:
    kind, what = type(error).__name__, first_line(error)
    if isinstance(error, ImportError):
        extra = _EXTRAS.get(scheme(url))
        remedy = f"pip install 'cramlm[{extra}]'" if extra else what
        return EnvironmentFault(f"{url}: reading {scheme(url)}:// needs a package that is not installed; {remedy}")
    if isinstance(error, ValueError) and "rotocol not known" in str(error):
        return UsageError(f"{url}: unknown scheme {scheme(url)}://; use hf://, s3://, gs:// or https://")
    if kind == "GatedRepoError":
        return EnvironmentFault(f"{url}: is gated; accept its terms on the page of the data set, then set HF_TOKEN")
    if kind in ("RepositoryNotFoundError", "RevisionNotFoundError", "EntryNotFoundError", "HFValidationError", "HfUriError"):
        return UsageError(f"{url}: not on the hub, or private; check the name, or set HF_TOKEN")
    if kind == "OfflineModeIsEnabled":
        return EnvironmentFault(f"{url}: the hub is disabled by HF_HUB_OFFLINE; unset it, or download the files and pass them")
    status = getattr(error, "status", None) or getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, FileNotFoundError | RuntimeError) and isinstance(error.__cause__, Exception):
        # fsspec raises FileNotFoundError for every failure of a web server; the hub wraps those of uploads.
        return _explain(url, error.__cause__, instead)
    if isinstance(error, FileNotFoundError) or status in (404, 410):
        return UsageError(f"{url}: no such file; check the URL")
    if isinstance(error, PermissionError) or status in (401, 403) or kind in ("NoCredentialsError", "PartialCredentialsError"):
        return EnvironmentFault(f"{url}: access denied ({what}); set the credentials in the environment")
    if isinstance(error, ValueError) and "range" in str(error).lower():
        return UsageError(f"{url}: the server does not support range requests, which parquet needs; download it and pass the file")
    if isinstance(status, int) and (status == 429 or status >= 500):
        problem = "allows no more requests for now" if status == 429 else "has an error of its own"
        return EnvironmentFault(f"{url}: the server {problem} (status {status}); wait and run again{instead}")
    if isinstance(error, OSError) or type(error).__module__.partition(".")[0] in _LIBRARIES:
        reason = f"status {status}" if status else f"{kind}: {what}"
        return EnvironmentFault(f"{url}: cannot be reached ({reason}); check the network and run again{instead}")
    return None


@dataclass(frozen=True, slots=True)
class HubSplit:
    """A split of a data set. config, revision: None for the data set's default."""

    url: str
    name: str
    revision: str | None
    config: str | None
    split: str
    column: str | None

    @staticmethod
    def parse(url: str) -> HubSplit:
        """Raise UsageError if the URL is not hf://NAME[@REVISION][:CONFIG]/SPLIT[#COLUMN]."""
        match = _NAMED.fullmatch(url)
        if match is None:
            raise UsageError(
                f"{url}: a data set of the hub is written hf://OWNER/NAME[@REVISION][:CONFIG]/SPLIT[#COLUMN], like hf://a/b/train#text"
            )
        return HubSplit(url, **match.groupdict())


def find_hub_files(url: str) -> list[RemoteFile]:
    """Return the files of a split in the order of the data set, with their blob hashes as versions.

    Raises:
        UsageError: if there is no such data set, config or split, or no file of a known format.
        EnvironmentFault: if the hub cannot be reached, or huggingface_hub is missing.
    """
    if _OWN_FORM.match(url):
        return find_files(url)
    requested = HubSplit.parse(url)
    try:
        info = _request(requested, requested.revision)
    except UsageError as error:
        if url != f"hf://{requested.name}/{requested.split}" or "/" in requested.name:
            raise
        name = url.removeprefix("hf://")  # OWNER/NAME without a split, read as a split of a data set with a bare name
        raise UsageError(f"{error}; if {name} is the data set, add its split: {url}/train") from error
    files = _listed(requested, info)
    if not files and requested.revision is None:
        info, files = _converted(requested, info)
    if not files:
        splits = sorted({name for name, words in _SPLIT_WORDS.items() if any(_has_word(path, words) for path in _data_files(info))})
        raise UsageError(
            f"{url}: {requested.name} has no files for the split {requested.split!r}" + (f"; it has {', '.join(splits)}" if splits else "")
        )
    blobs = {sibling.rfilename: sibling for sibling in info.siblings}
    root = f"hf://datasets/{requested.name}"
    return [
        RemoteFile(f"{root}@{info.sha}/{path}", f"{root}/{path}", int(blobs[path].size), _blob(blobs[path]), requested.column)
        for path in files
    ]


def _request(requested: HubSplit, revision: str | None) -> Any:
    with remote_faults(requested.url):
        from huggingface_hub import HfApi

        return HfApi(endpoint=os.environ.get("HF_ENDPOINT")).dataset_info(
            requested.name, revision=revision, files_metadata=True, timeout=30
        )


def _blob(sibling: Any) -> str:
    return f"sha256={sibling.lfs.sha256}" if sibling.lfs is not None else f"blob={sibling.blob_id}"


def _listed(requested: HubSplit, info: Any) -> list[str]:
    """Return the files of the split by the card's `configs`, or by the names of files and folders."""
    configs = (info.card_data or {}).get("configs") or []
    configs = [config for config in configs if isinstance(config, dict) and config.get("data_files")]
    if configs:
        return _of_card(requested, _choose_config(requested, configs), _data_files(info))
    inside = [
        path for path in _data_files(info) if requested.config in (None, "default") or requested.config in PurePosixPath(path).parts[:-1]
    ]
    words = _SPLIT_WORDS.get(requested.split, re.escape(requested.split))
    files = [path for path in inside if _has_word(path, words)]
    if files or requested.split != "train" or any(_has_word(path, other) for path in inside for other in _SPLIT_WORDS.values()):
        return files
    return inside  # no name contains a split: all files are train, as in huggingface's datasets


def _choose_config(requested: HubSplit, configs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    by_name = {str(config.get("config_name", "default")): config for config in configs}
    if requested.config is not None:
        if requested.config not in by_name:
            raise UsageError(
                f"{requested.url}: {requested.name} has no config {requested.config!r}; it has {', '.join(sorted(by_name)[:12])}"
            )
        return by_name[requested.config]
    if len(by_name) == 1:
        return next(iter(by_name.values()))
    chosen = next((config for config in configs if config.get("default")), by_name.get("default"))
    if chosen is None:
        shown = ", ".join(sorted(by_name)[:12])
        raise UsageError(
            f"{requested.url}: {requested.name} has several configs ({shown}); name one, as hf://{requested.name}:CONFIG/{requested.split}"
        )
    return chosen


def _of_card(requested: HubSplit, config: dict[str, Any], files: Sequence[str]) -> list[str]:
    from fsspec.utils import glob_translate

    data_files = config["data_files"]
    entries = data_files if isinstance(data_files, list) and all(isinstance(entry, dict) for entry in data_files) else None
    if entries is None:
        entries = [{"split": "train", "path": data_files}]
    patterns: list[str] = []
    for entry in entries:
        if entry.get("split") == requested.split:
            path = entry.get("path", [])
            patterns += [path] if isinstance(path, str) else [str(one) for one in path]
    if not patterns:
        splits = ", ".join(sorted(str(entry.get("split")) for entry in entries))
        raise UsageError(f"{requested.url}: no split {requested.split!r}; there is {splits}")
    folder = str(config.get("data_dir", "")).strip("/")
    matchers = [re.compile(glob_translate(f"{folder}/{pattern}".lstrip("/"))) for pattern in patterns]
    return [path for path in files if any(matcher.match(path) for matcher in matchers)]


def _converted(requested: HubSplit, info: Any) -> tuple[Any, list[str]]:
    try:
        converted = _request(requested, CONVERTED)
    except UsageError:
        return info, []  # there is no converted branch
    configs = sorted({PurePosixPath(path).parts[0] for path in _data_files(converted)})
    config = requested.config or ("default" if "default" in configs else configs[0] if len(configs) == 1 else None)
    if config is None:
        raise UsageError(
            f"{requested.url}: several configs ({', '.join(configs[:12])}); name one, as hf://{requested.name}:CONFIG/{requested.split}"
        )
    files = [path for path in _data_files(converted) if path.startswith(f"{config}/{requested.split}/")]
    if not files and any(path.startswith(f"{config}/partial-{requested.split}/") for path in _data_files(converted)):
        part = f"hf://datasets/{requested.name}@{CONVERTED.replace('/', '%2F')}/{config}/partial-{requested.split}/"
        raise UsageError(f"{requested.url}: the hub has only a part of it as parquet; to read that part, pass {part}")
    return converted, files


def _data_files(info: Any) -> list[str]:
    return sorted(sibling.rfilename for sibling in info.siblings or [] if is_data_file(PurePosixPath(sibling.rfilename)))


def _has_word(path: str, words: str) -> bool:
    return re.search(rf"(?:^|[/._ -])(?:{words})(?:[/._ 0-9-]|$)", path) is not None
