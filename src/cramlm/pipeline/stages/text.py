"""From the task file to the tokenizer: everything that happens to text before a model sees it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from cramlm.config.head import Slots
from cramlm.config.retriever import Bm25Config, ElasticsearchConfig, members_of
from cramlm.config.run import RunConfig
from cramlm.data.corpus import Corpus, build_corpus
from cramlm.data.decontamination import check_task
from cramlm.data.task import save_task, task_fingerprint
from cramlm.data.validation import COUNTED_RULES, check_files, files_of_task, summarize_findings
from cramlm.errors import ArtifactError, UsageError
from cramlm.evaluation.evaluate import sequences_of
from cramlm.model.huggingface.config import more
from cramlm.model.prompts import PROMPT_FILE, Prompt, choose_words, prompt_json, read_prompt, resolve_prompt
from cramlm.model.sentences import open_sentence_encoder
from cramlm.model.tokenizer import TOKENIZER_FILE, UNCUT, Tokenizer, Tokens, train_tokenizer
from cramlm.pipeline.context import Chosen, Context, Plan, Text, fingerprint, write_json
from cramlm.pipeline.stages.teacher import needs_linear_teacher
from cramlm.records import Event, Task
from cramlm.retrieval.bm25.index import build_index
from cramlm.retrieval.elasticsearch import server_corpus
from cramlm.retrieval.retrievers import RetrievalContext
from cramlm.retrieval.selection import SelectionTable, select_documents
from cramlm.storage.arrays import map_array, save_array
from cramlm.storage.artifacts import environment_faults


def report_task(run: Context) -> None:
    """Keep the task in the run's folder, and warn of what would make scores dishonest."""
    save_task(run.task, run.folder, emit=run.emit)
    for warning in [*check_task(run.task).warnings, *summarize_findings(check_files(*files_of_task(run.task)), without=COUNTED_RULES)]:
        run.emit(Event("warning", "task", warning))


def corpus(run: Context) -> Corpus | None:
    """The raw text, read once for all runs; from a search server, what the training texts find there."""
    if isinstance(run.config.retriever, ElasticsearchConfig):
        return server_corpus(run.config.retriever, [example.whole_text for example in run.task.train], run.store, emit=run.emit)
    return None if run.config.corpus is None else build_corpus(run.config.corpus, run.store, emit=run.emit)


def selection(run: Context, plan: Plan, corpus: Corpus | None) -> Chosen | None:
    """The documents that the training texts retrieve (or the control's random ones)."""
    if corpus is None or plan.retriever is None:
        return None
    out = run.folder / "selection"
    by_words = any(isinstance(member, Bm25Config) for member in members_of(plan.retriever))
    index = build_index(corpus, run.store, emit=run.emit) if by_words else None
    context = RetrievalContext(run.store, run.config.seed, index, plan.threads, open_encoder=open_sentence_encoder)
    select_documents(plan.retriever, corpus, run.task, out=out, context=context, emit=run.emit)
    return Chosen(SelectionTable.open(out))


def tokenizer(run: Context, selection: Chosen | None) -> Tokenizer:
    """A vocabulary learnt from the selection and the task's training text, nothing else; where a run starts from weights, theirs."""

    def write(target: Path) -> None:
        if run.pretrained is not None:
            (target / TOKENIZER_FILE).write_text(run.pretrained.tokenizer.content, "utf-8")
            run.emit(Event("done", "tokenizer", f"{run.pretrained.tokenizer.vocab_size} tokens, of {run.pretrained.folder}"))
            return
        run.emit(Event("start", "tokenizer"))
        texts = [text for example in run.task.train for text in (example.text, example.text_pair) if text is not None]
        room = run.config.tokenizer.sample_bytes
        for text in selection.texts() if selection else ():
            room -= len(text.encode())
            if room < 0:
                break
            texts.append(text)
        train_tokenizer(texts, run.config.tokenizer, target)
        run.emit(Event("done", "tokenizer", f"{Tokenizer.load(target).vocab_size} tokens from {len(texts)} texts"))

    inputs = {"selection": fingerprint(selection), "task": task_fingerprint(run.task)["train"]}
    key = {"format": 1, "config": run.config.tokenizer.model_dump(mode="json"), **inputs}
    if run.pretrained is not None:
        key = {"format": 1, "init": run.pretrained.tokenizer.fingerprint}
    artifact = run.stage("tokenizer", key=key, write=write)
    return Tokenizer.load(artifact.path)


_PASSAGES: Final = "passages"
_TASK: Final = "task"


def tokens(run: Context, selection: Chosen | None, tokenizer: Tokenizer) -> Text:
    """The tokenizer, which knows the ids of the task's texts, and the selection with the ids of its passages."""
    texts = task_texts(run.task)
    has_spans = selection is not None and needs_linear_teacher(run.config.phases)

    def write(target: Path) -> None:
        run.emit(Event("start", "tokens"))
        _save(target, _TASK, own := tokenizer.encode(texts))
        passages = None
        if selection is not None:
            passages = tokenizer.encode(selection.texts()) if not has_spans else None
            if passages is None:
                passages, spans = tokenizer.encode_with_spans(selection.texts())
                save_array(target / f"{_PASSAGES}-spans.npy", spans)
            _save(target, _PASSAGES, passages)
        count = 0 if passages is None else len(passages.ids)
        run.emit(Event("done", "tokens", f"{count:,} tokens of passages, {len(own.ids):,} of {len(texts):,} different texts of the task"))

    inputs = {"tokenizer": tokenizer.fingerprint, "selection": fingerprint(selection), "task": task_fingerprint(run.task)}
    artifact = run.stage("tokens", key={"format": 1, "spans": has_spans, **inputs}, write=write)
    if selection is not None:
        spans = _map(artifact.path / f"{_PASSAGES}-spans.npy") if has_spans else None
        selection = selection.encoded(_open(artifact.path, _PASSAGES), spans)
    return Text(tokenizer.with_cache(texts, _open(artifact.path, _TASK)), selection)


