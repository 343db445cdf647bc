"""The text that `cramlm recipes show` prints: data, encoder, and phases with their loss terms."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from cramlm.config.phase import OptimizerConfig, PhaseConfig, ScheduleConfig
from cramlm.config.retriever import Bm25Config, ElasticsearchConfig, RetrieverConfig, members_of
from cramlm.config.run import RunConfig, TaskConfig
from cramlm.config.terms import MaskingConfig, TermConfig
from cramlm.errors import counted
from cramlm.evaluation.kinds import KINDS, METRIC_NAMES
from cramlm.recipes.recipe import labelled_size

_METHODS: Final = {"bm25": "BM25", "random": "a random sample", "dsir": "DSIR (importance sampling by n-grams)", "dense": "dense retrieval"}
_BOUNDS: Final = {"top_k": "passages per query", "max_documents": "passages", "max_tokens": "tokens"}


def describe_run(config: RunConfig, *, summary: str = "") -> str:
    """Return a description of a run in lines of plain text. summary: a phrase that describes the method.

    Raises:
        UsageError, DataError: if the training file cannot be read.
    """
    lines = [f"{config.name}: {summary}" if summary else config.name, ""]
    rows = list(_data_rows(config))
    width = max(len(name) for name, _ in rows)
    lines += [f"  {name:<{width}}  {text}" for name, text in rows]
    if config.model != "encoder":
        return "\n".join(lines)
    lines += ["", "The loss of a step is the sum over the terms of weight x mean loss."]
    for number, phase in enumerate(config.phases, start=1):
        lines += ["", f"Phase {number}, {phase.name}: {_text_of(phase)}", *_term_table(phase)]
        lines += [f"  {line}" for line in _training_of(phase)]
    return "\n".join(lines)


def stages_of(config: RunConfig) -> list[str]:
    """Return the names of the stages that `pipeline.run` builds, in its order.

    Without those of optional prompts, of token importance and of fits on a small dev split.
    """
    scored, teaching = config.baseline.enabled, config.teaching
    text = [] if config.retriever is None or config.model == "tfidf" else _retrieval_stages(config.retriever)
    first = ["task", *(["baseline"] if scored or "tfidf" in teaching else [])]
    has_bayes = text and config.task.kind == "classification" and (scored or "bayes" in teaching)
    bayes = ["bayes"] if has_bayes else []
    if config.model != "encoder":
        static = ["word-vectors", "static"] if config.model == "static" else []
        return [*first, *text, *bayes, *static, "evaluation", "export", "report"]
    start = config.encoder.embedding_init
    embedding = [] if start == "random" else ["embedding"]
    static = ["static"] if text and (scored or "static" in teaching) else []
    words = ["word-vectors"] if static or (text and start == "words") else []
    fitted = {"tfidf", *static, *bayes}  # static and bayes are left out without a corpus
    teacher = ["teacher"] if fitted & set(teaching) else []
    adjusts = ["logit-adjustment"] if config.logit_adjustment == "dev" and KINDS[config.task.kind].has_prior else []
    trained = ["tokenizer", "tokens", *words, *embedding, *bayes, *static, *teacher, "schedule", *phase_stages(config), *adjusts]
    return [*first, "plan", *text, *trained, "evaluation", "export", "report"]


def phase_stages(config: RunConfig) -> list[str]:
    """Return the names of the stages of the phases."""
    return [f"phase-{number}-{phase.name}" for number, phase in enumerate(config.phases, start=1)]


def _retrieval_stages(retriever: RetrieverConfig) -> list[str]:
    uses_bm25 = any(isinstance(member, Bm25Config) for member in members_of(retriever))
    on_server = isinstance(retriever, ElasticsearchConfig)  # whose hits become the corpus
    return [*(["server"] if on_server else []), "corpus", *(["index"] if uses_bm25 else []), "selection"]


def _data_rows(config: RunConfig) -> Iterator[tuple[str, str]]:
    yield "task", _task(config.task, config.seed)
    retriever = config.retriever
    if isinstance(retriever, ElasticsearchConfig):
        yield "raw text", f"{retriever.url}/{retriever.index}: {_retrieval(retriever)}"
    elif retriever is not None and config.corpus is not None:
        yield "raw text", f"{', '.join(config.corpus.files)}: {_retrieval(retriever)}"
    if config.diacritics == "remove":
        yield "diacritics", "removed from the terms of BM25, words and tokens"
    if config.model == "encoder":
        yield from _encoder_rows(config)
    else:
        features = "n-grams and averaged word vectors of the corpus" if config.model == "static" else "n-grams"
        kind = "ridge regression" if config.task.kind == "regression" else "logistic regression"
        model = "naive Bayes, also on the retrieved text" if config.model == "bayes" else f"{kind} on {features}"
        yield "model", f"{model}; all settings are chosen on dev by {METRIC_NAMES[config.metric]}"


def _encoder_rows(config: RunConfig) -> Iterator[tuple[str, str]]:
    size = f"{config.encoder.shape}, {counted(config.encoder.layers, 'layer')} of width {config.encoder.hidden}"
    start = f"trained from scratch; {_start_of(config)}" if config.init is None else f"from the weights in {config.init}"
    yield "encoder", f"{size}, {start}"
    if config.has_linear_teacher:
        yield "teacher", f"linear: {_teacher(config)}"
    if KINDS[config.task.kind].has_prior:
        chosen = f"tau chosen on dev by {METRIC_NAMES[config.metric]}" if config.logit_adjustment == "dev" else "none"
        yield "logit adjustment", chosen
    budget = "none" if config.budget is None else config.budget
    yield "budget", f"{budget}; `cramlm plan` shows the steps and the cost on this machine"


def _teacher(config: RunConfig) -> str:
    *others, last = config.teaching
    models = f"{', '.join(others)} and {last} together" if others else last
    alignment = "; distribution alignment with the label frequencies of the training texts" if config.teacher.align_distribution else ""
    marked = "; pieces of passages get the markers of the training texts" if config.teacher.mark_passages else ""
    paired = "; pieces of passages become pairs" if config.teacher.pair_passages else ""
    return f"{models}{alignment}{marked}{paired}"


def _start_of(config: RunConfig) -> str:
    encoder = config.encoder
    match encoder.embedding_init:
        case "random":
            start = "random"
        case "words" if config.retriever is not None:  # a search server has raw text, too
            start = "from word vectors of the corpus and co-occurrence counts"
        case _:
            start = "from co-occurrence counts"
    copied = "neighbouring tokens and the nearest markers or text boundaries" if encoder.layer_init == "markers" else "neighbouring tokens"
    layers = f"; layers start by copying {copied}" if encoder.starts_from_context else ""
    return f"token embeddings start {start}{layers}"


def _task(task: TaskConfig, seed: int) -> str:
    size = labelled_size(task, seed=seed)
    labels = "" if task.kind == "regression" else f", {counted(size.labels, 'label')}"
    count = f"{counted(size.texts, 'training text')}{labels}"
    shown = f"{task.train}: {count}" if task.train else f"no file given, {count} assumed"
    dev = task.dev or f"{task.dev_fraction:.0%} split off from train"
    more = f"; unlabelled: {', '.join(task.unlabelled)}" if task.unlabelled else ""
    return f"{shown} ({task.kind}); dev: {dev}; test: {task.test or 'none'}{more}"


def _retrieval(retriever: RetrieverConfig) -> str:
    settings = retriever.model_dump()
    method = _METHODS.get(retriever.kind, retriever.kind)
    queries = {"text": "each training text is a query", "phrases": "the key phrases of each training text are a query"}
    query = queries.get(settings.get("queries", ""), "")
    bounds = [f"at most {settings[name]:,} {unit}" for name, unit in _BOUNDS.items() if settings.get(name) is not None]
    return ", ".join(part for part in (method, query, *(bounds or ["as much as the budget reads"])) if part)


def _text_of(phase: PhaseConfig) -> str:
    if not phase.external:
        return "labelled texts"
    if not phase.task:
        return "external (retrieved) text"
    if phase.mixing == "blended":
        return f"external (retrieved) and labelled texts, {phase.external} : {phase.task} by tokens in every batch"
    return f"{phase.external} batches of external (retrieved) text, then {phase.task} of labelled texts"


def _term_table(phase: PhaseConfig) -> list[str]:
    rows = [("term", "on", "weight", "loss"), *((term.kind, term.on, f"{term.weight:g}", _loss(term)) for term in phase.terms)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["    " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _loss(term: TermConfig) -> str:
    """Return the first phrase of the term's docstring, and the settings that only this term has."""
    first = re.match(r"[^(.:]+", type(term).__doc__ or "")
    values = term.model_dump(exclude={"kind", "on", "weight"})
    settings = ", ".join(f"{name} = {value:g}" if isinstance(value, float) else f"{name} = {value}" for name, value in values.items())
    return "; ".join(part for part in (first[0].strip().lower() if first else "", settings) if part)


