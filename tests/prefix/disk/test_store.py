"""The store of blocks as its users see it: what goes in comes out, once and whole, or is missed."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import resource
import stat
import threading
from collections.abc import Collection, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from kakeya.core.errors import ConfigError, InvalidArgument
from kakeya.core.units import MIB
from kakeya.generation.retention import Retention
from kakeya.prefix.disk.files import QUARANTINE
from kakeya.prefix.disk.index import FileEntry, IndexView, victims
from kakeya.prefix.disk.kvb import HEADER_LIMIT_BYTES
from kakeya.prefix.disk.store import BlockStore
from kakeya.prefix.names.blocks import BlockId
from tests.fakes import FakeClock
from tests.prefix.disk.world import Made, block_of, chain_of, config_of, opened

MINUTE = 60.0


def file_of(folder: Path, block_id: BlockId) -> Path:
    (path,) = (folder / "kv").glob(f"*/{block_id.hex()}.*")
    return path


def names(folder: Path) -> set[str]:
    return {path.name for path in (folder / "kv").glob("??/*")}


async def put_all(store: BlockStore, made: Collection[Made]) -> None:
    for block, payload in made:
        assert await store.put(block, payload)
    await store.flush()


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


@contextlib.contextmanager
def small_files() -> Iterator[None]:
    """No file may become larger than 4 KiB, as on a disk that is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


# What goes in comes out.


async def test_what_was_put_is_there_after_a_restart(tmp_path: Path) -> None:
    blocks = chain_of(3)
    async with opened(tmp_path) as store:
        for block, payload in blocks:
            assert await store.put(block, payload)
    found: list[BlockId] = []
    async with opened(tmp_path, stored=found.extend) as store:
        await store.ready()
        assert found == [block.id for block, _ in blocks], "parents first"
        assert set(store.ids()) == set(found)
        assert {entry.block for entry in store.entries()} == {block for block, _ in blocks}
        for block, payload in blocks:
            assert store.block(block.id) == block
            assert await store.get(block.id) == (block, payload)
            room = bytearray(len(payload))
            assert await store.read_into(block.id, memoryview(room))
            assert room == payload


async def test_what_waits_to_be_written_is_there_at_once(tmp_path: Path) -> None:
    block, payload = block_of()
    async with opened(tmp_path) as store:
        await store.put(block, payload)
        assert store.has(block.id)
        assert await store.get(block.id) == (block, payload)


async def test_the_same_block_put_twice_is_one_write(tmp_path: Path) -> None:
    block, payload = block_of()
    async with opened(tmp_path) as store:
        taken = await asyncio.gather(*(store.put(block, payload) for _ in range(9)))
        await store.flush()
        assert not await store.put(block, payload)
        await store.flush()
        assert sum(taken) == 1
        assert store.stats().counts.writes == 1
    async with opened(tmp_path) as store:
        assert await store.put(block, payload), "the folder was not looked through yet"
        await store.flush()
        assert store.stats().counts.writes == 0


async def test_a_block_is_written_again_when_it_comes_with_its_state(tmp_path: Path) -> None:
    block, payload = block_of(retention=Retention.SHORT)
    whole = replace(block, has_state=True, payload_bytes=1200, retention=Retention.LONG)
    async with opened(tmp_path) as store:
        await put_all(store, [(block, payload)])
        assert await store.put(whole, payload + bytes(200))
        await store.flush()
        assert await store.get(block.id) == (whole, payload + bytes(200))
        assert not await store.put(block, payload), "the state is not lost again"
    assert names(tmp_path) == {f"{block.id.hex()}.long.kvb"}


async def test_an_unknown_block_is_a_miss(tmp_path: Path) -> None:
    async with opened(tmp_path) as store:
        assert await store.get(bytes(32)) is None
        assert not await store.read_into(bytes(32), memoryview(bytearray(5)))
        assert not store.has(bytes(32))
        assert store.stats().counts.misses == 2


async def test_a_view_of_another_size_is_a_miss_and_no_damage(tmp_path: Path) -> None:
    block, payload = block_of()
    async with opened(tmp_path) as store:
        await store.put(block, payload)
        assert not await store.read_into(block.id, memoryview(bytearray(999)))
        await store.flush()
        assert not await store.read_into(block.id, memoryview(bytearray(1001)))
        assert await store.get(block.id) == (block, payload)
        with pytest.raises(InvalidArgument, match="came with 999 bytes; 1000 were announced"):
            await store.put(*block_of(1)[:1], payload[:-1])
    assert not (tmp_path / "kv" / QUARANTINE).exists()


