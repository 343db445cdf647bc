"""Soft labels for distillation: of the linear models together, or of the encoder of an earlier phase."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeAlias, assert_never

import numpy as np

from cramlm.config.phase import PhaseConfig, linear_teachers
from cramlm.data.task import task_fingerprint
from cramlm.evaluation.prediction import outputs_of, predict_logits, sequences_of_texts
from cramlm.linear.model import LinearModel
from cramlm.linear.teacher import TRAINING_TEXTS_FILE, Teacher, align_distribution, label_counts, out_of_fold_labels
from cramlm.model.model import Model
from cramlm.model.prompts import Prompt, passage_length
from cramlm.model.tokenizer import Tokenizer, Tokens
from cramlm.pipeline.context import SOFT_LABELS, EncodedTexts, FinishedPhase, RunContext, RunPlan, Stage, fingerprint
from cramlm.pipeline.stages.linear import model_fingerprint, read_held_out
from cramlm.pipeline.stages.text import marker_inserter
from cramlm.records import Event, Example, FloatArray, IntArray, TaskKind
from cramlm.storage.arrays import read_array, save_array
from cramlm.storage.artifacts import Artifact
from cramlm.storage.stages import shared_write
from cramlm.text.markers import MarkerInserter

_VERSION: Final = 12
TEMPERATURE: Final = 2.0
"""Divisor of an encoder's logits (Schick and Schütze 2021)."""
PASSAGES_FILE: Final = "passages.npy"
"""Soft labels of whole passages, by a model with a prompt."""
Load: TypeAlias = Callable[[FinishedPhase], Model]


def external_length(phase: PhaseConfig) -> int:
    """Return the tokens of the longest sequence of external text."""
    return min(phase.external_length or phase.text_length, phase.text_length)


def piece_length(phase: PhaseConfig, tokenizer: Tokenizer, prompt: Prompt | None) -> int:
    """Tokens, with [CLS] and [SEP], of the longest piece that `phase` cuts a passage into."""
    length = external_length(phase)
    return length if prompt is None else passage_length(prompt, tokenizer, length) + 2


def pieces_file(length: int) -> str:
    """Return the soft labels of passages in pieces of at most `length` tokens."""
    return f"passages-{length}.npy"


def teach_by_linear_models(run: RunContext, text: EncodedTexts, models: Mapping[str, Artifact], phases: Sequence[PhaseConfig]) -> Artifact:
    """Publish the soft labels of the linear models, float32 (n, labels): passages-LENGTH.npy of the pieces of the passages in order, for
    each piece length; task.npy of the training texts, predicted out of fold.

    A piece gets the mean of its own soft label and that of its passage, weighted by `teacher.passage_share`. A piece alone has few
    of the words that the linear model has weights for; but not every piece of a passage is about its label. With `teacher.mark_passages`
    the pieces get markers, with `teacher.pair_passages` they become pairs; their tokens are in pieces-LENGTH-*.npy, and each has its own
    label alone.
    """
    taught = [phase for phase in phases if any(term.on == "external" for term in linear_teachers(phase))]
    lengths = {piece_length(phase, text.tokenizer, text.prompt) for phase in taught}
    files = {pieces_file(length): length for length in sorted(lengths)}
    config, selection, tokenizer, seed = run.config.teacher, text.selection, text.tokenizer, run.config.seed
    inserter = marker_inserter(run) if config.mark_passages and files else None
    changes_pieces = inserter is not None or config.pair_passages
    inputs: dict[str, Any] = {
        "models": {name: model_fingerprint(model) for name, model in models.items()},
        "selection": fingerprint(selection),
        "tokenizer": tokenizer.fingerprint,
        "task": {split: content for split, content in task_fingerprint(run.task).items() if split != "test"},
    }
    # Without the seed, so that runs with other seeds share the soft labels of passages unless these are changed at random.
    settings: dict[str, Any] = {"files": sorted(files), "teacher": config.model_dump(mode="json"), "metric": run.config.metric}
    settings |= {"seed_of_pieces": seed} if changes_pieces else {}

    def write_passages(target: Path) -> None:
        assert selection is not None
        assert selection.spans is not None, "the stage `tokens` writes spans for a linear teacher"
        loaded = {name: LinearModel.load(model.path) for name, model in models.items()}
        teacher = Teacher.of(loaded, run.task, metric=run.config.metric, held_out=read_held_out(models))
        predict = partial(teacher.soft_labels, threads=run.threads, emit=run.emit)
        whole = None if config.passage_share == 0 or changes_pieces else predict(selection.texts())
        messages: list[str] = []
        for name, length in files.items():
            tokens, pieces = tokenizer.cut_with_texts(selection.texts(), selection.ids, selection.spans, max_length=length)
            if changes_pieces:
                pieces, changed = _change(pieces, inserter, tokenizer, length=length, seed=seed)
                _save_pieces(target, length, changed, tokens.source)
            labels = predict(pieces)
            if whole is not None:
                labels += np.float32(config.passage_share) * (whole[tokens.source] - labels)
            if config.align_distribution:
                labels = align_distribution(labels, label_counts(run.task))
            save_array(target / name, labels)
            messages.append(_message(run.task.kind, "pieces of passages", labels))
        run.emit(Event("note", "teacher", f"soft labels of {'; '.join(messages)}", data={"weights": teacher.combination.weights}))

    def write(target: Path) -> None:
        run.emit(Event("start", "teacher"))
        if files and selection is not None:
            key = {"format": _VERSION, **settings, **inputs}
            shared_write("teacher", kind=SOFT_LABELS, key=key, write=write_passages, emit=run.emit)(target)
        regression = LinearModel.load(models["static" if "static" in models else "tfidf"].path)
        held_out = out_of_fold_labels(regression, run.task, seed=seed, threads=run.threads, emit=run.emit)
        save_array(target / TRAINING_TEXTS_FILE, held_out)
        predicted = held_out[np.isfinite(held_out).all(axis=1)]
        run.emit(Event("done", "teacher", f"soft labels of {_message(run.task.kind, 'training texts out of fold', predicted)}"))

    return run.build(Stage("teacher", _VERSION, {**settings, "seed": seed}, inputs, write))


