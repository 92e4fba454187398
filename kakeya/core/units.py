"""Bytes and token ids in the forms people and wires use."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB
KV_BLOCK_TOKENS = 256
"""Tokens by which the caches of mlx-lm grow."""
ENCODER_TOKENS, ENCODER_CPU_TOKENS = 4096, 256
"""Tokens that an encoder computes in one forward: more take no less time each, but memory."""
ENCODER_SCORE_BYTES = 32 * MIB
"""An encoder computes scores of attention in pieces of at most about so many bytes."""


def printable(text: str) -> str:
    """The text without what moves a terminal's cursor: it may have come from a peer."""
    return "".join(char if char.isprintable() else "?" for char in text)


def format_bytes(count: float) -> str:
    """Write a byte count with one binary unit: `3.4 MiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def pack_ids(token_ids: Sequence[int]) -> bytes:
    """Pack ids as little-endian uint32. Raises OverflowError on an id outside 0..2^32-1."""
    packed = array("I", token_ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_ids(packed: bytes) -> list[int]:
    """Read ids packed by `pack_ids`. Raises ValueError when the length is no multiple of 4."""
    ids = array("I")
    ids.frombytes(packed)
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tolist()


def ordinal(place: int) -> str:
    """A place in a line, counted from 1, as 1st, 2nd, 3rd, 4th."""
    last = "" if place % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(place % 10, "")
    return f"{place}{last or 'th'}"
