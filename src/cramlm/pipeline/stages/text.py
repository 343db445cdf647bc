"""From the task file to token ids: task, corpus, selection, tokenizer, tokens, prompt."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from cramlm.config.head import Slots
from cramlm.config.retriever import DenseConfig, ElasticsearchConfig, RetrieverConfig, uses_bm25
from cramlm.config.run import RunConfig
from cramlm.data.corpus import Corpus, build_corpus
from cramlm.data.task import save_task, task_fingerprint
from cramlm.data.validation import check_files, files_of_task, summarize_findings
from cramlm.errors import ArtifactError, UsageError, more
from cramlm.evaluation.prediction import sequences_of
from cramlm.model.prompts import PROMPT_FILE, Prompt, choose_words, prompt_json, read_prompt, resolve_prompt
from cramlm.model.tokenizer import TOKENIZER_FILE, UNCUT, Tokenizer, Tokens, train_tokenizer
from cramlm.pipeline.context import EncodedTexts, RunContext, SelectedPassages, Stage, fingerprint
from cramlm.records import Event, Task
from cramlm.retrieval.bm25.analysis import Analyzer
from cramlm.retrieval.bm25.index import build_index
from cramlm.retrieval.elasticsearch import server_corpus
from cramlm.retrieval.retrievers import RetrievalContext
from cramlm.retrieval.selection import SelectionTable, select_documents
from cramlm.storage.arrays import are_offsets, map_array, save_array
from cramlm.storage.artifacts import write_json
from cramlm.storage.locks import damage_named
from cramlm.text.markers import MarkerInserter, Markers

if TYPE_CHECKING:
    from cramlm.model.sentences import SentenceEncoder

_PASSAGES, _TASK = "passages", "task"  # beginnings of the files of tokens
_MOST_SHOWN: Final = 4  # labels in a message


def report_task(run: RunContext) -> None:
    """Save the task in the run's folder, and warn of leaks and duplicates that distort scores."""
    save_task(run.task, run.folder, emit=run.emit)
    for warning in summarize_findings(check_files(*files_of_task(run.task))):
        run.emit(Event("warning", "task", warning))


def corpus(run: RunContext) -> Corpus | None:
    """Return the raw text, read once for all runs; of a search server, the hits of the queries."""
    if isinstance(run.config.retriever, ElasticsearchConfig):
        return server_corpus(run.config.retriever, run.task.queries, run.store, emit=run.emit)
    return None if run.config.corpus is None else build_corpus(run.config.corpus, run.store, emit=run.emit)


def selection(run: RunContext, retriever: RetrieverConfig | None, corpus: Corpus | None, *, threads: int) -> SelectedPassages | None:
    """Return the passages retrieved for the training and unlabelled texts (or random ones, of a control), and the unlabelled texts."""
    if corpus is None or retriever is None:
        return None
    out = run.folder / "selection"
    analyzer = Analyzer(diacritics=run.config.diacritics)
    index = build_index(corpus, run.store, analyzer=analyzer, emit=run.emit) if uses_bm25(retriever) else None

    def open_encoder(config: DenseConfig) -> SentenceEncoder:
        from cramlm.model.sentences import open_sentence_encoder  # here: imports torch, which other retrievers do not need

        return open_sentence_encoder(config, device=run.config.device)

    context = RetrievalContext(run.store, run.config.seed, index, threads, open_encoder=open_encoder)
    select_documents(retriever, corpus, run.task, out=out, context=context, emit=run.emit)
    return SelectedPassages(SelectionTable.open(out), tuple(example.whole_text for example in run.task.unlabelled))


def tokenizer(run: RunContext, selection: SelectedPassages | None) -> Tokenizer:
    """A vocabulary trained on the selection and the training texts; of a run with `init`, that of the pretrained weights."""

    def write(target: Path) -> None:
        if run.pretrained is not None:
            (target / TOKENIZER_FILE).write_text(run.pretrained.tokenizer.content, "utf-8")
            run.emit(Event("done", "tokenizer", f"{run.pretrained.tokenizer.vocab_size} tokens, the vocabulary of {run.pretrained.folder}"))
            return
        run.emit(Event("start", "tokenizer"))
        texts = [text for example in run.task.train for text in (example.text, example.text_pair) if text is not None]
        bytes_left = run.config.tokenizer.sample_bytes
        for text in selection.texts() if selection else ():
            bytes_left -= len(text.encode())
            if bytes_left < 0:
                break
            texts.append(text)
        train_tokenizer(texts, run.config.tokenizer, target, diacritics=run.config.diacritics)
        run.emit(Event("done", "tokenizer", f"{Tokenizer.load(target).vocab_size:,} tokens, a vocabulary trained on {len(texts):,} texts"))

    inputs = {"selection": fingerprint(selection), "task": task_fingerprint(run.task)["train"]}
    settings = {"config": run.config.tokenizer.model_dump(mode="json"), **run.config.word_settings}
    if run.pretrained is not None:
        settings, inputs = {}, {"init": run.pretrained.tokenizer.fingerprint}
    artifact = run.build(Stage("tokenizer", 1, settings, inputs, write))
    return Tokenizer.load(artifact.path)


