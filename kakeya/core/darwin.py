"""Questions to macOS and orders to it, by calls of its C library: no program is started for them.

    sysctl             the size of the machine, the kernel's levels, processes, environments
    host_statistics64  the pages of the machine by their use
    proc_pid_rusage    the footprint of a process
    kqueue             the end of any process, once

Structures have the layouts that Apple publishes in xnu (mach/vm_statistics.h, sys/sysctl.h,
sys/proc.h, sys/resource.h) for 64 bits, little-endian. Decoders are pure functions of bytes. `call`
is the only way to the library: an emulation replaces it. None of this ran on a Mac yet.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import plistlib
import select
import struct
import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import POINTER, c_char_p, c_int, c_size_t, c_uint, c_void_p
from functools import cache
from pathlib import Path
from typing import NamedTuple

Call = Callable[..., int]
PROTOTYPES = {
    "sysctl": (c_int, POINTER(c_int), c_uint, c_void_p, POINTER(c_size_t), c_void_p, c_size_t),
    "sysctlbyname": (c_int, c_char_p, c_void_p, POINTER(c_size_t), c_void_p, c_size_t),
    "mach_host_self": (c_uint,),
    "host_statistics64": (c_int, c_uint, c_int, c_void_p, POINTER(c_uint)),
    "proc_pid_rusage": (c_int, c_int, c_int, c_void_p),
    "gethostuuid": (c_int, c_void_p, c_void_p),
    "_NSGetExecutablePath": (c_int, c_void_p, POINTER(c_uint)),
    "setxattr": (c_int, c_char_p, c_char_p, c_void_p, c_size_t, c_uint, c_int),
    "malloc_zone_pressure_relief": (c_size_t, c_void_p, c_size_t),
    "pthread_set_qos_class_self_np": (c_int, c_uint, c_int),
}
"""The result and the arguments of each function that is called."""
_KERN, _KERN_PROC, _KERN_PROCARGS2, _ALL, _ONE_PID = 1, 14, 49, 0, 1
_HOST_VM_INFO64 = 4
_QOS_USER_INITIATED = 0x19
_ZOMBIE = 5
_F_FULLFSYNC, _F_BARRIERFSYNC = 51, 85
_TRIES = 5
"""A table may grow between the question for its size and that for its content."""
_VM_STATISTICS = struct.Struct("<4I9Q2I4Q4IQ")
_PROCESS = struct.Struct("<qi20xib3xi516xi84x")
"""kinfo_proc: start in s and us, flags, state, pid, parent's pid."""
_RUSAGE_V0 = struct.Struct("<16s10Q")
_FOOTPRINT = 8
"""The field of the physical footprint in rusage_info_v0."""
_ALIGNMENT = 8
_BACKUP_NAME = b"com.apple.metadata:com_apple_backup_excludeItem"
_BACKUP_VALUE = plistlib.dumps("com.apple.backupd", fmt=plistlib.FMT_BINARY)


class Pages(NamedTuple):
    """Pages of the machine. Speculative ones are among the free and the file-backed ones."""

    free: int
    speculative: int
    file_backed: int
    purgeable: int

    @property
    def available(self) -> int:
        """Pages that can be given without compressing or swapping one: anonymous inactive pages
        are not among them."""
        return max(0, self.free - self.speculative) + self.file_backed + self.purgeable


class ProcessRow(NamedTuple):
    """A process; `started` is its start in wall clock seconds with six places, as it was noted
    then."""

    pid: int
    parent: int
    started: str
    has_ended: bool


@cache
def call(name: str) -> Call:
    """A function of the C library. Raises AttributeError where it has none of that name."""
    result, *arguments = PROTOTYPES[name]
    prototype = ctypes.CFUNCTYPE(result, *arguments, use_errno=True)
    function: Call = prototype((name, ctypes.CDLL(None)))
    return function


# --- decoders


