"""Training speed compared with the released TLM loop (training_peer.py), and the fraction of peak performance.

    python benchmarks/bench_training.py --data ../shared/data
    python benchmarks/bench_training.py --sizes mini --threads 2

For each size the sides alternate, a few updates each, on the same passages and task texts; the median over the rounds counts:

    released     the peer, bf16 autocast, V 30522
    cramlm       the same BERT, vocabulary, AdamW, masks of 15 % and 32 texts a batch (8 at base), packed; its loss on the peer's weights
                 and masks is compared first
    default      the recipe `tlm`: the modern block with Muon, mixed batches of 4,096 tokens and the task's own vocabulary

Tokens exclude padding and include [CLS] and [SEP]; characters are those of the source texts. GFLOP/s count the
matrix products of the model alone (planning.executed_flops), not the optimizer's; the peak is that of a 2048^3 bf16 product in the same
run. One thread is timed in CPU seconds, several on the wall clock. Prints tables and, as the last line, one JSON object; writes
benchmarks/results/training.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cramlm import recipes
from cramlm.config.head import HeadConfig
from cramlm.config.phase import OptimizerConfig, PhaseConfig
from cramlm.config.run import EncoderConfig, TokenizerConfig
from cramlm.config.terms import Classify, MaskingConfig, Mlm
from cramlm.data.task import RowFormat, read_examples
from cramlm.model.huggingface.folder import save_classifier, save_mlm
from cramlm.model.model import Model, ModelSpec, PackedBatch, build_model
from cramlm.model.tokenizer import Tokenizer, Tokens, train_tokenizer
from cramlm.recipes.recipe import without_teacher
from cramlm.training.batching import Batches
from cramlm.training.loop import Updater, deterministic
from cramlm.training.masking import SpecialIds, mask
from cramlm.training.objective import executed_flops, objective_of
from cramlm.training.sequences import TokenPool, pack
from training_peer import LENGTH, ReleasedLoop, ReleasedModel

RESULTS = Path(__file__).parent / "results" / "training.json"
PAPER_VOCABULARY = 30_522
PASSAGES = 20_000
EXTERNAL_PER_TASK = 3


@dataclass(frozen=True)
class Size:
    """Encoder of the peer and of `tlm`; texts per batch, updates per round."""

    layers: int
    hidden: int
    heads: int
    batch: int
    vocabulary: int
    turn: int

    @property
    def bert(self) -> EncoderConfig:
        return EncoderConfig(shape="bert", layers=self.layers, hidden=self.hidden, heads=self.heads, intermediate=4 * self.hidden)

    @property
    def modern(self) -> EncoderConfig:
        return EncoderConfig(layers=self.layers, hidden=self.hidden, heads=self.heads, intermediate=2 * self.hidden)


SIZES = {
    "mini": Size(4, 256, 4, batch=32, vocabulary=8192, turn=8),
    "small": Size(6, 384, 6, batch=32, vocabulary=8192, turn=4),
    "base": Size(12, 768, 12, batch=8, vocabulary=16384, turn=2),
}


@dataclass(frozen=True)
class Text:
    """Return the texts of all sides, and their lengths in characters."""

    passages: list[str]
    task: list[str]
    labels: np.ndarray[Any, Any]
    label_count: int


@dataclass
class Side:
    """A measured side: `turn` returns (tokens, operations) of some updates."""

    name: str
    turn: Callable[[], tuple[int, float]]
    characters_per_token: float
    rates: list[float]
    speeds: list[float]


def main() -> None:
    """Measure, print and write the results."""
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    text = read_text(arguments.data)
    clock = time.process_time if arguments.threads == 1 else time.perf_counter
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        tokenizers = {
            size: tokenizer_for(text, size, Path(folder)) for size in {PAPER_VOCABULARY, *(SIZES[n].vocabulary for n in arguments.sizes)}
        }
        for name in arguments.sizes:
            rows += measure_size(name, text, tokenizers, Path(folder) / name, rounds=arguments.rounds, clock=clock)
    print_table(rows)
    ratio = {row["size"]: row["ratio"] for row in rows if row["side"] == "cramlm"}
    characters = {row["size"]: row["character_ratio"] for row in rows if row["side"] == "default"}
    result = {"benchmark": "training", "threads": arguments.threads, "ratio": ratio, "character_ratio": characters, "rows": rows}
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(result, indent=1) + "\n", "utf-8")
    print(json.dumps(result))


def read_text(data: Path) -> Text:
    """Some thousand passages of the general corpus, and ChemProt's training texts."""
    first = min((data / "corpus").glob("*.jsonl.zst"))
    passages = [example.text for example in read_examples(str(first), RowFormat(label_column=None))[:PASSAGES]]
    examples = read_examples(str(data / "tasks" / "chemprot" / "train.jsonl"), RowFormat())
    names = sorted({str(example.label) for example in examples})
    labels = np.asarray([names.index(str(example.label)) for example in examples], dtype=np.int64)
    return Text(passages, [example.text for example in examples], labels, len(names))


