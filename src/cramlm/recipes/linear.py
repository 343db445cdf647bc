"""Recipes without an encoder: the linear models that every other recipe is compared with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal

from cramlm.config.run import Bm25Config, RetrieverConfig, RunConfig, TaskConfig
from cramlm.errors import UsageError
from cramlm.recipes.recipe import Files, Start, check_start, corpus_config, no_corpus

STATIC_TOKENS: Final = 3_000_000
"""Of the selection that the token vectors are counted in: about what tlm retrieves in four minutes of two cores."""


@dataclass(frozen=True, slots=True)
class LinearRecipe:
    """A linear model of the labelled texts; with a retriever, its text vectors come from retrieved passages."""

    name: str
    summary: str
    model: Literal["static", "tfidf"]
    retriever: RetrieverConfig | None = None
    start: Start = "drawn"

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
        budget: str | None = None,
        seed: int = 13,
        top_k: int | None = None,
        **task: Any,
    ) -> RunConfig:
        """The run of this model. A budget limits nothing: fitting takes seconds. Arguments as for the other recipes.

        Raises:
            UsageError: for a model with vectors without a corpus, for pretrained weights, or for top_k without retrieval.
        """
        check_start(self.name, self.start, init)
        retriever = self.retriever
        if retriever is not None and not corpus:
            raise no_corpus(self.name)
        if top_k is not None:
            if retriever is None:
                raise UsageError(f"the recipe {self.name} retrieves nothing, so top_k has no meaning; drop it")
            retriever = retriever.model_copy(update={"top_k": top_k})
        return RunConfig(
            name=self.name,
            seed=seed,
            budget=budget,
            task=TaskConfig(train=train, **task),
            corpus=None if retriever is None else corpus_config(corpus or ()),
            retriever=retriever,
            model=self.model,
        )


static = LinearRecipe(
    "static",
    "logistic regression on TF-IDF and averaged token vectors from retrieved text; no encoder",
    "static",
    Bm25Config(max_tokens=STATIC_TOKENS),
)
tfidf = LinearRecipe("tfidf", "logistic regression on TF-IDF alone; no raw text, no encoder", "tfidf")
