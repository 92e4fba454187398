"""Dials against real sockets: each way to fail has its own outcome, and none outlasts its limit."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import select
import socket
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc.aio
import pytest

from kakeya.core.clock import SystemClock
from kakeya.doctor.dials import DialAttempt, Dialler, DialOutcome, outcome_of
from kakeya.fleet.identity.authority import authority_of, new_fleet
from kakeya.fleet.identity.identity import Identity
from tests.doctor.small_nodes import (
    closed_port,
    full_port,
    http_port,
    opener,
    silent_port,
    small_node,
)
from tests.netns import needs_netns, network

DAY = 86_400.0
PATIENT_S, SHORT_S = 30.0, 0.8
in_time = pytest.mark.parametrize(
    "most_s", [pytest.param(2 * SHORT_S + 1.0, marks=pytest.mark.slow), 26.0]
)
"""On a quiet machine, and on one ten times slower."""


async def dial(
    address: str, identity: Identity | None = None, limit_s: float = PATIENT_S
) -> DialAttempt:
    dialler = Dialler(SystemClock(), open_channels=opener(identity), limit_s=limit_s)
    found = await asyncio.wait_for(dialler.dial(address), 3 * PATIENT_S)
    assert found.address == address
    return found


async def test_a_node_answers_with_its_id(tmp_path: Path) -> None:
    async with small_node(tmp_path, "mini") as node:
        found = await dial(node.address)
    assert (found.outcome, found.node_id, found.errno) == (DialOutcome.ANSWERED, "mini", 0)
    assert found.rtt_ms > 0


async def test_a_closed_port_refuses() -> None:
    with closed_port() as address:
        found = await dial(address)
    assert found.outcome is DialOutcome.REFUSED
    assert found.errno != 0


async def test_a_name_with_several_addresses_keeps_its_errno() -> None:
    with closed_port() as address:
        found = await dial(address.replace("127.0.0.1", "localhost"))
    assert found.outcome is DialOutcome.REFUSED


@in_time
async def test_a_full_backlog_is_a_timeout(most_s: float) -> None:
    with full_port() as address:
        found = await asyncio.wait_for(dial(address, limit_s=SHORT_S), most_s)
    assert found.outcome is DialOutcome.TIMEOUT
    assert found.errno != 0


@in_time
async def test_a_port_that_says_nothing_is_silent(most_s: float) -> None:
    with silent_port() as address:
        found = await asyncio.wait_for(dial(address, limit_s=SHORT_S), most_s)
    assert found.outcome is DialOutcome.SILENT


async def test_a_web_server_is_no_node() -> None:
    async with http_port() as address:
        found = await dial(address)
    assert found.outcome in (DialOutcome.UNTRUSTED, DialOutcome.NO_NODE)
    assert found.shown is None


async def test_another_grpc_server_is_no_node() -> None:
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        found = await dial(f"127.0.0.1:{port}")
    finally:
        await server.stop(None)
    assert found.outcome is DialOutcome.NO_NODE


@pytest.mark.parametrize("address", ["nonsense", "127.0.0.1", "[::1:5", "host:99999"])
async def test_what_is_no_address_fails_with_words(address: str) -> None:
    found = await dial(address)
    assert found.outcome is DialOutcome.FAILED
    assert found.error


async def test_a_name_that_nobody_knows_fails() -> None:
    found = await dial("no-such-host.invalid:50051", limit_s=SHORT_S)
    assert found.outcome in (DialOutcome.FAILED, DialOutcome.TIMEOUT)
    assert found.error


# --- trust


@asynccontextmanager
async def member(tmp_path: Path, identity: Identity) -> AsyncIterator[str]:
    async with small_node(tmp_path, "", identity=identity) as node:
        yield node.address


def issue(fleet: Identity, label: str, *, now: float | None = None, life_s: float = 0) -> Identity:
    authority = authority_of(fleet)
    assert authority is not None
    if life_s:
        return authority.new_identity(label, now=now or time.time(), life_s=life_s)
    return authority.new_identity(label, now=now or time.time())


async def test_members_believe_each_other(tmp_path: Path) -> None:
    fleet = new_fleet("a", time.time())
    async with member(tmp_path, fleet) as address:
        found = await dial(address, issue(fleet, "b"))
    assert (found.outcome, found.node_id) == (DialOutcome.ANSWERED, fleet.node_id)


async def test_an_expired_certificate_is_seen_with_its_date(tmp_path: Path) -> None:
    fleet = new_fleet("a", time.time() - 400 * DAY)
    expired = issue(fleet, "b", now=time.time() - 100 * DAY, life_s=50 * DAY)
    async with member(tmp_path, expired) as address:
        found = await dial(address, issue(fleet, "c"))
    assert found.outcome is DialOutcome.UNTRUSTED
    assert found.shown is not None
    assert abs(found.shown.not_after_at - expired.not_after_at) < 2


async def test_a_certificate_from_a_clock_that_is_ahead_is_seen_with_its_date(
    tmp_path: Path,
) -> None:
    fleet = new_fleet("a", time.time())
    early = issue(fleet, "b", now=time.time() + 30 * DAY)
    async with member(tmp_path, early) as address:
        found = await dial(address, issue(fleet, "c"))
    assert found.outcome is DialOutcome.UNTRUSTED
    assert found.shown is not None
    assert found.shown.not_before_at > time.time()


async def test_a_foreign_fleet_shows_a_certificate_in_date(tmp_path: Path) -> None:
    ours, theirs = new_fleet("a", time.time()), new_fleet("b", time.time())
    async with member(tmp_path, theirs) as address:
        found = await dial(address, ours)
    assert found.outcome is DialOutcome.UNTRUSTED
    assert found.shown is not None
    assert found.shown.not_before_at < time.time() < found.shown.not_after_at


async def test_a_node_of_no_fleet_sees_that_the_other_has_one(tmp_path: Path) -> None:
    async with member(tmp_path, new_fleet("a", time.time())) as address:
        found = await dial(address)
    assert found.outcome is DialOutcome.UNTRUSTED
    assert found.shown is not None


async def test_a_member_sees_that_the_other_has_no_fleet(tmp_path: Path) -> None:
    async with small_node(tmp_path, "plain") as node:
        found = await dial(node.address, new_fleet("a", time.time()))
    assert found.outcome is DialOutcome.UNTRUSTED
    assert found.shown is None


async def test_a_connection_without_a_peer_is_none_and_says_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As the event loop reports some that failed: it looked for the error too early."""
    loop = asyncio.get_running_loop()

    async def too_early(probe: socket.socket, where: tuple[str, int]) -> None:
        with contextlib.suppress(BlockingIOError):
            probe.connect(where)
        await asyncio.to_thread(select.select, [], [probe], [], 10.0)

    monkeypatch.setattr(loop, "sock_connect", too_early)
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        found = await Dialler(SystemClock()).connect(f"127.0.0.1:{closed.getsockname()[1]}")
    assert found.errno == errno.ECONNREFUSED
    assert found.outcome is outcome_of(errno.ECONNREFUSED, sys.platform)


