"""The documentation: commands parse, tutorials run on synthetic data, the reference is complete, generated files are up to date."""

from __future__ import annotations

import csv
import importlib.util
import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path, PurePath
from typing import Any

import pytest
import typer
import zstandard

from commands import cramlm, printed
from cramlm.cli.app import app
from cramlm.cli.help import RENAMED_OPTIONS
from cramlm.config.run import RunConfig
from jsonl import read_json, read_jsonl, write_jsonl
from pretrained_folders import write_pretrained
from tiny_task import write_task

DOCS = Path(__file__).parents[1] / "docs"
README = DOCS.parent / "README.md"
TUTORIALS = [*(DOCS / f"guides/{name}.md" for name in ("low-resource", "own-data", "pretraining-study", "tiny-cpu"))]
TUTORIALS += [DOCS / "get-started/quick-start.md"]
NOTEBOOK = DOCS / "notebooks/pandas.ipynb"
GUIDES = [*(DOCS / f"guides/{name}.md" for name in ("budget", "corpus", "experiments", "long-texts", "objectives", "prompts"))]
GUIDES += [*(DOCS / f"guides/{name}.md" for name in ("task-types", "uneven-labels", "unlabelled", "using"))]
GUIDES += [DOCS / "concepts/retrieval.md", DOCS / "concepts/reproducibility.md"]
PLACEHOLDER = re.compile(r"OWNER|INDEX|://|--report-to|^track")  # a name to fill in, another machine, a service
PARTIAL = ("reproduction.md", "log.md")  # their commands leave out the files
PAGES = sorted([README, *(page for page in DOCS.rglob("*.md") if page.name not in PARTIAL)])
BUDGET = "3e10flops"  # in operations, so that the plan does not depend on what else the machine does
ENCODER = {f"encoder.{name}": size for name, size in {"layers": 1, "hidden": 32, "heads": 2, "intermediate": 32}.items()}
SETTINGS = {"threads": 1, "tokenizer.vocab_size": 400, "baseline.c": [3.0], **ENCODER}
STEPS = {"tokens_per_second": 1e6, "phases[0].steps": 2, "phases[1].steps": 2}  # nothing is measured or planned
GOOD_OR_BAD = {"sea": "good", "hill": "bad"}
RELATIONS = ["upregulator", "inhibitor", "part-of"]
PROMPT_WORDS = "good great bad terrible : all in all , it was . chemical raises blocks lowers protein"  # of the guide about prompts
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks(page: Path, *kinds: str) -> list[tuple[str, str]]:
    return [(match[1], match[2]) for match in BLOCK.finditer(page.read_text("utf-8")) if match[1] in kinds]


def commands(page: Path) -> list[list[str]]:
    """Return the arguments of every `cramlm` command in the code blocks of a page."""
    lines = [
        line.strip().removeprefix("$ ") for _, text in blocks(page, "sh", "console", "") for line in text.replace("\\\n", " ").splitlines()
    ]
    found = [line[line.index("cramlm ") :] for line in lines if re.search(r"(^|\| |-m )cramlm ", line) and "..." not in line]
    return [_without_rest(shlex.split(line, comments=True)[1:]) for line in found]


