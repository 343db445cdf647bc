"""Vectors of tokens from the vectors of words."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import ortho_group

from cramlm.config.run import TokenizerConfig
from cramlm.linear import token_vectors
from cramlm.linear.fit import SearchSpace, fit_linear
from cramlm.linear.token_vectors import fit_token_vectors, join_token_vectors, label_weights, token_rarity
from cramlm.linear.word_vectors import WordVectors
from cramlm.model.tokenizer import Tokenizer, train_tokenizer
from cramlm.records import Example, FloatArray, Task
from cramlm.storage.arrays import unit_vectors

BEGINNINGS, ENDINGS = ("bolan", "krimt", "sufer", "tedok"), ("ashun", "embil", "irope", "ortux")
WORDS = [first + last for first, last in itertools.product(BEGINNINGS, ENDINGS)]


def tokenizer_of(folder: Path, *, lowercase: bool = True) -> Tokenizer:
    """It has the halves of `WORDS` as tokens."""
    texts = [" ".join([*WORDS, "!", "."] * 2)] + ([] if lowercase else [" ".join(word.capitalize() for word in WORDS)])
    train_tokenizer(texts, TokenizerConfig(vocab_size=79 if lowercase else 100, lowercase=lowercase), folder)
    return Tokenizer.load(folder)


def fit(words: WordVectors, tokenizer: Tokenizer, *, width: int, weights: FloatArray | None = None) -> FloatArray:
    occurrences = np.bincount(tokenizer.encode([" ".join(WORDS)]).ids, minlength=tokenizer.vocab_size)
    values = fit_token_vectors(words, tokenizer, occurrences, width=width, weights=weights)
    assert values is not None
    return values


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return tokenizer_of(tmp_path_factory.mktemp("tokenizer"))


def words_with(directions: FloatArray, words: list[str] = WORDS) -> WordVectors:
    """Equally frequent words."""
    weights = np.full(len(words), 0.5, np.float32)
    return WordVectors(tuple(words), directions.astype(np.float16), weights, np.zeros(directions.shape[1], np.float32))


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
    gram, target = (shares.T @ shares), shares.T @ words.directions.astype(np.float32)
    expected = np.linalg.solve(gram.toarray().astype(np.float64) + np.eye(tokenizer.vocab_size), target)
    np.testing.assert_allclose(token_vectors._ridge(gram.tocsr(), target), expected, atol=1e-5)
    np.testing.assert_allclose(weights, 1)


@pytest.mark.parametrize("labels", [1, 2, 3])
def test_the_weights_of_the_tokens_of_a_word_add_up_to_those_of_the_word(tokenizer: Tokenizer, labels: int) -> None:
    directions = unit_vectors(np.random.default_rng(0).standard_normal((16, 6)).astype(np.float32))
    halves = np.random.default_rng(1).standard_normal((8, labels)).astype(np.float32)
    weights = np.stack([halves[i] + halves[4 + j] for i, j in itertools.product(range(4), range(4))])
    values = fit(words_with(directions), tokenizer, width=9, weights=weights)
    vectors, of_labels = values[:, : 9 - labels], values[:, 9 - labels :]
    in_words = np.unique(tokenizer.encode([f" {word}" for word in WORDS]).ids)
    np.testing.assert_allclose(np.linalg.norm(vectors[in_words], axis=1), 1, rtol=1e-4)
    assert np.sqrt((of_labels[in_words] ** 2).sum(axis=1).mean()) == pytest.approx(1, abs=0.05)
    sums = np.stack([of_labels[tokenizer.encode([f" {word}"]).ids].sum(axis=0) for word in WORDS])
    similarities, expected = (sums @ sums.T).ravel(), (weights @ weights.T).ravel()
    assert np.corrcoef(similarities, expected)[0, 1] > 0.95


def test_weights_of_many_labels_take_a_third_of_the_width(tokenizer: Tokenizer) -> None:
    rng = np.random.default_rng(0)
    directions, weights = (rng.standard_normal((16, width)).astype(np.float32) for width in (12, 40))
    values = fit(words_with(unit_vectors(directions)), tokenizer, width=12, weights=weights)
    lengths = np.linalg.norm(values[:, 8:], axis=1)
    assert values.shape == (tokenizer.vocab_size, 12)
    assert lengths.any()
    assert lengths.max() <= token_vectors.LONGEST + 1e-4


def test_weights_that_tell_no_words_apart_leave_the_width_to_vectors(tokenizer: Tokenizer) -> None:
    words = words_with(unit_vectors(np.random.default_rng(0).standard_normal((16, 12)).astype(np.float32)))
    without, equal = (fit(words, tokenizer, width=9, weights=weights) for weights in (None, np.zeros((16, 3), np.float32)))
    np.testing.assert_array_equal(without, equal)


def test_a_word_has_the_difference_that_it_makes_to_the_logits_of_a_text() -> None:
    words = words_with(unit_vectors(np.eye(16, dtype=np.float32) + 0.1))
    train = tuple(Example(word, f"{word} {word}", None, "ab"[number % 2]) for number, word in enumerate(WORDS))
    task = Task(train, train, (), ("a", "b"), False)
    model = fit_linear(task, SearchSpace((10.0,), "macro_f1", seed=0, variants=("tokens",)), stage="static", vectors=words).model
    weights = label_weights(model, words)
    assert weights.shape == (16, 2)
    np.testing.assert_allclose(weights.sum(axis=1), 0, atol=1e-5)
    assert (weights.argmax(axis=1) == np.arange(16) % 2).all()
    odds = model.logits([WORDS[3]]) - model.logits([""])
    assert weights[3, 1] - weights[3, 0] == pytest.approx(0.5 * float(odds[0, 1] - odds[0, 0]), rel=1e-4)


def test_weights_of_rarer_words_are_not_computed_and_change_those_of_tokens_little(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_vectors, "WEIGHTED_WORDS", 12)
    directions = unit_vectors(np.random.default_rng(0).standard_normal((16, 8)).astype(np.float32))
    words = words_with(directions)
    words.weights[:4] = 0.9  # rarer
    train = tuple(Example(word, word, None, "ab"[number % 2]) for number, word in enumerate(WORDS))
    task = Task(train, train, (), ("a", "b"), False)
    model = fit_linear(task, SearchSpace((10.0,), "macro_f1", seed=0, variants=("tokens",)), stage="static", vectors=words).model
    some = label_weights(model, words)
    assert np.isnan(some[:4]).all()
    monkeypatch.setattr(token_vectors, "WEIGHTED_WORDS", 16)
    every = label_weights(model, words)
    np.testing.assert_array_equal(some[4:], every[4:])
    of_some, of_every = (fit(words, tokenizer, width=9, weights=weights)[:, -1] for weights in (some, every))
    assert abs(np.corrcoef(of_some, of_every)[0, 1]) > 0.8


def test_rarity_falls_with_the_logarithm_of_the_frequency() -> None:
    rarity = token_rarity(np.array([0, 10, 100, 1_000, 10_000, 1_000_000]))
    assert (np.diff(rarity) < 0).all()
    assert rarity[0] == 1
    assert rarity[-1] == 0
    assert rarity[1] > 0.95
    assert rarity[3] - rarity[4] == pytest.approx(np.log(10) / token_vectors.LOG_WEIGHTS, rel=0.1)


def test_tokens_of_no_text_are_all_rare() -> None:
    assert (token_rarity(np.zeros(5, np.int64)) == 1).all()
