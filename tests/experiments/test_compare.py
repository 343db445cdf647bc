"""Experiments: arms on equal data and budgets, shared stages, resuming, and the table of results."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import shutil
import signal
import xml.etree.ElementTree as ET
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cramlm.config.run import load_config, to_toml
from cramlm.errors import DataError, DivergedError, EnvironmentFault, Stopped, UsageError
from cramlm.experiments.compare import compare
from cramlm.experiments.grid import Arm, Grid, arms_of, arms_over, cells_of, check_arms, default_folder, read_counts, read_seeds, subsample
from cramlm.experiments.results import CellResult, Usage, markdown, measure_usage, pairs_of, read_usage, rows_of, scores_plot, totals_of
from cramlm.io.machine import available_cores
from cramlm.recipes.recipe import PRESETS
from cramlm.records import Event
from cramlm.storage.artifacts import open_artifact, publish
from jsonl import read_json, read_jsonl, write_jsonl
from pretrained_folders import write_pretrained
from tiny_task import tiny_config, write_task


def write_arms(folder: Path) -> dict[str, str]:
    """Write the tiny task and two config files: raw.toml (with raw text) and alone.toml (labels only); the files of its splits."""
    paths = write_task(folder, documents=60)
    data = tiny_config(paths, baseline={"c": [1.0]}, tokens_per_second=1000.0)
    for phase in data["phases"]:
        phase |= {"steps": 2, "evaluate_every": 2, "checkpoint_every": 2}
    (folder / "raw.toml").write_text(to_toml(load_config(data)), "utf-8")
    alone = data | {"corpus": None, "retriever": None, "phases": data["phases"][1:]}
    (folder / "alone.toml").write_text(to_toml(load_config(alone)), "utf-8")
    return {name: paths[name] for name in ("train", "dev", "test")}


def arms_in(folder: Path, *names: str) -> tuple[Arm, ...]:
    return arms_of([str(folder / f"{name}.toml") for name in names])


def test_values_of_a_setting_are_compared_and_finished_runs_are_not_repeated_after_a_move(tmp_path: Path) -> None:
    task = write_arms(tmp_path / "data")
    arms = arms_over(str(tmp_path / "data/alone.toml"), ["phases[0].steps=1,2"])
    grid = Grid(arms, seeds=(1,), labels=("10",), task=task, settings=("baseline.enabled=false",))
    found = compare(grid, out=tmp_path / "out", store=tmp_path / "store")
    assert [(row.arm, row.is_baseline) for row in found.rows] == [("phases[0].steps=1", False), ("phases[0].steps=2", False)]
    assert found.pairs[0].seeds == 1
    tokens = [cell.folder / "tokens/task-ids.npy" for cell in cells_of(grid, tmp_path / "out")]
    assert tokens[0].samefile(tokens[1])
    (tmp_path / "out").rename(tmp_path / "elsewhere")
    seen: list[Event] = []
    again = compare(grid, out=tmp_path / "elsewhere", store=tmp_path / "store", emit=seen.append)
    assert [event.message for event in seen if event.kind == "note"] == ["2 runs, 2 finished"]
    assert again.rows == found.rows, "also with the usage of the runs that were moved"


def test_the_index_is_built_before_the_first_run_also_without_diacritics(tmp_path: Path) -> None:
    task = write_arms(tmp_path / "data")
    grid = Grid(arms_in(tmp_path / "data", "raw"), (1,), ("all",), task, settings=("diacritics=remove", "baseline.enabled=false"))
    seen: list[Event] = []
    compare(grid, out=tmp_path / "out", store=tmp_path / "store", emit=seen.append)
    begun = next(number for number, event in enumerate(seen) if event.message.startswith("run 1 of 1"))
    built = [number < begun for number, event in enumerate(seen) if (event.stage, event.kind) == ("index", "start")]
    assert built == [True]


def alone_grid(folder: Path, *settings: str) -> Grid:
    """Return a grid with one labels-only run on the tiny task in `folder`."""
    return Grid(arms_in(folder, "alone"), (1,), ("all",), write_arms(folder), settings=("baseline.enabled=false", *settings))


def stop_at(step: int, seen: list[Event]) -> Callable[[], int | None]:
    """Return a `stop` that returns 75 after the event of this training step."""
    return lambda: 75 if any(event.kind == "step" and event.data["step"] >= step for event in seen) else None


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with data/, store/ and out/, a finished experiment of one run."""
    folder = tmp_path_factory.mktemp("finished")
    compare(alone_grid(folder / "data"), out=folder / "out", store=folder / "store")
    return folder


