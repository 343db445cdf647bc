import re
import unicodedata
from hashlib import blake2b
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cramlm.text.words import (
    MeasuredText,
    _segment_any_script,
    count_words,
    cut_passages,
    hash_block,
    hash_words,
    segment,
    segment_utf8,
    split_words,
    word_pattern,
)


def words_key(text: str) -> bytes:
    return MeasuredText(text).words_key()


def test_words_are_folded_runs_of_letters_digits_and_marks() -> None:
    assert segment("Don't STOP, re-do 3.5 naïve “Ünïts” ﬁnd") == ["don", "t", "stop", "re", "do", "3", "5", "naïve", "ünïts", "find"]
    assert segment("कि की") == ["कि", "की"]  # vowel signs are marks, not separators
    assert segment("ọmọ e\u0301") == ["ọmọ", "é"]
    assert segment("— … !") == []


def test_grapheme_clusters_of_scripts_without_spaces_are_words() -> None:
    assert segment("東京GPU速報") == ["東", "京", "gpu", "速", "報"]
    assert segment("สวัสดีครับ") == ["ส", "วั", "ส", "ดี", "ค", "รั", "บ"]  # a vowel sign belongs to its consonant
    assert segment("ភាសាខ្មែរ") == ["ភា", "សា", "ខ្មែ", "រ"]  # and so does a stacked consonant
    assert segment("မြန်မာ") == ["မြ", "န်", "မာ"]
    assert segment("ｶﾞ") == ["ガ"]
    assert segment("안녕 하세요") == ["안녕", "하세요"]  # Hangul has spaces


def test_two_characters_count_as_a_word_in_scripts_without_spaces() -> None:
    assert [count_words(text) for text in ("one  two\nthree", "東京速報です。", "see 東京 now", "   ")] == [3, 3, 3, 0]


@given(
    st.text(
        st.sampled_from("ab. \t\n\x0b\x1c\x85\u00a0\u2003\u200b\u3000é\u0301\u0327Å가\u1100\u1161ก\u0e33東")
        | st.characters(exclude_categories=["Cs"])
    )
)
def test_the_exact_key_is_that_of_the_collapsed_text_in_nfc(text: str) -> None:
    for one in (text, "Plain ASCII words, more than nine in ten! " * 20 + text, "Plain words" + text.strip(" ")):
        expected = unicodedata.normalize("NFC", " ".join(one.split()))
        digest = blake2b(expected.encode(), digest_size=16).digest()
        measured = MeasuredText(one)
        assert MeasuredText(one).duplicate_key() == digest
        assert (measured.count_words(), measured.duplicate_key()) == (count_words(one), digest)  # counting first takes a shortcut


@pytest.mark.parametrize(
    ("one", "other", "exact", "words"),
    [
        ("A test: one.", "a  TEST “one”!", False, True),
        ("Polish", "polish", False, True),
        ("ﬁnd", "find", False, True),
        ("x²", "x2", False, True),
        ("if x < y", "if x > y", False, True),
        ("great film 😂", "great film 😡", False, True),
        ("café", "cafe\u0301", True, True),
        ("café", "cafe", False, False),
        ("ask a therapist", "ask a the rapist", False, False),
        ("it grew by 1.5", "it grew by 15", False, False),
        ("की", "कि", False, False),
        (" ? \n !", "? !", True, True),  # without words: only exact duplicates
        ("😀", "😞", False, False),
        ("...", "!!!", False, False),
    ],
)
def test_the_words_key_ignores_case_and_punctuation_and_the_exact_key_white_space_alone(
    one: str, other: str, exact: bool, words: bool
) -> None:
    assert (MeasuredText(one).duplicate_key() == MeasuredText(other).duplicate_key()) == exact
    assert (words_key(one) == words_key(other)) == words


@pytest.mark.parametrize("block", [(0x80, 0x600), (0x1E00, 0x3100), (0xFB00, 0x10000), (0x1F300, 0x1F700)])
def test_the_ascii_path_gives_the_same_words_for_single_characters(block: tuple[int, int]) -> None:
    # White space at the end changes nothing but the way that is taken: short of it, a foreign character is over a tenth of the text.
    for character in map(chr, range(*block)):
        for text in (f"Ab{character}c", f"{character} e{character}{character}F."):
            assert words_key(text + " " * 200) == words_key(text), ascii(text)
            assert count_words(text + " " * 200) == count_words(text), ascii(text)


@given(
    text=st.text(st.characters(exclude_categories=["Cs"])), ascii_text=st.text(st.characters(max_codepoint=127), min_size=1, max_size=60)
)
def test_lengths_and_keys_do_not_depend_on_the_share_of_ascii(text: str, ascii_text: str) -> None:
    mixed = ascii_text * 3 + text + ascii_text
    assert words_key(mixed + " " * 5000) == words_key(mixed)
    assert count_words(mixed + " " * 5000) == count_words(mixed)
    assert count_words(ascii_text) == len(ascii_text.split())


