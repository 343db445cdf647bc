"""A newcomer's path, from a wheel in an environment of its own: fit an own csv, report, predict, ONNX, serve; the README; the demo.

Slow, and it installs packages (`make newcomer`); the folder of the sources is out of reach for everything that runs in that environment.
"""

from __future__ import annotations

import csv
import json
import os
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from jsonl import read_jsonl
from server_process import PATIENCE
from tiny_task import write_task

ROOT = Path(__file__).parents[1]
SMALL = ("--budget", "1e12flops", "--preset", "tiny")  # in operations, so that the plan does not depend on what else the machine does

pytestmark = pytest.mark.slow


class Place:
    """A folder with an environment in it that holds cramlm's wheel and what it requires."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.python = folder / "venv" / "bin" / "python"

    def run(self, *command: str | Path, code: int = 0, stdin: str | None = None, seconds: float = 3600) -> str:
        kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
        environment = {**kept, "CRAMLM_STORE": str(self.folder / "store"), "HF_HUB_OFFLINE": "1"}
        result = subprocess.run(
            [*map(str, command)], cwd=self.folder, env=environment, capture_output=True, text=True, input=stdin, timeout=seconds
        )
        assert result.returncode == code, f"{command}\n{result.stdout[-3000:]}\n{result.stderr[-3000:]}"
        return result.stdout

    def cramlm(self, *arguments: str | Path, stdin: str | None = None) -> str:
        return self.run(self.folder / "venv" / "bin" / "cramlm", *arguments, stdin=stdin)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(ROOT)]
    subprocess.run(command, check=True, timeout=600)
    return next(folder.glob("*.whl"))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, wheel: Path) -> Place:
    place = Place(tmp_path_factory.mktemp("newcomer"))
    subprocess.run([sys.executable, "-m", "venv", str(place.folder / "venv")], check=True, timeout=300)
    install = ("-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-c", ROOT / "constraints.txt")
    place.run(place.python, *install, f"{wheel}[serve,onnx]", seconds=3000)
    return place


@pytest.fixture(scope="module")
def fitted(place: Place) -> Path:
    """The run of `cramlm fit` over a csv with columns of its own."""
    paths = write_task(place.folder / "own", train=60)
    rows = read_jsonl(paths["train"])
    with (place.folder / "mine.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["review", "topic"])
        writer.writerows([row["text"], row["label"]] for row in rows)
    columns = ("--text-column", "review", "--label-column", "topic")
    printed = place.cramlm("fit", "--train", "mine.csv", *columns, "--corpus", paths["corpus"], "--out", "run", *SMALL)
    assert "tfidf" in printed
    return place.folder / "run"


def test_the_wheel_contains_every_data_file(wheel: Path) -> None:
    inside = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("cramlm/")}
    source = {
        path.relative_to(ROOT / "src").as_posix()
        for path in (ROOT / "src" / "cramlm").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert inside == source
    reporting = {f"cramlm/reporting/{name}" for name in ("report.css", "report.js", "plot.css", "templates/run.html.jinja")}
    assert {*reporting, "cramlm/export/templates/model_card.md.jinja", "cramlm/serving/page.html"} <= inside


def test_the_wheel_gives_a_report_predictions_and_an_explanation_without_the_sources(place: Place, fitted: Path) -> None:
    assert place.run(place.python, "-c", "import cramlm; print(cramlm.__file__)").startswith(str(place.folder))
    assert "torch" in place.cramlm("doctor")
    assert (fitted / "report.html").read_text("utf-8").startswith("<!doctype html>")
    predictions = place.cramlm("predict", "run/export", "-", stdin="wave ship harbour sailor tide\nsummit ridge valley climber\n")
    assert [json.loads(line)["label"] for line in predictions.splitlines()] == ["sea", "hill"]
    assert json.loads(place.cramlm("explain", "run", "wave ship harbour", "--json"))
    assert "verified" in place.cramlm("verify", "run")


def test_an_onnx_folder_gives_the_models_predictions(place: Place, fitted: Path) -> None:
    place.cramlm("export", "run")
    texts = "wave ship harbour sailor tide\nsummit ridge valley climber\n"
    ours, theirs = (
        [json.loads(line)["probabilities"] for line in place.cramlm("predict", model, "-", stdin=texts).splitlines()]
        for model in ("run/export", "run/onnx")
    )
    for one, other in zip(ours, theirs, strict=True):
        assert one == pytest.approx(other, abs=1e-4)


@pytest.fixture
def server(place: Place, fitted: Path) -> Iterator[str]:
    command = [place.folder / "venv" / "bin" / "cramlm", "serve", fitted / "export", "--port", "0"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=place.folder)
    try:
        found = None
        while found is None:
            line = process.stderr.readline()
            assert line, "the server ended"
            found = re.search(r"http://127\.0\.0\.1:\d+", line)
        yield found[0]
    finally:
        process.terminate()
        assert process.wait(PATIENCE) == 0
        process.stderr.close()


def test_the_model_is_served_with_its_page(server: str) -> None:
    body = json.dumps({"texts": ["wave ship harbour sailor tide"]}).encode()
    hung = time.monotonic() + PATIENCE
    while not is_ready(server):
        assert time.monotonic() < hung, "the model was not loaded"
        time.sleep(0.2)
    request = urllib.request.Request(f"{server}/v1/predict", data=body, headers={"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=PATIENCE) as response:
        assert "sea" in response.read().decode()
    with urllib.request.urlopen(server, timeout=PATIENCE) as response:
        assert b"<html" in response.read()


def is_ready(server: str) -> bool:
    try:
        with urllib.request.urlopen(f"{server}/readyz", timeout=PATIENCE):
            return True
    except urllib.error.HTTPError:  # while the model is loading
        return False


def test_the_readme_runs_from_top_to_bottom_as_it_stands(place: Place) -> None:
    readme = (ROOT / "README.md").read_text("utf-8")
    typed = re.findall(r"^```(sh|python)\n(.*?)^```", readme, re.MULTILINE | re.DOTALL)
    assert [kind for kind, _ in typed] == ["sh", "python", "python"]
    for kind, text in typed:
        if kind == "sh":
            place.run("bash", "-euo", "pipefail", "-c", f"PATH={place.python.parent}:$PATH\n{text}")
        else:
            place.run(place.python, "-c", text)
    assert (place.folder / "predictions.jsonl").read_text("utf-8").count("\n") == 400


def test_the_demo_runs_with_the_wheel(place: Place) -> None:
    place.run(place.python, ROOT / "demo" / "build_task.py", "--out", place.folder / "demo")
    printed = place.run(place.python, ROOT / "demo" / "run.py", "--data", "demo", "--out", "demo-run", "--budget", "3e12flops")
    assert "Which library does a passage describe?" in printed