def _training_of(phase: PhaseConfig) -> Iterator[str]:
    if any(term.masks for term in phase.terms):
        yield _masks(phase.masking)
    if phase.candidates is not None and any(term.reads_candidates for term in phase.terms):
        yield f"softmax over {phase.candidates:,} tokens of the vocabulary: those to predict, and a sample of the others"
    length = f"{phase.passes:g} passes" if phase.passes else "steps set by the planner from the budget"
    most = f", at most {phase.max_passes:g} passes" if phase.max_passes and phase.steps is None else ""
    yield f"{length if phase.steps is None else counted(phase.steps, 'step')}{most}; batches of {phase.batch_size:,} {phase.batch_unit}"
    yield f"{_optimizer(phase.optimizer)}; {_schedule(phase.schedule)}"
    if phase.dropout:
        yield f"dropout {phase.dropout:g}, of attention probabilities {phase.attention_dropout:g}"
    changed = "; only the vectors of the soft prompt change" if phase.trains == "vectors" else ""
    weights = "keeps the weights that are best on dev" if phase.keep == "best" else "keeps the last weights"
    origin = {"previous": "", "start": "; starts from the initial weights of the run"}
    source = origin.get(phase.start_from, f"; starts from the weights of {phase.start_from}")
    yield weights + source + changed


def _masks(masking: MaskingConfig) -> str:
    rate = f"{masking.rate:.0%}" if masking.rate_end is None else f"{masking.rate:.0%} to {masking.rate_end:.0%}"
    unchanged = 1 - masking.mask_share - masking.random_share
    shares = [(masking.mask_share, "[MASK]"), (masking.random_share, "a random token"), (unchanged, "unchanged")]
    become = ", ".join(f"{share:.0%} {name}" for share, name in shares if share > 1e-9)
    return f"masks {rate} of the tokens ({masking.kind}): {become}"


def _optimizer(optimizer: OptimizerConfig) -> str:
    if optimizer.kind == "adamw":
        return f"AdamW at {optimizer.learning_rate:g}"
    return f"Muon at {optimizer.muon_learning_rate:g} for hidden matrices, AdamW at {optimizer.learning_rate:g} for the rest"


def _schedule(schedule: ScheduleConfig) -> str:
    warmup = f"warm-up over {schedule.warmup_fraction:.0%} of the steps, then "
    decay = "linear decay to 0" if schedule.kind == "linear" else f"constant, decay to 0 over the last {schedule.decay_fraction:.0%}"
    return warmup + decay
