"""What a recipe is: a named method that makes a complete `RunConfig` from the data and the budget; and its parts: sizes of encoders,
phases from scratch and from a checkpoint.

`EncoderRecipe` trains an encoder in phases, `LinearRecipe` fits a linear model; paper.py has the recipes of the paper.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar, Final, Literal, TypeAlias, assert_never

from pydantic import ValidationError
from pydantic.dataclasses import dataclass as validated

from cramlm.config.base import parse_budget
from cramlm.config.head import HeadConfig, PromptConfig
from cramlm.config.phase import OptimizerConfig, PhaseConfig, ScheduleConfig, linear_teachers
from cramlm.config.retriever import RetrieverConfig, without_queries
from cramlm.config.run import CorpusConfig, EncoderConfig, RunConfig, TaskConfig, TeacherConfig, explain_validation_error
from cramlm.config.terms import Classify, Distil, ImportantTokens, MaskingConfig, Mlm, Term
from cramlm.data.task import LabelledSize, count_training
from cramlm.errors import UsageError
from cramlm.io.machine import has_bf16_instructions
from cramlm.model.huggingface.pretrained import open_pretrained, with_encoder_of
from cramlm.planning.budget import TYPICAL
from cramlm.records import LinearName, TaskKind

DEFAULT_BUDGET = "10m"

NOMINAL_FLOPS = 2e11
"""Assumed operations per second of two cores in bf16, to choose a model size for a budget in time before anything is measured."""
NOMINAL_FP32_FLOPS = 6e10
"""The same of two cores without bf16: a run of 2e13 operations took 10 minutes of one core with AVX2 (docs/benchmarks/scaling.md)."""
NOMINAL_GPU_FLOPS = 3e13
"""The same of a GPU; one H200 did 2e13 to 7e13 in whole phases of small encoders, beside other runs (docs/benchmarks/scaling.md)."""

# At a small, fixed amount of compute the loss depends little on the shape (Geiping and Goldstein 2022), so a size is chosen that still sees
# each retrieved passage several times.
TINY = EncoderConfig(layers=2, hidden=192, heads=3, intermediate=384, embedding_init="words", layer_init="context")
MINI = EncoderConfig(layers=4, hidden=256, heads=4, intermediate=512, embedding_init="words", layer_init="context")
SMALL = EncoderConfig(layers=6, hidden=384, heads=6, intermediate=768, embedding_init="words", layer_init="context")
BASE = EncoderConfig(layers=12, hidden=768, heads=12, intermediate=1536, embedding_init="words", layer_init="context")
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

BERT_MASKS = MaskingConfig(rate=0.15, mask_share=0.8, random_share=0.1)  # Devlin et al. 2019
TAPT_PASSES = 100.0  # over the task's own text (Gururangan et al. 2020)
TUNING_PASSES = 10.0  # over the labels, from a checkpoint; as there for tasks of fewer than 5,000 labels (3 for larger ones)
MLM_ON_TASK: Final = Mlm(on="task", weight=0.25)
FEW_TEXTS_PER_LABEL, FEW_SMOOTHING = 30, 0.2  # docs/log.md
FEW_TEXTS, FEW_RATES = 300, 0.1
"""Below this number of training texts, if dev is split off from them, fine-tuning after a joint phase has `FEW_RATES` times its learning
rates (docs/log.md)."""
SHORT: Final = 300 * NOMINAL_FLOPS
LONG: Final = 3600 * NOMINAL_FLOPS
BATCH: Final = 4096
LONG_BATCH: Final = 16_384
CANDIDATES: Final = 1 / 4
"""Tokens that the softmax is over, relative to those of a batch: a fifth is predicted, and many of these are equal (docs/log.md)."""


def joint_phase() -> PhaseConfig:
    """The paper's stage 1 with external and task text in every batch, lower weights of task text, and a linear teacher on external text."""
    return PhaseConfig(
        name="joint",
        terms=(Mlm(on="external"), MLM_ON_TASK, Classify(weight=0.25), Distil(on="external")),
        external=4,
        task=1,
        mixing="blended",
        masking=MaskingConfig(rate=0.2, mask_share=1.0, random_share=0.0),
        batch_size=BATCH,
        candidates=int(CANDIDATES * BATCH),
        optimizer=OptimizerConfig(kind="muon"),
        schedule=ScheduleConfig(kind="wsd", warmup_fraction=0.03, decay_fraction=0.4),
        keep="last",
    )


