"""Cards to and from the wire: the only place of the fleet that knows the messages.

A batch of cards is `repeated field 1` of its message. It is split into the bytes of each card by
a scan of the outermost tags, so one unreadable card costs only itself, and an honest relay passes
on exactly the bytes that it got. Joining is the reverse: kept bytes are never encoded again.
"""

from __future__ import annotations

import functools
import hashlib
import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from google.protobuf.message import DecodeError

from kakeya.core.errors import Refused
from kakeya.core.ids import ModelId, NodeId
from kakeya.core.units import MIB, format_bytes
from kakeya.fleet.cards.cards import (
    MAX_CACHES,
    MAX_CARD_BYTES,
    MAX_ENDPOINTS,
    MAX_FILTER_BYTES,
    MAX_MODELS,
    PROTOCOL_MAX,
    PROTOCOL_MIN,
    CacheOffer,
    Card,
    CardFault,
    Endpoint,
    Offer,
    OfferedModel,
)
from kakeya.fleet.cards.disk_model import MAX_NAME_BYTES, MAX_ON_DISK, DiskModel
from kakeya.fleet.cards.framing import (
    FIXED64,
    LENGTH,
    read_content,
    read_number,
    skip_field,
    write_number,
)
from kakeya.fleet.cards.ring_offer import RingOffer
from kakeya.v1 import distributed_pb2 as pb

MAX_BATCH_BYTES = 2 * MIB
MAX_BATCH_CARDS = 4096
MAX_FIELDS = 2 * MAX_BATCH_CARDS
"""Most outermost fields of a message, unknown ones included: empty fields of two bytes would else
keep the scan busy for a second."""
ANCHOR_BYTES = 8
_CARD_TAG = 1 << 3 | LENGTH
_BEATS_TAG = 100 << 3 | LENGTH
_SENT_AT_TAG = 101 << 3 | FIXED64


class MalformedCard(ValueError):
    """Bytes that are no card; `fault` is the reason."""

    def __init__(self, fault: CardFault) -> None:
        super().__init__(fault.value)
        self.fault = fault


class CardBatch(NamedTuple):
    """A full exchange, cards unread: `beats` is a serialized Heartbeats, `sent_at` 0 = not told."""

    cards: list[bytes]
    beats: bytes = b""
    sent_at: float = 0.0


def split_cards(message: bytes) -> list[bytes]:
    """Split a batch into the bytes of its cards, unread.

    Raises Refused for a batch above 2 MiB or 4096 cards, InvalidArgument for broken framing.
    """
    return split_batch(message).cards


def split_batch(message: bytes) -> CardBatch:
    """Split a batch into its cards and the fields that an extended node adds. Raises as above."""
    check_size(message)
    cards: list[bytes] = []
    beats, sent_at = b"", 0.0
    at, end, fields = 0, len(message), 0
    while at < end:
        at = _read_run(message, at, _CARD_TAG, cards)
        if at >= end or len(cards) > MAX_BATCH_CARDS:
            break
        fields = _count_field(fields)
        tag, at = read_number(message, at)
        if tag == _CARD_TAG:
            card, at = read_content(message, at)
            cards.append(card)
        elif tag == _BEATS_TAG:
            beats, at = read_content(message, at)
        else:
            if tag == _SENT_AT_TAG and at + 8 <= end:
                sent_at = struct.unpack_from("<d", message, at)[0]
            at = skip_field(message, tag, at)
    if len(cards) > MAX_BATCH_CARDS:
        raise Refused(f"a batch holds at most {MAX_BATCH_CARDS} cards")
    return CardBatch(cards, beats, sent_at)


def scan_cards(message: bytes, field: int) -> list[bytes]:
    """The bytes in one field of a gossip message, unread. Raises as `check_counts` does."""
    check_size(message)
    found: list[bytes] = []
    at, end, fields, wanted = 0, len(message), 0, field << 3 | LENGTH
    while at < end:
        at = _read_run(message, at, wanted, found)
        if at >= end or len(found) > MAX_BATCH_CARDS:
            break
        fields = _count_field(fields)
        tag, at = read_number(message, at)
        if tag == wanted:
            content, at = read_content(message, at)
            found.append(content)
        else:
            at = skip_field(message, tag, at)
    if len(found) > MAX_BATCH_CARDS:
        raise _too_many(field, MAX_BATCH_CARDS)
    return found


