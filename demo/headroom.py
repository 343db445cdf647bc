"""Scores of simple methods on the demo's task with 100 labels, with all labels, and with the raw text.

    python demo/headroom.py runs/demo/data

All rows are logistic regression: on TF-IDF of the 100 training texts; on TF-IDF of all labelled passages outside the held-out files (an
upper bound: these labels are not part of the task); and on the 100 texts with features (TF-IDF + SVD) fitted to the raw corpus, which shows
whether unlabelled text helps. Variant and C are chosen on dev; test is scored once per row.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import zstandard
from sklearn.decomposition import TruncatedSVD
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import f1_score
from sklearn.pipeline import Pipeline, make_pipeline
from sklearn.preprocessing import Normalizer

C = (1.0, 10.0, 100.0)
SVD_TEXTS = 20_000  # of the corpus, evenly spaced


def read(path: Path) -> tuple[list[str], list[str]]:
    rows = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    return [row["text"] for row in rows], [row["label"] for row in rows]


def read_corpus(folder: Path) -> list[str]:
    texts = []
    for path in sorted(folder.glob("*.jsonl.zst")):
        with zstandard.open(path, "rt", encoding="utf-8") as lines:
            texts += [json.loads(line)["text"] for line in lines]
    return texts


def report(title: str, data: Path, train: str, spaces: dict[str, Pipeline]) -> None:
    """Fit a classifier for every C and fitted feature space, choose on dev, score test once, print a line."""
    texts, labels = read(data / f"{train}.jsonl")
    dev_texts, dev_labels = read(data / "dev.jsonl")
    fitted: list[tuple[float, str, Pipeline, LogisticRegression]] = []
    for name, space in spaces.items():
        features, dev_features = space.transform(texts), space.transform(dev_texts)
        for c in C:
            model = LogisticRegression(C=c, max_iter=3000, class_weight="balanced").fit(features, labels)
            dev = f1_score(dev_labels, model.predict(dev_features), average="macro")
            fitted.append((dev, f"{name}, C = {c:g}", space, model))
    dev, chosen, space, model = max(fitted, key=lambda entry: entry[0])
    test_texts, test_labels = read(data / "test.jsonl")
    test = f1_score(test_labels, model.predict(space.transform(test_texts)), average="macro")
    print(f"{title:32} dev {100 * dev:5.1f}  test {100 * test:5.1f}  {len(texts):5} labels  {chosen}", flush=True)


def main() -> None:
    data = Path(sys.argv[1])
    train, every = read(data / "train.jsonl")[0], read(data / "all_labels.jsonl")[0]
    words = make_pipeline(TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True))
    characters = make_pipeline(TfidfVectorizer(analyzer="char_wb", ngram_range=(2, 5), sublinear_tf=True))
    print("macro-F1")
    report("words", data, "train", {"words 1-2": words.fit(train)})
    report("characters", data, "train", {"characters 2-5": characters.fit(train)})
    report("words, every label", data, "all_labels", {"words 1-2": words.fit(every)})
    corpus = read_corpus(data / "corpus")
    corpus = corpus[:: max(1, len(corpus) // SVD_TEXTS)]
    spaces = {
        f"SVD {size}": make_pipeline(
            TfidfVectorizer(sublinear_tf=True, min_df=3, max_df=0.2, max_features=30_000), TruncatedSVD(size, random_state=0), Normalizer()
        ).fit(corpus)
        for size in (50, 200)
    }
    report("words, SVD of the corpus", data, "train", spaces)


if __name__ == "__main__":
    main()
