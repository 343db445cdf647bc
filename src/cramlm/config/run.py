"""Every setting once: frozen models with unit, range and source; TOML in and out.

Numbers come from the literature where a source is named, from experiments in docs/log.md otherwise. A recipe (recipes.py) is a
function that returns a complete `RunConfig`; nothing else invents defaults.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias, get_args

from pydantic import BaseModel, Field, ValidationError, model_validator

from cramlm.config.base import FrozenModel
from cramlm.config.base import parse_budget as parse_budget
from cramlm.config.base import parse_duration as parse_duration
from cramlm.config.head import HeadConfig as HeadConfig
from cramlm.config.head import PromptConfig as PromptConfig
from cramlm.config.head import check_head
from cramlm.config.phase import OptimizerConfig as OptimizerConfig
from cramlm.config.phase import PhaseConfig as PhaseConfig
from cramlm.config.phase import ScheduleConfig as ScheduleConfig
from cramlm.config.phase import check_order
from cramlm.config.retriever import Bm25Config as Bm25Config
from cramlm.config.retriever import ElasticsearchConfig, with_kind
from cramlm.config.retriever import RandomConfig as RandomConfig
from cramlm.config.retriever import RetrieverConfig as RetrieverConfig
from cramlm.config.terms import Classify, Term
from cramlm.config.terms import MaskingConfig as MaskingConfig
from cramlm.errors import UsageError
from cramlm.records import TaskKind

OnBadRow: TypeAlias = Literal["fail", "skip"]
Duplicates: TypeAlias = Literal["exact", "words"]
Metric: TypeAlias = Literal["macro_f1", "micro_f1", "accuracy", "subset_accuracy", "pearson", "spearman", "r2"]
DEV_METRICS: Final[dict[TaskKind, tuple[Metric, ...]]] = {
    "classification": ("macro_f1", "micro_f1", "accuracy"),
    "multi-label": ("macro_f1", "micro_f1", "subset_accuracy"),
    "regression": ("pearson", "spearman", "r2"),
}
"""The dev scores that may choose, by kind of task; the first does unless `RunConfig.dev_metric` is set. Higher is better in all of them."""


class CorpusConfig(FrozenModel):
    """The raw text to retrieve from."""

    files: tuple[str, ...] = Field(min_length=1, description="files, folders or globs; read in sorted order")
    text_column: str = "text"
    id_column: str = "id"
    source_column: str = "source"
    passage_words: int = Field(200, ge=20, description="a document over 1.5 times this is cut into passages of about this many words")
    max_record_bytes: int = Field(16_000_000, ge=1_000, description="one row, decompressed")
    on_bad_row: OnBadRow = "fail"
    duplicates: Duplicates = Field(
        "exact",
        description="passages to drop: exact = those that an earlier one equals in Unicode NFC with white space collapsed; words = also "
        "those of the same words, whatever their case, punctuation and symbols (counted apart, as near-duplicates)",
    )


class TaskConfig(FrozenModel):
    """The labelled data."""

    kind: TaskKind = Field(
        "classification", description="what a text is answered with: one label; any number of labels (multi-label); a number (regression)"
    )
    train: str
    dev: str | None = Field(None, description="without it a seeded part of train is split off, stratified where texts have one label")
    test: str | None = None
    text_column: str = "text"
    label_column: str = "label"
    text_pair_column: str | None = None
    dev_fraction: float = Field(0.1, gt=0, lt=0.5, description="share of train split off when there is no dev file")
    max_record_bytes: int = Field(16_000_000, ge=1_000)
    on_bad_row: OnBadRow = "fail"
    unseen_labels: Literal["fail", "ignore"] = Field("fail", description="dev/test label that train lacks; ignore = scored as wrong")
    label_separator: str = Field("|", min_length=1, description="multi-label only: between the labels of a csv, tsv or parquet cell")


class TokenizerConfig(FrozenModel):
    """Trained on the selection and the training text of the task, nothing else."""

    kind: Literal["wordpiece", "bpe"] = "wordpiece"
    vocab_size: int = Field(8192, ge=64, le=1_000_000, description="token ids take two bytes each, over 65,536 of them four")
    lowercase: bool = True
    sample_bytes: int = Field(60_000_000, ge=1_000, description="how much of the selected text the trainer reads")


class EncoderConfig(FrozenModel):
    """A small encoder in one of five shapes, all but moe native classes of transformers when exported.

    bert: post-norm, learned positions, GELU, biases, [CLS] pooler.
    roberta: the same with one token type, positions counted from behind the padding id, and a head of its own.
    modernbert: pre-norm, rotary positions, GeGLU, no biases; all layers global unless `global_every` says otherwise.
    albert: bert with one layer passed `layers` times, over word embeddings of width `embedding`.
    moe: modernbert with `experts` feed-forward parts in each layer, one of which a router chooses for each token; no native class.
    """

    shape: Literal["bert", "roberta", "modernbert", "albert", "moe"] = "modernbert"
    layers: int = Field(4, ge=1)
    hidden: int = Field(256, ge=16)
    heads: int = Field(4, ge=1)
    intermediate: int = Field(512, ge=16, description="width of the feed-forward part; for modernbert after the gate")
    max_positions: int = Field(512, ge=8, description="longest sequence in tokens")
    rope_theta: float = Field(10_000.0, gt=0, description="modernbert only; of layers that see the whole sequence")
    global_every: int = Field(1, ge=1, description="modernbert only: layers 0, n, 2n, ... see the whole sequence, the others a window")
    local_window: int = Field(128, ge=2, description="tokens that such a window is wide, half of them on either side")
    local_theta: float = Field(10_000.0, gt=0, description="rope_theta of layers with a window")
    embedding: int = Field(128, ge=16, description="albert only: width of the word embeddings")
    experts: int = Field(4, ge=2, description="moe only: feed-forward parts of a layer")
    balance_weight: float = Field(0.01, ge=0, description="moe only: weight of the loss that keeps experts in use; 0.01: Switch")
    norm_eps: float = Field(1e-5, gt=0)
    init_std: float = Field(0.02, gt=0)
    embedding_init: Literal["random", "cooccurrence"] = Field(
        "random", description="initial token embeddings: random, or from token co-occurrence (PPMI and truncated SVD)"
    )
    embedding_std: float = Field(0.04, gt=0, description="of embeddings from co-occurrence")

    @model_validator(mode="after")
    def _heads_divide_hidden(self) -> EncoderConfig:
        if self.hidden % self.heads or (self.is_modern and (self.hidden // self.heads) % 2):
            raise ValueError(f"hidden {self.hidden} must be a multiple of heads {self.heads}, with an even quotient for rotary positions")
        return self

    @property
    def is_modern(self) -> bool:
        """Whether it is built like ModernBERT: pre-norm, no biases, a classifier that may pool the mean."""
        return self.shape in ("modernbert", "moe")

    @property
    def embedding_width(self) -> int:
        """Of word embeddings."""
        return self.embedding if self.shape == "albert" else self.hidden


class BaselineConfig(FrozenModel):
    """The linear models that every run is compared with, fitted on the same split; how they are fitted is chosen on dev (linear/fit.py)."""

    enabled: bool = Field(
        True, description="compare with TF-IDF, and where there is a corpus with `static`; a teacher is fitted regardless"
    )
    c: tuple[float, ...] = Field((0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0), min_length=1, description="inverse regularisation to try")


class TeacherConfig(FrozenModel):
    """The linear teacher: logistic regression on TF-IDF and averaged token embeddings, fitted on the training labels. A phase learns from
    its label probabilities by the term `distil`.
    """

    align_distribution: bool = Field(
        False,
        description="weight its probabilities of each label on passages by the label's frequency in training over its mean probability on "
        "passages (distribution alignment, Berthelot et al. 2020)",
    )


class DistributedConfig(FrozenModel):
    """Several processes in one training, as torchrun starts them (docs/distributed.md); for one process nothing here matters."""

    timeout: float = Field(60.0, gt=0, description="seconds that ranks wait for one another in a step before all stop")


class RunConfig(FrozenModel):
    """One run, completely."""

    name: str = "tlm"
    seed: int = Field(13, ge=0)
    budget: str | None = Field(
        None,
        description="wall-clock time for the whole run, like 20m, 90s, 1h, or operations of its training, like 3e15flops; sets model size, "
        "selection and steps",
    )
    tokens_per_second: float | None = Field(
        None, gt=0, description="training speed to plan the budget with; None = measured. Given, the plan is the same on every machine"
    )
    threads: int | None = Field(
        None,
        ge=1,
        description="CPU threads; None = all cores, or one where the measurement for a budget finds that faster. Same number, same bits",
    )
    precision: Literal["auto", "fp32", "bf16"] = Field("auto", description="auto: bf16 where the CPU computes in it")
    init: str | None = Field(
        None,
        description="folder of pretrained weights to start from: BERT, RoBERTa or ModernBERT in the form of Hugging Face, or export/mlm "
        "of a run; encoder and tokenizer are the folder's. None = weights are drawn",
    )
    task: TaskConfig
    corpus: CorpusConfig | None = None
    retriever: RetrieverConfig | None = None
    tokenizer: TokenizerConfig = TokenizerConfig()
    encoder: EncoderConfig = EncoderConfig()
    head: HeadConfig = HeadConfig()
    model: Literal["encoder", "static", "tfidf"] = Field(
        "encoder",
        description="what is trained and exported. encoder: by the phases; static: logistic regression on TF-IDF and token vectors; "
        "tfidf: on TF-IDF alone. Linear models have no phases",
    )
    phases: tuple[PhaseConfig, ...] = ()
    baseline: BaselineConfig = BaselineConfig()
    teacher: TeacherConfig = TeacherConfig()
    dev_metric: Metric | None = Field(
        None,
        description="dev score that selects the checkpoint and the logit adjustment; None = macro_f1, or pearson in a regression. "
        "A classification also has micro_f1 and accuracy, a multi-label task micro_f1 and subset_accuracy, a regression spearman and r2",
    )
    logit_adjustment: Literal["dev", "none"] = Field(
        "dev",
        description="logit adjustment (Menon et al. 2021): tau times a label's log frequency in training is subtracted from its logit, at "
        "every evaluation on dev and in the finished model. dev: the tau in [0, 1] with the highest dev_metric; none: tau = 0",
    )
    distributed: DistributedConfig = DistributedConfig()

    @property
    def metric(self) -> Metric:
        """`dev_metric`, or the default of the kind of task."""
        return self.dev_metric or DEV_METRICS[self.task.kind][0]

    @model_validator(mode="after")
    def _model_agrees(self) -> RunConfig:
        if self.name in ("static", "tfidf") and self.name != self.model:
            raise ValueError(f"name: {self.name!r} is the name of a linear model in every table of scores; choose another name")
        if self.model == "encoder" and not self.phases:
            raise ValueError("phases: an encoder is trained by at least one phase; add one, or set model = 'static' or 'tfidf'")
        if self.model != "encoder" and self.phases:
            raise ValueError(f"phases: model {self.model!r} is linear and has none; remove them, or set model = 'encoder'")
        if self.model == "static" and self.corpus is None:
            raise ValueError("model 'static' needs raw text for its vectors; pass --corpus, or set model = 'tfidf'")
        if self.model == "tfidf" and not self.baseline.enabled:
            raise ValueError("model 'tfidf' is the baseline; set baseline.enabled = true")
        if self.model != "encoder" and self.init is not None:
            raise ValueError(f"init: model {self.model!r} is linear and starts from no weights; remove init")
        return self

    @model_validator(mode="after")
    def _kind_agrees(self) -> RunConfig:
        kind = self.task.kind
        if self.metric not in DEV_METRICS[kind]:
            raise ValueError(
                f"dev_metric {self.dev_metric!r} is no score of task.kind {kind!r}; take one of {', '.join(DEV_METRICS[kind])}"
            )
        if kind != "classification" and self.head.kind != "classifier":
            raise ValueError(f"head.kind {self.head.kind!r} gives a text one label; with task.kind {kind!r} set head.kind = 'classifier'")
        for phase in self.phases if kind != "classification" else ():
            where = f"phase {phase.name!r} with task.kind {kind!r}"
            for term in phase.terms:
                if term.needs_single_label:
                    raise ValueError(f"{where}: the term {term.kind!r} exists only where each text has one label; remove it")
            if any(term.label_smoothing for term in phase.terms_of(Classify)):
                raise ValueError(f"{where}: labels are smoothed only where a text has one; set label_smoothing = 0")
        return self

    @model_validator(mode="after")
    def _parts_agree(self) -> RunConfig:
        names = [phase.name for phase in self.phases]
        if len(set(names)) != len(names):
            raise ValueError(f"phase names must differ, got {names}")
        if isinstance(self.retriever, ElasticsearchConfig):
            if self.corpus is not None:
                raise ValueError("the retriever elasticsearch has its documents from its server: give no corpus with it")
        elif (self.corpus is None) != (self.retriever is None):
            raise ValueError("corpus and retriever come together: give both or neither")
        if self.retriever is None and any(phase.external for phase in self.phases):
            raise ValueError(
                "a phase draws external text (external > 0) but no corpus is given; pass --corpus or use the recipe labels-only"
            )
        if not self.encoder.is_modern and self.head.pooling != "cls":
            raise ValueError(
                f"the {self.encoder.shape} shape pools [CLS] (its native class knows no other); set head.pooling = 'cls' or "
                "encoder.shape = 'modernbert'"
            )
        check_order(self.phases)
        for term in (term for phase in self.phases for term in phase.terms):
            if term.needs_token_head and not self.head.has_token_classifier:
                raise ValueError(f"the term {term.kind!r} needs a head for every token; set head.token_classifier = true")
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


_TERMS: Final = frozenset(term.model_fields["kind"].default for term in get_args(get_args(Term)[0]))
"""By which pydantic names the classes of a union; not part of a setting's path."""


