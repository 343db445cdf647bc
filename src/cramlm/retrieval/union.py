"""Several retrievers in turn, one list.

    lists of the members, each cut to its own bound ─► turns in proportion to the shares ─► one list, each document once

With shares w the member's document at place p (from 0) has the turn (p + 1) / w; turns are taken in order, on ties the earlier
member first. A document that several name has its best turn. Ranks of different retrievers mean different things (thousands of documents
have rank 0 for BM25, one has it for the others), hence turns, not ranks, are compared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cramlm.data.corpus import Corpus
from cramlm.records import Emit, IntArray
from cramlm.retrieval.filters import Bound, within_bound
from cramlm.retrieval.ranking import NOT_ASKED, Proposal, Ranking, Retriever


@dataclass(frozen=True, slots=True)
class UnionRetriever:
    """members: each with its own bound. shares: as many positive numbers."""

    members: tuple[tuple[Retriever, Bound], ...]
    shares: tuple[float, ...]

    @property
    def key(self) -> Mapping[str, Any]:
        return {f"member {number}": dict(member.key) for number, (member, _) in enumerate(self.members)}

    def propose(self, corpus: Corpus, texts: Sequence[str], *, emit: Emit) -> Proposal:
        proposals = []
        for retriever, bound in self.members:
            proposal = retriever.propose(corpus, texts, emit=emit)
            ranking = proposal.ranking.take(slice(within_bound(proposal.ranking, corpus, bound)))
            proposals.append(Proposal(ranking, proposal.queries, proposal.capped))
        ranking = take_turns([proposal.ranking for proposal in proposals], self.shares)
        asked = next((proposal.queries for proposal in proposals if proposal.queries.texts), NOT_ASKED)
        return Proposal(ranking, asked, sum(proposal.capped for proposal in proposals), tuple(proposals))


def take_turns(rankings: Sequence[Ranking], shares: Sequence[float]) -> Ranking:
    """One ranking of all documents, a rank each; query and score are the naming member's."""
    turn = np.concatenate([(np.arange(len(ranking)) + 1) / share for ranking, share in zip(rankings, shares, strict=True)])
    member = np.concatenate([np.full(len(ranking), number, np.int32) for number, ranking in enumerate(rankings)])
    position: IntArray = np.concatenate([ranking.position for ranking in rankings])
    order = np.lexsort((member, turn))
    _, first = np.unique(position[order], return_index=True)
    chosen = order[np.sort(first)]
    query = np.concatenate([ranking.query for ranking in rankings])
    score = np.concatenate([ranking.score for ranking in rankings])
    return Ranking(position[chosen], np.arange(len(chosen), dtype=np.int32), query[chosen], score[chosen], member[chosen])
