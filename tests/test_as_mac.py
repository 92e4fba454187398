"""The Mac that `scripts/test --as-mac` plays is one, for a process and its children."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ENVIRON = {**os.environ, "PYTHONPATH": f"{ROOT}/tests/as_mac:{ROOT}"}
SEEN = """
import asyncio, os, pathlib, socket, subprocess, sys
from kakeya.backends.awake import StayAwake
from kakeya.core import darwin, process
from kakeya.doctor.machine import Machine
from kakeya.fleet.paths.interfaces import read_thunderbolt_ports
from kakeya.memory.leases.processes import MacProcesses, system_table
from kakeya.memory.machine.machine import machine_sources
from kakeya.node.agent import Agent

assert sys.platform == "darwin" and not hasattr(os, "pidfd_open")
assert type(system_table()) is MacProcesses
own, told = process.resident_bytes(), process.resident_bytes(os.getpid())
assert own > 1 << 20 and abs(own - told) < own / 2, (own, told)
assert os.getppid() in {row.pid for row in darwin.processes()}
assert b"MARK=1" in darwin.environment(os.getpid())
readings = [asyncio.run(source.read()) for source in machine_sources()]
assert [one.source for one in readings] == ["os", "memory_pressure", "kernel"]
assert asyncio.run(read_thunderbolt_ports(sys.platform)) == {"en2"}
with subprocess.Popen([sys.executable, "-c", "import sys; print(sys.platform); input()"],
                      stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
    assert child.stdout.readline() == b"darwin\\n"
    with process.watched_exit(child.pid) as descriptor:
        assert descriptor is not None
    child.communicate(b"\\n")
try:
    process._linux_bytes(1) is None or sys.exit("/proc was read")
    socket.socket().bind(("127.0.0.2", 0))
except OSError as refusal:
    print(refusal)
"""


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="Linux plays the Mac")
def test_a_process_sees_a_mac_and_so_do_its_children() -> None:
    seen = subprocess.run(
        [sys.executable, "-c", SEEN], env={**ENVIRON, "MARK": "1"}, capture_output=True, text=True
    )
    assert seen.stderr == ""
    assert seen.stdout == "[Errno 99] Can't assign requested address\n"
