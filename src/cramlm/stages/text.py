"""From the task file to the tokenizer: everything that happens to text before a model sees it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch

from cramlm.artifacts import Artifact, open_artifact, publish_file, stage
from cramlm.config import PhaseConfig, RunConfig
from cramlm.data.corpus import Corpus, build_corpus
from cramlm.data.hygiene import check_task
from cramlm.data.task import split_rows, task_fingerprint
from cramlm.evaluation.baselines import fit_baselines
from cramlm.model.device import Precision, resolve_precision
from cramlm.model.model import build_model
from cramlm.model.sentences import open_sentence_encoder
from cramlm.model.tokenization import Tokenizer, train_tokenizer
from cramlm.records import Emit, Event, Task
from cramlm.retrieval.index import build_index
from cramlm.retrieval.selection import select_documents
from cramlm.retrieval.server_corpus import server_corpus
from cramlm.retriever_config import RETRIEVER, Bm25Config, ElasticsearchConfig, RetrieverConfig, members_of
from cramlm.stages.common import Chosen, Clock, Plan, fingerprint, phases_by_name, write_json
from cramlm.training import budget
from cramlm.training.planning import count_parameters, measure_speed, paper_flops

PLANNED_BY = ("budget", "tokens_per_second", "encoder", "head", "tokenizer", "retriever")


def prepare_torch(config: RunConfig) -> None:
    """Fix the thread count: the same number gives the same bits."""
    torch.set_num_threads(config.threads or os.cpu_count() or 1)


def report_task(task: Task, folder: Path, *, emit: Emit) -> None:
    """Store which row went where, and warn of what would make scores dishonest."""
    publish_file(folder / "split.json", (json.dumps(split_rows(task), ensure_ascii=False) + "\n").encode())
    for warning in check_task(task).warnings:
        emit(Event("warning", "task", warning))


def fit_baseline(config: RunConfig, task: Task, folder: Path, *, emit: Emit) -> Artifact | None:
    """TF-IDF + logistic regression on the same split, before any compute is spent on the model."""
    if not config.baseline.enabled:
        return None

    def write(target: Path) -> None:
        baselines = fit_baselines(task, config.baseline, seed=config.seed, emit=emit)
        write_json(target / "baselines.json", baselines.as_dict())

    key = {"format": 1, "task": task_fingerprint(task), "config": config.baseline.model_dump(mode="json"), "seed": config.seed}
    return stage(folder / "baseline", kind="baseline", key=key, write=write, emit=emit)


def plan(config: RunConfig, task: Task, folder: Path, *, clock: Clock, emit: Emit) -> Plan:
    """Measure this machine for a few seconds and bound the selection by what the budget can train on."""
    threads = config.threads or os.cpu_count() or 1
    precision = resolve_precision(config.precision)

    def write(target: Path) -> None:
        emit(Event("start", "plan", "measuring this machine" if config.tokens_per_second is None else "with the speed given"))
        with_head = next((phase for phase in config.phases if phase.uses_mlm), config.phases[0])
        without_head = next((phase for phase in config.phases if not phase.uses_mlm), config.phases[-1])
        joint, finetune = (_measured(config, phase, precision) for phase in (with_head, without_head))
        retriever = config.retriever
        if retriever is not None:
            retriever = budget.plan_selection(retriever, seconds=clock.left, tokens_per_second=joint)
        chosen = None if retriever is None else retriever.model_dump(mode="json")
        write_json(target / "plan.json", {"retriever": chosen, "speed": {"joint": joint, "finetune": finetune}})
        rates = f"{joint:,.0f} tokens/s with the vocabulary head, {finetune:,.0f} without"
        emit(Event("done", "plan", f"{rates}, {precision}, {threads} threads"))
        if clock.left is not None:
            emit(Event("plan", "plan", _outlook(config, retriever, seconds=clock.left, tokens_per_second=joint)))

    sections = {name: config.model_dump(mode="json")[name] for name in PLANNED_BY}
    key = {"format": 2, **sections, "phases": phases_by_name(config.phases), "precision": precision, "threads": threads}
    artifact = stage(folder / "plan", kind="plan", key=key, write=write, emit=emit)
    data = json.loads((artifact.path / "plan.json").read_bytes())
    retriever = None if data["retriever"] is None else RETRIEVER.validate_python(data["retriever"])
    return Plan(retriever, precision, threads, budget.Speed(**data["speed"]))


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


def tokenizer(config: RunConfig, task: Task, selection: Chosen | None, folder: Path, *, emit: Emit) -> Tokenizer:
    """A vocabulary learnt from the selection and the task's training text, nothing else."""

    def write(target: Path) -> None:
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
    artifact = stage(folder / "tokenizer", kind="tokenizer", key=key, write=write, emit=emit)
    return Tokenizer.load(artifact.path)


def _measured(config: RunConfig, phase: PhaseConfig, precision: Precision) -> float:
    """Tokens per second of a phase, at the row length that most tasks get where it is still open; the config's figure if it has one."""
    if config.tokens_per_second is not None:
        return config.tokens_per_second
    fixed = phase if phase.max_length else phase.model_copy(update={"max_length": 128})
    return measure_speed(config.encoder, config.head, fixed, vocab_size=config.tokenizer.vocab_size, precision=precision)


def _outlook(config: RunConfig, retriever: RetrieverConfig | None, *, seconds: float, tokens_per_second: float) -> str:
    """What the budget will roughly buy, said before anything is read; the schedule says it exactly."""
    model = build_model(config.encoder, config.head, vocab_size=config.tokenizer.vocab_size, labels=2, seed=0)
    parameters, tokens = count_parameters(model).total, seconds * tokens_per_second
    bounds = [] if retriever is None else [(retriever.max_documents, "passages"), (retriever.max_tokens, "tokens of raw text")]
    limits = "".join(f"at most {bound:,} {unit}, " for bound, unit in bounds if bound is not None)
    flops = paper_flops(parameters, places=round(tokens))
    return f"{limits}up to {tokens / 1e6:.1f}M tokens for {parameters / 1e6:.1f}M parameters, {flops:.1e} FLOPs, {seconds / 60:.1f} min"
