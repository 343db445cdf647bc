"""Forecast the cost of a run before it starts (time, operations, memory, disk), and refuse one that the machine cannot complete.

Computed from sizes of files, estimated tokens, and the measured speed and memory of a training step (speed.py). After tokenizing, the
schedule has the exact steps.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from cramlm.config.base import Budget, parse_budget
from cramlm.config.phase import PhaseConfig
from cramlm.config.retriever import Bm25Config, DenseConfig, ElasticsearchConfig, RetrieverConfig
from cramlm.config.run import EncoderConfig, RunConfig
from cramlm.errors import EnvironmentFault, UsageError, size
from cramlm.linear.corpus_vectors import forecast_word_vectors
from cramlm.pipeline.context import threads_of
from cramlm.planning import budget
from cramlm.planning.speed import Measurement
from cramlm.recipes.recipe import PRESETS, encoder_for, for_budget, nominal_flops
from cramlm.records import Example, IntArray, Task
from cramlm.retrieval.ranking import CHARACTERS_PER_TOKEN

GROWTH = {".zst": 3.0, ".gz": 3.0, ".parquet": 2.0}  # text in a compressed file, per byte of it
_SECONDS_PER_BYTE = 5e-8  # to read, index and search raw text on one core: 24 s for 482 MB
_STORED_PER_TOKEN = 10.0  # of a passage: the ids and the position in the text
_STORED_PER_BYTE = 2.2  # parts, corpus and index on disk, per byte of raw text
_TOKENS_PER_PASSAGE = 270
_LOADING = 3.0  # seconds to read the last weights, write the export, check it against the model, and write the report
_BYTES_PER_EXTERNAL_TOKEN = 36.0  # while texts are tokenized: the text as str, its ids twice, positions as int64 three times
_SCATTER = 1.04  # fragmentation of the heap: 400 steps of mini took 12 % more memory than forecast, 25 steps 3 % less
_TEXT_STAGES = 250e6  # resident at the end of retrieval, beside what training takes: kernels, index pages, term statistics


@dataclass(frozen=True, slots=True)
class Machine:
    """Measurements of a phase with the vocabulary head and of one without. parameters: of the model. on_gpu: True if a GPU was measured."""

    joint: Measurement
    finetune: Measurement
    parameters: int
    on_gpu: bool = False

    @property
    def starved(self) -> Measurement | None:
        """The first measurement that other processes disturbed; None if there is none."""
        return next((each for each in (self.joint, self.finetune) if each.starved), None)

    @property
    def speed(self) -> budget.Speed:
        """The training speed in tokens per second."""
        return budget.Speed(self.joint.tokens_per_second, self.finetune.tokens_per_second)

    @property
    def speed_per_flop(self) -> budget.Speed:
        """The training speed in tokens per floating-point operation."""
        return budget.Speed(1 / self.joint.flops_per_token, 1 / self.finetune.flops_per_token)

    def times(self, ranks: int) -> Machine:
        """Return the speed of `ranks` processes, if none slows another down and communication is free."""
        joint, finetune = (replace(each, tokens_per_second=ranks * each.tokens_per_second) for each in (self.joint, self.finetune))
        return replace(self, joint=joint, finetune=finetune)


@dataclass(frozen=True, slots=True)
class TextSizes:
    """Estimates before tokenizing. rows: the row length. corpus_bytes: of raw text, decompressed."""

    sizes: budget.Sizes
    rows: int
    corpus_bytes: int


@dataclass(frozen=True, slots=True)
class CostForecast:
    """The forecast of a run. seconds: wall-clock time in all. memory: peak of resident bytes; None if the system does not report it.
    gpu_memory: bytes of a GPU; None without one.
    """

    phases: tuple[PhaseConfig, ...]
    retriever: RetrieverConfig | None
    parameters: int
    external_tokens: int
    phase_seconds: tuple[float, ...]
    seconds: float
    flops: float
    memory: int | None
    disk: int
    gpu_memory: int | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return plain JSON, without phases and retriever."""
        return {name: value for name, value in asdict(self).items() if name not in ("phases", "retriever")}

    def describe(self) -> str:
        """Return the cost in one line."""
        memory = "" if self.memory is None else f", at most {size(self.memory)} of memory"
        memory += "" if self.gpu_memory is None else f", {size(self.gpu_memory)} of the GPU's"
        selected = f"{self.external_tokens / 1e6:.2f}M tokens of raw text, " if self.external_tokens else ""
        return (
            f"{self.parameters / 1e6:.1f}M parameters, {selected}{self.seconds / 60:.1f} min in all, {self.flops:.1e} FLOPs{memory}, "
            f"{size(self.disk)} of disk"
        )


