from __future__ import annotations

import json
import random
import re
import unicodedata
from pathlib import Path

import numpy as np
import pytest
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import f1_score

from cramlm.config import BaselineConfig, TaskConfig
from cramlm.data.task import read_task
from cramlm.evaluation import baselines
from cramlm.evaluation.baselines import fit_baselines, word_pattern
from cramlm.records import Event, Example, Task

SHARED = Path(__file__).parents[3] / "shared" / "data" / "tasks"
QUICK = BaselineConfig(c=(1.0, 10.0))
TOPICS = {"sea": ("wave", "ship", "harbour", "sailor", "tide"), "hill": ("summit", "ridge", "valley", "climber", "meadow")}
COMMON = ("the", "a", "of", "and", "in", "to", "was", "is", "near", "old")


def example(number: int, text: str, label: str) -> Example:
    return Example(str(number), text, None, label)


def topics(rows: dict[str, int], *, seed: int, words: int = 8, told: float = 0.25) -> tuple[Example, ...]:
    """So many texts per topic, of common words and of words that betray the topic in a share `told` of the places."""
    draw = random.Random(seed)
    texts = [
        (" ".join(draw.choice(TOPICS[label]) if draw.random() < told else draw.choice(COMMON) for _ in range(words)), label)
        for label, count in rows.items()
        for _ in range(count)
    ]
    return tuple(example(number, *row) for number, row in enumerate(texts))


def topic_task(**rows: int) -> Task:
    even = {"sea": 20, "hill": 20}
    return Task(topics(rows or {"sea": 40, "hill": 40}, seed=1), topics(even, seed=2), topics(even, seed=3), ("hill", "sea"), False)


def test_every_variant_reports_what_was_chosen_on_dev() -> None:
    result = fit_baselines(topic_task(), QUICK, seed=0)
    assert set(result.variants) == {"words", "tokens", "characters", "union"}
    for fitted in result.variants.values():
        best = max(macro_f1 for _, _, macro_f1 in fitted.tried)
        assert fitted.dev.macro_f1 == best
        assert fitted.c == min(c for _, c, macro_f1 in fitted.tried if macro_f1 == best)
        assert fitted.test is not None
        assert fitted.test.macro_f1 > 0.7
    assert result.variants[result.chosen].dev.macro_f1 == max(fitted.dev.macro_f1 for fitted in result.variants.values())


@pytest.mark.parametrize(
    ("answers", "asked"),
    [
        ({0.3: 1, 1.0: 2, 3.0: 3, 10.0: 2, 30.0: 9}, [3.0, 10.0, 1.0]),
        ({0.3: 1, 1.0: 2, 3.0: 3, 10.0: 4, 30.0: 5}, [3.0, 10.0, 30.0, 1.0]),
        ({0.3: 5, 1.0: 4, 3.0: 3, 10.0: 3, 30.0: 9}, [3.0, 10.0, 1.0, 0.3]),
        ({0.3: 5, 1.0: 4, 3.0: 0, 10.0: 3, 30.0: 9}, [3.0]),
    ],
)
def test_c_is_walked_from_the_usual_one_as_long_as_dev_grows_and_left_where_it_starts_hopeless(
    answers: dict[float, float], asked: list[float]
) -> None:
    seen: list[float] = []

    def reached(c: float) -> float:
        seen.append(c)
        return answers[c]

    baselines._walk(sorted(answers), reached, least=1.0)
    assert seen == asked


def test_the_same_task_and_seed_give_the_same_answer() -> None:
    task = topic_task()
    first, second = (fit_baselines(task, QUICK, seed=5).as_dict() for _ in range(2))
    for result in (first, second):
        del result["seconds"]
        for fitted in result["variants"].values():
            del fitted["seconds"]
    assert first == second


def test_tokens_agree_with_an_exact_logistic_regression() -> None:
    task = topic_task()
    fitted = fit_baselines(task, BaselineConfig(c=(3.0,)), seed=0).variants["tokens"]
    vectorizer = TfidfVectorizer(token_pattern=r"\S+", ngram_range=(1, 2), lowercase=False, sublinear_tf=True)
    model = LogisticRegression(C=3.0, tol=1e-8, max_iter=10_000)
    model.fit(vectorizer.fit_transform([row.text for row in task.train]), [row.label for row in task.train])
    predicted = model.predict(vectorizer.transform([row.text for row in task.test]))
    reference = f1_score([row.label for row in task.test], predicted, average="macro")
    assert fitted.test is not None
    assert fitted.test.macro_f1 == pytest.approx(reference, abs=0.03)  # liblinear stops early and shrinks the intercept


