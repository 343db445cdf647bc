from __future__ import annotations

import re
import tempfile
import warnings
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from retrieval_fixtures import TextCorpus, index_texts, invented_texts, reference_search, results, terms_of

from cramlm.errors import UsageError
from cramlm.retrieval.bm25 import search as bm25
from cramlm.retrieval.bm25 import segment as segment_module
from cramlm.retrieval.bm25.analysis import analyze
from cramlm.retrieval.bm25.index import Bm25Index, build_index
from cramlm.retrieval.bm25.kernels import BLOCK
from cramlm.retrieval.bm25.search import Scoring

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import bm25s

_words = st.sampled_from(["red", "blue", "green", "one", "two", "three", "文", "é", "elephantine"])
_texts = st.lists(st.lists(_words, max_size=12).map(" ".join), min_size=1, max_size=30)


def assert_same(found: list[tuple[int, float]], expected: list[tuple[int, float]]) -> None:
    """Equal scores (one unit is 2.4e-7), and equal positions but for those whose scores differ by less than the arithmetic's rounding."""
    assert [score for _, score in found] == pytest.approx([score for _, score in expected], rel=1e-6, abs=1e-6)
    for (position, _), (wanted, score) in zip(found, expected, strict=True):
        if position != wanted:
            others = dict(expected)
            assert others.get(position, expected[-1][1]) == pytest.approx(score, rel=2e-6)


@given(_texts, _texts, st.integers(1, 40), st.sampled_from([(1.2, 0.75), (0.0, 0.0), (2.0, 1.0), (0.9, 0.4)]))
@example(["red"], ["red"], 5, (1.2, 0.75))  # one document, a limit above their number
@example(["red blue"] * 20, ["blue red red"], 7, (1.2, 0.75))  # all documents equal
@example(["", "", "文"], ["文 文", ""], 3, (1.2, 0.75))
def test_results_equal_brute_force(texts: list[str], queries: list[str], limit: int, parameters: tuple[float, float]) -> None:
    k1, b = parameters
    with tempfile.TemporaryDirectory() as folder:
        found = results(index_texts(texts, Path(folder)), queries, limit=limit, scoring=Scoring(k1, b))
    for query, hits in zip(queries, found, strict=True):
        assert_same(hits, reference_search(texts, query, limit, k1=k1, b=b))


@pytest.mark.parametrize("alphabet", ["", "".join(map(chr, range(0x4E00, 0x4E00 + 500)))], ids=["words", "without spaces"])
def test_scores_and_sets_equal_those_of_bm25s_on_the_same_terms(tmp_path: Path, alphabet: str) -> None:
    texts, queries = invented_texts(3000, seed=1, alphabet=alphabet), invented_texts(100, seed=2, words=(1, 150), alphabet=alphabet)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peer = bm25s.BM25(method="lucene", k1=1.2, b=0.75)
        peer.index([terms_of(text) for text in texts], show_progress=False)
        terms = [[term for term in terms_of(query) if term in peer.vocab_dict] for query in queries]
        peer_positions, peer_scores = peer.retrieve(terms, k=50, show_progress=False)
    for query, hits in enumerate(results(index_texts(texts, tmp_path), queries, limit=50)):
        positive = peer_scores[query] > 0
        assert [score for _, score in hits] == pytest.approx(peer_scores[query][positive].tolist(), rel=1e-5)
        unlike = {position for position, _ in hits} ^ set(peer_positions[query][positive].tolist())  # up to ties at the end
        scores = dict(hits) | dict(zip(peer_positions[query].tolist(), peer_scores[query].tolist(), strict=True))
        assert all(scores[position] == pytest.approx(hits[-1][1], rel=1e-5) for position in unlike)


@pytest.mark.parametrize("frequency", [1, 14, 15, 16, 254, 255, 256, 70_000])
def test_term_frequencies_of_any_size_are_exact(tmp_path: Path, frequency: int) -> None:
    texts = ["red " * frequency + "blue", "red blue", "red red green"]
    assert_same(results(index_texts(texts, tmp_path), ["red blue"], limit=3)[0], reference_search(texts, "red blue", 3))


@pytest.mark.parametrize("query", ["", "  ", "unknown words only", "?!", "\ud83d"])
def test_a_query_without_a_known_term_returns_nothing(tmp_path: Path, query: str) -> None:
    found = results(index_texts(["red blue", "green"], tmp_path), [query, "red"], limit=2)
    assert [len(hits) for hits in found] == [0, 1]


