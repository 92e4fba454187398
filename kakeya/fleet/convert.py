"""Cards to and from the wire: the only place of the fleet that knows the messages.

A batch of cards is `repeated field 1` of its message. It is split into the bytes of each card by
a scan of the outermost tags, so one unreadable card costs only itself, and an honest relay hands
on exactly what it got. Joining is the reverse: bytes that are kept are never encoded again.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from google.protobuf.message import DecodeError

from kakeya.core.errors import InvalidArgument, Refused
from kakeya.core.ids import ModelId, NodeId
from kakeya.core.units import MIB, format_bytes
from kakeya.fleet.cards import (
    MAX_CARD_BYTES,
    PROTOCOL_MAX,
    PROTOCOL_MIN,
    Card,
    CardFault,
    Offer,
    OfferedModel,
)
from kakeya.v1 import distributed_pb2 as pb

MAX_BATCH_BYTES = 2 * MIB
MAX_BATCH_CARDS = 4096
_CARD_TAG = 0x0A  # field 1, length-delimited
_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5


class MalformedCard(ValueError):
    """Bytes that are no card. `fault` says which way."""

    def __init__(self, fault: CardFault) -> None:
        super().__init__(fault.value)
        self.fault = fault


def split_cards(message: bytes) -> list[bytes]:
    """Split a batch into the bytes of its cards, unread.

    Raises Refused for a batch above 2 MiB or 4096 cards, InvalidArgument for broken framing.
    """
    if len(message) > MAX_BATCH_BYTES:
        raise Refused(
            f"a batch of cards of {format_bytes(len(message))} is too large; "
            f"at most {format_bytes(MAX_BATCH_BYTES)} are read"
        )
    cards: list[bytes] = []
    at, end = 0, len(message)
    while at < end:
        tag, at = _read_varint(message, at)
        if tag == _CARD_TAG:
            length, at = _read_varint(message, at)
            if at + length > end:
                raise InvalidArgument(
                    f"card {len(cards)} claims {length} bytes where {end - at} are left"
                )
            cards.append(message[at : at + length])
            at += length
            if len(cards) > MAX_BATCH_CARDS:
                raise Refused(f"a batch holds at most {MAX_BATCH_CARDS} cards")
        else:
            at = _skip_field(message, tag, at)
    return cards


def join_cards(wires: Iterable[bytes]) -> bytes:
    """Make the message of which `split_cards` gives back these cards."""
    parts: list[bytes] = []
    for wire in wires:
        parts.append(_card_head(len(wire)))
        parts.append(wire)
    return b"".join(parts)


def _card_head(length: int) -> bytes:
    head = bytearray((_CARD_TAG,))
    while length > 0x7F:
        head.append(length & 0x7F | 0x80)
        length >>= 7
    head.append(length)
    return bytes(head)


def _read_varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if at >= len(message) or shift > 63:
            raise InvalidArgument(f"a batch of cards breaks off inside a number at byte {at}")
        byte = message[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7


def _skip_field(message: bytes, tag: int, at: int) -> int:
    kind = tag & 7
    if tag >> 3 == 0:
        raise InvalidArgument(f"a batch of cards has field number 0 before byte {at}")
    if kind == _VARINT:
        return _read_varint(message, at)[1]
    if kind == _LENGTH:
        length, at = _read_varint(message, at)
        at += length
    elif kind in (_FIXED64, _FIXED32):
        at += 8 if kind == _FIXED64 else 4
    else:
        raise InvalidArgument(f"a batch of cards has wire type {kind} before byte {at}")
    if at > len(message):
        raise InvalidArgument("a batch of cards breaks off inside a field")
    return at


def from_wire(wire: bytes) -> Card:
    """Read one card. Raises MalformedCard for bytes that no correct peer sends."""
    if len(wire) > MAX_CARD_BYTES:
        raise MalformedCard(CardFault.OVERSIZE)
    try:
        message = pb.NodeCapability.FromString(wire)
    except DecodeError as failure:
        raise MalformedCard(CardFault.MALFORMED) from failure
    return Card(
        wire,
        NodeId(message.node_id),
        message.incarnation,
        message.announced_at_unix,
        message.ttl_seconds,
        message.grpc_address,
        message.ring_address,
        message.platform,
        message.unified_memory_bytes,
        message.mlx_version,
        tuple(
            OfferedModel(
                ModelId(model.model_id),
                model.role,
                model.quantization,
                _speed(model.tokens_per_second),
                model.vocabulary_digest,
            )
            for model in message.models
        ),
        message.protocol_min,
        message.protocol_max,
    )


def _speed(tokens_per_second: float) -> float:
    """A claimed speed that sorts: what is no finite positive number counts as not measured."""
    return tokens_per_second if 0.0 < tokens_per_second < math.inf else 0.0


def to_wire(node_id: str, offer: Offer, *, incarnation: int, announced_at: float) -> bytes:
    """Encode an own card, with the protocol range of this build."""
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
    )
    return message.SerializeToString(deterministic=True)


def _models_to_wire(models: Sequence[OfferedModel]) -> list[pb.ModelCapability]:
    return [
        pb.ModelCapability(
            model_id=model.model_id,
            role=pb.CapabilityRole.ValueType(model.role),
            quantization=model.quantization,
            tokens_per_second=model.tokens_per_second,
            vocabulary_digest=model.vocabulary_digest,
        )
        for model in models
    ]
