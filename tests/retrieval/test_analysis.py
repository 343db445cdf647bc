from __future__ import annotations

import unicodedata

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cramlm.errors import UsageError
from cramlm.records import Diacritics
from cramlm.retrieval.bm25 import analysis, analysis_kernels
from cramlm.retrieval.bm25.analysis import ENGLISH_STOP_WORDS, Analyzer, Vocabulary, analyze
from cramlm.retrieval.bm25.terms import MAX_TERM_BYTES
from cramlm.storage.arrays import joined


def vocabulary_numbers(vocabulary: Vocabulary, text: str) -> list[int]:
    return vocabulary.tokenize(*joined([text.encode()]))[0].tolist()


def compiled(texts: list[str], vocabulary: Vocabulary | None = None) -> list[list[str]]:
    """Terms of each text by way of the kernel; by default with a new vocabulary."""
    encoded = [text.encode() for text in texts]
    vocabulary = Vocabulary() if vocabulary is None else vocabulary
    offsets = np.cumsum([0, *map(len, encoded)], dtype=np.int64)
    tokens, starts = vocabulary.tokenize(np.frombuffer(b"".join(encoded), np.uint8), offsets)
    content, ends = vocabulary.term_bytes.tobytes(), vocabulary.term_offsets
    terms = [content[ends[term] : ends[term + 1]].decode() for term in range(len(vocabulary))]
    assert len(set(terms)) == len(terms)
    return [[terms[token] for token in tokens[starts[i] : starts[i + 1]]] for i in range(len(texts))]


@pytest.mark.parametrize(
    ("text", "terms"),
    [
        ("", []),
        (" \n\t.,;!? — … ", []),
        ("The << Gene >> binds [[ TP53 ]], it's 3.5", ["the", "gene", "binds", "tp53", "it", "s", "3", "5"]),
        ("under_score e-mail a/b", ["under", "score", "e", "mail", "a", "b"]),
        ("Straße ÅNGSTRÖM Ⅳ ﬁne x²", ["strasse", "ångström", "iv", "fine", "x2"]),
        ("Ẹ̀kọ́ Yorùbá ń kọ́", ["ẹ̀kọ́", "yorùbá", "ń", "kọ́"]),  # marks that have no composed letter stay in the word
        ("हिन्दी में", ["हिन्दी", "में"]),
        ("Привет, мир", ["привет", "мир"]),
        ("مرحبا بالعالم", ["مرحبا", "بالعالم"]),
        ("日本語", ["日本", "本語"]),
        ("日", ["日"]),
        ("ｶﾞﾗｽ ガラス", ["ガラ", "ラス", "ガラ", "ラス"]),  # halfwidth kana
        ("GPT模型v2", ["gpt", "模型", "v2"]),
        ("한국어를", ["한국", "국어", "어를"]),
        ("ภาษาไทย", ["ภาษ", "าษา", "ษาไ", "าไท", "ไทย"]),
        ("ไท ก", ["ไท", "ก"]),
        ("co\u00adop\u200ber\u200date", ["coop", "erate"]),  # soft hyphen and joiner vanish, a zero-width space parts
        ("❤️ 👩‍👩‍👧 1️⃣", ["1"]),
        ("\u202eabc\u202c \x00d", ["abc", "d"]),
    ],
)
def test_a_text_becomes_these_terms(text: str, terms: list[str]) -> None:
    assert analyze(text) == terms
    assert compiled([text]) == [terms]


_difficult = (
    "".join(map(chr, sorted(analysis._second_characters()))) + "éß…ﬁ²İıſΣςẞŉΐǰ\u0345ｶﾞ가각ᄀ\u200b\u200c\u200d\u00ad\ufe0f\u0e33\u0eb3\u3099"
)
_characters = st.one_of(
    st.characters(exclude_categories=["Cs"]),
    st.sampled_from(_difficult),
    st.characters(min_codepoint=0x300, max_codepoint=0x36F),
    st.characters(min_codepoint=0x0E00, max_codepoint=0x0EFF),
    st.characters(min_codepoint=0x1000, max_codepoint=0x11FF),
    st.characters(min_codepoint=0x3000, max_codepoint=0x33FF),
    st.sampled_from("aB1 ,中文漢"),
)


