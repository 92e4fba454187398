"""Adapters of a node: what is registered stays, comes where it is needed, and nobody starves."""

import asyncio
import random
import shutil
import threading
from collections import Counter
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest

from kakeya.adapters.files.base import base_fingerprint
from kakeya.adapters.files.packed import Precision, rounded, unpack
from kakeya.adapters.files.store import AdapterDamaged, AdapterRecord, AdapterStore, BaseReplaced
from kakeya.adapters.intake import AdapterIntake
from kakeya.adapters.lease import AdapterUse
from kakeya.adapters.tiers import Tier, TierRules
from kakeya.core.errors import (
    CapacityExhausted,
    Conflict,
    Denied,
    InvalidArgument,
    LoadFailed,
    MemoryRefused,
    NotFound,
    StoreFailed,
    Unsupported,
)
from kakeya.generation.spec import EMBEDDED_FOLDER
from tests.adapters.adapter_folders import tiny_adapter, tiny_arrays, write_adapter
from tests.adapters.world import TINY, World, waiting, world
from tests.fakes import SettableClock
from tests.waiting import until


def only_file(node: World) -> Path:
    (path,) = node.folder.glob("*.klora")
    return path


async def test_an_adapter_is_cold_then_hot_and_the_engine_has_its_very_bytes(
    tmp_path: Path,
) -> None:
    async with world(tmp_path) as node:
        model_id = await node.add(1)
        (record,) = node.adapters.records()
        assert node.adapters.describe(record).tier is Tier.COLD
        with await node.adapters.acquire(model_id) as lease:
            assert node.adapters.describe(record).tier is Tier.HOT
            assert lease.adapter_id == record.version
            held = unpack(node.engine.held[record.version])
            assert held.tensors[0].floats()[0].shape == (256, 2)
        with await node.adapters.acquire(model_id):
            pass
        assert node.engine.loads == [record.version]
        assert {t: times.total for t, times in node.adapters.times.items()} == {
            Tier.COLD: 1,
            Tier.WARM: 0,
            Tier.HOT: 1,
        }


async def test_many_who_ask_at_once_cause_one_load(tmp_path: Path) -> None:
    async with world(tmp_path) as node:
        model_id = await node.add(1)
        leases = await asyncio.gather(*(node.adapters.acquire(model_id) for _ in range(50)))
        assert len(node.engine.loads) == 1
        assert node.adapters.describe(node.adapters.records()[0]).leases == 50
        for lease in leases:
            lease.release()
            lease.release()  # harmless
        assert node.adapters.describe(node.adapters.records()[0]).leases == 0


async def test_the_one_that_idles_longest_makes_room_and_comes_back_from_pages(
    tmp_path: Path,
) -> None:
    async with world(tmp_path, slots=2) as node:
        ids = [await node.add(seed) for seed in (1, 2, 3)]
        for model_id in (*ids, ids[0]):
            with await node.adapters.acquire(model_id):
                pass
        versions = {r.model_id: r.version for r in node.adapters.records()}
        assert set(node.engine.held) == {versions[ids[0]], versions[ids[2]]}
        assert node.adapters.times[Tier.WARM].total == 1
        assert node.engine.most == 2


async def test_what_is_leased_is_not_displaced_and_who_waits_is_told_when_time_is_up(
    tmp_path: Path,
) -> None:
    async with world(tmp_path, slots=1) as node:
        first, second = await node.add(1), await node.add(2)
        with await node.adapters.acquire(first) as lease:
            with pytest.raises(CapacityExhausted, match=r"no slot within 0\.05 s; 1 of 1"):
                await node.adapters.acquire(second, patience_s=0.05)
            assert set(node.engine.held) == {lease.adapter_id}
            waiting = asyncio.ensure_future(node.adapters.acquire(second))
            await asyncio.sleep(0.02)
            assert not waiting.done()
        async with asyncio.timeout(60):
            (await waiting).release()


async def test_a_waiting_request_that_is_cancelled_leaves_nothing(tmp_path: Path) -> None:
    async with world(tmp_path, slots=1) as node:
        first, second = await node.add(1), await node.add(2)
        held = await node.adapters.acquire(first)
        waiting = asyncio.ensure_future(node.adapters.acquire(second))
        await asyncio.sleep(0.01)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        held.release()
        for record in node.adapters.records():
            assert node.adapters.describe(record).leases == 0
        assert node.adapters.status()["models"][TINY]["waiting"] == 0


