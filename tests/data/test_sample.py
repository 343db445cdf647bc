"""The data of `cramlm sample-data`: equal for equal seeds, and raw text helps a model that has few labels."""

from __future__ import annotations

import csv
import json
from pathlib import Path

from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression

from commands import cramlm, error_line, succeed
from cramlm.data.sample import LABELLED, PASSAGES, SPLITS, write_sample


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_equal_seeds_write_equal_files_and_other_seeds_other_texts(tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        write_sample(tmp_path / name, seed=seed, passages=20)
    for file in ("train.csv", "dev.csv", "test.csv", "corpus.jsonl"):
        first, second, third = ((tmp_path / name / file).read_bytes() for name in "abc")
        assert first == second != third


def test_the_command_writes_balanced_distinct_texts_and_a_corpus(tmp_path: Path) -> None:
    succeed("sample-data", tmp_path / "data")
    succeed("sample-data", tmp_path / "data")
    texts = []
    for split, count in SPLITS.items():
        rows = rows_of(tmp_path / f"data/{split}.csv")
        labels = [row["label"] for row in rows]
        assert {label: labels.count(label) for label in labels} == dict.fromkeys(LABELLED, count // len(LABELLED))
        texts += [row["text"] for row in rows]
    assert len(set(texts)) == sum(SPLITS.values())
    lines = (tmp_path / "data/corpus.jsonl").read_text("utf-8").splitlines()
    assert len({json.loads(line)["id"] for line in lines}) == PASSAGES


def test_labels_alone_leave_room_for_retrieved_text(tmp_path: Path) -> None:
    """TF-IDF is above chance (25 %) and far from solving the task: most words of a hobby are not in the training texts."""
    write_sample(tmp_path, passages=1)
    train, test = rows_of(tmp_path / "train.csv"), rows_of(tmp_path / "test.csv")
    vectorizer = TfidfVectorizer()
    model = LogisticRegression(C=10).fit(vectorizer.fit_transform([row["text"] for row in train]), [row["label"] for row in train])
    accuracy = model.score(vectorizer.transform([row["text"] for row in test]), [row["label"] for row in test])
    assert 0.35 < accuracy < 0.75


def test_a_file_in_the_place_of_the_folder_is_named_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("mine", "utf-8")
    assert error_line(cramlm("sample-data", tmp_path / "data"), 4).endswith(
        "a file is where a folder is needed; choose another path, or remove the file"
    )
    assert (tmp_path / "data").read_text("utf-8") == "mine"


def test_files_of_the_user_are_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "test.csv").write_text("text,label\nmine,a\n", "utf-8")
    assert error_line(cramlm("sample-data", tmp_path), 2).startswith(f"{tmp_path}/test.csv: exists with another content")
    assert [path.name for path in tmp_path.iterdir()] == ["test.csv"]
    assert (tmp_path / "test.csv").read_text("utf-8") == "text,label\nmine,a\n"
