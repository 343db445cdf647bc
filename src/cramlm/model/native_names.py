"""Which tensor of BERT's and ModernBERT's native classes each of our parameters is: patterns of our names, and theirs."""

from __future__ import annotations

from typing import Final

from cramlm.model.encoder import Shape

NATIVE_NAMES: Final[dict[Shape, tuple[tuple[str, str], ...]]] = {
    "bert": (
        (r"^encoder\.word_embeddings$", "bert.embeddings.word_embeddings.weight"),
        (r"^encoder\.position_embeddings$", "bert.embeddings.position_embeddings.weight"),
        (r"^encoder\.token_type_embeddings$", "bert.embeddings.token_type_embeddings.weight"),
        (r"^encoder\.embedding_norm\.", "bert.embeddings.LayerNorm."),
        (r"^encoder\.layers\.(\d+)\.qkv\.", r"bert.encoder.layer.\1.attention.self.QKV."),
        (r"^encoder\.layers\.(\d+)\.attention_output\.", r"bert.encoder.layer.\1.attention.output.dense."),
        (r"^encoder\.layers\.(\d+)\.attention_norm\.", r"bert.encoder.layer.\1.attention.output.LayerNorm."),
        (r"^encoder\.layers\.(\d+)\.intermediate\.", r"bert.encoder.layer.\1.intermediate.dense."),
        (r"^encoder\.layers\.(\d+)\.output\.", r"bert.encoder.layer.\1.output.dense."),
        (r"^encoder\.layers\.(\d+)\.output_norm\.", r"bert.encoder.layer.\1.output.LayerNorm."),
        (r"^classifier\.dense\.", "bert.pooler.dense."),
        (r"^classifier\.classifier\.", "classifier."),
        (r"^mlm_head\.dense\.", "cls.predictions.transform.dense."),
        (r"^mlm_head\.norm\.", "cls.predictions.transform.LayerNorm."),
        (r"^mlm_head\.decoder_bias$", "cls.predictions.bias"),
    ),
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
