from __future__ import annotations

import copy
import json
import pickle
import unicodedata
from pathlib import Path
from typing import Literal

import model_fixtures
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from commands import python
from cramlm.config.run import TokenizerConfig
from cramlm.errors import ArtifactError, DataError
from cramlm.model.tokenizer import Tokenizer, longest_first, train_tokenizer


@pytest.fixture(params=["wordpiece", "bpe"])
def either(request: pytest.FixtureRequest) -> Tokenizer:
    chosen: Tokenizer = request.getfixturevalue("tokenizer" if request.param == "wordpiece" else "bpe_tokenizer")
    return chosen


def pieces(tokenizer: Tokenizer, text: str) -> list[str]:
    return [tokenizer.token(token) for token in tokenizer.encode([text]).ids]


def test_special_tokens_have_the_ids_0_to_4(either: Tokenizer) -> None:
    ids = [either.pad_id, either.unk_id, either.cls_id, either.sep_id, either.mask_id]
    assert ids == [0, 1, 2, 3, 4]
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    assert [either.token(token) for token in ids] == names
    assert [token["content"] for token in json.loads(either.content)["added_tokens"]] == names


def test_training_gives_the_same_file_in_every_process_and_with_any_number_of_threads(tmp_path: Path) -> None:
    script = (
        "import json, sys; from pathlib import Path; from cramlm.config.run import TokenizerConfig\n"
        "from cramlm.model.tokenizer import train_tokenizer\n"
        "for kind in ('wordpiece', 'bpe'):\n"
        "    config = TokenizerConfig(kind=kind, vocab_size=300)\n"
        "    train_tokenizer(json.loads(Path(sys.argv[2]).read_bytes()), config, Path(sys.argv[1], kind))"
    )
    (tmp_path / "texts.json").write_text(json.dumps(model_fixtures.training_texts()), "utf-8")
    contents: dict[str, set[bytes]] = {"wordpiece": set(), "bpe": set()}
    python(script, tmp_path / "one thread", tmp_path / "texts.json", RAYON_NUM_THREADS="1")
    for kind, files in contents.items():
        train_tokenizer(model_fixtures.training_texts(), TokenizerConfig(kind=kind, vocab_size=300), tmp_path / "here" / kind)
        files |= {(tmp_path / name / kind / "tokenizer.json").read_bytes() for name in ("here", "one thread")}
    assert [len(files) for files in contents.values()] == [1, 1]


@pytest.mark.parametrize("kind", ["wordpiece", "bpe"])
def test_the_vocabulary_never_exceeds_its_size_even_with_a_large_alphabet(kind: str, tmp_path: Path) -> None:
    texts = [
        "".join(chr(code) for code in range(0x4E00, 0x4E00 + 1000)),
        "".join(chr(code) + " " for code in range(0xAC00, 0xAC00 + 1000)),
    ] * 2
    train_tokenizer(texts, TokenizerConfig(kind=kind, vocab_size=200), tmp_path)
    assert Tokenizer.load(tmp_path).vocab_size <= 200


def test_training_samples_evenly_from_more_text_than_sample_bytes_and_needs_text(tmp_path: Path) -> None:
    texts = ["alpha beta " * 5] * 500 + ["gamma delta " * 5] * 500
    train_tokenizer(texts, TokenizerConfig(vocab_size=64, sample_bytes=5_000), tmp_path)
    tokenizer = Tokenizer.load(tmp_path)
    assert pieces(tokenizer, "alpha beta gamma delta") == ["alpha", "beta", "gamma", "delta"]
    with pytest.raises(DataError, match="no text to train on"):
        train_tokenizer(["", " \n"], TokenizerConfig(), tmp_path)


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("<<aspirin>> [[", ["<<", "aspirin", ">>", "[["]),  # markers of entities are one token
        ("-----", ["--", "--", "-"]),
        ("NAÏVE Café", ["naïve", "café"]),
        *((word, [unicodedata.normalize("NFC", word)]) for word in ("한국어", "שלום", "مرحبا", "वाक्य")),
    ],
)
def test_a_text_becomes_these_tokens(tokenizer: Tokenizer, text: str, tokens: list[str]) -> None:
    assert pieces(tokenizer, text) == tokens


def test_lower_case_is_optional_and_another_tokenizer_has_another_fingerprint(tokenizer: Tokenizer, bpe_tokenizer: Tokenizer) -> None:
    assert pieces(bpe_tokenizer, "naïve") == ["naïve"]
    assert pieces(bpe_tokenizer, "NAÏVE") != ["naïve"]
    assert tokenizer.fingerprint == Tokenizer(tokenizer.content).fingerprint != bpe_tokenizer.fingerprint


