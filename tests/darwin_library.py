"""The part of macOS's C library that `core.darwin` calls, played in this process.

Structures are spelled field by field as xnu's headers have them (mach/vm_statistics.h,
sys/sysctl.h, sys/proc.h, sys/vm.h, sys/resource.h, 64 bits), so that a wrong offset shows. Each
function is a foreign one with the prototype of `core.darwin`: a wrong order or kind of arguments
fails as it would on a Mac. No answer of a real Mac is recorded here.
"""

from __future__ import annotations

import ctypes
import errno
from collections.abc import Callable
from ctypes import c_char, c_int32, c_int64, c_uint8, c_uint16, c_uint32, c_uint64
from dataclasses import dataclass, field

from kakeya.core import darwin

ZOMBIE, RUNNING = 5, 2
_ALL, _ONE_PID = 0, 1
Address = int | None


class VmStatistics64(ctypes.Structure):
    """mach/vm_statistics.h"""

    _fields_ = [
        ("free_count", c_uint32),
        ("active_count", c_uint32),
        ("inactive_count", c_uint32),
        ("wire_count", c_uint32),
        *(
            (name, c_uint64)
            for name in [
                "zero_fill_count",
                "reactivations",
                "pageins",
                "pageouts",
                "faults",
                "cow_faults",
                "lookups",
                "hits",
                "purges",
            ]
        ),
        ("purgeable_count", c_uint32),
        ("speculative_count", c_uint32),
        *((name, c_uint64) for name in ["decompressions", "compressions", "swapins", "swapouts"]),
        ("compressor_page_count", c_uint32),
        ("throttled_count", c_uint32),
        ("external_page_count", c_uint32),
        ("internal_page_count", c_uint32),
        ("total_uncompressed_pages_in_compressor", c_uint64),
    ]


class Timeval(ctypes.Structure):
    """user64_timeval"""

    _fields_ = [("tv_sec", c_int64), ("tv_usec", c_int32)]


class ExternProc(ctypes.Structure):
    """user64_extern_proc of sys/proc_internal.h"""

    _fields_ = [
        ("p_starttime", Timeval),
        ("p_vmspace", c_uint64),
        ("p_sigacts", c_uint64),
        ("p_flag", c_int32),
        ("p_stat", c_uint8),
        ("p_pid", c_int32),
        ("p_oppid", c_int32),
        ("p_dupfd", c_int32),
        ("user_stack", c_uint64),
        ("exit_thread", c_uint64),
        ("p_debugger", c_int32),
        ("sigwait", c_int32),
        ("p_estcpu", c_uint32),
        ("p_cpticks", c_int32),
        ("p_pctcpu", c_uint32),
        ("p_wchan", c_uint64),
        ("p_wmesg", c_uint64),
        ("p_swtime", c_uint32),
        ("p_slptime", c_uint32),
        ("p_realtimer", Timeval * 2),
        ("p_rtime", Timeval),
        ("p_uticks", c_uint64),
        ("p_sticks", c_uint64),
        ("p_iticks", c_uint64),
        ("p_traceflag", c_int32),
        ("p_tracep", c_uint64),
        ("p_siglist", c_int32),
        ("p_textvp", c_uint64),
        ("p_holdcnt", c_int32),
        ("p_sigmask", c_uint32),
        ("p_sigignore", c_uint32),
        ("p_sigcatch", c_uint32),
        ("p_priority", c_uint8),
        ("p_usrpri", c_uint8),
        ("p_nice", c_uint8),
        ("p_comm", c_char * 17),
        ("p_pgrp", c_uint64),
        ("p_addr", c_uint64),
        ("p_xstat", c_uint16),
        ("p_acflag", c_uint16),
        ("p_ru", c_uint64),
    ]


