"""Export a model as an ONNX graph that runs without torch.

    model.onnx          input_ids, attention_mask (batch, length) int64 -> logits (batch, labels) float32; batch and length are free
    tokenizer.json, tokenizer_config.json, config.json      copies
    combination/, confidence.json     as in the model's folder
    onnx.json           labels, max_length, weights (fp32 or int8), whether it reads pairs, the columns of its training file, the result of
                        the check, versions

Before the folder is published `OnnxPredictor` loads it: its logits for held-out texts must equal those of the model. int8 quantizes
weights statically and activations dynamically; this changes predictions, so the share of texts with an equal label is reported and stored.

The graph is written node by node in 0.1 CPU seconds; tracing the model with torch.onnx takes 19. It repeats the formulas of
model/encoder.py and model/heads.py without dropout, for all shapes but `moe`; a change there needs the same change here. A row of the
input is one sequence, padded at its end. Shapes: R rows, L positions, D hidden size, H heads.
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
from typing import Any, assert_never

import numpy as np
import torch
from torch import Tensor, nn

from cramlm.errors import ArtifactError, EnvironmentFault, UsageError, counted, size
from cramlm.evaluation.confidence import CONFIDENCE_FILE, ConfidenceFile
from cramlm.evaluation.kinds import KINDS
from cramlm.evaluation.prediction import predict_logits, sequences_of
from cramlm.inference.base import SETTINGS_FILE, are_pairs, read_provenance
from cramlm.inference.folders import folder_of_form, model_of, texts_for_check
from cramlm.inference.linear import COMBINATION_FOLDER, CombinedModels, has_combination
from cramlm.inference.onnx import GRAPH_FILE, OnnxPredictor
from cramlm.linear.files import is_linear
from cramlm.model.encoder import BertEncoder, Encoder, ModernBertEncoder, Norm
from cramlm.model.heads import BertClassifier, Classifier, ModernBertClassifier
from cramlm.model.huggingface.folder import LoadedModel, load_classifier
from cramlm.model.model import Model
from cramlm.records import Emit, Event, Example, FloatArray, silent
from cramlm.storage.artifacts import Artifact, hash_file, hash_json, refuse_foreign, write_json
from cramlm.storage.stages import stage

KIND = "onnx"
CODE_FORMAT = 5  # raise it when the same model would give another folder
LARGEST_DIFFERENCE = 1e-4
_COLUMNS = ("text_column", "text_pair_column", "label_column", "label_separator")
_COPIED = ("tokenizer.json", "tokenizer_config.json", "config.json")
_PACKAGES = ("onnx", "onnxruntime")
_OPSET, _IR_VERSION = 20, 9  # the first with Gelu
_INPUTS = ("input_ids", "attention_mask")


def export_onnx(
    path: Path, *, int8: bool = False, out: Path | None = None, texts: Sequence[Example] | None = None, emit: Emit = silent
) -> Artifact:
    """Publish the ONNX form of `path` (a run or an exported model), or keep the existing one of the same model and texts.

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
    probes = texts_for_check(path, texts, of="its ONNX form")
    target = out or folder_of_form(path, "onnx-int8" if int8 else "onnx")
    loaded = load_classifier(folder)
    if loaded.model.encoder_config.shape == "moe":
        raise UsageError(f"{folder}: a mixture of experts cannot be exported to ONNX; export another shape")
    if loaded.model.prompt is not None:
        raise UsageError(f"{folder}: a model with a prompt (prompt.json) cannot be exported to ONNX; export a classifier")

    task = (read_provenance(folder).get("config") or {}).get("task") or {}
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
        settings: dict[str, Any] = {
            "kind": loaded.model.kind,
            "labels": list(loaded.labels),
            "max_length": loaded.max_length,
            "pad_id": loaded.tokenizer.pad_id,
            "weights": "fp32",
            "pairs": are_pairs(read_provenance(folder)),
            "config": {"task": columns},
            "checked_texts": len(probes),
            "versions": {package: importlib.metadata.version(package) for package in ("cramlm", "torch", *_PACKAGES)},
        }
        sequences = sequences_of(loaded.tokenizer, probes, max_length=loaded.max_length)
        expected = predict_logits(loaded.model, sequences, precision="fp32")
        settings["largest_difference"] = difference = _checked_difference(_read_back(temporary, settings, probes), expected, loaded, target)
        message = f"logits within {difference:.0e} on {counted(len(probes), 'text')}"
        if int8:
            quantize(temporary / GRAPH_FILE)
            settings["weights"] = "int8"
            settings["int8"], of_int8 = _effect_of_int8(_read_back(temporary, settings, probes), expected, loaded)
            message = f"{of_int8} (fp32: {message})"
        write_json(temporary / SETTINGS_FILE, settings)
        emit(Event("done", KIND, f"{target}: {size((temporary / GRAPH_FILE).stat().st_size)}, {message}"))

    refuse_foreign(target, kind=KIND)
    beside = [CONFIDENCE_FILE] * (folder / CONFIDENCE_FILE).is_file()
    beside += [file.relative_to(folder).as_posix() for file in sorted((folder / COMBINATION_FOLDER).rglob("*")) if file.is_file()]
    files = {file: hash_file(folder / file) for file in (*_COPIED, "model.safetensors", *beside)}
    key = {"code_format": CODE_FORMAT, "int8": int8, "model": hash_json(files), "texts": hash_json([[e.text, e.text_pair] for e in probes])}
    key["columns"] = hash_json(columns)
    return stage(target, kind=KIND, key=key, write=write, emit=emit)


