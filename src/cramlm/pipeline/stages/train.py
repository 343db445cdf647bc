"""Train the phases: token pools, token importance, the weights to start from, and the evaluation on dev during training.

Several ranks train together: rank 0 runs the stages; the others wait in `follow` and join each phase. Rank 0 sends settings as JSON and
token pools as tensors, so that only rank 0 needs files, and machines need not share a disk.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from pydantic import TypeAdapter

from cramlm.config.phase import PhaseConfig, linear_teachers
from cramlm.config.terms import LINEAR_TEACHER, ImportantTokens, Origin
from cramlm.data.labels import RULES
from cramlm.data.task import task_fingerprint
from cramlm.errors import more
from cramlm.evaluation.kinds import distinct_rows
from cramlm.evaluation.logit_adjustment import TAUS, adjusts_logits, choose_adjustment
from cramlm.evaluation.prediction import example_logits, sequences_of
from cramlm.linear.teacher import TRAINING_TEXTS_FILE
from cramlm.model.huggingface.pretrained import Pretrained
from cramlm.model.huggingface.weights import LoadedWeights, load_pretrained_weights
from cramlm.model.model import Model, ModelSpec, Precision, build_model, initialise_all, resolve_device
from cramlm.model.prompts import Prompt, read_passages
from cramlm.model.tokenizer import Tokenizer, Tokens
from cramlm.pipeline.context import EncodedTexts, FinishedPhase, RunContext, RunPlan, SelectedPassages, Stage, fingerprint
from cramlm.pipeline.stages.linear import DEV_PREDICTIONS
from cramlm.pipeline.stages.teacher import PASSAGES_FILE, external_length, piece_length, pieces_file, read_pieces, teach_by_encoder
from cramlm.pipeline.stages.text import marker_tokens
from cramlm.planning.plan import Schedule, replan
from cramlm.records import Event, Example, FloatArray, Task
from cramlm.storage.arrays import array_bytes, read_array, save_array
from cramlm.storage.artifacts import Artifact, hash_json, publish_file, verify, write_json
from cramlm.storage.tensors import read_tensors, save_tensors
from cramlm.training.batching import Batches
from cramlm.training.loop import DevEvaluation, TrainingJob, train_phase
from cramlm.training.masking import SpecialIds
from cramlm.training.ranks import Ranks, Stop
from cramlm.training.sequences import TokenPool, with_word_begins
from cramlm.training.terms.important_tokens import IMPORTANT, UNLABELLED, label_words, score_tokens

_MOST_WORDS: Final = 200  # in words.json
_LABELS, _SCORES = "token-labels", "token-scores"  # kinds of artifacts; their folders end with the phase, like token-labels-2-scorer

Pools = tuple[TokenPool | None, TokenPool | None]


@dataclass(frozen=True, slots=True)
class Trained:
    """The trained model and its phases. fingerprint: of everything that determines the weights."""

    model: Model
    tokenizer: Tokenizer
    precision: Precision
    finished: tuple[FinishedPhase, ...]
    max_length: int
    has_mlm: bool
    fingerprint: str

    def logits(self, examples: Sequence[Example]) -> FloatArray:
        """Return the logits of the model for examples, float32 (n, labels)."""
        return example_logits(self.model, self.tokenizer, examples, max_length=self.max_length, precision=self.precision)

    @property
    def phases(self) -> tuple[PhaseConfig, ...]:
        """The final settings of each phase."""
        return tuple(each.phase for each in self.finished)

    @property
    def reports(self) -> tuple[Mapping[str, Any], ...]:
        """phase.json of each phase."""
        return tuple(each.report for each in self.finished)


class Training:
    """Trains the phases of a run.

    teacher: soft labels of the linear models, if a phase uses them. embedding: token embeddings to start from; None = random ones.
    finished: phases by name, in order. encoder_labels: soft labels of an earlier phase's model, by phase.
    """

    def __init__(
        self, run: RunContext, plan: RunPlan, planned: Schedule, text: EncodedTexts, *, teacher: Artifact | None, embedding: Artifact | None
    ) -> None:
        self.run, self.plan, self.planned, self.text = run, plan, planned, text
        self.teacher, self.embedding = teacher, embedding
        tokenizer, config = text.tokenizer, run.config
        self.special = SpecialIds(
            tokenizer.pad_id, tokenizer.cls_id, tokenizer.sep_id, tokenizer.mask_id, tokenizer.vocab_size, tokenizer.unk_id
        )
        markers = marker_tokens(run, tokenizer) if config.encoder.layer_init == "markers" else ()
        self.spec = ModelSpec(
            config.encoder, config.head, tokenizer.vocab_size, len(run.task.labels), tokenizer.pad_id, text.prompt, run.task.kind, markers
        )
        self.model = build_model(self.spec, seed=config.seed).to(resolve_device(config.device))
        self.set_embeddings()
        self.settings = config.model_dump(mode="json", include={"seed", "encoder", "head", "logit_adjustment"})
        self.settings["dev_metric"] = config.metric
        self.inputs = {"tokenizer": tokenizer.fingerprint, "selection": fingerprint(text.selection), "task": task_fingerprint(run.task)}
        self.finished: dict[str, FinishedPhase] = {}
        self.encoder_labels: dict[str, Artifact] = {}

    def train(self) -> Trained:
        """Run the phases in order, each from the weights of the previous one, or of `start_from`; a phase that is up to date is kept.

        After each phase the remaining budget is planned again.
        """
        for number in range(len(self.planned.phases)):
            phases = replan(self.run, self.planned, tuple(self.finished.values())) if number else self.planned.phases
            self.run_phase(phases[number])
        finished = tuple(self.finished.values())
        last = finished[-1]
        self.load(last).rescale_output(self.run.task.scale)
        has_mlm, length = any(phase.trains_mlm_head for phase in self.planned.phases), last.phase.row_length
        return Trained(self.model, self.text.tokenizer, self.plan.precision, finished, length, has_mlm, last.artifact.fingerprint)

    def set_embeddings(self) -> None:
        """Set the token embeddings, unless they start at random."""
        if self.embedding is not None:
            self.model.set_word_embeddings(read_array(self.embedding.path / "embedding.npy"))

    def load(self, finished: FinishedPhase) -> Model:
        """Return the model with the weights of a finished phase, after checking every byte.

        Raises:
            ArtifactError: if the folder is damaged.
        """
        verify(finished.artifact.path)
        self.model.load_state_dict(read_tensors(finished.artifact.path / "model.safetensors"))
        return self.model

    def begin(self, start: FinishedPhase | None) -> Model:
        """Return the model with the weights that a phase starts from."""
        if start is not None:
            return self.load(start)
        if self.finished:  # an earlier phase changed them
            initialise_all(self.model, seed=self.run.config.seed)
            self.set_embeddings()
        if self.run.pretrained is not None:
            self._report(load_pretrained_weights(self.model, self.run.pretrained), self.run.pretrained)
        return self.model

    def _report(self, taken: LoadedWeights, pretrained: Pretrained) -> None:
        """Emit which weights were loaded, and a warning if a phase needs a vocabulary head that the folder lacks."""
        head = "with its vocabulary head" if taken.mlm_head else "no vocabulary head"
        left = f"; left out: {taken.unused[0]}{more(taken.unused)}" if taken.unused else ""
        self.run.emit(Event("note", "init", f"{pretrained.folder}: {taken.tensors} tensors, {head}{left}"))
        uses_prompt = self.text.prompt is not None
        if not taken.mlm_head and (uses_prompt or any(phase.text_terms for phase in self.planned.phases)):
            begins = "a prompt" if uses_prompt else "masked language modeling"
            self.run.emit(Event("warning", "init", f"{pretrained.folder} holds no vocabulary head, so {begins} starts with a random one"))

    def pools(self, phase: PhaseConfig) -> Pools:
        """External and task sequences of a phase."""
        vectors = ["[V]"] * self.run.config.head.vectors
        vocabulary = [*self.text.tokenizer.vocabulary, *vectors] if phase.needs_words else ()
        return with_word_begins(phase, self._external(phase), self._task(phase), vocabulary, self.special)

    def _task(self, phase: PhaseConfig) -> TokenPool | None:
        soft = self._soft_labels(phase, "task", TRAINING_TEXTS_FILE)
        prompt = self.text.prompt if phase.learns_labels or phase.distil("task") else None
        return task_pool(self.text.tokenizer, self.run.task, soft, prompt, length=phase.text_length) if phase.task else None

    def _external(self, phase: PhaseConfig) -> TokenPool | None:
        tokenizer, selection = self.text.tokenizer, self.text.selection
        if not phase.external or selection is None:
            return None
        prompt, length = self.text.prompt if phase.distil("external") else None, external_length(phase)
        by_encoder = phase.name in self.encoder_labels
        of_passages = prompt is not None and by_encoder
        file = PASSAGES_FILE if of_passages else pieces_file(piece_length(phase, tokenizer, prompt))
        soft = self._soft_labels(phase, "external", file)
        # The encoder of an earlier phase labels the pieces as they are; the linear teacher may have put markers into them.
        changed = None if soft is None or self.teacher is None or by_encoder else read_pieces(self.teacher.path, length)
        if changed is not None:
            return external_pool(changed, selection, soft)
        if prompt is None:
            tokens = tokenizer.cut(selection.ids, max_length=length, cut="split")
        else:
            tokens = read_passages(prompt, tokenizer, selection.ids, max_length=length)
        return external_pool(tokens, selection, soft[tokens.source] if soft is not None and of_passages else soft)

    def _soft_labels(self, phase: PhaseConfig, on: Origin, file: str) -> FloatArray | None:
        term = phase.distil(on)
        source = self.teacher if term is None or term.teacher == LINEAR_TEACHER else self.encoder_labels.get(phase.name)
        return read_array(source.path / file) if source and term else None

    def run_phase(self, phase: PhaseConfig) -> None:
        """Train the next phase, unless its folder is up to date."""
        place = f"{len(self.finished) + 1}-{phase.name}"
        earlier = {**self.finished, "previous": list(self.finished.values())[-1]} if self.finished else {}
        start = earlier.get(phase.start_from)  # None for 'start'
        settings, inputs = self._key(phase, start)
        importance = self._importance(place, phase, start)
        if importance is not None:
            inputs["token_importance"] = importance.fingerprint
        work = self.run.folder / ".work" / f"phase-{place}"

        def write(target: Path) -> None:
            self._train(target, work, stage.key, phase, start, importance)

        stage = Stage(f"phase-{place}", 6, settings, inputs, write, kind="phase")
        artifact = self.run.build(stage)
        shutil.rmtree(work, ignore_errors=True)  # checkpoints of the published phase
        self.finished[phase.name] = FinishedPhase(phase, artifact, json.loads((artifact.path / "phase.json").read_bytes()))

    def _key(self, phase: PhaseConfig, start: FinishedPhase | None) -> tuple[dict[str, Any], dict[str, Any]]:
        """Settings and inputs of a phase; builds the soft labels of an earlier phase's model, if the phase uses them."""
        settings = {**self.settings, "precision": self.plan.precision, "threads": self.plan.threads, **self.run.ranks.settings}
        settings["phase"] = phase.model_dump(mode="json")
        inputs: dict[str, Any] = {**self.inputs, "start": start.artifact.fingerprint if start else None}
        if self.text.prompt is not None:
            inputs["prompt"] = asdict(self.text.prompt)
        distil = phase.distil("external")
        if distil is not None and distil.teacher != LINEAR_TEACHER and self.text.selection is not None:
            teacher = self.finished[distil.teacher]
            labels = teach_by_encoder(self.run, self.plan, self.text, phase, teacher, load=self.load, inputs=self.inputs)
            self.encoder_labels[phase.name] = labels
        teachers = [self.encoder_labels[phase.name]] if phase.name in self.encoder_labels else []
        teachers += [self.teacher] if self.teacher and linear_teachers(phase) else []
        if teachers:
            inputs["teacher"] = [teacher.fingerprint for teacher in teachers]
        if self.embedding is not None and start is None:
            inputs["embedding"] = self.embedding.fingerprint
        if self.run.pretrained is not None and start is None:
            inputs["init"] = self.run.pretrained.fingerprint
        return settings, inputs

    def _importance(self, place: str, phase: PhaseConfig, start: FinishedPhase | None) -> Artifact | None:
        """Publish the token labels or scores of a phase's pools (training/terms/important_tokens.py); None if the phase needs none.

        Files: labels.npy and words.json (counts of important words), or external.npy and task.npy (scores). place: number and name of
        the phase.
        """
        settings: dict[str, Any] = {**self.settings, "length": phase.text_length}
        if phase.needs_token_labels:
            (term,) = phase.terms_of(ImportantTokens)
            settings["term"] = term.model_dump(mode="json", include={"rule", "delta", "share"})
            kind, weights = _LABELS, start.artifact.fingerprint if start else self.text.tokenizer.fingerprint
        elif phase.needs_scores:
            assert phase.masking.scores_of is not None
            scorer = self.finished[phase.masking.scores_of]
            kind, weights = _SCORES, scorer.artifact.fingerprint
        else:
            return None

        def write(target: Path) -> None:
            self.run.emit(Event("start", kind))
            pools = self.pools(phase)
            if kind == _LABELS:
                message = self._write_token_labels(target, term, pools, self.begin(start))
            else:
                message = self._write_token_scores(target, pools, self.load(scorer))
            self.run.emit(Event("done", kind, message))

        return self.run.build(Stage(f"{kind}-{place}", 2, settings, {**self.inputs, "weights": weights}, write, kind=kind))

    def _write_token_labels(self, target: Path, term: ImportantTokens, pools: Pools, model: Model) -> str:
        """Write labels.npy and words.json; return a summary."""
        _, task = pools
        assert task is not None
        assert task.begins is not None
        labels = label_words(model, task, term, self.special, precision=self.plan.precision)
        save_array(target / "labels.npy", labels)
        first = np.flatnonzero(task.begins)
        word_labels, texts = labels[first], np.split(labels, task.offsets[1:-1])
        words = zip(np.split(task.ids, first[1:]), word_labels.tolist(), strict=True)
        important = Counter(self.text.tokenizer.decode(ids.tolist()) for ids, label in words if label == IMPORTANT)
        used = sum(bool((text != UNLABELLED).any()) for text in texts)
        share = float((word_labels == IMPORTANT).sum() / max(1, (word_labels != UNLABELLED).sum()))
        counts = {"texts": len(task), "texts_used": used, "share": share, "important": dict(important.most_common(_MOST_WORDS))}
        write_json(target / "words.json", counts)
        frequent = ", ".join(word for word, _ in important.most_common(5))
        return f"{used:,} of {len(task):,} texts classified correctly; {share:.0%} of their words are important, most often {frequent}"

    def _write_token_scores(self, target: Path, pools: Pools, model: Model) -> str:
        """Write external.npy and task.npy; return a summary."""
        important, total = 0, 0
        for name, pool in zip(("external", "task"), pools, strict=True):
            if pool is not None:
                scores = score_tokens(model, pool, precision=self.plan.precision)
                save_array(target / f"{name}.npy", scores)
                important, total = important + int((scores > 0).sum()), total + len(scores)
        return f"{important / max(1, total):.0%} of {total:,} tokens score as important"

    def _train(
        self,
        target: Path,
        work: Path,
        key: Mapping[str, Any],
        phase: PhaseConfig,
        start: FinishedPhase | None,
        importance: Artifact | None,
    ) -> None:
        run, plan, config, number = self.run, self.plan, self.run.config, len(self.finished)
        self.begin(start)
        if phase.reset_task_head:
            self.model.reset_classifier(config.seed + number)
        pools = with_importance(self.pools(phase), importance)
        # Of all evaluations: a resumed phase keeps them. The hash separates the phases of different keys.
        candidates = work / "dev-predictions" / hash_json(key)
        job = PhaseJob(
            phase, number, self.spec, self.special, config.seed, plan.precision, plan.threads, config.metric, work, config.compile_layers
        )
        initial = None if start is None else inherited_score(phase, start)

        def evaluate(model: Model, step: int) -> Mapping[str, float]:
            """Return the dev scores with the best logit adjustment; write the dev predictions of all candidates."""
            task, tokenizer = run.task, self.text.tokenizer
            logits = example_logits(model, tokenizer, task.dev, max_length=phase.row_length, precision=plan.precision, scale=task.scale)
            chosen = choose_adjustment(logits, task, metric=config.metric, taus=TAUS if adjusts_logits(config) else (0.0,))
            publish_file(candidates / f"{step:09d}.npy", array_bytes(chosen.predictions))  # durable like the checkpoints
            return chosen.metrics

        with training_together(run.ranks, job, *pools):
            dev = DevEvaluation(evaluate, config.metric, initial=initial)
            training = job.training(pools, dev, fingerprint=key, stop=run.stop, ranks=run.ranks)
            result = train_phase(self.model, replace(training, emit=run.emit))
        save_tensors(target / "model.safetensors", {name: parameter.float() for name, parameter in self.model.named_parameters()})
        if phase.learns_labels:
            evaluated = [read_array(file) for file in sorted(candidates.glob("*.npy"))]
            inherited = [] if start is None or initial is None else [read_array(start.artifact.path / DEV_PREDICTIONS)]
            save_array(target / DEV_PREDICTIONS, distinct_rows(np.concatenate([*inherited, *evaluated])))
        write_json(target / "phase.json", {"name": phase.name, **asdict(result)})


