"""Held-out loss over model size and text, for a fixed number of operations, and the size that a scaling law chooses.

    python benchmarks/bench_scaling.py --data ../shared/data --budgets 1e13 3e13 1e14
    python benchmarks/bench_scaling.py --budgets 1e15 --sizes 4x256 6x384 12x768      # hours; further rows of the same table

Each run trains the joint phase of `tlm` without its teacher on the BM25 selection for ChemProt and on ChemProt's training texts, on one
thread, for as many steps as the operations allow (planning/speed.py counts them for a token of each size). The loss is in bits per masked
word of 300 held-out passages (bench_learning.py). The law is that of Hoffmann et al. 2022, bits = E + A / N^a + B / D^b, where D are the
tokens read and N the operations of a token over 6; the tokens of a budget C are C / (6 N). Resumable: a finished run is read from --out,
and a stopped one goes on from its checkpoint.

Prints a table, the law, and for each budget what every size would lose; writes benchmarks/results/scaling.json.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.optimize import least_squares

from bench_learning import (
    Arm,
    add_text_options,
    batches_of,
    bits_per_word,
    held_out_batches,
    parse_with_texts,
    place_embeddings,
    read_texts,
    tokenizer_for,
)
from cramlm import recipes
from cramlm.config.head import HeadConfig
from cramlm.config.phase import PhaseConfig
from cramlm.config.run import EncoderConfig
from cramlm.model.model import ModelSpec, build_model, has_bf16
from cramlm.planning.budget import in_rows
from cramlm.planning.speed import TrainingSetup, count_flops
from cramlm.recipes.recipe import for_budget, without_teacher
from cramlm.training.loop import TrainingJob, train_phase

RESULTS = Path(__file__).parent / "results" / "scaling.json"
VOCABULARY = 8192
ROWS = 128
HEAD_WIDTH = 64
FORECAST = (1e13, 3e13, 1e14, 3e14, 1e15, 3e15, 1e16)


@dataclass(frozen=True)
class Law:
    """bits = floor + size_factor / N ** size_power + text_factor / D ** text_power."""

    floor: float
    size_factor: float
    size_power: float
    text_factor: float
    text_power: float

    def bits(self, operations_per_token: float, tokens: float) -> float:
        """Return the loss of a model with so many operations a token, after so many tokens."""
        size = operations_per_token / 6
        return float(self.floor + self.size_factor / size**self.size_power + self.text_factor / tokens**self.text_power)


def main() -> None:
    """Run what is missing, fit the law, print and write."""
    arguments = parse_arguments()
    torch.set_num_threads(1)
    texts = read_texts(arguments)
    tokenizer = tokenizer_for(arguments, texts, VOCABULARY)
    held_out = held_out_batches(texts.held_out, tokenizer)
    for budget in arguments.budgets:
        for size in arguments.sizes:
            run(arguments, arm_of(size, budget), budget, texts, tokenizer, held_out)
    rows = [json.loads(path.read_bytes()) for path in arguments.out.glob("run-*/run.json")]
    rows.sort(key=lambda row: (row["budget"], row["operations_per_token"]))
    law = fit_law(rows)
    errors = left_out_errors(rows)
    print_rows(rows, law)
    print_choices(law, {row["size"]: row["operations_per_token"] for row in rows})
    result = {"benchmark": "scaling", "rows": rows, "law": None if law is None else vars(law), "left_out_errors": errors}
    RESULTS.write_text(json.dumps(result, indent=1) + "\n", "utf-8")
    print(json.dumps(result))


def arm_of(size: str, budget: float) -> Arm:
    """Return the joint phase for this size, `LAYERSxHIDDEN`, with the batch that the planner gives the budget."""
    layers, hidden = map(int, size.split("x"))
    shape = {"layers": layers, "hidden": hidden, "heads": hidden // HEAD_WIDTH, "intermediate": 2 * hidden}
    encoder = EncoderConfig.model_validate(recipes.PRESETS["mini"].model_dump(mode="json") | shape)
    phase = without_teacher(recipes.joint_phase()).model_copy(update={"max_length": ROWS, "dropout": 0.0})
    return Arm(size, encoder, HeadConfig(), VOCABULARY, for_budget(phase, budget), 0.0)


def run(arguments: argparse.Namespace, arm: Arm, budget: float, texts: Any, tokenizer: Any, held_out: tuple[Any, int]) -> None:
    """Train one size with one budget, unless its result is there."""
    folder = arguments.out / f"run-{budget:.0e}-{arm.name}-{arguments.seed}"
    finished = folder / "run.json"
    if finished.is_file():
        return
    batches = batches_of(arm, arm.phase, texts, tokenizer, seed=arguments.seed)
    per_step = statistics.mean(int((batches.batch(step).sequence >= 0).sum()) for step in range(arm.phase.external + arm.phase.task))
    operations = operations_per_token(arm)
    steps = max(10, round(budget / operations / per_step))
    phase: PhaseConfig = arm.phase.model_copy(update={"steps": steps, "keep": "last"})
    model = build_model(
        ModelSpec(arm.encoder, arm.head, vocab_size=tokenizer.vocab_size, labels=len(texts.task.labels)), seed=arguments.seed
    )
    place_embeddings(model, arm, texts, tokenizer, seed=arguments.seed, kept=arguments.out / "counting.json")

    key = {"phase": phase.model_dump(mode="json"), "encoder": arm.encoder.model_dump(mode="json")}
    job = TrainingJob(
        batches_of(arm, phase, texts, tokenizer, seed=arguments.seed),
        folder / "work",
        fingerprint=key,
        precision="bf16" if has_bf16(torch.device("cpu")) else "fp32",
    )
    result = train_phase(model, job)
    row = {
        "size": arm.name,
        "budget": budget,
        "seed": arguments.seed,
        "batch": arm.phase.batch_size,
        "operations_per_token": operations,
        "steps": steps,
        "tokens": result.tokens,
        "executed": result.executed_flops,
        "bits": bits_per_word(model, *held_out),
    }
    finished.write_text(json.dumps(row) + "\n", "utf-8")
    print(f"{budget:.0e} {arm.name}: {steps} steps, {result.tokens:,} tokens, {row['bits']:.3f} bits per masked word", flush=True)


def operations_per_token(arm: Arm) -> float:
    """Return the operations of an update per real token."""
    (phase,) = in_rows([arm.phase], ROWS)
    return count_flops(TrainingSetup(arm.encoder, arm.head, phase, VOCABULARY, "bf16"))


def fit_law(rows: Sequence[Mapping[str, Any]]) -> Law | None:
    """Return the law with the least squares of the logarithms; None with fewer than six rows.

    The powers are kept between 0.05 and 1.5, and the floor above 0, outside of which twelve rows say nothing.
    """
    if len(rows) < 6:
        return None
    sizes = np.array([row["operations_per_token"] / 6 for row in rows])
    tokens = np.array([row["tokens"] for row in rows], dtype=float)
    bits = np.array([row["bits"] for row in rows])

    def residuals(values: Any) -> Any:
        floor, size_log, size_power, text_log, text_power = values
        forecast = np.exp(floor) + np.exp(size_log - size_power * np.log(sizes)) + np.exp(text_log - text_power * np.log(tokens))
        return np.log(forecast) - np.log(bits)

    bounds = ([-5, -5, 0.05, -5, 0.05], [math.log(bits.min()), 40, 1.5, 40, 1.5])
    starts = [
        (math.log(floor), size_power * 14 + 0.5, size_power, text_power * 14 + 0.5, text_power)
        for floor in (0.3 * bits.min(), 0.6 * bits.min())
        for size_power in (0.2, 0.5)
        for text_power in (0.2, 0.5)
    ]
    best = min((least_squares(residuals, start, bounds=bounds) for start in starts), key=lambda fit: fit.cost)
    floor, size_log, size_power, text_log, text_power = map(float, best.x)
    return Law(math.exp(floor), math.exp(size_log), size_power, math.exp(text_log), text_power)


def left_out_errors(rows: Sequence[Mapping[str, Any]]) -> list[float]:
    """Return the relative error of each row's forecast by the law of the other rows."""
    errors = []
    for left_out in range(len(rows)):
        law = fit_law([row for number, row in enumerate(rows) if number != left_out])
        if law is None:
            return []
        row = rows[left_out]
        errors.append(round(law.bits(row["operations_per_token"], row["tokens"]) / row["bits"] - 1, 4))
    return errors


