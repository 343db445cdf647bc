"""A finished model to the Hugging Face Hub, as one commit.

    run or model folder ─► every file against its hash ─► card and provenance made fit to be seen ─► repository ─► commit

What is sent: the folder's files, without the manifest, which speaks of this machine. In the card the place of the model becomes the
repository's name; in provenance.json the user's files lose their folders. An ONNX folder goes into a folder of its name, beside the model.
A repository that has to be made is private unless the user says otherwise; one that is there stays as it is.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Any, Final

from cramlm.artifacts import MANIFEST, open_artifact, verify
from cramlm.data.remote import remote_faults
from cramlm.deploy.onnx_predictor import FACTS_FILE
from cramlm.deploy.runs import model_of
from cramlm.errors import UsageError
from cramlm.records import Emit, Event, silent

STAGE: Final = "push"
_CARD, _PROVENANCE = "README.md", "provenance.json"
_REPOSITORY: Final = re.compile(r"[\w.-]+/[\w.-]+")
_PATHS: Final = {"train", "dev", "test", "files", "name", "init"}  # fields of the config and of statistics that hold names of files


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
    folder = path if (path / MANIFEST).is_file() and (path / "config.json").is_file() else model_of(path)
    verify(folder)
    artifact = open_artifact(folder, kind="onnx" if (folder / FACTS_FILE).is_file() else "export")
    prefix = "" if artifact.kind == "export" else f"{folder.name}/"
    contents: dict[str, bytes | str] = {prefix + name: str(folder / name) for name in artifact.files}
    if _CARD in contents:
        contents[_CARD] = _card((folder / _CARD).read_text("utf-8"), repository, license_id, language).encode()
    if _PROVENANCE in contents:
        facts = _without_folders(json.loads((folder / _PROVENANCE).read_bytes()))
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


def _card(text: str, repository: str, license_id: str | None, language: str | None) -> str:
    text = text.replace('model="path/to/this/folder"', f'model="{repository}"')
    text = text.replace('Predictor.load("path/to/this/folder")', 'Predictor.load("my-model")')
    text = text.replace("With cramlm, which", f"With cramlm, after `hf download {repository} --local-dir my-model`, which")
    for field, value in (("license", license_id), ("language", language)):
        if value is not None:
            if re.fullmatch(r"[\w.-]+", value) is None:
                raise UsageError(f"--{field} {value!r}: write it as the hub does, like apache-2.0 or en")
            text = re.sub(rf"^# {field}:.*$", f"{field}: {value}", text, count=1, flags=re.MULTILINE)
    return text


def _without_folders(value: Any, field: str = "") -> Any:
    if isinstance(value, Mapping):
        return {name: _without_folders(inner, name) for name, inner in value.items()}
    if isinstance(value, list):
        return [_without_folders(inner, field) for inner in value]
    return PurePath(value).name if isinstance(value, str) and field in _PATHS and "://" not in value else value