async def test_many_at_once_get_what_was_put_or_nothing(tmp_path: Path) -> None:
    made = [block_of(seed, size=rng_size) for seed, rng_size in enumerate([10, 999, 70_000] * 5)]
    rng = random.Random(3)
    config = config_of(400_000, queue_bytes=150_000)

    async def live(store: BlockStore) -> int:
        hits = 0
        for _ in range(30):
            block, payload = rng.choice(made)
            match rng.randrange(5):
                case 0 | 1:
                    await store.put(block, payload)
                case 2:
                    store.forget([block.id])
                case 3:
                    store.touch([block.id], rng.choice(list(Retention)))
                    await store.sweep()
                case _:
                    found = await store.get(block.id)
                    assert found is None or found == (found[0], payload)
                    hits += found is not None
        return hits

    async with opened(tmp_path, config) as store:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(live(store)) for _ in range(12)]
        assert sum(task.result() for task in tasks) > 10
        await store.sweep()
        await store.flush()
        assert store.stats().used_bytes <= config.cap_bytes
        assert names(tmp_path) == {entry.name for entry in store.entries()}
        sizes = [file_of(tmp_path, entry.block.id).stat().st_size for entry in store.entries()]
        assert sum(sizes) == store.stats().used_bytes
        assert store.stats().counts.damaged == 0


# A payload that is lent.


async def test_a_lent_payload_is_given_back_once_whatever_becomes_of_the_block(
    tmp_path: Path,
) -> None:
    given_back: list[str] = []
    block, payload = block_of(0)
    async with opened(tmp_path, config_of(queue_bytes=2500)) as store:
        pages = memoryview(payload).toreadonly()
        await store.put(block, pages, lambda: given_back.append("written"))
        assert given_back == []
        await store.flush()
        await store.put(block, pages, lambda: given_back.append("known"))
        assert given_back == ["written", "known"]
        for seed, name in enumerate(["dropped", "forgotten", "kept"], start=1):
            one, bytes_ = block_of(seed)
            await store.put(one, bytes_, lambda name=name: given_back.append(name))
        assert given_back[2:] == ["dropped"], "the oldest of what waits"
        store.forget([block_of(2)[0].id])
        assert given_back[3:] == ["forgotten"]
        large, bytes_ = block_of(4, size=3000)
        assert not await store.put(large, bytes_, lambda: given_back.append("too large"))
        assert given_back[4:] == ["too large"]
    assert given_back[5:] == ["kept"]
    assert not await store.put(*block_of(7), lambda: given_back.append("closed"))
    assert given_back[6:] == ["closed"]
    assert len(names(tmp_path)) == 2


async def test_a_lent_payload_is_not_given_back_while_it_is_read(tmp_path: Path) -> None:
    (stored, first, second) = (block_of(seed, size=8 * MIB) for seed in range(3))
    pages = bytearray(second[1])

    def reuse() -> None:
        pages[:] = bytes(len(pages))  # given back, pages hold something else at once

    async with opened(tmp_path, config_of(readers=1)) as store:
        await put_all(store, [stored])
        await store.put(*first)
        await store.put(second[0], memoryview(pages), reuse)
        before = asyncio.ensure_future(store.get(stored[0].id))  # keeps the only reader busy
        reading = asyncio.ensure_future(store.get(second[0].id))
        await asyncio.sleep(0)
        store.forget([second[0].id])
        assert not store.has(second[0].id)
        assert await before == stored
        assert await reading == second
        assert not any(pages)


async def test_a_cancelled_reader_gets_nothing_written_into_its_pages_later(
    tmp_path: Path,
) -> None:
    made = block_of(size=24 * MIB)
    async with opened(tmp_path, config_of(readers=1)) as store:
        await put_all(store, [made])
        for turns in range(4):
            pages = bytearray(24 * MIB)
            reading = asyncio.ensure_future(store.read_into(made[0].id, memoryview(pages)))
            for _ in range(turns * 20):
                await asyncio.sleep(0)
            reading.cancel()
            await asyncio.sleep(0)
            reading.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await reading
            pages[:] = b"\x55" * len(pages)
            assert await store.get(made[0].id) == made  # the only reading thread is free again
            assert pages == b"\x55" * len(pages)


