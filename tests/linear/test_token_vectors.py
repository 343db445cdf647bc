"""Vectors of tokens from the vectors of words."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import ortho_group

from cramlm.config.run import TokenizerConfig
from cramlm.linear import token_vectors
from cramlm.linear.token_vectors import fit_token_vectors, join_token_vectors
from cramlm.linear.word_vectors import WordVectors
from cramlm.model.tokenizer import Tokenizer, train_tokenizer
from cramlm.records import FloatArray
from cramlm.storage.arrays import unit_vectors

BEGINNINGS, ENDINGS = ("bolan", "krimt", "sufer", "tedok"), ("ashun", "embil", "irope", "ortux")
WORDS = [first + last for first, last in itertools.product(BEGINNINGS, ENDINGS)]


def tokenizer_of(folder: Path, *, lowercase: bool = True) -> Tokenizer:
    """It has the halves of `WORDS` as tokens."""
    texts = [" ".join([*WORDS, "!", "."] * 2)] + ([] if lowercase else [" ".join(word.capitalize() for word in WORDS)])
    train_tokenizer(texts, TokenizerConfig(vocab_size=79 if lowercase else 100, lowercase=lowercase), folder)
    return Tokenizer.load(folder)


def fit(words: WordVectors, tokenizer: Tokenizer, *, width: int) -> FloatArray:
    occurrences = np.bincount(tokenizer.encode([" ".join(WORDS)]).ids, minlength=tokenizer.vocab_size)
    return fit_token_vectors(words, tokenizer, occurrences, width=width)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return tokenizer_of(tmp_path_factory.mktemp("tokenizer"))


def words_with(directions: FloatArray, words: list[str] = WORDS) -> WordVectors:
    """Equally frequent words."""
    weights = np.full(len(words), 0.5, np.float32)
    return WordVectors(tuple(words), directions.astype(np.float16), weights)


def token_means(values: FloatArray, tokenizer: Tokenizer, words: list[str] = WORDS) -> FloatArray:
    return np.stack([values[tokenizer.encode([f" {word}"]).ids].mean(axis=0) for word in words])


def test_means_over_the_tokens_of_words_are_similar_where_the_words_are(tokenizer: Tokenizer) -> None:
    halves = ortho_group.rvs(8, random_state=0).astype(np.float32)
    directions = unit_vectors(np.stack([halves[i] + halves[4 + j] for i, j in itertools.product(range(4), range(4))]))
    values = fit(words_with(directions), tokenizer, width=8)
    fitted = unit_vectors(token_means(values, tokenizer))
    expected = directions - directions.mean(axis=0)  # token vectors are centred
    expected = unit_vectors(expected)
    assert np.corrcoef((fitted @ fitted.T).ravel(), (expected @ expected.T).ravel())[0, 1] > 0.95


def test_tokens_in_words_have_vectors_of_length_one_and_others_none(tokenizer: Tokenizer) -> None:
    directions = unit_vectors(np.random.default_rng(0).standard_normal((16, 12)).astype(np.float32))
    lengths = np.linalg.norm(fit(words_with(directions), tokenizer, width=10), axis=1)
    in_words = np.unique(tokenizer.encode([f" {word}" for word in WORDS]).ids)
    np.testing.assert_allclose(lengths[in_words], 1, rtol=1e-4)
    assert not np.delete(lengths, in_words).any()


def test_a_width_beyond_that_of_the_word_vectors_adds_zeros(tokenizer: Tokenizer) -> None:
    directions = unit_vectors(np.random.default_rng(0).standard_normal((16, 4)).astype(np.float32))
    values = fit(words_with(directions), tokenizer, width=32)
    assert values.shape == (tokenizer.vocab_size, 32)
    assert not values[:, 4:].any()


def test_joined_vectors_are_as_similar_as_both_kinds_on_average_and_have_the_given_standard_deviation() -> None:
    rng = np.random.default_rng(0)
    words, counted = (unit_vectors(rng.standard_normal((6, width)).astype(np.float32)) for width in (8, 4))
    values = join_token_vectors(words, 3 * counted, std=0.05, seed=1)
    similar = unit_vectors(values) @ unit_vectors(values).T
    np.testing.assert_allclose(similar, (words @ words.T + counted @ counted.T) / 2, atol=1e-5)
    np.testing.assert_allclose(np.sqrt((values**2).mean(axis=1)), 0.05, rtol=1e-5)


def test_a_token_with_one_kind_of_vector_has_that_and_one_without_any_is_nan() -> None:
    words, counted = np.eye(3, dtype=np.float32), np.eye(3, dtype=np.float32)
    words[1:], counted[2] = 0, np.nan
    values = join_token_vectors(words, counted, std=0.05, seed=1)
    assert np.isfinite(values[:2]).all()
    assert np.isnan(values[2]).all()
    assert values[0] @ values[1] == pytest.approx(0, abs=1e-6)


def test_a_tokenizer_that_keeps_case_gives_capitalised_words_the_vector_of_the_word(tmp_path: Path) -> None:
    cased = tokenizer_of(tmp_path, lowercase=False)
    directions = unit_vectors(np.random.default_rng(0).standard_normal((16, 12)).astype(np.float32))
    values = fit(words_with(directions), cased, width=12)
    capitalised = [word.capitalize() for word in WORDS]
    assert cased.encode([WORDS[0]]).ids.tolist() != cased.encode([capitalised[0]]).ids.tolist()
    lower, upper = (unit_vectors(token_means(values, cased, words)) for words in (WORDS, capitalised))
    assert float((lower * upper).sum(axis=1).mean()) > 0.6


def test_words_that_cover_less_than_half_of_the_text_give_no_vectors(tokenizer: Tokenizer) -> None:
    one = words_with(unit_vectors(np.ones((1, 4), np.float32)), WORDS[:1])
    nothing = words_with(np.zeros((0, 4), np.float32), [])
    occurrences = np.bincount(tokenizer.encode([" ".join(WORDS)]).ids, minlength=tokenizer.vocab_size)
    for words in (one, nothing):
        assert fit_token_vectors(words, tokenizer, occurrences, width=8) is None


def test_the_regression_equals_the_solution_of_the_normal_equations(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_vectors, "TOLERANCE", 1e-6)
    words = words_with(unit_vectors(np.random.default_rng(0).standard_normal((16, 12)).astype(np.float32)))
    shares, weights = token_vectors._token_shares(words, tokenizer)
    gram, target = (shares.T @ shares), shares.T @ words.vectors.astype(np.float32)
    expected = np.linalg.solve(gram.toarray().astype(np.float64) + np.eye(tokenizer.vocab_size), target)
    np.testing.assert_allclose(token_vectors._ridge(gram.tocsr(), target), expected, atol=1e-5)
    np.testing.assert_allclose(weights, 1)
