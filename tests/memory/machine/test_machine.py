"""Parsers and probes of the machine's memory.

The outputs below were written for these tests in the forms that the systems print, those of macOS
too: none of a real Mac is recorded. Those of a real Linux machine lie in `recorded`, and the last
test reads the machine that runs it.
"""

from __future__ import annotations

import asyncio
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from kakeya.core import errors
from kakeya.core.units import GIB, KIB, MIB
from kakeya.memory.arbiter.policy import PressureLevel
from kakeya.memory.machine import machine
from kakeya.memory.machine.pressure import MachineMemory, PressureSource, Reading

RECORDED = Path(__file__).parents[1] / "recorded"
MEMINFO = """MemTotal:       16384000 kB
MemFree:          204800 kB
MemAvailable:    8192000 kB
Buffers:           10000 kB
"""
VM_STAT = """Mach Virtual Memory Statistics: (page size of 16384 bytes)
Pages free:                                3960.
Pages active:                            402331.
Pages inactive:                          380000.
Pages speculative:                        20000.
Pages throttled:                              0.
Pages wired down:                        151234.
Pages purgeable:                          10000.
"Translation faults":                 912345678.
Pages copy-on-write:                   40123456.
Pages zero filled:                    512345678.
File-backed pages:                       200000.
Anonymous pages:                         602331.
Pages stored in compressor:               90000.
Swapins:                                      0.
Swapouts:                                     0.
"""
MEMORY_PRESSURE = """The system has 17179869184 (1048576 pages with a page size of 16384).
System-wide memory free percentage: 38%
"""
STAT_TWO = "anon 1000\nfile 5000\ninactive_file 4000\nactive_file 1000\n"
STAT_ONE = "cache 1\ninactive_file 10\nhierarchical_memory_limit 9\ntotal_inactive_file 4000\n"


def test_meminfo_counts_what_is_available_not_what_is_free() -> None:
    assert machine.parse_meminfo(MEMINFO) == MachineMemory(16384000 * KIB, 8192000 * KIB)


@pytest.mark.parametrize("text", ["", "MemTotal: 5 kB\n", "MemTotal: x kB\nMemAvailable: 1 kB\n"])
def test_a_meminfo_without_the_figures_is_refused(text: str) -> None:
    with pytest.raises(errors.PeerProtocol):
        machine.parse_meminfo(text)


@pytest.mark.parametrize(
    ("limit", "usage", "stat", "expected"),
    [
        ("max\n", "7000\n", STAT_TWO, None),
        ("9223372036854771712\n", "7000\n", STAT_ONE, None),
        ("10000\n", "7000\n", STAT_TWO, MachineMemory(10000, 7000)),
        ("10000\n", "7000\n", STAT_ONE, MachineMemory(10000, 7000)),
        ("10000\n", "12000\n", "", MachineMemory(10000, 0)),
        ("10000\n", "1000\n", STAT_TWO, MachineMemory(10000, 10000)),
    ],
)
def test_control_groups(limit: str, usage: str, stat: str, expected: MachineMemory | None) -> None:
    assert machine.parse_cgroup(limit, usage, stat) == expected


def test_a_control_group_that_is_no_number_is_refused() -> None:
    with pytest.raises(errors.PeerProtocol):
        machine.parse_cgroup("lots", "1", "")


def test_vm_stat_counts_pages_that_could_be_given_not_only_free_ones() -> None:
    """The defect that kept a healthy Mac critical: "free" alone is 0.4 % here."""
    memory = machine.parse_vm_stat(VM_STAT, 16 * GIB)
    assert memory.available_bytes == (3960 + 380000 + 20000 + 10000) * 16384
    assert memory.available_bytes / memory.total_bytes > 0.38


def test_vm_stat_is_capped_at_the_machine() -> None:
    assert machine.parse_vm_stat(VM_STAT, GIB) == MachineMemory(GIB, GIB)


@pytest.mark.parametrize(
    "text", ["", VM_STAT.replace("Pages purgeable", "Pages other"), VM_STAT.partition("\n")[2]]
)
def test_a_vm_stat_without_the_figures_is_refused(text: str) -> None:
    with pytest.raises(errors.PeerProtocol):
        machine.parse_vm_stat(text, GIB)


