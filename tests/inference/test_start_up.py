"""Which packages the commands on a finished model leave alone: importing one takes longer than a prediction."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from commands import python
from jsonl import write_jsonl

COMMANDS = """
import json, sys
from cramlm.cli.app import app

for command in json.loads(sys.argv[1]):
    app(command, standalone_mode=False)
print(json.dumps(sorted(set(sys.argv[2:]) & set(sys.modules))))
"""


@pytest.mark.parametrize(
    ("answer", "packages"),
    [
        ("static", ["torch", "transformers", "sklearn", "numba", "pyarrow"]),
        ("combined", ["transformers", "sklearn", "numba", "pyarrow", "sympy"]),
    ],
)
def test_predicting_evaluating_and_choosing_texts_do_not_import(answer: str, packages: list[str], tiny_run: Path, tmp_path: Path) -> None:
    run, texts = str(tiny_run / "run"), str(tmp_path / "texts.jsonl")
    rows = [{"text": f"a ship near the harbour, {count}", "label": "sea"} for count in range(3)]
    write_jsonl(texts, rows)
    commands = [[name, run, texts, "--model-part", answer] for name in ("predict", "evaluate", "label-next")]
    vectors = ["embed", run, texts, "--out", str(tmp_path / "vectors.npy"), "--model-part", "static" if answer == "static" else "encoder"]
    assert python(COMMANDS, json.dumps([*commands, vectors]), *packages).splitlines()[-1] == "[]"