@pytest.mark.parametrize("text", ["[MASK]", "[SEP] [CLS]", "a [MASK] b", "[PAD][UNK]", "<s> </s>", "x[MASK]y"])
def test_literal_special_tokens_in_a_text_are_ordinary_text(either: Tokenizer, text: str) -> None:
    ids = set(either.encode([text]).ids.tolist())
    assert ids.isdisjoint({either.pad_id, either.cls_id, either.sep_id, either.mask_id})


def test_a_pickle_or_a_copy_of_a_tokenizer_gives_the_same_tokens(either: Tokenizer) -> None:
    text = "a [MASK] b [SEP] naïve"
    for copied in (pickle.loads(pickle.dumps(either)), copy.copy(either), copy.deepcopy(either)):
        assert pieces(copied, text) == pieces(either, text)


@pytest.mark.parametrize(
    "text", ["日本語の文章です東京タワー", "中文沒有空格所以每個字", "ภาษาไทยไม่มีช่องว่าง", "ພາສາລາວບໍ່ມີ", "ភាសាខ្មែរមិនមាន", "မြန်မာဘာသာစကား"]
)
def test_scripts_without_spaces_give_at_least_one_token_per_two_characters(either: Tokenizer, text: str) -> None:
    assert len(either.encode([text]).ids) >= len(text) / 2


@given(st.text(max_size=60))
def test_canonically_equal_texts_give_equal_tokens(tokenizer: Tokenizer, text: str) -> None:
    text = "".join(character for character in text if unicodedata.category(character) != "Cn")  # Unicode versions differ on these
    forms = {tuple(tokenizer.encode([unicodedata.normalize(form, text)]).ids.tolist()) for form in ("NFC", "NFD")}
    assert len(forms) == 1


def test_control_characters_and_bidirectional_marks_are_dropped_and_the_text_is_kept(either: Tokenizer) -> None:
    assert pieces(either, "ki\x00na\x07se\u202e river\u2066\ufeff wa\x7fter") == ["kinase", "river", "water"]
    assert pieces(either, "kinase\triver\r\nwater\u0085bank\u00a0old") == ["kinase", "river", "water", "bank", "old"]


def test_a_word_over_100_characters_is_one_unknown_token(either: Tokenizer) -> None:
    assert pieces(either, "water " + "b" * 101 + " bank") == ["water", "[UNK]", "bank"]
    assert pieces(either, "é" * 10_000) == ["[UNK]"]
    assert "[UNK]" not in pieces(either, "ab" * 50)


def test_a_word_of_20_megabytes_is_one_unknown_token_in_bounded_time(either: Tokenizer) -> None:
    """In time that is linear in its length: otherwise this test does not end."""
    assert either.encode(["kinase " + "x" * 20_000_000]).ids.tolist()[1:] == [either.unk_id]


@pytest.mark.parametrize("kind", ["wordpiece", "bpe"])
def test_words_over_100_characters_are_not_trained_on(tmp_path: Path, kind: Literal["wordpiece", "bpe"]) -> None:
    """In time that is linear in their length: otherwise this test does not end."""
    texts = ["river bank, the river", "the bank"] * 3
    vocabularies = []
    for name, more in (("without", []), ("with", ["the " + "ri" * 500_000 + "-bank", "q" * 101])):
        train_tokenizer([*texts, *more], TokenizerConfig(kind=kind, vocab_size=200), tmp_path / name)
        vocabularies.append(set(json.loads((tmp_path / name / "tokenizer.json").read_bytes())["model"]["vocab"]))
    assert vocabularies[1] - vocabularies[0] == {"-", "##-"}


def test_a_lone_surrogate_is_refused_by_name(either: Tokenizer) -> None:
    with pytest.raises(DataError, match=r"text 2: character 4 is the lone surrogate '\\ud83d'"):
        either.encode(["fine", "bad\ud83d"])


def test_encoding_many_texts_equals_encoding_each_alone(either: Tokenizer) -> None:
    texts = [*model_fixtures.sentences(1100, seed=3, longest=3), "", " ", *model_fixtures.SAMPLES]
    together = either.encode(texts)
    assert together.ids.dtype == np.uint16
    for index in (0, 1, 1023, 1024, 1100, 1101, len(texts) - 1):
        assert together[index].tolist() == either.encode([texts[index]]).ids.tolist()


def test_truncated_sequences_have_their_special_tokens_and_at_most_the_length(either: Tokenizer) -> None:
    texts = ["", "water", *model_fixtures.sentences(50, seed=4)]
    plain, result = either.encode(texts), either.sequences(texts, max_length=12, cut="truncate")
    for index in range(len(texts)):
        assert result[index].tolist() == [either.cls_id, *plain[index][:10].tolist(), either.sep_id]
    assert result.source.tolist() == list(range(len(texts)))


