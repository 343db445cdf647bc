"""What `cramlm check` finds in labelled files: every kind of finding, at its file and line."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from commands import cramlm, error_line
from cramlm.config.run import CorpusConfig, TaskConfig
from cramlm.data.corpus import build_corpus
from cramlm.data.task import RowFormat, read_task
from cramlm.data.validation import (
    Finding,
    RepetitionCounts,
    check_corpus,
    check_files,
    count_repetitions,
    describe,
    read_labelled,
    summarize_findings,
)
from cramlm.evaluation.kinds import score_test
from cramlm.records import Event, Example, Task, TaskKind
from cramlm.text.characters import count_scripts, main_script
from jsonl import write_jsonl, write_labelled

LONG = "one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen"
TRAIN = [
    ("A wave  came in", "sea"),
    ("a WAVE came in", "sea"),
    ("a wave came in", "hill"),
    ("the summit at dawn", "hill"),
    (f"and then {LONG}", "hill"),
    *((f"the ridge number {number}", "hill") for number in range(60)),
    *((f"a harbour, the {number}th", "sea") for number in range(2)),
    ("гора над морем", "hill"),
    ("...", "hill"),
    ("word " * 400, "hill"),
    ("alone on an island", "island"),
]
TEST = [("The summit at dawn", "sea"), (LONG, "hill"), ("in deep water", "deep")]


def test_every_kind_of_finding_has_its_file_and_line(tmp_path: Path) -> None:
    train = write_labelled(tmp_path / "train.jsonl", TRAIN)
    with Path(train).open("a", encoding="utf-8") as file:
        file.write('{"text": "no label here"}\n')
    test = write_labelled(tmp_path / "test.jsonl", TEST)
    findings = list(check_files(read_labelled(train, RowFormat()), [read_labelled(test, RowFormat())]))
    found = {(finding.rule, finding.severity, finding.location.removeprefix(f"{tmp_path}/")) for finding in findings}
    assert found == {
        ("bad-row", "problem", "train.jsonl:72"),
        ("duplicate", "notice", "train.jsonl:2"),
        ("conflict", "problem", "train.jsonl:3"),
        ("leak", "problem", "test.jsonl:1"),
        ("near-leak", "notice", "train.jsonl:5"),
        ("rare-label", "notice", "train.jsonl:1"),
        ("rare-label", "notice", "train.jsonl:71"),
        ("uneven-labels", "notice", "train.jsonl"),
        ("unseen-label", "problem", "test.jsonl:3"),
        ("missing-label", "notice", "test.jsonl"),
        ("long", "notice", "train.jsonl:70"),
        ("no-words", "notice", "train.jsonl:69"),
        ("script", "notice", "train.jsonl:68"),
    }
    leak = next(finding for finding in findings if finding.rule == "leak")
    assert leak.message == f"the text of {train}:4, label 'sea' here and 'hill' there"


def test_a_leak_is_compared_with_the_training_row_of_the_same_label(tmp_path: Path) -> None:
    train = write_labelled(tmp_path / "train.jsonl", [("a wave", "hill"), ("a wave", "sea"), ("a summit", "hill")])
    test = write_labelled(tmp_path / "test.jsonl", [("a wave", "sea"), ("A summit", "sea")])
    findings = check_files(read_labelled(train, RowFormat()), [read_labelled(test, RowFormat())])
    assert [finding.message for finding in findings if finding.rule == "leak"] == [
        f"the text of {train}:2, same label",
        f"the text of {train}:3, label 'sea' here and 'hill' there",
    ]


def test_a_held_out_label_that_differs_in_case_from_one_of_train_is_named_with_it(tmp_path: Path) -> None:
    """As JSON's true beside the True that pandas writes into a table."""
    train = write_jsonl(tmp_path / "train.jsonl", ({"text": f"text number {number}", "label": number % 2 == 0} for number in range(20)))
    (tmp_path / "dev.csv").write_text("text,label\nanother text,True\na third one,maybe\n", "utf-8")
    held_out = read_labelled(str(tmp_path / "dev.csv"), RowFormat())
    messages = [each.message for each in check_files(read_labelled(str(train), RowFormat()), [held_out]) if each.rule == "unseen-label"]
    assert messages == [
        "label 'True' is not among the training labels; 'True' differs from 'true' in case, Unicode form or white space only",
        "label 'maybe' is not among the training labels",
    ]