# Damage.


@pytest.mark.parametrize("at", [0, 5, 40, -500, -1])
async def test_a_damaged_file_is_a_miss_and_can_be_written_again(tmp_path: Path, at: int) -> None:
    block, payload = block_of()
    lost: list[BlockId] = []
    async with opened(tmp_path, lost=lost.extend) as store:
        await put_all(store, [(block, payload)])
        flip(file_of(tmp_path, block.id), at)
        assert await store.get(block.id) is None
        assert lost == [block.id]
        assert not store.has(block.id)
        assert store.stats().counts.damaged == 1
        assert len(list((tmp_path / "kv" / QUARANTINE).iterdir())) == 1
        await put_all(store, [(block, payload)])
        assert await store.get(block.id) == (block, payload)


@pytest.mark.parametrize("at", [-1032, -500, -33])
async def test_pages_are_filled_with_nothing_that_is_damaged(tmp_path: Path, at: int) -> None:
    block, payload = block_of()
    lost: list[BlockId] = []
    async with opened(tmp_path, lost=lost.extend) as store:
        await put_all(store, [(block, payload)])
        flip(file_of(tmp_path, block.id), at)
        assert not await store.read_into(block.id, memoryview(bytearray(1000)))
        assert (lost, store.stats().counts.damaged) == ([block.id], 1)
        assert len(list((tmp_path / "kv" / QUARANTINE).iterdir())) == 1


async def test_what_is_read_for_others_is_proven_by_more_than_checksums(tmp_path: Path) -> None:
    block, payload = block_of()
    async with opened(tmp_path) as store:
        await put_all(store, [(block, payload)])
        flip(file_of(tmp_path, block.id), -1)  # of the SHA-256 itself
        room = bytearray(1000)
        assert await store.read_into(block.id, memoryview(room))
        assert bytes(room) == payload
        assert await store.get(block.id) is None


async def test_a_file_that_somebody_replaced_is_read_as_it_is_now(tmp_path: Path) -> None:
    block, payload = block_of()
    newer = (replace(block, created_at=1_800_000_000.0), payload[::-1])
    async with opened(tmp_path) as store, opened(tmp_path / "other") as other:
        await put_all(store, [(block, payload)])
        await put_all(other, [newer])
        file_of(tmp_path / "other", block.id).replace(file_of(tmp_path, block.id))
        room = bytearray(1000)
        assert await store.read_into(block.id, memoryview(room))
        assert bytes(room) == newer[1]
        assert await store.get(block.id) == newer


async def test_a_damaged_folder_costs_only_what_is_damaged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = [block_of(seed) for seed in range(4)]
    async with opened(tmp_path) as store:
        await put_all(store, made)
    file_of(tmp_path, made[0][0].id).write_bytes(b"foreign")
    file_of(tmp_path, made[1][0].id).write_bytes(b"KVB1" + b"\xff" * 4000)
    flip(file_of(tmp_path, made[2][0].id), -1)
    with caplog.at_level(logging.WARNING):
        async with opened(tmp_path) as store:
            await store.ready()
            assert len(store.ids()) == 2
            assert await store.get(made[3][0].id) == made[3]
            found = await store.verify()
            assert (found.blocks, len(found.damage)) == (1, 1)
            assert store.ids() == (made[3][0].id,)
            assert store.stats().counts.damaged == 3
            assert store.stats().counts.quarantined == 3
    said = [record for record in caplog.records if "set aside" in record.getMessage()]
    assert len(said) == 2, "once for all that a start finds, once for the rest"


async def test_what_somebody_else_removed_is_a_miss(tmp_path: Path) -> None:
    made = [block_of(seed) for seed in range(3)]
    lost: list[BlockId] = []
    async with opened(tmp_path, lost=lost.extend) as store:
        await put_all(store, made)
        file_of(tmp_path, made[0][0].id).unlink()
        assert await store.get(made[0][0].id) is None
        assert lost == [made[0][0].id]
        file_of(tmp_path, made[1][0].id).unlink()
        await store.sweep()
        assert lost == [made[0][0].id, made[1][0].id]
        assert store.ids() == (made[2][0].id,)
        assert store.stats().counts.damaged == 0


# Lives.


