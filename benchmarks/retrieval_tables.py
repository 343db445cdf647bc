"""The README's tables of bench_retrieval.py from its results."""

from __future__ import annotations

from typing import Any

PEERS = ("bm25s", "tantivy", "lucene")


def print_tables(measured: dict[str, Any]) -> None:
    """Markdown: whole batches, single queries, building."""
    for corpus in measured["corpora"]:
        (count, distinct), sample = corpus["queries"]["texts"], corpus["sample"]["texts"]
        size = f"{corpus['passages']:,} passages, {corpus['words'] / 1e6:.1f} M words, {corpus['postings'] / 1e6:.1f} M postings"
        print(f"\n### {corpus['corpus']}: {size}\n")
        print(f"All {count:,} training texts of {measured['task']}, {distinct:,} of them distinct queries; CPU seconds of one core.")
        if sample[1] < distinct and set(corpus["engines"]) & set(PEERS):
            scaled = f"{sample[0]:,} texts ({sample[1]:,} distinct)"
            print(f"The other engines: scaled up from {scaled}; the sets are compared over these.")
        print()
        _print_batches(corpus)
        if len(corpus["queries"]) > 1:
            kind = "150 words"
            few = f"; the other engines: mean over {corpus['sample'][kind][1]}" if corpus["sample"][kind] != corpus["queries"][kind] else ""
            print(f"\nMilliseconds for a distinct query, in a batch of {corpus['queries'][kind][1]}{few}.\n")
            _print_single(corpus)
        print("\nText on disk to index on disk.\n")
        _print_building(corpus)
    for name, why in sorted({(name, figures["missing"]) for name, figures in _all_engines(measured) if "missing" in figures}):
        print(f"\n{name}: not measured, {why}")
    print()


def _print_batches(corpus: dict[str, Any]) -> None:
    _print_row("K", "engine", "all texts", "ratio", "distinct queries only", "ratio", "union", "in one union only", "pairs beyond ties")
    _print_row(*["---"] * 9)
    scale = [whole / part for whole, part in zip(corpus["queries"]["texts"], corpus["sample"]["texts"], strict=True)]
    for column, (limit, (own, _)) in enumerate(_seconds(corpus["engines"]["cramlm"], "texts").items()):
        for name, figures in corpus["engines"].items():
            if limit not in (seconds := _seconds(figures, "texts")):
                continue
            every, distinct = seconds[limit]
            if name not in PEERS:
                union = f"{figures['unions'][column]:,}" if "unions" in figures else ""
                _print_row(limit, name, f"{every:.2f}", "", "", "", union, "", "")
                continue
            every, distinct = every * scale[0], distinct * scale[1]
            agreement = {row["limit"]: row for row in figures.get("agreement", [])}.get(limit)
            _print_row(limit, name, f"{every:.2f}", f"{every / own:.1f}x", f"{distinct:.2f}", f"{distinct / own:.1f}x", *_sets(agreement))


def _sets(agreement: dict[str, Any] | None) -> list[str]:
    """Return the cells that compare the result sets; with pairs beyond ties, the largest relative distance from the last score."""
    if agreement is None:
        return ["not compared"] * 3
    gap = f" (up to {agreement['largest_gap']:.0e})" if agreement["beyond_ties"] else ""
    return [f"{agreement['peer_union']:,}", f"{agreement['only_in_one']:,}", f"{agreement['beyond_ties']:,}{gap}"]


def _print_single(corpus: dict[str, Any]) -> None:
    kinds = [kind for kind in corpus["queries"] if kind != "texts"]
    limits = list(_seconds(corpus["engines"]["cramlm"], "texts"))
    _print_row("engine", *(f"{kind}, K={limit}" for kind in kinds for limit in limits))
    _print_row(*["---"] * (1 + len(kinds) * len(limits)))
    for name, figures in corpus["engines"].items():
        if not _seconds(figures, "texts"):
            continue
        searched = corpus["sample" if name in PEERS else "queries"]
        milliseconds = [1000 * _seconds(figures, kind)[limit][1] / searched[kind][1] for kind in kinds for limit in limits]
        _print_row(name, *(f"{value:.2f}" for value in milliseconds))


def _print_building(corpus: dict[str, Any]) -> None:
    _print_row("", "passages/s, one core", "bytes per posting", "peak memory, MB")
    _print_row(*["---"] * 4)
    if corpus["reading_seconds"]:
        _print_row("cramlm, reading the corpus", f"{corpus['passages'] / corpus['reading_seconds']:,.0f}", "", "")
    for name, figures in corpus["engines"].items():
        if "build_seconds" not in figures or name == "cramlm, one-byte lengths":
            continue
        rate = f"{corpus['passages'] / figures['build_seconds']:,.0f}" + (" (two cores)" if "workers" in name else "")
        label = f"{name} {figures['note']}".strip()
        _print_row(label, rate, f"{figures['bytes'] / corpus['postings']:.2f}", f"{figures['build_peak_megabytes']:,.0f}")


def _seconds(figures: dict[str, Any], queries: str) -> dict[int, tuple[float, float]]:
    """limit -> seconds for all queries, and for the distinct ones."""
    searches = (search for search in figures.get("searches", []) if search["queries"] == queries)
    return {search["limit"]: (search["all_seconds"], search["distinct_seconds"]) for search in searches}


def _all_engines(measured: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    return [item for corpus in measured["corpora"] for item in corpus["engines"].items()]


def _print_row(*cells: object) -> None:
    print(f"| {' | '.join(map(str, cells))} |")
