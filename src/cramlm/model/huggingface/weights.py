"""The tensor names of the native classes, and reading pretrained tensors into our model.

The encoder must be complete. Also loaded, as transformers would for a classifier and a language model: the vocabulary head, if complete;
of a classifier's head the layers below the labels (BERT's pooler, ModernBERT's prediction head, RoBERTa's dense layer). The rest of our
model keeps its initial weights. An unknown tensor is refused unless the native classes are known to have it, since the folder may compute
something else.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from cramlm.errors import ArtifactError, more
from cramlm.model.encoder import Shape
from cramlm.model.huggingface.config import WEIGHTS_FILE, open_weights
from cramlm.model.huggingface.pretrained import Pretrained
from cramlm.model.model import Model

PREFIXES: Final[dict[Shape, str]] = {"bert": "bert.", "roberta": "roberta.", "modernbert": "model.", "albert": "albert.", "moe": "encoder."}
"""Prefix of the encoder's tensors in a class with a head; absent if the encoder was saved alone."""

_POST_NORM: Final = (
    (r"^encoder\.word_embeddings$", "PREFIXembeddings.word_embeddings.weight"),
    (r"^encoder\.position_embeddings$", "PREFIXembeddings.position_embeddings.weight"),
    (r"^encoder\.token_type_embeddings$", "PREFIXembeddings.token_type_embeddings.weight"),
    (r"^encoder\.embedding_norm\.", "PREFIXembeddings.LayerNorm."),
    (r"^encoder\.layers\.(\d+)\.qkv\.", r"PREFIXencoder.layer.\1.attention.self.QKV."),
    (r"^encoder\.layers\.(\d+)\.attention_output\.", r"PREFIXencoder.layer.\1.attention.output.dense."),
    (r"^encoder\.layers\.(\d+)\.attention_norm\.", r"PREFIXencoder.layer.\1.attention.output.LayerNorm."),
    (r"^encoder\.layers\.(\d+)\.intermediate\.", r"PREFIXencoder.layer.\1.intermediate.dense."),
    (r"^encoder\.layers\.(\d+)\.output\.", r"PREFIXencoder.layer.\1.output.dense."),
    (r"^encoder\.layers\.(\d+)\.output_norm\.", r"PREFIXencoder.layer.\1.output.LayerNorm."),
)

_ALBERT_LAYER: Final = "albert.encoder.albert_layer_groups.0.albert_layers.0."

NATIVE_NAMES: Final[dict[Shape, tuple[tuple[str, str], ...]]] = {
    "bert": (
        *((ours, native.replace("PREFIX", "bert.")) for ours, native in _POST_NORM),
        (r"^classifier\.dense\.", "bert.pooler.dense."),
        (r"^classifier\.classifier\.", "classifier."),
        (r"^mlm_head\.dense\.", "cls.predictions.transform.dense."),
        (r"^mlm_head\.norm\.", "cls.predictions.transform.LayerNorm."),
        (r"^mlm_head\.decoder_bias$", "cls.predictions.bias"),
    ),
    "roberta": (
        *((ours, native.replace("PREFIX", "roberta.")) for ours, native in _POST_NORM),
        (r"^classifier\.dense\.", "classifier.dense."),
        (r"^classifier\.classifier\.", "classifier.out_proj."),
        (r"^mlm_head\.dense\.", "lm_head.dense."),
        (r"^mlm_head\.norm\.", "lm_head.layer_norm."),
        (r"^mlm_head\.decoder_bias$", "lm_head.bias"),
    ),
    "albert": (
        *((ours, native.replace("PREFIX", "albert.")) for ours, native in _POST_NORM[:4]),
        (r"^encoder\.widened\.", "albert.encoder.embedding_hidden_mapping_in."),
        (r"^encoder\.layers\.0\.qkv\.", f"{_ALBERT_LAYER}attention.QKV."),
        (r"^encoder\.layers\.0\.attention_output\.", f"{_ALBERT_LAYER}attention.dense."),
        (r"^encoder\.layers\.0\.attention_norm\.", f"{_ALBERT_LAYER}attention.LayerNorm."),
        (r"^encoder\.layers\.0\.intermediate\.", f"{_ALBERT_LAYER}ffn."),
        (r"^encoder\.layers\.0\.output\.", f"{_ALBERT_LAYER}ffn_output."),
        (r"^encoder\.layers\.0\.output_norm\.", f"{_ALBERT_LAYER}full_layer_layer_norm."),
        (r"^classifier\.dense\.", "albert.pooler."),
        (r"^classifier\.classifier\.", "classifier."),
        (r"^mlm_head\.dense\.", "predictions.dense."),
        (r"^mlm_head\.norm\.", "predictions.LayerNorm."),
        (r"^mlm_head\.decoder_bias$", "predictions.bias"),
    ),
    "moe": ((r"^", ""),),  # no native class: our names
    "modernbert": (
        (r"^encoder\.word_embeddings$", "model.embeddings.tok_embeddings.weight"),
        (r"^encoder\.embedding_norm\.", "model.embeddings.norm."),
        (r"^encoder\.layers\.(\d+)\.attention_norm\.", r"model.layers.\1.attn_norm."),
        (r"^encoder\.layers\.(\d+)\.qkv\.", r"model.layers.\1.attn.Wqkv."),
        (r"^encoder\.layers\.(\d+)\.attention_output\.", r"model.layers.\1.attn.Wo."),
        (r"^encoder\.layers\.(\d+)\.output_norm\.", r"model.layers.\1.mlp_norm."),
        (r"^encoder\.layers\.(\d+)\.wi\.", r"model.layers.\1.mlp.Wi."),
        (r"^encoder\.layers\.(\d+)\.output\.", r"model.layers.\1.mlp.Wo."),
        (r"^encoder\.final_norm\.", "model.final_norm."),
        (r"^classifier\.dense\.", "head.dense."),
        (r"^classifier\.norm\.", "head.norm."),
        (r"^classifier\.classifier\.", "classifier."),
        (r"^mlm_head\.dense\.", "head.dense."),
        (r"^mlm_head\.norm\.", "head.norm."),
        (r"^mlm_head\.decoder_bias$", "decoder.bias"),
    ),
}

