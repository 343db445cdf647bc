"""From the planned phases to the exported model."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from cramlm.config.phase import PhaseConfig, linear_teachers
from cramlm.config.run import RunConfig
from cramlm.config.terms import LINEAR_TEACHER, ImportantTokens, Origin
from cramlm.data.labels import RULES
from cramlm.data.task import task_fingerprint
from cramlm.evaluation.evaluate import example_logits, sequences_of
from cramlm.evaluation.kinds import KINDS
from cramlm.evaluation.logit_adjustment import TAUS, choose_adjustment
from cramlm.model.device import Precision
from cramlm.model.huggingface.config import more
from cramlm.model.huggingface.pretrained import Pretrained
from cramlm.model.huggingface.weights import load_pretrained_weights
from cramlm.model.model import Model, ModelSpec, build_model, initialise_all
from cramlm.model.prompts import Prompt, read_passages
from cramlm.model.tokenizer import Tokenizer
from cramlm.pipeline.context import Chosen, Context, Ended, Plan, Text, fingerprint, write_json
from cramlm.pipeline.stages.linear import DEV_PREDICTIONS
from cramlm.pipeline.stages.ranks import Order, training_together
from cramlm.pipeline.stages.teacher import PASSAGES_FILE, TASK_FILE, ask_model, external_length, piece_length, pieces_file
from cramlm.planning.schedule import Schedule, replan
from cramlm.records import Emit, Event, FloatArray, Task
from cramlm.storage.arrays import array_bytes, read_array, save_array
from cramlm.storage.artifacts import Artifact, hash_json, publish_file, verify
from cramlm.storage.tensors import read_tensors, save_tensors
from cramlm.training.batching import Batches
from cramlm.training.importance import IMPORTANT, UNLABELLED, label_words, score_tokens
from cramlm.training.loop import DevEvaluation, TrainingJob, train_phase
from cramlm.training.masking import SpecialIds
from cramlm.training.pools import TokenPool, with_word_begins

if TYPE_CHECKING:
    from cramlm.model.huggingface.weights import LoadedWeights


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
    run: Context, plan: Plan, planned: Schedule, text: Text, *, teacher: Artifact | None = None, embedding: Artifact | None = None
) -> Trained:
    """Run the phases in order, each from the weights of the one before; a published phase is not run again. Between two phases the
    rest of the budget is planned anew. `teacher`, `embedding`: what the stages of these names published, where a phase learns from the
    one, or the encoder starts from the other.
    """
    training = _Training(run, plan, planned, text, teacher, embedding)
    phases, last = planned.phases, None
    for number in range(len(phases)):
        if last is not None:
            phases = replan(run, planned, tuple(training.ended.values()))
        phase = phases[number]
        before = last if phase.start_from == "previous" else training.ended.get(phase.start_from)  # None for 'start'
        last = training.ended[phase.name] = training.run_phase(number, phase, before)
    assert last is not None, "a config has at least one phase"
    load_weights(training.model, last.artifact.path)
    training.model.rescale_output(run.task.scale)
    has_mlm = any(phase.trains_mlm_head for phase in phases)
    return Trained(training.model, tuple(training.ended.values()), last.phase.row_length, has_mlm, last.artifact.fingerprint)


class _Training:
    """The phases of a run so far. ended: by name and in order. answers: by phase, the soft labels that an earlier phase's model gave."""

    def __init__(
        self, run: Context, plan: Plan, planned: Schedule, text: Text, teacher: Artifact | None, embedding: Artifact | None
    ) -> None:
        self.run, self.plan, self.planned, self.text = run, plan, planned, text
        self.teacher, self.embedding = teacher, embedding
        tokenizer, config = text.tokenizer, run.config
        self.special = SpecialIds(
            tokenizer.pad_id, tokenizer.cls_id, tokenizer.sep_id, tokenizer.mask_id, tokenizer.vocab_size, tokenizer.unk_id
        )
        self.spec = ModelSpec(
            config.encoder, config.head, tokenizer.vocab_size, len(run.task.labels), tokenizer.pad_id, text.prompt, run.task.kind
        )
        self.model = build_model(self.spec, seed=config.seed)
        self.place_embeddings()
        self.sections = {name: config.model_dump(mode="json")[name] for name in ("seed", "encoder", "head", "logit_adjustment")}
        self.sections["dev_metric"] = config.metric
        self.inputs = {"tokenizer": tokenizer.fingerprint, "selection": fingerprint(text.selection), "task": task_fingerprint(run.task)}
        self.ended: dict[str, Ended] = {}
        self.answers: dict[str, Artifact] = {}

    def place_embeddings(self) -> None:
        """Give the token embeddings their start from co-occurrence, where the run has one."""
        if self.embedding is not None:
            self.model.set_word_embeddings(read_array(self.embedding.path / "embedding.npy"))

    def load(self, ended: Ended) -> Model:
        """The model with the weights of a finished phase."""
        load_weights(self.model, ended.artifact.path)
        return self.model

    def begin(self, number: int, before: Ended | None) -> Model:
        """The model with the weights that a phase starts from."""
        if before is not None:
            return self.load(before)
        if number:  # another phase has trained since
            initialise_all(self.model, seed=self.run.config.seed)
            self.place_embeddings()
        if self.run.pretrained is not None:
            taken = load_pretrained_weights(self.model, self.run.pretrained)
            report_loaded_weights(taken, self.run.pretrained, self.planned.phases, self.run.emit, uses_prompt=self.text.prompt is not None)
        return self.model

    def pools(self, phase: PhaseConfig) -> tuple[TokenPool | None, TokenPool | None]:
        """External and task text as the sequences that a phase draws from."""
        vectors = ["[V]"] * self.run.config.head.vectors
        vocabulary = [*self.text.tokenizer.vocabulary, *vectors] if phase.needs_words else ()
        return with_word_begins(phase, self._external(phase), self._labelled(phase), vocabulary, self.special)

    def _labelled(self, phase: PhaseConfig) -> TokenPool | None:
        soft = self._soft_labels(phase, "task", TASK_FILE)
        prompt = self.text.prompt if phase.learns_labels or phase.distil("task") else None
        return task_pool(self.text.tokenizer, self.run.task, soft, prompt, length=phase.text_length) if phase.task else None

    def _external(self, phase: PhaseConfig) -> TokenPool | None:
        tokenizer, selection = self.text.tokenizer, self.text.selection
        if not phase.external or selection is None:
            return None
        prompt, length = self.text.prompt if phase.distil("external") else None, external_length(phase)
        if prompt is not None and phase.name in self.answers:
            whole = self._soft_labels(phase, "external", PASSAGES_FILE)
            return external_pool(tokenizer, selection, prompt=prompt, soft_of_passages=whole, length=length)
        soft = self._soft_labels(phase, "external", pieces_file(piece_length(phase, tokenizer, prompt)))
        return external_pool(tokenizer, selection, soft, prompt, length=length)

    def _soft_labels(self, phase: PhaseConfig, on: Origin, file: str) -> FloatArray | None:
        term = phase.distil(on)
        source = self.teacher if term is None or term.teacher == LINEAR_TEACHER else self.answers.get(phase.name)
        return read_array(source.path / file) if source and term else None

    def run_phase(self, number: int, phase: PhaseConfig, before: Ended | None) -> Ended:
        """Train the phase from what `before` handed on, unless it is published and up to date."""
        name = f"phase-{number + 1}-{phase.name}"
        key = self._key(number, phase, before)
        importance = self._importance(name.removeprefix("phase-"), number, phase, before)
        if importance is not None:
            key["token_importance"] = importance.fingerprint
        work = self.run.folder / ".work" / name
        artifact = self.run.stage(
            name, kind="phase", key=key, write=lambda target: self._train(target, work, key, number, phase, before, importance)
        )
        shutil.rmtree(work, ignore_errors=True)  # its checkpoints: the phase is published
        return Ended(phase, artifact, json.loads((artifact.path / "phase.json").read_bytes()))

    def _key(self, number: int, phase: PhaseConfig, before: Ended | None) -> dict[str, Any]:
        key = {"format": 5, **self.sections, **self.inputs, "precision": self.plan.precision, "threads": self.plan.threads}
        key |= {
            "phase": phase.model_dump(mode="json"),
            "before": before.artifact.fingerprint if before else None,
            **self.run.ranks.settings,
        }
        if self.text.prompt is not None:
            key["prompt"] = asdict(self.text.prompt)
        taught = phase.distil("external")
        if taught is not None and taught.teacher != LINEAR_TEACHER and self.text.selection is not None:
            ended = self.ended[taught.teacher]
            of = {**self.inputs, "model": ended.artifact.fingerprint}
            self.answers[phase.name] = ask_model(
                self.run, self.plan, self.text, phase, model=lambda: self.load(ended), teacher=taught.teacher, key=of
            )
        sources = [self.answers[phase.name]] if phase.name in self.answers else []
        sources += [self.teacher] if self.teacher and linear_teachers(phase) else []
        if sources:
            key["teacher"] = [source.fingerprint for source in sources]
        if self.embedding is not None and before is None:
            key["embedding"] = self.embedding.fingerprint
        if self.run.pretrained is not None and before is None:
            key["init"] = self.run.pretrained.fingerprint
        return key

    def _importance(self, name: str, number: int, phase: PhaseConfig, before: Ended | None) -> Artifact | None:
        scorer = self.ended[phase.masking.scores_of] if phase.needs_scores and phase.masking.scores_of else None
        weights = scorer.artifact if scorer else before.artifact if before else self.text.tokenizer

        def judge() -> Model:
            return self.begin(number, before) if scorer is None else self.load(scorer)

        means = Judge(judge, lambda: self.pools(phase), self.text.tokenizer, self.special, self.plan.precision)
        key = {**self.sections, **self.inputs, "weights": weights.fingerprint, "length": phase.text_length}
        return token_importance(self.run, phase, means, name=name, key=key)

    def _train(
        self,
        target: Path,
        work: Path,
        key: Mapping[str, Any],
        number: int,
        phase: PhaseConfig,
        before: Ended | None,
        importance: Artifact | None,
    ) -> None:
        run, plan, config = self.run, self.plan, self.run.config
        self.begin(number, before)
        if phase.reset_task_head:
            self.model.reset_classifier(config.seed + number)
        drawn = with_importance(self.pools(phase), importance)
        # Of every evaluation so far: a phase that is resumed keeps them. Another key has another folder.
        candidates = work / "dev-predictions" / hash_json(key)
        order = Order(phase, number, self.spec, self.special, config.seed, plan.precision, plan.threads, config.metric, work)
        known = None if before is None else known_score(phase, before)

        def evaluate(model: Model, step: int) -> Mapping[str, float]:
            file = candidates / f"{step:09d}.npy"
            return _evaluate_on_dev(run, plan, model, self.text.tokenizer, max_length=phase.row_length, file=file)

        with training_together(run.ranks, order, *drawn):
            result = train_phase(
                self.model,
                TrainingJob(
                    Batches(phase, *drawn, seed=config.seed, phase_index=number, special=self.special),
                    work,
                    fingerprint=key,
                    precision=plan.precision,
                    dev=DevEvaluation(evaluate, config.metric, initial=known),
                    emit=run.emit,
                    stop=run.stop,
                    ranks=run.ranks,
                ),
            )
        save_weights(self.model, target)
        if phase.learns_labels:
            found = [read_array(file) for file in sorted(candidates.glob("*.npy"))]
            earlier = [] if before is None or known is None else [read_array(before.artifact.path / DEV_PREDICTIONS)]
            save_array(target / DEV_PREDICTIONS, np.unique(np.concatenate([*earlier, *found]), axis=0))
        write_json(target / "phase.json", {"name": phase.name, **asdict(result)})


