"""Small real things the model tests share: invented text in several scripts, trained tokenizers, packed batches."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np

from cramlm.config.head import HeadConfig
from cramlm.config.run import EncoderConfig
from cramlm.model.model import PackedBatch
from cramlm.model.tokenizer import Tokens
from cramlm.records import Batch

WORDS = (
    *("the", "of", "and", "to", "binding", "kinase", "inhibits", "receptor", "protein", "cell", "acts", "strongly", "on", "dose", "rats"),
    *("treated", "with", "aspirin", "reduces", "pain", "p53", "mutation", "river", "bank", "water", "flows", "slowly", "under", "old"),
    *("stone", "bridge", "naïve", "café", "résumé", "žluťoučký", "kůň"),
    *("한국어", "문장", "अंग्रेज़ी", "वाक्य", "שלום", "עולם", "مرحبا", "بالعالم"),
)
SAMPLES = (
    "日本語の文章です。東京タワーは高い。",
    "中文沒有空格，所以每個字是一個詞。",
    "ภาษาไทยไม่มีช่องว่าง",
    "<< aspirin >> inhibits [[ COX-2 ]] strongly (p < 0.05), see [1].",
    "It costs 3,000 € -- or $4.50 -- per kg!",
)
SHAPES = {
    "bert": (EncoderConfig(shape="bert", layers=2, hidden=32, heads=4, intermediate=48, max_positions=64), HeadConfig(pooling="cls")),
    "modernbert-mean": (
        EncoderConfig(shape="modernbert", layers=3, hidden=32, heads=4, intermediate=48, max_positions=64, rope_theta=500.0),
        HeadConfig(pooling="mean"),
    ),
    "albert": (
        EncoderConfig(
            shape="albert", layers=3, hidden=32, heads=4, intermediate=48, embedding=16, max_positions=64, norm_eps=1e-12, init_std=0.05
        ),
        HeadConfig(pooling="cls"),
    ),
    "modernbert-cls": (
        EncoderConfig(shape="modernbert", layers=2, hidden=48, heads=2, intermediate=32, max_positions=64, init_std=0.05),
        HeadConfig(pooling="cls"),
    ),
}


def sentences(count: int, *, seed: int = 0, longest: int = 30) -> list[str]:
    """Invented sentences of 1 to `longest` words."""
    generator = random.Random(seed)
    return [" ".join(generator.choices(WORDS, k=generator.randint(1, longest))) for _ in range(count)]


def training_texts() -> list[str]:
    return sentences(400) + list(SAMPLES) * 3


def packed(tokens: Tokens, *, per_row: int, pad_id: int = 0, padding: int = 3) -> PackedBatch:
    """`per_row` sequences side by side in each row, in order, and a few positions of padding at its end."""
    count, lengths = len(tokens), tokens.lengths
    rows = [np.arange(start, min(start + per_row, count)) for start in range(0, count, per_row)]
    width = max(lengths[row].sum() for row in rows) + padding
    token_ids, sequence, position = (np.full((len(rows), width), fill, np.int64) for fill in (pad_id, -1, 0))
    for number, row in enumerate(rows):
        used = slice(0, lengths[row].sum())
        token_ids[number, used] = np.concatenate([tokens[index] for index in row])
        sequence[number, used] = np.repeat(row, lengths[row])
        position[number, used] = np.concatenate([np.arange(length) for length in lengths[row]])
    first = np.unique(sequence, return_index=True)[1][-count:]
    none, soft_labels = np.zeros(0, np.int64), np.zeros((count, 0), np.float32)
    return PackedBatch.of(
        Batch(token_ids, sequence, position, first, none, none, np.full(count, -1, np.int64), np.zeros(count, np.bool_), soft_labels)
    )


def padded(rows: Sequence[Sequence[int]], pad_id: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Ids and attention mask as transformers takes them: one sequence per row."""
    width = max(map(len, rows))
    ids = np.array([[*row, *[pad_id] * (width - len(row))] for row in rows], np.int64)
    mask = np.array([[1] * len(row) + [0] * (width - len(row)) for row in rows], np.int64)
    return ids, mask
