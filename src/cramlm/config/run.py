"""All settings of a run, with validation; reading and writing TOML; `--set` overrides; names of earlier versions.

Defaults come from the literature where a source is named, otherwise from experiments (docs/log.md). A recipe is a function that returns a
complete `RunConfig`.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeAlias, get_args

from pydantic import BaseModel, Field, ValidationError, field_validator, model_validator

from cramlm.config.base import Budget, FrozenModel, classes_by_kind, parse_budget
from cramlm.config.head import HeadConfig, check_head
from cramlm.config.phase import PhaseConfig, check_order, linear_teachers
from cramlm.config.retriever import ElasticsearchConfig, RetrieverConfig, with_kind
from cramlm.config.terms import Classify, Term
from cramlm.errors import UsageError
from cramlm.records import COMBINED, LINEAR_NAMES, Diacritics, LinearName, TaskKind

OnBadRow: TypeAlias = Literal["fail", "skip"]
Duplicates: TypeAlias = Literal["exact", "words", "none"]
Metric: TypeAlias = Literal["macro_f1", "micro_f1", "accuracy", "subset_accuracy", "pearson", "spearman", "r2"]
DEV_METRICS: Final[dict[TaskKind, tuple[Metric, ...]]] = {
    "classification": ("macro_f1", "micro_f1", "accuracy"),
    "multi-label": ("macro_f1", "micro_f1", "subset_accuracy"),
    "regression": ("pearson", "spearman", "r2"),
}
"""Values of `RunConfig.dev_metric` by kind of task, the default first. Higher is better for all of them."""

OPTIONAL_ID: Final = "id"
"""The only column of ids that may be missing."""
_SHORTEST_PASSAGE: Final = 20


class CorpusConfig(FrozenModel):
    """The raw text to retrieve from."""

    files: tuple[str, ...] = Field(min_length=1, description="files, folders, globs or URLs; read in sorted order")
    text_column: str = "text"
    id_column: str = Field(
        OPTIONAL_ID, description="the default column may be missing: ids are then file:line; a column of another name may not"
    )
    source_column: str = "source"
    passage_words: int = Field(
        200, ge=0, description="a document over 1.5 times this long is cut into passages of about this many words; 0: no document is cut"
    )
    max_record_bytes: int = Field(16_000_000, ge=1_000, description="maximum size of a row, decompressed")
    on_bad_row: OnBadRow = "fail"
    duplicates: Duplicates = Field(
        "exact",
        description="passages to drop. exact: equal to an earlier one in Unicode NFC with white space collapsed; words: also those of the "
        "same words, ignoring case, punctuation and symbols (counted separately, as near-duplicates); none: no passage",
    )

    @model_validator(mode="after")
    def _passages_have_some_length(self) -> CorpusConfig:
        if 0 < self.passage_words < _SHORTEST_PASSAGE:
            raise ValueError(f"passage_words {self.passage_words} is under {_SHORTEST_PASSAGE}; use 0 for documents that are not cut")
        return self


class TaskConfig(FrozenModel):
    """The labelled data."""

    kind: TaskKind = Field(
        "classification", description="target of a text: one label; any number of labels (multi-label); a number (regression)"
    )
    train: str
    dev: str | None = Field(None, description="None = a random part of train (dev_fraction, seed), stratified if texts have one label")
    test: str | None = None
    unlabelled: tuple[str, ...] = Field(
        (), description="files of texts of the task without labels: queries, and text to learn from beside the retrieved passages"
    )
    text_column: str = "text"
    label_column: str = "label"
    text_pair_column: str | None = None
    dev_fraction: float = Field(0.1, gt=0, lt=0.5, description="share of train to split off without a dev file")
    max_record_bytes: int = Field(16_000_000, ge=1_000)
    on_bad_row: OnBadRow = "fail"
    unseen_labels: Literal["fail", "ignore"] = Field("fail", description="labels of dev and test that train lacks; ignore: scored as wrong")
    label_names: bool = Field(
        True,
        description="classification only: the words of each label's name are one more training text of the linear models, and so of the "
        "soft labels that teach the encoder",
    )
    label_separator: str = Field("|", min_length=1, description="multi-label only: separator of labels in a csv, tsv or parquet cell")

    @model_validator(mode="after")
    def _separates_several_labels(self) -> TaskConfig:
        if self.label_separator != "|" and self.kind != "multi-label":
            raise ValueError(
                f"label_separator {self.label_separator!r} is for several labels of a text; set kind = 'multi-label' "
                "(--task-type multi-label), or leave it out"
            )
        return self


class TokenizerConfig(FrozenModel):
    """The tokenizer; trained on the selection and the training texts only."""

    kind: Literal["wordpiece", "bpe"] = "wordpiece"
    vocab_size: int = Field(8192, ge=64, le=1_000_000, description="token ids are stored in two bytes, above 65,536 in four")
    lowercase: bool = True
    sample_bytes: int = Field(60_000_000, ge=1_000, description="maximum bytes of selected text to train it on")


class EncoderConfig(FrozenModel):
    """The encoder, in one of five architectures; all except moe are exported as a native class of transformers.

    bert: post-norm, learned positions, GELU, biases, [CLS] pooler.
    roberta: as bert, with one token type, positions that start after the padding id, and RoBERTa's head.
    modernbert: pre-norm, rotary positions, GeGLU, no biases; all layers global by default (`global_every`).
    albert: as bert, with one layer applied `layers` times, and factorised word embeddings of width `embedding`.
    moe: as modernbert, with `experts` feed-forward networks per layer and top-1 routing; no native class.
    """

    shape: Literal["bert", "roberta", "modernbert", "albert", "moe"] = "modernbert"
    layers: int = Field(4, ge=1)
    hidden: int = Field(256, ge=16)
    heads: int = Field(4, ge=1)
    intermediate: int = Field(512, ge=16, description="width of the feed-forward network; modernbert: after the gate")
    max_positions: int = Field(512, ge=8, description="longest sequence in tokens")
    rope_theta: float = Field(10_000.0, gt=0, description="modernbert only: base of the rotary positions of global layers")
    global_every: int = Field(1, ge=1, description="modernbert only: layers 0, n, 2n, ... have global attention, the others local")
    local_window: int = Field(128, ge=2, description="width of local attention in tokens, half on either side")
    local_theta: float = Field(10_000.0, gt=0, description="rope_theta of local layers")
    embedding: int = Field(128, ge=16, description="albert only: width of the word embeddings")
    experts: int = Field(4, ge=2, description="moe only: feed-forward networks per layer")
    balance_weight: float = Field(0.01, ge=0, description="moe only: weight of the load-balancing loss; 0.01: Switch")
    norm_eps: float = Field(1e-5, gt=0)
    init_std: float = Field(0.02, gt=0)
    embedding_init: Literal["random", "cooccurrence", "words"] = Field(
        "random",
        description="initial token embeddings. cooccurrence: from token co-occurrence in the selection (PPMI and truncated SVD). words: "
        "two thirds of the width fitted to the word vectors of the whole corpus, the rest as cooccurrence; all of it without a corpus",
    )
    embedding_std: float = Field(0.04, gt=0, description="standard deviation of initial embeddings that are not random")
    layer_init: Literal["random", "context", "markers"] = Field(
        "random",
        description="modernbert and moe only; context: attention starts by copying the tokens around each token; markers: two heads also "
        "copy the nearest marker (`<<`, `[E1]`, ...; of pairs the boundary) on either side. For tasks about relations or of pairs",
    )

    @model_validator(mode="after")
    def _heads_divide_hidden(self) -> EncoderConfig:
        if self.hidden % self.heads or (self.is_modern and (self.hidden // self.heads) % 2):
            raise ValueError(f"hidden {self.hidden} must be a multiple of heads {self.heads}, with an even quotient for rotary positions")
        return self

    @property
    def starts_from_context(self) -> bool:
        """True if `layer_init` applies: to rotary positions only."""
        return self.is_modern and self.layer_init != "random"

    @property
    def is_modern(self) -> bool:
        """True for ModernBERT's layout: pre-norm, no biases, a classifier that may use mean pooling."""
        return self.shape in ("modernbert", "moe")

    @property
    def embedding_width(self) -> int:
        """Width of word embeddings."""
        return self.embedding if self.shape == "albert" else self.hidden


