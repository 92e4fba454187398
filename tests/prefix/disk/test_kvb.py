"""The file of a block: whole, or found to be damaged; never something else."""

from __future__ import annotations

import io
import json
import struct
import zlib
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kakeya.core.errors import InvalidArgument
from kakeya.generation.retention import Retention
from kakeya.prefix.disk.kvb import (
    HEADER_LIMIT_BYTES,
    MAGIC,
    PART_BYTES,
    DamagedBlock,
    StoredBlock,
    file_bytes,
    pack_tokens,
    read_head,
    read_payload,
    read_sealed,
    write_block,
    written_bytes,
)
from tests.laws import law
from tests.prefix.disk.world import Made, block_of

ids = st.binary(min_size=32, max_size=32)
blocks = st.builds(
    StoredBlock,
    id=ids,
    parent=ids,
    fingerprint=ids,
    facts=st.dictionaries(st.text(max_size=20), st.text(max_size=40) | st.integers(), max_size=5),
    index=st.integers(0, 1 << 20),
    packed_ids=st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=64).map(pack_tokens),
    payload_bytes=st.integers(1, 300),
    has_state=st.booleans(),
    retention=st.sampled_from(Retention),
    created_at=st.floats(0, 4e9),
)


def written(made: Made) -> bytes:
    file = io.BytesIO()
    head = write_block(file, *made)
    data = file.getvalue()
    assert file_bytes(head) == len(data) == written_bytes(made[0])
    assert head == read_head(io.BytesIO(data), len(data))
    return data


def read(data: bytes, *, by_parts: bool = False) -> Made:
    file = io.BytesIO(data)
    head = read_head(file, len(data))
    room = bytearray(head.block.payload_bytes)
    if by_parts:
        assert read_sealed(file, head.seal, memoryview(room))  # type: ignore[arg-type]
    else:
        assert read_payload(file, head, memoryview(room))
    return head.block, bytes(room)


