"""Predicted and measured peak memory of a run.

    python benchmarks/bench_memory.py --presets tiny mini small

Each preset trains in its own process: both phases of `tlm`, on a synthetic task and corpus, with a budget of operations for about
`--steps` steps of the joint phase. The prediction is that of the plan (plan.json), the measurement VmHWM at the end. Prints a table and, as
the last line, one JSON object.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

GOAL = 0.1
WORDS = 4000


def main() -> None:
    """Measure every preset and print the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--presets", nargs="+", default=["tiny", "mini", "small", "base"])
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--alone", metavar="PRESET", help="run one preset in this process and print its figures (used by the others)")
    arguments = parser.parse_args()
    if arguments.alone:
        print(json.dumps(run(arguments.alone, arguments.steps)))
        return
    from cramlm.cli.console import show_table

    result: dict[str, Any] = {}
    for preset in arguments.presets:
        command = [sys.executable, __file__, "--alone", preset, "--steps", str(arguments.steps)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        result[preset] = json.loads(done.stdout.splitlines()[-1])
    rows = [[name, *(f"{each[key] / 1e6:,.0f}" for key in ("stated", "held")), f"{each['ratio']:.2f}"] for name, each in result.items()]
    show_table("memory of a run, MB", ("preset", "stated", "held", "held / stated"), rows)
    met = all(abs(each["ratio"] - 1) <= GOAL for each in result.values())
    print(json.dumps({"runs": result, "goal": {"within": GOAL, "met": met}}))


def run(preset: str, steps: int) -> dict[str, float]:
    """Run; return predicted and measured bytes."""
    from cramlm.io.machine import peak_memory
    from cramlm.pipeline.run import run as fit
    from cramlm.recipes import PRESETS, tlm, with_preset

    with tempfile.TemporaryDirectory() as folder:
        paths = write_texts(Path(folder))
        encoder = PRESETS[preset]
        parameters = encoder.layers * encoder.hidden * (4 * encoder.hidden + 3 * encoder.intermediate)
        flops = steps * 4096 * 6 * (parameters + 0.2 * encoder.hidden * 8192) / 0.7
        config = with_preset(tlm(train=paths["train"], dev=paths["dev"], corpus=paths["corpus"], budget=f"{flops:.2e}flops"), preset)
        fit(config.model_copy(update={"threads": 1}), out=Path(folder) / "run", store=Path(folder) / "store")
        stated = json.loads((Path(folder) / "run/plan/plan.json").read_bytes())["cost"]["memory"]
    held = peak_memory() or 0
    return {"stated": stated, "held": held, "ratio": held / stated}


def write_texts(folder: Path) -> dict[str, str]:
    """Write a task of two classes and a corpus of synthetic words with Zipf frequencies; deterministic."""
    rng = random.Random(5)
    words = ["".join(rng.choices("abcdefghijklmnoprstuvz", k=rng.randint(2, 9))) for _ in range(WORDS)]
    weights = [1 / (rank + 3) for rank in range(WORDS)]
    paths = {}
    for name, count, length in (("train", 1000, 12), ("dev", 100, 12), ("corpus", 4000, 180)):
        rows = [{"text": " ".join(rng.choices(words, weights, k=length)), "label": f"class {number % 2}"} for number in range(count)]
        path = folder / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
        paths[name] = str(path)
    return paths


if __name__ == "__main__":
    main()
