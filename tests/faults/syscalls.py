"""Trace the system calls on files of a child process before the kernel executes them: count, refuse or record them, or kill the child.

    supervise(action, decide) ─► fork ─► child: filter on itself, then action()
                                    └──► parent: Call by Call, decide(call) ─► None (the kernel continues) | errno | KILL

seccomp user notifications (Linux 5.5 and later, no privilege needed) stop the calling thread in Python, C or Rust code, in threads and in
processes that the child starts. The package needs no hooks, and no call is missed.
"""

from __future__ import annotations

import array
import ctypes
import errno
import fcntl
import functools
import os
import platform
import select
import signal
import socket
import struct
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeAlias

KILL: Final = -1

_NUMBERS: Final = {
    "x86_64": {
        "read": 0, "write": 1, "open": 2, "mmap": 9, "pread64": 17, "pwrite64": 18, "readv": 19, "writev": 20, "sendfile": 40,
        "flock": 73, "fsync": 74, "fdatasync": 75, "ftruncate": 77, "rename": 82, "mkdir": 83, "rmdir": 84, "link": 86, "unlink": 87,
        "symlink": 88, "getdents64": 217, "openat": 257, "mkdirat": 258, "newfstatat": 262, "unlinkat": 263, "renameat": 264,
        "fallocate": 285, "renameat2": 316, "copy_file_range": 326, "statx": 332, "execve": 59, "execveat": 322, "creat": 85, "stat": 4,
    },
    "aarch64": {
        "read": 63, "write": 64, "mmap": 222, "pread64": 67, "pwrite64": 68, "readv": 65, "writev": 66, "sendfile": 71,
        "flock": 32, "fsync": 82, "fdatasync": 83, "ftruncate": 46, "getdents64": 61, "openat": 56, "mkdirat": 34, "newfstatat": 79,
        "unlinkat": 35, "renameat": 38, "fallocate": 47, "renameat2": 276, "copy_file_range": 285, "statx": 291, "execve": 221,
        "execveat": 281,
    },
}  # fmt: skip
CHANGES: Final = (
    *("write", "pwrite64", "writev", "sendfile", "copy_file_range", "fallocate", "ftruncate", "fsync", "fdatasync", "rename", "renameat"),
    *("renameat2", "mkdir", "mkdirat", "rmdir", "unlink", "unlinkat", "link", "symlink", "open", "openat", "creat"),
)
READS: Final = ("read", "pread64", "readv", "mmap", "getdents64", "newfstatat", "statx", "stat", "flock", "open", "openat")
_BY_PATH: Final = {"open": 0, "creat": 0, "stat": 0, "rename": 0, "mkdir": 0, "rmdir": 0, "link": 0, "unlink": 0, "symlink": 1, "execve": 0}
_BY_FOLDER: Final = ("openat", "mkdirat", "unlinkat", "renameat", "renameat2", "newfstatat", "statx", "execveat")
_HERE: Final = -100  # AT_FDCWD
_EXCHANGE: Final = 2
_EVENT, _REPLY, _CONTINUE = struct.Struct("<QIIiIQ6Q"), struct.Struct("<QqiI"), 1
_RECEIVE, _SEND = 0xC0502100, 0xC0182101  # SECCOMP_IOCTL_NOTIF_RECV and _SEND


@dataclass(frozen=True, slots=True)
class Call:
    """A call that is not executed yet. path: its file; other: the second name of a rename or link. changes: it would write."""

    name: str
    path: str
    other: str
    changes: bool
    exchange: bool
    pid: int
    arguments: tuple[int, ...]

    def written(self) -> tuple[int, bytes]:
        """(offset, bytes) of a write, pwrite64 or sendfile with an offset in its source."""
        descriptor, address, size, offset = self.arguments[:4]
        if self.name == "sendfile":  # to, from, address of the offset, size
            descriptor, source, address, size = self.arguments[:4]
            content = self._read(f"fd/{source}", size, int.from_bytes(self._read("mem", 8, address), sys.byteorder))
        else:
            content = self._read("mem", size, address)
        if self.name == "pwrite64":
            return offset, content
        with open(f"/proc/{self.pid}/fdinfo/{descriptor}", encoding="ascii") as file:  # noqa: PTH123
            fields = dict(line.split(":", 1) for line in file)
        if int(fields["flags"], 8) & os.O_APPEND:
            return os.stat(f"/proc/{self.pid}/fd/{descriptor}").st_size, content  # noqa: PTH116
        return int(fields["pos"]), content

    def _read(self, name: str, size: int, offset: int) -> bytes:
        """Bytes of a file of the process."""
        with open(f"/proc/{self.pid}/{name}", "rb", buffering=0) as file:  # noqa: PTH123
            return os.pread(file.fileno(), size, offset)


Decide: TypeAlias = Callable[[Call], int | None]


@functools.cache
def available() -> bool:
    """Return True if the kernel lets a process trace the calls of its child."""
    if platform.machine() not in _NUMBERS or platform.system() != "Linux":
        return False
    try:
        return supervise(lambda: 7, lambda call: None) == 7
    except OSError:
        return False


def supervise(
    action: Callable[[], int], decide: Decide, *, names: tuple[str, ...] = CHANGES, started: Callable[[int], None] | None = None
) -> int:
    """Run `action` in a forked child and call `decide` with each call of these names; return the exit code, or minus the signal.

    started: called with the pid of the child.
    """
    here, there = socket.socketpair()
    if (pid := os.fork()) == 0:
        code = 99
        try:
            here.close()
            listener = _filter_myself(names)
            socket.send_fds(there, [b"."], [listener])
            os.close(listener)
            there.close()
            code = action()
        finally:
            os._exit(code)
    there.close()
    _, listeners, _, _ = socket.recv_fds(here, 1, 1)
    here.close()
    if not listeners:
        os.waitpid(pid, 0)
        raise OSError(errno.ENOSYS, "no seccomp notifications here")
    if started is not None:
        started(pid)
    end = os.pidfd_open(pid)
    try:
        _answer_until(listeners[0], end, pid, decide)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    finally:
        os.close(listeners[0])
        os.close(end)


