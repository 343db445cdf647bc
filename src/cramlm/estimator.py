"""`CramClassifier` and `CramRegressor`, scikit-learn estimators for texts: work in pipelines, cross-validation and grid searches.

    classifier = CramClassifier(corpus="corpus/*.jsonl.zst", budget="10m")
    classifier.fit(texts, labels).predict(["some text"])
    classifier.fit(table[["question", "answer"]], labels)           pairs of texts: two columns
    CramRegressor(corpus="corpus/*.jsonl.zst", budget="10m").fit(texts, numbers)

`fit` writes the texts to a task file and runs `cramlm fit`: dev rows are split off, there is no test file, corpus and index are in the
shared store, so that ten folds index once. The fitted model is the exported folder of the run; the estimator holds no weights, but a
pickle of one whose run is in a temporary folder does.
"""

from __future__ import annotations

import json
import math
import re
import shutil
import tempfile
import weakref
from abc import ABC
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, Self, TypeAlias, assert_never

import numpy as np
import numpy.typing as npt
import scipy.sparse
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.metrics import accuracy_score
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted

from cramlm.data.labels import LARGEST_NUMBER, RULES, format_labels, format_number
from cramlm.data.task import split_dev, text_key
from cramlm.errors import ArtifactError, CramError, DataError, UsageError, brief, counted, list_fault
from cramlm.io.machine import trim_memory
from cramlm.io.paths import at_home
from cramlm.records import Emit, Event, Example, FloatArray, TaskKind, silent
from cramlm.storage.artifacts import MANIFEST, hash_json, open_artifact, publish, publish_file, refuse_foreign
from cramlm.storage.locks import lock, wait_while_locked

if TYPE_CHECKING:
    from cramlm.config.run import RunConfig
    from cramlm.inference.predictor import AnyPredictor
    from cramlm.pipeline.run import Run


_PAIR: Final = "text_pair"  # column of the second text in the task files
_FROM_ARGUMENTS: Final = ("train", "unlabelled", "text_column", "text_pair_column", "label_column")
"""Settings of `task` that name the files which `fit` writes, and their columns."""
_LISTS: Final = (list, tuple, set, frozenset, np.ndarray)
"""Types of a text's labels where it may have several."""


class InvalidInput(DataError, ValueError):  # noqa: N818 - scikit-learn's callers catch it as a ValueError
    """X, y or a file of the corpus is invalid; the message has the index in X or y, counted from 0, or the file and line."""


class InvalidParameter(UsageError, ValueError):  # noqa: N818 - as above
    """A parameter is invalid, or parameters exclude each other."""


_PARAMETERS: Final = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"= \(--[a-z-]+ (FILES|FOLDER)\)", "="),  # "corpus= (--corpus FILES)"
        (r"\(--base-model FOLDER, ", "(a folder "),
        (r"--set (['\"])([^'\"=]+)=.*?\1:", r"settings['\2']:"),
        (r"--set ([\w.\[\]]+)=(\w+)", r'settings={"\1": \2}'),
        (r"^\S+: (all [\d,]+ unlabelled texts are those of labelled rows); leave the file out", r"\1; drop unlabelled"),
        (r"--text-column \(where.*?\)", 'settings={"corpus.text_column": NAME}'),
        (r"--id-column", 'settings={"corpus.id_column": NAME}'),
        (r"--on-bad-row skip", 'settings={"corpus.on_bad_row": "skip"}'),
        (r"--device (\w+)", r'settings={"device": "\1"}'),
        (r"pass --task-type multi-label( --label-separator '.')?", "pass y as lists of labels to CramClassifier"),
        (r"pass --task-type regression", "use CramRegressor"),
        (r"with --task-type regression", "with CramRegressor"),
        (r"is --label-separator .* the right one\?", "are these ids?"),
        (r"--budget ([\w.]+)", r'budget="\1"'),
        (r"a smaller --preset", 'a smaller encoder, as in settings={"encoder.layers": 2}'),
        (r"--base-model", "init"),
        (r"--(corpus|unlabelled|recipe|seed|out|store)\b", r"\1"),
    )
]
"""Options of the command line in messages, and what to write in Python."""


def in_parameters(message: str) -> str:
    """Return a message with the parameters of an estimator in place of the options of the command line."""
    for pattern, replacement in _PARAMETERS:
        message = pattern.sub(replacement, message)
    return message


