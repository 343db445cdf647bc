"""Where a run starts: from weights that are drawn, or from a folder of pretrained ones (`RunConfig.init`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cramlm.config.run import EncoderConfig, PhaseConfig, RunConfig, load_config
from cramlm.errors import UsageError
from cramlm.model.huggingface.checks import more
from cramlm.model.huggingface.pretrained import Pretrained, open_pretrained
from cramlm.records import Emit, Event

if TYPE_CHECKING:
    from cramlm.model.huggingface.starting_weights import Taken


def start_from(config: RunConfig) -> tuple[RunConfig, Pretrained | None]:
    """The config with the encoder of its `init`, and what that folder is; with its own and None where there is none.

    Raises:
        ArtifactError: if the folder cannot be used. UsageError: if the config asks for another encoder than the folder's, or for longer
        sequences than it reads.
    """
    if config.init is None:
        return config, None
    pretrained = open_pretrained(Path(config.init))
    return with_encoder_of(pretrained, config), pretrained


def with_encoder_of(pretrained: Pretrained, config: RunConfig) -> RunConfig:
    """The config with the folder as `init`, its encoder, and the size of its vocabulary; an encoder set by hand must be that one.

    Raises:
        UsageError: as `start_from`.
    """
    own = pretrained.encoder
    if config.encoder not in (EncoderConfig(), own):
        asked, there = (encoder.model_dump() for encoder in (config.encoder, own))
        field = next(name for name, value in asked.items() if value != there[name])
        raise UsageError(
            f"encoder.{field} is {asked[field]!r}, the weights in {pretrained.folder} have {there[field]!r}; drop that setting or --init"
        )
    head = config.head if own.shape == "modernbert" else config.head.model_copy(update={"pooling": "cls"})
    tokenizer = config.tokenizer.model_copy(update={"vocab_size": pretrained.tokenizer.vocab_size})
    changed: dict[str, Any] = {"init": str(pretrained.folder), "encoder": own, "head": head, "tokenizer": tokenizer}
    return load_config(config.model_copy(update=changed).model_dump(mode="json"), origin=f"--init {pretrained.folder}")


def tell_taken(taken: Taken, pretrained: Pretrained, phases: Sequence[PhaseConfig], emit: Emit, *, fills_masks: bool = False) -> None:
    """Say which weights the run begins with, and warn where a phase needs a vocabulary head that the folder lacks."""
    head = "with its vocabulary head" if taken.mlm_head else "no vocabulary head"
    left = f"; left out: {taken.left[0]}{more(taken.left)}" if taken.left else ""
    emit(Event("note", "init", f"{pretrained.folder}: {taken.tensors} tensors, {head}{left}"))
    if not taken.mlm_head and (fills_masks or any(phase.text_terms for phase in phases)):
        begins = "a prompt" if fills_masks else "masked language modeling"
        emit(Event("warning", "init", f"{pretrained.folder} holds no vocabulary head, so {begins} begins with a drawn one"))


def describe_start(pretrained: Pretrained | None) -> dict[str, Any] | None:
    """For provenance: the folder's name and the hashes of its files."""
    if pretrained is None:
        return None
    return {"name": str(pretrained.folder), "fingerprint": pretrained.fingerprint, "sha256": dict(pretrained.hashes)}
