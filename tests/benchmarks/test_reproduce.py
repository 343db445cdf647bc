"""The paper's tables as experiments: every row is one that can be run, and the page shows what was."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from cramlm.experiments.grid import Question, cells_of
from reproduce import page as pages
from reproduce.tables import FOLDERS, TABLES, TWIN_SCALE, Table, arms_of_table, command

TABLE_OF = {number: pytest.param(table, id=f"table {number}") for number, table in TABLES.items()}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as ../shared/data, with next to nothing in it."""
    folder = tmp_path_factory.mktemp("data")
    (folder / "corpus").mkdir()
    (folder / "corpus" / "general-0000.jsonl.zst").touch()
    for name in FOLDERS.values():
        (folder / "tasks" / name).mkdir(parents=True)
        rows = [{"text": f"text {n}", "label": "ab"[n % 2]} for n in range(20)]
        (folder / "tasks" / name / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return folder


@pytest.mark.parametrize("table", TABLE_OF.values())
@pytest.mark.parametrize("twin", [None, TWIN_SCALE], ids=["paper", "twin"])
def test_every_row_is_a_run_of_its_own(table: Table, twin: float | None, data: Path, tmp_path: Path) -> None:
    for task in table.here:
        arms = arms_of_table(table, task, twin=twin, data=data, out=tmp_path, init=None)
        files = {"train": str(data / "tasks" / FOLDERS[task] / "train.jsonl")}
        question = Question(arms, (1,), ("all",), files, corpus=(f"{data}/corpus/*.jsonl.zst",))
        cells = cells_of(question, tmp_path / task)
        assert [cell.arm.name for cell in cells] == [line.name for line in table.lines if line.source != "plm"]
        made = {cell.config.model_copy(update={"name": "same"}).model_dump_json() for cell in cells}
        assert len(made) == len(cells)
        assert all(cell.config.task.train == files["train"] for cell in cells)


@pytest.mark.parametrize("table", TABLE_OF.values())
def test_every_row_has_a_figure_of_the_paper_for_every_task(table: Table) -> None:
    assert all(set(line.figures) == set(table.tasks) for line in table.lines)
    assert command(table, table.here[0], twin=None).startswith("cramlm ")


def test_the_page_is_that_of_the_results_in_the_repository() -> None:
    if not pages.PAGE.is_file():
        pytest.skip("an installed package: the documents are not beside it")
    assert pages.PAGE.read_text("utf-8") == pages.page(), "python benchmarks/reproduce/page.py"


def test_a_result_takes_the_place_of_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "RESULTS", tmp_path)
    cells = pages.page().count(pages.NOT_RUN)
    score = {"mean": 0.5, "deviation": 0.01, "values": [0.49, 0.51]}
    rows = [{"arm": "K = 500", "scores": {"dev micro_f1": score, "dev macro_f1": score}}]
    (tmp_path / "table-4-chemprot.json").write_text(json.dumps({"scale": 0.05, "rows": rows}), "utf-8")
    told = pages.page()
    assert told.count(pages.NOT_RUN) == cells - 1
    assert re.search(r"\| K = 500 \|.*\| 81\.44 / \*\*50\.0\*\* ± 1\.0 \|", told)
    assert "Scale of the twins: 0.05." in told
