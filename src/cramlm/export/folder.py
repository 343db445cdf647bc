"""A run's model as a plain Hugging Face folder that needs nothing of the run.

    config.json, model.safetensors, tokenizer.json, tokenizer_config.json    the classifier, a native class of transformers (but for moe)
    mlm/                the language model it was made from (only if one was trained), as a folder of the same kind
    prompt.json         of a model with a prompt, whose first two files are a language model: patterns and words, and beside it
                        prompt.safetensors with its learned vectors; there is no mlm/ then
    README.md           model card (card.py)
    provenance.json     what went in and what came out, as plain data: the caller's `provenance`, versions, sizes

Before the folder gets its name it is read back as a user would read it: its logits for some texts of the task must equal those of the model
in memory. The texts themselves are not stored: they may be private.
"""

from __future__ import annotations

import importlib.metadata
import json
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cramlm.errors import ArtifactError
from cramlm.evaluation.evaluate import predict_logits, sequences_of_texts
from cramlm.export.card import model_card
from cramlm.model.huggingface.folder import load_classifier, load_mlm, save_classifier, save_mlm, save_prompted
from cramlm.model.model import Model, PackedBatch
from cramlm.model.prompts import prompt_json
from cramlm.model.tokenizer import Tokenizer, Tokens
from cramlm.records import Emit, Event, FloatArray, silent
from cramlm.storage.artifacts import Artifact, stage
from cramlm.training.packing import pack

KIND = "export"
CODE_FORMAT = 2  # raise it when the same model would give another folder
LARGEST_DIFFERENCE = 1e-5
MOST_PROBES = 32
_MLM_PLACES = 128
_PACKAGES = ("cramlm", "numpy", "safetensors", "tokenizers", "torch", "transformers")


def export_run(
    out: Path,
    *,
    model: Model,
    mlm: bool,
    tokenizer: Tokenizer,
    labels: Sequence[str],
    max_length: int,
    provenance: Mapping[str, Any],
    key: Mapping[str, Any],
    probe_texts: Sequence[str],
    emit: Emit = silent,
) -> Artifact:
    """Publish the folder at `out`, or leave it if it is there with this `key`.

    mlm: whether the vocabulary head was trained, so that `mlm/` is worth having. provenance: plain JSON values, stored as they are and
    told in the card; the keys that the card knows are those of `model_card`. probe_texts: any texts like those to be classified.

    Raises:
        ArtifactError: if the folder, read back, does not answer as the model does (nothing is published); or if `out` holds something
        damaged or foreign.
    """

    mlm = mlm and model.prompt is None

    def write(folder: Path) -> None:
        emit(Event("start", KIND))
        if model.encoder_config.shape == "moe":
            emit(
                Event(
                    "note",
                    KIND,
                    "a mixture of experts has no class in transformers: cramlm alone reads this folder (predict, serve, Predictor)",
                )
            )
        save = save_classifier if model.prompt is None else save_prompted
        save(model, tokenizer, folder, labels=labels, max_length=max_length)
        if mlm:
            save_mlm(model, tokenizer, folder / "mlm", max_length=max_length)
        facts = {
            "parameters": _stored_parameters(model),
            "vocab_size": model.vocab_size,
            "max_length": max_length,
            "labels": list(labels),
            "kind": model.kind,
            "mlm": mlm,
            **({} if model.prompt is None else {"prompt": prompt_json(model.prompt, labels)}),
            "versions": {"python": platform.python_version(), **{name: importlib.metadata.version(name) for name in _PACKAGES}},
            **provenance,
        }
        content = json.dumps(facts, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
        (folder / "provenance.json").write_text(content, "utf-8")
        (folder / "README.md").write_text(model_card(facts), "utf-8")
        probes = [*probe_texts[:MOST_PROBES], *labels[:MOST_PROBES]]
        difference = _check(folder, out, model, tokenizer, labels=labels, max_length=max_length, mlm=mlm, probes=probes)
        size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
        emit(Event("done", KIND, f"{out}: {size / 1e6:.1f} MB, read back with logits within {difference:.0e} on {len(probes)} texts"))

    return stage(out, kind=KIND, key={**key, "code_format": CODE_FORMAT}, write=write, emit=emit)


def _check(
    folder: Path, out: Path, model: Model, tokenizer: Tokenizer, *, labels: Sequence[str], max_length: int, mlm: bool, probes: Sequence[str]
) -> float:
    """Largest difference between the model's logits and those of `folder`, which is to become `out`; refuses one that is too large."""
    device = next(model.parameters()).device
    loaded = load_classifier(folder)
    if loaded.labels != tuple(labels) or loaded.max_length != max_length:
        raise ArtifactError(f"{out}: labels or max_length changed when the folder was read back; export again, and report this")
    sequences = sequences_of_texts(tokenizer, probes, None, max_length=max_length, prompt=model.prompt)
    again = sequences_of_texts(loaded.tokenizer, probes, None, max_length=max_length, prompt=loaded.model.prompt)
    if not np.array_equal(sequences.ids, again.ids):
        raise ArtifactError(f"{out}: the tokenizer gives other tokens when it is read back; export again, and report this")
    ours = predict_logits(model, sequences, precision="fp32", pad_id=tokenizer.pad_id)
    theirs = predict_logits(loaded.model.to(device), again, precision="fp32", pad_id=tokenizer.pad_id)
    differences = {out: _distance(ours, theirs, relative=model.kind == "regression")}
    if mlm:
        copy, _, _ = load_mlm(folder / "mlm", head=model.head_config, labels=model.labels, seed=0)
        places = [_vocabulary_logits(each, sequences, pad_id=tokenizer.pad_id) for each in (model, copy.to(device))]
        differences[out / "mlm"] = _distance(*places)
    for path, difference in differences.items():
        if not difference <= LARGEST_DIFFERENCE:  # so that NaN is refused too
            raise ArtifactError(
                f"{path}: read back, its logits differ by {difference:.1e} (at most {LARGEST_DIFFERENCE:.0e} allowed) from the model's; "
                "nothing was published, export again"
            )
    return max(differences.values())


def _vocabulary_logits(model: Model, sequences: Tokens, *, pad_id: int) -> FloatArray:
    """Logits of the first places of the first sequences, in fp32."""
    first = [sequences[index] for index in range(min(len(sequences), MOST_PROBES))]
    nothing = np.full(len(first), -1, dtype=np.int64)
    longest = max(map(len, first))
    batch = pack(first, labels=nothing, external=np.ones(len(first), dtype=np.bool_), row_length=longest, pad_id=pad_id)
    packed = PackedBatch.of(batch, next(model.parameters()).device)
    with torch.no_grad():
        places = (packed.sequence.flatten() >= 0).nonzero().squeeze(1)[:_MLM_PLACES]
        logits: FloatArray = model.mlm_logits(model.hidden(packed), places).float().cpu().numpy()
    return logits


def _distance(one: FloatArray, other: FloatArray, *, relative: bool = False) -> float:
    """relative: to the largest number, where numbers are in a unit of the user's."""
    unit = max(1.0, float(np.abs(one).max())) if relative else 1.0
    return float(np.abs(one - other).max()) / unit


def _stored_parameters(model: Model) -> int:
    """Parameters of the folder's own files: a classifier has no vocabulary head, and none has what only training needs."""
    left_out = ("generator.", "place_head.", *(("mlm_head.",) if model.prompt is None else ()))
    return sum(parameter.numel() for name, parameter in model.named_parameters() if not name.startswith(left_out))
