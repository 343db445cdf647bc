"""Tiny folders of pretrained weights: random weights in the classes of transformers, with a tokenizer of each family."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any, Literal

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from cramlm.model.huggingface.config import FAMILIES

Shape = Literal["bert", "roberta", "modernbert", "albert"]
BERT_SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
ROBERTA_SPECIAL = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
SIZES = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48, "initializer_range": 0.2}


def native_tokenizer(shape: Shape, texts: list[str], *, vocab_size: int = 300) -> tokenizers.Tokenizer:
    """BERT's WordPiece, RoBERTa's or ModernBERT's byte-level BPE; BERT's pads to a fixed length, as some published files do."""
    options = {"vocab_size": vocab_size, "show_progress": False}
    if shape in ("bert", "albert"):
        tokenizer = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
        tokenizer.normalizer = normalizers.BertNormalizer()
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        tokenizer.decoder = decoders.WordPiece()
        # ids as in the published vocabularies: [PAD] first, the others later
        unused = [f"[unused{number}]" for number in range(3)]
        trainer = trainers.WordPieceTrainer(special_tokens=["[PAD]", *unused, *BERT_SPECIAL[1:]], **options)
        tokenizer.train_from_iterator(texts, trainer)
        cls, sep = (("[CLS]", tokenizer.token_to_id("[CLS]")), ("[SEP]", tokenizer.token_to_id("[SEP]")))
        tokenizer.post_processor = processors.BertProcessing(sep, cls)
        tokenizer.enable_padding(length=40)
        tokenizer.enable_truncation(40)
        return tokenizer
    special = ROBERTA_SPECIAL if shape == "roberta" else BERT_SPECIAL
    tokenizer = tokenizers.Tokenizer(models.BPE(unk_token=None))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if shape == "roberta":
        tokenizer.train_from_iterator(texts, trainers.BpeTrainer(special_tokens=special, initial_alphabet=alphabet, **options))
        ends = (("</s>", 2), ("<s>", 0))
        tokenizer.post_processor = processors.RobertaProcessing(*ends, add_prefix_space=False)
        return tokenizer
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(special_tokens=[], initial_alphabet=alphabet, **options))
    tokenizer.add_special_tokens(special)  # behind the vocabulary, as ModernBERT has them
    tokenizer.add_tokens(["  ", "|||IP_ADDRESS|||"])
    ids = [(name, tokenizer.token_to_id(name)) for name in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B [SEP]", special_tokens=ids)
    return tokenizer


def write_pretrained(folder: Path, shape: Shape, texts: list[str], *, kind: str = "ForMaskedLM", layers: int = 2, **settings: Any) -> Path:
    """Write a folder with `save_pretrained`. kind: the suffix of the class name; "Model" = no head."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torch
        import transformers

        tokenizer = native_tokenizer(shape, texts)
        family = FAMILIES[shape]
        special = ROBERTA_SPECIAL if shape == "roberta" else BERT_SPECIAL
        pad = tokenizer.token_to_id(special[1] if shape == "roberta" else special[0])
        sizes = {**SIZES, "num_hidden_layers": layers, "vocab_size": tokenizer.get_vocab_size(), "pad_token_id": pad}
        if shape == "modernbert":
            sizes |= {"cls_token_id": tokenizer.token_to_id("[CLS]"), "sep_token_id": tokenizer.token_to_id("[SEP]")}
            sizes |= {"bos_token_id": sizes["cls_token_id"], "eos_token_id": sizes["sep_token_id"]}
        config = getattr(transformers, f"{family}Config")(**{**sizes, "max_position_embeddings": 66, **settings})
        torch.manual_seed(5)
        model = getattr(transformers, family + kind)(config)
        with torch.no_grad():
            for parameter in model.parameters():  # biases and norms too, so that a forgotten one shows
                parameter.add_(torch.randn(parameter.shape) * 0.1)
        model.save_pretrained(folder)
    names = dict(zip(("pad", "unk", "cls", "sep", "mask"), BERT_SPECIAL, strict=True))
    if shape == "roberta":
        names = {"pad": "<pad>", "unk": "<unk>", "cls": "<s>", "sep": "</s>", "mask": "<mask>"}
    tokenizer.save(str(folder / "tokenizer.json"))
    tokenizer_config = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 10**30} | {
        f"{role}_token": name for role, name in names.items()
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config), "utf-8")
    return folder
