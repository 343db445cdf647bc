"""Explain a prediction: the contribution of each word, and the nearest passages of the run.

The contribution of a word is the decrease of the predicted label's log-odds without the word (occlusion). In a deletion test it was as
faithful as integrated gradients (docs/log.md) in less than half the time; it needs probabilities only, so it works for ONNX models as well.
It costs one prediction per word. Of two redundant words each has a small contribution, since the other one remains.

Words are pre-tokens, not subword tokens: a run of letters, one or two equal punctuation marks, a single Han character. Of a linear model:
runs of letters and digits with their combining marks, and runs of an equal other character. An emoji of several characters is one word.
The nearest passages are the BM25 hits among the passages of the selection, which have an index of their own beside it.
"""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cramlm.config.run import CorpusConfig
from cramlm.errors import EnvironmentFault, UsageError
from cramlm.evaluation.kinds import require_single_label
from cramlm.inference.base import BasePredictor
from cramlm.inference.combined import ModelPart
from cramlm.inference.folders import run_of
from cramlm.retrieval.index import CATALOG, ExplainedHit, Index, build_catalog
from cramlm.retrieval.selection import SelectionTable
from cramlm.storage.artifacts import MANIFEST
from cramlm.text.characters import is_mark

PASSAGES_FOLDER = "selection-index"
_SMALLEST = 1e-30  # minimum of a probability and of the sum of the others


@dataclass(frozen=True, slots=True)
class ExplainedWord:
    """text[start:stop] and its contribution to the log-odds of the label (natural logarithm); negative: against the label."""

    start: int
    stop: int
    text: str
    contribution: float


@dataclass(frozen=True, slots=True)
class Explanation:
    """An explained prediction. read: characters of the text within the model's input; the rest was truncated.

    words: in the order of the text. passages: nearest first; empty without a run, without a selection, or without a shared word.
    """

    text: str
    label: str
    probability: float
    read: int
    words: tuple[ExplainedWord, ...]
    passages: tuple[ExplainedHit, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON."""
        return asdict(self)


def explain(predictor: BasePredictor, text: str, *, run: Path | None = None, passages: int = 3) -> Explanation:
    """Return the predicted label of `text`, the contribution of each word, and the nearest passages of `run`, if given.

    Costs one prediction per word.

    Raises:
        UsageError: if `text` is blank, or not one string, or the model reads pairs. DataError: if it holds a lone surrogate.
    """
    require_single_label(predictor.kind, "explain", "compare the predictions of cramlm predict for the text with and without a word")
    if predictor.trained_on_pairs:
        raise UsageError(
            "explain reads one text, and this model was trained on pairs; compare the predictions of cramlm predict for changed pairs"
        )
    if not isinstance(text, str) or not text.strip():
        raise UsageError(f"text to explain is {text!r:.40}; pass one string that is not blank")
    spans = _whole_emoji(text, predictor.word_spans(text))
    read = text[: spans[-1][1]] if spans else ""
    # A space replaces the word, so that its neighbours stay apart; truncated text does not move into the input.
    without = [f"{read[:start]} {read[stop:]}" for start, stop in spans]
    probabilities = predictor.probabilities([read, *without]).astype(np.float64)
    label = int(probabilities[0].argmax())
    odds = log_odds(probabilities, label)
    contributions = (odds[0] - odds[1:]).tolist()
    words = tuple(ExplainedWord(start, stop, text[start:stop], value) for (start, stop), value in zip(spans, contributions, strict=True))
    nearest = () if run is None else nearest_passages(run, text, limit=passages)
    return Explanation(text, predictor.labels[label], float(probabilities[0, label]), len(read), words, nearest)


def _whole_emoji(text: str, spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the spans with those of one emoji joined: symbols with a zero-width joiner, a symbol and its marks or skin tone."""
    joined: list[tuple[int, int]] = []
    for start, stop in spans:
        touches, first = bool(joined) and joined[-1][1] == start, text[start]
        if touches and ("\u200d" in text[start - 1 : start + 1] or is_mark(first) or "\U0001f3fb" <= first <= "\U0001f3ff"):
            joined[-1] = joined[-1][0], stop
        else:
            joined.append((start, stop))
    return joined


def log_odds(probabilities: np.ndarray[Any, Any], label: int) -> np.ndarray[Any, Any]:
    """ln(p / (1 - p)) of one label, float64 (n,), of probabilities (n, labels).

    1 - p is the sum of the other labels: it is exact where p itself is rounded to 1.
    """
    others = np.delete(probabilities, label, axis=1).sum(axis=1, dtype=np.float64)
    odds: np.ndarray[Any, Any] = np.log(np.maximum(probabilities[:, label], _SMALLEST)) - np.log(np.maximum(others, _SMALLEST))
    return odds


def nearest_passages(run: Path, text: str, *, limit: int) -> tuple[ExplainedHit, ...]:
    """The best BM25 hits for a text among the passages of a run's selection; none if the run retrieved nothing.

    The first call indexes the selection in the run's folder, under its fingerprint, so that a moved run keeps the index; if the disk
    refuses, every call indexes it. Duplicate passages count once.
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
            config = CorpusConfig(files=(str(passages),), max_record_bytes=1_000_000_000)
            try:
                build_catalog(config, folder)
            except EnvironmentFault:  # like a run on a read-only disk
                build_catalog(config, Path(name) / "index")
                return tuple(Index.open(Path(name) / "index").explain(text, limit))
    return tuple(Index.open(folder).explain(text, limit))


def explain_at(path: Path, text: str, *, passages: int = 3, model_part: ModelPart = "combined") -> Explanation:
    """`explain` for a run, an exported model or an ONNX folder, with passages if it lies in a run."""
    from cramlm.inference.folders import model_of
    from cramlm.inference.predictor import load_predictor

    folder = model_of(path)
    return explain(load_predictor(folder, model_part=model_part), text, run=run_of(folder), passages=passages)