def beyond_budget(config: RunConfig, cost: CostForecast) -> str | None:
    """Return a warning if phases of fixed length make the run exceed its budget by a fifth or more."""
    limit, fixed = config.limit, [phase.name for phase in config.phases if not budget.is_open(phase)]
    planned, allowed = (cost.seconds, limit.seconds) if limit.flops is None else (cost.flops, limit.flops)
    if not fixed or allowed is None or planned < 1.2 * allowed:
        return None
    amount = f"{planned / 60:,.0f} min" if limit.flops is None else f"{planned:.1e} operations"
    return f"the length of {', '.join(fixed)} is fixed, so the run takes {amount}, more than its budget of {config.budget}"


def forecast_cost(
    config: RunConfig, texts: TextSizes, machine: Machine, *, elapsed: float = 0.0, resident: int | None = None, peak: int | None = None
) -> CostForecast:
    """Forecast the run on this machine.

    elapsed: seconds since the run began. resident, peak: resident bytes of this process, now and at most.

    Raises:
        UsageError: if the budget is too small to train at all; it names one that is not. As `Planner.plan`.
    """
    limit, speed = config.limit, machine.speed
    preparing = preparing_seconds(config, texts.corpus_bytes)
    budget_speed, amount = (speed, None) if limit.flops is None else (machine.speed_per_flop, limit.flops)
    if limit.seconds is not None:
        amount = limit.seconds - elapsed - preparing - finishing_seconds(texts.sizes, speed)
    retriever, passes = None, budget.passes_over_selection(config.phases)
    if config.retriever is not None:
        retriever = budget.plan_selection(config.retriever, amount=amount, tokens_per_unit=budget_speed.joint, passes=passes)
    external = _external_tokens(retriever, texts)
    sizes = replace(texts.sizes, external_tokens=external)
    planner = budget.Planner(sizes, budget_speed)
    if amount is not None and (message := time_shortage(config, texts.corpus_bytes)):
        raise UsageError(f"{message}; pass --budget {_least_budget(config, planner, amount)} or more")
    if limit.seconds is not None and machine.starved is not None:  # a busy machine is no reason to refuse
        amount = max(amount or 0.0, planner.minimum_amount(config.phases))
    phases = _planned(config, planner, amount, rows=texts.rows)
    seconds = tuple(map(budget.Planner(sizes, speed).amount_of, phases))
    each = [(phase, machine.joint if phase.text_terms else machine.finetune) for phase in phases]
    held = [step.bytes for _, step in each if step.bytes is not None]
    weights = 4 * machine.parameters  # the best so far, beside those in training; of a GPU the exported ones, on the CPU
    memory, gpu_memory = None, round(_SCATTER * (max(held) + weights)) if held and machine.on_gpu else None
    if held and resident is not None:
        tokens = external * _BYTES_PER_EXTERNAL_TOKEN + 12 * sizes.train_tokens
        step = 0 if machine.on_gpu else max(held)
        training = round(_SCATTER * (resident + step + tokens + weights + (_TEXT_STAGES if retriever else 0)))
        memory = max(peak or 0, training, resident + forecast_word_vectors(texts.corpus_bytes)[1])
    return CostForecast(
        phases,
        retriever,
        parameters=machine.parameters,
        external_tokens=external,
        phase_seconds=seconds,
        seconds=elapsed + preparing + sum(seconds) + finishing_seconds(sizes, speed),
        flops=sum(sizes.tokens_of(phase) * step.flops_per_token for phase, step in each),
        memory=memory,
        disk=_disk_bytes(machine.parameters, sizes, texts.corpus_bytes, len(phases)),
        gpu_memory=gpu_memory,
    )


