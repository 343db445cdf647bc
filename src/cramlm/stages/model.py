"""From the planned phases to the exported model."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cramlm.arrays import read_array
from cramlm.artifacts import Artifact, stage, verify
from cramlm.config import PhaseConfig, RunConfig
from cramlm.data.corpus import Corpus
from cramlm.data.labels import RULES
from cramlm.data.task import task_fingerprint
from cramlm.deploy.export import export_run
from cramlm.evaluation.evaluate import evaluate_examples
from cramlm.evaluation.kinds import KINDS, NAMES, figure, metric_of
from cramlm.evaluation.label_prior import shift_on_dev
from cramlm.evaluation.leaks import score_test
from cramlm.model.device import Precision
from cramlm.model.model import Model, initialise_all
from cramlm.model.pretrained import Pretrained
from cramlm.model.prompts import Prompt
from cramlm.model.starting_weights import take_weights
from cramlm.model.tokenization import Tokenizer
from cramlm.model.weights import read_tensors, save_tensors
from cramlm.records import Emit, Event, Example, FloatArray, Task, TaskKind
from cramlm.stages.common import Chosen, Clock, Ended, Plan, fingerprint, write_json
from cramlm.stages.marking import tell, with_told
from cramlm.stages.pools import external_pool, task_pool
from cramlm.stages.ranks import Order, Size, give_order
from cramlm.stages.schedule import Schedule, replan
from cramlm.stages.start import describe_start, tell_taken
from cramlm.stages.teacher import ask_model
from cramlm.training.batching import Batches, SpecialIds, TokenPool
from cramlm.training.distributed import ALONE, Ranks
from cramlm.training.loop import train_phase
from cramlm.training.units import with_words


@dataclass(frozen=True, slots=True)
class Trained:
    """The model (a number in the user's unit) and the phases that made it. fingerprint: of what its weights are."""

    model: Model
    ended: tuple[Ended, ...]
    max_length: int
    has_mlm: bool
    fingerprint: str

    @property
    def phases(self) -> tuple[PhaseConfig, ...]:
        """As they were run."""
        return tuple(each.phase for each in self.ended)

    @property
    def reports(self) -> tuple[Mapping[str, Any], ...]:
        """What each phase reported (its phase.json)."""
        return tuple(each.report for each in self.ended)


def train(
    config: RunConfig,
    plan: Plan,
    planned: Schedule,
    task: Task,
    selection: Chosen | None,
    teacher: Artifact | None,
    tokenizer: Tokenizer,
    embedding: Artifact | None,
    folder: Path,
    *,
    prompt: Prompt | None = None,
    pretrained: Pretrained | None = None,
    clock: Clock,
    emit: Emit,
    stop: Callable[[], int | None],
    ranks: Ranks = ALONE,
) -> Trained:
    """Run the phases in order, each from the weights of the one before; a published phase is not run again. Between two phases the
    rest of the budget is planned anew. `teacher`, `embedding`: what the stages of these names published, where a phase learns from the
    one, or the encoder starts from the other.
    """
    special = SpecialIds(tokenizer.pad_id, tokenizer.cls_id, tokenizer.sep_id, tokenizer.mask_id, tokenizer.vocab_size, tokenizer.unk_id)
    size = Size(config.encoder, config.head, special, len(task.labels), prompt, task.kind)
    model = size.build(config.seed)

    def place() -> None:
        if embedding is not None:
            model.place_embeddings(read_array(embedding.path / "embedding.npy"))

    place()

    def labelled(phase: PhaseConfig) -> TokenPool | None:
        soft = soft_labels(phase, "task") if not phase.external else None
        asked = prompt if phase.uses_labels or phase.uses_teacher else None
        return task_pool(tokenizer, task, soft, asked, length=phase.text_length) if phase.task else None

    def external(phase: PhaseConfig) -> TokenPool | None:
        soft = soft_labels(phase, "passages")
        length = min(phase.external_length or phase.text_length, phase.text_length)
        asked = prompt if phase.uses_teacher else None
        return external_pool(tokenizer, selection, soft, asked, length=length) if phase.external and selection else None

    def soft_labels(phase: PhaseConfig, about: str) -> FloatArray | None:
        source = answers.get(phase.name, teacher)
        return read_array(source.path / f"{about}.npy") if source and phase.uses_teacher else None

    sections = {name: config.model_dump(mode="json")[name] for name in ("seed", "encoder", "head", "label_prior")}
    sections["choose_by"] = config.dev_metric
    inputs = {"tokenizer": tokenizer.fingerprint, "selection": fingerprint(selection), "task": task_fingerprint(task)}

    ended: dict[str, Ended] = {}  # the phases so far, by name and in order
    answers: dict[str, Artifact] = {}  # by phase, where another's model is its teacher

    def run_phase(number: int, phase: PhaseConfig, before: Ended | None) -> Ended:
        key = {"format": 2, **sections, **inputs, "precision": plan.precision, "threads": plan.threads}
        key |= {"phase": phase.model_dump(mode="json"), "before": before.artifact.fingerprint if before else None, **ranks.settings}
        if prompt is not None:
            key["prompt"] = asdict(prompt)
        if phase.uses_teacher and phase.teacher_from is not None and selection is not None:
            judge_of = ended[phase.teacher_from].artifact
            answers[phase.name] = ask_model(
                model,
                selection,
                tokenizer,
                folder,
                weights=lambda: load_weights(model, judge_of.path),
                key={**inputs, "model": judge_of.fingerprint, "length": phase.row_length, "precision": plan.precision},
                phase=phase,
                precision=plan.precision,
                emit=emit,
            )
        if phase.uses_teacher and (source := answers.get(phase.name, teacher)):
            key["teacher"] = source.fingerprint
        if embedding is not None and before is None:
            key["embedding"] = embedding.fingerprint
        if pretrained is not None and before is None:
            key["init"] = pretrained.fingerprint
        name = f"phase-{number + 1}-{phase.name}"
        work = folder / ".work" / name
        scorer = ended[phase.masking.scores_of].artifact if phase.uses_scores and phase.masking.scores_of else None

        def pools() -> tuple[TokenPool | None, TokenPool | None]:
            vocabulary = [*tokenizer.vocabulary, *["[V]"] * config.head.vectors] if phase.needs_words else ()
            return with_words(phase, external(phase), labelled(phase), vocabulary, special)

        def begin() -> Model:
            if before is not None:
                load_weights(model, before.artifact.path)
                return model
            if number:  # another phase has trained since
                initialise_all(model, seed=config.seed)
                place()
            if pretrained is not None:
                tell_taken(take_weights(model, pretrained), pretrained, planned.phases, emit, fills_masks=prompt is not None)
            return model

        def judge() -> Model:
            if scorer is None:
                return begin()
            load_weights(model, scorer.path)
            return model

        told = tell(
            phase,
            folder,
            name=name.removeprefix("phase-"),
            key={
                **sections,
                **inputs,
                "weights": (scorer or (before.artifact if before else tokenizer)).fingerprint,
                "length": phase.text_length,
            },
            pools=pools,
            weights=judge,
            tokenizer=tokenizer,
            special=special,
            precision=plan.precision,
            emit=emit,
        )
        if told is not None:
            key["told"] = told.fingerprint

        def write(target: Path) -> None:
            begin()
            if phase.reset_task_head:
                model.reset_classifier(config.seed + number)
            drawn = with_told(pools(), told)
            order = Order(phase, number, size, config.seed, plan.precision, plan.threads, config.dev_metric, work)
            give_order(ranks, order, *drawn)
            result = train_phase(
                model,
                phase,
                Batches(phase, *drawn, seed=config.seed, phase_index=number, special=special),
                seed=config.seed,
                phase_index=number,
                work=work,
                precision=plan.precision,
                emit=emit,
                evaluate=lambda model: _dev_scores(config, model, tokenizer, task, max_length=phase.row_length, precision=plan.precision),
                choose_by=config.dev_metric,
                incoming=None if before is None else known_score(phase, before),
                stop=stop,
                fingerprint=key,
                ranks=ranks,
            )
            save_weights(model, target)
            write_json(target / "phase.json", {"name": phase.name, **asdict(result)})

        artifact = stage(folder / name, kind="phase", key=key, write=write, emit=emit, name=name)
        shutil.rmtree(work, ignore_errors=True)  # its checkpoints: the phase is published
        return Ended(phase, artifact, json.loads((artifact.path / "phase.json").read_bytes()))

    phases, last = planned.phases, None
    for number in range(len(phases)):
        if last is not None:
            phases = replan(config, planned, tuple(ended.values()), folder, clock=clock, emit=emit)
        phase = phases[number]
        before = last if phase.start_from is None else ended.get(phase.start_from)  # None for 'start'
        last = ended[phase.name] = run_phase(number, phase, before)
    assert last is not None, "a config has at least one phase"
    load_weights(model, last.artifact.path)
    model.take_unit(task.scale)
    has_mlm = any(phase.fills_masks for phase in phases)
    return Trained(model, tuple(ended.values()), last.phase.row_length, has_mlm, last.artifact.fingerprint)


def evaluate(
    config: RunConfig,
    plan: Plan,
    trained: Trained,
    tokenizer: Tokenizer,
    task: Task,
    baseline: Artifact | None,
    folder: Path,
    *,
    emit: Emit,
) -> Artifact:
    """Score the finished model on dev and, this once, on test; beside it the baselines, and a sentence on which to use."""

    def write(target: Path) -> None:
        emit(Event("start", "evaluation"))
        model_scores: dict[str, Any] = {}
        for split, examples in (("dev", task.dev), ("test", task.test)):
            if not examples:
                continue
            scores, outputs = evaluate_examples(
                trained.model, tokenizer, examples, task.labels, max_length=trained.max_length, precision=plan.precision
            )
            model_scores[split] = scores.as_dict()
            if split == "test":
                _, leak_free = score_test(task, KINDS[task.kind].spelled(outputs, task.labels))
                model_scores |= {} if leak_free is None else {"test_leak_free": leak_free.as_dict()}
            _write_predictions(target / f"predictions-{split}.jsonl", examples, outputs, task)
        models: dict[str, Any] = {config.name: model_scores}
        if baseline is not None:
            models |= json.loads((baseline.path / "baselines.json").read_bytes())["variants"]
        verdict = _verdict(models, task.kind, own=config.name)
        training = {report["name"]: report for report in trained.reports}
        flops = {count: sum(report[f"{count}_flops"] for report in trained.reports) for count in ("paper", "executed")}
        result = {
            "models": models,
            "verdict": verdict,
            "flops": flops,
            "training": training,
            "labels": list(task.labels),
            "kind": task.kind,
        }
        write_json(target / "scores.json", result)
        metric = metric_of(task.kind)
        reached = figure(metric, model_scores["dev"][metric])
        emit(Event("done", "evaluation", f"dev and test scored, this once; {NAMES[metric]} on dev {reached}"))

    inputs = {"model": trained.fingerprint, "task": task_fingerprint(task)}
    key = {"format": 1, **inputs, "baseline": baseline.fingerprint if baseline else None, "precision": plan.precision}
    return stage(folder / "evaluation", kind="evaluation", key=key, write=write, emit=emit)


def export(
    config: RunConfig,
    plan: Plan,
    trained: Trained,
    tokenizer: Tokenizer,
    task: Task,
    corpus: Corpus | None,
    selection: Chosen | None,
    evaluation: Artifact,
    folder: Path,
    *,
    pretrained: Pretrained | None = None,
    emit: Emit,
) -> Artifact:
    """The plain Hugging Face folder, its model card and where everything came from."""
    report = json.loads((selection.artifact.path / "report.json").read_bytes()) if selection else None
    provenance = {
        "config": config.model_dump(mode="json"),
        "init": describe_start(pretrained),
        "phases": [dict(phase) for phase in trained.reports],
        "retriever": None if plan.retriever is None else plan.retriever.model_dump(mode="json"),
        "corpus": None if corpus is None else corpus.statistics,
        "selection": report,
        "task": {"fingerprint": task_fingerprint(task), "train": len(task.train), "dev": len(task.dev), "test": len(task.test)},
        "precision": plan.precision,
        "threads": plan.threads,
        "scores": json.loads((evaluation.path / "scores.json").read_bytes()),
    }
    key = {
        "format": 1,
        "model": trained.fingerprint,
        "evaluation": evaluation.fingerprint,
        "tokenizer": tokenizer.fingerprint,
    }
    return export_run(
        folder / "export",
        model=trained.model,
        mlm=trained.has_mlm,
        tokenizer=tokenizer,
        labels=task.labels,
        max_length=trained.max_length,
        provenance=provenance,
        key=key,
        probe_texts=[example.text for example in task.dev[:32]],
        emit=emit,
    )


def known_score(phase: PhaseConfig, before: Ended) -> float | None:
    """The dev score of what `before` handed on, where `phase` goes on learning the same labels with that head and in such rows."""
    earlier, report = before.phase, before.report
    comparable = phase.uses_labels and earlier.uses_labels and not phase.reset_task_head and phase.row_length == earlier.row_length
    handed_on = earlier.keep == "best" or report["best_step"] == report["steps"]
    score: float | None = report["best_score"] if comparable and handed_on else None
    return score


def save_weights(model: Model, folder: Path) -> None:
    """Every parameter as fp32 in folder/model.safetensors."""
    save_tensors(folder / "model.safetensors", {name: parameter.float() for name, parameter in model.named_parameters()})


def load_weights(model: Model, folder: Path) -> None:
    """Fill the model from what `save_weights` wrote for the same shapes, after every byte was checked.

    Raises:
        ArtifactError: if the folder is damaged.
    """
    verify(folder)
    model.load_state_dict(read_tensors(folder / "model.safetensors"))


def chooses_prior(config: RunConfig) -> bool:
    """Whether dev says how much the frequency of labels counts."""
    return config.label_prior == "dev" and KINDS[config.task.kind].has_prior


def _dev_scores(
    config: RunConfig, model: Model, tokenizer: Tokenizer, task: Task, *, max_length: int, precision: Precision
) -> Mapping[str, float]:
    """Of the weights as they would be handed on."""
    asked: dict[str, Any] = {"max_length": max_length, "precision": precision}
    if chooses_prior(config):
        return shift_on_dev(model, tokenizer, task, choose_by=config.dev_metric, **asked).figures
    return evaluate_examples(model, tokenizer, task.dev, task.labels, scale=task.scale, **asked)[0].figures


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


def _verdict(models: Mapping[str, Any], kind: TaskKind, *, own: str) -> str:
    """Which model to use, by the dev score of the kind, said with both figures; the simpler one on a tie."""
    metric, baseline = metric_of(kind), KINDS[kind].baseline
    name = NAMES[metric]
    reached = {model: models[model]["dev"][metric] for model in models}
    if len(models) == 1:
        return f"{own}: dev {name} {figure(metric, reached[own])} (no baseline was fitted to compare with)"
    rival = max((model for model in models if model != own), key=lambda model: reached[model])
    figures = f"{own} {figure(metric, reached[own])}, {rival} {figure(metric, reached[rival])}"
    if reached[own] > reached[rival]:
        return f"Use the exported model: it beats {baseline} on dev ({name} {figures})."
    return f"Use {baseline} instead: it is at least as good on dev ({name} {figures}) and simpler."
