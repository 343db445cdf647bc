"""The page of a run, rendered from Jinja2 templates: `report_page` renders it, `write_report` publishes it (or that of several runs),
`refresh_report` does so at the end of a fit.

One file without any reference outside itself; its content security policy lets it load nothing, and run no script but its own, so that not
even a mistake in escaping would let a text act. It is a function of the run's folder: the same run gives the same bytes.
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
from cramlm.reporting.record import MOST_PASSAGES, TASK_MISSING, RunRecord, read_run
from cramlm.reporting.sections import day_of, duration, open_neighbours, sections_of
from cramlm.storage.artifacts import hash_json, publish_file

FILE = "report.html"
RUNS_FILE = "runs.html"
CODE_FORMAT = 4  # raise it when the same run would give another page
_KEY = re.compile(r'<meta name="cramlm-report" content="(\w+)">')


def write_report(runs: Sequence[Path], out: Path | None = None) -> Path:
    """Write the page of a run, or one that shows several side by side, to `out`; returns where it is.

    Without `out`: report.html in the run's folder; of several runs, runs.html here.

    Raises:
        ArtifactError: if one is no run, is damaged, or was written by another version. EnvironmentFault: if the disk refuses.
    """
    if len(runs) == 1:
        target, page = out or runs[0] / FILE, report_page(runs[0])
    else:
        target, page = out or Path(RUNS_FILE), comparison_page(runs)
    publish_file(target, page.encode())
    return target


def refresh_report(run: Path, *, emit: Emit) -> None:
    """`write_report`, unless the page there is of the same results. Never fails: the run is finished, and the page can be made again."""
    target = run / FILE
    try:
        record = read_run(run)
        found = _KEY.search(target.read_text("utf-8", errors="replace")[:4000]) if target.is_file() else None
        if found is None or found[1] != _key(record):
            publish_file(target, _page(record).encode())
            emit(Event("note", "report", f"{target}: a page to look at"))
    except Exception as error:  # whatever it is, it must not take the finished run down with it
        emit(Event("warning", "report", f"no page was written ({type(error).__name__}: {error}); try `cramlm report {run}`"))


def report_page(run: Path) -> str:
    """The page of the run at `run`, as HTML.

    Raises:
        ArtifactError: if `run` is no run, is damaged, or was written by another version.
    """
    record = read_run(run)
    with _fields_named(run):
        return _page(record)


def comparison_page(runs: Sequence[Path]) -> str:
    """Several runs side by side, as HTML.

    Raises:
        ArtifactError: as `report_page`.
    """
    with _fields_named(*runs):
        return _render("comparison.html.jinja", key="runs", data=compare_runs(runs))


@cache
def environment() -> Environment:
    """The templates, strict: a name that is missing is an error, and every value is cleaned and escaped unless it is markup."""
    made = Environment(
        loader=PackageLoader("cramlm.reporting", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_cleaned,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    made.filters |= {
        "brief": brief,
        "count": lambda value: f"{value:,.0f}",
        "duration": duration,
        "excerpt": excerpt,
        "power": _power,
        "ratio": lambda part, whole: part / whole if whole else 0,
        "score": lambda value, metric: format_metric(metric, value),
        "share": lambda share, decimals=1: f"{100 * share:.{decimals}f} %",
    }
    made.globals |= {"metric_names": METRIC_NAMES, "task_missing": TASK_MISSING, "most_passages": MOST_PASSAGES}
    return made


@contextmanager
def _fields_named(*runs: Path) -> Iterator[None]:
    """Blame a field that a run's files lack on the run: another version wrote it."""
    try:
        yield
    except (KeyError, UndefinedError) as error:
        names = ", ".join(map(str, runs))
        raise ArtifactError(f"{names}: a field that the page tells is not there ({error}); written by another version of cramlm") from error


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
    """A whole page, with style and script inside."""
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
    """A large number as 1.7 × 10¹²."""
    digits, _, exponent = f"{value:.1e}".partition("e")
    return Markup("{} × 10<sup>{}</sup>").format(digits, int(exponent))
