"""Output for the terminal: events of a run as progress bars or plain lines on stderr, results of the commands as tables on stdout."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from cramlm.errors import counted, size
from cramlm.records import Emit, Event

PLAIN_INTERVAL = 10.0  # seconds between progress lines of one stage when there is no terminal

_WORDS_SHOWN = 12
_NARROWEST = 36  # width of the first column of a table, which is cut before the others are


@contextmanager
def console_events() -> Iterator[Emit]:
    """Yield an `Emit` that prints events: progress bars if stderr is a terminal, else lines."""
    if sys.stderr.isatty():
        with _columns() as progress:
            yield ProgressBars(progress)
    else:
        yield ProgressLines()


def show_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table; the first column is left-aligned, the others right-aligned. Markup in the text is not interpreted."""
    console = Console()
    table = Table(title=Text(title), title_justify="left", title_style="bold")
    others = sum(max(cell_len(row[index]) for row in (header, *rows)) + 3 for index in range(1, len(header)))
    for index, name in enumerate(header):
        widest = max(console.width - others - 4, _NARROWEST) if index == 0 else None
        table.add_column(Text(name), justify="left" if index == 0 else "right", no_wrap=index == 0, max_width=widest)
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    console.print(table)


class ProgressLines:
    """Prints a line per event, progress events of a stage at most every `PLAIN_INTERVAL` seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._first: dict[str, float] = {}  # when each running stage started, for its duration
        self._last: dict[str, float] = {}  # and for its speed: a deeper search starts the selection again
        self._shown: dict[str, float] = {}

    def __call__(self, event: Event) -> None:
        now, stage = self._clock(), event.stage
        match event.kind:
            case "start":
                if stage == "task":  # a run begins; of one before that failed, a stage may not have ended
                    self._first.clear()
                self._first.setdefault(stage, now)
                self._last[stage] = self._shown[stage] = now
                self._start(event)
            case "progress":
                self._progress(event, now, now - self._last.get(stage, now))
            case "done":
                self._line("green", stage, f"{event.message or 'done'} ({now - self._first.pop(stage, now):.1f} s)")
            case "step":
                pass
            case "warning":
                self._line("yellow", stage, f"warning: {event.message}")
            case "plan" | "up_to_date" | "stale" | "note" | "evaluation":
                self._line("cyan", stage, event.message)

    def _start(self, event: Event) -> None:
        self._line("", event.stage, event.message or "started")

    def _progress(self, event: Event, now: float, elapsed: float) -> None:
        """elapsed: seconds since the last start of the stage; 0 if it has not started."""
        if now - self._shown.get(event.stage, 0.0) >= PLAIN_INTERVAL:
            self._shown[event.stage] = now
            self._line("", event.stage, _progress_text(event, elapsed))

    def _line(self, colour: str, stage: str, message: str) -> None:
        print(f"{stage:>16}  {message}", file=sys.stderr, flush=True)


class ProgressBars(ProgressLines):
    """Shows a progress bar for each running stage, and prints the other lines above the bars."""

    def __init__(self, bars: Progress, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(clock)
        self._bars = bars
        self._bar_of: dict[str, TaskID] = {}

    def __call__(self, event: Event) -> None:
        if event.kind in ("start", "done") and (bar := self._bar_of.pop(event.stage, None)) is not None:
            self._bars.remove_task(bar)  # also of a stage that starts again
        super().__call__(event)

    def _start(self, event: Event) -> None:
        self._bar_of[event.stage] = self._bars.add_task(event.stage, total=event.total, rate="")

    def _progress(self, event: Event, now: float, elapsed: float) -> None:
        if (bar := self._bar_of.get(event.stage)) is not None:
            rate = f"{event.done / elapsed:,.0f} {event.unit}/s" if elapsed > 0.5 else ""
            self._bars.update(bar, completed=event.done, total=event.total, rate=event.message or rate)

    def _line(self, colour: str, stage: str, message: str) -> None:
        self._bars.console.print(Text.assemble((f"{stage:>16} ", f"bold {colour}"), message), highlight=False)


def _columns() -> Progress:
    return Progress(
        TextColumn("{task.description:>16}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        TextColumn("{task.fields[rate]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    )


def _progress_text(event: Event, elapsed: float) -> str:
    share = f" of {event.total:,.0f} ({event.done / event.total:.0%})" if event.total else ""
    rate = event.done / elapsed if elapsed > 0 else 0.0
    left = f", {(event.total - event.done) / rate:.0f} s left" if event.total and rate > 0 and event.done < event.total else ""
    return f"{event.done:,.0f}{share} {event.unit}{', ' + event.message if event.message else ''}{left}"


def summary_header(scores: Mapping[str, Any]) -> list[str]:
    """Return the header of `summary_rows`."""
    from cramlm.evaluation.kinds import KINDS, METRIC_NAMES, main_metric

    kind = scores.get("kind", "classification")
    return ["", f"dev {METRIC_NAMES[main_metric(kind)]}", *(f"test {METRIC_NAMES[metric]}" for metric in KINDS[kind].table_metrics)]


def summary_rows(scores: Mapping[str, Any]) -> list[list[str]]:
    """Return rows (model, dev score, test scores) from a run's scores.json: the model of the run first, then the baselines.

    If some test rows are also in train, a second row gives the scores on the others.
    """
    from cramlm.evaluation.kinds import KINDS, format_metric, main_metric

    kind = scores.get("kind", "classification")

    def shown(test: Mapping[str, Any] | None) -> list[str]:
        return ["-" if test is None else format_metric(metric, test[metric]) for metric in KINDS[kind].table_metrics]

    rows = []
    for name, entry in scores["models"].items():
        rows.append([name, format_metric(main_metric(kind), entry["dev"][main_metric(kind)]), *shown(entry.get("test"))])
        if "test_leak_free" in entry:
            rows.append([f"  {entry['test_leak_free']['rows']} rows not in train", "", *shown(entry["test_leak_free"])])
    return rows


def show_findings(
    files: Sequence[Mapping[str, Any]], findings: Sequence[Any], *, per_rule: int | None, of_rules: Mapping[str, int] | None = None
) -> None:
    """Print statistics of each file, a line for each finding (data/validation.py), and the number of findings.

    per_rule: number of findings to print of one rule; None is all. of_rules: another number for some rules.
    """
    for file in files:
        labels, words = list(file["labels"].items()), " / ".join(f"{count:,}" for count in file["words"])
        shares = dict((*labels[:1], *labels[-1:]))  # one, if there is one label
        ends = ", ".join(f"{printable(name[:40])} {count / file['rows']:.1%}" for name, count in shares.items())
        ends = ends or ", ".join(f"{number:g}" for number in file.get("numbers", ()))
        scripts = ", ".join(f"{name} {share:.0%}" for name, share in list(file["scripts"].items())[:3]) or "no letters"
        targets = counted(len(labels), "label") if labels else "numbers"
        print(f"{file['name']}: {counted(file['rows'], 'row')}, {targets} ({ends}), words {words}, {scripts}")
    ends = "numbers: minimum, median and maximum" if files[0].get("numbers") else "labels: the largest and the smallest"
    print(f"{ends}; words per row: 5th, 50th and 95th percentile and maximum")
    shown: dict[str, int] = {}
    limits = {finding.rule: len(findings) if per_rule is None else (of_rules or {}).get(finding.rule, per_rule) for finding in findings}
    for finding in findings:
        shown[finding.rule] = shown.get(finding.rule, 0) + 1
        if shown[finding.rule] <= limits[finding.rule]:
            print(printable(str(finding)))
    for rule, count in shown.items():
        if count > limits[rule]:
            print(f"... and {count - limits[rule]:,} more of {rule}; --all shows them")
    problems = sum(finding.severity == "problem" for finding in findings)
    print(f"{counted(problems, 'problem')}, {counted(len(findings) - problems, 'notice')} in {counted(len(files), 'file')}")


def show_plans(plans: Sequence[Mapping[str, Any]]) -> None:
    """Print a line for each plan (`RunForecast.as_dict`), never truncated to the width of the terminal."""
    header = ("budget", "model", "params", "vocab", "raw text", "phases", "batch", "steps", "passes", "minutes", "FLOPs", "memory", "disk")
    lines: list[Sequence[str]] = [header]
    for plan in plans:
        budget = plan["budget"] or "none"
        if plan["refused"]:
            lines.append([budget, plan["model"], "refused"])
            continue
        phases, about = plan["phases"], "~" if plan["rough"] else ""
        lines.append(
            [
                budget,
                plan["model"],
                f"{plan['parameters'] / 1e6:.1f}M",
                f"{plan['vocab_size']:,}",
                f"{plan['external_tokens'] / 1e6:.1f}M",
                " + ".join(phase["name"] for phase in phases),
                " + ".join(phase["batch"] for phase in phases),
                " + ".join(f"{phase['steps']:,}" for phase in phases),
                " + ".join("/".join(f"{count:.1f}" for count in phase["passes"].values()) for phase in phases),
                f"{about}{plan['seconds'] / 60:.1f}",
                f"{plan['flops']:.1e}",
                _memory(plan),
                size(plan["disk"]),
            ]
        )
    widths = [max(len(line[column]) for line in lines if column < len(line)) for column in range(len(header))]
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=False)).rstrip())
    print("raw text: estimated tokens; passes: epochs over the task text / over the raw text")
    if any(plan["rough"] for plan in plans):
        print("~: rough; a training step takes long here, so speed and memory are estimated from matrix products, and fit measures them")
    for plan in plans:
        if plan["refused"]:
            print(f"{plan['budget'] or 'no budget'}: {plan['refused']}")


def _memory(plan: Mapping[str, Any]) -> str:
    """Return the memory of a plan, and that of a GPU."""
    memory = "unknown" if plan["memory"] is None else f"{'~' if plan['rough'] else ''}{size(plan['memory'])}"
    return memory if plan["gpu_memory"] is None else f"{memory} + {size(plan['gpu_memory'])} GPU"


def show_selection(report: Mapping[str, Any]) -> None:
    """Print a selection's report.json: sources, counts of queries and passages, and how its words differ from the corpus."""
    from cramlm.retrieval.ranking import count_reasons

    documents, likeness = report["documents"], report["task_likeness"]
    total, tokens = documents["selected"], report["tokens"]["estimated"]
    header = ("source", "passages", "words", "share", "in the corpus", "ratio")
    title = f"{counted(total, 'passage')}, {report['words']:,} words, about {tokens / 1e6:.2f}M tokens"
    show_table(title, header, _source_rows(report, total))
    lines = [["passages", _counts(documents)], ["dropped", count_reasons(report["dropped"]) or "none"]]
    others = report["other_sources"]
    if others["sources"]:
        lines.insert(0, ["other sources", f"{others['sources']:,} with {others['passages']:,} passages"])
    if report["queries"]["texts"]:
        lines.insert(0, ["queries", _counts(report["queries"])])
    lines += [[f"by {part['kind']}", f"{part['selected']:,} of {part['found']:,}"] for part in report.get("retrievers", ())]
    for name in ("rank", "score"):
        lines.append([name, "  ".join(f"{share} {report[name][share]:,g}" for share in ("p0", "p10", "p50", "p90", "p100"))])
    random, selected = likeness["kl_random"], likeness["kl_selection"]
    change = f"{'reduced' if selected <= random else 'increased'} by {abs(random - selected):.3f}"
    lines.append(["KL(task || text)", f"{selected:.3f}; random text {random:.3f}; {change}"])
    lines.append(["frequent words", ", ".join(row["word"] for row in report["over_represented"]) + " (compared with the corpus)"])
    grid = Table.grid(padding=(0, 2))
    for name, value in lines:
        grid.add_row(Text(name, style="bold"), Text(value))
    Console().print(grid)


