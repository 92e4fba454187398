"""What a process occupies now, and what it asks of its heap and of the system's scheduler.

    Linux   VmRSS of /proc/PID/status without its shared memory, which whoever made it counts
    macOS   the physical footprint of `proc_pid_rusage`: what the system holds against a process
            when it chooses whom to end, graphics memory included

Both answer for one's own process and for one's children, and neither needs the other's help: a
process that hangs can be measured all the same.
"""

from __future__ import annotations

import ctypes
import os
import re
import struct
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

_KIB = 1024
_PARTS = re.compile(r"^(RssAnon|RssFile):\s+(\d+) kB$", re.MULTILINE)
_RUSAGE_INFO_V0 = struct.Struct("=16s10Q")
"""uuid; user time, system time, 2 kinds of wake-ups, page-ins, wired size, resident size,
physical footprint, start and exit time."""
_FOOTPRINT_FIELD = 8
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
"""Of glibc's malloc.h."""
_OWN_MAPPING_BYTES = 1 << 20
_KEPT_FREE_BYTES = 8 << 20
_HEAPS = 2


def resident_bytes(pid: int | None = None, *, platform: str = sys.platform) -> int | None:
    """What a process occupies now, by default this one; None where it has gone or is not ours.

    Reads a file or asks the kernel once: some 30 microseconds.
    """
    wanted = os.getpid() if pid is None else pid
    return _mac_bytes(wanted) if platform == "darwin" else _linux_bytes(wanted)


def parse_status(text: str) -> int | None:
    """Bytes by the text of /proc/PID/status; None for a process that has ended."""
    parts = _PARTS.findall(text)
    return sum(int(size) * _KIB for _, size in parts) if parts else None


def parse_rusage(data: bytes) -> int:
    """The physical footprint in a `rusage_info_v0`."""
    return int(_RUSAGE_INFO_V0.unpack(data)[_FOOTPRINT_FIELD])


def bound_heap() -> bool:
    """Have large blocks go back to the system when they are freed; False where this C library
    has no such switch. To be called before there are threads.

    glibc raises by itself the size from which a block gets a mapping of its own, up to 32 MiB, as
    large blocks are freed. From then on arrays lie in the heap between small blocks that live on,
    and what is freed of them stays resident: more than half of a heap whose arrays come and go.
    """
    try:
        mallopt: Callable[[int, int], int] = _this_program().mallopt
    except AttributeError:
        return False
    return all(
        [
            mallopt(_M_MMAP_THRESHOLD, _OWN_MAPPING_BYTES),
            mallopt(_M_TRIM_THRESHOLD, _KEPT_FREE_BYTES),
            mallopt(_M_ARENA_MAX, _HEAPS),
        ]
    )


def compute_in_bulk() -> bool:
    """Have this thread, and those it starts, take no processor from whoever runs when they wake;
    False where the system has no such class, or does not let us.

    A thread that computes and one that hands it work wake each other many times in a step.
    Linux takes that for being interactive, and each time puts one in the other's place, or in that
    of who answers clients.
    """
    if sys.platform != "linux":
        return False
    try:
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    except OSError:
        return False
    return True


def trim_heap() -> bool:
    """Return free pages of the C heap to the system; False where the C library cannot."""
    trim = _malloc_trim()
    return trim is not None and bool(trim(0))


def _linux_bytes(pid: int) -> int | None:
    try:
        return parse_status(Path(f"/proc/{pid}/status").read_text())
    except OSError:
        return None


def _mac_bytes(pid: int) -> int | None:
    answer = ctypes.create_string_buffer(_RUSAGE_INFO_V0.size)
    failed = _this_program().proc_pid_rusage(pid, 0, answer)
    return None if failed else parse_rusage(answer.raw)


@cache
def _malloc_trim() -> Callable[[int], int] | None:
    try:
        trim: Callable[[int], int] = _this_program().malloc_trim
    except AttributeError:
        return None
    return trim


@cache
def _this_program() -> Any:  # noqa: ANN401 - symbols of the C library, by name
    return ctypes.CDLL(None)