def _without_rest(arguments: list[str]) -> list[str]:
    """Return the arguments before a pipe or a redirection."""
    ends = [arguments.index(sign) for sign in ("|", ">") if sign in arguments]
    return arguments[: min(ends, default=len(arguments))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_command_of_a_page_parses(page: Path) -> None:
    group: Any = typer.main.get_command(app)
    assert commands(page) or page not in TUTORIALS
    for name, *arguments in commands(page):
        assert not {argument.partition("=")[0] for argument in arguments} & set(RENAMED_OPTIONS), "an old spelling of an option"
        if not name.startswith("--"):
            command = group.commands[name]
            command.make_context(name, list(arguments), resilient_parsing=False).close()


def test_the_readme_is_a_front_page() -> None:
    assert len(README.read_text("utf-8").splitlines()) <= 150


def test_no_page_names_a_commit() -> None:
    """The commits that made the figures are in benchmarks/results."""
    for page in PAGES:
        found = re.findall(r"\b(?=[0-9a-f]*[a-f])(?=[0-9a-f]*[0-9])[0-9a-f]{7}\b", page.read_text("utf-8"))
        assert not found, page


def test_the_reference_names_every_command_and_every_setting() -> None:
    pages = runpy.run_path(str(DOCS / "hooks.py"))["pages"]()
    group: Any = typer.main.get_command(app)
    for name, command in group.commands.items():
        assert f"## cramlm {name}\n" in pages["reference/commands.md"]
        for parameter in (each for each in command.params if not each.hidden):
            name_shown = parameter.metavar if parameter.param_type_name == "argument" else parameter.opts[0]
            assert (name_shown or parameter.opts[0]).lower().lstrip("-") in pages["reference/commands.md"].lower()
    for name in RunConfig.model_fields:
        assert f"| `{name}` |" in pages["reference/config.md"]
    assert "## cramlm.CramClassifier" in pages["reference/python.md"]
    assert "recipes.tlm" in pages["reference/python.md"]


def test_the_test_files_that_the_list_of_faults_names_exist() -> None:
    tests = Path(__file__).parent
    named = set(re.findall(r"`([\w/]+\.py)`", (DOCS / "concepts/faults.md").read_text("utf-8")))
    assert named
    assert {name for name in named if not (tests / name).is_file()} == set()


def test_the_figure_of_the_method_is_up_to_date() -> None:
    assert (DOCS / "pictures" / "method.svg").read_text("utf-8") == runpy.run_path(str(DOCS / "pictures" / "method.py"))["draw"]()


def front_page() -> PurePath:
    """Return the page below site/ that `make docs` prints."""
    target = re.search(r"^docs:.*\n((?:\t.*\n)+)", (DOCS.parent / "Makefile").read_text("utf-8"), re.MULTILINE)
    return PurePath(re.search(r"site/(\S+\.html)", target[1])[1])


def test_the_page_that_make_docs_prints_exists_and_is_first_in_the_navigation() -> None:
    source = front_page().with_suffix(".md")
    assert (DOCS / source).is_file()
    nav = (DOCS.parent / "mkdocs.yml").read_text("utf-8").partition("\nnav:\n")[2]
    assert nav.splitlines()[0].endswith(f": {source}")


def prepare(folder: Path) -> None:
    """Write the input files of the tutorials, made from the tiny task."""
    paths = {name: Path(path) for name, path in write_task(folder, train=60, documents=240).items()}
    rows = {name: read_jsonl(path) for name, path in paths.items()}
    for name, split in (("reviews.csv", "train"), ("new.csv", "test")):
        write_csv(folder / name, [{"review": row["text"], "topic": row["label"]} for row in rows[split]])
    for split in ("train", "test"):
        write_csv(folder / f"{split}.tsv", rows[split], "excel-tab")
    (folder / "raw").mkdir()
    (folder / "raw" / "all.txt").write_text("\n\n".join(row["text"] for row in rows["corpus"]), "utf-8")
    (folder / "web.jsonl").write_bytes(paths["corpus"].read_bytes())


def prepare_guides(folder: Path) -> None:
    """Write the input files that the guides name."""
    paths = {name: Path(path) for name, path in write_task(folder, train=60, documents=120).items()}
    rows = {name: read_jsonl(path) for name, path in paths.items()}
    texts = [{"text": row["text"]} for row in rows["corpus"]]
    pairs = [{"premise": row["text"], "hypothesis": row["text"], "label": row["label"]} for row in rows["train"]]
    numbers = [row | {"stars": row["text"].count("e")} for row in rows["test"]]
    for name, table in (("train", rows["train"]), ("dev", rows["dev"]), ("test", numbers), ("ratings", numbers), ("pairs", pairs)):
        write_csv(folder / f"{name}.csv", table)
    write_csv(folder / "reviews.csv", [row | {"label": GOOD_OR_BAD[row["label"]]} for row in rows["train"]])
    write_csv(folder / "new.csv", [row | {"premise": row["text"], "hypothesis": row["text"]} for row in texts[:8]])
    write_jsonl(folder / "topics.jsonl", [row | {"label": [row["label"], "all"]} for row in rows["train"]])
    relations = [
        row | {"text": f"[[ {row['text'][:9]} ]] {row['text']} << the end >>", "label": name}
        for row, name in zip(rows["train"], RELATIONS * 20, strict=True)
    ]
    write_jsonl(folder / "relations.jsonl", relations)
    (folder / "mine.toml").write_text(
        printed("config", "--recipe", "labels-only", "--train", folder / "train.csv", "--preset", "tiny"), "utf-8"
    )
    (folder / "text").mkdir()
    write_jsonl(folder / "text" / "words.jsonl", [{"text": f"{row['text']} {PROMPT_WORDS}"} for row in texts])
    for name in ("new", "more", "unlabelled"):
        write_jsonl(folder / f"{name}.jsonl", texts[:80])
    for name in ("corpus", "raw"):
        (folder / name).mkdir()
        (folder / name / "web.jsonl.zst").write_bytes(zstandard.compress(paths["corpus"].read_bytes()))
    shutil.copy(paths["corpus"], folder / "corpus" / "web.jsonl")
    write_jsonl(paths["corpus"], [row | {"_id": f"d{number}"} for number, row in enumerate(rows["corpus"])])
    write_jsonl(folder / "queries.jsonl", [{"_id": f"q{number}", "text": row["text"]} for number, row in enumerate(rows["test"])])
    (folder / "qrels.tsv").write_text("query-id\tcorpus-id\tscore\nq0\td0\t1\n", "utf-8")


def write_checkpoint(folder: Path) -> None:
    """Write a small folder of pretrained weights whose vocabulary has the words of the guide about prompts."""
    write_pretrained(folder, "bert", [row["text"] for row in read_jsonl(folder.parent / "text" / "words.jsonl")])


def write_csv(path: Path, rows: list[dict[str, Any]], dialect: str = "excel") -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), dialect=dialect)
        writer.writeheader()
        writer.writerows(rows)


