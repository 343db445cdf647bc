"""The stages after training: logit adjustment, the evaluation of all models of a run, and the export."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from cramlm.config.retriever import RetrieverConfig
from cramlm.config.run import RunConfig
from cramlm.data.corpus import Corpus
from cramlm.data.labels import RULES
from cramlm.data.task import task_fingerprint
from cramlm.evaluation.combination import COMBINATION_FILE, ENCODER, Combination, CombinationFit, HeldOut, combine_on_dev, comparable
from cramlm.evaluation.comparison import OutOfFold, compare_on_dev
from cramlm.evaluation.confidence import ConfidenceFile, fit_confidence
from cramlm.evaluation.kinds import KINDS, METRIC_NAMES, DevScorer, format_metric, main_metric, score_test
from cramlm.evaluation.logit_adjustment import adjusts_logits, choose_adjustment
from cramlm.evaluation.prediction import outputs_of
from cramlm.export.folder import publish_encoder, publish_linear
from cramlm.inference.linear import CombinedModels, LinearPredictor
from cramlm.linear.model import LinearModel
from cramlm.pipeline.context import EncodedTexts, RunContext, RunPlan, SelectedPassages, Stage
from cramlm.pipeline.stages.linear import DEV_PREDICTIONS, FIT_FACTS, FIT_FILE, read_held_out
from cramlm.records import COMBINED, Event, Example, FloatArray, IntArray, Task
from cramlm.storage.arrays import read_array
from cramlm.storage.artifacts import Artifact, hash_json, write_json

if TYPE_CHECKING:
    from cramlm.pipeline.stages.train import Trained

_Value = TypeVar("_Value")
Outputs: TypeAlias = Mapping[str, FloatArray]
"""Of a model: split -> probabilities (n, labels), or numbers (n, 1)."""
Logits: TypeAlias = Callable[[Sequence[Example]], FloatArray]
_COLUMNS = {"text_column", "label_column", "text_pair_column", "label_separator"}


def adjust_logits(run: RunContext, trained: Trained) -> Trained:
    """Add the logit adjustment that is best on dev to the classifier's bias; unchanged if the config disables it."""
    if not adjusts_logits(run.config) or not any(phase.learns_labels for phase in trained.phases):
        return trained

    def write(target: Path) -> None:
        run.emit(Event("start", "logit-adjustment"))
        chosen = choose_adjustment(trained.logits(run.task.dev), run.task, metric=run.config.metric)
        values = dict(zip(run.task.labels, map(float, chosen.values), strict=True))
        summary = {"tau": chosen.tau, "before": chosen.before, "after": chosen.after}
        write_json(target / "logit-adjustment.json", {**summary, "dev_metric": run.config.metric, "values": values})
        before, after = (format_metric(run.config.metric, score) for score in (chosen.before, chosen.after))
        change = f"{before}, unchanged" if chosen.tau == 0 else f"{before} -> {after}"
        shown = f"tau = {chosen.tau:.1f} (dev {METRIC_NAMES[run.config.metric]} {change})"
        run.emit(Event("done", "logit-adjustment", f"logit adjustment: {shown}", data=summary))

    inputs = {"model": trained.fingerprint, "task": task_fingerprint(run.task)}
    settings = {"precision": trained.precision, "metric": run.config.metric}
    artifact = run.build(Stage("logit-adjustment", 3, settings, inputs, write))
    values = json.loads((artifact.path / "logit-adjustment.json").read_bytes())["values"]
    trained.model.add_to_logits(np.array([values[label] for label in run.task.labels], dtype=np.float32))
    return replace(trained, fingerprint=f"{trained.fingerprint} {artifact.fingerprint}")


