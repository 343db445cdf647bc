"""Train a small text classifier from scratch on labelled texts and the raw text retrieved for them (task-driven language modeling).

>>> run = cramlm.fit(cramlm.recipes.tlm(train="train.jsonl", corpus="corpus/*.jsonl.zst", budget="20m"), out="runs/mine")
>>> cramlm.Predictor.load("runs/mine/export").predict(["some text"])

Retrieval alone needs no labels:

>>> index = cramlm.Index.build("corpus/*.jsonl.zst", out="index")
>>> index.search(["some query"], top_k=10).texts()

Names are imported on first use: `import cramlm` loads neither torch nor transformers.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cramlm import recipes
    from cramlm.config.run import RunConfig
    from cramlm.errors import CramError
    from cramlm.estimator import CramClassifier, CramRegressor
    from cramlm.experiments.compare import compare
    from cramlm.experiments.grid import Grid
    from cramlm.inference.explain import Explanation, explain
    from cramlm.inference.onnx import OnnxPredictor
    from cramlm.inference.predictor import Predictor
    from cramlm.pipeline.run import Run
    from cramlm.pipeline.run import run as fit
    from cramlm.records import LabelsPrediction, NumberPrediction, Prediction, SelectivePrediction
    from cramlm.retrieval.index import Hits, Index

__version__ = "0.1.0"
__all__ = [
    "CramClassifier",
    "CramError",
    "CramRegressor",
    "Explanation",
    "Grid",
    "Hits",
    "Index",
    "LabelsPrediction",
    "NumberPrediction",
    "OnnxPredictor",
    "Prediction",
    "Predictor",
    "Run",
    "RunConfig",
    "SelectivePrediction",
    "compare",
    "explain",
    "fit",
    "recipes",
]

_MODULES = {
    "CramClassifier": ("cramlm.estimator", "CramClassifier"),
    "CramError": ("cramlm.errors", "CramError"),
    "CramRegressor": ("cramlm.estimator", "CramRegressor"),
    "Explanation": ("cramlm.inference.explain", "Explanation"),
    "Grid": ("cramlm.experiments.grid", "Grid"),
    "Hits": ("cramlm.retrieval.index", "Hits"),
    "Index": ("cramlm.retrieval.index", "Index"),
    "LabelsPrediction": ("cramlm.records", "LabelsPrediction"),
    "NumberPrediction": ("cramlm.records", "NumberPrediction"),
    "OnnxPredictor": ("cramlm.inference.onnx", "OnnxPredictor"),
    "Prediction": ("cramlm.records", "Prediction"),
    "Predictor": ("cramlm.inference.predictor", "Predictor"),
    "Run": ("cramlm.pipeline.run", "Run"),
    "RunConfig": ("cramlm.config.run", "RunConfig"),
    "SelectivePrediction": ("cramlm.records", "SelectivePrediction"),
    "compare": ("cramlm.experiments.compare", "compare"),
    "explain": ("cramlm.inference.explain", "explain"),
    "fit": ("cramlm.pipeline.run", "run"),
}


def check_system(platform: str) -> None:
    """Raise ImportError, or warn, in one line on a system on which cramlm is not tested. platform: `sys.platform`."""
    if platform == "win32":
        raise ImportError("cramlm needs Linux: Windows has neither flock nor resource limits; use WSL or a container")
    if platform != "linux":
        warnings.warn(f"cramlm is tested on Linux only; on {platform} results are published without an atomic exchange", stacklevel=3)


check_system(sys.platform)


def __getattr__(name: str) -> Any:
    if name == "recipes":
        return importlib.import_module("cramlm.recipes")
    if name not in _MODULES:
        raise AttributeError(f"module 'cramlm' has no attribute {name!r}; it has {', '.join(__all__)}")
    importlib.import_module("cramlm.io.machine").limit_spinning()
    module, attribute = _MODULES[name]
    return getattr(importlib.import_module(module), attribute)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
