"""Token embeddings from co-occurrence counts."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
from sklearn.utils.extmath import randomized_svd

from cramlm.io.threads import Workers
from cramlm.linear import cooccurrence
from cramlm.linear.cooccurrence import LARGEST, Contexts, count_contexts, ppmi, rare_rows, singular_vectors, token_embeddings
from cramlm.model.tokenizer import Tokens


def texts_of(sequences: list[list[int]]) -> Tokens:
    ids = np.array([token for sequence in sequences for token in sequence], dtype=np.uint16)
    offsets = np.concatenate([[0], np.cumsum([len(sequence) for sequence in sequences])]).astype(np.int64)
    return Tokens(ids, offsets, np.arange(len(sequences)))


def sentences(seed: int = 0, count: int = 400) -> list[list[int]]:
    """Subject, verb, object: 10 and 11 stand with 20-22, 12 and 13 with 30-32; 1 opens each, as [CLS] does."""
    rng = np.random.default_rng(seed)
    sampled = []
    for _ in range(count):
        kind = rng.integers(2)
        sampled.append(
            [1, int(rng.integers(10, 12) + 2 * kind), int(rng.integers(20, 23) + 10 * kind), int(rng.integers(20, 23) + 10 * kind)]
        )
    return sampled


def cosine(values: np.ndarray, one: int, other: int) -> float:
    return float(values[one] @ values[other] / np.linalg.norm(values[one]) / np.linalg.norm(values[other]))


def test_tokens_with_the_same_contexts_are_similar_and_others_are_not() -> None:
    values = token_embeddings([texts_of(sentences())], vocab_size=40, width=16, std=0.06, seed=1)
    assert cosine(values, 10, 11) > 0.8
    assert cosine(values, 12, 13) > 0.8
    assert cosine(values, 10, 12) < 0.4


def test_tokens_without_a_context_are_nan_and_the_others_have_the_given_standard_deviation() -> None:
    values = token_embeddings([texts_of([*sentences(), [7]])], vocab_size=40, width=16, std=0.06, seed=1)
    seen = {token for sequence in sentences() for token in sequence}
    assert set(np.flatnonzero(np.isfinite(values).all(axis=1))) == seen
    assert np.isnan(values[7]).all()
    assert values[sorted(seen)].std() == pytest.approx(0.06, rel=1e-5)


def test_ppmi_equals_that_of_counts_by_hand() -> None:
    # 5 6 7 6, window 4, a pair counts 12 / distance to both sides.
    sequences = [[5, 6, 7, 6], [6, 5]]
    counts = np.zeros((8, 8))
    for sequence in sequences:
        for left, one in enumerate(sequence):
            for right in range(left + 1, len(sequence)):
                counts[one, sequence[right]] += 12 // (right - left)
                counts[sequence[right], one] += 12 // (right - left)
    contexts = counts.sum(axis=0) ** 0.75
    with np.errstate(divide="ignore", invalid="ignore"):
        expected = np.log(counts / counts.sum(axis=1, keepdims=True) / (contexts / contexts.sum()))
    expected = np.where(np.isfinite(expected), np.maximum(expected, 0), 0)
    seen = np.bincount([token for sequence in sequences for token in sequence], minlength=8)
    columns = np.argsort(-seen, kind="stable")[:3]
    assert ppmi([texts_of(sequences)], seen, contexts=3, window=4)[0] == pytest.approx(expected[:, columns], abs=1e-6)


def test_contexts_end_at_a_sequence_and_the_grouping_of_sequences_does_not_matter() -> None:
    sampled = sentences()
    whole = token_embeddings([texts_of(sampled)], vocab_size=40, width=16, std=0.06, seed=1)
    parts = token_embeddings([texts_of(sampled[:150]), texts_of(sampled[150:])], vocab_size=40, width=16, std=0.06, seed=1)
    assert np.array_equal(whole, parts, equal_nan=True)


def test_the_number_of_threads_and_of_tokens_counted_at_a_time_change_no_count(monkeypatch: pytest.MonkeyPatch) -> None:
    sampled = sentences()
    texts = [texts_of(sampled[first : first + 30]) for first in range(0, len(sampled), 30)]
    seen = np.bincount([token for sequence in sampled for token in sequence], minlength=40)
    whole, contexts = ppmi(texts, seen, contexts=30, window=3)
    blocks = [(each.ids.astype(np.int32), each.offsets) for each in texts]
    rare = rare_rows(blocks, 20, 33, contexts)
    monkeypatch.setattr(cooccurrence, "CHUNK", 200)
    with Workers(3) as workers:
        assert np.array_equal(ppmi(texts, seen, contexts=30, window=3, workers=workers)[0], whole)
        assert (rare_rows(blocks, 20, 33, contexts, workers=workers) != rare).nnz == 0


def test_the_seed_rotates_the_axes_and_changes_no_angle() -> None:
    one, other = (token_embeddings([texts_of(sentences())], vocab_size=40, width=16, std=0.06, seed=seed) for seed in (1, 2))
    assert not np.allclose(one[10], other[10], atol=1e-3)
    assert cosine(one, 10, 20) == pytest.approx(cosine(other, 10, 20), abs=1e-4)


def test_a_width_above_the_number_of_tokens_and_a_text_of_one_token_are_no_error() -> None:
    assert np.isfinite(token_embeddings([texts_of(sentences())], vocab_size=40, width=64, std=0.06, seed=1)[10]).all()
    assert np.isnan(token_embeddings([texts_of([[3]])], vocab_size=40, width=8, std=0.06, seed=1)).all()


def test_a_count_stays_at_the_largest_number_that_fits() -> None:
    counts = np.full((1, 1), LARGEST - 20, dtype=np.int32)
    ids = np.zeros(10, dtype=np.uint32)
    columns = np.pad(np.zeros(10, dtype=np.int16), 2, constant_values=-1)
    count_contexts(ids, np.array([0, 10]), columns, np.array([12, 6], dtype=np.int32), counts, 0, 1)
    assert counts[0, 0] == LARGEST


@pytest.mark.parametrize(("shape", "rank"), [((60, 30), 8), ((30, 60), 8), ((20, 20), 20), ((7, 1), 1)])
def test_singular_vectors_have_the_bits_of_scikit_learn(shape: tuple[int, int], rank: int) -> None:
    matrix = np.maximum(np.random.default_rng(3).standard_normal(shape), 0).astype(np.float32)
    vectors, sizes, right = randomized_svd(matrix, rank, n_iter=3, random_state=7)
    found, projection = singular_vectors(matrix, rank, seed=7)
    assert np.array_equal(found, vectors * np.sqrt(sizes))
    assert projection == pytest.approx(right.T / np.sqrt(sizes), abs=1e-5)


def test_singular_vectors_do_not_depend_on_the_cores_or_on_what_has_loaded_the_blas_of_scipy() -> None:
    code = """
