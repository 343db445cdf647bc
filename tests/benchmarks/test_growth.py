from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import growth_report


def rows(*sizes: int) -> list[dict[str, Any]]:
    """Return rows of bench_growth.py with linear cost."""
    settings = {"source": {"kind": "invented"}, "task": "chemprot", "limit": 500, "workers": 1}
    machine = {"processor": "a processor", "cores": 2, "memory_gigabytes": 8.0}
    steps = {
        size: {step: {"seconds": 3 + 2e-5 * size, "peak_bytes": 1e8 + 150 * size, "bytes": 900 * size} for step in growth_report.NAMES}
        for size in sizes
    }
    return [{"passages": size, "settings": settings, "machine": machine, "steps": steps[size]} for size in sizes]


def test_the_fit_recovers_a_line_and_its_coefficients_are_not_negative() -> None:
    a, b, error = growth_report.fit([1e5, 1e6, 1e7], [5.0, 23.0, 203.0])
    assert (a, b) == (pytest.approx(3.0), pytest.approx(2e-5))
    assert error < 1e-9
    assert growth_report.fit([1, 2, 3], [3.0, 2.0, 1.0])[1] == 0
    assert growth_report.fit([1, 2, 3], [1.0, 4.0, 9.0])[0] == 0
    assert growth_report.fit_all(rows(1000, 2000)) == {}, "two sizes are not fitted"


def test_the_page_has_a_text_version_of_the_plot_and_marks_extrapolations(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs pip install 'cramlm[bench]'")
    growth_report.write(rows(100_000, 1_000_000, 10_000_000), tmp_path)
    page = (tmp_path / "growth.md").read_text("utf-8")
    assert "![Three charts with logarithmic axes, from 100,000 to 10,000,000 passages" in page
    assert "read: 3.4 min" in page
    assert "| seconds: reading the corpus | 20.0 s | 33.4 min | 5.6 h | 0% |" in page
    assert "Calculated, not measured" in page
    assert (tmp_path / "growth.svg").read_bytes()[:5] == b"<?xml"
    assert (tmp_path / "growth.png").read_bytes()[:4] == b"\x89PNG"
