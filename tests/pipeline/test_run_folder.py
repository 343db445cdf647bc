"""A run's folder: which one a run gets, whose results it may replace, and which of its stages belong together."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest

from commands import cramlm, error_line
from cramlm.config.run import RunConfig, load_config, to_toml
from cramlm.data.task import load_task, read_task, save_task
from cramlm.errors import ArtifactError, DataError, Stopped, UsageError
from cramlm.io.paths import expand_files
from cramlm.pipeline.context import Process
from cramlm.pipeline.run import run, unfinished
from cramlm.pipeline.run_folder import (
    EventLog,
    begin_record,
    folder_for,
    is_up_to_date,
    name_of_task,
    read_events,
    read_record,
    refuse_other_folder,
    refuse_other_task,
)
from cramlm.records import Event, silent
from cramlm.reporting.record import read_run
from cramlm.storage.artifacts import hash_file, publish, verify
from jsonl import read_json, read_jsonl
from tiny_task import tiny_config, write_task


@pytest.mark.parametrize(
    ("train", "name"),
    [
        ("reviews.csv", "reviews"),
        ("data/news/train.jsonl", "news"),
        ("data/news/train-100-1-0f3a.jsonl.zst", "news"),
        ("/somewhere/Training_set.tsv", "somewhere"),
        ("x/../news/data.csv", "news"),
        ("trained.csv", "trained"),
        ("my reviews (2).csv", "my-reviews-2"),
        ("hf://OWNER/NAME/train#text", "NAME"),
        ("hf://OWNER/NAME@v1:yor/train", "NAME-v1-yor"),
        ("https://example.org/a/news.csv?X-Signature=secret", "news"),
        ("s3://bucket/train.jsonl", "bucket"),
        ("日本/train.csv", "日本"),
        ("/train.csv", "train"),
        ("/((.csv", "task"),
    ],
)
def test_a_task_is_named_after_its_training_file_or_its_folder(train: str, name: str) -> None:
    assert name_of_task(train) == name


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with the tiny task in sea/."""
    monkeypatch.chdir(tmp_path)
    write_task(Path("sea"))
    return tmp_path


def config_of(folder: str = "sea", **changes: Any) -> RunConfig:
    return load_config(tiny_config({name: f"{folder}/{name}.jsonl" for name in ("train", "dev", "test", "corpus")}, **changes))


def folder_of(config: RunConfig) -> Path:
    return folder_for(config, read_task(config.task, seed=config.seed), emit=silent)


def test_equal_calls_share_a_folder_and_others_get_the_next_number(place: Path) -> None:
    one, other = config_of(), config_of(seed=4)
    assert [folder_of(each) for each in (one, one, other, one, other)] == [Path(f"runs/sea-tlm-{n}") for n in (1, 1, 2, 1, 2)]
    assert folder_of(config_of(name="labels only/x")) == Path("runs/sea-labels-only-x-1")
    shutil.rmtree("runs/sea-tlm-1")
    assert folder_of(config_of(seed=5)) == Path("runs/sea-tlm-3"), "a number is not given twice while a later one is there"
    shutil.copytree("runs/sea-tlm-2", "runs/sea-tlm-12")
    assert folder_of(other) == Path("runs/sea-tlm-12"), "of equal runs the newest is continued"
    assert name_of_task("train.jsonl") == place.name, "of a relative file called train the working folder is the name"


def test_a_file_with_other_texts_gets_a_new_folder(place: Path) -> None:
    config = config_of()
    first = folder_of(config)
    save_task(read_task(config.task, seed=config.seed), first, emit=silent)
    assert folder_of(config) == first
    rewrite("sea/test.jsonl", " old ", " ancient ")
    assert folder_of(config) == Path("runs/sea-tlm-2")


def test_unreadable_folders_keep_their_number(place: Path) -> None:
    for number, toml in ((1, None), (2, "colour = 'red'\n"), (3, "x = [\n")):
        Path(f"runs/sea-tlm-{number}").mkdir(parents=True)
        if toml is not None:
            Path(f"runs/sea-tlm-{number}/run.toml").write_text(toml)
    Path("runs/sea-tlm-x").mkdir()
    assert folder_of(config_of()) == Path("runs/sea-tlm-4")


def test_a_run_below_a_corpus_is_not_read_with_it(place: Path) -> None:
    run = kept(folder_of(config_of()), config_of())
    log = EventLog()
    log.begin(run)
    log.around(silent)(Event("note", "run", "a note"))
    assert (run / "events.jsonl").stat().st_size
    assert not [path for path in expand_files([str(Path.cwd())]) if run.absolute() in path.parents]