def tokens(run: RunContext, selection: SelectedPassages | None, tokenizer: Tokenizer) -> EncodedTexts:
    """Encode each text once. The tokenizer caches the ids of the task's texts.

    Files: passages-ids.npy, passages-offsets.npy; passages-spans.npy (character spans) if a linear teacher needs the text of each piece;
    task-ids.npy, task-offsets.npy: the distinct texts of the task (`task_texts`)."""
    texts = task_texts(run.task)
    has_spans = selection is not None and run.config.teaching != ()

    def write(target: Path) -> None:
        run.emit(Event("start", "tokens"))
        _save(target, _TASK, own := tokenizer.encode(texts))
        count = 0
        if selection is not None:
            if has_spans:
                passages, spans = tokenizer.encode_with_spans(selection.texts())
                save_array(target / f"{_PASSAGES}-spans.npy", spans)
            else:
                passages = tokenizer.encode(selection.texts())
            _save(target, _PASSAGES, passages)
            count = len(passages.ids)
        run.emit(Event("done", "tokens", f"{count:,} tokens of passages, {len(own.ids):,} of {len(texts):,} distinct texts of the task"))

    inputs = {"tokenizer": tokenizer.fingerprint, "selection": fingerprint(selection), "task": task_fingerprint(run.task)}
    artifact = run.build(Stage("tokens", 1, {"spans": has_spans}, inputs, write))
    if selection is not None:
        spans = _map(artifact.path / f"{_PASSAGES}-spans.npy") if has_spans else None
        selection = selection.encoded(_open(artifact.path, _PASSAGES), spans)
    return EncodedTexts(tokenizer.with_cache(texts, _open(artifact.path, _TASK)), selection)


def task_texts(task: Task) -> list[str]:
    """Return the distinct texts that stages encode: each half of a pair and, for the linear models, both halves as one text."""
    examples = [*task.train, *task.dev, *task.test]
    texts = [text for each in examples for text in (each.text, each.text_pair, each.whole_text) if text is not None]
    return list(dict.fromkeys(texts))


def _save(folder: Path, name: str, tokens: Tokens) -> None:
    save_array(folder / f"{name}-ids.npy", tokens.ids)
    save_array(folder / f"{name}-offsets.npy", tokens.offsets)


def _open(folder: Path, name: str) -> Tokens:
    """Open the tokens of texts; raise ArtifactError if the arrays do not match."""
    ids, offsets = _map(folder / f"{name}-ids.npy"), _map(folder / f"{name}-offsets.npy")
    if not are_offsets(offsets, end=len(ids)):
        raise ArtifactError(f"{folder / name}-offsets.npy: damaged, offsets and ids do not match; delete the folder and run again")
    return Tokens(ids, offsets, np.arange(len(offsets) - 1, dtype=np.int64))


def _map(path: Path) -> npt.NDArray[Any]:
    with damage_named(path, "delete the folder and run again"):
        return map_array(path)


def check_settings(config: RunConfig, task: Task, tokenizer: Tokenizer | None) -> None:
    """Check before a run starts that its training texts have what its settings name: labels with words of a prompt, markers, or pairs.

    tokenizer: of the checkpoint that the run starts from; the words must be in its vocabulary.

    Raises:
        UsageError: naming the setting, the label or the word.
    """
    _check_prompt(config, task, tokenizer)
    if config.model != "encoder":
        return
    if config.teacher.pair_passages and not _are_pairs(config, task):
        raise UsageError(
            "teacher.pair_passages = true needs training texts that are pairs (--text-pair-column), and no prompt; set it to false"
        )
    if config.teacher.mark_passages or (config.encoder.layer_init == "markers" and not _are_pairs(config, task)):
        _markers_of(config, task)


def _check_prompt(config: RunConfig, task: Task, tokenizer: Tokenizer | None) -> None:
    words = config.head.prompt.words
    if not config.head.uses_prompt or not words:
        return
    if lacking := [label for label in task.labels if label not in words]:
        raise UsageError(f"head.prompt.words: the label {lacking[0]!r}{more(lacking)} has no words; give each label some, or none any")
    if strange := sorted(words.keys() - set(task.labels)):
        labels = ", ".join(map(repr, task.labels[:8]))
        raise UsageError(f"head.prompt.words: {strange[0]!r}{more(strange)} is no label of the training texts ({labels}); drop it")
    if tokenizer is not None:
        _resolve(config, [config.head.prompt.words_of(label) for label in task.labels], tokenizer)