@pytest.mark.parametrize(
    ("kind", "labels", "message"),
    [
        ("classification", ["sea"], "every row has the label 'sea'; a classifier needs at least two"),
        (
            "classification",
            range(20),
            "20 labels for 20 rows ('0', '1', '2', …), more than one per two rows; these look like numbers or ids",
        ),
        ("multi-label", [["sea"]], "every row has the labels ('sea'); there is nothing to learn"),
        ("regression", [2.5], "every row has the number 2.5; there is nothing to learn"),
    ],
)
def test_labels_that_fit_refuses_are_a_problem(tmp_path: Path, kind: TaskKind, labels: Sequence[Any], message: str) -> None:
    rows = ({"text": f"text number {number}", "label": labels[number % len(labels)]} for number in range(20))
    train = str(write_jsonl(tmp_path / "train.jsonl", rows))
    (finding,) = check_files(read_labelled(train, RowFormat(kind=kind)), [])
    assert (finding.location, finding.severity, finding.rule) == (train, "problem", "unlearnable")
    assert finding.message.startswith(message)


def test_labels_that_differ_in_case_unicode_form_or_white_space_only_are_named(tmp_path: Path) -> None:
    names = ["sea", "sea", "sea ", "Sea", "café", "cafe\u0301", "\u200bsea"] * 5
    train = write_labelled(tmp_path / "train.jsonl", [(f"text number {number}", name) for number, name in enumerate(names)])
    findings = [finding for finding in check_files(read_labelled(train, RowFormat()), []) if finding.rule == "similar-labels"]
    assert [finding.location.removeprefix(f"{tmp_path}/train.jsonl:") for finding in findings] == ["3", "4", "6", "7"]
    assert findings[0].message.startswith("label 'sea ' differs from 'sea' in case, Unicode form or white space only")
    assert findings[3].message.startswith(r"label '\u200bsea' differs from 'sea' in invisible characters only")
    assert findings[2].message.startswith(r"label 'cafe\u0301' differs from 'caf\xe9' in Unicode form only")


@pytest.mark.parametrize(
    ("label", "kind"), [("nan", "classification"), ("NA", "classification"), ("None", "classification"), ("null", "multi-label")]
)
def test_a_label_that_is_how_pandas_writes_a_missing_value_is_named_with_its_rows_and_a_remedy(
    label: str, kind: TaskKind, tmp_path: Path
) -> None:
    path = tmp_path / "train.csv"
    path.write_text("text,label\n" + "".join(f"text number {number},{['sea', 'hill', label][number % 3]}\n" for number in range(30)))
    train = read_labelled(str(path), RowFormat(kind=kind))
    (finding,) = [finding for finding in check_files(train, []) if finding.rule == "null-label"]
    assert str(finding) == (
        f"{path}:4: notice: null-label: label '{label}' of 10 rows may be a missing value, and is read as a class; "
        "drop rows without a label"
    )
    assert label in describe(train)["labels"]


def test_none_and_words_that_hold_a_missing_value_are_labels(tmp_path: Path) -> None:
    rows = [(f"text number {number}", ["none", "nano", "NAN"][number % 3]) for number in range(30)]
    findings = check_files(read_labelled(write_labelled(tmp_path / "train.jsonl", rows), RowFormat()), [])
    assert "null-label" not in {finding.rule for finding in findings}