import numpy as np
from cramlm.linear.cooccurrence import singular_vectors

matrix = np.random.default_rng(0).standard_normal((3000, 400)).astype(np.float32)
for _ in range(2):
    print(singular_vectors(matrix, 64, seed=0)[0].sum(dtype=np.float64))
"""
    environments = [{**os.environ, "OPENBLAS_NUM_THREADS": cores} for cores in ("1", "2")]
    runs = [subprocess.run([sys.executable, "-c", code], env=each, capture_output=True, text=True, check=True) for each in environments]
    assert len(set("".join(run.stdout for run in runs).split())) == 1


def test_the_projection_takes_rows_to_their_vectors_and_ignores_vanishing_singular_values() -> None:
    rows = np.random.default_rng(4).standard_normal((9, 3)).astype(np.float32) @ np.eye(3, 20, dtype=np.float32)
    found, projection = singular_vectors(rows, 6, seed=7)
    assert rows @ projection == pytest.approx(found, abs=1e-4)


def test_rare_rows_are_those_of_all_tokens_while_as_contexts_rare_tokens_are_one() -> None:
    sampled = [token for sequence in sentences() for token in sequence]
    texts = [texts_of([sampled[start : start + 50] for start in range(first, first + 400, 50)]) for first in (0, 400, 800)]
    seen = np.bincount(np.concatenate([each.ids for each in texts]), minlength=40)
    number = np.argsort(np.argsort(-seen, kind="stable"))  # by frequency, as the words of a corpus are numbered
    texts = [Tokens(number[each.ids].astype(np.int32), each.offsets, each.source) for each in texts]
    whole, contexts = ppmi(texts, np.sort(seen)[::-1], contexts=4, window=3)
    frequent = Contexts(np.append(contexts.column[:6], -1), contexts.weights, contexts.shares)
    rows = rare_rows([(each.ids, each.offsets) for each in texts], 6, 11, frequent)
    assert rows.toarray() == pytest.approx(whole[6:11], abs=1e-6)
    assert rows.nnz
