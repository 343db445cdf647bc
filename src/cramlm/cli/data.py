"""Commands on labelled and raw text: `check`, `index`, `select`, `passages`, `search`. Only dense retrieval imports torch."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cramlm.cli.options import (
    BM25,
    MOST_K1,
    NORM_HELP,
    OTHER_FORMATS,
    ColumnOptions,
    Diacritics,
    DuplicatesOption,
    IdColumn,
    JsonOption,
    KindOption,
    LabelColumn,
    Norm,
    OnBadRowOption,
    PairColumn,
    RayOption,
    RetrieverName,
    SeparatorOption,
    StoreOption,
    TextColumn,
    ThreadsOption,
    checked,
    printed_or_written,
    read_stop_words,
    resolve_corpus_settings,
    resolve_retriever,
    seed_option,
    top_k_option,
)
from cramlm.errors import DataError, UsageError, brief, counted

if TYPE_CHECKING:
    from cramlm.config.retriever import DenseConfig
    from cramlm.config.run import CorpusConfig
    from cramlm.data.corpus import Corpus
    from cramlm.data.task import RowFormat
    from cramlm.data.validation import Finding, LabelledFile
    from cramlm.inference.label_errors import Suspicion
    from cramlm.model.sentences import SentenceEncoder
    from cramlm.records import Emit
    from cramlm.retrieval.index import Hits, Index
    from cramlm.retrieval.trec import Qrels

_PER_RULE = 5  # findings shown of one rule, without --all
_SUSPICIOUS = 20  # the same for suspicious labels


def check(
    files: Annotated[list[str], typer.Argument(metavar="FILES", help="The training file, then dev, test or any other held-out files.")],
    corpus: Annotated[
        list[str] | None,
        typer.Option(metavar="FILES", help="Raw text for retrieval; it stays in the store for `fit`; may be repeated."),
    ] = None,
    index: Annotated[Path | None, typer.Option(metavar="DIR", help="Output folder of `cramlm index`, instead of --corpus.")] = None,
    model: Annotated[
        Path | None, typer.Option("--model", metavar="MODEL", help="A run, or an exported model: list rows whose label it contradicts.")
    ] = None,
    show_all: Annotated[
        bool, typer.Option("--all", help=f"Show all findings (default: {_PER_RULE} of a rule, {_SUSPICIOUS} suspicious labels).")
    ] = False,
    as_json: JsonOption = False,
    store: StoreOption = None,
    *,
    columns: ColumnOptions,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="A setting of the corpus, like corpus.text_column=body.")
    ] = None,
) -> None:
    """Find errors, duplicates and leaks in labelled and raw text.

    The exit code is 3 if there is a problem. With --model also suspicious labels: training rows whose label has a low probability out of
    fold, the most suspicious first; columns and kind of task are by default those that the model was trained on.

    Examples:
        cramlm check train.csv dev.csv test.csv --corpus 'corpus/*.jsonl'
        cramlm check train.csv --model runs/mine
    """
    from cramlm.cli.console import console_events, show_findings
    from cramlm.config.run import TaskConfig
    from cramlm.data.task import RowFormat
    from cramlm.data.validation import check_corpus, check_files, describe
    from cramlm.records import Event
    from cramlm.retrieval.index import Index
    from cramlm.storage.stages import default_store

    if corpus and index is not None:
        raise UsageError("--corpus and --index exclude each other; drop one")
    if set_ and not corpus:
        raise UsageError("--set is for the raw text of --corpus, which is not given; drop it")
    trained = RowFormat()
    if model is not None:
        from cramlm.inference.folders import columns_of, model_of
        from cramlm.inference.label_errors import find_suspicious_rows, refuse_numbers
        from cramlm.inference.predictor import kind_in

        trained = replace(columns_of(folder := model_of(model)), kind=kind_in(folder))
        refuse_numbers(trained.kind)  # before files are read
    named: dict[str, Any] = {name: getattr(trained, name) if value is None else value for name, value in asdict(columns).items()}
    row_format = RowFormat.of(checked(lambda: TaskConfig(train=files[0], **named)))
    config = resolve_corpus_settings(corpus, set_) if corpus else None
    with console_events() as emit:
        emit(Event("start", "check", f"reading {counted(len(files), 'labelled file')}"))
        train = _read_labelled(files[0], row_format, with_corpus=bool(corpus))
        like_train = replace(row_format, like=f"the training file ({files[0]})")
        held_out = [_read_labelled(file, like_train, with_corpus=bool(corpus)) for file in files[1:]]
        emit(Event("note", "check", f"checking {counted(sum(len(file.examples) for file in (train, *held_out)), 'row')}"))
        statistics = [describe(file) for file in (train, *held_out)]
        findings = list(check_files(train, held_out))
        emit(Event("done", "check", "rows checked"))
        if config is not None:
            bad_rows, read = _read_corpus(config, store or default_store(), emit)
            findings += [*bad_rows, *check_corpus(train, held_out, read)]
        elif index is not None:
            findings += check_corpus(train, held_out, Index.open(index).corpus)
        suspicious: Sequence[Suspicion] = ()
        if model is not None:
            suspicious = find_suspicious_rows(model, train, emit=emit)
            findings += [row.finding for row in suspicious]
    problems = sum(finding.severity == "problem" for finding in findings)
    if as_json:
        result: dict[str, Any] = {"files": statistics, "problems": problems, "findings": [asdict(finding) for finding in findings]}
        if model is not None:
            result["suspicious_labels"] = [row.as_dict() for row in suspicious]
        print(json.dumps(result, ensure_ascii=False))
    else:
        show_findings(statistics, findings, per_rule=None if show_all else _PER_RULE, of_rules={"suspicious-label": _SUSPICIOUS})
    if problems:
        raise typer.Exit(3)


def _read_labelled(file: str, row_format: RowFormat, *, with_corpus: bool) -> LabelledFile:
    """Read a file as `read_labelled`; with a corpus, an error says what to do if the file is raw text listed after --corpus."""
    from cramlm.data.validation import read_labelled

    try:
        return read_labelled(file, row_format)
    except (DataError, UsageError) as error:
        if not with_corpus or not Path(file).is_file():
            raise
        remedy = "if it is raw text, write --corpus before it, too, or quote the pattern: --corpus 'raw/*'"
        raise type(error)(f"{error} ({remedy})") from None


def _read_corpus(config: CorpusConfig, store: Path, emit: Emit) -> tuple[list[Finding], Corpus]:
    """Read the corpus as `fit` does, so that `fit` finds it in the store; if a row is bad, return a finding and read the others."""
    from cramlm.data.corpus import build_corpus
    from cramlm.data.validation import Finding

    try:
        return [], build_corpus(config, store, emit=emit)
    except DataError as error:
        location, _, message = str(error).partition(": ")
        without_bad_rows = build_corpus(config.model_copy(update={"on_bad_row": "skip"}), store, emit=emit)
        return [Finding(location, "problem", "bad-row", message)], without_bad_rows


def sample_data(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder for train.csv, dev.csv, test.csv and corpus.jsonl.")],
    seed: Annotated[int, seed_option("Seed of all random numbers.")] = 13,
) -> None:
    """Write a small task and a corpus made by code, to try cramlm.

    The task: which of four hobbies is a short note about? Equal seeds give equal files.

    Examples:
        cramlm sample-data data/
        cd data
        cramlm fit --train train.csv --dev dev.csv --test test.csv --corpus corpus.jsonl --budget 1m
    """
    from cramlm.data.sample import write_sample

    for name, rows in write_sample(folder, seed=seed).items():
        print(f"{folder / name}: {rows:,} rows")


def index(
    corpus: Annotated[list[str], typer.Argument(metavar="FILES", help="Files, folders or quoted globs of raw text.")],
    out: Annotated[Path, typer.Option("-o", "--out", metavar="DIR", help="Folder for the corpus and its index.")],
    workers: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Processes (default: one per core); the result is the same.")
    ] = None,
    ray: RayOption = None,
    text_column: TextColumn = "text",
    id_column: IdColumn = "id",
    on_bad_row: OnBadRowOption = "fail",
    duplicates: DuplicatesOption = "exact",
    passage_words: Annotated[
        int, typer.Option(metavar="N", min=0, help="Cut long documents into passages of so many words; 0: cut none.")
    ] = 200,
    k1: Annotated[
        float, typer.Option("--k1", metavar="K1", min=0, max=MOST_K1, help="Saturation of term frequency.", rich_help_panel=BM25)
    ] = 1.2,
    b: Annotated[
        float, typer.Option("--b", metavar="B", min=0, max=1, help="Normalisation by document length.", rich_help_panel=BM25)
    ] = 0.75,
    norm: Annotated[Norm, typer.Option("--norm", metavar="NORM", help=f"{NORM_HELP}.", rich_help_panel=BM25)] = "exact",
    stop_words: Annotated[
        str,
        typer.Option(metavar="LIST", help="none, english (33 words, as Lucene), or a file with a word per line.", rich_help_panel=BM25),
    ] = "none",
    stemmer: Annotated[
        str,
        typer.Option(metavar="NAME", help="none, or a Snowball algorithm like english or porter (cramlm[search]).", rich_help_panel=BM25),
    ] = "none",
    diacritics: Annotated[
        Diacritics, typer.Option(metavar="CHOICE", help="keep, or remove accents and tone marks (U+0300 to U+036F).", rich_help_panel=BM25)
    ] = "keep",
) -> None:
    """Read raw text once and build its BM25 index.

    `search`, `select` and `fit` use it. The index records k1, b, norm, stop words, stemmer and diacritics; they apply to queries, too.

    Examples:
        cramlm index 'corpus/*.jsonl.zst' -o index
        cramlm index articles.csv --text-column body --stemmer english -o index
    """
    from cramlm.cli.console import console_events
    from cramlm.config.run import CorpusConfig
    from cramlm.io.executors import executor_for
    from cramlm.retrieval.bm25.analysis import Analyzer
    from cramlm.retrieval.bm25.search import Scoring
    from cramlm.retrieval.index import build_catalog

    rules: Any = {"on_bad_row": on_bad_row, "duplicates": duplicates, "passage_words": passage_words}
    config = checked(lambda: CorpusConfig(files=tuple(corpus), text_column=text_column, id_column=id_column, **rules))
    settings: Any = {"scoring": Scoring(k1, b, norm), "analyzer": Analyzer.of(read_stop_words(stop_words), stemmer, diacritics)}
    with console_events() as emit, executor_for(ray, workers) as executor:
        build_catalog(config, out, **settings, workers=workers, executor=None if ray is None else executor, emit=emit)
    print(out)


def select(
    index: Annotated[Path, typer.Option(metavar="DIR", help="Output folder of `cramlm index`.")],
    out: Annotated[Path, typer.Option("-o", "--out", metavar="DIR", help="Folder for the selection.")],
    train: Annotated[str | None, typer.Option(metavar="FILE", help="Labelled texts; each one is a query.")] = None,
    queries: Annotated[
        str | None, typer.Option(metavar="FILE", help="Texts without labels, instead of --train; each one is a query.")
    ] = None,
    jsonl: Annotated[Path | None, typer.Option(metavar="FILE", help="Also write the passages to this file as JSON lines.")] = None,
    retriever: Annotated[RetrieverName | None, typer.Option(metavar="NAME", help="bm25 (default), dsir, dense, random or union.")] = None,
    top_k: Annotated[int | None, top_k_option("Passages per query (default: 50, or as many as a limit below needs).")] = None,
    dev: Annotated[str | None, typer.Option(metavar="FILE", help="Drop passages that overlap with these texts.")] = None,
    test: Annotated[str | None, typer.Option(metavar="FILE", help="Drop passages that overlap with these texts.")] = None,
    max_documents: Annotated[
        str | None, typer.Option(metavar="N", help="Keep at most so many passages, best rank first, like 20k.")
    ] = None,
    select_tokens: Annotated[
        str | None, typer.Option(metavar="N", help="Keep at most so many tokens (estimated), best rank first, like 50M.")
    ] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="One setting, like retriever.k1=1.5; may be repeated.")
    ] = None,
    seed: Annotated[int, seed_option("Seed of all random numbers.")] = 13,
    threads: ThreadsOption = 1,
    ray: RayOption = None,
    text_column: TextColumn = "text",
    label_column: LabelColumn = "label",
    text_pair_column: PairColumn = None,
    kind: KindOption = None,
    label_separator: SeparatorOption = None,
    on_bad_row: OnBadRowOption = "fail",
) -> None:
    """Write the passages that a task or other texts retrieve.

    The passages are in the order of their best rank; a report is printed.

    Examples:
        cramlm select --train train.csv --index index -o selection --top-k 50
        cramlm select --queries texts.txt --index index -o selection --jsonl out.jsonl --select-tokens 50M
    """
    from cramlm.cli.console import console_events, show_selection
    from cramlm.config.run import TaskConfig
    from cramlm.data.task import RowFormat, read_task, unlabelled_task
    from cramlm.io.executors import executor_for
    from cramlm.retrieval.bm25.distributed import holds_searches
    from cramlm.retrieval.index import Index
    from cramlm.retrieval.retrievers import Distribution, RetrievalContext
    from cramlm.retrieval.selection import KIND, SELECTION_FILE, select_documents
    from cramlm.storage.artifacts import refuse_foreign, refuse_output

    refuse_foreign(out, kind=KIND)
    if jsonl is not None:
        refuse_output(jsonl, train, queries, dev, test, published=[out])
        refuse_other_format(jsonl)
    if (train is None) == (queries is None):
        raise UsageError("pass labelled texts with --train, or texts without labels with --queries")
    named: Any = {"text_column": text_column, "label_column": label_column, "text_pair_column": text_pair_column}
    named |= {name: value for name, value in (("kind", kind), ("label_separator", label_separator)) if value is not None}
    named |= {"on_bad_row": on_bad_row, "unseen_labels": "ignore"}  # dev and test are only compared with the passages
    task_config = checked(lambda: TaskConfig(train=train or "", dev=dev, test=test, **named))
    options = {"kind": retriever, "top_k": top_k, "max_documents": max_documents, "max_tokens": select_tokens}
    resolve_retriever(options, set_, bm25={})  # before files are read
    with console_events() as emit, executor_for(ray, threads) as executor:
        if queries is not None:
            task = unlabelled_task(queries, dev, test, RowFormat(text_column, None, text_pair_column), on_bad_row=on_bad_row, emit=emit)
        else:
            task = read_task(task_config, seed=seed, emit=emit)
        opened = Index.open(index)
        retriever_config = resolve_retriever(options, set_, bm25=asdict(opened.scoring))
        distribution = Distribution(out.with_name(f"{out.name}.shares"), executor)
        used = distribution if ray is not None or holds_searches(distribution.folder) else None  # also one that was interrupted
        context = RetrievalContext(index, seed, opened.bm25, threads, used, _open_encoder)
        chosen = select_documents(retriever_config, opened.corpus, task, out=out, context=context, emit=emit)
    show_selection(json.loads((out / "report.json").read_bytes()))
    print(f"{counted(len(chosen), 'passage')}: {out / SELECTION_FILE}")
    if jsonl is not None:
        passages(out, jsonl)


def _open_encoder(config: DenseConfig) -> SentenceEncoder:
    """Return the sentence encoder of dense retrieval."""
    from cramlm.model.sentences import open_sentence_encoder  # here: imports torch, which other retrievers do not need

    return open_sentence_encoder(config)


def refuse_other_format(out: Path) -> None:
    """Raise UsageError if the name of a file for passages ends in that of another format than JSON lines."""
    if out.suffix.lower() in (".csv", ".tsv", *OTHER_FORMATS):
        raise UsageError(f"{out}: passages are written as JSON lines; choose the ending .jsonl")


def passages(
    selection: Annotated[Path, typer.Argument(metavar="DIR", help="Output folder of `cramlm select`, or a run.")],
    out: Annotated[Path | None, printed_or_written("File to write")] = None,
) -> None:
    """Write the passages of a selection or a run as JSON lines.

    The passages are in the order of their best rank.

    Examples:
        cramlm passages runs/mine | head -5
    """
    from cramlm.retrieval.selection import SELECTION_FILE, SelectionTable
    from cramlm.storage.artifacts import MANIFEST, publish_lines, refuse_output

    if out is not None:
        refuse_other_format(out)
    if not (selection / SELECTION_FILE).exists():
        from cramlm.config.run import read_toml
        from cramlm.inference.folders import finishing, run_at
        from cramlm.pipeline.run_folder import CONFIG

        run = run_at(selection, "passages")
        selection = run / "selection"
        if not (selection / MANIFEST).exists():
            config = read_toml(run / CONFIG)
            if config.get("retriever") is None:
                raise UsageError(f"{run}: the recipe {config.get('name')} retrieves no passages; pass a run of one that does, like tlm")
            raise UsageError(f"{run}: ended before it retrieved passages; finish it: {finishing(run)}")
    table = SelectionTable.open(selection)
    if out is None:
        sys.stdout.writelines(table.json_lines())
        return
    refuse_output(out)
    publish_lines(out, table.json_lines())
    print(f"{counted(len(table), 'passage')}: {out}")


def search(
    index: Annotated[Path, typer.Argument(metavar="INDEX", help="Output folder of `cramlm index`.")],
    query: Annotated[str | None, typer.Argument(metavar="QUERY", help="Any text; its hits are shown with the words that match.")] = None,
    queries: Annotated[
        str | None, typer.Option(metavar="FILE", help="File of queries: jsonl, csv, tsv, parquet, or a query per line.")
    ] = None,
    top_k: Annotated[int | None, top_k_option("Passages per query (default: 10; with --queries 100).")] = None,
    run: Annotated[Path | None, typer.Option(metavar="FILE", help="File for the hits, as a TREC run (default: standard output).")] = None,
    qrels: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Relevance judgements (TREC or BEIR): print nDCG@10, R@100 and RR.")
    ] = None,
    as_json: JsonOption = False,
    text_column: TextColumn = "text",
    id_column: IdColumn = "id",
    k1: Annotated[
        float | None,
        typer.Option(
            "--k1", metavar="K1", min=0, max=MOST_K1, help="Saturation of term frequency (default: of the index).", rich_help_panel=BM25
        ),
    ] = None,
    b: Annotated[
        float | None,
        typer.Option("--b", metavar="B", min=0, max=1, help="Normalisation by length (default: of the index).", rich_help_panel=BM25),
    ] = None,
    norm: Annotated[
        Norm | None, typer.Option("--norm", metavar="NORM", help=f"{NORM_HELP} (default: of the index).", rich_help_panel=BM25)
    ] = None,
    threads: ThreadsOption = 1,
) -> None:
    """Search an index with one text, or with a file of queries.

    Examples:
        cramlm search index "relief of chronic pain" --top-k 5
        cramlm search index --queries queries.tsv --top-k 100 --run out.trec --qrels qrels.txt
    """
    from cramlm.data.task import RowFormat, read_examples
    from cramlm.retrieval.index import Index
    from cramlm.retrieval.trec import read_qrels, require_measures, run_lines
    from cramlm.storage.artifacts import publish_lines, refuse_output

    if (query is None) == (queries is None):
        raise UsageError("pass a query, or a file of queries with --queries")
    if query is not None and not query.strip():
        raise UsageError("the query is blank; pass a text, or a file of queries with --queries")
    if query is not None and os.path.isfile(query):  # noqa: PTH113 - a text may be too long for a path
        raise UsageError(f"{query}: is a file; pass it with --queries")
    if run is not None:
        refuse_output(run, queries, qrels)
    if query is not None and (run is not None or qrels is not None):
        raise UsageError("--run and --qrels need a file of queries; pass --queries")
    if query is not None and (text_column, id_column) != ("text", "id"):
        raise UsageError("--text-column and --id-column are columns of a file of queries; pass --queries")
    changed: dict[str, Any] = {name: value for name, value in (("k1", k1), ("b", b), ("norm", norm)) if value is not None}
    opened = Index.open(index)
    opened = replace(opened, scoring=replace(opened.scoring, **changed))
    if queries is None:
        assert query is not None
        _show_hits(opened, query, top_k or 10, as_json=as_json)
        return
    if qrels is not None:
        require_measures()
    judgements = None if qrels is None else read_qrels(qrels)
    examples = read_examples(queries, RowFormat(text_column, None, id_column=id_column))
    ids = [example.id for example in examples]
    hits = opened.search([example.text for example in examples], top_k or 100, threads=threads)
    if empty := [example for example, found in zip(examples, hits.ids, strict=True) if not found]:
        first = f"the first is {brief(empty[0].id)} ({brief(empty[0].text)})"
        print(f"no hits: {len(empty):,} of {counted(len(ids), 'query', 'queries')}, {first}", file=sys.stderr)
    if run is not None:
        publish_lines(run, run_lines(hits, ids))
        if not as_json:
            print(f"{counted(sum(map(len, hits.ids)), 'hit')} of {counted(len(ids), 'query', 'queries')}: {run}")
    if judgements is not None:
        _show_measures(hits, ids, judgements, as_json=as_json)
        if top_k is not None and top_k < 100:
            print(f"--top-k {top_k}: passages after the first {top_k} count as not found; pass --top-k 100 for R@100", file=sys.stderr)
    elif as_json:
        for name, documents, scores in zip(ids, hits.ids, hits.scores, strict=True):
            print(json.dumps({"query": name, "ids": documents, "scores": [float(f"{score:.9g}") for score in scores]}, ensure_ascii=False))
    elif run is None:
        sys.stdout.writelines(run_lines(hits, ids))


def _show_hits(index: Index, query: str, top_k: int, *, as_json: bool) -> None:
    """Print the hits of a query with the words that match; without a hit, the reason to stderr."""
    from cramlm.cli.console import beginning
    from cramlm.retrieval.bm25.analysis import analyze

    hits = index.explain(query, top_k)
    if not hits:
        has_terms = bool(analyze(query, index.bm25.analyzer))
        unused = "this query has only stop words and punctuation, nothing to search for"
        print("no passage shares a word with this query" if has_terms else unused, file=sys.stderr)
    for hit in hits:
        if as_json:
            print(json.dumps(hit.as_dict(), ensure_ascii=False))
        else:
            terms = "  ".join(f"{term} {weight:.2f}" for term, weight in hit.terms[:8])
            print(f"{hit.rank + 1:>3}  {hit.score:8.3f}  {hit.id}  [{hit.source}]\n     {terms}\n     {beginning(hit.text, 200)}")


def _show_measures(hits: Hits, query_ids: Sequence[str], qrels: Qrels, *, as_json: bool) -> None:
    from cramlm.retrieval.trec import any_judged, measure, passages_of_judged

    means = measure(hits, query_ids, qrels)
    judged = sum(query in qrels for query in query_ids)
    if as_json:
        print(json.dumps({"queries": judged, **means}))
    else:
        print("\n".join(f"{name:8} {mean:.4f}" for name, mean in means.items()))
        print(f"means over the {judged:,} of {len(query_ids):,} queries with judgements", file=sys.stderr)
    found = next((ids[0] for ids in hits.ids if ids), None)
    if cut := passages_of_judged(hits, query_ids, qrels):
        passage, document = cut[0]
        print(
            f"{counted(len(cut), 'hit')} counted as not relevant: passages of judged documents, like {passage!r} of {document!r}; "
            "index whole documents (cramlm index --passage-words 0 --duplicates none)",
            file=sys.stderr,
        )
    elif found is not None and not any_judged(hits, query_ids, qrels):
        document = next(iter(next(iter(qrels.values()))))
        print(
            f"no hit is a judged document: ids of the index are like {found!r}, judgements are for ids like {document!r}", file=sys.stderr
        )