async def test_a_conversation_that_is_used_outlives_its_window(tmp_path: Path) -> None:
    clock = FakeClock()
    made = chain_of(3)
    idle, _ = block_of(50)
    async with opened(tmp_path, clock=clock) as store:
        await put_all(store, [*made, block_of(50)])
        for turn in range(5):
            clock.advance(50 * MINUTE)
            if turn % 2:
                store.touch([made[2][0].id])  # in memory; its prefix lives with it
            else:
                assert await store.get(made[2][0].id) is not None
            await store.sweep()
            assert set(store.ids()) >= {block.id for block, _ in made}
        assert not store.has(idle.id)
        assert store.stats().counts.expired == 1
    clock.advance(50 * MINUTE)
    async with opened(tmp_path, clock=clock) as store:
        await store.ready()
        await store.sweep()
        assert len(store.ids()) == 3, "the files show when they were used"
        clock.advance(61 * MINUTE)
        await store.sweep()
        assert store.ids() == ()
    assert names(tmp_path) == set()


@pytest.mark.parametrize("retention", Retention)
async def test_each_retention_lasts_its_window_also_across_a_restart(
    tmp_path: Path, retention: Retention
) -> None:
    clock = FakeClock()
    block, payload = block_of(retention=retention)
    async with opened(tmp_path, clock=clock) as store:
        await put_all(store, [(block, payload)])
    assert names(tmp_path) == {f"{block.id.hex()}.{retention.label}.kvb"}
    clock.advance(retention.seconds - 1)
    async with opened(tmp_path, clock=clock) as store:
        await store.sweep()
        assert store.has(block.id)
    clock.advance(2)
    async with opened(tmp_path, clock=clock) as store:
        await store.sweep()
        assert not store.has(block.id)


async def test_a_longer_retention_is_taken_over_and_kept(tmp_path: Path) -> None:
    block, payload = block_of(retention=Retention.SHORT)
    async with opened(tmp_path) as store:
        await put_all(store, [(block, payload)])
        store.touch([block.id], Retention.EXTENDED)
        store.touch([block.id], Retention.SHORT)
        await store.sweep()
        assert names(tmp_path) == {f"{block.id.hex()}.extended.kvb"}
        assert await store.get(block.id) == (block, payload)
    async with opened(tmp_path) as store:
        await store.ready()
        assert store.entries()[0].retention is Retention.EXTENDED
        assert store.stats().by_retention == {"extended": 1}


@pytest.mark.parametrize("what", ["forgotten", "evicted", "written anew", "read"])
async def test_a_file_that_is_named_anew_meanwhile_is_not_lost_from_sight(
    tmp_path: Path, what: str
) -> None:
    """Its new name is on disk a moment before the store knows of it; a file that nobody knows of
    would stay above the cap for good."""
    block, payload = block_of(retention=Retention.SHORT)
    whole = replace(block, has_state=True, payload_bytes=1200, retention=Retention.LONG)
    async with opened(tmp_path, config_of(cap_bytes=4000)) as store:
        await store.put(block, payload)
        await store.flush()
        store.touch((block.id,), Retention.EXTENDED)
        (entry,) = store.entries()
        tell = partial(store._folder.tell, entry.name, block.id, Retention.EXTENDED, 0.0)
        assert (await store._threads.write(tell)).endswith(".extended.kvb")
        assert store.entries() == (entry,), "it has not heard of that"
        match what:
            case "forgotten":
                store.forget((block.id,))
            case "evicted":
                other, content = block_of(1, size=3000)
                await store.put(other, content)
            case "written anew":
                await store.put(whole, bytes(1200))
            case _:
                assert await store.get(block.id) == (block, payload)
        await store.flush()
        await store._threads.write(lambda: None)
        known = {entry.block.id.hex() for entry in store.entries()}
        assert sorted(name.split(".")[0] for name in names(tmp_path)) == sorted(known)
        assert (block.id.hex() in known) == (what in ("written anew", "read"))


async def test_a_retention_that_grows_while_a_block_waits_is_written(tmp_path: Path) -> None:
    block, payload = block_of(retention=Retention.SHORT)
    async with opened(tmp_path) as store:
        await store.put(block, payload)
        store.touch([block.id], Retention.LONG)
        await store.put(replace(block, retention=Retention.EXTENDED), payload)
    assert names(tmp_path) == {f"{block.id.hex()}.extended.kvb"}