async def test_a_connection_without_a_peer_or_a_reason_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def nothing(probe: socket.socket, where: tuple[str, int]) -> None: ...

    monkeypatch.setattr(asyncio.get_running_loop(), "sock_connect", nothing)
    found = await Dialler(SystemClock()).connect("127.0.0.1:9")
    assert (found.outcome, found.errno) == (DialOutcome.FAILED, errno.ENOTCONN)


# --- real networks


_DIAL = """
import asyncio, sys
from kakeya.core.clock import SystemClock
from kakeya.doctor.dials import Dialler
dialler = Dialler(SystemClock(), limit_s=1.0)
for address in sys.argv[1:]:
    found = asyncio.run(dialler.connect(address))
    print(found.outcome.value, found.errno)
"""


@needs_netns()
async def test_no_route_a_firewall_and_a_missing_machine_are_told_apart() -> None:
    """A firewall that drops answers with a timeout, an unused address with no machine."""

    def look() -> list[str]:
        with network(2) as (left, right):
            left.drop_dials_to(right)
            done = left.python("-c", _DIAL, f"{right.ip}:50051")
            assert done.returncode == 0, done.stderr
            # No machine has 10.77.0.9: ARP gives up after 3 s, so this one is given the time.
            addresses = ("172.20.0.1:50051", "10.77.0.9:1")
            slow = left.python("-c", _DIAL.replace("limit_s=1.0", "limit_s=6.0"), *addresses)
            return (done.stdout + slow.stdout).splitlines()

    dropped, unrouted, missing = await asyncio.to_thread(look)
    assert dropped == "timeout 110"
    assert unrouted == "no_route 101"
    assert missing == "host_unreachable 113"
