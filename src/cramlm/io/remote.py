"""Files that are not on this machine: URLs and data sets of the Hugging Face Hub.

    URL ─► find_files, find_hub_files ─► RemoteFile (size, version) ─► RemoteBytes

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

import io
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, Final
from urllib.parse import urlsplit

from cramlm.errors import CramError, EnvironmentFault, UsageError, first_line
from cramlm.io.formats import READABLE, is_data_file

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
        raise UsageError(f"{bare}: no data file there; {READABLE}")
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