async def test_one_that_is_asked_for_all_the_time_lets_a_rare_one_in(tmp_path: Path) -> None:
    """Two slots whose adapters are never idle; the third is served all the same."""
    async with world(tmp_path, slots=2) as node:
        busy = [await node.add(1), await node.add(2)]
        rare = await node.add(3)
        is_over = False

        async def use(model_id: str, offset: float) -> None:
            await asyncio.sleep(offset)
            while not is_over:
                with await node.adapters.acquire(model_id):
                    await asyncio.sleep(0.02)

        # Two for each, half a period apart: some lease is always held.
        users = [
            asyncio.ensure_future(use(model_id, offset))
            for model_id in busy
            for offset in (0.0, 0.01)
        ]
        await asyncio.sleep(0.1)
        async with asyncio.timeout(60):
            with await node.adapters.acquire(rare, patience_s=15):
                pass
        is_over = True
        await asyncio.gather(*users)


async def test_an_engine_that_was_restarted_is_empty_and_filled_again(tmp_path: Path) -> None:
    async with world(tmp_path) as node:
        model_id = await node.add(1)
        with await node.adapters.acquire(model_id):
            node.engine.restart(node.adapters)
        assert node.adapters.describe(node.adapters.records()[0]).tier is Tier.WARM
        with await node.adapters.acquire(model_id) as lease:
            assert set(node.engine.held) == {lease.adapter_id}
        assert node.arena.snapshot().pool.pinned_pages == 0


async def test_an_engine_that_dies_during_a_load_costs_a_try_and_no_pin(tmp_path: Path) -> None:
    async with world(tmp_path) as node:
        model_id = await node.add(1)
        deaths = iter([True, True, False])

        def before_load() -> None:
            if next(deaths):
                node.engine.restart(node.adapters)

        def pause() -> float:
            return 0.0

        node.engine.before_load, node.engine.pause = before_load, pause
        # It dies after the pages are pinned for it, and before it answers.
        real = node.engine.load_adapter

        async def dying(adapter_id: str, ref, timeout_s: float, instead_of: str, sent) -> int:
            assert node.arena.snapshot().pool.pinned_pages == 1
            pid = node.engine.pid
            size = await real(adapter_id, ref, timeout_s, instead_of, sent)
            if node.engine.pid != pid:
                node.engine.held.clear()
            return size

        node.engine.load_adapter = dying
        with await node.adapters.acquire(model_id) as lease:
            assert set(node.engine.held) == {lease.adapter_id}
        assert node.arena.snapshot().pool.pinned_pages == 0


async def test_a_slot_of_which_nothing_is_known_is_freed_when_it_is_in_the_way(
    tmp_path: Path,
) -> None:
    """An engine may have taken an adapter whose answer came too late."""
    async with world(tmp_path, slots=1) as node:
        first, second = await node.add(1), await node.add(2)
        node.engine.held["from an answer that was lost"] = b""
        with await node.adapters.acquire(first) as lease:
            assert set(node.engine.held) == {lease.adapter_id}
        with await node.adapters.acquire(second) as lease:
            assert set(node.engine.held) == {lease.adapter_id}


async def test_a_restart_of_the_node_keeps_what_was_registered(tmp_path: Path) -> None:
    async with world(tmp_path) as node:
        await node.add(1, owner="alice")
        await node.add(2, precision=Precision.EXACT)
        await node.add(3)
        await node.adapters.remove(f"{TINY}:a3")
        before = node.adapters.records()
    async with world(tmp_path) as node:
        assert node.adapters.records() == before
        with await node.adapters.acquire(f"{TINY}:a2") as lease:
            assert unpack(node.engine.held[lease.adapter_id]).precision is Precision.EXACT
    assert all(path.stat().st_mode & 0o077 == 0 for path in node.folder.iterdir())
    assert node.folder.stat().st_mode & 0o077 == 0