def kept(folder: Path, config: RunConfig) -> Path:
    """A run's folder as far as it says whose it is."""
    save_task(read_task(config.task, seed=config.seed), folder, emit=silent)
    begin_record(folder, config)
    return folder


def refuse(folder: Path, config: RunConfig) -> None:
    refuse_other_task(folder, config, read_task(config.task, seed=config.seed))


def rewrite(path: str, old: str, new: str) -> None:
    Path(path).write_text(Path(path).read_text("utf-8").replace(old, new), "utf-8")


def test_tasks_are_the_same_with_equal_labels_and_equal_file_or_texts(place: Path) -> None:
    folder = kept(place / "run", config_of())
    shutil.copytree("sea", "copy")
    refuse(folder, config_of("copy"))  # the same texts elsewhere
    rewrite("sea/train.jsonl", " old ", " ancient ")
    refuse(folder, config_of())  # a file that was edited
    refuse(folder, config_of(seed=9))
    refuse(place / "nothing", config_of())


def test_another_task_is_refused_with_a_remedy(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = kept(place / "run", config_of())
    shutil.copytree("sea", "other")
    rewrite("other/train.jsonl", " old ", " ancient ")
    with pytest.raises(
        UsageError, match=r"run: holds a run on other training texts \(.*/sea/train\.jsonl\); pass another --out, or --over"
    ):
        refuse(folder, config_of("other"))
    several = replace(read_task(config_of().task, seed=13), kind="multi-label")
    with pytest.raises(UsageError, match=r"holds a run on a classification task, and sea/train\.jsonl is read as a multi-label task; pass"):
        refuse_other_task(folder, config_of(), several)
    other_task()
    with pytest.raises(UsageError, match=r"run: holds a run with other labels \('hill', 'sea'\), sea/train\.jsonl has 'lake', 'sea'; pass"):
        refuse(folder, config_of())
    elsewhere = place / "elsewhere"
    shutil.copytree("other", elsewhere / "sea")
    monkeypatch.chdir(elsewhere)
    with pytest.raises(UsageError, match="other training texts"):  # of the same name, in another folder
        refuse(folder, config_of())


def test_a_run_without_a_stored_task_is_identified_by_its_stages(place: Path) -> None:
    folder = kept(place / "run", config_of())
    task = read_json(folder / "task/manifest.json")["key"]["task"]
    for name in ("task", "stages.json"):
        shutil.rmtree(folder / name) if (folder / name).is_dir() else (folder / name).unlink()
    publish(folder / "evaluation", kind="evaluation", key={"task": task}, write=lambda target: None)
    refuse(folder, config_of())
    rewrite("sea/train.jsonl", " old ", " ancient ")
    with pytest.raises(UsageError, match=r"other training texts \(of another file\)"):
        refuse(folder, config_of())


# Runs of the whole pipeline


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """here/ with the tiny task in sea/, a store, and a finished run; and the same in copy/."""
    folder = tmp_path_factory.mktemp("finished")
    (folder / "here").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder / "here")
        write_task(Path("sea"), documents=60)
        run(small_config(), out="run", store="store")
    shutil.copytree(folder / "here", folder / "copy")
    return folder


