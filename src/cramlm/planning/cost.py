"""What a run will cost, said before it starts: time, operations, memory, disk; and whether it can end well at all.

Everything here is arithmetic on counts: sizes of files, estimated tokens, the speed and the memory of a step as measuring.py found them.
The schedule says the steps exactly once the texts are tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from cramlm.config.base import Budget
from cramlm.config.retriever import Bm25Config, DenseConfig, ElasticsearchConfig, RetrieverConfig
from cramlm.config.run import PhaseConfig, RunConfig
from cramlm.errors import EnvironmentFault
from cramlm.planning import budget
from cramlm.planning.speed import Measurement
from cramlm.records import Example, IntArray, Task
from cramlm.retrieval.ranking import CHARACTERS_PER_TOKEN

GROWTH = {".zst": 3.0, ".gz": 3.0, ".parquet": 2.0}  # text in a compressed file, per byte of it
_SECONDS_PER_BYTE = 5e-8  # to read, index and search raw text, one core: 24 s for 482 MB (README)
_STORED_PER_TOKEN = 10.0  # of a passage: its id, and where it stands in the text
_STORED_PER_BYTE = 2.2  # parts, corpus and index on disk, per byte of raw text
_TOKENS_PER_PASSAGE = 270
_LOADING = 3.0  # seconds to read the last weights, write the export, check it against the model, and draw the report
_BYTES_PER_EXTERNAL_TOKEN = 36.0  # while texts become tokens: the text as str, its ids twice, places as int64 three times
_SCATTER = 1.04  # what a heap scatters while a run goes on: 400 steps of mini held 12 % more than stated, 25 held 3 % less
_TEXT_STAGES = 250e6  # resident at the end of retrieval, beside what training takes: kernels, index pages, term statistics


@dataclass(frozen=True, slots=True)
class Machine:
    """A phase with the vocabulary head and one without, as they train here. parameters: of the model."""

    joint: Measurement
    finetune: Measurement
    parameters: int

    @property
    def speed(self) -> budget.Speed:
        """In tokens per second."""
        return budget.Speed(self.joint.tokens_per_second, self.finetune.tokens_per_second)

    @property
    def economy(self) -> budget.Speed:
        """In tokens per floating-point operation."""
        return budget.Speed(1 / self.joint.flops_per_token, 1 / self.finetune.flops_per_token)

    def times(self, ranks: int) -> Machine:
        """So many processes as fast as this one, if none slows another down and exchanges cost nothing."""
        joint, finetune = (replace(each, tokens_per_second=ranks * each.tokens_per_second) for each in (self.joint, self.finetune))
        return Machine(joint, finetune, self.parameters)


@dataclass(frozen=True, slots=True)
class Texts:
    """What is known before anything is tokenized: estimates of tokens, and bytes of raw text (decompressed)."""

    sizes: budget.Sizes
    rows: int
    corpus_bytes: int


@dataclass(frozen=True, slots=True)
class Outlook:
    """A run as it is foreseen. seconds: wall clock, everything; memory: most bytes resident, None where the system does not tell."""

    phases: tuple[PhaseConfig, ...]
    retriever: RetrieverConfig | None
    parameters: int
    external_tokens: int
    phase_seconds: tuple[float, ...]
    seconds: float
    flops: float
    memory: int | None
    disk: int

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON, without phases and retriever."""
        return {name: value for name, value in asdict(self).items() if name not in ("phases", "retriever")}

    def describe(self) -> str:
        """The cost in one line."""
        memory = "" if self.memory is None else f", at most {self.memory / 1e9:.1f} GB of memory"
        selected = f"{self.external_tokens / 1e6:.1f}M tokens of raw text, " if self.external_tokens else ""
        return (
            f"{self.parameters / 1e6:.1f}M parameters, {selected}{self.seconds / 60:.1f} min in all, {self.flops:.1e} FLOPs{memory}, "
            f"{self.disk / 1e9:.1f} GB of disk"
        )