def print_rows(rows: Sequence[Mapping[str, Any]], law: Law | None) -> None:
    """Print a row per run, with what the law says."""
    print("| operations | size | batch | steps | tokens | bits per masked word | law |\n|---|---|---|---|---|---|---|")
    for row in rows:
        forecast = "" if law is None else f"{law.bits(row['operations_per_token'], row['tokens']):.2f}"
        tokens = f"{row['tokens'] / 1e6:.2f} M"
        print(f"| {row['budget']:.0e} | {row['size']} | {row['batch']:,} | {row['steps']:,} | {tokens} | {row['bits']:.2f} | {forecast} |")


def print_choices(law: Law | None, operations: Mapping[str, float]) -> None:
    """Print the law, and for each budget the forecast of every size."""
    if law is None:
        return
    text = f"{law.text_factor:.3g} / D^{law.text_power:.2f}"
    print(f"\nbits = {law.floor:.2f} + {law.size_factor:.3g} / N^{law.size_power:.2f} + {text}\n")
    sizes = sorted(operations, key=lambda size: operations[size])
    print("| operations | " + " | ".join(sizes) + " |\n|" + "---|" * (len(sizes) + 1))
    for budget in FORECAST:
        forecasts = [law.bits(operations[size], budget / operations[size]) for size in sizes]
        cells = (f"**{bits:.2f}**" if bits == min(forecasts) else f"{bits:.2f}" for bits in forecasts)
        print(f"| {budget:.0e} | " + " | ".join(cells) + " |")


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_text_options(parser, out=Path("runs/scaling"), tokens=12_000_000, top_k=500)
    parser.add_argument("--budgets", type=float, nargs="+", default=[1e13, 3e13, 1e14], help="operations of a run")
    parser.add_argument("--sizes", nargs="+", default=["2x128", "2x192", "4x256", "6x384"], metavar="LAYERSxHIDDEN")
    parser.add_argument("--seed", type=int, default=1)
    return parse_with_texts(parser)


if __name__ == "__main__":
    main()