class Pcred(ctypes.Structure):
    """user64_pcred of sys/sysctl.h"""

    _fields_ = [
        ("pc_lock", c_char * 72),
        ("pc_ucred", c_uint64),
        ("p_ruid", c_uint32),
        ("p_svuid", c_uint32),
        ("p_rgid", c_uint32),
        ("p_svgid", c_uint32),
        ("p_refcnt", c_int32),
    ]


class Ucred(ctypes.Structure):
    """_ucred of sys/sysctl.h"""

    _fields_ = [
        ("cr_ref", c_int32),
        ("cr_uid", c_uint32),
        ("cr_ngroups", c_uint16),
        ("cr_groups", c_uint32 * 16),
    ]


class Vmspace(ctypes.Structure):
    """user64_vmspace of sys/sysctl.h"""

    _fields_ = [
        ("vm_refcnt", c_int32),
        ("vm_shm", c_uint64),
        ("sizes", c_int32 * 5),
        ("addresses", c_uint64 * 3),
    ]


class Eproc(ctypes.Structure):
    """user64_eproc of sys/sysctl.h"""

    _fields_ = [
        ("e_paddr", c_uint64),
        ("e_sess", c_uint64),
        ("e_pcred", Pcred),
        ("e_ucred", Ucred),
        ("e_vm", Vmspace),
        ("e_ppid", c_int32),
        ("e_pgid", c_int32),
        ("e_jobc", c_uint16),
        ("e_tdev", c_int32),
        ("e_tpgid", c_int32),
        ("e_tsess", c_uint64),
        ("e_wmesg", c_char * 8),
        ("e_xsize", c_int32),
        ("e_xrssize", c_uint16),
        ("e_xccount", c_uint16),
        ("e_xswrss", c_uint16),
        ("e_flag", c_int32),
        ("e_login", c_char * 12),
        ("e_spare", c_int32 * 4),
    ]


class KinfoProc(ctypes.Structure):
    """user64_kinfo_proc of sys/sysctl.h"""

    _fields_ = [("kp_proc", ExternProc), ("kp_eproc", Eproc)]


class RusageInfoV0(ctypes.Structure):
    """sys/resource.h"""

    _fields_ = [
        ("ri_uuid", c_uint8 * 16),
        *(
            (name, c_uint64)
            for name in [
                "ri_user_time",
                "ri_system_time",
                "ri_pkg_idle_wkups",
                "ri_interrupt_wkups",
                "ri_pageins",
                "ri_wired_size",
                "ri_resident_size",
                "ri_phys_footprint",
                "ri_proc_start_abstime",
                "ri_proc_exit_abstime",
            ]
        ),
    ]


def process_bytes(
    pid: int, parent: int, seconds: int, micros: int = 0, state: int = RUNNING
) -> bytes:
    """One kinfo_proc."""
    told = KinfoProc()
    told.kp_proc.p_starttime = Timeval(seconds, micros)
    told.kp_proc.p_pid, told.kp_proc.p_stat = pid, state
    told.kp_eproc.e_ppid = parent
    return bytes(told)


def argument_bytes(program: str, arguments: list[str], environment: list[str]) -> bytes:
    """The answer to KERN_PROCARGS2."""
    path = program.encode() + b"\0"
    path += bytes(-len(path) % 8)
    strings = b"".join(one.encode() + b"\0" for one in [*arguments, *environment])
    return len(arguments).to_bytes(4, "little") + path + strings


