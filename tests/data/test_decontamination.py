import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cramlm.data.decontamination import SHORTEST, WINDOW, HeldOut, Overlap, without_overlap
from cramlm.records import Event, Example, Task
from cramlm.text.words import segment

LONG = "The quick brown fox jumps over the lazy dog while seven wizards, boxed in, quietly judge my vow."
SHORT = "The plot never quite comes together"


def held(*texts: str) -> list[Example]:
    return [Example(f"test:{n}", text, None, "x") for n, text in enumerate(texts, start=1)]


def overlaps(documents: list[str], *texts: str) -> list[Overlap]:
    return list(HeldOut(held(*texts)).find(enumerate(map(str.encode, documents))))


def test_thirteen_shared_words_are_an_overlap_and_twelve_are_not() -> None:
    words = segment(LONG)
    documents = ["before " + " ".join(words[2 : 2 + n]).upper().replace(" ", ", ") + " after" for n in (12, 13)]
    assert overlaps(documents, LONG) == [Overlap(1, "test:1", " ".join(words[2:15]), "shares 13 words")]


@pytest.mark.parametrize("shortest", range(SHORTEST, WINDOW + 1))
def test_a_shared_text_is_found_wherever_it_begins(shortest: int) -> None:
    text = " ".join(f"word{number}" for number in range(shortest))
    for before in range(20):
        assert [each.match for each in overlaps(["other " * before + text + " other"], text, LONG)] == [text]


USA = "ประเทศสหรัฐอเมริกา"  # the Thai name of the United States: 18 code points, 16 grapheme clusters
THAI = f"เมื่อวานนี้ประธานาธิบดีของ{USA}เดินทางไปเยือนญี่ปุ่นและเกาหลีใต้"


@pytest.mark.parametrize(
    ("script", "text", "enough"),
    [
        ("Han", "昨日午后大会在北京举行来自五十个国家的代表参加了开幕式并发表讲话", 26),
        ("kana", "きのうのごごとうきょうでおおきなかいぎがひらかれましたとてもよかった", 26),
        ("Thai", THAI, 52),
    ],
)
def test_thirteen_words_are_26_clusters_in_han_and_kana_and_52_in_thai(script: str, text: str, enough: int) -> None:
    clusters = segment(text)
    assert len(clusters) > enough, script
    documents = ["X " + "".join(clusters[1 : 1 + count]) + " X" for count in (enough - 1, enough)]
    assert [(found.position, found.reason) for found in overlaps(documents, text)] == [(1, "shares 13 words")]


@pytest.mark.parametrize(
    ("text", "is_searched"), [("今天很好", False), ("今天天气很好", False), ("今天的天气非常好", True), (USA[:13], False), (USA, True)]
)
def test_a_short_text_without_spaces_is_searched_from_four_words_on(text: str, is_searched: bool) -> None:
    assert len(overlaps([f"x {text} x"], text)) == is_searched


SEVERAL_SCRIPTS = "GPU加速 of 大规模 models is 非常重要的 today"  # 5 words, 10 characters of Han: 10 words
MEETING = "昨日の午後、東京で大きな会議が開かれました"
CASES: dict[str, tuple[list[str], tuple[str, ...], list[int]]] = {
    "a short text is found whole and on word boundaries": (
        [f"I think {SHORT.lower()}!", f"{SHORT}ness", "The plot never quite comes", f"x{SHORT}", SHORT],
        (SHORT,),
        [0, 4],
    ),
    "under four words are too common": (["it is not so bad", "not so bad"], ("Not so bad", "", "bad"), []),
    "four words are enough": (["it is not so bad"], ("is not so bad",), [0]),
    "a script without spaces": (["関係のない文章です。" * 3, f"新聞によると{MEETING}。"], (MEETING,), [1]),
    "the name of a country in Thai": ([f"เขาเรียนหนังสืออยู่ที่{USA}มาสามปีแล้ว"], (THAI,), []),
    "several scripts": ([SEVERAL_SCRIPTS[:-6], SEVERAL_SCRIPTS.upper() + "!"], (SEVERAL_SCRIPTS,), [1]),
    "14 words of several scripts": ([f"{SEVERAL_SCRIPTS} and tomorrow 一切照X"], (f"{SEVERAL_SCRIPTS} and tomorrow 一切照旧",), [0]),
    "not from one document into the next": (["the plot never", "quite comes together"], (SHORT,), []),
    "no held-out text": ([LONG], (), []),
    "no document": ([], (LONG,), []),
}


@pytest.mark.parametrize("case", CASES)
def test_documents_that_hold_a_held_out_text_are_found(case: str) -> None:
    documents, texts, expected = CASES[case]
    assert [overlap.position for overlap in overlaps(documents, *texts)] == expected


def test_each_half_of_a_pair_is_searched_separately() -> None:
    pair = [Example("dev:1", "one two three four", "five six seven eight", "x")]
    documents = ["one two three four", "FIVE six seven eight", "three four five six"]
    assert [overlap.position for overlap in HeldOut(pair).find(enumerate(map(str.encode, documents)))] == [0, 1]


def test_the_first_match_in_a_document_is_reported_with_its_first_example() -> None:
    found = overlaps([f"{SHORT}. {LONG}"], LONG, SHORT, SHORT)
    assert [(overlap.split_example_id, overlap.reason) for overlap in found] == [("test:2", "contains the whole text")]


def length(words: Sequence[str]) -> float:
    return sum({"東": 0.5, "ก": 0.25}.get(word, 1.0) for word in words)


def contains(document: str, text: str) -> bool:
    """Whether some run of words is in both that has 13 words or, in a text of 4 to 12, all of them."""
    words, wanted = segment(document), segment(text)
    enough = min(WINDOW, length(wanted))
    runs = {tuple(wanted[start:end]) for start in range(len(wanted)) for end in range(start + 1, len(wanted) + 1)}
    shared = (run for run in runs if length(run) >= enough)
    spans = {tuple(words[start:end]) for start in range(len(words)) for end in range(start + 1, len(words) + 1)}
    return length(wanted) >= SHORTEST and any(run in spans for run in shared)


@given(seed=st.integers(0, 10**6), kinds=st.sampled_from(["a", "ab", "a東", "東", "東ก", "ab東ก", "ก"]))
def test_the_compiled_search_equals_a_plain_one(seed: int, kinds: str) -> None:
    generator = random.Random(seed)
    texts = [" ".join(generator.choice(kinds) for _ in range(generator.randint(0, 30))) for _ in range(6)]
    documents = [" ".join(generator.choice(kinds) for _ in range(generator.randint(0, 60))) for _ in range(6)]
    expected = [n for n, document in enumerate(documents) if any(contains(document, text) for text in texts)]
    assert [overlap.position for overlap in overlaps(documents, *texts)] == expected


def test_unlabelled_texts_that_overlap_dev_or_test_texts_are_left_out_with_a_note() -> None:
    seen: list[Event] = []
    rows = tuple(Example(f"unlabelled:{number}", text, None, None) for number, text in enumerate((LONG, f"{SHORT}!", "something else")))
    held_out = Example("dev:1", f"He wrote: {LONG}", None, "a"), Example("test:1", SHORT, None, "a")
    task = Task((Example("train:1", "x", None, "a"),), held_out[:1], held_out[1:], ("a", "b"), False, unlabelled=rows)
    assert [row.text for row in without_overlap(task, emit=seen.append).unlabelled] == ["something else"]
    assert "2 of 3 unlabelled texts left out, because they overlap dev or test texts (first unlabelled:0:" in seen[0].message
    assert without_overlap(replace(task, unlabelled=rows[2:])).unlabelled == rows[2:]