def inherited_score(phase: PhaseConfig, start: FinishedPhase) -> float | None:
    """Return the dev score of the weights of `start`, if `phase` continues with the same labels, head and row length; else None."""
    earlier, report = start.phase, start.report
    comparable = phase.learns_labels and earlier.learns_labels and not phase.reset_task_head and phase.row_length == earlier.row_length
    score_is_of_weights = earlier.keep == "best" or report["best_step"] == report["steps"]
    score: float | None = report["best_score"] if comparable and score_is_of_weights else None
    return score


def task_pool(tokenizer: Tokenizer, task: Task, soft: FloatArray | None, prompt: Prompt | None, *, length: int) -> TokenPool:
    """Training texts as sequences of at most `length` tokens, one per pattern of a prompt. soft: soft labels (texts, labels)."""
    tokens = sequences_of(tokenizer, task.train, max_length=length, prompt=prompt)
    labels, targets = RULES[task.kind].targets([str(example.label) for example in task.train], task.labels, task.scale)
    soft_labels = None if soft is None else soft[tokens.source]
    used_targets = targets[tokens.source] if targets.shape[1] else None
    return TokenPool(tokens.ids, tokens.offsets, labels[tokens.source], soft_labels=soft_labels, targets=used_targets)


def external_pool(tokens: Tokens, selection: SelectedPassages, soft: FloatArray | None = None) -> TokenPool:
    """Sequences of selected passages, each with the weight of its passage. soft: soft labels (sequences, labels)."""
    assert soft is None or len(soft) == len(tokens), "one soft label per sequence"
    weights = selection.weights()
    weights = None if weights is None else weights[tokens.source]
    return TokenPool(tokens.ids, tokens.offsets, np.full(len(tokens), -1, dtype=np.int64), weights, soft)