async def test_a_damaged_file_is_set_aside_and_named_and_others_go_on(tmp_path: Path) -> None:
    async with world(tmp_path) as node:
        damaged = await node.add(1)
        path = only_file(node)
        await asyncio.to_thread(path.write_bytes, path.read_bytes()[:-20] + b"x" * 20)
        healthy = await node.add(2)
        # Clients hear it too: it names the file, not where this node keeps its data.
        with pytest.raises(LoadFailed, match=r"damaged on disk [^/]* set aside as [^/]*\.damaged"):
            await node.adapters.acquire(damaged)
        with pytest.raises(NotFound, match="register it again"):
            await node.adapters.acquire(damaged)
        (await node.adapters.acquire(healthy)).release()
        assert [r.model_id for r in node.adapters.records()] == [healthy]
        assert len(list(node.folder.glob("*.damaged"))) == 1
        assert damaged in node.adapters.status()["problems"]
        await until(lambda: not node.adapters.status()["retired"])
        assert await node.add(1) == damaged
        (await node.adapters.acquire(damaged)).release()


@pytest.mark.parametrize(
    "spoil",
    [
        lambda data: b"",
        lambda data: data[:50],
        lambda data: b"KLORA9" + data[6:],
        lambda data: data.replace(b'"owner": "alice"', b'"owner": "mallo"', 1),
        lambda data: data.replace(b"\n", b" ", 1),
        lambda data: b"KLORA1 00000000 \xff\xfe\n" + data,
    ],
)
async def test_a_damaged_first_line_is_found_at_the_start(tmp_path: Path, spoil) -> None:
    async with world(tmp_path) as node:
        await node.add(1, owner="alice")
        path = only_file(node)
        await node.add(2)
        await asyncio.to_thread(path.write_bytes, spoil(path.read_bytes()))
        await asyncio.to_thread((node.folder / ".x.klora.tmp123").write_bytes, b"half")
    async with world(tmp_path) as node:
        assert [r.name for r in node.adapters.records()] == ["a2"]
        problems = node.adapters.problems()
        assert list(problems) == [f"{path.name}.damaged"]
        assert "add it again" in problems[f"{path.name}.damaged"]
        names = sorted(path.suffix for path in node.folder.iterdir())
        assert names == [".damaged", ".klora"]


async def test_only_its_owner_may_use_an_adapter(tmp_path: Path) -> None:
    async with world(tmp_path) as node:
        hers = await node.add(1, owner="alice")
        everybodys = await node.add(2)
        for client in ("", "bob", "alic"):
            with pytest.raises(Denied, match="belongs to another client"):
                await node.adapters.acquire(hers, client)
            assert [r.model_id for r in node.adapters.usable(client)] == [everybodys]
        (await node.adapters.acquire(hers, "alice")).release()
        (await node.adapters.acquire(everybodys, "bob")).release()
        assert len(node.adapters.usable("alice")) == 2


async def test_an_unknown_adapter_is_answered_with_near_names_that_may_be_used(
    tmp_path: Path,
) -> None:
    async with world(tmp_path) as node:
        await node.add(1, name="shakespeare")
        await node.add(2, name="shakespear", owner="alice")
        with pytest.raises(NotFound, match=f"did you mean {TINY}:shakespeare\\?"):
            await node.adapters.acquire(f"{TINY}:shakspeare")


async def test_a_name_is_taken_once_and_replaced_when_asked(tmp_path: Path) -> None:
    async with world(tmp_path) as node:
        model_id = await node.add(1, name="poet")
        with pytest.raises(Conflict, match="is registered"):
            await node.add(2, name="poet")
        old = await node.adapters.acquire(model_id)
        await node.add(2, name="poet", is_replacing=True)
        new = await node.adapters.acquire(model_id)
        assert {old.adapter_id, new.adapter_id} == set(node.engine.held)
        assert old.adapter_id != new.adapter_id
        await node.add(1, name="poet", is_replacing=True)  # its first content again
        with await node.adapters.acquire(model_id) as back:
            assert back.adapter_id == old.adapter_id
            assert node.adapters.status()["retired"] == [new.adapter_id]
        new.release()
        await until(lambda: not node.adapters.status()["retired"], limit_s=20)
        assert set(node.engine.held) == {old.adapter_id}, "a stream of before goes on with it"
        old.release()
        with await node.adapters.acquire(model_id) as lease:
            assert lease.adapter_id == old.adapter_id


