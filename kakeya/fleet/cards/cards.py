"""Cards: the offer of one node, ordered so that every node keeps the same card.

A card is the exact bytes its owner sent plus the fields read from them; relays pass the bytes on,
so fields that this build cannot read survive it. Cards of one owner order totally:

    incarnation (starts of the owner)  >  life  >  stamp (its clock)  >  digest of the bytes

The largest wins, hence merges commute, associate and repeat without effect, ties included. Of two
lives in one incarnation, two processes with one id, the smaller number wins everywhere for good.

The last card of a life says that it leaves: another life's card stays, and takes its place again.

A card shows its owner's offer; the owner's beats (`beats.py`) show that it lives, or else the stamp
of the card. Values and predicates only: no clock, no wire format (`convert.py`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum, StrEnum
from typing import NamedTuple, Protocol

from kakeya.core.ids import ModelId, NodeId
from kakeya.core.units import KIB
from kakeya.fleet.cards.disk_model import DiskModel
from kakeya.fleet.cards.ring_offer import RingOffer

MAX_CARD_BYTES = 8 * KIB
MAX_MODELS = 64
MAX_ENDPOINTS = 8
MAX_CACHES = 8
MAX_FILTER_BYTES = 2 * KIB
MAX_ID_BYTES = 256
MAX_STRING_BYTES = 256
MAX_LABEL_BYTES = 64
MIN_TTL_S = 10.0
MAX_TTL_S = 600.0
MAX_AHEAD_S = 60.0
"""Most seconds of a stamp ahead of the reader's clock: more than NTP's worst, less than a TTL."""
MAX_AHEAD_BEATING_S = 24 * 3600.0
"""The same for a card that came with a beat: the beat gives its age, so the stamp only orders, and
a clock that is an hour wrong excludes no node. A stamp more than a day ahead is no clock's."""
MAX_FORGED = 16
"""Forged cards in one message after which its other cards are not read."""
MAX_INCARNATION = 2**53
"""Most starts that a node can count; no incarnation could be raised above a larger number."""
PROTOCOL_MIN = 1
PROTOCOL_MAX = 1
DEFAULT_INTERVAL_S = 10.0
"""Seconds between two gossip rounds."""
DEFAULT_TTL_S = 12 * DEFAULT_INTERVAL_S
"""With a fanout of 2, no node is missed for a moment at 1000 nodes and 30 % of messages lost."""
FAREWELL_TTL_S = 10.0

_FORBIDDEN = re.compile(r"[\x00-\x1f\x7f-\x9f/\\\ud800-\udfff]")  # surrogates are no text
_FORBIDDEN_IN_LABEL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
_DIALABLE = re.compile(r"(?:[A-Za-z0-9._-]{1,253}|\[[0-9A-Fa-f:.]{2,45}(?:%\w{1,16})?\]):(\d{1,5})")


class CardRole(IntEnum):
    """Roles that this build acts on. Cards carry plain numbers, so newer roles survive."""

    VERIFIER = 1
    PROPOSER = 2
    EMBEDDER = 3
    TOOL = 4
    PREFILL_CACHE = 5
    PREFILL_COMPUTE = 6


class CardFault(StrEnum):
    """The reason why one card was dropped while the rest of its batch was kept."""

    MALFORMED = "malformed"
    OVERSIZE = "oversize"
    BAD_ID = "bad_id"
    BAD_STAMP = "bad_stamp"
    FUTURE = "future"
    BAD_TTL = "bad_ttl"
    BAD_INCARNATION = "bad_incarnation"
    TOO_MANY_MODELS = "too_many_models"
    TOO_MANY_ENDPOINTS = "too_many_endpoints"
    BAD_STRING = "bad_string"
    BAD_ADDRESS = "bad_address"
    EXPIRED = "expired"
    STALE = "stale"
    """No later than a card of the node that already expired here."""
    CONFLICT = "conflict"
    """Made by another process that runs under the id of a live node."""
    REPEATED = "repeated"
    """The second card of one node in one message."""
    REGISTRY_FULL = "registry_full"
    UNSIGNED = "unsigned"
    FORGED = "forged"
    REVOKED = "revoked"