def task_texts(task: Task) -> list[str]:
    """The different texts that stages encode: every half of a pair and, for the linear models, both halves as one text."""
    examples = [*task.train, *task.dev, *task.test]
    texts = [text for each in examples for text in (each.text, each.text_pair, each.whole_text) if text is not None]
    return list(dict.fromkeys(texts))


def _save(folder: Path, name: str, tokens: Tokens) -> None:
    save_array(folder / f"{name}-ids.npy", tokens.ids)
    save_array(folder / f"{name}-offsets.npy", tokens.offsets)


def _open(folder: Path, name: str) -> Tokens:
    """Raises ArtifactError if the arrays do not fit together."""
    ids, offsets = _map(folder / f"{name}-ids.npy"), _map(folder / f"{name}-offsets.npy")
    if offsets.ndim != 1 or len(offsets) == 0 or offsets[0] != 0 or offsets[-1] != len(ids) or (np.diff(offsets) < 0).any():
        raise ArtifactError(f"{folder / name}-offsets.npy: damaged, the offsets do not fit the ids; delete the folder and run again")
    return Tokens(ids, offsets, np.arange(len(offsets) - 1, dtype=np.int64))


def _map(path: Path) -> npt.NDArray[Any]:
    try:
        with environment_faults(path):
            return map_array(path)
    except ValueError as error:
        raise ArtifactError(f"{path}: damaged ({error}); delete the folder and run again") from error


_MOST_SHOWN = 4  # labels in a message


def check_prompt(run: Context) -> None:
    """At the start of a run: words for each label of the task and for no other, known to the vocabulary where there is one already.

    Raises:
        UsageError: naming the label or the word.
    """
    words = run.config.head.prompt.words
    if not run.config.head.uses_prompt or not words:
        return
    if lacking := [label for label in run.task.labels if label not in words]:
        raise UsageError(f"head.prompt.words: the label {lacking[0]!r}{more(lacking)} has no words; give each label some, or none any")
    if strange := sorted(words.keys() - set(run.task.labels)):
        known = ", ".join(map(repr, run.task.labels[:8]))
        raise UsageError(f"head.prompt.words: {strange[0]!r}{more(strange)} is no label of the training texts ({known}); drop it")
    if run.pretrained is not None:
        _resolved(run.config, [run.config.head.prompt.words_of(label) for label in run.task.labels], run.pretrained.tokenizer)


def prompt(run: Context, tokenizer: Tokenizer) -> Prompt | None:
    """The prompt of the run, published; None where labels have a classifier.

    Raises:
        UsageError: naming words that are not one token of the vocabulary.
    """
    settings = run.config.head.prompt
    if not run.config.head.uses_prompt:
        return None

    def write(target: Path) -> None:
        words: Sequence[Slots] = (
            [settings.words_of(label) for label in run.task.labels] if settings.words else _chosen(run.config, run.task, tokenizer)
        )
        resolved = _resolved(run.config, words, tokenizer)
        write_json(target / PROMPT_FILE, prompt_json(resolved, run.task.labels))
        shown = [f"{label}: {' + '.join('|'.join(slot) for slot in slots)}" for label, slots in zip(run.task.labels, words, strict=True)]
        left = f"; and {len(shown) - _MOST_SHOWN} more" if len(shown) > _MOST_SHOWN else ""
        how = "given" if settings.words else "chosen from the training texts"
        run.emit(Event("done", "prompt", f"words {how}: {'; '.join(shown[:_MOST_SHOWN])}{left}"))

    inputs = {"tokenizer": tokenizer.fingerprint, "train": task_fingerprint(run.task)["train"], "vectors": run.config.head.vectors}
    key = {"format": 1, "config": settings.model_dump(mode="json", exclude={"vectors"}), **inputs}
    artifact = run.stage("prompt", key=key, write=write)
    return read_prompt(artifact.path, tokenizer)[0]


def _chosen(config: RunConfig, task: Task, tokenizer: Tokenizer) -> list[Slots]:
    tokens = sequences_of(tokenizer, task.train, max_length=UNCUT)
    numbers = {label: number for number, label in enumerate(task.labels)}
    label_ids = np.array([numbers[example.label or ""] for example in task.train], np.int64)
    return [(words,) for words in choose_words(tokens, label_ids, task.labels, tokenizer, count=config.head.prompt.words_per_label)]


def _resolved(config: RunConfig, words: Sequence[Slots], tokenizer: Tokenizer) -> Prompt:
    return resolve_prompt(config.head.prompt, words, tokenizer, vectors=config.head.vectors)
