"""Commands on labelled and raw text: `check`, `index`, `select`, `passages`, `search`. Only dense retrieval imports torch."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from cramlm.cli.options import (
    DuplicatesOption,
    KindOption,
    LabelColumn,
    OnBadRowOption,
    PairColumn,
    RayOption,
    SeparatorOption,
    StoreOption,
    TextColumn,
    checked,
    checked_kind,
    open_encoder,
    resolve_corpus,
    resolve_retriever,
)
from cramlm.errors import UsageError

_PER_RULE = 5  # findings shown of one rule, without --all


def check(
    files: Annotated[list[str], typer.Argument(help="Labelled texts: the training file, then dev, test or any other held-out files.")],
    corpus: Annotated[list[str] | None, typer.Option(help="Raw text for retrieval; it stays in the store for `fit`.")] = None,
    index: Annotated[Path | None, typer.Option(help="Output folder of `cramlm index`, instead of --corpus.")] = None,
    show_all: Annotated[bool, typer.Option("--all", help=f"Show every finding (default: the first {_PER_RULE} of each rule).")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print all findings and statistics as one JSON object.")] = False,
    store: StoreOption = None,
    text_column: TextColumn = "text",
    label_column: LabelColumn = "label",
    text_pair_column: PairColumn = None,
    kind: KindOption = None,
    label_separator: SeparatorOption = None,
) -> None:
    """Find errors, duplicates and leaks in the data. The exit code is 3 if there is a problem."""
    from cramlm.cli.console import console_events, show_findings
    from cramlm.data.corpus import build_corpus
    from cramlm.data.task import RowFormat
    from cramlm.data.validation import check_corpus, check_files, describe, read_labelled
    from cramlm.retrieval.catalog import open_catalog
    from cramlm.storage.artifacts import default_store

    if corpus and index is not None:
        raise UsageError("--corpus and --index exclude each other; drop one")
    row_format = RowFormat(text_column, label_column, text_pair_column, checked_kind(kind), label_separator or "|")
    with console_events() as emit:
        train, *held_out = (read_labelled(file, row_format) for file in files)
        findings = list(check_files(train, held_out))
        if corpus:
            config = resolve_corpus(corpus, text_column=text_column, on_bad_row="skip")
            findings += check_corpus(train, held_out, build_corpus(config, store or default_store(), emit=emit))
        elif index is not None:
            findings += check_corpus(train, held_out, open_catalog(index)[0])
    statistics = [describe(file).as_dict() for file in (train, *held_out)]
    problems = sum(finding.severity == "problem" for finding in findings)
    if as_json:
        rows = [{"location": each.location, "severity": each.severity, "rule": each.rule, "message": each.message} for each in findings]
        print(json.dumps({"files": statistics, "problems": problems, "findings": rows}, ensure_ascii=False))
    else:
        show_findings(statistics, findings, per_rule=None if show_all else _PER_RULE)
    if problems:
        raise typer.Exit(3)


def index(
    corpus: Annotated[list[str], typer.Argument(help="Files, folders or quoted globs of raw text.")],
    out: Annotated[Path, typer.Option(help="Folder for the corpus and its index.")],
    workers: Annotated[int | None, typer.Option(min=1, help="Processes (default: one per core); the result is the same.")] = None,
    ray: RayOption = None,
    text_column: TextColumn = "text",
    on_bad_row: OnBadRowOption = "fail",
    duplicates: DuplicatesOption = "exact",
) -> None:
    """Build the BM25 index of raw text, for `search` and `select`."""
    from cramlm.cli.console import console_events
    from cramlm.io.executors import executor_for
    from cramlm.retrieval.catalog import build_catalog

    config = resolve_corpus(corpus, text_column=text_column, on_bad_row=on_bad_row, duplicates=duplicates)
    with console_events() as emit, executor_for(ray, workers) as executor:
        build_catalog(config, out, workers=workers, executor=None if ray is None else executor, emit=emit)
    print(out)


def select(
    train: Annotated[str, typer.Option(help="Labelled texts; each one is a query.")],
    index: Annotated[Path, typer.Option(help="Output folder of `cramlm index`.")],
    out: Annotated[Path, typer.Option(help="Folder for the selection.")],
    jsonl: Annotated[Path | None, typer.Option(help="Also write the passages to this file as JSON lines.")] = None,
    retriever: Annotated[str | None, typer.Option(help="bm25 (default), dsir, dense, random or union.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Passages per query (default: 50, or as many as a limit below needs).")] = None,
    dev: Annotated[str | None, typer.Option(help="Drop passages that overlap with these texts.")] = None,
    test: Annotated[str | None, typer.Option(help="Drop passages that overlap with these texts.")] = None,
    max_documents: Annotated[str | None, typer.Option(help="Keep at most so many passages, best rank first, like 20k.")] = None,
    select_tokens: Annotated[str | None, typer.Option(help="Keep at most so many tokens (estimated), best rank first, like 50M.")] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="Change one setting, like retriever.k1=1.5; may be repeated.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of all random numbers.")] = 13,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads; the result is the same.")] = 1,
    ray: RayOption = None,
    text_column: TextColumn = "text",
    label_column: LabelColumn = "label",
    text_pair_column: PairColumn = None,
    kind: KindOption = None,
    label_separator: SeparatorOption = None,
) -> None:
    """Write the passages that a task retrieves, best rank first."""
    from cramlm.cli.console import console_events, show_selection
    from cramlm.config.run import TaskConfig
    from cramlm.data.task import read_task
    from cramlm.io.executors import executor_for
    from cramlm.retrieval.catalog import open_catalog
    from cramlm.retrieval.retrievers import Distribution, RetrievalContext
    from cramlm.retrieval.selection import KIND, SELECTION_FILE, select_documents
    from cramlm.storage.artifacts import refuse_foreign

    refuse_foreign(out, kind=KIND)
    columns = {"text_column": text_column, "label_column": label_column, "text_pair_column": text_pair_column}
    columns |= {"kind": kind, "label_separator": label_separator}
    named: Any = {name: value for name, value in columns.items() if value is not None}
    task_config = checked(lambda: TaskConfig(train=train, dev=dev, test=test, **named))
    options = {"kind": retriever, "top_k": top_k, "max_documents": max_documents, "max_tokens": select_tokens}
    retriever_config = resolve_retriever(options, set_)
    with console_events() as emit, executor_for(ray, threads) as executor:
        task = read_task(task_config, seed=seed, emit=emit)
        corpus, bm25 = open_catalog(index)
        distribution = Distribution(out.with_name(f"{out.name}.shares"), executor)
        used = distribution if ray is not None or distribution.folder.exists() else None
        context = RetrievalContext(index, seed, bm25, threads, used, open_encoder)
        chosen = select_documents(retriever_config, corpus, task, out=out, context=context, emit=emit)
    show_selection(json.loads((out / "report.json").read_bytes()))
    print(f"{len(chosen)} passages: {out / SELECTION_FILE}")
    if jsonl is not None:
        passages(out, jsonl)


def passages(
    selection: Annotated[Path, typer.Argument(help="Output folder of `cramlm select`, or a run.")],
    out: Annotated[Path | None, typer.Option(help="File to write (default: standard output).")] = None,
) -> None:
    """Write the selected passages as JSON lines, best rank first."""
    from cramlm.retrieval.selection import SelectionTable
    from cramlm.storage.artifacts import MANIFEST, publish_file

    is_run = not (selection / MANIFEST).exists() and (selection / "selection" / MANIFEST).exists()
    table = SelectionTable.open(selection / "selection" if is_run else selection)
    if out is None:
        sys.stdout.writelines(table.json_lines())
        return
    if (out.parent / MANIFEST).exists():
        raise UsageError(f"{out}: is inside a folder whose files cramlm verifies; write the file outside of it")
    publish_file(out, "".join(table.json_lines()).encode())
    print(f"{len(table)} passages: {out}")


def search(
    index: Annotated[Path, typer.Argument(help="Output folder of `cramlm index`.")],
    query: Annotated[str, typer.Argument(help="Any text.")],
    top_k: Annotated[int, typer.Option("--top-k", "-k", min=1, help="Passages to show.")] = 10,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per passage.")] = False,
) -> None:
    """Show the passages that a text retrieves. The words that match are listed with their weights."""
    from cramlm.cli.console import printable
    from cramlm.retrieval.catalog import search_catalog

    hits = search_catalog(index, query, limit=top_k)
    for hit in hits:
        if as_json:
            print(json.dumps(hit.as_dict(), ensure_ascii=False))
        else:
            terms = "  ".join(f"{term} {weight:.2f}" for term, weight in hit.terms[:8])
            print(f"{hit.rank + 1:>3}  {hit.score:8.3f}  {hit.id}  [{hit.source}]\n     {terms}\n     {printable(hit.text[:200])}")
    if not hits:
        print("no passage shares a word with this query", file=sys.stderr)