def finetune_phase() -> PhaseConfig:
    """The paper's stage 2: labels only. An encoder that was trained for minutes goes on learning with Muon at high rates."""
    return PhaseConfig(
        name="finetune",
        terms=(Classify(), Distil(on="task")),
        external=0,
        task=1,
        batch_size=32,
        batch_unit="sequences",
        optimizer=OptimizerConfig(kind="muon", learning_rate=1e-3, muon_learning_rate=2e-3),
        schedule=ScheduleConfig(kind="linear", warmup_fraction=0.1),
        keep="best",
    )


def with_terms(phase: PhaseConfig, keep: Callable[[Term], bool]) -> PhaseConfig:
    """The phase with those of its terms that `keep` accepts."""
    return phase.model_copy(update={"terms": tuple(term for term in phase.terms if keep(term))})


def without_teacher(phase: PhaseConfig) -> PhaseConfig:
    """The phase without the linear teacher."""
    return with_terms(phase, lambda term: term not in linear_teachers(phase))


def smoothed(phase: PhaseConfig, label_smoothing: float) -> PhaseConfig:
    """The phase with this label smoothing."""
    terms = (term.model_copy(update={"label_smoothing": label_smoothing}) if isinstance(term, Classify) else term for term in phase.terms)
    return phase.model_copy(update={"terms": tuple(terms)})


def on_task_text(phase: PhaseConfig) -> PhaseConfig:
    """The phase on the task's text alone. Terms on external text move to task text unless there is one of their kind already."""
    if not phase.external:
        return phase
    own = [term for term in phase.terms if term.on == "task"]
    kinds = {term.kind for term in own}
    moved = [term.model_copy(update={"on": "task"}) for term in phase.terms if term.on == "external" and term.kind not in kinds]
    return phase.model_copy(update={"external": 0, "task": max(1, phase.task), "terms": (*own, *moved)})


def is_few(size: LabelledSize) -> bool:
    """Return True if there are fewer than `FEW_TEXTS_PER_LABEL` training texts per label, on average."""
    return size.texts < FEW_TEXTS_PER_LABEL * size.labels


def for_task(phase: PhaseConfig, kind: TaskKind, size: LabelledSize) -> PhaseConfig:
    """The phase with terms that suit the labelled texts; a phase with text terms or without a linear teacher is returned unchanged.

    A phase on labels alone learns from the teacher's predictions for held-out training texts. In a classification with few texts per label
    these are poor, and label smoothing takes their place. Predicted numbers are too close to their mean: an encoder that is better than its
    teacher would be pulled towards it (docs/log.md).
    """
    if phase.text_terms or not linear_teachers(phase):
        return phase
    match kind:
        case "classification":
            return smoothed(without_teacher(phase), FEW_SMOOTHING) if is_few(size) else phase
        case "multi-label":
            return phase
        case "regression":
            return without_teacher(phase)
        case _:
            assert_never(kind)


def with_slow_tuning(phases: tuple[PhaseConfig, ...], kind: TaskKind, size: LabelledSize) -> tuple[PhaseConfig, ...]:
    """The phases for a tiny dev set: with few texts of one label each, labels alone are learned slowly after a joint phase with a teacher.

    The joint phase has read the labels dozens of times. Fast learning then undoes what was learned from text and teacher in most runs, and
    a tiny dev set does not show it (docs/log.md).
    """
    if kind != "classification" or size.texts >= FEW_TEXTS:
        return phases
    suited = [phases[0]]
    for before, phase in pairwise(phases):
        has_read = before.text_terms and before.terms_of(Classify) and linear_teachers(before)
        is_slow = has_read and not phase.text_terms and phase.start_from == "previous"
        suited.append(with_rates(phase, FEW_RATES) if is_slow else phase)
    return tuple(suited)


def with_rates(phase: PhaseConfig, factor: float) -> PhaseConfig:
    """The phase with all learning rates multiplied by a factor."""
    rates = {name: factor * getattr(phase.optimizer, name) for name in ("learning_rate", "muon_learning_rate")}
    return phase.model_copy(update={"optimizer": phase.optimizer.model_copy(update=rates)})


