"""A run's linear model as a folder that needs nothing of the run, neither torch nor transformers.

linear.json, linear.safetensors, tokenizer.json    the model (linear/model.py)
README.md                                          model card
provenance.json                                    what went in and what came out, as for an encoder (export.py)
"""

from __future__ import annotations

import importlib.metadata
import json
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from cramlm.errors import ArtifactError
from cramlm.export.card import model_card
from cramlm.linear.model import LinearModel
from cramlm.records import Emit, Event, silent
from cramlm.storage.artifacts import Artifact, stage

KIND: Final = "export"
_PACKAGES: Final = ("cramlm", "numpy", "safetensors", "scikit-learn", "scipy", "tokenizers")


def export_linear(out: Path, model: LinearModel, *, provenance: Mapping[str, Any], key: Mapping[str, Any], emit: Emit = silent) -> Artifact:
    """Publish the folder at `out`, or leave it if it is there with this `key`.

    Raises:
        ArtifactError: if the folder, read back, gives other logits than the model (nothing is published).
    """

    def write(folder: Path) -> None:
        emit(Event("start", KIND))
        model.save(folder)
        facts = {
            "model": "static" if model.vectors is not None else "tfidf",
            "labels": list(model.labels),
            "kind": model.kind,
            "parameters": int(model.coefficients.weights.size + model.coefficients.bias.size),
            "versions": {"python": platform.python_version(), **{name: importlib.metadata.version(name) for name in _PACKAGES}},
            **provenance,
        }
        (folder / "provenance.json").write_text(json.dumps(facts, indent=1, ensure_ascii=False, allow_nan=False) + "\n", "utf-8")
        (folder / "README.md").write_text(model_card(facts), "utf-8")
        probes = [*model.labels, *(part.terms[0] for part in model.tfidf.parts if part.terms)]
        if not np.array_equal(LinearModel.load(folder).logits(probes), model.logits(probes)):
            raise ArtifactError(f"{out}: read back, the model gives other logits; nothing was published, export again")
        size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
        emit(Event("done", KIND, f"{out}: {size / 1e6:.1f} MB, read back with equal logits"))

    return stage(out, kind=KIND, key={**key, "code_format": 2}, write=write, emit=emit)
