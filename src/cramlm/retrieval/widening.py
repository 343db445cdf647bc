"""How many documents each query is asked for, where that is open.

    ask(50) ─► is the union larger than the slice may be? ── yes ─► that union
                 └─ no ─► ask(200), ask(800), ask(3,200)

A union is sorted by rank, so that the slice is the same at every depth that fills it: what is asked for more is cut again.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

from cramlm.data.corpus import Corpus
from cramlm.records import Emit, Event
from cramlm.retrieval.ranking import STAGE, Proposal
from cramlm.retrieval.winnow import Bound, within_bound
from cramlm.retriever_config import DEPTHS


def widen(ask: Callable[[int], Proposal], top_k: int | None, corpus: Corpus, bound: Bound, *, emit: Emit) -> Proposal:
    """What `ask` finds with `top_k` documents per query; where that is open, with the fewest of `DEPTHS` that give more than `bound`.

    Without a bound the first depth answers, and where the last is not enough, the last.
    """
    if top_k is not None or bound == Bound():
        return ask(top_k or DEPTHS[0])
    proposal = ask(DEPTHS[0])
    for narrow, wide in pairwise(DEPTHS):
        found = len(proposal.ranking)
        if found < narrow or found == len(corpus) or within_bound(proposal.ranking, corpus, bound) < found:
            break  # nothing more to find, or nothing more to keep
        emit(Event("start", STAGE, f"{narrow} for each text are {found:,} different passages, fewer than planned: {wide:,} for each"))
        proposal = ask(wide)
    return proposal