@contextmanager
def _errors_in_parameters() -> Iterator[None]:
    """Turn errors of usage and data into ValueErrors, and name parameters in place of options in the messages of all errors."""
    try:
        yield
    except CramError as error:
        message = in_parameters(str(error))
        if type(error) is UsageError:
            raise InvalidParameter(message) from error
        if type(error) is DataError:
            raise InvalidInput(message) from error
        error.args = (message, *error.args[1:])
        raise


@dataclass(frozen=True, slots=True)
class Texts:
    """Texts that a model reads. second: the second text of each pair; None for single texts."""

    first: list[str]
    second: list[str] | None = None

    @property
    def are_pairs(self) -> bool:
        return self.second is not None

    @property
    def plain(self) -> list[Any]:
        """JSON values: strings, or a list of two for each pair."""
        return self.first if self.second is None else [list(pair) for pair in zip(self.first, self.second, strict=True)]

    @property
    def rows(self) -> list[dict[str, str]]:
        """The row of each text in a task file, without its label."""
        if self.second is None:
            return [{"text": text} for text in self.first]
        return [{"text": text, _PAIR: pair} for text, pair in zip(self.first, self.second, strict=True)]


class CramEstimator(BaseEstimator, ABC):  # type: ignore[misc]  # scikit-learn is not typed
    """A model trained from scratch on labelled texts and on the passages of `corpus` that they retrieve.

    The parameters are described in `CramClassifier`. Fitted attribute: `run_` (folder, config and scores of the run; `run_.export` is the
    model).
    """

    def __init__(
        self,
        *,
        corpus: str | Path | Sequence[str | Path] | None = None,
        unlabelled: Any = None,
        recipe: str | None = None,
        init: str | Path | None = None,
        budget: str | None = "10m",
        seed: int = 13,
        dev_fraction: float = 0.1,
        settings: Mapping[str, Any] | None = None,
        out: str | Path | None = None,
        store: str | Path | None = None,
        verbose: bool = False,
    ) -> None:
        self.corpus = corpus
        self.unlabelled = unlabelled
        self.recipe = recipe
        self.init = init
        self.budget = budget
        self.seed = seed
        self.dev_fraction = dev_fraction
        self.settings = settings
        self.out = out
        self.store = store
        self.verbose = verbose

    def _train(self, texts: Texts, kind: TaskKind, labels: Sequence[Any]) -> None:
        """Fit a run and open its model. texts: `checked_training_texts`. labels: of each text, JSON values of the kind of task."""
        rows = [json.dumps({**row, "label": label}, ensure_ascii=False) + "\n" for row, label in zip(texts.rows, labels, strict=True)]
        further = None if self.unlabelled is None else checked_texts(self.unlabelled, "unlabelled")
        if further is not None and further.are_pairs != texts.are_pairs:
            one, other = ("single texts", "pairs") if texts.are_pairs else ("pairs", "single texts")
            raise InvalidInput(f"unlabelled holds {one} and X holds {other}; pass texts of one form")
        if self._config(kind, "", [], pairs=texts.are_pairs).task.dev is None:  # also validates the settings before files are written
            _check_dev_split(texts, kind, labels, fraction=self.dev_fraction, seed=int(self.seed))
        scratch = _Scratch() if self.out is None else None
        root = scratch.path if scratch is not None else at_home(self.out or "")
        folder = root / f"fit-{hash_json([self._inputs(), rows])[:12]}"
        train, more = folder / "data" / "train.jsonl", folder / "data" / "unlabelled.jsonl"

        def write_inputs() -> None:
            with lock(folder / "run"):  # which marks the folder as that of a run
                publish_file(train, "".join(rows).encode())
                if further is not None:
                    publish_file(more, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in further.rows).encode())

        with _events(self.verbose) as emit:
            wait_while_locked(write_inputs, stage="run", emit=emit)
        config = self._config(kind, str(train), [str(more)] if further is not None else [], pairs=texts.are_pairs)
        run = self._run(config, folder)
        run = replace(run, path=run.path.absolute())  # so that the model is found after a change of the working directory
        self.run_, self._scratch = run, scratch
        self._open()

    def _model(self) -> AnyPredictor:
        """Return the fitted model. Raises NotFittedError before `fit`."""
        check_is_fitted(self, "run_")
        return self._predictor or self._open()

    def _checked(self, X: Any) -> Texts:  # noqa: N803 - scikit-learn's name
        """Return `checked_texts` of X. Raises InvalidInput also if it has pairs and `fit` had single texts, or the other way round."""
        texts, pairs = checked_texts(X, "X"), self._model().trained_on_pairs
        if pairs is not None and texts.are_pairs != pairs:
            actual, expected = ("single texts", "pairs: two columns") if pairs else ("pairs", "single texts: one column")
            raise InvalidInput(f"X holds {actual}, and this model was fitted on {expected}")
        return texts

    def save(self, path: str | Path) -> Path:
        """Copy the model to the folder `path` for `cramlm.Predictor.load`, and for transformers if it is an encoder.

        Raises:
            UsageError: if `path` exists and is not such a folder.
        """
        check_is_fitted(self, "run_")
        export = open_artifact(self.run_.export, kind="export")

        def copy(folder: Path) -> None:
            for name in export.files:
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(export.path / name, folder / name)

        refuse_foreign(at_home(path), kind=export.kind)
        return publish(at_home(path), kind=export.kind, key=export.key, write=copy).path

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for pickling and copying.

        A run below `out` is named by its path. The model of a run in a temporary folder, which is deleted with this estimator, is in the
        state as bytes.
        """
        state = dict(self.__dict__)
        if state.pop("_scratch", None) is not None:
            export = open_artifact(self.run_.export, kind="export")
            state["_model"] = {name: (export.path / name).read_bytes() for name in (*export.files, MANIFEST)}
        if "_predictor" in state:
            state["_predictor"] = None
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a pickled state; a model in it is written to a temporary folder, which is deleted with this estimator."""
        model = state.pop("_model", None)
        self.__dict__.update(state)
        if "run_" not in state:
            return
        self._scratch = None if model is None else _Scratch()
        if self._scratch is not None:
            self.run_ = replace(self.run_, path=self._scratch.path)
            for name, content in model.items():
                file = self.run_.export / name
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(content)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.string, tags.input_tags.two_d_array, tags.input_tags.one_d_array = True, False, True
        return tags

    def _open(self) -> AnyPredictor:
        from cramlm.inference.predictor import Predictor

        if not self.run_.export.is_dir():
            raise ArtifactError(f"{self.run_.export}: the model of this estimator is no longer there; restore the folder, or fit again")
        self._predictor = Predictor.load(self.run_.export)
        return self._predictor

    def _inputs(self) -> dict[str, Any]:
        """Return the parameters that affect the model, as plain data."""
        values = {name: _plain(value) for name, value in self.get_params(deep=False).items() if name not in ("out", "store", "verbose")}
        further = None if self.unlabelled is None else checked_texts(self.unlabelled, "unlabelled").plain
        return {**values, "corpus": self._corpus_files(), "unlabelled": further, "settings": _overrides(self.settings)}

    def _corpus_files(self) -> list[str]:
        files = [] if self.corpus is None else [self.corpus] if isinstance(self.corpus, str | Path) else self.corpus
        return [str(file) for file in files]

    def _config(self, kind: TaskKind, train: str, unlabelled: list[str], *, pairs: bool) -> RunConfig:
        """Return the run config for a training file ("" for a typical one) and files of unlabelled texts. pairs: of the form of the texts.

        Raises:
            UsageError: if a setting does not exist, is out of range, or is not for the kind of task.
        """
        from cramlm.cli.options import recipe_data
        from cramlm.config.run import apply_overrides, load_config

        inputs = self._inputs()
        arguments = {name: inputs[name] for name in ("corpus", "init", "budget", "seed", "dev_fraction")} | {"train": train}
        arguments |= {"unlabelled": unlabelled} if unlabelled else {}
        arguments |= {} if kind == "classification" else {"kind": kind}
        arguments |= {"text_pair_column": _PAIR} if pairs else {}
        overrides = inputs["settings"]
        data = recipe_data(self.recipe or ("tlm" if inputs["corpus"] else "labels-only"), arguments, overrides)
        config = load_config(apply_overrides(data, overrides), origin=type(self).__name__)
        if config.task.kind != kind:
            raise UsageError(f"settings['task.kind'] is {config.task.kind!r}, and this is a {kind} task by the form of y; drop it")
        return config

    def _run(self, config: RunConfig, folder: Path) -> Run:
        """Run the pipeline; wait while another process (a parallel fold) builds the same corpus, index or run."""
        from cramlm.pipeline.run import run

        with _events(self.verbose) as emit:
            finished = wait_while_locked(lambda: run(config, out=folder, store=self.store, emit=emit), stage="run", emit=emit)
        trim_memory()  # for the next fold
        return finished