def known_score(phase: PhaseConfig, before: Ended) -> float | None:
    """The dev score of what `before` handed on, where `phase` goes on learning the same labels with that head and in such rows."""
    earlier, report = before.phase, before.report
    comparable = phase.learns_labels and earlier.learns_labels and not phase.reset_task_head and phase.row_length == earlier.row_length
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


def adjusts_logits(config: RunConfig) -> bool:
    """Return True if dev chooses a logit adjustment."""
    return config.logit_adjustment == "dev" and KINDS[config.task.kind].has_prior


def _evaluate_on_dev(run: Context, plan: Plan, model: Model, tokenizer: Tokenizer, *, max_length: int, file: Path) -> Mapping[str, float]:
    """Scores of the weights as they would be handed on; the dev predictions of all candidates go to `file`."""
    task = run.task
    logits = example_logits(model, tokenizer, task.dev, max_length=max_length, precision=plan.precision, scale=task.scale)
    chosen = choose_adjustment(logits, task, metric=run.config.metric, taus=TAUS if adjusts_logits(run.config) else (0.0,))
    publish_file(file, array_bytes(chosen.predictions))  # as durable as the checkpoints beside it
    return chosen.metrics


def task_pool(tokenizer: Tokenizer, task: Task, soft: FloatArray | None, prompt: Prompt | None, *, length: int) -> TokenPool:
    """The training texts as sequences of at most `length` tokens, in every pattern of a prompt if one is given. soft: (texts, labels)."""
    tokens = sequences_of(tokenizer, task.train, max_length=length, prompt=prompt)
    labels, targets = RULES[task.kind].targets([str(example.label) for example in task.train], task.labels, task.scale)
    taught, asked = (None if each is None else each[tokens.source] for each in (soft, targets if targets.shape[1] else None))
    return TokenPool(tokens.ids, tokens.offsets, labels[tokens.source], soft_labels=taught, targets=asked)


