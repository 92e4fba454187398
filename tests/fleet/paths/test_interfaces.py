"""What an interface is by its name and address, and what follows for listening and for cards."""

from __future__ import annotations

import ipaddress
import sys

import pytest

from kakeya.fleet.paths.addresses import NetworkRank
from kakeya.fleet.paths.interfaces import (
    Interface,
    choose_listeners,
    classify,
    endpoints_of,
    find_thunderbolt_ports,
    in_order,
    policy_for,
    read_interfaces,
    read_thunderbolt_ports,
)

T, L, S, P = NetworkRank.THUNDERBOLT, NetworkRank.LAN, NetworkRank.TAILSCALE, NetworkRank.PUBLIC
MAC = {
    ("bridge0", "169.254.10.20"): T,
    ("bridge0", "10.0.5.1"): T,
    ("bridge0", "fe80::1"): T,
    ("bridge100", "192.168.64.1"): None,
    ("en0", "192.168.1.5"): L,
    ("en0", "fe80::1c"): L,
    ("en0", "fd12:3456::5"): L,
    ("en0", "17.5.5.5"): P,
    ("en0", "2a00:1450::5"): P,
    ("en5", "169.254.3.4"): L,
    ("en7", "169.254.3.4"): T,
    ("utun3", "100.101.102.103"): S,
    ("utun3", "fd7a:115c:a1e0::1"): S,
    ("utun0", "fe80::2"): None,
    ("utun4", "10.8.0.2"): None,
    ("lo0", "127.0.0.1"): None,
    ("lo0", "fe80::1"): None,
    ("awdl0", "fe80::3"): None,
    ("llw0", "fe80::3"): None,
    ("anpi0", "fe80::4"): None,
    ("ap1", "fe80::5"): None,
    ("gif0", "10.1.1.1"): None,
    ("stf0", "2002::1"): None,
    ("vmenet0", "fe80::6"): None,
    ("ipsec0", "10.2.2.2"): None,
    ("vmnet8", "172.16.9.1"): None,
    ("vnic0", "10.211.55.2"): None,
    ("ppp0", "10.64.0.2"): None,
    ("feth0", "10.147.17.3"): None,
    ("vlan0", "192.168.20.8"): L,
    ("bond0", "192.168.1.8"): L,
}
LINUX = {
    ("thunderbolt0", "169.254.1.1"): T,
    ("thunderbolt0", "fe80::1"): T,
    ("eth0", "192.168.1.5"): L,
    ("enp3s0", "10.0.0.5"): L,
    ("wlan0", "172.16.3.4"): L,
    ("wlp2s0", "fe80::9"): L,
    ("lan0", "10.77.0.1"): L,
    ("br0", "192.168.1.9"): L,
    ("eth0", "203.0.113.5"): P,
    ("eth0", "192.0.2.2"): P,
    ("tailscale0", "100.64.0.7"): S,
    ("tailscale0", "fd7a:115c:a1e0::9"): S,
    ("tailscale0", "fe80::9"): None,
    ("wg0", "10.9.0.2"): None,
    ("tun0", "10.8.0.2"): None,
    ("lo", "127.0.0.1"): None,
    ("docker0", "172.17.0.1"): None,
    ("br-0123456789ab", "172.18.0.1"): None,
    ("veth1234abc", "fe80::8"): None,
    ("virbr0", "192.168.122.1"): None,
    ("cni0", "10.42.0.1"): None,
    ("podman0", "10.88.0.1"): None,
    ("lxdbr0", "10.24.0.1"): None,
    ("incusbr0", "10.25.0.1"): None,
    ("vmnet8", "172.16.9.1"): None,
    ("ppp0", "10.64.0.2"): None,
    ("ztabcdefgh", "10.147.17.3"): None,
    ("tap0", "10.6.0.2"): None,
    ("bond0", "192.168.1.8"): L,
    ("eth0.20", "192.168.20.8"): L,
}