def _planned(config: RunConfig, planner: budget.Planner, amount: float | None, *, rows: int) -> tuple[PhaseConfig, ...]:
    """Plan the phases as `Planner.plan`; the error for a budget that is too small names one that is not."""
    try:
        return planner.plan(config.phases, amount=amount, rows=rows)
    except UsageError as error:
        if amount is None:
            raise
        smaller = ", or a smaller --preset" if config.encoder.hidden > PRESETS["tiny"].hidden else ""
        raise UsageError(f"{error}; pass --budget {_least_budget(config, planner, amount)} or more{smaller}") from None


def preparing_seconds(config: RunConfig, corpus_bytes: int) -> float:
    """Seconds before training: reading, indexing and searching raw text, and counting its word vectors."""
    return corpus_bytes * _SECONDS_PER_BYTE + forecast_word_vectors(corpus_bytes, threads_of(config))[0]


def time_shortage(config: RunConfig, corpus_bytes: int) -> str | None:
    """Return a message if a budget of time is too short to read the raw text and to export, without any training of open phases."""
    least, seconds = preparing_seconds(config, corpus_bytes) + _LOADING, config.limit.seconds
    if seconds is None or least < seconds or not any(map(budget.is_open, config.phases)):
        return None
    what = f"reading and counting {size(corpus_bytes)} of raw text and the export take" if corpus_bytes else "the export takes"
    return f"the budget leaves no time to train: {what} about {least:.0f} s"


def _least_budget(config: RunConfig, planner: budget.Planner, amount: float) -> str:
    """Return the least budget, as it is typed, with which the phases can be planned, also those that a recipe makes for that budget.

    amount: what the config's budget leaves for them.
    """
    needed = max(amount, planner.minimum_amount(config.phases))
    while True:
        least = _enlarged(config.limit, needed - amount)
        left = amount + _quantity(parse_budget(least)) - _quantity(config.limit)
        phases, speed = _with_budget(config, planner.speed, least)
        if planner.suffices(config.phases, left) and replace(planner, speed=speed).suffices(phases, left):
            return least
        needed *= 1.01


def _with_budget(config: RunConfig, speed: budget.Speed, larger: str) -> tuple[tuple[PhaseConfig, ...], budget.Speed]:
    """Return the phases of a run from scratch as its recipe makes them for a larger budget, and their speed, estimated from the weights of
    the encoder's layers if the recipe chose the encoder and chooses a larger one.
    """
    if config.init is not None:
        return config.phases, speed
    flops = nominal_flops(larger, config.device)
    before, after = encoder_for(nominal_flops(config.budget, config.device)), encoder_for(flops)
    factor = _layer_weights(before) / _layer_weights(after) if _layer_weights(config.encoder) == _layer_weights(before) else 1.0
    return tuple(for_budget(phase, flops) for phase in config.phases), budget.Speed(factor * speed.joint, factor * speed.finetune)


def _layer_weights(encoder: EncoderConfig) -> int:
    return encoder.layers * encoder.hidden * (4 * encoder.hidden + 3 * encoder.intermediate)


def _quantity(limit: Budget) -> float:
    """Return the seconds or the operations of a budget."""
    return limit.flops or limit.seconds or 0.0


def _enlarged(limit: Budget, missing: float) -> str:
    """Return a budget that is larger by `missing` seconds or operations, rounded up, as it is typed."""
    if limit.flops is not None:
        unit = 10.0 ** (math.floor(math.log10(limit.flops + missing)) - 1)
        return f"{math.ceil((limit.flops + missing) / unit) * unit:.1e}flops".replace("e+", "e")
    seconds = math.ceil((limit.seconds or 0.0) + missing)
    return f"{seconds}s" if seconds < 120 else f"{math.ceil(seconds / 60)}m"


