"""What a recipe is: a name, a list of phases, a retriever; called with the data, it gives a complete `RunConfig`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from cramlm.config.phase import linear_teachers
from cramlm.config.run import CorpusConfig, EncoderConfig, HeadConfig, PhaseConfig, RetrieverConfig, RunConfig, TaskConfig, TeacherConfig
from cramlm.data.task import LabelledSize, count_training
from cramlm.errors import UsageError
from cramlm.model.huggingface.pretrained import open_pretrained, with_encoder_of
from cramlm.planning.budget import TYPICAL
from cramlm.recipes.phases import for_task, from_checkpoint, is_few
from cramlm.recipes.sizes import DEFAULT_BUDGET, encoder_for

Files: TypeAlias = str | Sequence[str]
Start: TypeAlias = Literal["drawn", "either", "pretrained"]


@dataclass(frozen=True, slots=True)
class Recipe:
    """A method. start: the weights that it can start from; pretrained ones come with `init`, and run the same phases at the rates that suit
    them (phases.from_checkpoint). embedding_init, logit_adjustment: as in `EncoderConfig` and `RunConfig`.
    """

    name: str
    summary: str
    phases: tuple[PhaseConfig, ...]
    retriever: RetrieverConfig | None = None
    start: Start = "either"
    phases_on_checkpoint: tuple[PhaseConfig, ...] | None = None  # None = the same
    head: Literal["classifier", "prompt", "soft-prompt"] = "classifier"
    embedding_init: Literal["random", "cooccurrence"] = "cooccurrence"
    logit_adjustment: Literal["dev", "none"] = "dev"

    @property
    def retrieves(self) -> bool:
        """Whether it reads raw text."""
        return self.retriever is not None

    def __call__(
        self,
        *,
        train: str,
        corpus: Files | None = None,
        init: str | None = None,
        budget: str | None = DEFAULT_BUDGET,
        seed: int = 13,
        top_k: int | None = None,
        **task: Any,
    ) -> RunConfig:
        """The run of this method, for the labelled texts in `train`, which are counted; "" means a typical file. `task` takes the other
        fields of `TaskConfig` (dev, test, text_column, ...); top_k: documents that each training text retrieves; corpus is left alone
        where no raw text is read.

        Raises:
            UsageError: if a corpus or pretrained weights are missing, or of no use; if there is no training file. DataError: if it has a
            bad row. ArtifactError: if `init` cannot be used.
        """
        check_start(self.name, self.start, init)
        phases = self.phases if init is None else self.phases_on_checkpoint or self.phases
        retriever = self.retriever if any(phase.external for phase in phases) else None
        if retriever is not None and not corpus:
            raise no_corpus(self.name)
        if top_k is not None:
            if retriever is None or "top_k" not in type(retriever).model_fields:
                raise UsageError(f"the recipe {self.name} asks the corpus nothing, so top_k means nothing to it; drop it")
            retriever = retriever.model_copy(update={"top_k": top_k})
        task_config = TaskConfig(train=train, **task)
        size = labelled_size(task_config, seed=seed)
        phases = tuple(for_task(phase, task_config.kind, size) for phase in phases)
        teaches_passages = any(term.on == "external" for phase in phases for term in linear_teachers(phase))
        drawn = RunConfig(
            name=self.name,
            seed=seed,
            budget=budget,
            task=task_config,
            corpus=None if retriever is None else corpus_config(corpus or ()),
            retriever=retriever,
            encoder=encoder_for(budget).model_copy(update={"embedding_init": self.embedding_init}),
            head=HeadConfig(kind=self.head, token_classifier=any(term.needs_token_head for phase in self.phases for term in phase.terms)),
            phases=phases,
            teacher=TeacherConfig(align_distribution=teaches_passages and is_few(size)),
            logit_adjustment=self.logit_adjustment,
        )
        return drawn if init is None else on_checkpoint(drawn, init)


def labelled_size(task: TaskConfig, *, seed: int) -> LabelledSize:
    """What is counted in the training file; typical numbers where none is named, as `cramlm plan` may do.

    Raises:
        UsageError, DataError: as `read_task` for the training file.
    """
    if not task.train:
        return LabelledSize(TYPICAL.train_examples, TYPICAL.labels)
    return count_training(task, seed=seed)


def on_checkpoint(config: RunConfig, init: str) -> RunConfig:
    """The run on pretrained weights: their encoder and tokenizer, and phases at the rates that suit them.

    Raises:
        ArtifactError: if the folder cannot be used.
    """
    pretrained = open_pretrained(Path(init))
    phases = tuple(from_checkpoint(phase, pretrained.encoder) for phase in config.phases)
    head = config.head.model_copy(update={"pooling": pretrained.head.pooling})
    undecided = {"encoder": EncoderConfig(), "head": head, "phases": phases, "teacher": TeacherConfig()}
    return with_encoder_of(pretrained, config.model_copy(update=undecided))


def check_start(name: str, start: Start, init: str | None) -> None:
    """Raises UsageError if the recipe needs pretrained weights and there are none, or the other way round."""
    if start == "pretrained" and init is None:
        raise UsageError(
            f"the recipe {name} starts from pretrained weights; pass init= (--init FOLDER, with config.json, model.safetensors and "
            "tokenizer.json), or take the recipe tlm, which needs none"
        )
    if start == "drawn" and init is not None:
        raise UsageError(f"the recipe {name} trains from scratch, as the paper does; drop init, or take the recipe tlm with it")


def no_corpus(name: str) -> UsageError:
    """What to say where a recipe has no raw text."""
    return UsageError(f"the recipe {name} retrieves from raw text; pass corpus= (--corpus FILES), or take the recipe labels-only")


def corpus_config(files: Files) -> CorpusConfig:
    """One name or several."""
    return CorpusConfig(files=(files,) if isinstance(files, str) else tuple(files))
