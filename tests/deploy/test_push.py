"""Pushing a model to a stand-in for the hub: a real HTTP server and the hub's real client."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cramlm.deploy.export import export_run
from cramlm.deploy.predictor import Predictor
from cramlm.deploy.push import push_model
from cramlm.errors import ArtifactError, UsageError
from cramlm.model.model import Model
from cramlm.model.tokenization import Tokenizer
from hub_stand_in import Hub, running_hub

PROVENANCE = {
    "config": {"name": "mine", "task": {"train": "/home/someone/secret/train.csv"}, "corpus": {"files": ["/home/someone/a.jsonl"]}},
    "scores": {"models": {}, "verdict": "Use it."},
}


@pytest.fixture
def hub() -> Iterator[Hub]:
    with running_hub() as running:
        yield running


@pytest.fixture
def folder(tmp_path: Path, model: Model, tokenizer: Tokenizer, texts: list[str]) -> Path:
    labels, key = ("a", "b", "c"), {"format": 1}
    arguments = {"model": model, "mlm": True, "tokenizer": tokenizer, "labels": labels, "max_length": 48, "key": key, "probe_texts": texts}
    return export_run(tmp_path / "export", provenance=PROVENANCE, **arguments).path  # type: ignore[arg-type]


def push(hub: Hub, *arguments: str | Path, token: str = "hf_right") -> subprocess.CompletedProcess[str]:
    # The hub's newer way to send large files is a service of its own; without it the client uses git's (LFS), which the stand-in speaks.
    environment = {**os.environ, "HF_ENDPOINT": hub.url, "HF_TOKEN": token, "HF_HUB_DISABLE_XET": "1", "HF_HOME": os.devnull}
    command = [sys.executable, "-m", "cramlm", "push", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)


@pytest.mark.parametrize("model", ["modernbert"], indirect=True)
def test_what_was_pushed_answers_as_the_model_does(tmp_path: Path, hub: Hub, folder: Path, texts: list[str]) -> None:
    result = push(hub, folder, "owner/mine", "--license", "apache-2.0", "--language", "yo")
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith(f"{hub.url}/owner/mine/commit/")
    files = hub.repositories["owner/mine"].files
    for name, data in files.items():
        (tmp_path / "copy" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "copy" / name).write_bytes(data)
    assert (Predictor.load(tmp_path / "copy").probabilities(texts) == Predictor.load(folder).probabilities(texts)).all()
    card = files["README.md"].decode()
    assert 'model="owner/mine"' in card
    assert "\nlicense: apache-2.0\nlanguage: yo\n---" in card
    assert "mlm/model.safetensors" in files
    assert "manifest.json" not in files
    sent = b"".join(data for name, data in files.items() if name.endswith((".md", ".json"))).decode()
    assert "secret" not in sent
    assert "someone" not in sent
    assert json.loads(files["provenance.json"])["config"]["task"]["train"] == "train.csv"
    assert push(hub, folder, "owner/mine").returncode == 0, "again, to a repository that is there"


@pytest.mark.parametrize("model", ["bert"], indirect=True)
def test_what_cannot_be_pushed_is_one_line(tmp_path: Path, hub: Hub, folder: Path) -> None:
    for place, repository, kind in ((folder, "mine", UsageError), (tmp_path / "none", "owner/mine", ArtifactError)):
        with pytest.raises(kind):
            push_model(place, repository)
    refused = push(hub, folder, "owner/mine", token="hf_wrong")
    assert refused.returncode == 4
    assert "not open to you" in refused.stderr.splitlines()[-1]
    (folder / "model.safetensors").write_bytes(b"x" * (folder / "model.safetensors").stat().st_size)
    with pytest.raises(ArtifactError, match=r"model\.safetensors"):
        push_model(folder, "owner/mine")
    assert not hub.repositories
