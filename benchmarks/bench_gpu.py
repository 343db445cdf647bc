"""Training speed on a GPU, beside the released TLM loop and transformers' Trainer, and its share of the GPU's peak.

    python benchmarks/bench_gpu.py
    python benchmarks/bench_gpu.py --sizes mini --batches 4096 32768

Random tokens in sequences of a quarter to a whole row of 128; the speed does not depend on which tokens they are. Sides:

    released     the peer of bench_training.py: BERT, 32 texts a batch, padded, masked in Python, AdamW, bf16 autocast, dropout 0.1
    trainer      transformers.Trainer on BERT's masked language modeling: 256 texts a batch, padded, bf16, fused AdamW, the collator in
                 as many processes as `cramlm` uses
    bert         cramlm with the same BERT, AdamW and masks of 15 %, packed, 32,768 tokens a batch, no dropout
    default      the recipe `tlm` without its teacher: the modern block with Muon
    compiled     the same with layers compiled by torch.compile
    one by one   the same as default without CUDA graphs

Tokens exclude padding. TFLOP/s count the matrix products of the model (training/objective.py), not the optimizer's; the peak is that of an
8192^3 bf16 product in the same run. Seconds are on the wall clock, after a synchronization. Prints a table and, as the last line, one JSON
object; writes benchmarks/results/gpu.json.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cramlm import recipes
from cramlm.config.head import HeadConfig
from cramlm.config.phase import OptimizerConfig, PhaseConfig
from cramlm.config.run import EncoderConfig
from cramlm.config.terms import Classify, MaskingConfig, Mlm
from cramlm.model.model import ModelSpec, build_model, describe_device, resolve_device
from cramlm.planning.speed import TrainingSetup, random_batches, random_pool
from cramlm.recipes.recipe import PRESETS, without_teacher
from cramlm.records import Batch
from cramlm.training.capture import compiled_layers
from cramlm.training.loop import Updater, deterministic
from cramlm.training.masking import SpecialIds
from cramlm.training.objective import executed_flops
from cramlm.training.prefetch import batches_of
from training_peer import LENGTH, ReleasedLoop, ReleasedModel

RESULTS = Path(__file__).parent / "results" / "gpu.json"
VOCABULARY = {"mini": 8192, "small": 8192, "base": 16384}
LABELS = 8
WARM_UP = 40
"""Steps before the clock starts: graphs are recorded, layers compiled."""


def main() -> None:
    """Measure, print and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=list(VOCABULARY), choices=list(VOCABULARY))
    parser.add_argument("--batches", nargs="+", type=int, default=[4096, 32768], help="tokens of a batch of default and compiled")
    parser.add_argument("--sides", nargs="+", default=["released", "trainer", "bert", "default", "compiled", "one by one"])
    parser.add_argument("--seconds", type=float, default=3.0, help="of a measurement, after warming up")
    arguments = parser.parse_args()
    device = resolve_device("cuda")
    print(f"{describe_device(device)}, PyTorch {torch.__version__}")
    peak = measured_peak(device)
    print(f"peak {peak / 1e12:.0f} TFLOP/s", flush=True)
    rows: list[dict[str, Any]] = []
    for size in arguments.sizes:
        for side in arguments.sides:
            for batch in arguments.batches if side in ("default", "compiled", "one by one") else [0]:
                try:
                    rows.append({"size": size, "side": side, **measured(side, size, batch, device, seconds=arguments.seconds)})
                except Exception:  # of one side: the others are measured
                    traceback.print_exc()
                    continue
                rows[-1]["share_of_peak"] = round(rows[-1]["flops"] / peak, 4)
                print(json.dumps(rows[-1]), flush=True)
    print_table(rows)
    result = {"benchmark": "gpu", "device": torch.cuda.get_device_name(device), "torch": torch.__version__, "peak": peak, "rows": rows}
    RESULTS.write_text(json.dumps(result, indent=1) + "\n", "utf-8")
    print(json.dumps(result))


def measured_peak(device: torch.device) -> float:
    """Operations a second of a large product in bf16."""
    matrix = torch.randn(8192, 8192, device=device, dtype=torch.bfloat16)
    for _ in range(3):
        matrix @ matrix
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(20):
        matrix @ matrix
    torch.cuda.synchronize()
    return 20 * 2 * 8192**3 / (time.perf_counter() - began)