async def test_a_request_amid_a_replacement_gets_the_new_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is the new one's before its record is."""
    async with world(tmp_path) as node:
        model_id = await node.add(1, name="poet")
        loop, is_read = asyncio.get_running_loop(), threading.Event()
        save, load = AdapterStore.save, AdapterStore.load
        asked: list[Future[AdapterUse]] = []

        def save_and_ask(store: AdapterStore, record: AdapterRecord, packed: bytes) -> int:
            size = save(store, record, packed)
            asked.append(asyncio.run_coroutine_threadsafe(node.adapters.acquire(model_id), loop))
            assert is_read.wait(20)
            return size

        def load_and_tell(store: AdapterStore, record: AdapterRecord) -> bytes:
            try:
                return load(store, record)
            finally:
                is_read.set()

        monkeypatch.setattr(AdapterStore, "save", save_and_ask)
        monkeypatch.setattr(AdapterStore, "load", load_and_tell)
        await node.add(2, name="poet", is_replacing=True)
        with await asyncio.wrap_future(asked[0]) as lease:
            assert lease.adapter_id == node.adapters.find(model_id).version
        assert not any(health.failures for health in node.adapters.health())


async def test_the_same_content_again_changes_the_owner_only(tmp_path: Path) -> None:
    async with world(tmp_path) as node:
        model_id = await node.add(1)
        with await node.adapters.acquire(model_id) as lease:
            await node.add(1, is_replacing=True, owner="alice")
            with await node.adapters.acquire(model_id, "alice") as same:
                assert same.adapter_id == lease.adapter_id
            with pytest.raises(Denied):
                await node.adapters.acquire(model_id, "bob")


async def test_a_removed_one_is_given_to_nobody_and_goes_when_its_last_user_does(
    tmp_path: Path,
) -> None:
    async with world(tmp_path) as node:
        model_id = await node.add(1)
        lease = await node.adapters.acquire(model_id)
        await node.adapters.remove(model_id)
        assert not list(node.folder.iterdir())
        with pytest.raises(NotFound):
            await node.adapters.acquire(model_id)
        with pytest.raises(NotFound):
            await node.adapters.remove(model_id)
        await node.adapters.rebalance()
        assert lease.adapter_id in node.engine.held
        lease.release()
        await until(lambda: not node.adapters.status()["retired"], limit_s=20)
        assert node.engine.held == {}
        pool = node.arena.snapshot().pool
        assert pool.free_pages == pool.total_pages


@pytest.mark.parametrize("is_used", [False, True])
@pytest.mark.parametrize("seed", [1, 2])
async def test_one_that_is_found_damaged_while_it_is_replaced_is_the_new_one_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int, is_used: bool
) -> None:
    async with world(tmp_path) as node:
        model_id = await node.add(1, "poet")
        used = await node.adapters.acquire(model_id)
        if not is_used:
            used.release()
        node.engine.restart(node.adapters)
        node.adapters.cool(model_id)
        only_file(node).write_bytes(only_file(node).read_bytes()[:-9])
        loop, save = asyncio.get_running_loop(), AdapterStore.save

        async def find() -> None:
            with pytest.raises(AdapterDamaged):
                await node.adapters.acquire(model_id)
            await node.adapters.rebalance()

        def save_later(store: AdapterStore, record: AdapterRecord, packed: bytes) -> int:
            asyncio.run_coroutine_threadsafe(find(), loop).result(10)
            return save(store, record, packed)

        monkeypatch.setattr(AdapterStore, "save", save_later)
        await node.add(seed, "poet", is_replacing=True)
        used.release()
        await node.adapters.rebalance()
        with await node.adapters.acquire(model_id) as lease:
            assert node.adapters.describe(lease.record).leases == 1
        assert node.adapters.status()["problems"] == {}


@pytest.mark.parametrize("comes_back", [False, True])
async def test_who_waits_for_a_model_has_the_version_that_took_the_place_of_the_one_asked_for(
    tmp_path: Path, comes_back: bool
) -> None:
    async with world(tmp_path) as node:
        model_id = await node.add(1, "poet")
        first = node.adapters.find(model_id).version
        node.engine.is_there = asyncio.Event()
        asked = asyncio.create_task(node.adapters.acquire(model_id))
        await until(lambda: waiting(node) == 1)
        await node.add(2, "poet", is_replacing=True)
        await node.adapters.rebalance()
        if comes_back:
            await node.add(1, "poet", is_replacing=True)
            await node.adapters.rebalance()
        node.engine.is_there.set()
        with await asked as lease:
            assert lease.adapter_id == node.adapters.find(model_id).version
            assert (lease.adapter_id == first) is comes_back
        await until(lambda: not node.adapters.status()["retired"])


