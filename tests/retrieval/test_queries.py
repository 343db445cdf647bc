from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from retrieval_fixtures import invented_texts
from selection_fixtures import write_corpus

from cramlm.data.corpus import Corpus
from cramlm.retrieval.queries import first_words, key_phrases, query_texts, stop_words
from cramlm.text.ngrams import cut_into_tokens

STOP = frozenset(("the", "of", "and", "in", "a", "is", "are"))
# Candidates: river delta | slow river | delta | wide river delta | mud.   Frequency: river 3, delta 3, slow 1, wide 1, mud 1.
# Degree: river 2 + 2 + 3, delta 2 + 1 + 3, slow 2, wide 3, mud 1.   Word scores: river 7/3, delta 2, slow 2, wide 3, mud 1.
# Phrase scores: wide river delta 22/3, river delta 13/3, slow river 13/3, delta 2, mud 1.   Five words: one phrase stays.
RIVER = "The river delta of a slow river, and the delta. A wide river delta is mud"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    rare = invented_texts(100, seed=51, words=(4, 6))
    return write_corpus(
        tmp_path_factory.mktemp("corpus"), [f"ati {text} ni {'ilu' if i % 20 == 0 else ''} {i}" for i, text in enumerate(rare)]
    )


def test_the_best_third_of_the_phrases_are_the_hand_calculated_ones_best_first_and_on_ties_in_the_order_of_the_text() -> None:
    assert key_phrases(RIVER, STOP) == ["wide river delta"]
    more = RIVER + ". Alpha, beta, gamma, epsilon"  # nine words: three phrases
    assert key_phrases(more, STOP) == ["wide river delta", "river delta", "slow river"]


def test_a_phrase_stands_as_in_the_text_and_a_hyphen_inside_a_word_does_not_end_it() -> None:
    assert key_phrases("IL-2 receptor; Mary's hat - blue", STOP) == ["il-2 receptor", "mary's hat"]
    assert key_phrases("機械学習", frozenset("械")) == ["学習"]
    assert key_phrases("ẹ̀kọ́  gíga the ilé", STOP) == ["ẹ̀kọ́ gíga"]


@pytest.mark.parametrize("text", ["", "ati ni", "... --- !", "____", "- ati", "ni -", "'"])
def test_a_text_without_content_words_is_its_own_query(text: str, corpus: Corpus) -> None:
    assert key_phrases(text, {"ati", "ni"}) == []
    assert query_texts([text], corpus, source="phrases", max_words=None) == [text]


def test_stop_words_are_frequent_in_the_corpus_or_the_training_texts(corpus: Corpus) -> None:
    found = stop_words(corpus, ["àti ilé kan", "àti oko kan", "àti odò", "ọba"])
    assert {"ati", "ni", "àti"} <= found
    assert not {"ilu", "99", "kan", "ilé"} & found  # in two texts: too few to say


def test_queries_keep_the_order_of_the_texts_and_repeated_ones(corpus: Corpus) -> None:
    texts = [RIVER, "other words here", RIVER]
    queries = query_texts(texts, corpus, source="phrases", max_words=None)
    assert len(queries) == 3
    assert queries[0] == queries[2] != queries[1]
    assert query_texts(texts, corpus, source="text", max_words=None) == texts


def test_max_words_truncates_texts_and_drops_whole_phrases_where_a_text_has_some(corpus: Corpus) -> None:
    assert query_texts(["One, two (three) four"], corpus, source="text", max_words=3) == ["One, two (three)"]
    assert query_texts(["One, two (three) four"], corpus, source="text", max_words=4) == ["One, two (three) four"]
    text = "wide river delta. alpha beta. gamma. epsilon. zeta. theta. iota"
    assert query_texts([text, "x"], corpus, source="phrases", max_words=None)[0] == "wide river delta, alpha beta, gamma"
    assert query_texts([text, "x"], corpus, source="phrases", max_words=5)[0] == "wide river delta, alpha beta"
    assert query_texts([text, "x"], corpus, source="phrases", max_words=1)[0] == "wide river delta"  # one stays, however long
    for most, query in ((3, "Ati, ni ati"), (6, "Ati, ni ati ni. Ati ni!")):
        assert query_texts(["Ati, ni ati ni. Ati ni!"], corpus, source="phrases", max_words=most) == [query]


@given(st.text(st.characters(codec="utf-8"), max_size=60), st.integers(1, 5))
def test_tokens_hold_the_whole_text_and_its_first_words_are_its_beginning(text: str, most: int) -> None:
    tokens = cut_into_tokens(text)
    whole = "".join(token.text + token.space for token in tokens)
    beginning = first_words(text, most)
    if sum(token.is_word for token in tokens) > most:
        assert whole.startswith(beginning)
        assert sum(token.is_word for token in cut_into_tokens(beginning)) == most
    else:
        assert beginning == text