def test_a_query_of_50_000_words_equals_the_reference(tmp_path: Path) -> None:
    texts = invented_texts(300, seed=5)
    query = " ".join(invented_texts(1200, seed=6))
    assert len(query.split()) > 50_000
    assert_same(results(index_texts(texts, tmp_path), [query], limit=20)[0], reference_search(texts, query, 20))


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], Bm25Index]:
    """Six blocks of passages; the first 200 of each share terms of their own, so that thresholds estimated from one block are too high."""
    texts = invented_texts(23_000, seed=3, words=(3, 12), vocabulary=500)
    for block in range(6):
        part = slice(block * BLOCK, block * BLOCK + 200)
        texts[part] = [f"{text} zebra{block} quagga" for text in texts[part]]
    return texts, index_texts(texts, tmp_path_factory.mktemp("large"))


def test_results_do_not_depend_on_order_threads_or_batches(large: tuple[list[str], Bm25Index], monkeypatch: pytest.MonkeyPatch) -> None:
    _, index = large
    queries = [*invented_texts(100, seed=4, vocabulary=500), "zebra1", "quagga zebra2 ba"]
    one = results(index, queries, limit=30)
    assert results(index, queries[::-1], limit=30) == one[::-1]
    assert results(index, queries + queries, limit=30, threads=3) == one + one
    monkeypatch.setattr(bm25, "CANDIDATE_BYTES", 1)  # the fewest queries per pass
    assert results(index, queries, limit=30, threads=2) == one


