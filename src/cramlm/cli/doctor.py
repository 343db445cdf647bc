"""What this machine offers to cramlm, for `cramlm doctor` and for bug reports."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
from collections.abc import Iterator
from pathlib import Path

EXTRAS = {
    "onnxruntime": "models that answer without torch ([onnx])",
    "fastapi": "answers over HTTP, `cramlm serve` ([serve])",
    "ray": "reading, indexing and selecting on a cluster ([ray])",
    "elasticsearch": "passages from a search server ([elasticsearch])",
    "datasketch": "removal of near-duplicates ([dedup])",
    "pytest": "the test suite ([dev])",
}
PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "numpy", "numba", "pyarrow", "zstandard", "scikit-learn", "pydantic")


def report() -> Iterator[tuple[str, str]]:
    """(name, value) lines, cheap ones first; imports torch."""
    from cramlm import __version__
    from cramlm.pipeline.run import default_store

    yield "cramlm", __version__
    yield "python", f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    import torch

    from cramlm.model.device import TRAINING_DEVICE, has_bf16

    yield "cores", f"{os.cpu_count()} ({torch.get_num_threads()} used by torch)"
    yield "memory", memory()
    other = f"; {torch.cuda.get_device_name(0)} encodes passages for dense retrieval, nothing else" if torch.cuda.is_available() else ""
    yield "device", f"CPU{other}"
    yield "bf16", "computed by the CPU" if has_bf16(TRAINING_DEVICE) else "not in hardware: fp32 is used"
    store = default_store()
    existing = next(path for path in (store, *store.parents) if path.exists())
    yield "store", f"{store} ({shutil.disk_usage(existing).free / 1e9:.0f} GB free)"
    for name in PACKAGES:
        yield name, importlib.metadata.version(name)
    for name, use in EXTRAS.items():
        if importlib.util.find_spec(name) is None:
            yield name, f"missing; it gives {use}"


def memory() -> str:
    """Total and available memory, read from /proc/meminfo where there is one."""
    try:
        fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    except OSError:
        return "unknown"
    total, available = (int(fields[name].split()[0]) / 1e6 for name in ("MemTotal", "MemAvailable"))
    return f"{total:.1f} GB, {available:.1f} GB available"