@pytest.fixture
def copied(finished: Path, tmp_path: Path) -> Path:
    """A copy of `finished` in another folder."""
    return Path(shutil.copytree(finished, tmp_path / "copied"))


def test_results_of_other_settings_are_not_reported_after_an_interrupted_run(copied: Path) -> None:
    few = alone_grid(copied / "data")
    longer = replace(few, settings=(*few.settings, "phases[0].steps=24", "phases[0].evaluate_every=12"))
    out, store, seen = copied / "out", copied / "store", list[Event]()
    before = compare(few, out=out, store=store, emit=seen.append)
    assert [event.message for event in seen if event.kind == "note"] == ["1 run, 1 finished"], "also in another folder"
    with pytest.raises(Stopped):
        compare(longer, out=out, store=store, emit=seen.append, stop=stop_at(5, seen))
    run = out / "runs/all/alone/1"
    assert [path.name for path in run.glob("*/") if path.name in ("evaluation", "export")], "the old results still exist"
    assert read_json(out / "results.json")["grid"]["settings"] == list(few.settings)
    seen.clear()
    after = compare(longer, out=out, store=store, emit=seen.append)
    assert "1 run, 0 finished" in [event.message for event in seen]
    flops = [experiment.results[0].flops["executed"] for experiment in (before, after)]
    assert flops[1] > 10 * flops[0]
    results = read_json(out / "results.json")
    assert (results["grid"]["settings"], results["cells"][0]["flops"]["executed"]) == (list(longer.settings), flops[1])


def test_runs_in_parallel_stop_at_a_signal(tmp_path: Path) -> None:
    task = write_task(tmp_path / "data", documents=0)
    grid = Grid(arms_of(["tfidf"]), (1, 2), ("all",), {"train": task["train"]})
    with pytest.raises(Stopped):
        compare(grid, out=tmp_path / "out", store=tmp_path / "store", jobs=2, stop=lambda: 75)
    assert not list(tmp_path.glob("out/runs/*/*/*/export"))


@pytest.mark.faults
def test_a_run_whose_process_is_killed_is_listed_and_the_others_go_on(tmp_path: Path) -> None:
    task = write_task(tmp_path / "data", documents=0)
    grid = Grid(arms_of(["tfidf"]), (1, 2, 3), ("all",), {"train": task["train"]})
    killed = list[int]()

    def kill_one() -> None:
        if not killed:
            killed.append(multiprocessing.active_children()[0].pid or 0)
            os.kill(killed[0], signal.SIGKILL)

    found = compare(grid, out=tmp_path / "out", store=tmp_path / "store", jobs=2, stop=kill_one)
    assert len(found.rows[0].seeds) == 2
    ((_, message),) = found.failed.items()
    assert re.match(
        rf"{tmp_path}/out/runs/all/tfidf/[123]: a worker process was ended by signal 9, possibly out of memory; run the", message
    )
    assert found.exit_code == EnvironmentFault.exit_code
    alone = replace(grid, settings=(f"threads={max(1, available_cores() // 2)}",))
    seen: list[Event] = []
    assert not compare(alone, out=tmp_path / "out", store=tmp_path / "store", emit=seen.append).failed
    assert "3 runs, 2 finished" in {event.message for event in seen}