TargetType: TypeAlias = Literal["multiclass", "multilabel-indicator", "multilabel-sequences"]
"""The form of y: one label for each text; a matrix of 0 and 1 (texts, classes); a list of labels for each text."""


class CramClassifier(ClassifierMixin, CramEstimator):  # type: ignore[misc]
    """A text classifier trained from scratch on labelled texts and on the passages of `corpus` that they retrieve. A text has one label or,
    by the form of y, several.

    corpus: files, folders or globs of raw text, one or several; None trains on the labels alone.
    unlabelled: further texts of the task, as X in `fit`, whose labels are unknown; used with a corpus (docs/guides/unlabelled.md).
    recipe: a name of `cramlm.recipes.RECIPES`; None is tlm with a corpus, labels-only without. A recipe without retrieval ignores `corpus`.
    init: folder of pretrained weights, for recipes that can start from one.
    budget: wall-clock time of one fit, like "10m"; 5 folds take it 5 times.
    settings: other settings, as in `--set`: {"retriever.top_k": 20, "threads": 1}.
    out: folder for the runs, each in a subfolder named by a hash of its inputs, so that an equal fit is loaded and a stopped one continues;
    None is a temporary folder that is deleted with the estimator; a pickle of the estimator then contains the exported model.
    store: folder for corpora and indexes; None is the default of `cramlm fit`. verbose: show progress on stderr.

    Fitted attributes: `classes_` (sorted, with their own type; of a matrix the numbers of its columns), `target_type_` (the form of y:
    multiclass, multilabel-indicator or multilabel-sequences), `run_` (folder, config and scores of the run; `run_.export` is the model).
    """

    def fit(self, X: Any, y: Any) -> Self:  # noqa: N803 - scikit-learn's name
        """Train on texts (n,), or pairs of texts (n, 2), and labels of any sortable type: one for each text, (n,), or a list of them for
        each text; or a matrix of 0 and 1, (n, classes), dense or sparse. Lists that NumPy reads as such a matrix are one, as elsewhere in
        scikit-learn.

        Raises:
            InvalidInput, InvalidParameter: (ValueErrors) for different lengths, a missing or blank text, labels that are not classes, too
            few different texts to split a dev set off; for an unknown setting. CramError: as `cramlm.fit`.
        """
        with _errors_in_parameters():
            y = list(y) if isinstance(y, Iterator) else y  # which is read more than once
            texts, target_type = checked_training_texts(X), _target_type(y)
            kind: TaskKind = "classification" if target_type == "multiclass" else "multi-label"
            labels: list[Any]
            match target_type:
                case "multiclass":
                    classes, codes = checked_labels(y, len(texts.first))
                    names = _names(classes)
                    labels = [names[code] for code in codes]
                case "multilabel-indicator":
                    matrix = _dense(y)
                    _check_lengths(len(texts.first), len(matrix))
                    classes = np.arange(matrix.shape[1])
                    names = _names(classes)
                    labels = [[names[column] for column in np.flatnonzero(row)] for row in matrix]
                case "multilabel-sequences":
                    classes, labels = checked_label_lists(y, len(texts.first))
                case _:
                    assert_never(target_type)
            if kind == "multi-label":
                RULES[kind].check([format_labels(each) for each in labels], "y")
            self._train(texts, kind, labels)
            self.classes_, self.target_type_ = classes, target_type
        return self

    def predict(self, X: Any) -> npt.NDArray[Any]:  # noqa: N803
        """Return the most probable class of each text, (n,), with the type of the labels. Of several labels those with a probability of at
        least 0.5: an integer matrix (n, classes), or tuples in an object array (n,), as y was in `fit`.

        Raises:
            NotFittedError: before `fit`. InvalidInput: if a text is not a string, or X has pairs and `fit` had not, or the other way round.
        """
        probabilities = self.predict_proba(X)
        predictions: npt.NDArray[Any]
        match self.target_type_:
            case "multiclass":
                predictions = self.classes_[probabilities.argmax(axis=1)]
            case "multilabel-indicator":
                predictions = (probabilities >= 0.5).astype(np.int64)
            case _:
                sets = (tuple(self.classes_[row].tolist()) for row in probabilities >= 0.5)
                predictions = np.fromiter(sets, dtype=object, count=len(probabilities))
        return predictions

    def predict_proba(self, X: Any) -> FloatArray:  # noqa: N803
        """Return the probability of each class, float32 (n, classes), columns in the order of `classes_`; 0 for a column of y without a 1.

        Raises:
            NotFittedError, InvalidInput: as `predict`.
        """
        model = self._model()
        column_of = {name: column for column, name in enumerate(model.labels)}
        columns = [column_of.get(name, -1) for name in _names(self.classes_)]
        texts = self._checked(X)
        probabilities = model.probabilities(texts.first, texts.second)
        return np.where(np.array(columns) >= 0, probabilities[:, columns], np.float32(0))

    def score(self, X: Any, y: Any, sample_weight: Any = None) -> float:  # noqa: N803
        """Return the accuracy; of several labels the share of the texts whose labels are all right.

        Raises:
            NotFittedError, InvalidInput: as `predict`.
        """
        predictions = self.predict(X)
        if self.target_type_ != "multilabel-sequences":
            return float(accuracy_score(y, predictions, sample_weight=sample_weight))
        y = list(y)
        _check_lengths(len(predictions), len(y))
        return float(np.average([set(one) == set(other) for one, other in zip(predictions, y, strict=True)], weights=sample_weight))

    def predict_or_abstain(self, X: Any, *, below: float) -> tuple[npt.NDArray[Any], npt.NDArray[np.float64]]:  # noqa: N803
        """Return (labels, confidences), each (n,): the most probable class, or None if its confidence is lower than `below`.

        The labels are an object array. Confidence is calibrated on the dev rows that `fit` splits off (evaluation/confidence.py).

        Raises:
            NotFittedError, InvalidInput: as `predict`. InvalidParameter: if `below` is not in [0, 1], or texts have several labels.
        """
        from cramlm.inference.base import check_threshold

        model = self._model()
        with _errors_in_parameters():
            check_threshold(below)
            calibrated = model.calibrated()
        texts = self._checked(X)
        probabilities = model.probabilities(texts.first, texts.second)
        confidences = calibrated.of(probabilities)
        names = dict(zip(_names(self.classes_), self.classes_.tolist(), strict=True))
        labels = np.array([names[model.labels[index]] for index in probabilities.argmax(axis=1)], dtype=object)
        labels[confidences < below] = None
        return labels, confidences

    def threshold(self, *, accuracy: float) -> float:
        """Return the lowest `below` of `predict_or_abstain` for which at least this share of the labels is right on dev.

        Raises:
            NotFittedError: before `fit`. InvalidParameter: if no threshold reaches it, or texts have several labels.
        """
        with _errors_in_parameters():
            return self._model().threshold(accuracy=accuracy)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.classifier_tags.multi_label = True
        return tags