def evaluate(
    run: RunContext, linear_models: Mapping[str, Artifact], final: Mapping[str, Artifact], trained: Trained | None = None
) -> Artifact:
    """Score the models of a run on dev and once on test, and write the verdict.

    linear_models: cheapest first; the last is the run's own if it trains no encoder. trained: the encoder, which is scored alone and, if
    there are linear models, combined with them. final: the linear models that are scored on test.
    """
    own = run.config.model if trained is None else ENCODER

    def named(values: Mapping[str, _Value]) -> dict[str, _Value]:
        """Return values with the name of the run for its own model, by which the verdict names it."""
        return {run.config.name if name == own else name: value for name, value in values.items()}

    def write(target: Path) -> None:
        run.emit(Event("start", "evaluation"))
        held_out, linear_outputs = read_held_out(linear_models), dict[str, Outputs]()
        for name in reversed(list(linear_models)):  # most expensive first
            linear_outputs[name] = outputs_of_linear_model(run.task, linear_models[name], final[name])
        candidates = {name: read_array(artifact.path / DEV_PREDICTIONS) for name, artifact in linear_models.items()}
        outputs: dict[str, Outputs] = dict(linear_outputs)
        if trained is not None:
            encoder = _outputs(run.task, trained.logits, trained.logits)
            outputs = {ENCODER: encoder, **linear_outputs}
            candidates[ENCODER] = _dev_candidates(run, trained)
            if linear_models:
                fit = _combine(run, outputs, held_out)
                outputs[COMBINED] = {split: _combined_outputs(fit.combination, outputs, split) for split in encoder}
                candidates[COMBINED] = fit.adjustment.predictions
                write_json(target / COMBINATION_FILE, fit.combination.as_dict())
        scores = {}
        for name in sorted(outputs, key=lambda each: each in final):
            scores[name] = score_outputs(run.task, outputs[name], target, name=None if name == own else name)
            if name in final:
                fit_report = json.loads((final[name].path / FIT_FILE).read_bytes())
                scores[name]["fit"] = {key: fit_report[key] for key in FIT_FACTS if key in fit_report}
        save_confidence(run.task, outputs, target)
        out_of_fold = _out_of_fold(run, named(linear_outputs), named(held_out))
        _conclude(run, target, named(scores), named(candidates), () if trained is None else trained.reports, out_of_fold)

    settings: dict[str, Any] = {"name": run.config.name, "seed": run.config.seed, "metric": run.config.metric}
    inputs = _inputs(run.task, linear_models, final)
    if trained is not None:
        settings, inputs = {**settings, "precision": trained.precision}, {"model": trained.fingerprint, **inputs}
    return run.build(Stage("evaluation", 7 if trained is None else 11, settings, inputs, write))


def _combine(run: RunContext, outputs: Mapping[str, Outputs], held_out: Mapping[str, HeldOut]) -> CombinationFit:
    """Fit the combination on dev, and report which models are part of it."""
    on_dev = {name: splits["dev"] for name, splits in outputs.items()}
    fit = combine_on_dev(run.task, on_dev, metric=run.config.metric, held_out=held_out)
    metric, parts = run.config.metric, ", ".join(f"{name} ({weight:.2f})" for name, weight in fit.combination.weights.items())
    losses = ", ".join(f"{name} {loss:.2f}" for name, loss in fit.losses.items() if name not in fit.combination.models)
    left_out = f"; left out for its loss on dev: {losses} (lowest {min(fit.losses.values()):.2f})" if losses else ""
    score = f"{METRIC_NAMES[metric]} on dev {format_metric(metric, fit.adjustment.after)}"
    tau = f"logit adjustment tau = {fit.combination.tau:.1f}, " if KINDS[run.task.kind].has_prior else ""
    run.emit(Event("note", "evaluation", f"weighted combination of {parts}: {tau}{score}{left_out}"))
    return fit


def _combined_outputs(combination: Combination, outputs: Mapping[str, Outputs], split: str) -> FloatArray:
    return outputs_of(combination.kind, combination.logits({name: splits[split] for name, splits in outputs.items()}))


def _dev_candidates(run: RunContext, trained: Trained) -> npt.NDArray[Any]:
    """Dev predictions of all candidates that the model was chosen from: all evaluations of a phase with keep = best, else the last weights
    with every tau.
    """
    last = trained.finished[-1]
    if last.phase.learns_labels and last.phase.keep == "best":
        predictions: npt.NDArray[Any] = read_array(last.artifact.path / DEV_PREDICTIONS)
        return predictions
    # The bias already contains the adjustment, so the chosen tau is 0.
    return choose_adjustment(trained.logits(run.task.dev), run.task, metric=run.config.metric, taus=(0.0,)).predictions


def _out_of_fold(run: RunContext, outputs: Mapping[str, Outputs], held_out: Mapping[str, HeldOut]) -> OutOfFold | None:
    """Return the predictions of the linear models for dev and training texts; None unless all predict the same training texts."""
    if not (known := comparable(held_out)):
        return None
    whole = run.task.with_training_in_dev(next(iter(known.values())).rows.tolist())
    scorer = DevScorer.of(whole, run.config.metric)
    both = {name: np.concatenate([outputs[name]["dev"], each.outputs]) for name, each in known.items()}
    return OutOfFold(scorer, {name: scorer.predictions_of_outputs(values) for name, values in both.items()})