@given(st.lists(st.text(_characters, max_size=12), min_size=1, max_size=12))
def test_the_kernel_finds_the_terms_of_the_definition(texts: list[str]) -> None:
    assert compiled(texts) == [analyze(text) for text in texts]


def test_every_single_character_is_treated_as_the_definition_says() -> None:
    texts = [chr(code) for code in range(0x110000) if unicodedata.category(chr(code)) not in ("Cn", "Co", "Cs")]
    texts = [text for text in texts if not 0x4E10 < ord(text) < 0x9FF0 and not 0xAC10 < ord(text) < 0xD790 and ord(text) < 0x20100]
    assert compiled(texts) == [analyze(text) for text in texts]


@given(st.text(_characters, max_size=20))
def test_texts_equal_under_nfc_have_equal_terms(text: str) -> None:
    assert analyze(unicodedata.normalize("NFD", text)) == analyze(unicodedata.normalize("NFC", text))


@pytest.mark.parametrize("text", ["漢字仮名交じり文の例", "ภาษาไทยไม่มีช่องว่าง", "ភាសាខ្មែរគ្មានចន្លោះ", "မြန်မာဘာသာစကား", "ພາສາລາວບໍ່ມີ"])
def test_scripts_without_spaces_give_a_term_per_two_characters_or_more(text: str) -> None:
    assert len(analyze(text)) >= len(text) / 2


@pytest.mark.parametrize("character", ["a", "é", "文", "ก", "ẹ́"])
def test_an_endless_word_stays_bounded(character: str) -> None:
    terms = analyze(character * 5000)
    assert max(len(term.encode()) for term in terms) < MAX_TERM_BYTES + 4
    assert compiled([character * 5000]) == [terms]
    assert len(set(terms)) <= 4


def test_a_long_term_is_cut_before_the_character_at_its_64th_byte() -> None:
    assert analyze("a" * 65) == ["a" * 64, "a"]
    assert analyze("a" * 63 + "é" + "b") == ["a" * 63 + "é", "b"]


def test_terms_whose_hash_keys_collide_stay_apart() -> None:
    vocabulary = Vocabulary()
    text = np.frombuffer(b"elephantine tiger", np.uint8)
    first, _ = vocabulary.tokenize(text, np.array([0, 17], np.int64))
    # The long word's key now belongs to other bytes, as if another word had hashed to it.
    vocabulary._bytes[0] = ord("x")
    second, _ = vocabulary.tokenize(text, np.array([0, 17], np.int64))
    assert second[0] != first[0]
    assert second[1] == first[1]
    assert vocabulary.keys()[first[0]] == vocabulary.keys()[second[0]]


def test_no_character_expands_beyond_the_buffer_of_the_kernel() -> None:
    codes, _ = analysis.character_table()
    for code in np.flatnonzero(codes & analysis_kernels.FOLDS).tolist():
        for text in (chr(code) * 4, f"{chr(code)} " * 4, f"{chr(code)}文" * 4):
            written = sum(len(term.encode()) + 1 for term in analyze(text))
            assert written <= analysis_kernels.CANONICAL_GROWTH * len(text.encode())


@pytest.mark.parametrize("character", ["\u3300", "\ufdfa", "㍿", "㋿", "𠀀", "ก"])
def test_long_runs_of_expanding_characters_fit_the_scratch_buffer(character: str) -> None:
    assert compiled([character * 4000]) == [analyze(character * 4000)]


