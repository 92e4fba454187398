"""Names and addresses of machines in certificates for HTTPS: which ones a fleet certifies.

A member must not be able to pose as a site of the internet to a laptop that trusts the fleet, nor
as another node to the fleet. So only names and addresses of local networks are certified, and no
name in the form of a node's id.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable

from cryptography import x509

MOST_HOSTS = 32
"""Names and addresses in one certificate for HTTPS."""
_WORD = r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?"
_LOCAL_NAME = re.compile(rf"{_WORD}(\.(local|lan|home|internal|localdomain|home\.arpa))?", re.ASCII)
_MEMBER_WORDS = re.compile(r"[a-z2-7]{52}", re.ASCII)
"""The form of a node's id, which callers on gRPC expect of that node alone."""


def local_hosts(hosts: Iterable[str]) -> tuple[str, ...]:
    """Those names and addresses that a fleet certifies, in lower case: of local networks only."""
    lowered = dict.fromkeys(host.lower().rstrip(".") for host in hosts)
    return tuple(host for host in lowered if _is_local_host(host))[:MOST_HOSTS]


def _is_local_host(host: str) -> bool:
    address = _address(host)
    if address is None:
        return bool(_LOCAL_NAME.fullmatch(host)) and not _MEMBER_WORDS.fullmatch(host)
    # A link-local address of IPv6 needs a zone, which no certificate carries.
    needs_zone = address.version == 6 and (address.is_link_local or "%" in host)
    is_usable = not (address.is_unspecified or address.is_multicast or address.is_global)
    return is_usable and not needs_zone


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def general_names(hosts: Iterable[str]) -> list[x509.GeneralName]:
    """Write names and addresses as a certificate does."""
    addresses = ((host, _address(host)) for host in hosts)
    return [x509.IPAddress(ip) if ip else x509.DNSName(host) for host, ip in addresses]


def hosts_of(extensions: x509.Extensions) -> tuple[str, ...]:
    """The names and addresses of machines in a request or a certificate, as `local_hosts`."""
    try:
        names = extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return ()
    addresses = (str(address) for address in names.get_values_for_type(x509.IPAddress))
    return local_hosts([*names.get_values_for_type(x509.DNSName), *addresses])
