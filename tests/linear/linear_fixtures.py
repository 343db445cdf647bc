"""Made-up tasks for tests of linear models."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from cramlm.data.labels import format_labels
from cramlm.linear.word_vectors import CorpusVectors, WordVectors
from cramlm.records import Example, Scale, Task

TOPICS = {
    "sea": ("wave", "ship", "harbour", "sailor", "tide"),
    "hill": ("summit", "ridge", "valley", "climber", "meadow"),
    "money": ("euro", "bank", "loan", "price", "market"),
    "war": ("tank", "front", "siege", "general", "truce"),
}
COMMON = ("the", "a", "of", "and", "in", "to", "was", "is", "near", "old")


def example(number: int, text: str, label: str) -> Example:
    return Example(str(number), text, None, label)


def topics(rows: dict[str, int], *, seed: int, words: int = 8, share: float = 0.25) -> tuple[Example, ...]:
    """Texts of each topic, as many as `rows` says: a share `share` of the words is of the topic, the others are common."""
    generator = random.Random(seed)
    texts = [
        (" ".join(generator.choice(TOPICS[label]) if generator.random() < share else generator.choice(COMMON) for _ in range(words)), label)
        for label, count in rows.items()
        for _ in range(count)
    ]
    return tuple(example(number, *row) for number, row in enumerate(texts))


def topic_task(**rows: int) -> Task:
    """A task of these many training texts per topic, with 20 dev and 20 test texts for each."""
    rows = rows or {"sea": 40, "hill": 40}
    even = dict.fromkeys(rows, 20)
    return Task(topics(rows, seed=1), topics(even, seed=2), topics(even, seed=3), tuple(sorted(rows)), False)


def several_labels_task() -> Task:
    """Words w0, w1, w2 stand for the labels a, b, c; a text has any of them."""
    labels = [format_labels([name for index, name in enumerate("abc") if number >> index & 1]) for number in range(48)]
    texts = [" ".join(f"w{index}" for index in range(3) if number >> index & 1) + f" filler{number % 5}" for number in range(48)]
    rows = tuple(map(example, range(48), texts, labels))
    return Task(rows[:32], rows[32:40], rows[40:], ("a", "b", "c"), False, kind="multi-label", scale=Scale())


def number_task() -> Task:
    """The number of a text is 100 and the sum of its words' values."""
    texts = [" ".join(f"w{index}" for index in range(3) if number >> index & 1) + f" filler{number % 5}" for number in range(48)]
    rows = tuple(example(number, text, repr(float(100 + number % 8))) for number, text in enumerate(texts))
    return Task(rows[:32], rows[32:40], rows[40:], ("label",), False, kind="regression", scale=Scale())


def relation_task() -> Task:
    """Both entities of a text are the same two; the words between them tell the label, and each word stands elsewhere as often."""
    generator = random.Random(1)
    rows = []
    for number in range(160):
        label = ("up", "down")[number % 2]
        inside, outside = ("raises", "lowers") if label == "up" else ("lowers", "raises")
        verbs = [outside, "<<tin>>", inside, "[[lead]]", outside, inside]
        text = " ".join(word for verb in verbs for word in (generator.choice(COMMON), verb, generator.choice(COMMON)))
        rows.append(example(number, text, label))
    return Task(tuple(rows[:60]), tuple(rows[60:100]), tuple(rows[100:]), ("down", "up"), False)


def pair_task() -> Task:
    """Both texts of a pair are of one topic, or each of another; every topic is as frequent with either label."""
    generator = random.Random(2)
    names = list(TOPICS)
    rows = []
    for number in range(240):
        first = generator.choice(names)
        second = first if number % 2 else generator.choice([name for name in names if name != first])
        halves = [" ".join([generator.choice(COMMON), *generator.sample(TOPICS[name], 2)]) for name in (first, second)]
        rows.append(Example(str(number), *halves, ("other", "same")[number % 2]))
    return Task(tuple(rows[:120]), tuple(rows[120:180]), tuple(rows[180:]), ("other", "same"), False)


def opposed_vectors() -> WordVectors:
    """Vectors of the words of `TOPICS` in two dimensions; two topics are opposed to the others, so that no direction tells equal ones."""
    vectors = word_vectors({word: axis // 2 for axis, words in enumerate(TOPICS.values()) for word in words})
    signs = np.array([(-1) ** axis for axis, words in enumerate(TOPICS.values()) for _ in words], dtype=np.float16)
    return replace(vectors, vectors=vectors.vectors * signs[:, None])


def word_vectors(axes: Mapping[str, int]) -> WordVectors:
    """Vectors of words along an axis each, of equal weights."""
    directions = np.zeros((len(axes), max(axes.values()) + 1), dtype=np.float16)
    directions[np.arange(len(axes)), list(axes.values())] = 1
    return WordVectors(tuple(axes), directions, np.ones(len(axes), dtype=np.float32))


def corpus_vectors(vectors: WordVectors | None) -> CorpusVectors | None:
    """A corpus whose counted and trained vectors are the same."""
    return None if vectors is None else CorpusVectors(vectors, vectors)