def external_pool(
    tokenizer: Tokenizer,
    selection: Chosen,
    soft: FloatArray | None = None,
    prompt: Prompt | None = None,
    *,
    soft_of_passages: FloatArray | None = None,
    length: int,
) -> TokenPool:
    """The selected passages as sequences of at most `length` tokens, each with its passage's weight, in the patterns of a prompt if there
    is one; a long passage gives several.

    soft: soft labels of every sequence, (sequences, labels). soft_of_passages: in place of them one for each passage, (passages, labels).
    """
    if prompt is None:
        tokens = tokenizer.cut(selection.ids, max_length=length, cut="split")
    else:
        tokens = read_passages(prompt, tokenizer, selection.ids, max_length=length)
    soft = soft if soft_of_passages is None else soft_of_passages[tokens.source]
    assert soft is None or len(soft) == len(tokens), "soft labels belong to the same pieces"
    weights = selection.weights()
    weights = None if weights is None else weights[tokens.source]
    return TokenPool(tokens.ids, tokens.offsets, np.full(len(tokens), -1, dtype=np.int64), weights, soft)


_MOST_WORDS = 200

Pools = tuple[TokenPool | None, TokenPool | None]


@dataclass(frozen=True, slots=True)
class Judge:
    """The model whose weights say which tokens are important, and the texts. model, pools: made when they are needed."""

    model: Callable[[], Model]
    pools: Callable[[], Pools]
    tokenizer: Tokenizer
    special: SpecialIds
    precision: Precision