@pytest.mark.parametrize("change", ["training texts", "code", "damage"])
def test_a_finished_run_of_other_texts_or_code_runs_again_and_the_reason_is_printed(copied: Path, change: str) -> None:
    grid, out = alone_grid(copied / "data"), copied / "out"
    if change == "training texts":
        out = copied / "other"
        compare(grid, out=out, store=copied / "store")
        with Path(str(grid.task["train"])).open("a", encoding="utf-8") as file:
            file.write(json.dumps({"text": "wave ship harbour", "label": "sea"}) + "\n")
    run = out / "runs/all/alone/1"
    if change == "code":  # as written by an earlier version
        before = open_artifact(run / "evaluation", kind="evaluation")
        scores = (run / "evaluation/scores.json").read_bytes()
        old = {**before.key, "format": -1}
        publish(run / "evaluation", kind="evaluation", key=old, write=lambda folder: (folder / "scores.json").write_bytes(scores))
    elif change == "damage":
        (run / "evaluation/scores.json").write_text("{}", "utf-8")
    seen: list[Event] = []
    again = compare(grid, out=out, store=copied / "store", emit=seen.append)
    reason = {"training texts": "task: rows", "code": "evaluation: format -1 -> ", "damage": "scores.json: damaged"}[change]
    assert any(event.message.startswith("alone, seed 1: runs again, because ") and reason in event.message for event in seen)
    if change == "damage":
        assert "scores.json: damaged" in again.failed["alone, seed 1"]
        assert not again.results
    else:
        assert not again.failed
        assert (run / "evaluation/predictions-test.jsonl").is_file()
        usage = again.results[0].usage
        assert usage.starts == {"training texts": 1, "code": 2}[change], "the cost of weights that were replaced does not count"


def test_a_run_on_a_subsample_runs_again_after_a_change_of_the_training_file_and_not_on_another_file(tmp_path: Path) -> None:
    task = write_task(tmp_path / "sea", documents=0)
    with pytest.raises(UsageError, match="with all labels no training row is left"):
        Grid(arms_of(["tfidf"]), (1,), ("all",), {"train": task["train"]}, rest_unlabelled=True)
    grid = Grid(arms_of(["tfidf"]), (1,), ("10",), {"train": task["train"]}, rest_unlabelled=True)
    out, store, seen = tmp_path / "out", tmp_path / "store", list[Event]()
    compare(grid, out=out, store=store)
    train = Path(task["train"])
    train.write_text(train.read_text("utf-8").replace(" the ", " another "), "utf-8")
    again = compare(grid, out=out, store=store, emit=seen.append)
    assert not again.failed
    assert any(event.message == "tfidf, 10 labels, seed 1: runs again, because task: task.train changed" for event in seen)
    assert " another " in (out / "runs/10/tfidf/1/task/train.jsonl").read_text("utf-8")
    other = replace(grid, task={"train": write_task(tmp_path / "hill", documents=0)["train"]})
    with pytest.raises(UsageError, match=r"runs/10/tfidf/1: holds a run on other training texts .*--overwrite"):
        compare(other, out=out, store=store)


def test_the_plot_of_an_earlier_call_is_removed_if_all_runs_fail(copied: Path) -> None:
    grid = alone_grid(copied / "data", "phases[0].optimizer.learning_rate=1e30")
    assert (copied / "out/scores.svg").is_file()
    assert compare(grid, out=copied / "out", store=copied / "store").failed
    assert not (copied / "out/scores.svg").exists()


