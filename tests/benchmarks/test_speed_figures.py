"""The figures of whole commands in the README equal the results in the repository."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks/results"


@pytest.mark.skipif(not (ROOT / "README.md").is_file(), reason="an installed package: the README is not beside it")
def test_whole_commands_in_the_readme_are_those_of_the_results() -> None:
    readme = (ROOT / "README.md").read_text("utf-8")
    select, fit = (json.loads((RESULTS / f"{name}.json").read_bytes()) for name in ("select", "fit"))
    ours, bm25s = (select["processes"][side]["cpu_seconds"] for side in ("cramlm", "bm25s"))
    assert f"best {select['top_k']} of {select['passages']:,} passages for all 4,169 texts, to disk, CPU seconds | {ours:.1f} |" in readme
    assert f"a script with bm25s {bm25s:.1f} |" in readme
    assert f"{fit['cpu_seconds']:.0f} CPU seconds, {100 * fit['outside']:.0f} % are not training" in " ".join(readme.split())