def _change(
    pieces: Sequence[str], inserter: MarkerInserter | None, tokenizer: Tokenizer, *, length: int, seed: int
) -> tuple[list[str], Tokens]:
    """Return the pieces with markers, or without an inserter as pairs: texts for linear models, and tokens."""
    if inserter is not None:
        marked = inserter.insert(pieces, seed=seed)
        return marked, tokenizer.cut(tokenizer.encode(marked), max_length=length, cut="truncate")
    pairs = _paired(pieces, seed=seed)
    firsts, seconds = [pair.text for pair in pairs], [pair.text_pair for pair in pairs]
    return [pair.divided_text for pair in pairs], tokenizer.sequences(firsts, seconds, max_length=length, cut="truncate")


def _paired(pieces: Sequence[str], *, seed: int) -> list[Example]:
    """For each piece a pair without a label: its first half, and its second half or that of a random other piece (evenly)."""
    rng = np.random.default_rng(seed)
    halves = [_halves(piece) for piece in pieces]
    partners = np.where(rng.random(len(pieces)) < 0.5, np.arange(len(pieces)), rng.permutation(len(pieces)))
    return [Example("", first, halves[partner][1], None) for (first, _), partner in zip(halves, partners.tolist(), strict=True)]


def _halves(text: str) -> tuple[str, str]:
    """Return a text divided at the first space behind its middle; at the middle if there is none, as in scripts without spaces."""
    middle = max(1, len(text) // 2)
    cut = text.find(" ", middle)
    cut = cut if 0 < cut < len(text) - 1 else middle
    return text[:cut], text[cut:].lstrip() or text


def _save_pieces(folder: Path, length: int, tokens: Tokens, source: IntArray) -> None:
    for name, array in (("ids", tokens.ids), ("offsets", tokens.offsets), ("source", source)):
        save_array(folder / f"pieces-{length}-{name}.npy", array)


def read_pieces(folder: Path, length: int) -> Tokens | None:
    """Return pieces with markers, or as pairs, as sequences of at most `length` tokens; None if the teacher of this folder changed none."""
    paths = [folder / f"pieces-{length}-{name}.npy" for name in ("ids", "offsets", "source")]
    return Tokens(*map(read_array, paths)) if paths[0].is_file() else None


def _message(kind: TaskKind, what: str, soft_labels: FloatArray) -> str:
    """Describe soft labels without NaN, (n, labels)."""
    if not len(soft_labels):
        return f"0 {what}"
    match kind:
        case "classification":
            summary = f"mean confidence {float(soft_labels.max(axis=1).mean()):.0%}"
        case "multi-label":
            summary = f"{float(soft_labels.sum(axis=1).mean()):.1f} labels a text"
        case "regression":
            summary = f"mean {float(soft_labels.mean()):.1f}, spread {float(soft_labels.std()):.1f} standard deviations"
        case _:
            assert_never(kind)
    return f"{len(soft_labels):,} {what} ({summary})"


def teach_by_encoder(
    run: RunContext, plan: RunPlan, text: EncodedTexts, phase: PhaseConfig, teacher: FinishedPhase, *, load: Load, inputs: Mapping[str, Any]
) -> Artifact:
    """Publish soft labels from the model of the earlier phase `teacher`: of the pieces of the passages or, with a prompt, of each passage
    truncated to a row of `phase`, over all patterns (passages.npy). Probabilities are at `TEMPERATURE`; a number has none.

    load: returns the model with the weights of a phase. inputs: all but these weights.
    """
    name, selection, length = f"teacher-of-{phase.name}", text.selection, external_length(phase)
    assert selection is not None, "a teacher of passages needs passages"

    def write(target: Path) -> None:
        run.emit(Event("start", name))
        encoder = load(teacher)
        if encoder.prompt is None:
            sequences = text.tokenizer.cut(selection.ids, max_length=length, cut="split")
        else:
            sequences = sequences_of_texts(text.tokenizer, selection.texts(), None, max_length=phase.row_length, prompt=encoder.prompt)
        logits = predict_logits(encoder, sequences, precision=plan.precision)
        predicted = logits if encoder.kind == "regression" else outputs_of(encoder.kind, logits / np.float32(TEMPERATURE))
        save_array(target / (pieces_file(length) if encoder.prompt is None else PASSAGES_FILE), predicted)
        run.emit(
            Event("done", name, f"soft labels of the model of phase {teacher.phase.name}: {_message(encoder.kind, 'texts', predicted)}")
        )

    settings = {"length": length, "precision": plan.precision}
    return run.build(Stage(name, 2, settings, {**inputs, "model": teacher.artifact.fingerprint}, write, kind="teacher"))
