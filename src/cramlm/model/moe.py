"""A mixture of experts (Switch Transformer, Fedus et al. 2022): several feed-forward parts, and a router that sends each token to one.

    p = softmax(router(x)), in float32        expert e = argmax p        y = p_e * expert_e(x)

No expert has a limit: no token is dropped, and a text's answer does not depend on its company. So that the router uses all experts,
training adds `balance_weight` times, as a mean over sequences and layers, E * sum over e of f_e P_e: f_e the share of a sequence's tokens
that expert e got, P_e its mean probability; 1 where they are used evenly. The original takes the shares of the whole batch; a mean over
sequences is the same however a batch is dealt over threads and ranks.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor, nn

from cramlm.config import EncoderConfig
from cramlm.model.kernels import geglu


class Expert(nn.Module):
    """A gated feed-forward part, (N, D) -> (N, D)."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.wi = nn.Linear(config.hidden, 2 * config.intermediate, bias=False)
        self.output = nn.Linear(config.intermediate, config.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.output(geglu(self.wi(x)))
        return result


class Experts(nn.Module):
    """(R, L, D) -> the same through each token's expert, and the balance of the sequences, summed: a scalar.

    sequence: (R, L), -1 = padding; its places have an expert too, but no part in the balance.
    """

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.router = nn.Linear(config.hidden, config.experts, bias=False)
        self.experts = nn.ModuleList(Expert(config) for _ in range(config.experts))

    def forward(self, x: Tensor, sequence: Tensor) -> tuple[Tensor, Tensor]:
        flat = x.flatten(0, 1)
        with torch.autocast(x.device.type, enabled=False):
            probabilities = torch.softmax(F.linear(flat.float(), self.router.weight.float()), -1)
        gate, choice = probabilities.max(-1)
        result = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            mine = (choice == number).nonzero().squeeze(1)
            result = result.index_add(0, mine, expert(flat.index_select(0, mine)).to(x.dtype))
        answer = result.view(x.shape) * gate.view(*x.shape[:2], 1).to(x.dtype)
        return answer, _balance(probabilities, choice, sequence.flatten())


def _balance(probabilities: Tensor, choice: Tensor, owner: Tensor) -> Tensor:
    """E * sum over experts of (share of tokens) * (mean probability), for each sequence, summed."""
    experts = probabilities.shape[1]
    real = (owner >= 0).nonzero().squeeze(1)
    owner = owner.index_select(0, real)
    sequences = int(owner.max()) + 1 if len(owner) else 0
    sums = torch.zeros(sequences, experts, device=owner.device)
    means = sums.index_add(0, owner, probabilities.index_select(0, real))
    shares = sums.index_add(0, owner, F.one_hot(choice.index_select(0, real), experts).float())
    lengths = shares.sum(1, keepdim=True)
    return experts * ((means / lengths) * (shares / lengths)).sum()