@pytest.mark.parametrize(
    ("label", "other", "message"),
    [
        ("1", "1.0", "label '1.0' differs from '1' in decimals only; rename one if they are one label"),
        ("⚽", "⚽\ufe0f", r"label '\u26bd\ufe0f' differs from '\u26bd' in invisible characters only; rename one if they are one label"),
        ("1", "1.5", None),
        ("007", "7", None),
    ],
)
def test_numbers_and_emoji_that_are_written_in_two_ways_are_named(label: str, other: str, message: str | None, tmp_path: Path) -> None:
    rows = [(f"text number {number}", [label, label, other][number % 3]) for number in range(30)]
    findings = check_files(read_labelled(write_labelled(tmp_path / "train.jsonl", rows), RowFormat()), [])
    assert [finding.message for finding in findings if finding.rule == "similar-labels"] == ([] if message is None else [message])


@pytest.mark.parametrize(
    ("names", "kind", "message"),
    [
        (
            ["sea|wind", "sea", "wind|hill"],
            "classification",
            "'sea|wind' seems to be several labels of one text; pass --task-type multi-label",
        ),
        (["sea; wind", "sea", "hill"], "classification", "--task-type multi-label --label-separator ';'"),
        (
            [f"{number / 2}" for number in range(30)],
            "classification",
            "30 different numbers; to predict a number pass --task-type regression",
        ),
        (["sea|wind", "hill|dale", "a;b"], "classification", None),
        ([f"{number}" for number in range(30)], "classification", None),  # ids of classes
        (["['sea'; 'wind']", "['sea']"], "classification", "\"['sea'; 'wind']\" is a list written as text; write a|b, or"),
        (["sea|wind", "sea", "wind|hill"], "multi-label", None),
        (["sea;wind", "sea", "hill"], "multi-label", "'sea;wind' seems to be several; if the file is a table, pass --label-separator ';'"),
        (["sea;wind", "wind;sea"], "multi-label", None),
    ],
)
def test_labels_that_look_like_another_kind_of_task_are_named(names: list[str], kind: Any, message: str | None, tmp_path: Path) -> None:
    file = tmp_path / "train.csv"
    file.write_text("text,label\n" + "".join(f"text {number},{name}\n" for number, name in enumerate(names * 6)), "utf-8")
    found = [finding for finding in check_files(read_labelled(str(file), RowFormat(kind=kind)), []) if finding.rule == "other-kind"]
    assert (message is None) == (found == [])
    assert message is None or message in found[0].message


def test_the_corpus_is_searched_for_held_out_text_and_compared_with_the_task(tmp_path: Path) -> None:
    train, test = (
        read_labelled(write_labelled(tmp_path / name, rows), RowFormat()) for name, rows in (("train.jsonl", TRAIN), ("test.jsonl", TEST))
    )
    texts = ["Заметки о погоде и о дороге", f"so it is: {LONG}, they said"]
    write_jsonl(tmp_path / "corpus.jsonl", ({"text": text * 3} for text in texts))
    corpus = build_corpus(CorpusConfig(files=(str(tmp_path / "corpus.jsonl"),)), tmp_path / "store", workers=1)
    found = {finding.rule: finding for finding in check_corpus(train, [test], corpus)}
    assert set(found) == {"in-corpus", "foreign-corpus"}
    assert found["in-corpus"].location.endswith("test.jsonl:2")
    assert " shares 13 words with this text (" in found["in-corpus"].message
    (tmp_path / "russian.jsonl").write_text(json.dumps({"text": texts[0] * 9}) + "\n", "utf-8")
    russian = build_corpus(CorpusConfig(files=(str(tmp_path / "russian.jsonl"),)), tmp_path / "store", workers=1)
    assert {(finding.location, finding.rule, finding.severity) for finding in check_corpus(train, [test], russian)} == {
        ("russian.jsonl", "foreign-corpus", "notice"),
        ("russian.jsonl", "corpus-script", "problem"),
    }


