"""Which tokens a step hides, and what stands in their positions."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from cramlm.config.retriever import FrozenModel


class MaskingConfig(FrozenModel):
    """Dynamic masks: drawn anew at every step, at least one per sequence. Devlin et al. 2019: 15 %, 80/10/10.

    random: single tokens. whole-word: words, whole. span: runs of words of geometric length (Joshi et al. 2020). phrase: words that stand
    together more often than chance has it, as wholes, and the other words (after Sun et al. 2019, who had a list of phrases). scored: the
    tokens that a phase with the term important_tokens learnt to find, best first, at most `rate`, at least one. scored-control: as many, at
    random.
    """

    kind: Literal["random", "whole-word", "span", "phrase", "scored", "scored-control"] = "random"
    scores_of: str | None = Field(
        None, description="scored and scored-control: the earlier phase, with the term important_tokens, that scores"
    )
    rate: float = Field(0.2, gt=0, lt=1, description="share of the maskable tokens; at the first step, where rate_end is given")
    rate_end: float | None = Field(None, gt=0, lt=1, description="share at the last step, in a straight line; None = as at the first")
    mean_span: float = Field(5.0, ge=1, description="span only: mean of the geometric lengths in words, before they are cut at 10")
    mask_share: float = Field(1.0, ge=0, le=1, description="of the chosen tokens, how many become [MASK]")
    random_share: float = Field(0.0, ge=0, le=1, description="... and how many a random token; the rest stay as they are")

    @model_validator(mode="after")
    def _shares_fit(self) -> MaskingConfig:
        if self.mask_share + self.random_share > 1:
            raise ValueError(f"mask_share {self.mask_share} + random_share {self.random_share} must not exceed 1")
        return self

    @property
    def is_scored(self) -> bool:
        """Whether tokens have scores that say which, or how many, are hidden."""
        return self.kind in ("scored", "scored-control")

    def rate_at(self, step: int, steps: int | None) -> float:
        """The share at a step; in a phase that has no number of steps yet, the one in its middle."""
        if self.rate_end is None:
            return self.rate
        done = 0.5 if steps is None else step / max(1, steps - 1)
        return self.rate + (self.rate_end - self.rate) * min(done, 1.0)
