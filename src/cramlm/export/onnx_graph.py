"""A classifier as an ONNX graph over padded rows: one sequence per row, padded at the end.

    input_ids, attention_mask (batch, length) int64 -> logits (batch, labels) float32

The graph is written node by node: tracing the model with torch.onnx takes 19 CPU seconds, this 0.1. It is the
formulas of model/encoder.py and model/heads.py without dropout, for all shapes but `moe`; a change there needs the same one here, and
every export compares the logits of both. Shapes: R rows, L positions, D hidden size, H heads.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, assert_never

import torch
from torch import Tensor, nn

from cramlm.model.encoder import BertEncoder, Encoder, ModernBertEncoder, Norm
from cramlm.model.heads import BertClassifier, Classifier, ModernBertClassifier
from cramlm.model.model import Model

OPSET, IR_VERSION = 20, 9  # the first with Gelu
INPUTS = ("input_ids", "attention_mask")


def write_graph(model: Model, path: Path) -> None:
    """Write the graph of a classifier, for any batch size and for lengths up to the model's positions."""
    from onnx import TensorProto, helper, save_model

    writer = _Writer(model.encoder_config.max_positions)
    pooled = writer.pooled(writer.encoded(model.encoder, model.encoder_config.heads), model.head_config.pooling)
    logits = writer.classified(pooled, model.classifier)
    inputs = [helper.make_tensor_value_info(name, TensorProto.INT64, ["batch", "length"]) for name in INPUTS]
    labels = model.classifier.classifier.out_features
    output = helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", labels])
    writer.nodes.append(helper.make_node("Identity", [logits], ["logits"]))
    graph = helper.make_graph(writer.nodes, "classifier", inputs, [output], writer.constants)
    opset = helper.make_opsetid("", OPSET)
    save_model(helper.make_model(graph, opset_imports=[opset], ir_version=IR_VERSION, producer_name="cramlm"), path)


class _Writer:
    """Nodes and constants of a graph. A `str` is the name of a value; a tensor given to `node` becomes a constant."""

    def __init__(self, positions: int) -> None:
        """positions: the largest L."""
        self.nodes: list[Any] = []
        self.constants: list[Any] = []
        self._weights: dict[Tensor, str] = {}
        self._positions = positions
        length = self.node("Gather", self.node("Shape", INPUTS[0]), torch.tensor(1))
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
        real = self.node("Unsqueeze", self.node("Cast", INPUTS[1], to=1), torch.tensor([2]))  # float32, (R, L, 1)
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
        embedded = self.node("Gather", self._weight(encoder.word_embeddings), INPUTS[0])
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
        x = self._norm(self.node("Gather", self._weight(encoder.word_embeddings), INPUTS[0]), encoder.embedding_norm)
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
        """(R, 1, L, L): 0 where both positions are of the sequence, or both padding, and at most `reach` apart; -inf elsewhere."""
        both = [self.node("Unsqueeze", INPUTS[1], torch.tensor(axes)) for axes in ([1, 3], [1, 2])]
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
        """The constant of a parameter, also if several layers share it."""
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
