"""Weights to and from plain Hugging Face folders: config.json, model.safetensors, tokenizer.json, tokenizer_config.json; no custom code.

`save_classifier` and `save_mlm` write what `AutoModelForSequenceClassification`, `AutoModelForMaskedLM` and `AutoTokenizer` load as BERT's
or ModernBERT's own classes. `load_classifier` and `load_mlm` read such a folder back without importing transformers (which takes seconds)
and trust nothing in it: pickles are refused unopened, config keys that would run code are refused, every setting that changes a result must
be the one our encoder computes, and every tensor must be there with its name, shape, dtype and finite values.

Where the tokenizer of an exported *classifier* treats `[MASK]` in a text as text (`split_special_tokens`), that of an exported *language
model* reads it as the mask, since filling masks is what it is for.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias, assert_never

import torch
from pydantic import ValidationError
from safetensors import SafetensorError, safe_open
from torch import Tensor

from cramlm.artifacts import environment_faults
from cramlm.config import EncoderConfig, HeadConfig, explain_validation_error
from cramlm.errors import ArtifactError, EnvironmentFault
from cramlm.model.model import Model, empty_model, initialise_all
from cramlm.model.native_names import NATIVE_NAMES
from cramlm.model.tokenization import SPECIAL_TOKENS, TOKENIZER_FILE, Tokenizer
from cramlm.model.weights import save_tensors

Task: TypeAlias = Literal["classifier", "mlm"]

CONFIG_FILE: Final = "config.json"
WEIGHTS_FILE: Final = "model.safetensors"
TOKENIZER_CONFIG_FILE: Final = "tokenizer_config.json"
_PICKLES: Final = {".bin", ".pt", ".pth", ".pkl", ".pickle", ".joblib", ".ckpt", ".dill"}
_CODE_KEYS: Final = ("auto_map", "trust_remote_code", "custom_code", "custom_pipelines")
_LARGEST_JSON: Final = 64_000_000  # bytes


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A classifier as it was exported. labels: in the order of the logits. max_length: tokens of the longest sequence, special ones too."""

    model: Model
    tokenizer: Tokenizer
    labels: tuple[str, ...]
    max_length: int


def save_classifier(model: Model, tokenizer: Tokenizer, folder: Path, *, labels: Sequence[str], max_length: int) -> None:
    """Write the encoder and the classifier as BertForSequenceClassification or ModernBertForSequenceClassification."""
    assert len(labels) == model.labels
    _save(model, tokenizer, folder, task="classifier", labels=labels, max_length=max_length)


def save_mlm(model: Model, tokenizer: Tokenizer, folder: Path, *, max_length: int) -> None:
    """Write the encoder and the vocabulary head as BertForMaskedLM or ModernBertForMaskedLM."""
    _save(model, tokenizer, folder, task="mlm", labels=(), max_length=max_length)


def load_classifier(folder: Path) -> LoadedModel:
    """Read a folder that `save_classifier` wrote; the vocabulary head, which it lacks, is drawn from seed 0.

    Raises:
        ArtifactError: naming the file, the setting or the tensor that is missing, damaged, unsafe or not ours.
    """
    loaded = _read(folder, "classifier")
    settings = loaded.settings
    labels = _labels(settings, folder / CONFIG_FILE)
    head = HeadConfig(pooling="mean" if settings.get("classifier_pooling") == "mean" else "cls")
    model = empty_model(loaded.encoder, head, vocab_size=loaded.tokenizer.vocab_size, labels=len(labels), pad_id=loaded.tokenizer.pad_id)
    _compare(settings, native_config(model, task="classifier", labels=labels), folder / CONFIG_FILE)
    initialise_all(model, seed=0)
    _fill(model, folder / WEIGHTS_FILE, "classifier")
    return LoadedModel(model, loaded.tokenizer, labels, loaded.max_length)


def load_mlm(folder: Path, *, head: HeadConfig, labels: int, seed: int) -> tuple[Model, Tokenizer, int]:
    """Read a folder that `save_mlm` wrote, with a fresh classifier drawn from `seed`: model, tokenizer, longest sequence in tokens.

    Raises:
        ArtifactError: as `load_classifier`.
    """
    loaded = _read(folder, "mlm")
    model = empty_model(loaded.encoder, head, vocab_size=loaded.tokenizer.vocab_size, labels=labels, pad_id=loaded.tokenizer.pad_id)
    _compare(loaded.settings, native_config(model, task="mlm", labels=()), folder / CONFIG_FILE)
    initialise_all(model, seed=seed)
    _fill(model, folder / WEIGHTS_FILE, "mlm")
    return model, loaded.tokenizer, loaded.max_length