class BaselineConfig(FrozenModel):
    """The linear models to compare a run with, fitted on the same split, with hyperparameters chosen on dev (linear/fit.py)."""

    enabled: bool = Field(
        True, description="fit and score the linear models; if false, only those in teacher.models are fitted, and not scored"
    )
    c: tuple[Annotated[float, Field(gt=0)], ...] = Field(
        (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0), min_length=1, description="inverse regularisation strengths to try"
    )


class TeacherConfig(FrozenModel):
    """The linear teacher: linear models fitted on the training labels, combined like those of a finished run.

    Its label probabilities or numbers for passages are the soft labels of the term `distil`; those for training texts are of one
    regression, fitted without the fold of the text.
    """

    models: tuple[LinearName, ...] = Field(
        LINEAR_NAMES,
        min_length=1,
        description="linear models that are combined; static and bayes need a corpus, bayes a single label for each text, and are left out "
        "without. Training texts get the out-of-fold predictions of static, or of tfidf where static is not among them",
    )
    align_distribution: bool = Field(
        False,
        description="distribution alignment (Berthelot et al. 2020): multiply each label's probability on passages by its frequency in "
        "training over its mean probability on passages; only for classification",
    )
    passage_share: float = Field(
        0.5,
        ge=0,
        le=1,
        description="share of the whole passage's soft label in the soft label of each piece that training cuts it into; the rest is "
        "the piece's own",
    )

    mark_passages: bool = Field(
        False,
        description="insert the markers of the training texts (`<<`, `[E1]`, ...) into each piece of a passage before it is labelled and "
        "trained on, with as many words between them as in a training text; pieces then have only their own soft label. For tasks about "
        "relations, of single texts",
    )
    pair_passages: bool = Field(
        False,
        description="make each piece of a passage a pair before it is labelled and trained on: its two halves, or its first half and the "
        "second half of another piece, each in half of the pieces; they then have their own soft label alone. For tasks of pairs",
    )


