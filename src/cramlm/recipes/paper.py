"""The paper's own recipes at its three scales, number for number (Yao et al. 2022, tables of section 4 and the appendix; released code).

Stage 1 trains BERT from scratch: rho_1 whole external batches, then one task batch; 15 % masks, 80/10/10; AdamW at 1e-4, 10,000 steps of
warm-up. Stage 2 learns the labels with a new head: 30,000 steps of 32 texts at 2e-5, the best on dev kept. `loss_scale` is "mean", the
released code's, which made the published figures; `--set phases[0].loss_scale=sum` is the paper's formula (docs/concepts/paper-map.md).

For other tasks than the paper's eight, the settings of the one with a similar number of labels are taken. A scale below 1 gives the twin:
the same phases, ratios and rates with as many times fewer steps, in a small BERT and small batches, to run here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Final, Literal, TypeAlias

from cramlm.config.head import HeadConfig
from cramlm.config.phase import OptimizerConfig, PhaseConfig, ScheduleConfig
from cramlm.config.retriever import Bm25Config
from cramlm.config.run import DEV_METRICS, EncoderConfig, RunConfig, TaskConfig, TokenizerConfig
from cramlm.config.terms import Classify, Mlm
from cramlm.data.task import RowFormat, read_examples
from cramlm.errors import UsageError
from cramlm.planning.budget import TYPICAL
from cramlm.recipes.recipe import BERT_BASE, BERT_LARGE, BERT_MASKS, Recipe, RunInputs, Start, with_top_k

Scale: TypeAlias = Literal["small", "medium", "large"]

SCALES: Final[tuple[Scale, ...]] = ("small", "medium", "large")
BERT_VOCABULARY: Final = 30_522
TWIN_BASE: Final = EncoderConfig(shape="bert", layers=2, hidden=128, heads=2, intermediate=512, norm_eps=1e-12)  # Turc et al. 2019
TWIN_LARGE: Final = EncoderConfig(shape="bert", layers=4, hidden=256, heads=4, intermediate=1024, norm_eps=1e-12)
_TWIN_BATCH: Final = 16
_FEWEST_STEPS, _FEWEST_TASK_BATCHES = 20, 5


@dataclass(frozen=True, slots=True)
class PaperTask:
    """Stage 1 of a task; tuples are for small, medium, large. lengths: tokens of task text, external_lengths: of external text."""

    top_k: tuple[int, int, int]
    rho_1: tuple[int, int, int]
    rho_2: tuple[int, int, int]
    steps: tuple[int, int, int]
    batch_large: int
    lengths: tuple[int, int, int] = (128, 128, 128)
    external_lengths: tuple[int, int, int] = (128, 128, 128)
    score: Literal["macro_f1", "micro_f1"] = "macro_f1"
    long_texts: bool = False


PAPER_TASKS: Final[Mapping[str, PaperTask]] = {
    "agnews": PaperTask((50, 50, 100), (1, 3, 3), (100, 100, 100), (100_000, 300_000, 500_000), 256),
    "hyperpartisan": PaperTask((5000, 5000, 10_000), (99, 99, 499), (20, 100, 20), (50_000, 100_000, 300_000), 512, long_texts=True),
    "helpfulness": PaperTask((50, 50, 100), (1, 1, 7), (100, 1000, 100), (150_000, 300_000, 500_000), 512, long_texts=True),
    "imdb": PaperTask(
        *((500, 500, 1000), (19, 99, 99), (100, 100, 1000), (150_000, 300_000, 500_000), 512),
        lengths=(512, 512, 512),
        external_lengths=(128, 512, 512),
        long_texts=True,
    ),
    "acl-arc": PaperTask((5000, 5000, 10_000), (999, 999, 1999), (100, 20, 20), (150_000, 300_000, 500_000), 512),
    "scierc": PaperTask((5000, 5000, 10_000), (999, 999, 1999), (20, 20, 20), (150_000, 300_000, 300_000), 512),
    "chemprot": PaperTask((5000, 5000, 10_000), (999, 999, 1999), (20, 100, 20), (150_000, 300_000, 500_000), 256, score="micro_f1"),
    "rct": PaperTask((50, 50, 100), (3, 3, 7), (20, 100, 100), (100_000, 300_000, 500_000), 256, score="micro_f1"),
}
"""By the name that stands after the colon in `--recipe tlm-small:chemprot`."""


@dataclass(frozen=True)
class PaperRecipe(Recipe):
    """The paper's settings at one of its scales. All steps are set, so a budget changes nothing; it is kept for the record."""

    own_options: ClassVar[tuple[str, ...]] = ("like", "shrink")

    scale: Scale
    start: Start = field(default="scratch", kw_only=True)

    def reads_corpus(self, init: str | None) -> bool:
        return True

    def build(self, inputs: RunInputs, *, like: str | None = None, shrink: float = 1.0, **own: Any) -> RunConfig:
        """Make the config. like: one of `PAPER_TASKS`; None = by the number of texts in `train` (`settings_by_labels`). shrink: below 1
        gives the twin (`twin`).

        Raises:
            UsageError: if `like` is not a task of the paper. DataError: if `train` cannot be read.
        """
        if like is not None and like not in PAPER_TASKS:
            raise UsageError(f"{like!r} is not a task of the paper; write {self.name}:TASK with one of {', '.join(PAPER_TASKS)}, or none")
        settings = settings_by_labels(_count(inputs.task)) if like is None else PAPER_TASKS[like]
        column = SCALES.index(self.scale)
        retriever = Bm25Config(
            top_k=settings.top_k[column],
            norm="lucene",  # Elasticsearch's
            queries="phrases" if settings.long_texts else "text",
        )
        whole = RunConfig(
            name=self.name,
            **inputs.settings,
            retriever=with_top_k(retriever, inputs.top_k, recipe=self.name),
            tokenizer=TokenizerConfig(vocab_size=BERT_VOCABULARY),
            encoder=BERT_LARGE if self.scale == "large" else BERT_BASE,
            head=HeadConfig(pooling="cls"),
            phases=(stage_1(settings, self.scale), stage_2(settings, self.scale)),
            dev_metric=settings.score if settings.score in DEV_METRICS[inputs.task.kind] else None,
            logit_adjustment="none",
        )
        return whole if shrink == 1.0 else twin(whole, shrink)