@given(st.lists(st.integers(0, 70), min_size=1, max_size=12), st.integers(8, 30))
def test_split_sequences_hold_every_token_once_in_order_and_are_nearly_equal(tokenizer: Tokenizer, words: list[int], room: int) -> None:
    texts = [" ".join(["water", "river", "kinase"][index % 3] for index in range(count)) for count in words]
    plain, result = tokenizer.encode(texts), tokenizer.sequences(texts, max_length=room, cut="split")
    inside = [result[index][1:-1] for index in range(len(result))]
    assert np.concatenate(inside).tolist() == plain.ids.tolist()
    assert sorted(set(result.source.tolist())) == list(range(len(texts)))
    assert np.all(result.source[1:] >= result.source[:-1])
    for text, count in enumerate(words):
        lengths = result.lengths[result.source == text]
        assert lengths.max() <= room
        assert lengths.max() - lengths.min() <= 1
        assert len(lengths) == max(1, -(-count // (room - 2)))


def test_pairs_are_joined_by_separators_and_a_missing_half_makes_a_single_text(tokenizer: Tokenizer) -> None:
    result = tokenizer.sequences(["water", "river"], ["kinase", None], max_length=16, cut="truncate")
    water, kinase, river = tokenizer.encode(["water kinase river"]).ids.tolist()
    assert result[0].tolist() == [2, water, 3, kinase, 3]
    assert result[1].tolist() == [2, river, 3]
    assert len(tokenizer.sequences([], max_length=16, cut="split")) == len(tokenizer.encode([])) == 0
    long = " ".join(["water"] * 40)
    single = tokenizer.sequences([long], max_length=16, cut="truncate")
    assert tokenizer.sequences([long, long], [None, "river"], max_length=16, cut="truncate")[0].tolist() == single[0].tolist()


@given(st.integers(0, 40), st.integers(0, 40), st.integers(5, 40))
def test_the_longer_half_is_cut_first(one: int, two: int, room: int) -> None:
    kept = longest_first(one, two, room)
    assert kept[0] <= one
    assert kept[1] <= two
    assert sum(kept) == min(one + two, room)
    if kept[0] < one and kept[1] < two:
        assert abs(kept[0] - kept[1]) <= 1


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda text: text[: len(text) // 2], "damaged, not a tokenizer"),
        (lambda text: "{}", "damaged, not a tokenizer"),
        (lambda text: text.replace("[MASK]", "<mask>"), "special tokens are"),
        (lambda text: text.replace('"water": ', '"water": 9'), "token ids up to"),
    ],
)
def test_a_damaged_or_foreign_tokenizer_is_refused(tokenizer: Tokenizer, tmp_path: Path, damage: object, message: str) -> None:
    (tmp_path / "tokenizer.json").write_text(damage(tokenizer.content), "utf-8")
    with pytest.raises(ArtifactError, match=message):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(ArtifactError, match=r"tokenizer\.json: missing"):
        Tokenizer.load(tmp_path)


@given(
    texts=st.lists(st.text(alphabet="ab kinase<[ọ̀é漢\n\u00a0😀İ", max_size=60) | st.sampled_from(["", "river bank " * 30]), max_size=4),
    length=st.integers(8, 16),
)
def test_pieces_are_the_sequences_of_split_texts_with_their_texts(either: Tokenizer, texts: list[str], length: int) -> None:
    tokens, parts = either.pieces(texts, max_length=length)
    split = either.sequences(texts, max_length=length, cut="split")
    assert np.array_equal(tokens.ids, split.ids)
    assert np.array_equal(tokens.offsets, split.offsets)
    assert np.array_equal(tokens.source, split.source)
    assert len(parts) == len(tokens)
    for number, part in enumerate(parts):
        assert part in texts[tokens.source[number]]


def test_the_text_of_a_piece_of_whole_words_is_encoded_as_the_piece(either: Tokenizer) -> None:
    text = "the kinase inhibits the receptor of the cell and acts strongly " * 6
    tokens, parts = either.pieces([text, "aspirin"], max_length=12)
    assert len(parts) == len(tokens) > 5
    assert parts[-1] == "aspirin"
    assert max(map(len, either.pieces(["kinase " + "x" * 100_000 + " receptor"], max_length=16)[1])) < 1000  # long words are shortened
    for number, part in enumerate(parts):
        if part == part.strip() and f" {part} " in f" {text} ":  # begins and ends at a word, like a text of its own
            again = either.sequences([part], max_length=64, cut="truncate").ids
            assert either.decode(again) == either.decode(tokens[number])


def test_a_tokenizer_without_diacritics_gives_the_same_tokens_and_spans_of_the_original_text(tmp_path: Path) -> None:
    train_tokenizer(["náà tọ́ka naa toka"] * 3, TokenizerConfig(vocab_size=80), tmp_path, diacritics="remove")
    tokenizer = Tokenizer.load(tmp_path)
    marked, bare = "náà tọ́ka", "naa toka"
    assert tokenizer.encode([marked]).ids.tolist() == tokenizer.encode([bare]).ids.tolist()
    _, spans = tokenizer.encode_with_spans([marked])
    assert spans[0, 0] == 0
    assert spans[-1, 1] == len(marked)
