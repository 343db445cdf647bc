"""Held-out loss over time of the released TLM recipe and of `tlm` on this machine.

    python benchmarks/bench_learning.py --data ../shared/data --sweep-minutes 10 --released-minutes 60 --minutes 4
    python benchmarks/bench_learning.py --only default --set joint.masking.rate=0.3 --label mask-30

Both train a mini encoder (4 x 256) on the BM25 selection for ChemProt and on ChemProt's training texts, with one thread. The released
recipe (BERT, AdamW, 30,522 words, 15 % masked, rho_1 = 3, rho_2 = 20, batches of 32 texts) uses the learning rate of `--rates` that is best
after `--sweep-minutes`. Its updates are computed by cramlm's loop, which is faster and has the same losses (bench_training.py
compares them); its time is computed from the peer's own speed, measured in turn with ours: seconds = tokens / tokens per second.
The minutes of `tlm` include its co-occurrence embeddings. The loss is in bits per masked word: 15 % of the words of 300 held-out passages
are masked completely, the same words for every vocabulary. Resumable: a finished arm is read from --out.

Prints a table and, as the last line, one JSON object; writes benchmarks/results/learning.json and docs/pictures/learning.svg.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from bench_training import EXTERNAL_PER_TASK, PAPER_VOCABULARY, SIZES, Size, released_phase, special_ids
from cramlm import recipes
from cramlm.config.head import HeadConfig
from cramlm.config.phase import PhaseConfig
from cramlm.config.retriever import Bm25Config
from cramlm.config.run import CorpusConfig, EncoderConfig, TaskConfig, TokenizerConfig, apply_overrides
from cramlm.data.corpus import build_corpus
from cramlm.data.task import read_task
from cramlm.linear.cooccurrence import token_embeddings
from cramlm.model.huggingface.folder import save_classifier, save_mlm
from cramlm.model.model import Model, ModelSpec, PackedBatch, build_model
from cramlm.model.tokenizer import UNCUT, Tokenizer, train_tokenizer
from cramlm.recipes.recipe import without_teacher
from cramlm.records import Batch, Event, Task
from cramlm.retrieval.bm25.index import build_index
from cramlm.retrieval.retrievers import RetrievalContext
from cramlm.retrieval.selection import SELECTION_FILE, SelectionTable, select_documents
from cramlm.training.batching import Batches
from cramlm.training.loop import DevEvaluation, TrainingJob, train_phase
from cramlm.training.sequences import TokenPool, pack
from training_peer import LENGTH, ReleasedLoop, ReleasedModel

RESULTS = Path(__file__).parent / "results" / "learning.json"
PLOT = Path(__file__).parent.parent / "docs" / "pictures" / "learning.svg"
HELD_OUT = 300
MASKED_WORDS = 0.15
SIZE: Size = SIZES["mini"]


@dataclass(frozen=True)
class Arm:
    """A recipe: encoder, vocabulary and phase, without the number of steps."""

    name: str
    encoder: EncoderConfig
    head: HeadConfig
    vocabulary: int
    phase: PhaseConfig
    minutes: float


@dataclass(frozen=True)
class Texts:
    """Training texts and held-out passages."""

    task: Task
    passages: list[str]
    held_out: list[str]


def main() -> None:
    """Run the missing arms, then print, plot and write."""
    arguments = parse_arguments()
    torch.set_num_threads(1)
    texts = read_texts(arguments)
    released, default = [released_arm(rate, arguments.sweep_minutes) for rate in arguments.rates], default_arm(arguments)
    tokenizers = {size: tokenizer_for(arguments, texts, size) for size in {PAPER_VOCABULARY, default.vocabulary}}
    speeds = measured_speeds(arguments, texts, tokenizers, default)

    def curve(arm: Arm) -> dict[str, Any]:
        return run(arguments, arm, texts, tokenizers[arm.vocabulary], tokens_per_second=speeds[arm.name.split(" ")[0]])

    curves = [] if arguments.only == "default" else [curve(arm) for arm in released]
    if curves:
        best = min(range(len(curves)), key=lambda at: curves[at]["final_bits"])
        curves.append(curve(released_arm(arguments.rates[best], arguments.released_minutes)))
    curves += [] if arguments.only == "released" else [curve(default)]
    print_table(curves)
    result = {"benchmark": "learning", "tokens_per_second": speeds, "curves": curves}
    if arguments.only is None:
        RESULTS.write_text(json.dumps(result, indent=1) + "\n", "utf-8")
        plot(curves, PLOT)
    print(json.dumps(result))


def released_arm(rate: float, minutes: float) -> Arm:
    """Return the released recipe; the learning rate rises for a tenth of its steps and falls to 0."""
    paper = released_phase(SIZE)
    optimizer = paper.optimizer.model_copy(update={"learning_rate": rate})
    schedule = paper.schedule.model_copy(update={"kind": "linear", "warmup_fraction": 0.1})
    phase = paper.model_copy(update={"dropout": 0.1, "optimizer": optimizer, "schedule": schedule})
    return Arm(f"released lr {rate:g}", SIZE.bert, HeadConfig(pooling="cls"), PAPER_VOCABULARY, phase, minutes)


def default_arm(arguments: argparse.Namespace) -> Arm:
    """Return the recipe `tlm` with the overrides of `--set`."""
    joint = without_teacher(recipes.joint_phase()).model_copy(update={"max_length": LENGTH, "dropout": 0.0})
    config: dict[str, Any] = {
        "joint": joint.model_dump(mode="json"),
        "encoder": recipes.PRESETS["mini"].model_dump(mode="json"),
        "vocabulary": SIZE.vocabulary,
    }
    config = apply_overrides(config, arguments.set)
    phase, encoder = PhaseConfig.model_validate(config["joint"]), EncoderConfig.model_validate(config["encoder"])
    return Arm(f"default {arguments.label}".strip(), encoder, HeadConfig(), int(config["vocabulary"]), phase, arguments.minutes)


def read_texts(arguments: argparse.Namespace) -> Texts:
    """Read ChemProt and its selection from the general corpus; every tenth passage is a candidate for the held-out ones."""
    folder = arguments.data / "tasks" / "chemprot"
    task = read_task(TaskConfig(**{split: str(folder / f"{split}.jsonl") for split in ("train", "dev", "test")}), seed=13)
    chosen = arguments.out / "selection"
    if not (chosen / SELECTION_FILE).is_file():
        corpus = build_corpus(CorpusConfig(files=(str(arguments.data / "corpus" / "*.jsonl.zst"),)), arguments.store)
        config = Bm25Config(top_k=arguments.top_k, max_tokens=arguments.selection_tokens)
        context = RetrievalContext(arguments.store, 13, build_index(corpus, arguments.store))
        select_documents(config, corpus, task, out=chosen, context=context)
    passages = SelectionTable.open(chosen).texts()
    order = np.random.default_rng(0).permutation(len(passages))
    return Texts(task, [passages[at] for at in np.sort(order[HELD_OUT:])], [passages[at] for at in order[:HELD_OUT]])


def tokenizer_for(arguments: argparse.Namespace, texts: Texts, vocabulary: int) -> Tokenizer:
    """Return a WordPiece tokenizer trained on the training texts."""
    target = arguments.out / f"tokenizer-{vocabulary}"
    if not (target / "tokenizer.json").is_file():
        target.mkdir(parents=True, exist_ok=True)
        train_tokenizer([*texts.passages, *(example.text for example in texts.task.train)], TokenizerConfig(vocab_size=vocabulary), target)
    return Tokenizer.load(target)


def batches_of(arm: Arm, phase: PhaseConfig, texts: Texts, tokenizer: Tokenizer, *, seed: int) -> Batches:
    """Yield the batches of an arm. The peer truncates passages to 128 tokens; ours splits them into sequences."""
    cut = "truncate" if arm.vocabulary == PAPER_VOCABULARY else "split"
    external = tokenizer.sequences(texts.passages, max_length=LENGTH, cut=cut)  # type: ignore[arg-type]
    task = tokenizer.sequences([example.text for example in texts.task.train], max_length=LENGTH, cut="truncate")
    labels = np.array([texts.task.labels.index(str(example.label)) for example in texts.task.train], dtype=np.int64)
    pools = TokenPool(external.ids, external.offsets, np.full(len(external), -1, dtype=np.int64)), TokenPool(task.ids, task.offsets, labels)
    return Batches(phase, *pools, seed=seed, phase_index=0, special=special_ids(tokenizer))


def run(arguments: argparse.Namespace, arm: Arm, texts: Texts, tokenizer: Tokenizer, *, tokens_per_second: float) -> dict[str, Any]:
    """Train for its minutes at that speed, and compute the held-out loss twelve times."""
    batches = batches_of(arm, arm.phase, texts, tokenizer, seed=arguments.seed)
    per_step = statistics.mean(int((batches.batch(step).sequence >= 0).sum()) for step in range(arm.phase.external + arm.phase.task))
    model = build_model(
        ModelSpec(arm.encoder, arm.head, vocab_size=tokenizer.vocab_size, labels=len(texts.task.labels)), seed=arguments.seed
    )
    counting = place_embeddings(model, arm, texts, tokenizer, seed=arguments.seed, kept=arguments.out / "counting.json")
    steps = max(24, int((60 * arm.minutes - counting) * tokens_per_second / per_step))
    phase = arm.phase.model_copy(update={"steps": steps, "evaluate_every": max(1, steps // 12), "keep": "last"})
    folder = arguments.out / f"{arm.name.replace(' ', '-')}-{arm.minutes:g}m-{arguments.seed}"
    finished = folder / "curve.json"
    key = {"phase": phase.model_dump(mode="json"), "encoder": arm.encoder.model_dump(mode="json"), "vocabulary": arm.vocabulary}
    if finished.is_file() and (curve := json.loads(finished.read_bytes()))["key"] == key:
        return dict(curve)
    batches = batches_of(arm, phase, texts, tokenizer, seed=arguments.seed)
    held_out = held_out_batches(texts.held_out, tokenizer)
    points: list[dict[str, float]] = []
    began = time.process_time()

    def bits(model: Model, step: int) -> Mapping[str, float]:
        return {"bits": -bits_per_word(model, *held_out)}

    def keep(event: Event) -> None:
        if event.kind == "evaluation" and event.data is not None:
            points.append({"step": event.data["step"], "bits": -event.data["scores"]["bits"]})

    dev = DevEvaluation(bits, "bits")
    result = train_phase(model, TrainingJob(batches, folder / "work", fingerprint=key, precision="bf16", dev=dev, emit=keep))
    for point in points:
        point["seconds"] = counting + point["step"] * per_step / tokens_per_second
    curve = {
        "arm": arm.name,
        "seed": arguments.seed,
        "steps": steps,
        "tokens": result.tokens,
        "cpu_seconds": round(time.process_time() - began, 1),
        "points": points,
        "final_bits": points[-1]["bits"],
        "key": key,
    }
    finished.write_text(json.dumps(curve) + "\n", "utf-8")
    print(f"{arm.name}: {steps} steps, {result.tokens:,} tokens, {points[-1]['bits']:.3f} bits per masked word", flush=True)
    return curve


def place_embeddings(model: Model, arm: Arm, texts: Texts, tokenizer: Tokenizer, *, seed: int, kept: Path) -> float:
    """Set co-occurrence embeddings if the arm uses them; return the CPU seconds of the first time, stored in `kept`."""
    if arm.encoder.embedding_init == "random":
        return 0.0
    began = time.process_time()
    every = tokenizer.sequences([*texts.passages, *(example.text for example in texts.task.train)], max_length=UNCUT, cut="split")
    width, std = arm.encoder.hidden, arm.encoder.embedding_std
    model.set_word_embeddings(token_embeddings([every], vocab_size=tokenizer.vocab_size, width=width, std=std, seed=seed))
    if not kept.is_file():
        kept.write_text(json.dumps(time.process_time() - began) + "\n", "utf-8")
    return float(json.loads(kept.read_bytes()))


def held_out_batches(passages: Sequence[str], tokenizer: Tokenizer) -> tuple[list[Batch], int]:
    """The passages' first 128 tokens with whole words masked, in batches; and how many words that is. Chosen by their number in the text
    alone, so that every tokenizer has the same ones; a word that is cut off at the end is left out.
    """
    rng = np.random.default_rng(1)
    sequences, targets, words = [], [], 0
    for passage in passages:
        pieces = passage.split()[:60]
        wanted = rng.random(len(pieces)) < MASKED_WORDS
        tokens = tokenizer.encode(pieces)
        ids, labels = [tokenizer.cls_id], [-1]
        for number in range(len(pieces)):
            word = [int(token) for token in tokens[number]]
            if len(ids) + len(word) > LENGTH - 1 or not word:
                break
            ids += [tokenizer.mask_id] * len(word) if wanted[number] else word
            labels += word if wanted[number] else [-1] * len(word)
            words += int(wanted[number])
        sequences.append(np.array([*ids, tokenizer.sep_id], dtype=np.uint16))
        targets.append(np.array([*labels, -1], dtype=np.int64))
    batches = []
    for start in range(0, len(sequences), 32):
        part = slice(start, start + 32)
        count = len(sequences[part])
        plain: dict[str, Any] = {"labels": np.full(count, -1, dtype=np.int64), "external": np.ones(count, dtype=bool), "row_length": LENGTH}
        packed = pack(sequences[part], **plain, pad_id=tokenizer.pad_id)
        shifted = pack([np.where(target < 0, 65_535, target) for target in targets[part]], **plain, pad_id=65_535)
        flat = shifted.token_ids.ravel()
        masked = np.flatnonzero(flat != 65_535)
        fields = {name: getattr(packed, name) for name in packed.__dataclass_fields__}
        batches.append(Batch(**{**fields, "masked": masked, "mlm_labels": flat[masked]}))
    return batches, words


def bits_per_word(model: Model, batches: Sequence[Batch], words: int) -> float:
    """Summed loss of the masked tokens over the masked words."""
    nats = 0.0
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        for batch in batches:
            packed = PackedBatch.of(batch)
            logits = model.mlm_logits(model.hidden(packed), packed.masked).float()
            nats += float(functional.cross_entropy(logits, packed.mlm_labels, reduction="sum"))
    return nats / words / math.log(2)


def measured_speeds(arguments: argparse.Namespace, texts: Texts, tokenizers: Mapping[int, Tokenizer], default: Arm) -> dict[str, float]:
    """Return real tokens per CPU second of the peer and of our default: median of five alternating rounds."""
    path = arguments.out / "speeds.json"
    if path.is_file():
        return dict(json.loads(path.read_bytes()))
    from bench_training import Text, our_turn

    labels = np.array([texts.task.labels.index(str(example.label)) for example in texts.task.train], dtype=np.int64)
    text = Text(texts.passages, [example.text for example in texts.task.train], labels, len(texts.task.labels))
    paper, own = tokenizers[PAPER_VOCABULARY], tokenizers[default.vocabulary]
    start = build_model(ModelSpec(SIZE.bert, HeadConfig(pooling="cls"), vocab_size=paper.vocab_size, labels=text.label_count), seed=0)
    save_mlm(start, paper, arguments.out / "peer" / "mlm", max_length=LENGTH)
    save_classifier(start, paper, arguments.out / "peer" / "classifier", labels=texts.task.labels, max_length=LENGTH)
    sequences = [paper.sequences(part, max_length=LENGTH, cut="truncate") for part in (text.passages, text.task)]
    special = special_ids(paper)
    loop = ReleasedLoop(
        ReleasedModel(arguments.out / "peer" / "mlm", arguments.out / "peer" / "classifier"),
        [list(map(int, sequences[0][at])) for at in range(len(sequences[0]))],
        [(list(map(int, sequences[1][at])), int(labels[at])) for at in range(len(sequences[1]))],
        special={"pad": special.pad, "cls": special.cls, "sep": special.sep, "mask": special.mask},
        vocab_size=paper.vocab_size,
        batch=SIZE.batch,
        external_per_task=EXTERNAL_PER_TASK,
    )
    modern = build_model(ModelSpec(default.encoder, default.head, vocab_size=own.vocab_size, labels=text.label_count), seed=0)
    ours = our_turn(modern, default.phase, own, text, 4)
    rates: dict[str, list[float]] = {"released": [], "default": []}
    for turn in range(6):
        sides: dict[str, Callable[[], int]] = {
            "released": lambda: sum(loop.step() for _ in range(4)),
            "default": lambda: ours()[0],
        }
        for name, side in sides.items():
            began = time.process_time()
            tokens = side()
            if turn:
                rates[name].append(tokens / (time.process_time() - began))
    speeds = {name: statistics.median(values) for name, values in rates.items()}
    path.write_text(json.dumps(speeds) + "\n", "utf-8")
    return speeds


def print_table(curves: Sequence[Mapping[str, Any]]) -> None:
    """Print a row per arm: the final loss, and when the default reached it."""
    print("| recipe | minutes | tokens | bits per masked word | the default was as low after |")
    print("|---|---|---|---|---|")
    own = next((curve for curve in curves if curve["arm"].startswith("default")), None)
    for curve in curves:
        minutes = curve["points"][-1]["seconds"] / 60
        level = curve["final_bits"]
        reached = None if own is None else next((point["seconds"] for point in own["points"] if point["bits"] <= level), None)
        when = "not reached" if reached is None else f"{reached / 60:.1f} min"
        print(f"| {curve['arm']} | {minutes:.1f} | {curve['tokens'] / 1e6:.1f} M | {level:.2f} | {when} |")


def plot(curves: Sequence[Mapping[str, Any]], target: Path) -> None:
    """Plot bits over minutes, a line per arm, with a logarithmic axis."""
    import matplotlib as mpl

    mpl.use("svg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4))
    for curve, colour in zip(curves, ("#999999", "#666666", "#333333", "#0072B2", "#D55E00"), strict=False):
        points = [point for point in curve["points"] if point["seconds"] > 0]
        axes.plot(
            [point["seconds"] / 60 for point in points],
            [point["bits"] for point in points],
            "o-",
            color=colour,
            label=f"{curve['arm']}, {curve['points'][-1]['seconds'] / 60:.0f} min",
            ms=3,
        )
    axes.set_xscale("log")
    axes.set_xlabel("minutes on one core (log scale)")
    axes.set_ylabel("bits per masked word, held-out text")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, metadata={"Date": None})


def add_text_options(parser: argparse.ArgumentParser, *, out: Path, tokens: int, top_k: int) -> None:
    """Add the options that `read_texts` reads, with these defaults."""
    parser.add_argument("--data", type=Path, default=Path("../shared/data"), help="folder with tasks/chemprot/ and corpus/")
    parser.add_argument("--out", type=Path, default=out)
    parser.add_argument("--store", type=Path, default=Path("runs/store"))
    parser.add_argument("--selection-tokens", type=int, default=tokens)
    parser.add_argument("--top-k", type=int, default=top_k, help="passages retrieved for each text")


def parse_with_texts(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Parse the command line, make the folder --out, and check that --data has a corpus."""
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    if not (arguments.data / "corpus").is_dir():
        parser.error(f"{arguments.data}: no corpus/ there; pass --data FOLDER with corpus/*.jsonl.zst and tasks/chemprot/")
    return arguments


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_text_options(parser, out=Path("runs/learning"), tokens=3_000_000, top_k=50)
    parser.add_argument("--rates", type=float, nargs="+", default=[3e-4, 1e-3, 3e-3])
    parser.add_argument("--sweep-minutes", type=float, default=10.0, help="minutes of the released recipe at each learning rate")
    parser.add_argument("--released-minutes", type=float, default=60.0, help="minutes of the released recipe at the best learning rate")
    parser.add_argument("--minutes", type=float, default=4.0)
    parser.add_argument("--only", choices=["released", "default"], help="run one side; no file is written")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="change the default: joint.masking.rate=0.3, encoder.layers=2"
    )
    parser.add_argument("--label", default="", help="name of a changed default")
    parser.add_argument("--seed", type=int, default=1)
    return parse_with_texts(parser)


if __name__ == "__main__":
    main()