@dataclass(slots=True)
class DarwinLibrary:
    """Functions by name, as `core.darwin.call` gives them; tests fill and read the fields."""

    named: dict[str, bytes] = field(default_factory=dict)
    rows: dict[int, bytes] = field(default_factory=dict)
    arguments: dict[int, bytes] = field(default_factory=dict)
    pages: bytes = b""
    footprints: dict[int, int] = field(default_factory=dict)
    grows: int = 0
    """So often a table is larger when it is read than when its size was asked for."""
    rooms: list[int] = field(default_factory=list)
    """The bytes of room that each reading had."""
    refusal: int = 0
    """The errno of every `sysctl`; 0 = it answers."""
    attributes: dict[bytes, bytes] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)

    def call(self, name: str) -> darwin.Call:
        """A foreign function."""
        result, *arguments = darwin.PROTOTYPES[name]
        prototype = ctypes.CFUNCTYPE(result, *arguments, use_errno=True)
        play: Callable[..., int] = getattr(self, f"_{name}".replace("__", "_"))
        self.asked.append(name)
        return prototype(play)

    def _sysctl(
        self, name: object, count: int, into: Address, size: object, new: Address, new_size: int
    ) -> int:
        assert (new, new_size) == (None, 0)
        numbers = tuple(name[: int(count)])  # type: ignore[index]
        match numbers:
            case (1, 14, 0, 0):
                return self._tell(b"".join(self.rows.values()), into, size)
            case (1, 14, 1, pid):
                return self._tell(self.rows.get(pid, b""), into, size)
            case (1, 49, pid) if pid in self.arguments:
                return self._tell(self.arguments[pid], into, size)
        return _fail(errno.EINVAL)

    def _sysctlbyname(
        self, name: bytes, into: Address, size: object, new: Address, new_size: int
    ) -> int:
        assert (new, new_size) == (None, 0)
        if name.decode() not in self.named:
            return _fail(errno.ENOENT)
        return self._tell(self.named[name.decode()], into, size)

    def _tell(self, data: bytes, into: Address, size: object) -> int:
        if self.refusal:
            return _fail(self.refusal)
        room = size[0]  # type: ignore[index]
        if into is not None:
            self.rooms.append(room)
        if into is not None and self.grows:
            self.grows -= 1
            return _fail(errno.ENOMEM)
        size[0] = len(data)  # type: ignore[index]
        if into is not None:
            assert room >= len(data)
            ctypes.memmove(into, data, len(data))
        return 0

    def _mach_host_self(self) -> int:
        return 77

    def _host_statistics64(self, host: int, flavor: int, into: int, words: object) -> int:
        assert (host, flavor) == (77, 4)
        if not self.pages:
            return 4
        told = self.pages[: 4 * words[0]]  # type: ignore[index]
        ctypes.memmove(into, told, len(told))
        words[0] = len(told) // 4  # type: ignore[index]
        return 0

    def _proc_pid_rusage(self, pid: int, flavor: int, into: int) -> int:
        assert flavor == 0
        if pid not in self.footprints:
            return _fail(errno.ESRCH)
        told = bytes(RusageInfoV0(ri_phys_footprint=self.footprints[pid], ri_resident_size=1))
        ctypes.memmove(into, told, len(told))
        return 0

    def _gethostuuid(self, into: int, wait: int) -> int:
        assert ctypes.string_at(wait, 16) == (1).to_bytes(8, "little") + bytes(8)
        if self.refusal:
            return _fail(self.refusal)
        ctypes.memmove(into, bytes.fromhex("1234567890abcdef1234567890abcdef"), 16)
        return 0

    def _NSGetExecutablePath(self, into: int, size: object) -> int:
        told = b"/opt/Python.app/Contents/MacOS/../MacOS/Python\0"
        if size[0] < len(told):  # type: ignore[index]
            return -1
        ctypes.memmove(into, told, len(told))
        return 0

    def _setxattr(
        self, path: bytes, name: bytes, value: int, size: int, position: int, options: int
    ) -> int:
        assert (position, options) == (0, 0)
        if self.refusal:
            return _fail(self.refusal)
        self.attributes[path + b":" + name] = ctypes.string_at(value, size)
        return 0

    def _malloc_zone_pressure_relief(self, zone: Address, goal: int) -> int:
        assert (zone, goal) == (None, 0)
        return 4096

    def _pthread_set_qos_class_self_np(self, kind: int, priority: int) -> int:
        return 0 if (kind, priority) == (0x19, 0) else errno.EINVAL


def _fail(number: int) -> int:
    ctypes.set_errno(number)
    return -1