RENAMED: Final[dict[str, str]] = {
    "label_prior": "logit_adjustment (dev|none)",
    "choose_by": "dev_metric",
    "encoder.embedding_init = drawn": "encoder.embedding_init = random",
    "head.places": "head.token_classifier",
    "head.prompt.chosen": "head.prompt.words_per_label",
    "phases[].most_passes": "phases[].max_passes",
}
"""Settings of earlier versions, and values written `setting = value`, with what they are called now. [] stands for any index."""

REPLACED: Final[dict[str, str]] = {
    "distributed.parallel": "DistributedDataParallel, always (docs/distributed.md); remove it",
    "phases[].objective": "phases[].terms, like terms = [{kind = 'mlm', on = 'external'}] (docs/objectives.md)",
    "phases[].mlm_weight": "the weight of the term 'mlm' on task text in phases[].terms (docs/objectives.md)",
    "phases[].task_weight": "the weight of the term 'classify' in phases[].terms (docs/objectives.md)",
    "phases[].teacher_weight": "the weight of the term 'distil' in phases[].terms (docs/objectives.md)",
    "phases[].teacher_from": "the teacher of the term 'distil' in phases[].terms (docs/objectives.md)",
    "phases[].label_smoothing": "the label_smoothing of the term 'classify' in phases[].terms (docs/objectives.md)",
    "phases[].causal_share": "the share of the term 'causal' in phases[].terms (docs/objectives.md)",
    "phases[].rtd_weight": "the detection_weight of the term 'replaced_tokens' in phases[].terms (docs/objectives.md)",
    "phases[].marks": "the term 'important_tokens' in phases[].terms (docs/objectives.md)",
}
"""Settings of earlier versions with what takes their place; each can be written only in another form."""


