from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from commands import cramlm, error_line, python
from cramlm.errors import CramError, DataError, UsageError
from cramlm.evaluation.prediction import outputs_of, predict_logits, predict_logits_fast
from cramlm.inference.predictor import Predictor
from cramlm.model.huggingface.folder import save_classifier
from cramlm.model.model import Model
from cramlm.model.tokenizer import Tokenizer
from cramlm.records import Example
from server_process import LABELS


@pytest.fixture
def folder(tmp_path: Path, model: Model, tokenizer: Tokenizer) -> Path:
    """An export of either shape of encoder."""
    save_classifier(model, tokenizer, tmp_path / "export", labels=LABELS, max_length=48)
    return tmp_path / "export"


@pytest.fixture(scope="module")
def predictor(tiny_export: Path) -> Predictor:
    return Predictor.load_encoder(tiny_export)


def test_predictions_equal_those_of_the_saved_model(folder: Path, model: Model, tokenizer: Tokenizer, texts: list[str]) -> None:
    predictor = Predictor.load(folder)
    tokens = tokenizer.sequences(texts, max_length=48, cut="truncate")
    expected = outputs_of(model.kind, predict_logits(model, tokens, precision="fp32"))
    np.testing.assert_allclose(predictor.probabilities(texts), expected, atol=1e-6)
    assert predictor.labels == LABELS
    for prediction, row in zip(predictor.predict(texts), expected, strict=True):
        assert prediction.label == LABELS[row.argmax()]
        assert list(prediction.probabilities) == list(LABELS)
        assert sum(prediction.probabilities.values()) == pytest.approx(1, abs=1e-6)


def test_auto_precision_gives_the_labels_of_fp32(folder: Path, model: Model, tokenizer: Tokenizer, texts: list[str]) -> None:
    predictor = Predictor.load(folder)
    tokens = tokenizer.sequences(texts * 3, max_length=48, cut="truncate")
    exact = predictor.probabilities(texts * 3)
    fast = outputs_of("classification", predict_logits_fast(model, tokens))
    np.testing.assert_array_equal(fast.argmax(axis=1), exact.argmax(axis=1))
    np.testing.assert_allclose(fast, exact, atol=0.05)
    auto = Predictor.load(folder, precision="auto").predict(texts)
    assert [prediction.label for prediction in auto] == [prediction.label for prediction in predictor.predict(texts)]


def test_predict_iter_is_lazy_and_equals_predict(predictor: Predictor, texts: list[str]) -> None:
    taken = 0

    def counted() -> Iterator[str]:
        nonlocal taken
        for taken, text in enumerate(itertools.cycle(texts), start=1):  # noqa: B007 - read by the test
            yield text

    stream = predictor.predict_iter(counted(), batch=16)
    predictions = list(itertools.islice(stream, len(texts)))
    assert [prediction.label for prediction in predictions] == [prediction.label for prediction in predictor.predict(texts)]
    assert taken == 48


def test_predict_iter_takes_pairs(predictor: Predictor, texts: list[str]) -> None:
    pairs = [None, *texts[:0:-1]]
    streamed = [prediction.label for prediction in predictor.predict_iter(iter(texts), iter(pairs), batch=7)]
    assert streamed == [prediction.label for prediction in predictor.predict(texts, pairs)]
    assert not np.allclose(predictor.probabilities(texts, pairs), predictor.probabilities(texts), atol=1e-3)


def test_no_texts_give_no_predictions(predictor: Predictor) -> None:
    assert predictor.predict([]) == list(predictor.predict_iter([])) == []
    assert predictor.probabilities([]).shape == (0, 3)


@pytest.mark.parametrize(
    ("inputs", "pairs", "message"),
    [
        ("some text", None, r"pass a list of strings, like \[text\]"),
        (["a"], "b", "pairs is one string"),
        (np.array([["a"]], dtype=object), None, "texts has 2 dimensions; pass one column of it, or a list of strings"),
        ({"text": "a"}, None, "texts is a dict; pass a list of strings"),
        (None, None, "texts is a NoneType; pass a list of strings"),
        (["a"], {"b"}, "pairs is a set; pass a list of strings"),
        (["fine", float("nan")], None, r"text 2: is float \('nan'\), not a string"),
        (["a", "\ud800"], None, "lone surrogate"),
        (["a", "b"], ["c"], "2 texts but 1 pairs"),
        (["a"], ["c", "d"], "more pairs than texts|1 texts but 2 pairs"),
    ],
)
def test_texts_and_pairs_that_are_no_lists_of_equally_many_strings_are_refused(
    predictor: Predictor, inputs: Any, pairs: Any, message: str
) -> None:
    for predict in (predictor.predict, predictor.probabilities, lambda texts, pairs: list(predictor.predict_iter(texts, pairs))):
        with pytest.raises(CramError, match=message):
            predict(inputs, pairs)
    with pytest.raises(CramError, match="batch is 0"):
        predictor.predict_iter(["a"], batch=0)


def test_a_generator_of_texts_is_refused_with_what_takes_it(predictor: Predictor, texts: list[str]) -> None:
    for arguments in ((iter(texts), None), (texts, iter(texts))):
        with pytest.raises(UsageError, match=r"(texts|pairs) is a \w+, which has no length; pass a list, or use predict_iter"):
            predictor.predict(*arguments)


def test_scores_count_what_was_predicted(predictor: Predictor, texts: list[str]) -> None:
    predictions = [prediction.label for prediction in predictor.predict(texts)]
    examples = [Example(str(number), text, None, label) for number, (text, label) in enumerate(zip(texts, predictions, strict=True))]
    assert predictor.score(examples).accuracy == 1.0
    with pytest.raises(DataError, match="no examples"):
        predictor.score([])


def test_threads_and_random_state_do_not_change(tiny_export: Path, texts: list[str]) -> None:
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    Predictor.load(tiny_export).predict(texts)
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"device": "tpu"}, "device 'tpu': expected auto, cpu, cuda or cuda:N"),
        ({"device": "cuda:x"}, "device 'cuda:x': expected auto"),
        ({"precision": "fp8"}, "precision 'fp8' is not one of auto, fp32, bf16"),
        ({"model_part": "tf-idf"}, "model_part 'tf-idf' is not one of combined, encoder, static, bayes, tfidf"),
    ],
)
def test_a_device_precision_or_part_that_does_not_exist_is_refused(finished: Path, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Predictor.load(finished, **arguments)
    if "device" in arguments:
        assert error_line(cramlm("predict", finished, "-", "--device", arguments["device"], stdin="a text"), 2).startswith(message)


FORKED = """
import os, sys
import torch
from cramlm.errors import UsageError
from cramlm.inference.predictor import Predictor

torch.set_num_threads(2)
predictor = Predictor.load(sys.argv[1])
expected = predictor.predict(["water"])
if os.fork():
    sys.exit(os.waitstatus_to_exitcode(os.wait()[1]))
for use in (lambda: predictor.predict(["water"]), lambda: predictor.embeddings(["water"]), lambda: Predictor.load(sys.argv[1])):
    try:
        use()
    except UsageError as error:
        print(error)
torch.set_num_threads(1)
print(predictor.predict(["water"]) == expected)
sys.stdout.flush()
os._exit(0)
"""


def test_a_forked_process_refuses_several_threads_instead_of_waiting_for_those_of_its_parent(tiny_export: Path) -> None:
    *refused, equal = python(FORKED, tiny_export).splitlines()
    assert len(refused) == 3
    assert all("call torch.set_num_threads(1) in it first" in line for line in refused)
    assert equal == "True"
