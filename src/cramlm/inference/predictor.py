"""An exported folder as a function from texts to labels; needs torch for an encoder, nothing of it for a linear model.

    predictor = Predictor.load("runs/mine/export")
    predictor.predict(["some text", "another"])

Answers come in the order of the texts. In fp32 (the default) they do not depend on which texts are asked together, up to 1e-5; "auto" is
bf16 where the hardware computes in it, with fp32's labels and probabilities that differ by about 1e-2. Nothing global is touched: PyTorch
keeps its threads and its random state.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from cramlm.errors import UsageError
from cramlm.evaluation.kinds import KINDS, AnyScores, check_labels
from cramlm.inference.texts import STREAM_BATCH, check_texts, predict_stream, word_spans
from cramlm.linear import is_linear
from cramlm.model.huggingface.config import CONFIG_FILE, TOKENIZER_CONFIG_FILE, WEIGHTS_FILE
from cramlm.model.tokenizer import TOKENIZER_FILE
from cramlm.records import AnyPrediction, Example, FloatArray, TaskKind
from cramlm.storage.artifacts import check_files

if TYPE_CHECKING:
    from cramlm.inference.linear import LinearPredictor
    from cramlm.inference.onnx import OnnxPredictor
    from cramlm.model.device import Precision
    from cramlm.model.huggingface.folder import LoadedModel


class Predictor:
    """A loaded encoder; make one with `load`, which gives a `LinearPredictor` of a linear model."""

    def __init__(self, loaded: LoadedModel, *, precision: Precision | Literal["auto"] = "fp32") -> None:
        from cramlm.model.device import resolve_precision

        self._loaded = loaded
        self._precision: Precision = resolve_precision(precision, next(loaded.model.parameters()).device)
        self._labels_as_fp32 = precision == "auto" and self._precision == "bf16"
        self.labels: tuple[str, ...] = loaded.labels
        self.kind: TaskKind = loaded.model.kind
        self.max_length = loaded.max_length

    @classmethod
    def load(
        cls, folder: str | Path, *, precision: Precision | Literal["auto"] = "fp32", device: str = "cpu"
    ) -> Predictor | LinearPredictor:
        """Read an exported folder. bf16 is faster where the hardware computes in it, and answers differ by about 1e-2; auto takes it there,
        and computes again in fp32 where the label could differ. A linear model (recipes `static` and `tfidf`) is loaded without torch;
        precision and device mean nothing to it.

        Raises:
            ArtifactError: naming what is missing, damaged or unsafe in the folder.
        """
        if is_linear(Path(folder)):
            from cramlm.inference.linear import LinearPredictor

            return LinearPredictor.load(folder)
        from cramlm.model.huggingface.folder import load_classifier
        from cramlm.model.prompts import PROMPT_FILE, VECTORS_FILE

        check_files(Path(folder), (CONFIG_FILE, WEIGHTS_FILE, TOKENIZER_FILE, TOKENIZER_CONFIG_FILE, PROMPT_FILE, VECTORS_FILE))
        loaded = load_classifier(Path(folder))
        loaded.model.to(device)
        return cls(loaded, precision=precision)

    def predict(self, texts: Sequence[str], pairs: Sequence[str | None] | None = None) -> list[AnyPrediction]:
        """What the model answers each text (or pair of texts) with, in the order given: a `Prediction`, the most probable label with the
        probability of every label; of a multi-label model a `LabelsPrediction`; of a regression a `NumberPrediction`.

        Raises:
            UsageError: if `texts` is one string, or `pairs` has another length. DataError: if a text is not a string.
        """
        return KINDS[self.kind].predictions(self._outputs(texts, pairs), self.labels)

    def predict_iter(
        self, texts: Iterable[str], pairs: Iterable[str | None] | None = None, *, batch: int = STREAM_BATCH
    ) -> Iterator[AnyPrediction]:
        """As `predict`, for any number of texts: reads `batch` of them at a time and gives their answers before it reads on.

        Raises:
            UsageError: as `predict`, or if texts and pairs end at different places.
        """
        return predict_stream(self.predict, texts, pairs, batch=batch)

    def probabilities(self, texts: Sequence[str], pairs: Sequence[str | None] | None = None) -> FloatArray:
        """Probability of each label for each text, float32 (n, labels) in the order of `labels`; rows sum to 1, unless the model is
        multi-label.

        Raises:
            UsageError, DataError: as `predict`. UsageError: of a regression.
        """
        if self.kind == "regression":
            raise UsageError("this model answers with a number, which has no probability; ask for predict")
        return self._outputs(texts, pairs)

    def _outputs(self, texts: Sequence[str], pairs: Sequence[str | None] | None) -> FloatArray:
        from cramlm.evaluation.evaluate import outputs_of, predict_logits_fast, predict_probabilities, sequences_of_texts

        check_texts(texts, pairs)
        loaded = self._loaded
        sequences = sequences_of_texts(loaded.tokenizer, texts, pairs, max_length=self.max_length, prompt=loaded.model.prompt)
        if self._labels_as_fp32:
            return outputs_of(self.kind, predict_logits_fast(loaded.model, sequences, pad_id=loaded.tokenizer.pad_id))
        return predict_probabilities(
            loaded.model, sequences, labels=len(self.labels), precision=self._precision, pad_id=loaded.tokenizer.pad_id
        )

    @property
    def longest_text(self) -> int:
        """Tokens of a text that are read, [CLS] and [SEP] with them; fewer than `max_length` where a prompt takes some."""
        from cramlm.model.prompts import text_room

        prompt = self._loaded.model.prompt
        return self.max_length if prompt is None else 2 + text_room(prompt, self._loaded.tokenizer, self.max_length)

    @property
    def tokenizer_json(self) -> str:
        """The text of its tokenizer.json."""
        return self._loaded.tokenizer.content

    def word_spans(self, text: str) -> list[tuple[int, int]]:
        """Where the words that the model reads stand in the text (texts.py)."""
        return word_spans(self.tokenizer_json, text, max_length=self.longest_text)

    def check_labels(self, examples: Sequence[Example], *, origin: str) -> None:
        """Raises DataError naming the first label that this model does not know, and its row in `origin`."""
        check_labels(self.kind, self.labels, examples, origin=origin)

    def score(self, examples: Sequence[Example]) -> AnyScores:
        """Compare with labelled examples; a label that this model does not know counts as missed.

        Raises:
            DataError: if there is no example, or one has no label.
        """
        from cramlm.evaluation.evaluate import evaluate_examples

        loaded = self._loaded
        scores, _ = evaluate_examples(
            loaded.model, loaded.tokenizer, examples, self.labels, max_length=self.max_length, precision=self._precision
        )
        return scores


def load_predictor(
    folder: str | Path, *, precision: Literal["auto", "fp32", "bf16"] = "fp32"
) -> Predictor | LinearPredictor | OnnxPredictor:
    """The predictor for an exported folder, Hugging Face's, ONNX's or a linear model's; onnxruntime or torch is loaded only for its own.
    `precision` is for the first; a graph computes in what it was exported in, a linear model in fp32.

    Raises:
        ArtifactError, EnvironmentFault: as `OnnxPredictor.load` and `Predictor.load`.
    """
    from cramlm.inference.onnx import GRAPH_FILE, OnnxPredictor

    if (Path(folder) / GRAPH_FILE).is_file():
        return OnnxPredictor.load(folder)
    return Predictor.load(folder, precision=precision)