def load_config(data: dict[str, Any], *, origin: str = "config") -> RunConfig:
    """Validate plain data.

    Raises:
        UsageError: naming the settings of an earlier version and what they are called now, else the first setting that is unknown or
            out of range.
    """
    if old := list(_of_earlier_versions(data, "", "")):
        raise UsageError(f"{origin}: {old[0]}{f', and {len(old) - 1} more' if old[1:] else ''}; `cramlm config` prints every setting")
    try:
        return RunConfig.model_validate(data)
    except ValidationError as error:
        raise UsageError(f"{origin}: {explain_validation_error(error)}") from error


def _of_earlier_versions(data: Any, path: str, pattern: str) -> Iterator[str]:
    """Yield what to say about each setting at or below `path` that an earlier version had. `pattern`: `path` with [] for each index."""
    for value in ("", f" = {data}"):
        if new := RENAMED.get(pattern + value):
            yield f"{path}{value} was renamed {new}"
        elif new := REPLACED.get(pattern + value):
            yield f"{path}{value} was replaced by {new}"
    if isinstance(data, dict):
        for key, value in data.items():
            yield from _of_earlier_versions(value, f"{path}.{key}".lstrip("."), f"{pattern}.{key}".lstrip("."))
    elif isinstance(data, list | tuple):
        for index, value in enumerate(data):
            yield from _of_earlier_versions(value, f"{path}[{index}]", f"{pattern}[]")