def forged(tree: object, payload: bytes = b"", *, length: int | None = None) -> bytes:
    """A file whose header has a right checksum, whatever it says."""
    text = tree if isinstance(tree, bytes) else json.dumps(tree).encode()
    head = struct.pack("<4sII", MAGIC, len(text) if length is None else length, zlib.crc32(text))
    return (head + text).ljust(-(-len(head + text) // 64) * 64, b"\0") + payload + bytes(32)


@given(blocks, st.data())
@settings(max_examples=60, deadline=None)
def test_a_block_comes_back_as_it_was_written(block: StoredBlock, data: st.DataObject) -> None:
    payload = data.draw(st.binary(min_size=block.payload_bytes, max_size=block.payload_bytes))
    for by_parts in (True, False):
        assert read(written((block, payload)), by_parts=by_parts) == (block, payload)


@pytest.mark.parametrize("size", [PART_BYTES - 1, PART_BYTES, PART_BYTES + 1, 3 * PART_BYTES])
def test_a_payload_of_any_number_of_parts_comes_back(size: int) -> None:
    made = block_of(size=size)
    for by_parts in (True, False):
        assert read(written(made), by_parts=by_parts) == made


def test_a_payload_lies_aligned_behind_its_header() -> None:
    made = block_of()
    data = written(made)
    assert data.index(made[1]) % 64 == 0
    assert data.startswith(MAGIC)


@given(st.data())
@law(1200)
def test_a_flip_of_any_byte_is_found(data: st.DataObject) -> None:
    whole = bytearray(written(block_of(size=data.draw(st.sampled_from([1, 64, 500])))))
    at = data.draw(st.integers(0, len(whole) - 1))
    whole[at] ^= data.draw(st.integers(1, 255))
    with pytest.raises(DamagedBlock):
        read(bytes(whole))


def test_a_flip_of_every_single_bit_is_found() -> None:
    good = written(block_of(size=40))
    for bit in range(8 * len(good)):
        data = bytearray(good)
        data[bit // 8] ^= 1 << bit % 8
        with pytest.raises(DamagedBlock):
            read(bytes(data))


def test_the_parts_prove_every_byte_of_a_payload() -> None:
    good = written(block_of(size=40))
    at = len(good) - 32 - 40
    for bit in range(8 * at, 8 * (at + 40)):
        data = bytearray(good)
        data[bit // 8] ^= 1 << bit % 8
        with pytest.raises(DamagedBlock, match="part 1 of 1 is damaged"):
            read(bytes(data), by_parts=True)


def test_what_a_head_told_of_is_read_without_it_and_nothing_else_is() -> None:
    made = block_of(size=3 * PART_BYTES)
    good = written(made)
    seal = read_head(io.BytesIO(good), len(good)).seal
    file, room = io.BytesIO(good), bytearray(len(made[1]))
    assert read_sealed(file, seal, memoryview(room))  # type: ignore[arg-type]
    assert bytes(room) == made[1]
    others = (
        b"",
        good[: seal.payload_at],
        good[:-33],
        written(block_of(1, size=3 * PART_BYTES)),
        written((replace(made[0], facts={"model_id": "x" * 200}), made[1])),
    )
    for data in others:
        with pytest.raises(DamagedBlock):
            read_sealed(io.BytesIO(data), seal, memoryview(room))  # type: ignore[arg-type]


def test_damage_to_a_header_is_found_without_reading_the_payload() -> None:
    good = written(block_of(size=40))
    length = struct.unpack_from("<I", good, 4)[0]
    for at in range(12 + length):
        data = bytearray(good)
        data[at] ^= 1
        with pytest.raises(DamagedBlock):
            read_head(io.BytesIO(data), len(data))


def test_a_file_that_is_cut_off_anywhere_is_found() -> None:
    good = written(block_of(size=200))
    for length in range(len(good)):
        with pytest.raises(DamagedBlock):
            read(good[:length])
    with pytest.raises(DamagedBlock):
        read(good + b"\0")


def test_damage_is_said_with_its_part() -> None:
    data = bytearray(written(block_of(size=3 * PART_BYTES)))
    data[-32 - PART_BYTES - 5] ^= 1
    for by_parts in (True, False):
        with pytest.raises(DamagedBlock, match="part 2 of 3 is damaged"):
            read(bytes(data), by_parts=by_parts)


def test_parts_in_another_order_are_found() -> None:
    data = written(block_of(size=2 * PART_BYTES))
    at = len(data) - 32 - 2 * PART_BYTES
    swapped = (
        data[:at]
        + data[at + PART_BYTES : at + 2 * PART_BYTES]
        + data[at : at + PART_BYTES]
        + data[-32:]
    )
    with pytest.raises(DamagedBlock):
        read(swapped)


@given(st.binary(max_size=300), st.booleans())
@settings(deadline=None)
def test_foreign_bytes_are_no_block(data: bytes, with_magic: bool) -> None:
    with pytest.raises(DamagedBlock):
        read(MAGIC + data if with_magic else data)


@pytest.mark.parametrize("length", [HEADER_LIMIT_BYTES + 1, 2**32 - 1])
def test_a_header_that_is_too_long_is_never_read(length: int) -> None:
    class Watched(io.BytesIO):
        asked = 0

        def read(self, size: int | None = -1, /) -> bytes:
            Watched.asked += size or 0
            return super().read(size)

    data = forged(b"{}", length=length).ljust(1 << 20, b"\0")
    with pytest.raises(
        DamagedBlock, match=f"would have {length} bytes; at most {HEADER_LIMIT_BYTES}"
    ):
        read_head(Watched(data), len(data))
    assert Watched.asked <= 8192


def header_of(made: Made) -> dict[str, object]:
    data = written(made)
    length = struct.unpack_from("<I", data, 4)[0]
    tree = json.loads(data[12 : 12 + length])
    assert isinstance(tree, dict)
    return tree


@pytest.mark.parametrize("size", [2**62, 10**400, 0, -5, 1.5e300, "many", None, [1]])
def test_a_header_that_lies_about_its_payload_is_found_before_anything_is_read(
    size: object,
) -> None:
    tree = header_of(block_of()) | {"payload_bytes": size}
    data = forged(tree, b"x" * 1000)
    with pytest.raises(DamagedBlock):
        read_head(io.BytesIO(data), len(data))


@given(st.data())
@settings(deadline=None)
def test_a_header_with_any_field_wrong_is_damage(data: st.DataObject) -> None:
    made = block_of(size=50)
    tree = header_of(made)
    name = data.draw(st.sampled_from(sorted(tree)))
    if data.draw(st.booleans()):
        del tree[name]
    else:
        scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9)
        tree[name] = data.draw(scalars | st.lists(scalars, max_size=2))
    whole = forged(tree, made[1])
    # The trailer is not right for any of them.
    with pytest.raises(DamagedBlock):
        read(whole)


@pytest.mark.parametrize("text", [b"[" * 60_000, b"null", b"[]", b"{}", b'"x"', b"\xff\xfe", b""])
def test_a_header_that_is_no_header_is_damaged(text: bytes) -> None:
    with pytest.raises(DamagedBlock):
        read(forged(text))


def test_blocks_of_one_fingerprint_share_their_facts() -> None:
    shared: dict[bytes, object] = {}
    heads = []
    for seed in range(2):
        data = written(block_of(seed))
        heads.append(read_head(io.BytesIO(data), len(data), shared))  # type: ignore[arg-type]
    assert heads[0].block.facts is heads[1].block.facts
    assert len(shared) == 1


def test_reading_ends_when_nobody_wants_it_any_more() -> None:
    data = written(block_of(size=4 * PART_BYTES))
    file = io.BytesIO(data)
    head = read_head(file, len(data))
    room = bytearray(head.block.payload_bytes)
    answers = iter([True, True, False])
    assert not read_payload(file, head, memoryview(room), lambda: next(answers))
    assert room[2 * PART_BYTES :] == bytes(2 * PART_BYTES)


def test_what_cannot_be_written_is_refused() -> None:
    block, payload = block_of()
    with pytest.raises(InvalidArgument, match=r"has 999 bytes; 1000 were announced"):
        write_block(io.BytesIO(), block, payload[:-1])
    long = replace(block, facts={"layout": "x" * HEADER_LIMIT_BYTES})
    with pytest.raises(InvalidArgument, match=f"at most {HEADER_LIMIT_BYTES} are allowed"):
        write_block(io.BytesIO(), long, payload)
    data = written((block, payload))
    file = io.BytesIO(data)
    with pytest.raises(InvalidArgument, match="999 bytes were given for a payload of 1000"):
        read_payload(file, read_head(file, len(data)), memoryview(bytearray(999)))


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("id", b"short", "id of a block has 5 bytes; it must have 32"),
        ("parent", b"", "parent of a block has 0 bytes"),
        ("fingerprint", bytes(33), "fingerprint of a block has 33 bytes"),
        ("packed_ids", b"", "token ids of a block take 0 bytes"),
        ("packed_ids", b"12345", "token ids of a block take 5 bytes"),
        ("index", -1, "block -1 with 1000 bytes"),
        ("payload_bytes", 0, "block 0 with 0 bytes"),
    ],
)
def test_a_block_that_cannot_be_meant_is_refused(field: str, value: object, said: str) -> None:
    block, _ = block_of()
    with pytest.raises(InvalidArgument, match=said):
        replace(block, **{field: value})  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="outside"):
        pack_tokens([1, -1])


def test_a_block_knows_its_tokens() -> None:
    block = replace(block_of()[0], packed_ids=pack_tokens([1, 2**32 - 1, 3]))
    assert block.token_ids == (1, 2**32 - 1, 3)
    assert block.tokens == 3
