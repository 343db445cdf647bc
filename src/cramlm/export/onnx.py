"""Export a model as an ONNX graph that runs without torch.

    model.onnx          input_ids, attention_mask (batch, length) int64 -> logits (batch, labels) float32; batch and length are free
    tokenizer.json, tokenizer_config.json, config.json      copies
    combination/, confidence.json     as in the model's folder
    onnx.json           labels, max_length, weights (fp32 or int8), whether it reads pairs, the columns of its training file, the result of
                        the check, versions

Before the folder is published `OnnxPredictor` loads it: its logits for held-out texts must equal those of the model. int8 quantizes
weights statically and activations dynamically; this changes predictions, so the share of texts with an equal label is reported and stored.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import logging
import shutil
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from cramlm.errors import ArtifactError, EnvironmentFault, UsageError, counted, size
from cramlm.evaluation.confidence import CONFIDENCE_FILE, ConfidenceFile
from cramlm.evaluation.evaluate import predict_logits, sequences_of
from cramlm.evaluation.kinds import KINDS
from cramlm.export.onnx_graph import write_graph
from cramlm.inference.base import SETTINGS_FILE, are_pairs, facts_of
from cramlm.inference.folders import model_of
from cramlm.inference.linear import COMBINATION_FOLDER, CombinedModels, has_combination
from cramlm.inference.onnx import GRAPH_FILE, OnnxPredictor
from cramlm.inference.predictor import folder_of_form, texts_for_check
from cramlm.linear.files import is_linear
from cramlm.model.huggingface.folder import LoadedModel, load_classifier
from cramlm.records import Emit, Event, Example, FloatArray, silent
from cramlm.storage.artifacts import Artifact, hash_file, hash_json, refuse_foreign, stage

KIND = "onnx"
CODE_FORMAT = 5  # raise it when the same model would give another folder
LARGEST_DIFFERENCE = 1e-4
MOST_TEXTS = 200
_COLUMNS = ("text_column", "text_pair_column", "label_column", "label_separator")
_COPIED = ("tokenizer.json", "tokenizer_config.json", "config.json")
_PACKAGES = ("onnx", "onnxruntime")


def export_onnx(
    path: Path, *, int8: bool = False, out: Path | None = None, texts: Sequence[Example] | None = None, emit: Emit = silent
) -> Artifact:
    """Publish the ONNX form of `path` (a run or an exported model), or keep the present one for the same model and texts.

    out: by default `onnx` or `onnx-int8` in the run, or beside a model outside of a run. texts: up to 200 to check the graph on; by default
    the run's dev and test texts.

    Raises:
        EnvironmentFault: if a package is missing. UsageError: if there are no texts for the check, or `out` holds something else.
        ArtifactError: if there is no model at `path`, or the graph gives other logits than the model (nothing is published).
    """
    folder = model_of(path)
    if is_linear(folder):
        raise UsageError(f"{folder}: a linear model has no ONNX form; use the folder itself, which needs no torch")
    if (folder / GRAPH_FILE).is_file():
        raise UsageError(f"{folder}: is an ONNX folder already; pass the run of an encoder, or the folder that it exported")
    _require_packages()
    probes = texts_for_check(path, texts, of="its ONNX form", limit=MOST_TEXTS)
    target = out or folder_of_form(path, "onnx-int8" if int8 else "onnx")
    loaded = load_classifier(folder)
    if loaded.model.encoder_config.shape == "moe":
        raise UsageError(f"{folder}: a mixture of experts cannot be exported to ONNX; export another shape")
    if loaded.model.prompt is not None:
        raise UsageError(f"{folder}: a model with a prompt (prompt.json) cannot be exported to ONNX; export a classifier")

    task = (facts_of(folder).get("config") or {}).get("task") or {}
    columns = {name: task[name] for name in _COLUMNS if name in task}

    def write(temporary: Path) -> None:
        emit(Event("start", KIND))
        for file in _COPIED:
            shutil.copyfile(folder / file, temporary / file)
        if has_combination(folder):
            CombinedModels.load(folder).save(temporary)
        if (confidence := ConfidenceFile.load(folder)) is not None:
            confidence.save(temporary)
        write_graph(loaded.model, temporary / GRAPH_FILE)
        facts: dict[str, Any] = {
            "kind": loaded.model.kind,
            "labels": list(loaded.labels),
            "max_length": loaded.max_length,
            "pad_id": loaded.tokenizer.pad_id,
            "weights": "fp32",
            "pairs": are_pairs(facts_of(folder)),
            "config": {"task": columns},
            "checked_texts": len(probes),
            "versions": {package: importlib.metadata.version(package) for package in ("cramlm", "torch", *_PACKAGES)},
        }
        expected = _logits(loaded, probes)
        difference = float(np.abs(_read_back(temporary, facts, probes) - expected).max())
        unit = max(1.0, float(np.abs(expected).max())) if loaded.model.kind == "regression" else 1.0  # years, or prices
        allowed = LARGEST_DIFFERENCE * unit
        if not difference <= allowed:  # so that NaN is refused too
            raise ArtifactError(
                f"{target}: the graph's logits differ by {difference:.1e} from the model's (at most {allowed:.0e} allowed); "
                "nothing was published, please report this"
            )
        facts["largest_difference"] = difference
        message = f"logits within {difference:.0e} on {counted(len(probes), 'text')}"
        if int8:
            quantize(temporary / GRAPH_FILE)
            facts["weights"] = "int8"
            quantized = _read_back(temporary, facts, probes)
            facts["int8"] = {"largest_difference": float(np.abs(quantized - expected).max())}
            if loaded.model.kind == "regression":
                message = f"int8 differs by at most {facts['int8']['largest_difference']:.3g} on {len(probes)} texts (fp32: {message})"
            else:
                agreement = _label_agreement(loaded, quantized, expected)
                facts["int8"]["label_agreement"] = agreement
                labels = "label" if loaded.model.kind == "classification" else "labels"
                message = f"int8 gives the same {labels} for {agreement:.1%} of {len(probes)} texts (as fp32: {message})"
        (temporary / SETTINGS_FILE).write_text(json.dumps(facts, indent=1, ensure_ascii=False, allow_nan=False) + "\n", "utf-8")
        emit(Event("done", KIND, f"{target}: {size((temporary / GRAPH_FILE).stat().st_size)}, {message}"))

    refuse_foreign(target, kind=KIND)
    beside = [CONFIDENCE_FILE] * (folder / CONFIDENCE_FILE).is_file()
    beside += [file.relative_to(folder).as_posix() for file in sorted((folder / COMBINATION_FOLDER).rglob("*")) if file.is_file()]
    files = {file: hash_file(folder / file) for file in (*_COPIED, "model.safetensors", *beside)}
    key = {"code_format": CODE_FORMAT, "int8": int8, "model": hash_json(files), "texts": hash_json([[e.text, e.text_pair] for e in probes])}
    key["columns"] = hash_json(columns)
    return stage(target, kind=KIND, key=key, write=write, emit=emit)


def _label_agreement(loaded: LoadedModel, logits: FloatArray, expected: FloatArray) -> float:
    """The share of texts whose predicted label, or labels, are the same."""
    kind = KINDS[loaded.model.kind]
    predicted = [kind.predicted_labels(kind.outputs(values), loaded.labels) for values in (logits, expected)]
    return float(np.mean([one == other for one, other in zip(*predicted, strict=True)]))


def quantize(path: Path) -> None:
    """Replace a graph by its int8 form: static weights per tensor, dynamic activations."""
    import onnx
    from onnxruntime.quantization import QuantType, quantize_dynamic

    graph = onnx.load(path)
    del graph.graph.value_info[:]  # shape annotations, which the quantizer contradicts where it folds a transpose
    with _quietly():
        quantize_dynamic(graph, path, weight_type=QuantType.QInt8)


def _read_back(folder: Path, facts: dict[str, Any], examples: Sequence[Example]) -> FloatArray:
    (folder / SETTINGS_FILE).write_text(json.dumps(facts), "utf-8")
    pairs = [example.text_pair for example in examples]
    return OnnxPredictor.load(folder).logits([example.text for example in examples], pairs)


def _logits(loaded: LoadedModel, examples: Sequence[Example]) -> FloatArray:
    sequences = sequences_of(loaded.tokenizer, examples, max_length=loaded.max_length)
    return predict_logits(loaded.model, sequences, precision="fp32", pad_id=loaded.tokenizer.pad_id)


def _require_packages() -> None:
    missing = [package for package in _PACKAGES if importlib.util.find_spec(package) is None]
    if missing:
        raise EnvironmentFault(f"ONNX needs {', '.join(missing)}, not installed here; run: pip install 'cramlm[onnx]'")


@contextmanager
def _quietly() -> Iterator[None]:
    """Silence the quantizer's warnings; the graph is checked afterwards."""
    loggers = [logging.getLogger(name) for name in ("onnxruntime", "")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
