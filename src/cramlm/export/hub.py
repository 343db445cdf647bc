"""A finished model to the Hugging Face Hub, as one commit.

    run or model folder ─► every file against its hash ─► card and provenance made fit to be seen ─► repository ─► commit

What is sent: the folder's files, without the manifest, which speaks of this machine. Of provenance.json the published part is sent
(provenance.py), and the card is made from that part; in it the place of the model becomes the repository's name. An ONNX folder goes
into a folder of its name, beside the model.
A repository that has to be made is private unless the user says otherwise; one that is there stays as it is.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, TypeAlias

from cramlm.errors import UsageError
from cramlm.export.card import file_name, model_card
from cramlm.inference.onnx import FACTS_FILE
from cramlm.inference.runs import model_of
from cramlm.io.paths import remote_faults
from cramlm.records import Emit, Event, silent
from cramlm.storage.artifacts import MANIFEST, open_artifact, verify

STAGE: Final = "push"
_CARD, _PROVENANCE = "README.md", "provenance.json"
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
    """Send the model to `repository` (OWNER/NAME); the url of the commit. Who sends it is told by HF_TOKEN or `hf auth login`.

    license_id, language: for the card's head, as the hub spells them (apache-2.0, en).

    Raises:
        ArtifactError: `path` holds no model, or a damaged one. UsageError: the repository's name.
        EnvironmentFault: no huggingface_hub, no network, or the hub refuses the token.
    """
    if _REPOSITORY.fullmatch(repository) is None:
        raise UsageError(f"{repository!r} is not a repository; write it as OWNER/NAME")
    for field, value in (("license", license_id), ("language", language)):
        if value is not None and re.fullmatch(r"[\w.-]+", value) is None:
            raise UsageError(f"--{field} {value!r}: write it as the hub does, like apache-2.0 or en")
    folder = path if (path / MANIFEST).is_file() and (path / "config.json").is_file() else model_of(path)
    verify(folder)
    artifact = open_artifact(folder, kind="onnx" if (folder / FACTS_FILE).is_file() else "export")
    prefix = "" if artifact.kind == "export" else f"{folder.name}/"
    contents: dict[str, bytes | str] = {prefix + name: str(folder / name) for name in artifact.files}
    if _PROVENANCE in contents:
        facts = published(json.loads((folder / _PROVENANCE).read_bytes()))
        card = model_card(facts, repository=repository, license_id=license_id, language=language)
        contents[_CARD] = card.encode()
        contents[_PROVENANCE] = (json.dumps(facts, indent=1, ensure_ascii=False) + "\n").encode()
    size = sum(file["bytes"] for file in artifact.files.values())
    emit(Event("start", STAGE, f"{len(contents)} files, {size / 1e6:.1f} MB to {repository}"))
    with remote_faults(f"hf://{repository}"):
        from huggingface_hub import CommitOperationAdd, HfApi
        from huggingface_hub.utils.tqdm import disable_progress_bars

        disable_progress_bars()
        api = HfApi(endpoint=os.environ.get("HF_ENDPOINT"))
        api.create_repo(repository, private=not public, exist_ok=True)
        operations = [CommitOperationAdd(name, content) for name, content in sorted(contents.items())]
        commit = api.create_commit(repository, operations, commit_message=f"Upload a {artifact.kind} made with cramlm")
    emit(Event("done", STAGE, f"{repository}: {len(contents)} files"))
    return str(commit.commit_url)


Rule: TypeAlias = "bool | Callable[[str], str] | Mapping[str, Rule]"
"""True: the value as it is. A function: of a string, or of each string in a list. A mapping: the fields of a table that are published."""


def _as_they_are(*names: str) -> dict[str, Rule]:
    return dict.fromkeys(names, True)


_RETRIEVER: Final[dict[str, Rule]] = {
    **_as_they_are("kind", "max_documents", "max_tokens", "rank_decay", "near_duplicates", "shares"),
    **_as_they_are("top_k", "per_query", "queries", "query_words", "k1", "b", "norm", "buckets", "normalise"),
    **_as_they_are("pooling", "max_length", "query_prefix", "passage_prefix", "max_clauses"),
    "encoder": file_name,
}
_RETRIEVERS: Final[dict[str, Rule]] = {**_RETRIEVER, "retrievers": _RETRIEVER}
_CONFIG: Final[dict[str, Rule]] = {
    **_as_they_are("name", "seed", "budget", "tokens_per_second", "threads", "precision", "dev_metric", "logit_adjustment"),
    **_as_they_are("model", "tokenizer", "encoder", "head", "phases", "baseline", "teacher", "distributed"),
    "init": file_name,
    "task": {
        **_as_they_are("kind", "dev_fraction", "max_record_bytes", "on_bad_row", "unseen_labels"),
        **dict.fromkeys(("train", "dev", "test"), file_name),
    },
    "corpus": {"files": file_name, **_as_they_are("passage_words", "duplicates", "max_record_bytes", "on_bad_row")},
    "retriever": _RETRIEVERS,
}
PUBLISHED: Final[dict[str, Any]] = {
    **_as_they_are("parameters", "vocab_size", "max_length", "labels", "kind", "mlm", "prompt", "versions", "precision", "threads"),
    **_as_they_are("phases", "seconds", "task", "model", "fit"),
    "config": _CONFIG,
    "init": {"name": file_name, "fingerprint": True, "sha256": True},
    "retriever": _RETRIEVERS,
    "corpus": {
        **_as_they_are("rows", "passages", "words", "bytes"),
        "files": {"name": file_name, **_as_they_are("bytes", "sha256", "rows_read", "rows_used", "rows_rejected")},
    },
    "selection": _as_they_are("queries", "documents", "words", "bytes", "tokens", "dropped", "rank", "score", "task_likeness"),
    "scores": _as_they_are("models", "verdict", "comparison", "flops", "labels", "kind"),
}
"""The published fields of provenance.json."""


def published(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the published part of `facts`, the content of a provenance.json."""
    kept = _kept(facts, PUBLISHED)
    assert isinstance(kept, dict)
    return kept


def _kept(value: Any, rule: Rule) -> Any:
    if rule is True or value is None:
        return value
    if isinstance(value, list):
        return [_kept(each, rule) for each in value]
    if isinstance(rule, Mapping):
        return {name: _kept(each, rule[name]) for name, each in value.items() if name in rule} if isinstance(value, Mapping) else None
    return rule(value) if callable(rule) and isinstance(value, str) else None