def shortened(arguments: list[str]) -> list[str]:
    """Return the arguments of a command, for one that trains with a budget for tiny data, of an experiment fewer runs."""
    if arguments[0] not in ("fit", "compare", "ablate"):
        return arguments
    settings = SETTINGS | STEPS
    if "--base-model" in arguments:  # whose weights have a size and a vocabulary
        settings = {name: value for name, value in settings.items() if name not in {*ENCODER, "tokenizer.vocab_size"}}
    if "--base-model" in arguments or arguments[0] == "compare":  # some recipes have one phase
        del settings["phases[1].steps"]
    quick = small(settings)
    if arguments[0] != "fit":
        quick += " --seeds 1"
    typed = re.sub(r"--(budget \d+m|seeds \d|jobs \d)", "", shlex.join(arguments))
    typed = re.sub(r"--labels [\w,]+", "--labels 20", typed)
    typed = re.sub(r"(--over \S+=[\d.]+,[\d.]+)[\d.,]*", r"\1", typed)  # two values of a setting
    return shlex.split(f"{typed} {quick}")


def small(settings: Mapping[str, Any]) -> str:
    """Return the options of a command that trains with a budget for tiny data and these settings."""
    return shlex.join(["--budget", BUDGET, *(part for assignment in assignments(settings) for part in ("--set", assignment))])


def assignments(settings: Mapping[str, Any]) -> list[str]:
    return [f"{name}={value}" for name, value in settings.items()]


