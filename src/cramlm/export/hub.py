"""Upload a finished model to the Hugging Face Hub as one commit.

    run or model folder ─► verify every file ─► public card and provenance ─► repository ─► commit

All files of the folder are sent except the manifest. Of provenance.json only the fields in `PUBLISHED` are sent: the complete file contains
paths, URLs (which may be signed), names of servers and sources, and words of the corpus. The card is rendered from the same fields. An ONNX
folder becomes a subfolder of that name.
A new repository is private unless `public`; an existing one keeps its visibility.
"""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, TypeAlias

from cramlm.errors import EnvironmentFault, UsageError, counted, size
from cramlm.export.card import file_name, model_card
from cramlm.inference.base import PROVENANCE_FILE, SETTINGS_FILE, are_pairs
from cramlm.inference.folders import model_of
from cramlm.io.remote import remote_faults
from cramlm.records import Emit, Event, silent
from cramlm.storage.artifacts import MANIFEST, open_artifact, verify

STAGE: Final = "push"
_CARD: Final = "README.md"
_TOKEN: Final = "a token that may write, from https://huggingface.co/settings/tokens"
_INVALID_CARD: Final = "Invalid metadata in README.md."
_REPOSITORY: Final = re.compile(r"[\w.-]+/[\w.-]+")


def push_model(
    path: Path,
    repository: str,
    *,
    public: bool = False,
    license_id: str | None = None,
    language: str | None = None,
    emit: Emit = silent,
) -> str:
    """Upload the model to `repository` (OWNER/NAME) and return the URL of the commit. The token is that of HF_TOKEN or `hf auth login`.

    license_id, language: for the card's front matter, in the hub's spelling (apache-2.0, en).

    Raises:
        ArtifactError: if `path` holds no model, or a damaged one. UsageError: if an argument is malformed, or the hub refuses the card.
        EnvironmentFault: without huggingface_hub, network or a token, or if the hub denies access.
    """
    if _REPOSITORY.fullmatch(repository) is None:
        raise UsageError(f"{repository!r} is not a repository name; use OWNER/NAME")
    for field, value in (("license", license_id), ("language", language)):
        if value is not None and re.fullmatch(r"[\w.-]+", value) is None:
            raise UsageError(f"--{field} {value!r}: use the hub's spelling, like apache-2.0 or en")
    folder = model_of(path)
    if not (folder / MANIFEST).is_file():
        command = f"hf upload {repository} {shlex.quote(str(folder))}"
        raise UsageError(f"{folder}: was not written by cramlm, which has no card and no hashes for it; upload it with: {command}")
    verify(folder)
    artifact = open_artifact(folder, kind="onnx" if (folder / SETTINGS_FILE).is_file() else "export")
    prefix = "" if artifact.kind == "export" else f"{folder.name}/"
    contents: dict[str, bytes | str] = {prefix + name: str(folder / name) for name in artifact.files}
    if PROVENANCE_FILE in contents:
        provenance = published(json.loads((folder / PROVENANCE_FILE).read_bytes()))
        card = model_card(provenance, repository=repository, license_id=license_id, language=language)
        contents[_CARD] = card.encode()
        contents[PROVENANCE_FILE] = (json.dumps(provenance, indent=1, ensure_ascii=False) + "\n").encode()
    settings = prefix + SETTINGS_FILE
    if settings in contents:
        values = published_settings(json.loads((folder / SETTINGS_FILE).read_bytes()))
        contents[settings] = (json.dumps(values, indent=1, ensure_ascii=False) + "\n").encode()
    uploaded = size(sum(file["bytes"] for file in artifact.files.values()))
    emit(Event("start", STAGE, f"{counted(len(contents), 'file')}, {uploaded} to {repository}"))
    with remote_faults(f"hf://{repository}", instead=""):
        from huggingface_hub import CommitOperationAdd, HfApi, get_token
        from huggingface_hub.utils.tqdm import disable_progress_bars

        if get_token() is None:
            raise EnvironmentFault(f"hf://{repository}: no access token; set HF_TOKEN to {_TOKEN}, or log in with: hf auth login")
        disable_progress_bars()
        api = HfApi(endpoint=os.environ.get("HF_ENDPOINT"))
        operations = [CommitOperationAdd(name, content) for name, content in sorted(contents.items())]
        with _refusals(repository):
            api.create_repo(repository, private=not public, exist_ok=True)
            commit = api.create_commit(repository, operations, commit_message=f"Upload a {artifact.kind} made with cramlm")
    emit(Event("done", STAGE, f"{repository}: {counted(len(contents), 'file')}"))
    return str(commit.commit_url)