async def test_a_wall_clock_that_jumps_kills_nothing_and_keeps_nothing(tmp_path: Path) -> None:
    clock = FakeClock()
    async with opened(tmp_path, clock=clock) as store:
        await put_all(store, [block_of()])
        clock.shift_wall(1e9)
        await store.sweep()
        assert len(store.ids()) == 1
        await put_all(store, [block_of(1)])
        clock.shift_wall(-1e9)
    async with opened(tmp_path, clock=clock) as store:
        await store.ready()
        clock.advance(59 * MINUTE)
        await store.sweep()
        assert len(store.ids()) == 2
        clock.advance(2 * MINUTE)
        await store.sweep()
        assert store.ids() == (), "one from the future was used at the start, at the latest"


# Room.


async def test_the_cap_holds_on_every_write_and_at_a_start(tmp_path: Path) -> None:
    clock = FakeClock()
    made = [block_of(seed, size=10_000) for seed in range(30)]
    lost: list[BlockId] = []
    async with opened(tmp_path, config_of(100_000), clock=clock, lost=lost.extend) as store:
        for one in made:
            clock.advance(1)
            await put_all(store, [one])
            assert store.stats().used_bytes <= 100_000
        assert lost == [block.id for block, _ in made[: len(lost)]], "the oldest first"
        assert len(store.ids()) + len(lost) == 30
        assert store.stats().counts.evicted == len(lost)
        assert await store.get(made[-1][0].id) == made[-1]
        assert not await store.get(made[0][0].id)
    async with opened(tmp_path, config_of(35_000), clock=clock) as store:
        await store.ready()
        await store.sweep()
        assert set(store.ids()) == {block.id for block, _ in made[-3:]}
    sizes = [path.stat().st_size for path in (tmp_path / "kv").rglob("*.kvb")]
    assert sum(sizes) <= 35_000


async def test_blocks_of_models_that_are_not_here_go_first(tmp_path: Path) -> None:
    clock = FakeClock()
    ours = chain_of(3, size=10_000)
    theirs = chain_of(3, seed=50, size=10_000, fingerprint=b"t" * 32)
    here = {ours[0][0].fingerprint}
    config = config_of(70_000, headroom=0.0)
    async with opened(tmp_path, config, clock=clock, usable=lambda _: here) as store:
        await put_all(store, ours)
        clock.advance(60)
        await put_all(store, theirs)
        uses = {use.fingerprint: use for use in store.stats().by_fingerprint}
        assert uses[ours[0][0].fingerprint.hex()].is_usable
        assert not uses[theirs[0][0].fingerprint.hex()].is_usable
        await put_all(store, [block_of(90, size=10_000), block_of(91, size=10_000)])
        gone = {block.id for block, _ in theirs} - set(store.ids())
        assert gone == {theirs[2][0].id, theirs[1][0].id}, "leaves first"
        await put_all(store, [block_of(seed, size=10_000) for seed in range(92, 94)])
        assert not store.has(ours[2][0].id), "then what was used longest ago"
        assert not store.has(theirs[0][0].id)


async def test_others_go_where_what_was_to_go_is_used_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = FakeClock()
    made = [block_of(seed, size=10_000) for seed in range(4)]
    async with opened(tmp_path, config_of(35_000, headroom=0.0), clock=clock) as store:
        for one in made[:3]:
            clock.advance(60)
            await put_all(store, [one])
        loop, touched = asyncio.get_running_loop(), list[BlockId]()

        def chosen(view: IndexView, need_bytes: int, now_mono: float) -> list[FileEntry]:
            going = victims(view, need_bytes, now_mono)
            if not touched:
                touched.extend(entry.block.id for entry in going)
                loop.call_soon_threadsafe(store.touch, touched)
            return going

        monkeypatch.setattr("kakeya.prefix.disk.upkeep.victims", chosen)
        clock.advance(60)
        await put_all(store, made[3:])
        assert touched == [made[0][0].id]
        assert set(store.ids()) == {made[at][0].id for at in (0, 2, 3)}
        assert not store.stats().trouble


