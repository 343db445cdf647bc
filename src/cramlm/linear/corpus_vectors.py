"""Word vectors of a corpus, for all tasks: counted, then trained.

The vector of a word that no labelled text has is close to those of similar words that labelled texts have; the passages retrieved for one
task are too few to learn such vectors. The co-occurrences (cooccurrence.py) of the most frequent words are factorized; the row of a rarer
one is multiplied by the projection that takes a row to its vector (folding-in; Berry, Dumais and O'Brien 1995), for a fraction of the time
and memory. These vectors are then trained on the halves of passages (contrastive.py). No label and no task decides anything here: passages
that equal a dev or test text are counted like all others. `<store>/word-vectors/<key>/` holds the files of `CorpusVectors`. Settings, and
what they are worth: docs/log.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from cramlm.data.corpus import MAX_RESIDENT_BYTES, Corpus
from cramlm.io.threads import Workers
from cramlm.linear.contrastive import EPOCHS, MIN_BATCHES, Halves, Texts, equalize, train_on_halves, training_settings
from cramlm.linear.cooccurrence import CHUNK, ppmi, rare_rows, singular_vectors
from cramlm.linear.features import count_columns
from cramlm.linear.solvers import on_one_blas_thread
from cramlm.linear.word_vectors import FREQUENT, CorpusVectors, WordVectors, mean_vectors
from cramlm.model.tokenizer import Tokens
from cramlm.records import Diacritics, Emit, Event, FloatArray, Int32Array, IntArray, silent
from cramlm.retrieval.bm25.analysis import PLAIN, Analyzer, Vocabulary
from cramlm.storage.arrays import offsets_of, spread, unit_vectors
from cramlm.storage.artifacts import Artifact, hash_json
from cramlm.storage.stages import shared_stage

KIND: Final = "word-vectors"
CODE_FORMAT: Final = 2  # increase when the same corpus gives other files
WIDTH: Final = 256
WORD_WINDOW: Final = 8
FACTORIZED_WORDS: Final = 32_768  # the most frequent
MAX_WORDS: Final = 131_072
WORD_CONTEXTS: Final = 8192  # words that are counted as contexts, the most frequent
MIN_COUNT: Final = 3
"""A rarer word has no vector."""
MIN_FOLDED_COUNT: Final = 10
"""A word that is neither factorized nor this frequent has no vector."""
MAX_BYTES: Final = 600_000_000
"""Of a larger corpus, passages at equal distances are counted."""
_SHARED_PASSAGES: Final = 20_000  # that the shared direction is taken from
_BLOCK: Final = 20_000  # passages that are read at a time
_REPORTED: Final = 20  # batches between two reports of progress
_FACTORIZING: Final = 1e-7  # seconds per element of the matrix, on one core: 27 s for all words and contexts
_COUNTING: Final = 4.2e-8  # seconds per byte: words, their contexts, those of rarer words, the shared direction
_TRAINING: Final = 1e-7  # seconds per byte, if there are enough passages
_ONE_THREAD: Final = 0.45  # share of the seconds that more threads do not shorten: most wait for memory
_BYTES_PER_WORD: Final = 5.5  # of text, with what separates words
_FACTORS: Final = 4 * 4 * WIDTH  # bytes per word while the matrix is factorized: about four matrices of float32 (words, WIDTH)
_CHUNK_BYTES: Final = 10  # per token of a chunk: copies of its ids and columns, and the positions
_OVERHEAD: Final = 60e6  # kernels, and the vocabulary of all words


def forecast_word_vectors(corpus_bytes: int, threads: int = 1) -> tuple[float, int]:
    """Return the seconds and the resident bytes that `count_word_vectors` takes for this much text, roughly.

    A text of n bytes has about 5.6 sqrt(n) words that are factorized, up to `FACTORIZED_WORDS`. The mapped text is resident, too, unless
    the corpus is so large that it releases it.
    """
    counted, words = min(corpus_bytes, MAX_BYTES), min(FACTORIZED_WORDS, int(5.6 * corpus_bytes**0.5))
    elements = words * min(words, WORD_CONTEXTS)
    mapped = corpus_bytes if corpus_bytes <= MAX_RESIDENT_BYTES else 0
    tokens = counted / _BYTES_PER_WORD
    arrays = 4 * elements + 4 * tokens + _CHUNK_BYTES * min(tokens, CHUNK) + _FACTORS * words
    seconds = (_ONE_THREAD + (1 - _ONE_THREAD) / threads) * (_FACTORIZING * elements + (_COUNTING + _TRAINING) * counted)
    return seconds, round(arrays + mapped + (_OVERHEAD if corpus_bytes else 0))


def build_word_vectors(corpus: Corpus, store: Path, *, diacritics: Diacritics = "keep", threads: int = 1, emit: Emit = silent) -> Artifact:
    """Return the word vectors of a corpus from the store; count the corpus if they are missing there.

    diacritics: "remove" = of words without them; the vectors are for texts without them.

    Raises:
        ArtifactError: if those in the store are damaged. EnvironmentFault: if the disk cannot be written.
    """
    settings = {
        "width": WIDTH,
        "window": WORD_WINDOW,
        "factorized": FACTORIZED_WORDS,
        "words": MAX_WORDS,
        "contexts": WORD_CONTEXTS,
        "min_count": MIN_COUNT,
        "min_folded_count": MIN_FOLDED_COUNT,
        "frequent": FREQUENT,
        "training": training_settings(),
    }
    analyzer = Analyzer(diacritics=diacritics)
    key = {"code": CODE_FORMAT, "terms": analyzer.name, "corpus": corpus.fingerprint, "bytes": MAX_BYTES, **settings}

    def write(folder: Path) -> None:
        count_word_vectors(corpus, analyzer, threads=threads, emit=emit).save(folder)

    return shared_stage(store / KIND / hash_json(key)[:16], kind=KIND, key=key, write=write, emit=emit)


@on_one_blas_thread
def count_word_vectors(corpus: Corpus, analyzer: Analyzer = PLAIN, *, threads: int = 1, emit: Emit = silent) -> CorpusVectors:
    """Count the words of a corpus, factorize the counts and train the vectors (contrastive.py); equal corpora give equal vectors up to
    rounding.
    """
    with Workers(threads, emit=emit) as workers:
        return _count(corpus, analyzer, workers)


def _count(corpus: Corpus, analyzer: Analyzer, workers: Workers) -> CorpusVectors:
    vocabulary, texts = _read_words(corpus, analyzer, workers)
    bincounts = workers.all(partial(np.bincount, ids, minlength=len(vocabulary)) for ids, _ in texts)
    counts = sum(bincounts, np.zeros(len(vocabulary), np.int64))
    chosen = np.argsort(-counts, kind="stable")[:MAX_WORDS]
    chosen = chosen[counts[chosen] >= np.where(np.arange(len(chosen)) < FACTORIZED_WORDS, MIN_COUNT, MIN_FOLDED_COUNT)]
    words, total = tuple(vocabulary.term(number) for number in chosen.tolist()), int(counts.sum())
    if not words:
        none = WordVectors((), np.zeros((0, WIDTH), np.float16), np.zeros(0, np.float32))
        return CorpusVectors(none, none)
    workers.emit(Event("note", KIND, f"factorizing the co-occurrences of {len(words):,} words"))
    number = np.full(len(vocabulary), len(words), np.int32)  # one number for all words without a vector
    number[chosen] = np.arange(len(words), dtype=np.int32)
    _renumber(texts, number, workers)
    counted = _factorize(texts, counts[chosen], total, workers)
    weights = (FREQUENT / (FREQUENT + counts[chosen] / total)).astype(np.float32)
    sampled = _sampled_counts(texts, len(words))
    counted_vectors = WordVectors(words, _without_shared(counted, sampled, weights), weights)
    trained = WordVectors(words, _train(texts, counted, sampled, weights, workers), weights)
    passages = sum(len(offsets) - 1 for _, offsets in texts)
    workers.emit(Event("done", KIND, f"vectors of {len(words):,} words, from {total:,} words of {passages:,} passages"))
    return CorpusVectors(counted_vectors, trained)


def _train(texts: Texts, vectors: FloatArray, sampled: Sequence[Any], weights: FloatArray, workers: Workers) -> npt.NDArray[np.float16]:
    """Train `vectors` in place on the halves of passages, if there are enough; return them without the direction that passages share."""
    halves = Halves(texts, weights, seed=0)
    if len(halves) < MIN_BATCHES:
        return _without_shared(vectors, sampled, weights)
    progress: dict[str, Any] = {"total": EPOCHS * len(halves), "unit": "batches"}
    workers.emit(Event("start", KIND, f"training the vectors on the halves of {halves.passages:,} passages", **progress))
    for done, loss in enumerate(train_on_halves(halves, vectors, weights, workers=workers), 1):
        if done % _REPORTED == 0:
            workers.emit(Event("progress", KIND, done=done, data={"loss": loss}, **progress))
    vectors = equalize(halves, _without_shared(vectors, sampled, weights).astype(np.float32), weights, workers=workers)
    vectors /= max(float(np.linalg.norm(vectors, axis=1).mean()), 1e-12)  # 0 if no two words are in one passage
    return vectors.astype(np.float16)


def _read_words(corpus: Corpus, analyzer: Analyzer, workers: Workers) -> tuple[Vocabulary, list[tuple[Int32Array, IntArray]]]:
    """Return the vocabulary, and for each block of passages the numbers of its words and their offsets.

    Each thread reads a span of the corpus into a vocabulary of its own; joined in order they are that of one thread.
    """
    size = sum(int(part.offsets[-1]) for part in corpus.parts)
    positions = np.arange(0, len(corpus), max(1, -(-size // MAX_BYTES)))
    progress: dict[str, Any] = {"total": len(positions), "unit": "passages"}
    workers.emit(Event("start", KIND, "counting the words of the corpus", **progress))
    blocks = [positions[first : first + _BLOCK] for first in range(0, len(positions), _BLOCK)]
    count = max(1, min(workers.threads, len(blocks)))
    bounds = [len(blocks) * number // count for number in range(count + 1)]
    spans = [(Vocabulary(analyzer), blocks[first:end]) for first, end in pairwise(bounds)]
    texts: list[list[tuple[Int32Array, IntArray]]] = [[] for _ in spans]

    def read(number: int) -> None:
        vocabulary, waiting = spans[number]
        texts[number].append(vocabulary.tokenize(*corpus.gather(waiting[len(texts[number])])))
        corpus.release()

    for turn in range(max(len(span) for _, span in spans)):
        reading = [number for number, (_, span) in enumerate(spans) if turn < len(span)]
        workers.all(partial(read, number) for number in reading)
        workers.emit(Event("progress", KIND, done=min(_BLOCK * sum(map(len, texts)), len(positions)), **progress))
    vocabulary = spans[0][0]
    for (other, _), own in zip(spans[1:], texts[1:], strict=True):
        _renumber(own, vocabulary.add(other), workers)
    return vocabulary, [block for own in texts for block in own]


def _renumber(texts: Texts, number: Int32Array, workers: Workers) -> None:
    """Replace each word by its number, in place."""
    workers.all(partial(np.take, number, ids, out=ids, mode="clip") for ids, _ in texts)


def _factorize(texts: Texts, counts: IntArray, total: int, workers: Workers) -> FloatArray:
    """Rows of length 1, (words, WIDTH) float32. texts: numbers of words; `len(counts)` stands for every other word."""
    frequent = counts[:FACTORIZED_WORDS]
    others = len(frequent)  # the id of every word that is not factorized
    tokens = (Tokens(np.minimum(ids, others).view(np.uint32), offsets, np.arange(len(offsets) - 1)) for ids, offsets in texts)
    token_counts = np.append(frequent, total - frequent.sum())
    matrix, contexts = ppmi(tokens, token_counts, contexts=WORD_CONTEXTS, window=WORD_WINDOW, workers=workers)
    rank = min(WIDTH, *matrix.shape)
    vectors, projection = singular_vectors(matrix, rank, seed=0, threads=workers.threads)
    del matrix  # up to a gigabyte
    values = np.zeros((len(counts), WIDTH), dtype=np.float32)
    values[:others, :rank] = vectors[:others]
    if len(counts) > others:
        values[others:, :rank] = rare_rows(texts, others, len(counts), contexts, workers=workers) @ projection
    return unit_vectors(values)


def _sampled_counts(texts: Texts, words: int) -> list[Any]:
    """Counts of the words of about `_SHARED_PASSAGES` passages at equal distances, CSR (passages, words) for each block."""
    step = max(1, sum(len(offsets) - 1 for _, offsets in texts) // _SHARED_PASSAGES)
    sampled = []
    for ids, offsets in texts:
        sizes = np.diff(offsets)[::step]
        some = ids[spread(offsets[:-1][::step], sizes)]
        sampled.append(count_columns(np.where(some < words, some, np.int32(-1)), offsets_of(sizes), words))
    return sampled


def _without_shared(vectors: FloatArray, sampled: Sequence[Any], weights: FloatArray) -> npt.NDArray[np.float16]:
    """Return the vectors of words less their components along the direction with the largest sum of squares over some passages.

    sampled: of `_sampled_counts`.
    """
    scatter = np.zeros((WIDTH, WIDTH), dtype=np.float32)
    for counts in sampled:
        rows = mean_vectors(counts, vectors, weights)
        scatter += rows.T @ rows
    shared = np.linalg.eigh(scatter)[1][:, -1].astype(np.float32)
    rest: FloatArray = vectors - np.outer(vectors @ shared, shared)
    return rest.astype(np.float16)