def test_a_long_text_is_cut_at_sentence_ends_into_even_passages() -> None:
    text = " ".join(f"Sentence number {n} says that nothing much happened today." for n in range(100))
    spans = cut_passages(text, count_words(text), 200)
    passages = [text[start:end] for start, end in spans]
    assert all(passage.endswith("today.") and passage.startswith("Sentence") for passage in passages)
    assert all(150 <= count_words(passage) <= 250 for passage in passages)
    assert " ".join(passages) == text


def test_a_text_up_to_one_and_a_half_passages_is_not_cut() -> None:
    text = "  word" * 300
    assert cut_passages(text, 300, 200) == [(0, len(text))]
    assert len(cut_passages(text, 301, 200)) == 2


@pytest.mark.parametrize(
    "text", ["東京の天気は今日も晴れです。" * 200, "東京の天気は今日も晴れです" * 200, "สวัสดีครับผมชื่อ" * 200, "word " * 3000, "a. b! " * 2000]
)
def test_passages_have_about_the_requested_length_in_any_script(text: str) -> None:
    words = count_words(text)
    passages = [text[start:end] for start, end in cut_passages(text, words, 200)]
    assert all(100 <= count_words(passage) <= 300 for passage in passages)
    assert len(passages) == pytest.approx(words / 200, rel=0.3)


@given(
    text=st.lists(st.text(st.sampled_from("ab.!? \n\t。東京ก\u0e34é\u0301"), max_size=40), max_size=60).map("".join),
    words=st.integers(20, 40),
)
def test_passages_contain_every_character_except_white_space_once_and_in_order(text: str, words: int) -> None:
    spans = cut_passages(text, count_words(text), words)
    assert all(start < end for start, end in spans) or text == ""
    assert all(before[1] <= after[0] for before, after in pairwise(spans))
    assert "".join("".join(text[start:end].split()) for start, end in spans) == "".join(text.split())


@given(st.text(st.sampled_from("aB9 .,-’“é É½™ﬁ\u00a0ßİΣς日ا\u0301\u0bcd\ud800한ᄀ") | st.characters(), max_size=60))
def test_the_ascii_path_gives_the_same_words_for_any_text(text: str) -> None:
    padded = "Plain ASCII words, more than nine in ten! " * 20 + text
    for one in (text, padded):
        words = _segment_any_script(one).decode("utf-8", "surrogatepass").split()
        assert segment(one) == words


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("ọ̀rọ̀ Yorùbá ni: हिन्दी में ए", ["ọ̀rọ̀", "Yorùbá", "ni", "हिन्दी", "में", "ए"]),
        ("a b می‌خواهم x2, 7!", ["a", "b", "می‌خواهم", "x2", "7"]),  # a joiner does not cut a word
    ],
)
def test_the_pattern_of_words_keeps_combining_marks_and_joiners(text: str, words: list[str]) -> None:
    for form in ("NFC", "NFD"):
        found = re.findall(word_pattern(), unicodedata.normalize(form, text))
        assert [unicodedata.normalize("NFC", word) for word in found] == words


def test_the_pattern_of_words_matches_each_cluster_of_a_script_without_spaces() -> None:
    assert re.findall(word_pattern(), "中文,GPU很好。 한국어") == ["中", "文", "GPU", "很", "好", "한국어"]
    assert re.findall(word_pattern(), "ที่นี่ ခြင်္သေ့") == ["ที่", "นี่", "ခြ", "င်္သေ့"]


@given(st.text(st.characters(max_codepoint=127)) | st.text())
def test_words_of_plain_ascii_are_those_that_the_expression_finds(text: str) -> None:
    assert split_words(text) == re.findall(word_pattern(), text)


def assert_hashed_like_each(texts: list[str]) -> None:
    """The words of a block have the hashes and sizes of the words of each text alone."""
    encoded = [text.encode() for text in texts]
    block = hash_block(np.frombuffer(b"".join(encoded), np.uint8), np.cumsum([0, *map(len, encoded)], dtype=np.int64))
    assert len(block.offsets) == len(texts) + 1
    for data, (start, end) in zip(encoded, pairwise(block.offsets.tolist()), strict=True):
        words = segment_utf8(data)
        alone = hash_words(np.frombuffer(words, np.uint8), np.array([0, len(words)]))
        assert len(alone.hashes) == len(words.split())
        assert block.hashes[start:end].tolist() == alone.hashes.tolist()
        assert block.sizes[start:end].tolist() == alone.sizes.tolist()


SHORT = st.text(st.one_of(st.characters(exclude_categories=["Cs"]), st.sampled_from("abc DÉ“”ﬁ東㈱½กा́")))
LONG_WORDS = st.one_of(st.integers(0, 70).map(lambda size: "aZ3"[size % 3] * size), st.sampled_from([" ", "_", "é", "ﬁ", "東", "कि"]))


@given(st.lists(SHORT, max_size=12) | st.lists(st.lists(LONG_WORDS).map("".join)))
@example(["\ufdfa" * 3000, "a", "\ufdfa" * 500])  # 3 bytes each, normalised 33, of four words
def test_the_words_of_a_block_of_texts_are_those_of_each_text(texts: list[str]) -> None:
    assert_hashed_like_each(texts)
    assert_hashed_like_each([*texts, " " * 100])  # the kernel reads 64 bytes at once, but not beyond the end of the block
