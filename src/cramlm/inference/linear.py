"""The linear models of a folder: one alone, or several combined with the encoder beside them (evaluation/combination.py).

    linear.json, ...                       a linear model alone (linear/model.py)
    combination/combination.json           the calibration of each model of a combination
    combination/static/, bayes/, tfidf/    the linear models of a combination, each as alone

A combination lies in the folder of its encoder, which stays a plain Hugging Face or ONNX folder without it. Importing this module loads
neither SciPy nor torch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, TypeAlias, TypeVar

import numpy as np

from cramlm.errors import ArtifactError, UsageError
from cramlm.evaluation.combination import COMBINATION_FILE, ENCODER, Combination
from cramlm.evaluation.confidence import load_confidence
from cramlm.evaluation.kinds import KINDS
from cramlm.inference.base import BasePredictor, EncoderPredictor, WordSpans, are_pairs, check_texts, read_provenance
from cramlm.linear.files import MODEL_FILE, WEIGHTS_FILE, is_linear
from cramlm.model.huggingface.config import refuse_pickles
from cramlm.model.tokenizer import UNCUT
from cramlm.records import COMBINED, LINEAR_NAMES, BoolArray, Example, FloatArray, IntArray, TaskKind
from cramlm.storage.artifacts import check_files
from cramlm.storage.locks import damage_named
from cramlm.text.words import word_pattern

if TYPE_CHECKING:
    from cramlm.linear.model import LinearModel

ModelPart: TypeAlias = Literal["combined", "encoder", "static", "bayes", "tfidf"]
"""Which model of a folder predicts. combined: all of them together where the folder holds a combination, else the only one."""
COMBINATION_FOLDER: Final = "combination"
_Value = TypeVar("_Value")


class LinearPredictor(BasePredictor):
    """A loaded linear model; create it with `load`."""

    max_length = UNCUT

    def __init__(self, model: LinearModel) -> None:
        self.model = model
        self.without_embeddings = f"{model.name} has no text vectors"
        self.labels: tuple[str, ...] = model.labels
        self.kind: TaskKind = model.kind

    @classmethod
    def load(cls, folder: str | Path) -> LinearPredictor:
        """Load the exported folder of the recipe `static`, `bayes` or `tfidf`.

        Raises:
            ArtifactError: naming what is missing, damaged or unsafe in the folder.
        """
        return _load(Path(folder))

    def outputs(self, texts: Sequence[str], pairs: Sequence[str | None] | None) -> FloatArray:
        return KINDS[self.kind].outputs(self.logits(texts, pairs))

    def logits(self, texts: Sequence[str], pairs: Sequence[str | None] | None = None) -> FloatArray:
        """Adjusted logits, float32 (n, labels), in the order given."""
        check_texts(texts, pairs, trained_on_pairs=self.trained_on_pairs)
        return self.model.logits(divided_texts(texts, pairs))

    def whole_lengths(self, texts: Sequence[str], pairs: Sequence[str | None] | None = None) -> IntArray:
        """Words separated by white space in each text, int64 (n,)."""
        return np.array([len(text.split()) for text in divided_texts(texts, pairs)], dtype=np.int64)

    def embeddings(self, texts: Sequence[str], pairs: Sequence[str | None] | None = None) -> FloatArray:
        """Return the averaged word vectors of `static`; the other linear models have none."""
        check_texts(texts, pairs, trained_on_pairs=self.trained_on_pairs)
        vectors = self.model.vectors
        return super().embeddings(texts, pairs) if vectors is None else vectors.of(self.model.prepare(divided_texts(texts, pairs)).texts)

    def word_spans(self, text: str, pair: str | None = None) -> WordSpans:
        """Character spans of words and of runs of an equal other character."""
        of_text, of_pair = ([match.span() for match in re.finditer(rf"{word_pattern()}|(\S)\1*", each)] for each in (text, pair or ""))
        return of_text, of_pair


def divided_texts(texts: Sequence[str], pairs: Sequence[str | None] | None) -> list[str]:
    """Each text, and both texts of each pair, as the linear models were trained on them."""
    examples = (Example("", text, pair, None) for text, pair in zip(texts, [None] * len(texts) if pairs is None else pairs, strict=True))
    return [example.divided_text for example in examples]


class CombinedModels:
    """The combination of a folder: the linear models, and how their outputs and the encoder's become one prediction."""

    def __init__(self, combination: Combination, linear: Mapping[str, LinearPredictor]) -> None:
        self.combination, self.linear = combination, linear

    @classmethod
    def load(cls, folder: Path) -> CombinedModels:
        """Read the combination in an encoder's folder.

        Raises:
            ArtifactError: naming what is missing or damaged. EnvironmentFault: if the disk fails.
        """
        path = folder / COMBINATION_FOLDER / COMBINATION_FILE
        check_files(folder, [f"{COMBINATION_FOLDER}/{COMBINATION_FILE}"])
        with damage_named(path, "export the model again", what="damaged, not the description of a combination"):
            combination = Combination.from_dict(json.loads(path.read_bytes()))
        linear = {name: _load_part(folder, name) for name in combination.models if name != ENCODER}
        for name, predictor in linear.items():
            if predictor.labels != combination.labels:
                raise ArtifactError(f"{path}: has other labels than the model {name}; export the model again")
        return cls(combination, linear)

    def save(self, folder: Path) -> None:
        """Write the files that `load` reads into the folder of an encoder.

        Raises:
            OSError: if a file cannot be written.
        """
        (folder / COMBINATION_FOLDER).mkdir()
        for name, predictor in self.linear.items():
            part = folder / COMBINATION_FOLDER / name
            part.mkdir()
            predictor.model.save(part)
        content = json.dumps(self.combination.as_dict(), ensure_ascii=False, allow_nan=False)
        (folder / COMBINATION_FOLDER / COMBINATION_FILE).write_text(content + "\n", "utf-8")

    @property
    def needs_encoder(self) -> bool:
        """True if the encoder is part of the combination."""
        return ENCODER in self.combination.models

    def linear_outputs(self, texts: Sequence[str], pairs: Sequence[str | None] | None) -> dict[str, FloatArray]:
        """Outputs of each linear model, float32 (n, labels)."""
        return {name: predictor.outputs(texts, pairs) for name, predictor in self.linear.items()}

    def logits(self, encoder: FloatArray | None, linear: Mapping[str, FloatArray]) -> FloatArray:
        """Combined logits, float32 (n, labels). encoder: its outputs for the texts of `linear`; None if it is not needed."""
        return self.combination.logits({**linear, ENCODER: encoder} if encoder is not None and self.needs_encoder else linear)

    def outputs(self, encoder: FloatArray | None, texts: Sequence[str], pairs: Sequence[str | None] | None) -> FloatArray:
        """Combined outputs, float32 (n, labels). encoder: as of `logits`."""
        return KINDS[self.combination.kind].outputs(self.logits(encoder, self.linear_outputs(texts, pairs)))

    def near_ties(self, logits: FloatArray) -> BoolArray:
        """Rows of combined logits whose labels may be others with the encoder in fp32 instead of bf16, (n,).

        The combination multiplies the difference of two logits of the encoder, and so its error, by the encoder's scale and weight.
        """
        factor = self.combination.models[ENCODER].scale * self.combination.weights[ENCODER]
        return KINDS[self.combination.kind].near_ties(logits / np.float32(factor))