class CramRegressor(RegressorMixin, CramEstimator):  # type: ignore[misc]
    """A regression of a number for each text; parameters and `run_` as in `CramClassifier`. Recipes for single labels only are refused."""

    def fit(self, X: Any, y: Any) -> Self:  # noqa: N803
        """Train on texts (n,), or pairs of texts (n, 2), and finite numbers (n,).

        Raises:
            InvalidInput, InvalidParameter: (ValueErrors) for different lengths, a missing or blank text, a missing number, equal numbers,
            too few different texts to split a dev set off; for an unknown setting. CramError: as `cramlm.fit`.
        """
        with _errors_in_parameters():
            texts = checked_training_texts(X)
            numbers = checked_numbers(y, len(texts.first))
            RULES["regression"].check([format_number(number) for number in numbers], "y")
            self._train(texts, "regression", numbers)
        return self

    def predict(self, X: Any) -> npt.NDArray[np.float64]:  # noqa: N803
        """Return the number of each text in the unit of y, (n,).

        Raises:
            NotFittedError: before `fit`. InvalidInput: as of `CramClassifier.predict`.
        """
        texts = self._checked(X)
        return self._model().outputs(texts.first, texts.second)[:, 0].astype(np.float64)


def checked_texts(values: Any, name: str) -> Texts:
    """Return texts from a list, a NumPy array, or a column of a pandas or polars data frame or of a `datasets.Dataset`; pairs of texts from
    an array or a data frame with two columns, or a list of pairs.

    Raises:
        InvalidInput: for a single string, other dimensions, no texts, or a value that is not a string (with its index).
    """
    if fault := list_fault(values, most_dimensions=2):
        raise InvalidInput(f"{name} {fault}")
    shape: tuple[int, ...] = getattr(values, "shape", (0,))
    if len(shape) == 2 and shape[1] != 2:
        what = "2 dimensions" if shape[1] == 1 else f"{shape[1]} columns"
        raise InvalidInput(f"{name} has {what}; pass a list of texts or one column of a table, or two columns for pairs of texts")
    rows = list(np.asarray(values, dtype=object) if len(shape) == 2 else values)
    if not rows:
        raise InvalidInput(f"{name} holds no texts; a minimum of 1 is required")
    if not isinstance(rows[0], list | tuple | np.ndarray):
        return Texts([_checked_text(value, f"{name}[{index}]") for index, value in enumerate(rows)])
    for index, row in enumerate(rows):
        if not isinstance(row, list | tuple | np.ndarray) or len(row) != 2:
            raise InvalidInput(f"{name}[{index}] is {brief(row)}, not a pair of texts; write two strings for each")
    first, second = ([_checked_text(row[side], f"{name}[{index}, {side}]") for index, row in enumerate(rows)] for side in (0, 1))
    return Texts(first, second)


