"""The table of an experiment as Markdown: for a terminal, a README and a paper's draft alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cramlm.experiments.grid import ALL
from cramlm.experiments.results import Pair, Row, Summary

NOT_RUN = "not run"


def markdown(rows: Sequence[Row], pairs: Sequence[Pair], totals: Mapping[str, float], failed: Mapping[str, str]) -> str:
    """Scores in percent, mean ± sample standard deviation over seeds; below, what the columns mean, the price of all runs, what failed."""
    columns = _columns(rows)
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    first = {row.labels: row.arm for row in reversed(rows) if not row.is_baseline}
    beside = {(pair.labels, pair.arm): pair for pair in pairs if pair.other == first.get(pair.labels)}
    for row in rows:
        cells = _cells(row, beside.get((row.labels, row.arm)), columns)
        lines.append(f"| {' | '.join(cells[column] for column in columns)} |")
    notes = [_legend(columns, next(iter(first.values()), ""))]
    if totals.get("runs"):
        energy = f", {totals['kwh']:.3f} kWh" if "kwh" in totals else ""
        notes.append(
            f"All {totals['runs']:.0f} runs together, which is what choosing among them costs: {totals['minutes']:.1f} minutes, "
            f"{totals['cpu_minutes']:.1f} CPU minutes{energy}, {totals['paper_flops']:.2e} FLOPs as the paper counts them, "
            f"{totals['executed_flops']:.2e} executed."
        )
    notes += [f"Failed: {name}: {reason}" for name, reason in failed.items()]
    return "\n".join([*lines, "", *notes]) + "\n"


def score_text(summary: Summary | None) -> str:
    """In percent, with the spread where there are several seeds."""
    if summary is None:
        return ""
    spread = "" if summary.deviation is None else f" ± {100 * summary.deviation:.1f}"
    return f"{100 * summary.mean:.1f}{spread}"


def _columns(rows: Sequence[Row]) -> list[str]:
    scored = {name for row in rows for name in row.scores}
    columns = ["arm"]
    if any(row.labels != ALL for row in rows):
        columns.append("labels")
    columns.append("seeds")
    if "test macro_f1" in scored:
        columns += ["test macro-F1", "test micro-F1"]
        columns += ["macro-F1, rows not in train"] if "test_leak_free macro_f1" in scored else []
        columns += ["beside the first (95 %), p"] if sum(not row.is_baseline for row in rows) > 1 else []
    columns += ["dev macro-F1", "minutes", "CPU minutes", "FLOPs (paper)", "FLOPs executed", "raw text", "parameters"]
    return columns + (["kWh"] if any(row.kwh is not None for row in rows) else [])


def _cells(row: Row, pair: Pair | None, columns: Sequence[str]) -> dict[str, str]:
    scores = row.scores
    at_least = "" if row.whole else "≥ "
    values = {
        "arm": row.arm,
        "labels": row.labels,
        "seeds": str(len(row.seeds)),
        "test macro-F1": score_text(scores.get("test macro_f1")),
        "test micro-F1": score_text(scores.get("test micro_f1")),
        "macro-F1, rows not in train": score_text(scores.get("test_leak_free macro_f1")),
        "beside the first (95 %), p": "" if pair is None else pair_text(pair),
        "dev macro-F1": score_text(scores.get("dev macro_f1")),
        "minutes": "" if row.minutes is None else f"{at_least}{row.minutes:.1f}",
        "CPU minutes": "" if row.cpu_minutes is None else f"{at_least}{row.cpu_minutes:.1f}",
        "FLOPs (paper)": "" if row.paper_flops is None else f"{row.paper_flops:.1e}",
        "FLOPs executed": "" if row.executed_flops is None else f"{row.executed_flops:.1e}",
        "raw text": f"{row.passages:,.0f} passages, {row.tokens / 1e6:.1f}M tokens" if row.passages else "",
        "parameters": "" if row.parameters is None else f"{row.parameters / 1e6:.1f}M",
        "kWh": "" if row.kwh is None else f"{row.kwh:.4f}",
    }
    return {column: values[column] for column in columns}


def pair_text(pair: Pair) -> str:
    """Difference, interval and p corrected by Holm, in percentage points."""
    p = "< 0.001" if pair.p_holm < 0.001 else f"{pair.p_holm:.3f}"
    return f"{100 * pair.difference:+.1f} ({100 * pair.low:+.1f} to {100 * pair.high:+.1f}), p {p}"


def _legend(columns: Sequence[str], first: str) -> str:
    words = ["Scores in percent, mean ± standard deviation over seeds; TF-IDF + LR is the variant that is best on dev."]
    if "beside the first (95 %), p" in columns:
        words.append(
            f"Beside the first: macro-F1 on test less that of {first}, with a paired bootstrap interval over rows and seeds; p by "
            "approximate randomisation, corrected by Holm for the number of arms."
        )
    words.append(
        "Minutes are a run's, with what it shares with others counted in full; CPU minutes are its own. FLOPs: all phases of a run, as the "
        "paper counts them (6 x tokens x parameters) and the matrix products that ran. Raw text: tokens are estimated."
    )
    return " ".join(words)