def vectors_phase() -> PhaseConfig:
    """Train the vectors of a soft prompt on labels only, at a rate far above that of weights (Lester et al. 2021: 0.3)."""
    tuned = {"name": "tune", "terms": (Classify(),), "trains": "vectors", "dropout": 0.0, "max_passes": None}
    optimizer = OptimizerConfig(kind="adamw", learning_rate=1e-2, weight_decay=0.0)
    return finetune_phase().model_copy(update={**tuned, "optimizer": optimizer})


def distil_phase(*, teacher: str, start: str) -> PhaseConfig:
    """Language, labels and the soft labels of external text by the model of phase `teacher`, from the weights of phase `start`."""
    terms = (*without_teacher(joint_phase()).terms, Distil(on="external", teacher=teacher))
    return joint_phase().model_copy(update={"name": "distil", "terms": terms, "start_from": start, "keep": "best"})


def text_phase(name: str, *, external: int, task: int, terms: tuple[Mlm, ...], max_passes: float | None = None) -> PhaseConfig:
    """Masked language modeling alone, with the masks, batches and rates of `joint_phase`: no labels, no teacher."""
    text = {"name": name, "terms": terms, "external": external, "task": task, "max_passes": max_passes}
    return joint_phase().model_copy(update=text)


def from_checkpoint(phase: PhaseConfig, encoder: EncoderConfig) -> PhaseConfig:
    """The phase on pretrained weights: AdamW at the rates of the literature, BERT's masks and dropout, no teacher, no label smoothing.

    MLM continues at 1e-4, fine-tuning has 2e-5 in batches of 16, both warm up over 6 % of the steps (Gururangan et al. 2020). Encoders
    narrower than 768 are tuned at 1e-4, since small ones need higher rates (docs/log.md).
    """
    if phase.trains == "vectors":
        return phase
    common: dict[str, Any] = {"schedule": ScheduleConfig(kind="linear", warmup_fraction=0.06), "dropout": 0.1, "attention_dropout": 0.1}
    phase = smoothed(without_teacher(phase), 0.0)
    if phase.text_terms and not phase.terms_of(ImportantTokens):
        masks = phase.masking.model_copy(update=BERT_MASKS.model_dump(include={"rate", "mask_share", "random_share"}))
        optimizer = OptimizerConfig(kind="adamw", learning_rate=1e-4)
        return phase.model_copy(update={**common, "masking": masks, "candidates": None, "optimizer": optimizer})
    rate = 2e-5 if encoder.hidden >= 768 else 1e-4
    tuned = {"optimizer": OptimizerConfig(kind="adamw", learning_rate=rate), "max_passes": TUNING_PASSES}
    return phase.model_copy(update={**common, **tuned, "batch_size": 16})


def encoder_for(flops: float) -> EncoderConfig:
    """The encoder for a budget: tiny up to five minutes of two cores with bf16, mini up to an hour, small beyond.

    At 1e13 operations (a minute of two cores, as budgets count) tiny is 4 to 23 points of dev macro-F1 above mini; at 6e13, five minutes
    of two cores and ten of one, they are even (docs/log.md).
    """
    return TINY if flops <= SHORT else MINI if flops <= LONG else SMALL


def for_budget(phase: PhaseConfig, flops: float) -> PhaseConfig:
    """The phase from scratch with batches that suit its budget: above `LONG`, text in batches of `LONG_BATCH` tokens.

    Thousands of steps on 4,096 tokens at the rates of short phases end 0.4 nats above a quarter of the steps on 16,384 (docs/log.md).
    """
    if flops <= LONG or not phase.text_terms or phase.batch_unit != "tokens":
        return phase
    candidates = None if phase.candidates is None else int(CANDIDATES * LONG_BATCH)
    return phase.model_copy(update={"batch_size": LONG_BATCH, "candidates": candidates})


