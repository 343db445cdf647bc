"""The machine that a run is on, as one line of its log: what its seconds were measured with."""

from __future__ import annotations

import os
import platform
from pathlib import Path

_FIELD = "model name"


def describe_machine() -> str:
    """Processor, cores, memory, accelerator, system; what the system does not tell is left out. Imports torch."""
    import torch

    parts = [_processor(), f"{os.cpu_count()} cores", _memory()]
    if torch.cuda.is_available():
        parts.append(torch.cuda.get_device_name(0))
    parts.append(f"{platform.system()} {platform.machine()}, Python {platform.python_version()}, torch {torch.__version__}")
    return ", ".join(part for part in parts if part)


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor()
    return next((" ".join(line.partition(":")[2].split()) for line in lines if line.startswith(_FIELD)), platform.processor())


def _memory() -> str:
    try:
        return f"{os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / 1e9:.0f} GB"
    except (OSError, ValueError):
        return ""