def foresee(
    config: RunConfig,
    given: Budget,
    texts: Texts,
    machine: Machine,
    *,
    elapsed: float = 0.0,
    resident: int | None = None,
    peak: int | None = None,
) -> Outlook:
    """The run that this budget gives on this machine.

    elapsed: seconds that are gone. resident, peak: bytes that this process holds, and the most that it held.

    Raises:
        UsageError: as `budget.plan_phases`: the budget is too small to train at all.
    """
    speed = machine.speed
    preparing = texts.corpus_bytes * _SECONDS_PER_BYTE
    units, amount = (speed, None) if given.flops is None else (machine.economy, given.flops)
    if given.seconds is not None:
        amount = given.seconds - elapsed - preparing - finishing_seconds(texts.sizes, speed)
    retriever, passes = None, budget.passes_over_selection(config.phases)
    if config.retriever is not None:
        retriever = budget.plan_selection(config.retriever, amount=amount, tokens_per_unit=units.joint, passes=passes)
    external = _external_tokens(retriever, texts)
    sizes = budget.Sizes(**{**asdict(texts.sizes), "external_tokens": external})
    if amount is not None and given.flops is None and (machine.joint.starved or machine.finetune.starved):
        amount = max(amount, budget.least_amount(config.phases, sizes, units))  # says little about this machine: no reason to refuse
    phases = budget.plan_phases(config.phases, sizes=sizes, speed=units, amount=amount, rows=texts.rows)
    seconds = tuple(budget.phase_amount(phase, sizes, speed) for phase in phases)
    each = [(phase, machine.joint if phase.text_terms else machine.finetune) for phase in phases]
    held = [step.bytes for _, step in each if step.bytes is not None]
    memory = None
    if held and resident is not None:
        tokens = external * _BYTES_PER_EXTERNAL_TOKEN + 12 * sizes.train_tokens
        weights = 4 * machine.parameters  # the best so far, beside those in training
        memory = max(peak or 0, round(_SCATTER * (resident + max(held) + tokens + weights + (_TEXT_STAGES if retriever else 0))))
    return Outlook(
        phases,
        retriever,
        machine.parameters,
        external,
        seconds,
        elapsed + preparing + sum(seconds) + finishing_seconds(sizes, speed),
        sum(budget.phase_tokens(phase, sizes) * step.flops_per_token for phase, step in each),
        memory,
        _disk_bytes(machine.parameters, sizes, texts.corpus_bytes, len(phases)),
    )


def refuse_hopeless(outlook: Outlook, *, memory: int | None, disk: int, folder: object) -> None:
    """Raises EnvironmentFault if the run needs more memory than is available, or more disk than is free where it is written."""
    if memory is not None and outlook.memory is not None and outlook.memory > memory:
        raise EnvironmentFault(
            f"this run needs about {outlook.memory / 1e9:.1f} GB of memory and {memory / 1e9:.1f} GB are available; pass a smaller "
            "--preset, a smaller --set phases[0].batch_size=N, or close other programs"
        )
    if outlook.disk > disk:
        raise EnvironmentFault(
            f"{folder}: this run needs about {outlook.disk / 1e9:.1f} GB of disk and {disk / 1e9:.1f} GB are free; free space, or pass "
            "--out and --store on another disk"
        )


def finishing_seconds(sizes: budget.Sizes, speed: budget.Speed) -> float:
    """What comes after training: the prior of the labels tried on dev, dev and test scored, the export written and checked, the report."""
    return _LOADING + 1.5 * (2 * sizes.dev_tokens + sizes.test_tokens) / (speed.finetune * budget.EVALUATION_SPEEDUP)


def estimate_texts(task: Task, config: RunConfig, corpus_bytes: int) -> Texts:
    """Tokens from characters, before there is a tokenizer."""
    lengths = _estimated_lengths(task.train)
    rows = budget.row_length(lengths, longest=config.encoder.max_positions)
    longest = max(phase.max_length or rows for phase in config.phases)
    train, dev, test = (
        int(np.minimum(each, longest).sum()) for each in (lengths, _estimated_lengths(task.dev), _estimated_lengths(task.test))
    )
    return Texts(budget.Sizes(len(task.train), len(task.labels), train, dev, test, 0), rows, corpus_bytes)


def raw_bytes(files: Iterable[tuple[str, int]]) -> int:
    """Bytes of text in files of these names and sizes, decompressed as compressed text usually is."""
    return round(sum(size * next((factor for end, factor in GROWTH.items() if name.endswith(end)), 1.0) for name, size in files))


def _estimated_lengths(examples: Iterable[Example]) -> IntArray:
    return np.array([len(example.whole_text) / CHARACTERS_PER_TOKEN + 2 for example in examples]).astype(np.int64)


def _external_tokens(retriever: RetrieverConfig | None, texts: Texts) -> int:
    if retriever is None:
        return 0
    there = texts.corpus_bytes / CHARACTERS_PER_TOKEN if texts.corpus_bytes else math.inf
    asked = math.inf if retriever.max_tokens is None else float(retriever.max_tokens)
    found = _most_per_query(retriever) * texts.sizes.train_examples
    passages = found if retriever.max_documents is None else retriever.max_documents
    bound = min(there, asked, passages * _TOKENS_PER_PASSAGE)
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
