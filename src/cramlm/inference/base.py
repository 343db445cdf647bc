"""The interface of all predictors, with the checks and the streaming of texts that they share. Importing it loads NumPy only."""

from __future__ import annotations

import itertools
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from cramlm.errors import DataError, UsageError, list_fault
from cramlm.records import AnyPrediction, Example, FloatArray, IntArray, SelectivePrediction, TaskKind
from cramlm.storage.locks import damage_named

if TYPE_CHECKING:
    from cramlm.evaluation.confidence import Confidence
    from cramlm.evaluation.kinds import AnyScores

STREAM_BATCH = 1024
WordSpans: TypeAlias = tuple[list[tuple[int, int]], list[tuple[int, int]]]
"""Spans of a text, and of its second text; without one the second list is empty."""


class BasePredictor(ABC):
    """A loaded model. labels: in the order of the outputs. Subclasses compute the outputs of texts and find their words.

    trained_on_pairs: True if every text needs a pair, False if none may have one, None if the model's folder does not say.
    max_length: tokens of its input, special ones included; `UNCUT` (model/tokenizer.py) if it reads whole texts. confidence:
    calibration of its predictions; None if its folder has no confidence.json. without_embeddings: why this kind of model has no
    `embeddings`.
    """

    labels: tuple[str, ...]
    kind: TaskKind
    max_length: int
    trained_on_pairs: bool | None = None
    confidence: Confidence | None = None
    without_embeddings: str = "this model has no text vectors"

    @abstractmethod
    def outputs(self, texts: Sequence[str], pairs: Sequence[str | None] | None) -> FloatArray:
        """Return probabilities, float32 (n, labels), or the numbers of a regression, (n, 1), in the order of the texts.

        Raises:
            UsageError, DataError: as `check_texts`.
        """

    @abstractmethod
    def whole_lengths(self, texts: Sequence[str], pairs: Sequence[str | None] | None = None) -> IntArray:
        """Return the tokens of each text before truncation, special tokens included; for a linear model its words. int64 (n,)."""

    @abstractmethod
    def word_spans(self, text: str, pair: str | None = None) -> WordSpans:
        """Return character spans [start, stop) of the words within the model's input, in order: those of the text and those of its pair."""

    def compute(self, texts: Sequence[str], pairs: Sequence[str | None] | None) -> tuple[FloatArray, IntArray]:
        """Return the outputs, and the tokens of each text, int64 (n,), `max_length` for one that is longer. Raises as `outputs`."""
        return self.outputs(texts, pairs), self.whole_lengths(texts, pairs)

    def predict(self, texts: Sequence[str], pairs: Sequence[str | None] | None = None) -> list[AnyPrediction]:
        """Return a prediction for each text (or pair of texts) in order: a `Prediction` (label and all probabilities); of a multi-label
        model a `LabelsPrediction`; of a regression a `NumberPrediction`. Of a blank text it is that of a text without words; commands and
        the server refuse such texts.

        Raises:
            UsageError: if `texts` is one string or a table, or `pairs` has another length, or is not what the model was trained on.
            DataError: if a text is not a string.
        """
        from cramlm.evaluation.kinds import KINDS

        return KINDS[self.kind].predictions(self.outputs(texts, pairs), self.labels)

    def embeddings(self, texts: Sequence[str], pairs: Sequence[str | None] | None = None) -> FloatArray:
        """Return a vector for each text (or pair of texts), float32 (n, width), in order; not scaled to length 1.

        Raises:
            UsageError, DataError: as `predict`. UsageError: if the model has no text vectors.
        """
        raise UsageError(f"{self.without_embeddings}; pass the folder of a run of an encoder, or of the model that it exported")

    def predict_or_abstain(
        self, texts: Sequence[str], pairs: Sequence[str | None] | None = None, *, below: float
    ) -> list[SelectivePrediction]:
        """As `predict`, with the confidence of each prediction, and no label (None) if it is lower than `below`.

        Raises:
            UsageError, DataError: as `predict`. UsageError: as `threshold`, or if `below` is not in [0, 1].
        """
        confidence = self.calibrated()
        check_threshold(below)
        rows = self.outputs(texts, pairs)
        best = rows.argmax(axis=1).tolist()
        return [
            SelectivePrediction(self.labels[index] if value >= below else None, value, dict(zip(self.labels, row.tolist(), strict=True)))
            for index, value, row in zip(best, confidence.of(rows).tolist(), rows, strict=True)
        ]

    def threshold(self, *, accuracy: float) -> float:
        """Return the lowest `below` of `predict_or_abstain` for which at least this share of the labels is right on dev.

        Raises:
            UsageError: if no threshold reaches it, the model has no calibrated confidence, or its texts do not have one label each.
        """
        return self.calibrated().threshold(accuracy=accuracy)

    def calibrated(self) -> Confidence:
        """Return `confidence`.

        Raises:
            UsageError: if there is none, or if the texts do not have one label each. ArtifactError: if it has other labels.
        """
        if self.kind != "classification":
            from cramlm.evaluation.kinds import require_single_label

            instead = "use the probability of each label" if self.kind == "multi-label" else "use the number, which has no confidence"
            require_single_label(self.kind, "abstaining", instead)
        from cramlm.evaluation.confidence import usable_confidence

        return usable_confidence(self.confidence, self.labels)

    def predict_iter(
        self, texts: Iterable[str], pairs: Iterable[str | None] | None = None, *, batch: int = STREAM_BATCH
    ) -> Iterator[AnyPrediction]:
        """Yield the predictions of `predict` for any number of texts, reading `batch` of them at a time.

        Raises:
            UsageError: if `texts` or `pairs` is no list (`refuse_no_list`) or `batch` is below 1, at once; later, if they have different
            lengths.
        """
        refuse_no_list(texts, pairs)
        if batch < 1:
            raise UsageError(f"batch is {batch}; take at least 1 text at a time")
        return self._stream(iter(texts), None if pairs is None else iter(pairs), batch)

    def probabilities(self, texts: Sequence[str], pairs: Sequence[str | None] | None = None) -> FloatArray:
        """Return the probability of each label for each text, float32 (n, labels) in the order of `labels`.

        Rows sum to 1 unless the model is multi-label.

        Raises:
            UsageError, DataError: as `predict`. UsageError: if the model is a regression.
        """
        if self.kind == "regression":
            raise UsageError("this model predicts a number, which has no probability; use predict")
        return self.outputs(texts, pairs)

    def check_labels(self, examples: Sequence[Example], *, origin: str) -> None:
        """Raise DataError with the first label that the model lacks and its row in `origin`."""
        from cramlm.evaluation.kinds import check_labels

        remedy = "pass --unseen-labels ignore to count it as missed"
        if self.kind == "multi-label":
            remedy = f"--label-separator CHAR if it is several labels, or {remedy}"
        check_labels(self.kind, self.labels, examples, origin=origin, remedy=remedy)

    def score(self, examples: Sequence[Example]) -> AnyScores:
        """Score predictions on labelled examples; a label that the model lacks counts as an error.

        Raises:
            DataError: if there is no example, or one has no label.
        """
        from cramlm.evaluation.kinds import KINDS, gold_labels

        true, kind = gold_labels(examples), KINDS[self.kind]
        outputs = self._outputs_to_score([example.text for example in examples], [example.text_pair for example in examples])
        return kind.score(true, kind.predicted_labels(outputs, self.labels), self.labels, outputs)

    def _outputs_to_score(self, texts: Sequence[str], pairs: Sequence[str | None]) -> FloatArray:
        return self.outputs(texts, pairs)

    def _stream(self, texts: Iterator[str], pairs: Iterator[str | None] | None, batch: int) -> Iterator[AnyPrediction]:
        while chunk := list(itertools.islice(texts, batch)):
            yield from self.predict(chunk, None if pairs is None else list(itertools.islice(pairs, len(chunk))))
        if pairs is not None and next(pairs, _END) is not _END:
            raise UsageError("there are more pairs than texts; give one for each text")


