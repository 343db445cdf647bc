"""One path argument means the same for every command: a table of commands and kinds of folders."""

from __future__ import annotations

import copy
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from commands import cramlm, error_line, printed, succeed
from cramlm.errors import UsageError
from cramlm.inference.folders import model_of
from cramlm.inference.predictor import Predictor, load_predictor
from jsonl import write_labelled
from pretrained_folders import write_pretrained
from tiny_task import COMMON, TOPICS

TEXTS = ("the ship near the harbour", "a path to the summit")
CLASSIFIER: Any = {"kind": "ForSequenceClassification", "id2label": {0: "sea", 1: "hill"}, "label2id": {"sea": 0, "hill": 1}}
WORDS = [" ".join([*COMMON, *words]) for words in TOPICS.values()] * 4
ANY_HOST = "203.0.113.1"  # no interface of this machine has it: the server finds its model first, and then ends

COMMANDS: dict[str, Callable[[Path, str, Path], list[str | Path]]] = {
    "predict": lambda model, file, out: ["predict", model, file],
    "evaluate": lambda model, file, out: ["evaluate", model, file, "--unseen-labels", "ignore"],
    "explain": lambda model, file, out: ["explain", model, TEXTS[0]],
    "serve": lambda model, file, out: ["serve", model, "--host", ANY_HOST, "--token", "a-long-token"],
    "label-next": lambda model, file, out: ["label-next", model, file, "-n", "1"],
    "embed": lambda model, file, out: ["embed", model, file, "-o", out / "vectors.npy"],
    "export onnx": lambda model, file, out: ["export", model, "--texts", file, "-o", out / "onnx"],
    "export sentence-transformers": lambda model, file, out: [
        *("export", model, "--texts", file),
        *("--format", "sentence-transformers", "-o", out / "sentences"),
    ],
    "push": lambda model, file, out: ["push", model, "owner/name"],
    "report": lambda model, file, out: ["report", model, "-o", out / "report.html"],
    "track": lambda model, file, out: ["track", model, "tensorboard"],
    "passages": lambda model, file, out: ["passages", model, "-o", out / "passages.jsonl"],
    "attention": lambda model, file, out: ["attention", model, file, "-o", out / "heads"],
}
ON_A_RUN = ("report", "track", "passages")
WITHOUT_RUN = dict.fromkeys(ON_A_RUN, "is a model without its run")
NO_CLASSIFIER = dict.fromkeys([name for name in COMMANDS if name not in (*ON_A_RUN, "attention")], "without a classifier; ")
REFUSED: dict[str, dict[str, str]] = {
    "export": {},  # of a run: test_moved_run.py
    "onnx": {
        "embed": "pass the folder of a run of an encoder",
        "export onnx": "is an ONNX folder already; pass the run of an encoder",
        "export sentence-transformers": "pass the run of an encoder",
        "attention": "pass the run of an encoder",
    },
    "copied model": WITHOUT_RUN,
    "linear run": {
        "export onnx": "use the folder itself",
        "export sentence-transformers": "pass the run of an encoder",
        "attention": "pass the run of an encoder",
    },
    "Hugging Face classifier": {**WITHOUT_RUN, "push": "upload it with: hf upload owner/name "},
    "Hugging Face encoder": {**WITHOUT_RUN, **NO_CLASSIFIER},
    "language model of the run": NO_CLASSIFIER,
    "selection of the run": {name: "pass the run " for name in COMMANDS if name not in ON_A_RUN},
    "unfinished run": {name: "finish it: cramlm fit --config " for name in COMMANDS if name not in ON_A_RUN},
    "folder of runs": dict.fromkeys(COMMANDS, "is a folder of runs; pass one of them, like "),
    "empty folder": dict.fromkeys(COMMANDS, "; pass the "),
    "file": dict.fromkeys(COMMANDS, "is a file; pass a run, or the folder of a model"),
    "nothing": dict.fromkeys(COMMANDS, "no such folder; pass a run, or the folder of a model"),
}


