from __future__ import annotations

import itertools
import json
import random
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import zstandard

import synthetic
from synthetic import FEWEST_WORDS, MOST_WORDS, Bootstrap, Invented, Source, write_corpus

RARE_WORD = "singular"


def source_file(folder: Path) -> Path:
    """600 passages of 60 words from three sources, each with its own words; quotes, backslashes, accents; one rare word in each."""
    rng = random.Random(3)
    rows = []
    for number in range(600):
        name = ("news", "books", "law")[number % 3]
        words = rng.choices([f"{name}{word}" for word in range(30)] + ["the", 'so-called "ọ̀rọ̀"', "back\\slash"], k=59)
        rows.append({"id": f"{name}-{number}", "source": name, "text": "\n".join([*words, f"{RARE_WORD}{number}"])})
    path = folder / "source.jsonl.zst"
    path.write_bytes(zstandard.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))
    return path


@pytest.fixture(params=["bootstrap", "invented"])
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Source:
    return Bootstrap([source_file(tmp_path)], seed=5) if request.param == "bootstrap" else Invented(seed=5)


def read_rows(files: list[Path]) -> list[dict[str, str]]:
    content = b"".join(zstandard.ZstdDecompressor().stream_reader(file.read_bytes()).read() for file in files)
    return [json.loads(line) for line in content.splitlines()]


def test_both_orders_have_the_same_passages_and_a_second_run_gives_the_same_bytes(source: Source, tmp_path: Path) -> None:
    topics = write_corpus(source, 900, tmp_path / "topics", order="topics")
    shuffled = write_corpus(source, 900, tmp_path / "shuffled")
    again = write_corpus(source, 900, tmp_path / "again")
    assert [path.read_bytes() for path in shuffled] == [path.read_bytes() for path in again]
    one, other = read_rows(topics), read_rows(shuffled)
    assert one != other
    assert [row["id"] for row in one] == [f"s{number}" for number in range(900)]
    assert sorted(one, key=lambda row: row["id"]) == sorted(other, key=lambda row: row["id"])
    changes = sum(left["source"] != right["source"] for left, right in itertools.pairwise(one))
    assert changes == len({row["source"] for row in one}) - 1


def test_passages_have_the_stated_length_and_do_not_depend_on_the_batch(source: Source) -> None:
    texts, _ = source.passages(np.arange(2000), 2000)
    words = [len(text.split()) for text in texts]
    assert FEWEST_WORDS <= min(words) < 50
    assert 270 < max(words) <= 2 * MOST_WORDS  # one word of the test's source is two
    assert source.passages(np.array([17, 1999, 3]), 2000)[0] == [texts[17], texts[1999], texts[3]]


def test_a_bootstrapped_passage_comes_from_one_neighbourhood_with_rare_words_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(synthetic, "NEIGHBOURHOOD", 10)
    texts, names = Bootstrap([source_file(tmp_path)], seed=5).passages(np.arange(50), 5_000_000)
    words = Counter(word for text in texts for word in json.loads(b'"' + text + b'"').split())
    assert set(names) == {"books"}  # the first of 5 million
    assert not [word for word in words if word.startswith(("news", "law"))]
    assert not [word for word in words if word.startswith(RARE_WORD)]
    assert len([word for word in words if word.startswith("zq")]) >= 5
    assert words['"ọ̀rọ̀"'] > 0
    assert words["back\\slash"] > 0
