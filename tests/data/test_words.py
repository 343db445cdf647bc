from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cramlm.data.words import _words_of_any_script, count_words, cut_passages, duplicate_key, normal_words


def test_words_are_folded_runs_of_letters_digits_and_marks() -> None:
    assert normal_words("Don't STOP, re-do 3.5 naïve “Ünïts” ﬁnd") == ["don", "t", "stop", "re", "do", "3", "5", "naïve", "ünïts", "find"]
    assert normal_words("कि की") == ["कि", "की"]  # vowel signs are marks, not separators
    assert normal_words("ọmọ e\u0301") == ["ọmọ", "é"]
    assert normal_words("— … !") == []


def test_characters_of_scripts_without_spaces_are_words() -> None:
    assert normal_words("東京GPU速報") == ["東", "京", "gpu", "速", "報"]
    assert len(normal_words("สวัสดีครับ")) == 10
    assert normal_words("안녕 하세요") == ["안녕", "하세요"]  # Hangul has spaces


def test_length_counts_two_characters_as_a_word_where_there_are_no_spaces() -> None:
    assert count_words("one  two\nthree") == 3
    assert count_words("東京速報です。") == 3
    assert count_words("see 東京 now") == 3
    assert count_words("   ") == 0


def test_keys_ignore_case_spacing_and_punctuation_but_nothing_else() -> None:
    assert duplicate_key("A test: one.") == duplicate_key("a  TEST “one”!")
    assert duplicate_key("café") == duplicate_key("cafe\u0301") != duplicate_key("cafe")
    assert duplicate_key("की") != duplicate_key("कि")
    assert duplicate_key("😀") != duplicate_key("😞")
    assert duplicate_key("...") != duplicate_key("!!!")


@pytest.mark.parametrize(
    "block", [(0x80, 0x600), (0x1E00, 0x3100), (0xA640, 0xA7FF), (0xFB00, 0x10000), (0x1F300, 0x1F700), (0x1D400, 0x1D500)]
)
def test_a_few_foreign_characters_in_ascii_are_read_as_among_themselves(block: tuple[int, int]) -> None:
    # White space at the end changes nothing but the way that is taken: short of it, a foreign character is over a tenth of the text.
    for character in map(chr, range(*block)):
        for text in (f"Ab{character}c", f"{character} e{character}{character}F."):
            assert duplicate_key(text + " " * 200) == duplicate_key(text), ascii(text)
            assert count_words(text + " " * 200) == count_words(text), ascii(text)


@given(
    text=st.text(st.characters(exclude_categories=["Cs"])), ascii_text=st.text(st.characters(max_codepoint=127), min_size=1, max_size=60)
)
def test_lengths_and_keys_do_not_depend_on_the_share_of_foreign_characters(text: str, ascii_text: str) -> None:
    mixed = ascii_text * 3 + text + ascii_text
    assert duplicate_key(mixed + " " * 5000) == duplicate_key(mixed)
    assert count_words(mixed + " " * 5000) == count_words(mixed)
    assert count_words(ascii_text) == len(ascii_text.split())


def test_a_long_text_is_cut_at_sentence_ends_into_even_passages() -> None:
    text = " ".join(f"Sentence number {n} says that nothing much happened today." for n in range(100))
    spans = cut_passages(text, count_words(text), 200)
    passages = [text[start:end] for start, end in spans]
    assert all(passage.endswith("today.") and passage.startswith("Sentence") for passage in passages)
    assert all(150 <= count_words(passage) <= 250 for passage in passages)
    assert " ".join(passages) == text


def test_a_text_up_to_one_and_a_half_passages_stays_whole_and_untouched() -> None:
    text = "  word" * 300
    assert cut_passages(text, 300, 200) == [(0, len(text))]
    assert len(cut_passages(text, 301, 200)) == 2


@pytest.mark.parametrize(
    "text",
    ["東京の天気は今日も晴れです。" * 200, "東京の天気は今日も晴れです" * 200, "สวัสดีครับผมชื่อ" * 200, "word " * 3000, "a. b! " * 2000],
)
def test_passages_have_about_the_wanted_length_in_any_script(text: str) -> None:
    words = count_words(text)
    passages = [text[start:end] for start, end in cut_passages(text, words, 200)]
    assert all(100 <= count_words(passage) <= 300 for passage in passages)
    assert len(passages) == pytest.approx(words / 200, rel=0.3)


@given(
    text=st.lists(st.text(st.sampled_from("ab.!? \n\t。東京ก\u0e34é\u0301"), max_size=40), max_size=60).map("".join),
    words=st.integers(20, 40),
)
def test_passages_hold_every_character_but_edge_white_space_once_and_in_order(text: str, words: int) -> None:
    spans = cut_passages(text, count_words(text), words)
    assert all(start < end for start, end in spans) or text == ""
    assert all(before[1] <= after[0] for before, after in pairwise(spans))
    assert "".join("".join(text[start:end].split()) for start, end in spans) == "".join(text.split())


@given(st.text(st.sampled_from("aB9 .,-’“é É½™ﬁ\u00a0ßİΣς日ا\u0301\u0bcd\ud800한ᄀ") | st.characters(), max_size=60))
def test_text_with_a_few_foreign_characters_gives_the_words_that_text_of_any_script_gives(text: str) -> None:
    padded = "Plain ASCII words, more than nine in ten! " * 20 + text
    for one in (text, padded):
        words = _words_of_any_script(one).decode("utf-8", "surrogatepass").split()
        assert normal_words(one) == words