TRAINING_ONLY: Final = ("generator.", "place_head.", "prompt_head.")  # in no file of native weights


def tensor_names(model: Model) -> dict[str, tuple[str, ...]]:
    """Our parameter -> its native names: three for the stacked queries, keys and values. Without parameters that only training needs."""
    names = {}
    for ours, _ in model.named_parameters():
        if ours.startswith(TRAINING_ONLY):
            continue
        native = [re.sub(pattern, to, ours) for pattern, to in NATIVE_NAMES[model.encoder_config.shape] if re.match(pattern, ours)]
        assert len(native) == 1, ours
        names[ours] = tuple(native[0].replace("QKV", part) for part in ("query", "key", "value")) if "QKV" in native[0] else (native[0],)
    return names


_DTYPES: Final = ("F32", "F16", "BF16")
_BESIDE: Final = re.compile(  # of the native classes, not in our model: buffers, copies of tied weights, heads for other tasks
    r"(.*\.)?(position_ids|token_type_ids)|head\.(dense|norm)\.weight|decoder\.weight|"
    r"(.*pooler(\.dense)?|cls\.seq_relationship|sop_classifier\.classifier|qa_outputs|score|(cls\.predictions|predictions|lm_head)\.decoder|"
    r"classifier(\.(dense|out_proj))?)\.(weight|bias)"
)
_MLM_HEADS: Final = ("cls.predictions", "predictions", "lm_head")
_TIED_BIASES: Final = {f"{head}.bias": f"{head}.decoder.bias" for head in _MLM_HEADS}
_TIED_MATRICES: Final = ("decoder.weight", *(f"{head}.decoder.weight" for head in _MLM_HEADS))


@dataclass(frozen=True, slots=True)
class LoadedWeights:
    """The result of loading: number of tensors, True if the vocabulary head is among them, names of tensors that were not used."""

    tensors: int
    mlm_head: bool
    unused: tuple[str, ...]


