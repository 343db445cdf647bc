"""Find and load an exported model of any kind, and the predictions of an encoder; torch is loaded for an encoder only.

    predictor = Predictor.load("runs/mine/export")
    predictor.predict(["some text", "another"])

Predictions are in the order of the texts. In fp32 (the default) they do not depend on the other texts, up to 1e-5; "auto" uses bf16 if the
hardware supports it: equal labels, probabilities within about 1e-2. PyTorch's number of threads and random state do not change.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias, get_args

from cramlm.errors import UsageError
from cramlm.evaluation.combination import ENCODER
from cramlm.evaluation.confidence import Confidence, load_confidence, usable_confidence
from cramlm.evaluation.kinds import require_single_label
from cramlm.inference.base import EncoderPredictor, are_pairs, check_texts, read_provenance
from cramlm.inference.folders import model_of
from cramlm.inference.linear import (
    CombinedModels,
    CombinedPredictor,
    LinearPredictor,
    ModelPart,
    has_combination,
    load_linear,
)
from cramlm.io.paths import at_home
from cramlm.linear.files import is_linear
from cramlm.model.huggingface.config import CONFIG_FILE, TOKENIZER_CONFIG_FILE, WEIGHTS_FILE, kind_of, read_json
from cramlm.model.tokenizer import TOKENIZER_FILE, UNCUT
from cramlm.records import LINEAR_NAMES, FloatArray, IntArray, TaskKind
from cramlm.storage.artifacts import check_files

if TYPE_CHECKING:
    from cramlm.config.retriever import Pooling
    from cramlm.inference.onnx import OnnxPredictor
    from cramlm.model.huggingface.folder import LoadedModel
    from cramlm.model.model import Precision
    from cramlm.model.tokenizer import Tokens

AnyPredictor: TypeAlias = "Predictor | OnnxPredictor | LinearPredictor | CombinedPredictor"

_threaded: int | None = None
"""The process in which an encoder first used several threads, by its number; a forked process has that of its parent."""


class Predictor(EncoderPredictor):
    """A loaded encoder. Create it with `load`, which returns a `LinearPredictor` for a linear model."""

    def __init__(self, loaded: LoadedModel, *, precision: Precision | Literal["auto"] = "fp32") -> None:
        from cramlm.model.model import resolve_precision

        self._loaded = loaded
        self._precision: Precision = resolve_precision(precision, loaded.model.device)
        self._labels_as_fp32 = precision == "auto" and self._precision == "bf16"
        self.labels: tuple[str, ...] = loaded.labels
        self.kind: TaskKind = loaded.model.kind
        self.max_length = loaded.max_length

    @classmethod
    def load(
        cls,
        folder: str | Path,
        *,
        precision: Precision | Literal["auto"] = "fp32",
        device: str = "cpu",
        model_part: ModelPart = "combined",
    ) -> AnyPredictor:
        """Load the model of a run, or a model folder of any kind; only the packages of its kind are imported.

        model_part: the model that predicts, if the folder of an encoder holds linear models and a combination beside it. precision,
        device: of an encoder in PyTorch (cpu, cuda, cuda:N; auto: a GPU if there is one); other models refuse bf16 and a GPU. bf16 is
        faster on hardware that supports it, with probabilities within about 1e-2; auto uses bf16 there, and fp32 again for texts whose
        label could differ.

        Raises:
            ArtifactError: naming what is missing, damaged or unsafe in the folder. UsageError: if it does not hold the model `model_part`,
            or an argument is none of the names above.
        """
        return load_predictor(folder, precision=precision, device=device, model_part=model_part)

    @classmethod
    def load_encoder(cls, folder: str | Path, *, precision: Precision | Literal["auto"] = "fp32", device: str = "cpu") -> Predictor:
        """As `load`, but the encoder of a Hugging Face folder alone."""
        from cramlm.model.huggingface.folder import load_classifier
        from cramlm.model.model import resolve_device
        from cramlm.model.prompts import PROMPT_FILE, VECTORS_FILE

        _refuse_threads_after_fork()
        check_files(Path(folder), (CONFIG_FILE, WEIGHTS_FILE, TOKENIZER_FILE, TOKENIZER_CONFIG_FILE, PROMPT_FILE, VECTORS_FILE))
        loaded = load_classifier(Path(folder))
        loaded.model.to(resolve_device(device))
        predictor = cls(loaded, precision=precision)
        predictor.confidence = load_confidence(Path(folder), ENCODER)
        predictor.trained_on_pairs = are_pairs(read_provenance(Path(folder)))
        return predictor

    @property
    def exact(self) -> Predictor | None:
        """The same weights in fp32 if precision is "auto" and the hardware supports bf16, else None."""
        return Predictor(self._loaded, precision="fp32") if self._labels_as_fp32 else None

    def compute(self, texts: Sequence[str], pairs: Sequence[str | None] | None) -> tuple[FloatArray, IntArray]:
        from cramlm.evaluation.prediction import lengths_of, outputs_of, predict_logits, predict_logits_fast

        model = self._loaded.model
        sequences = self._sequences(texts, pairs, max_length=self.max_length)
        if self._labels_as_fp32:
            logits = predict_logits_fast(model, sequences)
        else:
            logits = predict_logits(model, sequences, precision=self._precision)
        return outputs_of(self.kind, logits), lengths_of(model, sequences)

    def whole_lengths(self, texts: Sequence[str], pairs: Sequence[str | None] | None = None) -> IntArray:
        from cramlm.evaluation.prediction import lengths_of

        return lengths_of(self._loaded.model, self._sequences(texts, pairs, max_length=UNCUT))

    def embeddings(self, texts: Sequence[str], pairs: Sequence[str | None] | None = None) -> FloatArray:
        """Return the pooled last hidden states that the classifier reads ([CLS], or the mean over the tokens), in fp32."""
        from cramlm.evaluation.prediction import predict_embeddings

        if self._loaded.model.prompt is not None:
            raise UsageError("a model with a prompt reads the word at its mask, it has no text vectors; pass a run without a prompt")
        sequences = self._sequences(texts, pairs, max_length=self.max_length)
        return predict_embeddings(self._loaded.model, sequences)

    def _sequences(self, texts: Sequence[str], pairs: Sequence[str | None] | None, *, max_length: int) -> Tokens:
        """Return the input of each text; with a prompt one for each of its patterns."""
        from cramlm.evaluation.prediction import sequences_of_texts

        _refuse_threads_after_fork()
        check_texts(texts, pairs, trained_on_pairs=self.trained_on_pairs)
        self._check_pairs(pairs)
        return sequences_of_texts(self._loaded.tokenizer, texts, pairs, max_length=max_length, prompt=self._loaded.model.prompt)

    def _check_pairs(self, pairs: Sequence[str | None] | None) -> None:
        if self._loaded.has_pair_embeddings and pairs is not None and any(pair is not None for pair in pairs):
            raise UsageError(
                "this checkpoint marks the second text of a pair (token_type_ids), which cramlm does not compute; leave out pairs, use "
                "transformers for them, or train on them: cramlm fit --recipe plm --base-model"
            )

    @property
    def pooling(self) -> Pooling:
        """The pooling of hidden states to a text vector: that of [CLS], or the mean over the tokens, [CLS] and [SEP] included."""
        return self._loaded.model.head_config.pooling

    @property
    def width(self) -> int:
        """Numbers in a text vector."""
        return self._loaded.model.encoder_config.hidden

    def longest_input(self, pair: str | None = None) -> int:
        from cramlm.model.prompts import longest_text

        prompt, tokenizer = self._loaded.model.prompt, self._loaded.tokenizer
        if prompt is None:
            return self.max_length
        return 2 + (0 if pair is None else tokenizer.separators) + longest_text(prompt, tokenizer, self.max_length)

    @property
    def tokenizer_json(self) -> str:
        return self._loaded.tokenizer.content

    def _outputs_to_score(self, texts: Sequence[str], pairs: Sequence[str | None]) -> FloatArray:
        """At precision "auto" all texts are computed in bf16 where the hardware supports it."""
        from cramlm.evaluation.prediction import outputs_of, predict_logits

        sequences = self._sequences(texts, pairs, max_length=self.max_length)
        return outputs_of(self.kind, predict_logits(self._loaded.model, sequences, precision=self._precision))


def _refuse_threads_after_fork() -> None:
    """Raise UsageError if PyTorch has several threads in a process that was forked from one in which an encoder used several.

    They do not exist in the forked process, and PyTorch would wait for them for ever.
    """
    global _threaded
    import torch

    if torch.get_num_threads() == 1:
        return
    if _threaded is None:
        _threaded = os.getpid()
    elif _threaded != os.getpid():
        raise UsageError(
            "this process was forked after an encoder had used several threads, for which PyTorch would wait for ever; call "
            "torch.set_num_threads(1) in it first, or start processes by spawn"
        )


def load_predictor(
    folder: str | Path,
    *,
    precision: Literal["auto", "fp32", "bf16"] = "fp32",
    device: str = "cpu",
    model_part: ModelPart = "combined",
    threads: int | None = None,
) -> AnyPredictor:
    """Load the model of a run, or a model folder of any kind; arguments and errors as of `Predictor.load`.

    threads: of an encoder, those of onnxruntime, or of PyTorch in this thread; None = their default.
    """
    for name, value, choices in (("model_part", model_part, get_args(ModelPart)), ("precision", precision, ("auto", "fp32", "bf16"))):
        if value not in choices:
            raise UsageError(f"{name} {value!r} is not one of {', '.join(choices)}")
    folder = model_of(at_home(folder))
    if is_linear(folder) or model_part in LINEAR_NAMES:
        _refuse_settings_of_torch(folder, "a linear model", precision, device)
        return load_linear(folder, model_part)
    from cramlm.inference.onnx import GRAPH_FILE, OnnxPredictor

    combines = model_part == "combined" and has_combination(folder)
    if (folder / GRAPH_FILE).is_file():
        _refuse_settings_of_torch(folder, "an ONNX model", precision, device)
        graph = OnnxPredictor.load(folder, threads=threads)
        return CombinedPredictor(graph, CombinedModels.load(folder), origin=folder) if combines else graph
    if threads is not None:
        import torch

        torch.set_num_threads(threads)
    encoder = Predictor.load_encoder(folder, precision=precision, device=device)
    return CombinedPredictor(encoder, CombinedModels.load(folder), origin=folder, exact=encoder.exact) if combines else encoder


def _refuse_settings_of_torch(folder: Path, model: str, precision: str, device: str) -> None:
    for name, value, allowed in (("device", device, ("auto", "cpu")), ("precision", precision, ("auto", "fp32"))):
        if value not in allowed:
            raise UsageError(f"{folder}: {model} computes in its own precision on the CPU; leave out {name} {value!r}")


def confidence_at(path: Path, model_part: ModelPart) -> Confidence:
    """Return the confidence of the model that predicts at `path`, a run or a model.

    Raises:
        UsageError: if it has none, or its texts do not have one label each. ArtifactError: if there is no model, or it is damaged.
    """
    folder = model_of(path)
    require_single_label(kind_in(folder), "abstaining", "leave it out")
    of_encoder = model_part == "combined" and not has_combination(folder)
    confidence = load_confidence(folder, None if is_linear(folder) else ENCODER if of_encoder else model_part)
    return usable_confidence(confidence, () if confidence is None else confidence.labels)


def kind_in(folder: Path) -> TaskKind:
    """Return the kind of task of the model in `folder`; classification if there is none, which `load_predictor` reports.

    Raises:
        ArtifactError: if its description is damaged.
    """
    path = folder / CONFIG_FILE
    if is_linear(folder):
        from cramlm.linear.model import kind_of_linear

        return kind_of_linear(folder)
    return kind_of(read_json(path), path) if path.is_file() else "classification"
