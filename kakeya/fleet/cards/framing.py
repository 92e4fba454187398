"""The outermost framing of a protobuf message, read and written without parsing the content."""

from __future__ import annotations

from kakeya.core.errors import InvalidArgument

VARINT, FIXED64, LENGTH, FIXED32 = 0, 1, 2, 5


def write_number(number: int) -> bytes:
    """A number as protobuf writes tags and lengths."""
    head = bytearray()
    while number > 0x7F:
        head.append(number & 0x7F | 0x80)
        number >>= 7
    head.append(number)
    return bytes(head)


def read_number(message: bytes, at: int) -> tuple[int, int]:
    """The number at a byte, and where it ends. Raises InvalidArgument, as all of these."""
    value = shift = 0
    while True:
        if at >= len(message) or shift > 63:
            raise InvalidArgument(f"a message breaks off inside a number at byte {at}")
        byte = message[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7


def read_content(message: bytes, at: int) -> tuple[bytes, int]:
    """The whole content of a field, after its tag was read up to `at`, and where it ends."""
    length, at = read_number(message, at)
    if at + length > len(message):
        raise InvalidArgument(f"a field claims {length} bytes where {len(message) - at} are left")
    return message[at : at + length], at + length


def skip_field(message: bytes, tag: int, at: int) -> int:
    """The end of a field, after its tag was read up to `at`."""
    kind = tag & 7
    if tag >> 3 == 0:
        raise InvalidArgument(f"a message has field number 0 before byte {at}")
    if kind == VARINT:
        return read_number(message, at)[1]
    if kind == LENGTH:
        length, at = read_number(message, at)
        at += length
    elif kind in (FIXED64, FIXED32):
        at += 8 if kind == FIXED64 else 4
    else:
        raise InvalidArgument(f"a message has wire type {kind} before byte {at}")
    if at > len(message):
        raise InvalidArgument("a message breaks off inside a field")
    return at
