"""Histories in the store: found by content, under the name of their weights and server alone."""

from __future__ import annotations

import asyncio
import mmap
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from kakeya.backends.llama.archive import MOST_TOKENS, SlotArchive, packed_history
from kakeya.core.errors import PeerProtocol
from kakeya.core.units import pack_ids
from kakeya.generation.retention import Retention
from kakeya.prefix.names.weights import weights_digest, weights_state
from tests.fakes import FakeClock
from tests.prefix.disk.world import config_of, opened

MAGIC = 0x67677371


def written(tokens: list[int], kv: bytes = b"kv" * 50, *, is_old: bool = False) -> memoryview:
    """What llama-server writes of a slot."""
    ids = pack_ids(tokens)
    if not is_old:
        ids = pack_ids([0xFFFFFFFF, 1, len(tokens)]) + ids + pack_ids([0])
    return memoryview(struct.pack("<III", MAGIC, 2, len(ids) // 4) + ids + kv)


def weights(model: Path, state: str) -> asyncio.Future[str]:
    return asyncio.ensure_future(asyncio.to_thread(weights_digest, model, state))


@asynccontextmanager
async def archive(folder: Path, clock: FakeClock | None = None) -> AsyncIterator[SlotArchive]:
    async with opened(folder, clock=clock) as store:
        made = SlotArchive()
        made.open(store, weights)
        await made.ready()
        yield made


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"weights")
    return path


async def seed_of(made: SlotArchive, model: Path, *traits: str) -> bytes:
    state = await asyncio.to_thread(weights_state, model)
    return await made.seed("m", model, state, traits or ("b1",))


@pytest.mark.parametrize("is_old", [True, False])
def test_the_tokens_are_read_from_the_file_itself(is_old: bool) -> None:
    tokens = [7, 8, 9, 70_000]
    assert packed_history(written(tokens, is_old=is_old)) == pack_ids(tokens)


@pytest.mark.parametrize(
    "data", [b"", b"GGUF" * 20, bytes(written([1, 2, 3]))[:16], bytes(written([1, 2, 3]))[:28]]
)
def test_any_other_file_is_refused(data: bytes) -> None:
    with pytest.raises(PeerProtocol, match="the file of a slot"):
        packed_history(memoryview(data))


async def test_the_history_that_shares_most_is_found_after_a_restart(
    tmp_path: Path, model: Path
) -> None:
    async with archive(tmp_path) as made:
        seed = await seed_of(made, model)
        for tokens in ([1, 2, 3, 4], [1, 2, 9, 9, 9]):
            payload = written(tokens)
            assert await made.put(seed, "m", payload, Retention.LONG, 0.0) == len(tokens)
    async with archive(tmp_path) as again:
        assert await seed_of(again, model) == seed
        assert again.holds("m")
        assert not again.holds("other")
        found, shared = again.best(seed, pack_ids([1, 2, 3, 4, 5, 6]))
        assert found is not None
        assert (found.token_ids, shared) == ((1, 2, 3, 4), 4)
        into = memoryview(bytearray(found.payload_bytes))
        assert again.store is not None
        assert await again.store.read_into(found.id, into)
        assert into == written([1, 2, 3, 4])
        assert again.best(seed, pack_ids([5, 6]))[0] is None


async def test_other_weights_or_another_server_find_nothing(tmp_path: Path, model: Path) -> None:
    async with archive(tmp_path) as made:
        seed = await seed_of(made, model)
        await made.put(seed, "m", written([1, 2, 3]), Retention.LONG, 0.0)
        assert made.best(await seed_of(made, model, "b2"), pack_ids([1, 2, 3]))[0] is None
        await asyncio.to_thread(model.write_bytes, b"Weights")
        assert made.best(await seed_of(made, model), pack_ids([1, 2, 3]))[0] is None
        assert made.best(b"", pack_ids([1, 2, 3]))[0] is None


async def test_a_longer_history_takes_the_place_of_its_beginning(
    tmp_path: Path, model: Path
) -> None:
    async with archive(tmp_path) as made:
        seed = await seed_of(made, model)
        for tokens in ([1, 2, 3], [1, 9], [1, 2, 3, 4]):
            await made.put(seed, "m", written(tokens), Retention.LONG, 0.0)
        assert made.store is not None
        await made.store.flush()
        kept = {entry.block.token_ids for entry in made.store.entries()}
        assert kept == {(1, 9), (1, 2, 3, 4)}


async def test_the_longest_history_that_is_kept_fits_the_head_of_its_file(
    tmp_path: Path, model: Path
) -> None:
    async with archive(tmp_path) as made:
        seed = await seed_of(made, model)
        tokens = list(range(MOST_TOKENS))
        assert await made.put(seed, "m", written(tokens), Retention.LONG, 0.0)
        assert await made.put(seed, "m", written([*tokens, 1]), Retention.LONG, 0.0) == 0
        assert made.store is not None
        await made.store.flush()
        assert [entry.block.tokens for entry in made.store.entries()] == [MOST_TOKENS]


async def test_what_is_mapped_from_a_file_is_written_however_large(
    tmp_path: Path, model: Path
) -> None:
    """The queue of the store bounds memory, and this takes none."""
    large = tmp_path / "large"

    def mapped() -> memoryview:
        large.write_bytes(bytes(written([1, 2, 3], kv=bytes(5000))))
        with large.open("rb") as file:
            large.unlink()
            return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))

    async with opened(tmp_path, config_of(queue_bytes=1000)) as store:
        made = SlotArchive()
        made.open(store, weights)
        await made.ready()
        seed = await seed_of(made, model)
        view = await asyncio.to_thread(mapped)
        assert await made.put(seed, "m", view, Retention.LONG, 0.0) == 3
        await store.flush()
        assert [entry.block.payload_bytes for entry in store.entries()] == [view.nbytes]
        assert store.stats().counts.dropped == 0


async def test_without_a_store_nothing_is_kept(model: Path) -> None:
    made = SlotArchive()
    assert await seed_of(made, model) == b""
    assert await made.put(b"", "m", written([1]), Retention.LONG, 0.0) == 0
    await made.aclose(1.0)