def parse_pages(data: bytes) -> Pages:
    """Read a `vm_statistics64`; newer systems append fields. Raises ValueError."""
    fields = _unpacked(_VM_STATISTICS, data)
    return Pages(
        free=fields[0], speculative=fields[14], file_backed=fields[21], purgeable=fields[13]
    )


def parse_processes(data: bytes) -> list[ProcessRow]:
    """Read an array of `kinfo_proc`. Raises ValueError."""
    if len(data) % _PROCESS.size:
        raise ValueError(
            f"{len(data)} bytes are no processes: a multiple of {_PROCESS.size} is due"
        )
    return [
        ProcessRow(pid, parent, f"{seconds}.{micros:06}", state == _ZOMBIE)
        for seconds, micros, _, state, pid, parent in _PROCESS.iter_unpack(data)
    ]


def parse_environment(data: bytes) -> list[bytes]:
    """Read the environment from the answer to KERN_PROCARGS2; [] where the system withholds it.

    The answer: the count of arguments, the path of the program, zeros up to a multiple of 8 bytes
    from its beginning, the arguments, the environment; each string ends with a zero. Raises
    ValueError.
    """
    count, rest = int.from_bytes(data[:4], "little"), data[4:]
    length = rest.find(b"\0")
    if len(data) < 4 or length < 0:
        raise ValueError(f"{data[:16]!r} holds no arguments: their count and a path are due")
    begin = -(-(length + 1) // _ALIGNMENT) * _ALIGNMENT
    strings = rest[begin:].split(b"\0")[count:]
    return [one for one in strings if b"=" in one]


def parse_footprint(data: bytes) -> int:
    """Read the physical footprint in bytes from a `rusage_info_v0`. Raises ValueError."""
    return int(_unpacked(_RUSAGE_V0, data)[_FOOTPRINT])


def _unpacked(layout: struct.Struct, data: bytes) -> tuple[int, ...]:
    if len(data) < layout.size:
        raise ValueError(f"{len(data)} bytes were told, and the structure has {layout.size}")
    return layout.unpack_from(data)


# --- questions


def sysctl(name: str) -> bytes:
    """The value of a name of `sysctl`. Raises OSError."""
    return _told(name, lambda *into: call("sysctlbyname")(name.encode(), *into, None, 0))


def sysctl_number(name: str) -> int:
    """The number of a name of `sysctl`, of 4 or 8 bytes. Raises OSError."""
    return int.from_bytes(sysctl(name), "little", signed=True)


def sysctl_text(name: str) -> str:
    """The text of a name of `sysctl`. Raises OSError."""
    return sysctl(name).rstrip(b"\0").decode("utf-8", "replace")


def pages() -> Pages:
    """The machine's pages at this moment. Raises OSError, ValueError."""
    answer = ctypes.create_string_buffer(2 * _VM_STATISTICS.size)
    words = c_uint(len(answer) // 4)
    refused = call("host_statistics64")(_host_port(), _HOST_VM_INFO64, answer, ctypes.byref(words))
    if refused:
        raise OSError(errno.EIO, f"host_statistics64 failed with {refused}")
    return parse_pages(answer.raw[: 4 * words.value])


def processes(pid: int | None = None) -> list[ProcessRow]:
    """All processes, or the one of a pid; those of other users too. Raises OSError, ValueError."""
    which = (_ALL, 0) if pid is None else (_ONE_PID, pid)
    return parse_processes(_at("processes", _KERN, _KERN_PROC, *which))


def environment(pid: int) -> list[bytes]:
    """The environment with which a program of this user was started; [] where the system withholds
    it, and for a process that has ended."""
    try:
        return parse_environment(_at("arguments", _KERN, _KERN_PROCARGS2, pid))
    except (OSError, ValueError):
        return []


def footprint(pid: int) -> int | None:
    """The physical footprint of a process in bytes, graphics memory included: the figure by which
    the system chooses a process to end. None = it has ended, or belongs to another user."""
    answer = ctypes.create_string_buffer(_RUSAGE_V0.size)
    return None if call("proc_pid_rusage")(pid, 0, answer) else parse_footprint(answer.raw)


def hardware_id() -> str:
    """The id of this Mac, the same at each boot. Raises OSError."""
    answer, wait = ctypes.create_string_buffer(16), struct.pack("<qq", 1, 0)
    if call("gethostuuid")(answer, wait):
        raise _refused("gethostuuid")
    return str(uuid.UUID(bytes=answer.raw)).upper()


def executable() -> str:
    """The file that this process runs, which a firewall knows: a Python of a framework runs another
    one than `sys.executable`. Raises OSError."""
    answer = ctypes.create_string_buffer(4096)
    if call("_NSGetExecutablePath")(answer, ctypes.byref(c_uint(len(answer)))):
        raise OSError(errno.ENAMETOOLONG, "the path of this program is too long")
    return str(Path(os.fsdecode(answer.value)).resolve())


@contextmanager
def watched_exit(pid: int) -> Iterator[int]:
    """Yield a descriptor that can be read once a process ends. Raises ProcessLookupError."""
    if sys.platform != "darwin":
        raise OSError(errno.ENOSYS, "this system has no kqueue")
    queue = select.kqueue()
    try:
        queue.control(
            [
                select.kevent(
                    pid,
                    filter=select.KQ_FILTER_PROC,
                    flags=select.KQ_EV_ADD | select.KQ_EV_ONESHOT,
                    fflags=select.KQ_NOTE_EXIT,
                )
            ],
            0,
        )
        yield queue.fileno()
    finally:
        queue.close()


# --- orders


def flush(descriptor: int) -> None:
    """Bring a file to the medium: `fsync` stops at the drive's cache. Raises OSError."""
    try:
        fcntl.fcntl(descriptor, _F_FULLFSYNC)
    except OSError:  # of a network, or of a foreign format
        os.fsync(descriptor)


def order(descriptor: int) -> None:
    """Bring a file to the drive before all that is written later. Raises OSError."""
    try:
        fcntl.fcntl(descriptor, _F_BARRIERFSYNC)
    except OSError:
        os.fsync(descriptor)


def exclude_from_backup(folder: Path) -> None:
    """Keep a folder out of Time Machine. Raises OSError."""
    value = _BACKUP_VALUE
    if call("setxattr")(os.fsencode(folder), _BACKUP_NAME, value, len(value), 0, 0):
        raise _refused("setxattr")


def relieve_heap() -> bool:
    """Return free pages of the heap to the system; whether there were some."""
    return call("malloc_zone_pressure_relief")(None, 0) > 0


def compute_for_user() -> bool:
    """Give this thread the class of work that a user waits for; False where that fails."""
    return call("pthread_set_qos_class_self_np")(_QOS_USER_INITIATED, 0) == 0


@cache
def _host_port() -> int:
    """The port of the host; each question for it takes another reference."""
    return call("mach_host_self")()


def _at(what: str, *numbers: int) -> bytes:
    name = (c_int * len(numbers))(*numbers)
    return _told(what, lambda *into: call("sysctl")(name, len(numbers), *into, None, 0))


def _told(what: str, ask: Callable[..., int]) -> bytes:
    """Ask for the size of an answer, then for the answer. Raises OSError."""
    size = c_size_t(0)
    for tries in range(1, 1 + _TRIES):
        if ask(None, ctypes.byref(size)):
            raise _refused(what)
        if not size.value:
            return b""
        size.value *= tries  # a busy machine may start processes faster than it is asked
        answer = ctypes.create_string_buffer(size.value)
        if not ask(answer, ctypes.byref(size)):
            return answer.raw[: size.value]
        if ctypes.get_errno() != errno.ENOMEM:
            raise _refused(what)
    raise OSError(errno.ENOMEM, f"{what} grew {_TRIES} times while it was read")


def _refused(what: str) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, f"{what}: {os.strerror(number)}")
