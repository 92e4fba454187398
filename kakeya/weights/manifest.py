"""The content of a model: its files, each with its digest and those of its pieces.

    digest of a model = SHA-256 of its files: names, sizes, digests, digests of pieces

So a manifest is proven by the digest of its model, a piece by the manifest, and nothing of a peer
has to be believed once the digest is chosen. Names come from peers, too: each one is checked before
it becomes a path.
"""

from __future__ import annotations

import hashlib
import json
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from kakeya.core.errors import InvalidArgument
from kakeya.core.units import MIB

PIECE_BYTES = 4 * MIB
MOST_PIECES = 100_000
"""Of one model, 390 GiB: a manifest then just fits into one message."""
MOST_FILES = 10_000
SUFFIXES = frozenset({".safetensors", ".gguf", ".json", ".jinja", ".model", ".tiktoken", ".txt"})
"""Files with other endings are no part of a model: they neither leave this node nor come to it."""
_MOST_PARTS, _MOST_PART_BYTES = 4, 200
_HASH_BYTES = 32


class PieceOfFile(NamedTuple):
    """One piece: which file, where in it, and its digest."""

    file: int
    offset: int
    size: int
    sha256: bytes


@dataclass(frozen=True, slots=True)
class WeightsFile:
    """One file of a model; its name has slashes, and is relative to the model."""

    name: str
    size: int
    sha256: bytes
    pieces: tuple[bytes, ...]


@dataclass(frozen=True)
class WeightsManifest:
    """The files of a model, by name."""

    files: tuple[WeightsFile, ...]

    @cached_property
    def digest(self) -> str:
        """The SHA-256 of all this, hex."""
        told = [
            (one.name, one.size, one.sha256.hex(), [piece.hex() for piece in one.pieces])
            for one in self.files
        ]
        return hashlib.sha256(json.dumps(told, separators=(",", ":")).encode()).hexdigest()

    @cached_property
    def bytes(self) -> int:
        """The size of all files."""
        return sum(one.size for one in self.files)

    @cached_property
    def pieces(self) -> tuple[PieceOfFile, ...]:
        """All pieces, in order."""
        return tuple(
            PieceOfFile(place, offset, size, digest)
            for place, file in enumerate(self.files)
            for (offset, size), digest in zip(spans(file.size), file.pieces, strict=True)
        )


def spans(size: int) -> Iterator[tuple[int, int]]:
    """(offset, size) of the pieces of a file."""
    return ((at, min(PIECE_BYTES, size - at)) for at in range(0, size, PIECE_BYTES))


def checked_manifest(files: Sequence[WeightsFile], digest: str) -> WeightsManifest:
    """The manifest of a peer's model. Raises InvalidArgument for one that no correct node makes, or
    that is not that of the digest; "" = of any."""
    if not files or len(files) > MOST_FILES:
        raise InvalidArgument(f"a model of {len(files)} files; it must have 1 to {MOST_FILES}")
    for file in files:
        check_file_name(file.name)
    names = [file.name for file in files]
    if names != sorted(names) or len({_folded(name) for name in names}) != len(names):
        raise InvalidArgument("the files of a model are not in order, or two have the same name")
    total = 0
    for file in files:
        count = -(-file.size // PIECE_BYTES)
        total += count
        hashes = (file.sha256, *file.pieces)
        if count != len(file.pieces) or any(len(one) != _HASH_BYTES for one in hashes):
            raise InvalidArgument(
                f"{file.name[:80]!r} of {file.size} bytes has {len(file.pieces)} pieces, or a "
                f"digest that is none; it must have {count}"
            )
    if total > MOST_PIECES:
        raise InvalidArgument(f"a model of {total} pieces; at most {MOST_PIECES} are taken")
    made = WeightsManifest(tuple(files))
    if digest and made.digest != digest:
        raise InvalidArgument(
            f"the files have the digest {made.digest[:12]}, not {digest[:12]}, which was asked for"
        )
    return made


def check_file_name(name: str) -> None:
    """Raise InvalidArgument for a name that no file of a model has: it must lie in the model, be
    visible, and have an ending of SUFFIXES."""
    _check_parts(name, "a file of a model", _MOST_PARTS)
    if f".{name.rpartition('.')[2].lower()}" not in SUFFIXES:
        raise InvalidArgument(
            f"{name[:80]!r} is no file of a model; its name ends in {', '.join(sorted(SUFFIXES))}"
        )


def check_model_name(name: str) -> None:
    """Raise InvalidArgument for a name that cannot be that of a folder of models."""
    _check_parts(name, "a model", 2)
    if ":" in name or "=" in name:
        raise InvalidArgument(f"{name[:80]!r} names no model: it has a colon or an equals sign")


def _check_parts(name: str, what: str, most: int) -> None:
    parts = name.split("/")
    if len(parts) > most or not all(map(_is_plain, parts)):
        raise InvalidArgument(
            f"{name[:80]!r} is no name of {what}; it has 1 to {most} parts with slashes "
            f"between them, each of 1 to {_MOST_PART_BYTES} printable bytes that begin with no dot"
        )


def _is_plain(part: str) -> bool:
    if not part or not part.isprintable() or "\\" in part:
        return False
    is_plain = part[0] not in ".~" and not part.isspace()
    return is_plain and len(part.encode()) <= _MOST_PART_BYTES


def _folded(name: str) -> str:
    """Equal for names that are one file on a disk that ignores case, as those of Macs do."""
    return unicodedata.normalize("NFC", name).casefold()
