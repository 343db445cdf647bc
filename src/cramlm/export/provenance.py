"""The part of provenance.json that may be published: an allow-list.

The file in an export is complete: it holds paths, URLs (which may be signed), names of servers and of sources, and words of the corpus.
A field that is not listed here is not published.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeAlias
from urllib.parse import urlsplit

Rule: TypeAlias = "bool | Callable[[str], str] | Mapping[str, Rule]"
"""True: the value as it is. A function: of a string, or of each string in a list. A mapping: the fields of a table that are published."""


def file_name(name: str) -> str:
    """Return the last part of a path or URL, without query, fragment and credentials; "?" if there is none."""
    path = urlsplit(name).path if "://" in name else name
    return re.split(r"[/\\]", path.rstrip("/\\"))[-1] or "?"


def _as_they_are(*names: str) -> dict[str, Rule]:
    return dict.fromkeys(names, True)


_RETRIEVER: Final[dict[str, Rule]] = {
    **_as_they_are("kind", "max_documents", "max_tokens", "rank_decay", "near_duplicates", "shares"),
    **_as_they_are("top_k", "per_query", "queries", "query_words", "k1", "b", "norm", "buckets", "normalise"),
    **_as_they_are("pooling", "max_length", "query_prefix", "passage_prefix", "max_clauses"),
    "encoder": file_name,
}
_RETRIEVERS: Final[dict[str, Rule]] = {**_RETRIEVER, "retrievers": _RETRIEVER}
_CONFIG: Final[dict[str, Rule]] = {
    **_as_they_are("name", "seed", "budget", "tokens_per_second", "threads", "precision", "dev_metric", "logit_adjustment"),
    **_as_they_are("model", "tokenizer", "encoder", "head", "phases", "baseline", "teacher", "distributed"),
    "init": file_name,
    "task": {
        **_as_they_are("kind", "dev_fraction", "max_record_bytes", "on_bad_row", "unseen_labels"),
        **dict.fromkeys(("train", "dev", "test"), file_name),
    },
    "corpus": {"files": file_name, **_as_they_are("passage_words", "duplicates", "max_record_bytes", "on_bad_row")},
    "retriever": _RETRIEVERS,
}
PUBLISHED: Final[dict[str, Any]] = {
    **_as_they_are("parameters", "vocab_size", "max_length", "labels", "kind", "mlm", "prompt", "versions", "precision", "threads"),
    **_as_they_are("phases", "seconds", "task", "model", "fit"),
    "config": _CONFIG,
    "init": {"name": file_name, "fingerprint": True, "sha256": True},
    "retriever": _RETRIEVERS,
    "corpus": {
        **_as_they_are("rows", "passages", "words", "bytes"),
        "files": {"name": file_name, **_as_they_are("bytes", "sha256", "rows_read", "rows_used", "rows_rejected")},
    },
    "selection": _as_they_are("queries", "documents", "words", "bytes", "tokens", "dropped", "rank", "score", "task_likeness"),
    "scores": _as_they_are("models", "verdict", "comparison", "flops", "labels", "kind"),
}
"""The published fields of provenance.json."""


def published(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the published part of `facts`, the content of a provenance.json."""
    kept = _kept(facts, PUBLISHED)
    assert isinstance(kept, dict)
    return kept


def _kept(value: Any, rule: Rule) -> Any:
    if rule is True or value is None:
        return value
    if isinstance(value, list):
        return [_kept(each, rule) for each in value]
    if isinstance(rule, Mapping):
        return {name: _kept(each, rule[name]) for name, each in value.items() if name in rule} if isinstance(value, Mapping) else None
    return rule(value) if callable(rule) and isinstance(value, str) else None