class EncoderPredictor(BasePredictor):
    """A loaded encoder."""

    def longest_input(self, pair: str | None = None) -> int:
        """Return the longest input in tokens, special tokens included; less than `max_length` if a prompt takes some."""
        return self.max_length

    @property
    @abstractmethod
    def tokenizer_json(self) -> str:
        """The content of tokenizer.json."""

    def outputs(self, texts: Sequence[str], pairs: Sequence[str | None] | None) -> FloatArray:
        return self.compute(texts, pairs)[0]

    @abstractmethod
    def compute(self, texts: Sequence[str], pairs: Sequence[str | None] | None) -> tuple[FloatArray, IntArray]: ...

    def word_spans(self, text: str, pair: str | None = None) -> WordSpans:
        return word_spans(self.tokenizer_json, text, pair, max_length=self.longest_input(pair))


_END = object()
PROVENANCE_FILE: Final = "provenance.json"
SETTINGS_FILE: Final = "onnx.json"


def read_provenance(folder: Path) -> dict[str, Any]:
    """Return how the model in a folder was trained: its provenance.json, or the onnx.json of an ONNX folder; empty without either.

    Raises:
        ArtifactError: if the file is damaged.
    """
    path = next((folder / name for name in (PROVENANCE_FILE, SETTINGS_FILE) if (folder / name).is_file()), None)
    if path is None:
        return {}
    with damage_named(path, "export the model again"):
        return dict(json.loads(path.read_bytes()))