def with_importance(pools: Pools, importance: Artifact | None) -> Pools:
    """Return the pools with the token labels or scores of an artifact of token importance."""
    external, task = pools
    if importance is None:
        return pools
    if importance.kind == _LABELS:
        assert task is not None
        return external, replace(task, token_labels=read_array(importance.path / "labels.npy"))
    named = ("external", external), ("task", task)
    external, task = (None if pool is None else replace(pool, scores=read_array(importance.path / f"{name}.npy")) for name, pool in named)
    return external, task


@dataclass(frozen=True, slots=True)
class PhaseJob:
    """A phase to train. number: index of the phase. work: folder of rank 0's checkpoints."""

    phase: PhaseConfig
    number: int
    model: ModelSpec
    special: SpecialIds
    seed: int
    precision: Precision
    threads: int
    metric: str
    work: Path
    compile_layers: bool | None

    def training(self, pools: Pools, dev: DevEvaluation, *, fingerprint: Mapping[str, Any], stop: Stop, ranks: Ranks) -> TrainingJob:
        """Return the job of one rank."""
        batches = Batches(self.phase, *pools, seed=self.seed, phase_index=self.number, special=self.special)
        return TrainingJob(batches, self.work, fingerprint, self.precision, dev, stop=stop, ranks=ranks, compile_layers=self.compile_layers)


