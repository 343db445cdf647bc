"""Objectives, masks and encoders through `cramlm fit`, on a tiny task."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from commands import cramlm, error_line, succeed
from cramlm.config.run import load_config, to_toml
from cramlm.inference.predictor import Predictor
from cramlm.storage.artifacts import open_artifact
from jsonl import read_json, read_jsonl
from tiny_task import TOPICS, tiny_config, write_task

COMMON = {
    "steps": 6,
    "external": 2,
    "task": 1,
    "terms": [{"kind": "mlm"}, {"kind": "mlm", "on": "task"}, {"kind": "classify"}],
    "dropout": 0.0,
    "keep": "last",
    "batch_size": 256,
    "max_length": 32,
    "checkpoint_every": 100,
}
FINETUNE = COMMON | {"name": "finetune", "steps": 30, "external": 0, "terms": [{"kind": "classify"}], "keep": "best", "evaluate_every": 10}


def on_both(kind: str, *, labels: bool = True, **settings: Any) -> list[dict[str, Any]]:
    """A text term on external and on task text, and the labels."""
    return [{"kind": kind, "on": on, **settings} for on in ("external", "task")] + [{"kind": "classify"}] * labels


def fit(folder: Path, **changes: Any) -> Path:
    """The run folder of a fit without baseline; every phase but the last is `COMMON` with its own settings."""
    data = tiny_config(write_task(folder / "data", documents=60), baseline={"enabled": False}, tokens_per_second=1e6) | changes
    (folder / "run.toml").write_text(to_toml(load_config(data)), "utf-8")
    succeed("fit", "--config", folder / "run.toml", "--out", folder / "run", "--store", folder / "store")
    return folder / "run"


def terms_of(run: Path) -> dict[str, set[str]]:
    """Phase -> terms of its loss in the log."""
    terms: dict[str, set[str]] = {}
    for event in read_jsonl(run / "events.jsonl"):
        if event["kind"] == "step":
            found = {name for name in event["data"] if name.rpartition("_")[2] in ("external", "task")}
            terms.setdefault(event["stage"].split("-", 2)[2], set()).update(found)
    return terms


def test_an_exported_mixture_of_experts_is_for_cramlm_only(tmp_path: Path) -> None:
    encoder = {"shape": "moe", "layers": 1, "hidden": 32, "heads": 2, "intermediate": 32, "experts": 3, "max_positions": 64}
    run = fit(tmp_path, encoder=encoder, phases=[COMMON | {"name": "joint"}, FINETUNE])
    events = read_jsonl(run / "events.jsonl")
    assert any("transformers has no class" in event["message"] for event in events)
    assert all(0.9 < event["data"]["balance"] < 3 for event in events if event["kind"] == "step")
    answers = Predictor.load(run / "export").predict(["wave ship harbour sailor", "summit ridge valley climber"])
    assert [answer.label for answer in answers] == ["sea", "hill"]
    assert "AutoModel" not in (run / "export/README.md").read_text("utf-8")
    assert "cannot be exported to ONNX" in error_line(cramlm("export", run, "--format", "onnx"), 2)


def test_one_run_has_a_phase_of_every_text_term_and_exports_the_native_class(tmp_path: Path) -> None:
    phases = [
        {"name": "causal", "terms": on_both("causal", labels=False)},
        {
            "name": "hybrid",
            "terms": [*on_both("mlm"), *on_both("causal", labels=False, share=0.5)],
            "masking": {"kind": "whole-word", "rate": 0.3, "rate_end": 0.15},
        },
        {"name": "span", "terms": on_both("span_infilling"), "masking": {"rate": 0.3}},
        {"name": "rtd", "terms": on_both("replaced_tokens"), "masking": {"kind": "phrase"}},
    ]
    run = fit(tmp_path, phases=[*(COMMON | phase for phase in phases), FINETUNE], head={"generator": 16})
    kinds = ("mlm", "causal", "span_infilling", "replaced_tokens", "detection")
    masked, causal, spans, generator, detection = ({f"{kind}_external", f"{kind}_task"} for kind in kinds)
    labels = {"classify_task"}
    assert terms_of(run) == {
        "causal": causal,
        "hybrid": causal | masked | labels,
        "span": spans | labels,
        "rtd": generator | detection | labels,
        "finetune": labels,
    }
    assert read_json(run / "export/config.json")["architectures"] == ["ModernBertForSequenceClassification"]
    assert (run / "export/mlm/model.safetensors").is_file()  # a [MASK] was learnt in the hybrid phase
    answers = Predictor.load(run / "export").predict(["wave ship harbour sailor", "summit ridge valley climber"])
    assert [answer.label for answer in answers] == ["sea", "hill"]


@pytest.mark.parametrize("kind", ["scored", pytest.param("scored-control", marks=pytest.mark.slow)])
def test_selective_masking_is_phases_with_token_labels_and_scores_between_them(tmp_path: Path, kind: str) -> None:
    rule = {"rule": "auxiliary" if kind == "scored" else "gradient"}
    external = COMMON | {"task": 0, "terms": [{"kind": "mlm"}], "masking": {"rate": 0.15}}
    phases = [
        external | {"name": "genept"},
        FINETUNE | {"name": "tune"},
        COMMON | {"name": "scorer", "terms": [{"kind": "important_tokens", **rule}], "external": 0, "steps": 20},
        external | {"name": "taskpt", "start_from": "genept", "masking": {"kind": kind, "scores_of": "scorer", "rate": 0.15}},
        FINETUNE,
    ]
    run = fit(tmp_path, phases=phases, head={"token_classifier": True})
    assert terms_of(run)["scorer"] == {"important_tokens_task"}
    words = read_json(run / "token-labels-3-scorer/words.json")
    assert words["texts_used"] > 20
    topical = [word for word in list(words["important"])[:10] if any(word in topic for topic in TOPICS.values())]
    assert len(topical) >= (8 if kind == "scored" else 5)  # of the words that tell the topics apart; 24 of 44
    assert np.load(run / "token-scores-4-taskpt/external.npy").dtype == np.float32
    key = read_json(run / "phase-4-taskpt/manifest.json")["key"]
    assert key["start"] == open_artifact(run / "phase-1-genept", kind="phase").fingerprint
    assert key["token_importance"] == open_artifact(run / "token-scores-4-taskpt", kind="token-scores").fingerprint
