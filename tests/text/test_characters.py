"""Characters and their marks."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cramlm.text.characters import remove_diacritics


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plain ASCII", "plain ASCII"),
        ("Ọ̀ṣun náà", "Osun naa"),
        ("Äpfel, señor, façade", "Apfel, senor, facade"),
        ("ёлка, άλφα", "елка, αλφα"),
        ("हिन्दी ไทย مَرحبا 한국어", "हिन्दी ไทย مَرحبا 한국어"),
        ("ß æ ø", "ß æ ø"),
    ],
)
def test_marks_of_latin_greek_and_cyrillic_letters_are_removed(text: str, expected: str) -> None:
    for form in ("NFC", "NFD"):
        assert remove_diacritics(unicodedata.normalize(form, text)) == unicodedata.normalize("NFC", expected)


@given(st.text())
def test_removing_twice_changes_nothing_more(text: str) -> None:
    once = remove_diacritics(text)
    assert remove_diacritics(once) == once
