"""Explanations of a tiny trained model: exact positions, the words that decide, the passages of its run."""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from commands import printed
from cramlm.cli.console import show_explanation
from cramlm.errors import ArtifactError, CramError, UsageError
from cramlm.inference.base import BasePredictor, WordSpans, word_spans
from cramlm.inference.explain import ExplainedWord, Explanation, explain, explain_at, log_odds, nearest_passages
from cramlm.inference.folders import model_of, run_of, texts_for_check
from cramlm.inference.predictor import Predictor
from cramlm.model.tokenizer import Tokenizer
from cramlm.records import FloatArray, IntArray
from cramlm.retrieval.index import ExplainedHit
from cramlm.retrieval.selection import SelectionTable
from tiny_task import TOPICS

TEXT = "The old ship was near the harbour, and a Sailor on the path to the island"


@pytest.fixture(scope="module")
def predictor(finished: Path) -> Predictor:
    return Predictor.load_encoder(finished / "export")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("  Aspirin\t\treduces  pain. ", ["Aspirin", "reduces", "pain", "."]),
        ("ỌRỌ\u0301 \u200eilé\u00ad!! [MASK]", ["ỌRỌ\u0301", "ilé", "!!", "[", "MASK", "]"]),
        ("日本 kinase日", ["日", "本", "kinase", "日"]),
        ("<< cell >>", ["<<", "cell", ">>"]),
    ],
)
def test_word_spans_ignore_normalisation(text: str, words: list[str], tokenizer: Tokenizer) -> None:
    spans, of_pair = word_spans(tokenizer.content, text, max_length=64)
    assert of_pair == []
    assert [text[start:stop].strip("\u200e\u00ad") for start, stop in spans] == words


def test_long_labels_ids_and_terms_are_shortened(predictor: Predictor, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UsageError, match="choose one of") as refused:
        explain(predictor, TEXT, label="x" * 5000)
    assert len(str(refused.value)) < 600
    word = ExplainedWord(0, 4, "word", 1.0)
    hit = ExplainedHit(0, 2.0, 0, "i" * 5000, "source", "a passage", (("t" * 5000, 2.0),))
    show_explanation(Explanation("word", "l" * 5000, 0.5, 4, (word,), (hit,)).as_dict())
    assert len(capsys.readouterr().out) < 1500


def test_a_contribution_is_a_difference_of_log_odds(predictor: Predictor) -> None:
    explanation = explain(predictor, TEXT)
    assert all(explanation.text[word.start : word.stop] == word.text for word in explanation.words)
    assert [word.text for word in explanation.words] == TEXT.replace(",", " ,").split()
    assert (explanation.read, explanation.passages) == (len(TEXT), ())
    column = predictor.labels.index(explanation.label)
    word = explanation.words[2]
    without = f"{TEXT[: word.start]} {TEXT[word.stop :]}"
    before, after = log_odds(predictor.probabilities([TEXT, without]).astype(np.float64), column)
    assert word.contribution == pytest.approx(before - after, abs=1e-4)
    assert explanation.probability == pytest.approx(predictor.probabilities([TEXT])[0, column], abs=1e-5)


def test_an_emoji_of_several_characters_is_one_word(predictor: Predictor, finished: Path) -> None:
    england = "\U0001f3f4" + "".join(chr(0xE0000 + ord(letter)) for letter in "gbeng\x7f")
    germany, france = ("".join(chr(0x1F1E6 + ord(letter) - ord("a")) for letter in country) for country in ("de", "fr"))
    words = ["\U0001f469\u200d\U0001f469\u200d\U0001f467", "ship", "\U0001f44d\U0001f3fd", "\u2764\ufe0f", germany, france, england]
    for each in (predictor, Predictor.load(finished / "export"), Predictor.load(finished / "export", model_part="tfidf")):
        assert [word.text for word in explain(each, " ".join(words)).words] == words


class Saturated(BasePredictor):
    """Two labels per text; the logit of the first is high, and 1.5 higher with the word x."""

    labels, kind, max_length = ("a", "b"), "multi-label", 100

    def outputs(self, texts: Sequence[str], pairs: Sequence[str | None] | None) -> FloatArray:
        logits = np.array([[17.5 if "x" in text else 16.0, 0.0] for text in texts])
        return (1 / (1 + np.exp(-logits))).astype(np.float32)

    def whole_lengths(self, texts: Sequence[str], pairs: Sequence[str | None] | None = None) -> IntArray:
        return np.ones(len(texts), dtype=np.int64)

    def word_spans(self, text: str, pair: str | None = None) -> WordSpans:
        return [(match.start(), match.end()) for match in re.finditer(r"\w+", text)], []


def test_the_contribution_to_a_probability_that_float32_rounds_to_1_is_small() -> None:
    contribution = explain(Saturated(), "x y", label="a").words[0].contribution
    assert 0 < contribution < 1.5


