"""The HTML report of a run or of several runs, rendered from Jinja2 templates, which escape every text.

A page is one file without references to others; its content security policy allows no requests and only its own script, so that text from
data cannot act even if it were not escaped. Long texts are shortened to one line or to an excerpt with marked words. The same run folder
gives the same bytes.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, UndefinedError
from markupsafe import Markup

from cramlm.errors import ArtifactError, UsageError, counted
from cramlm.evaluation.confidence import FEWEST_TEXTS
from cramlm.evaluation.kinds import METRIC_NAMES, format_metric, main_metric
from cramlm.inference.folders import run_at
from cramlm.linear.files import read_setting, terms_of
from cramlm.records import Emit, Event
from cramlm.reporting.charts import clean, stylesheet
from cramlm.reporting.comparison import compare_runs
from cramlm.reporting.record import MAX_PASSAGES, TASK_MISSING, RunRecord, read_run
from cramlm.reporting.sections import day_of, duration, open_neighbours, sections_of
from cramlm.retrieval.bm25.analysis import analyze
from cramlm.storage.artifacts import hash_json, publish_file, refuse_output
from cramlm.text.words import word_pattern

FILE = "report.html"
RUNS_FILE = "runs.html"
ENDINGS = (".html", ".htm")
CODE_FORMAT = 12  # increase it when the page of an unchanged run changes
LABEL_CHARACTERS = 80
SHOWN_CHARACTERS = 320
MAX_CHARACTERS = 6000
_LEAD = 60  # characters shown before the first marked word
_BLANK_LINES = re.compile(r"\n\s*\n")
_KEY = re.compile(r'<meta name="cramlm-report" content="(\w+)">')


def write_report(runs: Sequence[Path], out: Path | None = None) -> Path:
    """Write the page of a run, or one page that compares several runs; return its path.

    runs: their folders, or folders inside of them. out: default is report.html in the run's folder, or runs.html in the current folder for
    several runs.

    Raises:
        UsageError: if `out` is no file of HTML by its ending, or cannot be one (`refuse_output`).
        ArtifactError: if a folder is not a run, is damaged, or was written by another version. EnvironmentFault: if it cannot be written.
    """
    if out is not None:
        refuse_output(out)
        if out.suffix.lower() not in ENDINGS:
            raise UsageError(f"{out}: the report is a page of HTML; pass a file that ends in {' or '.join(ENDINGS)}")
    runs = [run_at(path, "report") for path in runs]
    if len(runs) == 1:
        target, page = out or runs[0] / FILE, report_page(runs[0])
    else:
        target, page = out or Path(RUNS_FILE), comparison_page(runs)
    publish_file(target, page.encode())
    return target


def refresh_report(run: Path, *, emit: Emit) -> None:
    """Write the page of a finished run unless it exists for the same results. An error becomes a warning, so that the run does not fail."""
    target = run / FILE
    try:
        record = read_run(run)
        key = _KEY.search(target.read_text("utf-8", errors="replace")[:4000]) if target.is_file() else None
        if key is None or key[1] != _key(record):
            publish_file(target, _page(record).encode())
            emit(Event("note", "report", f"HTML report: {target}"))
    except Exception as error:  # no error here may fail the finished run
        emit(Event("warning", "report", f"no HTML report was written ({type(error).__name__}: {error}); try `cramlm report {run}`"))


def report_page(run: Path) -> str:
    """Return the HTML page of the run in the folder `run`.

    Raises:
        ArtifactError: if the folder is not a run, is damaged, or was written by another version.
    """
    record = read_run(run)
    with _fields_named(run):
        return _page(record)


def comparison_page(runs: Sequence[Path]) -> str:
    """Return an HTML page that compares several runs.

    Raises:
        ArtifactError: as `report_page`.
    """
    with _fields_named(*runs):
        return _render("comparison.html.jinja", key="runs", data=compare_runs(runs))


@cache
def environment() -> Environment:
    """Return the template environment: a missing name is an error, every value is cleaned and escaped unless it is markup."""
    templates = Environment(
        loader=PackageLoader("cramlm.reporting", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_cleaned,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    templates.filters |= {
        "brief": brief,
        "code": _with_code,
        "count": lambda value: f"{value:,.0f}",
        "counted": counted,
        "duration": duration,
        "excerpt": excerpt,
        "setting": lambda fit: str(read_setting(fit)),
        "features": terms_of,
        "power": _power,
        "ratio": lambda part, whole: part / whole if whole else 0,
        "score": lambda value, metric: format_metric(metric, value),
        "share": lambda share, decimals=1: f"{100 * share:.{decimals}f}\u00a0%",
    }
    templates.globals |= {"metric_names": METRIC_NAMES, "task_missing": TASK_MISSING}
    templates.globals |= {"max_passages": MAX_PASSAGES, "fewest_texts": FEWEST_TEXTS}
    return templates


@contextmanager
def _fields_named(*runs: Path) -> Iterator[None]:
    """Raise ArtifactError for a missing field of a run's files, which another version wrote."""
    try:
        yield
    except (KeyError, UndefinedError) as error:
        names = ", ".join(map(str, runs))
        raise ArtifactError(f"{names}: written by another version of cramlm, a field is missing ({error})") from error