def marker_inserter(run: RunContext) -> MarkerInserter:
    """Return what inserts the markers of the training texts into passages.

    Raises:
        UsageError: if the training texts have no markers, are pairs, or are read through a prompt.
    """
    return MarkerInserter(_markers_of(run.config, run.task), [each.text for each in run.task.train])


def marker_tokens(run: RunContext, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the tokens that mark places in the training texts: [CLS], [SEP], and those that occur in markers more often than elsewhere.

    Raises:
        UsageError: if the texts have no markers and are no pairs.
    """
    if _are_pairs(run.config, run.task):
        return tuple(sorted({tokenizer.cls_id, tokenizer.sep_id}))
    return tokens_of_markers(_markers_of(run.config, run.task), [each.text for each in run.task.train], tokenizer)


def tokens_of_markers(markers: Markers, texts: Sequence[str], tokenizer: Tokenizer) -> tuple[int, ...]:
    """As `marker_tokens`, of single texts with these markers."""
    used = Counter(segment.after for text in texts for segment in markers.segments(text))
    inside: Counter[int] = Counter()
    for marker in markers.strings:
        for token in tokenizer.encode([marker]).ids.tolist():
            inside[token] += used[marker]
    counts = np.bincount(tokenizer.encode(texts).ids, minlength=tokenizer.vocab_size)
    return tuple(sorted({tokenizer.cls_id, tokenizer.sep_id, *(token for token, number in inside.items() if 2 * number > counts[token])}))


def _are_pairs(config: RunConfig, task: Task) -> bool:
    return not config.head.uses_prompt and all(each.text_pair is not None for each in task.train)


def _markers_of(config: RunConfig, task: Task) -> Markers:
    markers = None if config.head.uses_prompt else Markers.of_single([(each.text, each.text_pair) for each in task.train])
    if markers is None:
        setting = "teacher.mark_passages = true" if config.teacher.mark_passages else 'encoder.layer_init = "markers"'
        raise UsageError(
            f"{setting} needs single texts with markers such as `<<` or `[E1]` (at least 20 of them, and no prompt); the training texts "
            'have none, set teacher.mark_passages = false and encoder.layer_init = "context"'
        )
    return markers


def prompt(run: RunContext, tokenizer: Tokenizer) -> Prompt | None:
    """Publish prompt.json (patterns, labels, words: configured, or chosen from the training texts); None if labels have a classifier.

    Raises:
        UsageError: naming words that are not a single token.
    """
    settings = run.config.head.prompt
    if not run.config.head.uses_prompt:
        return None

    def write(target: Path) -> None:
        words: Sequence[Slots] = (
            [settings.words_of(label) for label in run.task.labels] if settings.words else _choose_words(run.config, run.task, tokenizer)
        )
        resolved = _resolve(run.config, words, tokenizer)
        write_json(target / PROMPT_FILE, prompt_json(resolved, run.task.labels))
        shown = [f"{label}: {' + '.join('|'.join(slot) for slot in slots)}" for label, slots in zip(run.task.labels, words, strict=True)]
        left = f"; and {len(shown) - _MOST_SHOWN} more" if len(shown) > _MOST_SHOWN else ""
        how = "from the config" if settings.words else "chosen from the training texts"
        run.emit(Event("done", "prompt", f"label words {how}: {'; '.join(shown[:_MOST_SHOWN])}{left}"))

    inputs = {"tokenizer": tokenizer.fingerprint, "train": task_fingerprint(run.task)["train"]}
    config = {"config": settings.model_dump(mode="json", exclude={"vectors"}), "vectors": run.config.head.vectors}
    artifact = run.build(Stage("prompt", 2, config, inputs, write))
    return read_prompt(artifact.path, tokenizer)[0]


def _choose_words(config: RunConfig, task: Task, tokenizer: Tokenizer) -> list[Slots]:
    tokens = sequences_of(tokenizer, task.train, max_length=UNCUT)
    numbers = {label: number for number, label in enumerate(task.labels)}
    label_ids = np.array([numbers[example.label or ""] for example in task.train], np.int64)
    return [(words,) for words in choose_words(tokens, label_ids, task.labels, tokenizer, count=config.head.prompt.words_per_label)]


def _resolve(config: RunConfig, words: Sequence[Slots], tokenizer: Tokenizer) -> Prompt:
    return resolve_prompt(config.head.prompt, words, tokenizer, vectors=config.head.vectors)