class DistributedConfig(FrozenModel):
    """Training by several processes under torchrun (docs/guides/distributed.md); no effect with one process."""

    timeout: float = Field(60.0, gt=0, description="seconds to wait for the other ranks in a step before all ranks stop")


DEVICE_NAME: Final = r"auto|cpu|cuda(:\d+)?"


class RunConfig(FrozenModel):
    """All settings of one run."""

    name: str = Field("tlm", min_length=1)
    seed: int = Field(13, ge=0, lt=2**32, description="of all random numbers")
    budget: str | None = Field(
        None,
        description="wall-clock time of the whole run, like 20m, 90s, 1h, or operations of training, like 3e15flops; sets model size, "
        "selection and steps",
    )
    tokens_per_second: float | None = Field(
        None, gt=0, description="training speed to plan with; None = measured. If set, the plan is the same on every machine"
    )
    threads: int | None = Field(
        None,
        ge=1,
        le=1024,
        description="CPU threads, also of NumPy's matrix products; None = all cores, or one if measured to be faster (with a budget). "
        "Equal numbers give equal bits",
    )
    precision: Literal["auto", "fp32", "bf16"] = Field("auto", description="auto: bf16 if the CPU supports it")
    device: str = Field(
        "auto",
        description="where the encoder is trained and evaluated: cpu, cuda, cuda:N; auto: a CUDA GPU if PyTorch has one. A run that "
        "was begun on one device can be finished on another, though not to the same bits",
    )
    compile_layers: bool | None = Field(
        None,
        description="on a GPU: fuse the encoder's operations by torch.compile, which takes half a minute; None = in phases of at least "
        "1e16 operations without dropout",
    )
    init: str | None = Field(
        None,
        description="folder of pretrained weights to start from: a Hugging Face folder of BERT, RoBERTa or ModernBERT, or export/mlm of a "
        "run; encoder and tokenizer are the folder's. None = random weights",
    )
    diacritics: Diacritics = Field(
        "keep",
        description="remove: leave accents, tone marks and the other marks in U+0300 to U+036F out of the terms of BM25, the words of "
        "linear models and word vectors, and the tokens (unless they are those of `init`); for raw text that is written with more or "
        "fewer of them than the task's texts",
    )
    task: TaskConfig
    corpus: CorpusConfig | None = None
    retriever: RetrieverConfig | None = None
    tokenizer: TokenizerConfig = TokenizerConfig()
    encoder: EncoderConfig = EncoderConfig()
    head: HeadConfig = HeadConfig()
    model: Literal["encoder", "static", "bayes", "tfidf"] = Field(
        "encoder",
        description="model to train and export. encoder: trained by the phases; static: logistic regression on n-grams and word vectors; "
        "tfidf: on n-grams only; bayes: naive Bayes on labelled and retrieved texts. Linear models have no phases",
    )
    phases: tuple[PhaseConfig, ...] = ()
    baseline: BaselineConfig = BaselineConfig()
    teacher: TeacherConfig = TeacherConfig()
    dev_metric: Metric | None = Field(
        None,
        description="dev score that selects the checkpoint and the logit adjustment; None = macro_f1, for a regression pearson. Others: "
        "micro_f1; accuracy (classification); subset_accuracy (multi-label); spearman, r2 (regression)",
    )
    logit_adjustment: Literal["dev", "none"] = Field(
        "dev",
        description="logit adjustment (Menon et al. 2021): tau times a label's log frequency in training is subtracted from its logit, at "
        "every evaluation on dev and in the finished model. dev: the tau in [0, 1] with the highest dev_metric; none: tau = 0",
    )
    distributed: DistributedConfig = DistributedConfig()

    @field_validator("device")
    @classmethod
    def _check_device(cls, device: str) -> str:
        if not re.fullmatch(DEVICE_NAME, device):
            raise ValueError("expected auto, cpu, cuda or cuda:N")
        return device

    @property
    def limit(self) -> Budget:
        """`budget` as a number; unlimited without one."""
        return Budget() if self.budget is None else parse_budget(self.budget)

    @property
    def metric(self) -> Metric:
        """`dev_metric`, or the default of the kind of task."""
        return self.dev_metric or DEV_METRICS[self.task.kind][0]

    @property
    def word_settings(self) -> dict[str, Any]:
        """The settings that determine the words of a text, for the keys of stages; empty with the defaults."""
        return {} if self.diacritics == "keep" else {"diacritics": self.diacritics}

    @property
    def has_linear_teacher(self) -> bool:
        """True if a phase learns from soft labels of linear models."""
        return any(linear_teachers(phase) for phase in self.phases)

    @property
    def teaching(self) -> tuple[LinearName, ...]:
        """The linear models that teach the encoder: those of `teacher.models` for the kind of task, if a phase learns from them."""
        models = self.teacher.models if self.has_linear_teacher else ()
        return tuple(name for name in models if name != "bayes" or self.task.kind == "classification")

    @model_validator(mode="after")
    def _check_model(self) -> RunConfig:
        if self.name == COMBINED:
            raise ValueError(
                f"name: {self.name!r} is reserved for the combination of a run's models in tables of scores; choose another name"
            )
        if self.name in LINEAR_NAMES and self.name != self.model:
            raise ValueError(f"name: {self.name!r} is reserved for a linear model in tables of scores; choose another name")
        if self.model == "encoder" and not self.phases:
            raise ValueError("phases: an encoder needs at least one phase; add one, or set model = 'static', 'bayes' or 'tfidf'")
        if self.model != "encoder" and self.phases:
            raise ValueError(f"phases: model {self.model!r} is linear and has no phases; remove them, or set model = 'encoder'")
        if self.model in ("static", "bayes") and self.corpus is None and not isinstance(self.retriever, ElasticsearchConfig):
            raise ValueError(f"model {self.model!r} learns from raw text, too, and needs a corpus; pass --corpus, or set model = 'tfidf'")
        if self.model in ("tfidf", "bayes") and not self.baseline.enabled:
            raise ValueError(f"model {self.model!r} is one of the baselines; set baseline.enabled = true")
        if self.model == "bayes" and self.task.kind != "classification":
            raise ValueError("model 'bayes' needs one label for each text; set task.kind = 'classification', or model = 'static'")
        if self.model != "encoder" and self.init is not None:
            raise ValueError(f"init: model {self.model!r} is linear and has no pretrained weights; remove init")
        return self

    @model_validator(mode="after")
    def _check_kind(self) -> RunConfig:
        kind = self.task.kind
        if self.metric not in DEV_METRICS[kind]:
            raise ValueError(
                f"dev_metric {self.dev_metric!r} is not a metric of task.kind {kind!r}; choose one of {', '.join(DEV_METRICS[kind])}"
            )
        if kind != "classification" and self.head.kind != "classifier":
            raise ValueError(f"head.kind {self.head.kind!r} predicts one label; with task.kind {kind!r} set head.kind = 'classifier'")
        if kind != "classification" and self.teacher.align_distribution:
            raise ValueError(
                f"teacher.align_distribution needs tasks with one label per text; with task.kind {kind!r} set "
                "teacher.align_distribution = false"
            )
        for phase in self.phases if kind != "classification" else ():
            where = f"phase {phase.name!r} with task.kind {kind!r}"
            for term in phase.terms:
                if term.needs_single_label:
                    raise ValueError(f"{where}: the term {term.kind!r} needs tasks with one label per text; remove it")
            if any(term.label_smoothing for term in phase.terms_of(Classify)):
                raise ValueError(f"{where}: label smoothing needs tasks with one label per text; set label_smoothing = 0")
        return self

    @model_validator(mode="after")
    def _check_parts(self) -> RunConfig:
        names = [phase.name for phase in self.phases]
        if len(set(names)) != len(names):
            raise ValueError(f"phase names must differ, got {names}")
        if isinstance(self.retriever, ElasticsearchConfig):
            if self.corpus is not None:
                raise ValueError("the retriever elasticsearch reads documents from its server; unset corpus")
        elif (self.corpus is None) != (self.retriever is None):
            raise ValueError("corpus and retriever must be set together, or neither")
        if self.retriever is None and self.task.unlabelled:
            raise ValueError("task.unlabelled: unlabelled texts are added to retrieved ones, but there is no corpus; pass --corpus")
        if self.retriever is None and any(phase.external for phase in self.phases):
            raise ValueError(
                "a phase samples external text (external > 0), but there is no corpus; pass --corpus or use the recipe labels-only"
            )
        if not self.encoder.is_modern and self.head.pooling != "cls":
            raise ValueError(
                f"encoder.shape {self.encoder.shape!r} supports [CLS] pooling only, as its native class; set head.pooling = 'cls' or "
                "encoder.shape = 'modernbert'"
            )
        if self.teaching and self.retriever is None and "tfidf" not in self.teaching:
            raise ValueError(
                f"teacher.models: there is no corpus, which {' and '.join(self.teaching)} would learn from; pass --corpus, or add tfidf"
            )
        if self.has_linear_teacher and self.teacher.models == ("bayes",):
            raise ValueError("teacher.models: naive Bayes has no probabilities out of fold for training texts; add static or tfidf")
        check_order(self.phases)
        for term in (term for phase in self.phases for term in phase.terms):
            if term.needs_token_head and not self.head.has_token_classifier:
                raise ValueError(f"the term {term.kind!r} needs a classifier of every token; set head.token_classifier = true")
            if term.needs_generator and self.head.generator is None:
                raise ValueError(f"the term {term.kind!r} needs a generator; set head.generator, like {max(8, self.encoder.hidden // 4)}")
        width = self.encoder.hidden // self.encoder.heads
        if self.head.generator is not None and self.head.generator % width:
            raise ValueError(f"head.generator {self.head.generator} must be a multiple of encoder.hidden / encoder.heads = {width}")
        check_head(self.head, self.phases, pairs=self.task.text_pair_column is not None)
        longest = max((phase.max_length or 0 for phase in self.phases), default=0)
        if longest > self.encoder.max_positions:
            raise ValueError(f"max_length {longest} exceeds encoder.max_positions {self.encoder.max_positions}")
        return self


