"""Word vectors of a whole corpus, counted once for all tasks and kept in the store.

Positive pointwise mutual information of words at most `WINDOW` positions apart, and its truncated SVD (cooccurrence.py). A word that no
labelled text shows lies near those that they do; the passages retrieved for one task are too few to place it. No label and no task decides
anything here: passages that equal a dev or test text are counted like all others. Settings and what they are worth: docs/log.md.

`<store>/word-vectors/<key>/` holds the files of `WordVectors`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from cramlm.data.corpus import MAX_RESIDENT_BYTES, Corpus
from cramlm.linear.cooccurrence import ppmi, singular_vectors
from cramlm.linear.word_vectors import FREQUENT, WordVectors, count_columns, unit_vectors
from cramlm.model.tokenizer import Tokens
from cramlm.records import Emit, Event, FloatArray, Int32Array, IntArray, silent
from cramlm.retrieval.bm25.analysis import Vocabulary
from cramlm.retrieval.bm25.terms import ANALYZER
from cramlm.storage.artifacts import Artifact, hash_json, shared_stage

KIND: Final = "word-vectors"
CODE_FORMAT: Final = 1  # increase when the same corpus gives other files
WIDTH: Final = 256
WINDOW: Final = 8
MAX_WORDS: Final = 32_768
CONTEXTS: Final = 8192  # words that are counted as contexts, the most frequent
MIN_COUNT: Final = 3
"""A rarer word has no vector."""
MAX_BYTES: Final = 600_000_000
"""Of a larger corpus, passages at equal distances are counted."""
_SHARED_PASSAGES: Final = 20_000  # that the shared direction is taken from
_BLOCK: Final = 20_000  # passages that are read at a time
_FACTORIZING: Final = 1e-7  # seconds per element of the matrix, on one core: 27 s for all words and contexts
_COUNTING: Final = 1.2e-8  # seconds per byte
_BYTES_PER_WORD: Final = 5.5  # of text, with what separates words
_FACTORS: Final = 4 * 4 * WIDTH  # bytes per word while the matrix is factorized: about four matrices of float32 (words, WIDTH)
_OVERHEAD: Final = 60e6  # kernels, and the vocabulary of all words


def forecast_word_vectors(corpus_bytes: int) -> tuple[float, int]:
    """The seconds of one core and the resident bytes that `count_word_vectors` takes for this much text, roughly.

    A text of n bytes has about 5.6 sqrt(n) words that are frequent enough for a vector, up to `MAX_WORDS`. The mapped text is resident,
    too, unless the corpus is so large that it releases it.
    """
    counted, words = min(corpus_bytes, MAX_BYTES), min(MAX_WORDS, int(5.6 * corpus_bytes**0.5))
    elements = words * min(words, CONTEXTS)
    mapped = corpus_bytes if corpus_bytes <= MAX_RESIDENT_BYTES else 0
    memory = 4 * elements + 4 * counted / _BYTES_PER_WORD + _FACTORS * words + mapped + (_OVERHEAD if corpus_bytes else 0)
    return _FACTORIZING * elements + _COUNTING * counted, round(memory)


def build_word_vectors(corpus: Corpus, store: Path, *, emit: Emit = silent) -> Artifact:
    """Return the word vectors of a corpus from the store; count the corpus if they are missing there.

    Raises:
        ArtifactError: if those in the store are damaged. EnvironmentFault: if the disk cannot be written.
    """
    settings = {"width": WIDTH, "window": WINDOW, "words": MAX_WORDS, "contexts": CONTEXTS, "min_count": MIN_COUNT, "frequent": FREQUENT}
    key = {"code": CODE_FORMAT, "terms": ANALYZER, "corpus": corpus.fingerprint, "bytes": MAX_BYTES, **settings}

    def write(folder: Path) -> None:
        count_word_vectors(corpus, emit=emit).save(folder)

    return shared_stage(store / KIND / hash_json(key)[:16], kind=KIND, key=key, write=write, emit=emit)


def count_word_vectors(corpus: Corpus, *, emit: Emit = silent) -> WordVectors:
    """Count the words of a corpus and factorize the counts; the same corpus gives the same vectors up to rounding."""
    vocabulary, texts = _read_words(corpus, emit)
    counts = sum((np.bincount(ids, minlength=len(vocabulary)) for ids, _ in texts), np.zeros(len(vocabulary), np.int64))
    chosen = np.argsort(-counts, kind="stable")[:MAX_WORDS]
    chosen = chosen[counts[chosen] >= MIN_COUNT]
    words, total = tuple(vocabulary.term(number) for number in chosen.tolist()), int(counts.sum())
    if not words:
        return WordVectors((), np.zeros((0, WIDTH), np.float16), np.zeros(0, np.float32), np.zeros(WIDTH, np.float32))
    emit(Event("note", KIND, f"factorizing the co-occurrences of {len(words):,} words"))
    number = np.full(len(vocabulary), len(words), np.int32)  # one number for all words without a vector
    number[chosen] = np.arange(len(words), dtype=np.int32)
    for ids, _ in texts:
        np.take(number, ids, out=ids)
    directions = _directions(texts, counts[chosen], total)
    weights = (FREQUENT / (FREQUENT + counts[chosen] / total)).astype(np.float32)
    vectors = WordVectors(words, directions, weights, np.zeros(WIDTH, np.float32))
    passages = sum(len(offsets) - 1 for _, offsets in texts)
    emit(Event("done", KIND, f"vectors of {len(words):,} words, from {total:,} words of {passages:,} passages"))
    return WordVectors(words, directions, weights, _shared_direction(vectors, texts))


def _read_words(corpus: Corpus, emit: Emit) -> tuple[Vocabulary, list[tuple[Int32Array, IntArray]]]:
    """The vocabulary, and for each block of passages the numbers of its words and their offsets."""
    size = sum(int(part.offsets[-1]) for part in corpus.parts)
    positions = np.arange(0, len(corpus), max(1, -(-size // MAX_BYTES)))
    progress: dict[str, Any] = {"total": len(positions), "unit": "passages"}
    emit(Event("start", KIND, "counting the words of the corpus", **progress))
    vocabulary, texts = Vocabulary(), []
    for first in range(0, len(positions), _BLOCK):
        texts.append(vocabulary.tokenize(*corpus.gather(positions[first : first + _BLOCK])))
        corpus.release()
        emit(Event("progress", KIND, done=min(first + _BLOCK, len(positions)), **progress))
    return vocabulary, texts


def _directions(texts: Sequence[tuple[Int32Array, IntArray]], counts: IntArray, total: int) -> npt.NDArray[np.float16]:
    """Rows of length 1, (words, WIDTH) float16. texts: numbers of words; `len(counts)` stands for every other word."""
    tokens = [Tokens(ids.view(np.uint32), offsets, np.arange(len(offsets) - 1)) for ids, offsets in texts]
    matrix = ppmi(tokens, np.append(counts, total - counts.sum()), contexts=CONTEXTS, window=WINDOW)
    values = np.zeros((len(counts), WIDTH), dtype=np.float32)
    rank = min(WIDTH, *matrix.shape)
    values[:, :rank] = singular_vectors(matrix, rank, seed=0)[: len(counts)]
    return unit_vectors(values).astype(np.float16)


def _shared_direction(vectors: WordVectors, texts: Sequence[tuple[Int32Array, IntArray]]) -> FloatArray:
    """The direction with the largest sum of squares over some passages, float32 (WIDTH,)."""
    step = max(1, sum(len(offsets) - 1 for _, offsets in texts) // _SHARED_PASSAGES)
    scatter = np.zeros((WIDTH, WIDTH), dtype=np.float32)
    for ids, offsets in texts:
        columns = np.where(ids < len(vectors.words), ids, np.int32(-1))
        rows = vectors.of_counts(count_columns(columns, offsets, len(vectors.words))[::step])
        scatter += rows.T @ rows
    direction: FloatArray = np.linalg.eigh(scatter)[1][:, -1].astype(np.float32)
    return direction
