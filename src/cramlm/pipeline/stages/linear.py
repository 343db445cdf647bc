"""Stages of the linear models: `baseline` (n-grams), `bayes`, `static` (n-grams and averaged word vectors); embeddings of tokens.

A model's stage publishes the best candidate on dev, a report (fit.json) and the dev predictions of all candidates, for the verdict.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np

from cramlm.config.retriever import RetrieverConfig
from cramlm.config.run import RunConfig
from cramlm.data.corpus import Corpus
from cramlm.data.task import task_fingerprint
from cramlm.evaluation.calibration import FEWEST_NUMBERS
from cramlm.evaluation.combination import HeldOut
from cramlm.evaluation.prediction import sequences_of
from cramlm.io.threads import Workers
from cramlm.linear.bayes import bayes_reads_seed, fit_bayes
from cramlm.linear.cooccurrence import count_tokens, token_embeddings
from cramlm.linear.corpus_vectors import build_word_vectors
from cramlm.linear.cross_validation import DECIDING_TEXTS, SMALL_DEV
from cramlm.linear.fit import FEW_TEXTS, LinearFit, SearchSpace, fit_linear, fit_reads_seed, refit
from cramlm.linear.model import FORMAT, LinearModel
from cramlm.linear.self_training import reads_unlabelled, self_trained, self_training_reads_seed, with_unlabelled
from cramlm.linear.teacher import Teacher
from cramlm.linear.token_vectors import WORDS_SHARE, fit_token_vectors, join_token_vectors
from cramlm.linear.word_vectors import CorpusVectors, WordVectors
from cramlm.model.tokenizer import UNCUT
from cramlm.pipeline.context import EncodedTexts, RunContext, SelectedPassages, Stage, fingerprint
from cramlm.planning.budget import plan_selection
from cramlm.records import Event, Task
from cramlm.storage.arrays import read_array, save_array
from cramlm.storage.artifacts import Artifact, hash_json, write_json
from cramlm.text.characters import remove_diacritics

DEV_PREDICTIONS: Final = "dev-predictions.npy"
FIT_FILE: Final = "fit.json"
_HELD_OUT, _HELD_OUT_ROWS = "held-out.npy", "held-out-rows.npy"
FIT_FACTS: Final = (
    "variant",
    "scheme",
    "class_weights",
    "c",
    "vector_weight",
    "unlabelled_weight",
    "passage_weight",
    "scale",
    "tau",
    "features",
    "train_texts",
    "held_out_texts",
    "seconds",
)
"""Fields of fit.json that scores.json repeats, if the model has them."""
MANY_WITH_OTHER_DIACRITICS: Final = 0.05
"""A larger share of the words of the training texts that the raw text has with other diacritics only gives a warning."""
_VERSION: Final = 13  # of all linear models; their format is in the key as well


def embedding(run: RunContext, text: EncodedTexts, words: Artifact | None) -> Artifact:
    """Initial token embeddings: a part fitted to the word vectors `words` of the corpus and a part from co-occurrence in the selection and
    the training texts (PPMI + truncated SVD); co-occurrence alone without word vectors, or where these cover too little of the text.

    embedding.npy: float32 (vocabulary, width); NaN in the rows of tokens without either."""
    encoder, vocab_size = run.config.encoder, text.tokenizer.vocab_size
    sizes: dict[str, Any] = {"width": encoder.embedding_width, "std": encoder.embedding_std, "seed": run.config.seed}

    def write(target: Path) -> None:
        run.emit(Event("start", "embedding"))
        texts = [sequences_of(text.tokenizer, run.task.train, max_length=UNCUT)]
        texts += [text.tokenizer.cut(text.selection.ids, max_length=UNCUT, cut="split")] if text.selection else []
        fitted, width = None, round(WORDS_SHARE * encoder.embedding_width)
        if words is not None:
            fitted = fit_token_vectors(CorpusVectors.load(words.path).counted, text.tokenizer, count_tokens(texts, vocab_size), width=width)
        missing = encoder.embedding_width - (0 if fitted is None else width)
        with Workers(run.threads) as workers:
            values = token_embeddings(texts, vocab_size=vocab_size, **(sizes | {"width": missing}), workers=workers)
        counted = f"{int(np.isfinite(values[:, 0]).sum()):,} of {vocab_size:,} tokens"
        message = f"{counted} have a co-occurrence embedding, from {sum(len(each.ids) for each in texts):,} tokens of text"
        if fitted is not None:
            message += f"; {int(fitted.any(axis=1).sum()):,} have one from the word vectors of the corpus"
            values = join_token_vectors(fitted, values, std=encoder.embedding_std, seed=run.config.seed)
        save_array(target / "embedding.npy", values)
        run.emit(Event("done", "embedding", message))

    inputs = {
        "tokenizer": text.tokenizer.fingerprint,
        "selection": fingerprint(text.selection),
        "task": task_fingerprint(run.task)["train"],
        "words": None if words is None else words.fingerprint,
    }
    return run.build(Stage("embedding", 2, sizes, inputs, write))


def fit_baseline(run: RunContext) -> Artifact:
    """Fit a linear model on n-grams."""

    def write(target: Path) -> None:
        fit = fit_linear(_words_of(run), search_space(run.config), stage="baseline", threads=run.threads, emit=run.emit)
        _save(fit, target, run.config)

    stage = Stage("baseline", _VERSION, _search_settings(run), {"task": _task(run.task)}, write, unused=_unused(run.task))
    return run.build(stage)


def fit_naive_bayes(run: RunContext, selection: SelectedPassages) -> Artifact | None:
    """Fit naive Bayes on the labelled texts, the selection and the unlabelled texts; None if a text has no single label."""
    if run.task.kind != "classification":
        return None

    def write(target: Path) -> None:
        passages: Sequence[str] = selection.texts()[: len(selection.table)]
        unlabelled: Sequence[str] = selection.unlabelled
        if run.config.diacritics == "remove":
            passages, unlabelled = (list(map(remove_diacritics, texts)) for texts in (passages, unlabelled))
        options: dict[str, Any] = {"metric": run.config.metric, "seed": run.config.seed, "emit": run.emit}
        _save(fit_bayes(_words_of(run), passages, unlabelled, **options), target, run.config)

    inputs = {"task": _task(run.task), "selection": fingerprint(selection)}
    reads_seed = bayes_reads_seed(len(selection.table), len(selection.unlabelled), labels=len(run.task.labels))
    return run.build(Stage("bayes", _VERSION, _settings(run), inputs, write, unused=() if reads_seed else ("seed",)))


def word_vectors(run: RunContext, corpus: Corpus) -> Artifact:
    """Return the word vectors of the corpus, from the store."""
    return build_word_vectors(corpus, run.store, diacritics=run.config.diacritics, threads=run.threads, emit=run.emit)


def fit_static(run: RunContext, words: Artifact, baseline: Artifact | None, bayes: Artifact | None) -> Artifact:
    """Fit a linear model on n-grams and averaged word vectors of the corpus; with unlabelled texts, self-train it on them.

    With more than `FEW_TEXTS` training texts only the baseline's variant of n-grams is tried, to save time. bayes: labels the unlabelled
    texts together with the others.
    """
    others = {name: model for name, model in (("tfidf", baseline), ("bayes", bayes)) if model is not None}
    reads_more = reads_unlabelled(run.task)

    def write(target: Path) -> None:
        searched = search_space(run.config)
        if baseline is not None and len(run.task.train) > FEW_TEXTS:
            searched = replace(searched, variants=(LinearModel.load(baseline.path).ngrams.variant,))
        task, vectors = _words_of(run), CorpusVectors.load(words.path)
        _warn_of_diacritics(run, vectors.trained)
        fit = fit_linear(task, searched, stage="static", vectors=vectors, threads=run.threads, emit=run.emit)
        if reads_more:
            loaded = {name: LinearModel.load(model.path) for name, model in others.items()}
            fit = self_trained(fit, loaded, task, searched, held_out=read_held_out(others), emit=run.emit)
        _save(fit, target, run.config)

    inputs: dict[str, Any] = {"task": _task(run.task), "words": words.fingerprint}
    inputs |= {"baseline": None if baseline is None else model_fingerprint(baseline)}
    if reads_more:
        labelling = {name: model_fingerprint(model) for name, model in others.items()}
        inputs["self_training"] = {"unlabelled": task_fingerprint(run.task)["unlabelled"], "labelled_by": labelling}
        inputs["self_training"] |= {"format": 2} if len(run.task.dev) < SMALL_DEV else {}
    unused = () if self_training_reads_seed(run.task) else _unused(run.task)
    return run.build(Stage("static", _VERSION, _search_settings(run), inputs, write, unused=unused))


def _unused(task: Task) -> tuple[str, ...]:
    return () if fit_reads_seed(task) else ("seed",)


def _settings(run: RunContext) -> dict[str, Any]:
    # Where dev is small: the number of texts that decide, and the format of what is kept of them.
    folds = {"deciding_texts": DECIDING_TEXTS, "held_out": 1} if len(run.task.dev) < SMALL_DEV else {}
    return {"model_format": FORMAT, "seed": run.config.seed, "metric": run.config.metric, **run.config.word_settings, **folds}


def _search_settings(run: RunContext) -> dict[str, Any]:
    numbers = {"numbers": f"on the line of {FEWEST_NUMBERS} texts of dev"} if run.task.kind == "regression" else {}
    return {"config": run.config.baseline.model_dump(mode="json"), **_settings(run), **numbers}


def model_fingerprint(model: Artifact) -> str:
    """Return a hash of a fitted model without its report, whose seconds differ between equal fits."""
    return hash_json({name: file for name, file in model.files.items() if name != FIT_FILE})


def search_space(config: RunConfig) -> SearchSpace:
    """Return the candidates of the run's linear models."""
    return SearchSpace(config.baseline.c, config.metric, config.seed)