async def test_who_waits_for_a_model_hears_that_the_adapter_was_removed(tmp_path: Path) -> None:
    async with world(tmp_path) as node:
        model_id = await node.add(1, "poet")
        node.engine.is_there = asyncio.Event()
        asked = asyncio.create_task(node.adapters.acquire(model_id))
        await until(lambda: waiting(node) == 1)
        await node.adapters.remove(model_id)
        await node.adapters.rebalance()
        node.engine.is_there.set()
        with pytest.raises(NotFound, match="poet"):
            await asked
        await until(lambda: not node.adapters.status()["retired"])


async def test_one_that_the_disk_keeps_is_not_removed(tmp_path: Path) -> None:
    async with world(tmp_path) as node:
        model_id = await node.add(1)
        aside = node.folder.rename(tmp_path / "aside")
        node.folder.write_text("no folder")
        with pytest.raises(StoreFailed, match="adapters cannot be written"):
            await node.adapters.remove(model_id)
        node.folder.unlink()
        aside.rename(node.folder)
        with await node.adapters.acquire(model_id) as lease:
            assert lease.adapter_id in node.engine.held
        await node.adapters.remove(model_id)
        assert list(node.folder.iterdir()) == []


async def test_what_cannot_be_served_is_refused_when_it_is_registered(tmp_path: Path) -> None:
    async with world(tmp_path, most_rank=4) as node:
        register = node.adapters.register
        good = await asyncio.to_thread(tiny_adapter, tmp_path / "good", 1, rank=4)
        big = await asyncio.to_thread(tiny_adapter, tmp_path / "big", 1, rank=5)
        with pytest.raises(InvalidArgument, match="rank 5, and engines are started for at most 4"):
            await register("a", TINY, big)
        for name in ("", "a:b", "a/b", "../a", ".a", "a b", "ä", "x" * 65):
            with pytest.raises(InvalidArgument, match="cannot be an adapter's name"):
                await register(name, TINY, good)
        with pytest.raises(InvalidArgument, match="no client's name"):
            await register("a", TINY, good, owner="a\nb")
        with pytest.raises(NotFound, match=f"no model 'other' that .*; there are: {TINY}"):
            await register("a", "other", good)
        foreign = {"model.layers.9.self_attn.q_proj": (256, 256)}
        foreign_arrays = {
            f"{path}.lora_{leaf}": np.ones(shape, np.float32)
            for path, (ins, outs) in foreign.items()
            for leaf, shape in (("a", (ins, 2)), ("b", (2, outs)))
        }
        await asyncio.to_thread(write_adapter, tmp_path / "f", foreign_arrays, rank=2)
        with pytest.raises(InvalidArgument, match="no linear layer of the base"):
            await register("a", TINY, tmp_path / "f")
        wide = {
            name: np.ones((array.shape[0] + 1, array.shape[1]), np.float32)
            if name.endswith("lora_a")
            else array
            for name, array in tiny_arrays(1, rank=2).items()
        }
        await asyncio.to_thread(write_adapter, tmp_path / "w", wide, rank=2)
        with pytest.raises(InvalidArgument, match="257 features in"):
            await register("a", TINY, tmp_path / "w")
        embedding = {
            "model.embed_tokens.lora_a": np.ones((256, 2), np.float32),
            "model.embed_tokens.lora_b": np.ones((2, 3072), np.float32),
        }
        await asyncio.to_thread(write_adapter, tmp_path / "e", embedding, rank=2)
        shorter = {
            name.removeprefix("model."): array for name, array in tiny_arrays(1, rank=2).items()
        }
        await asyncio.to_thread(write_adapter, tmp_path / "s", shorter, rank=2)
        for named_otherwise in ("e", "s"):
            with pytest.raises(InvalidArgument, match="no linear layer of the base"):
                await register("a", TINY, tmp_path / named_otherwise)
        assert node.adapters.records() == ()


