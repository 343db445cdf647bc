"""`CramClassifier`, a scikit-learn classifier for texts: works in pipelines, cross-validation and grid searches.

    classifier = CramClassifier(corpus="corpus/*.jsonl.zst", budget="10m")
    classifier.fit(texts, labels).predict(["some text"])

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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

import numpy as np
import numpy.typing as npt
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted

from cramlm.data.task import split_dev, text_key
from cramlm.errors import CramError, DataError, UsageError, brief, counted
from cramlm.records import Emit, Event, Example, FloatArray, silent
from cramlm.storage.artifacts import MANIFEST, hash_json, open_artifact, publish, publish_file, refuse_foreign
from cramlm.storage.locks import lock, wait_while_locked

if TYPE_CHECKING:
    from cramlm.config.run import RunConfig
    from cramlm.inference.predictor import AnyPredictor
    from cramlm.pipeline.run import Run


class InvalidInput(DataError, ValueError):  # noqa: N818 - scikit-learn's callers catch it as a ValueError
    """X, y or a file of the corpus is invalid; the message has the index in X or y, counted from 0, or the file and line."""


class InvalidParameter(UsageError, ValueError):  # noqa: N818 - as above
    """A parameter is invalid, or parameters exclude each other."""


_PARAMETERS: Final = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"= \(--[a-z-]+ FILES\)", "="),  # "corpus= (--corpus FILES)"
        (r"\(--base-model FOLDER, ", "(a folder "),
        (r"--set (['\"])([^'\"=]+)=.*?\1:", r"settings['\2']:"),
        (r"--set ([\w.\[\]]+)=(\w+)", r'settings={"\1": \2}'),
        (r"--text-column \(where.*?\)", 'settings={"corpus.text_column": NAME}'),
        (r"--id-column", 'settings={"corpus.id_column": NAME}'),
        (r"--on-bad-row skip", 'settings={"corpus.on_bad_row": "skip"}'),
        (r"--device (\w+)", r'settings={"device": "\1"}'),
        (r"pass --task-type (\S+)( --label-separator '.')?", r'use cramlm.fit with files and kind="\1"'),
        (r"--budget ([\w.]+)", r'budget="\1"'),
        (r"a smaller --preset", 'a smaller encoder, as in settings={"encoder.hidden": 128}'),
        (r"--base-model", "init"),
        (r"--(corpus|unlabelled|recipe|seed|out|store)\b", r"\1"),
    )
]
"""Options of the command line in messages, and what to write in Python."""


def in_parameters(message: str) -> str:
    """Return a message with the parameters of `CramClassifier` in place of the options of the command line."""
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


class CramClassifier(ClassifierMixin, BaseEstimator):  # type: ignore[misc]  # scikit-learn is not typed
    """A text classifier trained from scratch on labelled texts and on the passages of `corpus` that they retrieve.

    corpus: files, folders or globs of raw text, one or several; None trains on the labels alone.
    unlabelled: further texts of the task (n,), whose labels are unknown; used with a corpus (docs/guides/unlabelled.md).
    recipe: a name of `cramlm.recipes.RECIPES`; None is tlm with a corpus, labels-only without. A recipe without retrieval ignores `corpus`.
    init: folder of pretrained weights, for recipes that can start from one.
    budget: wall-clock time of one fit, like "10m"; 5 folds take it 5 times.
    settings: other settings, as in `--set`: {"retriever.top_k": 20, "threads": 1}.
    out: folder for the runs, each in a subfolder named by a hash of its inputs, so that an equal fit is loaded and a stopped one continues;
    None is a temporary folder that is deleted with the estimator; a pickle of the estimator then contains the exported model.
    store: folder for corpora and indexes; None is the default of `cramlm fit`. verbose: show progress on stderr.

    Fitted attributes: `classes_` (sorted, with their own type), `run_` (folder, config and scores of the run; `run_.export` is the model).
    """

    def __init__(
        self,
        *,
        corpus: str | Path | Sequence[str | Path] | None = None,
        unlabelled: Sequence[str] | None = None,
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

    def fit(self, X: Any, y: Any) -> Self:  # noqa: N803 - scikit-learn's name
        """Train on texts (n,) and labels (n,) of any sortable type.

        Raises:
            InvalidInput, InvalidParameter: (ValueErrors) for different lengths, a missing or blank text, labels that are not classes, too
            few different texts to split a dev set off; for an unknown setting. CramError: as `cramlm.fit`.
        """
        with _errors_in_parameters():
            return self._fit(X, y)

    def _fit(self, X: Any, y: Any) -> Self:  # noqa: N803
        texts = checked_texts(X, "X")
        for index, text in enumerate(texts):
            if not text.strip():
                raise InvalidInput(f"X[{index}] is blank; drop it")
        classes, codes = checked_labels(y, len(texts))
        names = _names(classes)
        rows = [
            json.dumps({"text": text, "label": names[code]}, ensure_ascii=False) + "\n" for text, code in zip(texts, codes, strict=True)
        ]
        further = [] if self.unlabelled is None else checked_texts(self.unlabelled, "unlabelled")
        scratch = _Scratch() if self.out is None else None
        root = scratch.path if scratch is not None else Path(self.out or "")
        folder = root / f"fit-{hash_json([self._inputs(), rows])[:12]}"
        train, more = folder / "data" / "train.jsonl", folder / "data" / "unlabelled.jsonl"
        if self._config("", []).task.dev is None:  # also validates the settings before files are written
            _check_dev_split(texts, [names[code] for code in codes], fraction=self.dev_fraction, seed=int(self.seed))

        def write_inputs() -> None:
            with lock(folder / "run"):  # which marks the folder as that of a run
                publish_file(train, "".join(rows).encode())
                if further:
                    publish_file(more, "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in further).encode())

        with _events(self.verbose) as emit:
            wait_while_locked(write_inputs, stage="run", emit=emit)
        config = self._config(str(train), [str(more)] if further else [])
        run = self._run(config, folder)
        run = replace(run, path=run.path.absolute())  # so that the model is found after a change of the working directory
        self.classes_, self.run_, self._scratch = classes, run, scratch
        self._open()
        return self

    def predict(self, X: Any) -> npt.NDArray[Any]:  # noqa: N803
        """Return the most probable class of each text, (n,), with the type of the labels.

        Raises:
            NotFittedError: before `fit`. InvalidInput: if a text is not a string.
        """
        probabilities = self.predict_proba(X)
        predictions: npt.NDArray[Any] = self.classes_[probabilities.argmax(axis=1)]
        return predictions

    def predict_proba(self, X: Any) -> FloatArray:  # noqa: N803
        """Return the probability of each class, float32 (n, classes), columns in the order of `classes_`.

        Raises:
            NotFittedError, InvalidInput: as `predict`.
        """
        check_is_fitted(self, ("classes_", "run_"))
        predictor = self._predictor or self._open()
        columns = [predictor.labels.index(name) for name in _names(self.classes_)]
        probabilities: FloatArray = predictor.probabilities(checked_texts(X, "X"))[:, columns]
        return probabilities

    def predict_or_abstain(self, X: Any, *, below: float) -> tuple[npt.NDArray[Any], npt.NDArray[np.float64]]:  # noqa: N803
        """Return (labels, confidences), each (n,): the most probable class, or None if its confidence is lower than `below`.

        The labels are an object array. Confidence is calibrated on the dev rows that `fit` splits off (evaluation/confidence.py).

        Raises:
            NotFittedError, InvalidInput: as `predict`. UsageError: if `below` is not in [0, 1].
        """
        from cramlm.inference.base import check_threshold

        check_is_fitted(self, ("classes_", "run_"))
        check_threshold(below)
        predictor = self._predictor or self._open()
        probabilities = predictor.probabilities(checked_texts(X, "X"))
        confidences = predictor.calibrated().of(probabilities)
        names = dict(zip(_names(self.classes_), self.classes_.tolist(), strict=True))
        labels = np.array([names[predictor.labels[index]] for index in probabilities.argmax(axis=1)], dtype=object)
        labels[confidences < below] = None
        return labels, confidences

    def threshold(self, *, accuracy: float) -> float:
        """Return the lowest `below` of `predict_or_abstain` for which at least this share of the labels is right on dev.

        Raises:
            NotFittedError: before `fit`. UsageError: if no threshold reaches it.
        """
        check_is_fitted(self, ("classes_", "run_"))
        return (self._predictor or self._open()).threshold(accuracy=accuracy)

    def save(self, path: str | Path) -> Path:
        """Copy the model to the folder `path` for `cramlm.Predictor.load`, and for transformers if it is an encoder.

        Raises:
            UsageError: if `path` exists and is not such a folder.
        """
        check_is_fitted(self, ("classes_", "run_"))
        export = open_artifact(self.run_.export, kind="export")

        def copy(folder: Path) -> None:
            for name in export.files:
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(export.path / name, folder / name)

        refuse_foreign(Path(path), kind=export.kind)
        return publish(Path(path), kind=export.kind, key=export.key, write=copy).path

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

        self._predictor = Predictor.load(self.run_.export)
        return self._predictor

    def _inputs(self) -> dict[str, Any]:
        """Return the parameters that affect the model, as plain data."""
        values = {name: _plain(value) for name, value in self.get_params(deep=False).items() if name not in ("out", "store", "verbose")}
        further = None if self.unlabelled is None else list(map(str, self.unlabelled))
        return {**values, "corpus": self._corpus_files(), "unlabelled": further, "settings": _overrides(self.settings)}

    def _corpus_files(self) -> list[str]:
        files = [] if self.corpus is None else [self.corpus] if isinstance(self.corpus, str | Path) else self.corpus
        return [str(file) for file in files]

    def _config(self, train: str, unlabelled: list[str]) -> RunConfig:
        """Return the run config for a training file ("" for a typical one) and files of unlabelled texts.

        Raises:
            UsageError: if a setting does not exist, is out of range, or is not for classification.
        """
        from cramlm.cli.options import recipe_data
        from cramlm.config.run import apply_overrides, load_config
        from cramlm.evaluation.kinds import require_single_label

        inputs = self._inputs()
        arguments = {name: inputs[name] for name in ("corpus", "init", "budget", "seed", "dev_fraction")} | {"train": train}
        arguments |= {"unlabelled": unlabelled} if unlabelled else {}
        overrides = inputs["settings"]
        data = recipe_data(self.recipe or ("tlm" if inputs["corpus"] else "labels-only"), arguments, overrides)
        config = load_config(apply_overrides(data, overrides), origin="CramClassifier")
        require_single_label(config.task.kind, "CramClassifier", "use cramlm.fit, or the command, with files")
        return config

    def _run(self, config: RunConfig, folder: Path) -> Run:
        """Run the pipeline; wait while another process (a parallel fold) builds the same corpus, index or run."""
        from cramlm.pipeline.run import run

        with _events(self.verbose) as emit:
            return wait_while_locked(lambda: run(config, out=folder, store=self.store, emit=emit), stage="run", emit=emit)


def checked_texts(values: Any, name: str) -> list[str]:
    """Return a list of texts from a list, a NumPy array or a pandas Series.

    Raises:
        InvalidInput: for a single string, several dimensions, no texts, or a value that is not a string (with its index).
    """
    if isinstance(values, str | bytes | Mapping | set | frozenset):
        raise InvalidInput(f"{name} is a {type(values).__name__}; pass a list of strings")
    if (dimensions := getattr(values, "ndim", 1)) != 1:
        raise InvalidInput(f"{name} has {dimensions} dimensions, expected 1: pass a list of texts or one column of a table")
    texts = []
    for index, value in enumerate(values):
        if not isinstance(value, str):
            missing = _is_missing(value)
            what = f"missing ({value})" if missing else f"{type(value).__name__} ({str(value)[:30]!r}), not a text"
            raise InvalidInput(f"{name}[{index}] is {what}; {'drop it, or fill it' if missing else 'convert it'}")
        _refuse_surrogates(value, f"{name}[{index}]")
        texts.append(str(value))
    if not texts:
        raise InvalidInput(f"{name} holds no texts; a minimum of 1 is required")
    return texts


def checked_labels(values: Any, texts: int) -> tuple[npt.NDArray[Any], npt.NDArray[np.intp]]:
    """Return the sorted classes, with their own type, and the index of each label among them.

    Raises:
        InvalidInput: if the number of labels is not `texts`, a label is missing or blank (with its index), labels cannot be sorted or are
        not classes, or there is only one class, or more than one for two texts.
    """
    if isinstance(values, str | bytes) or (dimensions := getattr(values, "ndim", 1)) != 1:
        shown = f"one {type(values).__name__}" if isinstance(values, str | bytes) else f"of {dimensions} dimensions"
        raise InvalidInput(f"y is {shown}, expected one label per text in a flat list")
    labels = list(values)
    if len(labels) != texts:
        raise InvalidInput(f"X and y have inconsistent numbers of samples: {texts} texts, {len(labels)} labels")
    for index, label in enumerate(labels):
        if _is_missing(label):
            raise InvalidInput(f"y[{index}] is missing ({label}); drop the row, or label it")
        if isinstance(label, str) and not label.strip():
            raise InvalidInput(f"y[{index}] is blank; drop the row, or label it")
        if isinstance(label, str):
            _refuse_surrogates(label, f"y[{index}]")
        elif isinstance(label, list | tuple | np.ndarray):
            raise InvalidInput(f"y[{index}] is a {type(label).__name__} ({str(label)[:30]}); expected one label per text in a flat list")
        if isinstance(label, str) != isinstance(labels[0], str):
            raise InvalidInput(
                f"y mixes text and other labels: y[0] is {_shown(labels[0])}, y[{index}] is {_shown(label)}; convert them to one type"
            )
    try:
        check_classification_targets(np.asarray(labels))
        classes, codes = np.unique(np.asarray(labels), return_inverse=True)
    except (TypeError, ValueError) as error:
        raise InvalidInput(f"y holds no classes: {error}") from error
    if len(classes) == 1:
        raise InvalidInput(f"y holds one class only ({_shown(classes[0])}); a classifier needs at least 2")
    if len(classes) > texts / 2:
        raise InvalidInput(f"y holds {len(classes):,} classes for {texts:,} texts, more than one per two texts; are these ids or numbers?")
    return classes, codes


def _shown(label: Any) -> str:
    """A label as it is written in Python: a NumPy scalar without its type."""
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
        UsageError: if a value is none of JSON.
    """
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


def _check_dev_split(texts: Sequence[str], labels: Sequence[str], *, fraction: float, seed: int) -> None:
    """Raise InvalidInput if no dev set can be split off."""
    rows = [Example(str(index), text, None, label) for index, (text, label) in enumerate(zip(texts, labels, strict=True))]
    try:
        split_dev(rows, fraction=fraction, seed=seed)
    except DataError as error:
        distinct = counted(len({text_key(row) for row in rows}), "distinct text")
        raise InvalidInput(f"X holds {distinct}, too few to split a dev set off; a class needs at least 2") from error


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
