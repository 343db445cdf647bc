"""Files of retrieval experiments: runs and relevance judgements (qrels) in TREC's formats, and the measures of a run by `ir_measures`.

run     QUERY Q0 DOCUMENT RANK SCORE TAG, a line per hit; ranks from 1
qrels   QUERY 0 DOCUMENT GRADE, a line per judgement; or BEIR's, with three columns under a header: query-id corpus-id score
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, TypeAlias

from cramlm.errors import DataError, EnvironmentFault, UsageError, brief
from cramlm.io.formats import COMPRESSIONS
from cramlm.io.paths import stamp_file
from cramlm.io.streams import ByteStream
from cramlm.retrieval.index import Hits

Qrels: TypeAlias = dict[str, dict[str, int]]
"""For each query the grade of each judged document; 0 = not relevant."""

TAG: Final = "cramlm"
MEASURES: Final = ("nDCG@10", "R@100", "RR")
_LARGEST_GRADE: Final = 1000  # trec_eval allocates memory in proportion to the largest grade
_BEIR_HEADER: Final = ["query-id", "corpus-id", "score"]


def run_lines(hits: Hits, query_ids: Sequence[str]) -> Iterator[str]:
    """Yield the lines of a TREC run. Scores have the nine digits that distinguish all float32.

    Raises:
        DataError: an id is empty or has white space, which separates the columns of a run.
    """
    assert len(query_ids) == len(hits)
    for query, ids, scores in zip(query_ids, hits.ids, hits.scores, strict=True):
        for name in (query, *ids):
            if not name or name.split() != [name]:
                raise DataError(f"id {brief(name)}: a TREC run cannot hold ids with white space; rename it, or use --json")
        for rank, (document, score) in enumerate(zip(ids, scores.tolist(), strict=True), 1):
            yield f"{query} Q0 {document} {rank} {score:.9g} {TAG}\n"


def read_qrels(path: str | Path) -> Qrels:
    """Read relevance judgements in TREC's or BEIR's format, also compressed (.gz or .zst).

    Raises:
        UsageError: the file is missing. DataError: a damaged line, a grade over 1,000, a document judged twice, or no judgement.
    """
    stamp = stamp_file(path)
    file = stamp.path
    assert isinstance(file, Path)
    qrels: Qrels = {}
    columns = 4
    lines = b"".join(ByteStream(stamp, compression=COMPRESSIONS.get(file.suffix.lower())).blocks()).split(b"\n")
    for number, line in enumerate(lines, 1):
        try:
            fields = line.decode("utf-8-sig" if number == 1 else "utf-8").split()
        except UnicodeDecodeError as error:
            raise DataError(f"{file}:{number}: not UTF-8; convert the file") from error
        if number == 1 and fields == _BEIR_HEADER:
            columns = 3
            continue
        if not fields:
            continue
        if len(fields) != columns:
            form = "QUERY 0 DOCUMENT GRADE" if columns == 4 else " ".join(_BEIR_HEADER)
            raise DataError(f"{file}:{number}: {len(fields)} columns, expected {columns}: {form}; fix the line")
        query, document, grade = fields[0], fields[-2], fields[-1]
        try:
            value = int(grade)
        except ValueError as error:
            raise DataError(f"{file}:{number}: the grade {brief(grade)} is not a whole number; fix the line") from error
        if abs(value) > _LARGEST_GRADE:
            bound = f"over {_LARGEST_GRADE:,}" if value > 0 else f"under {-_LARGEST_GRADE:,}"
            raise DataError(f"{file}:{number}: the grade {brief(grade)} is {bound}; is it the last column?")
        if document in (judged := qrels.setdefault(query, {})):
            raise DataError(f"{file}:{number}: query {brief(query)} judges document {brief(document)} twice; remove one line")
        judged[document] = value
    if not qrels:
        raise DataError(f"{file}: no judgements; pass a file with lines like QUERY 0 DOCUMENT GRADE")
    return qrels


def require_measures() -> None:
    """Raise EnvironmentFault if `ir_measures` is missing."""
    try:
        import ir_measures  # noqa: F401
    except ModuleNotFoundError as error:
        raise EnvironmentFault(f"measures need the package ir-measures (no {error.name}): pip install 'cramlm[search]'") from error


def measure(hits: Hits, query_ids: Sequence[str], qrels: Mapping[str, Mapping[str, int]]) -> dict[str, float]:
    """Return the means of `MEASURES` over the queries that have judgements; a query without hits counts as 0.

    R@100 is the recall of the first 100 hits, RR the reciprocal rank of the first relevant one. Hits with equal scores are ordered by id,
    as trec_eval does.

    Raises:
        UsageError: no query has judgements. EnvironmentFault: `ir_measures` is missing.
    """
    require_measures()
    import ir_measures

    judged = {query: dict(qrels[query]) for query in query_ids if query in qrels}
    if not judged:
        other, own = next(iter(qrels)), next(iter(query_ids), "none")
        raise UsageError(f"the judgements are for other queries, like {brief(other)}, not for {brief(own)}; check the ids (--id-column)")
    run = {
        query: dict(zip(ids, scores.tolist(), strict=True))
        for query, ids, scores in zip(query_ids, hits.ids, hits.scores, strict=True)
        if query in judged
    }
    parsed = [ir_measures.parse_measure(name) for name in MEASURES]
    means = ir_measures.calc_aggregate(parsed, judged, run)
    return {name: float(means[each]) for name, each in zip(MEASURES, parsed, strict=True)}


def any_judged(hits: Hits, query_ids: Sequence[str], qrels: Mapping[str, Mapping[str, int]]) -> bool:
    """Return True if any hit is a judged document of its query."""
    return any(not qrels.get(query, {}).keys().isdisjoint(ids) for query, ids in zip(query_ids, hits.ids, strict=True))


def passages_of_judged(hits: Hits, query_ids: Sequence[str], qrels: Mapping[str, Mapping[str, int]]) -> list[tuple[str, str]]:
    """Return (hit, document) for hits that are not judged, as their document was cut into passages (x#0 of x), while it is."""
    pairs = ((qrels[query], name) for query, ids in zip(query_ids, hits.ids, strict=True) if query in qrels for name in ids)
    return [(name, name.rpartition("#")[0]) for judged, name in pairs if name not in judged and name.rpartition("#")[0] in judged]