def test_test_labels_do_not_influence_what_is_chosen() -> None:
    task = topic_task()
    swapped = {"sea": "hill", "hill": "sea"}
    test = tuple(Example(row.id, row.text, None, swapped[str(row.label)]) for row in task.test)
    other = Task(task.train, task.dev, test, task.labels, False)
    one, two = (fit_baselines(each, QUICK, seed=0) for each in (task, other))
    assert one.chosen == two.chosen
    for name, fitted in one.variants.items():
        assert (fitted.c, fitted.weights, fitted.tried) == (two.variants[name].c, two.variants[name].weights, two.variants[name].tried)
        assert fitted.test is not None
        assert two.variants[name].test is not None
        assert two.variants[name].test.accuracy == pytest.approx(1 - fitted.test.accuracy)


def test_uneven_labels_are_also_weighted_alike_and_even_ones_are_not() -> None:
    even = fit_baselines(topic_task(), QUICK, seed=0).variants["words"]
    uneven = fit_baselines(topic_task(sea=60, hill=6), QUICK, seed=0).variants["words"]
    assert {weights for weights, _, _ in even.tried} == {"rows alike"}
    assert {weights for weights, _, _ in uneven.tried} == {"rows alike", "labels alike"}
    assert uneven.weights == "labels alike"


def test_a_task_without_a_test_set_has_no_test_scores() -> None:
    task = topic_task()
    result = fit_baselines(Task(task.train, task.dev, (), task.labels, False), QUICK, seed=0).as_dict()
    assert all("test" not in fitted and "dev" in fitted for fitted in result["variants"].values())


def test_three_labels_and_a_dev_label_that_training_lacks_are_scored() -> None:
    train = (*topics({"sea": 30, "hill": 30}, seed=1), *(example(100 + number, "red green blue", "colour") for number in range(8)))
    dev = (*topics({"sea": 10, "hill": 10}, seed=2), example(50, "blue red", "colour"), example(51, "nothing", "strange"))
    result = fit_baselines(Task(train, dev, (), ("colour", "hill", "sea"), False), QUICK, seed=0)
    scores = result.variants["words"].dev
    assert scores.per_class["colour"]["recall"] == 1.0
    assert scores.per_class["strange"]["f1"] == 0.0
    assert scores.accuracy < 1.0


def test_pairs_are_read_as_one_text() -> None:
    def paired(rows: tuple[Example, ...]) -> tuple[Example, ...]:
        halves = [row.text.split(" ", 3) for row in rows]
        return tuple(Example(row.id, " ".join(words[:3]), words[3], row.label) for row, words in zip(rows, halves, strict=True))

    task = topic_task()
    pairs = Task(paired(task.train), paired(task.dev), paired(task.test), task.labels, False)
    one, two = (fit_baselines(each, QUICK, seed=0).as_dict()["variants"]["tfidf-tokens"] for each in (task, pairs))
    assert (one["tried"], one["test"]) == (two["tried"], two["test"])


def test_texts_without_a_single_term_leave_a_baseline_that_knows_the_larger_label() -> None:
    train = tuple(example(number, "!", "a" if number < 6 else "b") for number in range(8))
    result = fit_baselines(Task(train, train, (), ("a", "b"), False), QUICK, seed=0)
    assert result.variants["words"].dev.accuracy >= 0.25  # one of the two labels for all
    assert result.variants["words"].features == 1


def test_markup_counts_among_tokens_and_not_among_words() -> None:
    def rows(seed: int) -> tuple[Example, ...]:
        draw = random.Random(seed)
        return tuple(
            example(number, " ".join([*draw.choices(COMMON, k=6), "<<" if label == "open" else "[["]), label)
            for number in range(40)
            for label in (["open", "square"][number % 2],)
        )

    result = fit_baselines(Task(rows(1), rows(2), rows(3), ("open", "square"), False), QUICK, seed=0)
    assert result.variants["tokens"].dev.macro_f1 > 0.9
    assert result.variants["words"].dev.macro_f1 < 0.8