def test_the_english_stop_words_are_those_of_bm25s_and_lucene() -> None:
    stopwords = pytest.importorskip("bm25s.stopwords", reason="bm25s is missing: pip install 'cramlm[bench]'")
    assert set(ENGLISH_STOP_WORDS) == set(stopwords.STOPWORDS_EN)


def test_stop_words_are_left_out_in_any_spelling() -> None:
    analyzer = Analyzer.of(["The", "don't", "ＯＦ"])
    assert analyzer.stop_words == ("don", "of", "t", "the")
    assert analyze("THE ship of the line; don’t go", analyzer) == ["ship", "line", "go"]
    assert Analyzer.of("english").stop_words == tuple(sorted(ENGLISH_STOP_WORDS))


@given(st.lists(st.text(st.sampled_from("aethsxé日本กขค ́'゛i"), max_size=40), max_size=6), st.sampled_from(["none", "english", "porter"]))
def test_the_vocabulary_gives_the_terms_of_the_definition_with_stop_words_and_stems(texts: list[str], stemmer: str) -> None:
    if stemmer != "none":
        pytest.importorskip("Stemmer", reason="PyStemmer is missing: pip install 'cramlm[search]'")
    analyzer = Analyzer.of(["the", "a", "日本"], stemmer)
    vocabulary = Vocabulary(analyzer)
    for _ in range(2):  # the second time, all words are known
        assert compiled(texts, vocabulary) == [analyze(text, analyzer) for text in texts]


@given(
    st.lists(st.text(st.sampled_from("aetxÉé日本 '"), max_size=12), max_size=12), st.integers(0, 12), st.sampled_from(["keep", "remove"])
)
def test_vocabularies_of_two_spans_of_text_make_that_of_the_whole(texts: list[str], cut: int, diacritics: Diacritics) -> None:
    whole, first, second = (Vocabulary(Analyzer(diacritics=diacritics)) for _ in range(3))
    expected = compiled(texts, whole)
    found = compiled(texts[:cut], first)
    span = [vocabulary_numbers(second, text) for text in texts[cut:]]
    number = first.add(second)
    assert found + [[first.term(number[each]) for each in numbers] for numbers in span] == expected
    assert [first.term(each) for each in range(len(first))] == [whole.term(each) for each in range(len(whole))]


def test_stems_are_those_of_snowball() -> None:
    stemmer = pytest.importorskip("Stemmer", reason="PyStemmer is missing: pip install 'cramlm[search]'")
    words = ["retrieval", "retrieving", "connections", "generously", "relational"]
    assert analyze(" ".join(words), Analyzer.of(stemmer="english")) == stemmer.Stemmer("english").stemWords(words)


def test_an_unknown_list_or_stemmer_is_refused() -> None:
    with pytest.raises(UsageError, match="no list of stop words 'klingon'; use none or english"):
        Analyzer.of("klingon")
    pytest.importorskip("Stemmer", reason="PyStemmer is missing: pip install 'cramlm[search]'")
    with pytest.raises(UsageError, match=r"no stemmer 'klingon'; use none, .*english.*porter"):
        Analyzer.of(stemmer="klingon")


def test_without_diacritics_terms_lose_the_marks_of_latin_greek_and_cyrillic_and_keep_those_of_other_scripts() -> None:
    bare = Analyzer(diacritics="remove")
    assert analyze("Ẹ̀kọ́ Yorùbá ń Ärger ё άλφα हिन्दी 한국", bare) == ["eko", "yoruba", "n", "arger", "е", "αλφα", "हिन्दी", "한국"]
    assert bare.name != Analyzer().name
    assert Analyzer.from_dict(bare.as_dict()) == bare


@given(st.lists(st.text(), max_size=5))
def test_the_kernel_removes_diacritics_as_the_definition_does(texts: list[str]) -> None:
    bare = Analyzer(diacritics="remove")
    assert compiled(texts, Vocabulary(bare)) == [analyze(text, bare) for text in texts]
