"""The page of a run: `report_page` makes it, `write_report` puts it (or several runs') on disk, `refresh_report` does at the end of a fit.

One file without any reference outside itself; its content security policy lets it load nothing, and run no script but its own, so that not
even a mistake in escaping would let a text act. It is a function of the run's folder (and the task's files): the same run gives the same
bytes.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import resources
from pathlib import Path

from cramlm.artifacts import hash_json, publish_file
from cramlm.deploy.report.facts import RunFacts, read_run
from cramlm.deploy.report.learning import learning_curves
from cramlm.deploy.report.markup import attribute
from cramlm.deploy.report.material import labelled_data, retrieved_text
from cramlm.deploy.report.neighbours import open_neighbours
from cramlm.deploy.report.overview import asked_and_spent, head, provenance
from cramlm.deploy.report.quality import errors, scores
from cramlm.deploy.report.side_by_side import runs_page
from cramlm.errors import ArtifactError
from cramlm.records import Emit, Event

FILE = "report.html"
RUNS_FILE = "runs.html"
CODE_FORMAT = 2  # raise it when the same run would give another page
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
        facts = read_run(run)
        found = _KEY.search(target.read_text("utf-8", errors="replace")[:4000]) if target.is_file() else None
        if found is None or found[1] != _key(facts):
            publish_file(target, _page(facts).encode())
            emit(Event("note", "report", f"{target}: a page to look at"))
    except Exception as error:  # whatever it is, it must not take the finished run down with it
        emit(Event("warning", "report", f"no page was written ({type(error).__name__}: {error}); try `cramlm report {run}`"))


def report_page(run: Path) -> str:
    """The page of the run at `run`, as HTML.

    Raises:
        ArtifactError: if `run` is no run, is damaged, or was written by another version.
    """
    facts = read_run(run)
    with _fields_named(run):
        return _page(facts)


def comparison_page(runs: Sequence[Path]) -> str:
    """Several runs side by side, as HTML.

    Raises:
        ArtifactError: as `report_page`.
    """
    with _fields_named(*runs):
        title, body = runs_page(runs)
    return document(title, "runs", body)


@contextmanager
def _fields_named(*runs: Path) -> Iterator[None]:
    """A field that a run's files lack is the run's fault: it is of another version."""
    try:
        yield
    except KeyError as error:
        names = ", ".join(map(str, runs))
        raise ArtifactError(f"{names}: a field that the page tells is not there ({error}); written by another version of cramlm") from error


def document(title: str, key: str, body: str) -> str:
    """A whole page around `body`, with style and script inside."""
    style, script = (resources.files("cramlm.deploy.report").joinpath(name).read_text("utf-8") for name in ("report.css", "report.js"))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    return f"""<!doctype html>
<html lang="en" dir="ltr">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta name="generator" content="cramlm">
<meta name="cramlm-report" content="{key}">
<title>{attribute(title)}</title>
<style>{style}</style>
</head>
<body>
{body}
<script>{script}</script>
</body>
</html>
"""


def _page(run: RunFacts) -> str:
    with open_neighbours(run.passages) as neighbours:
        sections = [
            scores(run),
            asked_and_spent(run),
            labelled_data(run),
            retrieved_text(run, neighbours),
            learning_curves(run),
            errors(run, neighbours),
            provenance(run),
        ]
    names = [match for section in sections for match in re.findall(r'^<section id="(\w+)"><h2>(.*)</h2>', section)]
    links = "".join(f'<a href="#{identity}">{heading}</a>' for identity, heading in names)
    navigation = f'<nav aria-label="Sections">{links}</nav>'
    ending = (
        "<footer>Made by <code>cramlm report</code>. This file needs no network. It holds texts of the task and of the corpus: share it as "
        "you may share those.</footer>"
    )
    return document(
        f"{run.config.name}: {run.path.resolve().name}", _key(run), f"{head(run)}{navigation}<main>{''.join(sections)}</main>{ending}"
    )


def _key(run: RunFacts) -> str:
    stages = {name: artifact.fingerprint for name, artifact in run.stages.items()}
    return hash_json({"format": CODE_FORMAT, "config": run.config_text, "stages": stages, "task": run.task is not None})[:32]