def _checked_text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        missing = _is_missing(value)
        what = f"missing ({value})" if missing else f"{type(value).__name__} ({str(value)[:30]!r}), not a text"
        remedy = "drop it, or fill it" if missing else "pass one column of the table" if isinstance(value, Mapping) else "convert it"
        raise InvalidInput(f"{name} is {what}; {remedy}")
    _refuse_surrogates(value, name)
    return str(value)


def checked_training_texts(values: Any) -> Texts:
    """Return `checked_texts` of X.

    Raises:
        InvalidInput: as there, and for a blank text.
    """
    texts = checked_texts(values, "X")
    for side, column in enumerate([texts.first] if texts.second is None else [texts.first, texts.second]):
        for index, text in enumerate(column):
            if not text.strip():
                raise InvalidInput(f"X[{index}{f', {side}' if texts.are_pairs else ''}] is blank; drop it")
    return texts


def checked_labels(values: Any, texts: int) -> tuple[npt.NDArray[Any], npt.NDArray[np.intp]]:
    """Return the sorted classes, with their own type, and the index of each label among them.

    Raises:
        InvalidInput: if the number of labels is not `texts`, a label is missing or blank (with its index), labels cannot be sorted or are
        not classes, or there is only one class, or more than one for two texts.
    """
    labels = _flat(values, texts, "label")
    for index, label in enumerate(labels):
        _check_label(label, f"y[{index}]", labels[0])
    classes, codes = _classes(labels)
    if len(classes) == 1:
        raise InvalidInput(f"y holds one class only ({_shown(classes[0])}); a classifier needs at least 2")
    if len(classes) > texts / 2:
        raise InvalidInput(f"y holds {len(classes):,} classes for {texts:,} texts, more than one per two texts; are these ids or numbers?")
    return classes, codes


