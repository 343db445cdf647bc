"""The description of a folder of pretrained weights: its encoder, its tokenizer, a hash of its content.

Any folder of BERT, RoBERTa or ModernBERT shape that transformers saved (config.json, model.safetensors, tokenizer.json), with whatever
head; or `mlm/` and exports that cramlm wrote. weights.py reads the weights; this module does not import torch, so that a config
can be made from a folder quickly.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from cramlm.config.head import HeadConfig
from cramlm.config.run import EncoderConfig, RunConfig, TokenizerConfig, load_config
from cramlm.errors import ArtifactError, UsageError
from cramlm.io.paths import require_folder
from cramlm.model.huggingface.config import (
    CONFIG_FILE,
    DEFAULTS,
    WEIGHTS_FILE,
    pretrained_encoder,
    read_json,
    refuse_pickles,
    refuse_shards,
)
from cramlm.model.tokenizer import TOKENIZER_FILE, Tokenizer
from cramlm.storage.artifacts import hash_file, hash_json

_FILES: Final = (CONFIG_FILE, WEIGHTS_FILE, TOKENIZER_FILE)


@dataclass(frozen=True)
class Pretrained:
    """A folder whose config and tokenizer can be used here. head: the pooling of its native class, if the config has it."""

    folder: Path
    encoder: EncoderConfig
    head: HeadConfig
    tokenizer: Tokenizer

    @functools.cached_property
    def hashes(self) -> Mapping[str, str]:
        """SHA-256 of the three files that are read."""
        return {name: hash_file(self.folder / name) for name in _FILES}

    @property
    def fingerprint(self) -> str:
        """Hash of their content."""
        return hash_json(dict(self.hashes))


def open_pretrained(folder: Path) -> Pretrained:
    """Check the folder's config and tokenizer; does not read the weights.

    Raises:
        UsageError: if there is no such folder. ArtifactError: naming the file that is missing, pickled or damaged, or the setting that our
        encoder does not compute.
    """
    require_folder(folder, remedy=f"--base-model takes a folder with {', '.join(_FILES)}, or export/mlm of a run")
    if not (folder / WEIGHTS_FILE).is_file():
        refuse_shards(folder)
        refuse_pickles(folder)
    for name in _FILES:
        if not (folder / name).is_file():
            exported = (folder / "export" / "mlm", folder / "export")  # of a run
            if (own := next((each for each in exported if all((each / file).is_file() for file in _FILES)), None)) is not None:
                raise ArtifactError(f"{folder}: is a run; pass the weights that it exported: --base-model {own}")
            raise ArtifactError(
                f"{folder / name}: missing; --base-model takes a folder with {', '.join(_FILES)}, as transformers' save_pretrained leaves "
                "it for model and tokenizer, or export/mlm of a run"
            )
    path = folder / CONFIG_FILE
    settings = read_json(path)
    encoder, tokenizer = pretrained_encoder(settings, path), Tokenizer.load(folder)
    _check_tokenizer(DEFAULTS[encoder.shape] | settings, encoder, tokenizer, folder)
    pools_mean = encoder.is_modern and settings.get("classifier_pooling", "mean") == "mean"
    return Pretrained(folder, encoder, HeadConfig(pooling="mean" if pools_mean else "cls"), tokenizer)


def _check_tokenizer(settings: dict[str, Any], encoder: EncoderConfig, tokenizer: Tokenizer, folder: Path) -> None:
    rows = settings["vocab_size"]
    if type(rows) is not int or tokenizer.vocab_size > rows:
        raise ArtifactError(
            f"{folder / TOKENIZER_FILE}: holds {tokenizer.vocab_size} tokens, the model {rows!r}; pass both of one model to --base-model"
        )
    if encoder.shape == "roberta" and tokenizer.pad_id != settings["pad_token_id"]:
        raise ArtifactError(
            f"{folder / CONFIG_FILE}: pad_token_id is {settings['pad_token_id']!r}, the tokenizer's is {tokenizer.pad_id}, and positions "
            "are counted from it; pass both of one model to --base-model"
        )


def start_from(config: RunConfig) -> tuple[RunConfig, Pretrained | None]:
    """Return the config with the encoder of the folder `init`, and that folder; unchanged and None without `init`.

    Raises:
        ArtifactError: if the folder cannot be used. UsageError: if the config has another encoder than the folder, or longer
        sequences than it supports.
    """
    if config.init is None:
        return config, None
    pretrained = open_pretrained(Path(config.init))
    return with_encoder_of(pretrained, config), pretrained


def with_encoder_of(pretrained: Pretrained, config: RunConfig) -> RunConfig:
    """Return the config with the folder as `init`, its encoder and vocabulary size; settings that are not the default must equal
    the folder's.

    Raises:
        UsageError: as `start_from`.
    """
    own, tokenizer = pretrained.encoder, TokenizerConfig(vocab_size=pretrained.tokenizer.vocab_size)
    for section, setting, of_folder in (("encoder", config.encoder, own), ("tokenizer", config.tokenizer, tokenizer)):
        if setting not in (type(setting)(), of_folder):
            settings, stored = (each.model_dump() for each in (setting, of_folder))
            field = next(name for name, value in settings.items() if value != stored[name])
            theirs = f"the weights in {pretrained.folder} have {stored[field]!r}"
            if section == "tokenizer":
                theirs = f"the tokenizer in {pretrained.folder} is used as it is, with {tokenizer.vocab_size:,} tokens"
            raise UsageError(f"{section}.{field} is {settings[field]!r}, {theirs}; drop that setting or --base-model")
    head = config.head if own.shape == "modernbert" else config.head.model_copy(update={"pooling": "cls"})
    changed: dict[str, Any] = {"init": str(pretrained.folder), "encoder": own, "head": head, "tokenizer": tokenizer}
    return load_config(config.model_copy(update=changed).model_dump(mode="json"), origin=f"--base-model {pretrained.folder}")
