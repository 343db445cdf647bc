"""What the tests of retrievers and selections share: a published corpus and a task."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cramlm.config.retriever import RetrieverConfig
from cramlm.config.run import CorpusConfig
from cramlm.data.corpus import Corpus, build_corpus
from cramlm.records import Emit, Example, Selection, Task, silent
from cramlm.retrieval.bm25.index import Bm25Index
from cramlm.retrieval.retrievers import RetrievalContext
from cramlm.retrieval.selection import SelectionTable, select_documents
from jsonl import read_json, write_jsonl

World = tuple[Corpus, Bm25Index | None]


def write_corpus(folder: Path, texts: Sequence[str]) -> Corpus:
    """A corpus of these texts in folder/store, with ids d0, d1, ... and the sources even and odd."""
    file = folder / "corpus.jsonl"
    rows = [{"id": f"d{i}", "source": "even" if i % 2 == 0 else "odd", "text": text} for i, text in enumerate(texts)]
    write_jsonl(file, rows)
    return build_corpus(CorpusConfig(files=(str(file),)), folder / "store")


def make_task(train: Sequence[str], dev: Sequence[str] = ("something of no concern",), pair: str | None = None) -> Task:
    """Training and dev texts with labels a and b in turn, each with the same second half, if any."""

    def examples(split: str, texts: Sequence[str]) -> tuple[Example, ...]:
        return tuple(Example(f"{split}-{i}", text, pair, "a" if i % 2 else "b") for i, text in enumerate(texts))

    return Task(examples("train", train), examples("dev", dev), (), ("a", "b"), dev_is_split_from_train=False)


def select(world: World, task: Task, out: Path, config: RetrieverConfig, *, emit: Emit = silent, **context: Any) -> Selection:
    """Publish a selection to `out`. context: fields of `RetrievalContext`."""
    corpus, index = world
    resources = RetrievalContext(corpus.store, **{"seed": 1, "index": index, **context})
    return select_documents(config, corpus, task, out=out, context=resources, emit=emit)


def report_of(folder: Path) -> dict[str, Any]:
    report: dict[str, Any] = read_json(folder / "report.json")
    return report


def selected(folder: Path) -> list[dict[str, Any]]:
    """The rows of a published selection."""
    return list(SelectionTable.open(folder).rows())
