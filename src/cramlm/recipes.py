"""Functions that return a complete `RunConfig`. A method is a list of phases; there is nothing else to a recipe.

    tlm               retrieve, then joint (external : task, MLM on both, labels) -> finetune (labels only)       Yao et al. 2022
    random_retrieval  the same with documents drawn blindly: what retrieval adds
    labels_only       finetune alone, from scratch, no raw text: what the raw text adds

Numbers that a recipe leaves open (steps, row length, size of the selection) are set by the planner (training/budget.py) from the
time budget and the sizes of the data; every one can be fixed by hand (`--set phases[0].steps=500`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cramlm.config import (
    Bm25Config,
    CorpusConfig,
    EncoderConfig,
    HeadConfig,
    MaskingConfig,
    OptimizerConfig,
    PhaseConfig,
    RandomConfig,
    RetrieverConfig,
    RunConfig,
    ScheduleConfig,
    TaskConfig,
    parse_budget,
)
from cramlm.errors import UsageError

DEFAULT_BUDGET = "20m"

# Sizes by wall-clock time on two CPU cores: at a small, fixed amount of compute the loss depends little on the shape (Geiping and
# Goldstein 2022), so a size is chosen that still sees each retrieved passage several times.
TINY = EncoderConfig(layers=2, hidden=192, heads=3, intermediate=384, embedding_init="cooccurrence")
MINI = EncoderConfig(layers=4, hidden=256, heads=4, intermediate=512, embedding_init="cooccurrence")
SMALL = EncoderConfig(layers=6, hidden=384, heads=6, intermediate=768, embedding_init="cooccurrence")
BASE = EncoderConfig(layers=12, hidden=768, heads=12, intermediate=1536, embedding_init="cooccurrence")
# The paper's: BERT-base at its small and medium scale, BERT-large at its large one.
BERT_BASE = EncoderConfig(shape="bert", layers=12, hidden=768, heads=12, intermediate=3072, norm_eps=1e-12)
BERT_LARGE = EncoderConfig(shape="bert", layers=24, hidden=1024, heads=16, intermediate=4096, norm_eps=1e-12)

PRESETS: Mapping[str, EncoderConfig] = {
    "tiny": TINY,
    "mini": MINI,
    "small": SMALL,
    "base": BASE,
    "bert-base": BERT_BASE,
    "bert-large": BERT_LARGE,
}
"""Sizes by the name that `--preset` takes."""


def encoder_for_budget(seconds: float) -> EncoderConfig:
    """tiny under 2 minutes, mini up to an hour, small beyond."""
    return TINY if seconds < 120 else MINI if seconds <= 3600 else SMALL


def joint_phase() -> PhaseConfig:
    """External and task text side by side in every batch; the paper's stage 1 with a task weight that is felt, and a teacher's labels on
    external text.
    """
    return PhaseConfig(
        name="joint",
        external=4,
        task=1,
        mixing="blended",
        mlm_weight=0.25,
        task_weight=0.25,
        masking=MaskingConfig(rate=0.2, mask_share=1.0, random_share=0.0),
        batch_size=4096,
        optimizer=OptimizerConfig(kind="muon"),
        schedule=ScheduleConfig(kind="wsd", warmup_fraction=0.03, decay_fraction=0.4),
        keep="last",
    )


def finetune_phase() -> PhaseConfig:
    """Labels only, no vocabulary head; the paper's stage 2. The encoder is young, so it is trained on with Muon rather than tuned."""
    return PhaseConfig(
        name="finetune",
        external=0,
        task=1,
        mlm_weight=0.0,
        task_weight=1.0,
        batch_size=32,
        batch_unit="sequences",
        optimizer=OptimizerConfig(kind="muon", learning_rate=1e-3, muon_learning_rate=2e-3),
        schedule=ScheduleConfig(kind="linear", warmup_fraction=0.1),
        keep="best",
    )


def tlm(
    *, train: str, corpus: str | Sequence[str], budget: str | None = DEFAULT_BUDGET, seed: int = 13, top_k: int = 50, **task: Any
) -> RunConfig:
    """Task-driven language modeling with BM25 retrieval. `task` takes the other fields of `TaskConfig` (dev, test, text_column, ...)."""
    return _with_retrieval("tlm", Bm25Config(top_k=top_k), train=train, corpus=corpus, budget=budget, seed=seed, task=task)


def random_retrieval(
    *, train: str, corpus: str | Sequence[str], budget: str | None = DEFAULT_BUDGET, seed: int = 13, **task: Any
) -> RunConfig:
    """The control: as `tlm`, but the documents are drawn without looking at the task; as many as the planner gives `tlm`."""
    return _with_retrieval("random-retrieval", RandomConfig(), train=train, corpus=corpus, budget=budget, seed=seed, task=task)


def labels_only(*, train: str, budget: str | None = DEFAULT_BUDGET, seed: int = 13, **task: Any) -> RunConfig:
    """The other control: the same encoder trained on the labels alone."""
    return RunConfig(
        name="labels-only",
        seed=seed,
        budget=budget,
        task=TaskConfig(train=train, **task),
        encoder=_encoder(budget),
        head=HeadConfig(),
        phases=(finetune_phase(),),
    )


RECIPES: Mapping[str, Callable[..., RunConfig]] = {"tlm": tlm, "random-retrieval": random_retrieval, "labels-only": labels_only}
"""By the name that `--recipe` takes. Those other than labels-only need `corpus`."""


def with_preset(config: RunConfig, name: str) -> RunConfig:
    """The same run with an encoder of `PRESETS`; one of BERT's shape pools [CLS].

    Raises:
        UsageError: if there is no such preset.
    """
    if name not in PRESETS:
        raise UsageError(f"--preset {name!r} is not one of {', '.join(PRESETS)}")
    encoder = PRESETS[name]
    head = config.head.model_copy(update={"pooling": "cls"}) if encoder.shape == "bert" else config.head
    return config.model_copy(update={"encoder": encoder, "head": head})


def _with_retrieval(
    name: str,
    retriever: RetrieverConfig,
    *,
    train: str,
    corpus: str | Sequence[str],
    budget: str | None,
    seed: int,
    task: Mapping[str, Any],
) -> RunConfig:
    return RunConfig(
        name=name,
        seed=seed,
        budget=budget,
        task=TaskConfig(train=train, **task),
        corpus=CorpusConfig(files=(corpus,) if isinstance(corpus, str) else tuple(corpus)),
        retriever=retriever,
        encoder=_encoder(budget),
        head=HeadConfig(),
        phases=(joint_phase(), finetune_phase()),
    )


def _encoder(budget: str | None) -> EncoderConfig:
    return encoder_for_budget(parse_budget(budget or DEFAULT_BUDGET).nominal_seconds)
