"""The namespaces themselves: what is cut is cut, and nothing stays behind."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import netns

pytestmark = netns.needs_netns()

LISTEN = """
import socket
with socket.create_server(("0.0.0.0", 7000)) as server:
    print("listening", flush=True)
    while True:
        server.accept()[0].close()
"""
DIAL = "import socket, sys; socket.create_connection((sys.argv[1], 7000), 0.5).close()"


def dials(here: netns.Machine, address: str) -> bool:
    return here.python("-c", DIAL, address).returncode == 0


def test_machines_talk_until_one_is_cut_and_again_after_it_is_healed(tmp_path: Path) -> None:
    with netns.network(3) as (one, two, three):
        for number, machine in enumerate((one, two, three)):
            server = machine.spawn(
                sys.executable, "-c", LISTEN, log_file=tmp_path / f"{number}.log"
            )
            assert server.first_line == "listening\n"
        for silently in (True, False):
            assert dials(one, two.ip)
            two.cut(silently=silently)
            assert not dials(one, two.ip)
            assert not dials(two, one.ip)
            assert dials(one, three.ip)
            two.heal()
            deadline = time.monotonic() + 60
            while not dials(one, two.ip):
                assert time.monotonic() < deadline


def test_one_direction_of_dialling_can_be_lost(tmp_path: Path) -> None:
    with netns.network(3) as (one, two, three):
        for number, machine in enumerate((one, two, three)):
            machine.spawn(sys.executable, "-c", LISTEN, log_file=tmp_path / f"{number}.log")
        two.drop_dials_to(one)
        assert dials(one, two.ip)
        assert not dials(two, one.ip)
        assert dials(two, three.ip)
        two.pass_out()
        assert dials(two, one.ip)
        two.drop_out()
        assert not dials(one, two.ip)
        two.pass_out()
        assert dials(one, two.ip)


def test_a_second_cable_is_apart_from_the_switch(tmp_path: Path) -> None:
    with netns.network(2, thunderbolt=True) as (one, two):
        two.spawn(sys.executable, "-c", LISTEN, log_file=tmp_path / "2.log")
        far = two.cables["thunderbolt0"]
        two.cut()
        assert dials(one, far)
        one.unplug("thunderbolt0")
        assert not dials(one, far)
        one.plug("thunderbolt0")
        assert dials(one, far)


def test_what_a_crashed_run_left_is_removed_and_no_more() -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    old, young = (netns.run_name(pid) for pid in (ended.pid, os.getpid()))
    try:
        for name in (old, young):
            subprocess.run(["ip", "netns", "add", name], check=True, timeout=10)
        with netns.network(1) as (machine,):
            listing = subprocess.run(
                ["ip", "netns", "list"], capture_output=True, text=True, check=True, timeout=10
            ).stdout
            assert old not in listing
            assert young in listing
            assert machine.name in listing
    finally:
        for name in (old, young):
            subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=10)


class _Crash(Exception):
    pass


def test_nothing_stays_behind_when_the_inside_fails(tmp_path: Path) -> None:
    made: list[tuple[netns.Machine, netns.Spawned]] = []

    def crash_inside() -> None:
        with netns.network(1) as (machine,):
            log_file = tmp_path / "1.log"
            made.append((machine, machine.spawn(sys.executable, "-c", LISTEN, log_file=log_file)))
            raise _Crash

    with pytest.raises(_Crash):
        crash_inside()
    ((machine, server),) = made
    assert server.process.poll() is not None
    assert not (Path("/run/netns") / machine.name).exists()