async def test_what_is_held_stays_when_room_is_needed(tmp_path: Path) -> None:
    made = [block_of(seed, size=10_000) for seed in range(6)]
    async with opened(tmp_path, config_of(35_000)) as store:
        let_go = store.hold([made[0][0].id])
        await put_all(store, made[:1])
        for one in made[1:]:
            await store.put(*one)
        await store.flush()
        assert store.has(made[0][0].id)
        let_go()
        let_go()
        await put_all(store, [block_of(9, size=10_000), block_of(10, size=10_000)])
        assert not store.has(made[0][0].id)


async def test_a_block_larger_than_the_cap_is_skipped(tmp_path: Path) -> None:
    async with opened(tmp_path, config_of(5000)) as store:
        await store.put(*block_of(0, size=6000))
        await store.flush()
        assert store.ids() == ()
        assert store.stats().counts.skipped == 1
        assert "more do not fit" in store.stats().trouble


async def test_the_store_gives_way_when_the_disk_is_to_stay_free(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = [block_of(seed) for seed in range(4)]
    async with opened(tmp_path) as store:
        await put_all(store, made[:3])
    with caplog.at_level(logging.WARNING):
        config = config_of(keep_free_bytes=1 << 60)
        async with opened(tmp_path, config) as store:
            await store.sweep()
            assert store.ids() == ()
            await store.put(*made[3])
            await store.flush()
            await store.put(*made[3])
            assert store.stats().counts.skipped == 2
    assert names(tmp_path) == set()
    assert len([one for one in caplog.records if "going on without" in one.getMessage()]) == 1


async def test_what_comes_faster_than_the_disk_drops_the_oldest(tmp_path: Path) -> None:
    made = [block_of(seed) for seed in range(10)]
    async with opened(tmp_path, config_of(queue_bytes=3000)) as store:
        for one in made:
            assert await store.put(*one)
        assert store.stats().queued == 3
        assert store.stats().queued_bytes == 3000
        await store.flush()
        assert set(store.ids()) == {block.id for block, _ in made[-3:]}
        assert store.stats().counts.dropped == 7


# A disk that fails.


async def test_a_full_disk_is_counted_said_once_and_tried_again_later(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clock = FakeClock()
    small, large = block_of(0), [block_of(seed, size=9000) for seed in range(1, 5)]
    with caplog.at_level(logging.INFO):
        async with opened(tmp_path, config_of(retry_s=(5.0, 30.0)), clock=clock) as store:
            await put_all(store, [small])
            with small_files():
                for one in large:
                    await store.put(*one)
                await store.flush()
                counts = store.stats().counts
                assert (counts.writes, counts.write_failures, counts.skipped) == (1, 1, 3)
                assert "File too large" in store.stats().trouble
                assert not await store.put(*large[0]), "not tried for a while"
                clock.advance(6)
                await store.put(*large[0])
                await store.flush()
                assert store.stats().counts.write_failures == 2
                clock.advance(6)
                assert not await store.put(*large[0]), "the second wait is longer"
                assert await store.get(small[0].id) == small, "what is there can be read"
            clock.advance(30)
            await put_all(store, [large[0]])
            assert store.stats().trouble == ""
    assert len(names(tmp_path)) == 2, "nothing is left of what failed"
    said = [one.getMessage() for one in caplog.records if "stored KV can" in one.getMessage()]
    assert said == [
        "stored KV cannot be written; going on without",
        "stored KV can be written again",
    ]


async def test_a_folder_that_cannot_be_made_costs_only_misses(tmp_path: Path) -> None:
    clock = FakeClock()
    (tmp_path / "kv").write_text("in the way")
    async with opened(tmp_path, clock=clock) as store:
        await store.ready()
        await store.put(*block_of())
        await store.flush()
        await store.sweep()
        assert await store.get(block_of()[0].id) is None
        assert (await store.wipe()).kept == (f"{tmp_path / 'kv'}: Not a directory",)
        assert store.stats().trouble
        (tmp_path / "kv").unlink()
        clock.advance(60)
        await put_all(store, [block_of()])
        await store.sweep()
        assert store.stats().trouble == ""


async def test_a_folder_that_can_be_read_only_later_is_looked_through_then(tmp_path: Path) -> None:
    made = [block_of(seed) for seed in range(2)]
    async with opened(tmp_path) as store:
        await put_all(store, made[:1])
    (tmp_path / "kv").rename(tmp_path / "away")
    (tmp_path / "kv").write_text("in the way")
    async with opened(tmp_path) as store:
        await store.sweep()  # behind the one that a start makes: that could look in between
        assert store.ids() == ()
        (tmp_path / "kv").unlink()
        (tmp_path / "away").rename(tmp_path / "kv")
        await put_all(store, made[1:])
        await store.sweep()
        assert set(store.ids()) == {block.id for block, _ in made}
        assert store.stats().trouble == ""


async def test_a_header_that_cannot_be_written_costs_only_its_block(tmp_path: Path) -> None:
    block, payload = block_of()
    async with opened(tmp_path) as store:
        await store.put(replace(block, facts={"layout": "x" * HEADER_LIMIT_BYTES}), payload)
        await put_all(store, [block_of(1)])
        assert store.ids() == (block_of(1)[0].id,)
        assert store.stats().counts.skipped == 1


# Going.


async def test_what_is_forgotten_goes_wherever_it_is(tmp_path: Path) -> None:
    made = [block_of(seed, size=200_000) for seed in range(3)]
    async with opened(tmp_path) as store:
        await put_all(store, made[:1])
        await store.put(*made[1])
        while store.stats().queued and not store._writer._writing:
            await asyncio.sleep(0)
        await store.put(*made[2])
        store.forget([block.id for block, _ in made] + [bytes(32)])
        assert not any(store.has(block.id) for block, _ in made)
        assert [await store.get(block.id) for block, _ in made] == [None] * 3
        await store.flush()
        assert store.ids() == ()
        assert await store.put(*made[1])
    assert names(tmp_path) == {f"{made[1][0].id.hex()}.long.kvb"}


async def test_wiping_removes_what_is_there_and_what_is_on_its_way(tmp_path: Path) -> None:
    made = [block_of(seed, size=100_000) for seed in range(6)]
    lost: list[BlockId] = []
    async with opened(tmp_path, lost=lost.extend) as store:
        await put_all(store, made[:3])
        flip(file_of(tmp_path, made[0][0].id), -1)
        await store.get(made[0][0].id)
        for one in made[3:]:
            await store.put(*one)
        await store.wipe()
        await store.flush()
        assert store.ids() == ()
        assert store.stats().used_bytes == 0
        assert store.stats().counts.quarantined == 0
        assert set(lost) >= {block.id for block, _ in made[:3]}
    assert [path for path in (tmp_path / "kv").rglob("*") if path.is_file()] == []


async def test_what_is_not_wanted_any_more_is_not_written_behind_a_wipe(tmp_path: Path) -> None:
    """Room is being made for it when the wipe comes; after a kill it would be there again."""
    gate = threading.Event()
    async with opened(tmp_path) as store:
        await put_all(store, [block_of(1)])
        store._threads.write_later(gate.wait)
        await store.put(*block_of())
        while store._writer._writing is None:
            await asyncio.sleep(0)
        wiping = asyncio.create_task(store.wipe())
        await asyncio.sleep(0)
        gate.set()
        assert (await wiping).files == 1
        assert store.stats().queued == 0
        await store.flush()
        assert store.stats().counts.writes == 1


async def test_closing_writes_what_waits_and_then_takes_nothing(tmp_path: Path) -> None:
    made = [block_of(seed) for seed in range(5)]
    async with opened(tmp_path) as store:
        for one in made:
            await store.put(*one)
    assert len(names(tmp_path)) == 5
    assert not await store.put(*block_of(9))
    assert await store.get(made[0][0].id) is None
    store.touch([made[0][0].id])
    store.forget([made[0][0].id])
    await store.aclose()


async def test_only_the_owner_may_look_at_what_is_stored(tmp_path: Path) -> None:
    async with opened(tmp_path) as store:
        await put_all(store, [block_of()])
        flip(file_of(tmp_path, block_of()[0].id), -1)
        await store.get(block_of()[0].id)
        await put_all(store, [block_of()])
    for path in [tmp_path / "kv", *(tmp_path / "kv").rglob("*")]:
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"cap_bytes": 0}, "cap_bytes is 0; it must be 1 or more"),
        ({"readers": 0}, "readers is 0"),
        ({"headroom": -0.1}, "headroom is -0.1; it must be 0 or more"),
        ({"retry_s": ()}, "retry_s is empty"),
    ],
)
def test_a_shape_that_cannot_work_is_refused(wrong: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        replace(config_of(), **wrong)  # type: ignore[arg-type]
