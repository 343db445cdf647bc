"""Several methods on one task: equal data and budgets, what is shared, what is resumed, and a table that says what came out."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from cramlm.config.run import load_config, to_toml
from cramlm.errors import Stopped, UsageError
from cramlm.experiments.compare import Experiment, compare
from cramlm.experiments.grid import Arm, Question, arms_of, arms_over, cells_of, default_folder, draw_labels, read_counts, read_seeds
from cramlm.experiments.results import CellResult, Spent, draw, markdown, pairs_of, read_spent, rows_of, spending, totals_of
from cramlm.records import Event
from cramlm.reporting.page import report_page
from cramlm.storage.artifacts import open_artifact, publish
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
    assert [(row.arm, row.seeds, row.is_baseline) for row in found.rows[-2:]] == [("static", (1, 2), True), ("tfidf", (1, 2), True)]
    raw, alone = found.rows[:2]
    assert raw.passages > 0 == alone.passages
    assert raw.executed_flops is not None
    assert raw.paper_flops is not None
    assert raw.scores["test macro_f1"].deviation is not None
    assert found.totals["runs"] == len([result for result in found.results if not result.is_baseline])
    assert {("alone", "raw"), ("tfidf", "raw"), ("static", "raw"), ("tfidf", "static")} <= {(pair.arm, pair.other) for pair in found.pairs}
    runs = tmp_path / "out" / "runs" / "all"
    baselines = [runs / arm / "1" / "baseline" / "linear.json" for arm in ("raw", "alone")]
    assert baselines[0].samefile(baselines[1])
    for file in ("static/linear.json", "embedding/embedding.npy"):
        assert (runs / "raw/1" / file).samefile(runs / "bad/1" / file), "arms with equal settings share it"
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
    assert [event.message for event in seen if event.kind != "progress"] == ["2 runs, 2 of them done"]
    assert again.rows == found.rows


def alone_question(folder: Path, *settings: str) -> Question:
    """One run on labels alone over the tiny task in `folder`, the same every time."""
    paths = write_arms(folder)
    task = {name: paths[name] for name in ("train", "dev", "test")}
    return Question(arms_of([str(folder / "alone.toml")]), (1,), ("all",), task, settings=("baseline.enabled=false", *settings))


def stops_at(step: int, seen: list[Event]) -> Callable[[], int | None]:
    """A `stop` that asks for the end once the events hold a logged step of training from this one on."""
    return lambda: 75 if any(event.kind == "step" and event.data["step"] >= step for event in seen) else None


def test_a_finished_run_asked_with_other_settings_and_stopped_is_not_reported_with_its_old_scores(tmp_path: Path) -> None:
    few = alone_question(tmp_path / "data")
    longer = replace(few, settings=(*few.settings, "phases[0].steps=40", "phases[0].evaluate_every=10"))
    out, store, seen = tmp_path / "out", tmp_path / "store", list[Event]()
    before = compare(few, out=out, store=store)
    with pytest.raises(Stopped):
        compare(longer, out=out, store=store, emit=seen.append, stop=stops_at(5, seen))
    run = out / "runs/all/alone/1"
    assert [path.name for path in run.glob("*/") if path.name in ("evaluation", "export")], "the old results are still there"
    page = report_page(run)
    assert "This run is not finished" in page
    assert "The model is not evaluated yet" in page
    assert "Of earlier settings, and therefore not shown: phase-1-finetune, logit-adjustment, evaluation, export." in page
    assert json.loads((out / "results.json").read_bytes())["question"]["settings"] == list(few.settings)
    seen.clear()
    after = compare(longer, out=out, store=store, emit=seen.append)
    assert "1 runs, 0 of them done" in [event.message for event in seen]
    flops = [found.results[0].flops["executed"] for found in (before, after)]
    assert flops[1] > 10 * flops[0]
    told = json.loads((out / "results.json").read_bytes())
    assert (told["question"]["settings"], told["cells"][0]["flops"]["executed"]) == (list(longer.settings), flops[1])
    assert "This run is not finished" not in report_page(run)


@pytest.mark.parametrize("change", ["training texts", "code", "damage"])
def test_a_finished_run_of_other_texts_or_of_other_code_is_run_again_and_the_reason_is_told(tmp_path: Path, change: str) -> None:
    question = alone_question(tmp_path / "data")
    compare(question, out=tmp_path / "out", store=tmp_path / "store")
    run = tmp_path / "out/runs/all/alone/1"
    if change == "training texts":
        with Path(str(question.task["train"])).open("a", encoding="utf-8") as file:
            file.write(json.dumps({"text": "wave ship harbour", "label": "sea"}) + "\n")
    elif change == "code":  # as if an earlier version had written it
        before = open_artifact(run / "evaluation", kind="evaluation")
        scores = (run / "evaluation/scores.json").read_bytes()
        old = {**before.key, "format": -1}
        publish(run / "evaluation", kind="evaluation", key=old, write=lambda folder: void((folder / "scores.json").write_bytes(scores)))
    else:
        (run / "evaluation/scores.json").write_text("{}", "utf-8")
    seen: list[Event] = []
    again = compare(question, out=tmp_path / "out", store=tmp_path / "store", emit=seen.append)
    reason = {"training texts": "task: rows", "code": "evaluation: format -1 -> ", "damage": "scores.json: damaged"}[change]
    assert any(event.message.startswith("alone, seed 1 runs again: ") and reason in event.message for event in seen)
    if change == "damage":
        assert "scores.json: damaged" in again.failed["alone, seed 1"]
        assert not again.results
    else:
        assert not again.failed
        assert (run / "evaluation/predictions-test.jsonl").is_file()


def void(value: object) -> None:
    """Forget a value, so that a call can stand in a lambda that returns nothing."""


def test_an_experiment_that_was_moved_is_still_done_and_keeps_its_costs(tmp_path: Path) -> None:
    question = replace(alone_question(tmp_path / "data"), labels=("10",))
    found = compare(question, out=tmp_path / "out", store=tmp_path / "store")
    (tmp_path / "out").rename(tmp_path / "elsewhere")
    seen: list[Event] = []
    again = compare(question, out=tmp_path / "elsewhere", store=tmp_path / "store", emit=seen.append)
    assert [event.message for event in seen if event.kind == "note"] == ["1 runs, 1 of them done"]
    assert again.rows == found.rows


def test_a_folder_that_holds_an_experiment_on_another_task_is_refused_before_anything_is_run(tmp_path: Path) -> None:
    question = alone_question(tmp_path / "data")
    compare(question, out=tmp_path / "out", store=tmp_path / "store")
    table = (tmp_path / "out/table.md").read_bytes()
    other = alone_question(tmp_path / "other")
    train = Path(str(other.task["train"]))
    train.write_text(train.read_text("utf-8").replace(" the ", " another "), "utf-8")
    with pytest.raises(UsageError, match=r"runs/all/alone/1: holds a run on other training texts .*--overwrite"):
        compare(other, out=tmp_path / "out", store=tmp_path / "store")
    assert (tmp_path / "out/table.md").read_bytes() == table
    replaced = compare(other, out=tmp_path / "out", store=tmp_path / "store", overwrite=True)
    assert not replaced.failed
    assert replaced.question.task == other.task


def test_the_default_folder_of_an_experiment_is_named_after_the_task() -> None:
    assert default_folder("data/reviews/train.jsonl", "compare") == Path("runs/reviews-compare")
    assert default_folder("news.csv", "ablate") == Path("runs/news-ablate")


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


def linear(name: str, seed: int, answers: str) -> CellResult:
    return replace(result(name, seed, answers), spent=Spent(seconds=6), flops={}, parameters=None, passages=0, tokens=0.0)


def test_linear_models_stand_below_the_arms_and_cost_what_their_fit_took() -> None:
    results = [result("tlm", 1, "aabb" * 10), linear("tfidf", 1, "aabb" * 9 + "bbaa"), linear("static", 1, "aabb" * 10)]
    rows = rows_of([*results, result("labels-only", 1, "abab" * 10)])
    assert [(row.arm, row.is_baseline) for row in rows] == [("tlm", False), ("labels-only", False), ("static", True), ("tfidf", True)]
    assert (rows[3].minutes, rows[3].cpu_minutes, rows[3].executed_flops) == (0.1, None, None)
    table = markdown(rows, pairs_of(results), totals_of(results), {})
    assert "| tfidf | 1 | 90.0 | 90.0 | -10.0" in table
    assert "dev chooses their settings" in table
    assert "All 1 runs together" in table
    assert "tfidf" not in markdown(rows_of(results[:1]), [], totals_of(results[:1]), {})


def test_every_table_has_both_linear_models_in_rows_and_paired_tests(tmp_path: Path) -> None:
    paths = write_arms(tmp_path / "data")
    task = {name: paths[name] for name in ("train", "dev", "test")}
    arms = arms_of([str(tmp_path / "data" / name) for name in ("alone.toml", "raw.toml")])
    found = compare(Question(arms, (1,), ("all",), task, (paths["corpus"],)), out=tmp_path / "out", store=tmp_path / "store")
    assert [(row.arm, row.is_baseline) for row in found.rows] == [("alone", False), ("raw", False), ("static", True), ("tfidf", True)]
    assert found.rows[2].scores.keys() == found.rows[0].scores.keys()
    assert {(pair.arm, pair.other) for pair in found.pairs if "raw" in (pair.arm, pair.other)} == {
        ("raw", "alone"),
        ("raw", "tfidf"),
        ("static", "raw"),
    }


def test_a_linear_recipe_that_is_an_arm_has_one_row(tmp_path: Path) -> None:
    paths = write_arms(tmp_path / "data")
    task = {name: paths[name] for name in ("train", "dev", "test")}
    question = Question(arms_of(["static", "tfidf"]), (1,), ("all",), task, (paths["corpus"],), settings=("baseline.c=[1.0]",))
    found = compare(question, out=tmp_path / "out", store=tmp_path / "store")
    assert [(row.arm, row.is_baseline) for row in found.rows] == [("static", False), ("tfidf", False)]
    assert [(pair.arm, pair.other) for pair in found.pairs] == [("tfidf", "static")]
    alone = replace(question, arms=arms_of(["static"]))
    again = compare(alone, out=tmp_path / "out", store=tmp_path / "store")
    assert [(row.arm, row.is_baseline) for row in again.rows] == [("static", False), ("tfidf", True)]


def test_an_encoder_cannot_have_the_name_of_a_linear_model(tmp_path: Path) -> None:
    paths = write_arms(tmp_path / "data")
    (tmp_path / "data/raw.toml").rename(tmp_path / "data/static.toml")
    question = Question(arms_of([str(tmp_path / "data/static.toml")]), (1,), ("all",), {"train": paths["train"]})
    with pytest.raises(UsageError, match="'static' is the name of a linear model"):
        cells_of(question, tmp_path / "out")


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
    picture = draw(rows_of([result("a < b & c", 1, "aabb" * 10), linear("tfidf", 1, "aaaa" * 10)]), title="<title>")
    root = ET.fromstring(picture)
    words = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"<title>", "a < b & c", "tfidf"} <= set(words)
    assert draw([], title="nothing") == ""


def test_what_a_run_spent_adds_up_over_its_starts_and_says_if_one_was_killed(tmp_path: Path) -> None:
    config = load_config(tiny_config({name: f"{name}.jsonl" for name in ("train", "dev", "test", "corpus")}))
    for _ in range(2):
        with spending(tmp_path, config):
            pass
    told = read_spent(tmp_path, config)
    assert told is not None
    assert (told.starts, told.whole, told.running) == (2, True, False)
    killed = spending(tmp_path, config)
    killed.__enter__()
    assert read_spent(tmp_path, config).running  # type: ignore[union-attr]
    with spending(tmp_path, config):
        pass
    assert read_spent(tmp_path, config).whole is False  # type: ignore[union-attr]


def test_what_a_run_spent_is_counted_for_its_settings_wherever_its_files_are(tmp_path: Path) -> None:
    data = tiny_config({name: f"here/{name}.jsonl" for name in ("train", "dev", "test", "corpus")})
    moved = tiny_config({name: f"there/{name}.jsonl" for name in ("train", "dev", "test", "corpus")})
    one, other = load_config(data), load_config(data | {"seed": 4})
    with spending(tmp_path, one):
        pass
    publish(tmp_path / "baseline", kind="baseline", key={}, write=lambda folder: None)
    with spending(tmp_path, other):
        pass
    assert read_spent(tmp_path, load_config(moved)) == read_spent(tmp_path, one)
    assert read_spent(tmp_path, one).whole  # type: ignore[union-attr]
    assert not read_spent(tmp_path, other).whole  # type: ignore[union-attr]  # it has a stage of the other settings
    assert read_spent(tmp_path, load_config(data | {"seed": 5})) is None