def run_block(kind: str, text: str, folder: Path) -> None:
    """Run the code of a page in a folder with the tutorials' data, with a budget and an encoder for tiny data and a store of its own."""
    script = re.sub(r"^(cramlm (?:fit|compare) .*?) --budget \d+m(.*)", rf"\1\2 {small(SETTINGS)}", text, flags=re.MULTILINE)
    command = ["bash", "-euo", "pipefail", "-c", script] if kind == "sh" else [sys.executable, "-c", script]
    own = {"CRAMLM_STORE": str(folder / "store"), "HF_HUB_OFFLINE": "1"}
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, **own, "PATH": path}
    result = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=3600)
    assert result.returncode == 0, f"{script}\n{result.stdout}\n{result.stderr}"


def test_the_python_code_of_the_page_on_retrieval_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code = [text for _, text in blocks(DOCS / "concepts/retrieval.md", "python")]
    assert code
    for text in code:
        exec(text, {})


def run_line(line: str, folder: Path) -> None:
    """Run a line of a shell block: in this process if it is one `cramlm` command, with the settings of `shortened`."""
    if line.startswith("cramlm ") and not {"|", ">"} & set(line):
        arguments = shlex.split(line, comments=True)[1:]
        result = cramlm(*shortened(arguments), cwd=folder, environment={"CRAMLM_STORE": str(folder / "store")})
        assert result.returncode == 0, f"{line}\n{result.stderr}"
    else:
        run_block("sh", line, folder)


@pytest.mark.slow
@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_the_code_of_a_tutorial_runs(page: Path, tmp_path: Path) -> None:
    prepare(tmp_path)
    code = blocks(page, "sh", "python")
    assert code
    for kind, text in code:
        if kind == "sh":
            for line in text.replace("\\\n", " ").splitlines():
                run_line(line, tmp_path)
        else:
            run_block(kind, text, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.stem)
def test_the_commands_of_a_guide_run(page: Path, tiny_run: Path, tmp_path: Path) -> None:
    prepare_guides(tmp_path)
    shutil.copytree(tiny_run / "run", tmp_path / "runs" / "mine")
    if "CHECKPOINT" in page.read_text("utf-8"):
        write_checkpoint(tmp_path / "CHECKPOINT")
    typed = [arguments for arguments in commands(page) if not PLACEHOLDER.search(" ".join(arguments))]
    assert typed
    for arguments in typed:
        result = cramlm(*shortened(arguments), cwd=tmp_path, environment={"CRAMLM_STORE": str(tmp_path / "store")})
        found_problems = arguments[0] == "check" and result.returncode == 3  # the texts of the task are made from few words
        assert result.returncode == 0 or found_problems, f"{arguments}\n{result.stderr}"


@pytest.mark.slow
def test_the_adapters_of_the_guide_about_prompts_are_merged_into_a_model_that_predicts(tiny_run: Path, tmp_path: Path) -> None:
    if importlib.util.find_spec("peft") is None:
        pytest.skip("no peft: pip install 'cramlm[docs]'")
    prepare_guides(tmp_path)
    shutil.copytree(tiny_run / "run", tmp_path / "runs" / "mine")
    code = blocks(DOCS / "guides/prompts.md", "python")
    assert code
    for kind, text in code:
        run_block(kind, text, tmp_path)
    assert printed("predict", "tuned", "new.csv", cwd=tmp_path).count("\n") == 8


