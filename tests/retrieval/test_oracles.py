"""Search beside independent engines on the same terms: a product of scipy's sparse matrices, and Lucene itself where it is at hand.

Sets are compared up to ties: a document that only one side returned must score, there, what the last one returned scores. bm25s is in
test_bm25.py.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse
from hypothesis import example, given
from hypothesis import strategies as st
from retrieval_fixtures import index_texts, invented_texts, results, terms_of
from sklearn.feature_extraction.text import CountVectorizer

from cramlm.retrieval.bm25.analysis import analyze
from cramlm.retrieval.bm25.index import Bm25Index
from cramlm.retrieval.bm25.search import LENGTHS, Scoring, lucene_lengths
from lucene_peer import Lucene

RELATIVE = 1e-6

# What org.apache.lucene.util.SmallFloat of Lucene 9.9.1 printed: byte4ToInt of the bytes 0..255, and (length, intToByte4(length) & 0xff).
LUCENE_LENGTHS = [
    *range(40), 40, 42, 44, 46, 48, 50, 52, 54, 56, 60, 64, 68, 72, 76, 80, 84, 88, 96, 104, 112, 120, 128, 136, 144, 152, 168, 184, 200,
    216, 232, 248, 264, 280, 312, 344, 376, 408, 440, 472, 504, 536, 600, 664, 728, 792, 856, 920, 984, 1048, 1176, 1304, 1432, 1560, 1688,
    1816, 1944, 2072, 2328, 2584, 2840, 3096, 3352, 3608, 3864, 4120, 4632, 5144, 5656, 6168, 6680, 7192, 7704, 8216, 9240, 10264, 11288,
    12312, 13336, 14360, 15384, 16408, 18456, 20504, 22552, 24600, 26648, 28696, 30744, 32792, 36888, 40984, 45080, 49176, 53272, 57368,
    61464, 65560, 73752, 81944, 90136, 98328, 106520, 114712, 122904, 131096, 147480, 163864, 180248, 196632, 213016, 229400, 245784,
    262168, 294936, 327704, 360472, 393240, 426008, 458776, 491544, 524312, 589848, 655384, 720920, 786456, 851992, 917528, 983064, 1048600,
    1179672, 1310744, 1441816, 1572888, 1703960, 1835032, 1966104, 2097176, 2359320, 2621464, 2883608, 3145752, 3407896, 3670040, 3932184,
    4194328, 4718616, 5242904, 5767192, 6291480, 6815768, 7340056, 7864344, 8388632, 9437208, 10485784, 11534360, 12582936, 13631512,
    14680088, 15728664, 16777240, 18874392, 20971544, 23068696, 25165848, 27263000, 29360152, 31457304, 33554456, 37748760, 41943064,
    46137368, 50331672, 54525976, 58720280, 62914584, 67108888, 75497496, 83886104, 92274712, 100663320, 109051928, 117440536, 125829144,
    134217752, 150994968, 167772184, 184549400, 201326616, 218103832, 234881048, 251658264, 268435480, 301989912, 335544344, 369098776,
    402653208, 436207640, 469762072, 503316504, 536870936, 603979800, 671088664, 738197528, 805306392, 872415256, 939524120, 1006632984,
    1073741848, 1207959576, 1342177304, 1476395032, 1610612760, 1744830488, 1879048216, 2013265944,
]  # fmt: skip
LUCENE_BYTES = [
    (0, 0), (1, 1), (23, 23), (24, 24), (39, 39), (40, 40), (41, 40), (42, 41), (55, 47), (56, 48), (57, 48), (100, 57), (158, 64),
    (161, 64), (500, 78), (1000, 87), (5000, 105), (65535, 135), (1000000, 167), (2013265943, 254), (2013265944, 255), (2147483647, 255),
]  # fmt: skip


COMMON_HAN = "的一是不了人我在有他这中大来上国个到说们为子和你地出道也时年得就那要下以生会"


def hard_texts() -> list[str]:
    """1,600 passages: invented English, Han without spaces, Yoruba with combining marks; terms up to 900 times; empty ones; copies."""
    texts = invented_texts(900, seed=1) + invented_texts(300, seed=2, alphabet=COMMON_HAN)
    texts += [text.replace("a", "á").replace("o", "ọ̀") for text in invented_texts(150, seed=3)]
    texts += [f"{text} {text.split()[0]}" * count for count, text in zip([2, 9, 16, 17, 40, 300, 900] * 10, texts, strict=False)]
    texts += ["", " ", "?! --"] * 20 + texts[:150]
    order = np.random.default_rng(4).permutation(len(texts))
    return [texts[place] for place in order.tolist()]


@dataclass(frozen=True)
class Oracle:
    """Texts and queries, and how often scikit-learn counts each term in them (CSR, one row each)."""

    texts: list[str]
    queries: list[str]
    text_counts: scipy.sparse.csr_array
    query_counts: scipy.sparse.csr_array

    def scores(self, *, k1: float, b: float) -> np.ndarray:
        """float64 (queries, texts): the formula of bm25.py as a product of sparse matrices."""
        counts = self.text_counts.tocoo()
        lengths = self.text_counts.sum(axis=1)
        containing = np.bincount(counts.col, minlength=counts.shape[1])
        idf = np.log1p((len(self.texts) - containing + 0.5) / (containing + 0.5))
        norms = k1 * (1 - b + b * lengths / lengths.mean())
        impacts = idf[counts.col] * counts.data / (counts.data + norms[counts.row])
        return (self.query_counts @ scipy.sparse.csr_array((impacts, (counts.row, counts.col)), shape=counts.shape).T).toarray()


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    """A hundred queries, short and long ones, words repeated, and passages themselves, in every script that the texts have."""
    texts = hard_texts()
    queries = [*invented_texts(60, seed=5, words=(1, 150)), *texts[:40], " ".join(texts[40:44]), "ba ba ba co", "的人"]
    counter = CountVectorizer(analyzer=terms_of, dtype=np.float64)
    text_counts = scipy.sparse.csr_array(counter.fit_transform(texts))
    return Oracle(texts, queries, text_counts, scipy.sparse.csr_array(counter.transform(queries)))


@pytest.fixture(scope="module")
def index(oracle: Oracle, tmp_path_factory: pytest.TempPathFactory) -> Bm25Index:
    return index_texts(oracle.texts, tmp_path_factory.mktemp("oracle"))


def assert_equal_up_to_ties(found: list[tuple[int, float]], scores: np.ndarray, limit: int, *, fine: float | None = None) -> None:
    """`found` are the best `limit` of `scores` (> 0), best first, each with its score, to within `fine`."""
    position = np.array([position for position, _ in found], np.int64)
    score = np.array([score for _, score in found])
    assert len(np.unique(position)) == len(found) == min(limit, int((scores > 0).sum()))
    fine = (
        1e-7 * scores.max() if fine is None else fine
    )  # the unit of a query's scores grows with its size, and some here repeat a word 900 times
    np.testing.assert_allclose(score, scores[position], rtol=RELATIVE, atol=fine)
    np.testing.assert_allclose(score, np.sort(scores)[::-1][: len(found)], rtol=RELATIVE, atol=fine)


@pytest.mark.parametrize(("k1", "b", "limit"), [(1.2, 0.75, 50), (1.2, 0.75, 5000), (0.9, 0.4, 7), (2.0, 1.0, 300), (0.0, 0.0, 100)])
def test_search_equals_a_sparse_matrix_product(oracle: Oracle, index: Bm25Index, k1: float, b: float, limit: int) -> None:
    expected = oracle.scores(k1=k1, b=b)
    for found, scores in zip(results(index, oracle.queries, limit=limit, scoring=Scoring(k1, b)), expected, strict=True):
        assert_equal_up_to_ties(found, scores, limit)


def test_lengths_are_rounded_as_lucene_rounds_them() -> None:
    assert LENGTHS.tolist() == LUCENE_LENGTHS
    lengths, codes = np.array(LUCENE_BYTES).T
    assert lucene_lengths(lengths).tolist() == LENGTHS[codes].tolist()
    assert lucene_lengths(np.arange(40)).tolist() == list(range(40))


@pytest.mark.skipif(
    not os.environ.get("LUCENE_JAR") or not shutil.which("javac"), reason="needs Java and a jar with Lucene 9 in $LUCENE_JAR"
)
def test_search_with_one_byte_lengths_equals_lucene(oracle: Oracle, tmp_path: Path) -> None:
    """Lucene counts only documents with terms, so that empty ones are left out here; its float32 sums are good to 2e-6."""
    analysed = {text: terms for text in oracle.texts if (terms := analyze(text))}
    texts = [text for text in oracle.texts if text in analysed]
    (tmp_path / "terms.txt").write_text("".join(" ".join(analysed[text]) + "\n" for text in texts), "utf-8")
    lucene = Lucene.compile(tmp_path / "lucene")
    lucene.index(tmp_path / "terms.txt", tmp_path / "index")
    queries = {query: terms for query in oracle.queries if (terms := analyze(query))}
    index = index_texts(texts, tmp_path / "store")
    limits = (10, 500)
    for limit, found in zip(limits, lucene.search(tmp_path / "index", [(list(queries.values()), k) for k in limits]), strict=True):
        for query, hits in enumerate(results(index, list(queries), limit=limit, scoring=Scoring(norm="lucene"))):
            part = slice(found.offsets[query], found.offsets[query + 1])
            positions, scores = found.position[part].tolist(), found.score[part].tolist()
            np.testing.assert_allclose([score for _, score in hits], scores, rtol=2e-6)
            unlike = {position for position, _ in hits} ^ set(positions)
            known = dict(hits) | dict(zip(positions, scores, strict=True))
            assert all(known[position] == pytest.approx(hits[-1][1], rel=2e-6) for position in unlike)


@dataclass(frozen=True)
class Exhaustive:
    """An index, and the impact of every one of its terms on every text by the formula: float64 (texts, terms). Term i is the word w<i>."""

    index: Bm25Index
    impacts: np.ndarray
    frequency: np.ndarray

    @classmethod
    def of(cls, counts: np.ndarray, store: Path) -> Exhaustive:
        """counts: (texts, terms), how often each term stands in each text."""
        texts = [" ".join(f"w{term}" for term in np.repeat(np.arange(len(row)), row)) for row in counts]
        frequency, lengths = (counts > 0).sum(axis=0), counts.sum(axis=1)
        idf = np.log1p((len(counts) - frequency + 0.5) / (frequency + 0.5))
        norms = 1.2 * (0.25 + 0.75 * lengths / lengths.mean())
        return cls(index_texts(texts, store), idf * counts / (counts + norms[:, None]), frequency)

    def assert_search_is_exact(self, queries: Sequence[np.ndarray], limit: int) -> None:
        """queries: how often each stands in it, by term; each query is searched for in one batch with the others."""
        texts = [" ".join(f"w{term}" for term in np.repeat(np.arange(len(counts)), counts)) for counts in queries]
        expected = (self.impacts @ np.stack(queries, axis=1).astype(np.float64)).T
        for counts, found, scores in zip(queries, results(self.index, texts, limit=limit), expected, strict=True):
            assert_equal_up_to_ties(found, scores, limit, fine=2**-21 * counts.sum())  # an occurrence is rounded to 2 ** -20 or finer


@pytest.fixture(scope="module")
def common(tmp_path_factory: pytest.TempPathFactory) -> Exhaustive:
    """6,000 texts of 20 words, two or three times each of 8 of the same 20 terms: every term is in 40 % of the texts."""
    chance = np.random.default_rng(1)
    counts = chance.permuted(np.tile([3] * 4 + [2] * 4 + [0] * 12, (6000, 1)), axis=1)
    return Exhaustive.of(counts, tmp_path_factory.mktemp("common"))


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Exhaustive:
    """2,500 texts; of 1,200 terms a quarter is in more than a sixteenth of the texts (a row each), the rest in few to hundreds."""
    chance = np.random.default_rng(2)
    share = np.concatenate([chance.uniform(0.0627, 0.9, 300), 10 ** chance.uniform(-3.3, -1.3, 900)])
    counts = (chance.random((2500, len(share))) < share) * chance.geometric(0.6, (2500, len(share)))
    return Exhaustive.of(counts, tmp_path_factory.mktemp("mixed"))


@pytest.mark.parametrize(("words", "company"), [(480, 0), (560, 200), (600, 0), (620, 200)])
def test_long_queries_of_common_terms_are_exact_alone_and_beside_short_ones(common: Exhaustive, words: int, company: int) -> None:
    for terms in (7, 8, 10, 20):
        query = np.bincount(np.arange(words) % terms, minlength=20)
        short = [np.bincount([number % 20, number // 20], minlength=20) for number in range(company)]
        common.assert_search_is_exact([query, *short], 50)


@dataclass(frozen=True)
class QueryShape:
    """How a query is sampled: `words` words, of `terms` terms at most, none more than 100 times; `dense`: the share of dense terms."""

    words: int
    terms: int
    dense: float
    seed: int

    def sample(self, frequency: np.ndarray) -> np.ndarray:
        chance = np.random.default_rng(self.seed)
        dense, sparse = (np.flatnonzero(kind) for kind in (frequency > 2500 / 16, (frequency > 0) & (frequency <= 2500 / 16)))
        count = min(round(self.dense * self.terms), len(dense))
        chosen = np.concatenate([chance.choice(dense, count, replace=False), chance.choice(sparse, min(self.terms - count, len(sparse)))])
        result = np.zeros(len(frequency), np.int64)
        np.add.at(result, chance.choice(chosen, self.words), 1)
        return np.minimum(result, 100)


shapes = st.builds(
    QueryShape,
    st.integers(1, 2000),
    st.sampled_from([1, 2, 5, 20, 100, 300, 1000]),
    st.sampled_from([0.0, 0.3, 0.9, 1.0]),
    st.integers(0, 999),
)


@given(st.lists(shapes, min_size=1, max_size=4), st.sampled_from([0, 1, 60]), st.sampled_from([1, 50, 700]))
@example([QueryShape(2000, 20, 1.0, 0)], 0, 50)  # every term 100 times
@example([QueryShape(2000, 300, 1.0, 0), QueryShape(1, 1, 1.0, 0)], 60, 50)
@example([QueryShape(1500, 300, 1.0, 0), QueryShape(1500, 1000, 0.0, 1)], 0, 50)
def test_queries_of_any_length_are_exact_alone_and_in_any_batch(mixed: Exhaustive, long: list[QueryShape], short: int, limit: int) -> None:
    sampled = [*long, *(QueryShape(5, 5, 0.5, seed) for seed in range(short))]
    mixed.assert_search_is_exact([shape.sample(mixed.frequency) for shape in sampled], limit)
