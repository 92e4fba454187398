"""Row 19: what a card or mDNS names is dialled only where this node has a reason to."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
from collections.abc import AsyncIterator

import grpc
import grpc.aio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kakeya.fleet.gossip.gossip import Gossip, GossipConfig
from kakeya.fleet.paths.addresses import AddressPolicy, Literal, dialable, read_literal
from kakeya.wire.channels import Channels
from tests.fleet.nodes import make_wire, running_node
from tests.waiting import LIMIT_S

LINKS = (ipaddress.ip_network("192.168.7.0/24"), ipaddress.ip_network("fe80::/64"))
POLICY = AddressPolicy(
    own=frozenset({"192.168.7.5:50051"}),
    typed=frozenset({"mini.local:50051", "203.0.113.9:50051"}),
    links=LINKS,
    zones=frozenset({"en0", "4"}),
)

ALLOWED = (
    "192.168.7.6:50051",
    "10.1.2.3:1",
    "172.31.0.1:65535",
    "100.100.1.1:50051",
    "[fd7a:115c:a1e0::7]:50051",
    "[fd00::2]:50051",
    "[fe80::1%en0]:50051",
    "[fe80::1%4]:50051",
    "mini.local:50051",
    "203.0.113.9:50051",
)
# PORT stands for that of a listener on every address of this machine: who dials, is counted.
REJECTED = (
    "127.0.0.1:PORT",
    "127.0.0.2:PORT",
    "127.1:PORT",
    "0.0.0.0:PORT",
    "0:PORT",
    "localhost:PORT",
    "LOCALHOST:PORT",
    "localhost.:PORT",
    "[::1]:PORT",
    "[::]:PORT",
    "[::ffff:127.0.0.1]:PORT",
    "[::ffff:7f00:1]:PORT",
    "[0:0:0:0:0:0:0:1]:PORT",
    "::1:PORT",
    "2130706433:PORT",
    "0x7f000001:PORT",
    "0x7f.0.0.1:PORT",
    "017700000001:PORT",
    "127.0.0.1:0",
    "127.0.0.1:PORT0000",
    "127.0.0.1:+PORT",
    "127.0.0.1:PORT ",
    " 127.0.0.1:PORT",
    "127.0.0.1",
    "ipv4:127.0.0.1:PORT",
    "ipv6:[::1]:PORT",
    "dns:localhost:PORT",
    "dns:///localhost:PORT",
    "dns:///127.0.0.1:PORT",
    "ipv4:127.0.0.1:PORT,127.0.0.2:PORT",
    "unix:/tmp/kakeya-corpus.sock",
    "unix-abstract:kakeya",
    "224.0.0.251:PORT",
    "[ff02::fb%en0]:PORT",
    "255.255.255.255:PORT",
    "192.168.7.255:PORT",
    "192.168.7.5:50051",
    "169.254.9.9:PORT",
    "8.8.8.8:PORT",
    "[2001:db8::1]:PORT",
    "[fe80::1]:PORT",
    "[fe80::1%en9]:PORT",
    "[fd00::2%en0]:PORT",
    "router.example:PORT",
    "",
)


@contextlib.asynccontextmanager
async def counting_listener() -> AsyncIterator[tuple[int, list[str]]]:
    """Listens on every address of this machine; yields its port and who connected."""
    callers: list[str] = []

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        callers.append(str(writer.get_extra_info("sockname")))
        writer.close()

    four = await asyncio.start_server(accept, "0.0.0.0", 0)
    port = four.sockets[0].getsockname()[1]
    six = await asyncio.start_server(accept, "::", port)
    async with four, six:
        yield port, callers


async def dial(addresses: list[str], limit_s: float = 1.0) -> None:
    """Dial as gossip does, all at once and each with a deadline."""
    # gRPC would end its thread with the last channel, and block the loop while it waits for that.
    grpc.aio.init_grpc_aio()
    channels = Channels(is_plain=lambda address: True)

    async def call(address: str) -> None:
        with contextlib.suppress(grpc.RpcError, ValueError, RuntimeError):
            await channels.get(address).unary_unary("/x/Y")(b"", timeout=limit_s)

    await asyncio.gather(*map(call, addresses))
    await channels.aclose()
    grpc.aio.shutdown_grpc_aio()


async def test_rejected_addresses_are_never_connected_to() -> None:
    assert len(REJECTED) >= 40
    async with counting_listener() as (port, callers):
        corpus = [address.replace("PORT", str(port)) for address in REJECTED]
        await dial([address for address in corpus if POLICY.allows(address)])
        assert callers == []
        # The control: without the policy these very spellings reach the listener.
        in_reach = [a for a in corpus if a.startswith(("127.", "localhost:", "[::1]", "0.0.0.0"))]
        await dial(in_reach, LIMIT_S)
        assert len(callers) >= 5


async def test_gossip_dials_none_of_them_whoever_announces_them() -> None:
    async with counting_listener() as (port, callers), running_node("me") as node:
        corpus = [address.replace("PORT", str(port)) for address in REJECTED]
        gossip = Gossip(
            node.registry,
            GossipConfig(),
            channels=node.channels,
            clock=node.clock,
            rng=node.rng,
            sightings=lambda: corpus,
            may_dial=POLICY.allows,
        )
        for number, address in enumerate(corpus):
            node.merge(make_wire(f"n{number}", address=address, at=node.clock.wall()))
        assert len(node.known()) > 1
        dialled = {a for _ in range(40) for a in (await gossip.round()).outcomes}
        assert dialled == set()
        assert callers == []


@pytest.mark.parametrize("address", REJECTED)
def test_each_rejected_address_has_its_reason(address: str) -> None:
    reason = POLICY.may_dial(address.replace("PORT", "50052"))
    assert reason.startswith("it")


@pytest.mark.parametrize("address", ALLOWED)
def test_what_peers_may_name_is_allowed(address: str) -> None:
    assert POLICY.may_dial(address) == ""


def test_loopback_is_for_nodes_on_loopback() -> None:
    at_home = AddressPolicy(own=frozenset({"127.0.0.1:1"}), is_on_loopback=True)
    assert at_home.allows("127.0.0.1:2")
    assert at_home.allows("[::1]:2")
    assert not at_home.allows("127.0.0.1:1")
    assert not at_home.allows("localhost:2")


def test_a_cable_of_another_machine_is_not_dialled_whatever_is_allowed() -> None:
    everything = (ipaddress.ip_network("0.0.0.0/0"), ipaddress.ip_network("::/0"))
    wide = AddressPolicy(allowed=everything)
    assert wide.allows("8.8.8.8:1")
    assert not wide.allows("169.254.1.2:1")
    on_cable = AddressPolicy(links=(ipaddress.ip_network("169.254.0.0/16"),))
    assert on_cable.allows("169.254.1.2:1")


def test_own_links_come_first_and_the_number_is_bounded() -> None:
    named = [f"10.0.0.{n}:1" for n in range(1, 9)] + ["192.168.7.9:1", "8.8.8.8:1"]
    assert dialable(named, POLICY, 3) == ("192.168.7.9:1", "10.0.0.1:1", "10.0.0.2:1")


ips = st.ip_addresses().filter(lambda ip: getattr(ip, "scope_id", None) is None)
zones = st.sampled_from(["", "en0", "4", "bridge0", "eth0.100"])


@given(ips, st.integers(1, 65535), zones)
def test_addresses_survive_the_round_trip_zone_and_all(
    ip: ipaddress.IPv4Address | ipaddress.IPv6Address, port: int, zone: str
) -> None:
    written = Literal(ip, port, zone if ip.version == 6 else "")
    assert read_literal(str(written)) == written


@given(st.text(max_size=60))
def test_no_text_breaks_the_policy(text: str) -> None:
    literal = read_literal(text)
    assert POLICY.allows(text) in (True, False)
    assert literal is None or read_literal(str(literal)) == literal
