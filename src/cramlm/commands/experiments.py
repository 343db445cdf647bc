"""Commands that ask what the data and the methods are worth: `check`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from cramlm.commands.parameters import LabelColumn, PairColumn, StoreOption, TextColumn
from cramlm.errors import UsageError

_SHOWN = 5  # findings of one rule, without --all


def check(
    files: Annotated[list[str], typer.Argument(help="Labelled texts: the training file, then dev, test or any other held-out files.")],
    corpus: Annotated[list[str] | None, typer.Option(help="Raw text that retrieval will read; kept in the store for `fit`.")] = None,
    index: Annotated[Path | None, typer.Option(help="The same as `cramlm index` wrote it, instead of --corpus.")] = None,
    show_all: Annotated[bool, typer.Option("--all", help=f"Every finding (default: the first {_SHOWN} of a kind).")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Every finding and the files' figures as one JSON object.")] = False,
    store: StoreOption = None,
    text_column: TextColumn = "text",
    label_column: LabelColumn = "label",
    text_pair_column: PairColumn = None,
) -> None:
    """Look for what makes scores dishonest before any compute is spent; exit code 3 if there is a problem."""
    from cramlm.artifacts import default_store
    from cramlm.console import console_events, show_findings
    from cramlm.data.checkup import check_corpus, check_files, describe, read_labelled
    from cramlm.data.corpus import build_corpus
    from cramlm.options import resolve_corpus
    from cramlm.retrieval.catalog import open_catalog

    if corpus and index is not None:
        raise UsageError("--corpus and --index name the same thing twice; drop one")
    columns = {"text_column": text_column, "label_column": label_column, "text_pair_column": text_pair_column}
    with console_events() as emit:
        train, *held_out = (read_labelled(file, **columns) for file in files)
        findings = list(check_files(train, held_out))
        if corpus:
            config = resolve_corpus(corpus, text_column=text_column, on_bad_row="skip")
            findings += check_corpus(train, held_out, build_corpus(config, store or default_store(), emit=emit))
        elif index is not None:
            findings += check_corpus(train, held_out, open_catalog(index)[0])
    facts = [describe(file).as_dict() for file in (train, *held_out)]
    problems = sum(finding.severity == "problem" for finding in findings)
    if as_json:
        rows = [{"place": each.place, "severity": each.severity, "rule": each.rule, "message": each.message} for each in findings]
        print(json.dumps({"files": facts, "problems": problems, "findings": rows}, ensure_ascii=False))
    else:
        show_findings(facts, findings, limit=None if show_all else _SHOWN)
    if problems:
        raise typer.Exit(3)
