"""From the task file to the tokenizer: everything that happens to text before a model sees it."""

from __future__ import annotations

import json
from pathlib import Path

from cramlm.artifacts import Artifact, open_artifact, publish_file, stage
from cramlm.config import RunConfig
from cramlm.data.checkup import COUNTED, check_files, labelled_of, short_form
from cramlm.data.corpus import Corpus, build_corpus
from cramlm.data.hygiene import check_task
from cramlm.data.labels import RULES
from cramlm.data.task import split_rows, task_fingerprint
from cramlm.evaluation.baselines import fit_baselines
from cramlm.model.pretrained import Pretrained
from cramlm.model.sentences import open_sentence_encoder
from cramlm.model.tokenization import TOKENIZER_FILE, Tokenizer
from cramlm.model.tokenizer_training import train_tokenizer
from cramlm.records import Emit, Event, Task
from cramlm.retrieval.index import build_index
from cramlm.retrieval.selection import select_documents
from cramlm.retrieval.server_corpus import server_corpus
from cramlm.retriever_config import Bm25Config, ElasticsearchConfig, members_of
from cramlm.stages.common import Chosen, Plan, fingerprint, write_json

PREDICTIONS = "predictions-test.jsonl"


def report_task(task: Task, folder: Path, *, emit: Emit) -> None:
    """Store which row went where, and warn of what would make scores dishonest."""
    publish_file(folder / "split.json", (json.dumps(split_rows(task), ensure_ascii=False) + "\n").encode())
    for warning in [*check_task(task).warnings, *short_form(check_files(*labelled_of(task)), without=COUNTED)]:
        emit(Event("warning", "task", warning))


def fit_baseline(config: RunConfig, task: Task, folder: Path, *, emit: Emit) -> Artifact | None:
    """TF-IDF + a linear model on the same split, before any compute is spent on the model."""
    if not config.baseline.enabled:
        return None

    def write(target: Path) -> None:
        baselines = fit_baselines(task, config.baseline, seed=config.seed, emit=emit)
        write_json(target / "baselines.json", baselines.as_dict())
        answers = baselines.variants[baselines.chosen].answers  # of the variant that dev chose, for paired tests
        plain = RULES[task.kind].plain
        lines = (
            {"id": each.id, "label": plain(str(each.label)), "predicted": plain(answer)}
            for each, answer in zip(task.test, answers, strict=True)
        )
        (target / PREDICTIONS).write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), "utf-8")

    key = {"format": 2, "task": task_fingerprint(task), "config": config.baseline.model_dump(mode="json"), "seed": config.seed}
    return stage(folder / "baseline", kind="baseline", key=key, write=write, emit=emit)


def corpus(config: RunConfig, task: Task, store: Path, *, emit: Emit) -> Corpus | None:
    """The raw text, read once for all runs; from a search server, what the training texts find there."""
    if isinstance(config.retriever, ElasticsearchConfig):
        return server_corpus(config.retriever, [example.whole_text for example in task.train], store, emit=emit)
    return None if config.corpus is None else build_corpus(config.corpus, store, emit=emit)


def selection(config: RunConfig, plan: Plan, corpus: Corpus | None, task: Task, folder: Path, store: Path, *, emit: Emit) -> Chosen | None:
    """The documents that the training texts retrieve (or the control's random ones)."""
    if corpus is None or plan.retriever is None:
        return None
    out = folder / "selection"
    by_words = any(isinstance(member, Bm25Config) for member in members_of(plan.retriever))
    index = build_index(corpus, store, emit=emit) if by_words else None
    select_documents(
        plan.retriever,
        corpus,
        task,
        index=index,
        out=out,
        seed=config.seed,
        store=store,
        open_encoder=open_sentence_encoder,
        threads=plan.threads,
        emit=emit,
    )
    return Chosen(open_artifact(out, kind="selection"))


def tokenizer(
    config: RunConfig, task: Task, selection: Chosen | None, folder: Path, *, pretrained: Pretrained | None = None, emit: Emit
) -> Tokenizer:
    """A vocabulary learnt from the selection and the task's training text, nothing else; where a run starts from weights, theirs."""

    def write(target: Path) -> None:
        if pretrained is not None:
            (target / TOKENIZER_FILE).write_text(pretrained.tokenizer.content, "utf-8")
            emit(Event("done", "tokenizer", f"{pretrained.tokenizer.vocab_size} tokens, of {pretrained.folder}"))
            return
        emit(Event("start", "tokenizer"))
        texts = [text for example in task.train for text in (example.text, example.text_pair) if text is not None]
        room = config.tokenizer.sample_bytes
        for text in selection.texts() if selection else ():
            room -= len(text.encode())
            if room < 0:
                break
            texts.append(text)
        train_tokenizer(texts, config.tokenizer, target)
        emit(Event("done", "tokenizer", f"{Tokenizer.load(target).vocab_size} tokens from {len(texts)} texts"))

    inputs = {"selection": fingerprint(selection), "task": task_fingerprint(task)["train"]}
    key = {"format": 1, "config": config.tokenizer.model_dump(mode="json"), **inputs}
    if pretrained is not None:
        key = {"format": 1, "init": pretrained.tokenizer.fingerprint}
    artifact = stage(folder / "tokenizer", kind="tokenizer", key=key, write=write, emit=emit)
    return Tokenizer.load(artifact.path)
