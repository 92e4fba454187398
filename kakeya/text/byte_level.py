"""How byte-level vocabularies write bytes: one printable character stands for each."""

from __future__ import annotations

from collections.abc import Mapping


def _byte_characters() -> dict[str, int]:
    """The printable stand-in for each byte in byte-level vocabularies, reversed.

    Bytes that print stand for themselves; the others are numbered from U+0100 in order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in set(printable)]
    pairs = {chr(byte): byte for byte in printable}
    pairs.update({chr(0x100 + index): byte for index, byte in enumerate(hidden)})
    return pairs


BYTE_OF: Mapping[str, int] = _byte_characters()
"""The byte behind each character."""
