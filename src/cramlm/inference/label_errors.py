"""Rows of a training file whose label the linear model of a run contradicts.

A run with a linear teacher keeps the probabilities of its training texts that were predicted out of fold. If the file is still the one that
the run was trained on, row by row, these are used. Otherwise (corrected rows, a run that split dev rows off the file, another export) the
linear model is fitted again without each fold of the file, with the settings and features of the run.

Source: Northcutt, Jiang and Chuang 2021, "Confident Learning: Estimating Uncertainty in Dataset Labels", JAIR 70. A label is *confident*
for a text if its probability is at least the mean probability of that label over the texts that have it (equation 2), so that a label that
the model predicts with low probabilities is not compared with one that it predicts with high ones. A text is suspicious if its most
probable confident label is another, more probable one (an off-diagonal entry of the confident joint, equation 1). The texts are ranked by
the margin between both labels. The package cleanlab has this rule (`filter_by="confident_learning"`) and others; these lines need no
package. Where a text may have several labels, the rule decides for each label between having it and not having it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from cramlm.data.labels import RULES
from cramlm.data.task import texts_of_labels
from cramlm.data.validation import Finding, LabelledFile
from cramlm.errors import UsageError, brief
from cramlm.evaluation.kinds import check_labels
from cramlm.inference.base import are_pairs, check_texts, read_provenance
from cramlm.inference.folders import model_of, run_of, task_of
from cramlm.inference.linear import COMBINATION_FOLDER
from cramlm.linear.files import Setting, is_linear
from cramlm.linear.model import LinearModel
from cramlm.linear.teacher import TRAINING_TEXTS_FILE, out_of_fold_labels
from cramlm.pipeline.run_folder import is_up_to_date
from cramlm.records import BoolArray, Emit, Event, Example, FloatArray, IntArray, Scale, Task, TaskKind, silent
from cramlm.storage.arrays import read_array

RULE: Final = "suspicious-label"
STAGE: Final = "labels"
_SEED: Final = 13  # of the folds, outside of a run


@dataclass(frozen=True, slots=True)
class Suspicion(ABC):
    """A row of a file, by its location, with a label that is probably wrong."""

    location: str
    text: str

    @property
    @abstractmethod
    def reason(self) -> str:
        """The label and the probabilities that contradict it."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def finding(self) -> Finding:
        """The row in the form of the other findings of `cramlm check`."""
        return Finding(self.location, "notice", RULE, f"{self.reason}: {brief(self.text, 60)}")


@dataclass(frozen=True, slots=True)
class SuspiciousRow(Suspicion):
    """A row with its label and a more probable one, and their probabilities out of fold."""

    label: str
    suggested: str
    label_probability: float
    suggested_probability: float

    @property
    def reason(self) -> str:
        return (
            f"label {brief(self.label, 30)} has probability {self.label_probability:.0%} out of fold, "
            f"{brief(self.suggested, 30)} {self.suggested_probability:.0%}"
        )


@dataclass(frozen=True, slots=True)
class SuspiciousLabel(Suspicion):
    """One of several labels of a row that is probably wrong, or missing. given: True if the row has it. probability: out of fold."""

    label: str
    given: bool
    probability: float

    @property
    def reason(self) -> str:
        state = "given" if self.given else "not given"
        return f"label {brief(self.label, 30)} is {state}, and has probability {self.probability:.0%} out of fold"


def find_suspicious_rows(path: Path, train: LabelledFile, *, emit: Emit = silent) -> Sequence[Suspicion]:
    """Return the rows of `train` whose label is probably wrong, the most suspicious first; where texts may have several labels, every label
    that a row probably lacks or should not have. path: a run, or an exported model.

    Raises:
        UsageError: if the texts have numbers, or the model is of another kind of task or has no linear model beside it. DataError: if a row
        has a label that the model does not have. ArtifactError: if there is no model, or it is damaged.
    """
    refuse_numbers(train.kind)
    folder = model_of(path)
    pairs = [row.text_pair for row in train.examples]
    check_texts([row.text for row in train.examples], pairs, trained_on_pairs=are_pairs(read_provenance(folder)))
    probabilities, labels = _out_of_fold(train, folder, emit)
    label_ids, has = RULES[train.kind].targets([str(example.label) for example in train.examples], labels, Scale())
    if train.kind == "multi-label":
        return [
            SuspiciousLabel(
                train.examples[row].id,
                train.examples[row].whole_text,
                labels[label],
                bool(has[row, label]),
                float(probabilities[row, label]),
            )
            for row, label in contradicted_labels(probabilities, has > 0)
        ]
    return [
        SuspiciousRow(
            train.examples[row].id,
            train.examples[row].whole_text,
            str(train.examples[row].label),
            labels[suggested],
            float(probabilities[row, label_ids[row]]),
            float(probabilities[row, suggested]),
        )
        for row, suggested in suspicious_labels(probabilities, label_ids)
    ]


