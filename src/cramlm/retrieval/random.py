"""The control: documents drawn without looking at the task, so that a gain of retrieval can be told from a gain of more text."""

from __future__ import annotations

import numpy as np

from cramlm.records import IntArray


def draw_documents(documents: int, count: int, *, seed: int) -> IntArray:
    """Positions of min(count, documents) different documents in the order drawn; a shorter draw is the beginning of a longer one."""
    generator = np.random.default_rng([seed, 0x52414E44])  # the stream is this purpose's own
    return generator.permutation(documents)[:count].astype(np.int64)