async def test_an_adapter_of_weights_that_were_replaced_is_refused_until_it_is_added_again(
    tmp_path: Path,
) -> None:
    base = tmp_path / "base"
    await asyncio.to_thread(shutil.copytree, EMBEDDED_FOLDER / TINY, base)
    async with world(tmp_path / "node", bases={TINY: str(base)}) as node:
        model_id = await node.add(1)
        node.engine.fingerprint = await asyncio.to_thread(base_fingerprint, base)
        assert await node.adapters.stale() == {}
        (await node.adapters.acquire(model_id)).release()

        weights = base / "model.safetensors"
        data = bytearray(weights.read_bytes())
        data[len(data) // 2 :] = bytes(len(data) - len(data) // 2)
        await asyncio.to_thread(weights.write_bytes, data)
        assert list(await node.adapters.stale()) == [model_id]
        (await node.adapters.acquire(model_id)).release()  # the engine has the old ones yet
        node.engine.restart(node.adapters)
        node.engine.fingerprint = await asyncio.to_thread(base_fingerprint, base)
        for _ in range(2):
            with pytest.raises(BaseReplaced, match=r"adapters add a1 .* --replace"):
                await node.adapters.acquire(model_id)
        assert node.engine.held == {}

        await node.add(1, is_replacing=True)
        assert await node.adapters.stale() == {}
        (await node.adapters.acquire(model_id)).release()


async def test_one_that_is_added_while_weights_are_looked_at_is_no_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = str(EMBEDDED_FOLDER / TINY)
    async with world(tmp_path, bases={TINY: folder, "copy": folder}) as node:
        await node.add(1)
        made = await asyncio.to_thread(tiny_adapter, tmp_path / "made", 2, rank=2)
        look = AdapterIntake.fingerprint

        async def look_later(intake: AdapterIntake, base: str) -> str:
            await node.adapters.register("late", "copy", made)
            return await look(intake, base)

        monkeypatch.setattr(AdapterIntake, "fingerprint", look_later)
        assert await node.adapters.stale() == {}
        assert len(node.adapters.records()) == 2


async def test_an_adapter_that_took_the_place_of_another_is_alone_there(tmp_path: Path) -> None:
    """Where the engine refuses, who was to leave is in its slot yet."""
    async with world(tmp_path, slots=1) as node:
        first, second = await node.add(1), await node.add(2)
        lease = await node.adapters.acquire(first)
        lease.release()
        node.engine.in_use.add(lease.adapter_id)
        with pytest.raises(Conflict, match="in use"):
            await node.adapters.acquire(second)
        assert node.adapters.describe(lease.record).tier is Tier.HOT
        node.engine.in_use.clear()
        with await node.adapters.acquire(second) as other:
            assert set(node.engine.held) == {other.adapter_id}
        assert node.adapters.describe(lease.record).tier is Tier.WARM


async def test_an_engine_without_slots_says_what_to_set(tmp_path: Path) -> None:
    async with world(tmp_path, slots=0) as node:
        model_id = await node.add(1)
        with pytest.raises(Unsupported, match=r"adapters\.slots"):
            await node.adapters.acquire(model_id)


async def test_when_pages_are_few_adapters_fall_back_to_disk_and_come_again(
    tmp_path: Path,
) -> None:
    async with world(tmp_path, slots=1, pages=2) as node:
        ids = [await node.add(seed) for seed in range(6)]
        for _ in range(3):
            for model_id in ids:
                with await node.adapters.acquire(model_id) as lease:
                    assert set(node.engine.held) == {lease.adapter_id}
        tiers = Counter(node.adapters.describe(record).tier for record in node.adapters.records())
        assert tiers[Tier.COLD] >= 3
        assert node.arena.snapshot().pool.evicted_pages > 0


async def test_what_is_used_a_lot_is_brought_in_before_it_is_asked_for_again(
    tmp_path: Path,
) -> None:
    async with world(tmp_path, slots=2, rules=TierRules(hot_uses=3)) as node:
        ids = [await node.add(seed) for seed in range(3)]
        for _ in range(3):
            with await node.adapters.acquire(ids[0]):
                pass
        for model_id in ids[1:]:
            with await node.adapters.acquire(model_id):
                pass
        node.engine.restart(node.adapters)
        await node.adapters.rebalance()
        first = node.adapters.find(ids[0]).version
        await until(lambda: first in node.engine.held)


async def test_one_that_leaves_for_a_wanted_one_is_not_lent_meanwhile(tmp_path: Path) -> None:
    rules = TierRules(hot_uses=2, warm_uses=1)
    async with world(tmp_path, slots=1, rules=rules) as node:
        wanted, other = await node.add(1), await node.add(2)
        for _ in range(4):
            (await node.adapters.acquire(wanted)).release()
        (await node.adapters.acquire(other)).release()
        node.engine.until = asyncio.Event()
        await node.adapters.rebalance()
        await until(lambda: node.engine.loading == {node.adapters.find(wanted).version})
        asked = asyncio.create_task(node.adapters.acquire(other))
        await until(lambda: waiting(node) == 1)
        node.engine.until.set()
        with await asked as lease:
            assert set(node.engine.held) == {lease.adapter_id}


async def test_random_use_with_deaths_removals_and_few_slots_loses_nobody(
    tmp_path: Path,
) -> None:
    """Laws: a lease means that the engine has the adapter; slots are never exceeded; all end."""
    rng = random.Random(11)
    async with world(tmp_path, slots=3, pages=8) as node:
        ids = [await node.add(seed) for seed in range(10)]
        node.engine.pause = node.engine.comes = lambda: rng.choice((0.0, 0.0, 0.002))
        outcomes: Counter[str] = Counter()

        async def client(number: int) -> None:
            own = random.Random(number)
            for _ in range(25):
                model_id = own.choices(ids, [1 / (1 + i) for i in range(len(ids))])[0]
                try:
                    with await node.adapters.acquire(model_id, patience_s=20) as lease:
                        await asyncio.sleep(own.random() * 0.004)
                        models = node.adapters.status()["models"]
                        hot = {one["adapter"] for one in models[TINY]["hot"]}
                        assert hot <= set(node.engine.held) or node.engine.pid is None
                        assert lease.adapter_id in hot or deaths
                        outcomes["served"] += 1
                except NotFound:
                    outcomes["removed"] += 1

        deaths = 0

        async def mischief() -> None:
            nonlocal deaths
            for turn in range(16):
                await asyncio.sleep(0.03)
                if turn % 4 == 0:
                    node.engine.restart(node.adapters)
                    deaths += 1
                elif turn % 4 == 1:
                    await node.adapters.remove(ids[-1 - turn // 4])
                elif turn % 4 == 2:
                    await node.add(20 + turn % 8, "a0", is_replacing=True)
                await node.adapters.rebalance()

        async with asyncio.timeout(60):
            await asyncio.gather(mischief(), *(client(number) for number in range(20)))
        assert sum(outcomes.values()) == 500
        assert outcomes["served"] > 400
        assert node.engine.most <= 3
        assert node.adapters.status()["models"][TINY]["waiting"] == 0
        for record in node.adapters.records():
            assert node.adapters.describe(record).leases == 0
        # A load that no request waits for may still run.
        await until(lambda: not node.arena.snapshot().pool.pinned_pages, limit_s=60.0)
        assert not any(health.failures for health in node.adapters.health())


async def test_metrics_and_status_tell_where_adapters_are(tmp_path: Path) -> None:
    async with world(tmp_path) as node:
        await node.add(1)
        await node.add(2)
        with await node.adapters.acquire(f"{TINY}:a1"):
            found = {figure.name: figure for figure in node.adapters.figures()}
        assert found["kakeya_adapters"].values == {("hot",): 1, ("warm",): 0, ("cold",): 1}
        assert node.adapters.status()["models"][TINY]["slots"] == 2


async def test_slots_are_lent_what_they_take_and_asked_for_where_the_engine_has_no_room(
    tmp_path: Path,
) -> None:
    lent: list[int] = []
    has_room = True

    async def lend_slots(base: str, size: int) -> bool:
        assert base == TINY
        lent.append(size)
        return has_room

    async with world(tmp_path, lend_slots=lend_slots) as node:
        for seed in (1, 2, 3):
            await node.add(seed)
        with await node.adapters.acquire(f"{TINY}:a1"):
            (packed,) = node.engine.held.values()
            taken = len(packed)
        assert lent == [taken]
        with await node.adapters.acquire(f"{TINY}:a2"):
            assert lent == [taken], "the same layers: no slot more"
        refusals = 1

        def refuse() -> None:
            nonlocal refusals
            if refusals:
                refusals -= 1
                raise MemoryRefused("no room for slots")

        node.engine.before_load = refuse
        with await node.adapters.acquire(f"{TINY}:a3"):
            features = 4 * (512 + 384 + 384 + 512)
            assert lent[1:] == [taken + 4 * 16 * features * 4, taken]
        has_room, refusals = False, 1
        node.engine.restart(node.adapters)
        with pytest.raises(MemoryRefused, match="no room for slots"):
            await node.adapters.acquire(f"{TINY}:a1")
        assert lent[-1] == 0


async def test_adapters_share_the_slots_that_memory_allows(tmp_path: Path) -> None:
    async with world(tmp_path, slots=2) as node:
        node.engine.promised = 100
        models = [await node.add(seed) for seed in range(6)]
        for _ in range(2):
            for model in models:
                with await node.adapters.acquire(model):
                    assert len(node.engine.held) <= 2
        assert node.adapters.status()["models"][TINY]["slots"] == 2
        node.engine.slots = 6
        with (
            await node.adapters.acquire(models[0]),
            await node.adapters.acquire(models[1]),
            pytest.raises(CapacityExhausted, match="2 of 2 are taken"),
        ):
            await node.adapters.acquire(models[2], patience_s=0.05)


async def test_a_slot_is_asked_for_again_after_a_while(tmp_path: Path) -> None:
    clock = SettableClock()
    async with world(tmp_path, slots=1, clock=clock) as node:
        node.engine.promised = 100
        models = [await node.add(seed) for seed in range(3)]
        for model in models:
            with await node.adapters.acquire(model):
                pass
        node.engine.slots = 100
        clock.advance(31.0)
        for model in models:
            with await node.adapters.acquire(model):
                pass
        assert len(node.engine.held) == 3


def used_pages(node: World) -> int:
    pool = node.arena.snapshot().pool
    return pool.total_pages - pool.free_pages


async def add_wide(node: World, seed: int, precision: Precision) -> str:
    """Register an adapter that is of three pages when it is exact, and of one in int8."""
    made = await asyncio.to_thread(tiny_adapter, node.source / f"{seed}", seed, rank=40)
    record = await node.adapters.register(f"a{seed}", TINY, made, precision=precision)
    return record.model_id


@pytest.mark.parametrize("limit_s", [0.0, 60.0])
async def test_an_exact_adapter_that_idles_is_rounded_in_its_pages_where_that_is_wanted(
    limit_s: float, tmp_path: Path
) -> None:
    clock = SettableClock()
    rules = TierRules(round_s=limit_s, window_s=600.0)
    async with world(tmp_path, clock=clock, rules=rules, slots=1, most_rank=64) as node:
        idle, plain, busy = [
            await add_wide(node, seed, precision)
            for seed, precision in enumerate((Precision.EXACT, Precision.INT8, Precision.EXACT))
        ]
        for model in (idle, plain):
            with await node.adapters.acquire(model) as lease:
                first = node.engine.held[lease.adapter_id]
        with await node.adapters.acquire(busy):
            assert used_pages(node) == 7
            clock.advance(61.0)
            await node.adapters.rebalance()
            await node.adapters.rebalance()
        assert used_pages(node) == (5 if limit_s else 7)
        node.arena.check_integrity()
        with await node.adapters.acquire(plain) as lease:
            assert node.engine.held[lease.adapter_id] == first, "it is int8 already"
        with await node.adapters.acquire(idle) as lease:
            precision = unpack(node.engine.held[lease.adapter_id]).precision
            assert precision is (Precision.INT8 if limit_s else Precision.EXACT)
        node.adapters.cool(idle)
        with await node.adapters.acquire(plain):
            pass
        with await node.adapters.acquire(idle) as lease:
            precision = unpack(node.engine.held[lease.adapter_id]).precision
            assert precision is Precision.EXACT, "the disk has it as it was"


async def test_an_adapter_that_is_used_while_it_is_rounded_stays_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, begun, may_end = SettableClock(), threading.Event(), threading.Event()

    def slowly(packed: memoryview) -> bytes:
        begun.set()
        may_end.wait(10)
        return rounded(packed)

    monkeypatch.setattr("kakeya.adapters.places.rounded", slowly)
    rules = TierRules(round_s=1.0)
    async with world(tmp_path, clock=clock, rules=rules, slots=1, most_rank=64) as node:
        model = await add_wide(node, 1, Precision.EXACT)
        with await node.adapters.acquire(model):
            pass
        clock.advance(2.0)
        rounding = asyncio.create_task(node.adapters.rebalance())
        await until(begun.is_set)
        with await node.adapters.acquire(model) as lease:
            may_end.set()
            await rounding
        node.arena.check_integrity()
        node.engine.restart(node.adapters)
        with await node.adapters.acquire(model) as lease:
            assert unpack(node.engine.held[lease.adapter_id]).precision is Precision.EXACT
        assert used_pages(node) == 3
