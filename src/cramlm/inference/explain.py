"""Why a text got its label: what each of its words adds, and the passages of the run that are nearest to it.

A word's contribution is by how much the log-odds of the predicted label fall when the word is taken out of the text (occlusion). In a
deletion test it was as faithful as integrated gradients (docs/log.md), at less than half the time, and it asks nothing of a predictor but
probabilities, so that models in ONNX form are explained as well. The cost is one answer per word. Two words that say the same hide each
other: without one of them the other still decides.

Words are what the tokenizer cuts at, not its pieces: a run of letters, a punctuation mark or two equal ones, a single Han character. Of a
linear model, which has no such tokenizer: runs of letters and digits with their marks, and runs of any other character.
Nearest passages are found by BM25 among those that the run trained on, in an index of their own beside the selection.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from cramlm.config.run import CorpusConfig
from cramlm.errors import UsageError
from cramlm.evaluation.kinds import require_single_label
from cramlm.inference.runs import run_of
from cramlm.records import FloatArray, TaskKind
from cramlm.retrieval.catalog import CATALOG, SearchResult, build_catalog, search_catalog
from cramlm.retrieval.selection import SelectionTable
from cramlm.storage.artifacts import MANIFEST

PASSAGES_FOLDER = "selection-index"
_SMALLEST = 1e-9  # probabilities are kept this far from 0 and 1, where log-odds end


class Explainable(Protocol):
    """What an explanation asks of a predictor."""

    labels: tuple[str, ...]
    kind: TaskKind

    def word_spans(self, text: str) -> list[tuple[int, int]]:
        """Where the words that the model reads stand in the text, as characters [start, stop), in order."""

    def probabilities(self, texts: Sequence[str]) -> FloatArray:
        """(n, labels), rows sum to 1."""


@dataclass(frozen=True, slots=True)
class Word:
    """text[start:stop] and what it adds to the log-odds of the label (natural logarithm); negative: it speaks against it."""

    start: int
    stop: int
    text: str
    contribution: float


@dataclass(frozen=True, slots=True)
class Explanation:
    """A text's label with its reasons. read: characters of the text that the model reads; the rest was cut off, and adds nothing.

    words: in the order of the text. passages: nearest first; empty where the run is unknown, retrieved nothing, or shares no word.
    """

    text: str
    label: str
    probability: float
    read: int
    words: tuple[Word, ...]
    passages: tuple[SearchResult, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON."""
        return asdict(self)


def explain(predictor: Explainable, text: str, *, run: Path | None = None, passages: int = 3) -> Explanation:
    """The predicted label of `text`, the contribution of each word, and the nearest passages of `run` (where one is given).

    Costs one answer for each word that the model reads.

    Raises:
        UsageError: if `text` is blank, or not one string. DataError: if it holds a lone surrogate.
    """
    require_single_label(predictor.kind, "explain", "compare what cramlm predict says of the text with and without a word")
    if not isinstance(text, str) or not text.strip():
        raise UsageError(f"text to explain is {text!r:.40}; pass one string that is not blank")
    spans = predictor.word_spans(text)
    read = text[: spans[-1][1]] if spans else ""
    # A space stays in the place of a word, so that its neighbours do not grow together; what was cut off does not move in.
    without = [f"{read[:start]} {read[stop:]}" for start, stop in spans]
    probabilities = predictor.probabilities([read, *without]).astype(np.float64)
    label = int(probabilities[0].argmax())
    odds = log_odds(probabilities[:, label])
    words = tuple(
        Word(start, stop, text[start:stop], float(odds[0] - changed)) for (start, stop), changed in zip(spans, odds[1:], strict=True)
    )
    nearest = () if run is None else nearest_passages(run, text, limit=passages)
    return Explanation(text, predictor.labels[label], float(probabilities[0, label]), len(read), words, nearest)


def log_odds(probabilities: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """ln(p / (1 - p)), finite for 0 and 1 too."""
    kept = np.clip(probabilities, _SMALLEST, 1 - _SMALLEST)
    odds: np.ndarray[Any, Any] = np.log(kept) - np.log1p(-kept)
    return odds


def nearest_passages(run: Path, text: str, *, limit: int) -> tuple[SearchResult, ...]:
    """The passages of a run's selection that BM25 finds for a text, best first; none if the run retrieved nothing.

    The first call for a selection indexes it, in the run's folder, under its fingerprint, so that a moved run has it already; passages
    that repeat one another count once.
    """
    if limit < 1 or not (run / "selection" / MANIFEST).is_file():
        return ()
    selection = SelectionTable.open(run / "selection")
    folder = run / PASSAGES_FOLDER / selection.artifact.fingerprint[:16]
    if not (folder / CATALOG).is_file():
        for other in set((run / PASSAGES_FOLDER).glob("*")) - {folder}:  # of earlier selections
            shutil.rmtree(other, ignore_errors=True)
        with tempfile.TemporaryDirectory(prefix="cramlm-explain-") as name:
            passages = Path(name) / "passages.parquet"
            selection.write_parquet(passages)
            build_catalog(CorpusConfig(files=(str(passages),), max_record_bytes=1_000_000_000), folder)
    return tuple(search_catalog(folder, text, limit=limit))


def explain_at(path: Path, text: str, *, passages: int = 3) -> Explanation:
    """`explain` for a run, an exported model or an ONNX folder, with passages where it lies in a run."""
    from cramlm.inference.predictor import load_predictor
    from cramlm.inference.runs import model_of

    folder = model_of(path)
    return explain(load_predictor(folder), text, run=run_of(folder), passages=passages)
