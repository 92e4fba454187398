"""The memory that the machine has to give, as the operating system tells it.

    Linux   MemAvailable of /proc/meminfo; and, where a control group limits us, the tightest of it
            and its ancestors: limit - usage + what it could drop of its page cache
    macOS   (free + inactive + speculative + purgeable) pages of vm_stat: "free" alone is near zero
            on a healthy machine; the free percentage of memory_pressure; the kernel's own level

Parsers are pure functions of text. Probes read files or run commands, and block: sources call them
off the event loop.
"""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from kakeya.core import errors
from kakeya.core.units import KIB
from kakeya.memory.arbiter.policy import PressureLevel
from kakeya.memory.machine.pressure import AvailableMemory, MachineMemory, PressureSource, Reading

Run = Callable[[Sequence[str]], str]
"""Runs a command and returns its output; raises OSError or a KakeyaError."""
_COMMAND_LIMIT_S = 2.0
_UNLIMITED = 1 << 60
"""Version 1 of control groups says "no limit" by a number near 2^63."""
_LEVEL_BY_KERNEL = {1: PressureLevel.NOMINAL, 2: PressureLevel.LOW, 4: PressureLevel.CRITICAL}
_AVAILABLE_PAGES = ("free", "inactive", "speculative", "purgeable")


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


def parse_vm_stat(text: str, total_bytes: int) -> MachineMemory:
    """Available memory of macOS by `vm_stat`. Raises PeerProtocol."""
    page = re.search(r"page size of (\d+) bytes", text)
    counts = {
        name: int(count) for name, count in re.findall(r"^Pages ([a-z ]+):\s+(\d+)\.", text, re.M)
    }
    missing = [name for name in _AVAILABLE_PAGES if name not in counts]
    if page is None or missing:
        raise errors.PeerProtocol(f"vm_stat without page size or {missing}: {text[:80]!r}")
    pages = sum(counts[name] for name in _AVAILABLE_PAGES)
    return MachineMemory(total_bytes, min(total_bytes, pages * int(page[1])))


def parse_memory_pressure(text: str) -> MachineMemory:
    """Available memory of macOS by `memory_pressure -Q`. Raises PeerProtocol."""
    total = re.search(r"^The system has (\d+) ", text, re.MULTILINE)
    free = re.search(r"^System-wide memory free percentage: (\d+)%", text, re.MULTILINE)
    if total is None or free is None or not 0 <= int(free[1]) <= 100:
        raise errors.PeerProtocol(f"memory_pressure without total or percentage: {text[:80]!r}")
    return MachineMemory(int(total[1]), int(total[1]) * int(free[1]) // 100)


def parse_kernel_level(text: str) -> PressureLevel:
    """The level of macOS by `sysctl -n kern.memorystatus_vm_pressure_level`: 1, 2 or 4."""
    word = text.strip()
    if not word.isdecimal() or int(word) not in _LEVEL_BY_KERNEL:
        raise errors.PeerProtocol(f"memory pressure level {word[:40]!r}; 1, 2 or 4 is known")
    return _LEVEL_BY_KERNEL[int(word)]


def run_command(command: Sequence[str]) -> str:
    """Run a command of the system and return its output. Raises PeerUnavailable."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_COMMAND_LIMIT_S, check=True
        )
    except (OSError, subprocess.SubprocessError) as fault:
        raise errors.PeerUnavailable(f"{' '.join(command)} failed: {fault}") from fault
    return done.stdout


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

    def __init__(self, run: Run = run_command) -> None:
        self._run = run

    def memory(self) -> MachineMemory:
        """Memory by the pages that could be given at once."""
        total = self._run(("sysctl", "-n", "hw.memsize")).strip()
        if not total.isdecimal():
            raise errors.PeerProtocol(f"hw.memsize is {total[:40]!r}; a number of bytes is due")
        return parse_vm_stat(self._run(("vm_stat",)), int(total))

    def pressure(self) -> MachineMemory:
        """Memory by the system's own percentage."""
        return parse_memory_pressure(self._run(("memory_pressure", "-Q")))

    def level(self) -> PressureLevel:
        """The kernel's level, at which it begins to end processes."""
        return parse_kernel_level(
            self._run(("sysctl", "-n", "kern.memorystatus_vm_pressure_level"))
        )


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
    """The text of a file; "" where there is none: groups and processes come and go."""
    try:
        return path.read_text()
    except OSError:
        return ""
