"""The ONNX form of a model: the same predictions without torch, checked before it is published."""

from __future__ import annotations

import functools
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from commands import python
from cramlm.errors import ArtifactError, DataError, UsageError
from cramlm.export.onnx import export_onnx, write_graph
from cramlm.inference.onnx import OnnxPredictor
from cramlm.inference.predictor import Predictor, load_predictor
from cramlm.model.model import Model
from cramlm.model.tokenizer import Tokenizer
from cramlm.records import Example
from cramlm.storage.artifacts import verify
from jsonl import read_json
from server_process import LABELS, export_tiny

onnx = pytest.importorskip("onnx", reason="onnx is missing: pip install 'cramlm[onnx]'")
pytest.importorskip("onnxruntime", reason="onnxruntime is missing: pip install 'cramlm[onnx]'")

SHAPES = [("bert", "cls"), ("roberta", "cls"), ("albert", "cls"), ("modernbert", "mean"), ("modernbert", "cls")]
HARD = ("[MASK] [SEP] aspirin", "Ọ̀RỌ̀ ilé \u200e kinase", "cell " * 300, "x" * 400)


def examples(texts: list[str]) -> list[Example]:
    return [Example(str(number), text, None, None) for number, text in enumerate(texts)]


@pytest.fixture(scope="module")
def export(
    tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer, texts: list[str], tiny_export: Path, tiny_onnx: Path
) -> Callable[[str, str], Path]:
    """Returns for a shape and a pooling a folder with export/ and its ONNX form in fp32, which no test may change."""

    @functools.cache
    def make(shape: str, pooling: str) -> Path:
        folder = tmp_path_factory.mktemp(f"{shape}-{pooling}")
        if (shape, pooling) == ("modernbert", "mean"):
            shutil.copytree(tiny_export, folder / "export")
            shutil.copytree(tiny_onnx, folder / "export-onnx")
            return folder
        export_onnx(export_tiny(folder / "export", tokenizer, shape=shape, pooling=pooling), texts=examples(texts))
        return folder

    return make


@pytest.fixture(params=SHAPES, ids=str)
def every_shape(request: pytest.FixtureRequest, export: Callable[[str, str], Path]) -> Path:
    return export(*request.param)


@pytest.fixture
def exported(export: Callable[[str, str], Path]) -> Path:
    return export("modernbert", "mean")


def test_onnx_predictions_equal_torch_for_any_length_pair_and_batch(every_shape: Path, texts: list[str]) -> None:
    onnx.checker.check_model(every_shape / "export-onnx/model.onnx", full_check=True)
    ours, theirs = Predictor.load(every_shape / "export"), OnnxPredictor.load(every_shape / "export-onnx", threads=1)
    assert (theirs.labels, theirs.max_length) == (LABELS, 48)
    inputs = [*texts, *HARD]
    np.testing.assert_allclose(theirs.probabilities(inputs), ours.probabilities(inputs), atol=1e-4)
    assert [prediction.label for prediction in theirs.predict(inputs)] == [prediction.label for prediction in ours.predict(inputs)]
    np.testing.assert_allclose(theirs.probabilities(inputs[-1:]), theirs.probabilities(inputs)[-1:], atol=1e-5)
    assert theirs.probabilities([]).shape == (0, 3)
    pairs = [None if number % 5 == 0 else text for number, text in enumerate(reversed(texts))]
    np.testing.assert_allclose(theirs.probabilities(texts, pairs), ours.probabilities(texts, pairs), atol=1e-4)
    streamed = list(theirs.predict_iter(iter(texts), iter(pairs), batch=7))
    assert [prediction.label for prediction in streamed] == [prediction.label for prediction in ours.predict(texts, pairs)]


def test_scores_are_those_of_the_model(exported: Path, texts: list[str]) -> None:
    ours, theirs = Predictor.load(exported / "export"), OnnxPredictor.load(exported / "export-onnx", threads=1)
    labelled = [Example(str(index), text, None, (*LABELS, "unknown")[index % 4]) for index, text in enumerate(texts)]
    expected, scores = ours.score(labelled).as_dict(), theirs.score(labelled).as_dict()
    assert scores.pop("calibration_error") == pytest.approx(expected.pop("calibration_error"), abs=1e-4)
    assert scores == expected
    for predictor in (ours, theirs):
        with pytest.raises(DataError, match=r"file:3: label 'unknown' is none of the model's .*--unseen-labels"):
            predictor.check_labels(labelled, origin="file")
        with pytest.raises(DataError, match="example 0: has no label"):
            predictor.score([Example("0", "a", None, None)])
        with pytest.raises(DataError, match="no examples"):
            predictor.score([])


def test_onnx_json_describes_the_export(exported: Path, texts: list[str]) -> None:
    folder = exported / "export-onnx"
    settings = read_json(folder / "onnx.json")
    assert (settings["labels"], settings["max_length"], settings["weights"]) == (list(LABELS), 48, "fp32")
    assert settings["checked_texts"] == len(texts)
    assert 0 <= settings["largest_difference"] <= 1e-4
    assert {"onnx", "onnxruntime", "torch"} <= set(settings["versions"])
    assert verify(folder) == 1
    assert {path.name for path in folder.iterdir()} == {
        *("model.onnx", "onnx.json", "manifest.json"),
        *("config.json", "tokenizer.json", "tokenizer_config.json"),
    }
    assert isinstance(load_predictor(folder), OnnxPredictor)
    assert isinstance(load_predictor(exported / "export"), Predictor)


