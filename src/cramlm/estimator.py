"""The scikit-learn face of the pipeline: `fit(texts, labels)`, `predict(texts)`, in pipelines, cross-validation and grid searches.

    classifier = CramClassifier(corpus="corpus/*.jsonl.zst", budget="10m")
    classifier.fit(texts, labels).predict(["some text"])

The texts are written as a task file into a run folder, and from there on it is the run of `cramlm fit`: dev is split off inside, there is
no test file, corpus and index come from the shared store (so that ten folds index once). What is fitted is the run's exported folder;
the estimator itself holds no weights.
"""

from __future__ import annotations

import json
import math
import shutil
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted

from cramlm.errors import DataError, UsageError
from cramlm.records import FloatArray, silent
from cramlm.storage.artifacts import hash_json, open_artifact, publish, publish_file, refuse_foreign, wait_while_locked

if TYPE_CHECKING:
    from cramlm.config.run import RunConfig
    from cramlm.inference.linear import LinearPredictor
    from cramlm.inference.predictor import Predictor
    from cramlm.pipeline.run import Run


class InvalidInput(DataError, ValueError):  # noqa: N818 - scikit-learn's callers catch it as a ValueError
    """X or y breaks a rule; the message names the place, counted from 0."""


class CramClassifier(ClassifierMixin, BaseEstimator):  # type: ignore[misc]  # scikit-learn is not typed
    """A text classifier trained from scratch on the texts it is fitted on and on what they retrieve from `corpus`.

    corpus: files, folders or globs of raw text, one or several; None trains on the labels alone.
    recipe: a name of `cramlm.recipes.RECIPES`; None is tlm with a corpus, labels-only without. One that reads no corpus ignores it.
    init: folder of pretrained weights to start from, for recipes that can.
    budget: wall-clock time of one fit, like "10m"; a search over 5 folds takes it 5 times.
    settings: any other setting, as `--set` takes it: {"retriever.top_k": 20, "threads": 1}.
    out: folder for the runs, each in a subfolder of its own named by what went in, so that the same fit is not done twice and a stopped
    one goes on; None is a temporary folder that goes when the estimator does.
    store: where corpora and indexes are kept; None as for `cramlm fit`. verbose: show progress on stderr.

    Fitted: `classes_` (sorted, as they were given), `run_` (folder, config, scores of the run; its `export` is the model).
    """

    def __init__(
        self,
        *,
        corpus: str | Path | Sequence[str | Path] | None = None,
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
        """Train on texts (n,) and one label each (n,), of any sortable type.

        Raises:
            InvalidInput: (a ValueError) for lengths that differ, a text that is missing or blank, labels that are not classes.
            CramError: as `cramlm.fit`.
        """
        texts = checked_texts(X, "X")
        for place, text in enumerate(texts):
            if not text.strip():
                raise InvalidInput(f"X[{place}] is blank; there is nothing to learn from, drop it")
        classes, codes = checked_labels(y, len(texts))
        names = _names(classes)
        rows = [
            json.dumps({"text": text, "label": names[code]}, ensure_ascii=False) + "\n" for text, code in zip(texts, codes, strict=True)
        ]
        scratch = _Scratch() if self.out is None else None
        root = scratch.path if scratch is not None else Path(self.out or "")
        folder = root / f"fit-{hash_json([self._inputs(), rows])[:12]}"
        train = folder / "data" / "train.jsonl"
        self._config("")  # settings are checked before anything is written
        publish_file(train, "".join(rows).encode())
        config = self._config(str(train))
        run = self._run(config, folder)
        self.classes_, self.run_, self._scratch = classes, run, scratch
        self._open()
        return self

    def predict(self, X: Any) -> npt.NDArray[Any]:  # noqa: N803
        """The most probable class of each text, (n,), of the type that `fit` was given.

        Raises:
            NotFittedError: before `fit`. InvalidInput: if a text is not a string.
        """
        probabilities = self.predict_proba(X)
        answers: npt.NDArray[Any] = self.classes_[probabilities.argmax(axis=1)]
        return answers

    def predict_proba(self, X: Any) -> FloatArray:  # noqa: N803
        """Probability of each class for each text, float32 (n, classes), columns in the order of `classes_`.

        Raises:
            NotFittedError, InvalidInput: as `predict`.
        """
        check_is_fitted(self, ("classes_", "run_"))
        predictor = self._predictor or self._open()
        places = [predictor.labels.index(name) for name in _names(self.classes_)]
        probabilities: FloatArray = predictor.probabilities(checked_texts(X, "X"))[:, places]
        return probabilities

    def save(self, path: str | Path) -> Path:
        """Copy the model to `path` as a plain folder; `cramlm.Predictor.load` reads it, and transformers does unless it is linear.

        Raises:
            UsageError: if there is something else at `path`.
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
        """What a pickle or a copy holds: parameters, classes and the place of the run, no weights.

        Raises:
            UsageError: if the run lies in a temporary folder, where the copy would not find it.
        """
        state = dict(self.__dict__)
        if state.get("_scratch") is not None:
            raise UsageError(
                "a fitted CramClassifier is its run's folder, and this one is temporary: pass out='runs' before fit, or keep .save(path)"
            )
        if "_predictor" in state:
            state["_predictor"] = None
        return state

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.string, tags.input_tags.two_d_array, tags.input_tags.one_d_array = True, False, True
        return tags

    def _open(self) -> Predictor | LinearPredictor:
        from cramlm.inference.predictor import Predictor

        self._predictor = Predictor.load(self.run_.export)
        return self._predictor

    def _inputs(self) -> dict[str, Any]:
        """The parameters that decide what is learnt, as plain data."""
        values = {name: value for name, value in self.get_params(deep=False).items() if name not in ("out", "store", "verbose")}
        return {**values, "corpus": self._corpus_files(), "settings": _overrides(self.settings)}

    def _corpus_files(self) -> list[str]:
        files = [] if self.corpus is None else [self.corpus] if isinstance(self.corpus, str | Path) else self.corpus
        return [str(file) for file in files]

    def _config(self, train: str) -> RunConfig:
        """The run of these parameters on a training file ("" stands for a typical one).

        Raises:
            UsageError: if a setting does not exist, is out of range, or is not for texts of one label each.
        """
        from cramlm.cli.options import recipe_data
        from cramlm.config.run import apply_overrides, load_config
        from cramlm.evaluation.kinds import require_single_label

        corpus, overrides = self._corpus_files(), _overrides(self.settings)
        given: dict[str, Any] = {"train": train, "budget": self.budget, "seed": self.seed, "dev_fraction": self.dev_fraction}
        given |= {"corpus": corpus, "init": None if self.init is None else str(self.init)}
        data = recipe_data(self.recipe or ("tlm" if corpus else "labels-only"), given, overrides)
        config = load_config(apply_overrides(data, overrides), origin="CramClassifier")
        require_single_label(config.task.kind, "CramClassifier", "use cramlm.fit, or the command, with files")
        return config

    def _run(self, config: RunConfig, folder: Path) -> Run:
        """The pipeline; waits while another process builds the same corpus, index or run, as parallel folds do."""
        from cramlm.pipeline.run import run

        with _events(self.verbose) as emit:
            return wait_while_locked(lambda: run(config, out=folder, store=self.store, emit=emit), stage="run", emit=emit)


def checked_texts(values: Any, name: str) -> list[str]:
    """A flat list of texts from a list, a NumPy array or a pandas Series.

    Raises:
        InvalidInput: for one string, something not flat, nothing at all, or a value that is not a text (its place is named).
    """
    if isinstance(values, str | bytes | Mapping | set | frozenset):
        raise InvalidInput(f"{name} is a {type(values).__name__}; pass a list of strings")
    if (dimensions := getattr(values, "ndim", 1)) != 1:
        raise InvalidInput(f"{name} has {dimensions} dimensions, expected 1: pass a flat list of texts, of a table one column")
    texts = []
    for place, value in enumerate(values):
        if not isinstance(value, str):
            missing = _is_missing(value)
            what = f"missing ({value})" if missing else f"{type(value).__name__} ({str(value)[:30]!r}), not a text"
            raise InvalidInput(f"{name}[{place}] is {what}; {'drop it, or fill it' if missing else 'convert it'}")
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise InvalidInput(f"{name}[{place}]: character {error.start} is a lone surrogate; remove it") from error
        texts.append(str(value))
    if not texts:
        raise InvalidInput(f"{name} holds no texts; a minimum of 1 is required")
    return texts


def checked_labels(values: Any, texts: int) -> tuple[npt.NDArray[Any], npt.NDArray[np.intp]]:
    """(the classes, sorted and of their own type; the place of each label among them).

    Raises:
        InvalidInput: for a number of labels other than `texts`, a missing or blank label (its place is named), labels that do not sort
        or are no classes, or one class only.
    """
    if isinstance(values, str | bytes) or (dimensions := getattr(values, "ndim", 1)) != 1:
        shown = f"one {type(values).__name__}" if isinstance(values, str | bytes) else f"of {dimensions} dimensions"
        raise InvalidInput(f"y is {shown}, expected one label per text in a flat list")
    labels = list(values)
    if len(labels) != texts:
        raise InvalidInput(f"X and y have inconsistent numbers of samples: {texts} texts, {len(labels)} labels")
    for place, label in enumerate(labels):
        if _is_missing(label):
            raise InvalidInput(f"y[{place}] is missing ({label}); drop the row, or label it")
        if isinstance(label, str) and not label.strip():
            raise InvalidInput(f"y[{place}] is blank; drop the row, or label it")
        if isinstance(label, str) != isinstance(labels[0], str):
            raise InvalidInput(f"y mixes text and other labels: y[0] is {labels[0]!r}, y[{place}] is {label!r}; convert them to one type")
    try:
        check_classification_targets(np.asarray(labels))
        classes, codes = np.unique(np.asarray(labels), return_inverse=True)
    except (TypeError, ValueError) as error:
        raise InvalidInput(f"y holds no classes: {error}") from error
    if len(classes) == 1:
        raise InvalidInput(f"y holds one class only ({classes[0]!r}); a classifier needs at least 2")
    return classes, codes


def _is_missing(value: Any) -> bool:
    """Return True for None, a float that is NaN, and the missing values of pandas, which cannot be compared."""
    return value is None or type(value).__name__ in ("NAType", "NaTType") or (isinstance(value, float | np.floating) and math.isnan(value))


def _names(classes: npt.NDArray[Any]) -> list[str]:
    """The classes as the model names them."""
    names = [str(label) for label in classes.tolist()]
    if len(set(names)) != len(names):
        raise InvalidInput("two classes have the same name when written as text; rename one")
    return names


def _overrides(settings: Mapping[str, Any] | None) -> list[str]:
    """Settings as `apply_overrides` reads them; JSON's scalars and lists are TOML's."""
    return [f"{key}={'none' if value is None else json.dumps(value)}" for key, value in (settings or {}).items()]


def _events(verbose: bool) -> Any:
    """A context that gives an `Emit`."""
    if not verbose:
        return nullcontext(enter_result=silent)
    from cramlm.cli.console import console_events

    return console_events()


class _Scratch:
    """A temporary folder that is removed with this object, or at the end of the process."""

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="cramlm-"))
        weakref.finalize(self, shutil.rmtree, self.path, ignore_errors=True)
