"""The Mac that a process sees. Names are macOS's; facts are read from this Linux machine."""

from __future__ import annotations

import asyncio  # with the libraries below: they choose their branches when they are imported
import contextlib
import ctypes
import ctypes.util
import errno
import io
import multiprocessing
import os
import platform
import re
import select
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import sysconfig
import tempfile
import threading
import uuid
from collections.abc import Iterable
from functools import cache
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, spec_from_file_location
from pathlib import Path
from typing import NamedTuple

import ifaddr

from kakeya.core import darwin
from tests.darwin_library import (
    RUNNING,
    ZOMBIE,
    DarwinLibrary,
    VmStatistics64,
    argument_bytes,
    process_bytes,
)

CHOSEN = (asyncio, ifaddr, multiprocessing, shutil, ssl, tempfile, threading, uuid)
ROOT = Path(__file__).parents[2]
_PROGRAMS = Path(__file__).parent / "programs"
PROGRAMS = {f"/{file.relative_to(_PROGRAMS)}": str(file) for file in _PROGRAMS.rglob("*")}
IN_PLACE = {"truststore._macos": "truststore._openssl"}
"""Modules that load libraries of macOS, and those that do the same for Linux."""
BLAS = "libopenblas.so.0"
"""As quick as Accelerate, where it is installed."""
MOST_SOCKET_BYTES = 103
"""sun_path without its last zero."""
LACKS = {
    os: "posix_fallocate posix_fadvise pidfd_open memfd_create fdatasync eventfd copy_file_range "
    "splice getresuid unshare setns sched_getaffinity sched_setaffinity sched_getscheduler "
    "sched_setscheduler sched_param SCHED_BATCH SCHED_OTHER SCHED_IDLE",
    signal: "sigwaitinfo sigtimedwait pidfd_send_signal SIGPWR SIGSTKFLT SIGPOLL",
    socket: "SO_PROTOCOL SO_DOMAIN SO_PEERCRED SO_BINDTODEVICE MSG_NOSIGNAL SOCK_CLOEXEC "
    "SOCK_NONBLOCK TCP_KEEPIDLE TCP_USER_TIMEOUT IP_MTU_DISCOVER",
}
_TRIM = ctypes.CDLL(None).malloc_trim
"""What relieves the heap here; hidden from the programs of the Mac."""
NO_FUNCTIONS = {"mallopt", "malloc_trim", "prctl", "openblas_get_config"}
HIDDEN = ("/proc", "/sys", "/dev/shm")
NUMBERS = {errno.ECONNREFUSED: 61, errno.ETIMEDOUT: 60, errno.EHOSTUNREACH: 65, errno.EHOSTDOWN: 64,
           errno.ENETUNREACH: 51, errno.ENETDOWN: 50, errno.EADDRNOTAVAIL: 49}  # fmt: skip
"""Failures of a connect; macOS numbers them in its own way."""


def play() -> None:
    """Make a Mac of this process."""
    sysconfig.get_config_vars()  # from a file that is named by the platform
    sys.platform = "darwin"
    platform.system, platform.machine = (lambda: "Darwin"), (lambda: "arm64")
    platform.mac_ver = lambda *_: ("15.6", ("", "", ""), "arm64")
    _play_library()  # while this process can still look behind the stage
    _play_programs()
    _play_connects()
    sys.meta_path.insert(0, Modules())
    sys.addaudithook(_forbid)
    for module, names in LACKS.items():
        for name in names.split():
            vars(module).pop(name, None)
    # Python 3.13 has it everywhere; elsewhere than on a Mac it asks for the affinity.
    os.process_cpu_count = os.cpu_count  # type: ignore[attr-defined]


# --- the C library


