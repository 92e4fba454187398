"""The messages of GossipService to and from values; each is scanned before it is parsed.

Numbers on the wire: keys and proofs are 8 bytes little-endian, ages tenths of a second, rounded up
so that no card grows younger by being told of.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from google.protobuf.message import DecodeError, Message

from kakeya.core.errors import InvalidArgument, Refused
from kakeya.fleet.beats import TENTH_S, Beats, Keys, no_beats
from kakeya.fleet.convert import MAX_BATCH_CARDS, check_counts, check_size
from kakeya.fleet.suspicion import MAX_ACCUSATIONS, Sign
from kakeya.v1 import fleet_pb2 as pb

MAX_NAMED = 16_384
"""Cards that one message may name."""
MAX_WANTED = 512
"""Bodies that one answer may ask for; the next exchange asks for the others."""
Parsed = TypeVar("Parsed", bound=Message)
KEY_BYTES = 8
_KEY = np.dtype("<u8")
_MAX_TENTHS = 2**32 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Digest:
    """What a caller holds, its own card first."""

    held: Beats
    accusations: tuple[Sign, ...] = ()
    revocations_version: int = 0
    sent_at: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What the callee holds of later beats and other bodies, and what it wants."""

    newer: Beats
    cards: Sequence[bytes] = ()
    wanted: Keys
    accusations: tuple[Sign, ...] = ()
    revocations_version: int = 0
    revocations: bytes = b""
    sent_at: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Parcel:
    """Bodies and beats for one who wanted them, or a last card."""

    beats: Beats
    cards: Sequence[bytes] = ()
    revocations: bytes = b""
    is_farewell: bool = False


def beats_to_wire(beats: Beats) -> pb.Heartbeats:
    """Encode columns of beats."""
    tenths = np.ceil(np.maximum(beats.ages_s, 0.0) / TENTH_S - 1e-6)
    return pb.Heartbeats(
        keys=beats.keys.astype(_KEY, copy=False).tobytes(),
        beats=beats.numbers.tolist(),
        age_ds=np.minimum(tenths, _MAX_TENTHS).astype(np.uint32).tolist(),
        proofs=beats.proofs.astype(_KEY, copy=False).tobytes(),
    )


def beats_from_wire(message: pb.Heartbeats) -> Beats:
    """Read columns of beats. Raises InvalidArgument if they do not fit together."""
    if len(message.keys) % KEY_BYTES or len(message.proofs) % KEY_BYTES:
        raise InvalidArgument(
            f"heartbeats hold {len(message.keys)} bytes of keys and {len(message.proofs)} of "
            f"proofs; both are {KEY_BYTES} bytes for each card"
        )
    count, told = len(message.keys) // KEY_BYTES, len(message.age_ds)
    proofs = len(message.proofs) // KEY_BYTES
    if count > MAX_NAMED:
        raise Refused(f"heartbeats of {count} cards are too many; at most {MAX_NAMED} are read")
    if len(message.beats) != count or told > count or proofs not in (0, told):
        raise InvalidArgument(
            f"heartbeats of {count} cards with {len(message.beats)} beats, {told} ages and "
            f"{proofs} proofs do not fit together"
        )
    keys = np.frombuffer(message.keys, _KEY).astype(np.uint64, copy=False)
    if len(np.unique(keys)) != count:
        raise InvalidArgument(f"heartbeats of {count} cards name a card twice")
    return Beats(
        keys,
        np.fromiter(message.beats, np.uint32, count),
        np.fromiter(message.age_ds, np.float64, told) * TENTH_S,
        np.frombuffer(message.proofs, _KEY).astype(np.uint64, copy=False),
    )


def encode_beats(beats: Beats) -> bytes:
    """Serialize beats, as they lie beside the cards of a full exchange."""
    return beats_to_wire(beats).SerializeToString()


def decode_beats(data: bytes) -> Beats:
    """Read beats that lay beside cards. Raises InvalidArgument, Refused."""
    if not data:
        return no_beats()
    return beats_from_wire(_parse(pb.Heartbeats(), data))


def encode_digest(digest: Digest) -> bytes:
    """Serialize a SyncRequest."""
    return pb.SyncRequest(
        held=beats_to_wire(digest.held),
        accusations=_accusations_to_wire(digest.accusations),
        revocations_version=digest.revocations_version,
        sent_at_unix=digest.sent_at,
    ).SerializeToString()


def decode_digest(data: bytes) -> Digest:
    """Read a SyncRequest. Raises InvalidArgument, Refused."""
    check_counts(data, {1: 1, 2: MAX_ACCUSATIONS})
    message = _parse(pb.SyncRequest(), data)
    return Digest(
        held=beats_from_wire(message.held),
        accusations=_accusations_from_wire(message.accusations),
        revocations_version=message.revocations_version,
        sent_at=message.sent_at_unix,
    )


def encode_answer(answer: Answer) -> bytes:
    """Serialize a SyncResponse."""
    return pb.SyncResponse(
        newer=beats_to_wire(answer.newer),
        cards=answer.cards,
        wanted=answer.wanted.astype(_KEY, copy=False).tobytes(),
        accusations=_accusations_to_wire(answer.accusations),
        revocations_version=answer.revocations_version,
        revocations=answer.revocations,
        sent_at_unix=answer.sent_at,
    ).SerializeToString()


def decode_answer(data: bytes) -> Answer:
    """Read a SyncResponse. Raises InvalidArgument, Refused."""
    check_counts(data, {1: 1, 2: MAX_BATCH_CARDS, 4: MAX_ACCUSATIONS})
    message = _parse(pb.SyncResponse(), data)
    if len(message.wanted) % KEY_BYTES or len(message.wanted) > KEY_BYTES * MAX_WANTED:
        raise InvalidArgument(
            f"an answer wants {len(message.wanted)} bytes of keys; they are {KEY_BYTES} bytes "
            f"each, at most {MAX_WANTED}"
        )
    return Answer(
        newer=beats_from_wire(message.newer),
        cards=list(message.cards),
        wanted=np.frombuffer(message.wanted, _KEY).astype(np.uint64, copy=False),
        accusations=_accusations_from_wire(message.accusations),
        revocations_version=message.revocations_version,
        revocations=message.revocations,
        sent_at=message.sent_at_unix,
    )


def encode_parcel(parcel: Parcel) -> bytes:
    """Serialize a PushRequest."""
    return pb.PushRequest(
        beats=beats_to_wire(parcel.beats),
        cards=parcel.cards,
        revocations=parcel.revocations,
        is_farewell=parcel.is_farewell,
    ).SerializeToString()


def decode_parcel(data: bytes) -> Parcel:
    """Read a PushRequest. Raises InvalidArgument, Refused."""
    check_counts(data, {1: 1, 2: MAX_BATCH_CARDS})
    message = _parse(pb.PushRequest(), data)
    return Parcel(
        beats=beats_from_wire(message.beats),
        cards=list(message.cards),
        revocations=message.revocations,
        is_farewell=message.is_farewell,
    )


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
