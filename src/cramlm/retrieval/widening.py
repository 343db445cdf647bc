"""How many documents each query is asked for, where that is open.

    ask(50) ─► is the union larger than the slice may be? ── yes ─► that union
                 └─ no ─► ask(200), ask(800), ask(3,200)

A union is sorted by rank, so that the slice is the same at every depth that fills it: what is asked for more is cut again.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

from cramlm.config.retriever import Bm25Config, DenseConfig
from cramlm.data.corpus import Corpus
from cramlm.records import Emit, Event
from cramlm.retrieval.filters import bound_of, within_bound
from cramlm.retrieval.ranking import STAGE, Proposal


def widen(ask: Callable[[int], Proposal], config: Bm25Config | DenseConfig, corpus: Corpus, *, emit: Emit) -> Proposal:
    """What `ask` finds with the first of `config.depths` whose union is more than the slice may hold, else with the last."""
    proposal = ask(config.depths[0])
    for narrow, wide in pairwise(config.depths):
        found = len(proposal.ranking)
        if found < narrow or found == len(corpus) or within_bound(proposal.ranking, corpus, bound_of(config)) < found:
            break  # nothing more to find, or nothing more to keep
        emit(Event("start", STAGE, f"{narrow} for each text are {found:,} different passages, fewer than planned: {wide:,} for each"))
        proposal = ask(wide)
    return proposal