def measured(side: str, size: str, batch: int, device: torch.device, *, seconds: float) -> dict[str, Any]:
    """Tokens and operations a second of a side."""
    torch.cuda.reset_peak_memory_stats(device)
    match side:
        case "released":
            result = measure_released(size, device, seconds=seconds)
        case "trainer":
            result = measure_trainer(size)
        case "bert":
            phase = bert_phase()
            result = measure_own(bert(size), phase, 30522, device, seconds=seconds, sides=())
        case _:
            phase = without_teacher(recipes.joint_phase()).model_copy(update={"max_length": LENGTH, "dropout": 0.0, "batch_size": batch})
            result = measure_own(PRESETS[size], phase, VOCABULARY[size], device, seconds=seconds, sides=(side,))
    return {"batch": batch, **result, "memory_gib": round(torch.cuda.max_memory_allocated(device) / 2**30, 2)}


def bert(size: str) -> EncoderConfig:
    """BERT with the layers of the preset, and an intermediate size of four times the width."""
    modern = PRESETS[size]
    return EncoderConfig(
        shape="bert", layers=modern.layers, hidden=modern.hidden, heads=modern.heads, intermediate=4 * modern.hidden, max_positions=512
    )


def bert_phase() -> PhaseConfig:
    """The released loop's losses and masks in batches of 32,768 tokens."""
    return PhaseConfig(
        name="joint",
        terms=(Mlm(on="external"), Mlm(on="task"), Classify()),
        external=3,
        task=1,
        masking=MaskingConfig(rate=0.15, mask_share=0.8, random_share=0.1),
        batch_size=32768,
        optimizer=OptimizerConfig(kind="adamw"),
        max_length=LENGTH,
        dropout=0.0,
    )


def measure_own(
    encoder: EncoderConfig, phase: PhaseConfig, vocabulary: int, device: torch.device, *, seconds: float, sides: tuple[str, ...]
) -> dict[str, Any]:
    """cramlm's updates, with batches made ahead as in training."""
    head = HeadConfig(pooling="cls") if encoder.shape == "bert" else HeadConfig()
    setup = TrainingSetup(encoder, head, phase, vocabulary, "bf16", device=device)
    model = build_model(ModelSpec(encoder, head, vocab_size=vocabulary, labels=LABELS), seed=0).to(device)
    updater = Updater(model, phase, precision="bf16", captures="one by one" not in sides)
    counted = {"tokens": 0, "flops": 0.0}
    pending: list[Callable[[], Any]] = []

    def step(numbered: Iterator[tuple[int, Batch]]) -> None:
        number, batch = next(numbered)
        pending.append(updater.start(batch, step=number, factor=1e-3, dropout_seed=number))
        if len(pending) > 1:
            pending.pop(0)()
        counted["tokens"] += batch.tokens
        counted["flops"] += executed_flops(model, batch, phase)

    began = time.perf_counter()
    ahead = batches_of(random_batches(setup), range(10**6), device)
    with ahead as batches, deterministic(device), compiled_layers(model, "compiled" in sides):
        made = enumerate(batches)
        for _ in range(WARM_UP):
            step(made)
        torch.cuda.synchronize()
        warm, counted["tokens"], counted["flops"], steps = time.perf_counter() - began, 0, 0.0, 0
        began = time.perf_counter()
        while time.perf_counter() - began < seconds:
            step(made)
            steps += 1
        pending.pop()()
    took = time.perf_counter() - began
    return {
        "tokens_per_second": round(counted["tokens"] / took),
        "flops": counted["flops"] / took,
        "step_ms": round(1e3 * took / steps, 2),
        "warm_up_seconds": round(warm, 1),
    }


def texts(size: int) -> tuple[list[list[int]], list[int], dict[str, int]]:
    """Random sequences of a quarter to a whole row, their labels, and the ids of special tokens, with BERT's vocabulary."""
    special = SpecialIds(pad=0, unk=1, cls=2, sep=3, mask=4, vocab_size=30522)
    pool = random_pool(bert_phase(), special, "task", None)
    sequences = [pool.sequence(number).tolist() for number in range(min(size, len(pool)))]
    return sequences, pool.labels.tolist(), {"pad": 0, "cls": 2, "sep": 3, "mask": 4}