def test_a_folder_with_an_experiment_on_another_task_is_refused_before_any_run(copied: Path) -> None:
    table = (copied / "out/table.md").read_bytes()
    other = alone_grid(copied / "other")
    train = Path(str(other.task["train"]))
    train.write_text(train.read_text("utf-8").replace(" the ", " another "), "utf-8")
    with pytest.raises(UsageError, match=r"runs/all/alone/1: holds a run on other training texts .*--overwrite"):
        compare(other, out=copied / "out", store=copied / "store")
    assert (copied / "out/table.md").read_bytes() == table
    with pytest.raises(UsageError, match=r"other: holds other files \(.*\) and no experiment of cramlm; pass a new"):
        compare(other, out=copied / "other", store=copied / "store", overwrite=True)
    replaced = compare(other, out=copied / "out", store=copied / "store", overwrite=True)
    assert not replaced.failed
    assert replaced.grid.task == other.task


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"labels": ("1",)}, "expected a number from 4 to 40, or all"),
        ({"settings": ("nonsense=1",)}, "nonsense is no setting"),
        ({"arms": (*arms_of(["tfidf"]), Arm("numbers", "tfidf", ("task.kind=regression",))), "settings": ()}, r"several kinds \("),
    ],
)
def test_an_experiment_that_is_refused_leaves_no_folder(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        compare(replace(alone_grid(tmp_path), **changes), out=tmp_path / "out", store=tmp_path / "store")
    assert not (tmp_path / "out").exists()


def test_over_makes_an_arm_with_its_own_folder_for_every_combination() -> None:
    arms = arms_over("tlm", ["select.top_k=0,50", 'corpus.files=["a"],["a","b"]'])
    assert [arm.name for arm in arms][:2] == ['top_k=0, corpus.files=["a"]', 'top_k=0, corpus.files=["a","b"]']
    assert arms[3].settings == ("retriever.top_k=50", 'corpus.files=["a","b"]')
    assert len({arm.folder for arm in arms}) == 4
    assert default_folder("data/reviews/train.jsonl", "compare") == Path("runs/reviews-compare")
    for wrong in ("top_k", "top_k=", "top_k=1,,2"):
        with pytest.raises(UsageError, match="KEY=VALUE"):
            arms_over("tlm", [wrong])
    with pytest.raises(UsageError, match="the value 1 is listed twice"):
        arms_over("tlm", ["top_k=1,2,1"])


def test_top_k_zero_keeps_the_phases_on_task_text(tmp_path: Path) -> None:
    task = write_arms(tmp_path / "data")
    grid = Grid(arms_over(str(tmp_path / "data/raw.toml"), ["retriever.top_k=0,5"]), (1,), ("all",), task)
    without, five = (cell.config for cell in cells_of(grid, tmp_path / "out"))
    assert (without.corpus, without.retriever) == (None, None)
    assert [phase.name for phase in without.phases] == [phase.name for phase in five.phases]
    assert [phase.external for phase in without.phases] == [0, 0]
    assert five.retriever is not None


def test_a_model_of_raw_text_is_not_compared_without_its_corpus(tmp_path: Path) -> None:
    paths = write_task(tmp_path / "data")
    for recipe in ("static", "bayes"):
        arms = arms_over(recipe, ["retriever.top_k=5,0"])
        with pytest.raises(UsageError, match="leave out the value 0, or compare with the recipe tfidf") as caught:
            check_arms(Grid(arms, (1,), ("all",), {"train": paths["train"]}, corpus=(paths["corpus"],)))
        assert "--corpus" not in str(caught.value)


def test_recipes_are_arms_and_only_those_that_need_a_checkpoint_start_from_it(tmp_path: Path) -> None:
    task, corpus = write_arms(tmp_path / "data"), (str(tmp_path / "data/corpus.jsonl"),)
    grid = Grid(arms_of(["tlm", "labels-only"]), (4,), ("all", "10"), task, corpus=corpus, budget="2m")
    cells = cells_of(grid, tmp_path / "out")
    expected = [(arm, labels, 4, "2m") for labels in ("all", "10") for arm in ("tlm", "labels-only")]
    assert [(cell.arm.name, cell.labels, cell.config.seed, cell.config.budget) for cell in cells] == expected
    assert cells[2].config.task.train == cells[3].config.task.train != task["train"]
    raw, alone = cells_of(replace(grid, arms=arms_in(tmp_path / "data", "raw", "alone"), labels=("all",)), tmp_path / "out")
    assert raw.config.corpus is not None
    assert alone.config.corpus is None, "a config file without raw text stays so"
    with pytest.raises(UsageError, match="--base-model"):
        cells_of(replace(grid, arms=arms_of(["tlm@init"])), tmp_path / "out")
    with pytest.raises(UsageError, match="different names"):
        arms_of(["tlm", "tlm"])
    (tmp_path / "data/raw.toml").rename(tmp_path / "data/static.toml")
    with pytest.raises(UsageError, match="'static' is reserved for a linear model"):
        cells_of(replace(grid, arms=arms_in(tmp_path / "data", "static")), tmp_path / "out")


def test_recipes_that_start_from_a_checkpoint_get_it_and_others_do_not(tmp_path: Path) -> None:
    task = write_task(tmp_path / "data", documents=60)
    corpus = (task.pop("corpus"),)
    checkpoint = write_pretrained(tmp_path / "checkpoint", "bert", [row["text"] for row in read_jsonl(Path(task["train"]))])
    names = ["plm", "tapt", "dapt", "tlm", "tlm@init"]
    grid = Grid(arms_of(names), (1,), ("all",), task, corpus, init=str(checkpoint))
    starts = {cell.arm.name: cell.config.init for cell in cells_of(grid, tmp_path / "out")}
    assert starts == {name: None if name == "tlm" else str(checkpoint) for name in names}
    sizes = {cell.arm.name: cell.config.encoder for cell in cells_of(replace(grid, preset="tiny"), tmp_path / "out")}
    assert {name for name in names if sizes[name] == PRESETS["tiny"]} == {"tlm"}, "weights have a size of their own"
    with pytest.raises(UsageError, match=r"no arm starts from --base-model .*checkpoint; name one that does, like tlm@init"):
        check_arms(replace(grid, arms=arms_of(["tlm", "labels-only"])))
    with pytest.raises(UsageError, match="--preset tiny: every arm starts from weights that have a size"):
        check_arms(replace(grid, arms=arms_of(["plm", "tlm@init"]), preset="tiny"))


@pytest.mark.parametrize(
    ("replaces", "message"),
    [
        ({"arms": arms_over("tfidf", ["seed=1,2"])}, r"seed=1: every arm runs with the seeds of --seeds"),
        ({"settings": ("seed = 5",)}, r"seed = 5: every arm runs with the seeds of --seeds"),
        ({"settings": ("task.train=other.csv",)}, r"task.train=other.csv: every arm trains on rows of --train"),
    ],
)
def test_a_setting_that_gives_every_seed_the_same_run_or_replaces_the_sampled_texts_is_refused(
    replaces: dict[str, Any], message: str, tmp_path: Path
) -> None:
    grid = Grid(arms_of(["tfidf"]), (1, 2), ("all",), write_arms(tmp_path / "data"))
    with pytest.raises(UsageError, match=message):
        check_arms(replace(grid, **replaces))


@pytest.mark.parametrize("over", ["retriever.top_k=5,50,05", "retriever.k1=.9,0.9,1", 'phases[0].name="a",a'])
def test_arms_with_equal_settings_are_refused(over: str, tmp_path: Path) -> None:
    task = write_arms(tmp_path / "data")
    grid = Grid(arms_over(str(tmp_path / "data/raw.toml"), [over]), (1,), ("all",), task)
    with pytest.raises(UsageError, match=r"the arms '.*' and '.*' have equal settings"):
        check_arms(grid)


def test_an_arm_without_retrieval_has_no_unlabelled_texts_either(tmp_path: Path) -> None:
    task = write_task(tmp_path / "data", documents=60)
    corpus = (task.pop("corpus"),)
    arms = arms_over("tlm", ["retriever.top_k=0,20"])
    grid = Grid(arms, (1,), ("20",), task, corpus, rest_unlabelled=True)
    without, with_text = cells_of(grid, tmp_path / "out")
    assert (without.config.corpus, without.config.task.unlabelled) == (None, ())
    assert len(with_text.config.task.unlabelled) == 1


def test_a_subsample_is_stratified_and_contains_smaller_subsamples(tmp_path: Path) -> None:
    rows = [{"text": f"text {n}", "label": "ab"[n % 4 == 0]} for n in range(200)] + [{"text": "only", "label": "rare"}]
    write_jsonl(tmp_path / "train.jsonl", rows)
    task = {"train": str(tmp_path / "train.jsonl")}

    def sample(count: int, seed: int) -> list[dict[str, str]]:
        sampled, rest = subsample(task, count=count, seed=seed, folder=tmp_path / "subsamples")
        chosen, others = (read_jsonl(file) for file in (sampled, rest))
        assert sorted(row["text"] for row in [*chosen, *others]) == sorted(row["text"] for row in rows)
        assert all("label" not in row for row in others)
        return chosen

    few, more = sample(20, 1), sample(80, 1)
    assert {label: sum(row["label"] == label for row in more) for label in ("a", "b", "rare")} == {"a": 60, "b": 20, "rare": 1}
    assert {row["text"] for row in few} <= {row["text"] for row in more}
    assert few == sample(20, 1) != sample(20, 2)
    for count in (5, 500):
        with pytest.raises(UsageError, match="expected a number from 6 to 201, or all"):
            sample(count, 1)


def test_a_subsample_is_read_with_the_task_settings_of_each_arm(tmp_path: Path) -> None:
    rows = [{"body": f"text {n}", "title": f"title {n}", "topic": "ab"[n % 2]} for n in range(20)]
    task = {split: str(write_jsonl(tmp_path / f"{split}.jsonl", rows)) for split in ("train", "dev")}
    columns = ("task.text_column=body", "task.label_column=topic")
    arms = (*arms_of(["tfidf"]), Arm("titles", "tfidf", ("task.text_column=title",)))
    body, title = cells_of(Grid(arms, (1,), ("8",), task, settings=columns), tmp_path / "out")
    for cell, column in ((body, "body"), (title, "title")):
        sampled = read_jsonl(Path(cell.config.task.train))
        assert [row.keys() for row in sampled] == [{column, "topic"}] * 8
    by_flags, _ = subsample({**task, "text_column": "body", "label_column": "topic"}, count=8, seed=1, folder=tmp_path / "out/subsamples")
    assert str(by_flags) == body.config.task.train, "the columns of options and of settings give one file"
    write_jsonl(tmp_path / "train.jsonl", [rows[0] | {"body": "long " * 1000}, *rows[1:]])
    with pytest.raises(DataError, match=r"longer than 2,000 bytes \(max_record_bytes\)"):
        cells_of(Grid(arms[:1], (1,), ("8",), task, settings=(*columns, "task.max_record_bytes=2000")), tmp_path / "out")


def test_seeds_are_a_number_or_a_list() -> None:
    assert (read_seeds("3"), read_seeds("7, 11"), read_seeds("7,")) == ((1, 2, 3), (7, 11), (7,))
    assert (read_seeds("0,"), read_seeds("0,1")) == ((0,), (0, 1)), "0 is a seed, not a number of seeds"
    assert read_counts("100,all") == ("100", "all")
    for read, wrong in ((read_seeds, ("0", "00", "a", "1,1", "1,01", ",")), (read_counts, ("some", "", "10,010"))):
        for text in wrong:
            with pytest.raises(UsageError):
                read(text)


def result(arm: str, seed: int, predictions: str, true: str = "aabb" * 10, labels: str = "all") -> CellResult:
    right = sum(a == b for a, b in zip(predictions, true, strict=True)) / len(true)
    scores = {split: dict.fromkeys(("macro_f1", "micro_f1", "accuracy"), right) for split in ("dev", "test")}
    usage = Usage(seconds=60, borrowed_seconds=30, cpu_seconds=45, kwh=0.5)
    flops = {"paper": 1e15, "executed": 2e15}
    return CellResult(arm, labels, seed, scores, usage, flops, 5_000_000, 10, 2e6, tuple(true), tuple(predictions))


def linear(name: str, seed: int, predictions: str) -> CellResult:
    return replace(result(name, seed, predictions), usage=Usage(seconds=6), flops={}, parameters=None, passages=0, tokens=0.0)


def test_linear_models_are_the_last_rows_with_the_time_of_their_fit() -> None:
    results = [result("tlm", 1, "aabb" * 10), linear("tfidf", 1, "aabb" * 9 + "bbaa"), linear("static", 1, "aabb" * 10)]
    rows = rows_of([*results, result("labels-only", 1, "abab" * 10)])
    assert [(row.arm, row.is_baseline) for row in rows] == [("tlm", False), ("labels-only", False), ("static", True), ("tfidf", True)]
    assert (rows[3].minutes, rows[3].cpu_minutes, rows[3].executed_flops) == (0.1, None, None)
    table = markdown(rows, pairs_of(results), totals_of(results), {})
    assert "| tfidf | 1 | 90.0 | 90.0 | -10.0" in table
    assert "Their settings are chosen on dev" in table
    assert "1 run in all, the cost of choosing among them: 1.0 minutes, 0.8 CPU minutes" in table
    for unknown in (None, replace(results[0].usage, complete=False)):
        others = [*results, replace(result("labels-only", 1, "abab" * 10), usage=unknown)]
        assert "2 runs in all, the cost of choosing among them: ≥ " in markdown(rows_of(others), [], totals_of(others), {})
    assert "tfidf" not in markdown(rows_of(results[:1]), [], totals_of(results[:1]), {})


def test_the_table_and_the_paired_tests_include_all_linear_models_and_arms_that_did_not_fail(tmp_path: Path) -> None:
    task, corpus = write_arms(tmp_path / "data"), (str(tmp_path / "data/corpus.jsonl"),)
    diverges = Arm("bad", str(tmp_path / "data/raw.toml"), settings=("phases[0].optimizer.learning_rate=1e30",))
    grid = Grid((*arms_in(tmp_path / "data", "alone", "raw"), diverges), (1,), ("all",), task, corpus)
    found = compare(grid, out=tmp_path / "out", store=tmp_path / "store")
    assert list(found.failed) == ["bad, seed 1"]
    assert found.exit_code == DivergedError.exit_code
    assert [(row.arm, row.is_baseline) for row in found.rows] == [
        *((arm, False) for arm in ("alone", "alone combined", "raw", "raw combined")),
        *((arm, True) for arm in ("static", "bayes", "tfidf")),
    ]
    assert all(row.scores.keys() == found.rows[0].scores.keys() for row in found.rows)
    assert found.rows[2].passages > 0 == found.rows[0].passages
    assert found.rows[2].paper_flops > found.rows[0].paper_flops > 0
    runs = tmp_path / "out/runs/all"
    for file in ("baseline/linear.safetensors", "static/linear.safetensors", "embedding/embedding.npy", "tokens/task-ids.npy"):
        assert (runs / "raw/1" / file).samefile(runs / "bad/1" / file), "arms with equal settings share it"
    assert read_json(tmp_path / "out/results.json")["rows"][0]["arm"] == "alone"
    assert (tmp_path / "out/table.md").read_text("utf-8") == found.table
    ET.fromstring((tmp_path / "out/scores.svg").read_text("utf-8"))
    others = {frozenset((pair.arm, pair.other)) - {"raw"} for pair in found.pairs if "raw" in (pair.arm, pair.other)}
    assert others == {frozenset([arm]) for arm in ("alone", "alone combined", "raw combined", "static", "bayes", "tfidf")}


def test_a_linear_recipe_that_is_an_arm_has_one_row(tmp_path: Path) -> None:
    task, corpus = write_arms(tmp_path / "data"), (str(tmp_path / "data/corpus.jsonl"),)
    grid = Grid(arms_of(["static", "tfidf"]), (1,), ("all",), task, corpus, settings=("baseline.c=[1.0]",))
    found = compare(grid, out=tmp_path / "out", store=tmp_path / "store")
    assert [(row.arm, row.is_baseline) for row in found.rows] == [("static", False), ("tfidf", False), ("bayes", True)]
    assert "FLOPs" not in found.table.rpartition("in all, the cost")[2], "no FLOPs were counted"
    header, _, *rows = ([cell.strip() for cell in line.split("|")] for line in found.table.splitlines() if line.startswith("|"))
    for row in rows[:2]:
        cells = dict(zip(header, row, strict=True))
        assert cells["FLOPs executed"] == ""
        assert cells["parameters"].endswith("k")
    pairs = {frozenset((pair.arm, pair.other)) for pair in found.pairs}
    assert pairs == {frozenset(each) for each in (("tfidf", "static"), ("bayes", "static"), ("bayes", "tfidf"))}
    alone = replace(grid, arms=arms_of(["static"]))
    again = compare(alone, out=tmp_path / "out", store=tmp_path / "store")
    assert [(row.arm, row.is_baseline) for row in again.rows] == [("static", False), ("bayes", True), ("tfidf", True)]


def test_the_table_shows_mean_deviation_costs_and_paired_tests() -> None:
    results = [result("good", seed, "aabb" * 10) for seed in (1, 2)]
    results += [result("fair", 1, "aabb" * 9 + "bbaa"), result("fair", 2, "aabb" * 10), result("bad", 1, "bbaa" * 10)]
    rows, pairs = rows_of(results), pairs_of(results)
    table = markdown(rows, pairs, totals_of(results), {"ugly, seed 1": "diverged"})
    lines = {line.split(" | ")[0].removeprefix("| "): line for line in table.splitlines() if line.startswith("|")}
    assert "| 2 | 95.0 ± 7.1 | 95.0 ± 7.1 |" in lines["fair"]
    assert "| 1.5 | 0.8 | 1.0e+15 | 2.0e+15 | 10 passages, 2.0M tokens | 5.0M | 0.5000 |" in lines["good"]
    assert "-100.0 (-100.0 to -100.0), p < 0.001" in lines["bad"]
    assert "5 runs in all, the cost" in table
    assert "5.00e+15 FLOPs by the paper's formula, 1.00e+16 executed" in table
    assert "2.500 kWh" in table
    assert "Failed: ugly, seed 1: diverged" in table
    assert {(pair.arm, pair.other, pair.seeds) for pair in pairs} == {("fair", "good", 2), ("bad", "good", 1), ("bad", "fair", 1)}


def test_a_value_with_a_bar_stays_in_its_cell() -> None:
    results = [result('head.prompt.patterns=["{mask} | {text}"]', 1, "aabb" * 10)]
    assert '| head.prompt.patterns=["{mask} \\| {text}"] | 1 |' in markdown(rows_of(results), [], totals_of(results), {})


def test_the_plot_names_every_arm_and_escapes_text() -> None:
    plot = scores_plot(rows_of([result("a < b & c", 1, "aabb" * 10), linear("tfidf", 1, "aaaa" * 10)]), title="<title>")
    root = ET.fromstring(plot)
    words = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"<title>", "a < b & c", "tfidf"} <= set(words)
    assert scores_plot([], title="nothing") == ""


