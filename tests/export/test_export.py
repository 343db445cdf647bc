from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cramlm.errors import ArtifactError
from cramlm.evaluation.metrics import score
from cramlm.evaluation.prediction import outputs_of, predict_logits
from cramlm.export.folder import publish_encoder
from cramlm.inference.predictor import Predictor
from cramlm.model.huggingface import folder as huggingface
from cramlm.model.huggingface.folder import LoadedModel, load_classifier
from cramlm.model.model import Model
from cramlm.model.tokenizer import Tokenizer
from cramlm.records import Event
from cramlm.storage import artifacts
from cramlm.storage.artifacts import Artifact
from jsonl import read_json

LABELS = ("up|down", "<< b >>", "très bien")
KEY = {"format": 1, "model": "abc"}


def run_scores() -> dict[str, Any]:
    """What the evaluation stage writes, of made-up predictions."""
    true = [LABELS[number % 3] for number in range(60)]
    wrong = [LABELS[(number + (number % 7 == 0)) % 3] for number in range(60)]
    scores = score(true, wrong, LABELS).as_dict()
    return {"models": {"mine": {"dev": scores, "test": scores}, "tfidf-words": {"dev": scores}}, "verdict": "Use it (macro-F1 85.7)."}


def provenance() -> dict[str, Any]:
    report = {"steps": 1200, "tokens": 3_456_789, "seconds": 61.2, "paper_flops": 1.5e15, "executed_flops": 9.9e14}
    file = {"name": "secret/place/corpus-a.jsonl.zst", "sha256": "ab" * 32, "rows_used": 4321}
    return {
        "config": {"name": "mine", "seed": 13, "encoder": {"layers": 2, "hidden": 32}},
        "phases": [{"name": "joint", **report}, {"name": "finetune", **report}],
        "retriever": {"kind": "bm25", "top_k": 50},
        "corpus": {"rows": {"used": 4321}, "passages": {"kept": 5000}, "files": [file]},
        "selection": {"documents": {"found": 800, "cut": 0, "dropped": 23, "selected": 777}, "words": 88_888},
        "task": {"train": 100, "dev": 20, "test": 60},
        "precision": "bf16",
        "seconds": {"baseline": 3.2, "selection": 1.0},
        "scores": run_scores(),
    }


one_shape = pytest.mark.parametrize("model", ["modernbert"], indirect=True)


@pytest.fixture
def exported(tmp_path: Path, model: Model, tokenizer: Tokenizer, texts: list[str]) -> Callable[..., Artifact]:
    """Exports the model to a folder of this name below `tmp_path`."""
    arguments = {"mlm": True, "provenance": provenance(), "key": KEY, "probe_texts": texts}
    loaded = LoadedModel(model, tokenizer, LABELS, 48)
    return lambda name="export", **changes: publish_encoder(tmp_path / name, loaded, **{**arguments, **changes})


def test_a_copied_folder_predicts_like_the_model(
    exported: Callable[..., Artifact], tmp_path: Path, model: Model, tokenizer: Tokenizer, texts: list[str]
) -> None:
    shutil.move(exported().path, tmp_path / "elsewhere")
    tokens = tokenizer.sequences(texts, max_length=48, cut="truncate")
    expected = outputs_of(model.kind, predict_logits(model, tokens, precision="fp32"))
    np.testing.assert_allclose(Predictor.load(tmp_path / "elsewhere").probabilities(texts), expected, atol=1e-5)
    assert artifacts.verify(tmp_path / "elsewhere") == 1


@one_shape
def test_an_export_has_the_given_provenance_the_same_bytes_each_time_and_no_probe_texts(exported: Callable[..., Artifact]) -> None:
    one, two = (exported(name, probe_texts=["a text", "the patient Xylander Quorx"]) for name in ("one", "two"))
    assert one.fingerprint == two.fingerprint
    written = read_json(one.path / "provenance.json")
    assert (written["labels"], written["scores"]) == (list(LABELS), run_scores())
    assert {"cramlm", "torch", "numpy", "python"} <= set(written["versions"])
    stored = load_classifier(one.path).model
    assert written["parameters"] == sum(value.numel() for name, value in stored.named_parameters() if not name.startswith("mlm_head."))
    assert "mine: a text classifier" in (one.path / "README.md").read_text("utf-8")
    assert not any(b"Quorx" in file.read_bytes() for file in one.path.rglob("*") if file.is_file())


@one_shape
def test_the_mlm_folder_exists_only_if_its_head_was_trained(exported: Callable[..., Artifact]) -> None:
    """Without texts the labels are the probes."""
    events: list[Event] = []
    with_mlm = exported("one", probe_texts=[], emit=events.append)
    without = exported("two", probe_texts=[], mlm=False)
    assert "3 texts" in events[-1].message
    assert (with_mlm.path / "mlm" / "model.safetensors").is_file()
    assert not (without.path / "mlm").exists()
    assert "mlm/" not in (without.path / "README.md").read_text("utf-8")


@one_shape
@pytest.mark.parametrize("head", ["classifier", "mlm_head"])
def test_an_export_with_other_logits_is_not_published(
    exported: Callable[..., Artifact], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, head: str
) -> None:
    name, folder, size = {"classifier": ("save_classifier", "export", "1.0e-02"), "mlm_head": ("save_mlm", "export/mlm", "")}[head]
    save = getattr(huggingface, name)

    def damaging(saved: Model, *arguments: Any, **named: Any) -> None:
        """Writes weights that are a little off, as a fault in a converter would."""
        parameter = list(getattr(saved, head).parameters())[-1]
        with torch.no_grad():
            kept = parameter.clone()
            parameter.add_(0.01)
        save(saved, *arguments, **named)
        with torch.no_grad():
            parameter.copy_(kept)

    before = exported().fingerprint
    monkeypatch.setattr(huggingface, name, damaging)
    with pytest.raises(ArtifactError, match=f"^{re.escape(str(tmp_path / folder))}: .* logits differ by {size}"):
        exported(key={**KEY, "model": "def"})
    assert artifacts.open_artifact(tmp_path / "export", kind="export").fingerprint == before
    assert [path.name for path in tmp_path.iterdir() if not path.name.endswith(".lock")] == ["export"]


@one_shape
def test_a_model_that_is_not_finite_is_not_exported(exported: Callable[..., Artifact], tmp_path: Path, model: Model) -> None:
    with torch.no_grad():
        next(iter(model.classifier.parameters())).fill_(float("nan"))
    with pytest.raises(ArtifactError, match="NaN or infinity"):
        exported()
    assert not (tmp_path / "export").exists()


@pytest.mark.slow
def test_the_cards_lines_for_transformers_work(exported: Callable[..., Artifact], texts: list[str]) -> None:
    """The first Python block of README.md, as a reader would run it, on a text that is far too long for the model."""
    artifact = exported()
    block = (artifact.path / "README.md").read_text("utf-8").split("```python\n")[1].split("```")[0]
    text = " ".join(texts)
    block = block.replace("path/to/this/folder", str(artifact.path)).replace('"some text"', repr(text))
    result = subprocess.run([sys.executable, "-W", "ignore", "-c", block], capture_output=True, text=True, check=True, timeout=600)
    (results,) = [eval(line) for line in result.stdout.splitlines() if line.startswith("[")]
    results = results[0] if isinstance(results[0], list) else results
    (ours,) = Predictor.load(artifact.path).predict([text])
    assert results[0]["label"] == ours.label
    assert {row["label"]: row["score"] for row in results} == pytest.approx(dict(ours.probabilities), abs=1e-4)
