"""Cards: what one node says of itself, ordered so that every node keeps the same one.

A card is the exact bytes its owner sent plus the fields read from them; relays pass the bytes on,
so what this build cannot read survives it. Cards of one owner order totally:

    incarnation (starts of the owner)  >  stamp (its clock)  >  digest of the bytes

The largest wins, hence merges commute, associate and repeat without effect, ties included.
Values and predicates only: no clock, no wire format (`convert.py`), no memory (`registry.py`).
"""

from __future__ import annotations

import hashlib
import math
import re
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import NamedTuple

from kakeya.core.ids import ModelId, NodeId
from kakeya.core.units import KIB

MAX_CARD_BYTES = 8 * KIB
MAX_MODELS = 64
MAX_ID_BYTES = 256
MIN_TTL_S = 10.0
MAX_TTL_S = 600.0
MAX_AHEAD_S = 60.0
"""How far a stamp may run ahead of the reader's clock: more than NTP's worst, less than a TTL."""
MAX_INCARNATION = 2**53
"""Starts that a node can count; a larger number could not be jumped above."""
PROTOCOL_MIN = 1
PROTOCOL_MAX = 1
DEFAULT_INTERVAL_S = 30.0
"""Between two gossip rounds; at most a quarter of the TTL, so that three lost ones are survived."""
DEFAULT_TTL_S = 4 * DEFAULT_INTERVAL_S
FAREWELL_TTL_S = 10.0

_FORBIDDEN = re.compile(r"[\x00-\x1f\x7f-\x9f/\\\ud800-\udfff]")  # surrogates are no text
_DIALABLE = re.compile(r"(?:[A-Za-z0-9._-]{1,253}|\[[0-9A-Fa-f:.]{2,45}(?:%\w{1,16})?\]):(\d{1,5})")


class Role(IntEnum):
    """Roles that this build acts on. Cards carry plain numbers, so newer roles survive."""

    VERIFIER = 1
    PROPOSER = 2
    EMBEDDER = 3
    TOOL = 4
    PREFILL_CACHE = 5
    PREFILL_COMPUTE = 6


class CardFault(StrEnum):
    """Why one card was dropped while the rest of its batch was kept."""

    MALFORMED = "malformed"
    OVERSIZE = "oversize"
    BAD_ID = "bad_id"
    BAD_STAMP = "bad_stamp"
    FUTURE = "future"
    BAD_TTL = "bad_ttl"
    BAD_INCARNATION = "bad_incarnation"
    TOO_MANY_MODELS = "too_many_models"
    EXPIRED = "expired"
    REGISTRY_FULL = "registry_full"


class OfferedModel(NamedTuple):
    """One model in one role; 0 tokens per second = not measured. A tuple: thousands are read."""

    model_id: ModelId
    role: int
    quantization: str = ""
    tokens_per_second: float = 0.0
    vocabulary_digest: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """What an owner says of itself, before it is stamped; `""` and 0 mean unknown."""

    grpc_address: str = ""
    ring_address: str = ""
    platform: str = ""
    unified_memory_bytes: int = 0
    mlx_version: str = ""
    models: tuple[OfferedModel, ...] = ()
    ttl_s: float = DEFAULT_TTL_S


@dataclass(frozen=True, slots=True, eq=False)
class Card:
    """One node's advertisement as it was received; equal when the bytes are."""

    wire: bytes
    node_id: NodeId
    incarnation: int
    announced_at: float
    ttl_s: float
    grpc_address: str
    ring_address: str
    platform: str
    unified_memory_bytes: int
    mlx_version: str
    models: tuple[OfferedModel, ...]
    protocol_min: int
    protocol_max: int

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Card) and self.wire == other.wire

    def __hash__(self) -> int:
        return hash(self.wire)

    @property
    def digest(self) -> bytes:
        """SHA-256 of the bytes: breaks ties of the stamp alike on every node."""
        return hashlib.sha256(self.wire).digest()

    @property
    def is_extended(self) -> bool:
        """Whether the owner understands this build's extensions of the protocol."""
        return self.protocol_min <= PROTOCOL_MAX and self.protocol_max >= PROTOCOL_MIN

    def is_newer_than(self, other: Card) -> bool:
        """Whether this card replaces another of the same owner."""
        mine, theirs = (
            (self.incarnation, self.announced_at),
            (other.incarnation, other.announced_at),
        )
        return mine > theirs or (mine == theirs and self.digest > other.digest)

    def is_expired(self, now: float) -> bool:
        """Whether the card's time is over; it still counts at the very instant of its end."""
        return now > self.announced_at + self.ttl_s

    def offers(self, role: int, model_id: str | None = None) -> tuple[OfferedModel, ...]:
        """The models that the node carries in a role, or the one with the given name."""
        return tuple(
            model
            for model in self.models
            if model.role == role and model_id in (None, model.model_id)
        )


def is_valid_node_id(node_id: str) -> bool:
    """Non-empty, at most 256 bytes, no control characters and no slashes."""
    if not node_id or _FORBIDDEN.search(node_id):
        return False
    return len(node_id.encode()) <= MAX_ID_BYTES


def is_dialable(address: str) -> bool:
    """Whether gossip may dial it: `HOST:PORT` and nothing that a resolver reads otherwise."""
    match = _DIALABLE.fullmatch(address)
    return match is not None and 0 < int(match[1]) <= 65535


def fault_of(card: Card, now: float) -> CardFault | None:
    """What is wrong with a card at this time; None = it may be merged. First fault wins."""
    stamp, ttl_s = card.announced_at, card.ttl_s
    if not is_valid_node_id(card.node_id):
        return CardFault.BAD_ID
    if not math.isfinite(stamp):
        return CardFault.BAD_STAMP
    if stamp > now + MAX_AHEAD_S:
        return CardFault.FUTURE
    if not MIN_TTL_S <= ttl_s <= MAX_TTL_S:  # also false for NaN
        return CardFault.BAD_TTL
    if card.incarnation >= MAX_INCARNATION:
        return CardFault.BAD_INCARNATION
    if len(card.models) > MAX_MODELS:
        return CardFault.TOO_MANY_MODELS
    return CardFault.EXPIRED if card.is_expired(now) else None