@contextmanager
def _refusals(repository: str) -> Iterator[None]:
    """Turn refusals of the hub to write into one-line errors. Its client reports a repository that it may not write to as missing."""
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, RepositoryNotFoundError

    try:
        yield
    except HfHubHTTPError as error:
        status = error.response.status_code
        if status in (401, 403) or isinstance(error, RepositoryNotFoundError):
            owner = repository.partition("/")[0]
            remedy = f"check that {owner} is you or your organization, and that HF_TOKEN is {_TOKEN}"
            raise EnvironmentFault(f"hf://{repository}: access denied (status {status}); {remedy}") from error
        if status in (400, 402):
            raise EnvironmentFault(
                f"hf://{repository}: the hub refuses the upload ({error.server_message or f'status {status}'})"
            ) from error
        raise
    except HFValidationError as error:
        raise UsageError(f"{repository!r} is not a repository name: {error}") from error
    except ValueError as error:
        if not str(error).startswith(_INVALID_CARD):
            raise
        problem = " ".join(str(error).removeprefix(_INVALID_CARD).split()).removeprefix("- ")
        raise UsageError(f"hf://{repository}: the hub refuses the card ({problem}); check --license and --language") from error


Rule: TypeAlias = "bool | Callable[[str], str] | Mapping[str, Rule]"
"""True: the value itself. A function: applied to a string, or to each string of a list. A mapping: the published fields of a table."""


def _unchanged(*names: str) -> dict[str, Rule]:
    return dict.fromkeys(names, True)


_RETRIEVER: Final[dict[str, Rule]] = {
    **_unchanged("kind", "max_documents", "max_tokens", "rank_decay", "near_duplicates", "shares"),
    **_unchanged("top_k", "per_query", "queries", "query_words", "k1", "b", "norm", "buckets", "normalise"),
    **_unchanged("pooling", "max_length", "query_prefix", "passage_prefix", "max_clauses"),
    "encoder": file_name,
}
_RETRIEVERS: Final[dict[str, Rule]] = {**_RETRIEVER, "retrievers": _RETRIEVER}
_CONFIG: Final[dict[str, Rule]] = {
    **_unchanged("name", "seed", "budget", "tokens_per_second", "threads", "precision", "device", "dev_metric", "logit_adjustment"),
    **_unchanged("diacritics", "compile_layers"),
    **_unchanged("model", "tokenizer", "encoder", "head", "phases", "baseline", "teacher", "distributed"),
    "init": file_name,
    "task": {
        **_unchanged("kind", "dev_fraction", "max_record_bytes", "on_bad_row", "unseen_labels", "label_names"),
        **dict.fromkeys(("train", "dev", "test", "unlabelled"), file_name),
    },
    "corpus": {"files": file_name, **_unchanged("passage_words", "duplicates", "max_record_bytes", "on_bad_row")},
    "retriever": _RETRIEVERS,
}
PUBLISHED: Final[dict[str, Any]] = {
    **_unchanged("parameters", "vocab_size", "max_length", "labels", "kind", "mlm", "prompt", "versions", "precision", "threads"),
    **_unchanged("phases", "seconds", "task", "model", "fit"),
    "config": _CONFIG,
    "init": {"name": file_name, "fingerprint": True, "sha256": True},
    "retriever": _RETRIEVERS,
    "corpus": {
        **_unchanged("rows", "passages", "words", "bytes"),
        "files": {"name": file_name, **_unchanged("bytes", "sha256", "rows_read", "rows_used", "rows_rejected")},
    },
    "selection": _unchanged("queries", "documents", "words", "bytes", "tokens", "dropped", "rank", "score", "task_likeness"),
    "scores": _unchanged("models", "verdict", "comparison", "flops", "labels", "kind"),
}
"""The published fields of provenance.json; a field that is not listed is not published."""


def published(provenance: Mapping[str, Any]) -> dict[str, Any]:
    """Return the published part of `provenance`, the content of a provenance.json."""
    public = _filter(provenance, PUBLISHED)
    assert isinstance(public, dict)
    return public | {"pairs": are_pairs(provenance)}


def published_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the published part of the content of an onnx.json: all but the names of columns."""
    return {name: value for name, value in settings.items() if name != "config"}


def _filter(value: Any, rule: Rule) -> Any:
    if rule is True or value is None:
        return value
    if isinstance(value, list):
        return [_filter(each, rule) for each in value]
    if isinstance(rule, Mapping):
        return {name: _filter(each, rule[name]) for name, each in value.items() if name in rule} if isinstance(value, Mapping) else None
    return rule(value) if callable(rule) and isinstance(value, str) else None
