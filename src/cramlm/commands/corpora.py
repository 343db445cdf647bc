"""Commands on raw text: `index`, `select`, `search`. None of them loads torch, unless dense retrieval is asked for."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from cramlm.commands.parameters import KindOption, LabelColumn, OnBadRowOption, PairColumn, RayOption, SeparatorOption, TextColumn
from cramlm.options import checked, open_encoder, resolve_corpus, resolve_retriever


def index(
    corpus: Annotated[list[str], typer.Argument(help="Files, folders or quoted globs of raw text.")],
    out: Annotated[Path, typer.Option(help="Folder for the corpus and its index.")],
    workers: Annotated[int | None, typer.Option(min=1, help="Processes (default: one per core); the result is the same.")] = None,
    ray: RayOption = None,
    shard: Annotated[str | None, typer.Option(help="i/n: only the i-th of n shares of the work, for one job of an array.")] = None,
    text_column: TextColumn = "text",
    on_bad_row: OnBadRowOption = "fail",
) -> None:
    """Read raw text once and index it for search and selection."""
    from cramlm.console import console_events
    from cramlm.data.executors import Share, executor_for
    from cramlm.retrieval.catalog import build_catalog, build_share

    share = None if shard is None else Share.parse(shard)
    config = resolve_corpus(corpus, text_column=text_column, on_bad_row=on_bad_row)
    with console_events() as emit, executor_for(ray, workers) as executor:
        if share is None:
            build_catalog(config, out, workers=workers, executor=None if ray is None else executor, emit=emit)
        else:
            print(build_share(config, out, share, executor, emit=emit))
            return
    print(out)


def select(
    train: Annotated[str, typer.Option(help="Labelled texts; each is a query.")],
    index: Annotated[Path, typer.Option(help="What `cramlm index` wrote.")],
    out: Annotated[Path, typer.Option(help="Folder for the selection.")],
    retriever: Annotated[str | None, typer.Option(help="bm25 (default), dsir, dense, random or union.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Documents per query (default: 50, or what a bound needs).")] = None,
    dev: Annotated[str | None, typer.Option(help="Passages that overlap these texts are dropped.")] = None,
    test: Annotated[str | None, typer.Option(help="Passages that overlap these texts are dropped.")] = None,
    max_documents: Annotated[str | None, typer.Option(help="Keep only the best-ranked so many, like 20k.")] = None,
    select_tokens: Annotated[str | None, typer.Option(help="Keep the best-ranked up to so many tokens, like 50M (estimated).")] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="One knob, like retriever.k1=1.5; may be repeated.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of everything random.")] = 13,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads (with --shard, processes); the result is the same.")] = 1,
    ray: RayOption = None,
    shard: Annotated[str | None, typer.Option(help="i/n: only score the i-th of n shares of the index, into OUT.shares.")] = None,
    text_column: TextColumn = "text",
    label_column: LabelColumn = "label",
    text_pair_column: PairColumn = None,
    kind: KindOption = None,
    label_separator: SeparatorOption = None,
) -> None:
    """Write the passages that a task asks for, best rank first."""
    from cramlm.artifacts import refuse_foreign
    from cramlm.config import TaskConfig
    from cramlm.console import console_events, show_selection
    from cramlm.data.executors import Share, executor_for
    from cramlm.data.task import read_task
    from cramlm.retrieval.catalog import open_catalog
    from cramlm.retrieval.retrievers import Spread, search_share
    from cramlm.retrieval.selection import KIND, select_documents

    refuse_foreign(out, kind=KIND)
    columns = {"text_column": text_column, "label_column": label_column, "text_pair_column": text_pair_column}
    columns |= {"kind": kind, "label_separator": label_separator}
    named: Any = {name: value for name, value in columns.items() if value is not None}
    task_config = checked(lambda: TaskConfig(train=train, dev=dev, test=test, **named))
    given = {"kind": retriever, "top_k": top_k, "max_documents": max_documents, "max_tokens": select_tokens}
    chosen_by = resolve_retriever(given, set_)
    share = None if shard is None else Share.parse(shard)
    with console_events() as emit, executor_for(ray, threads) as executor:
        task = read_task(task_config, seed=seed, emit=emit)
        corpus, bm25 = open_catalog(index)
        spread = Spread(out.with_name(f"{out.name}.shares"), executor)
        if share is not None:
            print(search_share(chosen_by, corpus, bm25, task, share, spread, emit=emit))
            return
        used = spread if ray is not None or spread.folder.exists() else None
        means: dict[str, Any] = {"index": bm25, "store": index, "open_encoder": open_encoder, "threads": threads, "spread": used}
        chosen = select_documents(chosen_by, corpus, task, out=out, seed=seed, emit=emit, **means)
    show_selection(json.loads((out / "report.json").read_bytes()))
    print(f"{len(chosen)} passages: {out / 'selected.jsonl'}")


def search(
    index: Annotated[Path, typer.Argument(help="What `cramlm index` wrote.")],
    query: Annotated[str, typer.Argument(help="Any text.")],
    k: Annotated[int, typer.Option("-k", "--limit", min=1, help="How many passages.")] = 10,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per passage.")] = False,
) -> None:
    """Show the passages that a text retrieves, and by which of its words."""
    from cramlm.retrieval.catalog import search_catalog

    found = search_catalog(index, query, limit=k)
    for hit in found:
        if as_json:
            print(json.dumps(hit.as_dict(), ensure_ascii=False))
        else:
            terms = "  ".join(f"{term} {weight:.2f}" for term, weight in hit.terms[:8])
            print(f"{hit.rank + 1:>3}  {hit.score:8.3f}  {hit.id}  [{hit.source}]\n     {terms}\n     {_printable(hit.text[:200])}")
    if not found:
        print("no passage shares a word with this query", file=sys.stderr)


def _printable(text: str) -> str:  # for a terminal: control characters (escape sequences, line ends) as spaces
    return "".join(character if character.isprintable() else " " for character in text)