def show_explanation(explanation: Mapping[str, Any]) -> None:
    """Print an `Explanation`: each text with coloured words, the words with the largest contributions, the nearest passages."""
    words, is_pair = explanation["words"], explanation["text_pair"] is not None
    console = Console()
    is_number = explanation["value"] is not None
    figure = f"{explanation['value']:.6g}" if is_number else f"{100 * explanation['probability']:.1f} %"
    console.print(Text.assemble((beginning(explanation["label"], 60), "bold"), f"  {figure}"))
    strongest = max((abs(word["contribution"]) for word in words), default=0.0)
    for field, read in (("text", "read"), ("text_pair", "read_pair"))[: 1 + is_pair]:
        text, of_field = explanation[field], [word for word in words if word["field"] == field]
        heading = [(f"{field}: ", "dim")] if is_pair else []
        console.print(Text.assemble(*heading, _shaded(text[: explanation[read]], of_field, strongest)))
        if truncated := len(text) - explanation[read]:
            console.print(f"({truncated:,} more characters: truncated)", style="dim")
    ranked = sorted(words, key=lambda word: -abs(word["contribution"]))[:_WORDS_SHOWN]
    format_of, unit = ("+.3g", "change of the number") if is_number else ("+.2f", "log-odds of the label")
    rows = [[beginning(word["text"], 60), *[word["field"]] * is_pair, f"{word['contribution']:{format_of}}"] for word in ranked]
    show_table("largest contributions", ("word", *["in"] * is_pair, unit), rows)
    for passage in explanation["passages"]:
        terms = ", ".join(term for term, _ in passage["terms"][:8])
        console.print(
            Text.assemble((f"{passage['score']:8.2f} ", "bold"), f"{beginning(passage['id'], 60)}  ", (beginning(terms, 300), "cyan"))
        )
        console.print(Text(beginning(passage["text"], 300)))