_TERMS: Final = frozenset(classes_by_kind(get_args(Term)[0]))
_PATH: Final = re.compile(r"[A-Za-z_][\w-]*(\[\d+\]|\.[A-Za-z_][\w-]*)*")  # of a setting, like phases[0].steps
_RETRIEVERS: Final = frozenset(classes_by_kind(get_args(RetrieverConfig)[0]))
"""Names of the classes in pydantic's error locations; not part of a setting's path."""


RENAMED: Final[dict[str, str]] = {
    "label_prior": "logit_adjustment (dev|none)",
    "choose_by": "dev_metric",
    "encoder.embedding_init = drawn": "encoder.embedding_init = random",
    "head.places": "head.token_classifier",
    "head.prompt.chosen": "head.prompt.words_per_label",
    "phases[].most_passes": "phases[].max_passes",
}
"""Settings (or `setting = value`) of earlier versions and their new names. [] stands for any index."""

REPLACED: Final[dict[str, str]] = {
    "distributed.parallel": "DistributedDataParallel, always (docs/guides/distributed.md); remove it",
    "phases[].objective": "phases[].terms, like terms = [{kind = 'mlm', on = 'external'}] (docs/guides/objectives.md)",
    "phases[].mlm_weight": "the weight of the term 'mlm' on task text in phases[].terms (docs/guides/objectives.md)",
    "phases[].task_weight": "the weight of the term 'classify' in phases[].terms (docs/guides/objectives.md)",
    "phases[].teacher_weight": "the weight of the term 'distil' in phases[].terms (docs/guides/objectives.md)",
    "phases[].teacher_from": "the teacher of the term 'distil' in phases[].terms (docs/guides/objectives.md)",
    "phases[].label_smoothing": "the label_smoothing of the term 'classify' in phases[].terms (docs/guides/objectives.md)",
    "phases[].causal_share": "the share of the term 'causal' in phases[].terms (docs/guides/objectives.md)",
    "phases[].rtd_weight": "the detection_weight of the term 'replaced_tokens' in phases[].terms (docs/guides/objectives.md)",
    "phases[].marks": "the term 'important_tokens' in phases[].terms (docs/guides/objectives.md)",
}
"""Settings of earlier versions without a direct successor, and what to write instead."""


