"""The HTML report of a run or of several runs, rendered from Jinja2 templates.

A page is one file without references to others; its content security policy allows no requests and only its own script, so that text from
data cannot act even if it were not escaped. The same run folder gives the same bytes.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, UndefinedError
from markupsafe import Markup

from cramlm.errors import ArtifactError
from cramlm.evaluation.kinds import METRIC_NAMES, format_metric, main_metric
from cramlm.records import Emit, Event
from cramlm.reporting.charts import stylesheet
from cramlm.reporting.comparison import compare_runs
from cramlm.reporting.excerpts import brief, clean, excerpt
from cramlm.reporting.record import MAX_PASSAGES, TASK_MISSING, RunRecord, read_run
from cramlm.reporting.sections import day_of, duration, open_neighbours, sections_of
from cramlm.storage.artifacts import hash_json, publish_file

FILE = "report.html"
RUNS_FILE = "runs.html"
CODE_FORMAT = 5  # increase it when the page of an unchanged run changes
_KEY = re.compile(r'<meta name="cramlm-report" content="(\w+)">')


def write_report(runs: Sequence[Path], out: Path | None = None) -> Path:
    """Write the page of a run, or one page that compares several runs; return its path.

    out: default is report.html in the run's folder, or runs.html in the current folder for several runs.

    Raises:
        ArtifactError: if a folder is not a run, is damaged, or was written by another version. EnvironmentFault: if it cannot be written.
    """
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
        "count": lambda value: f"{value:,.0f}",
        "duration": duration,
        "excerpt": excerpt,
        "features": lambda variant: "tokens and characters" if variant == "union" else variant,
        "power": _power,
        "ratio": lambda part, whole: part / whole if whole else 0,
        "score": lambda value, metric: format_metric(metric, value),
        "share": lambda share, decimals=1: f"{100 * share:.{decimals}f} %",
    }
    templates.globals |= {"metric_names": METRIC_NAMES, "task_missing": TASK_MISSING, "max_passages": MAX_PASSAGES}
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
        folder=run.path.resolve().name,
        day=day_of(run),
        metric=main_metric(run.config.task.kind),
        sections=sections,
    )


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


def _power(value: float) -> Markup:
    """Format a large number as 1.7 × 10¹²."""
    digits, _, exponent = f"{value:.1e}".partition("e")
    return Markup("{} × 10<sup>{}</sup>").format(digits, int(exponent))