def is_liars(dropped: Mapping[CardFault, int]) -> bool:
    """Whether no honest node passes on a message with so many cards of this fault."""
    made_up = dropped.get(CardFault.FORGED, 0) + dropped.get(CardFault.MALFORMED, 0)
    return made_up >= MAX_FORGED


class OfferedModel(NamedTuple):
    """A model in a role; 0 tokens per second = not measured, no digest = it was never loaded."""

    model_id: ModelId
    role: int
    quantization: str = ""
    tokens_per_second: float = 0.0
    vocabulary_digest: str = ""
    capability: str = ""  # of one in the role TOOL


class Endpoint(NamedTuple):
    """One way to reach a node: `network` is thunderbolt, lan, tailscale or public; the lowest
    priority is the best, 0 = not given; `rtt_ms` 0 = not measured."""

    address: str
    network: str = ""
    priority: int = 0
    rtt_ms: float = 0.0


class CacheOffer(NamedTuple):
    """KV of prompts that a node serves to others, of one fingerprint.

    `compatibility` is a serialized CacheCompatibility, `filter` a small set of block names; both
    are read by `prefix/` only. `epoch` changes with the filter.
    """

    compatibility: bytes
    filter: bytes = b""
    blocks: int = 0
    used_bytes: int = 0
    free_bytes: int = 0
    epoch: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """The content of a card before it is stamped; `""` and 0 mean unknown.

    `label` is the node's name for people. `is_authority`: members renew their certificates there.
    `is_careful`: the node accepts less work than it could, after its machine panicked.
    """

    grpc_address: str = ""
    label: str = ""
    endpoints: tuple[Endpoint, ...] = ()
    is_authority: bool = False
    ring_address: str = ""
    platform: str = ""
    unified_memory_bytes: int = 0
    mlx_version: str = ""
    models: tuple[OfferedModel, ...] = ()
    ttl_s: float = DEFAULT_TTL_S
    is_careful: bool = False
    caches: tuple[CacheOffer, ...] = ()
    ring: RingOffer | None = None
    on_disk: tuple[DiskModel, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Card:
    """One node's advertisement as it was received; equal when the bytes are.

    `digest` is the SHA-256 of the bytes and `key` its first 8 bytes as a little-endian number, by
    which beats name the card. `anchor` is the end of the owner's hash chain as such a number;
    None = its beats are not proven. `life` 0, like `protocol_max` 0: a node without extensions.
    `started_at` is the owner's clock when its life began; 0 = not told.
    """

    wire: bytes
    digest: bytes
    key: int
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
    label: str
    life: int
    is_authority: bool
    anchor: int | None
    endpoints: tuple[Endpoint, ...]
    is_careful: bool = False
    caches: tuple[CacheOffer, ...] = ()
    is_leaving: bool = False
    started_at: float = 0.0
    ring: RingOffer | None = None
    on_disk: tuple[DiskModel, ...] = ()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Card) and self.wire == other.wire

    def __hash__(self) -> int:
        return self.key

    @property
    def order(self) -> tuple[int, int, float, bytes]:
        """Sorts the cards of one owner, the newest last."""
        return (self.incarnation, -self.life, self.announced_at, self.digest)

    @property
    def addresses(self) -> tuple[str, ...]:
        """The addresses that the card claims for its node, each once, its first choice first."""
        named = (self.grpc_address, *(way.address for way in self.endpoints))
        return tuple(filter(None, dict.fromkeys(named)))

    @property
    def is_plain(self) -> bool:
        """Whether the owner knows none of this build's extensions, so that it never beats."""
        return self.protocol_max == 0

    @property
    def is_extended(self) -> bool:
        """Whether the owner understands this build's extensions of the protocol."""
        return self.protocol_min <= PROTOCOL_MAX and self.protocol_max >= PROTOCOL_MIN

    def is_newer_than(self, other: Card) -> bool:
        """Whether this card replaces another of the same owner."""
        return self.order > other.order

    def is_outdated(self, now: float) -> bool:
        """Whether the card is expired by its stamp; it still counts at the instant of its end.

        Not for a card that came with a beat: the beat tells its age.
        """
        return now > self.announced_at + self.ttl_s

    def is_expired(self, now: float) -> bool:
        """Whether a plain card is expired. The registry judges cards with beats."""
        return self.is_plain and self.is_outdated(now)

    def offers(self, role: int, model_id: str | None = None) -> tuple[OfferedModel, ...]:
        """The models that the node carries in a role, or the one with the given name."""
        found = (one for one in self.models if one.role == role)
        return tuple(one for one in found if model_id in (None, one.model_id))


