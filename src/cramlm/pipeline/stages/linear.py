"""The linear models of a run: `baseline` (TF-IDF alone) and `static` (TF-IDF and co-occurrence vectors from the selection).

Each stage publishes the model that is best on dev, what was tried (fit.json) and the dev predictions of all candidates, for the verdict.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from cramlm.config.run import RunConfig
from cramlm.data.corpus import Corpus
from cramlm.data.labels import RULES
from cramlm.data.task import task_fingerprint
from cramlm.evaluation.choice import DevScorer
from cramlm.evaluation.evaluate import outputs_of, sequences_of
from cramlm.evaluation.kinds import KINDS, NAMES, figure, metric_of, score_test
from cramlm.evaluation.verdict import compare_on_dev
from cramlm.export.linear import export_linear
from cramlm.io.workers import available_cores
from cramlm.linear.cooccurrence import TextSpace
from cramlm.linear.features import VARIANTS, Variant
from cramlm.linear.fit import FEW_TEXTS, LinearFit, fit_linear
from cramlm.linear.model import LinearModel, TextVectors
from cramlm.model.tokenizer import UNCUT, Tokenizer
from cramlm.pipeline.stages.common import Chosen, Context, Plan, Text, fingerprint, write_json
from cramlm.planning.budget import Speed, plan_selection
from cramlm.records import Event, Example, FloatArray, Task
from cramlm.storage.arrays import read_array, save_array
from cramlm.storage.artifacts import Artifact

DEV_PREDICTIONS: Final = "dev-predictions.npy"
FIT_FILE: Final = "fit.json"
FIT_FACTS: Final = ("variant", "scheme", "class_weights", "c", "tau", "features", "train_texts", "seconds")
"""What a run's scores say of how a linear model was fitted."""
_FORMAT: Final = 1


def fit_baseline(run: Context) -> Artifact | None:
    """TF-IDF + a linear model; None where the config switches it off."""
    if not run.config.baseline.enabled:
        return None

    def write(target: Path) -> None:
        _save(
            fit_linear(
                run.task, c=run.config.baseline.c, metric=run.config.dev_metric, seed=run.config.seed, stage="baseline", emit=run.emit
            ),
            target,
        )

    key = {"format": _FORMAT, "task": _task(run.task), "config": run.config.baseline.model_dump(mode="json"), "seed": run.config.seed}
    return run.stage("baseline", key={**key, "metric": run.config.dev_metric}, write=write)


def fit_static(run: Context, text: Text, embedding: Artifact, baseline: Artifact | None) -> Artifact:
    """The same with averaged co-occurrence embeddings of the tokens beside TF-IDF.

    With more than `FEW_TEXTS` training texts the variant of TF-IDF is the baseline's, if there is one, to save time.
    """

    def write(target: Path) -> None:
        run.emit(Event("note", "static", "averaging token embeddings"))
        passages = text.tokenizer.encode([]) if text.selection is None else text.selection.ids
        texts = [
            sequences_of(text.tokenizer, run.task.train, max_length=UNCUT),
            text.tokenizer.cut(passages, max_length=UNCUT, cut="split"),
        ]
        space = TextSpace.of(texts, read_array(embedding.path / "embedding.npy"))
        variants: Sequence[Variant] = VARIANTS
        if baseline is not None and len(run.task.train) > FEW_TEXTS:
            variants = (LinearModel.load(baseline.path).tfidf.variant,)
        vectors = TextVectors(space, text.tokenizer)
        options: dict[str, Any] = {"c": run.config.baseline.c, "metric": run.config.dev_metric, "seed": run.config.seed}
        _save(fit_linear(run.task, **options, stage="static", vectors=vectors, variants=variants, emit=run.emit), target)

    inputs = {
        "selection": fingerprint(text.selection),
        "task": _task(run.task),
        "embedding": embedding.fingerprint,
        "tokenizer": text.tokenizer.fingerprint,
    }
    inputs["baseline"] = None if baseline is None else baseline.fingerprint
    key = {
        "format": _FORMAT,
        "config": run.config.baseline.model_dump(mode="json"),
        "seed": run.config.seed,
        "metric": run.config.dev_metric,
        **inputs,
    }
    return run.stage("static", key=key, write=write)


def _task(task: Task) -> dict[str, str]:
    """Test is not read: another test file leaves the models as they are."""
    return {split: content for split, content in task_fingerprint(task).items() if split != "test"}


def _save(fit: LinearFit, target: Path) -> None:
    fit.model.save(target)
    write_json(target / FIT_FILE, fit.as_dict())
    save_array(target / DEV_PREDICTIONS, fit.predictions)


def plan_linear(config: RunConfig) -> Plan:
    """The plan of a run without training: a retriever without a bound of its own is bounded by documents."""
    retriever = None if config.retriever is None else plan_selection(config.retriever, amount=None, tokens_per_unit=0.0)
    return Plan(retriever, "fp32", config.threads or available_cores(), Speed(0.0, 0.0), Speed(0.0, 0.0), operations=False)


