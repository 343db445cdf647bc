"""Pushing a model to a stand-in for the hub: a real HTTP server and the hub's real client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import ModelCard

from commands import python
from cramlm.config.retriever import Bm25Config, DenseConfig, DsirConfig, ElasticsearchConfig, RandomConfig, UnionConfig
from cramlm.config.run import CorpusConfig, RunConfig, TaskConfig
from cramlm.errors import ArtifactError, UsageError
from cramlm.export.card import file_name
from cramlm.export.folder import publish_encoder
from cramlm.export.hub import PUBLISHED, push_model
from cramlm.inference.predictor import Predictor
from cramlm.model.huggingface.folder import LoadedModel
from cramlm.model.model import Model
from cramlm.model.tokenizer import Tokenizer
from hub_stand_in import Hub, running_hub

SIGNED = "https://corp.internal/b/a.jsonl?X-Amz-Signature=secret&X-Amz-Credential=someone"
ELASTICSEARCH = {
    "kind": "elasticsearch",
    "top_k": 50,
    "url": "https://secret.internal:9200",
    "index": "secret-index",
    "text_field": "secret_field",
    "api_key_env": "SECRET_KEY",
    "ca_certs": "/home/someone/secret.pem",
}
DENSE = {"kind": "dense", "top_k": 7, "encoder": "/home/someone/models/minilm", "query_prefix": "query: "}
PROVENANCE = {
    "config": {
        "name": "mine",
        "seed": 13,
        "init": "/home/someone/models/bert",
        "task": {"kind": "classification", "train": "/home/someone/secret/train.csv", "dev": None, "text_column": "secret_column"},
        "corpus": {"files": ["/home/someone/a.jsonl", SIGNED, "s3://someone-secret/raw/*.jsonl.zst"], "passage_words": 200},
        "retriever": {"kind": "union", "retrievers": [DENSE, {"kind": "bm25", "k1": 1.2}]},
        "encoder": {"layers": 2, "hidden": 32},
        "secret_of_tomorrow": "secret",
    },
    "init": {"name": "/home/someone/models/bert", "fingerprint": "f0", "sha256": {"model.safetensors": "ab" * 32}},
    "retriever": ELASTICSEARCH,
    "corpus": {
        "rows": {"read": 3, "used": 3},
        "passages": {"kept": 3},
        "sources": {"https://secret.internal/page": 3},
        "files": [{"name": SIGNED, "rows_used": 3, "sha256": "ab" * 32, "bytes": 10}],
        "server": "https://secret.internal:9200",
    },
    "selection": {
        "documents": {"selected": 2, "dropped": 1},
        "words": 20,
        "sources": {"https://secret.internal/page": 2},
        "over_represented": [{"word": "secret"}],
    },
    "task": {"fingerprint": {"train": "f1"}, "train": 40, "dev": 16, "test": 16},
    "scores": {"models": {}, "verdict": "Use it.", "training": {"secret": 1}},
    "secret_of_tomorrow": "secret",
}
WITHHELD = {
    TaskConfig: {"text_column", "label_column", "text_pair_column", "label_separator"},
    CorpusConfig: {"text_column", "id_column", "source_column"},
    ElasticsearchConfig: {
        *("url", "index", "text_field", "id_field", "source_field", "api_key_env", "login_env", "ca_certs"),
        *("batch", "timeout", "retries"),
    },
}


@pytest.fixture
def hub() -> Iterator[Hub]:
    with running_hub() as running:
        yield running


@pytest.fixture
def folder(tmp_path: Path, model: Model, tokenizer: Tokenizer, texts: list[str]) -> Path:
    loaded = LoadedModel(model, tokenizer, ("a", "b", "c"), 48)
    return publish_encoder(tmp_path / "export", loaded, mlm=True, provenance=PROVENANCE, key={"format": 1}, probe_texts=texts).path


PUSHES = """
import json, os, sys
from cramlm.cli.app import app
from cramlm.errors import CramError

folder, pushes = sys.argv[1], json.loads(sys.argv[2])
for token, *arguments in pushes:
    os.environ.pop("HF_TOKEN", None)
    if token:
        os.environ["HF_TOKEN"] = token
    try:
        app(["push", folder, *arguments], standalone_mode=False)
    except CramError as error:
        print(error.exit_code, error)
