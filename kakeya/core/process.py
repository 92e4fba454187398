"""Measure the memory of a process, notice its end, and set its heap and its scheduling.

    Linux   VmRSS of /proc/PID/status without shared memory, which the process that made it counts;
            a pidfd
    macOS   the physical footprint of `proc_pid_rusage`; a kqueue (see `darwin`)

A measurement works for this process and for its children. The measured process does nothing for
it, so that a process that hangs is measured too.
"""

from __future__ import annotations

import ctypes
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any

from kakeya.core import darwin

_KIB = 1024
_STATUS_BYTES = 16384
"""More than /proc/PID/status has: some 1,500 bytes."""
_PARTS = re.compile(r"^(RssAnon|RssFile):\s+(\d+) kB$", re.MULTILINE)
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
"""Constants of glibc's malloc.h."""
_OWN_MAPPING_BYTES = 1 << 20
_KEPT_FREE_BYTES = 8 << 20
_HEAPS = 2


def resident_bytes(pid: int | None = None, *, platform: str = sys.platform) -> int | None:
    """Return the bytes that a process occupies, by default this one.

    None when the process has ended or belongs to another user.

    Reads a file or asks the kernel once: some 30 microseconds.
    """
    wanted = os.getpid() if pid is None else pid
    return darwin.footprint(wanted) if platform == "darwin" else _linux_bytes(wanted)


def signal_group(pid: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Send a signal to the processes of a group, if there are any; SIGKILL ends them."""
    # macOS refuses a group of which each process has ended and none was waited for yet.
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)


@contextmanager
def watched_exit(pid: int) -> Iterator[int | None]:
    """Yield a descriptor that can be read once a process ends, None where the system has none.

    Raises ProcessLookupError for one that has ended.
    """
    if sys.platform == "darwin":
        with darwin.watched_exit(pid) as descriptor:
            yield descriptor
        return
    if sys.platform != "linux":
        yield None
        return
    descriptor = os.pidfd_open(pid)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def parse_status(text: str) -> int | None:
    """Read bytes from the text of /proc/PID/status; None for a process that has ended."""
    parts = _PARTS.findall(text)
    return sum(int(size) * _KIB for _, size in parts) if parts else None


def bound_heap() -> bool:
    """Make freed large blocks go back to the system; False where the C library has no such switch.

    Call it before threads start. When a large block is freed, glibc raises the size from which a
    block gets a mapping of its own, up to 32 MiB. Later arrays then lie in the heap between small
    blocks that live on, and their freed memory stays resident: more than half of the heap of a
    process that allocates and frees arrays.
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


def own_program() -> str:
    """Return the file that this process runs, as a firewall knows it."""
    if sys.platform == "darwin":
        with suppress(OSError):
            return darwin.executable()
    return sys.executable


def compute_in_bulk() -> bool:
    """Give this thread the class of a thread that computes; False where that fails.

    Linux: batch work, for its later children too. A thread of this class takes no processor from a
    running thread when it wakes. The thread that computes and the thread that hands it work wake
    each other many times in a step; Linux takes both for interactive, and each wake-up displaces
    the other one or the thread that answers clients.

    macOS: work that a user waits for, which runs on the fast processors.
    """
    if sys.platform == "darwin":
        return darwin.compute_for_user()
    if sys.platform != "linux":
        return False
    try:
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    except OSError:
        return False
    return True


def trim_heap() -> bool:
    """Return free pages of the C heap to the system; False where there were none, or the C library
    cannot."""
    if sys.platform == "darwin":
        return darwin.relieve_heap()
    trim = _malloc_trim()
    return trim is not None and bool(trim(0))


def _linux_bytes(pid: int) -> int | None:
    try:
        # Not by `Path.read_text`, which takes twice the time: the guard of engines asks often.
        status = os.open(f"/proc/{pid}/status", os.O_RDONLY)
        try:
            return parse_status(os.read(status, _STATUS_BYTES).decode())
        finally:
            os.close(status)
    except OSError:
        return None


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
