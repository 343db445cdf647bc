"""What the model was made of: the labelled texts and the passages retrieved for them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from cramlm.data.hygiene import check_task
from cramlm.data.labels import RULES
from cramlm.data.words import count_words
from cramlm.deploy.report.charts import histogram
from cramlm.deploy.report.facts import MOST_PASSAGES, Json, RunFacts
from cramlm.deploy.report.markup import Cell, facts, inline, missing, note, number, passage, percent, section, table
from cramlm.deploy.report.neighbours import Neighbours
from cramlm.records import Example, Task
from cramlm.retrieval.selection import read_selection

_SAMPLES = 12
_MOST_ROWS = 200
_BINS = 20


def labelled_data(run: RunFacts) -> str:
    """Classes, lengths, repetitions and leaks."""
    if run.task is None:
        return section("data", "Labelled data", missing(f"Not shown: {run.task_trouble}."))
    task, check = run.task, check_task(run.task)
    splits = {name: examples for name, examples in (("train", task.train), ("dev", task.dev), ("test", task.test)) if examples}
    words = {name: [count_words(example.whole_text) for example in examples] for name, examples in splits.items()}
    lengths: list[list[Cell | str]] = [
        [name, *(number(value) for value in np.percentile(words[name], (0, 10, 50, 90, 100)).round())] for name in splits
    ]
    parts = [
        _numbers(task) if task.kind == "regression" else _labels(task, splits),
        '<div class="pair">',
        _length_chart(words["train"]),
        "<div>",
        table("Words in a text", ["split", "least", "10 %", "median", "90 %", "most"], lengths, tools=False),
        _repetitions(check.repeated_train, check.conflicting_train, {"dev": check.dev_in_train, "test": check.test_in_train}, splits),
        "</div></div>",
    ]
    if "test" not in splits:
        parts.insert(
            0, missing("There is no test file: scores below are on dev, which also chose the model, and are therefore a little too good.")
        )
    if task.dev_is_split_from_train:
        parts.append(note("There was no dev file: dev was split off from the training file."))
    return section("data", "Labelled data", *parts)


def _labels(task: Task, splits: Mapping[str, Sequence[Example]]) -> str:
    """How many texts have each label."""
    names_of = RULES[task.kind].names
    counts = {split: Counter(name for each in examples for name in names_of(str(each.label))) for split, examples in splits.items()}
    names = [*task.labels, *sorted({label for each in counts.values() for label in each} - set(task.labels))]
    most, others = max(counts["train"].values()), [split for split in splits if split != "train"]
    rows: list[list[Cell | str]] = []
    for name in sorted(names, key=lambda name: -counts["train"][name])[:_MOST_ROWS]:
        own = counts["train"][name]
        figures = [Cell(f"{own:,}", order=own, bar=own / most), percent(own / len(task.train))]
        rows.append([name, *figures, *(number(counts[split][name]) for split in others)])
    return table("Labels, by how many training texts they have", ["label", "train", "share", *others], rows)


def _numbers(task: Task) -> str:
    """How the training numbers lie."""
    values = np.array([float(str(example.label)) for example in task.train])
    told = f"From {values.min():g} to {values.max():g}, mean {task.scale.mean:.4g}, standard deviation {task.scale.spread:.4g}."
    return f'<div class="above">{_histogram("Numbers of the training texts", told, values, task.labels[0])}{note(told)}</div>'


def retrieved_text(run: RunFacts, neighbours: Neighbours | None) -> str:
    """What became of the documents found, where they come from, how they rank, what marks them off, and some of them to read."""
    report = run.selection
    if report is None:
        reason = "This run trains on labels only: nothing was retrieved." if run.config.corpus is None else "The selection is not made yet."
        return section("retrieved", "Retrieved text", missing(reason))
    documents, queries = report["documents"], report["queries"]
    told = [
        ("passages selected", f"{documents['selected']:,}"),
        ("words", f"{report['words']:,}"),
        ("tokens, estimated", f"{report['tokens']['estimated'] / 1e6:.2f} M"),
        ("found, before the bound", f"{documents['found']:,}"),
        ("beyond the bound", f"{documents['cut'] + documents['capped']:,}"),
        ("left out for dev or test text", f"{documents['dropped']:,}"),
    ]
    if queries["texts"]:
        told.append(("queries answered", f"{queries['answered']:,} of {queries['texts']:,} ({queries['distinct']:,} distinct)"))
    if likeness := report.get("task_likeness"):
        told.append(
            (
                "nearer to the task than a blind draw",
                f"{likeness['kl_reduction']:+.3f} nats (KL {likeness['kl_random']:.2f} → {likeness['kl_selection']:.2f})",
            )
        )
    parts = [
        facts(told),
        _source_table(report),
        _profile(run, asked=queries["texts"] > 0),
        _telling_words(report.get("over_represented", ())),
        _samples(run, neighbours),
    ]
    return section("retrieved", "Retrieved text", *parts)


def _length_chart(words: Sequence[int]) -> str:
    top = float(np.percentile(words, 99)) + 1
    counts, edges = np.histogram(np.minimum(words, top), bins=_BINS, range=(0, top))
    half, most = np.median(words), np.percentile(words, 90)
    description = f"Half of the {len(words):,} training texts have {half:.0f} words or fewer, nine in ten at most {most:.0f}."
    return histogram(
        "Length of the training texts",
        description,
        edges.tolist(),
        counts.tolist(),
        x_name="words (the last bar: and more)",
        x_format=_round,
    )


def _repetitions(repeated: int, conflicting: int, seen: dict[str, tuple[int, int]], splits: dict[str, tuple[Example, ...]]) -> str:
    lines = [
        f"{repeated:,} training rows repeat an earlier text" if repeated else "no training text stands there twice",
        f"{conflicting:,} training texts stand there with different labels" if conflicting else "no training text has two labels",
    ]
    for split in ("dev", "test"):
        if split in splits:
            same, other = seen[split]
            lines.append(
                f"{same + other:,} of {len(splits[split]):,} {split} rows are in train too ({other:,} with another label)"
                if same + other
                else f"no {split} row is in train"
            )
    return "<h3>Repetitions and leaks</h3><ul>" + "".join(f"<li>{line}</li>" for line in lines) + "</ul>"


def _source_table(report: Json) -> str:
    total, corpus = report["documents"]["selected"], report["corpus_documents"]
    most = max(report["sources"].values())
    rows = []
    for source, count in list(report["sources"].items())[:_MOST_ROWS]:
        there = report["corpus_sources"][source]
        words = report["source_words"][source]
        often = (count / total) / (there / corpus)
        cells = [Cell(f"{count:,}", order=count, bar=count / most), percent(count / total), number(words), percent(there / corpus)]
        rows.append([source, *cells, Cell(f"{often:.2f} ×", order=often)])
    header = ["source", "passages", "share", "words", "share of the corpus", "as often as blindly"]
    more = len(report["sources"]) - len(rows)
    return table("Where the passages come from", header, rows) + (note(f"{more:,} more sources are left out here.") if more else "")


def _profile(run: RunFacts, *, asked: bool) -> str:
    kept = read_selection(run.path / "selection")
    rank, score = kept.rank.astype(np.float64), kept.score.astype(np.float64)
    best = int((kept.rank == 0).sum())
    ranks = (
        f"{best:,} of {len(kept):,} passages are the first answer to a query; half of all have rank {np.median(rank) + 1:.0f} or better."
    )
    scores = f"Half of the passages score {np.median(score):.3g} or more; the lowest {score.min():.3g}, the highest {score.max():.3g}."
    by_score = _histogram("Score of each passage", scores, score, "score of the query that ranks it best" if asked else "score")
    if not asked or len(np.unique(rank)) == 1:  # a chart of the ranks would say nothing
        return f'<div class="above">{by_score}</div>{note(f"{ranks} {scores}" if asked else scores)}'
    by_rank = _histogram("Best rank of each passage", ranks, rank + 1, "best rank over all queries, 1 = first", whole=True)
    return f'<div class="pair"><div>{by_rank}{note(ranks)}</div><div>{by_score}{note(scores)}</div></div>'


def _histogram(title: str, description: str, values: npt.NDArray[np.float64], x_name: str, *, whole: bool = False) -> str:
    low, high = float(values.min()), float(values.max())
    bins, wide = _BINS, 0
    if whole:  # every bar holds equally many whole numbers
        wide = int(np.ceil((high - low + 1) / _BINS))
        bins = int(np.ceil((high - low + 1) / wide))
        high = low + bins * wide
    counts, edges = np.histogram(values, bins=bins, range=(low, high if high > low else low + 1))
    return histogram(title, description, edges.tolist(), counts.tolist(), x_name=x_name, x_format=_round, centred=wide == 1)


def _round(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 10 or value == int(value) else f"{value:.2g}"


def _telling_words(words: Sequence[Json]) -> str:
    if not words:
        return missing("No word stands out against a blind draw from the corpus.")
    most = max(row["z"] for row in words)
    rows = []
    for row in words:
        times = math.exp(min(row["log_odds"], 20))
        cells = [Cell(f"{row['z']:.1f}", order=row["z"], bar=row["z"] / most), Cell(f"{times:.1f} ×", order=times)]
        rows.append([row["word"], *cells, number(row["selection"]), number(row["random"])])
    header = ["word", "z", "odds", "in the selection", "in as much blind text"]
    told = "Log-odds with a prior (Monroe, Colaresi and Quinn 2008); z says how sure the difference is."
    return table("Words that mark the selection off from the corpus", header, rows) + note(told)


def _samples(run: RunFacts, neighbours: Neighbours | None) -> str:
    if not run.passages:
        return missing("The passages themselves are not there to show.")
    places = np.unique(np.linspace(0, len(run.passages) - 1, _SAMPLES).round().astype(int)).tolist()
    train = run.task.train if run.task is not None else ()
    items = []
    for place in places:
        found = run.passages[place]
        number_of_query = int(found["query"])
        query = train[number_of_query].whole_text if 0 <= number_of_query < len(train) else None
        terms = neighbours.shared(query, place) if neighbours is not None and query is not None else ()
        asked = f"<p class=query><span class=tag>asked by</span> {passage(query, terms=terms, limit=160)}</p>" if query is not None else ""
        retriever = f" · {inline(found['retriever'])}" if "retriever" in found else ""
        head = (
            f"rank {found['rank'] + 1:,} · score {found['score']:.4g}{retriever} · {inline(found['source'])} · {inline(str(found['id']))}"
        )
        items.append(f"<article><p class=meta>{head}</p><p>{passage(found['text'], terms=terms)}</p>{asked}</article>")
    searched = f" (of the best {MOST_PASSAGES:,})" if len(run.passages) == MOST_PASSAGES else ""
    told = note(
        f"{len(items)} passages, evenly over the ranks{searched}; marked are the words that passage and query share, those that weigh most."
    )
    if run.task is None:
        told += missing(f"The queries are not shown: {run.task_trouble}.")
    return "<h3>Some of the passages</h3>" + told + '<div class="cards">' + "\n".join(items) + "</div>"
