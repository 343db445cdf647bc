"""The job of `cramlm select` as a script with bm25s: load an index, search all texts of a task, write the passages of the union.

python benchmarks/select_peer.py index CORPUS FOLDER        # CORPUS: JSON lines with the key text
python benchmarks/select_peer.py select FOLDER TRAIN K OUT
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import bm25s
import numpy as np

K1, B = 1.2, 0.75


def texts_of(path: Path) -> list[str]:
    with path.open(encoding="utf-8") as file:
        return [json.loads(line)["text"] for line in file]


def tokenize(texts: list[str], *, ids: bool = True) -> Any:
    return bm25s.tokenize(texts, stopwords=None, token_pattern=r"\w+", show_progress=False, return_ids=ids)


def index(corpus: Path, folder: Path) -> None:
    """Index the passages of a file; their texts are stored with the index."""
    texts = texts_of(corpus)
    retriever = bm25s.BM25(method="lucene", k1=K1, b=B, backend="numba")
    retriever.index(tokenize(texts), show_progress=False)
    retriever.save(str(folder), corpus=texts)


def select(folder: Path, train: Path, k: int, out: Path) -> None:
    """Write the union of the best k passages of every distinct text as JSON lines; a text that no passage matches selects none."""
    retriever = bm25s.BM25.load(str(folder), mmap=True, load_corpus=True)
    queries = tokenize(list(dict.fromkeys(texts_of(train))), ids=False)
    positions, scores = retriever.retrieve(
        queries, corpus=np.arange(retriever.scores["num_docs"]), k=k, show_progress=False, n_threads=1, backend_selection="numba"
    )
    union = np.unique(positions[scores > 0])
    with out.open("w", encoding="utf-8") as file:
        for position in union.tolist():
            passage = retriever.corpus[position]
            file.write(json.dumps({"position": position, "text": passage["text"] if isinstance(passage, dict) else passage}) + "\n")
    print(len(union))


if __name__ == "__main__":
    command, *arguments = sys.argv[1:]
    if command == "index":
        index(Path(arguments[0]), Path(arguments[1]))
    else:
        select(Path(arguments[0]), Path(arguments[1]), int(arguments[2]), Path(arguments[3]))
