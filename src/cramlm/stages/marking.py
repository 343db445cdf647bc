"""What a phase must be told of its tokens before it can begin: which words matter to the labels, or how fit each token is to be hidden.

marks-2-scorer/    marks.npy, words.json: the labelled texts as the weights before the phase see them (training/importance.py)
scores-3-taskpt/   external.npy, task.npy: logits of the phase that learnt the marks
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from cramlm.arrays import read_array, save_array
from cramlm.artifacts import Artifact, stage
from cramlm.config import PhaseConfig
from cramlm.model.device import Precision
from cramlm.model.model import Model
from cramlm.model.tokenization import Tokenizer
from cramlm.records import Emit, Event
from cramlm.stages.common import write_json
from cramlm.training.batching import SpecialIds, TokenPool
from cramlm.training.importance import MARKED, NOT_ASKED, mark_words, score_tokens

_MOST_WORDS = 200

Pools = tuple[TokenPool | None, TokenPool | None]


def tell(
    phase: PhaseConfig,
    folder: Path,
    *,
    name: str,
    key: Mapping[str, Any],
    pools: Callable[[], Pools],
    weights: Callable[[], Model],
    tokenizer: Tokenizer,
    special: SpecialIds,
    precision: Precision,
    emit: Emit,
) -> Artifact | None:
    """What the phase must be told, published; None where it needs nothing.

    name: of the phase's folder without 'phase-'. key: what the pools and the weights come from. weights: the model as it is to judge, asked
    for when it is needed.
    """
    if phase.objective == "marks":
        kind, write = "marks", lambda target: _write_marks(target, phase, pools, weights(), tokenizer, special, precision, emit)
        key = {**key, "marks": phase.marks.model_dump(mode="json", exclude={"positive_weight"})}
    elif phase.uses_scores:
        kind, write = "scores", lambda target: _write_scores(target, pools, weights(), precision, emit)
    else:
        return None
    return stage(folder / f"{kind}-{name}", kind=kind, key={"format": 1, **key}, write=write, emit=emit, name=f"{kind}-{name}")


def with_told(pools: Pools, told: Artifact | None) -> Pools:
    """The pools with what `tell` published."""
    external, task = pools
    if told is None:
        return pools
    if told.path.name.startswith("marks-"):
        assert task is not None
        return external, replace(task, marks=read_array(told.path / "marks.npy"))
    scored = ("external", external), ("task", task)
    external, task = (None if pool is None else replace(pool, scores=read_array(told.path / f"{origin}.npy")) for origin, pool in scored)
    return external, task


def _write_marks(
    target: Path,
    phase: PhaseConfig,
    pools: Callable[[], Pools],
    model: Model,
    tokenizer: Tokenizer,
    special: SpecialIds,
    precision: Precision,
    emit: Emit,
) -> None:
    emit(Event("start", "marks"))
    _, task = pools()
    assert task is not None
    assert task.begins is not None
    marks = mark_words(model, task, phase.marks, special, precision=precision)
    save_array(target / "marks.npy", marks)
    first = np.flatnonzero(task.begins)
    words = zip(np.split(task.ids, first[1:]), marks[first].tolist(), strict=True)
    marked = Counter(tokenizer.decode(ids.tolist()) for ids, mark in words if mark == MARKED)
    asked, texts = marks[first], np.split(marks, task.offsets[1:-1])
    used = sum(bool((text != NOT_ASKED).any()) for text in texts)
    share = float((asked == MARKED).sum() / max(1, (asked != NOT_ASKED).sum()))
    write_json(
        target / "words.json", {"texts": len(task), "texts_used": used, "share": share, "marked": dict(marked.most_common(_MOST_WORDS))}
    )
    most = ", ".join(word for word, _ in marked.most_common(5))
    emit(
        Event("done", "marks", f"{used:,} of {len(task):,} texts labelled correctly; {share:.0%} of their words marked, most often {most}")
    )


def _write_scores(target: Path, pools: Callable[[], Pools], model: Model, precision: Precision, emit: Emit) -> None:
    emit(Event("start", "scores"))
    found, tokens = 0, 0
    for origin, pool in zip(("external", "task"), pools(), strict=True):
        if pool is not None:
            scores = score_tokens(model, pool, precision=precision)
            save_array(target / f"{origin}.npy", scores)
            found, tokens = found + int((scores > 0).sum()), tokens + len(scores)
    emit(Event("done", "scores", f"{found / max(1, tokens):.0%} of {tokens:,} tokens look like those that matter"))
