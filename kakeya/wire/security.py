"""What a connection between machines is secured with, and who is at its other end.

Values and seams only: `fleet/identity.py` makes the keys, `wire/channels.py` and the listeners
use them, `wire/authorization.py` asks who calls.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple, Protocol

CLIENT_NAME = "x-kakeya-client"
"""The metadata or header in which a caller without a certificate says who it is."""


class CertRole(StrEnum):
    """What a certificate allows its holder."""

    MEMBER = "member"
    CLIENT = "client"
    ADMIN = "admin"


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsMaterial:
    """PEM texts: the own private key, the own certificate, the authority that peers must show."""

    key: bytes
    certificate: bytes
    authority: bytes


class Certified(NamedTuple):
    """Whom a certificate names, and when it runs out (wall seconds)."""

    node_id: str
    role: CertRole
    ends_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Who calls a service. `role` None = a process on this machine, over loopback or a socket; in
    a fleet without identities anybody. `node_id` is then "".

    `address` is the IP and port that the call came from, `ipv4:10.0.0.5:50123` as gRPC writes it.
    """

    node_id: str
    role: CertRole | None
    address: str


class ChannelSecurity(Protocol):
    """How channels to other machines are opened; loopback and unix sockets are always plain."""

    def material(self) -> TlsMaterial:
        """The own key and certificate as of now; a renewal changes it."""
        ...

    def server_name(self, address: str) -> str:
        """The name that the certificate at an address must carry: a node id, or any member's."""
        ...
