"""The processes of a machine, their parents and the bytes that they occupy, as the system tells.

    Linux   /proc/PID/stat: the start in ticks since the boot, which no clock that is set can move
    macOS   `sysctl`: the start by the wall clock as it was noted then, to the microsecond

A process that ended and that no parent waited for is dead: its memory has been given back. All of
this blocks for a moment; call it off the event loop.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar

from kakeya.core import darwin, errors
from kakeya.core.process import resident_bytes
from kakeya.core.units import KIB
from kakeya.memory.leases.lease import Book, Process, ProcessLease
from kakeya.memory.leases.rules import MachineSight
from kakeya.memory.machine.machine import OUT_OF_ORDER

_Answer = TypeVar("_Answer")
MARK = "KAKEYA_LEASE_ID"
"""In the environment of a leased command and of all that it starts."""
_PARTS = re.compile(r"^(Pss_Anon|Pss_File):\s+(\d+) kB$", re.MULTILINE)


class LivingProcess(NamedTuple):
    """A living process: its parent and its start."""

    parent: int
    started: str


class ProcessTree(NamedTuple):
    """The processes of a holder: first the one that asked, living or not, then all others that
    live."""

    processes: tuple[Process, ...]
    used_bytes: int
    is_alive: bool


class ProcessTable(Protocol):
    """The process table of one kind of system."""

    def boot(self) -> str:
        """The id of this boot."""
        ...

    def space(self) -> str:
        """The space of the pids that are seen from here."""
        ...

    def machine(self) -> str:
        """The machine, the same at each boot."""
        ...

    def find(self, pids: Iterable[int]) -> dict[int, LivingProcess]:
        """The living ones of some processes. Raises PeerUnavailable where the system does not
        tell: then none of them may be taken for dead."""
        ...

    def all(self) -> dict[int, LivingProcess]:
        """All living processes."""
        ...

    def marked(self, value: str) -> list[int]:
        """Processes with a mark in their environment; [] where that cannot be seen."""
        ...

    def used_bytes(self, pids: Iterable[int]) -> int:
        """The bytes that processes occupy together."""
        ...


class LinuxProcesses:
    """The process table of Linux, by /proc."""

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc = proc

    def boot(self) -> str:
        """The kernel's own id of this boot."""
        return (self._proc / "sys/kernel/random/boot_id").read_text().strip()

    def space(self) -> str:
        """The boot and the pid namespace."""
        return f"{self.boot()}/{(self._proc / 'self/ns/pid').readlink()}"

    def machine(self) -> str:
        """The id that the installation drew, else the host's name."""
        return _text(Path("/etc/machine-id")).strip() or os.uname().nodename

    def find(self, pids: Iterable[int]) -> dict[int, LivingProcess]:
        """See the contract."""
        rows = ((pid, self._row(pid)) for pid in pids)
        return {pid: row for pid, row in rows if row is not None}

    def all(self) -> dict[int, LivingProcess]:
        """See the contract."""
        return self.find(self._pids())

    def marked(self, value: str) -> list[int]:
        """See the contract; a process of another user is not seen."""
        wanted = f"{MARK}={value}".encode()
        return [
            pid
            for pid in self._pids()
            if wanted in _bytes(self._proc / str(pid) / "environ").split(b"\0")
        ]

    def used_bytes(self, pids: Iterable[int]) -> int:
        """Sum up proportional shares: processes of one fork share pages."""
        wanted = tuple(pids)
        if len(wanted) == 1:
            return resident_bytes(wanted[0]) or 0
        return sum(self._share(pid) for pid in wanted)

    def _share(self, pid: int) -> int:
        parts = _PARTS.findall(_text(self._proc / str(pid) / "smaps_rollup"))
        if not parts:
            return resident_bytes(pid) or 0
        return sum(int(size) * KIB for _, size in parts)

    def _pids(self) -> list[int]:
        try:
            return [int(name) for name in os.listdir(self._proc) if name.isdecimal()]  # noqa: PTH208
        except OSError as problem:
            raise _unreadable(self._proc, problem) from problem

    def _row(self, pid: int) -> LivingProcess | None:
        fields = _text(self._proc / str(pid) / "stat").rpartition(")")[2].split()
        if len(fields) < 20:
            return None
        if fields[0] in "ZX" and len(_names(self._proc / str(pid) / "task")) < 2:
            return None
        return LivingProcess(int(fields[1]), fields[19])


class MacProcesses:
    """The process table of macOS."""

    def __init__(self) -> None:
        self._boot = ""

    def boot(self) -> str:
        """The kernel's own id of this boot."""
        if not self._boot:
            self._boot = _asked(lambda: darwin.sysctl_text("kern.bootsessionuuid"))
        return self._boot

    def space(self) -> str:
        """The boot: pids are the same for all processes of it."""
        return self.boot()

    def machine(self) -> str:
        """The hardware's id, else the host's name."""
        try:
            return darwin.hardware_id()
        except OSError:
            return os.uname().nodename

    def find(self, pids: Iterable[int]) -> dict[int, LivingProcess]:
        """See the contract."""
        found: dict[int, LivingProcess] = {}
        for pid in pids:
            found |= _living(_asked(partial(darwin.processes, pid)))
        return found

    def all(self) -> dict[int, LivingProcess]:
        """See the contract."""
        return _living(_asked(darwin.processes))

    def marked(self, value: str) -> list[int]:
        """See the contract; the system withholds the environments of programs of its own and of
        other users."""
        wanted = f"{MARK}={value}".encode()
        return [pid for pid in self.all() if wanted in darwin.environment(pid)]

    def used_bytes(self, pids: Iterable[int]) -> int:
        """Physical footprints, graphics memory included."""
        return sum(resident_bytes(pid) or 0 for pid in pids)


