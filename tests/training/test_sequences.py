"""Words and collocations of a pool."""

from __future__ import annotations

import numpy as np
import pytest
from training_fixtures import make_phase

from cramlm.training.batching import Batches
from cramlm.training.masking import SpecialIds
from cramlm.training.sequences import TokenPool, with_word_begins

SPECIALS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def pool_of(texts: list[str], vocabulary: list[str]) -> TokenPool:
    """Texts of vocabulary entries separated by blanks, each between [CLS] and [SEP]."""
    rows = [[vocabulary.index(token) for token in ["[CLS]", *text.split(), "[SEP]"]] for text in texts]
    offsets = np.concatenate([[0], np.cumsum([len(row) for row in rows])]).astype(np.int64)
    return TokenPool(np.concatenate(rows).astype(np.uint16), offsets, np.full(len(rows), -1, dtype=np.int64))


def special_ids(vocabulary: list[str]) -> SpecialIds:
    return SpecialIds(pad=0, unk=1, cls=2, sep=3, mask=4, vocab_size=len(vocabulary))


def units(pool: TokenPool, vocabulary: list[str]) -> list[list[str]]:
    """The units of each sequence, tokens joined."""
    joined = []
    for number in range(len(pool)):
        tokens = [vocabulary[token] for token in pool.sequence(number)]
        starts = np.flatnonzero(pool.begins[pool.offsets[number] : pool.offsets[number + 1]])
        joined.append([" ".join(piece) for piece in np.split(np.array(tokens, dtype=object), starts[1:])])
    return joined


@pytest.mark.parametrize(
    ("vocabulary", "text", "words"),
    [
        (["play", "##ing", "chess", "-", "##"], "play ##ing - ## chess", ["play ##ing", "-", "##", "chess"]),
        (["Ġplay", "ing", "Ġchess", "-", "Ġ"], "Ġplay ing - Ġchess", ["Ġplay ing", "-", "Ġchess"]),
        (["▁play", "ing", "▁chess", "-", "▁"], "▁play ing - ▁chess", ["▁play ing", "-", "▁chess"]),
        (["東", "京", "play"], "東 京 play", ["東", "京", "play"]),
    ],
)
def test_words_begin_by_the_conventions_of_the_vocabulary(vocabulary: list[str], text: str, words: list[str]) -> None:
    vocabulary = [*SPECIALS, *vocabulary]
    phase = make_phase(masking={"kind": "whole-word"})
    _, task = with_word_begins(phase, None, pool_of([text], vocabulary), vocabulary, special_ids(vocabulary))
    assert units(task, vocabulary) == [["[CLS]", *words, "[SEP]"]]


def test_phrases_are_words_that_occur_together_more_often_than_by_chance() -> None:
    rng = np.random.default_rng(0)
    vocabulary = [*SPECIALS, "new", "##er", "york", "city", ".", *[f"w{number}" for number in range(40)]]
    fillers = vocabulary[10:]

    def text(phrase: str) -> str:
        before, after = (" ".join(rng.choice(fillers, 6)) for _ in range(2))
        return f"{before} {phrase} {after} ."

    external = pool_of([text("new york city") for _ in range(20)] + [text("york city . new ##er") for _ in range(3)], vocabulary)
    task = pool_of([text("new ##er york")], vocabulary)
    phase = make_phase(masking={"kind": "phrase"})
    phrases = [units(pool, vocabulary) for pool in with_word_begins(phase, external, task, vocabulary, special_ids(vocabulary))]
    assert all("new york city" in sentence for sentence in phrases[0][:20])
    assert {"york city", ".", "new ##er"} <= set(phrases[0][20])
    assert {"new ##er", "york"} <= set(phrases[1][0])
    assert sum(len(unit.split()) > 1 for sentence in phrases[0] for unit in sentence) < 30  # fillers meet by chance


def test_masks_of_phrases_hide_them_whole_in_packed_rows() -> None:
    vocabulary = [*SPECIALS, "a", "b", "c", "d", "e"]
    phase = make_phase(external=1, task=0, masking={"kind": "phrase", "rate": 0.3}, batch_size=64)
    pool = pool_of(["a b c d e c", "c d e", "e c a b d", "d c e a b", "a b e c d"] * 4, vocabulary)
    special = special_ids(vocabulary)
    external, _ = with_word_begins(phase, pool, None, vocabulary, special)
    batches = Batches(phase, external, None, seed=1, phase_index=0, special=special)
    seen = 0
    for step in range(20):
        batch = batches.batch(step)
        flat = batch.token_ids.ravel().copy()
        flat[batch.masked] = batch.mlm_labels
        hidden = np.isin(np.arange(len(flat)), batch.masked)
        first = np.flatnonzero(flat == vocabulary.index("a"))
        assert (hidden[first] == hidden[first + 1]).all()  # a b
        seen += int(hidden[first].sum())
    assert seen > 0
