"""Weighted matrices of terms, compared with those of scikit-learn's TfidfVectorizer where the weights are idf."""

from __future__ import annotations

import itertools
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import entropy
from sklearn.feature_extraction.text import TfidfVectorizer

from cramlm.linear import character_ngrams, features
from cramlm.linear.features import Ngrams, Terms, TextMatrices, Vocabulary, WordsAndPairs, count_terms, join, normalize
from cramlm.records import PAIR_BOUNDARY, Example
from cramlm.text.markers import Markers
from cramlm.text.words import word_pattern

WORDS = ("wave", "Ship", "a", "the", "<<", "[[", "don't", "ọ̀rọ̀", "हिन्दी", "x2,", "é", "naïve", "ab", "wavering")
OPTIONS: dict[Terms, dict[str, Any]] = {
    "words": {"token_pattern": word_pattern(), "ngram_range": (1, 2)},
    "tokens": {"token_pattern": r"\S+", "ngram_range": (1, 2), "lowercase": False},
    "characters": {"analyzer": "char_wb", "ngram_range": (2, 5)},
}


def texts_of(count: int, seed: int) -> list[str]:
    random_ = random.Random(seed)
    return [normalize(" ".join(random_.choices(WORDS, k=random_.randint(1, 12)))) for _ in range(count)]


def fitted_matrix(kind: Terms, texts: list[str], *arguments: Any, **options: Any) -> tuple[Vocabulary, Any]:
    vocabulary, frequencies = Vocabulary.fit(kind, texts, *arguments, **options)
    return vocabulary, vocabulary.weigh(frequencies)


def reference(kind: Terms, texts: list[str], others: list[str], **more: Any) -> tuple[list[str], Any, Any]:
    """Terms and matrices by scikit-learn."""
    vectorizer = TfidfVectorizer(**OPTIONS[kind], **more, sublinear_tf=True, dtype=np.float64)
    matrix = vectorizer.fit_transform(texts)
    return vectorizer.get_feature_names_out().tolist(), matrix, vectorizer.transform(others) if others else None