"""


def pushed(hub: Hub, folder: Path, home: Path, *pushes: list[str]) -> list[str]:
    """Push a folder several times in a new interpreter, each with a token and arguments; return the line that each push prints."""
    # Large files go through LFS, which the stand-in implements, and not through the service that the hub prefers for them.
    environment = {"HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_XET": "1", "HF_HOME": str(home)}
    return python(PUSHES, folder, json.dumps(pushes), **environment).splitlines()


@pytest.mark.parametrize("model", ["modernbert"], indirect=True)
def test_refused_pushes_say_why_and_what_to_do(tmp_path: Path, hub: Hub, folder: Path) -> None:
    hub.add("other/mine", {"README.md": b"not mine"})
    foreign = ["hf_wrong", "other/mine"], ["hf_right", "other/new"], ["hf_right", "other/mine"]
    own = ["hf_right", "owner/mine", "--license", "nolicense"], ["hf_right", "owner/my..model"]
    lines = pushed(hub, folder, tmp_path, ["", "owner/mine"], ["hf_wrong", "owner/mine"], *foreign, *own)
    missing, wrong, *others, card, name = lines
    assert missing.startswith("4 hf://owner/mine: no access token; set HF_TOKEN to a token that may write")
    assert wrong.startswith("4 hf://owner/mine: access denied (status 401); check that owner is you")
    assert all(line.startswith("4 hf://other/") and "access denied" in line and "HF_TOKEN" in line for line in others), others
    assert card.startswith('2 hf://owner/mine: the hub refuses the card ("license" must be one of')
    assert name.startswith("2 'owner/my..model' is not a repository name")
    assert hub.repositories["other/mine"].files == {"README.md": b"not mine"}
    assert not hub.repositories["owner/mine"].files


@pytest.mark.parametrize("model", ["modernbert"], indirect=True)
def test_a_model_is_pushed_twice_without_private_data_and_predicts_equally(
    tmp_path: Path, hub: Hub, folder: Path, texts: list[str]
) -> None:
    push = ["hf_right", "owner/mine", "--license", "apache-2.0", "--language", "yo"]
    first, again = pushed(hub, folder, tmp_path / "home", push, push)
    assert first.startswith(f"{hub.url}/owner/mine/commit/")
    assert again.startswith(f"{hub.url}/owner/mine/commit/")
    files = hub.repositories["owner/mine"].files
    for name, data in files.items():
        (tmp_path / "copy" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "copy" / name).write_bytes(data)
    assert (Predictor.load(tmp_path / "copy").probabilities(texts) == Predictor.load(folder).probabilities(texts)).all()
    card = files["README.md"].decode()
    assert 'model="owner/mine"' in card
    head = ModelCard(card).data
    assert (head.license, head.language) == ("apache-2.0", "yo")
    assert "left to you" not in card
    assert "mlm/model.safetensors" in files
    assert "manifest.json" not in files
    sent = b"".join(data for name, data in files.items() if name.endswith((".md", ".json"))).decode()
    for leak in ("secret", "someone", "internal", "X-Amz", "SECRET"):
        assert leak not in sent, leak
    provenance = json.loads(files["provenance.json"])
    assert provenance["config"]["task"] == {"kind": "classification", "train": "train.csv", "dev": None}
    assert provenance["config"]["corpus"] == {"files": ["a.jsonl", "a.jsonl", "*.jsonl.zst"], "passage_words": 200}
    assert provenance["config"]["retriever"]["retrievers"] == [DENSE | {"encoder": "minilm"}, {"kind": "bm25", "k1": 1.2}]
    assert provenance["retriever"] == {"kind": "elasticsearch", "top_k": 50}
    assert provenance["init"] == {"name": "bert", "fingerprint": "f0", "sha256": {"model.safetensors": "ab" * 32}}
    assert provenance["labels"] == ["a", "b", "c"]
    assert "started from the weights of bert" in card
    assert "a.jsonl: 3 rows" in card


def test_each_setting_is_published_or_withheld() -> None:
    published = {
        RunConfig: PUBLISHED["config"],
        TaskConfig: PUBLISHED["config"]["task"],
        CorpusConfig: PUBLISHED["config"]["corpus"],
        **dict.fromkeys(
            (Bm25Config, RandomConfig, DsirConfig, DenseConfig, UnionConfig, ElasticsearchConfig), PUBLISHED["config"]["retriever"]
        ),
    }
    for model, fields in published.items():
        withheld = WITHHELD.get(model, set())
        assert not withheld & set(fields), model
        assert set(model.model_fields) <= withheld | set(fields), model


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("train.csv", "train.csv"),
        ("/home/someone/train.csv", "train.csv"),
        ("C:\\Users\\someone\\train.csv", "train.csv"),
        (SIGNED, "a.jsonl"),
        ("hf://datasets/someone/private@abc/train.parquet#text", "train.parquet"),
        ("https://user:secret@host/x.csv", "x.csv"),
        ("https://host?token=secret", "?"),
        ("/home/someone/", "someone"),
        ("/", "?"),
    ],
)
def test_only_the_names_of_files_are_published(name: str, shown: str) -> None:
    assert file_name(name) == shown


@pytest.mark.parametrize("model", ["bert"], indirect=True)
def test_a_wrong_name_and_a_missing_or_damaged_folder_are_refused(tmp_path: Path, hub: Hub, folder: Path) -> None:
    for place, repository, kind in ((folder, "mine", UsageError), (tmp_path / "none", "owner/mine", UsageError)):
        with pytest.raises(kind):
            push_model(place, repository)
    (folder / "model.safetensors").write_bytes(b"x" * (folder / "model.safetensors").stat().st_size)
    with pytest.raises(ArtifactError, match=r"model\.safetensors"):
        push_model(folder, "owner/mine")
    assert not hub.repositories