def test_usage_is_kept_if_all_files_are_moved_together(tmp_path: Path) -> None:
    paths = write_task(tmp_path / "data", documents=60)
    config = tiny_config(paths)
    config["task"]["unlabelled"] = [str(write_jsonl(tmp_path / "data/rest.jsonl", [{"text": "a gull"}]))]
    with measure_usage(tmp_path, load_config(config)):
        pass
    elsewhere = json.loads(json.dumps(config).replace(str(tmp_path / "data"), str(tmp_path / "moved")))
    assert read_usage(tmp_path, load_config(elsewhere)) == read_usage(tmp_path, load_config(config)) is not None


def test_usage_is_summed_over_starts_and_incomplete_after_a_killed_start(tmp_path: Path) -> None:
    config = load_config(tiny_config({name: f"{name}.jsonl" for name in ("train", "dev", "test", "corpus")}))
    for _ in range(2):
        with measure_usage(tmp_path, config):
            pass
    usage = read_usage(tmp_path, config)
    assert (usage.starts, usage.complete, usage.running) == (2, True, False)
    killed = measure_usage(tmp_path, config)
    killed.__enter__()
    assert read_usage(tmp_path, config).running
    with measure_usage(tmp_path, config):
        pass
    assert read_usage(tmp_path, config).complete is False


def test_usage_is_recorded_per_settings_and_does_not_depend_on_file_locations(tmp_path: Path) -> None:
    data = tiny_config({name: f"here/{name}.jsonl" for name in ("train", "dev", "test", "corpus")})
    moved = tiny_config({name: f"there/{name}.jsonl" for name in ("train", "dev", "test", "corpus")})
    one, other = load_config(data), load_config(data | {"seed": 4})
    with measure_usage(tmp_path, one):
        pass
    publish(tmp_path / "baseline", kind="baseline", key={}, write=lambda folder: None)
    with measure_usage(tmp_path, other):
        pass
    assert read_usage(tmp_path, load_config(moved)) == read_usage(tmp_path, one)
    assert read_usage(tmp_path, one).complete
    assert not read_usage(tmp_path, other).complete  # it has a stage of the other settings
    assert read_usage(tmp_path, load_config(data | {"seed": 5})) is None