ALONE = """
import sys
from cramlm.inference.onnx import OnnxPredictor
print(OnnxPredictor.load(sys.argv[1]).predict(["aspirin reduces pain"])[0].label)
print({"torch", "transformers", "sklearn", "pydantic", "numba", "pyarrow", "scipy", "typer", "rich"} & set(sys.modules))
"""


def test_it_needs_only_onnxruntime_tokenizers_and_numpy(exported: Path) -> None:
    (expected,) = Predictor.load(exported / "export").predict(["aspirin reduces pain"])
    assert python(ALONE, exported / "export-onnx").splitlines() == [expected.label, "set()"]


def test_int8_is_smaller_and_reports_its_agreement(every_shape: Path, texts: list[str]) -> None:
    folder = export_onnx(every_shape / "export", int8=True, texts=examples(texts)).path
    assert folder == every_shape / "export-onnx-int8"
    settings = read_json(folder / "onnx.json")
    int8, ours = OnnxPredictor.load(folder, threads=1), Predictor.load(every_shape / "export")
    agreement = np.mean(int8.probabilities(texts).argmax(1) == ours.probabilities(texts).argmax(1))
    assert settings["weights"] == "int8"
    assert settings["int8"]["label_agreement"] == agreement > 0.8
    assert (folder / "model.onnx").stat().st_size < 0.8 * (every_shape / "export-onnx" / "model.onnx").stat().st_size
    np.testing.assert_array_equal(int8.probabilities(texts[5:6]), int8.probabilities(texts)[5:6])  # whatever the other texts


def test_a_graph_with_other_logits_is_not_published(
    exported: Path, texts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pooling ignores the mask, as a fault in the graph could: only texts of different lengths reveal it."""

    def faulty(model: Model, path: Path) -> None:
        write_graph(model, path)
        graph = onnx.load(path)
        index, cast = next((index, node) for index, node in enumerate(graph.graph.node) if node.op_type == "Cast")
        cast.input[:] = ["everything"]
        graph.graph.node.insert(index, onnx.helper.make_node("Equal", ["attention_mask"] * 2, ["everything"]))
        onnx.save(graph, path)

    monkeypatch.setattr("cramlm.export.onnx.write_graph", faulty)
    with pytest.raises(ArtifactError, match=r"graph's logits differ by .*nothing was published"):
        export_onnx(exported / "export", texts=examples(texts), out=tmp_path / "onnx")
    assert not (tmp_path / "onnx").exists()


def test_an_export_without_model_or_texts_or_over_other_content_is_an_error(exported: Path, texts: list[str], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="pass --texts FILE"):
        export_onnx(exported / "export", texts=[])
    with pytest.raises(ArtifactError, match="holds no exported model"):
        export_onnx(tmp_path)
    (tmp_path / "letter.txt").write_text("dear")
    with pytest.raises(UsageError, match="would be replaced"):
        export_onnx(exported / "export", texts=examples(texts), out=tmp_path)
    assert (tmp_path / "letter.txt").read_text() == "dear"


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("onnx.json", None, "onnx.json: No such file"),
        ("onnx.json", b"{", "onnx.json: damaged"),
        (
            "onnx.json",
            b'{"kind": "classification", "labels": ["a", "a"], "max_length": 48, "pad_id": 0, "weights": "fp32"}',
            "labels, max_length, pad_id or weights",
        ),
        (
            "onnx.json",
            b'{"kind": "classification", "labels": ["a"], "max_length": 48, "pad_id": 0, "weights": "fp32"}',
            "contradict onnx.json",
        ),
        ("tokenizer.json", b"{}", "tokenizer.json: missing, or not a tokenizer"),
        ("model.onnx", b"nothing", "model.onnx: missing, or not a usable ONNX graph"),
        ("model.onnx", b"nothing", r"model.onnx: damaged, 7 bytes instead of \d+; export again"),
    ],
)
def test_a_damaged_folder_is_refused_in_one_line(exported: Path, tmp_path: Path, name: str, content: bytes | None, complaint: str) -> None:
    for path in (exported / "export-onnx").iterdir():
        if path.name != name:
            os.link(path, tmp_path / path.name)
    if "bytes instead" not in complaint:  # the manifest's own check, which would hide the others
        (tmp_path / "manifest.json").unlink()
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ArtifactError, match=complaint):
        OnnxPredictor.load(tmp_path)


@pytest.mark.parametrize("place", ["../weights.bin", "{outside}", "link.bin"])
def test_external_weights_are_not_read(exported: Path, tmp_path: Path, place: str) -> None:
    folder, outside = tmp_path / "model", tmp_path / "weights.bin"
    shutil.copytree(exported / "export-onnx", folder)
    (folder / "manifest.json").unlink()
    from onnx.external_data_helper import set_external_data

    graph = onnx.load(folder / "model.onnx")
    weights = next(each for each in graph.graph.initializer if each.raw_data)
    outside.write_bytes(weights.raw_data)
    (folder / "link.bin").symlink_to(outside)
    set_external_data(weights, place.format(outside=outside))
    weights.ClearField("raw_data")
    (folder / "model.onnx").write_bytes(graph.SerializeToString())
    with pytest.raises(ArtifactError, match=r"model.onnx: missing, or not a usable ONNX graph"):
        OnnxPredictor.load(folder)