def token_importance(run: Context, phase: PhaseConfig, judge: Judge, *, name: str, key: Mapping[str, Any]) -> Artifact | None:
    """Token labels or scores that the phase needs, published; None where it needs none.

    name: of the phase's folder without 'phase-'. key: what the pools and the weights come from.
    """
    if phase.needs_token_labels:
        (term,) = phase.terms_of(ImportantTokens)
        kind, write = "marks", lambda target: _write_marks(target, term, judge, run.emit)
        key = {**key, "marks": term.model_dump(mode="json", include={"rule", "delta", "share"})}
    elif phase.needs_scores:
        kind, write = "scores", lambda target: _write_scores(target, judge, run.emit)
    else:
        return None
    return run.stage(f"{kind}-{name}", kind=kind, key={"format": 1, **key}, write=write)


def with_importance(pools: Pools, told: Artifact | None) -> Pools:
    """The pools with what `token_importance` published."""
    external, task = pools
    if told is None:
        return pools
    if told.path.name.startswith("marks-"):
        assert task is not None
        return external, replace(task, token_labels=read_array(told.path / "marks.npy"))
    scored = ("external", external), ("task", task)
    external, task = (None if pool is None else replace(pool, scores=read_array(told.path / f"{origin}.npy")) for origin, pool in scored)
    return external, task