def with_preset(config: RunConfig, name: str) -> RunConfig:
    """The run with an encoder of `PRESETS`; one of BERT's shape pools [CLS]. Initial weights stay those of the run, where they apply.

    Raises:
        UsageError: if there is no such preset, or the run starts from weights that have a size.
    """
    if name not in PRESETS:
        raise UsageError(f"--preset {name!r} is not one of {', '.join(PRESETS)}")
    if config.init is not None:
        raise UsageError(f"--preset {name} and --base-model exclude each other: the weights in {config.init} have a size; drop one")
    preset = PRESETS[name]
    start = {name: getattr(config.encoder, name) for name in ("embedding_init", "layer_init")}
    encoder = preset.model_copy(update=start if preset.is_modern else {})
    head = config.head.model_copy(update={"pooling": "cls"}) if encoder.shape == "bert" else config.head
    return config.model_copy(update={"encoder": encoder, "head": head})


_GPU_DRIVERS: Final = (Path("/dev/nvidiactl"), Path("/dev/kfd"))

Start: TypeAlias = Literal["scratch", "checkpoint", "either"]
OF_THE_RECIPE: Final = "default"
"""A budget that stands for `Recipe.default_budget`."""


@validated(frozen=True, slots=True)
class RunInputs:
    """The arguments of a recipe, checked. corpus: None if the recipe reads no raw text. budget: None = no limit."""

    task: TaskConfig
    corpus: CorpusConfig | None
    init: str | None
    budget: str | None
    seed: int
    top_k: int | None
    device: str

    @property
    def nominal_flops(self) -> float:
        """As `nominal_flops` of the budget and the device."""
        return nominal_flops(self.budget, self.device)

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that every recipe takes over as they are."""
        return {"seed": self.seed, "budget": self.budget, "task": self.task, "corpus": self.corpus, "device": self.device}


@dataclass(frozen=True)
class Recipe(ABC):
    """A method. start: the weights that it can start from; those of a checkpoint are given as `init`."""

    own_options: ClassVar[tuple[str, ...]] = ()
    """Keyword arguments that only this class of recipes takes."""
    name: str
    summary: str
    start: Start = field(default="either", kw_only=True)
    default_budget: str | None = field(default=None, kw_only=True)

    def __call__(
        self,
        *,
        train: str | Path,
        corpus: str | Path | Sequence[str | Path] | None = None,
        init: str | Path | None = None,
        budget: str | None = OF_THE_RECIPE,
        seed: int = 13,
        top_k: int | None = None,
        device: str = "auto",
        **options: Any,
    ) -> RunConfig:
        """Return the run of this method on the labelled texts in `train`.

        train: a file, whose texts and labels are counted; "" stands for a typical file. corpus: raw text; ignored, like the option
        unlabelled, by a recipe that reads none. init: a folder of pretrained weights. budget: a time or a number of operations, like 20m or
        2e13flops; None = no limit. top_k: passages that each training text retrieves. device: of training, as in `RunConfig`; with a
        budget in time the size depends on it. options: the other fields of `TaskConfig` (dev, test, text_column, ...); the recipes of the
        paper also take like, one of its tasks, and shrink, the scale of a twin.

        Raises:
            UsageError: if the corpus, the pretrained weights or the training file is missing, or an argument has no meaning here, or a
            value that its setting does not accept.
            DataError: if the training file has a bad row. ArtifactError: if `init` cannot be used.
        """
        init = None if init is None else str(init)
        self._check_start(init)
        reads_corpus = self.reads_corpus(init)
        if reads_corpus and not corpus:
            raise UsageError(
                f"the recipe {self.name} retrieves from raw text; pass corpus= (--corpus FILES), or take the recipe {self.without_corpus}"
            )
        own = {name: options.pop(name) for name in self.own_options if name in options}
        if others := sorted(options.keys() & RunConfig.model_fields.keys()):
            raise UsageError(
                f"{others[0]} is a setting of the run and no argument of a recipe; set it in the result: "
                f"config.model_copy(update={{{others[0]!r}: ...}})"
            )
        options = {name: _without_paths(value) for name, value in options.items()}
        if isinstance(unlabelled := options.get("unlabelled"), str):
            options["unlabelled"] = (unlabelled,)
        files = (corpus,) if isinstance(corpus, str | Path) else tuple(corpus or ())
        try:
            inputs = RunInputs(
                task=TaskConfig(train=_without_paths(train), **(options if reads_corpus else options | {"unlabelled": ()})),
                corpus=CorpusConfig(files=_without_paths(files)) if reads_corpus else None,
                init=init,
                budget=self.default_budget if budget == OF_THE_RECIPE else budget,
                seed=seed,
                top_k=top_k,
                device=device,
            )
            return self.build(inputs, **own)
        except ValidationError as error:
            raise UsageError(explain_validation_error(error)) from error

    @property
    def without_corpus(self) -> str:
        """The recipe to take without raw text."""
        return "tapt" if self.start == "checkpoint" else "labels-only"

    @property
    def retrieves(self) -> bool:
        """True if the recipe reads raw text, at least when it starts from scratch."""
        return self.reads_corpus(None)

    @abstractmethod
    def reads_corpus(self, init: str | None) -> bool:
        """Return True if the recipe reads raw text, from scratch (None) or from the checkpoint `init`."""

    @abstractmethod
    def build(self, inputs: RunInputs, **own: Any) -> RunConfig:
        """Make the config. own: the arguments named in `own_options`."""

    def _check_start(self, init: str | None) -> None:
        if self.start == "checkpoint" and init is None:
            raise UsageError(
                f"the recipe {self.name} starts from pretrained weights; pass init= (--base-model FOLDER, with config.json, "
                "model.safetensors and tokenizer.json), or take the recipe tlm, which needs none"
            )
        if self.start == "scratch" and init is not None:
            raise UsageError(
                f"the recipe {self.name} trains from scratch; drop init= (--base-model FOLDER), or take the recipe tlm with it"
            )


def nominal_flops(budget: str | None, device: str) -> float:
    """Return the operations of a budget, or about those that the device does in its time, to choose a size of the encoder before any speed
    is measured. Without a budget: those of the default one, on any CPU as with bf16.
    """
    amount = parse_budget(budget or DEFAULT_BUDGET)
    return amount.flops or (amount.seconds or 0.0) * _nominal_speed(device, any_cpu=budget is None)


def _nominal_speed(device: str, *, any_cpu: bool) -> float:
    """Return the operations per second that a run on this device, as users write it, is assumed to do. any_cpu: the same on every CPU."""
    if _is_on_gpu(device):
        return NOMINAL_GPU_FLOPS
    return NOMINAL_FLOPS if any_cpu or has_bf16_instructions() else NOMINAL_FP32_FLOPS


def _is_on_gpu(device: str) -> bool:
    """Return True if a run on this device, as users write it, computes on a GPU.

    torch, which takes seconds to load, is imported only if the driver of a GPU is installed.
    """
    if device != "auto":
        return str(device).startswith("cuda")
    if not any(file.exists() for file in _GPU_DRIVERS):
        return False
    import torch

    return torch.cuda.is_available()


def _without_paths(value: Any) -> Any:
    """Return a value with paths as strings, also those in a list."""
    if isinstance(value, Path):
        return str(value)
    return tuple(map(_without_paths, value)) if isinstance(value, list | tuple) else value


_PATTERNS_OF_PAIRS: Final = ("{text_a} {mask}, {text_b}",)
"""The mask between both texts, as in the patterns of Schick and Schütze (2021) for entailment."""


@dataclass(frozen=True)
class EncoderRecipe(Recipe):
    """Trains an encoder in phases; from a checkpoint at the rates of `from_checkpoint`.

    phases_on_checkpoint: None = the same phases. embedding_init, layer_init, logit_adjustment: as in `EncoderConfig` and `RunConfig`.
    Layers that start from context attend to the markers of a task that has some, or to the boundary of its pairs, and the teacher puts
    markers into passages or makes pairs of them.
    """

    phases: tuple[PhaseConfig, ...]
    retriever: RetrieverConfig | None = None
    phases_on_checkpoint: tuple[PhaseConfig, ...] | None = None
    head: Literal["classifier", "prompt", "soft-prompt"] = "classifier"
    embedding_init: Literal["random", "cooccurrence", "words"] = "words"
    layer_init: Literal["random", "context"] = "context"
    logit_adjustment: Literal["dev", "none"] = "dev"
    default_budget: str | None = field(default=DEFAULT_BUDGET, kw_only=True)

    def reads_corpus(self, init: str | None) -> bool:
        return self.retriever is not None and any(phase.external for phase in self._phases(init))

    def _phases(self, init: str | None) -> tuple[PhaseConfig, ...]:
        return self.phases if init is None else self.phases_on_checkpoint or self.phases

    def build(self, inputs: RunInputs, **own: Any) -> RunConfig:
        size = labelled_size(inputs.task, seed=inputs.seed)
        flops = inputs.nominal_flops
        phases = tuple(for_task(phase, inputs.task.kind, size) for phase in self._phases(inputs.init))
        if inputs.task.dev is None:  # a tenth of the training texts
            phases = with_slow_tuning(phases, inputs.task.kind, size)
        phases = phases if inputs.init is not None else tuple(for_budget(phase, flops) for phase in phases)
        teaches_passages = any(term.on == "external" for phase in phases for term in linear_teachers(phase))
        suited = self.head == "classifier" and inputs.task.kind == "classification"
        reads_pairs = self.head != "classifier" and inputs.task.text_pair_column is not None
        marked, paired = suited and size.marked, suited and size.paired
        layer_init = "markers" if (marked or paired) and self.layer_init == "context" else self.layer_init
        config = RunConfig(
            name=self.name,
            **inputs.settings,
            retriever=with_top_k(self.retriever if inputs.corpus else None, inputs.top_k, recipe=self.name),
            encoder=encoder_for(flops).model_copy(update={"embedding_init": self.embedding_init, "layer_init": layer_init}),
            head=HeadConfig(
                kind=self.head,
                prompt=PromptConfig(patterns=_PATTERNS_OF_PAIRS) if reads_pairs else PromptConfig(),
                token_classifier=any(term.needs_token_head for phase in self.phases for term in phase.terms),
            ),
            phases=phases,
            teacher=TeacherConfig(
                align_distribution=teaches_passages and is_few(size) and inputs.task.kind == "classification",
                mark_passages=teaches_passages and marked,
                pair_passages=teaches_passages and paired,
            ),
            logit_adjustment=self.logit_adjustment,
        )
        return config if inputs.init is None else on_checkpoint(config, inputs.init)


@dataclass(frozen=True)
class LinearRecipe(Recipe):
    """A linear model of the labelled texts and, with a retriever, of retrieved passages. A budget limits nothing."""

    model: LinearName
    retriever: RetrieverConfig | None = None
    start: Start = field(default="scratch", kw_only=True)

    @property
    def without_corpus(self) -> str:
        return "tfidf"

    def reads_corpus(self, init: str | None) -> bool:
        return self.retriever is not None

    def build(self, inputs: RunInputs, **own: Any) -> RunConfig:
        return RunConfig(
            name=self.name,
            **inputs.settings,
            retriever=with_top_k(self.retriever, inputs.top_k, recipe=self.name),
            model=self.model,
        )


def with_top_k(retriever: RetrieverConfig | None, top_k: int | None, *, recipe: str) -> RetrieverConfig | None:
    """The retriever with this number of passages per query; None leaves it as it is.

    Raises:
        UsageError: if nothing is retrieved by queries. ValidationError: if the retriever does not accept the number.
    """
    if top_k is None:
        return retriever
    if retriever is None or without_queries(retriever.kind):
        raise UsageError(f"the recipe {recipe} sends no queries to the corpus, so top_k has no meaning; drop it")
    return type(retriever).model_validate({**retriever.model_dump(), "top_k": top_k})


def labelled_size(task: TaskConfig, *, seed: int) -> LabelledSize:
    """Count the training file; typical numbers if there is none, as for `cramlm plan`.

    Raises:
        UsageError, DataError: as `read_task` for the training file.
    """
    if not task.train:
        return LabelledSize(TYPICAL.train_examples, TYPICAL.labels)
    return count_training(task, seed=seed)


def on_checkpoint(config: RunConfig, init: str) -> RunConfig:
    """The run on pretrained weights: their encoder and tokenizer, and phases at the rates of the literature.

    Raises:
        ArtifactError: if the folder cannot be used.
    """
    pretrained = open_pretrained(Path(init))
    phases = tuple(from_checkpoint(phase, pretrained.encoder) for phase in config.phases)
    head = config.head.model_copy(update={"pooling": pretrained.head.pooling})
    undecided = {"encoder": EncoderConfig(), "head": head, "phases": phases, "teacher": TeacherConfig()}
    return with_encoder_of(pretrained, config.model_copy(update=undecided))
