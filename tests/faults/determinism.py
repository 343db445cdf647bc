"""R6: equal runs give equal bytes, with any number of processes."""

from __future__ import annotations

import functools
import json
from pathlib import Path

from figures import Figure, measured
from workloads import World, results, run_child

from cramlm.config.retriever import Bm25Config
from cramlm.config.run import CorpusConfig
from cramlm.data.corpus import build_corpus
from cramlm.retrieval.bm25.index import build_index
from cramlm.retrieval.retrievers import RetrievalContext
from cramlm.retrieval.selection import select_documents


@measured("R6", "whole runs with the same bytes; index and selection by 1, 2, 4 processes")
def repeats(figure: Figure, world: World, scratch: Path, *, runs: int) -> None:
    expected: dict[str, str] = {}
    for number in range(runs):
        with figure.trial(scratch) as folder:
            folder.mkdir()
            figure.check(run_child(functools.partial(world.fit_anew, folder)) == 0, f"run {number} fails")
            made = results(folder)
            expected = expected or made
            figure.check(made == expected, f"run {number} differs in {[name for name in made if made[name] != expected.get(name)]}")
    files = _split(world.folder / "data/corpus.jsonl", scratch / "corpus")
    config = CorpusConfig(files=(str(files),))
    expected = {}
    for workers in (1, 2, 4):
        folder = scratch / f"{workers}-workers"
        code = run_child(functools.partial(_build, world, config, folder, workers))
        figure.check(code == 0, f"{workers} workers: exit {code}")
        expected = expected or results(folder)
        figure.check(results(folder) == expected, f"{workers} workers: another index or selection")
        figure.trials += 1


def _build(world: World, config: CorpusConfig, folder: Path, workers: int) -> None:
    corpus = build_corpus(config, folder, workers=workers, part_bytes=2000)
    index = build_index(corpus, folder, workers=workers)
    select_documents(
        Bm25Config(top_k=20), corpus, world.task, out=folder / "selection", context=RetrievalContext(corpus.store, 3, index, workers)
    )


def _split(file: Path, folder: Path) -> Path:
    folder.mkdir()
    lines = file.read_text("utf-8").splitlines()
    for number in range(6):
        rows = [json.loads(line) for line in lines[number::6]]
        (folder / f"{number}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return folder
