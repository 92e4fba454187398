"""A node's own addresses: opened at the start, followed while cables come and go."""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager

import pytest

from kakeya.config import config
from kakeya.core.clock import Clock, SystemClock
from kakeya.core.errors import ConfigError
from kakeya.core.settings import split_address
from kakeya.core.tasks import Supervisor
from kakeya.fleet.identity.authority import new_fleet
from kakeya.fleet.identity.trust import FleetTrust
from kakeya.fleet.paths.addresses import NetworkRank
from kakeya.fleet.paths.interfaces import Interface, source_host
from kakeya.fleet.paths.own_addresses import OwnAddresses
from kakeya.fleet.paths.round_trips import SETTLE_S
from kakeya.wire.server.listeners import Listeners
from tests.fakes import SettableClock
from tests.netns import needs_all_loopback
from tests.waiting import until

NOW = 1_800_000_000.0


class Cables:
    """Interfaces that a test plugs in: addresses of loopback's range, which Linux all has."""

    def __init__(self, *hosts: str) -> None:
        self.hosts = list(hosts)

    def read(self, platform: str, thunderbolt: Collection[str]) -> tuple[Interface, ...]:
        return tuple(
            Interface(
                name=f"en{index}",
                index=index,
                ip=ipaddress.ip_address(host),
                prefix=32,
                priority=NetworkRank.LAN,
            )
            for index, host in enumerate(self.hosts, 1)
        )


class Rig:
    def __init__(
        self,
        cables: Cables,
        loaded: config.NodeConfig,
        *,
        is_member: bool,
        clock: Clock,
        source: Callable[[str], str],
    ) -> None:
        trust = FleetTrust(new_fleet("mini", clock.wall())) if is_member else None
        self.changes = 0
        self.listeners = Listeners(
            lambda server: None,
            clock=clock,
            material=trust.material if trust else None,
            trust=trust,
        )
        self.supervisor = Supervisor(clock)
        self.reach = OwnAddresses(
            loaded.listen,
            loaded.fleet,
            has_identity=is_member,
            clock=clock,
            on_change=self._changed,
            read=cables.read,
            source=source,
        )

    def _changed(self) -> None:
        self.changes += 1

    async def until_listening_on(self, *hosts: str) -> None:
        await until(lambda: set(self.reach.hosts) == set(hosts))


@asynccontextmanager
async def opened(
    cables: Cables,
    *flags: str,
    is_member: bool = True,
    networks: str = "",
    clock: Clock | None = None,
    source: Callable[[str], str] = source_host,
) -> AsyncIterator[Rig]:
    loaded = await asyncio.to_thread(config.load, flags, {"KAKEYA_NETWORKS": networks})
    clock = clock or SystemClock()
    rig = Rig(cables, loaded, is_member=is_member, clock=clock, source=source)
    try:
        await rig.reach.open(rig.listeners)
        await rig.listeners.start()
        yield rig
    finally:
        await rig.supervisor.aclose()
        await rig.listeners.stop(None)


async def accepts(address: str) -> bool:
    host, port = split_address(address)
    try:
        _, writer = await asyncio.open_connection(host, port)
    except OSError:
        return False
    writer.close()
    return True


@needs_all_loopback()
async def test_a_member_takes_one_port_on_every_network_and_loopback() -> None:
    async with opened(Cables("127.0.0.2", "127.0.0.3"), "--bind", "0.0.0.0:0") as rig:
        reach = rig.reach
        assert reach.hosts == ("127.0.0.2", "127.0.0.3")
        assert reach.grpc == f"127.0.0.2:{reach.port}" == reach.advertised
        assert [way.address for way in reach.endpoints] == [
            f"127.0.0.2:{reach.port}",
            f"127.0.0.3:{reach.port}",
        ]
        for host in ("127.0.0.1", "127.0.0.2", "127.0.0.3"):
            assert await accepts(f"{host}:{reach.port}")
        assert reach.is_networked