def _conclude(
    run: RunContext,
    target: Path,
    models: Mapping[str, Any],
    candidates: Mapping[str, npt.NDArray[Any]],
    phases: Sequence[Mapping[str, Any]],
    out_of_fold: OutOfFold | None,
) -> None:
    """Write scores.json with the verdict. models: scores by name. candidates: dev predictions by name. phases: reports of the phases."""
    verdict = compare_on_dev(DevScorer.of(run.task, run.config.metric), candidates, seed=run.config.seed, out_of_fold=out_of_fold)
    result = {
        "models": models,
        "verdict": verdict.text,
        "comparison": verdict.as_dict(),
        "flops": {count: sum((report[f"{count}_flops"] for report in phases), 0.0) for count in ("paper", "executed")},
        "training": {report["name"]: report for report in phases},
        "labels": list(run.task.labels),
        "kind": run.task.kind,
    }
    write_json(target / "scores.json", result)
    metric = main_metric(run.task.kind)
    score = format_metric(metric, models[run.config.name]["dev"][metric])
    run.emit(Event("done", "evaluation", f"{METRIC_NAMES[metric]} on dev {score}{'; test scored once' if run.task.test else ''}"))


def _inputs(task: Task, models: Mapping[str, Artifact], final: Mapping[str, Artifact]) -> dict[str, Any]:
    """rows: of the ids, which predictions are written with; equal texts may have moved to other lines."""
    rows = hash_json([[example.id for example in split] for split in (task.dev, task.test)])
    fingerprints = {name: each.fingerprint for name, each in models.items()}
    refitted = {name: each.fingerprint for name, each in final.items() if each.fingerprint != fingerprints[name]}
    more = {"refitted": refitted} if refitted else {}
    return {"task": task_fingerprint(task), "rows": rows, "linear_models": fingerprints, **more}


def _outputs(task: Task, on_dev: Logits, on_test: Logits) -> Outputs:
    """Return the outputs of a model for dev and, if there are any, test texts, from its logits on each."""
    splits = ("dev", on_dev, task.dev), ("test", on_test, task.test)
    return {split: outputs_of(task.kind, logits(examples)) for split, logits, examples in splits if examples}


def outputs_of_linear_model(task: Task, model: Artifact, final: Artifact) -> Outputs:
    """Return the outputs of a linear model for dev, and of the final one, which may be the same, for test."""
    load = cache(LinearModel.load)

    def logits(path: Path, examples: Sequence[Example]) -> FloatArray:
        return load(path).logits([example.divided_text for example in examples])

    return _outputs(task, partial(logits, model.path), partial(logits, final.path))


def save_confidence(task: Task, outputs: Mapping[str, Outputs], target: Path) -> None:
    """Write the confidence of each model to `target`; nothing unless each text has one label."""
    if task.kind != "classification":
        return
    log_prior = -KINDS[task.kind].negative_log_prior(task)
    truth = {"dev": _label_ids(task.dev, task.labels), "test": _label_ids(task.test, task.labels)}
    models = {}
    for name, splits in outputs.items():
        test = (splits["test"], truth["test"]) if "test" in splits else None
        models[name] = fit_confidence(task.labels, (splits["dev"], truth["dev"]), test, log_prior=log_prior)
    ConfidenceFile(task.labels, models).save(target)


def _label_ids(examples: Sequence[Example], labels: Sequence[str]) -> IntArray:
    """Label ids, (n,); of a label that is not in `labels`, their number."""
    ids = {label: number for number, label in enumerate(labels)}
    return np.array([ids.get(str(example.label), len(labels)) for example in examples], dtype=np.int64)


def score_outputs(task: Task, outputs: Outputs, target: Path, *, name: str | None = None) -> dict[str, Any]:
    """Scores of a model's outputs on dev and, if there is one, test. Predictions are written to predictions-SPLIT.jsonl, or, of another
    model than the run's own, to predictions-SPLIT-NAME.jsonl.
    """
    kind, scores = KINDS[task.kind], {}
    for split, values in outputs.items():
        examples = task.dev if split == "dev" else task.test
        predicted = kind.predicted_labels(values, task.labels)
        true = [str(example.label) for example in examples]
        scores[split] = kind.score(true, predicted, task.labels, values).as_dict()
        if split == "test" and (leak_free := score_test(task, predicted)[1]) is not None:
            scores["test_leak_free"] = leak_free.as_dict()
        file = f"predictions-{split}.jsonl" if name is None else f"predictions-{split}-{name}.jsonl"
        _write_predictions(target / file, examples, values, task)
    return scores