def _write_marks(target: Path, term: ImportantTokens, judge: Judge, emit: Emit) -> None:
    emit(Event("start", "marks"))
    _, task = judge.pools()
    assert task is not None
    assert task.begins is not None
    marks = label_words(judge.model(), task, term, judge.special, precision=judge.precision)
    save_array(target / "marks.npy", marks)
    first = np.flatnonzero(task.begins)
    words = zip(np.split(task.ids, first[1:]), marks[first].tolist(), strict=True)
    marked = Counter(judge.tokenizer.decode(ids.tolist()) for ids, mark in words if mark == IMPORTANT)
    asked, texts = marks[first], np.split(marks, task.offsets[1:-1])
    used = sum(bool((text != UNLABELLED).any()) for text in texts)
    share = float((asked == IMPORTANT).sum() / max(1, (asked != UNLABELLED).sum()))
    write_json(
        target / "words.json", {"texts": len(task), "texts_used": used, "share": share, "marked": dict(marked.most_common(_MOST_WORDS))}
    )
    most = ", ".join(word for word, _ in marked.most_common(5))
    emit(
        Event("done", "marks", f"{used:,} of {len(task):,} texts labelled correctly; {share:.0%} of their words marked, most often {most}")
    )


def _write_scores(target: Path, judge: Judge, emit: Emit) -> None:
    emit(Event("start", "scores"))
    found, tokens, model = 0, 0, judge.model()
    for origin, pool in zip(("external", "task"), judge.pools(), strict=True):
        if pool is not None:
            scores = score_tokens(model, pool, precision=judge.precision)
            save_array(target / f"{origin}.npy", scores)
            found, tokens = found + int((scores > 0).sum()), tokens + len(scores)
    emit(Event("done", "scores", f"{found / max(1, tokens):.0%} of {tokens:,} tokens look like those that matter"))


def report_loaded_weights(
    taken: LoadedWeights, pretrained: Pretrained, phases: Sequence[PhaseConfig], emit: Emit, *, uses_prompt: bool = False
) -> None:
    """Say which weights the run begins with, and warn where a phase needs a vocabulary head that the folder lacks."""
    head = "with its vocabulary head" if taken.mlm_head else "no vocabulary head"
    left = f"; left out: {taken.unused[0]}{more(taken.unused)}" if taken.unused else ""
    emit(Event("note", "init", f"{pretrained.folder}: {taken.tensors} tensors, {head}{left}"))
    if not taken.mlm_head and (uses_prompt or any(phase.text_terms for phase in phases)):
        begins = "a prompt" if uses_prompt else "masked language modeling"
        emit(Event("warning", "init", f"{pretrained.folder} holds no vocabulary head, so {begins} begins with a drawn one"))


def describe_start(pretrained: Pretrained | None) -> dict[str, Any] | None:
    """For provenance: the folder's name and the hashes of its files."""
    if pretrained is None:
        return None
    return {"name": str(pretrained.folder), "fingerprint": pretrained.fingerprint, "sha256": dict(pretrained.hashes)}
