"""Files that lie elsewhere: hf://, s3://, gs://, https:// and whatever else fsspec opens. They are read as a stream, never copied first.

    url ─► find_files ─► RemoteFile: url, size, version ─► open ─► bytes, whatever the network does in one line of error

A version is what the place says of the content: a hash, an entity tag, a time of change. It stands in the key of what was read, as time
and size do for a local file, so that a changed source is read again and nothing stale is taken for fresh. A place that tells none of them
is refused: whether its file changed could not be known.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import PurePosixPath
from types import TracebackType
from typing import Any, Final
from urllib.parse import urlsplit

from cramlm.errors import CramError, EnvironmentFault, UsageError

_SCHEME: Final = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]+://")
_EXTRAS: Final = {"hf": "hub", "http": "cloud", "https": "cloud", "s3": "cloud", "s3a": "cloud", "gs": "cloud", "gcs": "cloud"}
_LIBRARIES: Final = {"aiobotocore", "aiohttp", "botocore", "fsspec", "gcsfs", "google", "httpx", "httpx2", "huggingface_hub", "s3fs"}
_VERSIONS: Final = (
    *("ETag", "etag", "blob_id", "Content-MD5", "md5Hash", "Digest", "generation"),
    *("LastModified", "Last-Modified", "updated", "mtime", "created"),
)
_AHEAD: Final = 1 << 20  # bytes fetched beyond those asked for: the library's 5 MB would fetch the columns that nobody wants
_FRUGAL: Final = {"hf", "http", "https"}  # these can read one answer from beginning to end, and need not ask for a size that is known


@dataclass(frozen=True, slots=True, order=True)
class RemoteFile:
    """A file as its place described it. Stands where a local file's `Path` does.

    url: what fsspec opens; of a hub repository with the commit, so that it cannot change. origin: the same without the commit.
    version: changes when the content does. text_column: that the user named behind a `#`.
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
        """Whether the url itself says which version it gives."""
        return self.url != self.origin

    @property
    def where(self) -> str:
        """The folder that it lies in, with the commit where there is one: to be told, and kept in the log of a run."""
        return self.url.rpartition("/")[0] + "/"

    def open(self, mode: str = "rb") -> RemoteBytes:
        """Its bytes, any range of them; for parquet. Raises as `find_files`."""
        assert mode == "rb"
        return self._open({"block_size": _AHEAD} if scheme(self.url) in _FRUGAL else {})

    def stream(self) -> RemoteBytes:
        """Its bytes from the beginning to the end, over one connection where the place can do that. Raises as `find_files`."""
        return self._open({"block_size": 0} if scheme(self.url) in _FRUGAL else {})

    def check_whole(self, read: int, sha256: str) -> None:
        """Raises EnvironmentFault unless so many bytes with this hash are the file."""
        if read != self.bytes:
            raise EnvironmentFault(f"{self}: ended after {read:,} of {self.bytes:,} bytes; run again")
        if self.version.startswith("sha256=") and self.version != f"sha256={sha256}":
            raise EnvironmentFault(f"{self}: damaged on the way, its hash is not {self.version}; run again")

    def now(self) -> RemoteFile:
        """What the place says of it now. Raises as `find_files`."""
        return self if self.pinned else describe(self.url, self.text_column)

    def _open(self, options: dict[str, Any]) -> RemoteBytes:
        with remote_faults(self.url):
            system, path = open_system(self.url)
            if scheme(self.url) in _FRUGAL:
                options = {"size": self.bytes, **options}
            return RemoteBytes(self.url, system.open(path, "rb", **options))


class RemoteBytes:
    """An open remote file whose every failure is one line."""

    def __init__(self, url: str, file: Any) -> None:
        self._url, self._file = url, file

    def read(self, size: int = -1) -> bytes:
        return bytes(self._call(lambda: self._file.read(size)))

    def seek(self, offset: int, whence: int = 0) -> int:
        return int(self._call(lambda: self._file.seek(offset, whence)))

    def tell(self) -> int:
        return int(self._file.tell())

    def close(self) -> None:
        self._file.close()

    @property
    def closed(self) -> bool:
        return bool(self._file.closed)

    def readable(self) -> bool:
        return True

    def writable(self) -> bool:
        return False

    def seekable(self) -> bool:
        return bool(self._file.seekable())

    def __enter__(self) -> RemoteBytes:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _call(self, function: Callable[[], Any]) -> Any:
        with remote_faults(self._url):
            return function()


def is_remote(name: str) -> bool:
    """Whether a user's name for a file is a url."""
    return _SCHEME.match(name) is not None


def scheme(url: str) -> str:
    return url.partition("://")[0].lower()


def split_column(url: str) -> tuple[str, str | None]:
    """(url without it, what stands behind `#`)."""
    bare, _, column = url.partition("#")
    return bare, column or None