def _checked_difference(logits: FloatArray, expected: FloatArray, loaded: LoadedModel, target: Path) -> float:
    """Return the largest difference between the logits of the graph and those of the model, both (n, labels).

    Raises:
        ArtifactError: if it is above `LARGEST_DIFFERENCE`, for a regression multiplied by the largest number, such as a year or a price.
    """
    difference = float(np.abs(logits - expected).max())
    unit = max(1.0, float(np.abs(expected).max())) if loaded.model.kind == "regression" else 1.0
    allowed = LARGEST_DIFFERENCE * unit
    if not difference <= allowed:  # so that NaN is refused too
        raise ArtifactError(
            f"{target}: the graph's logits differ by {difference:.1e} from the model's (at most {allowed:.0e} allowed); "
            "nothing was published, please report this"
        )
    return difference


def _effect_of_int8(logits: FloatArray, expected: FloatArray, loaded: LoadedModel) -> tuple[dict[str, float], str]:
    """Compare the logits (n, labels) of int8 with those of the model; return the result for onnx.json and as a message."""
    difference, texts = float(np.abs(logits - expected).max()), len(expected)
    if loaded.model.kind == "regression":
        return {"largest_difference": difference}, f"int8 differs by at most {difference:.3g} on {texts} texts"
    kind = KINDS[loaded.model.kind]
    predicted = [kind.predicted_labels(kind.outputs(values), loaded.labels) for values in (logits, expected)]
    agreement = float(np.mean([one == other for one, other in zip(*predicted, strict=True)]))
    labels = "label" if loaded.model.kind == "classification" else "labels"
    message = f"int8 gives the same {labels} for {agreement:.1%} of {texts} texts"
    return {"largest_difference": difference, "label_agreement": agreement}, message


def quantize(path: Path) -> None:
    """Replace a graph by its int8 form: static weights per tensor, dynamic activations."""
    import onnx
    from onnxruntime.quantization import QuantType, quantize_dynamic

    graph = onnx.load(path)
    del graph.graph.value_info[:]  # shape annotations, which the quantizer contradicts where it folds a transpose
    with _quietly():
        quantize_dynamic(graph, path, weight_type=QuantType.QInt8)


def _read_back(folder: Path, settings: dict[str, Any], examples: Sequence[Example]) -> FloatArray:
    (folder / SETTINGS_FILE).write_text(json.dumps(settings), "utf-8")
    pairs = [example.text_pair for example in examples]
    return OnnxPredictor.load(folder).logits([example.text for example in examples], pairs)


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