def is_valid_node_id(node_id: str) -> bool:
    """Non-empty, at most 256 bytes, no control characters and no slashes."""
    is_plain = bool(node_id) and not _FORBIDDEN.search(node_id)
    return is_plain and len(node_id.encode()) <= MAX_ID_BYTES


def is_dialable(address: str) -> bool:
    """Whether gossip may dial it: `HOST:PORT` and nothing that a resolver reads otherwise."""
    match = _DIALABLE.fullmatch(address)
    return match is not None and 0 < int(match[1]) <= 65535


class CardTrust(Protocol):
    """Decides which cards count in a fleet with identities."""

    def seal(self, body: bytes) -> bytes:
        """Append the own certificate and the signature over everything before it."""
        ...

    def fault_of(self, card: Card, now: float) -> CardFault | None:
        """Tell whether the card is unsigned, forged, or its owner revoked; remembers its answer."""
        ...

    def warm(self, wires: Sequence[bytes]) -> None:
        """Verify cards ahead of `fault_of`; called in a thread when there are many."""
        ...


def with_bounded_ttl(card: Card) -> Card:
    """The card of a peer with its TTL moved into the bounds, since other engines choose others;
    not for a TTL that is no number."""
    ttl_s = min(max(card.ttl_s, MIN_TTL_S), MAX_TTL_S)
    is_kept = ttl_s == card.ttl_s or not math.isfinite(card.ttl_s)
    return card if is_kept else replace(card, ttl_s=ttl_s)


def fault_of(card: Card, now: float, *, is_beating: bool = False) -> CardFault | None:
    """The first fault of a card at this time; None = it may be merged.

    `is_beating`: a beat came with it, which tells its age in place of the stamp.
    """
    stamp, ttl_s = card.announced_at, card.ttl_s
    if not is_valid_node_id(card.node_id):
        return CardFault.BAD_ID
    if not math.isfinite(stamp):
        return CardFault.BAD_STAMP
    if stamp > now + (MAX_AHEAD_BEATING_S if is_beating else MAX_AHEAD_S):
        return CardFault.FUTURE
    if not MIN_TTL_S <= ttl_s <= MAX_TTL_S:  # also false for NaN
        return CardFault.BAD_TTL
    if card.incarnation >= MAX_INCARNATION:
        return CardFault.BAD_INCARNATION
    if fault := _fault_of_content(card):
        return fault
    return CardFault.EXPIRED if not is_beating and card.is_outdated(now) else None


def _fault_of_content(card: Card) -> CardFault | None:
    texts = [card.grpc_address, card.ring_address, card.platform, card.mlx_version]
    texts += card.ring.texts if card.ring else ()
    for model_id, _, quantization, _, vocabulary_digest, capability in card.models:
        texts += (model_id, quantization, vocabulary_digest, capability)
    for address, network, _, _ in card.endpoints:
        texts += (address, network)
    if _is_any_longer(texts, MAX_STRING_BYTES):
        return CardFault.BAD_STRING
    label = card.label
    if label and (_is_any_longer([label], MAX_LABEL_BYTES) or _FORBIDDEN_IN_LABEL.search(label)):
        return CardFault.BAD_STRING
    # Plain nodes may mean something else by an address; this build writes only valid ones.
    if card.is_plain or all(is_dialable(way.address) for way in card.endpoints):
        return None
    return CardFault.BAD_ADDRESS


def _is_any_longer(texts: Sequence[str], limit_bytes: int) -> bool:
    # At most 4 bytes a letter, so most texts are never encoded.
    if 4 * max(map(len, texts)) <= limit_bytes:
        return False
    return any(len(text.encode()) > limit_bytes for text in texts)
