"""The files of a linear model: their names, the settings that they store, and how they are read.

Finding and describing a linear model on disk loads neither scikit-learn, SciPy nor Numba.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias, TypeVar, get_args

from safetensors import SafetensorError

from cramlm.errors import ArtifactError
from cramlm.storage.locks import environment_faults

MODEL_FILE: Final = "linear.json"
WEIGHTS_FILE: Final = "linear.safetensors"
REBUILD: Final = "delete the folder and build it again"
_Content = TypeVar("_Content")

Scheme: TypeAlias = Literal["multinomial", "one-vs-rest", "ridge"]
ClassWeights: TypeAlias = Literal["uniform", "balanced"]
NAIVE_BAYES: Final = "naive-bayes"
_JOINED: Final = {"union": "tokens and characters", "marked": "tokens and segments between markers"}


@dataclass(frozen=True, slots=True)
class Setting:
    """The settings of a regression (linear/solvers.py).

    c: inverse L2 regularization. class_weights: balanced gives each label the same total weight. vector_weight: length of the text vector
    beside a row of n-grams of length 1; 0 without text vectors. unlabelled_weight: weight of all unlabelled texts together, as a multiple
    of the number of labelled ones; 0 without self-training (linear/self_training.py).
    """

    scheme: Scheme
    class_weights: ClassWeights
    c: float
    vector_weight: float = 0.0
    unlabelled_weight: float = 0.0

    def __str__(self) -> str:
        vectors = f", vector weight {self.vector_weight:g}" if self.vector_weight else ""
        unlabelled = f", unlabelled weight {self.unlabelled_weight:g}" if self.unlabelled_weight else ""
        classes = f", {self.class_weights} class weights" if self.scheme != "ridge" else ""
        return f"{self.scheme}{classes}, C = {self.c:g}{vectors}{unlabelled}"

    def as_dict(self) -> dict[str, Any]:
        """Return plain JSON values; `read_setting` reads them."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class BayesSetting:
    """The settings of naive Bayes (linear/bayes.py).

    passage_weight: weight of a passage; a labelled text has 1. scale: factor of a text's log-likelihood; its words are
    not independent, so that the sum over them is too confident.
    """

    passage_weight: float
    scale: float

    def __str__(self) -> str:
        return f"naive Bayes, passage weight {self.passage_weight:g}, scale {self.scale:g}"

    def as_dict(self) -> dict[str, Any]:
        """Return plain JSON values; `read_setting` reads them."""
        return {"scheme": NAIVE_BAYES, **asdict(self)}


def read_setting(values: Mapping[str, Any]) -> Setting | BayesSetting:
    """Read what `as_dict` returned; other keys are ignored.

    Raises:
        KeyError, TypeError, ValueError: if a value is missing or not allowed.
    """
    scheme = values["scheme"]
    if scheme == NAIVE_BAYES:
        return BayesSetting(float(values["passage_weight"]), float(values["scale"]))
    if scheme not in get_args(Scheme) or values["class_weights"] not in get_args(ClassWeights):
        raise ValueError("scheme or class_weights is none of the known ones")
    weights = (float(values[name]) for name in ("c", "vector_weight", "unlabelled_weight"))
    return Setting(scheme, values["class_weights"], *weights)


def terms_of(variant: str) -> str:
    """Return what the n-grams of a variant (linear/features.py) are of, as messages and pages name it."""
    return _JOINED.get(variant, variant)


def is_linear(folder: Path) -> bool:
    """Return True if the folder holds a linear model."""
    return (folder / MODEL_FILE).is_file()


def read_file(path: Path, parse: Callable[[bytes], _Content]) -> _Content:
    """Return `parse` of the content. parse: such as `json.loads`; raises ValueError, RecursionError or SafetensorError for a damaged file.

    Raises:
        ArtifactError: if the file is missing or damaged. EnvironmentFault: if it cannot be read.
    """
    try:
        with environment_faults(path):
            if not path.is_file():
                raise ArtifactError(f"{path}: missing; pass the folder of a linear model, or {REBUILD}")
            return parse(path.read_bytes())
    except (ValueError, RecursionError, SafetensorError) as error:
        raise ArtifactError(f"{path}: damaged ({error}); {REBUILD}") from error