def explain_validation_error(error: ValidationError) -> str:
    """The first complaint of pydantic as one line: where, what, got; and how many more there are."""
    first, *others = error.errors(include_url=False)
    location = [
        part for place, part in enumerate(first["loc"]) if not (place and isinstance(first["loc"][place - 1], int) and part in _TERMS)
    ]
    where = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location).lstrip(".")
    got = "" if isinstance(first.get("input"), dict | BaseModel) else f" (got {first.get('input')!r})"
    message = first["msg"].removeprefix("Value error, ")
    more = f"; and {len(others)} more" if others else ""
    return f"{where + ': ' if where else ''}{message}{got}; `cramlm config` prints every setting{more}"


def read_toml(path: Path) -> dict[str, Any]:
    """A TOML file as plain data.

    Raises:
        UsageError: if it is missing, not UTF-8, or not TOML; names the line.
    """
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}; pass an existing TOML file to --config") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: not valid TOML: {error}") from error


def to_toml(config: RunConfig) -> str:
    """The resolved config as TOML that `load_config(tomllib.loads(...))` turns into an equal config. Unset settings become comments."""
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
    """Bare where TOML allows it; labels may be any text."""
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else str(_toml_value(key))


def _toml_value(value: Any) -> str:
    if isinstance(value, list):
        return "[" + ", ".join(_toml_value(item) for item in value) + "]"
    # JSON's strings, numbers and booleans are TOML's too, except that TOML wants DEL escaped.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def apply_overrides(data: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Set `phases[0].steps=500`-like assignments in plain config data; values are read as TOML, else taken as strings; `none` unsets.
    Another `retriever.kind` takes the settings with it that only the former kind has.

    Raises:
        UsageError: if an assignment has no `=`, or its path leads into something that is not a table.
    """
    result: dict[str, Any] = json.loads(json.dumps(data))
    for override in overrides:
        path, equals, raw = override.partition("=")
        keys = [int(index) if index else name for name, index in re.findall(r"([A-Za-z_][\w-]*)|\[(\d+)\]", path)]
        if not equals or not keys or re.sub(r"[A-Za-z_][\w-]*|\[\d+\]|\.", "", path.strip()):
            raise UsageError(f"--set {override!r} is not KEY=VALUE; write it like phases[0].steps=500")
        place: Any = result
        for key, following in zip(keys, [*keys[1:], None], strict=True):
            if isinstance(key, int) != isinstance(place, list) or (isinstance(key, int) and key >= len(place)):
                raise UsageError(f"--set {override!r}: the config has no place {path!r}; `cramlm config` prints every setting")
            if following is None:
                place[key] = _override_value(raw.strip())
                if keys == ["retriever", "kind"]:
                    result["retriever"] = with_kind(place, place[key])
            else:
                if isinstance(place, dict) and place.get(key) is None:
                    place[key] = {}
                place = place[key]
                if not isinstance(place, dict | list):
                    raise UsageError(f"--set {override!r}: {key!r} holds a value, not a table; `cramlm config` prints every setting")
    return result


def _override_value(raw: str) -> Any:
    if raw.lower() == "none":
        return None
    try:
        return tomllib.loads(f"value = {raw}")["value"]
    except tomllib.TOMLDecodeError:
        return raw