def load_config(data: dict[str, Any], *, origin: str = "config") -> RunConfig:
    """Validate plain data.

    Raises:
        UsageError: naming the first setting of an earlier version and its new name, else the first that is unknown or out of range.
    """
    if old := list(_find_old_settings(data, "", "")):
        raise UsageError(f"{origin}: {old[0]}{f', and {len(old) - 1} more' if old[1:] else ''}; `cramlm config` prints every setting")
    try:
        return RunConfig.model_validate(data)
    except ValidationError as error:
        raise UsageError(f"{origin}: {explain_validation_error(error)}") from error


def _find_old_settings(data: Any, path: str, pattern: str) -> Iterator[str]:
    """Yield a message for each setting of an earlier version at or below `path`. pattern: `path` with [] for each index."""
    for value in ("", f" = {data}"):
        if new := RENAMED.get(pattern + value):
            yield f"{path}{value} was renamed {new}"
        elif new := REPLACED.get(pattern + value):
            yield f"{path}{value} was replaced by {new}"
    if isinstance(data, dict):
        for key, value in data.items():
            yield from _find_old_settings(value, f"{path}.{key}".lstrip("."), f"{pattern}.{key}".lstrip("."))
    elif isinstance(data, list | tuple):
        for index, value in enumerate(data):
            yield from _find_old_settings(value, f"{path}[{index}]", f"{pattern}[]")


