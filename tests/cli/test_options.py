"""Options override the config file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import typer

from commands import cramlm, error_line, printed
from cramlm.cli.app import app
from cramlm.cli.options import resolve_run
from cramlm.config.run import RunConfig, load_config, to_toml
from tiny_task import tiny_config, write_task


def resolved(config: Path, **task: str | None) -> RunConfig:
    run: RunConfig = resolve_run(None, config, None, task=task, corpus=None, budget=None, seed=None)
    return run


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A config file with other column names than the defaults."""
    data = tiny_config(write_task(tmp_path))
    data["task"] |= {"text_column": "body", "label_column": "topic", "on_bad_row": "skip"}
    path = tmp_path / "run.toml"
    path.write_text(to_toml(load_config(data)), "utf-8")
    return path


@pytest.mark.parametrize(("field", "default"), [("text_column", "text"), ("label_column", "label"), ("on_bad_row", "fail")])
def test_an_option_overrides_the_config_also_with_its_default_value(config: Path, field: str, default: str) -> None:
    assert getattr(resolved(config, **{field: default}).task, field) == default
    assert getattr(resolved(config, **{field: None}).task, field) != default, "no option"
    assert getattr(resolved(config).task, field) != default


def test_the_rule_for_bad_rows_is_that_of_the_corpus_too(config: Path, tmp_path: Path) -> None:
    corpus = resolved(config, on_bad_row="skip").corpus
    assert corpus is not None
    assert corpus.on_bad_row == "skip"
    task = {"train": str(tmp_path / "train.jsonl"), "on_bad_row": "skip"}
    run = resolve_run("tlm", None, None, task=task, corpus=["corpus.jsonl"], budget=None, seed=None)
    assert run.corpus.on_bad_row == "skip"
    run = resolve_run("labels-only", None, None, task=task, corpus=None, budget=None, seed=None)
    assert run.task.on_bad_row == "skip"


def test_only_options_on_the_command_line_override_the_config(config: Path) -> None:
    """The files have the columns text and label; the config says body and topic."""
    settings = ("--set", "tokens_per_second=40000", "--set", "threads=1", "--preset", "tiny")
    arguments = ["plan", "5m", "--config", config, *settings, "--json"]
    assert "body" in error_line(cramlm(*arguments), 3)
    assert "topic" in error_line(cramlm(*arguments, "--text-column", "text"), 3)
    plan = json.loads(printed(*arguments, "--text-column", "text", "--label-column", "label"))
    assert [phase["steps"] for phase in plan["phases"]] == [24, 16]
    group: Any = typer.main.get_command(app)
    of_task = {"text_column", "label_column", "text_pair_column", "kind", "label_separator", "on_bad_row", "dev", "test"}
    for name in ("fit", "plan", "config", "compare", "ablate"):
        found = {parameter.name: parameter.default for parameter in group.commands[name].params if parameter.name in of_task}
        assert len(found) >= 7
        assert set(found.values()) == {None}, "an option that a config file may set has no default"
