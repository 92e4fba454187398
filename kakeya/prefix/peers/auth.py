"""The identity of a caller of the prefix cache in a fleet with a common key: four headers, one of
them a MAC.

    MAC = HMAC-SHA256(fleet key, tenant NUL node NUL seconds NUL SHA-256(request))   in hex

A call counts for 60 s on either side of its time. The MAC names no method and has no nonce, so it
proves only that its sender had the key and asked this at about this time; between machines mTLS
keeps calls from being heard. Of a stream of requests the first one is covered.

A tenant is a namespace of blocks. Its own key, derived from the fleet's, makes the names of blocks,
so that names tell nothing to other tenants.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable
from dataclasses import dataclass, field

from google.protobuf.message import Message

from kakeya.core.errors import ConfigError, Denied, Unauthenticated

TENANT, NODE = "x-kakeya-tenant-id", "x-kakeya-node-id"
SECONDS, MAC = "x-kakeya-auth-ts", "x-kakeya-auth-mac"
LEAST_KEY_BYTES = 16
SKEW_S = 60.0
_MAX_TEXT = 256
_TENANT_LABEL = b"kakeya-prefill-tenant\0"

Metadata = tuple[tuple[str, str], ...]


def tenant_key(fleet_key: bytes, tenant: str) -> bytes:
    """The key that names the blocks of a tenant."""
    return hmac.digest(fleet_key, _TENANT_LABEL + tenant.encode(), "sha256")


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetKey:
    """The common key, with the node and the tenant that this node signs as. Raises ConfigError."""

    key: bytes = field(repr=False)
    tenant: str
    node_id: str

    def __post_init__(self) -> None:
        if len(self.key) < LEAST_KEY_BYTES:
            raise ConfigError(
                f"the fleet key has {len(self.key)} bytes; give at least {LEAST_KEY_BYTES}, "
                "drawn by chance"
            )
        for name in ("tenant", "node_id"):
            text: str = getattr(self, name)
            if not text or len(text) > _MAX_TEXT or not text.isascii() or not text.isprintable():
                raise ConfigError(
                    f"{name} {text[:40]!r} cannot stand in a header; give 1 to {_MAX_TEXT} "
                    "printable ASCII characters"
                )

    @property
    def block_key(self) -> bytes:
        """Of the tenant's block names."""
        return tenant_key(self.key, self.tenant)

    def sign(self, request: Message, now: float) -> Metadata:
        """The headers of one call; `now` in wall seconds."""
        seconds = str(int(now))
        return (
            (TENANT, self.tenant),
            (NODE, self.node_id),
            (SECONDS, seconds),
            (MAC, self._mac(self.tenant, self.node_id, seconds, request)),
        )

    def check(
        self, headers: Iterable[tuple[str, str | bytes]], request: Message, now: float
    ) -> str:
        """Return the node that signed a call. Raises Unauthenticated, Denied for another tenant."""
        said = {name.lower(): text for name, text in headers if isinstance(text, str)}
        tenant, node = said.get(TENANT, ""), said.get(NODE, "")
        seconds, mac = said.get(SECONDS, ""), said.get(MAC, "")
        if not (tenant and node and mac and seconds.isdecimal() and len(seconds) < 16):
            raise Unauthenticated(
                f"this call must carry {TENANT}, {NODE}, {SECONDS} and {MAC}, made with the key "
                "of this fleet"
            )
        if abs(now - int(seconds)) > SKEW_S:
            raise Unauthenticated(
                f"this call was signed {now - int(seconds):+.0f} s ago by this node's clock; "
                f"{SKEW_S:.0f} s are allowed, so one of the two clocks is wrong"
            )
        if not hmac.compare_digest(
            mac.encode(), self._mac(tenant, node, seconds, request).encode()
        ):
            raise Unauthenticated("the MAC of this call was not made with the key of this fleet")
        if tenant != self.tenant:
            raise Denied(f"tenant {tenant!r} has no blocks here; this node serves {self.tenant!r}")
        return node

    def _mac(self, tenant: str, node: str, seconds: str, request: Message) -> str:
        body = hashlib.sha256(request.SerializeToString(deterministic=True)).digest()
        said = b"\0".join((tenant.encode(), node.encode(), seconds.encode(), body))
        return hmac.digest(self.key, said, "sha256").hex()