class CombinedPredictor(BasePredictor):
    """An encoder and the linear models beside it."""

    def __init__(self, encoder: EncoderPredictor, models: CombinedModels, *, origin: Path, exact: EncoderPredictor | None = None) -> None:
        """origin: the folder of the encoder. exact: the encoder in fp32, for texts whose label could differ from that of fp32; None if such
        labels may differ.

        Raises:
            ArtifactError: if the encoder has other labels than the combination, or is of another kind of task.
        """
        if (encoder.kind, tuple(encoder.labels)) != (models.combination.kind, models.combination.labels):
            raise ArtifactError(f"{origin}: {COMBINATION_FILE} has other labels than the encoder; export the model again")
        self.kind: TaskKind = encoder.kind
        self.encoder, self.models, self.exact = encoder, models, exact
        self.labels: tuple[str, ...] = encoder.labels
        self.max_length = encoder.max_length if models.needs_encoder else UNCUT
        self.confidence = load_confidence(origin, COMBINED)
        self.trained_on_pairs = encoder.trained_on_pairs

    def outputs(self, texts: Sequence[str], pairs: Sequence[str | None] | None) -> FloatArray:
        return self.compute(texts, pairs)[0] if self.models.needs_encoder else self.models.outputs(None, texts, pairs)

    def compute(self, texts: Sequence[str], pairs: Sequence[str | None] | None) -> tuple[FloatArray, IntArray]:
        if not self.models.needs_encoder:
            return super().compute(texts, pairs)
        linear = self.models.linear_outputs(texts, pairs)
        outputs, lengths = self.encoder.compute(texts, pairs)
        logits = self.models.logits(outputs, linear)
        if self.exact is not None:
            close = np.flatnonzero(self.models.near_ties(logits)).tolist()
            if close:
                some, others = _at(texts, close), None if pairs is None else _at(pairs, close)
                linear_of_some = {name: values[close] for name, values in linear.items()}
                logits[close] = self.models.logits(self.exact.outputs(some, others), linear_of_some)
        return KINDS[self.kind].outputs(logits), lengths

    def whole_lengths(self, texts: Sequence[str], pairs: Sequence[str | None] | None = None) -> IntArray:
        counting = self.encoder if self.models.needs_encoder else next(iter(self.models.linear.values()))
        return counting.whole_lengths(texts, pairs)

    def embeddings(self, texts: Sequence[str], pairs: Sequence[str | None] | None = None) -> FloatArray:
        return self.encoder.embeddings(texts, pairs)

    def word_spans(self, text: str, pair: str | None = None) -> WordSpans:
        """As `LinearPredictor.word_spans`: whole words, of which the encoder reads those in its first `max_length` tokens."""
        predictor = next(iter(self.models.linear.values()), self.encoder)
        return predictor.word_spans(text, pair)


