"""What a server asks of a model, whichever way it is computed: by PyTorch from an export, by onnxruntime from an ONNX folder, by NumPy
from a linear model.

ONNX folders and linear models are served without PyTorch in the process. Answers are those of `Predictor`, `OnnxPredictor` and
`LinearPredictor`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from cramlm.evaluation.kinds import KINDS
from cramlm.linear import is_linear
from cramlm.model.tokenizer import UNCUT
from cramlm.records import FloatArray, IntArray

if TYPE_CHECKING:
    from cramlm.inference.linear import LinearPredictor
    from cramlm.inference.onnx import OnnxPredictor
    from cramlm.model.huggingface.folder import LoadedModel


@dataclass(frozen=True, slots=True)
class Answers:
    """What the model says of the n texts of a request.

    probabilities: float32, (n, labels). lengths: tokens of each whole text with its special ones, before any was cut off, or words
    for a linear model; (n,).
    """

    probabilities: FloatArray
    lengths: IntArray


@dataclass(frozen=True, slots=True)
class ServedModel:
    """labels: in the order of the logits. max_length: tokens that it reads, `UNCUT` where it reads whole texts. answer: texts and their
    pairs (None: none) -> Answers.

    `answer` raises DivergedError if a logit is not finite.
    """

    labels: tuple[str, ...]
    max_length: int
    answer: Callable[[Sequence[str], Sequence[str | None]], Answers]

    @property
    def limit(self) -> str:
        """How much of a text it reads, in words."""
        return "whole texts" if self.max_length == UNCUT else f"{self.max_length} tokens per text"


def load_model(folder: Path, threads: int | None) -> ServedModel:
    """The model of a folder, for the thread that will use it (PyTorch's number of threads is a matter of each thread); warm.

    Raises:
        ArtifactError, EnvironmentFault: as `OnnxPredictor.load`, `LinearPredictor.load` and `load_classifier`.
    """
    from cramlm.inference.linear import LinearPredictor
    from cramlm.inference.onnx import GRAPH_FILE, OnnxPredictor

    if is_linear(folder):
        model = of_linear(LinearPredictor.load(folder))
    elif (folder / GRAPH_FILE).is_file():
        model = of_onnx(OnnxPredictor.load(folder, threads=threads))
    else:
        import torch

        from cramlm.model.huggingface.folder import load_classifier

        if threads is not None:
            torch.set_num_threads(threads)
        model = of_torch(load_classifier(folder))
    model.answer(["warm up"], [None])  # the first call is slow, and shows whether the model answers at all
    return model


def of_torch(loaded: LoadedModel) -> ServedModel:
    return ServedModel(tuple(loaded.labels), loaded.max_length, partial(answer, loaded))


def of_linear(predictor: LinearPredictor) -> ServedModel:
    def answer_linear(texts: Sequence[str], pairs: Sequence[str | None]) -> Answers:
        logits = predictor.logits(texts, pairs)
        return Answers(KINDS[predictor.kind].outputs(logits), predictor.lengths(texts, pairs))

    return ServedModel(predictor.labels, UNCUT, answer_linear)


def of_onnx(predictor: OnnxPredictor) -> ServedModel:
    from cramlm.inference.onnx import probabilities_of

    def answer_onnx(texts: Sequence[str], pairs: Sequence[str | None]) -> Answers:
        logits, lengths = predictor.compute(texts, pairs)
        full = np.flatnonzero(lengths == predictor.max_length).tolist()
        if full:  # cut, or exactly as long: only these are worth a second look
            lengths[full] = predictor.whole_lengths([texts[index] for index in full], [pairs[index] for index in full])
        return Answers(probabilities_of(logits), lengths)

    return ServedModel(predictor.labels, predictor.max_length, answer_onnx)


def answer(model: LoadedModel, texts: Sequence[str], pairs: Sequence[str | None]) -> Answers:
    """Compute texts as `Predictor` does.

    Raises:
        DivergedError: if a logit is not finite.
    """
    from cramlm.evaluation.evaluate import outputs_of, predict_logits, sequences_of_texts

    tokenizer, longest, prompt = model.tokenizer, model.max_length, model.model.prompt
    sequences = sequences_of_texts(tokenizer, texts, pairs, max_length=longest, prompt=prompt)
    logits = predict_logits(model.model, sequences, precision="fp32", pad_id=tokenizer.pad_id)
    lengths = sequences.lengths.reshape(len(texts), -1).max(axis=1)  # of a prompt's patterns the longest
    full = np.flatnonzero(lengths == longest).tolist()
    if full:  # cut, or exactly as long: only these are worth a second look
        asked, others = [texts[index] for index in full], [pairs[index] for index in full]
        whole = sequences_of_texts(tokenizer, asked, others, max_length=UNCUT, prompt=prompt).lengths
        lengths[full] = whole.reshape(len(full), -1).max(axis=1)
    return Answers(outputs_of(model.model.kind, logits), lengths)