class LongText(Saturated):
    """The most texts that it was given at a time, and in all."""

    most = total = 0

    def outputs(self, texts: Sequence[str], pairs: Sequence[str | None] | None) -> FloatArray:
        self.most, self.total = max(self.most, len(texts)), self.total + len(texts)
        return super().outputs(texts, pairs)


def test_a_long_text_is_explained_in_spans_of_several_words(finished: Path) -> None:
    text, long = "a, b\n" * 250, LongText()
    assert len(explain(long, text, label="a").words) == 500
    words = explain(long, f"{text} x", label="a").words
    assert [words[0].text, words[1].text, words[-1].text] == ["a, b", "a, b", "x"]
    assert [word.start for word in words[:-1] if word.contribution] == []
    assert words[-1].contribution > 0
    assert (long.most, long.total) == (64, 501 + 252)
    assert "harbour" in printed("explain", finished, f"{TEXT} " * 50, "--model-part", "tfidf")


def test_removing_the_top_words_changes_the_label(predictor: Predictor, finished: Path) -> None:
    """Without its three top words the label loses more probability than without three random words, on average."""
    generator = np.random.default_rng(0)
    without_top, without_random = [], []
    examples = texts_for_check(finished, None, of="the words")
    for example in examples[:: -(-len(examples) // 12)]:
        explanation = explain(predictor, example.text)
        column = predictor.labels.index(explanation.label)
        top = sorted(explanation.words, key=lambda word: -word.contribution)[:3]
        sampled = [explanation.words[index] for index in generator.permutation(len(explanation.words))[:3]]
        texts = [" ".join(word.text for word in explanation.words if word not in removed) for removed in (top, sampled)]
        remaining = predictor.probabilities(texts)[:, column]
        without_top.append(explanation.probability - remaining[0])
        without_random.append(explanation.probability - remaining[1])
    assert np.mean(without_top) > np.mean(without_random) + 0.05


def test_truncated_text_has_no_contribution(predictor: Predictor) -> None:
    long = " ".join([TEXT] * 10)
    explanation = explain(predictor, long)
    assert 0 < explanation.read < len(long)
    assert explanation.words[-1].stop == explanation.read
    again = explain(predictor, long[: explanation.read])
    assert [word.contribution for word in again.words] == pytest.approx([word.contribution for word in explanation.words], abs=1e-4)


def test_nearest_passages_are_from_the_selection(finished: Path) -> None:
    passages = nearest_passages(finished, TEXT, limit=3)
    selected = set(SelectionTable.open(finished / "selection").texts())
    assert len(passages) == 3
    assert {passage.text for passage in passages} <= selected
    assert [passage.score for passage in passages] == sorted((passage.score for passage in passages), reverse=True)
    assert {term for term, _ in passages[0].terms} & set(TOPICS["sea"])
    assert nearest_passages(finished, "zzz qqq", limit=3) == ()
    assert nearest_passages(finished.parent, TEXT, limit=3) == ()


def test_nearest_passages_of_a_run_that_cannot_be_written_are_the_same(finished: Path, tmp_path: Path) -> None:
    shutil.copytree(finished / "selection", tmp_path / "run/selection")
    (tmp_path / "run/selection-index").write_text("no folder can be made here", "utf-8")
    assert nearest_passages(tmp_path / "run", TEXT, limit=2) == nearest_passages(finished, TEXT, limit=2)


def test_explain_takes_runs_exports_and_onnx_folders(finished: Path, tmp_path: Path) -> None:
    shutil.copytree(finished / "export", tmp_path / "copy")
    here, there = explain_at(finished, TEXT), explain_at(tmp_path / "copy", TEXT)
    assert (here.words, len(here.passages)) == (there.words, 3)
    assert there.passages == ()
    assert (model_of(finished), run_of(finished / "export")) == (finished / "export", finished.resolve())
    with pytest.raises(ArtifactError, match="holds no exported model"):
        model_of(tmp_path)


def test_the_command_prints_a_table_with_escaped_texts(finished: Path) -> None:
    shown = printed("explain", finished, f"{TEXT} \x1b[31m [bold]")
    assert "harbour" in shown
    assert "sea" in shown
    assert "\x1b[31m" not in shown


def test_explain_errors_are_one_line(predictor: Predictor) -> None:
    for text in ("", "  \n", ["a"]):
        with pytest.raises(UsageError, match="pass one string that is not blank"):
            explain(predictor, text)
    with pytest.raises(UsageError, match=r"the model to explain is 'runs/mine', not loaded; pass cramlm.Predictor.load\(FOLDER\)"):
        explain("runs/mine", TEXT)
    with pytest.raises(CramError, match="lone surrogate"):
        explain(predictor, "a \ud800")
    assert explain(predictor, "\u200e").words == ()
