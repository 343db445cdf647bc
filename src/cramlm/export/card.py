"""README.md of an exported model: what it is, how to load it, training data, training, scores and limits.

Figures that provenance.json lacks are omitted. The body is templates/model_card.md.jinja, in which every value
(labels, names of files) is escaped as Markdown; the head is `huggingface_hub.ModelCardData`, with the scores as a model-index.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from pydantic import ValidationError

from cramlm.config.phase import PhaseConfig, linear_teachers
from cramlm.config.run import EncoderConfig
from cramlm.config.terms import LINEAR_TEACHER, Classify, Distil
from cramlm.evaluation.kinds import KINDS, METRIC_NAMES, format_metric, is_percent, main_metric
from cramlm.inference.base import are_pairs
from cramlm.linear.files import NAIVE_BAYES, read_setting, terms_of
from cramlm.records import COMBINED, TaskKind

if TYPE_CHECKING:
    from huggingface_hub import EvalResult

_MOST_ROWS: Final = 40
_MOST_COLUMNS: Final = 3
_SPECIAL: Final = str.maketrans({character: f"\\{character}" for character in "\\`*_{}[]<>#|~$"})
_WHAT: Final[dict[TaskKind, str]] = {"classification": "classifier", "multi-label": "tagger", "regression": "scorer"}
_SCHEMES: Final = {
    "multinomial": "multinomial logistic regression",
    "one-vs-rest": "one-vs-rest logistic regression",
    "ridge": "ridge",
    NAIVE_BAYES: "naive Bayes",
}
_LINEAR: Final = {
    "tfidf": "logistic regression on weighted n-grams",
    "bayes": "naive Bayes on labelled and raw text",
    "static": "logistic regression on weighted n-grams and averaged word vectors of the corpus",
}
_HUB_METRICS: Final = {
    "accuracy": "accuracy",
    "subset_accuracy": "accuracy",
    "micro_f1": "f1",
    "macro_f1": "f1",
    "pearson": "pearsonr",
    "spearman": "spearmanr",
    "rmse": "rmse",
    "r2": "r_squared",
}
"""The identifier of each metric on the Hugging Face Hub."""


def model_card(
    provenance: Mapping[str, Any], *, repository: str | None = None, license_id: str | None = None, language: str | None = None
) -> str:
    """Return the model card: Markdown with YAML front matter.

    provenance: plain data, as in provenance.json. Required: labels, parameters, vocab_size, max_length, mlm, versions. Optional: kind (of
    task), config (a RunConfig), phases (a report for each), retriever, corpus (statistics), selection (report), task, seconds
    (per stage), scores (models: name -> dev, test; verdict; comparison), prompt (where the labels are words: prompt.json). The first of
    scores.models is this model. A linear model (`model` is static, bayes or tfidf) has fit (fit.json) in place of what only an encoder has.

    repository: OWNER/NAME on the hub, for a card that is read there. license_id, language: as the hub spells them (apache-2.0, en).
    """
    from huggingface_hub import ModelCard, ModelCardData

    linear, config, kind = provenance.get("model", "encoder") != "encoder", _config(provenance), _kind(provenance)
    results = list(_eval_results(provenance))
    tags = ["cramlm", "text-classification"]
    data = ModelCardData(
        library_name="cramlm" if linear else "transformers",
        pipeline_tag="fill-mask" if provenance.get("prompt") else "text-classification",
        tags=tags if linear else [*tags, "task-driven-language-modeling"],
        license=license_id,
        language=language,
        model_name=_one_line(config.get("name") or "cramlm") if results else None,
        eval_results=results or None,
    )
    phases = _phases(provenance)
    name = config.get("name")
    title = f"text {_WHAT[kind]} made with cramlm"
    body = (
        _environment()
        .get_template("model_card.md.jinja")
        .render(
            card_data=Markup(data.to_yaml()),
            has_license=license_id is not None,
            has_language=language is not None,
            repository=None if repository is None else Markup(repository),
            provenance=provenance,
            kind=kind,
            pairs=are_pairs(provenance),
            linear=linear,
            config=config,
            encoder=config.get("encoder"),
            init=provenance.get("init"),
            title=f"{name}: a {title}" if name else f"A {title}",
            labels=provenance["labels"],
            splits={split: provenance["task"][split] for split in ("train", "dev", "test") if provenance["task"].get(split)}
            if provenance.get("task")
            else {},
            phases_known=bool(phases),
            parts=list(_parts(provenance, phases)),
            phase_rows=_phase_rows(provenance),
            chosen_how=_chosen_how(provenance),
            has_prior=KINDS[kind].has_prior,
            scores=_scores(provenance),
            measured=_measured(provenance)[1],
        )
    )
    return str(ModelCard(body))


def file_name(name: str) -> str:
    """Return the last part of a path or URL, without query, fragment and credentials; "?" if there is none."""
    path = urlsplit(name).path if "://" in name else name
    return re.split(r"[/\\]", path.rstrip("/\\"))[-1] or "?"


@cache
def _environment() -> Environment:
    made = Environment(
        loader=PackageLoader("cramlm.export", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_escaped,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    made.filters["setting"] = read_setting
    made.filters["features"] = terms_of
    made.filters["count"] = lambda value: f"{value:,.0f}"
    made.filters["file_name"] = file_name
    made.filters["listing"] = _listing
    made.globals |= {"most_rows": _MOST_ROWS, "schemes": _SCHEMES}
    return made


def _escaped(value: Any) -> Markup:
    """Text on one line with what Markdown would read as markup escaped; `Markup` as it is."""
    return value if isinstance(value, Markup) else Markup(_one_line(value).translate(_SPECIAL))


def _one_line(value: Any) -> str:
    return "".join(character if character.isprintable() else " " for character in str(value))


def _listing(names: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def _config(provenance: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the run's config as plain data; empty if it is unknown."""
    return provenance.get("config") or {}


