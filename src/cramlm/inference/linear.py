"""Predictions of an exported linear model, without torch and transformers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from cramlm.evaluation.confidence import load_confidence
from cramlm.evaluation.kinds import KINDS
from cramlm.inference.base import BasePredictor, WordSpans, are_pairs, check_texts, facts_of
from cramlm.linear.files import MODEL_FILE, WEIGHTS_FILE
from cramlm.linear.model import LinearModel
from cramlm.linear.word_vectors import TENSORS_FILE, WORDS_FILE
from cramlm.model.huggingface.config import refuse_pickles
from cramlm.model.tokenizer import UNCUT
from cramlm.records import Example, FloatArray, IntArray, TaskKind
from cramlm.storage.artifacts import check_files
from cramlm.text.words import word_pattern


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
        refuse_pickles(Path(folder))
        check_files(Path(folder), (MODEL_FILE, WEIGHTS_FILE, WORDS_FILE, TENSORS_FILE))
        predictor = cls(LinearModel.load(Path(folder)))
        predictor.confidence = load_confidence(Path(folder))
        predictor.trained_on_pairs = are_pairs(facts_of(Path(folder)))
        return predictor

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
        """The averaged word vectors of `static`; the other linear models have none."""
        check_texts(texts, pairs, trained_on_pairs=self.trained_on_pairs)
        vectors = self.model.vectors
        return super().embeddings(texts, pairs) if vectors is None else vectors.of(divided_texts(texts, pairs))

    def word_spans(self, text: str, pair: str | None = None) -> WordSpans:
        """Character spans of words and of runs of an equal other character."""
        of_text, of_pair = ([match.span() for match in re.finditer(rf"{word_pattern()}|(\S)\1*", each)] for each in (text, pair or ""))
        return of_text, of_pair


def divided_texts(texts: Sequence[str], pairs: Sequence[str | None] | None) -> list[str]:
    """Each text, and both texts of each pair, as the linear models were trained on them."""
    examples = (Example("", text, pair, None) for text, pair in zip(texts, [None] * len(texts) if pairs is None else pairs, strict=True))
    return [example.divided_text for example in examples]