def open_native_encoder(folder: Path) -> tuple[Any, Any]:
    """(model, tokenizer) of any encoder folder, transformers' own classes: eval mode, fp32, from safetensors; no code of the folder runs.

    Raises:
        ArtifactError: if weights or tokenizer are missing, pickled or damaged, or the folder asks for code.
    """
    for name in (CONFIG_FILE, TOKENIZER_CONFIG_FILE):
        _read_json(folder / name)
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
        raise ArtifactError(
            f"{folder}: transformers cannot read it ({' '.join(str(error).split())[:200]}); pass an encoder's folder"
        ) from error
    return model.float().eval(), tokenizer


def native_config(model: Model, *, task: Task, labels: Sequence[str]) -> dict[str, Any]:
    """config.json of the native class: every setting that changes what transformers (5, and 4 from 4.48) computes is spelt out."""
    encoder = model.encoder_config
    family = {"bert": "Bert", "modernbert": "ModernBert"}[encoder.shape]
    common: dict[str, Any] = {
        "architectures": [family + {"classifier": "ForSequenceClassification", "mlm": "ForMaskedLM"}[task]],
        "model_type": encoder.shape,
        "dtype": "float32",
        "vocab_size": model.vocab_size,
        "hidden_size": encoder.hidden,
        "intermediate_size": encoder.intermediate,
        "num_hidden_layers": encoder.layers,
        "num_attention_heads": encoder.heads,
        "max_position_embeddings": encoder.max_positions,
        "initializer_range": encoder.init_std,
        "pad_token_id": SPECIAL_TOKENS.index("[PAD]"),
        "classifier_dropout": 0.0,
        "tie_word_embeddings": True,
    }
    if task == "classifier":
        common["problem_type"] = "single_label_classification"
        common["id2label"] = {str(index): label for index, label in enumerate(labels)}
        common["label2id"] = {label: index for index, label in enumerate(labels)}
    match encoder.shape:
        case "bert":
            return common | {
                "hidden_act": "gelu",
                "layer_norm_eps": encoder.norm_eps,
                "type_vocab_size": 2,
                "hidden_dropout_prob": 0.0,
                "attention_probs_dropout_prob": 0.0,
                "is_decoder": False,
                "add_cross_attention": False,
            }
        case "modernbert":
            rope = {"rope_type": "default", "rope_theta": encoder.rope_theta}
            return common | {
                "hidden_activation": "gelu",
                "norm_eps": encoder.norm_eps,
                "norm_bias": False,
                "attention_bias": False,
                "mlp_bias": False,
                "decoder_bias": True,
                "layer_types": ["full_attention"] * encoder.layers,
                "rope_parameters": {"full_attention": rope, "sliding_attention": rope},
                "global_attn_every_n_layers": 1,
                "global_rope_theta": encoder.rope_theta,
                "local_rope_theta": encoder.rope_theta,
                "attention_dropout": 0.0,
                "embedding_dropout": 0.0,
                "mlp_dropout": 0.0,
                "classifier_pooling": model.head_config.pooling if task == "classifier" else "cls",
                "classifier_bias": False,
                "classifier_activation": "gelu",
                "sparse_prediction": False,
                "cls_token_id": SPECIAL_TOKENS.index("[CLS]"),
                "sep_token_id": SPECIAL_TOKENS.index("[SEP]"),
                "bos_token_id": SPECIAL_TOKENS.index("[CLS]"),
                "eos_token_id": SPECIAL_TOKENS.index("[SEP]"),
            }
        case _:
            assert_never(encoder.shape)


def _save(model: Model, tokenizer: Tokenizer, folder: Path, *, task: Task, labels: Sequence[str], max_length: int) -> None:
    assert tokenizer.vocab_size == model.vocab_size
    assert 8 <= max_length <= model.encoder_config.max_positions
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_length,
        **{f"{name.strip('[]').lower()}_token": name for name in SPECIAL_TOKENS},
        "model_input_names": ["input_ids", "attention_mask"],  # no token types: both halves of a pair have type 0
        "split_special_tokens": task == "classifier",
        "clean_up_tokenization_spaces": False,
        "padding_side": "right",
        "truncation_side": "right",
    }
    tensors = {
        name: tensor.detach().to("cpu", torch.float32).clone()
        for ours, names in _tensor_names(model, task).items()
        for name, tensor in zip(names, dict(model.named_parameters())[ours].chunk(len(names)), strict=True)
    }
    with environment_faults(folder):
        folder.mkdir(parents=True, exist_ok=True)
        save_tensors(folder / WEIGHTS_FILE, tensors, metadata={"format": "pt"})
        (folder / TOKENIZER_FILE).write_text(tokenizer.content, "utf-8")
        for name, content in ((CONFIG_FILE, native_config(model, task=task, labels=labels)), (TOKENIZER_CONFIG_FILE, tokenizer_config)):
            (folder / name).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", "utf-8")


