"""A corpus and its index in one folder, as `cramlm index` writes it and `select` and `search` read it.

The folder is a store (corpora/<key>, indexes/<key>) with `catalog.json` naming the pair in use; `fit --store FOLDER` shares it.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cramlm.artifacts import environment_faults, publish_file, wait_while_locked
from cramlm.config import CorpusConfig
from cramlm.data.corpus import Corpus, build_corpus, read_share
from cramlm.data.executors import Executor, Share
from cramlm.data.workers import available_cores
from cramlm.errors import ArtifactError
from cramlm.records import Emit, Event, silent
from cramlm.retrieval.index import Index, build_index, build_shards, missing_shards, plan

CATALOG = "catalog.json"


@dataclass(frozen=True, slots=True)
class Found:
    """One passage that a query retrieves; `terms` are the words both share with what each adds to the score, heaviest first."""

    rank: int
    score: float
    position: int
    id: str
    source: str
    text: str
    terms: tuple[tuple[str, float], ...]

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON."""
        return asdict(self)


def build_catalog(
    config: CorpusConfig, folder: Path, *, workers: int | None = None, executor: Executor | None = None, emit: Emit = silent
) -> tuple[Corpus, Index]:
    """Read and index the corpus in `folder`, by `workers` processes (None = one per core) or by `executor`; what is fresh is kept."""
    corpus = build_corpus(config, folder, workers=workers, executor=executor, emit=emit)
    index = build_index(corpus, folder, workers=workers or available_cores(), executor=executor, emit=emit)
    names = {"corpus": str(corpus.path.relative_to(folder)), "index": str(index.path.relative_to(folder))}
    publish_file(folder / CATALOG, (json.dumps(names, indent=1) + "\n").encode())
    return corpus, index


def build_share(config: CorpusConfig, folder: Path, share: Share, executor: Executor, *, emit: Emit = silent) -> str:
    """One share of `build_catalog`: of reading the parts, then, when all parts are there, of building the index's shards. Any number of
    shares may run at a time. Returns what is missing and what to do about it, in a line.
    """
    missing, parts = read_share(config, folder, share, executor, emit=emit)
    if missing:
        return f"{missing} of {parts} parts are not read yet; run the other shares, then this command again"

    def tell(message: str) -> None:
        emit(Event("note", "corpus", f"waiting: {message}"))

    corpus = wait_while_locked(lambda: build_corpus(config, folder, executor=executor, emit=emit), tell)
    runs = plan(corpus, folder)
    build_shards(corpus, missing_shards(share.of(runs), folder), folder, executor, emit=emit)
    if left := len(missing_shards(runs, folder)):
        return f"{left} of {len(runs)} index shards are not built yet; run the other shares, or this command without --shard"
    return f"all {parts} parts are read, all {len(runs)} index shards are built; run this command without --shard to publish the index"


def open_catalog(folder: Path) -> tuple[Corpus, Index]:
    """The corpus and index of a folder.

    Raises:
        ArtifactError: if `cramlm index` did not write it, or a part is damaged.
    """
    try:
        with environment_faults(folder):
            content = (folder / CATALOG).read_bytes() if (folder / CATALOG).is_file() else b""
        names = json.loads(content)
        corpus, index = folder / names["corpus"], folder / names["index"]
    except (ValueError, KeyError, TypeError) as error:
        raise ArtifactError(
            f"{folder}: not an index folder (no readable {CATALOG}); build it with `cramlm index FILES --out {folder}`"
        ) from error
    return Corpus.open(corpus), Index.open(index)


def search_catalog(folder: Path, query: str, *, limit: int) -> list[Found]:
    """The best `limit` passages for one text, best first; empty if it shares no word with the corpus."""
    corpus, index = open_catalog(folder)
    hits = index.search([query], limit=limit)
    found = []
    for rank, (position, score) in enumerate(zip(hits.position.tolist(), hits.score.tolist(), strict=True)):
        document = corpus.document(position)
        terms = tuple(index.explain(query, position))
        found.append(Found(rank, float(score), position, document.id, document.source, document.text, terms))
    return found
