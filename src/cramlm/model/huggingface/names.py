"""Which tensor of the native classes each of our parameters is: patterns of our names, and theirs."""

from __future__ import annotations

import re
from typing import Final

from cramlm.model.encoder import Shape
from cramlm.model.model import Model

PREFIXES: Final[dict[Shape, str]] = {"bert": "bert.", "roberta": "roberta.", "modernbert": "model.", "albert": "albert.", "moe": "encoder."}
"""What stands before the encoder's tensors where a head is on top, and is missing where an encoder was saved alone."""

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

TRAINING_ONLY: Final = ("generator.", "place_head.", "prompt_head.")  # what no file of native weights holds


def tensor_names(model: Model) -> dict[str, tuple[str, ...]]:
    """Our parameter -> its native names; three for the queries, keys and values that we keep one below the other. Without those that only
    training needs.
    """
    names = {}
    for ours, _ in model.named_parameters():
        if ours.startswith(TRAINING_ONLY):
            continue
        native = [re.sub(pattern, to, ours) for pattern, to in NATIVE_NAMES[model.encoder_config.shape] if re.match(pattern, ours)]
        assert len(native) == 1, ours
        names[ours] = tuple(native[0].replace("QKV", part) for part in ("query", "key", "value")) if "QKV" in native[0] else (native[0],)
    return names
