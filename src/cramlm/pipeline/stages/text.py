"""From the task file to the tokenizer: everything that happens to text before a model sees it."""

from __future__ import annotations

from pathlib import Path

from cramlm.config.retriever import Bm25Config, ElasticsearchConfig, members_of
from cramlm.data.corpus import Corpus, build_corpus
from cramlm.data.decontamination import check_task
from cramlm.data.kept_task import keep_task
from cramlm.data.task import task_fingerprint
from cramlm.data.validation import COUNTED, check_files, labelled_of, short_form
from cramlm.model.sentences import open_sentence_encoder
from cramlm.model.tokenizer import TOKENIZER_FILE, Tokenizer, train_tokenizer
from cramlm.pipeline.stages.common import Chosen, Context, Plan, fingerprint
from cramlm.records import Event
from cramlm.retrieval.bm25.index import build_index
from cramlm.retrieval.selection import select_documents
from cramlm.retrieval.selection_table import SelectionTable
from cramlm.retrieval.server_corpus import server_corpus


def report_task(run: Context) -> None:
    """Keep the task in the run's folder, and warn of what would make scores dishonest."""
    keep_task(run.task, run.folder, emit=run.emit)
    for warning in [*check_task(run.task).warnings, *short_form(check_files(*labelled_of(run.task)), without=COUNTED)]:
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
    select_documents(
        plan.retriever,
        corpus,
        run.task,
        index=index,
        out=out,
        seed=run.config.seed,
        store=run.store,
        open_encoder=open_sentence_encoder,
        threads=plan.threads,
        emit=run.emit,
    )
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
