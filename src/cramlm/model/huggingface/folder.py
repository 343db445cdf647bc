"""Reading and writing of plain Hugging Face folders: config.json, model.safetensors, tokenizer.json, tokenizer_config.json; no custom code.

`AutoModelForSequenceClassification`, `AutoModelForMaskedLM` and `AutoTokenizer` load what `save_classifier` and `save_mlm` write as the
native classes of BERT, RoBERTa, ModernBERT or ALBERT. `load_classifier` and `load_mlm` read such a folder without importing transformers
(which takes seconds) and trust nothing in it: pickles are refused unopened, config keys that would run code are refused, every setting that
changes a result must be the one our encoder computes, and every tensor must have its name, shape, dtype and finite values.

A model with a prompt is a language model with `prompt.json` (prompts.py) and, for learned vectors, `prompt.safetensors` beside it;
`save_prompted` writes and `load_classifier` reads it.

The tokenizer of an exported classifier treats `[MASK]` in a text as text (`split_special_tokens`); that of an exported language model reads
it as the mask.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError
from torch import Tensor

from cramlm.config.head import HeadConfig
from cramlm.config.run import EncoderConfig
from cramlm.errors import ArtifactError, more
from cramlm.model.huggingface.config import (
    CONFIG_FILE,
    DEFAULT_LABELS,
    TOKENIZER_CONFIG_FILE,
    WEIGHTS_FILE,
    Ids,
    Task,
    compare,
    exported_encoder,
    kind_of,
    native_config,
    open_weights,
    read_json,
    refuse_pickles,
)
from cramlm.model.huggingface.weights import current_name, tensor_names
from cramlm.model.model import Model, ModelSpec, empty_model, initialise_all
from cramlm.model.prompts import PROMPT_FILE, VECTORS_FILE, head_of, prompt_json, read_prompt
from cramlm.model.tokenizer import SPECIAL_ROLES, TOKENIZER_FILE, Tokenizer
from cramlm.storage.artifacts import write_json
from cramlm.storage.locks import environment_faults, raise_if_refused
from cramlm.storage.tensors import save_tensors

UNLIMITED: Final = 10**30
"""From here on a model_max_length means that the tokenizer sets no limit, as in transformers."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """An exported classifier. labels: in the order of the logits. max_length: tokens of the longest sequence, with special tokens.

    has_pair_embeddings: True if the checkpoint embeds the second text of a pair in a way of its own (token type 1), which our encoder does
    not compute; False for what cramlm trained.
    """

    model: Model
    tokenizer: Tokenizer
    labels: tuple[str, ...]
    max_length: int
    has_pair_embeddings: bool = False


def save_classifier(model: Model, tokenizer: Tokenizer, folder: Path, *, labels: Sequence[str], max_length: int) -> None:
    """Write the encoder and the classifier as BertForSequenceClassification, or the class of its shape."""
    assert len(labels) == model.labels
    _save(model, tokenizer, folder, task="classifier", labels=labels, max_length=max_length)


def save_mlm(model: Model, tokenizer: Tokenizer, folder: Path, *, max_length: int) -> None:
    """Write the encoder and the vocabulary head as BertForMaskedLM, or the class of its shape."""
    _save(model, tokenizer, folder, task="mlm", labels=(), max_length=max_length)


def save_prompted(model: Model, tokenizer: Tokenizer, folder: Path, *, labels: Sequence[str], max_length: int) -> None:
    """Write a model with a prompt: the files of `save_mlm`, the prompt, and its learned vectors, if any."""
    assert model.prompt_head is not None
    _save(model, tokenizer, folder, task="mlm", labels=(), max_length=max_length)
    with environment_faults(folder):
        write_json(folder / PROMPT_FILE, prompt_json(model.prompt_head.prompt, labels))
        if model.prompt_head.vectors is not None:
            save_tensors(folder / VECTORS_FILE, {"vectors": model.prompt_head.vectors.detach().to("cpu", torch.float32).clone()})


def load_classifier(folder: Path) -> LoadedModel:
    """Read a folder of `save_classifier` or `save_prompted`. The vocabulary head, which the former lacks, is initialised with seed 0.

    Raises:
        ArtifactError: naming the file, the setting or the tensor that is missing, damaged, unsafe or unsupported.
    """
    if (folder / PROMPT_FILE).is_file():
        return _load_prompted(folder)
    loaded = _read(folder, "classifier")
    settings = loaded.settings if loaded.settings.keys() & DEFAULT_LABELS.keys() else loaded.settings | DEFAULT_LABELS
    labels = _labels(settings, folder / CONFIG_FILE)
    kind = kind_of(settings, folder / CONFIG_FILE)
    if kind == "regression" and len(labels) != 1:
        raise ArtifactError(
            f"{folder / CONFIG_FILE}: a regression of {len(labels)} numbers, expected one in id2label; export the model again"
        )
    head = HeadConfig(pooling="mean" if settings.get("classifier_pooling") == "mean" else "cls")
    spec = ModelSpec(loaded.encoder, head, loaded.tokenizer.vocab_size, len(labels), loaded.tokenizer.pad_id, kind=kind)
    model = _filled(folder, replace(loaded, settings=settings), spec, task="classifier", labels=labels)
    return LoadedModel(model, loaded.tokenizer, labels, loaded.max_length, loaded.has_pair_embeddings)


def _load_prompted(folder: Path) -> LoadedModel:
    loaded = _read(folder, "mlm")
    prompt, labels = read_prompt(folder, loaded.tokenizer)
    spec = ModelSpec(loaded.encoder, head_of(prompt), loaded.tokenizer.vocab_size, len(labels), loaded.tokenizer.pad_id, prompt)
    model = _filled(folder, loaded, spec, task="mlm")
    assert model.prompt_head is not None
    if model.prompt_head.vectors is not None:
        _copy_all({"vectors": model.prompt_head.vectors.detach()}, folder / VECTORS_FILE)
    return LoadedModel(model, loaded.tokenizer, labels, loaded.max_length)


def load_mlm(folder: Path, *, head: HeadConfig, labels: int, seed: int) -> tuple[Model, Tokenizer, int]:
    """Read a folder of `save_mlm`, with a classifier initialised with `seed`: model, tokenizer, longest sequence in tokens.

    Raises:
        ArtifactError: as `load_classifier`.
    """
    loaded = _read(folder, "mlm")
    spec = ModelSpec(loaded.encoder, head, loaded.tokenizer.vocab_size, labels, loaded.tokenizer.pad_id)
    return _filled(folder, loaded, spec, task="mlm", seed=seed), loaded.tokenizer, loaded.max_length


def open_native_encoder(folder: Path) -> tuple[Any, Any]:
    """(model, tokenizer) of any encoder folder in the classes of transformers: eval mode, fp32, safetensors only; runs no code of it.

    Raises:
        ArtifactError: if weights or tokenizer are missing, pickled or damaged, or the config would run code.
    """
    for name in (CONFIG_FILE, TOKENIZER_CONFIG_FILE):
        read_json(folder / name)
    if not any(folder.glob("model*.safetensors")):
        raise ArtifactError(f"{folder / WEIGHTS_FILE}: missing; pickled weights are refused, save the model as safetensors")
    import transformers

    quiet: Any = transformers.logging
    quiet.set_verbosity_error()
    quiet.disable_progress_bar()
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        model = transformers.AutoModel.from_pretrained(folder, local_files_only=True, trust_remote_code=False, use_safetensors=True)
    except (OSError, ValueError, KeyError, ImportError, SafetensorError) as error:
        raise_if_refused(error, folder)
        raise ArtifactError(
            f"{folder}: transformers cannot read it ({' '.join(str(error).split())[:200]}); pass an encoder's folder"
        ) from error
    return model.float().eval(), tokenizer


def _save(model: Model, tokenizer: Tokenizer, folder: Path, *, task: Task, labels: Sequence[str], max_length: int) -> None:
    assert (tokenizer.vocab_size, tokenizer.pad_id) == (model.vocab_size, model.pad_id)
    assert 8 <= max_length <= model.encoder_config.max_positions
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_length,
        **{f"{role}_token": name for role, name in zip(SPECIAL_ROLES, tokenizer.special_tokens, strict=True)},
        "model_input_names": ["input_ids", "attention_mask"],  # no token types: both halves of a pair have type 0
        "split_special_tokens": task == "classifier",
        "clean_up_tokenization_spaces": False,
        "padding_side": "right",
        "truncation_side": "right",
    }
    tensors = {
        name: tensor.detach().to("cpu", torch.float32).clone()
        for ours, names in _stored(model, task).items()
        for name, tensor in zip(names, dict(model.named_parameters())[ours].chunk(len(names)), strict=True)
    }
    with environment_faults(folder):
        folder.mkdir(parents=True, exist_ok=True)
        save_tensors(folder / WEIGHTS_FILE, tensors, metadata={"format": "pt"})
        (folder / TOKENIZER_FILE).write_text(tokenizer.content, "utf-8")
        config = _config_of(model, tokenizer, task=task, labels=labels)
        for name, content in ((CONFIG_FILE, config), (TOKENIZER_CONFIG_FILE, tokenizer_config)):
            (folder / name).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", "utf-8")


def _config_of(model: Model, tokenizer: Tokenizer, *, task: Task, labels: Sequence[str]) -> dict[str, Any]:
    ids = Ids(tokenizer.pad_id, tokenizer.cls_id, tokenizer.sep_id)
    return native_config(
        model.encoder_config, model.head_config, vocab_size=model.vocab_size, ids=ids, task=task, labels=labels, kind=model.kind
    )


def _stored(model: Model, task: Task) -> dict[str, tuple[str, ...]]:
    """Our parameters in a folder for `task` -> their native names."""
    unused = {"classifier": "mlm_head.", "mlm": "classifier."}[task]
    return {ours: names for ours, names in tensor_names(model).items() if not ours.startswith(unused)}


@dataclass(frozen=True, slots=True)
class _Read:
    settings: dict[str, Any]
    encoder: EncoderConfig
    tokenizer: Tokenizer
    max_length: int
    has_pair_embeddings: bool


def _read(folder: Path, task: Task) -> _Read:
    """Read and check everything but the weights."""
    refuse_pickles(folder)
    path = folder / CONFIG_FILE
    settings, tokenizer_settings = read_json(path), read_json(folder / TOKENIZER_CONFIG_FILE)
    encoder = exported_encoder(settings, path)
    tokenizer = Tokenizer.load(folder)
    with open_weights(folder / WEIGHTS_FILE) as weights:
        layers = len(weights.keys())
        values = sum(math.prod(weights.get_slice(name).get_shape()) for name in weights.keys())  # noqa: SIM118 (safe_open is not iterable)
    positions = 0 if encoder.is_modern else encoder.max_positions
    largest = max(encoder.hidden * encoder.intermediate, encoder.embedding_width * max(tokenizer.vocab_size, positions))
    if (encoder.layers > layers and encoder.shape != "albert") or largest > values:  # checked before memory is allocated
        raise ArtifactError(f"{path}: describes more weights than {WEIGHTS_FILE} holds; export the model again")
    if tokenizer.vocab_size != settings.get("vocab_size"):
        raise ArtifactError(
            f"{folder / TOKENIZER_FILE}: holds {tokenizer.vocab_size} tokens, the model {settings.get('vocab_size')!r}; "
            "use the tokenizer that was exported with the model"
        )
    max_length = tokenizer_settings.get("model_max_length", UNLIMITED)
    if type(max_length) is int and max_length >= UNLIMITED:
        max_length = encoder.max_positions
    if type(max_length) is not int or not 8 <= max_length <= encoder.max_positions:
        raise ArtifactError(
            f"{folder / TOKENIZER_CONFIG_FILE}: model_max_length is {max_length!r}, expected 8 to {encoder.max_positions}; "
            "export the model again"
        )
    names = tokenizer_settings.get("model_input_names")
    token_types = not isinstance(names, list) or "token_type_ids" in names  # as transformers' default
    return _Read(settings, encoder, tokenizer, max_length, token_types and encoder.shape in ("bert", "albert"))


def _labels(settings: Mapping[str, Any], path: Path) -> tuple[str, ...]:
    names = settings.get("id2label")
    if not isinstance(names, dict) or not names or not all(isinstance(name, str) for name in names.values()):
        raise ArtifactError(f"{path}: id2label is {str(names)[:60]!r}, expected a name for each label; export the model again")
    if list(names) != [str(index) for index in range(len(names))] or len(set(names.values())) != len(names):
        raise ArtifactError(
            f"{path}: id2label must count 0, 1, 2, ... with different names, got {str(names)[:80]!r}; export the model again"
        )
    return tuple(names.values())


def _filled(folder: Path, loaded: _Read, spec: ModelSpec, *, task: Task, labels: Sequence[str] = (), seed: int = 0) -> Model:
    """Return the model with the weights of the folder, whose settings must be those of `spec`; others are initialised with `seed`."""
    model = empty_model(spec)
    compare(loaded.settings, _config_of(model, loaded.tokenizer, task=task, labels=labels), folder / CONFIG_FILE)
    stored, parameters = _stored(model, task), dict(model.named_parameters())
    initialise_all(model, seed=seed, but=stored)
    targets: dict[str, Tensor] = {}
    for ours, names in stored.items():
        targets |= zip(names, parameters[ours].detach().chunk(len(names)), strict=True)
    _copy_all(targets, folder / WEIGHTS_FILE)
    return model


def _copy_all(targets: Mapping[str, Tensor], path: Path) -> None:
    """Copy the tensors of the file into `targets`; the names must be exactly these."""
    with open_weights(path) as weights:
        present = {current_name(key): key for key in weights.keys()}  # noqa: SIM118 (safe_open is not iterable)
        if missing := sorted(targets.keys() - present.keys()):
            raise ArtifactError(f"{path}: tensor {missing[0]!r} is missing{more(missing)}; export the model again")
        if extra := sorted(present.keys() - targets.keys()):
            raise ArtifactError(f"{path}: tensor {extra[0]!r} has no place in this model{more(extra)}; export the model again")
        for name, target in targets.items():
            piece = weights.get_slice(present[name])
            shape, dtype = tuple(piece.get_shape()), piece.get_dtype()
            if shape != tuple(target.shape):
                raise ArtifactError(f"{path}: tensor {name!r} has shape {shape}, expected {tuple(target.shape)}; export the model again")
            if dtype != "F32":
                raise ArtifactError(
                    f"{path}: tensor {name!r} has dtype {dtype}, expected F32; export the model again, or save it with "
                    "transformers as model.float()"
                )
            tensor = weights.get_tensor(present[name])
            if not torch.isfinite(tensor).all():
                raise ArtifactError(f"{path}: tensor {name!r} holds NaN or infinity; the file is damaged or its training failed")
            target.copy_(tensor)
