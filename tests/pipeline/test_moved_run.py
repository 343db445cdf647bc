"""A finished run after it was moved and its data, store and working folder are gone: every command on it works as before."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from commands import cramlm, printed, succeed
from cramlm.config.run import load_config
from cramlm.data.task import load_task
from cramlm.pipeline.run import run
from cramlm.reporting.page import report_page
from cramlm.retrieval.selection import SelectionTable
from cramlm.storage.artifacts import MANIFEST
from hub_stand_in import running_hub
from jsonl import read_json, write_jsonl, write_labelled
from server_process import serving
from tiny_task import tiny_config, write_task

TEXT = "The old ship was near the harbour"


@pytest.fixture(scope="module", params=["encoder", "static"])
def before(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the report says while everything is in its place; beside it in run/ the run, which was fitted with relative paths."""
    folder = tmp_path_factory.mktemp("before")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        data = tiny_config(write_task(Path("data")), tokens_per_second=10_000.0)
        if request.param == "static":
            data |= {"model": "static", "name": "static", "phases": []}
        run(load_config(data), out="run", store="store")
        (folder / "before.html").write_text(report_page(Path("run")), "utf-8")
    return folder


@pytest.fixture(scope="module")
def moved(before: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run alone, moved to another folder; the one that it was made in is gone."""
    target = tmp_path_factory.mktemp("moved") / "run"
    shutil.copytree(before / "run", target, ignore=shutil.ignore_patterns(".work", "*.lock"))
    for name in ("data", "store", "run"):
        shutil.rmtree(before / name)
    return target


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Another working folder, and a store that is empty."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("CRAMLM_STORE", str(tmp_path / "store"))
    yield
    assert not (tmp_path / "store").exists(), "a command on a run used the shared store"


def only_an_encoder(run: Path) -> None:
    if not list(run.glob("phase-*")):
        pytest.skip("a linear model has no such form")


def labelled(folder: Path) -> Path:
    return write_jsonl(folder / "new.jsonl", ({"text": TEXT, "label": "sea"}, {"text": "a summit", "label": "hill"}))


def test_report_shows_texts_queries_and_errors(before: Path, moved: Path) -> None:
    succeed("report", moved)
    page = (moved / "report.html").read_text("utf-8")
    assert "<span class=tag>query" in page
    assert page.replace(str(moved), "run") == (before / "before.html").read_text("utf-8")


def test_report_compares_several_runs(moved: Path, tmp_path: Path) -> None:
    shutil.copytree(moved, tmp_path / "copy", ignore=shutil.ignore_patterns("onnx*"))
    succeed("report", moved, tmp_path / "copy", "--out", tmp_path / "runs.html")
    assert "cannot be compared" not in (tmp_path / "runs.html").read_text("utf-8")


def predictions(model: Path, folder: Path) -> list[list[float]]:
    """Probabilities that `cramlm predict` prints for the texts of `labelled`, after a check of the labels."""
    answers = [json.loads(line) for line in printed("predict", model, labelled(folder)).splitlines()]
    assert [answer["label"] for answer in answers] == ["sea", "hill"]
    return [list(answer["probabilities"].values()) for answer in answers]


def test_predict(moved: Path, tmp_path: Path) -> None:
    assert predictions(moved, tmp_path) == predictions(moved / "export", tmp_path)


def test_evaluate_on_a_file(moved: Path, tmp_path: Path) -> None:
    assert json.loads(printed("evaluate", moved, labelled(tmp_path), "--json"))["accuracy"] == 1.0


def test_explain_uses_the_passage_index_of_the_run(moved: Path, tmp_path: Path) -> None:
    explanation = json.loads(printed("explain", moved, TEXT, "--json"))
    assert (explanation["label"], len(explanation["passages"])) == ("sea", 3)
    again = tmp_path / "again"
    shutil.copytree(moved, again)
    files = sorted(path.relative_to(again) for path in again.rglob("*"))
    assert json.loads(printed("explain", again, TEXT, "--json")) == explanation
    assert sorted(path.relative_to(again) for path in again.rglob("*")) == files, "the passages were indexed again"


def test_export_onnx_checks_on_the_stored_texts(moved: Path, tmp_path: Path) -> None:
    for package in ("onnx", "onnxruntime"):
        pytest.importorskip(package, reason=f"{package} is missing: pip install 'cramlm[onnx]'")
    only_an_encoder(moved)
    succeed("export", moved, "--format", "onnx")
    assert read_json(moved / "onnx/onnx.json")["checked_texts"] == 32
    np.testing.assert_allclose(predictions(moved / "onnx", tmp_path), predictions(moved, tmp_path), atol=1e-4)
    assert json.loads(printed("evaluate", moved / "onnx", labelled(tmp_path), "--json"))["accuracy"] == 1.0


def test_embed(moved: Path, tmp_path: Path) -> None:
    succeed("embed", moved, labelled(tmp_path), "--out", tmp_path / "vectors.npy", "--model-part", "static")
    assert len(np.load(tmp_path / "vectors.npy")) == 2


def test_passages(moved: Path) -> None:
    texts = [json.loads(line)["text"] for line in printed("passages", moved).splitlines()]
    assert texts == SelectionTable.open(moved / "selection").texts()


def test_label_next_leaves_out_the_stored_texts(moved: Path, tmp_path: Path) -> None:
    known = load_task(moved).train[0].text
    chosen = printed("label-next", moved, write_jsonl(tmp_path / "texts.jsonl", ({"text": text} for text in (known, TEXT))))
    assert [json.loads(line)["text"] for line in chosen.splitlines()] == [TEXT]


def test_check_reads_the_stored_probabilities(moved: Path, tmp_path: Path) -> None:
    train = write_labelled(tmp_path / "train.jsonl", ((row.text, row.label) for row in load_task(moved).train))
    checked = cramlm("check", train, "--model", moved)
    assert checked.returncode == 0, checked.stderr
    assert ("those of the run's teacher" in checked.stderr) == (moved / "teacher").is_dir()


@pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")  # raised inside huggingface_hub
def test_push(moved: Path, tmp_path: Path) -> None:
    with running_hub() as hub:
        succeed("push", moved, "owner/mine", environment={"HF_ENDPOINT": hub.url, "HF_TOKEN": "hf_right"})
        pushed = hub.repositories["owner/mine"].files
    files = {path.relative_to(moved / "export").as_posix() for path in (moved / "export").rglob("*") if path.is_file()}
    assert set(pushed) == files - {"manifest.json"}
    assert not [name for name, content in pushed.items() if name.endswith((".md", ".json")) and str(moved.parent).encode() in content]
    for name, content in pushed.items():
        (tmp_path / "copy" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "copy" / name).write_bytes(content)
    assert predictions(tmp_path / "copy", tmp_path) == predictions(moved, tmp_path)


def test_serve(moved: Path) -> None:
    with serving(moved) as server:
        assert server.post("/v1/predict", {"texts": [TEXT]}).json()["predictions"][0]["label"] == "sea"


def test_track(moved: Path) -> None:
    pytest.importorskip("tensorboard")
    succeed("track", moved, "tensorboard")
    assert list((moved / "tensorboard").iterdir())


def test_attention(moved: Path, tmp_path: Path) -> None:
    only_an_encoder(moved)
    succeed("attention", moved, labelled(tmp_path), "--out", tmp_path / "heads")
    assert (tmp_path / "heads/heads.json").is_file()


def test_verify(moved: Path) -> None:
    shown = printed("verify", moved)
    assert f"{len(list(moved.rglob(MANIFEST)))} folders verified" in shown