def test_a_corpus_with_some_text_in_the_script_of_the_task_may_have_more_in_another(tmp_path: Path) -> None:
    rows = [("おいしいスープ", "food"), ("しずかな部屋", "hotel")] * 3
    train = read_labelled(write_labelled(tmp_path / "train.jsonl", rows), RowFormat())
    write_jsonl(tmp_path / "corpus.jsonl", ({"text": text} for text in ("株式会社東京電力本社", "おいしい部屋", "a line in English")))
    corpus = build_corpus(CorpusConfig(files=(str(tmp_path / "corpus.jsonl"),)), tmp_path / "store", workers=1)
    assert "corpus-script" not in {finding.rule for finding in check_corpus(train, [], corpus)}


def test_the_summary_has_a_line_per_rule_with_the_first_location() -> None:
    findings = [Finding(f"train:{line}", "notice", rule, "so") for rule, line in (("long", 3), ("long", 9), ("script", 4))]
    assert summarize_findings(findings) == ["long: 2 findings, first train:3: so", "script: train:4: so"]


def test_scripts_are_those_of_the_letters() -> None:
    assert count_scripts(["Ab 3", "ж, ｱア文字é\u0301"]) == {"Latin": 3, "Cyrillic": 1, "Kana": 2, "Han": 2}
    assert count_scripts(["データー時々〻 ゝ〱〼"]) == {"Kana": 7, "Han": 3}  # marks of length and repetition are letters of their script
    assert count_scripts(["Ⅎ Ↄ ˇ ⸯ ᳩ"]) == {"Latin": 2}  # turned letters; then a caron, a tilde and a Vedic sign, of no script
    assert count_scripts(["ᥐ ꪀ ᦀ 𐎠 𐌀"]) == {"Tai Le": 1, "Tai Viet": 1, "New Tai Lue": 1, "Old Persian": 1, "Old Italic": 1}
    assert main_script(["ọ̀rọ̀ Yorùbá"]) == "Latin"
    assert main_script(["1 + 1 = 2"]) is None


def test_check_exits_with_3_if_there_is_a_problem_else_0(tmp_path: Path) -> None:
    train = write_labelled(tmp_path / "train.jsonl", TRAIN)
    result = cramlm("check", train, "--json")
    events = json.loads(result.stdout)
    assert (result.returncode, events["problems"]) == (3, 1)
    assert events["files"][0]["labels"] == describe(read_labelled(train, RowFormat()))["labels"]
    clean = write_labelled(tmp_path / "clean.jsonl", [(f"{topic} number {row}", topic) for topic in ("sea", "hill") for row in range(6)])
    shown = cramlm("check", clean)
    assert shown.returncode == 0
    assert "0 problems, 0 notices in 1 file" in shown.stdout


def test_check_shows_on_stderr_what_it_does(tmp_path: Path) -> None:
    files = [write_labelled(tmp_path / f"{name}.jsonl", TRAIN[3:]) for name in ("train", "test")]
    lines = [line.split(maxsplit=1)[1] for line in cramlm("check", *files).stderr.strip().splitlines()]
    assert lines[:2] == ["reading 2 labelled files", f"checking {2 * len(TRAIN[3:])} rows"]


def test_check_reads_a_corpus_as_fit_does_whatever_the_columns_of_the_task(tmp_path: Path) -> None:
    train = write_jsonl(tmp_path / "train.jsonl", ({"body": text, "topic": label} for text, label in TRAIN[3:]))
    test = write_jsonl(tmp_path / "test.jsonl", [{"body": f"Now {LONG}.", "topic": "sea"}])
    raw, other = tmp_path / "raw.jsonl", tmp_path / "other.jsonl"
    write_jsonl(raw, [{"text": f"Passage of {LONG}, and more."}])
    write_jsonl(other, [{"content": f"Passage of {LONG}, and more."}])
    columns = ("--text-column", "body", "--label-column", "topic", "--store", tmp_path / "store")
    assert "in-corpus" in cramlm("check", train, test, *columns, "--corpus", raw).stdout
    events: list[Event] = []
    build_corpus(CorpusConfig(files=(str(raw),)), tmp_path / "store", emit=events.append)
    assert [event.kind for event in events] == ["up_to_date"]
    assert "in-corpus" in cramlm("check", train, test, *columns, "--corpus", other, "--set", "corpus.text_column=content").stdout
    assert "drop it" in error_line(cramlm("check", train, *columns, "--set", "corpus.text_column=content"), 2)
    refused = cramlm("check", train, *columns, "--corpus", raw, "--set", "task.kind=regression")
    assert (refused.returncode, "check has only the settings of corpus" in refused.stderr) == (2, True)
    refused = cramlm("check", train, *columns, "--corpus", raw, "--set", "corpus.passage_words=-1")
    assert error_line(refused, 2).startswith("command line: corpus.passage_words: ")


