"""Chance as a function: every draw is keyed by what it is for, so nothing about chance needs to be stored or replayed.

Order, masks and dropout of a step depend on (seed, phase, step) alone. A run that was stopped, a run on fewer machines and a run
that looks at step 700 out of turn all see the same numbers (FAULTS.md, rule 5).
"""

from __future__ import annotations

import hashlib

import numpy as np


def derived_key(seed: int, *, phase_index: int, purpose: str, index: int) -> int:
    """A 128-bit number that differs for every combination of arguments, the same on every machine and Python (sha256, not `hash`)."""
    name = f"cramlm/{seed}/{phase_index}/{purpose}/{index}"
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:16], "little")


def generator(seed: int, *, phase_index: int, purpose: str, index: int) -> np.random.Generator:
    """numpy's counter-based generator (Philox) under that key; about 20 microseconds to make."""
    return np.random.Generator(np.random.Philox(key=derived_key(seed, phase_index=phase_index, purpose=purpose, index=index)))


def torch_seed(seed: int, *, phase_index: int, purpose: str, index: int) -> int:
    """The same key for `torch.manual_seed`, cut to the 63 bits it takes."""
    return derived_key(seed, phase_index=phase_index, purpose=purpose, index=index) & (2**63 - 1)
