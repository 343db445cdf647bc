"""The paper's tables as experiments: every row can be run, and the page shows the results."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from cramlm.experiments.grid import Cell, Grid, cells_of
from jsonl import write_jsonl
from reproduce import page as pages
from reproduce.run import KEPT, keep
from reproduce.tables import FOLDERS, TABLES, TWIN_BUDGET, Table, arm_name, arms_of, command

TABLE_OF = {number: pytest.param(table, id=f"table {number}") for number, table in TABLES.items()}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the structure of ../shared/data and tiny files."""
    folder = tmp_path_factory.mktemp("data")
    (folder / "corpus").mkdir()
    (folder / "corpus" / "general-0001.jsonl.zst").touch()
    for name in FOLDERS.values():
        (folder / "tasks" / name).mkdir(parents=True)
        rows = [{"text": f"text {n}", "label": "ab"[n % 2]} for n in range(20)]
        write_jsonl(folder / "tasks" / name / "train.jsonl", rows)
    return folder


@pytest.mark.parametrize("table", TABLE_OF.values())
@pytest.mark.parametrize("paper", [True, False], ids=["paper", "twin"])
def test_every_row_of_a_table_is_a_different_run(table: Table, paper: bool, data: Path, tmp_path: Path) -> None:
    for task in table.here:
        cells = _cells([table], task, paper=paper, data=data, out=tmp_path / task)
        assert [cell.arm.name for cell in cells] == [arm_name(line, paper=paper) for line in table.lines if line.source != "plm"]
        made = {cell.config.model_copy(update={"name": "same"}).model_dump_json() for cell in cells}
        assert len(made) == len(cells)
        assert all(cell.config.task.train == str(data / "tasks" / FOLDERS[task] / "train.jsonl") for cell in cells)


@pytest.mark.parametrize("task", FOLDERS)
def test_a_row_of_several_tables_is_one_run(task: str, data: Path, tmp_path: Path) -> None:
    cells = _cells(list(TABLES.values()), task, paper=False, data=data, out=tmp_path)
    assert len({cell.arm.folder for cell in cells}) == len(cells)
    lines = [line for table in TABLES.values() if task in table.here for line in table.lines if line.source != "plm"]
    assert {cell.arm.name for cell in cells} == {arm_name(line, paper=False) for line in lines}
    made = {cell.config.model_copy(update={"name": "same"}).model_dump_json() for cell in cells}
    assert len(made) == len(cells) < len(lines)


def _cells(tables: list[Table], task: str, *, paper: bool, data: Path, out: Path) -> list[Cell]:
    arms = arms_of(tables, task, paper=paper, data=data, out=out, init=None)
    files = {"train": str(data / "tasks" / FOLDERS[task] / "train.jsonl")}
    budget = None if paper else TWIN_BUDGET
    return cells_of(Grid(arms, (1,), ("all",), files, corpus=(f"{data}/corpus/*.jsonl.zst",), budget=budget), out)


@pytest.mark.parametrize("table", TABLE_OF.values())
def test_every_row_has_the_papers_figures(table: Table) -> None:
    assert all(set(line.figures) == set(table.tasks) for line in table.lines)
    assert all(command(table, table.here[0], paper=paper).startswith("cramlm ") for paper in (True, False))


def test_the_page_is_up_to_date() -> None:
    if not pages.PAGE.is_file():
        pytest.skip("an installed package: the documents are not beside it")
    assert pages.PAGE.read_text("utf-8") == pages.page(), "python benchmarks/reproduce/page.py"


def test_a_result_replaces_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "RESULTS", tmp_path)
    cells = pages.page().count(pages.NOT_RUN)
    row = dict.fromkeys(KEPT) | {"arm": "tlm, retriever.top_k=500", "is_baseline": False}
    scores = {"dev micro_f1": {"mean": 0.5, "deviation": 0.01, "values": [0.49, 0.51]}}
    keep(tmp_path / "chemprot-twin.json", [row | {"scores": {"dev micro_f1": {"mean": 0.1, "deviation": None, "values": [0.1]}}}])
    keep(tmp_path / "chemprot-twin.json", [row | {"scores": scores}])
    keep(tmp_path / "chemprot-twin.json", [row | {"arm": "tlm, phases[0].external=1", "scores": scores}])
    page = pages.page()
    assert page.count(pages.NOT_RUN) == cells - 2
    assert re.search(r"\| K = 5000 \| top_k=500 \|.*\| 83\.64 / \*\*50\.0\*\* ± 1\.0 \|", page)
    assert re.search(r"\| rho1 = 1 \| external=1 \|.*\| 73\.27 / \*\*50\.0\*\* ± 1\.0 \|", page)