def check_resources(cost: CostForecast, *, memory: int | None, gpu_memory: int | None, disk: int, folder: object) -> None:
    """Raise EnvironmentFault if the run needs more memory, GPU memory or disk space than is available."""
    for needed, available, whose in ((cost.memory, memory, ""), (cost.gpu_memory, gpu_memory, " on the GPU")):
        if needed is not None and available is not None and needed > available:
            raise EnvironmentFault(
                f"this run needs about {size(needed)} of memory{whose} and {size(available)} are available; pass a smaller "
                "--preset, a smaller --set phases[0].batch_size=N, or close other programs"
            )
    if cost.disk > disk:
        raise EnvironmentFault(
            f"{folder}: this run needs about {size(cost.disk)} of disk and {size(disk)} are free; free space, or pass "
            "--out and --store on another disk"
        )


def finishing_seconds(sizes: budget.Sizes, speed: budget.Speed) -> float:
    """Seconds after training: logit adjustment, scores on dev and test, the export and its check, the report."""
    return _LOADING + 1.5 * (2 * sizes.dev_tokens + sizes.test_tokens) / (speed.finetune * budget.EVALUATION_SPEEDUP)


def estimate_texts(task: Task, config: RunConfig, corpus_bytes: int) -> TextSizes:
    """Estimate tokens from characters, before there is a tokenizer."""
    lengths = [_estimated_lengths(split) for split in (task.train, task.dev, task.test)]
    return TextSizes(*sizes_in_rows(task, config, lengths), corpus_bytes)


def sizes_in_rows(task: Task, config: RunConfig, lengths: Sequence[IntArray], *, external_tokens: int = 0) -> tuple[budget.Sizes, int]:
    """Return the sizes of the data of a run and its row length. lengths: tokens of the sequences of train, dev and test."""
    rows = budget.row_length(lengths[0], longest=config.encoder.max_positions)
    longest = max(phase.max_length or rows for phase in config.phases)
    train, dev, test = (int(np.minimum(each, longest).sum()) for each in lengths)
    train = train * len(task.train) // len(lengths[0])  # a pass reads each text in one pattern of a prompt
    return budget.Sizes(len(task.train), len(task.labels), train, dev, test, external_tokens), rows


def raw_bytes(files: Iterable[tuple[str, int]]) -> int:
    """Estimate the bytes of text in files of these names and sizes, with the usual compression ratios."""
    return round(sum(size * next((factor for end, factor in GROWTH.items() if name.endswith(end)), 1.0) for name, size in files))


def _estimated_lengths(examples: Iterable[Example]) -> IntArray:
    return np.array([len(example.whole_text) / CHARACTERS_PER_TOKEN + 2 for example in examples]).astype(np.int64)


def _external_tokens(retriever: RetrieverConfig | None, texts: TextSizes) -> int:
    if retriever is None:
        return 0
    available = texts.corpus_bytes / CHARACTERS_PER_TOKEN if texts.corpus_bytes else math.inf
    max_tokens = math.inf if retriever.max_tokens is None else float(retriever.max_tokens)
    passages = retriever.max_documents or _most_per_query(retriever) * texts.sizes.train_examples
    bound = min(available, max_tokens, passages * _TOKENS_PER_PASSAGE)
    return 0 if bound == math.inf else int(bound)


def _most_per_query(retriever: RetrieverConfig) -> float:
    match retriever:
        case Bm25Config() | DenseConfig() | ElasticsearchConfig():
            return retriever.depths[-1]
        case _:
            return math.inf


def _disk_bytes(parameters: int, sizes: budget.Sizes, corpus_bytes: int, phases: int) -> int:
    """Corpus and index in the store; in the run the task, the selection and its tokens, weights of each phase, three checkpoints (one being
    written), predictions and the export.
    """
    weights = 4.0 * parameters
    return round(
        corpus_bytes * _STORED_PER_BYTE
        + sizes.external_tokens * (CHARACTERS_PER_TOKEN * 1.1 + _STORED_PER_TOKEN)
        + weights * (phases + 2)
        + weights * 4 * 3
        + (sizes.dev_tokens + sizes.test_tokens) * 4
        + (sizes.train_tokens + sizes.dev_tokens + sizes.test_tokens) * CHARACTERS_PER_TOKEN
        + 20e6
    )