def _shaded(text: str, words: Sequence[Mapping[str, Any]], strongest: float) -> Text:
    """Return a text with coloured words."""
    shown, position = Text(), 0
    for word in words:
        shown.append(printable(text[position : word["start"]]))
        shown.append(printable(word["text"]), style=_shade(word["contribution"], strongest))
        position = word["stop"]
    return shown.append(printable(text[position:]))


def _shade(contribution: float, strongest: float) -> str:
    """Return a style: green for the label, red against it, bold above half of the strongest word, plain below a tenth of it."""
    share = contribution / strongest if strongest > 0 else 0.0
    if abs(share) < 0.1:
        return ""
    return ("bold " if abs(share) > 0.5 else "") + ("green" if share > 0 else "red")


def beginning(text: str, characters: int) -> str:
    """Return the first words of a text in at most so many characters, on one line, with an ellipsis if more follow."""
    text = printable(text)
    if len(text) <= characters:
        return text
    first = text[: characters - 2]
    return f"{first.rpartition(' ')[0] or first} …"


def printable(text: str) -> str:
    """Replace control characters (escape sequences, line ends) by spaces."""
    return "".join(character if character.isprintable() else " " for character in text)


def _source_rows(report: Mapping[str, Any], total: int) -> list[list[str]]:
    """Return rows: source, passages, words, share of the selection, share of the source that was selected, ratio to a random sample."""
    rows = []
    for source, count in report["sources"].items():
        there = report["corpus_sources"][source]
        ratio = (count / total) / (there / report["corpus_documents"])
        words = report["source_words"][source]
        rows.append([source, f"{count:,}", f"{words:,}", f"{count / total:.1%}", f"{count / there:.1%} of {there:,}", f"{ratio:.2f}"])
    return rows


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count:,} {name}" for name, count in counts.items())
