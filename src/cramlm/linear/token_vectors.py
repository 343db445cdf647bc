"""Initial token embeddings of an encoder, of up to three parts side by side: from the word vectors of a corpus, from the weights of a
linear model, and from co-occurrence in the passages of a task.

A vocabulary of 8,192 tokens splits most words, and the few passages of one task say little about rare tokens; the vectors of words are
learned from the whole corpus (cooccurrence.py). Those of tokens solve a ridge regression: row w of its matrix has the share of each token
in word w, and is to give the vector of w. A mean over the tokens of a text is then near the mean over its words, which labels often follow.

A linear model adds the weights of the words of a text. `label_weights` gives them for every word of the corpus, also for words that are in
no training text, and a second regression gives those of tokens, whose sum is to be that of the word. The mean of this part over a text is
nearly the linear model's prediction for it, before the first step of training.

What stands beside a token in the passages is predicted better by co-occurrence there (figures: docs/log.md).
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import scipy.sparse

from cramlm.linear.model import LinearModel
from cramlm.linear.word_vectors import FREQUENT, WordVectors
from cramlm.model.tokenizer import Tokenizer
from cramlm.records import FloatArray, IntArray
from cramlm.storage.arrays import unit_vectors

CAPITALISED: Final = 0.1
"""Frequency of a capitalised word relative to the same word in lower case, if the tokenizer distinguishes them."""
TOLERANCE: Final = 1e-3  # of the residual, as a share of the right-hand side
MAX_ITERATIONS: Final = 100
_RIDGE: Final = 1.0  # in units of the mean weight of a word
_SMALLEST: Final = 1e-4  # length of a vector; words without directions give shorter ones
WORDS_SHARE: Final = 2 / 3
"""Of the width of the embeddings, that of vectors from words, with the weights of a linear model."""
LABELS_SHARE: Final = 1 / 3
"""Of the width of vectors from words, at most that of the weights of a linear model; more labels are reduced to principal components."""
LONGEST: Final = 2.0
"""Largest length of a token's weights; their root mean square over tokens is 1, the length of the token's vector."""
RARE_SHARE: Final = 1e-4
"""The share of the text at which a token has half the weight of the rarest ones."""
LOG_WEIGHTS: Final = 7.0
"""The logarithm of the weight of the rarest tokens relative to that of the commonest."""
WEIGHTED_WORDS: Final = 32_768
"""The number of words whose weights in a linear model are computed; rarer ones change those of tokens little."""
WEIGHTS_EXPONENT: Final = 1.5
"""A word weighs the square root of its frequency in the regression of vectors, and this power of the root in that of weights."""
MIN_SHARE: Final = 0.5
"""Of the tokens of the text, those that are in words."""


def join_token_vectors(words: FloatArray, counted: FloatArray, *, std: float, seed: int) -> FloatArray:
    """The vectors of two kinds side by side, rows of length std * sqrt(width), or NaN for a token without any.

    words: of `fit_token_vectors`. counted: of `token_embeddings`, with NaN for tokens without co-occurrences. The axes are rotated at
    random, so that none is special.
    """
    joined = unit_vectors(np.hstack([words, unit_vectors(np.nan_to_num(counted))]))
    width = joined.shape[1]
    rotation, _ = np.linalg.qr(np.random.default_rng([seed, 0x746F]).standard_normal((width, width)))
    values = joined @ rotation.astype(np.float32) * np.float32(std * width**0.5)
    values[~joined.any(axis=1)] = np.nan
    return values


def token_rarity(occurrences: IntArray) -> FloatArray:
    """The rarity of each token, (vocabulary,) float32, from its number of occurrences: 1 for the rarest, 0 for shares of the text above a
    tenth.

    It is linear in the logarithm of the weight that averages with smooth inverse frequency give a word (word_vectors.py).
    """
    weights = RARE_SHARE / (RARE_SHARE + occurrences / max(int(occurrences.sum()), 1))
    rarity: FloatArray = np.maximum(1 + np.log(weights) / LOG_WEIGHTS, 0).astype(np.float32)
    return rarity


def fit_token_vectors(
    words: WordVectors, tokenizer: Tokenizer, occurrences: IntArray, *, width: int, weights: FloatArray | None = None
) -> FloatArray | None:
    """Return (vocabulary, width) float32; a token that is part of no word (punctuation) has 0; None if words cover too little of the text
    (`MIN_SHARE`).

    A row is a vector of length 1, reduced to principal components; with `weights`, those of the token are beside it, reduced to at most
    `LABELS_SHARE` of the width. A width beyond that of the word vectors adds zeros.

    occurrences: (vocabulary,), of each token in the text. weights: of `label_weights`, (words, labels).
    """
    if not words.words:
        return None
    shares, frequency = _token_shares(words, tokenizer)
    fitted = _fit(shares, frequency, words.directions.astype(np.float32))
    is_part = np.linalg.norm(fitted, axis=1) > _SMALLEST
    if occurrences[is_part].sum() < MIN_SHARE * occurrences.sum():
        return None
    of_labels = np.zeros((len(fitted), 0), dtype=np.float32)
    if weights is not None:
        of_labels = np.where(is_part[:, None], _label_part(shares, frequency, weights, round(LABELS_SHARE * width)), np.float32(0))
        width -= of_labels.shape[1]
    centred = unit_vectors(fitted[is_part])
    centred -= centred.mean(axis=0)
    components = _components(centred, width)
    values = np.zeros((len(fitted), width), dtype=np.float32)
    values[is_part, : components.shape[1]] = unit_vectors(centred @ components)
    return np.hstack([values, of_labels])


def label_weights(model: LinearModel, words: WordVectors) -> FloatArray:
    """What a word adds to the logits of `model` in a text with others: (words, labels) float32, relative to the mean of all labels in a
    classification; NaN for words that are not among the `WEIGHTED_WORDS` most frequent.

    It is the difference between the logits of a text of this word alone and those of an empty text, times the weight of the word in an
    average of vectors. A single word has length 1 in the features, whatever its frequency.
    """
    frequent = np.sort(np.argsort(words.weights, kind="stable")[:WEIGHTED_WORDS])
    logits = (model.logits([words.words[place] for place in frequent]) - model.logits([""])).astype(np.float32)
    if model.kind == "classification":
        logits -= logits.mean(axis=1, keepdims=True)
    weights = np.full((len(words.words), logits.shape[1]), np.nan, dtype=np.float32)
    weights[frequent] = logits * words.weights[frequent, None]
    return weights


def _label_part(shares: Any, frequency: FloatArray, weights: FloatArray, width: int) -> FloatArray:
    """The weights of tokens, (vocabulary, at most width): the sum over the tokens of a word is near its weights, times a constant."""
    known = np.isfinite(weights[:, 0])
    of_words = np.tile(known, shares.shape[0] // len(known))
    counts = scipy.sparse.diags(np.maximum(np.diff(shares.indptr), 1).astype(np.float32)[of_words]) @ shares[of_words]
    emphasis = frequency[of_words] ** WEIGHTS_EXPONENT
    fitted = _fit(counts, emphasis / max(float(emphasis.mean()), 1e-12), weights[known])
    reduced: FloatArray = fitted @ _components(fitted, width)
    lengths = np.linalg.norm(reduced, axis=1)
    if not lengths.any():  # all words have the same weights
        return reduced
    lengths /= np.sqrt((lengths[lengths > 0] ** 2).mean())
    scale = np.minimum(lengths, LONGEST) / np.maximum(np.linalg.norm(reduced, axis=1), np.finfo(np.float32).tiny)
    scaled: FloatArray = (reduced * scale[:, None]).astype(np.float32)
    return scaled


def _fit(shares: Any, frequency: FloatArray, targets: FloatArray) -> FloatArray:
    """Rows of tokens (vocabulary, width) that give the targets (words, width) best; words may be repeated in `shares`, capitalised."""
    repeated = np.tile(targets, (shares.shape[0] // len(targets), 1))
    weighted = scipy.sparse.diags(frequency) @ shares
    return _ridge(shares.T @ weighted, weighted.T @ repeated)


def _components(rows: FloatArray, most: int) -> FloatArray:
    """The principal axes of rows (n, width), which need not be centred: (width, rank), at most `most`, and none without variance."""
    variances, axes = np.linalg.eigh(rows.T @ rows)
    present = int((variances > _SMALLEST**2 * max(float(variances[-1]), 1e-30)).sum())
    kept: FloatArray = axes[:, ::-1][:, : min(most, present)]
    return kept


def _token_shares(words: WordVectors, tokenizer: Tokenizer) -> tuple[Any, FloatArray]:
    """The share of each token in each word, CSR (words, tokens), capitalised words last; and the weights of the rows, mean 1."""
    frequency = FREQUENT / words.weights.astype(np.float64) - FREQUENT
    forms, weights = [list(words.words)], [np.sqrt(frequency)]
    if tokenizer.encode(["A"]).ids.tolist() != tokenizer.encode(["a"]).ids.tolist():
        forms.append([word.capitalize() for word in words.words])
        weights.append(np.sqrt(CAPITALISED * frequency))
    rows = []
    for form in forms:
        tokens = tokenizer.encode([f" {word}" for word in form])
        lengths = tokens.lengths
        values = np.repeat(1 / np.maximum(lengths, 1), lengths).astype(np.float32)
        entries = (values, tokens.ids.astype(np.int32), tokens.offsets)
        rows.append(scipy.sparse.csr_matrix(entries, shape=(len(form), tokenizer.vocab_size)))
    joined = np.concatenate(weights)
    return scipy.sparse.vstack(rows).tocsr(), (joined / max(joined.mean(), 1e-12)).astype(np.float32)


def _ridge(gram: Any, target: FloatArray) -> FloatArray:
    """Solve (gram + ridge) x = target, all columns together, by conjugate gradients with the diagonal as the preconditioner."""
    matrix = (gram + _RIDGE * scipy.sparse.identity(gram.shape[0], dtype=np.float32)).tocsr()
    inverse = (1 / matrix.diagonal())[:, None]
    solution = np.zeros_like(target)
    residual = target.copy()
    direction = inverse * residual
    product = (residual * direction).sum(axis=0)
    goal = TOLERANCE * float(np.linalg.norm(target))
    for _ in range(MAX_ITERATIONS):
        if float(np.linalg.norm(residual)) <= goal:
            break
        image = matrix @ direction
        step = product / np.maximum((direction * image).sum(axis=0), np.finfo(np.float32).tiny)
        solution += step * direction
        residual -= step * image
        scaled = inverse * residual
        previous, product = product, (residual * scaled).sum(axis=0)
        direction = scaled + product / np.maximum(previous, np.finfo(np.float32).tiny) * direction
    return solution
