"""Parsers and probes of the machine's memory.

The outputs below were written for these tests in the forms that the systems give, those of macOS
too: none of a real Mac is recorded. Those of a real Linux machine lie in `recorded`, and the last
test reads the machine that runs it.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kakeya.core import darwin, errors
from kakeya.core.units import GIB, KIB, MIB
from kakeya.memory.arbiter.policy import PressureLevel
from kakeya.memory.machine import machine
from kakeya.memory.machine.pressure import MachineMemory, PressureSource, Reading
from tests.darwin_library import DarwinLibrary, VmStatistics64

RECORDED = Path(__file__).parents[1] / "recorded"
MEMINFO = """MemTotal:       16384000 kB
MemFree:          204800 kB
MemAvailable:    8192000 kB
Buffers:           10000 kB
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


@pytest.fixture
def mac(monkeypatch: pytest.MonkeyPatch) -> DarwinLibrary:
    """A healthy Mac of 16 GiB: 0.4 % of its memory is free, and 20 % can be given."""
    page = os.sysconf("SC_PAGE_SIZE")
    library = DarwinLibrary(
        named={
            "hw.memsize": (16 * GIB).to_bytes(8, "little"),
            "kern.memorystatus_level": (38).to_bytes(4, "little"),
            "kern.memorystatus_vm_pressure_level": (1).to_bytes(4, "little"),
        },
        pages=bytes(
            VmStatistics64(
                free_count=64 * MIB // page,
                inactive_count=6 * GIB // page,
                external_page_count=3 * GIB // page,
                purgeable_count=128 * MIB // page,
            )
        ),
    )
    monkeypatch.setattr(darwin, "call", library.call)
    darwin._host_port.cache_clear()
    return library


def test_a_mac_counts_pages_that_can_be_given_without_compressing_any(mac: DarwinLibrary) -> None:
    available = 64 * MIB + 3 * GIB + 128 * MIB
    assert machine.MacMachine().memory() == MachineMemory(16 * GIB, available)
    mac.named["hw.memsize"] = GIB.to_bytes(8, "little")
    assert machine.MacMachine().memory() == MachineMemory(GIB, GIB)


def test_a_mac_tells_its_own_share_and_level(mac: DarwinLibrary) -> None:
    asked = machine.MacMachine()
    assert asked.pressure() == MachineMemory(16 * GIB, 16 * GIB * 38 // 100)
    for number, level in zip((1, 2, 4), PressureLevel, strict=True):
        mac.named["kern.memorystatus_vm_pressure_level"] = number.to_bytes(4, "little")
        assert asked.level() is level
    mac.named["kern.memorystatus_vm_pressure_level"] = (3).to_bytes(4, "little")
    mac.named["kern.memorystatus_level"] = (101).to_bytes(4, "little")
    for ask in (asked.level, asked.pressure):
        with pytest.raises(errors.PeerProtocol):
            ask()


async def test_a_mac_is_read_without_any_program(
    mac: DarwinLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a program was started")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    readings = [await source.read() for source in machine.machine_sources("darwin")]
    sources = [one.source for one in readings if one is not None]
    assert sources == ["os", "memory_pressure", "kernel"]


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


def test_a_control_group_that_cannot_be_read_now_is_no_group_without_a_limit(
    tmp_path: Path,
) -> None:
    resource = pytest.importorskip("resource")
    proc, root = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "self" / "cgroup").write_text("0::/job\n")
    _group(root / "job", str(800 * MIB), str(100 * MIB), "inactive_file 0\n", 2)
    linux = machine.LinuxMachine(proc, root)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            linux.limited()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert linux.limited() == MachineMemory(800 * MIB, 700 * MIB)


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