@pytest.mark.parametrize("form", ["NFC", "NFD"])
def test_words_keep_their_combining_marks_in_every_form(form: str) -> None:
    text = unicodedata.normalize("NFC", unicodedata.normalize(form, "ọ̀rọ̀ Yorùbá ni: हिन्दी में ए"))
    assert re.findall(word_pattern(), text) == ["ọ̀rọ̀", "Yorùbá", "ni", "हिन्दी", "में", "ए"]


def test_words_may_be_one_character_long_and_joiners_do_not_cut_them() -> None:
    assert re.findall(word_pattern(), "a b می‌خواهم x2, 7!") == ["a", "b", "می‌خواهم", "x2", "7"]


def test_composed_and_decomposed_texts_are_the_same_to_every_variant() -> None:
    words = {"a": "ọ̀rọ̀ ẹ̀kọ́ ilé", "b": "ọ̀nà ọjà omi"}
    draw = random.Random(3)
    train = tuple(
        example(number, unicodedata.normalize("NFD", " ".join(draw.choices(words[label].split(), k=4))), label)
        for number in range(20)
        for label in (["a", "b"][number % 2],)
    )
    dev = tuple(Example(row.id, unicodedata.normalize("NFC", row.text), None, row.label) for row in train)
    result = fit_baselines(Task(train, dev, (), ("a", "b"), False), QUICK, seed=0)
    assert all(fitted.dev.accuracy == 1.0 for fitted in result.variants.values())


def test_too_much_text_is_thinned_alike_for_every_label_and_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(baselines._LONGEST, "characters", 1500)
    events: list[Event] = []
    task = topic_task(sea=80, hill=40)
    fitted = fit_baselines(task, QUICK, seed=0, emit=events.append).variants
    assert fitted["tokens"].train_rows == 120
    assert 30 < fitted["characters"].train_rows < 60
    assert fitted["union"].train_rows == fitted["characters"].train_rows
    warnings = [event.message for event in events if event.kind == "warning"]
    assert len(warnings) == 2
    assert "of 120 training texts" in warnings[0]


def test_the_union_is_left_out_where_it_would_be_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(baselines, "_UNION_BELOW", 10)
    events: list[Event] = []
    result = fit_baselines(topic_task(), QUICK, seed=0, emit=events.append)
    assert "union" not in result.variants
    assert any(event.kind == "note" and "union" in event.message for event in events)


def test_events_count_variants_and_end_with_the_choice() -> None:
    events: list[Event] = []
    result = fit_baselines(topic_task(), QUICK, seed=0, emit=events.append)
    assert {event.stage for event in events} == {"baseline"}
    assert [event.kind for event in events] == ["start", "progress", "progress", "progress", "progress", "done"]
    assert result.chosen in events[-1].message


def test_results_become_plain_json() -> None:
    values = json.loads(json.dumps(fit_baselines(topic_task(), QUICK, seed=0).as_dict(), allow_nan=False))
    assert values["chosen"] in values["variants"]
    assert set(values["variants"]) == {"tfidf-words", "tfidf-tokens", "tfidf-characters", "tfidf-union"}
    assert values["variants"]["tfidf-words"]["test"]["rows"] == 40
    assert np.array(values["variants"]["tfidf-words"]["dev"]["confusion"]).sum() == 40


@pytest.mark.slow
@pytest.mark.shared_data
@pytest.mark.skipif(not SHARED.is_dir(), reason="the data sets are not here")
@pytest.mark.parametrize(("name", "micro", "macro"), [("chemprot", 0.636, 0.379), ("sciie", 0.669, 0.514)])
def test_real_tasks_reach_what_was_measured_before(name: str, micro: float, macro: float) -> None:
    folder = SHARED / name
    config = TaskConfig(**{split: str(folder / f"{split}.jsonl") for split in ("train", "dev", "test")})
    result = fit_baselines(read_task(config, seed=13), BaselineConfig(), seed=13)
    test = result.variants[result.chosen].test
    assert test is not None
    assert test.micro_f1 > micro
    assert test.macro_f1 > macro