def _answer_until(listener: int, end: int, pid: int, decide: Decide) -> None:
    names = {number: name for name, number in _NUMBERS[platform.machine()].items()}
    poll = select.poll()
    poll.register(listener, select.POLLIN)
    poll.register(end, select.POLLIN)
    while True:
        ready = dict(poll.poll())
        if ready.get(listener, 0) & select.POLLIN:
            event = array.array("B", bytes(_EVENT.size))
            try:
                fcntl.ioctl(listener, _RECEIVE, event, True)
            except OSError as error:
                if error.errno in (errno.ENOENT, errno.EINTR):
                    continue  # the caller was killed meanwhile
                raise
            identity, thread, _, number, _, _, *arguments = _EVENT.unpack(event)
            verdict = None
            if (call := _describe(names[number], thread, arguments)) is not None:
                verdict = decide(call)
            if verdict == KILL:
                os.kill(pid, signal.SIGKILL)
                continue
            reply = _REPLY.pack(identity, 0, -(verdict or 0), 0 if verdict else _CONTINUE)
            try:
                fcntl.ioctl(listener, _SEND, reply)
            except OSError as error:
                if error.errno != errno.ENOENT:
                    raise
        elif end in ready:
            return


def _describe(name: str, pid: int, arguments: list[int]) -> Call | None:
    """Return None if the caller has ended, or its file has no name."""
    path = other = ""
    exchange = False
    try:
        if name in _BY_PATH:
            path = _path(pid, _HERE, arguments[_BY_PATH[name]])
            if name in ("rename", "link"):
                other = _path(pid, _HERE, arguments[1])
        elif name in _BY_FOLDER:
            path = _path(pid, _signed(arguments[0]), arguments[1])
            if name.startswith("renameat"):
                other = _path(pid, _signed(arguments[2]), arguments[3])
                exchange = name == "renameat2" and bool(arguments[4] & _EXCHANGE)
        else:
            path = os.readlink(f"/proc/{pid}/fd/{_signed(arguments[4 if name == 'mmap' else 0])}")  # noqa: PTH115
    except (OSError, UnicodeDecodeError):
        return None
    flags = arguments[1] if name == "open" else arguments[2] if name == "openat" else os.O_WRONLY
    opened = name in ("open", "openat")
    changes = bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC)) if opened else name in CHANGES
    return Call(name, path, other, changes, exchange, pid, tuple(arguments))


def _signed(value: int) -> int:
    return ctypes.c_int(value & 0xFFFFFFFF).value


def _path(pid: int, folder: int, address: int) -> str:
    with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:  # noqa: PTH123
        content = b""
        while b"\0" not in content:  # page by page: the next one may not be mapped
            piece = os.pread(memory.fileno(), 4096 - (address + len(content)) % 4096, address + len(content))
            if not piece:
                raise OSError(errno.EFAULT, "not readable")
            content += piece
    name = os.fsdecode(content[: content.index(0)])
    base = "" if os.path.isabs(name) else os.readlink(f"/proc/{pid}/{'cwd' if folder == _HERE else f'fd/{folder}'}")  # noqa: PTH115, PTH117
    return os.path.normpath(os.path.join(base, name))  # noqa: PTH118


class _Instruction(ctypes.Structure):
    _fields_ = (("code", ctypes.c_ushort), ("then", ctypes.c_ubyte), ("otherwise", ctypes.c_ubyte), ("value", ctypes.c_uint))


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.POINTER(_Instruction)))


def _filter_myself(names: tuple[str, ...]) -> int:
    """Make the kernel stop this process at calls of these names; return the descriptor of the notifications."""
    all_numbers = _NUMBERS[platform.machine()]
    numbers = [all_numbers[name] for name in names if name in all_numbers and name != "mmap"]
    load, equal, leave, notify, allow = 0x20, 0x15, 0x06, 0x7FC00000, 0x7FFF0000
    code = [_Instruction(load, 0, 0, 0)]  # the number of the call
    if "mmap" in names:  # of files only: most calls allocate memory
        to_allow, to_notify = len(numbers) + 1, len(numbers) + 2
        fourth = 16 + 8 * 4  # the offset of the descriptor in seccomp_data; -1 without a file
        code += [_Instruction(equal, 0, 3, all_numbers["mmap"]), _Instruction(load, 0, 0, fourth)]
        code += [_Instruction(equal, to_allow, to_notify, 0xFFFFFFFF), _Instruction(load, 0, 0, 0)]
    for position, number in enumerate(numbers):
        code.append(_Instruction(equal, len(numbers) - position, 0, number))
    code += [_Instruction(leave, 0, 0, allow), _Instruction(leave, 0, 0, notify)]
    instructions = (_Instruction * len(code))(*code)
    program = _Program(len(code), instructions)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS: then it needs no privilege
    system_call = {"x86_64": 317, "aarch64": 277}[platform.machine()]  # seccomp
    for flags in (8 | 32, 8):  # NEW_LISTENER with WAIT_KILLABLE_RECV, if the kernel has it: signals do not repeat a call
        if (listener := libc.syscall(system_call, 1, flags, ctypes.byref(program))) >= 0:
            return int(listener)
    raise OSError(ctypes.get_errno(), "seccomp")