def settings_by_labels(labelled: int) -> PaperTask:
    """Return the settings for a task that is not one of the paper's eight, by its number of labelled texts, with texts of 128 tokens.

    Under 1,000 the settings of HyperPartisan (515 texts), under 5,000 (the paper's bound of low-resource tasks) of SciERC (3,219), under
    50,000 of IMDB (20,000), else of AG News (115,000); scored by macro-F1.
    """
    bounds = ((1_000, "hyperpartisan"), (5_000, "scierc"), (50_000, "imdb"))
    like = next((name for bound, name in bounds if labelled < bound), "agnews")
    usual = (128, 128, 128)
    return replace(PAPER_TASKS[like], lengths=usual, external_lengths=usual, long_texts=False)


def stage_1(task: PaperTask, scale: Scale) -> PhaseConfig:
    """Return the joint stage."""
    column = SCALES.index(scale)
    steps = task.steps[column]
    return PhaseConfig(
        name="joint",
        terms=(Mlm(on="external"), Mlm(on="task", weight=float(task.rho_2[column])), Classify()),
        steps=steps,
        external=task.rho_1[column],
        task=1,
        mixing="interleaved",
        loss_scale="mean",
        masking=BERT_MASKS,
        batch_size=task.batch_large if scale == "large" else 256,
        batch_unit="sequences",
        max_length=task.lengths[column],
        external_length=task.external_lengths[column],
        dropout=0.1,
        attention_dropout=0.1,
        optimizer=OptimizerConfig(kind="adamw", learning_rate=1e-4, weight_decay=0.01),
        schedule=ScheduleConfig(kind="linear", warmup_fraction=10_000 / steps),
        keep="last",
    )


def stage_2(task: PaperTask, scale: Scale) -> PhaseConfig:
    """Labels only, with a new head."""
    return PhaseConfig(
        name="finetune",
        terms=(Classify(),),
        steps=30_000,
        external=0,
        task=1,
        batch_size=32,
        batch_unit="sequences",
        max_length=task.lengths[SCALES.index(scale)],
        dropout=0.1,
        attention_dropout=0.1,
        optimizer=OptimizerConfig(kind="adamw", learning_rate=2e-5, weight_decay=0.0),
        schedule=ScheduleConfig(kind="linear", warmup_fraction=3_000 / 30_000),
        keep="best",
        reset_task_head=True,
        evaluate_every=1_000,
    )


def twin(config: RunConfig, shrink: float) -> RunConfig:
    """Return the run `shrink` times as long: steps, documents per query and intervals times `shrink`, batches of 16 texts, a BERT of 2
    layers of 128 (for BERT-large 4 of 256), 8,192 words.

    What cannot shrink keeps its sense: at least 20 steps a phase, and rho_1 small enough that at least 5 task batches come.

    Raises:
        UsageError: unless 0 < shrink < 1.
    """
    if not 0.0 < shrink < 1.0:
        raise UsageError(f"a twin's scale is {shrink}, expected a number between 0 and 1, like 0.001")
    assert isinstance(config.retriever, Bm25Config)
    assert config.retriever.top_k is not None, "the paper says K for every task"
    changed: dict[str, Any] = {
        "retriever": config.retriever.model_copy(update={"top_k": max(5, round(config.retriever.top_k * shrink))}),
        "tokenizer": config.tokenizer.model_copy(update={"vocab_size": 8_192}),
        "encoder": TWIN_LARGE if config.encoder == BERT_LARGE else TWIN_BASE,
        "phases": tuple(_shrunk(phase, shrink) for phase in config.phases),
    }
    return config.model_copy(update=changed)


def _shrunk(phase: PhaseConfig, shrink: float) -> PhaseConfig:
    steps = max(_FEWEST_STEPS, round((phase.steps or 0) * shrink))
    every = None if phase.evaluate_every is None else max(1, steps * phase.evaluate_every // (phase.steps or 1))
    external = min(phase.external, steps // _FEWEST_TASK_BATCHES - 1) if phase.external else 0
    return phase.model_copy(update={"steps": steps, "evaluate_every": every, "external": external, "batch_size": _TWIN_BATCH})


def _count(task: TaskConfig) -> int:
    if not task.train:
        return TYPICAL.train_examples
    return len(read_examples(task.train, RowFormat.of(task), max_record_bytes=task.max_record_bytes, on_bad_row=task.on_bad_row))


def paper_recipe(scale: Scale) -> PaperRecipe:
    """tlm-small, tlm-medium or tlm-large."""
    size = {"small": "BERT-base", "medium": "BERT-base, longer", "large": "BERT-large"}[scale]
    return PaperRecipe(f"tlm-{scale}", f"the paper's {scale} scale ({size}): tlm-{scale}[:TASK[:SCALE]], {len(PAPER_TASKS)} tasks", scale)