def test_memory_pressure_gives_a_percentage() -> None:
    memory = machine.parse_memory_pressure(MEMORY_PRESSURE)
    assert memory == MachineMemory(17179869184, 17179869184 * 38 // 100)
    for broken in ("", MEMORY_PRESSURE.replace("38%", "380%")):
        with pytest.raises(errors.PeerProtocol):
            machine.parse_memory_pressure(broken)


def test_kernel_levels() -> None:
    levels = [machine.parse_kernel_level(f"{number}\n") for number in (1, 2, 4)]
    assert levels == [PressureLevel.NOMINAL, PressureLevel.LOW, PressureLevel.CRITICAL]
    for broken in ("", "3", "-1", "low"):
        with pytest.raises(errors.PeerProtocol):
            machine.parse_kernel_level(broken)


def test_a_mac_is_asked_by_its_commands() -> None:
    answers = {
        ("sysctl", "-n", "hw.memsize"): "17179869184\n",
        ("vm_stat",): VM_STAT,
        ("memory_pressure", "-Q"): MEMORY_PRESSURE,
        ("sysctl", "-n", "kern.memorystatus_vm_pressure_level"): "2\n",
    }

    def run(command: Sequence[str]) -> str:
        return answers[tuple(command)]

    mac = machine.MacMachine(run)
    assert mac.memory().total_bytes == 16 * GIB
    assert mac.pressure().total_bytes == 16 * GIB
    assert mac.level() is PressureLevel.LOW
    answers[("sysctl", "-n", "hw.memsize")] = "sysctl: unknown oid\n"
    with pytest.raises(errors.PeerProtocol):
        mac.memory()


def test_a_command_that_fails_is_unavailable() -> None:
    assert machine.run_command(("echo", "hello")) == "hello\n"
    for command in (("false",), ("no-such-command-here",)):
        with pytest.raises(errors.PeerUnavailable, match=command[0]):
            machine.run_command(command)


def _group(folder: Path, limit: str, usage: str, stat: str, version: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    names = ("memory.max", "memory.current") if version == 2 else (
        "memory.limit_in_bytes", "memory.usage_in_bytes",
    )  # fmt: skip
    (folder / names[0]).write_text(limit)
    (folder / names[1]).write_text(usage)
    (folder / "memory.stat").write_text(stat)


@pytest.mark.parametrize("version", [1, 2])
def test_the_tightest_of_a_group_and_its_ancestors_counts(tmp_path: Path, version: int) -> None:
    proc, root = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    line = "0::/slice/job" if version == 2 else "4:cpu,memory:/slice/job"
    (proc / "self" / "cgroup").write_text(f"9:name=systemd:/\n{line}\n")
    (proc / "meminfo").write_text(MEMINFO)
    groups = root if version == 2 else root / "memory"
    linux = machine.LinuxMachine(proc, root)
    assert linux.limited() is None
    stat = "inactive_file 0\n"
    _group(groups / "slice" / "job", str(800 * MIB), str(100 * MIB), stat, version)
    _group(groups / "slice", str(900 * MIB), str(600 * MIB), stat, version)
    _group(groups, "max" if version == 2 else str(1 << 63), "1", stat, version)
    assert linux.limited() == MachineMemory(900 * MIB, 300 * MIB)
    assert linux.memory() == MachineMemory(16384000 * KIB, 8192000 * KIB)


def test_a_recorded_linux_machine_is_read(tmp_path: Path) -> None:
    shutil.copytree(RECORDED, tmp_path, dirs_exist_ok=True)
    linux = machine.LinuxMachine(tmp_path / "proc", tmp_path / "cgroup")
    assert linux.memory() == MachineMemory(24683656 * KIB, 22604104 * KIB)
    assert linux.limited() is None
    group = tmp_path / "cgroup" / "memory" / "process_api" / "0b20c107"
    (group / "memory.limit_in_bytes").write_text(f"{GIB}\n")  # this alone is made up
    assert linux.limited() == MachineMemory(GIB, GIB - 398221312 + 128139264)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_this_machine_can_be_read() -> None:
    linux = machine.LinuxMachine()
    memory = linux.memory()
    assert 0 < memory.available_bytes <= memory.total_bytes

    async def read(source: PressureSource) -> Reading | None:
        return await source.read()

    for source in machine.machine_sources():
        reading = asyncio.run(read(source))
        assert reading is not None
        assert reading.available_bytes is not None
