"""The command line in this process: what a command prints, and the code that it exits with."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from typer.testing import CliRunner

from cramlm.cli.app import main


@dataclass(frozen=True)
class Result:
    """Named as in `subprocess.CompletedProcess`, so that a test can run a command in a process of its own instead."""

    returncode: int
    stdout: str
    stderr: str


def cramlm(
    *arguments: str | Path, stdin: str | None = None, cwd: Path | None = None, environment: Mapping[str, str] | None = None
) -> Result:
    """Run `cramlm ARGUMENTS` as a process would, without loading everything again."""
    with _process_state(), CliRunner().isolation(input=stdin, env=environment) as (stdout, stderr, _):
        sys.argv = ["cramlm", *map(str, arguments)]
        if cwd is not None:
            os.chdir(cwd)
        try:
            main()
        except SystemExit as error:
            code = error.code
        sys.stdout.flush()
        sys.stderr.flush()
        assert isinstance(code, int)
        return Result(code, stdout.getvalue().decode(), stderr.getvalue().decode())


@contextlib.contextmanager
def _process_state() -> Iterator[None]:
    """Restore what a command changes of the process that runs it."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    argv, folder, environment, threads = sys.argv, Path.cwd(), dict(os.environ), torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(folder)
        sys.argv = argv
        for number, handler in handlers.items():
            signal.signal(number, handler)
