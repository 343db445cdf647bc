"""What a phase must be told of its tokens before it can begin: which words matter to the labels, or how fit each token is to be hidden.

marks-2-scorer/    marks.npy, words.json: the labelled texts as the weights before the phase see them (training/importance.py)
scores-3-taskpt/   external.npy, task.npy: logits of the phase that learnt the marks
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from cramlm.config.phase import PhaseConfig
from cramlm.config.terms import ImportantTokens
from cramlm.model.device import Precision
from cramlm.model.model import Model
from cramlm.model.tokenizer import Tokenizer
from cramlm.pipeline.stages.common import Context, write_json
from cramlm.records import Emit, Event
from cramlm.storage.arrays import read_array, save_array
from cramlm.storage.artifacts import Artifact
from cramlm.training.importance import MARKED, NOT_ASKED, mark_words, score_tokens
from cramlm.training.masking import SpecialIds
from cramlm.training.pools import TokenPool

_MOST_WORDS = 200

Pools = tuple[TokenPool | None, TokenPool | None]


@dataclass(frozen=True, slots=True)
class Judge:
    """The model whose weights say which tokens are important, and the texts. model, pools: made when they are needed."""

    model: Callable[[], Model]
    pools: Callable[[], Pools]
    tokenizer: Tokenizer
    special: SpecialIds
    precision: Precision


def token_importance(run: Context, phase: PhaseConfig, judge: Judge, *, name: str, key: Mapping[str, Any]) -> Artifact | None:
    """Token labels or scores that the phase needs, published; None where it needs none.

    name: of the phase's folder without 'phase-'. key: what the pools and the weights come from.
    """
    if phase.needs_token_labels:
        (term,) = phase.terms_of(ImportantTokens)
        kind, write = "marks", lambda target: _write_marks(target, term, judge, run.emit)
        key = {**key, "marks": term.model_dump(mode="json", include={"rule", "delta", "share"})}
    elif phase.needs_scores:
        kind, write = "scores", lambda target: _write_scores(target, judge, run.emit)
    else:
        return None
    return run.stage(f"{kind}-{name}", kind=kind, key={"format": 1, **key}, write=write)


def with_importance(pools: Pools, told: Artifact | None) -> Pools:
    """The pools with what `token_importance` published."""
    external, task = pools
    if told is None:
        return pools
    if told.path.name.startswith("marks-"):
        assert task is not None
        return external, replace(task, token_labels=read_array(told.path / "marks.npy"))
    scored = ("external", external), ("task", task)
    external, task = (None if pool is None else replace(pool, scores=read_array(told.path / f"{origin}.npy")) for origin, pool in scored)
    return external, task


def _write_marks(target: Path, term: ImportantTokens, judge: Judge, emit: Emit) -> None:
    emit(Event("start", "marks"))
    _, task = judge.pools()
    assert task is not None
    assert task.begins is not None
    marks = mark_words(judge.model(), task, term, judge.special, precision=judge.precision)
    save_array(target / "marks.npy", marks)
    first = np.flatnonzero(task.begins)
    words = zip(np.split(task.ids, first[1:]), marks[first].tolist(), strict=True)
    marked = Counter(judge.tokenizer.decode(ids.tolist()) for ids, mark in words if mark == MARKED)
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


def _write_scores(target: Path, judge: Judge, emit: Emit) -> None:
    emit(Event("start", "scores"))
    found, tokens, model = 0, 0, judge.model()
    for origin, pool in zip(("external", "task"), judge.pools(), strict=True):
        if pool is not None:
            scores = score_tokens(model, pool, precision=judge.precision)
            save_array(target / f"{origin}.npy", scores)
            found, tokens = found + int((scores > 0).sum()), tokens + len(scores)
    emit(Event("done", "scores", f"{found / max(1, tokens):.0%} of {tokens:,} tokens look like those that matter"))
