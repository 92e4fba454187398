"""mDNS between real processes: in network namespaces where those work, on loopback everywhere."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import errno
import random
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from zeroconf import IPVersion
from zeroconf.asyncio import AsyncServiceInfo, AsyncZeroconf

from kakeya.core.clock import SystemClock
from kakeya.core.tasks import Supervisor
from kakeya.fleet.paths.addresses import AddressPolicy
from kakeya.fleet.paths.discovery import (
    MAX_ADDRESSES,
    MAX_SIGHTINGS,
    SERVICE,
    Discovery,
    mark_of,
    multicast_errno,
)
from tests import netns
from tests.waiting import LIMIT_S, until

REPO = Path(__file__).parents[3]
WITHIN_S = 2.0
HOME = AddressPolicy(is_on_loopback=True)
MARK = base64.b32encode(secrets.token_bytes(5)).decode().lower()
FLEET = f"fleet-{MARK}"
"""Of this process: another run of these tests on this machine is heard too."""


class Watcher:
    """A discovery in a child process; `wait_for` gives when it saw exactly these addresses."""

    def __init__(self, node_id: str, fleet: str, port: int, hosts: Sequence[str]) -> None:
        arguments = [node_id, fleet, str(port), ",".join(hosts)]
        self.command = [sys.executable, "-m", "tests.fleet.child_discovery", *arguments]
        self.process: subprocess.Popen[str] | None = None

    def start(self, machine: netns.Machine | None = None) -> None:
        command = self.command if machine is None else machine.command(*self.command)
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=REPO
        )
        assert self._line() == "ready"

    def _line(self) -> str:
        assert self.process is not None
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def wait_for(self, *addresses: str) -> float:
        assert self.process is not None
        limit = threading.Timer(LIMIT_S, self.process.kill)
        limit.start()
        try:
            while line := self._line():
                at, *seen = line.split()
                if seen == sorted(addresses):
                    return float(at)
        finally:
            limit.cancel()
        raise AssertionError(f"it ended, or did not see {addresses} alone")

    def stop(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            self.process.wait(10)
        if self.process is not None and self.process.stdout is not None:
            self.process.stdout.close()


@dataclass
class Lan:
    """Where the watchers of one test live: a host each, and a namespace if there are any."""

    hosts: list[str]
    machines: list[netns.Machine | None]
    watchers: list[Watcher] = field(default_factory=list)

    def watch(self, place: int, node_id: str, fleet: str, port: int) -> Watcher:
        watcher = Watcher(node_id, fleet, port, [self.hosts[place]])
        self.watchers.append(watcher)
        watcher.start(self.machines[place])
        return watcher


@contextlib.contextmanager
def stopped_at_the_end(watchers: list[Watcher]):
    try:
        yield
    finally:
        for watcher in watchers:
            watcher.stop()


@pytest.fixture(params=["loopback", "namespaces"])
def lan(request: pytest.FixtureRequest):
    with contextlib.ExitStack() as stack:
        if request.param == "loopback":
            made = Lan(["127.0.0.1"] * 3, [None] * 3)
        else:
            if netns.why_not():
                pytest.skip(netns.why_not())
            machines = stack.enter_context(netns.network(3))
            made = Lan([machine.ip for machine in machines], list(machines))
        stack.enter_context(stopped_at_the_end(made.watchers))
        yield made


def test_nodes_appear_and_disappear_within_two_seconds_and_fleets_do_not_mix(lan: Lan) -> None:
    first = lan.watch(0, "first", FLEET, 1001)
    stranger = lan.watch(2, "stranger", "bbbb", 1003)
    second = lan.watch(1, "second", FLEET, 1002)
    started = time.monotonic()  # the start of the second process is no part of it
    one, two = f"{lan.hosts[0]}:1001", f"{lan.hosts[1]}:1002"
    assert first.wait_for(two) - started < WITHIN_S + 1.0
    second.wait_for(one)
    leaving = time.monotonic()
    second.stop()
    assert first.wait_for() - leaving < WITHIN_S
    stranger.stop()
    assert stranger.process is not None
    assert stranger.process.stdout is not None
    assert stranger.process.stdout.closed


@netns.needs_netns()
def test_a_node_on_two_links_is_seen_by_its_cable_first() -> None:
    watchers: list[Watcher] = []
    with netns.network(3, thunderbolt=True) as (one, two, three), stopped_at_the_end(watchers):
        here, there = one.cables["thunderbolt0"], two.cables["thunderbolt0"]
        watchers.append(Watcher("one", "aaaa", 1001, [here, one.ip]))
        watchers.append(Watcher("two", "aaaa", 1002, [there, two.ip]))
        watchers.append(Watcher("three", "aaaa", 1003, [three.ip]))
        for watcher, machine in zip(watchers, (one, two, three), strict=True):
            watcher.start(machine)
        # The third machine has a cable to the second only and does not listen on it.
        watchers[0].wait_for(f"{there}:1002", f"{two.ip}:1002", f"{three.ip}:1003")
        watchers[2].wait_for(f"{one.ip}:1001", f"{two.ip}:1002")


@contextlib.asynccontextmanager
async def discovering(**options: object) -> AsyncIterator[Discovery]:
    settings: dict[str, object] = {
        "fleet": FLEET,
        "port": 1001,
        "hosts": ["127.0.0.1"],
        "policy": HOME,
        "clock": SystemClock(),
        "rng": random.Random(1),
        **options,
    }
    discovery = Discovery(f"me-{MARK}", **settings)  # type: ignore[arg-type]
    async with Supervisor(SystemClock()) as tasks:
        discovery.start(tasks)
        yield discovery


@pytest.fixture
def netns_machine() -> Iterator[netns.Machine]:
    if why := netns.why_not():
        pytest.skip(why)
    with netns.network(2) as (machine, _):
        yield machine


@contextlib.asynccontextmanager
async def responder() -> AsyncIterator[AsyncZeroconf]:
    zeroconf = AsyncZeroconf(interfaces=["127.0.0.1"], ip_version=IPVersion.V4Only)
    try:
        yield zeroconf
    finally:
        await zeroconf.async_close()


def instance(
    name: str,
    *,
    fleet: str = FLEET,
    port: int = 2000,
    addresses: Sequence[str] = ("127.0.0.1",),
    **txt: str | bytes,
) -> AsyncServiceInfo:
    return AsyncServiceInfo(
        SERVICE,
        f"{name}.{SERVICE}",
        port=port,
        properties={"id": name[:8], "fleet": fleet, **txt},
        server=f"{name}.local.",
        parsed_addresses=list(addresses),
    )


async def announce(zeroconf: AsyncZeroconf, *infos: AsyncServiceInfo) -> None:
    sent = [
        await zeroconf.async_register_service(info, cooperating_responders=True, strict=False)
        for info in infos
    ]
    await asyncio.gather(*sent)


async def test_only_what_the_policy_would_dial_is_a_sighting() -> None:
    async with discovering() as discovery, responder() as hostile:
        await announce(
            hostile,
            instance(f"{MARK}-0001", addresses=("224.0.0.251", "0.0.0.0", "8.8.8.8")),
            instance(f"{MARK}-0002", fleet="bbbb"),
            instance(f"{MARK}-0003", port=0),
            instance("Evil name", port=2003),
            instance(f"{MARK}-0004", junk=b"\xff" * 200, port=2004),
            instance(f"{MARK}-0005", fleet="a" * 200, port=2005),
            instance(f"{MARK}-0006", port=1001),
            instance(f"{MARK}-0007", port=2007, addresses=[f"127.0.0.{n}" for n in range(10, 40)]),
        )
        await until(lambda: len(discovery.sightings()) == 2 + MAX_ADDRESSES)
        assert {int(a.rpartition(":")[2]) for a in discovery.sightings()} == {1001, 2004, 2007}
        assert discovery.stats.ignored >= 3
        assert discovery.stats.is_running


async def test_the_own_address_is_no_sighting() -> None:
    policy = AddressPolicy(own=frozenset({"127.0.0.1:1001"}), is_on_loopback=True)
    async with discovering(policy=policy) as discovery, responder() as other:
        await announce(other, instance(f"{MARK}-0001", port=1001))
        await announce(other, instance(f"{MARK}-0002", port=1002))
        await until(lambda: bool(discovery.sightings()))
        assert discovery.sightings() == {"127.0.0.1:1002"}


async def test_a_flood_of_names_is_bounded() -> None:
    """Said to the handler directly: a real flood of thousands takes longer than the suite has."""
    async with discovering() as discovery, responder() as honest:
        await announce(honest, instance(f"{MARK}-0001", port=2001))
        await until(lambda: discovery.sightings() == {"127.0.0.1:2001"})
        for number in range(5000):
            discovery._keep(f"aaaaaaaa-{number:04x}.{SERVICE}", (f"10.0.0.1:{number + 1}",))
        assert len(discovery.sightings()) <= MAX_SIGHTINGS
        for number in range(5000):
            name = f"bbbbbbbb-{number:04x}.{SERVICE}"
            discovery._hear(honest.zeroconf, SERVICE, name, _Added())
        assert len(discovery._lookups) <= 64
        assert len(discovery.sightings()) <= MAX_SIGHTINGS


class _Added:
    name = "Added"


async def test_a_name_whose_answers_were_lost_is_looked_at_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    really, asked = AsyncServiceInfo.async_request, []

    async def lossy(info: AsyncServiceInfo, *how: Any) -> bool:
        asked.append(info.name)
        return asked.count(info.name) > 2 and await really(info, *how)

    monkeypatch.setattr(AsyncServiceInfo, "async_request", lossy)
    async with discovering() as discovery, responder() as other:
        await announce(other, instance(f"{MARK}-0001", port=1001))
        await until(lambda: discovery.sightings() == {"127.0.0.1:1001"})


async def test_garbage_on_the_port_disturbs_nothing() -> None:
    async with discovering() as discovery:
        await until(lambda: discovery.stats.is_running)
        rng = random.Random(3)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
            local = socket.inet_aton("127.0.0.1")
            sender.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, local)
            for size in range(0, 1400, 7):
                sender.sendto(rng.randbytes(size), ("224.0.0.251", 5353))
                sender.sendto(
                    b"\0\0\x84\0\0\0\xff\xff" + rng.randbytes(size), ("224.0.0.251", 5353)
                )
        async with responder() as other:
            await announce(other, instance(f"{MARK}-0002", port=2002))
            await until(lambda: discovery.sightings() == {"127.0.0.1:2002"})


async def test_without_multicast_it_warns_once_and_tries_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Impatient(SystemClock):
        async def sleep(self, seconds: float, wake: asyncio.Event | None = None) -> None:
            await super().sleep(0.01, wake)

    with caplog.at_level("WARNING", logger="kakeya"):
        async with discovering(hosts=["192.0.2.77"], clock=Impatient()) as discovery:
            await until(lambda: discovery.stats.failures >= 3)
            assert not discovery.stats.is_running
            # Once there is an interface, it works.
            discovery.update(hosts=["127.0.0.1"], policy=HOME)
            await until(lambda: discovery.stats.is_running)
    warned = [record for record in caplog.records if "no discovery" in record.getMessage()]
    assert len(warned) == 1


async def test_hosts_that_change_are_announced_anew() -> None:
    other = random.Random(2)
    async with discovering(port=1003) as discovery, discovering(port=1004, rng=other) as watcher:
        await until(lambda: watcher.sightings() == {"127.0.0.1:1003"})
        discovery.update(hosts=["127.0.0.1"], policy=HOME)
        assert discovery.stats.is_running
        discovery.update(hosts=[], policy=HOME)
        await until(lambda: not watcher.sightings())


def test_a_node_is_announced_by_eight_letters() -> None:
    key_bound = "abcdefgh" + "2" * 44
    assert mark_of(key_bound) == "abcdefgh"
    assert mark_of("mini-1") != mark_of("mini-2")
    assert len(mark_of("mini-1")) == 8


async def test_a_system_that_refuses_multicast_is_noticed_once_and_counted_by_errno(
    caplog: pytest.LogCaptureFixture,
) -> None:
    says = {"127.0.0.1": 65, "::1": 65}
    async with discovering(hosts=["127.0.0.1", "::1"], refusal=says.__getitem__) as discovery:
        await until(lambda: discovery.stats.is_silenced)
        assert discovery.stats.errno == 65
        assert discovery.stats.refusals == {65: 2}
        discovery.update(hosts=["::1", "127.0.0.1"], policy=HOME)
        await until(lambda: discovery.stats.refusals == {65: 4})
        says["::1"] = 0
        discovery.update(hosts=["127.0.0.1", "::1"], policy=HOME)
        await until(lambda: not discovery.stats.is_silenced)
        assert discovery.stats.refusals == {65: 5}
    assert caplog.text.count("refuses to send multicast") == 1


def test_the_errno_of_multicast_is_the_systems(netns_machine: netns.Machine) -> None:
    code = (
        "import sys; from kakeya.fleet.paths.discovery import multicast_errno; "
        "print(multicast_errno(sys.argv[1]))"
    )

    def asked() -> str:
        return netns_machine.python("-c", code, netns_machine.ip).stdout.strip()

    assert asked() == "0"
    netns_machine.unplug(netns.LAN)
    assert asked() in (str(errno.ENETUNREACH), str(errno.ENETDOWN))


def test_an_address_that_no_interface_has_is_refused_too() -> None:
    assert multicast_errno("192.0.2.1") == errno.EADDRNOTAVAIL