def find_files(url: str, is_data: Callable[[PurePosixPath], bool]) -> list[RemoteFile]:
    """The files that a url names: itself, or those below a folder (ends with `/`) or of a glob that `is_data` accepts; sorted.

    Raises:
        UsageError: there is no such file, none of a form that is read, or its place tells neither size nor version.
        EnvironmentFault: a package is missing, the network or the place refuses.
    """
    bare, column = split_column(url)
    parts = urlsplit(bare)
    if parts.password is not None:
        raise UsageError(f"{parts.scheme}://…@{parts.hostname}: a password in a url would be kept in the run; pass it by the environment")
    many = bare.endswith("/") or any(mark in parts.path for mark in "*[")
    if not many:
        return [describe(bare, column)]
    if scheme(bare) in ("http", "https"):
        raise UsageError(f"{bare}: a web server lists no files; pass the url of each file")
    with remote_faults(bare):
        system, path = open_system(bare)
        names = system.glob(path) if not bare.endswith("/") else system.find(path)
    found = [system.unstrip_protocol(name) for name in names if is_data(PurePosixPath(name))]
    if not found:
        raise UsageError(f"{bare}: no data file there; use .jsonl, .csv, .tsv, .txt (also with .gz or .zst) or .parquet")
    return [describe(name, column) for name in sorted(found)]


def describe(url: str, column: str | None) -> RemoteFile:
    """Size and version of one file, asked for now. Raises as `find_files`."""
    with remote_faults(url):
        system, path = open_system(url)
        system.invalidate_cache()
        info = system.info(path)
    if info.get("type") == "directory":
        raise UsageError(f"{url}: is a folder; end it with / to read the data files below it")
    version = next((f"{name}={info[name]}" for name in _VERSIONS if info.get(name)), None)
    if info.get("size") is None or version is None:
        missing = "its size" if info.get("size") is None else "an entity tag or a time of change"
        raise UsageError(f"{url}: the server does not tell {missing}, so a change could not be noticed; download it and pass the file")
    return RemoteFile(url, url, int(info["size"]), version, column)


def open_system(url: str) -> tuple[Any, str]:
    """The fsspec file system of a url, and the path in it; call it within `remote_faults`."""
    from fsspec.core import url_to_fs  # 0.1 s, and most corpora are local

    options = {"endpoint": os.environ["HF_ENDPOINT"]} if scheme(url) == "hf" and os.environ.get("HF_ENDPOINT") else {}
    system, path = url_to_fs(url, **options)
    return system, str(path)


@contextmanager
def remote_faults(url: str) -> Iterator[None]:
    """What a place or its library refuses, as one line."""
    try:
        yield
    except CramError:
        raise
    except Exception as error:
        explained = _explain(url, error)
        if explained is None:
            raise
        raise explained from error


def _explain(url: str, error: Exception) -> CramError | None:
    kind = type(error).__name__
    what = next((line.strip() for line in str(error).splitlines() if line.strip()), kind)[:160]
    if isinstance(error, ImportError):
        extra = _EXTRAS.get(scheme(url))
        remedy = f"pip install 'cramlm[{extra}]'" if extra else what
        return EnvironmentFault(f"{url}: reading {scheme(url)}:// needs a package that is not installed; {remedy}")
    if isinstance(error, ValueError) and "rotocol not known" in str(error):
        return UsageError(f"{url}: {scheme(url)}:// is not known; hf://, s3://, gs:// and https:// are")
    if kind == "GatedRepoError":
        return EnvironmentFault(f"{url}: asks for consent; give it on the page of the data set, then set HF_TOKEN")
    if kind in ("RepositoryNotFoundError", "RevisionNotFoundError", "EntryNotFoundError", "HFValidationError", "HfUriError"):
        return UsageError(f"{url}: not on the hub, or not open to you; check the name, or set HF_TOKEN")
    if kind == "OfflineModeIsEnabled":
        return EnvironmentFault(f"{url}: the hub is switched off by HF_HUB_OFFLINE; unset it, or download the files and pass them")
    status = getattr(error, "status", None) or getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, FileNotFoundError | RuntimeError) and isinstance(error.__cause__, Exception):
        return _explain(url, error.__cause__)  # fsspec calls every failure of a web server a missing file; the hub wraps those of uploads
    if isinstance(error, FileNotFoundError) or status in (404, 410):
        return UsageError(f"{url}: no such file; check the url")
    if isinstance(error, PermissionError) or status in (401, 403) or kind in ("NoCredentialsError", "PartialCredentialsError"):
        return EnvironmentFault(f"{url}: not open to you ({what}); set the credentials of the place in the environment")
    if isinstance(error, ValueError) and "range" in str(error).lower():
        return UsageError(f"{url}: the server does not give parts of a file, which parquet needs; download it and pass the file")
    if isinstance(error, OSError) or type(error).__module__.partition(".")[0] in _LIBRARIES:
        reason = f"status {status}" if status else f"{kind}: {what}"
        return EnvironmentFault(f"{url}: cannot be read ({reason}); check the network and run again, or download it and pass the file")
    return None
