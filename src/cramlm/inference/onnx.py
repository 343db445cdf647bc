"""Predictions of an exported ONNX model; needs onnxruntime, tokenizers and NumPy, neither torch nor transformers.

    predictor = OnnxPredictor.load("runs/mine/onnx")
    predictor.predict(["some text", "another"])

It is the encoder alone (`Predictor.load` adds the linear models of the folder); in fp32 its probabilities equal those of the encoder in
PyTorch within 1e-4. Texts are sorted by length and computed in padded batches; an int8
model computes one text at a time, because its activation scale, and so each prediction, would depend on the whole batch.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from cramlm.errors import ArtifactError, DataError, DivergedError, EnvironmentFault
from cramlm.evaluation.confidence import load_confidence
from cramlm.inference.base import SETTINGS_FILE, EncoderPredictor, are_pairs, check_texts, read_provenance
from cramlm.io.paths import at_home
from cramlm.records import AnyPrediction, FloatArray, IntArray, Prediction, TaskKind
from cramlm.storage.arrays import groups_by_length
from cramlm.storage.artifacts import check_files
from cramlm.storage.locks import damage_named

GRAPH_FILE = "model.onnx"
TOKENIZER_FILE = "tokenizer.json"
BATCH_TOKENS = 8192
_CHUNK = 1024  # texts tokenized at a time
_QUIET = 3  # onnxruntime's level for errors only


@dataclass(frozen=True, slots=True)
class OnnxSettings:
    """Settings in onnx.json. kind: of the task. labels: in the order of the logits. max_length: tokens, special ones included."""

    kind: TaskKind
    labels: tuple[str, ...]
    max_length: int
    pad_id: int
    weights: Literal["fp32", "int8"]


class OnnxPredictor(EncoderPredictor):
    """A loaded ONNX classifier, the encoder of a run alone; create it with `load`.

    A pickle or a copy of it holds the path of its folder, from which it is loaded again; that of other predictors holds their weights.
    """

    without_embeddings = "an ONNX folder gives logits only, no text vectors"

    def __init__(self, session: Any, tokenizer: Any, settings: OnnxSettings, *, origin: Path, threads: int | None) -> None:
        """origin, threads: the arguments of `load`."""
        self._origin, self._threads = origin, threads
        self._session = session
        self._tokenizer = tokenizer
        self._settings = settings
        self.labels = settings.labels
        self.kind: TaskKind = settings.kind
        self.max_length = settings.max_length

    @classmethod
    def load(cls, folder: str | Path, *, threads: int | None = None) -> OnnxPredictor:
        """Load a folder that `cramlm export --format onnx` wrote. threads: of the CPU; None = onnxruntime's default.

        Raises:
            ArtifactError: naming what is missing, damaged or foreign in the folder. EnvironmentFault: if a package is missing.
        """
        folder = at_home(folder)
        try:
            import onnxruntime
            from tokenizers import Tokenizer
        except ImportError as error:
            raise EnvironmentFault(f"an ONNX model needs the package {error.name}; run: pip install 'cramlm[onnx]'") from error
        check_files(folder, (GRAPH_FILE, SETTINGS_FILE, TOKENIZER_FILE))
        settings = _settings(folder)
        options = onnxruntime.SessionOptions()
        options.log_severity_level = _QUIET
        options.intra_op_num_threads = threads or 0
        try:
            tokenizer = Tokenizer.from_file(str(folder / TOKENIZER_FILE))
        except Exception as error:  # tokenizers raises bare Exception, for a missing file too
            raise ArtifactError(f"{folder / TOKENIZER_FILE}: missing, or not a tokenizer; export the model again") from error
        try:
            session = onnxruntime.InferenceSession(folder / GRAPH_FILE, options, providers=["CPUExecutionProvider"])
        except Exception as error:  # onnxruntime's exceptions have no public base
            reason = " ".join(str(error).split())[:120]
            raise ArtifactError(f"{folder / GRAPH_FILE}: missing, or not a usable ONNX graph ({reason}); export the model again") from error
        inputs, outputs = [value.name for value in session.get_inputs()], [value.shape[-1:] for value in session.get_outputs()]
        if inputs != ["input_ids", "attention_mask"] or outputs != [[len(settings.labels)]]:
            raise ArtifactError(f"{folder / GRAPH_FILE}: inputs {inputs}, outputs {outputs} contradict {SETTINGS_FILE}; export it again")
        tokenizer.encode_special_tokens = True  # `[MASK]` in a text is ordinary text
        tokenizer.enable_truncation(settings.max_length, strategy="longest_first")
        tokenizer.no_padding()
        predictor = cls(session, tokenizer, settings, origin=folder.absolute(), threads=threads)
        predictor.confidence = load_confidence(folder, "encoder")
        predictor.trained_on_pairs = are_pairs(read_provenance(folder))
        return predictor

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(OnnxPredictor.load, self._origin, threads=self._threads), ()  # the session of onnxruntime cannot be pickled

    def compute(self, texts: Sequence[str], pairs: Sequence[str | None] | None) -> tuple[FloatArray, IntArray]:
        """As `BasePredictor.compute`. Raises DivergedError if a logit is not finite."""
        logits, lengths = self._compute(texts, pairs)
        if self.kind == "classification":
            return probabilities_of(logits), lengths
        from cramlm.evaluation.kinds import KINDS

        return KINDS[self.kind].outputs(_finite(logits)), lengths

    def predict(self, texts: Sequence[str], pairs: Sequence[str | None] | None = None) -> list[AnyPrediction]:
        """As `BasePredictor.predict`, of a classification without the imports that other kinds of task need."""
        if self.kind != "classification":
            return super().predict(texts, pairs)
        rows = self.outputs(texts, pairs)
        return [Prediction(self.labels[int(row.argmax())], dict(zip(self.labels, row.tolist(), strict=True))) for row in rows]

    @property
    def tokenizer_json(self) -> str:
        return str(self._tokenizer.to_str())

    def logits(self, texts: Sequence[str], pairs: Sequence[str | None] | None = None) -> FloatArray:
        """Logits, float32 (n, labels), in order."""
        return self._compute(texts, pairs)[0]

    def _compute(self, texts: Sequence[str], pairs: Sequence[str | None] | None) -> tuple[FloatArray, IntArray]:
        check_texts(texts, pairs, trained_on_pairs=self.trained_on_pairs)
        sequences = self._sequences(self._tokenizer, texts, pairs)
        logits = np.empty((len(sequences), len(self.labels)), dtype=np.float32)
        lengths = np.array([len(sequence) for sequence in sequences], dtype=np.int64)
        for group in groups_by_length(lengths, BATCH_TOKENS if self._settings.weights == "fp32" else 1):
            width = int(lengths[group[-1]])
            ids = np.full((len(group), width), self._settings.pad_id, dtype=np.int64)
            for row, index in enumerate(group):
                ids[row, : lengths[index]] = sequences[index]
            mask = (np.arange(width) < lengths[group, None]).astype(np.int64)
            logits[group] = self._session.run(None, {"input_ids": ids, "attention_mask": mask})[0]
        return logits, lengths

    def whole_lengths(self, texts: Sequence[str], pairs: Sequence[str | None] | None = None) -> IntArray:
        return np.array([len(sequence) for sequence in self._sequences(self._uncut, texts, pairs)], dtype=np.int64)

    @cached_property
    def _uncut(self) -> Any:
        tokenizer = type(self._tokenizer).from_str(self.tokenizer_json)
        tokenizer.no_truncation()
        tokenizer.encode_special_tokens = True
        return tokenizer

    def _sequences(self, tokenizer: Any, texts: Sequence[str], pairs: Sequence[str | None] | None) -> list[list[int]]:
        """Token ids of each text, [CLS] and [SEP] included."""
        second_texts = [None] * len(texts) if pairs is None else pairs
        inputs = [text if pair is None else (text, pair) for text, pair in zip(texts, second_texts, strict=True)]
        sequences: list[list[int]] = []
        for start in range(0, len(inputs), _CHUNK):
            try:
                encodings = tokenizer.encode_batch_fast(inputs[start : start + _CHUNK])
            except (TypeError, UnicodeEncodeError) as error:
                raise DataError(f"one of texts {start + 1} to {start + _CHUNK}: holds a lone surrogate; remove it") from error
            sequences += [encoding.ids for encoding in encodings]
        return sequences


def probabilities_of(logits: FloatArray) -> FloatArray:
    """Softmax of each row (n, labels), float32. Raises DivergedError if a logit is not a finite number."""
    logits = _finite(logits).astype(np.float64)
    odds = np.exp(logits - logits.max(axis=1, keepdims=True))
    probabilities: FloatArray = (odds / odds.sum(axis=1, keepdims=True)).astype(np.float32)
    return probabilities


def _finite(logits: FloatArray) -> FloatArray:
    if not np.isfinite(logits).all():
        raise DivergedError("the model's logits are not finite; export it again, and report this")
    return logits


def _settings(folder: Path) -> OnnxSettings:
    path = folder / SETTINGS_FILE
    if not path.is_file():
        raise ArtifactError(f"{path}: No such file or directory; pass a folder that `cramlm export --format onnx` wrote")
    with damage_named(path, "export the model again", what="damaged, not written by an ONNX export"):
        values = json.loads(path.read_bytes())
        settings = OnnxSettings(values["kind"], tuple(values["labels"]), values["max_length"], values["pad_id"], values["weights"])
    strings = all(isinstance(label, str) for label in settings.labels) and len(set(settings.labels)) == len(settings.labels) > 0
    numbers = type(settings.max_length) is int and settings.max_length >= 8 and type(settings.pad_id) is int
    if not (strings and numbers and settings.weights in ("fp32", "int8") and settings.kind in get_args(TaskKind)):
        raise ArtifactError(f"{path}: kind, labels, max_length, pad_id or weights are invalid; export the model again")
    return settings