def released_model(size: str) -> ReleasedModel:
    """BERT of transformers with random weights."""
    from transformers import BertConfig, BertForMaskedLM, BertForSequenceClassification

    config = bert(size)
    given = BertConfig(
        vocab_size=30522,
        hidden_size=config.hidden,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        intermediate_size=config.intermediate,
    )
    given.num_labels = LABELS
    return ReleasedModel(BertForMaskedLM(given), BertForSequenceClassification(given))


def bert_flops(size: str, tokens: float) -> float:
    """Operations of an update of the peers: all products on all positions."""
    config = bert(size)
    matrices = 12 * config.hidden**2 * config.layers + config.hidden * (config.hidden + 30522)
    return 6.0 * tokens * (matrices + 2 * config.layers * LENGTH * config.hidden)


def measure_released(size: str, device: torch.device, *, seconds: float) -> dict[str, Any]:
    """The released loop's updates."""
    sequences, labels, special = texts(1000)
    loop = ReleasedLoop(
        released_model(size).to(device),
        sequences,
        list(zip(sequences, labels, strict=True)),
        special=special,
        vocab_size=30522,
        batch=32,
        external_per_task=3,
        device=device,
    )
    for _ in range(WARM_UP // 4):
        loop.step()
    torch.cuda.synchronize()
    began, tokens, steps = time.perf_counter(), 0, 0
    while time.perf_counter() - began < seconds:
        tokens += loop.step()
        steps += 1
    torch.cuda.synchronize()
    took = time.perf_counter() - began
    rates = {"tokens_per_second": round(tokens / took), "flops": bert_flops(size, steps * 32 * LENGTH) / took}
    return {**rates, "step_ms": round(1e3 * took / steps, 2)}


def measure_trainer(size: str, *, batch: int = 256, steps: int = 40) -> dict[str, Any]:
    """The updates of transformers' Trainer from the tenth on."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    sequences, labels, special = texts(1000)
    loop = ReleasedLoop(
        released_model(size),
        sequences,
        list(zip(sequences, labels, strict=True)),
        special=special,
        vocab_size=30522,
        batch=batch,
        external_per_task=3,
    )

    class Collator:
        def __call__(self, chosen: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
            ids, attention, targets = loop.collate([each["ids"] for each in chosen])
            return {"input_ids": ids, "attention_mask": attention, "labels": targets}

    times: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            torch.cuda.synchronize()
            times.append(time.perf_counter())

    from transformers import BertForMaskedLM

    masked = BertForMaskedLM(loop.model.bert.config)
    rows = [{"ids": sequences[number % len(sequences)]} for number in range(batch * steps)]
    with tempfile.TemporaryDirectory() as folder:
        given = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=batch,
            max_steps=steps,
            bf16=True,
            optim="adamw_torch_fused",
            dataloader_num_workers=8,
            save_strategy="no",
            logging_strategy="no",
            report_to=[],
            disable_tqdm=True,
            remove_unused_columns=False,
        )
        Trainer(masked, given, train_dataset=rows, data_collator=Collator(), callbacks=[Clock()]).train()
    took = (times[-1] - times[9]) / (len(times) - 10)
    real = float(np.mean([len(row["ids"]) for row in rows])) * batch
    return {"tokens_per_second": round(real / took), "flops": bert_flops(size, batch * LENGTH) / took, "step_ms": round(1e3 * took, 2)}


def print_table(rows: list[dict[str, Any]]) -> None:
    """A row for each side."""
    print(f"\n{'size':6} {'side':11} {'batch':>6} {'tokens/s':>11} {'TFLOP/s':>8} {'of peak':>8} {'ms a step':>10} {'GiB':>6}")
    for row in rows:
        print(
            f"{row['size']:6} {row['side']:11} {row['batch'] or '':>6} {row['tokens_per_second']:>11,} {row['flops'] / 1e12:>8.1f} "
            f"{row['share_of_peak']:>8.1%} {row['step_ms']:>10.2f} {row['memory_gib']:>6.1f}"
        )


if __name__ == "__main__":
    main()
