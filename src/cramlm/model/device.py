"""What the hardware computes in."""

from __future__ import annotations

from typing import Literal

import torch

Precision = Literal["fp32", "bf16"]


def has_bf16() -> bool:
    """Whether matrix products in bf16 run in hardware here (GPU, AMX or AVX512-BF16)."""
    if torch.cuda.is_available():
        return bool(torch.cuda.is_bf16_supported())
    capabilities = torch.cpu.get_capabilities()
    return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))


def resolve_precision(asked: Literal["auto", "fp32", "bf16"]) -> Precision:
    """auto is bf16 where the hardware computes in it, else fp32 (emulated bf16 is slower than fp32)."""
    if asked == "auto":
        return "bf16" if has_bf16() else "fp32"
    return asked
