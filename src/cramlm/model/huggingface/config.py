"""Checks of the files in a model folder, and config.json of the native classes, written and read. Imports neither torch nor transformers.

A folder is not trusted, whoever wrote it: no pickles, no code, JSON objects of a limited size, whole safetensors files.

    EncoderConfig, HeadConfig ─► native_config ─► config.json ─► exported_encoder, compare      a folder of ours: every setting is there
                                                  config.json ─► pretrained_encoder             any folder: settings that are missing are
                                                                                                those that transformers would take

What is read is turned into an `EncoderConfig`, and that back into the config.json which it means: a setting of the folder that differs is
one that our encoder does not compute, and is refused by its name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias, assert_never

from pydantic import ValidationError
from safetensors import SafetensorError, safe_open

from cramlm.config.head import HeadConfig
from cramlm.config.run import EncoderConfig, explain_validation_error
from cramlm.errors import ArtifactError, EnvironmentFault
from cramlm.records import TaskKind
from cramlm.storage.locks import environment_faults, raise_if_refused

Task: TypeAlias = Literal["classifier", "mlm"]

FAMILIES: Final = {"bert": "Bert", "roberta": "Roberta", "modernbert": "ModernBert", "albert": "Albert", "cramlm-moe": "CramlmMoe"}
"""By model_type; the last is no class of transformers."""
PROBLEM_TYPES: Final[dict[TaskKind, str]] = {
    "classification": "single_label_classification",
    "multi-label": "multi_label_classification",
    "regression": "regression",
}
_POST_NORM: Final = {
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "hidden_act": "gelu",
    "max_position_embeddings": 512,
    "initializer_range": 0.02,
    "layer_norm_eps": 1e-12,
    "is_decoder": False,
    "add_cross_attention": False,
    "tie_word_embeddings": True,
}
DEFAULT_LABELS: Final = {"id2label": {"0": "LABEL_0", "1": "LABEL_1"}, "label2id": {"LABEL_0": 0, "LABEL_1": 1}}
"""Of a classifier whose config.json names none, as transformers saves two labels without names."""
DEFAULTS: Final[dict[str, dict[str, Any]]] = {
    "bert": {**_POST_NORM, "vocab_size": 30_522, "pad_token_id": 0},
    "roberta": {**_POST_NORM, "vocab_size": 50_265, "pad_token_id": 1},
    "albert": {
        **{key: value for key, value in _POST_NORM.items() if key not in ("is_decoder", "add_cross_attention")},
        "vocab_size": 30_000,
        "embedding_size": 128,
        "hidden_size": 4096,
        "num_attention_heads": 64,
        "intermediate_size": 16_384,
        "num_hidden_groups": 1,
        "inner_group_num": 1,
        "hidden_act": "gelu_new",
        "pad_token_id": 0,
    },
    "modernbert": {
        "vocab_size": 50_368,
        "hidden_size": 768,
        "intermediate_size": 1152,
        "num_hidden_layers": 22,
        "num_attention_heads": 12,
        "hidden_activation": "gelu",
        "max_position_embeddings": 8192,
        "initializer_range": 0.02,
        "norm_eps": 1e-5,
        "norm_bias": False,
        "attention_bias": False,
        "mlp_bias": False,
        "decoder_bias": True,
        "local_attention": 128,
        "classifier_bias": False,
        "classifier_activation": "gelu",
        "sparse_prediction": False,
        "tie_word_embeddings": True,
        "pad_token_id": 50_283,
    },
}
"""The value in transformers of a setting that config.json leaves out."""
_SAME_AS: Final = {"xlm-roberta": "roberta", "camembert": "roberta"}  # classes that differ in their names only
_ONLY_VALUES: Final[dict[str, tuple[Any, ...]]] = {
    "position_embedding_type": (None, "absolute"),
    "rope_scaling": (None,),
    "quantization_config": (None,),
}
_IRRELEVANT: Final = {  # for pretrained weights: the kind of head, token types after the first, settings of the tokenizer
    *("architectures", "vocab_size", "type_vocab_size", "classifier_pooling", "id2label", "label2id"),
    *("pad_token_id", "cls_token_id", "sep_token_id", "global_attn_every_n_layers", "global_rope_theta", "local_rope_theta"),
}


@dataclass(frozen=True, slots=True)
class Ids:
    """Token ids that config.json names."""

    pad: int
    cls: int
    sep: int


def kind_of(settings: Mapping[str, Any], path: Path) -> TaskKind:
    """Return the kind of task of a config.json; without problem_type as a pipeline of transformers: an own probability for a single label,
    else single labels.

    Raises:
        ArtifactError: for a problem_type that transformers does not have.
    """
    names = settings.get("id2label")
    default: TaskKind = "multi-label" if isinstance(names, dict) and len(names) == 1 else "classification"
    problem_type = settings.get("problem_type") or PROBLEM_TYPES[default]
    for kind, name in PROBLEM_TYPES.items():
        if name == problem_type:
            return kind
    raise ArtifactError(
        f"{path}: problem_type is {problem_type!r}, expected one of {', '.join(PROBLEM_TYPES.values())}; export the model again"
    )


def native_config(
    encoder: EncoderConfig,
    head: HeadConfig,
    *,
    vocab_size: int,
    ids: Ids,
    task: Task,
    labels: Sequence[str],
    kind: TaskKind = "classification",
) -> dict[str, Any]:
    """config.json of the native class: with every setting that changes what transformers (5, and 4 from 4.48) computes."""
    model_type = "cramlm-moe" if encoder.shape == "moe" else encoder.shape
    common: dict[str, Any] = {
        "architectures": [FAMILIES[model_type] + {"classifier": "ForSequenceClassification", "mlm": "ForMaskedLM"}[task]],
        "model_type": model_type,
        "dtype": "float32",
        "vocab_size": vocab_size,
        "hidden_size": encoder.hidden,
        "intermediate_size": encoder.intermediate,
        "num_hidden_layers": encoder.layers,
        "num_attention_heads": encoder.heads,
        "max_position_embeddings": encoder.max_positions,
        "initializer_range": encoder.init_std,
        "pad_token_id": ids.pad,
        "classifier_dropout": 0.0,
        "tie_word_embeddings": True,
    }
    if task == "classifier":
        common["problem_type"] = PROBLEM_TYPES[kind]
        common["id2label"] = {str(index): label for index, label in enumerate(labels)}
        common["label2id"] = {label: index for index, label in enumerate(labels)}
    post_norm = {
        "hidden_act": "gelu",
        "layer_norm_eps": encoder.norm_eps,
        "type_vocab_size": 2,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "is_decoder": False,
        "add_cross_attention": False,
    }
    match encoder.shape:
        case "bert":
            return common | post_norm
        case "roberta":
            positions = {"max_position_embeddings": encoder.max_positions + ids.pad + 1, "type_vocab_size": 1}
            return common | post_norm | positions | {"bos_token_id": ids.cls, "eos_token_id": ids.sep}
        case "albert":
            shared = {"embedding_size": encoder.embedding, "num_hidden_groups": 1, "inner_group_num": 1, "classifier_dropout_prob": 0.0}
            left_out = ("is_decoder", "add_cross_attention", "classifier_dropout")
            settings = common | post_norm | shared | {"bos_token_id": ids.cls, "eos_token_id": ids.sep}
            return {key: value for key, value in settings.items() if key not in left_out}
        case "modernbert" | "moe":
            experts = {} if encoder.shape == "modernbert" else {"num_experts": encoder.experts}
            local_theta = encoder.rope_theta if encoder.global_every == 1 else encoder.local_theta
            window = {} if encoder.global_every == 1 else {"local_attention": encoder.local_window}
            return common | {
                "hidden_activation": "gelu",
                "norm_eps": encoder.norm_eps,
                "norm_bias": False,
                "attention_bias": False,
                "mlp_bias": False,
                "decoder_bias": True,
                "layer_types": _layer_types(encoder.layers, encoder.global_every),
                "rope_parameters": {
                    "full_attention": {"rope_type": "default", "rope_theta": encoder.rope_theta},
                    "sliding_attention": {"rope_type": "default", "rope_theta": local_theta},
                },
                "global_attn_every_n_layers": encoder.global_every,
                "global_rope_theta": encoder.rope_theta,
                "local_rope_theta": local_theta,
                **window,
                **experts,
                "attention_dropout": 0.0,
                "embedding_dropout": 0.0,
                "mlp_dropout": 0.0,
                "classifier_pooling": head.pooling if task == "classifier" else "cls",
                "classifier_bias": False,
                "classifier_activation": "gelu",
                "sparse_prediction": False,
                "cls_token_id": ids.cls,
                "sep_token_id": ids.sep,
                "bos_token_id": ids.cls,
                "eos_token_id": ids.sep,
            }
        case _:
            assert_never(encoder.shape)


def exported_encoder(settings: Mapping[str, Any], path: Path) -> EncoderConfig:
    """Return the encoder of a config.json that `native_config` wrote.

    Raises:
        ArtifactError: naming the setting that is missing or invalid.
    """
    shape = settings.get("model_type")
    if not isinstance(shape, str) or shape not in FAMILIES:
        names = ", ".join(map(repr, FAMILIES))
        raise ArtifactError(f"{path}: model_type is {shape!r}, expected one of {names}; pass a model exported by cramlm")
    return _encoder(settings, path, remedy="export the model again")


def pretrained_encoder(settings: Mapping[str, Any], path: Path) -> EncoderConfig:
    """Return the encoder of any config.json of one of the shapes.

    Raises:
        ArtifactError: naming a setting that our encoder does not support.
    """
    shape = _SAME_AS.get(str(settings.get("model_type")), settings.get("model_type"))
    if not isinstance(shape, str) or shape not in DEFAULTS:
        raise ArtifactError(
            f"{path}: model_type is {shape!r}; pretrained weights may be of the shapes {', '.join(DEFAULTS)}; "
            "pass another folder to --base-model"
        )
    for key, values in _ONLY_VALUES.items():
        if settings.get(key) not in values:
            raise ArtifactError(
                f"{path}: {key} is {settings[key]!r}, which this encoder does not compute; pass another folder to --base-model"
            )
    complete = DEFAULTS[shape] | {key: value for key, value in settings.items() if value is not None} | {"model_type": shape}
    if shape == "modernbert":
        complete = _with_layer_settings(complete, path)
    encoder = _encoder(complete, path, remedy="pass another folder to --base-model")
    pad = complete["pad_token_id"] if isinstance(complete["pad_token_id"], int) else 0
    expected = native_config(encoder, HeadConfig(), vocab_size=0, ids=Ids(pad, 0, 0), task="mlm", labels=())
    relevant = {key: value for key, value in expected.items() if key not in _IRRELEVANT}
    compare(complete, relevant, path, remedy="pass another folder to --base-model")
    return encoder


def compare(
    settings: Mapping[str, Any], expected: Mapping[str, Any], path: Path, *, remedy: str = "pass a model exported by cramlm"
) -> None:
    """Refuse settings that differ from what our encoder computes; keys that only some versions of transformers write may be absent.

    Raises:
        ArtifactError: naming it.
    """
    if "quantization_config" in settings:
        raise ArtifactError(f"{path}: quantization_config: quantised weights are not supported; export the model again")
    optional = {"global_attn_every_n_layers", "global_rope_theta", "local_rope_theta"}
    informative = {"dtype", "bos_token_id", "eos_token_id", "initializer_range", "problem_type"}
    dropouts = {key for key in expected if "dropout" in key}  # inactive when a model is read, whatever their value
    for key in expected:
        if key in informative | dropouts or (key in optional and key not in settings):
            continue
        if key not in settings:
            raise ArtifactError(f"{path}: setting {key!r} is missing, expected {expected[key]!r}; export the model again")
        ours, theirs = expected[key], settings[key]
        if key == "rope_parameters" and "sliding_attention" not in expected["layer_types"]:
            ours, theirs = ours["full_attention"], theirs["full_attention"]  # no layer uses the other part
        if ours != theirs:
            raise ArtifactError(f"{path}: {key} is {theirs!r}, this encoder computes {ours!r}; {remedy}")


def _encoder(settings: Mapping[str, Any], path: Path, *, remedy: str) -> EncoderConfig:
    shape = "moe" if settings["model_type"] == "cramlm-moe" else settings["model_type"]
    try:
        sizes: dict[str, Any] = {
            "layers": settings["num_hidden_layers"],
            "hidden": settings["hidden_size"],
            "heads": settings["num_attention_heads"],
            "intermediate": settings["intermediate_size"],
            "max_positions": settings["max_position_embeddings"],
            "norm_eps": settings["norm_eps" if shape in ("modernbert", "moe") else "layer_norm_eps"],
            "init_std": settings["initializer_range"],
        }
        if shape == "roberta":
            sizes["max_positions"] -= settings["pad_token_id"] + 1
        if shape in ("modernbert", "moe"):
            sizes |= _layers(settings)
        if shape == "albert":
            sizes["embedding"] = settings["embedding_size"]
        if shape == "moe":
            sizes["experts"] = settings["num_experts"]
        return EncoderConfig(shape=shape, **sizes)
    except (KeyError, TypeError, AttributeError) as error:
        raise ArtifactError(f"{path}: setting {error} is missing or invalid; {remedy}") from error
    except ValidationError as error:
        raise ArtifactError(f"{path}: {explain_validation_error(error)}") from error


def _layers(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the attention settings of ModernBERT's layers."""
    rope, types = settings["rope_parameters"], list(settings["layer_types"])
    every = next((index for index, kind in enumerate(types) if index and kind == "full_attention"), max(1, len(types)))
    layers = {"rope_theta": rope["full_attention"]["rope_theta"], "global_every": every}
    if every == 1:
        return layers
    return layers | {"local_theta": rope["sliding_attention"]["rope_theta"], "local_window": settings["local_attention"]}


