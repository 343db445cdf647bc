"""`make faults`: the figures of the fault list at the size for a release, as a Markdown table and a last line of JSON.

python tests/faults/run.py [R1 R2 ...] [--size ci|release]
python tests/faults/run.py fuzz [--minutes 60] [--out runs/fuzz]
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: children are forked
sys.path.insert(0, str(Path(__file__).parents[1]))

import bad_inputs
import crashes
import damage
import determinism
import fuzzing
import hostile
import io_errors
import lost_ranks
import power_loss
import server_load
import workloads
from figures import Figure
from workloads import World

EVERYTHING = 10**9
FIGURES: dict[str, Callable[[World, Path, bool], list[Figure]]] = {
    "R1": lambda world, scratch, release: [
        crashes.kills(world, scratch, most=500 if release else 50),
        crashes.random_kills(world, scratch, times=50 if release else 10),
    ],
    "R2": lambda world, scratch, release: [
        io_errors.failures(world, scratch, workloads=("index", "select", "train", "finish"), most=EVERYTHING if release else 150)
    ],
    "R3": lambda world, scratch, release: [power_loss.losses(world, scratch, most=5000 if release else 600, rerun_every=50)],
    "R4": lambda world, scratch, release: [
        damage.damages(world, every=64 if release else None, most=None if release else 300),
        damage.store_damages(world),
    ],
    "R5": lambda world, scratch, release: [bad_inputs.bad_inputs(world, scratch)],
    "R6": lambda world, scratch, release: [determinism.repeats(world, scratch, runs=10 if release else 3)],
    "R7": lambda world, scratch, release: [server_load.clients(world, scratch, seconds=600 if release else 30)],
    "R8": lambda world, scratch, release: [
        crashes.stops(world, scratch, times=50 if release else 10),
        server_load.stops(world, scratch, times=50 if release else 10),
    ],
    "R9": lambda world, scratch, release: [crashes.races(world, scratch, times=200 if release else 50)],
    "R10": lambda world, scratch, release: [lost_ranks.losses(scratch, times=20 if release else 3)],
    "R11": lambda world, scratch, release: [hostile.hostile(world, scratch)],
}


def main() -> int:
    """Return 0 if nothing failed."""
    parser = argparse.ArgumentParser(description="the figures of the fault list")
    parser.add_argument("figures", nargs="*", help="R1 R2 ..., default: all; or fuzz")
    parser.add_argument("--size", choices=("ci", "release"), default="release")
    parser.add_argument("--minutes", type=float, default=60.0, help="duration of fuzzing")
    parser.add_argument("--out", type=Path, default=Path("runs/fuzz"), help="folder for the files that violate a rule")
    options = parser.parse_args()
    if options.figures == ["fuzz"]:
        return fuzzing.fuzz(minutes=options.minutes, out=options.out)
    if unknown := set(options.figures) - set(FIGURES):
        parser.error(f"{', '.join(sorted(unknown))}: not one of {', '.join(FIGURES)}, fuzz")
    rows = []
    with workloads.scratch() as folder:
        world = World.build(folder / "world")
        for name in options.figures or FIGURES:
            (folder / name).mkdir()
            for figure in FIGURES[name](world, folder / name, options.size == "release"):
                rows.append(figure)
                print(
                    f"{name}: {figure.trials:,} trials, {len(figure.wrong)} failures, {figure.seconds:.0f} s", file=sys.stderr, flush=True
                )
                print("".join(f"  {failure}\n" for failure in figure.wrong[:20]), file=sys.stderr, end="", flush=True)
    commit = (
        subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False).stdout.strip() or "unknown"
    )
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    print(f"| figure | what | trials | failures | seconds |\n|---|---|---:|---:|---:|  <!-- {date}, {commit} -->")
    for figure in rows:
        notes = f" ({'; '.join(figure.notes)})" if figure.notes else ""
        print(f"| {figure.name} | {figure.what}{notes} | {figure.trials:,} | {len(figure.wrong)} | {figure.seconds:.0f} |")
    print(json.dumps({"date": date, "commit": commit, "size": options.size, "figures": [figure.as_dict() for figure in rows]}))
    return int(any(figure.wrong for figure in rows))


if __name__ == "__main__":
    sys.exit(main())