@pytest.mark.parametrize(("platform", "table"), [("darwin", MAC), ("linux", LINUX)])
def test_interfaces_are_told_by_name_and_address(
    platform: str, table: dict[tuple[str, str], NetworkRank | None]
) -> None:
    told = {
        (name, ip): classify(name, ipaddress.ip_address(ip), platform, thunderbolt={"en7"})
        for name, ip in table
    }
    assert told == table


def test_macos_names_the_thunderbolt_ports() -> None:
    listing = """
Hardware Port: Ethernet
Device: en0
Ethernet Address: 00:00:00:00:00:01

Hardware Port: Thunderbolt Bridge
Device: bridge0
Ethernet Address: 00:00:00:00:00:02

Hardware Port: Wi-Fi
Device: en1
Ethernet Address: 00:00:00:00:00:03

Hardware Port: Thunderbolt 2
Device: en3
Ethernet Address: 00:00:00:00:00:04

Hardware Port: Thunderbolt Ethernet Slot 0
Device: en7
Ethernet Address: 00:00:00:00:00:05

Hardware Port: Thunderbolt FireWire
Device: fw0
Ethernet Address: 00:00:00:00:00:06
"""
    assert find_thunderbolt_ports(listing) == {"bridge0", "en3"}
    assert find_thunderbolt_ports("") == frozenset()


async def test_no_other_system_is_asked_for_thunderbolt_ports() -> None:
    assert await read_thunderbolt_ports("linux") == frozenset()


def interface(name: str, text: str, index: int = 2, platform: str = "darwin") -> Interface:
    ip, _, prefix = text.partition("/")
    address = ipaddress.ip_address(ip)
    priority = classify(name, address, platform)
    assert priority is not None
    return Interface(
        name=name, index=index, ip=address, prefix=int(prefix or 24), priority=priority
    )


MINI = (
    interface("utun3", "100.64.1.2/32", 9),
    interface("en0", "192.168.1.5/24", 4),
    interface("en0", "fe80::5/64", 4),
    interface("en0", "fd00::5/64", 4),
    interface("en0", "2a00:1450::5/64", 4),
    interface("bridge0", "169.254.10.20/16", 7),
    interface("en9", "fe80::9/64", 8),
)


def test_each_private_address_is_listened_on_the_best_network_first() -> None:
    chosen = choose_listeners(MINI)
    assert [i.address(50051) for i in chosen] == [
        "169.254.10.20:50051",
        "192.168.1.5:50051",
        "[fd00::5]:50051",
        "[fe80::9%en9]:50051",
        "100.64.1.2:50051",
    ]


def test_public_addresses_are_chosen_only_when_asked() -> None:
    hosts = {i.host for i in choose_listeners(MINI)}
    asked = {i.host for i in choose_listeners(MINI, with_public=True)}
    assert asked - hosts == {"2a00:1450::5"}


def test_cards_name_no_address_that_needs_the_readers_interface() -> None:
    said = endpoints_of(choose_listeners(MINI), 50051)
    assert [(e.address, e.network, e.priority) for e in said] == [
        ("169.254.10.20:50051", "thunderbolt", 10),
        ("192.168.1.5:50051", "lan", 20),
        ("[fd00::5]:50051", "lan", 20),
        ("100.64.1.2:50051", "tailscale", 30),
    ]


def test_a_machine_with_many_addresses_says_eight() -> None:
    many = [interface("en0", f"10.0.{n}.1/24") for n in range(20)]
    assert len(endpoints_of(choose_listeners(many), 1)) == 8


def test_the_policy_knows_the_own_links_and_interfaces() -> None:
    policy = policy_for(MINI, own=["192.168.1.5:1"], typed=["mini.local:1"])
    for allowed in ("169.254.3.3:1", "192.168.1.6:1", "[fe80::7%en0]:1", "[fe80::7%8]:1"):
        assert policy.may_dial(allowed) == ""
    for refused in ("192.168.1.5:1", "192.168.1.255:1", "[fe80::7%en3]:1", "127.0.0.1:1"):
        assert policy.may_dial(refused)


def test_this_machine_can_be_read() -> None:
    found = read_interfaces(sys.platform)
    assert found == in_order(found)
    assert all(not i.ip.is_loopback for i in found)