def _task(task: Task) -> dict[str, str]:
    """Fingerprints without test and unlabelled texts, which these stages do not read (the selection has unlabelled texts)."""
    return {split: content for split, content in task_fingerprint(task).items() if split not in ("test", "unlabelled")}


def _words_of(run: RunContext) -> Task:
    """Return the task with the texts that linear models read."""
    return run.task.with_texts(remove_diacritics) if run.config.diacritics == "remove" else run.task


def _warn_of_diacritics(run: RunContext, vectors: WordVectors) -> None:
    """Warn if words of the training texts are in the corpus with other diacritics only."""
    if run.config.diacritics == "remove":
        return
    kept, removed = vectors.coverage([example.whole_text for example in run.task.train])
    if removed - kept > MANY_WITH_OTHER_DIACRITICS:
        shares = f"{kept:.0%} of the words of the training texts are in the raw text, {removed:.0%} without diacritics"
        run.emit(Event("warning", "static", f"{shares}: the two are written differently; try --set diacritics=remove"))


def _save(fit: LinearFit, target: Path, config: RunConfig) -> None:
    replace(fit.model, diacritics=config.diacritics).save(target)
    write_json(target / FIT_FILE, fit.as_dict())
    save_array(target / DEV_PREDICTIONS, fit.predictions)
    if len(fit.held_out.rows):
        save_array(target / _HELD_OUT_ROWS, fit.held_out.rows)
        save_array(target / _HELD_OUT, fit.held_out.outputs)


