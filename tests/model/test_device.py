"""Which precision `auto` means: that of the device that computes, not that of the best one in the machine."""

from __future__ import annotations

import pytest
import torch

from cramlm.cli.runs import machine_lines
from cramlm.model.model import has_bf16, resolve_precision

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture(params=[{"avx512_bf16": False}, {"avx512_bf16": True}, {"amx_bf16": True}, {}], ids=str)
def capabilities(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> dict[str, bool]:
    """Of the CPU of a machine with a GPU that computes in bf16, as PyTorch describes both."""
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: request.param)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Some GPU")
    found: dict[str, bool] = request.param
    return found


def test_on_a_machine_with_a_gpu_the_precision_of_cpu_training_depends_on_the_cpu(capabilities: dict[str, bool]) -> None:
    assert has_bf16(CPU) == any(capabilities.values())
    assert resolve_precision("auto", CPU) == ("bf16" if any(capabilities.values()) else "fp32")
    assert resolve_precision("auto", CUDA) == "bf16"


@pytest.mark.parametrize("asked", ["fp32", "bf16"])
def test_an_explicit_precision_is_used(asked: str, capabilities: dict[str, bool]) -> None:
    assert resolve_precision(asked, CPU) == resolve_precision(asked, CUDA) == asked  # type: ignore[arg-type]


def test_doctor_reports_the_use_of_a_gpu(capabilities: dict[str, bool]) -> None:
    lines = dict(machine_lines())
    assert lines["device"] == "CPU; Some GPU is used for dense retrieval only"
    assert lines["bf16"].startswith("supported" if any(capabilities.values()) else "not supported")


def test_without_a_gpu_doctor_reports_none() -> None:
    assert torch.cuda.is_available() or dict(machine_lines())["device"] == "CPU"
