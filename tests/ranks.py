"""Several ranks on this machine, each a forked child, so that torch is loaded once."""

from __future__ import annotations

import os
import socket
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

from cramlm.config.run import DistributedConfig
from cramlm.errors import CramError
from cramlm.training.distributed import join
from cramlm.training.ranks import Ranks


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def start_ranks(count: int, work: Callable[[Ranks], None], *, errors: Path, timeout: float = 3600.0) -> list[int]:
    """Start a child per rank that runs `work`; return their pids. The error message of a rank is written to `errors/rank-N`."""
    errors.mkdir(parents=True, exist_ok=True)
    port = free_port()
    pids = []
    for index in range(count):
        pid = os.fork()
        if pid == 0:
            place = {"RANK": str(index), "WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
            os.environ.update(place | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)})
            os._exit(_child(work, DistributedConfig(timeout=timeout), errors / f"rank-{index}"))
        pids.append(pid)
    return pids


def exit_codes(pids: list[int]) -> list[int]:
    """Wait for the children: exit codes, or minus the signal."""
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]


def error_messages(errors: Path) -> list[str]:
    """The error messages of the ranks that have one, by rank."""
    return [path.read_text("utf-8") for path in sorted(errors.iterdir()) if path.stat().st_size]


def _child(work: Callable[[Ranks], None], config: DistributedConfig, error_file: Path) -> int:
    try:
        with join(config, device="cpu") as ranks:
            work(ranks)
    except CramError as error:
        error_file.write_text(str(error), "utf-8")
        return error.exit_code
    except SystemExit as error:
        return int(error.code or 0)
    except BaseException:
        traceback.print_exc(file=sys.stderr)
        return 1
    return 0
