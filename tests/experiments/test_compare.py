"""Several methods on one task: equal data and budgets, what is shared, what is resumed, and a table that says what came out."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import pytest

from cramlm.config import load_config, to_toml
from cramlm.errors import UsageError
from cramlm.experiments.compare import Experiment, compare
from cramlm.experiments.draws import draw_labels
from cramlm.experiments.grid import Arm, Question, arms_of, arms_over, cells_of, read_counts, read_seeds
from cramlm.experiments.picture import draw
from cramlm.experiments.results import BASELINE, CellResult, pairs_of, rows_of, totals_of
from cramlm.experiments.spending import Spent, read_spent, spending
from cramlm.experiments.tables import markdown
from cramlm.records import Event
from tiny_task import tiny_config, write_task


def write_arms(folder: Path) -> dict[str, str]:
    """The tiny task, and two methods as config files: with raw text, and on labels alone."""
    paths = write_task(folder, documents=60)
    data = tiny_config(paths, baseline={"c": [1.0]}, tokens_per_second=1000.0)
    for phase in data["phases"]:
        phase |= {"steps": 2, "evaluate_every": 2, "checkpoint_every": 2}
    (folder / "raw.toml").write_text(to_toml(load_config(data)), "utf-8")
    alone = data | {"corpus": None, "retriever": None, "phases": data["phases"][1:]}
    (folder / "alone.toml").write_text(to_toml(load_config(alone)), "utf-8")
    return paths


@pytest.mark.slow
def test_arms_run_on_equal_terms_share_what_is_equal_and_are_not_run_again(tmp_path: Path) -> None:
    paths = write_arms(tmp_path / "data")
    arms = (*arms_of([str(tmp_path / "data" / name) for name in ("raw.toml", "alone.toml")]), Arm("bad", str(tmp_path / "data/raw.toml")))
    arms = (*arms[:2], replace(arms[2], settings=("phases[0].optimizer.learning_rate=1e30",)))
    task = {name: paths[name] for name in ("train", "dev", "test")}
    question = Question(arms, seeds=(1, 2), labels=("all",), task=task, corpus=(paths["corpus"],))
    seen: list[Event] = []

    def ask(folder: Path) -> Experiment:
        seen.clear()
        return compare(question, out=folder, store=tmp_path / "store", emit=seen.append)

    found = ask(tmp_path / "out")
    assert [(row.arm, row.seeds) for row in found.rows][:2] == [("raw", (1, 2)), ("alone", (1, 2))]
    assert found.rows[-1].arm == BASELINE
    raw, alone = found.rows[:2]
    assert raw.passages > 0 == alone.passages
    assert raw.executed_flops is not None
    assert raw.paper_flops is not None
    assert raw.scores["test macro_f1"].deviation is not None
    assert found.totals["runs"] == len([result for result in found.results if result.arm != BASELINE])
    assert {("alone", "raw"), (BASELINE, "raw")} <= {(pair.arm, pair.other) for pair in found.pairs}
    runs = tmp_path / "out" / "runs" / "all"
    baselines = [runs / arm / "1" / "baseline" / "baselines.json" for arm in ("raw", "alone")]
    assert baselines[0].samefile(baselines[1])
    assert (runs / "raw/1/tokenizer/tokenizer.json").samefile(runs / "bad/1/tokenizer/tokenizer.json")
    told = json.loads((tmp_path / "out/results.json").read_bytes())
    assert told["rows"][0]["arm"] == "raw"
    assert (tmp_path / "out/table.md").read_text("utf-8") == found.table
    ET.fromstring((tmp_path / "out/scores.svg").read_text("utf-8"))
    question = replace(question, arms=arms[:2])
    again = ask(tmp_path / "out")
    assert not [event for event in seen if event.kind == "start"]
    assert again.rows[:2] == found.rows[:2]


def test_the_values_of_a_setting_are_compared_and_what_is_done_is_not_run_again(tmp_path: Path) -> None:
    paths = write_arms(tmp_path / "data")
    arms = arms_over(str(tmp_path / "data/alone.toml"), ["phases[0].steps=1,2"])
    task = {name: paths[name] for name in ("train", "dev", "test")}
    question = Question(arms, seeds=(1,), labels=("all",), task=task, settings=("baseline.enabled=false",))
    found = compare(question, out=tmp_path / "out", store=tmp_path / "store")
    assert [(row.arm, row.is_baseline) for row in found.rows] == [("phases[0].steps=1", False), ("phases[0].steps=2", False)]
    assert found.pairs[0].seeds == 1
    tokenizers = [cell.folder / "tokenizer/tokenizer.json" for cell in cells_of(question, tmp_path / "out")]
    assert tokenizers[0].samefile(tokenizers[1])
    seen: list[Event] = []
    again = compare(question, out=tmp_path / "out", store=tmp_path / "store", emit=seen.append)
    assert [event.message for event in seen] == ["2 runs, 2 of them done"]
    assert again.rows == found.rows


def test_over_gives_an_arm_for_every_value_and_a_folder_of_its_own() -> None:
    arms = arms_over("tlm", ["select.top_k=0,50", 'corpus.files=["a"],["a","b"]'])
    assert [arm.name for arm in arms][:2] == ['top_k=0, corpus.files=["a"]', 'top_k=0, corpus.files=["a","b"]']
    assert arms[3].settings == ("retriever.top_k=50", 'corpus.files=["a","b"]')
    assert len({arm.folder for arm in arms}) == 4
    for wrong in ("top_k", "top_k=", "top_k=1,,2", "top_k=1,1"):
        with pytest.raises(UsageError, match="KEY=VALUE"):
            arms_over("tlm", [wrong])


def test_no_retrieved_text_at_all_leaves_the_same_phases_on_the_task(tmp_path: Path) -> None:
    paths = write_arms(tmp_path / "data")
    question = Question(arms_over(str(tmp_path / "data/raw.toml"), ["retriever.top_k=0,5"]), (1,), ("all",), {"train": paths["train"]})
    without, five = (cell.config for cell in cells_of(question, tmp_path / "out"))
    assert (without.corpus, without.retriever) == (None, None)
    assert [phase.name for phase in without.phases] == [phase.name for phase in five.phases]
    assert [phase.external for phase in without.phases] == [0, 0]
    assert five.retriever is not None


def test_recipes_are_arms_and_only_those_that_need_a_checkpoint_start_from_it(tmp_path: Path) -> None:
    paths = write_arms(tmp_path / "data")
    question = Question(
        arms_of(["tlm", "labels-only"]), (4,), ("all", "10"), {"train": paths["train"]}, corpus=(paths["corpus"],), budget="2m"
    )
    cells = cells_of(question, tmp_path / "out")
    assert [(cell.arm.name, cell.labels, cell.config.seed, cell.config.budget) for cell in cells] == [
        ("tlm", "all", 4, "2m"),
        ("labels-only", "all", 4, "2m"),
        ("tlm", "10", 4, "2m"),
        ("labels-only", "10", 4, "2m"),
    ]
    assert cells[2].config.task.train == cells[3].config.task.train != paths["train"]
    files = arms_of([str(tmp_path / "data" / name) for name in ("raw.toml", "alone.toml")])
    raw, alone = cells_of(replace(question, arms=files, labels=("all",)), tmp_path / "out")
    assert raw.config.corpus is not None
    assert alone.config.corpus is None, "a config file without raw text stays so"
    with pytest.raises(UsageError, match="--init"):
        cells_of(replace(question, arms=arms_of(["tlm@init"])), tmp_path / "out")
    with pytest.raises(UsageError, match="each once"):
        arms_of(["tlm", "tlm"])


def test_a_draw_of_labels_keeps_proportions_and_holds_the_smaller_ones(tmp_path: Path) -> None:
    rows = [{"text": f"text {n}", "label": "ab"[n % 4 == 0]} for n in range(200)] + [{"text": "only", "label": "rare"}]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    task = {"train": str(tmp_path / "train.jsonl")}

    def drawn(count: int, seed: int) -> list[dict[str, str]]:
        file = draw_labels(task, count=count, seed=seed, folder=tmp_path / "draws")
        return [json.loads(line) for line in file.read_text("utf-8").splitlines()]

    few, more = drawn(20, 1), drawn(80, 1)
    assert {label: sum(row["label"] == label for row in more) for label in ("a", "b", "rare")} == {"a": 60, "b": 20, "rare": 1}
    assert {row["text"] for row in few} <= {row["text"] for row in more}
    assert few == drawn(20, 1) != drawn(20, 2)
    for count in (2, 500):
        with pytest.raises(UsageError, match="between, or all"):
            drawn(count, 1)


def test_seeds_are_a_number_or_a_list() -> None:
    assert (read_seeds("3"), read_seeds("7, 11"), read_seeds("7,")) == ((1, 2, 3), (7, 11), (7,))
    assert read_counts("100,all") == ("100", "all")
    for read, wrong in (
        (read_seeds, "0"),
        (read_seeds, "a"),
        (read_seeds, "1,1"),
        (read_seeds, ","),
        (read_counts, "some"),
        (read_counts, ""),
    ):
        with pytest.raises(UsageError):
            read(wrong)


def result(arm: str, seed: int, answers: str, true: str = "aabb" * 10, labels: str = "all") -> CellResult:
    right = sum(a == b for a, b in zip(answers, true, strict=True)) / len(true)
    scores = {split: dict.fromkeys(("macro_f1", "micro_f1", "accuracy"), right) for split in ("dev", "test")}
    spent = Spent(seconds=60, borrowed_seconds=30, cpu_seconds=45, kwh=0.5)
    flops = {"paper": 1e15, "executed": 2e15}
    return CellResult(arm, labels, seed, scores, spent, flops, 5_000_000, 10, 2e6, tuple(true), tuple(answers))


def test_the_table_has_mean_and_spread_costs_and_paired_tests() -> None:
    results = [result("good", seed, "aabb" * 10) for seed in (1, 2)]
    results += [result("fair", 1, "aabb" * 9 + "bbaa"), result("fair", 2, "aabb" * 10), result("bad", 1, "bbaa" * 10)]
    rows, pairs = rows_of(results), pairs_of(results)
    table = markdown(rows, pairs, totals_of(results), {"ugly, seed 1": "diverged"})
    lines = {line.split(" | ")[0].removeprefix("| "): line for line in table.splitlines() if line.startswith("|")}
    assert "| 2 | 95.0 ± 7.1 | 95.0 ± 7.1 |" in lines["fair"]
    assert "| 1.5 | 0.8 | 1.0e+15 | 2.0e+15 | 10 passages, 2.0M tokens | 5.0M | 0.5000 |" in lines["good"]
    assert "-100.0 (-100.0 to -100.0), p < 0.001" in lines["bad"]
    assert "All 5 runs together" in table
    assert "5.00e+15 FLOPs as the paper counts them, 1.00e+16 executed" in table
    assert "2.500 kWh" in table
    assert "Failed: ugly, seed 1: diverged" in table
    assert {(pair.arm, pair.other, pair.seeds) for pair in pairs} == {("fair", "good", 2), ("bad", "good", 1), ("bad", "fair", 1)}


def test_the_picture_names_every_arm_and_escapes_what_it_is_given() -> None:
    picture = draw(rows_of([result("a < b & c", 1, "aabb" * 10), result(BASELINE, 1, "aaaa" * 10)]), title="<title>")
    root = ET.fromstring(picture)
    words = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"<title>", "a < b & c", BASELINE} <= set(words)
    assert draw([], title="nothing") == ""


def test_what_a_run_spent_adds_up_over_its_starts_and_says_if_one_was_killed(tmp_path: Path) -> None:
    for _ in range(2):
        with spending(tmp_path):
            pass
    told = read_spent(tmp_path)
    assert told is not None
    assert (told.starts, told.whole, told.running) == (2, True, False)
    killed = spending(tmp_path)
    killed.__enter__()
    assert read_spent(tmp_path).running  # type: ignore[union-attr]
    with spending(tmp_path):
        pass
    assert read_spent(tmp_path).whole is False  # type: ignore[union-attr]
