"""The messages of GossipService to and from values; each is scanned before it is parsed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from google.protobuf.message import DecodeError, Message

from kakeya.core.errors import InvalidArgument
from kakeya.fleet.cards.convert import MAX_BATCH_CARDS, check_counts, check_size
from kakeya.fleet.cards.framing import read_content, write_number
from kakeya.fleet.gossip.columns import KEY, KEY_BYTES, columns_from_wire, columns_to_wire
from kakeya.fleet.view.beats import Beats, Keys, no_beats
from kakeya.fleet.view.suspicion import MAX_ACCUSATIONS, Sign
from kakeya.v1 import fleet_pb2 as pb

MAX_WANTED = 512
"""Most bodies that one answer may ask for; the next exchange asks for the others."""
Parsed = TypeVar("Parsed", bound=Message)
_BEATS_TAG = b"\x0a"
"""Tag of field 1, which this encoder writes first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Digest:
    """The cards that a caller holds, its own first."""

    held: Beats
    accusations: tuple[Sign, ...] = ()
    revocations_version: int = 0
    sent_at: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchAnswer:
    """The callee's later beats and other bodies, and the keys that it wants."""

    newer: Beats
    cards: Sequence[bytes] = ()
    wanted: Keys
    accusations: tuple[Sign, ...] = ()
    revocations_version: int = 0
    revocations: bytes = b""
    sent_at: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Parcel:
    """Bodies and beats for a peer that wanted them, or a last card."""

    beats: Beats
    cards: Sequence[bytes] = ()
    revocations: bytes = b""
    is_farewell: bool = False


def encode_beats(beats: Beats) -> bytes:
    """Serialize beats, as they lie beside the cards of a full exchange."""
    return columns_to_wire(beats)


def decode_beats(data: bytes) -> Beats:
    """Read beats that lay beside cards. Raises InvalidArgument, Refused."""
    if not data:
        return no_beats()
    check_size(data)
    return columns_from_wire(data)


def encode_digest(digest: Digest) -> bytes:
    """Serialize a SyncRequest."""
    rest = pb.SyncRequest(
        accusations=_accusations_to_wire(digest.accusations),
        revocations_version=digest.revocations_version,
        sent_at_unix=digest.sent_at,
    )
    return _join(digest.held, rest)


def decode_digest(data: bytes) -> Digest:
    """Read a SyncRequest. Raises InvalidArgument, Refused."""
    check_counts(data, {1: 1, 2: MAX_ACCUSATIONS})
    columns, rest = _split(data)
    message = _parse(pb.SyncRequest(), rest)
    return Digest(
        held=columns_from_wire(columns or message.held.SerializeToString()),
        accusations=_accusations_from_wire(message.accusations),
        revocations_version=message.revocations_version,
        sent_at=message.sent_at_unix,
    )


def encode_answer(answer: BatchAnswer) -> bytes:
    """Serialize a SyncResponse."""
    rest = pb.SyncResponse(
        cards=answer.cards,
        wanted=answer.wanted.astype(KEY, copy=False).tobytes(),
        accusations=_accusations_to_wire(answer.accusations),
        revocations_version=answer.revocations_version,
        revocations=answer.revocations,
        sent_at_unix=answer.sent_at,
    )
    return _join(answer.newer, rest)


def decode_answer(data: bytes) -> BatchAnswer:
    """Read a SyncResponse. Raises InvalidArgument, Refused."""
    check_counts(data, {1: 1, 2: MAX_BATCH_CARDS, 4: MAX_ACCUSATIONS})
    columns, rest = _split(data)
    message = _parse(pb.SyncResponse(), rest)
    if len(message.wanted) % KEY_BYTES or len(message.wanted) > KEY_BYTES * MAX_WANTED:
        raise InvalidArgument(
            f"an answer wants {len(message.wanted)} bytes of keys; they are {KEY_BYTES} bytes "
            f"each, at most {MAX_WANTED}"
        )
    return BatchAnswer(
        newer=columns_from_wire(columns or message.newer.SerializeToString()),
        cards=list(message.cards),
        wanted=np.frombuffer(message.wanted, KEY).astype(np.uint64, copy=False),
        accusations=_accusations_from_wire(message.accusations),
        revocations_version=message.revocations_version,
        revocations=message.revocations,
        sent_at=message.sent_at_unix,
    )


def encode_parcel(parcel: Parcel) -> bytes:
    """Serialize a PushRequest."""
    rest = pb.PushRequest(
        cards=parcel.cards,
        revocations=parcel.revocations,
        is_farewell=parcel.is_farewell,
    )
    return _join(parcel.beats, rest)


def decode_parcel(data: bytes) -> Parcel:
    """Read a PushRequest. Raises InvalidArgument, Refused."""
    check_counts(data, {1: 1, 2: MAX_BATCH_CARDS})
    columns, rest = _split(data)
    message = _parse(pb.PushRequest(), rest)
    return Parcel(
        beats=columns_from_wire(columns or message.beats.SerializeToString()),
        cards=list(message.cards),
        revocations=message.revocations,
        is_farewell=message.is_farewell,
    )


def _join(beats: Beats, rest: Message) -> bytes:
    """A message with its beats as first field."""
    columns = columns_to_wire(beats)
    return b"".join((_BEATS_TAG, write_number(len(columns)), columns, rest.SerializeToString()))


def _split(data: bytes) -> tuple[bytes, bytes]:
    """The beats, unread, of a message that has them once and first, and the rest of it."""
    if data[:1] != _BEATS_TAG:
        return b"", data
    beats, end = read_content(data, 1)
    return beats, data[end:]


def _parse(message: Parsed, data: bytes) -> Parsed:
    check_size(data)
    try:
        message.ParseFromString(data)
    except DecodeError as failure:
        name = message.DESCRIPTOR.name
        raise InvalidArgument(f"{len(data)} bytes are no {name}") from failure
    return message


def _accusations_to_wire(signs: Iterable[Sign]) -> list[pb.Accusation]:
    return [
        pb.Accusation(
            node_id=sign.node_id,
            incarnation=sign.incarnation,
            key=sign.key.to_bytes(KEY_BYTES, "little"),
            beat=sign.beat,
        )
        for sign in signs
    ]


def _accusations_from_wire(messages: Iterable[pb.Accusation]) -> tuple[Sign, ...]:
    return tuple(
        Sign(m.node_id, m.incarnation, int.from_bytes(m.key, "little"), m.beat)
        for m in messages
        if len(m.key) == KEY_BYTES
    )
