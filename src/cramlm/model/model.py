"""The model: an encoder with its heads, over packed batches, for training, evaluation and prediction; devices and their precision.

    hidden = model.hidden(batch)                          # (R * L, D), once
    model.mlm_logits(hidden, batch.masked)                # (M, V), only at masked positions
    model.task_logits(hidden, batch)                      # (S, labels), from the classifier or from the vocabulary head

Dropout is an argument, not a state: `train()` and `eval()` change nothing. The caller chooses the precision: inside `torch.autocast`
products are bf16, while weights, norms and the residual stream stay float32.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Collection
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Final, Literal

import torch
from torch import Tensor, nn

from cramlm.config.head import HeadConfig
from cramlm.config.run import DEVICE_NAME, EncoderConfig
from cramlm.errors import EnvironmentFault, UsageError, counted
from cramlm.model.encoder import Rows, build_encoder, without_autocast
from cramlm.model.heads import Classifier, Generator, MlmHead, PromptHead, TokenHead, build_classifier, pool
from cramlm.model.initialisation import initialise, remove_shared_direction, share_direction, start_from_context
from cramlm.model.operations import Dropout, no_dropout
from cramlm.model.prompts import Prompt
from cramlm.records import Batch, FloatArray, Scale, TaskKind

Precision = Literal["fp32", "bf16"]
CPU: Final = torch.device("cpu")


def resolve_device(name: str) -> torch.device:
    """Return the device of a name: cpu, cuda, cuda:N, or auto, a CUDA GPU if there is one. Of the ranks that torchrun starts on a machine,
    each gets a GPU of its own by cuda or auto.

    Raises:
        UsageError: for another name. EnvironmentFault: if PyTorch cannot use this device.
    """
    if not re.fullmatch(DEVICE_NAME, name):
        raise UsageError(f"device {name!r}: expected auto, cpu, cuda or cuda:N")
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return CPU
    device = torch.device("cuda" if name == "auto" else name)
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if not count:
        raise EnvironmentFault(
            f"device {name!r}: PyTorch has no CUDA device here; use --device cpu, or install a CUDA build of torch and a driver"
        )
    if ranks > 1 and (device.index is not None or ranks > count):  # every rank raises it
        raise EnvironmentFault(
            f"device {name!r}: the {ranks} ranks on this machine need a GPU each, PyTorch has {count}; use --device cuda and at most "
            f"{counted(count, 'rank')}, or --device cpu"
        )
    index = int(os.environ.get("LOCAL_RANK", "0")) if device.index is None else device.index
    if index >= count:
        raise EnvironmentFault(f"device {name!r}: PyTorch has {counted(count, 'CUDA device')} here; use one of these, or --device cpu")
    return torch.device("cuda", index)


def describe_device(device: torch.device) -> str:
    """Return the device as users read it: CPU, or the name of the GPU."""
    return "CPU" if device.type == "cpu" else f"{torch.cuda.get_device_name(device)} ({device})"


def autocast(device: torch.device, precision: Precision, *, cache: bool = True) -> AbstractContextManager[Any]:
    """Return a context in which matrix products have this precision; weights stay float32. cache: of the cast weights."""
    if precision == "fp32":
        return nullcontext()
    return torch.autocast(device.type, dtype=torch.bfloat16, cache_enabled=cache)


def as_current(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context in which a GPU is the current one, on which CUDA graphs are captured; on a CPU it changes nothing."""
    return nullcontext() if device.type == "cpu" else torch.cuda.device(device)


def has_bf16(device: torch.device) -> bool:
    """Return True if `device` computes matrix products in bf16 in hardware (of a CPU: AMX or AVX512-BF16)."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported())
    capabilities = torch.cpu.get_capabilities()
    return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))


def resolve_precision(precision: Literal["auto", "fp32", "bf16"], device: torch.device) -> Precision:
    """Return bf16 for auto if `device` has it in hardware, else fp32 (emulated bf16 is slower)."""
    if precision == "auto":
        return "bf16" if has_bf16(device) else "fp32"
    return precision


VECTORS: Final = "prompt_head.vectors"


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """`records.Batch` as tensors on a device; same fields, shapes and types."""

    token_ids: Tensor
    sequence: Tensor
    position: Tensor
    first: Tensor
    masked: Tensor
    mlm_labels: Tensor
    task_labels: Tensor
    external: Tensor
    soft_labels: Tensor
    causal_from: Tensor
    candidates: Tensor
    stand_for: Tensor
    chance: Tensor
    targets: Tensor
    term: str

    @classmethod
    def of(cls, batch: Batch, device: torch.device | str = "cpu") -> PackedBatch:
        """Convert a batch; on the CPU the tensors share the arrays' memory."""
        return cls(**{name: torch.from_numpy(array).to(device) for name, array in batch.arrays.items()}, term=batch.term)


