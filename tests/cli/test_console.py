from __future__ import annotations

import io
import re
from typing import Any

import pytest
from rich.console import Console
from rich.progress import Progress, TextColumn

from cramlm.cli.console import ProgressBars, ProgressLines, beginning, console_events, show_plans, show_selection, show_table
from cramlm.records import Event


def test_a_selection_is_printed_with_sources_counts_and_frequent_words(capsys: pytest.CaptureFixture[str]) -> None:
    profile = dict.fromkeys(("p0", "p10", "p50", "p90", "p100"), 1.5)
    report: dict[str, Any] = {
        "queries": {"texts": 7, "distinct": 6, "answered": 7, "empty": 0, "failed": 0},
        "documents": {"found": 60, "dropped": 2, "capped": 0, "cut": 8, "selected": 50},
        "dropped": {"shares 13 words": 1, "near-duplicate": 1},
        "words": 5000,
        "tokens": {"estimated": 7000, "characters_per_token": 4.0},
        "sources": {"[news]": 40, "wiki": 10},
        "source_words": {"[news]": 4000, "wiki": 1000},
        "corpus_sources": {"[news]": 100, "wiki": 100},
        "other_sources": {"sources": 3, "passages": 4},
        "corpus_documents": 200,
        "rank": profile,
        "score": profile,
        "task_likeness": {"kl_random": 0.7, "kl_selection": 0.6},
        "over_represented": [{"word": "harbour"}, {"word": "tide"}],
        "retrievers": [{"kind": "bm25", "found": 55, "selected": 45}, {"kind": "random", "found": 5, "selected": 5}],
    }
    show_selection(report)
    shown = capsys.readouterr().out
    assert "50 passages, 5,000 words, about 0.01M tokens" in shown
    news = next(line for line in shown.splitlines() if "[news]" in line)
    assert [cell.strip() for cell in news.split("│")[1:-1]] == ["[news]", "40", "4,000", "80.0%", "40.0% of 100", "1.60"]
    for text in (
        "7 texts, 6 distinct",
        "1 sharing 13 words with a dev or test text",
        "1 nearly equal to",
        "45 of 55",
        "reduced by 0.100",
        "harbour, tide",
        "3 with 4 passages",
    ):
        assert text in " ".join(shown.split())


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_a_line_above_the_bars_for_each_finished_stage_warning_and_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr", terminal := Terminal())
    with console_events() as emit:
        emit(Event("start", "index", "reading", total=10))
        emit(Event("progress", "index", done=5, total=10, unit="passages"))
        emit(Event("progress", "unknown", done=5, total=10))
        emit(Event("warning", "index", "one row skipped"))
        emit(Event("done", "index", "10 passages"))
        emit(Event("step", "phase-1", data={"step": 1}))
        emit(Event("note", "plan", "[two] steps"))
    lines = [line.strip() for line in re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "\n", terminal.getvalue()).splitlines()]
    shown = " ".join(filter(None, lines))
    for text in ("index warning: one row skipped", "index 10 passages (", "plan [two] steps"):
        assert text in shown


def test_the_time_of_a_stage_counts_from_its_first_start_in_this_run(capsys: pytest.CaptureFixture[str]) -> None:
    now = [0.0]
    with Progress(TextColumn("{task.fields[rate]}"), console=Console(file=(terminal := io.StringIO()), width=100)) as progress:
        shows = (ProgressLines(lambda: now[0]), ProgressBars(progress, lambda: now[0]))
        for now[0], kind, stage in (
            (0.0, "start", "task"),
            (1.0, "done", "task"),
            (1.0, "start", "selection"),
            (4.0, "start", "selection"),
            (6.5, "done", "selection"),
            (7.0, "start", "tokens"),  # fails; another run follows
            (9.0, "start", "task"),
            (10.0, "start", "tokens"),
            (12.0, "done", "tokens"),
        ):
            for show in shows:
                show(Event(kind, stage))  # type: ignore[arg-type]
    for shown in (capsys.readouterr().err, terminal.getvalue()):
        assert re.findall(r"(\w+) +done \((\S+) s\)", shown) == [("task", "1.0"), ("selection", "5.5"), ("tokens", "2.0")]


def test_a_stage_that_starts_again_has_one_bar() -> None:
    with Progress(TextColumn("{task.fields[rate]}"), console=Console(file=io.StringIO())) as progress:
        bars = ProgressBars(progress)
        for message in ("retrieving", "searching deeper"):
            bars(Event("start", "selection", message))
            assert [task.description for task in progress.tasks] == ["selection"]
        bars(Event("done", "selection", "10 passages"))
        assert progress.tasks == []


@pytest.mark.parametrize(
    ("text", "shown"),
    [("short\n\x1b[31mtext", "short  [31mtext"), ("the tide rose over the reef", "the tide rose …"), ("潮" * 30, "潮" * 18 + " …")],
)
def test_a_long_text_ends_at_a_word_with_an_ellipsis(text: str, shown: str) -> None:
    assert beginning(text, 20) == shown


def test_a_table_cuts_its_first_column_before_the_numbers(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    header = ("label", "precision", "recall", "F1", "texts")
    show_table("2 texts", header, [["x" * 500, "97.8", "100.0", "98.9", "44"], ["short", "12.5", "50.0", "20.0", "1"]])
    lines = capsys.readouterr().out.splitlines()
    long, short = (next(line for line in lines if word in line) for word in ("xxx", "short"))
    assert re.findall(r"[\d.]+", long) == ["97.8", "100.0", "98.9", "44"]
    assert re.findall(r"[\d.]+", short) == ["12.5", "50.0", "20.0", "1"]
    assert "…" in long
    assert max(map(len, lines)) <= 80


def test_a_plan_shows_small_amounts_of_memory_and_disk_in_megabytes(capsys: pytest.CaptureFixture[str]) -> None:
    phase = {"name": "joint", "batch": "64 texts", "steps": 10, "passes": {"task": 1.0}}
    plan = {
        "budget": None,
        "model": "1 x 32",
        "refused": "",
        "rough": False,
        "phases": [phase],
        "parameters": 1e6,
        "vocab_size": 200,
        "seconds": 6.0,
    }
    plan |= {"external_tokens": 0, "flops": 1e9, "memory": 1_940_000_000, "gpu_memory": None, "disk": 400_000}
    show_plans([plan])
    shown = capsys.readouterr().out
    assert shown.splitlines()[1].endswith("1.0e+09  1.9 GB  0.4 MB")
    assert "rough" not in shown
    show_plans([plan | {"rough": True}])
    shown = capsys.readouterr().out
    assert "  ~0.1 " in shown
    assert "  ~1.9 GB  0.4 MB" in shown
    assert "~: rough; a training step takes long here" in shown
