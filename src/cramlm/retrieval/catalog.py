"""A corpus and its BM25 index in one folder: written by `cramlm index`, read by `select` and `search`.

The folder is a store (corpora/<key>, indexes/<key>); `catalog.json` names the corpus and the index. `fit --store FOLDER` can use it too.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cramlm.config.run import CorpusConfig
from cramlm.data.corpus import Corpus, build_corpus
from cramlm.errors import ArtifactError
from cramlm.io.executors import Executor, available_cores
from cramlm.records import Emit, silent
from cramlm.retrieval.bm25.index import Bm25Index, build_index
from cramlm.storage.artifacts import environment_faults, publish_file

CATALOG = "catalog.json"


@dataclass(frozen=True, slots=True)
class SearchResult:
    """A passage retrieved by a query. terms: shared terms with what each adds to the score, largest first."""

    rank: int
    score: float
    position: int
    id: str
    source: str
    text: str
    terms: tuple[tuple[str, float], ...]

    def as_dict(self) -> dict[str, Any]:
        """Return JSON data."""
        return asdict(self)


def build_catalog(
    config: CorpusConfig, folder: Path, *, workers: int | None = None, executor: Executor | None = None, emit: Emit = silent
) -> tuple[Corpus, Bm25Index]:
    """Read and index a corpus in `folder`, by `workers` processes (None = one per core) or `executor`; up-to-date results are reused."""
    corpus = build_corpus(config, folder, workers=workers, executor=executor, emit=emit)
    index = build_index(corpus, folder, workers=workers or available_cores(), executor=executor, emit=emit)
    names = {"corpus": str(corpus.path.relative_to(folder)), "index": str(index.path.relative_to(folder))}
    publish_file(folder / CATALOG, (json.dumps(names, indent=1) + "\n").encode())
    return corpus, index


def open_catalog(folder: Path) -> tuple[Corpus, Bm25Index]:
    """Open the corpus and index of a folder.

    Raises:
        ArtifactError: the folder was not written by `cramlm index`, or is damaged.
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
    return Corpus.open(corpus), Bm25Index.open(index)


def search_catalog(folder: Path, query: str, *, limit: int) -> list[SearchResult]:
    """Return the best `limit` passages for a text, best first; empty if it shares no term with the corpus."""
    corpus, index = open_catalog(folder)
    hits = index.search([query], limit=limit)
    results = []
    for rank, (position, score) in enumerate(zip(hits.position.tolist(), hits.score.tolist(), strict=True)):
        document = corpus.document(position)
        terms = tuple(index.explain(query, position))
        results.append(SearchResult(rank, float(score), position, document.id, document.source, document.text, terms))
    return results