def evaluate(run: Context, rungs: Mapping[str, Artifact], *, tokenizer: Tokenizer | None = None) -> Artifact:
    """Score a run's linear models (`rungs`, cheapest first) on dev and, this once, on test; the run's own model is the last."""

    def write(target: Path) -> None:
        run.emit(Event("start", "evaluation"))
        scores = score_rungs(run.task, rungs, target, own=run.config.model, tokenizer=tokenizer)
        named = {name: run.config.name if name == run.config.model else name for name in rungs}
        candidates = {named[name]: read_array(artifact.path / DEV_PREDICTIONS) for name, artifact in rungs.items()}
        verdict = compare_on_dev(dev_scorer(run.config, run.task), candidates, seed=run.config.seed)
        models = {named[name]: entry for name, entry in scores.items()}
        result = {
            "models": models,
            "verdict": verdict.text,
            "comparison": verdict.as_dict(),
            "labels": list(run.task.labels),
            "kind": run.task.kind,
        }
        write_json(target / "scores.json", {**result, "flops": {"paper": 0.0, "executed": 0.0}, "training": {}})
        metric = metric_of(run.task.kind)
        own = figure(metric, scores[run.config.model]["dev"][metric])
        run.emit(Event("done", "evaluation", f"{NAMES[metric]} on dev {own}; test scored once"))

    inputs = {"task": task_fingerprint(run.task), "seed": run.config.seed, "metric": run.config.dev_metric, "name": run.config.name}
    key = {"format": 2, **inputs, "rungs": {name: artifact.fingerprint for name, artifact in rungs.items()}}
    return run.stage("evaluation", key=key, write=write)


def export(run: Context, fitted: Artifact, corpus: Corpus | None, selection: Chosen | None, evaluation: Artifact) -> Artifact:
    """The folder of the run's linear model, with its card and where everything came from."""
    report = json.loads((selection.artifact.path / "report.json").read_bytes()) if selection else None
    provenance = {
        "config": run.config.model_dump(mode="json"),
        "retriever": None if run.config.retriever is None else run.config.retriever.model_dump(mode="json"),
        "corpus": None if corpus is None else corpus.statistics,
        "selection": report,
        "task": {
            "fingerprint": task_fingerprint(run.task),
            "train": len(run.task.train),
            "dev": len(run.task.dev),
            "test": len(run.task.test),
        },
        "fit": json.loads((fitted.path / FIT_FILE).read_bytes()),
        "scores": json.loads((evaluation.path / "scores.json").read_bytes()),
    }
    key = {"format": 1, "model": fitted.fingerprint, "evaluation": evaluation.fingerprint}
    return export_linear(run.folder / "export", LinearModel.load(fitted.path), provenance=provenance, key=key, emit=run.emit)


def dev_scorer(config: RunConfig, task: Task) -> DevScorer:
    """Scores of predictions on the task's dev texts by the metric that chooses."""
    return DevScorer.of(task.kind, [str(example.label) for example in task.dev], task.labels, config.dev_metric)


def score_rungs(
    task: Task, rungs: Mapping[str, Artifact], target: Path, *, own: str | None = None, tokenizer: Tokenizer | None = None
) -> dict[str, Any]:
    """Scores of the linear models, most expensive first, with their predictions in `target`. own: the model that the run is about.
    tokenizer: of the run, with the ids of its texts.
    """
    scores = {}
    for name, artifact in reversed(list(rungs.items())):
        model = LinearModel.load(artifact.path, tokenizer=tokenizer)

        def outputs(examples: Sequence[Example], model: LinearModel = model) -> FloatArray:
            return outputs_of(task.kind, model.logits([example.whole_text for example in examples]))

        fit = json.loads((artifact.path / FIT_FILE).read_bytes())
        scores[name] = {
            **score_model(task, outputs, target, name=None if name == own else name),
            "fit": {key: fit[key] for key in FIT_FACTS},
        }
    return scores


def score_model(task: Task, outputs: Callable[[Sequence[Example]], FloatArray], target: Path, *, name: str | None) -> dict[str, Any]:
    """Scores on dev and, if there is one, test; predictions go to predictions-SPLIT.jsonl, of a rung to predictions-SPLIT-NAME.jsonl."""
    kind, scores = KINDS[task.kind], {}
    for split, examples in (("dev", task.dev), ("test", task.test)):
        if not examples:
            continue
        values = outputs(examples)
        predicted = kind.spelled(values, task.labels)
        true = [str(example.label) for example in examples]
        scores[split] = kind.score(true, predicted, task.labels, values).as_dict()
        if split == "test" and (leak_free := score_test(task, predicted)[1]) is not None:
            scores["test_leak_free"] = leak_free.as_dict()
        _write_predictions(
            target / (f"predictions-{split}.jsonl" if name is None else f"predictions-{split}-{name}.jsonl"), examples, values, task
        )
    return scores


def _write_predictions(path: Path, examples: Sequence[Example], outputs: FloatArray, task: Task) -> None:
    """A JSON line each: the true label, the predicted one, and every label's probability where there is one."""
    kind, plain = KINDS[task.kind], RULES[task.kind].plain
    with path.open("w", encoding="utf-8") as file:
        answers = zip(examples, kind.spelled(outputs, task.labels), kind.answers(outputs, task.labels), strict=True)
        for example, predicted, answer in answers:
            line: dict[str, Any] = {"id": example.id, "label": plain(str(example.label)), "predicted": plain(predicted)}
            if (probabilities := getattr(answer, "probabilities", None)) is not None:
                line["probabilities"] = {label: round(value, 6) for label, value in probabilities.items()}
            file.write(json.dumps(line, ensure_ascii=False) + "\n")