def explain_validation_error(error: ValidationError, *, section: str = "") -> str:
    """Return the first error of pydantic as one line: location, rule, input; and the number of further errors.

    section: the table of `RunConfig` that was validated alone, if it was.
    """
    first, *others = error.errors(include_url=False)
    parts = (section, *first["loc"]) if section else first["loc"]
    location = [
        part
        for before, part in zip((None, *parts), parts, strict=False)
        if not ((isinstance(before, int) and part in _TERMS | _RETRIEVERS) or (before == "retriever" and part in _RETRIEVERS))
    ]
    where = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location).lstrip(".")
    more = f"; and {len(others)} more" if others else ""
    if first["type"] == "extra_forbidden":
        return f"{where} is no setting; `cramlm config` prints every setting{more}"
    if first["type"] == "union_tag_not_found" and location == ["retriever"]:
        names = ", ".join(f"{where}.{name}" for name in first["input"])
        return f"{names}: this run retrieves nothing; take a recipe that does, like tlm, or set {where}.kind, like {where}.kind=bm25{more}"
    if first["type"] == "missing":
        return f"{where} has no default and is not set (--set {where}=VALUE); `cramlm config` prints every setting{more}"
    if first["type"] == "union_tag_invalid":
        kind, kinds = first["ctx"]["tag"], first["ctx"]["expected_tags"]
        return f"{where}.kind: {kind!r} is not one of {kinds}; `cramlm config` prints every setting{more}"
    if first["type"] == "model_type":
        return f"{where} is a table of settings (got {first['input']!r}); `cramlm config` prints every setting{more}"
    got = "" if isinstance(first.get("input"), dict | BaseModel) else f" (got {first.get('input')!r})"
    message = first["msg"].removeprefix("Value error, ")
    return f"{where + ': ' if where else ''}{message}{got}; `cramlm config` prints every setting{more}"


