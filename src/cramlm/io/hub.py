"""A data set of the Hugging Face Hub by its name: which files make up a split.

    hf://NAME[@REVISION][:CONFIG]/SPLIT[#COLUMN]    NAME is OWNER/NAME or a bare name
    hf://datasets/OWNER/NAME/path/to/file.parquet   one file, folder/ or glob of a repository, as the hub's own library writes it

Files are looked for as the hub's library does: what the data set's card lists; else files or folders named after the split; else the
parquet files that the hub made of it (branch refs/convert/parquet), unless those are only a part. Their urls hold the commit of now.
No code of a data set is run.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, Final

from cramlm.errors import UsageError
from cramlm.io.remote import RemoteFile, find_files, remote_faults
from cramlm.io.streams import is_data_file

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


@dataclass(frozen=True, slots=True)
class HubSplit:
    """What a user's url names. config, revision: None for the data set's own default."""

    url: str
    name: str
    revision: str | None
    config: str | None
    split: str
    column: str | None

    @staticmethod
    def parse(url: str) -> HubSplit:
        """Raises UsageError if the url has not the form hf://NAME[@REVISION][:CONFIG]/SPLIT[#COLUMN]."""
        match = _NAMED.fullmatch(url)
        if match is None:
            raise UsageError(
                f"{url}: write a data set of the hub as hf://OWNER/NAME[@REVISION][:CONFIG]/SPLIT[#COLUMN], like hf://a/b/train#text"
            )
        return HubSplit(url, **match.groupdict())


def find_hub_files(url: str) -> list[RemoteFile]:
    """The files of a split, in the order in which the data set has them, with the blob of each as its version.

    Raises:
        UsageError: no such data set, config or split, or none of its files is of a form that is read.
        EnvironmentFault: offline, or huggingface_hub is missing.
    """
    if _OWN_FORM.match(url):
        return find_files(url, is_data_file)
    wanted = HubSplit.parse(url)
    info = _ask(wanted, wanted.revision)
    files = _listed(wanted, info)
    if not files and wanted.revision is None:
        info, files = _converted(wanted, info)
    if not files:
        splits = sorted({name for name, words in _SPLIT_WORDS.items() if any(_names(path, words) for path in _data_files(info))})
        raise UsageError(
            f"{url}: {wanted.name} has no files for the split {wanted.split!r}" + (f"; it has {', '.join(splits)}" if splits else "")
        )
    blobs = {sibling.rfilename: sibling for sibling in info.siblings}
    root = f"hf://datasets/{wanted.name}"
    return [
        RemoteFile(f"{root}@{info.sha}/{path}", f"{root}/{path}", int(blobs[path].size), _blob(blobs[path]), wanted.column)
        for path in files
    ]


def _ask(wanted: HubSplit, revision: str | None) -> Any:
    with remote_faults(wanted.url):
        from huggingface_hub import HfApi

        return HfApi(endpoint=os.environ.get("HF_ENDPOINT")).dataset_info(wanted.name, revision=revision, files_metadata=True, timeout=30)


def _blob(sibling: Any) -> str:
    return f"sha256={sibling.lfs.sha256}" if sibling.lfs is not None else f"blob={sibling.blob_id}"


def _listed(wanted: HubSplit, info: Any) -> list[str]:
    """By the card's `configs`, or by the names of files and folders."""
    configs = ((info.card_data or {}).get("configs") or []) if info.card_data is not None else []
    configs = [config for config in configs if isinstance(config, dict) and config.get("data_files")]
    if configs:
        return _of_card(wanted, _choose_config(wanted, configs), _data_files(info))
    inside = [path for path in _data_files(info) if wanted.config in (None, "default") or wanted.config in PurePosixPath(path).parts[:-1]]
    words = _SPLIT_WORDS.get(wanted.split, re.escape(wanted.split))
    files = [path for path in inside if _names(path, words)]
    if files or wanted.split != "train" or any(_names(path, other) for path in inside for other in _SPLIT_WORDS.values()):
        return files
    return inside  # no file speaks of a split: all of them are for training, as the hub's library has it


def _choose_config(wanted: HubSplit, configs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    by_name = {str(config.get("config_name", "default")): config for config in configs}
    if wanted.config is not None:
        if wanted.config not in by_name:
            raise UsageError(f"{wanted.url}: {wanted.name} has no config {wanted.config!r}; it has {', '.join(sorted(by_name)[:12])}")
        return by_name[wanted.config]
    if len(by_name) == 1:
        return next(iter(by_name.values()))
    chosen = next((config for config in configs if config.get("default")), by_name.get("default"))
    if chosen is None:
        shown = ", ".join(sorted(by_name)[:12])
        raise UsageError(
            f"{wanted.url}: {wanted.name} has several configs ({shown}); name one, as hf://{wanted.name}:CONFIG/{wanted.split}"
        )
    return chosen


def _of_card(wanted: HubSplit, config: dict[str, Any], files: Sequence[str]) -> list[str]:
    from fsspec.utils import glob_translate

    data_files = config["data_files"]
    entries = data_files if isinstance(data_files, list) and all(isinstance(entry, dict) for entry in data_files) else None
    if entries is None:
        entries = [{"split": "train", "path": data_files}]
    patterns: list[str] = []
    for entry in entries:
        if entry.get("split") == wanted.split:
            path = entry.get("path", [])
            patterns += [path] if isinstance(path, str) else [str(one) for one in path]
    if not patterns:
        splits = ", ".join(sorted(str(entry.get("split")) for entry in entries))
        raise UsageError(f"{wanted.url}: no split {wanted.split!r}; there is {splits}")
    folder = str(config.get("data_dir", "")).strip("/")
    matchers = [re.compile(glob_translate(f"{folder}/{pattern}".lstrip("/"))) for pattern in patterns]
    return [path for path in files if any(matcher.match(path) for matcher in matchers)]


def _converted(wanted: HubSplit, info: Any) -> tuple[Any, list[str]]:
    try:
        converted = _ask(wanted, CONVERTED)
    except UsageError:
        return info, []  # the hub made none
    configs = sorted({PurePosixPath(path).parts[0] for path in _data_files(converted)})
    config = wanted.config or ("default" if "default" in configs else configs[0] if len(configs) == 1 else None)
    if config is None:
        raise UsageError(
            f"{wanted.url}: several configs ({', '.join(configs[:12])}); name one, as hf://{wanted.name}:CONFIG/{wanted.split}"
        )
    files = [path for path in _data_files(converted) if path.startswith(f"{config}/{wanted.split}/")]
    if not files and any(path.startswith(f"{config}/partial-{wanted.split}/") for path in _data_files(converted)):
        part = f"hf://datasets/{wanted.name}@{CONVERTED.replace('/', '%2F')}/{config}/partial-{wanted.split}/"
        raise UsageError(f"{wanted.url}: the hub holds only a part of it as parquet; to read that part, pass {part}")
    return converted, files


def _data_files(info: Any) -> list[str]:
    return sorted(sibling.rfilename for sibling in info.siblings or [] if is_data_file(PurePosixPath(sibling.rfilename)))


def _names(path: str, words: str) -> bool:
    return re.search(rf"(?:^|[/._ -])(?:{words})(?:[/._ 0-9-]|$)", path) is not None
