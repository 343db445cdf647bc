import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cramlm.config import TaskConfig
from cramlm.data.hygiene import SHORTEST, WINDOW, HeldOut, Overlap, check_task
from cramlm.data.task import read_task
from cramlm.data.words import normal_words
from cramlm.records import Example, Task

LONG = "The quick brown fox jumps over the lazy dog while seven wizards, boxed in, quietly judge my vow."
SHORT = "The plot never quite comes together"


def held(*texts: str) -> list[Example]:
    return [Example(f"test:{n}", text, None, "x") for n, text in enumerate(texts, start=1)]


def overlaps(documents: list[str], *texts: str) -> list[Overlap]:
    return list(HeldOut(held(*texts)).find(enumerate(documents)))


def test_thirteen_shared_words_are_an_overlap_and_twelve_are_not() -> None:
    words = normal_words(LONG)
    documents = ["before " + " ".join(words[2 : 2 + n]).upper().replace(" ", ", ") + " after" for n in (12, 13)]
    assert overlaps(documents, LONG) == [Overlap(1, "test:1", " ".join(words[2:15]), "shares 13 words")]


def test_a_short_text_overlaps_only_whole_and_on_word_boundaries() -> None:
    documents = [f"I think {SHORT.lower()}!", f"{SHORT}ness", "The plot never quite comes", f"x{SHORT}", SHORT]
    found = overlaps(documents, SHORT)
    assert [(overlap.position, overlap.reason) for overlap in found] == [(0, "contains the whole text"), (4, "contains the whole text")]


def test_texts_under_four_words_are_too_common_to_be_evidence() -> None:
    assert overlaps(["it is not so bad", "not so bad"], "Not so bad", "", "bad") == []
    assert len(overlaps(["it is not so bad"], "is not so bad")) == 1


def test_each_half_of_a_pair_is_searched_on_its_own() -> None:
    pair = [Example("dev:1", "one two three four", "five six seven eight", "x")]
    documents = ["one two three four", "FIVE six seven eight", "three four five six"]
    assert [overlap.position for overlap in HeldOut(pair).find(enumerate(documents))] == [0, 1]


def test_text_in_scripts_without_spaces_is_found() -> None:
    text = "昨日の午後、東京で大きな会議が開かれました"
    assert [overlap.position for overlap in overlaps(["関係のない文章です。" * 3, f"新聞によると{text}。"], text)] == [1]


def test_a_match_does_not_run_from_one_document_into_the_next() -> None:
    assert overlaps(["the plot never", "quite comes together"], SHORT) == []


def test_the_first_match_in_the_document_is_told_with_the_first_example_that_has_it() -> None:
    found = overlaps([f"{SHORT}. {LONG}"], LONG, SHORT, SHORT)
    assert [(overlap.split_example_id, overlap.reason) for overlap in found] == [("test:2", "contains the whole text")]


def test_nothing_held_out_means_no_overlap() -> None:
    assert overlaps([LONG]) == []
    assert overlaps([], LONG) == []


def contains(document: str, text: str) -> bool:
    words, wanted = normal_words(document), normal_words(text)
    length = min(WINDOW, len(wanted))
    windows = {tuple(wanted[start : start + length]) for start in range(len(wanted) - length + 1)}
    return len(wanted) >= SHORTEST and any(tuple(words[start : start + length]) in windows for start in range(len(words) - length + 1))


@settings(deadline=None)
@given(seed=st.integers(0, 10**6), words=st.integers(1, 3))
def test_the_fast_search_finds_what_a_plain_one_finds(seed: int, words: int) -> None:
    draw = random.Random(seed)
    texts = [" ".join(draw.choice("ab東"[:words]) for _ in range(draw.randint(0, 20))) for _ in range(6)]
    documents = [" ".join(draw.choice("ab東"[:words]) for _ in range(draw.randint(0, 30))) for _ in range(10)]
    expected = [n for n, document in enumerate(documents) if any(contains(document, text) for text in texts)]
    assert [overlap.position for overlap in overlaps(documents, *texts)] == expected


def test_repetitions_and_conflicts_of_a_task_are_counted() -> None:
    def split(name: str, *rows: tuple[str, str]) -> tuple[Example, ...]:
        return tuple(Example(f"{name}:{n}", text, None, label) for n, (text, label) in enumerate(rows, start=1))

    task = Task(
        train=split("train", ("A b", "x"), ("a  B", "x"), ("c", "x"), ("c", "y"), ("d", "y")),
        dev=split("dev", ("a b", "x"), ("e", "y")),
        test=split("test", ("d", "x"), ("f", "x"), ("C", "y"), ("d!", "y")),
        labels=("x", "y"),
        dev_is_split_from_train=False,
    )
    check = check_task(task)
    assert (check.repeated_train, check.conflicting_train) == (2, 1)
    assert (check.dev_in_train, check.test_in_train) == ((1, 0), (1, 1))
    assert check.leak_free_test.tolist() == [1, 3]
    assert check.warnings[-1] == "2 test rows are also in train (1 with another label)"


SHARED = Path(__file__).parents[3] / "shared/data/tasks"


@pytest.mark.shared_data
@pytest.mark.skipif(not SHARED.is_dir(), reason="the shared tasks are not here")
@pytest.mark.parametrize(("name", "repeated", "in_train", "leak_free"), [("citation_intent", 418, 52, 87), ("chemprot", 25, 4, 3465)])
def test_the_known_leaks_of_public_tasks_are_found(name: str, repeated: int, in_train: int, leak_free: int) -> None:
    """Counts: as published with these files (lower-cased text)."""
    paths = {split: str(SHARED / name / f"{split}.jsonl") for split in ("train", "dev", "test")}
    check = check_task(read_task(TaskConfig(**paths), seed=1))
    assert (check.repeated_train, sum(check.test_in_train), len(check.leak_free_test)) == (repeated, in_train, leak_free)