@needs_all_loopback()
async def test_a_cable_that_is_plugged_in_or_pulled_changes_the_addresses_and_tells() -> None:
    cables = Cables("127.0.0.2")
    async with opened(cables, "--bind", "0.0.0.0:0") as rig:
        rig.reach.start(rig.supervisor)
        cables.hosts.append("127.0.0.3")
        await rig.until_listening_on("127.0.0.2", "127.0.0.3")
        new = f"127.0.0.3:{rig.reach.port}"
        assert await accepts(new)
        assert rig.reach.policy().may_dial(new) == "it is this node's own"
        cables.hosts.remove("127.0.0.2")
        # An address that went is closed first, which takes up to a second; only then is it told.
        await until(lambda: rig.changes == 2)
        assert rig.reach.hosts == ("127.0.0.3",)
        assert not await accepts(f"127.0.0.2:{rig.reach.port}")
        assert rig.reach.advertised == new


@needs_all_loopback()
async def test_a_member_without_any_network_waits_for_one() -> None:
    cables = Cables()
    async with opened(cables, "--bind", "0.0.0.0:0") as rig:
        assert rig.reach.grpc == f"127.0.0.1:{rig.reach.port}"
        assert rig.reach.is_networked
        rig.reach.start(rig.supervisor)
        cables.hosts.append("127.0.0.2")
        await rig.until_listening_on("127.0.0.2")


@needs_all_loopback()
async def test_an_address_that_was_typed_and_cannot_be_used_ends_the_start() -> None:
    with pytest.raises(ConfigError, match=r"--bind 203\.0\.113\.9:0 cannot be used"):
        async with opened(Cables("127.0.0.2"), "--bind", "203.0.113.9:0"):
            pass


@needs_all_loopback()
async def test_of_addresses_that_nobody_typed_one_may_be_dead() -> None:
    async with opened(Cables("127.0.0.2", "203.0.113.9"), "--bind", "0.0.0.0:0") as rig:
        assert rig.reach.hosts == ("127.0.0.2",)


@needs_all_loopback()
async def test_a_port_that_is_taken_ends_the_start() -> None:
    async with opened(Cables("127.0.0.2"), "--bind", "0.0.0.0:0") as rig:
        with pytest.raises(ConfigError, match=r"in use"):
            async with opened(Cables("127.0.0.2"), "--bind", f"0.0.0.0:{rig.reach.port}"):
                pass


@needs_all_loopback()
async def test_on_loopback_nothing_is_followed_and_loopback_may_be_dialled() -> None:
    async with opened(Cables("127.0.0.2"), "--bind", "127.0.0.1:0", is_member=False) as rig:
        assert rig.reach.hosts == ()
        assert rig.reach.endpoints == ()
        assert not rig.reach.is_networked
        assert rig.reach.policy().may_dial("127.0.0.1:9") == ""


async def test_ranges_that_were_configured_may_be_dialled() -> None:
    flags = ("--bind", "127.0.0.1:0")
    async with opened(Cables(), *flags, is_member=False, networks="203.0.113.0/24") as rig:
        assert rig.reach.policy().may_dial("203.0.113.7:1") == ""
        assert rig.reach.policy().may_dial("198.51.100.7:1") != ""


@needs_all_loopback()
async def test_round_trips_are_measured_for_each_own_network_and_shown_after_a_while() -> None:
    cables, clock = Cables("127.0.0.2", "127.0.0.3"), SettableClock()
    by_peer = {"127.0.0.9": "127.0.0.2", "127.0.0.8": "127.0.0.3", "127.0.0.7": "127.0.0.5"}
    async with opened(
        cables,
        "--bind",
        "0.0.0.0:0",
        clock=clock,
        source=lambda address: by_peer[address.partition(":")[0]],
    ) as rig:
        reach = rig.reach
        for _ in range(3):
            reach.answered("127.0.0.9:1", 0.9)
            reach.answered("127.0.0.8:1", 0.1)
            reach.answered("127.0.0.7:1", 70.0)  # by no address that is listened on
        assert not reach.settle_round_trips()
        assert [way.rtt_ms for way in reach.endpoints] == [0.0, 0.0]
        clock.advance(SETTLE_S + 1)
        assert reach.settle_round_trips()
        assert [way.rtt_ms for way in reach.endpoints] == [1.0, 0.25]
        assert not reach.settle_round_trips()


def test_the_system_tells_by_which_own_address_it_sends() -> None:
    assert source_host("127.0.0.1:9") == "127.0.0.1"
    assert source_host("[::1]:9") in ("::1", "")  # a machine may have no IPv6
    for nonsense in ("", "127.0.0.1", "mini.local:9", "127.0.0.1:x", "127.0.0.1:99999"):
        assert source_host(nonsense) == ""
