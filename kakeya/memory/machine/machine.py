"""The memory that the machine has to give, as the operating system tells it.

    Linux   MemAvailable of /proc/meminfo; and, where a control group limits us, the tightest of it
            and its ancestors: limit - usage + what it could drop of its page cache
    macOS   free, file-backed and purgeable pages: "free" alone is near zero on a healthy machine;
            the free percentage of which `memory_pressure` tells; the kernel's own level

Parsers are pure functions of text. Probes read files or ask the kernel; sources call them off the
event loop. A file that is not there is no limit; one that cannot be read at the moment is a probe
that fails, never one that found no limit.
"""

from __future__ import annotations

import asyncio
import errno
import os
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from kakeya.core import darwin, errors
from kakeya.core.units import KIB
from kakeya.memory.arbiter.policy import PressureLevel
from kakeya.memory.machine.pressure import AvailableMemory, MachineMemory, PressureSource, Reading

OUT_OF_ORDER = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EIO})
"""Faults of reading that say nothing of what would be read."""
_UNLIMITED = 1 << 60
"""Version 1 of control groups says "no limit" by a number near 2^63."""
_LEVEL_BY_KERNEL = {1: PressureLevel.NOMINAL, 2: PressureLevel.LOW, 4: PressureLevel.CRITICAL}


def parse_meminfo(text: str) -> MachineMemory:
    """Total and available memory of /proc/meminfo. Raises PeerProtocol."""
    found = {
        name: int(size) * KIB
        for name, size in re.findall(r"^(MemTotal|MemAvailable):\s+(\d+) kB$", text, re.MULTILINE)
    }
    if len(found) < 2:
        raise errors.PeerProtocol(
            f"/proc/meminfo without MemTotal and MemAvailable in kB: {text[:80]!r}"
        )
    return MachineMemory(found["MemTotal"], found["MemAvailable"])


def parse_cgroup(limit: str, usage: str, stat: str) -> MachineMemory | None:
    """The limit of a control group and its free bytes; None = it has no limit. Raises
    PeerProtocol."""
    if limit.strip() == "max":
        return None
    dropped = re.search(r"^(?:total_)?inactive_file (\d+)$", _with_children(stat), re.MULTILINE)
    try:
        total, used = int(limit), int(usage)
    except ValueError as fault:
        raise errors.PeerProtocol(f"control group limit {limit!r}, usage {usage!r}") from fault
    if total >= _UNLIMITED:
        return None
    reclaimable = int(dropped[1]) if dropped else 0
    return MachineMemory(total, min(total, max(0, total - used + reclaimable)))


class LinuxMachine:
    """The memory of a Linux machine."""

    def __init__(self, proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> None:
        self._proc = proc
        self._cgroup = cgroup

    def memory(self) -> MachineMemory:
        """The memory of the whole machine."""
        return parse_meminfo((self._proc / "meminfo").read_text())

    def limited(self) -> MachineMemory | None:
        """The memory of the control group, or of the ancestor with the least left; None = no
        limit."""
        found = []
        for folder, names in self._folders():
            texts = [_text(folder / name) for name in names]
            if all(texts):
                memory = parse_cgroup(*texts)
                if memory is not None:
                    found.append(memory)
        return min(found, key=lambda memory: memory.available_bytes, default=None)

    def _folders(self) -> Iterable[tuple[Path, tuple[str, str, str]]]:
        two = ("memory.max", "memory.current", "memory.stat")
        one = ("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.stat")
        for line in _text(self._proc / "self" / "cgroup").splitlines():
            number, _, rest = line.partition(":")
            kinds, _, path = rest.partition(":")
            if number == "0":
                yield from ((folder, two) for folder in _upward(self._cgroup, path))
            elif "memory" in kinds.split(","):
                root = self._cgroup / "memory"
                yield from ((folder, one) for folder in _upward(root, path))


class MacMachine:
    """The memory of a Mac."""

    def memory(self) -> MachineMemory:
        """Memory by the pages that could be given at once."""
        total = darwin.sysctl_number("hw.memsize")
        available = darwin.pages().available * os.sysconf("SC_PAGE_SIZE")
        return MachineMemory(total, min(total, available))

    def pressure(self) -> MachineMemory:
        """Memory by the system's own percentage. Raises PeerProtocol."""
        percent = darwin.sysctl_number("kern.memorystatus_level")
        if not 0 <= percent <= 100:
            raise errors.PeerProtocol(f"kern.memorystatus_level is {percent}; 0 to 100 is due")
        total = darwin.sysctl_number("hw.memsize")
        return MachineMemory(total, total * percent // 100)

    def level(self) -> PressureLevel:
        """The kernel's level, at which it begins to end processes. Raises PeerProtocol."""
        number = darwin.sysctl_number("kern.memorystatus_vm_pressure_level")
        if number not in _LEVEL_BY_KERNEL:
            raise errors.PeerProtocol(f"memory pressure level {number}; 1, 2 or 4 is known")
        return _LEVEL_BY_KERNEL[number]


class KernelLevel:
    """Pressure by the kernel's own level."""

    def __init__(self, probe: Callable[[], PressureLevel]) -> None:
        self._probe = probe

    @property
    def name(self) -> str:
        """For logs and status."""
        return "kernel"

    async def read(self) -> Reading:
        """Ask, off the loop."""
        return Reading(level=await asyncio.to_thread(self._probe), source=self.name)


def machine_sources(platform: str = sys.platform) -> tuple[PressureSource, ...]:
    """The sources of pressure on this machine. Blocks for a moment."""
    if platform == "darwin":
        mac = MacMachine()
        return (
            AvailableMemory(mac.memory),
            AvailableMemory(mac.pressure, name="memory_pressure"),
            KernelLevel(mac.level),
        )
    linux = LinuxMachine()
    limit = linux.limited()
    if limit is None:
        return (AvailableMemory(linux.memory),)
    return (
        AvailableMemory(linux.memory),
        AvailableMemory(lambda: linux.limited() or linux.memory(), name="cgroup"),
    )


def _with_children(stat: str) -> str:
    """The figures with children of a version 1 group: it lists its own first, then `total_`
    ones."""
    totals = [line for line in stat.splitlines() if line.startswith("total_")]
    return "\n".join(totals) if totals else stat


def _upward(root: Path, path: str) -> Iterable[Path]:
    """A group's folder and its ancestors'. Inside a container its own group is the root."""
    parts = [part for part in path.split("/") if part not in ("", "..")]
    for depth in range(len(parts), -1, -1):
        yield root.joinpath(*parts[:depth])


def _text(path: Path) -> str:
    """The text of a file; "" where there is none: groups and processes come and go.

    Raises OSError where the machine is out of order.
    """
    try:
        return path.read_text()
    except OSError as problem:
        if problem.errno in OUT_OF_ORDER:
            raise
        return ""
