"""Commands in this process, and in forked children of it: nothing is imported again.

A new interpreter loads torch for two to four CPU seconds; a forked child starts at once, with signals, an exit code and standard streams of
its own. Tests of what is imported, of memory limits and of the entry point need a new interpreter (`subprocess`).
"""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any, NoReturn

import torch
import typer.main
from typer.testing import CliRunner

from cramlm.cli.app import main

typer.main.get_command = functools.cache(typer.main.get_command)  # of the 25 commands and their options: 0.1 s for each command that runs


def cramlm(
    *arguments: str | Path, stdin: str | None = None, cwd: Path | None = None, environment: Mapping[str, str] | None = None
) -> CompletedProcess[str]:
    """Run `cramlm ARGUMENTS` as `subprocess.run` would, without loading everything again."""
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
        return CompletedProcess(sys.argv, code, stdout.getvalue().decode(), stderr.getvalue().decode())


def succeed(*arguments: str | Path, **options: Any) -> CompletedProcess[str]:
    """Run a command as `cramlm` does; it must exit with 0."""
    result = cramlm(*arguments, **options)
    assert result.returncode == 0, result.stderr
    return result


def printed(*arguments: str | Path, **options: Any) -> str:
    """Return what a command prints that exits with 0."""
    return succeed(*arguments, **options).stdout


def error_line(result: CompletedProcess[str], code: int) -> str:
    """Return the last line of a command that exits with `code`, without `cramlm: error: `; no traceback may precede it."""
    assert result.returncode == code, result.stderr
    assert "Traceback" not in result.stderr
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith("cramlm: error: ")
    return last.removeprefix("cramlm: error: ")


def python(code: str, *arguments: str | Path, **environment: str) -> str:
    """Run code in a new interpreter, with these variables set; return what it prints."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | environment, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout


COMMANDS = """
import json, sys
from cramlm.cli.app import app

imported = []
for commands, packages in json.loads(sys.argv[1]):
    for command in commands:
        app(command, standalone_mode=False)
    imported.append(sorted(set(packages) & set(sys.modules)))
print(json.dumps(imported))
"""


def imported_by(*groups: tuple[Iterable[Iterable[str | Path]], list[str]]) -> list[list[str]]:
    """Run groups of commands in one new interpreter; return for each those of its packages that are imported after it."""
    shown = python(COMMANDS, json.dumps([([[*map(str, command)] for command in commands], packages) for commands, packages in groups]))
    return list(json.loads(shown.splitlines()[-1]))


def start(*arguments: str | Path, environment: Mapping[str, str] | None = None, prepare: Callable[[], None] | None = None) -> Child:
    """Start `cramlm ARGUMENTS` in a forked child. environment: variables to set in it. prepare: called in it before the command."""

    def command() -> None:
        os.environ.update(environment or {})
        if prepare is not None:
            prepare()
        sys.argv = ["cramlm", *map(str, arguments)]
        main()

    return Child(command)


class Child:
    """A forked process that runs a function, with the interface of `subprocess.Popen` in text mode."""

    def __init__(self, work: Callable[[], object]) -> None:
        (out, out_end), (err, err_end) = os.pipe(), os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            _run_as_process(work, out_end, err_end)
        os.close(out_end)
        os.close(err_end)
        self.stdout = os.fdopen(out, encoding="utf-8")
        self.stderr = os.fdopen(err, encoding="utf-8")
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float) -> int:
        end = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired("child", timeout)
            time.sleep(0.005)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout: float) -> tuple[str, str]:
        """Wait for the end; (standard output, standard error) since the last read."""
        errors: list[str] = []
        reader = threading.Thread(target=lambda: errors.append(self.stderr.read()))
        reader.start()
        output = self.stdout.read()
        reader.join()
        self.wait(timeout)
        self.close()
        return output, errors[0]

    def close(self) -> None:
        self.stdout.close()
        self.stderr.close()


def _run_as_process(work: Callable[[], object], out: int, err: int) -> NoReturn:
    """Run `work` with new standard streams and default signal handlers, and end this process with its exit code."""
    code: object = 1
    try:
        for source, target in ((os.open(os.devnull, os.O_RDONLY), 0), (out, 1), (err, 2)):
            os.dup2(source, target)
        os.closerange(3, 65536)  # as a new interpreter has none of its parent's files and connections
        sys.stdin, sys.stdout, sys.stderr = (
            open(number, mode, encoding="utf-8", closefd=False)  # noqa: SIM115
            for number, mode in ((0, "r"), (1, "w"), (2, "w"))
        )
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        work()
        code = 0
    except SystemExit as error:
        code = error.code or 0
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 1)


@contextlib.contextmanager
def _process_state() -> Iterator[None]:
    """Restore what a command changes of the process that runs it."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    argv, folder, environment, threads = sys.argv, Path.cwd(), dict(os.environ), torch.get_num_threads()
    collections = gc.get_threshold()
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        gc.set_threshold(*collections)
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(folder)
        sys.argv = argv
        for number, handler in handlers.items():
            signal.signal(number, handler)
