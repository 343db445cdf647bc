"""The demo: compare the recipe tlm with labels-only training and two linear models, on documentation that is on every machine.

    python demo/build_task.py --out runs/demo/data && python demo/run.py

The task: which library does a passage of documentation describe? About 100 passages have labels; all other documentation is raw text.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import cramlm
from cramlm.cli.console import console_events, show_table, summary_rows

HEADER = ("model", "dev macro-F1", "test accuracy", "test micro-F1", "test macro-F1", "minutes")
INTRODUCTIONS = {
    "tlm": "retrieves raw text that is similar to the labelled texts and trains a small encoder on both",
    "labels-only": "trains the same encoder on the labelled texts alone",
}


def main() -> None:
    """Run both recipes (a finished run is not repeated) and print one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("runs/demo/data"))
    parser.add_argument("--out", type=Path, default=Path("runs/demo"))
    parser.add_argument("--budget", default="110s", help="wall-clock time of the recipe tlm")
    parser.add_argument("--seed", type=int, default=13)
    arguments = parser.parse_args()
    train, dev, test = (str(arguments.data / f"{split}.jsonl") for split in ("train", "dev", "test"))
    task = {"train": train, "dev": dev, "test": test, "seed": arguments.seed}
    # The same budget gives the same encoder; labels-only ends earlier, after 60 passes over its labels.
    recipes = [
        cramlm.recipes.tlm(corpus=str(arguments.data / "corpus"), budget=arguments.budget, **task),
        cramlm.recipes.labels_only(budget=arguments.budget, **task),
    ]
    rows: dict[str, list[str]] = {}
    for config in recipes:
        print(f"\nrecipe {config.name}: {INTRODUCTIONS[config.name]}", flush=True)
        began = time.monotonic()
        with console_events() as emit:
            finished = cramlm.fit(config, out=arguments.out / config.name, overwrite=True, store=arguments.out / "store", emit=emit)
        minutes = (time.monotonic() - began) / 60
        for name, *cells in summary_rows(finished.scores):
            own = f"{minutes:.1f}" if name == config.name else ""
            rows.setdefault(name, [name, *cells, own])
        if config.name == "tlm":
            verdict, model = finished.scores["verdict"], finished.export
    print()
    show_table("Which library does a passage describe? (about 100 labels; scores in percent)", HEADER, list(rows.values()))
    print("tfidf, bayes, static: linear models on n-grams; naive Bayes, also on retrieved text; n-grams with word vectors of raw text.")
    print("combined: the weighted average of the calibrated log-probabilities of the encoder (tlm) and the linear models.")
    print(f"Verdict of the run: {verdict}")
    print(f"Report: {arguments.out / 'tlm' / 'report.html'}")
    print(f"Model (Hugging Face folder): {model}")
    print(f'Try it: echo "Return the sum of the array elements over the given axis." | .venv/bin/cramlm predict {model} -')


if __name__ == "__main__":
    main()