def checked_label_lists(values: Any, texts: int) -> tuple[npt.NDArray[Any], list[list[str]]]:
    """Return the sorted classes, with their own type, and the names of the labels of each text.

    Raises:
        InvalidInput: if the number of lists is not `texts`, one is missing or not a list, or a label in it is repeated, missing or blank
        (with its index), or labels cannot be sorted or are not classes.
    """
    rows = list(values)
    _check_lengths(texts, len(rows))
    for index, row in enumerate(rows):
        if not isinstance(row, _LISTS):
            raise InvalidInput(f"y[{index}] is {_shown(row)}, and other rows are lists of labels; write a list for every text")
    flat = [label for row in rows for label in row]
    for index, row in enumerate(rows):
        for label in row:
            _check_label(label, f"a label of y[{index}]", flat[0])
        if len(set(row)) < len(row):
            raise InvalidInput(f"y[{index}] has a label twice ({str(row)[:30]}); drop one")
    if not flat:
        raise InvalidInput("y holds no labels; there is nothing to learn")
    classes, codes = _classes(flat)
    names = _names(classes)
    ends = np.cumsum([len(row) for row in rows])[:-1]
    return classes, [[names[code] for code in np.sort(row)] for row in np.split(codes, ends)]


def checked_numbers(values: Any, texts: int) -> list[float]:
    """Return the numbers as floats.

    Raises:
        InvalidInput: if there are not `texts` of them, or one is missing, infinite, too large or no number (with its index).
    """
    numbers = _flat(values, texts, "number")
    for index, number in enumerate(numbers):
        if _is_missing(number):
            raise InvalidInput(f"y[{index}] is missing ({number}); drop the row")
        if not isinstance(number, int | float | np.integer | np.floating) or not math.isfinite(number):
            raise InvalidInput(f"y[{index}] is {_shown(number)}, not a finite number; convert it, or use CramClassifier for classes")
        if abs(float(number)) > LARGEST_NUMBER:
            raise InvalidInput(f"y[{index}] is {_shown(number)}, whose absolute value is over {LARGEST_NUMBER:.0e}; divide all numbers")
    return [float(number) for number in numbers]


