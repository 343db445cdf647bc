"""Publish the exported folder of a run, which is complete without the run.

Of an encoder, a plain Hugging Face folder:
    config.json, model.safetensors, tokenizer.json, tokenizer_config.json    the classifier, a native class of transformers (except moe)
    mlm/                the language model with its vocabulary head, as a folder of the same kind; only if that head was trained
    prompt.json         patterns and words of a model with a prompt (its first two files are a language model, and there is no mlm/);
                        beside it prompt.safetensors with the learned vectors
    combination/        linear models and how they are combined with the encoder (inference/linear.py)
Of a linear model, which needs neither torch nor transformers:
    linear.json, linear.safetensors, words.*           the model (linear/model.py)
Of both:
    confidence.json     calibration of the confidence, of each model of a classification (evaluation/confidence.py)
    README.md           model card (card.py)
    provenance.json     inputs and results as plain data: the caller's `provenance`, versions, sizes

Before a folder is published it is loaded again: its logits for some texts of the task must equal those of the model in memory. The texts
are not stored: they may be private.
"""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from cramlm.errors import ArtifactError, counted, size
from cramlm.evaluation.confidence import ConfidenceFile
from cramlm.evaluation.prediction import predict_logits, sequences_of_texts
from cramlm.export.card import model_card
from cramlm.linear.model import LinearModel
from cramlm.model.prompts import prompt_json
from cramlm.model.tokenizer import Tokens
from cramlm.records import Emit, Event, FloatArray, silent
from cramlm.storage.artifacts import Artifact, write_json
from cramlm.storage.stages import stage
from cramlm.training.sequences import pack

if TYPE_CHECKING:
    from cramlm.model.huggingface.folder import LoadedModel
    from cramlm.model.model import Model

KIND: Final = "export"
CODE_FORMAT: Final = 5  # raise it when the same model would give another folder
LARGEST_DIFFERENCE: Final = 1e-5
MOST_PROBES: Final = 32
_MLM_POSITIONS: Final = 128
_ENCODER_PACKAGES: Final = ("cramlm", "numpy", "safetensors", "tokenizers", "torch", "transformers")
_LINEAR_PACKAGES: Final = ("cramlm", "numpy", "safetensors", "scikit-learn", "scipy")


def publish_encoder(
    out: Path,
    loaded: LoadedModel,
    *,
    mlm: bool,
    provenance: Mapping[str, Any],
    key: Mapping[str, Any],
    probe_texts: Sequence[str],
    beside: Sequence[Callable[[Path], None]] = (),
    emit: Emit = silent,
) -> Artifact:
    """Publish the folder at `out`, or keep the one that is there for this `key`.

    beside: write the combination with linear models, and the confidence, into the folder. mlm: True if the vocabulary head was
    trained; then `mlm/` is written, unless the model has a prompt. provenance: plain JSON values, stored as they are; the card shows the
    keys that `model_card` lists. probe_texts: texts like those to be classified.

    Raises:
        ArtifactError: if the loaded folder gives other logits than the model (nothing is published); or if `out` holds something damaged
            or foreign.
    """
    from cramlm.model.huggingface.folder import save_classifier, save_mlm, save_prompted  # here, as below: imports torch

    model, tokenizer, labels = loaded.model, loaded.tokenizer, loaded.labels
    mlm = mlm and model.prompt is None

    def write(folder: Path) -> None:
        emit(Event("start", KIND))
        if model.encoder_config.shape == "moe":
            emit(Event("note", KIND, "transformers has no class for a mixture of experts: only cramlm loads this folder"))
        save = save_classifier if model.prompt is None else save_prompted
        save(model, tokenizer, folder, labels=labels, max_length=loaded.max_length)
        if mlm:
            save_mlm(model, tokenizer, folder / "mlm", max_length=loaded.max_length)
        for save_beside in beside:
            save_beside(folder)
        description = {
            "parameters": _stored_parameters(model),
            "vocab_size": model.vocab_size,
            "max_length": loaded.max_length,
            "labels": list(labels),
            "kind": model.kind,
            "mlm": mlm,
            **({} if model.prompt is None else {"prompt": prompt_json(model.prompt, labels)}),
        }
        _write_card(folder, {**description, "versions": _versions(_ENCODER_PACKAGES), **provenance})
        probes = [*probe_texts[:MOST_PROBES], *labels[:MOST_PROBES]]
        difference = _check(folder, out, loaded, mlm=mlm, probes=probes)
        message = f"{_size_of(folder)}; loaded again, its logits differ by at most {difference:.0e} on {counted(len(probes), 'text')}"
        emit(Event("done", KIND, f"{out}: {message}"))

    return stage(out, kind=KIND, key={**key, "code_format": CODE_FORMAT}, write=write, emit=emit)