def test_of_a_large_index_a_block_at_a_time_is_resident(
    large: tuple[list[str], Bm25Index], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts, index = large
    expected = results(index, texts[:50], limit=30)
    monkeypatch.setattr(segment_module, "SMALL_FILE", 0)  # map every array
    mapped = Bm25Index.open(index.path)
    ((_, segment),) = mapped.segments

    def resident() -> list[int]:
        """Resident kB of the postings and of their dictionary."""
        areas = re.split(r"(?m)^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text())
        files = [str(segment.path / f"{name}.npy") for name in ("postings", "dictionary")]
        return [sum(int(re.search(r"Rss:\s+(\d+)", area)[1]) for area in areas if file in area) for file in files]

    assert results(mapped, texts[:50], limit=30) == expected
    assert min(resident()) > 0
    monkeypatch.setattr(bm25, "MAX_CACHED_BYTES", 0)
    after_blocks: list[list[int]] = []
    found = results(mapped, texts[:50], limit=30, emit=lambda event: after_blocks.append(resident()))
    assert found == expected
    assert len(after_blocks) >= 6
    assert after_blocks[-1] == [0, 0]


@pytest.mark.parametrize("limit", [50, 250, 5000])
def test_documents_in_clumps_are_all_found(large: tuple[list[str], Bm25Index], limit: int) -> None:
    texts, index = large
    queries = [f"zebra{block} {texts[6000]} {texts[9000]}" for block in range(6)]
    found = results(index, queries, limit=limit)
    for query, hits in list(zip(queries, found, strict=True))[::3]:
        assert_same(hits, reference_search(texts, query, limit))


def test_thousands_of_equal_documents_are_ranked_by_position(tmp_path: Path) -> None:
    texts = [*["red blue green"] * 9000, "red"]
    index = index_texts(texts, tmp_path)
    found = results(index, ["green", "red", "blue green"], limit=10)
    assert [[position for position, _ in hits] for hits in found] == [list(range(10)), [9000, *range(9)], list(range(10))]


@pytest.mark.parametrize("cuts", [[23_000], [1, 22_999], [5000, 4096, 0, 10_000, 3904]])
def test_parts_and_segments_do_not_matter(
    large: tuple[list[str], Bm25Index], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cuts: list[int]
) -> None:
    texts, index = large
    monkeypatch.setattr(segment_module, "SEGMENT_PASSAGES", 9000)
    other = build_index(TextCorpus(texts, cuts=cuts), tmp_path)
    assert len(other.segments) > 1
    queries = [*invented_texts(100, seed=4, vocabulary=500), "zebra1", "quagga zebra2 ba"]
    assert results(other, queries, limit=30) == results(index, queries, limit=30)
    assert other.explain("zebra5 quagga", 20_500) == index.explain("zebra5 quagga", 20_500)


def test_lengths_as_lucene_stores_them_change_scores_as_the_formula_says(tmp_path: Path) -> None:
    texts = ["red " * 3 + "blue " * length for length in (1, 36, 37, 38, 80, 200, 1000)]
    index = index_texts(texts, tmp_path)
    stored = [4, 39, 40, 40, 80, 200, 984]  # of 4, 39, 40, 41, 83, 203, 1003 by SmallFloat: above 39 four leading bits are kept
    average = sum(3 + length for length in (1, 36, 37, 38, 80, 200, 1000)) / 7
    weight = np.log1p((7 - 7 + 0.5) / 7.5)
    expected = {position: weight * 3 / (3 + 1.2 * (0.25 + 0.75 * length / average)) for position, length in enumerate(stored)}
    found = results(index, ["red"], limit=7, scoring=Scoring(norm="lucene"))[0]
    assert dict(found) == pytest.approx(expected, rel=1e-6, abs=1e-6)


def test_an_exact_copy_of_a_passage_is_its_first_hit_in_any_script(tmp_path: Path) -> None:
    passages = {
        "english": "The kinase << TP53 >> was inhibited by [[ aspirin ]] in every sample we looked at.",
        "german": "Die Straße führt über eine Brücke zum größten Flußhafen der Gegend.",
        "yoruba": "Ọmọ náà lọ sí ilé-ẹ̀kọ́ ní òwúrọ̀ kùtùkùtù, ó sì padà ní ìrọ̀lẹ́.",
        "russian": "Учёные изучили влияние света на рост растений в теплице.",
        "greek": "Οι ερευνητές μελέτησαν την επίδραση του φωτός στα φυτά.",
        "arabic": "درس الباحثون تأثير الضوء على نمو النباتات.",
        "hebrew": "החוקרים בדקו את השפעת האור על צמיחת הצמחים.",
        "hindi": "वैज्ञानिकों ने पौधों की वृद्धि पर प्रकाश के प्रभाव का अध्ययन किया।",
        "tamil": "ஒளியின் தாக்கத்தை ஆராய்ச்சியாளர்கள் ஆய்வு செய்தனர்.",
        "japanese": "研究者は植物の成長に対する光の影響を調べた。",
        "chinese": "研究人员研究了光照对植物生长的影响。",
        "korean": "연구자들은 식물 성장에 대한 빛의 영향을 조사했다.",
        "thai": "นักวิจัยศึกษาผลของแสงต่อการเจริญเติบโตของพืช",
        "lao": "ນັກຄົ້ນຄວ້າສຶກສາຜົນກະທົບຂອງແສງ",
        "khmer": "អ្នកស្រាវជ្រាវបានសិក្សាពីឥទ្ធិពលនៃពន្លឺ",
        "burmese": "သုတေသီများသည် အလင်း၏ အကျိုးသက်ရောက်မှုကို လေ့လာခဲ့သည်။",
        "emoji": "👩‍👩‍👧 famille ❤️ nombreuse à l’œuvre",
    }
    texts = [*invented_texts(200, seed=9), *passages.values()]
    index = index_texts(texts, tmp_path)
    for place, hits in enumerate(results(index, list(passages.values()), limit=3)):
        assert hits[0][0] == 200 + place


def test_explain_names_the_shared_terms_and_adds_up_to_the_score(large: tuple[list[str], Bm25Index]) -> None:
    texts, index = large
    query = f"zebra0 zebra0 nowhere {texts[7]}"
    for position, score in results(index, [query], limit=5)[0]:
        terms = index.explain(query, position)
        assert {term for term, _ in terms} == set(analyze(query)) & set(analyze(texts[position]))
        assert sum(part for _, part in terms) == pytest.approx(score, rel=1e-6)
        assert [part for _, part in terms] == sorted((part for _, part in terms), reverse=True)
    assert index.explain("nowhere", 0) == []
    for outside in (-1, len(texts)):
        with pytest.raises(UsageError, match=f"position {outside:,} is not in an index of {len(texts):,} documents"):
            index.explain("zebra5", outside)


def test_settings_out_of_range_are_refused_and_no_queries_give_no_hits(tmp_path: Path) -> None:
    for scoring in ({"k1": -1}, {"b": 1.5}, {"k1": float("nan")}, {"norm": "exactly"}):
        with pytest.raises(UsageError, match="BM25 needs"):
            Scoring(**scoring)
    index = index_texts(["red"], tmp_path)
    for limit, threads in ((0, 1), (1, 0)):
        with pytest.raises(UsageError, match="search needs"):
            index.search(["red"], limit=limit, threads=threads)
    assert index.search([], limit=5) == []
    ((position, score),) = index.search([""], limit=5)
    assert (len(position), position.dtype, score.dtype) == (0, np.int64, np.float32)