def _tensor_names(model: Model, task: Task) -> dict[str, tuple[str, ...]]:
    """Our parameter -> its native names; three for BERT's queries, keys and values, which we keep one below the other."""
    unused = {"classifier": "mlm_head.", "mlm": "classifier."}[task]
    names = {}
    for ours, _ in model.named_parameters():
        if ours.startswith(unused):
            continue
        native = [re.sub(pattern, to, ours) for pattern, to in NATIVE_NAMES[model.encoder_config.shape] if re.match(pattern, ours)]
        assert len(native) == 1, ours
        names[ours] = tuple(native[0].replace("QKV", part) for part in ("query", "key", "value")) if "QKV" in native[0] else (native[0],)
    return names


@dataclass(frozen=True, slots=True)
class _Read:
    settings: dict[str, Any]
    encoder: EncoderConfig
    tokenizer: Tokenizer
    max_length: int


def _read(folder: Path, task: Task) -> _Read:
    """Everything but the weights, checked."""
    _refuse_pickles(folder)
    path = folder / CONFIG_FILE
    settings, tokenizer_settings = _read_json(path), _read_json(folder / TOKENIZER_CONFIG_FILE)
    shape = settings.get("model_type")
    if shape not in ("bert", "modernbert"):
        raise ArtifactError(f"{path}: model_type is {shape!r}, expected 'bert' or 'modernbert'; pass a model exported by cramlm")
    try:
        encoder = EncoderConfig(
            shape=shape,
            layers=settings["num_hidden_layers"],
            hidden=settings["hidden_size"],
            heads=settings["num_attention_heads"],
            intermediate=settings["intermediate_size"],
            max_positions=settings["max_position_embeddings"],
            norm_eps=settings["layer_norm_eps" if shape == "bert" else "norm_eps"],
            init_std=settings["initializer_range"],
            **({"rope_theta": settings["rope_parameters"]["full_attention"]["rope_theta"]} if shape == "modernbert" else {}),
        )
    except (KeyError, TypeError) as error:
        raise ArtifactError(f"{path}: setting {error} is missing or not what it should be; export the model again") from error
    except ValidationError as error:
        raise ArtifactError(f"{path}: {explain_validation_error(error)}") from error
    tokenizer = Tokenizer.load(folder)
    with _opened(folder / WEIGHTS_FILE) as weights:
        layers = len(weights.keys())
    values = (folder / WEIGHTS_FILE).stat().st_size // 4
    positions = encoder.max_positions if shape == "bert" else 0
    if encoder.layers > layers or encoder.hidden * max(encoder.intermediate, tokenizer.vocab_size, positions) > values:
        raise ArtifactError(f"{path}: promises more weights than {WEIGHTS_FILE} holds; export the model again")  # before memory is taken
    if tokenizer.vocab_size != settings.get("vocab_size"):
        raise ArtifactError(
            f"{folder / TOKENIZER_FILE}: holds {tokenizer.vocab_size} tokens, the model {settings.get('vocab_size')!r}; "
            "use the tokenizer that was exported with the model"
        )
    max_length = tokenizer_settings.get("model_max_length")
    if type(max_length) is not int or not 8 <= max_length <= encoder.max_positions:
        raise ArtifactError(
            f"{folder / TOKENIZER_CONFIG_FILE}: model_max_length is {max_length!r}, expected 8 to {encoder.max_positions}; "
            "export the model again"
        )
    return _Read(settings, encoder, tokenizer, max_length)


def _refuse_pickles(folder: Path) -> None:
    try:
        files = sorted(folder.iterdir())
    except OSError as error:
        raise ArtifactError(f"{folder}: {error.strerror}; pass a folder that holds an exported model") from error
    for path in files:
        suffixes = {suffix.lower() for suffix in path.suffixes}
        if suffixes & _PICKLES or (path.suffix.lower() in (".npy", ".npz") and _may_hold_objects(path)):
            raise ArtifactError(
                f"{path}: pickle, refused: it can run code when it is opened; convert it with transformers' save_pretrained and remove it"
            )