def load_pretrained_weights(model: Model, pretrained: Pretrained) -> LoadedWeights:
    """Copy the weights of the folder into the model; rows of token ids beyond the tokenizer's are dropped.

    Raises:
        ArtifactError: naming the tensor that is missing, of the wrong size or type, not finite, or unknown.
    """
    path = pretrained.folder / WEIGHTS_FILE
    parameters = dict(model.named_parameters())
    with open_weights(path) as weights:
        stored = _by_full_name(weights.keys(), PREFIXES[model.encoder_config.shape])
        names = tensor_names(model)
        encoder = [ours for ours in names if ours.startswith("encoder.")]
        if missing := [name for ours in encoder for name in names[ours] if name not in stored]:
            raise ArtifactError(
                f"{path}: tensor {missing[0]!r} is missing{more(missing)}, which config.json describes; pass another folder to --base-model"
            )
        head = _complete([ours for ours in names if ours.startswith("mlm_head.")], names, stored)
        below = [ours for ours in names if ours.startswith("classifier.") and not ours.startswith("classifier.classifier.")]
        loaded = {ours: names[ours] for ours in (*encoder, *head, *_complete(below, names, stored))}
        used = {name for group in loaded.values() for name in group}
        unused = sorted(stored[name] for name in stored.keys() - used)
        if unknown := [name for name in unused if not _BESIDE.fullmatch(name)]:
            raise ArtifactError(
                f"{path}: tensor {unknown[0]!r} has no place in this model{more(unknown)}; pass another folder to --base-model"
            )
        for ours, group in loaded.items():
            for name, target in zip(group, parameters[ours].detach().chunk(len(group)), strict=True):
                _copy(weights, stored[name], target, ours, path)
        if head:
            _check_tied(weights, stored, model.encoder.word_embeddings.detach(), path)
    return LoadedWeights(len(used), bool(head), tuple(unused))


def current_name(key: str) -> str:
    """Return a tensor's name with LayerNorm's weight and bias. Old BERT checkpoints, and transformers 5.0 to 5.5, write gamma and beta."""
    return re.sub(r"LayerNorm\.(gamma|beta)$", lambda match: f"LayerNorm.{'weight' if match[1] == 'gamma' else 'bias'}", key)


def _by_full_name(keys: Sequence[str], prefix: str) -> dict[str, str]:
    """Return the name of each tensor in a native class with a head -> its name in the file."""
    alone = not any(key.startswith(prefix) for key in keys)
    stored = {}
    for key in keys:
        name = current_name(key)
        stored[prefix + name if alone and not _belongs_to_head(name) else name] = key
    for bias, copy in _TIED_BIASES.items():
        if bias not in stored and copy in stored:
            stored[bias] = stored.pop(copy)
    return stored


def _belongs_to_head(name: str) -> bool:
    return name.startswith(("cls.", "predictions.", "lm_head.", "classifier.", "head.", "decoder."))


def _complete(ours: Sequence[str], names: Mapping[str, Sequence[str]], stored: Mapping[str, str]) -> list[str]:
    """These parameters if the folder has all of them, else none."""
    return list(ours) if all(name in stored for each in ours for name in names[each]) else []


def _copy(weights: Any, name: str, target: Tensor, ours: str, path: object) -> None:
    dtype = weights.get_slice(name).get_dtype()
    if dtype not in _DTYPES:
        raise ArtifactError(f"{path}: tensor {name!r} has dtype {dtype}, expected one of {', '.join(_DTYPES)}; save the model as float32")
    tensor: Tensor = weights.get_tensor(name).float()
    rows = target.shape[0]
    if ours in ("encoder.word_embeddings", "mlm_head.decoder_bias"):
        tensor = tensor[:rows]  # without rows beyond the last id, which pad to round numbers
    if ours == "encoder.token_type_embeddings":
        tensor = torch.cat([tensor, tensor[-1:].expand(rows, -1)])[:rows]  # only the first type is used
    if tensor.shape != target.shape:
        shapes = f"has shape {tuple(tensor.shape)}, config.json says {tuple(target.shape)}"
        raise ArtifactError(f"{path}: tensor {name!r} {shapes}; pass another folder to --base-model")
    if not torch.isfinite(tensor).all():
        raise ArtifactError(f"{path}: tensor {name!r} holds NaN or infinity; the file is damaged or its training failed")
    target.copy_(tensor)


def _check_tied(weights: Any, stored: Mapping[str, str], embedding: Tensor, path: object) -> None:
    """Refuse a vocabulary head whose last matrix is not the token embedding."""
    for name in _TIED_MATRICES:
        if name in stored and not torch.equal(weights.get_tensor(stored[name]).float()[: len(embedding)], embedding):
            raise ArtifactError(f"{path}: tensor {name!r} is not the token embedding; only tied vocabulary heads are read")
