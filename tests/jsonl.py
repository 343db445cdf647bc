"""Files of JSON, and of JSON lines."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


def write_jsonl(path: str | Path, rows: Iterable[Mapping[str, Any]]) -> Path:
    """Write a line per row; return the path."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return path


def write_labelled(path: Path, rows: Iterable[tuple[Any, Any]]) -> str:
    """Write rows of (text, label); return the path as a config has it."""
    return str(write_jsonl(path, ({"text": text, "label": label} for text, label in rows)))


def read_json(path: str | Path) -> Any:
    """Return the value of a JSON file."""
    return json.loads(Path(path).read_bytes())


def read_jsonl(path: str | Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(path).read_text("utf-8").splitlines()]