def _target_type(values: Any) -> TargetType:
    """Return the form of y; of a value that has none of them `multiclass`, which is checked later."""
    if scipy.sparse.issparse(values):
        return "multilabel-indicator"
    dimensions = getattr(values, "ndim", 1)
    rows = list(values) if dimensions == 1 and not list_fault(values) else []
    are_lists = any(isinstance(row, _LISTS) for row in rows)
    if dimensions == 2 or (are_lists and len({len(row) if isinstance(row, _LISTS) else -1 for row in rows}) == 1):
        matrix = np.asarray(values if dimensions == 2 else [list(row) for row in rows])
        if matrix.ndim == 2 and matrix.shape[1] > 1 and matrix.dtype.kind in "biuf" and np.isin(matrix, (0, 1)).all():
            return "multilabel-indicator"
    return "multilabel-sequences" if are_lists else "multiclass"


def _dense(values: Any) -> npt.NDArray[Any]:
    """Return an indicator matrix as an array (n, classes). Raises InvalidInput if a sparse matrix holds other values than 0 and 1."""
    matrix: npt.NDArray[Any] = values.toarray() if scipy.sparse.issparse(values) else np.asarray(values)
    if not np.isin(matrix, (0, 1)).all():
        raise InvalidInput("y is a sparse matrix with other values than 0 and 1; expected 1 for each label of a text")
    return matrix


def _flat(values: Any, texts: int, what: str) -> list[Any]:
    """Return y as a list with a value for each text. what: the value, in the message.

    Raises:
        InvalidInput: for a value that is no list, several dimensions, or another number of values than `texts`.
    """
    if fault := list_fault(values, f"a flat list with one {what} per text"):
        raise InvalidInput(f"y {fault}")
    flat = list(values)
    _check_lengths(texts, len(flat))
    return flat


def _check_lengths(texts: int, labels: int) -> None:
    if labels != texts:
        raise InvalidInput(f"X and y have inconsistent numbers of samples: {texts} texts, {labels} labels")


def _check_label(label: Any, name: str, first: Any) -> None:
    """Raise InvalidInput if a label is missing, blank, a list or of another type than the first one."""
    if _is_missing(label):
        raise InvalidInput(f"{name} is missing ({label}); drop the row, or label it")
    if isinstance(label, str) and not label.strip():
        raise InvalidInput(f"{name} is blank; drop the row, or label it")
    if isinstance(label, str):
        _refuse_surrogates(label, name)
    elif isinstance(label, _LISTS):
        raise InvalidInput(f"{name} is a {type(label).__name__} ({str(label)[:30]}); expected a single label")
    if isinstance(label, str) != isinstance(first, str):
        raise InvalidInput(
            f"y mixes text and other labels: the first is {_shown(first)}, {name} is {_shown(label)}; convert them to one type"
        )