def _page(run: RunRecord) -> str:
    with open_neighbours(run.passages) as neighbours:
        sections = sections_of(run, neighbours)
    return _render(
        "run.html.jinja",
        key=_key(run),
        run=run,
        folder=_folder_name(run),
        day=day_of(run),
        metric=main_metric(run.config.task.kind),
        sections=sections,
    )


def _folder_name(run: RunRecord) -> str:
    """Return the name of the run's folder; `compare` names it by the seed alone, which is then called so."""
    name = run.path.resolve().name
    return f"seed {name}" if name == str(run.config.seed) else name


def _render(template: str, **values: Any) -> str:
    """Render a complete page, including style and script."""
    rules, script = (resources.files("cramlm.reporting").joinpath(name).read_text("utf-8") for name in ("report.css", "report.js"))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    style = Markup(stylesheet() + rules)
    return environment().get_template(template).render(policy=Markup(policy), style=style, script=Markup(script), **values)


def _key(run: RunRecord) -> str:
    stages = {name: artifact.fingerprint for name, artifact in run.stages.items()}
    return hash_json({"format": CODE_FORMAT, "config": run.config_text, "stages": stages})[:32]


def _cleaned(value: Any) -> Any:
    return clean(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def _with_code(message: str) -> Markup:
    """Return a message as markup, with what it has between backticks as code; a backtick without a second one stays."""
    parts = re.split("`([^`]+)`", clean(message))
    return Markup("").join(Markup("<code>{}</code>").format(part) if number % 2 else part for number, part in enumerate(parts))


def _power(value: float) -> Markup:
    """Format a large number as 1.7 × 10¹²."""
    digits, _, exponent = f"{value:.1e}".partition("e")
    return Markup("{} × 10<sup>{}</sup>").format(digits, int(exponent))


@dataclass(frozen=True, slots=True)
class Brief:
    """A short text on one line. whole: the complete text if `shown` is shortened, else empty."""

    shown: str
    whole: str


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of an excerpt; a marked part is a word."""

    text: str
    marked: bool


@dataclass(frozen=True, slots=True)
class Excerpt:
    """A text in three parts; the first and the last are folded.

    characters_before, characters_after: lengths of the folded parts. left_out: number of characters that are in no part.
    """

    before: Sequence[Piece]
    shown: Sequence[Piece]
    after: Sequence[Piece]
    characters_before: int
    characters_after: int
    left_out: int


def brief(text: str, limit: int = LABEL_CHARACTERS) -> Brief:
    """Shorten a label or a name to one line of at most `limit` characters."""
    whole = " ".join(clean(text).split()) or "(blank)"
    return Brief(whole, "") if len(whole) <= limit else Brief(f"{whole[: limit - 1]}…", whole[:MAX_CHARACTERS])


def excerpt(text: str, terms: Collection[str] = (), limit: int = SHOWN_CHARACTERS, most: int = MAX_CHARACTERS) -> Excerpt:
    """Shorten a text and mark the words whose terms (of the BM25 analysis) are in `terms`.

    The part of about `limit` characters with most marked words is shown; all parts together have at most `most` characters.
    """
    whole = _BLANK_LINES.sub("\n", clean(text).strip())
    kept = whole[:most]
    matches = _matching_words(kept, terms)
    if len(whole) <= limit * 1.2:
        return Excerpt((), _pieces(kept, matches, 0, len(kept)), (), 0, 0, 0)
    start, end = _window(kept, matches, limit)
    before, shown, after = (_pieces(kept, matches, *span) for span in ((0, start), (start, end), (end, len(kept))))
    return Excerpt(before, shown, after, start, len(whole) - end, len(whole) - len(kept))


def _matching_words(text: str, terms: Collection[str]) -> list[tuple[int, int]]:
    """Return the spans of the words all of whose terms are in `terms`, in order."""
    is_marked: dict[str, bool] = {}
    spans = []
    for match in re.finditer(word_pattern(), text) if terms else ():
        word = match[0]
        if word not in is_marked:
            analyzed = analyze(word)
            is_marked[word] = bool(analyzed) and all(term in terms for term in analyzed)
        if is_marked[word]:
            spans.append(match.span())
    return spans


def _window(text: str, matches: Sequence[tuple[int, int]], limit: int) -> tuple[int, int]:
    """Return start and end of the part to show: the first `limit` characters with most marked words, cut at a space if there is one."""
    best, start = sum(end <= limit for _, end in matches), 0
    for index, (first, _) in enumerate(matches):
        if (count := sum(end <= first + limit - _LEAD for _, end in matches[index:])) > best:
            best, start = count, max(0, first - _LEAD)
    start = min(start, max(0, len(text) - limit))
    if start:
        space = text.find(" ", start, start + _LEAD)
        start = start if space < 0 else space + 1
    end = text.rfind(" ", start + limit // 2, start + limit) if start + limit < len(text) else len(text)
    return start, min(start + limit, len(text)) if end < 0 else end


def _pieces(text: str, matches: Sequence[tuple[int, int]], start: int, end: int) -> list[Piece]:
    """Split text[start:end] into pieces at the marked words inside it."""
    pieces = []
    for first, last in matches:
        if start <= first and last <= end:
            pieces += [Piece(text[start:first], False), Piece(text[first:last], True)]
            start = last
    return [*pieces, Piece(text[start:end], False)]