@dataclass(frozen=True, slots=True)
class ParameterGroups:
    """Parameters by how they are optimised, name -> parameter.

    matrix: 2-D weights inside encoder layers (Muon's). decayed: embeddings and the heads' matrices. undecayed: norms and biases.
    """

    matrix: dict[str, nn.Parameter]
    decayed: dict[str, nn.Parameter]
    undecayed: dict[str, nn.Parameter]


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Everything but the weights of a model. labels: logits of the classifier; kind: their meaning, which changes no shape. markers: tokens
    that some heads attend to at first (initialisation.py); only initial weights depend on them.
    """

    encoder: EncoderConfig
    head: HeadConfig
    vocab_size: int
    labels: int
    pad_id: int = 0
    prompt: Prompt | None = None
    kind: TaskKind = "classification"
    markers: tuple[int, ...] = ()


class Model(nn.Module):
    """An encoder with a vocabulary head and a classifier, or with a prompt in place of the classifier; build it with `build_model`."""

    classifier: Classifier  # unless there is a prompt

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        encoder, head, prompt, pad_id = spec.encoder, spec.head, spec.prompt, spec.pad_id
        assert encoder.is_modern or head.pooling == "cls", f"the native {encoder.shape} class pools [CLS] only"
        self.encoder_config = encoder
        self.head_config = head
        self.vocab_size = spec.vocab_size
        self.labels = spec.labels
        self.kind: TaskKind = spec.kind
        self.pad_id = pad_id
        self.markers = spec.markers
        self.encoder = build_encoder(encoder, vocab_size=spec.vocab_size, pad_id=pad_id)
        self.mlm_head = MlmHead(encoder, spec.vocab_size)
        self.prompt_head = None if prompt is None else PromptHead(prompt, encoder)
        if prompt is None:
            self.classifier = build_classifier(encoder, spec.labels)
        if head.generator is not None:
            self.generator = Generator(encoder, head.generator, spec.vocab_size, pad_id=pad_id)
        if head.has_token_classifier:
            self.place_head = TokenHead(encoder)  # initial weights are a function of the attribute's name

    @property
    def device(self) -> torch.device:
        """The device of the weights; batches must be on the same."""
        return next(self.parameters()).device

    def hidden(self, batch: PackedBatch, *, dropout: Dropout | None = None) -> Tensor:
        """Hidden states of every position, (R * L, D); those of padding are finite and meaningless."""
        return self.hidden_and_balance(batch, dropout=dropout)[0]

    def hidden_and_balance(self, batch: PackedBatch, *, dropout: Dropout | None = None) -> tuple[Tensor, Tensor | None]:
        """Hidden states, and the balance loss of the experts summed over sequences (encoder.py), None without experts."""
        causal_from = batch.causal_from if len(batch.causal_from) else None
        rows = Rows(batch.token_ids, batch.sequence, batch.position, causal_from)
        words = None if self.prompt_head is None else self.prompt_head.words(self.encoder.word_embeddings)
        result: Tensor | tuple[Tensor, Tensor] = self.encoder(rows, dropout=dropout or no_dropout(), words=words)
        states, balance = result if isinstance(result, tuple) else (result, None)
        return states.flatten(0, 1), balance

    def mlm_logits(self, hidden: Tensor, masked: Tensor) -> Tensor:
        """Vocabulary logits at the flat positions `masked`, (M, V); tied to the token embedding."""
        logits: Tensor = self.mlm_head(hidden.index_select(0, masked), self.encoder.word_embeddings)
        return logits

    def candidate_logits(self, hidden: Tensor, batch: PackedBatch) -> Tensor:
        """Logits of the batch's candidates at its masked positions, (M, C), each plus ln of the number of tokens that it stands for.

        Their softmax estimates that over the vocabulary.
        """
        head, candidates = self.mlm_head, batch.candidates
        embedding = self.encoder.word_embeddings.index_select(0, candidates)
        bias = head.decoder_bias.index_select(0, candidates) + batch.stand_for.log()
        logits: Tensor = head(hidden.index_select(0, batch.masked), embedding, bias)
        return logits

    def task_logits(self, hidden: Tensor, batch: PackedBatch, *, dropout: Dropout | None = None) -> Tensor:
        """Label logits of every sequence, (S, labels); with a prompt, zeros for sequences without a pattern. For a regression the number,
        (S, 1), computed in float32: in bf16's 8 bits, 2003 would be 2000.
        """
        if self.prompt_head is not None:
            return self._prompt_logits(self.prompt_head, hidden, batch)
        pooled = self.pooled(hidden, batch)
        exact = without_autocast(pooled) if self.kind == "regression" else nullcontext()
        with exact:
            logits: Tensor = self.classifier(pooled.float() if self.kind == "regression" else pooled, dropout=dropout or no_dropout())
        return logits

    def pooled(self, hidden: Tensor, batch: PackedBatch) -> Tensor:
        """Return the vector of every sequence that the classifier reads, (S, D)."""
        return pool(hidden, batch.first, batch.sequence.flatten(), self.head_config)

    def _prompt_logits(self, head: PromptHead, hidden: Tensor, batch: PackedBatch) -> Tensor:
        is_slot = batch.token_ids.flatten() == head.prompt.mask_id
        is_slot[batch.masked] = False  # a [MASK] that hides text
        slots = is_slot.nonzero().squeeze(1)
        states = self.mlm_head.transformed(hidden.index_select(0, slots))
        scores: Tensor = head(states, self.encoder.word_embeddings, self.mlm_head.decoder_bias)
        if len(scores) == len(batch.first):
            return scores
        owner = batch.sequence.flatten()[slots[:: head.prompt.slots]]
        return scores.new_zeros(len(batch.first), self.labels).index_copy(0, owner, scores)

    @property
    def prompt(self) -> Prompt | None:
        """The patterns around the texts; None without a prompt."""
        return None if self.prompt_head is None else self.prompt_head.prompt

    def set_trainable(self, part: Literal["all", "vectors"]) -> None:
        """Enable gradients for every parameter, or only for the vectors of a soft prompt."""
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(part == "all" or name == VECTORS)

    def rescale_output(self, scale: Scale) -> None:
        """Rescale the last layer of a regression, which was trained on (number - mean) / spread, to the unit of the number."""
        if scale == Scale():
            return
        last = self.classifier.classifier
        with torch.no_grad():
            last.weight.mul_(scale.spread)
            last.bias.mul_(scale.spread).add_(scale.mean)

    def set_word_embeddings(self, values: FloatArray) -> None:
        """Set the word embeddings to `values`, (V, D); tokens whose row is not finite keep theirs."""
        embeddings = self.encoder.word_embeddings
        rows = torch.from_numpy(values).to(embeddings.device)
        finite = torch.isfinite(rows).all(dim=1)
        with torch.no_grad():
            embeddings[finite] = rows[finite]
        if self.encoder_config.starts_from_context:
            share_direction(embeddings, self.markers)

    def add_to_logits(self, shift: FloatArray) -> None:
        """Add a constant (labels,) to the logits, in the classifier's bias or in the prompt."""
        if self.prompt_head is not None:
            self.prompt_head.add_to_scores(shift.tolist())
            return
        bias = self.classifier.classifier.bias
        with torch.no_grad():
            bias.add_(torch.from_numpy(shift).to(bias))

    def reset_classifier(self, seed: int) -> None:
        """Initialise the classifier, or the vectors of a soft prompt, again, as `build_model` does for this seed."""
        for name, parameter in self.named_parameters():
            if name.startswith(("classifier.", VECTORS)):
                initialise(name, parameter, seed=seed, std=self.encoder_config.init_std)
        if self.encoder_config.starts_from_context and self.prompt_head is None:
            remove_shared_direction(self.classifier.dense.weight)

    def parameter_groups(self) -> ParameterGroups:
        """Every parameter in exactly one group; tied weights are one parameter."""
        groups = ParameterGroups({}, {}, {})
        for name, parameter in self.named_parameters():
            if parameter.dim() < 2 or name == VECTORS:
                groups.undecayed[name] = parameter
            elif "encoder.layers." in name:
                groups.matrix[name] = parameter
            else:
                groups.decayed[name] = parameter
        return groups

    @property
    def matmul_parameters(self) -> int:
        """Weights of the encoder layers that each token is multiplied with: one multiply-add each, forward."""
        matrices = {name: matrix.numel() for name, matrix in self.parameter_groups().matrix.items() if name.startswith("encoder.")}
        routed = sum(numbers for name, numbers in matrices.items() if ".experts.experts." in name)
        times = self.encoder_config.layers if self.encoder_config.shape == "albert" else 1
        return times * (sum(matrices.values()) - routed) + routed // self.encoder_config.experts


