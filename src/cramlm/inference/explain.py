"""Explain a prediction: the contribution of each word, and the nearest passages of the run.

The contribution of a word is the decrease of a label's log-odds without the word, or of the number of a regression (occlusion). In a
deletion test it was as faithful as integrated gradients (docs/log.md) in less than half the time; it needs predictions only, so it works
for ONNX models as well. It costs one prediction per word, and at most `MOST_PARTS`: a longer text is divided into spans of equally many
words, each with one contribution, as SHAP does, which has the same bound by default (`max_evals`). Of two redundant words each has a small
contribution, since the other one remains.

Of a pair the words of both texts are removed, one at a time; each has the field that it is in, text or text_pair.

Words are pre-tokens, not subword tokens: a run of letters, one or two equal punctuation marks, a single Han character. Of a linear model:
runs of letters and digits with their combining marks, and runs of an equal other character. An emoji of several characters is one word.
The nearest passages are the BM25 hits among the passages of the selection, which have an index of their own beside it.
"""

from __future__ import annotations

import itertools
import math
import re
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np

from cramlm.config.run import CorpusConfig
from cramlm.errors import EnvironmentFault, UsageError, brief
from cramlm.evaluation.kinds import brief_labels
from cramlm.inference.base import BasePredictor
from cramlm.inference.folders import model_of, run_of
from cramlm.inference.linear import ModelPart
from cramlm.inference.predictor import load_predictor
from cramlm.records import TaskKind
from cramlm.retrieval.index import ExplainedHit, Index, build_catalog
from cramlm.retrieval.selection import SelectionTable
from cramlm.storage.artifacts import CATALOG, MANIFEST
from cramlm.text.characters import is_mark

PASSAGES_FOLDER = "selection-index"
MOST_PARTS: Final = 500
_BATCH = 64  # texts predicted at a time
_SMALLEST = 1e-30  # minimum of a probability and of the sum of the others
_ROUNDING = 2.0**-24  # half the distance of 1 from the next smaller float32
_CONTINUES_EMOJI = re.compile("[\u200d\U0001f3fb-\U0001f3ff\U000e0020-\U000e007f]")  # joiner, skin tones, tags
_FLAG = re.compile("[\U0001f1e6-\U0001f1ff]{2}")


@dataclass(frozen=True, slots=True)
class ExplainedWord:
    """Characters [start, stop) of `field`, and their contribution to the log-odds of the label (natural logarithm) or to the number.

    A negative one is against the label, or makes the number smaller. Several consecutive words in a text of more than `MOST_PARTS`.
    """

    start: int
    stop: int
    text: str
    contribution: float
    field: Literal["text", "text_pair"] = "text"