def _write_predictions(path: Path, examples: Sequence[Example], outputs: FloatArray, task: Task) -> None:
    """A JSON line each: the true label, the predicted one, and every label's probability where there is one."""
    kind, plain = KINDS[task.kind], RULES[task.kind].plain
    with path.open("w", encoding="utf-8") as file:
        rows = zip(examples, kind.predicted_labels(outputs, task.labels), kind.predictions(outputs, task.labels), strict=True)
        for example, predicted, prediction in rows:
            line: dict[str, Any] = {"id": example.id, "label": plain(str(example.label)), "predicted": plain(predicted)}
            if (probabilities := getattr(prediction, "probabilities", None)) is not None:
                line["probabilities"] = {label: round(value, 6) for label, value in probabilities.items()}
            file.write(json.dumps(line, ensure_ascii=False) + "\n")


def export_encoder(
    run: RunContext,
    plan: RunPlan,
    trained: Trained,
    text: EncodedTexts,
    corpus: Corpus | None,
    evaluation: Artifact,
    linear_models: Mapping[str, Artifact],
) -> Artifact:
    """Publish the Hugging Face folder with the combination beside the encoder, model card and provenance."""
    from cramlm.model.huggingface.folder import LoadedModel  # here: imports torch

    init = None
    if (known := run.pretrained) is not None:
        init = {"name": str(known.folder), "fingerprint": known.fingerprint, "sha256": dict(known.hashes)}
    provenance = {
        **_provenance(run, plan.retriever, corpus, text.selection, evaluation),
        "init": init,
        "phases": [dict(phase) for phase in trained.reports],
        "precision": plan.precision,
        "threads": plan.threads,
    }
    key = {
        "format": 4,
        "model": trained.fingerprint,
        "evaluation": evaluation.fingerprint,
        "tokenizer": text.tokenizer.fingerprint,
        **_columns(run.config),
    }
    combined = _combined_models(evaluation, linear_models)
    return publish_encoder(
        run.folder / "export",
        LoadedModel(trained.model.to("cpu"), text.tokenizer, run.task.labels, trained.max_length),
        mlm=trained.has_mlm,
        provenance=provenance,
        key=key,
        probe_texts=[example.text for example in run.task.dev[:32]],
        beside=[part.save for part in (combined, ConfidenceFile.load(evaluation.path)) if part is not None],
        emit=run.emit,
    )


def _combined_models(evaluation: Artifact, linear_models: Mapping[str, Artifact]) -> CombinedModels | None:
    path = evaluation.path / COMBINATION_FILE
    if not path.is_file():
        return None
    combination = Combination.from_dict(json.loads(path.read_bytes()))
    models = {name: LinearModel.load(linear_models[name].path) for name in combination.models if name != ENCODER}
    return CombinedModels(combination, {name: LinearPredictor(model) for name, model in models.items()})


def export_linear(
    run: RunContext, fitted: Artifact, corpus: Corpus | None, selection: SelectedPassages | None, evaluation: Artifact
) -> Artifact:
    """Publish the folder of the run's linear model with model card and provenance."""
    fit = json.loads((fitted.path / FIT_FILE).read_bytes())
    provenance = {**_provenance(run, run.config.retriever, corpus, selection, evaluation), "fit": fit}
    key = {"format": 2, "model": fitted.fingerprint, "evaluation": evaluation.fingerprint, **_columns(run.config)}
    confidence = ConfidenceFile.load(evaluation.path)
    return publish_linear(
        run.folder / "export",
        LinearModel.load(fitted.path),
        provenance=provenance,
        key=key,
        confidence=None if confidence is None else confidence.only(run.config.model),
        emit=run.emit,
    )


def _columns(config: RunConfig) -> dict[str, str]:
    """Return the part of an export's key for the columns that `predict` reads and the card names, if they are not the default ones."""
    return config.task.model_dump(include=_COLUMNS, exclude_defaults=True)


def _provenance(
    run: RunContext, retriever: RetrieverConfig | None, corpus: Corpus | None, selection: SelectedPassages | None, evaluation: Artifact
) -> dict[str, Any]:
    """Return the part of the provenance that all exported models of a run share. retriever: as it was run."""
    splits = {"train": len(run.task.train), "dev": len(run.task.dev), "test": len(run.task.test)}
    splits |= {"unlabelled": len(run.task.unlabelled)} if run.task.unlabelled else {}
    return {
        "config": run.config.model_dump(mode="json"),
        "retriever": None if retriever is None else retriever.model_dump(mode="json"),
        "corpus": None if corpus is None else corpus.statistics,
        "selection": json.loads((selection.artifact.path / "report.json").read_bytes()) if selection else None,
        "task": {"fingerprint": task_fingerprint(run.task), **splits},
        "scores": json.loads((evaluation.path / "scores.json").read_bytes()),
    }