def _classes(labels: Sequence[Any]) -> tuple[npt.NDArray[Any], npt.NDArray[np.intp]]:
    """Return the sorted classes and the index of each label among them."""
    if np.asarray(labels).dtype.kind not in "biufUT":  # scikit-learn has no other classes: dates, integers over 64 bits, objects
        odd = next((label for label in labels if np.asarray(label).dtype.kind not in "biufUT"), labels[0])
        raise InvalidInput(f"y holds {_shown(odd)}, which cannot be a class; convert all labels to strings, like str(label)")
    try:
        check_classification_targets(np.asarray(labels))
        return np.unique(np.asarray(labels), return_inverse=True)
    except (TypeError, ValueError) as error:
        raise InvalidInput(f"y holds no classes: {error}") from error


def _shown(label: Any) -> str:
    """Return a label as it is written in Python: a NumPy scalar without its type."""
    return repr(label.item() if isinstance(label, np.generic) else label)


def _refuse_surrogates(text: str, name: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidInput(f"{name}: character {error.start} is a lone surrogate; remove it") from error


def _is_missing(value: Any) -> bool:
    """Return True for None, NaN, and the missing values of pandas, which cannot be compared."""
    return value is None or type(value).__name__ in ("NAType", "NaTType") or (isinstance(value, float | np.floating) and math.isnan(value))


def _names(classes: npt.NDArray[Any]) -> list[str]:
    """Return the classes as label names of the model."""
    names = [str(label) for label in classes.tolist()]
    if len(set(names)) != len(names):
        raise InvalidInput("two classes have the same name when written as text; rename one")
    return names


def _overrides(settings: Mapping[str, Any] | None) -> list[str]:
    """Return settings in the form of `--set`; scalars and lists of JSON are valid TOML.

    Raises:
        UsageError: if they are no mapping, a value is none of JSON, or one would replace the texts and labels of `fit`.
    """
    if not isinstance(settings, Mapping | None):
        raise UsageError(f'settings is a {type(settings).__name__}; pass a dictionary, like {{"threads": 1}}')
    for name in _FROM_ARGUMENTS:
        if f"task.{name}" in (settings or {}):
            raise UsageError(f"settings['task.{name}'] would replace what fit(X, y) reads; drop it, and pass texts and labels as X and y")
    values = {}
    for key, value in (settings or {}).items():
        try:
            values[key] = "none" if value is None else json.dumps(value, default=_plain)
        except (TypeError, ValueError) as error:  # also of `_plain`, which returns other objects unchanged
            raise UsageError(
                f"settings[{key!r}] is {brief(value)}, not a number, text or list; `cramlm config` prints every setting"
            ) from error
    return [f"{key}={value}" for key, value in values.items()]


def _plain(value: Any) -> Any:
    """Return NumPy's numbers and arrays, which samplers of parameters return, and paths as JSON values; all else unchanged."""
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    return str(value) if isinstance(value, Path) else value


def _check_dev_split(texts: Texts, kind: TaskKind, labels: Sequence[Any], *, fraction: float, seed: int) -> None:
    """Raise InvalidInput if no dev set can be split off. labels: JSON values."""
    strata = list(labels) if kind == "classification" else [""] * len(labels)
    pairs: Sequence[str | None] = texts.second or [None] * len(labels)
    rows = [Example(str(index), *row) for index, row in enumerate(zip(texts.first, pairs, strata, strict=True))]
    try:
        split_dev(rows, fraction=fraction, seed=seed)
    except DataError as error:
        distinct = counted(len({text_key(row) for row in rows}), "distinct text")
        remedy = "; a class needs at least 2" if kind == "classification" else ""
        raise InvalidInput(f"X holds {distinct}, too few to split a dev set off{remedy}") from error


@contextmanager
def _events(verbose: bool) -> Iterator[Emit]:
    """Yield a function that prints events, with the names of parameters, if `verbose`."""
    if not verbose:
        yield silent
        return
    from cramlm.cli.console import console_events

    with console_events() as emit:

        def emit_in_parameters(event: Event) -> None:
            emit(replace(event, message=in_parameters(event.message)))

        yield emit_in_parameters


class _Scratch:
    """A temporary folder that is deleted with this object or at the end of the process."""

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="cramlm-"))
        weakref.finalize(self, shutil.rmtree, self.path, ignore_errors=True)