@pytest.fixture(scope="module")
def folders(tiny_run: Path, onnx_form: Path, linear_runs: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("folders")
    run = Path(shutil.copytree(tiny_run / "run", place / "runs" / "mine"))
    (place / "empty").mkdir()
    unfinished = Path(shutil.copytree(run, place / "unfinished"))
    shutil.rmtree(unfinished / "export")
    return {
        "run": run,
        "export": run / "export",
        "onnx": Path(shutil.copytree(onnx_form, run / "onnx")),
        "copied model": Path(shutil.copytree(run / "export", place / "copied" / "model")),
        "linear run": Path(shutil.copytree(linear_runs / "static", place / "runs" / "static")),
        "Hugging Face classifier": write_pretrained(place / "classifier", "bert", WORDS, **CLASSIFIER),
        "Hugging Face encoder": write_pretrained(place / "encoder", "bert", WORDS, kind="Model"),
        "language model of the run": run / "export" / "mlm",
        "selection of the run": run / "selection",
        "unfinished run": unfinished,
        "folder of runs": place / "runs",
        "empty folder": place / "empty",
        "file": tiny_run / "run" / "run.toml",
        "nothing": place / "nothing",
    }


@pytest.mark.parametrize("kind", ["export", "onnx", "linear run", "Hugging Face classifier"])
@pytest.mark.parametrize("part", ["combined", "encoder"])
def test_a_predictor_of_every_kind_can_be_pickled_and_copied(
    kind: str, part: Literal["combined", "encoder"], folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(folders[kind].parent)
    predictor = load_predictor(folders[kind].name, model_part="combined" if kind == "linear run" else part)
    monkeypatch.chdir(tmp_path)
    for again in (pickle.loads(pickle.dumps(predictor)), copy.deepcopy(predictor)):
        assert again.predict(TEXTS) == predictor.predict(TEXTS)
        assert (repr(again.confidence), again.trained_on_pairs) == (repr(predictor.confidence), predictor.trained_on_pairs)


@pytest.mark.parametrize("kind", REFUSED)
def test_every_command_uses_a_folder_or_says_in_one_line_what_to_pass(
    kind: str, folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for package in ("onnx", "onnxruntime", "fastapi", "tensorboard"):
        pytest.importorskip(package)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # nothing listens there
    file = write_labelled(tmp_path / "texts.jsonl", zip(TEXTS, ("sea", "hill"), strict=True))
    for name in COMMANDS:
        out = tmp_path / name.replace(" ", "-")
        out.mkdir()
        result = cramlm(*COMMANDS[name](folders[kind], file, out))
        last = result.stderr.strip().splitlines()[-1:]
        if (refusal := REFUSED[kind].get(name)) is not None:
            assert result.returncode in ((2,) if kind in ("file", "nothing") else (2, 5)), (name, last)
            assert last[0].startswith("cramlm: error: "), (name, last)
            assert refusal in last[0], (name, last)
            assert not any(out.iterdir()), name
        elif name in ("serve", "push"):  # up to the network
            assert result.returncode == 4, (name, last)
            assert ANY_HOST in last[0] or "owner/name" in last[0], (name, last)
        else:
            assert result.returncode == 0, (name, last)


def test_passages_says_whether_a_run_retrieves_none_or_ended_before(copied_run: Path, linear_runs: Path) -> None:
    shutil.rmtree(copied_run / "selection")
    for run, reason in ((copied_run, "finish it: cramlm fit --config "), (linear_runs / "tfidf", "the recipe tfidf retrieves no passages")):
        assert reason in error_line(cramlm("passages", run), 2)


def test_of_a_folder_of_runs_a_finished_one_is_named(tmp_path: Path) -> None:
    for name in ("a-stopped", "b-finished"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        for file in ("run.toml", "events.jsonl"):
            (tmp_path / "runs" / name / file).touch()
    (tmp_path / "runs" / "b-finished" / "export").mkdir()
    for command in (("predict", tmp_path / "runs", "-"), ("report", tmp_path / "runs")):
        line = error_line(cramlm(*command), 5)
        assert line.endswith(f"runs: is a folder of runs; pass one of them, like {tmp_path / 'runs' / 'b-finished'}")


def test_a_model_beside_a_config_file_is_not_in_a_run(tiny_export: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_export, tmp_path / "model")
    (tmp_path / "run.toml").write_text(printed("config"), "utf-8")
    assert "model: is a model without its run" in error_line(cramlm("report", "model", cwd=tmp_path), 5)
    assert not (tmp_path / "report.html").exists()
    assert ".: holds no exported model" in error_line(cramlm("predict", ".", "-", cwd=tmp_path), 5)


def test_the_line_about_an_unfinished_run_is_a_command_that_finishes_it(tiny_run: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(tiny_run / "run", tmp_path / "run"))
    shutil.rmtree(run / "export")
    line = cramlm("predict", run, "-", stdin="a ship\n").stderr.strip()
    command = line.partition("finish it: cramlm ")[2].split()
    succeed(*command, "--store", tiny_run / "store")
    succeed("predict", run, "-", stdin="a ship\n")


def test_the_command_that_finishes_a_run_names_its_folder_if_its_paths_are_relative(tmp_path: Path) -> None:
    for name in ("start", "elsewhere"):
        (tmp_path / name).mkdir()
    rows = "".join(f"word{number % 7} and word{number % 5},{1 + number % 4}\n" for number in range(60))
    (tmp_path / "start/train.csv").write_text(f"text,label\n{rows}", "utf-8")
    succeed("fit", "--train", "train.csv", "--recipe", "tfidf", "-o", "run", cwd=tmp_path / "start")
    shutil.rmtree(tmp_path / "start/run/export")
    line = error_line(cramlm("predict", "../start/run", "-", stdin="a\n", cwd=tmp_path / "elsewhere"), 5)
    command, found, where = line.partition("finish it: cramlm ")[2].partition(" (")
    assert found
    assert where == "in the folder where that run was started: its paths are relative)"
    succeed(*command.split(), cwd=tmp_path / "start")
    succeed("predict", "../start/run", "-", stdin="a\n", cwd=tmp_path / "elsewhere")
    shutil.rmtree(tmp_path / "start/run/export")
    line = error_line(cramlm("predict", "run", "-", stdin="a\n", cwd=tmp_path / "start"), 5)
    assert line.endswith("finish it: cramlm fit --config run/run.toml -o run")


def test_python_takes_a_run_as_the_command_line_does(folders: dict[str, Path]) -> None:
    assert Predictor.load(folders["run"]).predict([*TEXTS]) == Predictor.load(folders["export"]).predict([*TEXTS])
    assert model_of(folders["run"]) == folders["export"]


def test_a_classifier_that_transformers_saved_predicts_as_there_and_refuses_pairs(folders: dict[str, Path]) -> None:
    """Its tokenizer sets no limit and marks the second text of a pair, which cramlm does not."""
    import torch
    import transformers

    folder = folders["Hugging Face classifier"]
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    predictor = Predictor.load(folder)
    with torch.no_grad():
        expected = model(**tokenizer([*TEXTS], return_tensors="pt", padding=True)).logits.softmax(-1).numpy()
    assert np.allclose(predictor.probabilities([*TEXTS]), expected, atol=1e-5)
    for use in (predictor.probabilities, predictor.embeddings):
        with pytest.raises(UsageError, match="token_type_ids"):
            use([TEXTS[0]], [TEXTS[1]])


@pytest.mark.parametrize("labels", [1, 2])
def test_a_classifier_without_names_of_labels_or_problem_type_predicts_as_a_pipeline(labels: int, tmp_path: Path) -> None:
    """transformers writes no names of two labels, and gives a single one a probability of its own."""
    import transformers

    folder = write_pretrained(tmp_path / "model", "bert", WORDS, kind="ForSequenceClassification", num_labels=labels)
    classify = transformers.pipeline("text-classification", model=str(folder), device="cpu")
    found = Predictor.load(folder).predict([*TEXTS])
    expected = [{each["label"]: each["score"] for each in row} for row in classify([*TEXTS], top_k=None)]
    assert [each.probabilities for each in found] == [pytest.approx(row, abs=1e-5) for row in expected]
