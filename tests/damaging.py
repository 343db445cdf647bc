"""Ways to damage or edit files, and an object that shows whether it was unpickled."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any


def flip(path: Path, at: int = -1) -> None:
    """Flip a bit of the byte at this position, by default the last."""
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def cut(path: Path, kept: float) -> None:
    """Truncate a file to this share of its bytes."""
    content = path.read_bytes()
    path.write_bytes(content[: int(kept * len(content))])


def edit_json(path: Path, **changes: Any) -> None:
    """Set keys of the JSON object in a file."""
    path.write_text(json.dumps(json.loads(path.read_bytes()) | changes), "utf-8")


class Marker:
    """An object that makes a folder if it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[[str], object], tuple[str]]:
        return os.mkdir, (str(self.path),)


def edit_tensors(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the tensors of a safetensors file."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def edit_header(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the header of a safetensors file, and not its data."""
    content = path.read_bytes()
    (size,) = struct.unpack("<Q", content[:8])
    fields = json.loads(content[8 : 8 + size])
    change(fields)
    text = json.dumps(fields).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + size :])