class LiveLibrary(DarwinLibrary):
    """Apple's functions with the facts of this machine."""

    def _sysctl(
        self, name: object, count: int, into: object, size: object, new: object, new_size: int
    ) -> int:
        told = LiveLibrary()  # several threads ask at the same time
        match tuple(name[: int(count)]):  # type: ignore[index]
            case (1, 14, 0, 0):
                told.rows = _rows(int(one) for one in _listdir("/proc") if one.isdigit())
            case (1, 14, 1, pid):
                told.rows = _rows([pid])
            case (1, 49, pid):
                told.arguments = _arguments(pid)
        return DarwinLibrary._sysctl(told, name, count, into, size, new, new_size)

    def _tell(self, data: bytes, into: object, size: object) -> int:
        """As xnu: some room more is asked for, and a table that outgrew it is refused."""
        if into is not None and size[0] < len(data):  # type: ignore[index]
            ctypes.set_errno(errno.ENOMEM)
            return -1
        answer = DarwinLibrary._tell(self, data, into, size)
        if into is None and self.rows:
            size[0] += 5 * len(data) // len(self.rows)  # type: ignore[index]
        return answer

    def _sysctlbyname(
        self, name: bytes, into: object, size: object, new: object, new_size: int
    ) -> int:
        total, available = _memory()
        numbers = {
            "hw.memsize": (total, 8),
            "kern.memorystatus_level": (100 * available // total, 4),
            "kern.memorystatus_vm_pressure_level": (1, 4),
            "iogpu.wired_limit_mb": (0, 4),
        }
        named = {key: value.to_bytes(n, "little") for key, (value, n) in numbers.items()}
        boot = _told("/proc/sys/kernel/random/boot_id").strip().upper()
        named["kern.bootsessionuuid"] = boot.encode() + b"\0"
        told = DarwinLibrary(named=named)
        return DarwinLibrary._sysctlbyname(told, name, into, size, new, new_size)

    def _host_statistics64(self, host: int, flavor: int, into: int, words: object) -> int:
        pages = _memory()[1] // os.sysconf("SC_PAGE_SIZE")
        told = DarwinLibrary(pages=bytes(VmStatistics64(free_count=pages)))
        return DarwinLibrary._host_statistics64(told, host, flavor, into, words)

    def _proc_pid_rusage(self, pid: int, flavor: int, into: int) -> int:
        parts = re.findall(r"^Rss(?:Anon|File):\s+(\d+) kB$", _told(f"/proc/{pid}/status"), re.M)
        footprints = {pid: 1024 * sum(map(int, parts))} if parts else {}
        told = DarwinLibrary(footprints=footprints)
        return DarwinLibrary._proc_pid_rusage(told, pid, flavor, into)

    def _malloc_zone_pressure_relief(self, zone: object, goal: int) -> int:
        return int(_TRIM(0))


def _rows(pids: Iterable[int]) -> dict[int, bytes]:
    rows = {}
    for pid in pids:
        told = _told(f"/proc/{pid}/stat").rpartition(")")[2].split()
        if told:
            started = _boot_ticks() + int(told[19])
            state = ZOMBIE if told[0] == "Z" else RUNNING
            rows[pid] = process_bytes(pid, int(told[1]), *_time(started), state)
    return rows


def _time(ticks: int) -> tuple[int, int]:
    seconds, rest = divmod(ticks, 100)
    return seconds, 10_000 * rest


def _arguments(pid: int) -> dict[int, bytes]:
    told = [_told(f"/proc/{pid}/{part}").split("\0")[:-1] for part in ("cmdline", "environ")]
    return {pid: argument_bytes("/usr/bin/program", *told)} if told[0] else {}


@cache
def _boot_ticks() -> int:
    return 100 * int(re.findall(r"^btime (\d+)", _told("/proc/stat"), re.M)[0])


def _memory() -> tuple[int, int]:
    told = dict(re.findall(r"^(\w+):\s+(\d+) kB$", _told("/proc/meminfo"), re.M))
    return 1024 * int(told["MemTotal"]), 1024 * int(told["MemAvailable"])


def _told(path: str) -> str:
    try:
        with io.FileIO(path) as file:
            return file.readall().decode(errors="surrogateescape")
    except OSError:  # it has ended, or is another user's
        return ""


# --- what the process sees


class KeventLike(NamedTuple):
    """select.kevent"""

    ident: int
    filter: int
    flags: int
    fflags: int


class KqueueLike:
    """select.kqueue, for one end of one process."""

    def __init__(self) -> None:
        self._descriptor = -1

    def control(self, changes: list[KeventLike], most: int) -> list[KeventLike]:
        """Watch; no event is collected."""
        assert (len(changes), most, self._descriptor) == (1, 0, -1)
        row = _rows([changes[0].ident]).get(changes[0].ident)
        if row is None or darwin.parse_processes(row)[0].has_ended:
            raise ProcessLookupError(errno.ESRCH, "No such process")
        self._descriptor = _pidfd_open(changes[0].ident)
        return []

    def fileno(self) -> int:
        """The descriptor."""
        return self._descriptor

    def close(self) -> None:
        """Close the descriptor; harmless twice."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1


class Modules:
    """Finds modules for Linux in the place of those for macOS."""

    @staticmethod
    def find_spec(name: str, path: object, target: object = None) -> ModuleSpec | None:
        """Leave all other modules to the next finder."""
        if name == "mlx.core":
            os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
            with contextlib.suppress(OSError):
                ctypes.CDLL(BLAS, mode=ctypes.RTLD_GLOBAL)
        if name not in IN_PLACE:
            return None
        found = find_spec(IN_PLACE[name])
        assert found is not None
        return spec_from_file_location(name, found.origin)


_pidfd_open, _listdir = os.pidfd_open, os.listdir


def _play_library() -> None:
    library = LiveLibrary()
    darwin.call = cache(library.call)
    select.kqueue, select.kevent = KqueueLike, KeventLike
    constants = {"KQ_FILTER_PROC": -5, "KQ_EV_ADD": 1, "KQ_EV_ONESHOT": 16}
    vars(select).update(constants, KQ_NOTE_EXIT=1 << 31)
    look_up = ctypes.CDLL.__getattr__

    def refuse(own: ctypes.CDLL, name: str) -> object:
        if name in NO_FUNCTIONS:
            raise AttributeError(f"symbol not found: {name}")
        return look_up(own, name)

    ctypes.CDLL.__getattr__ = refuse


def _play_programs() -> None:
    start = subprocess.Popen.__init__

    def begin(own: object, args: object, *more: object, **named: object) -> None:
        if isinstance(args, (list, tuple)):
            args = [PROGRAMS.get(str(args[0]), args[0]), *args[1:]]
        start(own, args, *more, **named)

    subprocess.Popen.__init__ = begin


def _play_connects() -> None:
    connect = asyncio.selector_events.BaseSelectorEventLoop.sock_connect

    async def renumbered(own: object, sock: socket.socket, address: object) -> None:
        try:
            await connect(own, sock, address)
        except OSError as problem:
            problem.errno = NUMBERS.get(problem.errno, problem.errno)
            raise

    asyncio.selector_events.BaseSelectorEventLoop.sock_connect = renumbered


def _forbid(event: str, arguments: tuple[object, ...]) -> None:
    """Fail where macOS would: for folders of Linux, addresses of lo0, long names of sockets."""
    match event, arguments:
        case ("open" | "os.listdir" | "os.scandir", (str() as path, *_)):
            if path.startswith(HIDDEN) and _is_ours():
                raise FileNotFoundError(errno.ENOENT, "No such file or directory", path)
        case ("socket.bind" | "socket.connect", (_, str() | bytes() as path)):
            if len(os.fsencode(path)) > MOST_SOCKET_BYTES:
                raise OSError("AF_UNIX path too long")
        case ("socket.bind", (_, (str() as host, *_))):
            if host.startswith("127.") and host != "127.0.0.1":
                raise OSError(errno.EADDRNOTAVAIL, "Can't assign requested address")


def _is_ours() -> bool:
    """Whether a file of the package asks, by way of other libraries or not."""
    frame = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(f"{ROOT}/") and not file.startswith(f"{ROOT}/.venv/"):
            return file.startswith(f"{ROOT}/kakeya/")
        frame = frame.f_back
    return False