def _asked(ask: Callable[[], _Answer]) -> _Answer:
    """The system's answer. Raises PeerUnavailable: no process may be taken for dead then."""
    try:
        return ask()
    except (OSError, ValueError) as problem:
        raise errors.PeerUnavailable(f"the system tells no processes: {problem}") from problem


def _living(rows: Iterable[darwin.ProcessRow]) -> dict[int, LivingProcess]:
    return {row.pid: LivingProcess(row.parent, row.started) for row in rows if not row.has_ended}


class Census:
    """The holders of leases as one process sees them. `table` None = this system's."""

    def __init__(self, table: ProcessTable | None = None, *, pid: int | None = None) -> None:
        self._table = table or system_table()
        self.boot = self._table.boot()
        self._space = self._table.space()
        self.own = self.identify(os.getpid() if pid is None else pid)

    def identify(self, pid: int) -> Process:
        """The process that has a pid at this moment. Raises NotFound."""
        row = self._table.find((pid,)).get(pid)
        if row is None:
            raise errors.NotFound(f"no process {pid} lives")
        return Process(pid, row.started, self._space)

    def lives(self, process: Process) -> bool | None:
        """Whether a process lives; None = it cannot be seen from here."""
        if process.space != self._space:
            return None
        row = self._table.find((process.pid,)).get(process.pid)
        return row is not None and row.started == process.started

    def look(self, book: Book, now_mono: float) -> MachineSight:
        """See which holders live."""
        mine = [one for one in book.leases.values() if self._is_visible(one)]
        rows = self._table.find({process.pid for one in mine for process in one.processes})
        living = {one.lease_id: self._lives(one, rows) for one in mine}
        granter = book.granter
        return MachineSight(
            boot=self.boot,
            now_mono=now_mono,
            living=living,
            granter_lives=None if granter is None else self.lives(granter.process),
        )

    def process_trees(
        self, leases: Iterable[ProcessLease], apart: Collection[int] = ()
    ) -> dict[str, ProcessTree]:
        """The living processes of each holder and their bytes, by lease. `apart` are pids that are
        left out.

        They are the children of a holder and theirs, processes seen before, and those with its
        mark: a process without its parent still uses memory. Holders that cannot be seen from here
        are left out.
        """
        mine = [one for one in leases if self._is_visible(one)]
        rows = self._table.all() if mine else {}
        rows = {pid: row for pid, row in rows.items() if pid not in apart}
        return {one.lease_id: self._tree_of(one, rows) for one in mine}

    def _tree_of(self, lease: ProcessLease, rows: Mapping[int, LivingProcess]) -> ProcessTree:
        found = {
            one.pid
            for one in lease.processes
            if one.pid in rows and rows[one.pid].started == one.started
        }
        if not found:
            found = {pid for pid in self._table.marked(lease.lease_id) if pid in rows}
        _add_children(found, rows)
        first = lease.processes[0]
        seen = {Process(pid, rows[pid].started, self._space) for pid in found}
        used = self._table.used_bytes(sorted(found)) if found else 0
        return ProcessTree((first, *sorted(seen - {first})), used, bool(found))

    def _is_visible(self, lease: ProcessLease) -> bool:
        return any(process.space == self._space for process in lease.processes)

    def _lives(self, lease: ProcessLease, rows: Mapping[int, LivingProcess]) -> bool:
        for process in lease.processes:
            row = rows.get(process.pid)
            if row is not None and row.started == process.started:
                return True
        return bool(self._table.marked(lease.lease_id))


def system_table(platform: str = sys.platform) -> ProcessTable:
    """The table of this system."""
    return MacProcesses() if platform == "darwin" else LinuxProcesses()


def _add_children(found: set[int], rows: Mapping[int, LivingProcess]) -> None:
    children: dict[int, list[int]] = {}
    for pid, row in rows.items():
        children.setdefault(row.parent, []).append(pid)
    new = list(found)
    while new:
        born = [pid for pid in children.get(new.pop(), ()) if pid not in found]
        found.update(born)
        new += born


def _text(path: Path) -> str:
    return _bytes(path).decode("utf-8", "replace")


def _bytes(path: Path) -> bytes:
    """The content of a file; empty where there is none: processes come and go."""
    try:
        return path.read_bytes()
    except OSError as problem:
        if problem.errno in OUT_OF_ORDER:
            raise _unreadable(path, problem) from problem
        return b""


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)  # noqa: PTH208 - names only
    except OSError as problem:
        if problem.errno in OUT_OF_ORDER:
            raise _unreadable(folder, problem) from problem
        return []


def _unreadable(path: Path, problem: OSError) -> errors.PeerUnavailable:
    return errors.PeerUnavailable(f"{path} cannot be read: {problem.strerror}")