def _may_hold_objects(path: Path) -> bool:
    if path.suffix.lower() == ".npz":
        return True
    with environment_faults(path), path.open("rb") as file:
        return b"|O" in file.read(4096)


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ArtifactError(f"{path}: missing; pass a folder that holds an exported model")
    try:
        with environment_faults(path):
            if path.stat().st_size > _LARGEST_JSON:
                raise ArtifactError(f"{path}: {path.stat().st_size} bytes, too large for a config; export the model again")
            content = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ArtifactError(f"{path}: damaged, not JSON; export the model again") from error
    if not isinstance(content, dict):
        raise ArtifactError(f"{path}: damaged, not a JSON object; export the model again")
    for key in _CODE_KEYS:
        if key in content:
            raise ArtifactError(f"{path}: {key!r} asks for code from the folder to be run, refused; export the model without custom code")
    return content


def _compare(found: Mapping[str, Any], expected: Mapping[str, Any], path: Path) -> None:
    """Refuse a setting that our encoder does not compute; keys that only older or newer versions write may be absent."""
    if "quantization_config" in found:
        raise ArtifactError(f"{path}: quantization_config: quantised weights are not read here; export the model again")
    optional = {"global_attn_every_n_layers", "global_rope_theta", "local_rope_theta"}
    informative = {"dtype", "bos_token_id", "eos_token_id", "initializer_range", "problem_type"}
    dropouts = {key for key in expected if "dropout" in key}  # inactive when a model is read, whatever their value
    for key in expected:
        if key in informative | dropouts or (key in optional and key not in found):
            continue
        if key not in found:
            raise ArtifactError(f"{path}: setting {key!r} is missing, expected {expected[key]!r}; export the model again")
        ours, theirs = expected[key], found[key]
        if key == "rope_parameters":  # the sliding part is not used by any layer
            ours, theirs = ours["full_attention"], theirs["full_attention"]
        if ours != theirs:
            raise ArtifactError(f"{path}: {key} is {theirs!r}, this encoder computes {ours!r}; pass a model exported by cramlm")


def _labels(settings: Mapping[str, Any], path: Path) -> tuple[str, ...]:
    names = settings.get("id2label")
    if not isinstance(names, dict) or not names or not all(isinstance(name, str) for name in names.values()):
        raise ArtifactError(f"{path}: id2label is {str(names)[:60]!r}, expected a name for each label; export the model again")
    if list(names) != [str(index) for index in range(len(names))] or len(set(names.values())) != len(names):
        raise ArtifactError(
            f"{path}: id2label must count 0, 1, 2, ... with different names, got {str(names)[:80]!r}; export the model again"
        )
    return tuple(names.values())


def _opened(path: Path) -> Any:
    if not path.is_file():
        raise ArtifactError(f"{path}: missing; pass a folder that holds an exported model")
    try:
        with environment_faults(path):
            return safe_open(path, framework="pt", device="cpu")
    except RuntimeError as error:  # torch maps the file
        raise EnvironmentFault(f"{path}: cannot be read ({str(error).rpartition(':')[2].strip()}); check the disk") from error
    except SafetensorError as error:
        raise ArtifactError(f"{path}: damaged, not a whole safetensors file ({error}); export the model again") from error


def _fill(model: Model, path: Path, task: Task) -> None:
    """Copy every tensor of the file into the model, after checking that they are exactly the expected ones."""
    parameters = dict(model.named_parameters())
    targets: dict[str, Tensor] = {}
    for ours, names in _tensor_names(model, task).items():
        targets |= zip(names, parameters[ours].detach().chunk(len(names)), strict=True)
    with _opened(path) as weights:
        present = set(weights.keys())
        if missing := sorted(targets.keys() - present):
            raise ArtifactError(f"{path}: tensor {missing[0]!r} is missing{_more(missing)}; export the model again")
        if extra := sorted(present - targets.keys()):
            raise ArtifactError(f"{path}: tensor {extra[0]!r} has no place in this model{_more(extra)}; export the model again")
        for name, target in targets.items():
            piece = weights.get_slice(name)
            shape, dtype = tuple(piece.get_shape()), piece.get_dtype()
            if shape != tuple(target.shape):
                raise ArtifactError(f"{path}: tensor {name!r} has shape {shape}, expected {tuple(target.shape)}; export the model again")
            if dtype != "F32":
                raise ArtifactError(f"{path}: tensor {name!r} has dtype {dtype}, expected F32; export the model again")
            tensor = weights.get_tensor(name)
            if not torch.isfinite(tensor).all():
                raise ArtifactError(f"{path}: tensor {name!r} holds NaN or infinity; the file is damaged or its training failed")
            target.copy_(tensor)


def _more(names: Iterable[str]) -> str:
    others = len(list(names)) - 1
    return f" (and {others} more)" if others else ""
