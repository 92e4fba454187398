"""Keys of a connection between machines, and the identity of its other end.

Values and seams only: `fleet/identity` makes the keys, `wire/channels.py` and the listeners use
them, `wire/server/authorization.py` finds the caller.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple, Protocol

CLIENT_NAME = "x-kakeya-client"
"""The metadata key or header in which a caller without a certificate states its id."""


class CertRole(StrEnum):
    """The role in a certificate, which decides the methods that its holder may call."""

    MEMBER = "member"
    CLIENT = "client"
    ADMIN = "admin"


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsMaterial:
    """PEM texts: the own private key and certificate, and the authority that peers must show."""

    key: bytes
    certificate: bytes
    authority: bytes


class Certified(NamedTuple):
    """The node and role in a certificate, and the time when it expires (wall seconds)."""

    node_id: str
    role: CertRole
    ends_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """The caller of a method.

    `role` None = a process on this machine, over loopback or a socket, or any caller in a fleet
    without identities; `node_id` is then "". `address` is the caller's IP and port as gRPC writes
    it: `ipv4:10.0.0.5:50123`.
    """

    node_id: str
    role: CertRole | None
    address: str


class ChannelSecurity(Protocol):
    """The keys for channels to other machines; loopback and unix sockets are always plain."""

    def material(self) -> TlsMaterial:
        """Return the current key and certificate; a renewal changes them."""
        ...

    def server_name(self, address: str) -> str:
        """Return the name that a certificate must carry: a node id, or the name of all members."""
        ...