def test_check_says_how_to_pass_several_files_of_raw_text(tmp_path: Path) -> None:
    train = write_labelled(tmp_path / "train.jsonl", TRAIN[3:])
    raw = [write_jsonl(tmp_path / f"raw{number}.jsonl", [{"text": LONG}]) for number in range(2)]
    (tmp_path / "raw2.txt").write_text(LONG, "utf-8")
    for second, code in ((raw[1], 3), (tmp_path / "raw2.txt", 2)):
        error = error_line(cramlm("check", train, "--corpus", raw[0], second, "--store", tmp_path / "store"), code)
        assert error.startswith(f"{second}: ")
        assert "write --corpus before it, too, or quote the pattern: --corpus 'raw/*'" in error


def test_check_reports_the_first_bad_row_of_a_corpus_and_reads_the_others(tmp_path: Path) -> None:
    train = write_labelled(tmp_path / "train.jsonl", TRAIN[3:])
    test = write_labelled(tmp_path / "test.jsonl", [(f"Now {LONG}.", "sea")])
    raw = write_jsonl(tmp_path / "raw.jsonl", [{"text": 7}, {"text": f"Passage of {LONG}, and more."}])
    result = cramlm("check", train, test, "--store", tmp_path / "store", "--corpus", raw)
    assert result.returncode == 3
    assert f"{raw}:1: problem: bad-row: 'text' is" in result.stdout
    assert "in-corpus" in result.stdout


def test_repetitions_and_conflicts_of_a_task_are_counted() -> None:
    def split(name: str, *rows: tuple[str, str]) -> tuple[Example, ...]:
        return tuple(Example(f"{name}:{n}", text, None, label) for n, (text, label) in enumerate(rows, start=1))

    task = Task(
        train=split("train", ("A b", "x"), ("a  B", "x"), ("c", "x"), ("c", "y"), ("d", "y")),
        dev=split("dev", ("a b", "x"), ("e", "y")),
        test=split("test", ("d", "x"), ("f", "x"), ("C", "y"), ("d!", "y")),
        labels=("x", "y"),
        dev_is_split_from_train=False,
    )
    assert count_repetitions(task) == RepetitionCounts(train=2, conflicting=1, dev_in_train=(1, 0), test_in_train=(1, 1))
    everything, leak_free = score_test(task, ["y", "x", "x", "y"])
    assert (everything.rows, everything.accuracy, leak_free.rows, leak_free.accuracy) == (4, 0.5, 2, 1.0)


SHARED = Path(__file__).parents[3] / "shared/data/tasks"


@pytest.mark.shared_data
@pytest.mark.skipif(not SHARED.is_dir(), reason="the shared tasks are not here")
@pytest.mark.parametrize(("name", "repeated", "in_train", "leak_free"), [("citation_intent", 418, 52, 87), ("chemprot", 25, 4, 3465)])
def test_the_known_leaks_of_public_tasks_are_found(name: str, repeated: int, in_train: int, leak_free: int) -> None:
    """Counts: as published with these files (lower-cased text)."""
    paths = {split: str(SHARED / name / f"{split}.jsonl") for split in ("train", "dev", "test")}
    task = read_task(TaskConfig(**paths), seed=1)
    counts = count_repetitions(task)
    assert (counts.train, sum(counts.test_in_train), len(task.test) - sum(counts.test_in_train)) == (repeated, in_train, leak_free)
