"""Throughput of `Predictor.predict` and of `transformers.pipeline("text-classification")`, on the same model and texts.

    python benchmarks/bench_prediction.py --data ../shared/data/tasks

One process, one thread, CPU time. Both take texts and return labels with probabilities. The pipeline pads each batch to its longest text;
it runs with batches of 1, 8 and 32, texts in order and sorted by length, in fp32 and, where the processor has it, in bf16 (weights loaded
with `dtype="bfloat16"`), and its best result counts. cramlm runs with `precision="auto"` and in fp32. The sides alternate; each figure is
the best of `--rounds`. Labels must agree: in fp32 all but ties, in bf16 the share is printed. The models are untrained, with the sizes of
the presets and a vocabulary of the task's training texts: speed does not depend on the weights. Prints a table and, as the last line, one
JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from cramlm.records import Prediction

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

GOAL = 3.0
SHORT, LONG = "sst2", "newsgroups20"


def main() -> None:
    """Measure every size on short and long texts, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("../shared/data/tasks"), help="folder of tasks")
    parser.add_argument("--tasks", nargs="+", default=[SHORT, LONG])
    parser.add_argument("--presets", nargs="+", default=["tiny", "mini", "small"])
    parser.add_argument("--texts", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    import torch

    from cramlm.cli.console import show_table

    torch.set_num_threads(1)
    rows: list[list[str]] = []
    result: dict[str, Any] = {"texts": arguments.texts, "cells": {}}
    for task in arguments.tasks:
        train, texts = (read_texts(arguments.data / task / f"{split}.jsonl") for split in ("train", "test"))
        for preset in arguments.presets:
            cell = measure(preset, train, texts[: arguments.texts], rounds=arguments.rounds)
            result["cells"][f"{task}/{preset}"] = cell
            ours, peer = cell["cramlm"], cell["pipeline"]
            figures = [ours["auto"], ours["fp32"], *(peer[name]["texts_per_second"] if name in peer else None for name in ("fp32", "bf16"))]
            ratios = [cell[name] for name in ("ratio", "ratio_as_they_come", "ratio_bf16")]
            rates = ["" if each is None else f"{each:,.0f}" for each in figures]
            times = ["" if each is None else f"{each:.2f}x" for each in ratios]
            rows.append([f"{task}, {preset}", f"{cell['tokens']:.0f}", *rates, *times, f"{cell['agree']:.1%}"])
    header = ("texts, model", "tokens", "cramlm auto", "fp32", "pipeline", "in bf16", "ratio", "unsorted", "to bf16", "same labels")
    show_table(f"texts per CPU second, one thread, {arguments.texts} texts", header, rows)
    result["ratio"] = {name: round(cell["ratio"], 2) for name, cell in result["cells"].items()}
    result["goal"] = {"ratio": GOAL, "met": min(result["ratio"].values()) >= GOAL}
    print(json.dumps(result))


def measure(preset: str, train: Sequence[str], texts: Sequence[str], *, rounds: int) -> dict[str, Any]:
    """Both sides on one model and one set of texts."""
    import torch

    from cramlm.inference.predictor import Predictor
    from cramlm.model.model import has_bf16, resolve_device, resolve_precision

    with tempfile.TemporaryDirectory() as folder:
        tokens = export(preset, train, texts, Path(folder))
        predictors = {"fp32": Predictor.load(folder), "auto": Predictor.load(folder, precision="auto")}
        pipelines = {name: load_pipeline(folder, name) for name in (("fp32", "bf16") if has_bf16(torch.device("cpu")) else ("fp32",))}
        by_length = sorted(texts, key=len)
        sides: dict[str, Callable[[], Any]] = {name: partial(each.predict, texts) for name, each in predictors.items()}
        for name, pipe in pipelines.items():
            for order, texts_in_order in (("as they come", texts), ("sorted", by_length)):
                for size in (1, 8, 32):
                    sides[f"{name}, {order}, batches of {size}"] = partial(pipe, texts_in_order, batch_size=size)
        seconds = {name: float("inf") for name in sides}
        for _ in range(rounds):
            for name, run in sides.items():
                began = time.process_time()
                run()
                seconds[name] = min(seconds[name], time.process_time() - began)
        rates = {name: len(texts) / each for name, each in seconds.items()}
        labels = {name: [cast("Prediction", prediction).label for prediction in each.predict(texts)] for name, each in predictors.items()}
        theirs = [max(scores, key=lambda each: each["score"])["label"] for scores in pipelines["fp32"](list(texts), batch_size=1)]
    agree = {name: sum(map(str.__eq__, each, theirs)) / len(texts) for name, each in labels.items()}
    assert min(agree.values()) > 0.99, f"labels differ from the pipeline's: {agree}"
    best = {name: max((each for each in rates if each.startswith(f"{name},")), key=lambda each: rates[each]) for name in pipelines}
    peer: dict[str, Any] = {name: {"texts_per_second": rates[each], "setting": each} for name, each in best.items()}
    return {
        "cramlm": {name: rates[name] for name in predictors},
        "pipeline": peer,
        "ratio": rates["auto"] / peer["fp32"]["texts_per_second"],
        "ratio_as_they_come": rates["auto"] / max(rate for name, rate in rates.items() if name.startswith("fp32, as they come")),
        "ratio_bf16": rates["auto"] / peer["bf16"]["texts_per_second"] if "bf16" in peer else None,
        "agree": agree["auto"],
        "precision": resolve_precision("auto", resolve_device("cpu")),
        "tokens": tokens,
        "all": {name: round(rate, 1) for name, rate in rates.items()},
    }


def export(preset: str, train: Sequence[str], texts: Sequence[str], folder: Path) -> float:
    """Write an untrained classifier of this size; returns the mean tokens of a text."""
    from cramlm.config.head import HeadConfig
    from cramlm.config.run import TokenizerConfig
    from cramlm.model.huggingface.folder import save_classifier
    from cramlm.model.model import ModelSpec, build_model
    from cramlm.model.tokenizer import Tokenizer, train_tokenizer
    from cramlm.recipes import PRESETS

    train_tokenizer(train, TokenizerConfig(), folder)
    tokenizer = Tokenizer.load(folder)
    encoder = PRESETS[preset].model_copy(update={"init_std": 0.1})  # so that predictions differ between texts
    head = HeadConfig(pooling="cls" if encoder.shape == "bert" else "mean")
    labels = ["first", "second", "third", "fourth"]
    model = build_model(ModelSpec(encoder, head, vocab_size=tokenizer.vocab_size, labels=len(labels)), seed=1)
    lengths = tokenizer.sequences(texts, max_length=256, cut="truncate").lengths
    save_classifier(model, tokenizer, folder, labels=labels, max_length=256 if lengths.mean() > 64 else 128)
    return float(lengths.mean())


def load_pipeline(folder: str, dtype: str) -> Callable[..., list[list[dict[str, Any]]]]:
    """transformers' own way, all probabilities."""
    import torch
    import transformers

    logging: Any = transformers.logging
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    kind = torch.bfloat16 if dtype == "bf16" else torch.float32
    pipe: Any = transformers.pipeline("text-classification", model=folder, device="cpu", dtype=kind, top_k=None)

    def run(texts: Sequence[str], *, batch_size: int) -> list[list[dict[str, Any]]]:
        predictions: list[list[dict[str, Any]]] = pipe(list(texts), batch_size=batch_size, truncation=True)
        return predictions

    return run


def read_texts(path: Path) -> list[str]:
    """Return the texts of a task file."""
    with path.open(encoding="utf-8") as file:
        return [json.loads(line)["text"] for line in file]


if __name__ == "__main__":
    main()
