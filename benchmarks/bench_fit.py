"""Measure the CPU seconds of each stage of `cramlm fit`, and the share that is not training.

    python benchmarks/bench_fit.py                                  # citation_intent, 100 labels, 2e13 operations, one thread
    python benchmarks/bench_fit.py --task sciie --budget 1e14flops

First, the corpus is read and indexed in a new store, and a fit with a small budget counts its words for `static` and compiles the kernels;
its other stages are removed from the store. Then the fit is measured. At last, second fits run up to their first training step, each in a
new folder: with the same settings, another learning rate (an arm of an ablation), another seed, and another budget (`--second`).

CPU seconds are user + system time of the process and its children. Phases are training; everything else is not: imports, linear models,
plan, selection, soft labels, evaluation, export, report. The row `other` is the time outside of all stages.

Prints tables and, as the last line, one JSON object; writes benchmarks/results/fit.json for the default task and budget.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from cramlm.config.run import CorpusConfig
from cramlm.data.corpus import build_corpus
from cramlm.experiments.grid import subsample
from cramlm.pipeline.run_folder import EVENTS
from cramlm.reporting.record import read_run
from cramlm.retrieval.bm25.index import build_index

RESULTS = Path(__file__).parent / "results" / "fit.json"
DEFAULTS = ("citation_intent", 100, "2e13flops")
SMALL_BUDGET = "1e12flops"
ARM = "phases[0].optimizer.learning_rate=0.002"
ONE_THREAD = os.environ | {"OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}


def main() -> None:
    """Run both fits, print and write the results."""
    arguments = parse_arguments()
    store = arguments.out / "store"
    build_index(build_corpus(CorpusConfig(files=(corpus_of(arguments),)), store), store)
    out = arguments.out / f"{arguments.task}-{arguments.labels}"
    warm = out.with_name("warm")
    shutil.rmtree(warm, ignore_errors=True)  # one that is up to date would compile and measure nothing
    subprocess.run(command(arguments, warm, SMALL_BUDGET), check=True, stdout=subprocess.DEVNULL, env=ONE_THREAD)
    for folder in (out, store / "stages"):
        shutil.rmtree(folder, ignore_errors=True)
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.time()
    subprocess.run(command(arguments, out, arguments.budget), check=True, stdout=subprocess.DEVNULL, env=ONE_THREAD)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    total, run = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, read_run(out)
    phases = sum(run.cpu_seconds[name] for name in run.phases)
    stages = {name: round(seconds, 2) for name, seconds in run.cpu_seconds.items()}
    stages["other"] = round(total - sum(stages.values()), 2)
    first = first_step(out, began)
    second_fits = {
        "same settings, new folder": start_again(arguments, out, arguments.budget),
        f"another arm: {ARM}": start_again(arguments, out, arguments.budget, "--set", ARM),
        "another seed": start_again(arguments, out, arguments.budget, "--seed", "2"),
        f"budget {arguments.second}": start_again(arguments, out, arguments.second),
    }

    print(f"{arguments.task}, {arguments.labels} labels, {arguments.budget}\n\n| stage | CPU s | share |\n|---|---|---|")
    for stage, seconds in stages.items():
        print(f"| {stage} | {seconds:.1f} | {seconds / total:.1%} |")
    print(f"| all | {total:.1f} | {1 - phases / total:.1%} outside of training |")
    print("\n| up to the first training step | CPU s | s |\n|---|---|---|")
    for name, start in {"first fit": first, **second_fits}.items():
        print(f"| {name} | {start['cpu_seconds']:.1f} | {start['seconds']:.1f} |")
    measured = {"benchmark": "fit", "task": arguments.task, "labels": arguments.labels, "budget": arguments.budget}
    measured |= {
        "cpu_seconds": round(total, 2),
        "outside": round(1 - phases / total, 4),
        "stages": stages,
        "first_step": first,
        "second_fits": second_fits,
    }
    if (arguments.task, arguments.labels, arguments.budget) == DEFAULTS:
        RESULTS.write_text(json.dumps(measured, indent=1) + "\n", "utf-8")
    print(json.dumps(measured))


def corpus_of(arguments: argparse.Namespace) -> str:
    """Return the value of --corpus."""
    return f"{arguments.data}/corpus/*.jsonl.zst"


def command(arguments: argparse.Namespace, out: Path, budget: str) -> list[str]:
    """Return the command that a user types."""
    task = arguments.data / "tasks" / arguments.task
    files = {split: str(task / f"{split}.jsonl") for split in ("train", "dev", "test")}
    files["train"] = str(subsample(files, count=arguments.labels, seed=1, folder=arguments.out / "subsamples" / arguments.task)[0])
    options = {f"--{split}": path for split, path in files.items()} | {
        "--corpus": corpus_of(arguments),
        "--budget": budget,
        "--store": str(arguments.out / "store"),
        "--out": str(out),
    }
    return [sys.executable, "-m", "cramlm", "fit", "--set", "threads=1", *(part for option in options.items() for part in option)]


def start_again(arguments: argparse.Namespace, first: Path, budget: str, *options: str) -> dict[str, float]:
    """Run the command with more options in a new folder up to its first training step; return the time until then."""
    out, began = first.with_name("second"), time.time()
    shutil.rmtree(out, ignore_errors=True)
    process = subprocess.Popen([*command(arguments, out, budget), *options], stdout=subprocess.DEVNULL, env=ONE_THREAD)
    while process.poll() is None:
        time.sleep(0.2)
        with suppress(StopIteration, FileNotFoundError):
            found = first_step(out, began)
            process.terminate()
            process.wait()
            return found
    raise SystemExit(f"bench_fit.py: error: the second fit ended with {process.returncode} before its first training step")


def first_step(out: Path, began: float) -> dict[str, float]:
    """Return the CPU seconds and the seconds of a call before its first training step."""
    events = [json.loads(line) for line in (out / EVENTS).read_text("utf-8").splitlines()]
    step = next(event for event in events if event["kind"] == "start" and event["stage"].startswith("phase-"))
    return {"cpu_seconds": step["cpu"], "seconds": round(step["time"] - began, 2)}


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"), help="folder with tasks/NAME/ and corpus/")
    parser.add_argument("--out", type=Path, default=Path("runs/bench-fit"))
    parser.add_argument("--task", default=DEFAULTS[0])
    parser.add_argument("--labels", type=int, default=DEFAULTS[1])
    parser.add_argument("--budget", default=DEFAULTS[2])
    parser.add_argument("--second", default="2.5e13flops", help="another budget of a second fit")
    return parser.parse_args()


if __name__ == "__main__":
    main()