_JOB = TypeAdapter(PhaseJob)


@contextmanager
def training_together(ranks: Ranks, job: PhaseJob, external: TokenPool | None, task: TokenPool | None) -> Iterator[None]:
    """On rank 0, around `train_phase`: start the same phase on the other ranks."""
    ranks.on_leader(lambda: _JOB.dump_python(job, mode="json"))
    for pool in (external, task):
        arrays = {} if pool is None else {name: getattr(pool, name) for name in TokenPool.__dataclass_fields__}
        writable = {name: np.require(array, requirements=["C", "W"]) for name, array in arrays.items() if array is not None}
        ranks.broadcast({name: torch.from_numpy(array) for name, array in writable.items()})
    yield
    ranks.lead()


def follow(ranks: Ranks, *, device: torch.device, stop: Stop) -> dict[str, Any]:
    """Join the phases that rank 0 trains until it sends its result, on a device of this machine, and return that; use no file.

    Raises:
        RankLost: if rank 0 is gone. Stopped, DivergedError: as `train_phase`, on all ranks at once.
    """
    while "result" not in (message := ranks.on_leader(_only_on_leader)):
        job = _JOB.validate_python(message)
        external, task = _pool(ranks), _pool(ranks)
        torch.set_num_threads(job.threads)
        dev = DevEvaluation(_only_on_leader, job.metric)
        model = build_model(job.model, seed=job.seed).to(device)
        train_phase(model, job.training((external, task), dev, fingerprint={}, stop=stop, ranks=ranks))
    result: dict[str, Any] = message["result"]
    return result


def _pool(ranks: Ranks) -> TokenPool | None:
    arrays = {name: tensor.numpy() for name, tensor in ranks.broadcast({}).items()}
    return TokenPool(**arrays) if arrays else None


def _only_on_leader(model: Model | None = None, step: int = 0) -> dict[str, Any]:
    raise AssertionError("only rank 0 does this")
