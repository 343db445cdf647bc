"""Devices and the precision they compute in."""

from __future__ import annotations

from typing import Literal

import torch

Precision = Literal["fp32", "bf16"]
TRAINING_DEVICE = torch.device("cpu")


def has_bf16(device: torch.device) -> bool:
    """Return True if `device` computes matrix products in bf16 in hardware (of a CPU: AMX or AVX512-BF16)."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported())
    capabilities = torch.cpu.get_capabilities()
    return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))


def resolve_precision(precision: Literal["auto", "fp32", "bf16"], device: torch.device) -> Precision:
    """Return bf16 for auto if `device` has it in hardware, else fp32 (emulated bf16 is slower)."""
    if precision == "auto":
        return "bf16" if has_bf16(device) else "fp32"
    return precision
