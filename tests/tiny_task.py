"""A tiny made-up task and corpus for tests that run the whole pipeline: two topics with words of their own, and common ones."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from cramlm import recipes
from cramlm.config.run import RunConfig, apply_overrides, load_config, to_toml
from cramlm.pipeline.run import run
from jsonl import write_jsonl

TOPICS = {
    "sea": ["wave", "ship", "harbour", "sailor", "tide", "anchor", "reef", "gull", "current", "lighthouse", "captain", "island"],
    "hill": ["summit", "ridge", "valley", "climber", "meadow", "glacier", "path", "stone", "cabin", "shepherd", "eagle", "forest"],
}
COMMON = [
    *("the", "a", "of", "and", "in", "to", "was", "is", "on", "with", "for", "near", "by", "at", "from"),
    *("old", "new", "small", "long", "every"),
]


QUICK = (
    "budget=none",
    "tokens_per_second=1e6",
    "threads=1",
    "baseline.enabled=false",
    'teacher.models=["tfidf"]',
    "baseline.c=[3.0]",
    "precision=fp32",
)
"""Settings, as of `--set`, for a run whose models need not be good: no baselines, a small teacher, no measurement of speed."""


def write_task(folder: Path, *, train: int = 40, held_out: int = 16, documents: int = 240) -> dict[str, str]:
    """Files train, dev, test and corpus in `folder`, the same every time; returns their paths."""
    generator = random.Random(5)

    def sentence(topic: str, words: int) -> str:
        return " ".join(generator.choice(TOPICS[topic] if generator.random() < 0.4 else COMMON) for _ in range(words))

    folder.mkdir(parents=True, exist_ok=True)
    paths = {}
    for split, count in (("train", train), ("dev", held_out), ("test", held_out)):
        rows = [{"text": sentence(topic, 14), "label": topic} for _ in range(count // 2) for topic in TOPICS]
        paths[split] = str(write_jsonl(folder / f"{split}.jsonl", rows))
    rows = [{"text": sentence(generator.choice(list(TOPICS)), 60)} for _ in range(documents)]
    paths["corpus"] = str(write_jsonl(folder / "corpus.jsonl", rows))
    return paths


def tiny_config(paths: dict[str, str], **changes: Any) -> dict[str, Any]:
    """Config data of a TLM run over `write_task`'s files that takes a few seconds."""
    common = {"batch_size": 256, "max_length": 32, "checkpoint_every": 5}
    return {
        "seed": 3,
        "threads": 1,
        "tokens_per_second": 10_000.0,
        "baseline": {"c": [1.0, 10.0]},
        "task": {name: paths[name] for name in ("train", "dev", "test")},
        "corpus": {"files": [paths["corpus"]]},
        "retriever": {"kind": "bm25", "top_k": 20},
        "tokenizer": {"vocab_size": 200},
        "encoder": {"layers": 1, "hidden": 32, "heads": 2, "intermediate": 32, "max_positions": 64, "embedding_init": "words"},
        "phases": [
            {
                "name": "joint",
                "steps": 24,
                "external": 2,
                "task": 1,
                "terms": [
                    {"kind": "mlm", "on": "external"},
                    {"kind": "mlm", "on": "task"},
                    {"kind": "classify"},
                    {"kind": "distil", "on": "external"},
                ],
                "dropout": 0.1,
                "keep": "last",
                **common,
            },
            {
                "name": "finetune",
                "steps": 16,
                "terms": [{"kind": "classify"}, {"kind": "distil", "on": "task"}],
                "dropout": 0.1,
                "evaluate_every": 4,
                **common,
            },
        ],
        **changes,
    }


def quick(config: RunConfig, *settings: str) -> RunConfig:
    """Return the config with one thread, one value of C, and these settings, as of `--set`."""
    return load_config(apply_overrides(config.model_dump(mode="json"), ["threads=1", "baseline.c=[3.0]", *settings]))


def task_paths(folder: Path) -> dict[str, str]:
    """Return the paths that `write_task` has written to `folder`."""
    return {name: str(folder / f"{name}.jsonl") for name in ("train", "dev", "test", "corpus")}


def fit_tiny_run(folder: Path) -> None:
    """Write data/, run.toml, store/ and the finished run/ of `tiny_config` to `folder`."""
    config = load_config(tiny_config(write_task(folder / "data")))
    (folder / "run.toml").write_text(to_toml(config), "utf-8")
    run(config, out=folder / "run", store=folder / "store")


def fit_linear_runs(folder: Path) -> None:
    """Write data/, store/ and finished runs of the linear recipes to folders of these names."""
    paths = write_task(folder / "data", documents=60)
    corpus = [paths.pop("corpus")]
    for config in (recipes.static(corpus=corpus, **paths), recipes.bayes(corpus=corpus, **paths), recipes.tfidf(**paths)):
        run(quick(config, "tokenizer.vocab_size=200"), out=folder / config.name, store=folder / "store")