def are_pairs(provenance: Mapping[str, Any]) -> bool | None:
    """Return True if a model with this provenance was trained on pairs of texts; None if it does not say."""
    if "pairs" in provenance:  # of an ONNX folder, and of a model on the Hub, where names of columns are not published
        return None if provenance["pairs"] is None else bool(provenance["pairs"])
    task = (provenance.get("config") or {}).get("task") or {}
    return task["text_pair_column"] is not None if "text_pair_column" in task else None


def check_texts(texts: Sequence[str], pairs: Sequence[str | None] | None, *, trained_on_pairs: bool | None) -> None:
    """Check that texts (and pairs) are lists of strings of equal length, and that there are pairs if the model was trained on them.

    Raises:
        UsageError: if `texts` or `pairs` is no list (`refuse_no_list`), or `pairs` has another length, or is not what the model was trained
        on. DataError: if a text is not a string.
    """
    refuse_no_list(texts, pairs)
    for name, values in (("texts", texts), ("pairs", pairs)):
        if values is not None and not hasattr(values, "__len__"):
            raise UsageError(f"{name} is a {type(values).__name__}, which has no length; pass a list, or use predict_iter")
    second_texts = [None] * len(texts) if pairs is None else list(pairs)  # also of a pandas Series
    if len(second_texts) != len(texts):
        raise UsageError(f"{len(texts)} texts but {len(second_texts)} pairs; give one for each text (None where there is none)")
    _check_strings("text", texts)
    _check_strings("pair", [pair for pair in second_texts if pair is not None])
    if trained_on_pairs is True and None in second_texts:
        raise UsageError("this model was trained on pairs of texts; pass the second text of each: pairs (--text-pair-column)")
    if trained_on_pairs is False and any(pair is not None for pair in second_texts):
        raise UsageError("this model was trained on single texts; leave out the second ones: pairs (--text-pair-column)")


def check_threshold(below: float) -> None:
    """Raise UsageError if a threshold of the confidence is not in [0, 1]."""
    if not 0 <= below <= 1:
        raise UsageError(f"the threshold of the confidence is {below:g}; pass a number from 0 (never abstain) to 1")


def refuse_no_list(texts: object, pairs: object) -> None:
    """Raise UsageError if a string, a table, a mapping or a set is passed in place of a list (`errors.list_fault`)."""
    for name, value in (("texts", texts), ("pairs", [] if pairs is None else pairs)):
        if fault := list_fault(value, "a list of strings, like [text]"):
            raise UsageError(f"{name} {fault}")


def word_spans(tokenizer_json: str, text: str, pair: str | None = None, *, max_length: int) -> WordSpans:
    """Return character spans [start, stop) of the words within the model's input, in order: those of the text and those of its pair.

    Raises:
        DataError: if the text holds a lone surrogate.
    """
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_str(tokenizer_json)
    tokenizer.encode_special_tokens = True
    tokenizer.enable_truncation(max_length, strategy="longest_first")
    try:
        encoding = tokenizer.encode(text, pair)
    except (TypeError, UnicodeEncodeError) as error:
        raise DataError("the text holds a lone surrogate; remove it") from error
    spans: tuple[dict[int, tuple[int, int]], dict[int, tuple[int, int]]] = {}, {}
    for side, word, (start, stop) in zip(encoding.sequence_ids, encoding.word_ids, encoding.offsets, strict=True):
        if side is not None and word is not None:  # None: [CLS] and [SEP]
            first, last = spans[side].get(word, (start, stop))
            spans[side][word] = (min(first, start), max(last, stop))
    return list(spans[0].values()), list(spans[1].values())


def _check_strings(name: str, values: Sequence[object]) -> None:
    for number, value in enumerate(values, start=1):
        if not isinstance(value, str):
            raise DataError(f"{name} {number}: is {type(value).__name__} ({str(value)[:30]!r}), not a string; convert it, or leave it out")
