"""Initial token embeddings of an encoder from the word vectors of a corpus and from co-occurrence in the passages of a task, side by side.

A vocabulary of 8,192 tokens splits most words, and the few passages of one task say little about rare tokens; the vectors of words are
learned from the whole corpus (corpus_vectors.py). Those of tokens solve a ridge regression: row w of its matrix has the share of each token
in word w, and is to give the vector of w. A mean over the tokens of a text is then near the mean over its words, which labels often follow.
What stands beside a token in the passages is predicted better by co-occurrence there (figures: docs/log.md).
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import scipy.sparse

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
"""Of the width of the embeddings, that of vectors from words."""
MIN_SHARE: Final = 0.5
"""Of the tokens of the text, those that are in words."""


def join_token_vectors(words: FloatArray, counted: FloatArray, *, std: float, seed: int) -> FloatArray:
    """Return the vectors of two kinds side by side, rows of length std * sqrt(width), or NaN for a token without any.

    words: of `fit_token_vectors`. counted: of `token_embeddings`, with NaN for tokens without co-occurrences. The axes are rotated at
    random, so that none is special.
    """
    joined = unit_vectors(np.hstack([words, unit_vectors(np.nan_to_num(counted))]))
    width = joined.shape[1]
    rotation, _ = np.linalg.qr(np.random.default_rng([seed, 0x746F]).standard_normal((width, width)))
    values = joined @ rotation.astype(np.float32) * np.float32(std * width**0.5)
    values[~joined.any(axis=1)] = np.nan
    return values


def fit_token_vectors(words: WordVectors, tokenizer: Tokenizer, occurrences: IntArray, *, width: int) -> FloatArray | None:
    """Return (vocabulary, width) float32, rows of length 1, or 0 for a token that is part of no word (punctuation); None if words cover too
    little of the text (`MIN_SHARE`).

    occurrences: (vocabulary,), of each token in the text. A word weighs the square root of its frequency. Vectors are reduced to `width`
    principal components; a greater width adds zeros.
    """
    if not words.words:
        return None
    shares, weights = _token_shares(words, tokenizer)
    directions = np.tile(words.vectors.astype(np.float32), (shares.shape[0] // len(words.words), 1))
    weighted = scipy.sparse.diags(weights) @ shares
    fitted = _ridge(shares.T @ weighted, weighted.T @ directions)
    is_part = np.linalg.norm(fitted, axis=1) > _SMALLEST
    if occurrences[is_part].sum() < MIN_SHARE * occurrences.sum():
        return None
    centred = unit_vectors(fitted[is_part])
    centred -= centred.mean(axis=0)
    rank = min(width, fitted.shape[1])
    components = np.linalg.eigh(centred.T @ centred)[1][:, ::-1][:, :rank]
    values = np.zeros((len(fitted), width), dtype=np.float32)
    values[is_part, :rank] = unit_vectors(centred @ components)
    return values


def _token_shares(words: WordVectors, tokenizer: Tokenizer) -> tuple[Any, FloatArray]:
    """Return the share of each token in each word, CSR (words, tokens), capitalised words last; and the weights of the rows, mean 1."""
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
