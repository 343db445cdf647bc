"""What a recipe is: a named method that makes a complete `RunConfig` from the data and the budget.

`EncoderRecipe` trains an encoder in phases, `LinearRecipe` fits a linear model; paper.py has the recipes of the paper.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Final, Literal, TypeAlias

from cramlm.config.phase import linear_teachers
from cramlm.config.run import CorpusConfig, EncoderConfig, HeadConfig, PhaseConfig, RetrieverConfig, RunConfig, TaskConfig, TeacherConfig
from cramlm.data.task import LabelledSize, count_training
from cramlm.errors import UsageError
from cramlm.model.huggingface.pretrained import open_pretrained, with_encoder_of
from cramlm.planning.budget import TYPICAL
from cramlm.recipes.phases import DEFAULT_BUDGET, encoder_for, for_task, from_checkpoint, is_few

Start: TypeAlias = Literal["scratch", "checkpoint", "either"]
OF_THE_RECIPE: Final = "default"
"""A budget that stands for `Recipe.default_budget`."""


@dataclass(frozen=True, slots=True)
class RunInputs:
    """The arguments of a recipe, checked. corpus: None if the recipe reads no raw text. budget: None = no limit."""

    task: TaskConfig
    corpus: CorpusConfig | None
    init: str | None
    budget: str | None
    seed: int
    top_k: int | None


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
        train: str,
        corpus: str | Sequence[str] | None = None,
        init: str | None = None,
        budget: str | None = OF_THE_RECIPE,
        seed: int = 13,
        top_k: int | None = None,
        **options: Any,
    ) -> RunConfig:
        """Return the run of this method on the labelled texts in `train`.

        train: a file, whose texts and labels are counted; "" stands for a typical file. corpus: raw text; ignored by a recipe that reads
        none. init: a folder of pretrained weights. budget: a time or a number of operations, like 20m or 2e13flops; None = no limit.
        top_k: passages that each training text retrieves. options: the other fields of `TaskConfig` (dev, test, text_column, ...); the
        recipes of the paper also take like, one of its tasks, and shrink, the scale of a twin.

        Raises:
            UsageError: if the corpus, the pretrained weights or the training file is missing, or an argument has no meaning here.
            DataError: if the training file has a bad row. ArtifactError: if `init` cannot be used.
        """
        self._check_start(init)
        reads_corpus = self.reads_corpus(init)
        if reads_corpus and not corpus:
            raise UsageError(
                f"the recipe {self.name} retrieves from raw text; pass corpus= (--corpus FILES), or take the recipe labels-only"
            )
        own = {name: options.pop(name) for name in self.own_options if name in options}
        files = (corpus,) if isinstance(corpus, str) else tuple(corpus or ())
        inputs = RunInputs(
            task=TaskConfig(train=train, **options),
            corpus=CorpusConfig(files=files) if reads_corpus else None,
            init=init,
            budget=self.default_budget if budget == OF_THE_RECIPE else budget,
            seed=seed,
            top_k=top_k,
        )
        return self.build(inputs, **own)

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
                f"the recipe {self.name} starts from pretrained weights; pass init= (--init FOLDER, with config.json, model.safetensors "
                "and tokenizer.json), or take the recipe tlm, which needs none"
            )
        if self.start == "scratch" and init is not None:
            raise UsageError(f"the recipe {self.name} trains from scratch; drop init, or take the recipe tlm with it")


@dataclass(frozen=True)
class EncoderRecipe(Recipe):
    """Trains an encoder in phases; from a checkpoint at the rates of phases.from_checkpoint.

    phases_on_checkpoint: None = the same phases. embedding_init, logit_adjustment: as in `EncoderConfig` and `RunConfig`.
    """

    phases: tuple[PhaseConfig, ...]
    retriever: RetrieverConfig | None = None
    phases_on_checkpoint: tuple[PhaseConfig, ...] | None = None
    head: Literal["classifier", "prompt", "soft-prompt"] = "classifier"
    embedding_init: Literal["random", "cooccurrence"] = "cooccurrence"
    logit_adjustment: Literal["dev", "none"] = "dev"
    default_budget: str | None = field(default=DEFAULT_BUDGET, kw_only=True)

    def reads_corpus(self, init: str | None) -> bool:
        return self.retriever is not None and any(phase.external for phase in self._phases(init))

    def _phases(self, init: str | None) -> tuple[PhaseConfig, ...]:
        return self.phases if init is None else self.phases_on_checkpoint or self.phases

    def build(self, inputs: RunInputs, **own: Any) -> RunConfig:
        size = labelled_size(inputs.task, seed=inputs.seed)
        phases = tuple(for_task(phase, inputs.task.kind, size) for phase in self._phases(inputs.init))
        teaches_passages = any(term.on == "external" for phase in phases for term in linear_teachers(phase))
        config = RunConfig(
            name=self.name,
            seed=inputs.seed,
            budget=inputs.budget,
            task=inputs.task,
            corpus=inputs.corpus,
            retriever=with_top_k(self.retriever if inputs.corpus else None, inputs.top_k, recipe=self.name),
            encoder=encoder_for(inputs.budget).model_copy(update={"embedding_init": self.embedding_init}),
            head=HeadConfig(kind=self.head, token_classifier=any(term.needs_token_head for phase in self.phases for term in phase.terms)),
            phases=phases,
            teacher=TeacherConfig(align_distribution=teaches_passages and is_few(size)),
            logit_adjustment=self.logit_adjustment,
        )
        return config if inputs.init is None else on_checkpoint(config, inputs.init)


@dataclass(frozen=True)
class LinearRecipe(Recipe):
    """A linear model of the labelled texts; with a retriever, its text vectors come from retrieved passages. A budget limits nothing."""

    model: Literal["static", "tfidf"]
    retriever: RetrieverConfig | None = None
    start: Start = field(default="scratch", kw_only=True)

    def reads_corpus(self, init: str | None) -> bool:
        return self.retriever is not None

    def build(self, inputs: RunInputs, **own: Any) -> RunConfig:
        return RunConfig(
            name=self.name,
            seed=inputs.seed,
            budget=inputs.budget,
            task=inputs.task,
            corpus=inputs.corpus,
            retriever=with_top_k(self.retriever, inputs.top_k, recipe=self.name),
            model=self.model,
        )


def with_top_k(retriever: RetrieverConfig | None, top_k: int | None, *, recipe: str) -> RetrieverConfig | None:
    """The retriever with this number of passages per query; None leaves it as it is.

    Raises:
        UsageError: if nothing is retrieved by queries.
    """
    if top_k is None:
        return retriever
    if retriever is None or "top_k" not in type(retriever).model_fields:
        raise UsageError(f"the recipe {recipe} sends no queries to the corpus, so top_k has no meaning; drop it")
    return retriever.model_copy(update={"top_k": top_k})


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