def read_toml(path: Path) -> dict[str, Any]:
    """Read a TOML file as plain data.

    Raises:
        UsageError: if it is missing, not UTF-8, or not TOML, naming the line.
    """
    try:
        return tomllib.loads(path.read_text("utf-8-sig"))
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}; pass an existing TOML file") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: not valid TOML: {error}") from error


def to_toml(config: RunConfig) -> str:
    """Return TOML that `load_config(tomllib.loads(...))` reads as an equal config. Unset settings are comments."""
    lines: list[str] = []
    _write_table(config.model_dump(mode="json"), (), lines)
    return "\n".join(lines).strip() + "\n"


def _write_table(table: dict[str, Any], path: tuple[str, ...], lines: list[str]) -> None:
    tables = {key: value for key, value in table.items() if isinstance(value, dict)}
    arrays = {key: value for key, value in table.items() if isinstance(value, list) and value and isinstance(value[0], dict)}
    for key, value in table.items():
        if key in tables or key in arrays:
            continue
        name = _toml_key(key)
        lines.append(f"# {name} is unset" if value is None else f"{name} = {_toml_value(value)}")
    for key, value in tables.items():
        lines += ["", f"[{'.'.join(map(_toml_key, (*path, key)))}]"]
        _write_table(value, (*path, key), lines)
    for key, values in arrays.items():
        for value in values:
            lines += ["", f"[[{'.'.join(map(_toml_key, (*path, key)))}]]"]
            _write_table(value, (*path, key), lines)


def _toml_key(key: str) -> str:
    """Return a bare key if TOML allows it; labels may be any text."""
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else str(_toml_value(key))


def _toml_value(value: Any) -> str:
    if isinstance(value, list):
        return "[" + ", ".join(_toml_value(item) for item in value) + "]"
    # JSON's strings, numbers and booleans are valid TOML, except that TOML requires DEL to be escaped.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def apply_overrides(data: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Apply assignments like `phases[0].steps=500` to a copy of plain config data. Values are TOML, else strings; `none` unsets.

    Another `retriever.kind` removes the settings that the new kind lacks.

    Raises:
        UsageError: if an assignment has no `=`, or its path does not lead through tables.
    """
    result: dict[str, Any] = json.loads(json.dumps(data))
    for override in overrides:
        path, equals, raw = override.partition("=")
        keys = [int(index) if index else name for name, index in re.findall(r"([A-Za-z_][\w-]*)|\[(\d+)\]", path)]
        if not equals or not _PATH.fullmatch(path.strip()):
            raise UsageError(f"--set {override!r} is not KEY=VALUE; write it like phases[0].steps=500")
        node: Any = result
        for key, following in zip(keys, [*keys[1:], None], strict=True):
            if isinstance(key, int) != isinstance(node, list) or (isinstance(key, int) and key >= len(node)):
                raise UsageError(f"--set {override!r}: the config has no {path!r}; `cramlm config` prints every setting")
            if following is None:
                node[key] = _override_value(raw.strip())
                if keys == ["retriever", "kind"]:
                    result["retriever"] = with_kind(node, node[key])
            else:
                if isinstance(node, dict) and node.get(key) is None:
                    node[key] = {}
                node = node[key]
                if not isinstance(node, dict | list):
                    raise UsageError(f"--set {override!r}: {key!r} is a value, not a table; `cramlm config` prints every setting")
    return result


def _override_value(raw: str) -> Any:
    if raw.lower() == "none":
        return None
    try:
        return tomllib.loads(f"value = {raw}")["value"]
    except tomllib.TOMLDecodeError:
        return raw