def _read_run(message: bytes, at: int, tag: int, found: list[bytes]) -> int:
    """Add the contents of successive fields with a tag of one byte; returns the end of the run.

    Most of a message is such a run. Any unusual field ends it, and the slow reader goes on.
    """
    end = len(message)
    while at + 1 < end and message[at] == tag and len(found) <= MAX_BATCH_CARDS:
        length, start = message[at + 1], at + 2
        if length > 0x7F:
            more = message[start] if start < end else 0x80
            if more > 0x7F:
                break
            length, start = length & 0x7F | more << 7, start + 1
        at_next = start + length
        if at_next > end:
            break
        found.append(message[start:at_next])
        at = at_next
    return at


def join_batch(wires: Iterable[bytes], beats: bytes, sent_at: float) -> bytes:
    """Make the message that `split_batch` splits; plain nodes read the cards of it."""
    return b"".join(
        (
            join_cards(wires),
            write_number(_BEATS_TAG),
            write_number(len(beats)),
            beats,
            write_number(_SENT_AT_TAG),
            struct.pack("<d", sent_at),
        )
    )


def check_size(message: bytes) -> None:
    """Raise Refused for a gossip message above 2 MiB."""
    if len(message) > MAX_BATCH_BYTES:
        raise Refused(
            f"a gossip message of {format_bytes(len(message))} is too large; "
            f"at most {format_bytes(MAX_BATCH_BYTES)} are read"
        )


def check_counts(message: bytes, limits: Mapping[int, int]) -> None:
    """Bound the count of each of these fields, before a parser makes an object of each.

    Raises Refused for more, InvalidArgument for broken framing.
    """
    check_size(message)
    counts = dict.fromkeys(limits, 0)
    at, end, fields = 0, len(message), 0
    while at < end:
        fields = _count_field(fields)
        tag, at = read_number(message, at)
        at = skip_field(message, tag, at)
        field = tag >> 3
        if field in counts:
            counts[field] += 1
            if counts[field] > limits[field]:
                raise _too_many(field, limits[field])


def _too_many(field: int, limit: int) -> Refused:
    return Refused(f"a gossip message holds field {field} at most {limit} times")


def join_cards(wires: Iterable[bytes]) -> bytes:
    """Make the message that `split_cards` splits into these cards."""
    parts: list[bytes] = []
    for wire in wires:
        parts += (_head(len(wire)), wire)
    return b"".join(parts)


@functools.cache
def _head(length: int) -> bytes:
    """The tag and length before a card; the cache holds one entry for each length."""
    return b"\x0a" + write_number(length)


def _count_field(fields: int) -> int:
    if fields >= MAX_FIELDS:
        raise Refused(f"a gossip message holds at most {MAX_FIELDS} fields")
    return fields + 1


def from_wire(wire: bytes) -> Card:
    """Read one card. Raises MalformedCard for bytes that no correct peer sends."""
    if len(wire) > MAX_CARD_BYTES:
        raise MalformedCard(CardFault.OVERSIZE)
    try:
        message = pb.NodeCapability.FromString(wire)
    except DecodeError as failure:
        raise MalformedCard(CardFault.MALFORMED) from failure
    # Before each becomes an object: one card may hold thousands of empty fields of two bytes.
    if len(message.models) > MAX_MODELS:
        raise MalformedCard(CardFault.TOO_MANY_MODELS)
    if len(message.endpoints) > MAX_ENDPOINTS:
        raise MalformedCard(CardFault.TOO_MANY_ENDPOINTS)
    digest = hashlib.sha256(wire).digest()
    anchor = message.beat_anchor
    return Card(
        wire,
        digest,
        int.from_bytes(digest[:8], "little"),
        NodeId(message.node_id),
        message.incarnation,
        message.announced_at_unix,
        message.ttl_seconds,
        message.grpc_address,
        message.ring_address,
        message.platform,
        message.unified_memory_bytes,
        message.mlx_version,
        tuple([_model_from_wire(model) for model in message.models]),
        message.protocol_min,
        message.protocol_max,
        message.label,
        message.life,
        message.is_authority,
        int.from_bytes(anchor, "little") if len(anchor) == ANCHOR_BYTES else None,
        _endpoints_from_wire(message.endpoints) if message.endpoints else (),
        message.is_careful,
        _caches_from_wire(message.caches) if message.caches else (),
        message.is_leaving,
        message.started_at_unix,
        _ring_from_wire(message.ring) if message.HasField("ring") else None,
        _on_disk_from_wire(message.on_disk) if message.on_disk else (),
    )