def _kind(provenance: Mapping[str, Any]) -> TaskKind:
    kind: TaskKind = provenance.get("kind", "classification")
    return kind


def _measured(provenance: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """Return the split that this model is measured on (test if there is one, else dev) and its scores; empty if there are none."""
    models = (provenance.get("scores") or {}).get("models") or {}
    own: Mapping[str, Any] = next(iter(models.values()), {})
    split = "test" if own.get("test") else "dev"
    return split, own.get(split) or {}


def _eval_results(provenance: Mapping[str, Any]) -> Iterator[EvalResult]:
    """The scores of this model for the model-index: shares as such (0 to 1), not in percent."""
    from huggingface_hub import EvalResult

    split, measured = _measured(provenance)
    task = _config(provenance).get("task") or {}
    file = task.get(split) or task.get("train")
    for metric in reversed(KINDS[_kind(provenance)].table_metrics):
        if metric in measured:
            yield EvalResult(
                task_type="text-classification",
                dataset_type="own-labelled-texts",
                dataset_name=_one_line(file_name(file)) if file else "labelled texts",
                dataset_split=split,
                metric_type=_HUB_METRICS[metric],
                metric_name=METRIC_NAMES[metric],
                metric_value=round(float(measured[metric]), 4),
            )


def _phases(provenance: Mapping[str, Any]) -> list[PhaseConfig]:
    """Return the phases of the run's config; none if it is unknown or of a version with other settings."""
    try:
        return [PhaseConfig.model_validate(phase) for phase in _config(provenance).get("phases", ())]
    except ValidationError:
        return []


def _encoder(provenance: Mapping[str, Any]) -> EncoderConfig:
    """Return the encoder of the run's config; one that starts from random weights if it is unknown or of a version with other settings."""
    try:
        return EncoderConfig.model_validate(_config(provenance).get("encoder", {}))
    except ValidationError:
        return EncoderConfig()


def _parts(provenance: Mapping[str, Any], phases: Sequence[PhaseConfig]) -> Iterator[tuple[str, str]]:
    """Yield the name and the description of every part of the method that the run used beside the texts and their labels."""
    config, encoder, kind = _config(provenance), _encoder(provenance), _kind(provenance)
    task, teacher = config.get("task", {}), config.get("teacher", {})
    soft_labels = "numbers" if kind == "regression" else "probabilities"
    if linear := [(phase, term) for phase in phases for term in linear_teachers(phase)]:
        models = ", ".join(_LINEAR[name] for name in teacher["models"] if name != "bayes" or kind == "classification")
        models = models.replace("logistic", "ridge") if kind == "regression" else models
        named = " and on the words of the labels' names" if kind == "classification" and task.get("label_names") else ""
        subjects = {"external": "for the raw text", "task": "for the training texts, each held out of its fit"}
        terms = {origin: [(phase, term) for phase, term in linear if term.on == origin] for origin in subjects}
        read = " and ".join(f"{subject} ({_weights(terms[origin])})" for origin, subject in subjects.items() if terms[origin])
        yield ("a linear teacher", f"{models}, fitted on the training texts{named}. The encoder uses its {soft_labels} {read}.")
        if teacher.get("mark_passages"):
            text = "pieces of the raw text got markers like those of the training texts before the teacher labelled them."
            yield ("markers in passages", text)
        if teacher.get("pair_passages"):
            yield ("pairs of passages", "the teacher labelled pairs of halves of the raw text's pieces, of one piece or of two.")
        if teacher.get("align_distribution"):
            text = "the teacher's label probabilities for the raw text are reweighted towards the label frequencies of the training texts."
            yield ("distribution alignment", text)
    if task.get("unlabelled"):
        text = "they retrieved raw text, too, and were learned from like retrieved text; the model `static` was self-trained on them."
        yield ("unlabelled texts of the task", text)
    for phase in phases:
        for term in phase.terms_of(Distil):
            if term.teacher != LINEAR_TEACHER:
                text = f"{soft_labels} that the model of phase {term.teacher} predicts for the raw text ({_weights([(phase, term)])})."
                yield ("pseudo-labels", text)
    if encoder.embedding_init == "cooccurrence" or (encoder.embedding_init == "words" and not config.get("retriever")):
        yield ("co-occurrence embeddings", "token embeddings start from token co-occurrence (PPMI + SVD).")
    elif encoder.embedding_init == "words":
        sources = "word vectors of the raw text (PPMI + SVD, ridge regression) and token co-occurrence"
        yield ("embeddings from word vectors and co-occurrence", f"token embeddings start from {sources}.")
    if encoder.starts_from_context:
        text = "initial attention adds to each token the embeddings of those around it."
        yield ("layers that start by copying neighbours", text)
        if encoder.layer_init == "markers":
            text = "two heads first attend to the nearest marker, or boundary, on either side of each token."
            yield ("heads that start at markers", text)
    if smoothed := [(phase, term) for phase in phases for term in phase.terms_of(Classify) if term.label_smoothing]:
        yield ("label smoothing", f"{', '.join(f'{term.label_smoothing:g} (phase {phase.name})' for phase, term in smoothed)}.")
    if config.get("logit_adjustment") == "dev" and KINDS[kind].has_prior and any(phase.learns_labels for phase in phases):
        text = "tau times the log label frequencies is subtracted from the logits; tau was chosen on dev."
        yield ("logit adjustment", text)


def _weights(terms: Sequence[tuple[PhaseConfig, Distil]]) -> str:
    return ", ".join(f"phase {phase.name}, weight {term.weight:g}" for phase, term in terms)


def _chosen_how(provenance: Mapping[str, Any]) -> str:
    match provenance.get("retriever"):
        case {"kind": "bm25" | "dense" as kind, "top_k": top_k}:
            best = "the best" if top_k is None else f"the best {top_k}"
            return f"{best} by {'BM25' if kind == 'bm25' else 'sentence embeddings'} for each training text"
        case {"kind": "dsir"}:
            return "sampled by importance resampling towards the training texts"
        case {"kind": "union", "retrievers": members}:
            return f"chosen by {' and '.join(member['kind'] for member in members)} in turn"
        case {"kind": "random"}:
            return "sampled at random"
        case _:
            return "retrieved for the training texts"


def _phase_rows(provenance: Mapping[str, Any]) -> list[list[str]]:
    return [
        [
            phase["name"],
            f"{phase['steps']:,}",
            f"{phase['tokens']:,}",
            f"{phase['seconds']:,.0f}",
            f"{phase['paper_flops']:.2g}",
            f"{phase['executed_flops']:.2g}",
        ]
        for phase in provenance.get("phases") or ()
    ]


def _scores(provenance: Mapping[str, Any]) -> dict[str, Any] | None:
    """Tables of scores as text, this model first. per_class: of this model on `split`. linear_models: (name, features, fit)."""
    models = (provenance.get("scores") or {}).get("models") or {}
    if not models:
        return None
    kind = _kind(provenance)
    main = main_metric(kind)
    comparison = provenance["scores"].get("comparison") or {}
    cross_fitted = comparison.get("cross_fitted", {})
    choice = _config(provenance).get("dev_metric") or main
    columns = [("dev", main), ("test", main), *(("test", metric) for metric in reversed(KINDS[kind].table_metrics[:-1]))][:_MOST_COLUMNS]
    header = ["model", *(f"{split} {METRIC_NAMES[metric]}" for split, metric in columns)]
    if cross_fitted:
        header.insert(2, f"dev {METRIC_NAMES[choice]}, cross-fitted")
    rows = []
    for name, entry in models.items():
        cells = [_figure(entry.get(split), field) for split, field in columns]
        if cross_fitted:
            cells.insert(1, format_metric(choice, cross_fitted[name]) if name in cross_fitted else "–")
        rows.append((name, cells))
    features = (
        ("tfidf", "weighted n-grams"),
        ("bayes", "TF-IDF of these and of retrieved texts"),
        ("static", "weighted n-grams and averaged word vectors of the corpus"),
    )
    split, measured = _measured(provenance)
    return {
        "percent": is_percent(main),
        "header": header,
        "rows": rows,
        "linear_models": [(name, what, fit) for name, what in features if (fit := models.get(name, {}).get("fit"))],
        "out_of_fold": any((entry.get("fit") or {}).get("held_out_texts") for entry in models.values()),
        "compared": bool(comparison),
        "combined": COMBINED in models,
        "verdict": provenance["scores"].get("verdict") or "",
        "split": split,
        "per_class": [
            [label, *(f"{100 * row[field]:.1f}" for field in ("precision", "recall", "f1")), f"{row['support']:,}"]
            for label, row in list((measured.get("per_class") or {}).items())[:_MOST_ROWS]
        ],
    }


def _figure(scores: Mapping[str, Any] | None, field: str) -> str:
    if not scores:
        return "–"
    low, high = scores.get("intervals", {}).get(field, (None, None))
    interval = "" if low is None else f" ({format_metric(field, low)}–{format_metric(field, high)})"
    return f"{format_metric(field, scores[field])}{interval}"
