"""README.md of an exported model, for whoever finds the folder: what it is, how to load it, what it was made of, how good it is.

A figure that provenance does not hold is left out; nothing is made up. Names that come from data (labels, files) are escaped.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import Any, Final

from cramlm.evaluation.kinds import KINDS, NAMES, figure, is_percent, metric_of
from cramlm.records import TaskKind

_MOST_ROWS = 40
_MOST_COLUMNS = 3
_SPECIAL = str.maketrans({character: f"\\{character}" for character in "\\`*_{}[]<>#|~$"})

_HEAD = """\
---
library_name: transformers
pipeline_tag: text-classification
tags:
- cramlm
- text-classification
- task-driven-language-modeling
# license: left to you; what the training text allows may decide it
# language: left to you, like en
---
"""

_CITATION = """\
The method is TLM, task-driven language modeling ([arXiv:2111.04130](https://arxiv.org/abs/2111.04130)):

```bibtex
@inproceedings{yao2022tlm,
  title     = {NLP From Scratch Without Large-Scale Pretraining: A Simple and Efficient Framework},
  author    = {Yao, Xingcheng and Zheng, Yanan and Yang, Xiaocong and Yang, Zhilin},
  booktitle = {Proceedings of the 39th International Conference on Machine Learning},
  year      = {2022}
}
```"""


_WHAT: Final[dict[TaskKind, str]] = {"classification": "classifier", "multi-label": "tagger", "regression": "scorer"}
_DOES: Final[dict[TaskKind, str]] = {
    "classification": "Sorts texts into {count} labels: {labels}.",
    "multi-label": "Gives texts any of {count} labels, none too: {labels}. A label is given where its probability is 0.5 or more.",
    "regression": "Answers a text with a number, {labels}, in the unit of its training file: the model's single logit.",
}
_KNOWS: Final[dict[TaskKind, str]] = {
    "classification": "It knows these labels only, and gives one of them to every text, whatever the text is.",
    "multi-label": "It knows these labels only; that it gives none says nothing of others.",
    "regression": "It gives a number to every text, whatever the text is, and none far outside those that it was trained on.",
}


def model_card(facts: Mapping[str, Any]) -> str:
    """Markdown with YAML front matter.

    Known keys of `facts`, plain data as in provenance.json: labels, parameters, vocab_size, max_length, mlm, versions; and, each optional,
    kind (of task), config (a RunConfig), phases (a report for each), retriever, corpus (statistics), selection (report), task, seconds
    (per stage), scores (models: name -> dev, test; verdict), prompt (where the labels are words: prompt.json). The first of scores.models
    is this model.
    """
    sections = [
        f"# {_title(facts)}",
        _summary(facts),
        "## Use",
        _use(facts),
        *_headed("## Data", _data(facts)),
        *_headed("## Training", _training(facts)),
        *_headed("## Scores", _scores(facts)),
        "## Limits",
        _limits(facts),
        "## Citation",
        _CITATION,
    ]
    head = _HEAD.replace("pipeline_tag: text-classification", "pipeline_tag: fill-mask") if facts.get("prompt") else _HEAD
    return head + "\n" + "\n\n".join(sections) + "\n"


def _title(facts: Mapping[str, Any]) -> str:
    name = facts.get("config", {}).get("name")
    what = _WHAT[_kind(facts)]
    return f"{_plain(name)}: a text {what} made with cramlm" if name else f"A text {what} made with cramlm"


def _kind(facts: Mapping[str, Any]) -> TaskKind:
    kind: TaskKind = facts.get("kind", "classification")
    return kind


def _summary(facts: Mapping[str, Any]) -> str:
    labels = [_plain(label) for label in facts["labels"]]
    shown = ", ".join(labels[:_MOST_ROWS]) + (", …" if len(labels) > _MOST_ROWS else "")
    encoder = facts.get("config", {}).get("encoder")
    shape = f"{encoder['layers']} layers of width {encoder['hidden']}, " if encoder else ""
    text = "labelled texts and on raw text that was chosen for them" if facts.get("selection") else "labelled texts only"
    origin = f"It was trained from scratch, on {text}; no pretrained model went in."
    if init := facts.get("init"):
        weights = f"sha256 `{init['sha256']['model.safetensors'][:16]}…`"
        origin = f"It started from the weights of {_plain(PurePath(init['name']).name)} ({weights}) and was trained on {text}."
    return (
        f"{_DOES[_kind(facts)].format(count=len(labels), labels=shown)} An encoder of {facts['parameters'] / 1e6:.1f}M parameters ({shape}"
        f"vocabulary of {facts['vocab_size']:,} tokens). {origin}"
    )


def _use(facts: Mapping[str, Any]) -> str:
    native = """\
With transformers (no custom code):

```python
from transformers import pipeline

classify = pipeline("text-classification", model="path/to/this/folder", truncation=True, top_k=None)
print(classify("some text"))
```

With cramlm, which is faster and needs no transformers:"""
    ours = """\
```python
from cramlm import Predictor

print(Predictor.load("path/to/this/folder").predict(["some text"]))
```"""
    if facts.get("prompt"):
        return _use_of_prompt(ours)
    own = "No class of transformers computes this encoder (a mixture of experts); cramlm reads the folder:"
    text = f"{own if (facts.get('config') or {}).get('encoder', {}).get('shape') == 'moe' else native}\n\n{ours}"
    if facts["mlm"] and text.startswith(native):
        text += "\n\n`mlm/` holds the language model that the classifier was made from; `AutoModelForMaskedLM` loads it."
    return text + "\n\n`provenance.json` holds everything below and more, for programs."


def _use_of_prompt(ours: str) -> str:
    return f"""\
`prompt.json` holds patterns that a text is put into, and for each label the words that stand for it; the label's score is what the
masked language model in this folder (`AutoModelForMaskedLM` loads it) says of these words at the pattern's masks. cramlm puts the two
together, transformers' text-classification pipeline does not:

{ours}

`provenance.json` holds everything below and more, for programs."""


def _data(facts: Mapping[str, Any]) -> str:
    lines = []
    if task := facts.get("task"):
        counts = [f"{task[split]:,} {split}" for split in ("train", "dev", "test") if task.get(split)]
        lines.append(f"- Labelled texts: {', '.join(counts)}.")
    if corpus := facts.get("corpus"):
        rows, passages = corpus.get("rows", {}), corpus.get("passages", {})
        lines.append(f"- Raw text searched: {passages.get('kept', 0):,} passages from {rows.get('used', 0):,} rows.")
        lines += [
            f"  - {_plain(PurePath(file['name']).name)}: {file['rows_used']:,} rows, sha256 `{file['sha256'][:16]}…`"
            for file in corpus.get("files", [])[:_MOST_ROWS]
        ]
    if selection := facts.get("selection"):
        documents = selection["documents"]
        lines.append(
            f"- Raw text trained on: {documents['selected']:,} passages, {selection['words']:,} words, {_chosen_how(facts)}; "
            f"{documents['dropped']:,} that overlap dev or test texts were left out."
        )
    return "\n".join(lines)


def _chosen_how(facts: Mapping[str, Any]) -> str:
    match facts.get("retriever"):
        case {"kind": "bm25" | "dense" as kind, "top_k": top_k}:
            best = "the best" if top_k is None else f"the best {top_k}"
            return f"{best} by {'BM25' if kind == 'bm25' else 'sentence embeddings'} for each training text"
        case {"kind": "dsir"}:
            return "drawn by importance resampling towards the training texts"
        case {"kind": "union", "retrievers": members}:
            return f"chosen by {' and '.join(_plain(member['kind']) for member in members)} in turn"
        case {"kind": "random"}:
            return "drawn at random"
        case _:
            return "retrieved for the training texts"


def _training(facts: Mapping[str, Any]) -> str:
    phases = facts.get("phases") or []
    if not phases:
        return ""
    rows = [
        [
            _plain(phase["name"]),
            f"{phase['steps']:,}",
            f"{phase['tokens']:,}",
            f"{phase['seconds']:,.0f}",
            f"{phase['paper_flops']:.2g}",
            f"{phase['executed_flops']:.2g}",
        ]
        for phase in phases
    ]
    paragraphs = [_table(["phase", "steps", "tokens", "seconds", "FLOPs as the paper counts", "FLOPs executed"], rows)]
    if seconds := facts.get("seconds"):
        paragraphs.append("Seconds per stage: " + ", ".join(f"{_plain(name)} {value:,.0f}" for name, value in seconds.items()) + ".")
    sentences = [f"Made with {', '.join(f'{name} {version}' for name, version in facts['versions'].items())}."]
    if precision := facts.get("precision"):
        sentences.insert(0, f"Computed in {precision}.")
    if (seed := facts.get("config", {}).get("seed")) is not None:
        sentences.insert(0, f"Seed {seed}.")
    return "\n\n".join([*paragraphs, " ".join(sentences)])


def _scores(facts: Mapping[str, Any]) -> str:
    models = (facts.get("scores") or {}).get("models") or {}
    if not models:
        return ""
    kind, rows = _kind(facts), []
    main = metric_of(kind)
    columns = [("dev", main), ("test", main), *(("test", metric) for metric in reversed(KINDS[kind].metrics[:-1]))][:_MOST_COLUMNS]
    for place, (name, entry) in enumerate(models.items()):
        shown = f"**{_plain(name)}** (this model)" if place == 0 else _plain(name)
        cells = [_figure(entry.get(split), field) for split, field in columns]
        rows.append([shown, *cells])
    parts = [
        f"{'In percent, with' if is_percent(main) else 'With'} 95 % bootstrap intervals. Models and their settings were chosen on dev; "
        f"test was scored once. The names with tfidf are {KINDS[kind].baseline}, fitted on the same texts.",
        _table(["model", *(f"{split} {NAMES[metric]}" for split, metric in columns)], rows),
    ]
    if verdict := facts["scores"].get("verdict"):
        parts.append(_plain(verdict))
    own = next(iter(models.values()))
    split = "test" if own.get("test") else "dev"
    if per_class := (own.get(split) or {}).get("per_class"):
        shown_rows = [
            [_plain(label), *(f"{100 * row[field]:.1f}" for field in ("precision", "recall", "f1")), f"{row['support']:,}"]
            for label, row in list(per_class.items())[:_MOST_ROWS]
        ]
        parts += [f"This model on {split}, label by label:", _table(["label", "precision", "recall", "F1", "texts"], shown_rows)]
    return "\n\n".join(parts)


def _figure(scores: Mapping[str, Any] | None, field: str) -> str:
    if not scores:
        return "–"
    low, high = scores.get("intervals", {}).get(field, (None, None))
    interval = "" if low is None else f" ({figure(field, low)}–{figure(field, high)})"
    return f"{figure(field, scores[field])}{interval}"


def _limits(facts: Mapping[str, Any]) -> str:
    lines = [
        f"- A text is cut after {facts['max_length']} tokens.",
        f"- {_KNOWS[_kind(facts)]}",
        "- It was made for texts like its training texts; other kinds of text, and other languages, were not measured.",
        "- What is one-sided in the training texts or the raw text is one-sided in its answers.",
    ]
    models = (facts.get("scores") or {}).get("models") or {}
    own: Mapping[str, Any] = next(iter(models.values()), {})
    measured = own.get("test") or own.get("dev") or {}
    if (error := measured.get("calibration_error")) is not None:
        lines.append(f"- Its probabilities are off by {100 * error:.1f} points on average (expected calibration error, 15 bins).")
    rare = [label for label, row in measured.get("per_class", {}).items() if row["support"] < 10]
    if rare:
        lines.append(f"- {len(rare)} of its labels had fewer than 10 texts to be measured on; their figures say little.")
    return "\n".join(lines)


def _headed(heading: str, text: str) -> Iterator[str]:
    if text:
        yield heading
        yield text


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---", *(["---:"] * (len(header) - 1))], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _plain(value: Any) -> str:
    """Text from data on one line, with what Markdown would read as markup escaped."""
    return "".join(character if character.isprintable() else " " for character in str(value)).translate(_SPECIAL)