def write_graph(model: Model, path: Path) -> None:
    """Write the graph of a classifier, for any batch size and for lengths up to the model's positions."""
    from onnx import TensorProto, helper, save_model

    writer = _GraphWriter(model.encoder_config.max_positions)
    pooled = writer.pooled(writer.encoded(model.encoder, model.encoder_config.heads), model.head_config.pooling)
    logits = writer.classified(pooled, model.classifier)
    inputs = [helper.make_tensor_value_info(name, TensorProto.INT64, ["batch", "length"]) for name in _INPUTS]
    labels = model.classifier.classifier.out_features
    output = helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", labels])
    writer.nodes.append(helper.make_node("Identity", [logits], ["logits"]))
    graph = helper.make_graph(writer.nodes, "classifier", inputs, [output], writer.constants)
    opset = helper.make_opsetid("", _OPSET)
    save_model(helper.make_model(graph, opset_imports=[opset], ir_version=_IR_VERSION, producer_name="cramlm"), path)


class _GraphWriter:
    """Collects the nodes and constants of a graph. A `str` is the name of a value; a tensor passed to `node` becomes a constant."""

    def __init__(self, positions: int) -> None:
        """positions: the largest L."""
        self.nodes: list[Any] = []
        self.constants: list[Any] = []
        self._weights: dict[Tensor, str] = {}
        self._positions = positions
        length = self.node("Gather", self.node("Shape", _INPUTS[0]), torch.tensor(1))
        self._position = self.node("Range", torch.tensor(0), length, torch.tensor(1))  # (L,)

    def node(self, kind: str, *inputs: str | Tensor, **attributes: Any) -> str:
        (result,) = self._nodes(kind, 1, *inputs, **attributes)
        return result

    def encoded(self, encoder: Encoder, heads: int) -> str:
        """Hidden states (R, L, D)."""
        match encoder:
            case BertEncoder():
                return self._through_bert(encoder, heads)
            case ModernBertEncoder():
                return self._through_modernbert(encoder, heads)
            case _:
                assert_never(encoder)

    def pooled(self, hidden: str, pooling: str) -> str:
        """One vector per row: (R, L, D) -> (R, D)."""
        if pooling == "cls":
            return self.node("Gather", hidden, torch.tensor(0), axis=1)
        real = self.node("Unsqueeze", self.node("Cast", _INPUTS[1], to=1), torch.tensor([2]))  # float32, (R, L, 1)
        sums = [self.node("ReduceSum", each, torch.tensor([1]), keepdims=0) for each in (self.node("Mul", hidden, real), real)]
        return self.node("Div", *sums)

    def classified(self, pooled: str, classifier: Classifier) -> str:
        """(R, D) -> logits (R, labels)."""
        dense = self._linear(pooled, classifier.dense)
        match classifier:
            case BertClassifier():
                return self._linear(self.node("Tanh", dense), classifier.classifier)
            case ModernBertClassifier():
                return self._linear(self._norm(self.node("Gelu", dense), classifier.norm), classifier.classifier)
            case _:
                assert_never(classifier)

    def _through_bert(self, encoder: BertEncoder, heads: int) -> str:
        positions = encoder.position_embeddings[encoder.first_position :][: self._positions] + encoder.token_type_embeddings[0]
        embedded = self.node("Gather", self._weight(encoder.word_embeddings), _INPUTS[0])
        x = self._norm(self.node("Add", embedded, self.node("Gather", positions, self._position)), encoder.embedding_norm)
        x = x if encoder.widened is None else self._linear(x, encoder.widened)
        bias = self._bias(None)
        for number in range(encoder.passes):
            layer: Any = encoder.layers[number % len(encoder.layers)]
            attended = self._attention(self._linear(x, layer.qkv), bias, None, heads, layer.attention_output)
            x = self._norm(self.node("Add", x, attended), layer.attention_norm)
            changed = self._linear(self.node("Gelu", self._linear(x, layer.intermediate)), layer.output)
            x = self._norm(self.node("Add", x, changed), layer.output_norm)
        return x

    def _through_modernbert(self, encoder: ModernBertEncoder, heads: int) -> str:
        x = self._norm(self.node("Gather", self._weight(encoder.word_embeddings), _INPUTS[0]), encoder.embedding_norm)
        whole = window = self._bias(None), self._rotation(encoder, encoder.rope_theta)
        if encoder.global_every > 1:
            window = self._bias(encoder.reach), self._rotation(encoder, encoder.local_theta)
        layer: Any
        for index, layer in enumerate(encoder.layers):
            bias, rotation = window if index % encoder.global_every else whole
            read = self._norm(x, layer.attention_norm) if index else x
            x = self.node("Add", x, self._attention(self._linear(read, layer.qkv), bias, rotation, heads, layer.attention_output))
            value, gate = self._nodes("Split", 2, self._linear(self._norm(x, layer.output_norm), layer.wi), axis=-1, num_outputs=2)
            x = self.node("Add", x, self._linear(self.node("Mul", self.node("Gelu", value), gate), layer.output))
        return self._norm(x, encoder.final_norm)

    def _attention(self, qkv: str, bias: str, rotation: tuple[str, str] | None, heads: int, output: nn.Linear) -> str:
        """Queries, keys and values side by side, (R, L, 3 D) -> (R, L, D)."""
        size = output.in_features // heads
        by_head = [
            self.node("Transpose", self.node("Reshape", part, torch.tensor([0, 0, heads, size])), perm=[0, 2, 1, 3])
            for part in self._nodes("Split", 3, qkv, axis=-1, num_outputs=3)
        ]
        query, key = (part if rotation is None else self._rotated(part, *rotation) for part in by_head[:2])
        transposed = self.node("Transpose", key, perm=[0, 1, 3, 2])
        scores = self.node("MatMul", self.node("Mul", query, torch.tensor(size**-0.5)), transposed)
        context = self.node("MatMul", self.node("Softmax", self.node("Add", scores, bias), axis=-1), by_head[2])
        joined = self.node("Reshape", self.node("Transpose", context, perm=[0, 2, 1, 3]), torch.tensor([0, 0, heads * size]))
        return self._linear(joined, output)

    def _bias(self, reach: int | None) -> str:
        """(R, 1, L, L): 0 where both positions are tokens, or both padding, and at most `reach` apart; -inf elsewhere."""
        both = [self.node("Unsqueeze", _INPUTS[1], torch.tensor(axes)) for axes in ([1, 3], [1, 2])]
        visible = self.node("Equal", *both)
        if reach is not None:
            pair = [self.node("Unsqueeze", self._position, torch.tensor([axis])) for axis in (1, 0)]
            near = self.node("LessOrEqual", self.node("Abs", self.node("Sub", *pair)), torch.tensor(reach))
            visible = self.node("And", visible, near)
        return self.node("Where", visible, torch.tensor(0.0), torch.tensor(-torch.inf))

    def _rotation(self, encoder: ModernBertEncoder, theta: float) -> tuple[str, str]:
        """cos and sin for every position, (L, size / 2)."""
        rotation = encoder.rotation(torch.arange(self._positions)[None], theta)
        cos, sin = (self.node("Gather", table[0, :, 0], self._position) for table in rotation)
        return cos, sin

    def _rotated(self, x: str, cos: str, sin: str) -> str:
        first, second = self._nodes("Split", 2, x, axis=-1, num_outputs=2)
        turned = self.node("Sub", self.node("Mul", first, cos), self.node("Mul", second, sin))
        return self.node("Concat", turned, self.node("Add", self.node("Mul", second, cos), self.node("Mul", first, sin)), axis=-1)

    def _linear(self, x: str, layer: nn.Linear) -> str:
        product = self.node("MatMul", x, self._weight(layer.weight, transposed=True))
        return product if layer.bias is None else self.node("Add", product, self._weight(layer.bias))

    def _norm(self, x: str, norm: Norm) -> str:
        parameters = [self._weight(each) for each in (norm.weight, norm.bias) if each is not None]
        return self.node("LayerNormalization", x, *parameters, axis=-1, epsilon=norm.eps)

    def _weight(self, parameter: Tensor, *, transposed: bool = False) -> str:
        """Return the constant of a parameter, also if several layers share it."""
        if parameter not in self._weights:
            self._weights[parameter] = self._constant(parameter.T if transposed else parameter)
        return self._weights[parameter]

    def _nodes(self, kind: str, outputs: int, *inputs: str | Tensor, **attributes: Any) -> list[str]:
        from onnx import helper

        names = [each if isinstance(each, str) else self._constant(each) for each in inputs]
        results = [f"{kind}_{len(self.nodes)}_{number}" for number in range(outputs)]
        self.nodes.append(helper.make_node(kind, names, results, **attributes))
        return results

    def _constant(self, tensor: Tensor) -> str:
        from onnx import numpy_helper

        name = f"constant_{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(tensor.detach().contiguous().numpy(), name))
        return name