@dataclass(frozen=True, slots=True)
class Explanation:
    """An explained prediction. read: characters of the text within the model's input; the rest was truncated.

    label, probability: the label that is explained. Of a regression the name of the number; `value` is the number, `probability` None.
    words: in the order of the text, then of its pair. passages: nearest first; empty without a run, without a selection, or without a
    shared word. text_pair, read_pair: the second text and the characters that were read of it; None of a single text.
    """

    text: str
    label: str
    probability: float | None
    read: int
    words: tuple[ExplainedWord, ...]
    passages: tuple[ExplainedHit, ...] = ()
    text_pair: str | None = None
    read_pair: int | None = None
    value: float | None = None

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON."""
        return asdict(self)


def explain(
    predictor: BasePredictor,
    text: str,
    *,
    text_pair: str | None = None,
    label: str | None = None,
    run: str | Path | None = None,
    passages: int = 3,
) -> Explanation:
    """Return what each word of `text` contributes to a label or number, and the nearest passages of `run`, if given.

    text_pair: the second text, for a model of pairs. label: the label to explain; None = the most probable one. Costs one prediction per
    word; from 501 words on, spans of several words have a contribution, and it costs at most 502.

    Raises:
        UsageError: if the model is not loaded, a text is blank, or not one string, `text_pair` is not what the model was trained on, or the
            model has no such label.
        DataError: if a text holds a lone surrogate.
    """
    if not isinstance(predictor, BasePredictor):
        raise UsageError(f"the model to explain is {brief(predictor)}, not loaded; pass cramlm.Predictor.load(FOLDER)")
    _check_pair(predictor, text_pair)
    if label is not None and label not in predictor.labels:
        raise UsageError(f"label {brief(label)} is none of the model's; choose one of {brief_labels(predictor.labels)}")
    fields = {"text": text} if text_pair is None else {"text": text, "text_pair": text_pair}
    for name, value in fields.items():
        if not isinstance(value, str) or not value.strip():
            raise UsageError(f"{name} to explain is {value!r:.40}; pass one string that is not blank")
    sides = [_read_words(each, spans) for each, spans in zip((text, text_pair or ""), predictor.word_spans(text, text_pair), strict=True)]
    (of_text, read), (of_pair, read_pair) = sides
    size = max(1, math.ceil((len(of_text) + len(of_pair)) / MOST_PARTS))
    of_text, of_pair = _joined(of_text, size), _joined(of_pair, size)
    changed = itertools.chain(
        [(read, read_pair)],
        ((without, read_pair) for without in _without_each(read, of_text)),
        ((read, without) for without in _without_each(read_pair, of_pair)),
    )
    outputs = _outputs(predictor, changed, paired=text_pair is not None)
    column = int(outputs[0].argmax()) if label is None else predictor.labels.index(label)
    evidence = _evidence(outputs, column, predictor.kind)
    contributions = iter((evidence[0] - evidence[1:]).tolist())
    words = [ExplainedWord(*span, read[slice(*span)], next(contributions)) for span in of_text]
    words += [ExplainedWord(*span, read_pair[slice(*span)], next(contributions), "text_pair") for span in of_pair]
    query = text if text_pair is None else f"{text} {text_pair}"
    return Explanation(
        text=text,
        label=predictor.labels[column],
        probability=None if predictor.kind == "regression" else float(outputs[0, column]),
        read=len(read),
        words=tuple(words),
        passages=() if run is None else nearest_passages(Path(run), query, limit=passages),
        text_pair=text_pair,
        read_pair=None if text_pair is None else len(read_pair),
        value=float(outputs[0, column]) if predictor.kind == "regression" else None,
    )


def _evidence(outputs: np.ndarray[Any, Any], column: int, kind: TaskKind) -> np.ndarray[Any, Any]:
    """The number whose decrease without a word is its contribution, float64 (n,), of outputs (n, labels)."""
    match kind:
        case "classification":
            return log_odds(outputs, column)
        case "multi-label":
            others = np.maximum(1 - outputs[:, column], _ROUNDING)
            return log_odds(np.stack([outputs[:, column], others], axis=1), 0)
        case "regression":
            return outputs[:, column]


def _check_pair(predictor: BasePredictor, text_pair: str | None) -> None:
    if predictor.trained_on_pairs is True and text_pair is None:
        raise UsageError("this model was trained on pairs of texts; pass the second text, too: text_pair (--text-pair)")
    if predictor.trained_on_pairs is False and text_pair is not None:
        raise UsageError("this model was trained on single texts; leave out the second one: text_pair (--text-pair)")


def _read_words(text: str, spans: list[tuple[int, int]]) -> tuple[list[tuple[int, int]], str]:
    """The spans of whole words, and the text up to the last one: truncated text must not move into the input."""
    words = _whole_emoji(text, spans)
    return words, text[: words[-1][1]] if words else ""


def _joined(spans: list[tuple[int, int]], size: int) -> list[tuple[int, int]]:
    """The spans of each `size` consecutive words."""
    return [(part[0][0], part[-1][1]) for start in range(0, len(spans), size) if (part := spans[start : start + size])]


def _without_each(text: str, spans: list[tuple[int, int]]) -> Iterator[str]:
    """The text without each of the words; a space replaces it, so that its neighbours stay apart."""
    return (f"{text[:start]} {text[stop:]}" for start, stop in spans)


def _outputs(predictor: BasePredictor, texts: Iterator[tuple[str, str]], *, paired: bool) -> np.ndarray[Any, Any]:
    """The outputs of texts, float64 (n, labels), computed without holding all texts. paired: with their second halves."""
    rows = []
    while batch := list(itertools.islice(texts, _BATCH)):
        firsts, seconds = map(list, zip(*batch, strict=True))
        rows.append(predictor.outputs(firsts, seconds if paired else None))
    return np.concatenate(rows).astype(np.float64)


def _whole_emoji(text: str, spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the spans with those of one emoji joined: symbols with a zero-width joiner, a symbol and its marks, skin tone or tags, and
    the two letters of a flag.
    """
    joined: list[tuple[int, int]] = []
    for start, stop in spans:
        before = joined[-1] if joined and joined[-1][1] == start else None
        follows = is_mark(text[start]) or text[start - 1] == "\u200d" or _CONTINUES_EMOJI.match(text, start)
        if before and (follows or _FLAG.fullmatch(text, before[0], stop)):
            joined[-1] = before[0], stop
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


def explain_at(
    path: Path,
    text: str,
    *,
    text_pair: str | None = None,
    label: str | None = None,
    passages: int = 3,
    model_part: ModelPart = "combined",
) -> Explanation:
    """`explain` for a run, an exported model or an ONNX folder, with passages if it lies in a run."""
    folder = model_of(path)
    predictor = load_predictor(folder, model_part=model_part)
    return explain(predictor, text, text_pair=text_pair, label=label, run=run_of(folder), passages=passages)
