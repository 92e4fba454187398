"""Which names of machines a fleet certifies for HTTPS, and that they survive the way there."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kakeya.core.hosts import is_loopback_host
from kakeya.fleet.identity.authority import Authority, new_fleet
from kakeya.fleet.identity.certificates import (
    make_request,
    new_key,
    read_authority,
    read_holder,
    read_leaf,
    read_request,
)
from kakeya.fleet.identity.hosts import MOST_HOSTS, general_names, hosts_of, local_hosts
from kakeya.wire.security import CertRole
from kakeya.wire.tls import any_member

NOW = 1_800_000_000.0
FLEET = new_fleet("mini-1", NOW)
assert FLEET.ca_key is not None
AUTHORITY = Authority(FLEET.tls.authority, FLEET.ca_key)


@pytest.mark.parametrize(
    "host",
    [
        "mini-1",
        "mini-1.local",
        "llm.home.arpa",
        "10.0.0.7",
        "100.64.1.2",
        "169.254.1.2",
        "fd00::7",
        "localhost",
    ],
)
def test_names_and_addresses_of_a_local_network_are_certified(host: str) -> None:
    assert local_hosts([host]) == (host,)


@pytest.mark.parametrize(
    "host",
    [
        *[
            "example.com",
            "api.openai.com",
            "8.8.8.8",
            "2001:4860:4860::8888",
            "0.0.0.0",
            "224.0.0.1",
        ],
        *["fe80::1", "fe80::1%en0", "fd00::1%en0", "*.local", "a.b.local", "-a", "ä.local"],
        *("", "a b", "mini.local\n"),
        pytest.param(FLEET.node_id, id="a node"),  # drawn: names of tests are equal everywhere
        pytest.param(FLEET.member_name, id="a member"),
    ],
)
def test_sites_of_the_internet_and_other_nodes_are_not(host: str) -> None:
    assert local_hosts([host]) == ()


def test_a_name_is_certified_once_and_few_are() -> None:
    assert local_hosts(["Mini.Local.", "mini.local"]) == ("mini.local",)
    assert len(local_hosts(f"mini-{i}" for i in range(100))) == MOST_HOSTS


@given(st.lists(st.sampled_from(["mini", "mini.local", "10.0.0.1", "fd00::1"]), unique=True))
def test_a_certificate_carries_what_was_asked_and_the_member_stays_who_it_is(
    hosts: list[str],
) -> None:
    key = new_key()
    request = read_request(make_request(key, "mini-2", [*hosts, "example.com"]))
    assert set(request.hosts) == set(hosts)
    certificate = AUTHORITY.issue(request, role=CertRole.MEMBER, now=NOW)
    leaf = read_leaf(certificate)
    assert set(hosts_of(leaf.extensions)) == set(hosts)
    holder = read_holder(leaf, read_authority(FLEET.tls.authority))
    assert (holder.node_id, holder.role) == (request.node_id, CertRole.MEMBER)


def test_the_authority_itself_drops_a_name_that_no_member_may_have() -> None:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization

    bad = [FLEET.node_id, any_member(FLEET.fleet), "example.com", "mini-2"]
    subject = x509.Name([x509.NameAttribute(x509.oid.NameOID.COMMON_NAME, "mini-2")])
    csr = (
        x509.CertificateSigningRequestBuilder()
        .subject_name(subject)
        .add_extension(x509.SubjectAlternativeName(general_names(bad)), critical=False)
        .sign(new_key(), hashes.SHA256())
        .public_bytes(serialization.Encoding.DER)
    )
    assert AUTHORITY.read(csr).hosts == ("mini-2",)


def test_a_client_gets_no_names_since_it_serves_nothing() -> None:
    request = read_request(make_request(new_key(), "phone", ["mini"]))
    leaf = read_leaf(AUTHORITY.issue(request, role=CertRole.CLIENT, now=NOW))
    assert hosts_of(leaf.extensions) == ()


def test_loopback_names_are_those_that_the_rest_of_the_house_knows() -> None:
    assert all(is_loopback_host(host) for host in local_hosts(["localhost", "127.0.0.1", "::1"]))