@pytest.fixture
def copied(finished: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """here/ as it was, as the working folder: the store knows a corpus by its path and its time."""
    shutil.rmtree(finished / "here")
    shutil.copytree(finished / "copy", finished / "here")
    monkeypatch.chdir(finished / "here")
    return finished / "here"


def small_config(**changes: Any) -> RunConfig:
    config = tiny_config({name: f"sea/{name}.jsonl" for name in ("train", "dev", "test", "corpus")}, baseline={"c": [1.0]})
    for phase in config["phases"]:
        phase |= {"steps": 4, "evaluate_every": 2, "checkpoint_every": 2}
    return load_config(config | {"tokens_per_second": 1e6} | changes)


def test_the_record_of_a_finished_run_has_every_stage(copied: Path) -> None:
    record = read_record(Path("run"))
    assert record.finished
    assert set(record.stages) == {path.parent.name for path in Path("run").glob("*/manifest.json")}


def test_unfinished_changes_nothing(copied: Path) -> None:
    def state() -> dict[str, str]:
        return {str(path): hash_file(path) for path in Path().rglob("*") if path.is_file() and path.suffix != ".lock"}

    before = state()
    assert unfinished(small_config(), out=Path("run"), store="store") is None
    assert "steps 4 -> 5" in str(unfinished(longer(), out=Path("run"), store="store"))
    assert "missing" in str(unfinished(small_config(), out=Path("run"), store="empty"))
    assert unfinished(small_config(), out=Path("none"), store="store") == "not started"
    assert state() == before


def longer() -> RunConfig:
    config = small_config()
    return config.model_copy(update={"phases": (config.phases[0], config.phases[1].model_copy(update={"steps": 5}))})


CHANGES: dict[str, tuple[Callable[[], object], str]] = {
    "a phase": (lambda: shutil.rmtree("run/phase-2-finetune"), "phase-2-finetune: it is missing"),
    "the export": (lambda: shutil.rmtree("run/export"), "export: it is missing"),
    "training texts": (lambda: rewrite("sea/train.jsonl", " old ", " ancient "), "task: "),
    "raw text": (lambda: rewrite("sea/corpus.jsonl", " old ", " new "), "corpus: it is missing"),
    "more raw text": (lambda: rewrite("sea/corpus.jsonl", " old ", " ancient "), "plan: texts.corpus_bytes"),
    "no raw text": (lambda: Path("sea/corpus.jsonl").unlink(), "corpus.jsonl"),
    "no dev file": (lambda: Path("sea/dev.jsonl").unlink(), "dev.jsonl"),
    "damage": (lambda: Path("run/evaluation/scores.json").write_text("{}"), "scores.json: damaged"),
    "parts": (lambda: [shutil.rmtree(path) for path in Path("store/parts").iterdir() if path.is_dir()], "parts of it are missing"),
    "no record": (lambda: Path("run/stages.json").unlink(), "stopped before its end"),
}


@pytest.mark.parametrize("what", CHANGES)
def test_unfinished_names_the_first_stage_that_a_run_builds(copied: Path, what: str) -> None:
    change, reason = CHANGES[what]
    change()
    assert reason in str(unfinished(small_config(), out=Path("run"), store="store"))


def stopped(config: RunConfig, out: str) -> None:
    """The run, stopped in its first training phase."""
    seen: list[Event] = []
    stop = lambda: 75 if any(event.kind == "start" and event.stage.startswith("phase-") for event in seen) else None  # noqa: E731
    with pytest.raises(Stopped):
        run(config, out=out, store="store", emit=seen.append, process=Process(stop))


def test_the_report_omits_stages_of_other_settings(copied: Path) -> None:
    stopped(longer(), "run")
    record = read_run(Path("run"))
    assert not record.finished
    assert record.stale == ("phase-2-finetune", "logit-adjustment", "evaluation", "export")
    assert "phase-1-joint" in record.stages
    assert (record.scores, record.provenance, record.predictions) == (None, None, {})
    assert {event["stage"] for event in record.events if event["kind"] == "step"} == {"phase-1-joint"}
    assert not is_up_to_date(Path("run"), "evaluation")
    assert unfinished(small_config(), out=Path("run"), store="store") == "stopped before its end"
    events: list[Event] = []
    run(small_config(), out="run", store="store", emit=events.append)
    assert not [event for event in events if event.kind == "step"], "the weights of the first settings are still there"
    record = read_run(Path("run"))
    assert record.finished
    assert not record.stale


def test_a_folder_with_other_files_is_refused_before_the_task_is_read_and_left_as_it_was(place: Path) -> None:
    events: list[Event] = []
    before = {path: hash_file(path) for path in Path("sea").rglob("*") if path.is_file()}
    for overwrite in (False, True):
        with pytest.raises(
            UsageError, match=r"^sea: holds other files \(.+ and \d more\) and no run of cramlm; pass a new or empty folder"
        ):
            run(config_of(), out="sea", store="store", overwrite=overwrite, emit=events.append)
    assert not events
    assert {path: hash_file(path) for path in Path("sea").rglob("*") if path.is_file()} == before


def test_a_folder_with_hidden_files_or_of_a_call_that_failed_at_once_is_taken(copied: Path) -> None:
    Path("new").mkdir()
    Path("new/.gitignore").write_text("*\n", "utf-8")
    refuse_other_folder(Path("new"))
    with pytest.raises(UsageError):
        run(small_config(), out="new", store="store", track="visdom")
    assert Path("new/error.log").is_file()
    refuse_other_folder(Path("new"))


def test_a_finished_run_does_not_keep_the_traceback_of_an_earlier_call(copied: Path) -> None:
    with pytest.raises(UsageError):
        run(small_config(), out="run", store="store", track="visdom")
    assert Path("run/error.log").is_file()
    run(small_config(), out="run", store="store")
    assert not Path("run/error.log").exists()


def test_a_record_of_another_config_is_ignored(copied: Path) -> None:
    """As a kill between the two writes leaves it."""
    rewrite("run/run.toml", "seed = ", "# changed\nseed = ")
    assert read_record(Path("run")).stages == {}
    assert not read_run(Path("run")).finished


@pytest.mark.parametrize(
    ("content", "message"),
    [('{"config": ', r"stages\.json: damaged"), (None, "written by an earlier version of cramlm; run the same `cramlm fit` again")],
    ids=["damaged", "missing"],
)
def test_a_run_whose_record_cannot_be_read_is_reported_after_it_ran_again(copied: Path, content: str | None, message: str) -> None:
    Path("run/stages.json").unlink() if content is None else Path("run/stages.json").write_text(content, "utf-8")
    with pytest.raises(ArtifactError, match=message):
        read_run(Path("run"))
    events: list[Event] = []
    run(small_config(), out="run", store="store", emit=events.append)
    assert not [event for event in events if event.kind in ("step", "stale")]
    assert read_run(Path("run")).finished


def test_another_recipe_name_rebuilds_the_evaluation(copied: Path) -> None:
    run(small_config(name="mine"), out="run", store="store")
    record = read_run(Path("run"))
    assert record.own_scores["test"]["rows"] == 16
    assert "tlm" not in record.scores["models"]


def test_predictions_name_the_present_lines_of_their_texts(copied: Path) -> None:
    """The report finds the text of a prediction by its id."""
    for split in ("dev", "test"):
        path = Path(f"sea/{split}.jsonl")
        path.write_text("\n" + path.read_text("utf-8"), "utf-8")  # every row moves down a line
    run(small_config(), out="run", store="store")
    task = load_task(Path("run"))
    for split, examples in (("dev", task.dev), ("test", task.test)):
        for name in ("", "-combined", "-tfidf"):
            lines = read_jsonl(Path(f"run/evaluation/predictions-{split}{name}.jsonl"))
            assert [line["id"] for line in lines] == [example.id for example in examples]


def other_task() -> None:
    """sea/ with other labels."""
    for split in ("train", "dev", "test"):
        rewrite(f"sea/{split}.jsonl", '"label": "hill"', '"label": "lake"')


def test_bad_input_creates_no_folder(place: Path) -> None:
    Path("sea/train.jsonl").write_text("{}\n", "utf-8")
    with pytest.raises(DataError):
        run(config_of(), store="store")
    assert not Path("runs").exists()


def fit(*options: str) -> CompletedProcess[str]:
    """`cramlm fit` with `small_config`."""
    Path("tiny.toml").write_text(to_toml(small_config()), "utf-8")
    return cramlm("fit", "--config", "tiny.toml", "--store", "store", *options)


def test_fit_without_out_continues_its_folder_and_keeps_other_runs(copied: Path) -> None:
    first = fit()
    assert first.returncode == 0, first.stderr
    assert "runs/sea-tlm-1 (new)" in first.stderr
    assert "runs/sea-tlm-1/export" in first.stdout.replace("\n", "")
    weights = hash_file(Path("runs/sea-tlm-1/export/model.safetensors"))
    assert "runs/sea-tlm-1 (continued)" in fit().stderr
    other_task()
    assert "runs/sea-tlm-2 (new)" in fit().stderr
    assert hash_file(Path("runs/sea-tlm-1/export/model.safetensors")) == weights


def test_fit_into_the_folder_of_another_task_exits_2_and_replaces_it_only_with_overwrite(copied: Path) -> None:
    other_task()
    before = {path: hash_file(path) for path in Path("run").rglob("*") if path.is_file()}
    assert "holds a run with other labels" in error_line(fit("--out", "run"), 2)
    assert {path: hash_file(path) for path in Path("run").rglob("*") if path.is_file()} == before
    assert fit("--out", "run", "--overwrite").returncode == 0
    assert load_task(Path("run")).labels == ("lake", "sea")
    assert read_json(Path("run/export/config.json"))["label2id"] == {"lake": 0, "sea": 1}
    assert verify(Path("run"))


def test_a_truncated_line_of_a_killed_process_costs_no_other_event(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_text('{"time": 1.0, "kind": "start", "stage": "task", "data": {}}\n{"time": 2.0, "ki', "utf-8")
    log = EventLog()
    log.begin(tmp_path)
    log.around(silent)(Event("start", "corpus"))
    assert [(number, event["stage"]) for number, event in read_events(tmp_path)] == [(0, "task"), (2, "corpus")]