def _out_of_fold(train: LabelledFile, folder: Path, emit: Emit) -> tuple[FloatArray, Sequence[str]]:
    """Return the probabilities of the rows out of fold, (n, labels), and the labels: those of the run's teacher if it was trained on these
    rows, else of the linear model, fitted again without each fold.
    """
    run, task = run_of(folder), task_of(folder)
    if task is not None:
        _check_kind(task.kind, train.kind)
    if run is not None and task is not None and _same_rows(task.train, train.examples) and is_up_to_date(run, "teacher"):
        probabilities: FloatArray = read_array(run / "teacher" / TRAINING_TEXTS_FILE)
        emit(Event("note", STAGE, f"probabilities out of fold of {len(probabilities):,} texts are those of the run's teacher"))
        return probabilities, task.labels
    model = _regression(folder, run)
    _check_kind(model.kind, train.kind)
    check_labels(train.kind, model.labels, _without_file(train), origin=train.name, remedy="pass a model of these labels")
    emit(Event("start", STAGE))
    label_texts = task.label_texts if task is not None else texts_of_labels(model.labels) if train.kind == "classification" else ()
    rows = Task(train.examples, (), (), model.labels, dev_is_split_from_train=False, kind=train.kind, label_texts=label_texts)
    probabilities = out_of_fold_labels(model, rows, seed=_SEED, emit=lambda event: emit(replace(event, stage=STAGE)))
    emit(Event("done", STAGE, f"{len(probabilities):,} texts predicted out of fold by the linear model"))
    return probabilities, model.labels


def suspicious_labels(probabilities: FloatArray, labels: IntArray) -> list[tuple[int, int]]:
    """Return (row, id of the more probable label) of the suspicious texts, the most suspicious first.

    probabilities: (n, labels), out of fold; rows of NaN are left out. labels: the label id of each text, (n,).
    """
    own = probabilities[np.arange(len(labels)), labels].astype(np.float64)
    predicted = np.isfinite(probabilities).all(axis=1)
    counts = np.bincount(labels[predicted], minlength=probabilities.shape[1])
    sums = np.bincount(labels[predicted], weights=own[predicted], minlength=probabilities.shape[1])
    thresholds = np.divide(sums, counts, out=np.full(len(counts), np.inf), where=counts > 0)
    confident = np.where(probabilities >= thresholds, probabilities, -1.0)
    suggested = confident.argmax(axis=1)
    highest = confident[np.arange(len(labels)), suggested]
    rows = np.flatnonzero(predicted & (highest > own) & (suggested != labels))
    ranked = rows[np.argsort((own - highest)[rows], kind="stable")]
    return [(row, int(suggested[row])) for row in ranked.tolist()]


def contradicted_labels(probabilities: FloatArray, has: BoolArray) -> list[tuple[int, int]]:
    """Return (row, label id) where a text has a label that it should not have, or the reverse, the most suspicious first.

    probabilities: (n, labels), of each label out of fold; NaN is left out. has: (n, labels).
    """
    found = []
    for label in range(has.shape[1]):
        either = np.stack([1 - probabilities[:, label], probabilities[:, label]], axis=1)
        found += [(row, label) for row, _ in suspicious_labels(either, has[:, label].astype(np.int64))]
    return sorted(found, key=lambda each: (-abs(float(probabilities[each]) - 0.5), each))


def refuse_numbers(kind: TaskKind) -> None:
    """Raise UsageError if texts have numbers, whose errors are not found."""
    if kind == "regression":
        raise UsageError("check --model finds wrong labels, and this is a regression task; leave out --model")


def _check_kind(kind: TaskKind, of_file: TaskKind) -> None:
    refuse_numbers(kind)
    if kind != of_file:
        raise UsageError(f"the model is of a {kind} task, and the file is read as one of {of_file}; pass --task-type {kind}")


def _same_rows(one: tuple[Example, ...], other: tuple[Example, ...]) -> bool:
    return [(row.text, row.text_pair, row.label) for row in one] == [(row.text, row.text_pair, row.label) for row in other]


def _without_file(train: LabelledFile) -> list[Example]:
    """Return the rows with the line alone as id."""
    prefix = f"{train.name}:"
    return [Example(each.id.removeprefix(prefix), each.text, each.text_pair, each.label) for each in train.examples]


def _regression(folder: Path, run: Path | None) -> LinearModel:
    """Return the best logistic regression of a run or of an exported model; naive Bayes is not fitted without a fold."""
    stages = [] if run is None else [run / name for name in ("static", "baseline") if is_up_to_date(run, name)]
    for candidate in (*stages, folder, folder / COMBINATION_FOLDER / "static", folder / COMBINATION_FOLDER / "tfidf"):
        if is_linear(candidate) and isinstance((model := LinearModel.load(candidate)).setting, Setting):
            return model
    raise UsageError(
        f"{folder}: holds no linear model to predict training texts out of fold (tfidf or static); pass the folder of a run that "
        "`cramlm fit` wrote"
    )
