"""Comparison of engines by bench_retrieval.py: terms, queries, exact scores, differences beyond ties."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from bench_retrieval import TEXTS, compare
from cramlm.config.run import CorpusConfig
from cramlm.data.corpus import Corpus, build_corpus
from cramlm.retrieval.bm25.analysis import analyze
from terms import Queries, TermCorpus

PASSAGES = ["red blue blue", "red green", "blue?", "Größe red-red blue", "文字 green", "red blue green grey", "grey grey grey grey", "…"]


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    (tmp_path / "corpus.jsonl").write_text("".join(f'{{"text": "{text}"}}\n' for text in PASSAGES), "utf-8")
    return build_corpus(CorpusConfig(files=(str(tmp_path / "corpus.jsonl"),)), tmp_path / "store")


@pytest.fixture
def terms(corpus: Corpus, tmp_path: Path) -> TermCorpus:
    return TermCorpus.write(corpus, tmp_path / "terms")


def test_distinct_queries_come_first_and_texts_without_indexed_terms_are_dropped(terms: TermCorpus) -> None:
    queries = terms.queries(TEXTS, ["red, blue", "unheard of", "Blue red!", "green green", "blue", "RED (blue) unheard"])
    assert queries.texts == ("red, blue", "green green", "blue", "Blue red!", "RED (blue) unheard")
    assert queries.distinct == 3
    assert queries.owner.tolist() == [0, 1, 2, 0, 0]
    assert queries.count.tolist() == [1, 1, 2, 1]
    part, chosen = queries.sample(2)
    assert chosen.tolist() == [0, 2]
    assert part.texts == ("red, blue", "blue", "Blue red!", "RED (blue) unheard")
    assert part.owner.tolist() == [0, 1, 0, 0]
    assert part.count.tolist() == [1, 1, 1]


def test_scores_equal_the_bm25_formula(corpus: Corpus, terms: TermCorpus) -> None:
    queries = terms.queries(TEXTS, ["blue red blue", "green 文字"])
    documents = [Counter(analyze(document.text)) for document in corpus]
    lengths = [document.total() for document in documents]
    for number, query in enumerate(("blue red blue", "green 文字")):
        for position, document in enumerate(documents):
            expected = 0.0
            for term in analyze(query):
                frequency = sum(term in other for other in documents)
                norm = 1.2 * (0.25 + 0.75 * lengths[position] * len(documents) / sum(lengths))
                expected += np.log1p((len(documents) - frequency + 0.5) / (frequency + 0.5)) * document[term] / (document[term] + norm)
            scores = terms.scores(queries, np.array([number]), np.array([position]), "exact")
            assert scores.tolist() == pytest.approx([expected])


def write_results(folder: Path, terms: TermCorpus, queries: Queries, results: list[list[int]]) -> Path:
    """Write results in the format of engines.py."""
    folder.mkdir()
    offsets = np.cumsum([0, *map(len, results)])
    position = np.concatenate([np.array(part) for part in results])
    score = terms.scores(queries, np.repeat(np.arange(len(results)), np.diff(offsets)), position, "exact").astype(np.float32)
    for name, array in {"offsets": offsets, "position": position, "score": score}.items():
        np.save(folder / f"{TEXTS}-2-{name}.npy", array)
    return folder


def test_a_difference_is_counted_unless_it_is_a_tie_at_the_limit(tmp_path: Path) -> None:
    (tmp_path / "ties.jsonl").write_text("".join(f'{{"text": "{text}"}}\n' for text in ["red red", "red a", "red b", "blue c d"]), "utf-8")
    terms = TermCorpus.write(build_corpus(CorpusConfig(files=(str(tmp_path / "ties.jsonl"),)), tmp_path / "store"), tmp_path / "terms")
    queries = terms.queries(TEXTS, ["red", "red c"])
    ours = write_results(tmp_path / "ours", terms, queries, [[0, 1], [3, 0]])
    tied = write_results(tmp_path / "tied", terms, queries, [[0, 2], [3, 0]])
    wrong = write_results(tmp_path / "wrong", terms, queries, [[0, 1], [3, 2]])
    agreement = compare(terms, queries, np.arange(2), ours, tied, 2, "exact")
    assert (agreement["only_in_one"], agreement["unlike_pairs"], agreement["beyond_ties"]) == (2, 2, 0)
    agreement = compare(terms, queries, np.arange(2), ours, wrong, 2, "exact")
    assert (agreement["only_in_one"], agreement["unlike_pairs"], agreement["beyond_ties"]) == (1, 2, 1)