def publish_linear(
    out: Path,
    model: LinearModel,
    *,
    provenance: Mapping[str, Any],
    key: Mapping[str, Any],
    confidence: ConfidenceFile | None = None,
    emit: Emit = silent,
) -> Artifact:
    """Publish the folder at `out`, or keep the one that is there for this `key`. confidence: of a classification.

    Raises:
        ArtifactError: if the loaded folder gives other logits than the model (nothing is published).
    """

    def write(folder: Path) -> None:
        emit(Event("start", KIND))
        model.save(folder)
        if confidence is not None:
            confidence.save(folder)
        description = {
            "model": model.name,
            "labels": list(model.labels),
            "kind": model.kind,
            "parameters": int(model.coefficients.weights.size + model.coefficients.bias.size),
        }
        _write_card(folder, {**description, "versions": _versions(_LINEAR_PACKAGES), **provenance})
        probes = [*model.labels, *(part.terms[0] for part in model.ngrams.parts if part.terms)]
        if not np.array_equal(LinearModel.load(folder).logits(probes), model.logits(probes)):
            raise ArtifactError(f"{out}: the loaded folder gives other logits than the model; nothing was published, export again")
        emit(Event("done", KIND, f"{out}: {_size_of(folder)}; loaded again, its logits are equal"))

    return stage(out, kind=KIND, key={**key, "code_format": CODE_FORMAT}, write=write, emit=emit)


def _versions(packages: Sequence[str]) -> dict[str, str]:
    return {"python": platform.python_version(), **{name: importlib.metadata.version(name) for name in packages}}


def _write_card(folder: Path, provenance: Mapping[str, Any]) -> None:
    """Write provenance.json and README.md."""
    write_json(folder / "provenance.json", provenance)
    (folder / "README.md").write_text(model_card(provenance), "utf-8")


def _size_of(folder: Path) -> str:
    return size(sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()))


def _check(folder: Path, out: Path, exported: LoadedModel, *, mlm: bool, probes: Sequence[str]) -> float:
    """Return the largest difference between the model's logits and those of `folder`, which will be published as `out`.

    Raises:
        ArtifactError: if the difference is above `LARGEST_DIFFERENCE`, or labels, max_length or tokens differ.
    """
    from cramlm.model.huggingface.folder import load_classifier, load_mlm

    model, tokenizer, max_length = exported.model, exported.tokenizer, exported.max_length
    device = next(model.parameters()).device
    loaded = load_classifier(folder)
    if loaded.labels != tuple(exported.labels) or loaded.max_length != max_length:
        raise ArtifactError(f"{out}: the loaded folder has other labels or another max_length; export again, and report this")
    sequences = sequences_of_texts(tokenizer, probes, None, max_length=max_length, prompt=model.prompt)
    loaded_sequences = sequences_of_texts(loaded.tokenizer, probes, None, max_length=max_length, prompt=loaded.model.prompt)
    if not np.array_equal(sequences.ids, loaded_sequences.ids):
        raise ArtifactError(f"{out}: the loaded tokenizer gives other tokens; export again, and report this")
    expected = predict_logits(model, sequences, precision="fp32")
    logits = predict_logits(loaded.model.to(device), loaded_sequences, precision="fp32")
    # Of a regression relative to the largest number, which is in the user's unit.
    unit = max(1.0, float(np.abs(expected).max())) if model.kind == "regression" else 1.0
    differences = {out: float(np.abs(expected - logits).max()) / unit}
    if mlm:
        copy, _, _ = load_mlm(folder / "mlm", head=model.head_config, labels=model.labels, seed=0)
        one, other = (_vocabulary_logits(each, sequences) for each in (model, copy.to(device)))
        differences[out / "mlm"] = float(np.abs(one - other).max())
    for path, difference in differences.items():
        if not difference <= LARGEST_DIFFERENCE:  # so that NaN is refused too
            raise ArtifactError(
                f"{path}: when loaded, its logits differ by {difference:.1e} (at most {LARGEST_DIFFERENCE:.0e} allowed) from the model's; "
                "nothing was published, export again"
            )
    return max(differences.values())


def _vocabulary_logits(model: Model, sequences: Tokens) -> FloatArray:
    """Logits at the first positions of the first sequences, fp32 (positions, vocabulary)."""
    import torch

    from cramlm.model.model import PackedBatch

    first = [sequences[index] for index in range(min(len(sequences), MOST_PROBES))]
    nothing = np.full(len(first), -1, dtype=np.int64)
    longest = max(map(len, first))
    batch = pack(first, labels=nothing, external=np.ones(len(first), dtype=np.bool_), row_length=longest, pad_id=model.pad_id)
    packed = PackedBatch.of(batch, next(model.parameters()).device)
    with torch.no_grad():
        positions = (packed.sequence.flatten() >= 0).nonzero().squeeze(1)[:_MLM_POSITIONS]
        logits: FloatArray = model.mlm_logits(model.hidden(packed), positions).float().cpu().numpy()
    return logits


def _stored_parameters(model: Model) -> int:
    """Parameters of the folder's own files: a classifier has no vocabulary head, and none has what only training needs."""
    left_out = ("generator.", "place_head.", *(("mlm_head.",) if model.prompt is None else ()))
    return sum(parameter.numel() for name, parameter in model.named_parameters() if not name.startswith(left_out))