@pytest.mark.slow
def test_the_code_of_the_readme_and_of_the_guide_runs(tmp_path: Path) -> None:
    prepare(tmp_path)
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "web.jsonl.zst").write_bytes(zstandard.compress((tmp_path / "web.jsonl").read_bytes()))
    data = "from pathlib import Path\nfrom cramlm.data.sample import write_sample\nwrite_sample(Path('data'))\n"
    data += "import json\nrows = [json.loads(line) for line in open('train.jsonl')]\n"
    data += "texts, labels = ([row[name] for row in rows] for name in ('text', 'label'))\n"
    data += "from cramlm.config.run import apply_overrides, load_config\n"
    data += f"small = lambda config: load_config(apply_overrides(config.model_dump(mode='json'), {assignments(SETTINGS | STEPS)}))\n"
    parts = ["".join(text for _, text in blocks(page, "python")) for page in (README, DOCS / "guides/using.md")]
    script = data + "import shutil\nshutil.copytree('runs/python', 'runs/mine')\n".join(parts)  # the guide's run is the README's
    script = re.sub(r'budget="\d+m"\)\n', f'budget="{BUDGET}")\nconfig = small(config)\n', script, count=1)
    script = re.sub(r'budget="\d+m"', f'budget="{BUDGET}", settings={SETTINGS | STEPS}', script)
    export = "from cramlm.cli.app import app\napp(['export', 'runs/mine', '--format', 'onnx'], standalone_mode=False)\n"
    script = script.replace("from cramlm import OnnxPredictor", export + "from cramlm import OnnxPredictor", 1)
    for _, text in blocks(README, "sh"):
        run_block("sh", text, tmp_path)
    run_block("python", script, tmp_path)


@pytest.mark.slow
def test_the_notebook_runs(tmp_path: Path) -> None:
    notebook = tmp_path / "notebook.ipynb"
    quick = json.dumps(f'budget="{BUDGET}", settings={SETTINGS | STEPS}')[1:-1]
    text, count = re.subn(r'budget=\\"1m\\"', lambda _: quick, NOTEBOOK.read_text("utf-8"))
    assert count == 1
    notebook.write_text(text, "utf-8")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "CRAMLM_STORE": str(tmp_path / "store"), "PATH": path, "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, DOCS / "run_notebook.py", notebook, tmp_path]
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=3600)
    assert result.returncode == 0, result.stderr
    assert outputs(notebook) == outputs(NOTEBOOK), "run docs/run_notebook.py, which stores the outputs"


def outputs(notebook: Path) -> list[list[str]]:
    """Return the kinds of output of each cell of code: stream, execute_result, display_data."""
    cells = read_json(notebook)["cells"]
    return [[output["output_type"] for output in cell["outputs"]] for cell in cells if cell["cell_type"] == "code"]


@pytest.fixture(scope="session")
def site(once: Callable[[str, Callable[[Path], object]], Path]) -> Path:
    """The documentation site, built without warnings."""
    pytest.importorskip("material", reason="no mkdocs-material: pip install 'cramlm[docs]'")

    def build(folder: Path) -> None:
        command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
        result = subprocess.run(command, cwd=DOCS.parent, capture_output=True, text=True, timeout=600)
        assert result.returncode == 0, result.stderr

    return once("documentation", build)


@pytest.mark.slow
def test_the_site_holds_the_generated_pages_and_loads_nothing_from_elsewhere(site: Path) -> None:
    assert (site / front_page()).is_file()
    assert "passage_words" in (site / "reference" / "config" / "index.html").read_text("utf-8")
    assert "data:image/png" in (site / "notebooks" / "pandas" / "index.html").read_text("utf-8")
    for file in site.rglob("*.html"):
        assert not re.search(r'(src|href)="https?://[^"]*\.(js|css|woff2?)"', file.read_text("utf-8")), "nothing is fetched from elsewhere"


@pytest.mark.slow
def test_no_page_of_the_site_scrolls_horizontally(site: Path, browser: Any) -> None:
    pages = sorted(site.rglob("index.html"))
    assert len(pages) > 40
    context = browser.new_context()
    tab = context.new_page()
    for page in pages:
        tab.goto(page.as_uri())
        for width in (400, 1300):
            tab.set_viewport_size({"width": width, "height": 900})
            shown, content = tab.evaluate("[innerWidth, document.documentElement.scrollWidth]")
            assert content <= shown == width, page.relative_to(site)
    context.close()


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_is_available_for_common_shells(shell: str) -> None:
    environment = {**os.environ, "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}  # read while the command line is built
    command = [sys.executable, "-m", "cramlm", "--show-completion", shell]
    assert "complet" in subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