@pytest.mark.parametrize("kind", ["words", "tokens", "characters"])
@pytest.mark.parametrize("plain", [0, features._PLAIN_CHARACTERS])
def test_terms_and_matrices_equal_those_of_scikit_learn(kind: Terms, plain: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(features, "_PLAIN_CHARACTERS", plain)
    texts, others = texts_of(80, 1), [*texts_of(30, 2), "", "unknown 漢字"]
    terms, train, other = reference(kind, texts, others)
    vocabulary, matrix = fitted_matrix(kind, texts)
    assert list(vocabulary.terms) == terms
    np.testing.assert_allclose(matrix.toarray(), train.toarray(), atol=1e-6)
    np.testing.assert_allclose(vocabulary.transform(others).toarray(), other.toarray(), atol=1e-6)
    assert matrix.dtype == np.float32


@pytest.mark.parametrize("kind", ["words", "tokens", "characters"])
def test_rare_terms_of_many_texts_are_dropped_as_by_min_df(kind: Terms, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(features, "MANY_TEXTS", 60)
    texts = texts_of(60, 3)
    terms, train, _ = reference(kind, texts, [], min_df=2)
    vocabulary, matrix = fitted_matrix(kind, texts)
    assert list(vocabulary.terms) == terms
    np.testing.assert_allclose(matrix.toarray(), train.toarray(), atol=1e-6)
    assert len(Vocabulary.fit(kind, texts[:59])[0].terms) == len(reference(kind, texts[:59], [])[0])


@pytest.mark.parametrize("kind", ["words", "tokens", "characters"])
def test_the_most_frequent_terms_are_kept_as_by_max_features(kind: Terms) -> None:
    # Every word has a count of its own, so that no choice among equally frequent terms is left.
    texts = [" ".join(["qa"] * 7 + ["vb"] * 5), " ".join(["qa"] * 6 + ["vb"] * 4 + ["zz"] * 2), "zz"]
    limit = {"words": 4, "tokens": 4, "characters": 3}[kind]
    vocabulary, matrix = fitted_matrix(kind, texts, limit=limit)
    assert len(vocabulary.terms) == limit
    counts = features._count(kind, texts, None, None)
    totals = dict(zip(counts[1], np.asarray(counts[0].sum(axis=0)).ravel(), strict=True))
    assert min(totals[term] for term in vocabulary.terms) >= max(totals[term] for term in set(totals) - set(vocabulary.terms))
    fixed = TfidfVectorizer(**OPTIONS[kind], vocabulary=vocabulary.terms, sublinear_tf=True).fit_transform(texts)
    np.testing.assert_allclose(matrix.toarray(), fixed.toarray(), atol=1e-6)


def test_scripts_without_spaces_are_cut_into_clusters_and_for_naive_bayes_into_terms_of_bm25() -> None:
    texts = ["房间很干净, A1", "房间不好"]
    for kind in ("words", "tokens"):
        terms = Vocabulary.fit(kind, texts)[0].terms
        assert {"房", "间", "房 间", "好", "不 好"} < set(terms)
        assert not any("房间" in term for term in terms)
    assert Vocabulary.fit("unigrams", texts)[0].terms == ("a1", "不好", "干净", "很干", "房间", "间不", "间很")


def test_terms_of_bm25_are_counted_equally_in_few_and_in_many_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [*texts_of(40, 6), "漢字かな boat", "sail\u200bboat", ""]
    for columns in (None, {"ship": 0, "wave": 1}):
        few, names = features.count_words(texts, columns)
        with monkeypatch.context() as patch:
            patch.setattr(features, "_PLAIN_CHARACTERS", 0)
            many, others = features.count_words(texts, columns)
        assert list(names) == list(others)
        assert (few != many).nnz == 0


def test_the_boundary_of_a_pair_changes_nothing_but_segments() -> None:
    pairs = [Example("", one, other, None) for one, other in itertools.pairwise(texts_of(60, 5))]
    whole, divided = [pair.whole_text for pair in pairs], [pair.divided_text for pair in pairs]
    assert whole != divided
    for kind in ("words", "tokens", "characters", "unigrams"):
        (one, of_whole), (other, of_divided) = fitted_matrix(kind, whole), fitted_matrix(kind, divided)
        assert one.terms == other.terms
        assert (of_whole != of_divided).nnz == 0


def test_terms_of_segments_name_the_markers_around_them_and_pairs_the_words_that_both_texts_have() -> None:
    markers = Markers(("<<", ">>"), ())
    terms, matrix = fitted_matrix("segments", ["In <<Tin ore>>"], markers)
    assert terms.terms == (" … << 1 words", " … << in", "<< … >> 2 words", "<< … >> ore", "<< … >> tin", "<< … >> tin ore", ">> …  0 words")
    assert matrix.shape == (1, len(terms.terms))
    of_pairs, _ = Vocabulary.fit("segments", [f"Tin ore{PAIR_BOUNDARY}tin of lead"], Markers((PAIR_BOUNDARY,), ()))
    assert {"both tin", "both 50 %"} <= set(of_pairs.terms)


@given(st.lists(st.text(alphabet="abA é<'\n", max_size=12), min_size=1, max_size=8))
def test_character_ngrams_of_any_text_equal_those_of_scikit_learn(texts: list[str]) -> None:
    texts = [normalize(text) for text in texts]
    vocabulary, matrix = fitted_matrix("characters", texts)
    if any(text.split() for text in texts):
        terms, train, _ = reference("characters", texts, [])
        assert list(vocabulary.terms) == terms
        np.testing.assert_allclose(matrix.toarray(), train.toarray(), atol=1e-6)
    else:
        assert vocabulary.terms == ()


@given(st.lists(st.text(alphabet="abcA é<'\n漢\U0001d49c", max_size=20), max_size=12), st.lists(st.text("abdé ", max_size=9), max_size=5))
def test_compiled_counts_of_character_ngrams_equal_those_of_plain_python(texts: list[str], others: list[str]) -> None:
    plain, matrix = fitted_matrix("characters", texts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(features, "_PLAIN_CHARACTERS", -1)
        patch.setattr(character_ngrams, "_BLOCK", 3)  # words: the table grows between blocks
        patch.setattr(character_ngrams, "_LEAST_PLACES", 2)
        compiled, other = fitted_matrix("characters", texts)
        transformed = compiled.transform(others)
    assert compiled.terms == plain.terms
    for one, same in ((matrix, other), (plain.transform(others), transformed)):
        assert all(np.array_equal(getattr(one, part), getattr(same, part)) for part in ("indptr", "indices", "data"))


_WORD_LISTS = st.lists(st.lists(st.sampled_from(["a", "b", "c", "ab", "é", "<<"])))


@given(_WORD_LISTS, _WORD_LISTS, st.data())
def test_pairs_are_counted_by_the_numbers_of_their_words_as_by_their_strings(
    texts: list[list[str]], others: list[list[str]], data: st.DataObject
) -> None:
    def with_pairs(words: list[str]) -> list[str]:
        return [*words, *map(" ".join, itertools.pairwise(words))]

    all_terms = sorted({term for words in texts for term in with_pairs(words)})
    terms = [term for term in all_terms if data.draw(st.booleans())]
    expected, _ = count_terms(map(with_pairs, others), {term: column for column, term in enumerate(terms)})
    counts = WordsAndPairs.of(terms).count(others)
    assert (counts != expected).nnz == 0
    assert counts.has_canonical_format
    assert counts.dtype == np.float32


def test_texts_without_a_term_have_no_columns_and_rows_of_length_0() -> None:
    vocabulary, matrix = fitted_matrix("words", ["!", "?"])
    assert (vocabulary.terms, matrix.shape) == ((), (2, 0))
    for kind in ("words", "tokens", "characters"):
        fitted = Vocabulary.fit(kind, ["one two", "three"])[0]
        assert fitted.transform(["", " "]).nnz == 0
        assert fitted.transform([]).shape == (0, len(fitted.terms))


def test_models_with_equal_terms_share_the_frequencies_of_texts_and_have_weights_of_their_own() -> None:
    vocabulary = Vocabulary.fit("words", texts_of(20, 4))[0]
    equal = Vocabulary(vocabulary.kind, tuple(f"{term} "[:-1] for term in vocabulary.terms), vocabulary.weights[::-1].copy())
    others = [Vocabulary("tokens", equal.terms, equal.weights), Vocabulary(equal.kind, equal.terms[1:], equal.weights[1:])]
    texts = TextMatrices(texts_of(5, 6))
    assert texts.frequencies(vocabulary) is texts.frequencies(equal)
    for each in (vocabulary, equal, *others):
        assert (each.weigh(texts.frequencies(each)) != each.transform(texts_of(5, 6))).nnz == 0
    for other in others:
        assert texts.frequencies(other) is not texts.frequencies(vocabulary)


@pytest.mark.parametrize("at_once", [1, 1000])
def test_an_association_is_the_divergence_of_the_labels_of_texts_with_a_term(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(features, "_COUNTS_AT_ONCE", at_once)
    texts, labels = ["sail sail wind", "sail rope", "hill wind", "hill", "rope hill", "wind"], np.eye(3, dtype=np.bool_)[[0, 0, 1, 1, 1, 2]]
    vocabulary, _ = Vocabulary.fit("unigrams", texts)
    assert vocabulary.terms == ("hill", "rope", "sail", "wind")

    def associations(texts: list[str], labels: Any, weights: list[float]) -> Any:
        return vocabulary.weighted_by_labels(vocabulary.frequencies(texts), labels, np.array(weights, np.float32)).weights

    prior, counts = np.array([2, 3, 1]) / 6, np.array([[0, 3, 0], [1, 1, 0], [2, 0, 0], [1, 1, 1]])
    expected = [entropy((row + prior) / (row.sum() + 1), prior) ** 0.5 for row in counts]
    np.testing.assert_allclose(associations(texts, labels, [1] * 6), expected, rtol=1e-5)
    # A weight of 2 is a text that is there twice, a weight of 0 one that is not there.
    twice = associations([*texts[:5], texts[0]], labels[[0, 1, 2, 3, 4, 0]], [1] * 6)
    np.testing.assert_allclose(associations(texts, labels, [2, 1, 1, 1, 1, 0]), twice, rtol=1e-5)
    # Where texts may have several labels, or none, none is a label of its own.
    one = labels[:, :1]
    np.testing.assert_allclose(associations(texts, one, [1] * 6), associations(texts, np.hstack([one, ~one]), [1] * 6), rtol=1e-5)


def test_rows_of_several_parts_side_by_side_have_length_1() -> None:
    texts = texts_of(20, 4)
    parts = tuple(Vocabulary.fit(kind, texts)[0] for kind in ("tokens", "characters"))
    ngrams = Ngrams("union", parts)
    matrix = ngrams.transform(TextMatrices(texts))
    assert matrix.shape == (20, ngrams.width)
    np.testing.assert_allclose(np.sqrt(matrix.multiply(matrix).sum(axis=1)), 1, rtol=1e-5)
    one = parts[0].transform(texts)
    np.testing.assert_allclose(matrix[:, : one.shape[1]].toarray(), one.toarray() / np.sqrt(2), rtol=1e-5)
    assert join([one]) is one


def test_terms_in_too_few_texts_are_left_out_of_counts_that_are_otherwise_the_same() -> None:
    texts = [text.split() for text in ("sea wave sea", "wave hill", "tide sea wave", "tide tide", "")]
    counts, terms = count_terms(texts, None)
    frequent, their_terms = count_terms(texts, None, least=2)
    assert (terms, their_terms) == (["hill", "sea", "tide", "wave"], ["sea", "tide", "wave"])
    assert np.array_equal(frequent.toarray(), counts[:, 1:].toarray())