def _layer_types(layers: int, every: int) -> list[str]:
    return ["sliding_attention" if index % every else "full_attention" for index in range(layers)]


def _with_layer_settings(settings: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Complete ModernBERT's settings from transformers 4 with those that transformers 5 writes."""
    result = dict(settings)
    try:
        result.setdefault("layer_types", _layer_types(result["num_hidden_layers"], result.get("global_attn_every_n_layers", 3)))
        rope = result.get("rope_parameters") or {}
        thetas = {
            "full_attention": result.get("global_rope_theta", 160_000.0),
            "sliding_attention": result.get("local_rope_theta", 10_000.0),
        }
        result["rope_parameters"] = {
            kind: {"rope_type": "default", "rope_theta": theta} | (rope.get(kind) or {}) for kind, theta in thetas.items()
        }
    except (TypeError, AttributeError, ZeroDivisionError) as error:
        raise ArtifactError(f"{path}: layer_types or rope_parameters are invalid; pass another folder to --base-model") from error
    return result


CONFIG_FILE: Final = "config.json"
WEIGHTS_FILE: Final = "model.safetensors"
TOKENIZER_CONFIG_FILE: Final = "tokenizer_config.json"
_PICKLES: Final = {".bin", ".pt", ".pth", ".pkl", ".pickle", ".joblib", ".ckpt", ".dill"}
_CODE_KEYS: Final = ("auto_map", "trust_remote_code", "custom_code", "custom_pipelines")
_LARGEST_JSON: Final = 64_000_000  # bytes


def refuse_pickles(folder: Path) -> None:
    """Raise ArtifactError if the folder is missing or one of its files may hold pickled objects (none is unpickled), EnvironmentFault
    if the disk fails.
    """
    try:
        files = sorted(folder.iterdir())
    except OSError as error:
        raise_if_refused(error, folder)
        raise ArtifactError(f"{folder}: {error.strerror}; pass a folder that holds an exported model") from error
    for path in files:
        suffixes = {suffix.lower() for suffix in path.suffixes}
        if suffixes & _PICKLES or (path.suffix.lower() in (".npy", ".npz") and _may_hold_objects(path)):
            raise ArtifactError(
                f"{path}: pickle, refused: it can run code when it is opened; convert it with transformers' save_pretrained and remove it"
            )


def refuse_shards(folder: Path) -> None:
    """Raise ArtifactError if the weights of a folder are in several files."""
    index = folder / f"{WEIGHTS_FILE}.index.json"
    if index.is_file():
        raise ArtifactError(
            f"{index}: the weights are in several files, and only {WEIGHTS_FILE} is read; load the model with transformers and save it in "
            "one file: save_pretrained(FOLDER, max_shard_size='50GB')"
        )


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        ArtifactError: if it is missing, too large, damaged, or has a key that makes transformers run code.
    """
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
            raise ArtifactError(f"{path}: {key!r} would run code from the folder, refused; export the model without custom code")
    return content


def open_weights(path: Path) -> Any:
    """Open a safetensors file as a context manager over its torch tensors.

    Raises:
        ArtifactError: if it is missing or damaged. EnvironmentFault: if the disk fails.
    """
    if not path.is_file():
        refuse_shards(path.parent)
        raise ArtifactError(f"{path}: missing; pass a folder that holds an exported model")
    try:
        with environment_faults(path):
            return safe_open(path, framework="pt", device="cpu")
    except RuntimeError as error:  # torch maps the file
        raise EnvironmentFault(f"{path}: cannot be read ({str(error).rpartition(':')[2].strip()}); check the disk") from error
    except SafetensorError as error:
        raise ArtifactError(f"{path}: damaged, not a whole safetensors file ({error}); export the model again") from error


def _may_hold_objects(path: Path) -> bool:
    if path.suffix.lower() == ".npz":
        return True
    with environment_faults(path), path.open("rb") as file:
        return b"|O" in file.read(4096)