def refit_on_dev(run: RunContext, models: Mapping[str, Artifact]) -> dict[str, Artifact]:
    """Return the linear models that are exported and scored on test, by name.

    If a small dev set was split off from the training texts, `tfidf` and `static` are fitted again on both, in the chosen setting, as is
    usual after cross-validation. Dev scores and the teacher's labels come from the models that were fitted without dev.
    """
    task = run.task
    if not task.dev_is_split_from_train or task.kind == "regression" or not read_held_out(models):
        return dict(models)
    return {name: model if name == "bayes" else _refit(run, name, models) for name, model in models.items()}


def _refit(run: RunContext, name: str, models: Mapping[str, Artifact]) -> Artifact:
    """Fit one of the linear models of a run again; one that was self-trained also on unlabelled texts, which all of them label again."""
    stage, fitted = f"{name}-on-dev", models[name]
    report = json.loads((fitted.path / FIT_FILE).read_bytes())
    reads_more = report["unlabelled_weight"] > 0

    def write(target: Path) -> None:
        run.emit(Event("start", stage))
        words, seed, label = _words_of(run), run.config.seed, None
        if reads_more:
            loaded = {each: LinearModel.load(model.path) for each, model in models.items()}
            teacher = Teacher.of(loaded, words, metric=run.config.metric, held_out=read_held_out(models))
            label = partial(with_unlabelled, teacher=teacher, seed=seed)
        model = refit(LinearModel.load(fitted.path), words, seed=seed, with_unlabelled=label)
        model.save(target)
        more = {"features": model.coefficients.weights.shape[0], "train_texts": report["train_texts"] + len(words.dev)}
        write_json(target / FIT_FILE, report | more)
        run.emit(Event("done", stage, f"fitted again in the chosen setting, on {len(words.train)} training and {len(words.dev)} dev texts"))

    inputs: dict[str, Any] = {"model": model_fingerprint(fitted), "task": _task(run.task)}
    settings: dict[str, Any] = dict(run.config.word_settings)
    if reads_more:
        inputs["unlabelled"] = task_fingerprint(run.task)["unlabelled"]
        inputs["labelled_by"] = {each: model_fingerprint(model) for each, model in models.items()}
        settings |= {"seed": run.config.seed, "metric": run.config.metric}
    return run.build(Stage(stage, 2, settings, inputs, write))


def read_held_out(models: Mapping[str, Artifact]) -> dict[str, HeldOut]:
    """Return the predictions of the linear models for training texts out of fold, by name; empty unless all models have some."""
    if not all(_HELD_OUT in model.files for model in models.values()):
        return {}
    paths = {name: model.path for name, model in models.items()}
    return {name: HeldOut(read_array(path / _HELD_OUT_ROWS), read_array(path / _HELD_OUT)) for name, path in paths.items()}


def retriever_of_linear(config: RunConfig) -> RetrieverConfig | None:
    """Return the retriever of a run that trains no encoder: the selection is limited by documents only."""
    return None if config.retriever is None else plan_selection(config.retriever, amount=None, tokens_per_unit=0.0)