def build_model(spec: ModelSpec, *, seed: int) -> Model:
    """Return a model with initial weights: each parameter is a function of (seed, its name), so that equal parts of models start equal."""
    model = empty_model(spec)
    initialise_all(model, seed=seed)
    return model


def empty_model(spec: ModelSpec) -> Model:
    """Return a model with uninitialised weights; does not use PyTorch's global generator."""
    with torch.device("meta"):
        model = Model(spec)
    # `to_empty` does the same by an operation on meta tensors, for which PyTorch imports SymPy: 0.6 CPU seconds.
    apply: Any = model._apply
    apply(lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu"))
    return model


def initialise_all(model: Model, *, seed: int, but: Collection[str] = ()) -> None:
    """Initialise every parameter; in the modernbert and moe shapes the end of a residual branch is smaller by sqrt(2 x layers).

    but: names of parameters that are left as they are. If there are any, `layer_init` does not apply.
    """
    encoder = model.encoder_config
    branch_end = encoder.init_std / math.sqrt(2 * encoder.layers) if encoder.is_modern else encoder.init_std
    for name, parameter in model.named_parameters():
        if name in but:
            continue
        ends_branch = "encoder.layers." in name and name.endswith("output.weight")
        initialise(name, parameter, seed=seed, std=branch_end if ends_branch else encoder.init_std)
    if encoder.starts_from_context and not but:
        start_from_context(model.encoder, encoder, model.markers)
        with torch.no_grad():
            model.mlm_head.dense.weight += torch.eye(encoder.hidden, device=model.mlm_head.dense.weight.device)
        heads: list[Any] = [model.mlm_head] if model.prompt_head is not None else [model.mlm_head, model.classifier]
        for head in heads:
            remove_shared_direction(head.dense.weight)
