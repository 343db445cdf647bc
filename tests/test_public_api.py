"""The public names of `cramlm`: which there are, what their parameters are called, and that the documentation needs no others."""

from __future__ import annotations

import importlib.resources
import inspect
import os
import re
import warnings
from pathlib import Path

import pytest

import cramlm
from jsonl import write_labelled

DOCS = Path(__file__).parents[1] / "docs"
PARAMETERS = {
    "fit": ["config", "out", "overwrite", "track", "store", "emit", "process"],
    "compare": ["grid", "out", "store", "jobs", "overwrite", "title", "emit", "stop"],
    "explain": ["predictor", "text", "text_pair", "label", "run", "passages"],
    "Predictor.load": ["folder", "precision", "device", "model_part"],
    "Predictor.predict": ["self", "texts", "pairs"],
    "OnnxPredictor.load": ["folder", "threads"],
    "Index.build": ["source", "out", "workers", "emit", "settings"],
    "Index.search": ["self", "queries", "top_k", "scoring", "threads"],
}


def test_the_public_names_are_these_and_each_can_be_imported() -> None:
    assert cramlm.__all__ == [
        *("CramClassifier", "CramError", "CramRegressor", "Explanation", "Grid", "Hits", "Index", "LabelsPrediction", "NumberPrediction"),
        *("OnnxPredictor", "Prediction", "Predictor", "Run", "RunConfig", "SelectivePrediction", "compare", "explain", "fit", "recipes"),
    ]
    for name in cramlm.__all__:
        assert getattr(cramlm, name) is not None
        assert name in dir(cramlm)
    with pytest.raises(AttributeError, match="has no attribute 'train'; it has CramClassifier"):
        _ = cramlm.train


def test_idle_threads_of_openmp_sleep_soon_unless_the_user_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    assert cramlm.Predictor
    assert os.environ["GOMP_SPINCOUNT"] == "10000"
    monkeypatch.setenv("GOMP_SPINCOUNT", "5")
    assert cramlm.Predictor
    assert os.environ["GOMP_SPINCOUNT"] == "5"


@pytest.mark.parametrize("name", PARAMETERS)
def test_the_parameters_of_a_public_function_keep_their_names(name: str) -> None:
    owner, _, method = name.partition(".")
    member = getattr(cramlm, owner)
    function = getattr(member, method) if method else member
    assert list(inspect.signature(function).parameters) == PARAMETERS[name]


def test_fit_names_what_it_takes_as_a_config() -> None:
    with pytest.raises(cramlm.CramError, match=r"^the config is 'run\.toml', not a RunConfig; make one by a recipe, like cramlm\.recipes"):
        cramlm.fit("run.toml")


def test_paths_in_the_home_folder_are_read_and_written_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "home").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    texts, labels = [f"{'ship' if number % 2 else 'hill'} {number}" for number in range(20)], [number % 2 for number in range(20)]
    write_labelled(tmp_path / "home" / "train.jsonl", zip(texts, labels, strict=True))
    run = cramlm.fit(cramlm.recipes.tfidf(train="~/train.jsonl", budget=None), out="~/run", store="~/store")
    assert cramlm.Predictor.load("~/run").predict(["ship"])[0].label == "1"
    assert run.path == tmp_path / "home" / "run"
    assert len(cramlm.Index.build(texts, "~/index", workers=1)) == len(cramlm.Index.open("~/index")) == 20
    classifier = cramlm.CramClassifier(recipe="tfidf", budget=None, out="~/runs", store="~/store").fit(texts, labels)
    assert classifier.save("~/model") == tmp_path / "home" / "model"
    assert [path.name for path in tmp_path.iterdir()] == ["home"]


def test_the_documentation_imports_public_names_only() -> None:
    pages = [DOCS.parent / "README.md", *(page for page in DOCS.rglob("*.md") if page.name != "log.md")]
    for page in pages:
        for module, names in re.findall(r"^(?:>>> )?from (cramlm[\w.]*) import (.+)$", page.read_text("utf-8"), re.MULTILINE):
            assert module == "cramlm", page
            assert set(names.split(", ")) <= set(cramlm.__all__), page


def test_the_package_has_types() -> None:
    assert importlib.resources.files("cramlm").joinpath("py.typed").is_file()


def test_other_systems_are_refused_or_warned_of_in_one_line() -> None:
    with pytest.raises(ImportError, match=r"^cramlm needs Linux: Windows has neither flock nor resource limits; use WSL or a container$"):
        cramlm.check_system("win32")
    with pytest.warns(UserWarning, match="tested on Linux only"):
        cramlm.check_system("darwin")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cramlm.check_system("linux")
