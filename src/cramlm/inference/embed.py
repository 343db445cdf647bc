"""Text vectors as files."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from cramlm.inference.base import BasePredictor
from cramlm.inference.folders import model_of
from cramlm.inference.predictor import load_predictor
from cramlm.linear.files import is_linear
from cramlm.records import FloatArray
from cramlm.storage.arrays import array_bytes


def embedder_at(path: Path, model_part: Literal["encoder", "static"]) -> BasePredictor:
    """Load the model at `path`, a run or a model; a linear one is loaded whatever `model_part` is.

    Raises:
        ArtifactError: if there is no model, or it is damaged. UsageError: if there is no model `model_part`.
    """
    folder = model_of(path)
    return load_predictor(folder, model_part="static" if is_linear(folder) else model_part)


def vectors_file(vectors: FloatArray, ids: Sequence[str], *, form: str, normalize: bool) -> bytes:
    """Return the content of a file of vectors (n, width) in order.

    form: .npy, the array; or .parquet, the columns id (string) and embedding (list of `width` float32). normalize: scale each vector to
    length 1; one of zeros, of a text without a known token, stays so.
    """
    if normalize:
        vectors = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), np.float32(1e-12))
    if form == ".npy":
        return array_bytes(vectors)
    import pyarrow as pa
    import pyarrow.parquet as pq

    assert form == ".parquet", "checked by the command"
    column = pa.FixedSizeListArray.from_arrays(pa.array(vectors.ravel()), vectors.shape[1])
    file = io.BytesIO()
    pq.write_table(pa.table({"id": pa.array(list(ids), pa.string()), "embedding": column}), file)
    return file.getvalue()
