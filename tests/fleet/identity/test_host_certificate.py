"""The certificate of a member for HTTPS: asked for at the authority, over real mutual TLS."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from kakeya.fleet.identity.certificates import read_leaf
from kakeya.fleet.identity.host_certificate import HostCertificate
from kakeya.fleet.identity.hosts import hosts_of
from tests.fakes import SettableClock
from tests.fleet.identity.test_membership import LIFE_S, Node, two_nodes


class Watched:
    """The certificate of a node for HTTPS, with names that change and a count of new files."""

    def __init__(self, node: Node, clock: SettableClock, *hosts: str) -> None:
        self.hosts, self.changes = list(hosts), 0
        self.certificate = HostCertificate(
            node.home,
            node.membership.renewal,
            hosts=lambda: self.hosts,
            on_change=self._changed,
            clock=clock,
        )

    def _changed(self) -> None:
        self.changes += 1

    async def names(self) -> set[str]:
        pem = await asyncio.to_thread(self.certificate.path.read_bytes)
        return set(hosts_of(read_leaf(pem).extensions))


@pytest.mark.parametrize("which", [0, 1], ids=["the authority", "a member"])
async def test_a_node_gets_a_certificate_of_its_names_once(tmp_path: Path, which: int) -> None:
    clock = SettableClock()
    async with two_nodes(tmp_path, clock) as nodes:
        seen = Watched(nodes[which], clock, "Mini-2.local", "10.0.0.7", "example.com")
        for _ in range(2):
            assert await seen.certificate.keep()
        assert await seen.names() == {"mini-2.local", "10.0.0.7"}
        assert seen.changes == 1


async def test_new_names_and_old_age_bring_a_new_one(tmp_path: Path) -> None:
    clock = SettableClock()
    async with two_nodes(tmp_path, clock) as (_, two):
        seen = Watched(two, clock, "mini-2.local")
        assert await seen.certificate.keep()
        seen.hosts.append("10.0.0.8")
        assert await seen.certificate.keep()
        assert await seen.names() == {"mini-2.local", "10.0.0.8"}
        seen.hosts.remove("10.0.0.8")
        assert await seen.certificate.keep()
        assert seen.changes == 2  # more names than needed do no harm
        clock.advance(LIFE_S * 0.7)
        assert await seen.certificate.keep()
        assert seen.changes == 3
        await asyncio.to_thread(seen.certificate.path.write_bytes, b"damaged")
        assert await seen.certificate.keep()
        assert seen.changes == 4


async def test_without_the_authority_the_old_one_stays_and_the_log_says_why(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clock = SettableClock()
    async with two_nodes(tmp_path, clock) as (_, two):
        seen = Watched(two, clock, "mini-2.local")
        assert await seen.certificate.keep()
        two.cards[:] = [two.card()]
        seen.hosts.append("mini-3.local")
        assert not await seen.certificate.keep()
        assert await seen.names() == {"mini-2.local"}
    assert "authority" in caplog.text