def _at(values: Sequence[_Value], positions: Sequence[int]) -> list[_Value]:
    """Return the values at these positions; `values[position]` of a pandas Series would be the one with this label."""
    listed = list(values)
    return [listed[position] for position in positions]


def has_combination(folder: Path) -> bool:
    """Return True if the folder of an encoder holds a combination."""
    return (folder / COMBINATION_FOLDER / COMBINATION_FILE).is_file()


def load_linear(folder: Path, model_part: ModelPart) -> LinearPredictor:
    """Read the linear model of a folder: its only one, or the one named `model_part` beside its encoder.

    Raises:
        UsageError: if the folder holds no model `model_part`. ArtifactError: if it is damaged.
    """
    if is_linear(folder):
        if model_part == "encoder":
            raise UsageError(f"{folder}: is a linear model without an encoder; leave out the part {model_part!r}")
        predictor = LinearPredictor.load(folder)
        if model_part not in (COMBINED, predictor.model.name):
            raise UsageError(f"{folder}: is the linear model {predictor.model.name!r} alone; leave out the part {model_part!r}")
        return predictor
    if not (folder / COMBINATION_FOLDER / model_part).is_dir():
        linear = [name for name in LINEAR_NAMES if (folder / COMBINATION_FOLDER / name).is_dir()]
        parts = " or ".join([*([COMBINED] if has_combination(folder) else []), "encoder", *linear])
        raise UsageError(f"{folder}: holds no model {model_part!r} beside its encoder; choose the part {parts}")
    return _load_part(folder, model_part)


def _load_part(folder: Path, name: str) -> LinearPredictor:
    return _load(folder, part=f"{COMBINATION_FOLDER}/{name}/", name=name)


def _load(folder: Path, *, part: str = "", name: str | None = None) -> LinearPredictor:
    """Load the linear model in a published folder. part: before the names of its files. name: of a part in confidence.json."""
    from cramlm.linear.model import LinearModel  # here: loads SciPy, which an encoder alone does not need

    refuse_pickles(folder / part)
    _check_hashes(folder, part)
    predictor = LinearPredictor(LinearModel.load(folder / part))
    predictor.confidence = load_confidence(folder, name)
    predictor.trained_on_pairs = are_pairs(read_provenance(folder))
    return predictor


def _check_hashes(folder: Path, part: str) -> None:
    """Check the files of a linear model in a published folder. part: before their names."""
    from cramlm.linear.word_vectors import TENSORS_FILE, WORDS_FILE  # here: loads SciPy

    check_files(folder, [part + file for file in (MODEL_FILE, WEIGHTS_FILE, WORDS_FILE, TENSORS_FILE)])
