"""KVB1: the file of one block of KV, which describes itself and shows any damage.

    0      4         8       12        12+n    64*k            64*k+payload    +32
    | KVB1 | n, u32  | crc32 | header  | zeros | payload       | SHA-256 of all before |

The header is canonical JSON (keys sorted, no spaces) with a bounded length and a checksum of its
own, so an index is built from headers alone. The payload is the engine's bytes as they lie in
pages, from a multiple of 64 on. The header has a crc32 of each part of it. Numbers are
little-endian.

A payload is proven in one of two ways. The checksums of its parts find the faults of a failing
disk: any run of up to 32 wrong bits, and all but one in 2^32 of the rest. SHA-256 takes twice as
long and finds any change.

Every length is checked against the file's size before anything is allocated or read. Everything
here blocks; nothing here knows names or folders.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import struct
import zlib
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass, field

from kakeya.core.errors import InvalidArgument
from kakeya.core.units import KIB, MIB, pack_ids, unpack_ids
from kakeya.generation.retention import Retention, retention_named
from kakeya.prefix.names.blocks import ID_BYTES, BlockId
from kakeya.prefix.names.fingerprint import Facts

MAGIC = b"KVB1"
HEADER_LIMIT_BYTES = 512 * KIB
"""A header has 3 KiB where a block has 256 tokens, and 180 KiB where a file has a history of
32,768; the checksums of 4 GiB take 40 KiB more."""
PART_BYTES = MIB
ALIGNMENT_BYTES = 64
_PROLOGUE = struct.Struct("<4sII")
_FIRST_READ_BYTES = 8 * KIB
_DIGEST_BYTES = 32
Payload = bytes | bytearray | memoryview


class DamagedBlock(ValueError):
    """The file is not as it was written, or was never a block."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredBlock:
    """The facts of a block beside its bytes. Raises InvalidArgument.

    `fingerprint` is the digest that seeds its id, `facts` are the texts that the digest was made
    of, for people. `packed_ids` are its tokens as `pack_ids` makes them, fewer than a block's in a
    tail. `created_at` is in wall seconds.
    """

    id: BlockId
    parent: BlockId
    fingerprint: bytes
    facts: Facts = field(hash=False)
    index: int
    packed_ids: bytes
    payload_bytes: int
    has_state: bool = False
    retention: Retention = Retention.LONG
    created_at: float = 0.0

    def __post_init__(self) -> None:
        for name in ("id", "parent", "fingerprint"):
            value: bytes = getattr(self, name)
            if len(value) != ID_BYTES:
                raise InvalidArgument(
                    f"the {name} of a block has {len(value)} bytes; it must have {ID_BYTES}"
                )
        if not self.packed_ids or len(self.packed_ids) % 4:
            raise InvalidArgument(
                f"the token ids of a block take {len(self.packed_ids)} bytes; they must take 4 each"
            )
        if self.index < 0 or self.payload_bytes < 1:
            raise InvalidArgument(
                f"block {self.index} with {self.payload_bytes} bytes; it must be block 0 or a "
                "later one, and have bytes"
            )

    @property
    def tokens(self) -> int:
        """How many tokens it holds."""
        return len(self.packed_ids) // 4

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Its tokens."""
        return tuple(unpack_ids(self.packed_ids))


@dataclass(frozen=True, slots=True, kw_only=True)
class HeaderSeal:
    """The part of a header that finds the payload behind it, and proves it."""

    payload_at: int
    part_crcs: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """The header in front of a payload: the block, and the proofs of its bytes."""

    block: StoredBlock
    seal: HeaderSeal


def written_bytes(block: StoredBlock) -> int:
    """Tell the size of the file of a block before it is written. Raises InvalidArgument."""
    return _file_bytes(block, len(_encode_head(block, [0] * len(_parts(block.payload_bytes)))))


def file_bytes(head: Head) -> int:
    """Tell the size of the file that begins so."""
    return _file_bytes(head.block, head.seal.payload_at)


def write_block(file: io.RawIOBase, block: StoredBlock, payload: Payload) -> Head:
    """Write a block to an empty file; the header in front of its payload.

    Raises InvalidArgument when the payload has another size or the header would be too long,
    OSError.
    """
    view = memoryview(payload).cast("B")
    if len(view) != block.payload_bytes:
        raise InvalidArgument(
            f"the payload of block {block.id.hex()} has {len(view)} bytes; "
            f"{block.payload_bytes} were announced"
        )
    parts = _parts(len(view))
    crcs = [zlib.crc32(view[first:last]) for first, last in parts]
    head = _encode_head(block, crcs)
    sha256 = hashlib.sha256(head)
    _write_all(file, head)
    for first, last in parts:
        sha256.update(view[first:last])
        _write_all(file, view[first:last])
    _write_all(file, sha256.digest())
    return Head(block=block, seal=_seal(head, crcs))


def read_head(
    file: io.RawIOBase, size: int, shared: MutableMapping[bytes, Facts] | None = None
) -> Head:
    """Read the header in front of the payload of a file of `size` bytes.

    Blocks of one fingerprint share the facts in `shared`, of which thousands have few. Raises
    DamagedBlock, OSError.
    """
    begin = _read_up_to(file, min(size, _FIRST_READ_BYTES))
    if len(begin) < _PROLOGUE.size:
        raise DamagedBlock(f"it has only {len(begin)} bytes")
    magic, length, crc = _PROLOGUE.unpack_from(begin)
    if magic != MAGIC:
        raise DamagedBlock(f"it begins with {magic!r} and not with {MAGIC!r}: no block of ours")
    if length > HEADER_LIMIT_BYTES:
        raise DamagedBlock(
            f"its header would have {length} bytes; at most {HEADER_LIMIT_BYTES} are allowed"
        )
    payload_at = _aligned(_PROLOGUE.size + length)
    raw = begin[:payload_at]
    if len(raw) < payload_at:
        raw += _read_up_to(file, payload_at - len(raw))
    text = raw[_PROLOGUE.size : _PROLOGUE.size + length]
    if len(raw) < payload_at or zlib.crc32(text) != crc:
        raise DamagedBlock("its header is cut off or damaged")
    block, part_crcs = _decode_header(text, {} if shared is None else shared)
    if size != _file_bytes(block, payload_at):
        raise DamagedBlock(
            f"it has {size} bytes; with its payload it must have {_file_bytes(block, payload_at)}"
        )
    return Head(block=block, seal=_seal(raw, part_crcs))


def read_sealed(
    file: io.FileIO,
    seal: HeaderSeal,
    into: memoryview,
    is_wanted: Callable[[], bool] = lambda: True,
) -> bool:
    """Read the payload of a file whose head was read some time ago, and prove it by its parts.

    As `read_payload`, but nothing else of the file is looked at. Raises DamagedBlock where the
    payload is not that of the head, though the file may be whole and have another head now.
    """
    file.seek(seal.payload_at)
    return _read_parts(file, seal, into, is_wanted, lambda _part: None)


def read_payload(
    file: io.FileIO, head: Head, into: memoryview, is_wanted: Callable[[], bool] = lambda: True
) -> bool:
    """Read the payload straight into `into`, which has its size, and prove it by SHA-256.

    Returns False when it was no longer wanted, asked before each part; `into` then holds anything.
    Raises DamagedBlock, and OSError.
    """
    if into.nbytes != head.block.payload_bytes:
        raise InvalidArgument(
            f"{into.nbytes} bytes were given for a payload of {head.block.payload_bytes}"
        )
    file.seek(0)
    sha256 = hashlib.sha256(_read_up_to(file, head.seal.payload_at))
    if not _read_parts(file, head.seal, into, is_wanted, sha256.update):
        return False
    trailer = bytearray(_DIGEST_BYTES)
    _read_exactly(file, memoryview(trailer))
    if trailer != sha256.digest():
        raise DamagedBlock("its SHA-256 is another one than its trailer says")
    return True


def _read_parts(
    file: io.FileIO,
    seal: HeaderSeal,
    into: memoryview,
    is_wanted: Callable[[], bool],
    seen: Callable[[memoryview], None],
) -> bool:
    crcs = seal.part_crcs
    for number, (first, last) in enumerate(_parts(into.nbytes)):
        if not is_wanted():
            return False
        part = into[first:last]
        _read_exactly(file, part)
        if zlib.crc32(part) != crcs[number]:
            raise DamagedBlock(f"part {number + 1} of {len(crcs)} is damaged")
        seen(part)
    return True


# The header.


def _encode_head(block: StoredBlock, part_crcs: list[int]) -> bytes:
    text = json.dumps(
        {
            "id": block.id.hex(),
            "parent": block.parent.hex(),
            "fingerprint": block.fingerprint.hex(),
            "facts": dict(block.facts),
            "index": block.index,
            "token_ids": base64.b64encode(block.packed_ids).decode(),
            "payload_bytes": block.payload_bytes,
            "has_state": block.has_state,
            "retention": block.retention.label,
            "created_at": block.created_at,
            "part_crc32": "".join(f"{crc:08x}" for crc in part_crcs),
        },
        sort_keys=True,
        separators=(",", ":"),
    ).encode()
    if len(text) > HEADER_LIMIT_BYTES:
        raise InvalidArgument(
            f"the header of block {block.id.hex()} has {len(text)} bytes; "
            f"at most {HEADER_LIMIT_BYTES} are allowed"
        )
    head = _PROLOGUE.pack(MAGIC, len(text), zlib.crc32(text)) + text
    return head.ljust(_aligned(len(head)), b"\0")


def _decode_header(
    text: bytes, shared: MutableMapping[bytes, Facts]
) -> tuple[StoredBlock, tuple[int, ...]]:
    try:
        tree = json.loads(text)
        fingerprint = bytes.fromhex(tree["fingerprint"])
        if fingerprint not in shared:
            shared[fingerprint] = _facts(tree["facts"])
        block = StoredBlock(
            id=bytes.fromhex(tree["id"]),
            parent=bytes.fromhex(tree["parent"]),
            fingerprint=fingerprint,
            facts=shared[fingerprint],
            index=int(tree["index"]),
            packed_ids=base64.b64decode(tree["token_ids"], validate=True),
            payload_bytes=int(tree["payload_bytes"]),
            has_state=bool(tree["has_state"]),
            retention=retention_named(tree["retention"]),
            created_at=float(tree["created_at"]),
        )
        crcs = bytes.fromhex(tree["part_crc32"])
    except InvalidArgument as wrong:
        raise DamagedBlock(f"its header cannot be meant: {wrong.message}") from None
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as wrong:
        raise DamagedBlock(f"its header lacks something: {wrong!r:.200}") from None
    parts = -(-block.payload_bytes // PART_BYTES)
    if len(crcs) != 4 * parts:
        raise DamagedBlock(f"its header has {len(crcs)} bytes of checksums for {parts} parts")
    return block, struct.unpack(f">{parts}I", crcs)


def _seal(raw: bytes, part_crcs: Sequence[int]) -> HeaderSeal:
    return HeaderSeal(payload_at=len(raw), part_crcs=tuple(part_crcs))


def _facts(tree: object) -> Facts:
    if not isinstance(tree, dict):
        raise TypeError("facts")
    return {str(name): value for name, value in tree.items() if isinstance(value, str | int)}


def pack_tokens(token_ids: Sequence[int]) -> bytes:
    """Pack token ids for a StoredBlock. Raises InvalidArgument."""
    try:
        return pack_ids(token_ids)
    except (OverflowError, TypeError):
        raise InvalidArgument("a token id of the block is outside 0..2^32-1") from None


# Bytes.


def _file_bytes(block: StoredBlock, head_bytes: int) -> int:
    return head_bytes + block.payload_bytes + _DIGEST_BYTES


def _parts(size: int) -> list[tuple[int, int]]:
    return [(first, min(first + PART_BYTES, size)) for first in range(0, size, PART_BYTES)]


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _write_all(file: io.RawIOBase, data: Payload) -> None:
    view = memoryview(data)
    while len(view):
        view = view[file.write(view) or 0 :]


def _read_up_to(file: io.RawIOBase, size: int) -> bytes:
    found = bytearray()
    while len(found) < size:
        more = file.read(size - len(found))
        if not more:
            break
        found += more
    return bytes(found)


def _read_exactly(file: io.FileIO, into: memoryview) -> None:
    while len(into):
        count = file.readinto(into)
        if not count:
            raise DamagedBlock("it ends before its payload does")
        into = into[count:]
