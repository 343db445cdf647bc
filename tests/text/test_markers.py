"""Markers that a task sets in its texts, and the segments between them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cramlm.records import PAIR_BOUNDARY
from cramlm.text.markers import MAX_KINDS, MAX_MARKERS, MIN_TEXTS, MarkerInserter, Markers
from cramlm.text.words import split_runs

WORDS = ("tin", "binds", "lead", "in", "acid", "(see", "2)", "often,", "e.g.", "10%")


def marked(pattern: str, count: int = 40) -> list[str]:
    """Texts in which `pattern` has a word at each %s."""
    slots = pattern.count("%s")
    return [pattern % tuple(WORDS[(number * 3 + slot) % len(WORDS)] for slot in range(slots)) for number in range(count)]


@pytest.mark.parametrize(
    ("pattern", "strings"),
    [
        ("%s << %s >> %s [[ %s ]] %s.", {"<<", ">>", "[[", "]]"}),
        ("%s ([[%s]]), %s <<%s>>", {"<<", ">>", "[[", "]]"}),
        ("The <e1>%s</e1> %s <e2>%s</e2>.", {"<e1>", "</e1>", "<e2>", "</e2>"}),
        ("[E1] %s [/E1] %s [E2] %s [/E2]", {"[E1]", "[/E1]", "[E2]", "[/E2]"}),
        ("%s @GENE$ %s @CHEM-ICAL$", {"@GENE$", "@CHEM-ICAL$"}),
        ("$ %s $ %s # %s # %s", {"$", "#"}),
        ("%s 「%s」 %s", {"「", "」"}),
    ],
)
def test_the_strings_that_every_text_has_equally_often_are_markers(pattern: str, strings: set[str]) -> None:
    markers = Markers.find(marked(pattern))
    assert set(markers.strings) == strings


UNMARKED = {
    "punctuation of sentences": marked("%s, (%s) %s: '%s'... -- \"%s\" %s."),
    "of other scripts": marked("¿%s，%s？ “%s” «%s»。"),
    "not in every text": [*marked("%s <<%s>> %s", 30), *marked("%s %s", 10)],
    "not equally often": [text + " @" * (number % 3) for number, text in enumerate(marked("%s %s"))],
    "few texts": marked("%s <<%s>> %s", MIN_TEXTS - 1),
    "often in a text": marked("%s | %s | %s | %s"),
    "empty": [""] * 40,
    "none": [],
}


@pytest.mark.parametrize("texts", UNMARKED.values(), ids=UNMARKED)
def test_other_texts_have_no_markers(texts: list[str]) -> None:
    assert Markers.find(texts) is None


def test_some_texts_without_markers_do_not_matter() -> None:
    markers = Markers.find([*marked("%s <<%s>> %s", 38), "tin", "lead"])
    assert markers.kinds == (("", "<<"), ("<<", ">>"), (">>", ""), ("", "")), "the most frequent first"


def test_the_boundary_of_a_pair_is_a_marker_beside_any_number_of_longer_ones() -> None:
    half = " ".join(f"<e{number}>%s</e{number}>" for number in range(MAX_MARKERS // 2))
    markers = Markers.find(marked(f"{half}{PAIR_BOUNDARY}%s"), known=(PAIR_BOUNDARY,))
    assert len(markers.strings) == MAX_MARKERS
    assert markers.pairs


def test_the_boundary_of_a_pair_is_a_marker_in_any_number_of_texts_and_other_strings_are_not_in_few() -> None:
    few, many = marked(f"<%s>{PAIR_BOUNDARY}%s", MIN_TEXTS - 1), marked(f"<%s>{PAIR_BOUNDARY}%s", MIN_TEXTS)
    assert Markers.find(few[:1], known=(PAIR_BOUNDARY,)) == Markers((PAIR_BOUNDARY,), (("", PAIR_BOUNDARY), (PAIR_BOUNDARY, "")))
    of_few, of_many = (Markers.find(texts, known=(PAIR_BOUNDARY,)) for texts in (few, many))
    assert (of_few and of_few.strings, of_many and set(of_many.strings)) == ((PAIR_BOUNDARY,), {PAIR_BOUNDARY, "<", ">"})


def test_single_texts_that_hold_the_character_of_the_boundary_are_no_pairs() -> None:
    assert Markers.find(marked(f"%s {PAIR_BOUNDARY} %s")) is None


def test_a_text_is_divided_at_its_markers() -> None:
    markers = Markers(("<<", ">>"), (("", "<<"), ("<<", ">>"), (">>", ""), ("", "")))
    assert [(each.kind, each.words) for each in markers.segments("In <<tin  ore>>: lead")] == [
        (("", "<<"), ["In"]),
        (("<<", ">>"), ["tin", "ore"]),
        ((">>", ""), [":", "lead"]),
    ]
    assert [(each.kind, each.words) for each in markers.segments("")] == [(("", ""), [])]
    assert markers.by_kind(["In <<tin>> and <<lead>>", "ore"]) == [["In ", ""], ["tin lead", ""], ["", ""], ["", "ore"]]


def test_segments_of_scripts_without_spaces_are_divided_into_clusters() -> None:
    markers = Markers(("<<", ">>"), (("<<", ">>"),))
    assert [each.words for each in markers.segments("<<銅板>>は安い, 12 円")] == [[], ["銅", "板"], ["は", "安", "い", ",", "12", "円"]]
    assert markers.by_kind(["<<銅板>>は安い"]) == [["銅板"]], "as written: its terms are pairs of characters"
    assert split_runs("กา ọ̀rọ̀, don't") == ["ก", "า", "ọ̀rọ̀,", "don't"]


def test_which_of_two_entities_comes_first_is_in_the_kinds_of_segments() -> None:
    markers = Markers.find([*marked("%s <<%s>> %s [[%s]]"), *marked("%s [[%s]] %s <<%s>>")])
    assert {(">>", "[["), ("]]", "<<")} <= set(markers.kinds)
    assert len(markers.kinds) <= MAX_KINDS


@given(st.lists(st.text(alphabet="<>[]a b.", max_size=20), max_size=30))
def test_the_segments_and_markers_of_any_text_make_it_up_again(texts: list[str]) -> None:
    markers = Markers.find(texts) or Markers(("<<", ">"), ())
    for text in texts:
        segments = markers.segments(text)
        assert "".join("".join(each.words) + each.after for each in segments) == "".join(text.split())
        assert [each.after for each in segments[:-1]] == [each.before for each in segments[1:]]


@pytest.mark.parametrize("pattern", ["%s << %s >> %s [[ %s ]] %s.", "The <e1> %s </e1> %s %s <e2> %s </e2> ."])
def test_other_texts_get_the_markers_of_the_task_with_as_many_words_between_them(pattern: str) -> None:
    texts = marked(pattern)
    markers = Markers.find(texts)
    plain = ["some words of a passage that has none of these markers at all", "one two three four five six seven", "short"]
    results = MarkerInserter(markers, texts).insert(plain, seed=1)
    assert results == MarkerInserter(markers, texts).insert(plain, seed=1)
    assert results[2] == "short"
    between = [len(each.text.split()) for each in markers.segments(texts[0])[1:-1]]
    for text, result in zip(plain[:2], results, strict=False):
        found = markers.segments(result)
        assert [each.after for each in found[:-1]] == [each.after for each in markers.segments(texts[0])[:-1]]
        assert [len(each.text.split()) for each in found[1:-1]] == between
        assert " ".join(markers.without_markers(result)) == text


def test_texts_that_have_markers_are_left_as_they_are() -> None:
    """Unlabelled texts of the task, which are passages, too."""
    texts = [f"a [[ ship {number} ]] in the << harbour >>" for number in range(MIN_TEXTS)]
    markers = Markers.find(texts)
    own = ["the  [[ boat ]]  near\ta << pier >> at night", "night >> at sea and so on, for some words more"]
    marked, *left = MarkerInserter(markers, texts).insert(["a plain text of some words more than those", *own], seed=1)
    assert left == own
    assert len(markers.segments(marked)) == 5


def test_rare_words_and_words_that_the_task_marks_are_marked_more_often_than_common_ones() -> None:
    texts = [f"the {word} of [[ {word} ]] is << the acid >> in it" for word in ("tin", "lead") * 20]
    markers = Markers.find(texts)
    plain = [f"the of and {'tin' if number % 2 else 'zinc'} the of and the" for number in range(40)]
    results = MarkerInserter(markers, texts).insert(plain, seed=3)
    hits = sum("[[ tin ]]" in each or "[[ zinc ]]" in each for each in results)
    assert hits > 25  # of 8 random places out of 6, none is the right one in a quarter of the texts