def _model_from_wire(model: pb.ModelCapability) -> OfferedModel:
    return OfferedModel(
        ModelId(model.model_id),
        model.role,
        model.quantization,
        _positive(model.tokens_per_second),
        model.vocabulary_digest,
        model.capability,
    )


def _endpoints_from_wire(ways: Iterable[pb.NodeEndpoint]) -> tuple[Endpoint, ...]:
    return tuple(
        Endpoint(way.address, way.network, way.priority, _positive(way.measured_rtt_ms))
        for way in ways
    )


def _caches_from_wire(caches: Sequence[pb.CacheCapability]) -> tuple[CacheOffer, ...]:
    """The first few caches: a hint costs its reader a lookup at most, and so does a missing one."""
    return tuple(
        CacheOffer(
            compatibility=cache.compatibility.SerializeToString(deterministic=True),
            filter=cache.bloom_filter if len(cache.bloom_filter) <= MAX_FILTER_BYTES else b"",
            blocks=cache.entry_count,
            used_bytes=cache.cache_bytes_used,
            free_bytes=cache.cache_bytes_free,
            epoch=cache.cache_epoch,
        )
        for cache in caches[:MAX_CACHES]
    )


def _ring_from_wire(ring: pb.RingSeatCapability) -> RingOffer:
    return RingOffer(ring.group_id, ring.model_id, ring.backend, ring.split, ring.rank, ring.ranks)


def _on_disk_from_wire(models: Sequence[pb.ModelOnDisk]) -> tuple[DiskModel, ...]:
    """The first few that may be named: others are as if the node did not tell them."""
    return tuple(
        DiskModel(ModelId(one.model_id), one.bytes)
        for one in models[:MAX_ON_DISK]
        if one.model_id and len(one.model_id.encode()) <= MAX_NAME_BYTES
    )


def _positive(measured: float) -> float:
    """A claimed figure, made sortable: 0 (not measured) unless finite and positive."""
    return measured if 0.0 < measured < math.inf else 0.0


def to_wire(
    node_id: str,
    offer: Offer,
    *,
    incarnation: int,
    announced_at: float,
    life: int = 0,
    anchor: bytes = b"",
    is_leaving: bool = False,
    started_at: float = 0.0,
) -> bytes:
    """Encode an own card, with the protocol range of this build and no signature yet."""
    message = pb.NodeCapability(
        node_id=node_id,
        grpc_address=offer.grpc_address,
        ring_address=offer.ring_address,
        platform=offer.platform,
        unified_memory_bytes=offer.unified_memory_bytes,
        mlx_version=offer.mlx_version,
        models=_models_to_wire(offer.models),
        announced_at_unix=announced_at,
        ttl_seconds=offer.ttl_s,
        incarnation=incarnation,
        protocol_min=PROTOCOL_MIN,
        protocol_max=PROTOCOL_MAX,
        label=offer.label,
        life=life,
        is_authority=offer.is_authority,
        is_careful=offer.is_careful,
        is_leaving=is_leaving,
        started_at_unix=started_at,
        beat_anchor=anchor,
        endpoints=[
            pb.NodeEndpoint(
                address=way.address,
                network=way.network,
                priority=way.priority,
                measured_rtt_ms=way.rtt_ms,
            )
            for way in offer.endpoints
        ],
        caches=[cache_to_wire(cache, offer.grpc_address) for cache in offer.caches],
        ring=pb.RingSeatCapability(**offer.ring._asdict()) if offer.ring else None,
        on_disk=[pb.ModelOnDisk(**one._asdict()) for one in offer.on_disk],
    )
    return message.SerializeToString(deterministic=True)


def cache_to_wire(cache: CacheOffer, address: str) -> pb.CacheCapability:
    """Encode an offer of cached prompts."""
    return pb.CacheCapability(
        compatibility=pb.CacheCompatibility.FromString(cache.compatibility),
        cache_address=address,
        cache_bytes_used=cache.used_bytes,
        cache_bytes_free=cache.free_bytes,
        entry_count=cache.blocks,
        cache_epoch=cache.epoch,
        bloom_filter=cache.filter,
        default_compression=pb.COMPRESSION_CODEC_NONE,
    )


def _models_to_wire(models: Sequence[OfferedModel]) -> list[pb.ModelCapability]:
    return [
        pb.ModelCapability(
            model_id=model.model_id,
            role=pb.CapabilityRole.ValueType(model.role),
            quantization=model.quantization,
            tokens_per_second=model.tokens_per_second,
            vocabulary_digest=model.vocabulary_digest,
            capability=model.capability,
        )
        for model in models
    ]
