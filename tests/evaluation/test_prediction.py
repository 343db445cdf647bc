from __future__ import annotations

import numpy as np
import pytest
import torch

from cramlm.errors import DataError, DivergedError
from cramlm.evaluation.metrics import score
from cramlm.evaluation.prediction import outputs_of, predict_logits, sequences_of
from cramlm.inference.predictor import Predictor
from cramlm.model.huggingface.folder import LoadedModel
from cramlm.model.model import Model, PackedBatch
from cramlm.model.tokenizer import Tokenizer, Tokens
from cramlm.records import Example, FloatArray
from cramlm.training.sequences import pack

LABELS = ("a", "b", "c")


def examples(texts: list[str], labels: tuple[str, ...] = LABELS) -> list[Example]:
    return [Example(str(number), text, None, labels[number % len(labels)]) for number, text in enumerate(texts)]


def sequences(tokenizer: Tokenizer, texts: list[str]) -> Tokens:
    return tokenizer.sequences(texts, max_length=64, cut="truncate")


def probabilities(model: Model, tokens: Tokens, *, batch_tokens: int = 8192) -> FloatArray:
    return outputs_of(model.kind, predict_logits(model, tokens, precision="fp32", batch_tokens=batch_tokens))


def alone(model: Model, tokens: Tokens, index: int) -> FloatArray:
    """One sequence by itself, straight through the model."""
    nothing = np.full(1, -1, dtype=np.int64)
    ids = tokens[index]
    batch = PackedBatch.of(pack([ids], labels=nothing, external=np.zeros(1, np.bool_), row_length=len(ids), pad_id=0))
    with torch.no_grad():
        result: FloatArray = model.task_logits(model.hidden(batch), batch)[0].softmax(-1).numpy()
    return result


@pytest.mark.parametrize("batch_tokens", [1, 300, 8192])
def test_the_probabilities_of_each_text_do_not_depend_on_its_batch(
    model: Model, tokenizer: Tokenizer, texts: list[str], batch_tokens: int
) -> None:
    tokens = sequences(tokenizer, texts)
    together = probabilities(model, tokens, batch_tokens=batch_tokens)
    apart = np.stack([alone(model, tokens, index) for index in range(len(tokens))])
    np.testing.assert_allclose(together, apart, atol=1e-5)
    assert (together.argmax(1) == apart.argmax(1)).all()
    assert np.ptp(together[:, 0]) > 0.1, "a model with one output for all texts would prove nothing"
    assert together.dtype == np.float32
    np.testing.assert_allclose(together.sum(1), 1, atol=1e-6)
    assert probabilities(model, sequences(tokenizer, []), batch_tokens=batch_tokens).shape == (0, 3)


def test_the_vocabulary_head_does_not_run_and_weights_and_random_state_are_left_alone(
    model: Model, tokenizer: Tokenizer, texts: list[str]
) -> None:
    with torch.no_grad():
        for parameter in model.mlm_head.parameters():
            parameter.fill_(float("nan"))
    before, state = {name: value.clone() for name, value in model.named_parameters()}, torch.get_rng_state()
    assert np.isfinite(probabilities(model, sequences(tokenizer, texts))).all()
    assert all(torch.equal(value.nan_to_num(), before[name].nan_to_num()) for name, value in model.named_parameters())
    assert torch.equal(torch.get_rng_state(), state)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_logits_that_are_not_finite_are_an_error(model: Model, tokenizer: Tokenizer, texts: list[str]) -> None:
    with torch.no_grad():
        next(iter(model.classifier.parameters())).fill_(float("inf"))
    with pytest.raises(DivergedError, match="not finite"):
        probabilities(model, sequences(tokenizer, texts))


def test_scores_of_examples_are_those_of_the_most_probable_labels(model: Model, tokenizer: Tokenizer, texts: list[str]) -> None:
    rows = examples(texts)
    predictor = Predictor(LoadedModel(model, tokenizer, LABELS, max_length=64))
    scores, result = predictor.score(rows), probabilities(model, sequences(tokenizer, texts))
    expected = score([str(row.label) for row in rows], [LABELS[index] for index in result.argmax(1)], LABELS)
    assert scores.macro_f1 == expected.macro_f1
    assert scores.confusion.tolist() == expected.confusion.tolist()
    assert 0 <= scores.calibration_error <= 1
    unlabelled = [Example("7", "the cell", None, "a"), Example("8", "the cell", None, None)]
    with pytest.raises(DataError, match="example 8: has no label"):
        predictor.score(unlabelled)


def test_pairs_are_read_as_pairs(tokenizer: Tokenizer) -> None:
    rows = [Example("1", "the cell", "river bank", "a"), Example("2", "the cell", None, "a")]
    paired, single = (sequences_of(tokenizer, rows, max_length=64)[index].tolist() for index in (0, 1))
    assert (paired.count(tokenizer.sep_id), single.count(tokenizer.sep_id)) == (2, 1)