def tokenizer_for(text: Text, vocabulary: int, folder: Path) -> Tokenizer:
    """WordPiece of that size, trained on the texts."""
    target = folder / f"tokenizer-{vocabulary}"
    target.mkdir()
    train_tokenizer([*text.passages, *text.task], TokenizerConfig(vocab_size=vocabulary), target)
    return Tokenizer.load(target)


def measure_size(
    name: str, text: Text, tokenizers: dict[int, Tokenizer], folder: Path, *, rounds: int, clock: Callable[[], float]
) -> list[dict[str, Any]]:
    """Return the rows of one size."""
    size = SIZES[name]
    tokenizer = tokenizers[PAPER_VOCABULARY]
    external, task = encoded(tokenizer, text)
    model = build_model(ModelSpec(size.bert, HeadConfig(pooling="cls"), vocab_size=tokenizer.vocab_size, labels=text.label_count), seed=0)
    save_mlm(model, tokenizer, folder / "mlm", max_length=LENGTH)
    save_classifier(model, tokenizer, folder / "classifier", labels=[f"l{i}" for i in range(text.label_count)], max_length=LENGTH)
    special = special_ids(tokenizer)
    named = {"pad": special.pad, "cls": special.cls, "sep": special.sep, "mask": special.mask}
    released = ReleasedModel.load(folder / "mlm", folder / "classifier")
    difference = loss_difference(model, released, external, special)
    pairs = [(list(map(int, task[i])), int(text.labels[i])) for i in range(len(task))]
    texts = [list(map(int, external[i])) for i in range(len(external))]
    loop = ReleasedLoop(
        released, texts, pairs, special=named, vocab_size=tokenizer.vocab_size, batch=size.batch, external_per_task=EXTERNAL_PER_TASK
    )
    per_token = characters_per_token(text, tokenizer)
    own = per_token if size.vocabulary == PAPER_VOCABULARY else characters_per_token(text, tokenizers[size.vocabulary])
    default = without_teacher(recipes.joint_phase()).model_copy(update={"max_length": LENGTH, "dropout": 0.0})
    modern = build_model(
        ModelSpec(size.modern, HeadConfig(), vocab_size=tokenizers[size.vocabulary].vocab_size, labels=text.label_count), seed=0
    )
    sides = [
        Side("released", lambda: (sum(loop.step() for _ in range(max(1, size.turn // 2))), 0.0), per_token, [], []),
        Side("cramlm", our_turn(model, released_phase(size), tokenizer, text, size.turn), per_token, [], []),
        Side("default", our_turn(modern, default, tokenizers[size.vocabulary], text, max(1, size.turn * size.batch // 32)), own, [], []),
    ]
    peaks: list[float] = []
    for turn in range(rounds + 1):  # the first warms up
        peak = measured_peak(clock)
        for side in sides:
            began = clock()
            tokens, operations = side.turn()
            seconds = clock() - began
            if turn:
                side.rates.append(tokens / seconds)
                side.speeds.append(operations / seconds)
        if turn:
            peaks.append(peak)
    return [row(name, side, sides[0], statistics.median(peaks), difference) for side in sides]


def row(size: str, side: Side, released: Side, peak: float, difference: float) -> dict[str, Any]:
    """Return one line of the table; ratios are medians over the turns, each against the peer's turn just before."""
    rate, speed = statistics.median(side.rates), statistics.median(side.speeds)
    ratios = [mine / theirs for mine, theirs in zip(side.rates, released.rates, strict=True)]
    characters = side.characters_per_token / released.characters_per_token
    return {
        "size": size,
        "side": side.name,
        "tokens_per_second": round(rate),
        "characters_per_second": round(rate * side.characters_per_token),
        "ratio": round(statistics.median(ratios), 2),
        "character_ratio": round(statistics.median(ratios) * characters, 2),
        "gflops": round(speed / 1e9),
        "share_of_peak": round(speed / peak, 3),
        "peak_gflops": round(peak / 1e9),
        "loss_difference": difference,
    }


def released_phase(size: Size) -> PhaseConfig:
    """Return the phase of the paper's stage 1, with the settings of the peer."""
    return PhaseConfig(
        name="joint",
        external=EXTERNAL_PER_TASK,
        task=1,
        mixing="interleaved",
        terms=(Mlm(on="external"), Mlm(on="task", weight=20.0), Classify()),
        loss_scale="mean",
        masking=MaskingConfig(rate=0.15, mask_share=0.8, random_share=0.1),
        batch_size=size.batch,
        batch_unit="sequences",
        max_length=LENGTH,
        dropout=0.0,
        optimizer=OptimizerConfig(kind="adamw", learning_rate=1e-4),
    )


def our_turn(model: Model, phase: PhaseConfig, tokenizer: Tokenizer, text: Text, updates: int) -> Callable[[], tuple[int, float]]:
    """Run some updates of `model` on these texts, continuing from round to round."""
    external, task = encoded(tokenizer, text)
    pools = (
        TokenPool(external.ids, external.offsets, np.full(len(external), -1, dtype=np.int64)),
        TokenPool(task.ids, task.offsets, text.labels),
    )
    batches = Batches(phase, *pools, seed=0, phase_index=0, special=special_ids(tokenizer))
    updater = Updater(model, phase, precision="bf16")
    done = 0

    def turn() -> tuple[int, float]:
        nonlocal done
        tokens, operations = 0, 0.0
        with deterministic(model.device):
            for step in range(done, done + updates):
                batch = batches.batch(step)
                updater.update(batch, step=step, factor=0.1, dropout_seed=step)
                tokens += batch.tokens
                operations += executed_flops(model, batch, phase)
        done += updates
        return tokens, operations

    return turn


def encoded(tokenizer: Tokenizer, text: Text) -> tuple[Tokens, Tokens]:
    """Passages and task texts, each cut to the peer's 128 tokens."""
    external = tokenizer.sequences(text.passages, max_length=LENGTH, cut="truncate")
    return external, tokenizer.sequences(text.task, max_length=LENGTH, cut="truncate")


def characters_per_token(text: Text, tokenizer: Tokenizer) -> float:
    """Return the number of tokens of whole passages, with special tokens once per passage."""
    sample = text.passages[:2000]
    tokens = tokenizer.sequences(sample, max_length=1 << 20, cut="truncate")
    return sum(map(len, sample)) / int(tokens.lengths.sum())


def loss_difference(model: Model, released: ReleasedModel, external: Tokens, special: SpecialIds) -> float:
    """Relative difference of the two sides' MLM losses in float32, on one batch with the same weights and masks, without dropout."""
    chosen = [external[index] for index in range(16)]
    nothing, outside = np.full(16, -1, dtype=np.int64), np.ones(16, dtype=bool)
    phase = PhaseConfig(name="joint", terms=(Mlm(),), external=1, task=0, max_length=LENGTH, dropout=0.0)
    clean = pack(chosen, labels=nothing, external=outside, row_length=LENGTH, pad_id=special.pad)
    batch = mask(clean, MaskingConfig(rate=0.15, mask_share=0.8, random_share=0.1), np.random.default_rng(0), special, where=outside)
    batch = replace(batch, term="mlm")
    starts = batch.first
    lengths = np.bincount(batch.sequence[batch.sequence >= 0], minlength=16)
    ids, attention = torch.full((16, LENGTH), special.pad), torch.zeros(16, LENGTH, dtype=torch.int64)
    targets = torch.full((16, LENGTH), -100)
    wanted = np.full(batch.token_ids.size, -100)
    wanted[batch.masked] = batch.mlm_labels
    for number, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        ids[number, :length] = torch.from_numpy(batch.token_ids.reshape(-1)[start : start + length])
        attention[number, :length] = 1
        targets[number, :length] = torch.from_numpy(wanted[start : start + length])
    with torch.no_grad():
        ours = float(objective_of(phase).losses(model, PackedBatch.of(batch)).total)
        theirs = float(released.eval().losses(ids, attention, targets, None)[0])
    return abs(ours - theirs) / theirs


def special_ids(tokenizer: Tokenizer) -> SpecialIds:
    """Return the special token ids."""
    return SpecialIds(tokenizer.pad_id, tokenizer.cls_id, tokenizer.sep_id, tokenizer.mask_id, tokenizer.vocab_size, tokenizer.unk_id)


def measured_peak(clock: Callable[[], float]) -> float:
    """Operations per second of a 2048 x 2048 bf16 product, the best of five."""
    one, other = (torch.randn(2048, 2048).bfloat16() for _ in range(2))
    times = []
    for _ in range(5):
        began = clock()
        one @ other
        times.append(clock() - began)
    return 2.0 * 2048**3 / min(times)


def print_table(rows: list[dict[str, Any]]) -> None:
    """Print a Markdown table."""
    print("| size | side | real tokens/s | x released | characters/s | x released | GFLOP/s | of the peak | loss difference |")
    print("|---" * 9 + "|")
    for row in rows:
        ours = row["side"] != "released"
        used = f"{row['gflops']} | {row['share_of_peak']:.0%} of {row['peak_gflops']}" if ours else " | "
        ratios = (f"{row['ratio']:.1f}", f"{row['character_ratio']:.1f}") if ours else ("", "")
        difference = f"{row['loss_difference']:.0e}" if row["side"] == "cramlm" else ""
        cells = (row["size"], row["side"], f"{row['tokens_per_second']:,}", ratios[0], f"{row['characters_per_second']:,}", ratios[1])
        print(f"| {' | '.join(cells)} | {used} | {difference} |")


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"), help="folder with tasks/chemprot/ and corpus/")
    parser.add_argument("--sizes", nargs="+", default=list(SIZES), choices=list(SIZES))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    if not (arguments.data / "corpus").is_dir():
        parser.error(f"{arguments.data}: no corpus/ there; pass --data FOLDER with corpus/*.jsonl.zst and tasks/chemprot/train.jsonl")
    return arguments


if __name__ == "__main__":
    main()
