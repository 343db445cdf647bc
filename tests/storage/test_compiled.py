"""Kernels on disk: machine code is run only if the sources of all kernels of its folder are those that it was made from."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Any

import numba
import pytest

from commands import Child
from server_process import PATIENCE


def compiled_sum(folder: Path, **environment: str) -> int:
    """Return what the kernel in `folder` returns for 1, in a process of its own, which has loaded none of it."""

    def work() -> None:
        os.environ.update(environment)
        settings: Any = numba.config
        settings.CACHE_DIR = environment["NUMBA_CACHE_DIR"]  # numba has read the variable
        sys.path.insert(0, str(folder))
        sys.dont_write_bytecode = True
        print(importlib.import_module("linear").plus(1))

    output, errors = Child(work).communicate(PATIENCE)
    assert output, errors
    return int(output)


def write_kernels(folder: Path, constant: int) -> Path:
    """Two files of kernels, one of which uses a constant of the other: it is part of the machine code."""
    folder.mkdir(exist_ok=True)
    (folder / "cpu.py").write_text(f"CONSTANT = {constant}\n")
    (folder / "linear.py").write_text(
        "from cpu import CONSTANT\nfrom cramlm.storage.compiled import jit\n\n\n@jit\ndef plus(x):\n    return x + CONSTANT\n"
    )
    os.utime(folder / "linear.py", (1e9, 1e9))  # numba itself compares the time and size of this file alone
    return folder


def machine_code(folder: Path) -> set[str]:
    return {path.name for path in folder.rglob("*.nbc")}


@pytest.mark.parametrize("is_chosen", [False, True])
def test_a_changed_constant_in_another_file_compiles_anew(tmp_path: Path, is_chosen: bool) -> None:
    kernels, cache = tmp_path / "kernels", tmp_path / "cache"
    environment = {"NUMBA_CACHE_DIR": str(cache) if is_chosen else ""}
    for constant in (10, 20, 10):
        assert compiled_sum(write_kernels(kernels, constant), **environment) == 1 + constant
    assert len(list((cache if is_chosen else kernels / "__pycache__").glob("kernels-*"))) == 2
    assert machine_code(cache if is_chosen else kernels)
    assert not machine_code(kernels if is_chosen else cache)


def test_without_a_writable_kernel_folder_the_users_cache_is_used_or_kernels_are_compiled_in_memory(tmp_path: Path) -> None:
    kernels, home, file = write_kernels(tmp_path / "kernels", 10), tmp_path / "home", tmp_path / "file"
    for path in (kernels / "__pycache__", file):
        path.write_text("a file where a folder would be")
    assert compiled_sum(kernels, NUMBA_CACHE_DIR="", HOME=str(home), XDG_CACHE_HOME=str(home / "cache")) == 11
    assert machine_code(home / "cache")
    assert compiled_sum(kernels, NUMBA_CACHE_DIR=str(file), HOME=str(file), XDG_CACHE_HOME=str(file)) == 11
