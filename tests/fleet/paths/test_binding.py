"""Where a node listens, for each combination of the flag, the identity and the interfaces."""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import Any

import pytest

from kakeya.core.errors import ConfigError
from kakeya.fleet.paths.addresses import NetworkRank
from kakeya.fleet.paths.binding import Binding, check_http, choose_binding
from kakeya.fleet.paths.interfaces import Interface
from kakeya.wire.server.config import ListenConfig

CERT = Path("cert.pem")


def _interface(name: str, ip: str, priority: NetworkRank) -> Interface:
    address = ipaddress.ip_address(ip)
    return Interface(name=name, index=2, ip=address, prefix=24, priority=priority)


INTERFACES = (
    _interface("bridge0", "169.254.3.4", NetworkRank.THUNDERBOLT),
    _interface("en0", "192.168.1.7", NetworkRank.LAN),
    _interface("en1", "203.0.113.9", NetworkRank.PUBLIC),
)
PRIVATE = ("169.254.3.4", "192.168.1.7")


def choose(bind: str, *, has_identity: bool, insecure_lan: bool = False) -> Binding:
    return choose_binding(
        bind, has_identity=has_identity, insecure_lan=insecure_lan, interfaces=INTERFACES
    )


@pytest.mark.parametrize("bind", ["", "127.0.0.1:50051", "localhost:50051"])
def test_without_an_identity_only_this_machine_is_served(bind: str) -> None:
    chosen = choose(bind, has_identity=False)
    assert chosen.network == ()
    assert chosen.loopback in ("127.0.0.1", "localhost")
    assert chosen.port == 50051
    assert not chosen.follows_interfaces


@pytest.mark.parametrize("bind", ["", "0.0.0.0:50051", "[::]:50051"])
def test_a_member_listens_encrypted_on_each_private_address_and_never_on_a_public_one(
    bind: str,
) -> None:
    chosen = choose(bind, has_identity=True)
    assert chosen.network == PRIVATE
    assert chosen.is_encrypted
    assert chosen.follows_interfaces
    assert chosen.loopback == "127.0.0.1"


def test_a_member_that_was_given_an_address_listens_there_and_on_loopback() -> None:
    chosen = choose("203.0.113.9:7", has_identity=True)
    assert (chosen.network, chosen.port) == (("203.0.113.9",), 7)
    assert chosen.is_encrypted
    assert not chosen.follows_interfaces
    assert chosen.loopback == "127.0.0.1"


def test_a_member_may_stay_on_its_own_machine() -> None:
    chosen = choose("127.0.0.1:0", has_identity=True)
    assert (chosen.network, chosen.loopback, chosen.port) == ((), "127.0.0.1", 0)


@pytest.mark.parametrize("bind", ["0.0.0.0:1", "192.168.1.7:1", "mini-1.local:1"])
def test_the_open_needs_a_word_and_the_refusal_names_both_ways_out(bind: str) -> None:
    with pytest.raises(ConfigError) as refused:
        choose(bind, has_identity=False)
    for word in (bind, "kakeya init", "--join", "--insecure-lan", "127.0.0.1:1"):
        assert word in refused.value.message
    chosen = choose(bind, has_identity=False, insecure_lan=True)
    assert len(chosen.network) == 1
    assert not chosen.is_encrypted
    assert chosen.loopback == ""


def test_insecure_lan_takes_no_encryption_from_a_member() -> None:
    assert choose("192.168.1.7:1", has_identity=True, insecure_lan=True).is_encrypted


@pytest.mark.parametrize(
    ("listen", "has_identity", "has_keys", "words"),
    [
        ({"http": "127.0.0.1:1"}, False, False, ()),
        ({"http": "0.0.0.0:1", "insecure_lan": True}, False, False, ()),
        ({"http": "0.0.0.0:1"}, False, True, ("kakeya init", "--http-cert", "--insecure-lan")),
        ({"http": "0.0.0.0:1"}, True, False, ("kakeya key add", "--insecure-lan")),
        ({"http": "0.0.0.0:1"}, True, True, ()),
        ({"http": "0.0.0.0:1", "http_cert": CERT, "http_cert_key": CERT}, False, True, ()),
        ({"http": "0.0.0.0:1", "http_cert": CERT, "http_cert_key": CERT}, False, False, ("key",)),
    ],
)
def test_http_beyond_this_machine_needs_a_certificate_and_a_key(
    listen: dict[str, Any], has_identity: bool, has_keys: bool, words: tuple[str, ...]
) -> None:
    config = ListenConfig(**listen)
    if not words:
        check_http(config, has_identity=has_identity, has_keys=has_keys)
        return
    with pytest.raises(ConfigError) as refused:
        check_http(config, has_identity=has_identity, has_keys=has_keys)
    for word in ("--http 0.0.0.0:1", *words):
        assert word in refused.value.message
