"""Adapters in the engine: each computes what it computes alone, whoever shares its forwards."""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import mlx.core as mx
import mlx_lm
import pytest
from mlx_lm.generate import generate_step
from tokenizers import Tokenizer

from kakeya.adapters.files.packed import Precision, pack
from kakeya.core.errors import Conflict, InvalidArgument, MemoryRefused, NotFound, PageFreed
from kakeya.engine.adapters.pages import AdapterPages, ReadAdapter
from kakeya.engine.adapters.slots import EngineAdapters
from kakeya.engine.steps.scheduler import Scheduler
from kakeya.generation.kv import PageRef
from kakeya.generation.request import DecodeJob, DraftSource, Sampling
from kakeya.memory.pages.content import ContentType, PageConfig
from kakeya.memory.pages.pins import Block
from kakeya.memory.pages.reader import PageReader
from kakeya.memory.pages.shared_arena import PageArena
from kakeya.mlx.model import MlxModel
from tests.engine.adapter_rig import (
    FOLDERS,
    NAMES,
    TINY,
    AdapterRig,
    Answer,
    Ending,
    adapter_rig,
    take,
    tiny,
)

PACKED = {folder.name: pack(folder, Precision.EXACT) for folder in FOLDERS}
NGRAM = (DraftSource(kind="ngram"),)
CONFIG = PageConfig(page_bytes=512 << 10, slab_pages=2, total_pages=4)


@pytest.fixture(scope="module")
def model() -> MlxModel:
    return tiny()


@pytest.fixture
def rig(model: MlxModel) -> AdapterRig:
    return adapter_rig(model)


@pytest.fixture(scope="module")
def prompt() -> list[int]:
    tokenizer = Tokenizer.from_file(str(TINY / "tokenizer.json"))
    return tokenizer.encode("The following lines are\n").ids


def job(prompt: list[int], adapter_id: str = "", tokens: int = 16, **more: object) -> DecodeJob:
    return DecodeJob(
        token_ids=prompt,
        max_tokens=tokens,
        adapter_id=adapter_id,
        **more,  # type: ignore[arg-type]
    )


def load_all(rig: AdapterRig) -> None:
    for name in NAMES:
        take(rig.adapters, name, PACKED[name])


def mlx_lms(folder: Path | None, prompt: list[int], count: int) -> list[int]:
    """Greedy tokens of mlx-lm's own model with its own adapter, in float32 as ours."""
    network, _ = mlx_lm.load(str(TINY), adapter_path=str(folder) if folder else None)
    network.set_dtype(mx.float32)
    steps = generate_step(mx.array(prompt), network, max_tokens=count)
    return [int(token) for token, _ in steps]


@pytest.mark.parametrize(
    "folders",
    [FOLDERS[:4], pytest.param(FOLDERS[4:], marks=pytest.mark.slow)],
    ids=["of each kind", "others"],
)
def test_each_adapter_computes_what_mlx_lm_computes_with_it(
    rig: AdapterRig, prompt: list[int], folders: list[Path]
) -> None:
    load_all(rig)
    base = mlx_lms(None, prompt, 16)
    assert rig.alone(job(prompt)) == base
    for folder in folders:
        expected = mlx_lms(folder, prompt, 16)
        assert rig.alone(job(prompt, folder.name)) == expected
        assert expected != base


@pytest.mark.parametrize(
    ("sampling", "sources"),
    [
        pytest.param(Sampling(), (), id="greedy", marks=pytest.mark.slow),
        pytest.param(Sampling(temperature=0.9, top_k=50), NGRAM, id="keyed and drafted"),
    ],
)
def test_eight_adapters_and_the_base_in_one_batch_are_each_as_alone(
    rig: AdapterRig, prompt: list[int], sampling: Sampling, sources: tuple[DraftSource, ...]
) -> None:
    load_all(rig)
    jobs = [
        job(prompt[: 3 + at % 4], name, sampling=replace(sampling, seed=at))
        for at, name in enumerate([*NAMES, "", ""])
    ]
    alone = [rig.alone(one) for one in jobs]
    together = rig.run(*((replace(one, draft_sources=sources), Answer()) for one in jobs))
    assert together == alone
    assert len({tuple(tokens) for tokens in together}) == len(jobs)


def test_rows_that_plain_decoding_brings_together_share_a_forward(
    rig: AdapterRig, prompt: list[int]
) -> None:
    load_all(rig)
    scheduler_load = []
    rig.tools = replace(rig.tools, timer=lambda: 0.0)
    answers = [Answer() for _ in NAMES]
    ending = Ending(make_scheduler(rig), len(NAMES))
    answers[0].after = lambda count: scheduler_load.append(ending.scheduler.load().batch_rows)
    for name, answer in zip(NAMES, answers, strict=True):
        ending.submit(job(prompt, name), answer)
    ending.scheduler.run()
    assert max(scheduler_load) == len(NAMES)


def make_scheduler(rig: AdapterRig) -> Scheduler:
    return Scheduler(rig.model, rig.tools, max_running=16)


def test_an_adapter_that_comes_while_others_decode_changes_nothing_for_them(
    rig: AdapterRig, prompt: list[int]
) -> None:
    load_all(rig)
    alone = {name: rig.alone(job(prompt, name, 24)) for name in ("record", "letter", "query")}
    for name in NAMES:
        rig.adapters.unload(name)
    for name in ("record", "letter"):
        take(rig.adapters, name, PACKED[name])
    ending = Ending(make_scheduler(rig), 3)
    late = Answer()

    def add(count: int) -> None:
        if count == 7:
            take(rig.adapters, "query", PACKED["query"])
            ending.submit(job(prompt, "query", 24), late)

    record, letter = Answer(after=add), Answer()
    ending.submit(job(prompt, "record", 24), record)
    ending.submit(job(prompt, "letter", 24), letter)
    ending.scheduler.run()
    assert record.tokens == alone["record"]
    assert letter.tokens == alone["letter"]
    assert late.tokens == alone["query"]


def test_an_adapter_that_is_replaced_serves_who_began_with_it_to_the_end(
    rig: AdapterRig, prompt: list[int]
) -> None:
    take(rig.adapters, "a", PACKED["record"])
    record = rig.alone(job(prompt, "a", 24))
    take(rig.adapters, "a", PACKED["letter"])
    letter = rig.alone(job(prompt, "a", 24))
    take(rig.adapters, "a", PACKED["record"])
    ending = Ending(make_scheduler(rig), 2)
    new = Answer()

    def swap(count: int) -> None:
        if count == 7:
            take(rig.adapters, "a", PACKED["letter"])
            ending.submit(job(prompt, "a", 24), new)

    old = Answer(after=swap)
    ending.submit(job(prompt, "a", 24), old)
    ending.scheduler.run()
    assert old.tokens == record
    assert new.tokens == letter
    assert record != letter


def test_a_slot_in_use_is_neither_freed_nor_written(rig: AdapterRig, prompt: list[int]) -> None:
    load_all(rig)
    take(rig.adapters, "ninth", PACKED["march"])
    seen: list[type[Exception]] = []

    def try_it(count: int) -> None:
        if count != 5:
            return
        for attempt in (
            lambda: rig.adapters.unload("shout"),
            lambda: take(rig.adapters, "shout", PACKED["table"]),
            lambda: take(rig.adapters, "tenth", PACKED["table"]),
        ):
            with pytest.raises((Conflict, MemoryRefused)) as refusal:
                attempt()
            seen.append(refusal.type)

    expected = rig.alone(job(prompt, "shout"))
    assert rig.run((job(prompt, "shout"), Answer(after=try_it))) == [expected]
    assert seen == [Conflict, MemoryRefused, MemoryRefused]
    assert rig.adapters.unload("shout")
    assert not rig.adapters.unload("shout")
    take(rig.adapters, "tenth", PACKED["table"])
    assert "tenth" in rig.adapters.ids()


def test_slots_return_when_the_last_user_of_a_replaced_adapter_ends(rig: AdapterRig) -> None:
    first = take(rig.adapters, "a", PACKED["table"])
    one, two = rig.adapters.enter("a"), rig.adapters.enter("a")
    second = take(rig.adapters, "a", PACKED["query"])
    assert second.slot != first.slot
    rig.adapters.leave(one)
    taken = {take(rig.adapters, name, PACKED[name]).slot for name in NAMES[:7]}
    assert first.slot not in taken
    with pytest.raises(MemoryRefused):
        take(rig.adapters, "more", PACKED["table"])
    rig.adapters.leave(two)
    assert take(rig.adapters, "more", PACKED["table"]).slot == first.slot


def test_the_same_bytes_again_are_no_work(rig: AdapterRig) -> None:
    first = take(rig.adapters, "a", PACKED["table"])
    use = rig.adapters.enter("a")
    assert take(rig.adapters, "a", PACKED["table"]) == first
    assert rig.adapters.enter("a") is use


def test_an_adapter_that_is_not_loaded_is_not_found(rig: AdapterRig, prompt: list[int]) -> None:
    answer = Answer()
    rig.run((job(prompt, "nobody"), answer))
    assert isinstance(answer.error, NotFound)
    assert "nobody" in answer.error.message


def test_kept_kv_is_continued_only_with_the_same_content(
    rig: AdapterRig, prompt: list[int]
) -> None:
    take(rig.adapters, "a", PACKED["record"])
    take(rig.adapters, "b", PACKED["letter"])

    def cached(adapter_id: str) -> int:
        answer = Answer()
        rig.run((job(prompt, adapter_id, 4, kv_key="k"), answer))
        assert answer.done is not None
        return answer.done.usage.cached_tokens

    assert cached("a") == 0
    assert cached("a") == len(prompt) - 1
    assert cached("b") == 0
    assert cached("") == 0
    assert cached("") == len(prompt) - 1
    assert cached("a") == 0
    take(rig.adapters, "a", PACKED["table"])
    assert cached("a") == 0
    rig.adapters.unload("a")
    take(rig.adapters, "a", PACKED["table"])
    assert cached("a") == len(prompt) - 1


def test_a_cancelled_row_leaves_the_others_alone_and_its_slot_free(
    rig: AdapterRig, prompt: list[int]
) -> None:
    load_all(rig)
    names = NAMES[:4]
    alone = [rig.alone(job(prompt, name)) for name in names]
    ending = Ending(make_scheduler(rig), 3)
    answers = [Answer() for _ in names]
    answers[1].after = lambda count: tickets[1].cancel() if count == 6 else None
    tickets = [
        ending.submit(job(prompt, name), answer)
        for name, answer in zip(names, answers, strict=True)
    ]
    ending.scheduler.run()
    assert [answer.tokens for answer in answers] == [alone[0], alone[1][:6], alone[2], alone[3]]
    assert all(rig.adapters.unload(name) for name in names)


@dataclass
class Lying:
    """Packed bytes in a real page arena."""

    arena: PageArena

    def lay(self, packed: bytes) -> tuple[PageRef, Block]:
        holder = self.arena.pool.holder("agent")
        tenant = self.arena.pool.tenant(ContentType.LORA_WEIGHT, "adapters")
        with self.arena.prepare(tenant, len(packed), holder) as filling:
            filling.view[:] = packed
            filling.commit()
            ref = filling.ref
        self.arena.close_holder(holder)
        return ref, filling.block


@pytest.fixture
def lying(tmp_path: Path) -> Iterator[Lying]:
    with PageArena(CONFIG, folder=tmp_path, rng=random.Random(str(tmp_path))) as arena:
        arena.grow()
        yield Lying(arena)


def fresh(rig: AdapterRig) -> EngineAdapters:
    assert rig.model.adapters is not None
    return EngineAdapters(rig.model.adapters)


def alone(rig: AdapterRig, adapters: EngineAdapters, asked: DecodeJob) -> list[int]:
    return AdapterRig(rig.model, replace(rig.tools, adapters=adapters), adapters).alone(asked)


def test_an_adapter_comes_from_pages_and_does_not_need_them_afterwards(
    rig: AdapterRig, prompt: list[int], lying: Lying
) -> None:
    take(rig.adapters, "a", PACKED["letter"])
    expected = rig.alone(job(prompt, "a"))
    ref, block = lying.lay(PACKED["letter"])
    adapters = fresh(rig)
    with PageReader() as pages:
        loaded = adapters.load("b", ReadAdapter(pages.view(ref)))
    lying.arena.pool.free(block)
    assert alone(rig, adapters, job(prompt, "b")) == expected
    assert loaded.nbytes > 0


async def test_pages_that_went_before_the_slot_was_filled_are_told_and_leave_nothing(
    rig: AdapterRig, prompt: list[int], lying: Lying
) -> None:
    """As when the agent gives up to wait while the model thread is busy: other bytes lie there."""
    take(rig.adapters, "a", PACKED["letter"])
    expected = rig.alone(job(prompt, "a"))
    ref, block = lying.lay(PACKED["table"])
    adapters, pages = fresh(rig), AdapterPages(keep_s=0.01)
    read, late = pages.read(ref), pages.read(ref)
    await asyncio.sleep(0.05)  # they are mapped as long as somebody reads them
    lying.arena.pool.free(block)
    lying.lay(b"\x01" * len(PACKED["table"]))
    with pytest.raises(PageFreed, match="the block was freed"):
        adapters.load("b", read)
    assert adapters.ids() == ()
    late.close()
    with pytest.raises(PageFreed, match="pages were let go"):
        adapters.load("b", late)
    with pytest.raises(PageFreed, match="the block was freed"):
        pages.read(ref)
    read.close()
    assert take(adapters, "b", PACKED["letter"]).slot == 1
    assert alone(rig, adapters, job(prompt, "b")) == expected


@pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc for what is mapped")
async def test_a_slab_is_mapped_until_the_last_adapter_in_it_is_closed_and_a_moment(
    lying: Lying,
) -> None:
    ref, _ = lying.lay(PACKED["table"])

    async def mapped() -> int:
        maps = await asyncio.to_thread(Path("/proc/self/maps").read_text)
        return maps.count(ref.slab)

    owned, pages = await mapped(), AdapterPages(keep_s=0.02)
    first, second = pages.read(ref), pages.read(ref)
    assert await mapped() == owned + 1
    first.close()
    await asyncio.sleep(0.06)
    assert await mapped() == owned + 1
    second.close()
    async with asyncio.timeout(60):
        while await mapped() > owned:
            await asyncio.sleep(0.01)
    third = pages.read(ref)
    assert third.content == first.content
    third.close()


@pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc for what is mapped")
async def test_a_slab_goes_however_much_is_read_from_others(lying: Lying) -> None:
    """One that its owner took away takes memory as long as it is mapped."""
    pool, pages = lying.arena.pool, AdapterPages()
    ref, _ = lying.lay(PACKED["table"])
    while pool.has_free(1):
        pool.tenant(ContentType.KV_CACHE, "prefixes").page()
    await lying.arena.grow_async()
    other, block = lying.lay(PACKED["letter"])
    pool.holder("engine").hold(block).pin()
    read = pages.read(ref)
    await lying.arena.shrink_async()
    read.close()
    async with asyncio.timeout(60):
        while ref.slab in await asyncio.to_thread(Path("/proc/self/maps").read_text):
            pages.read(other).close()
            await asyncio.sleep(0.005)


def test_what_does_not_fit_the_engines_limit_is_refused() -> None:
    fresh = tiny()
    assert fresh.adapters is not None
    adapters = EngineAdapters(fresh.adapters, lambda keeps_kv: 1000)
    with pytest.raises(MemoryRefused, match="slots for this adapter"):
        take(adapters, "a", PACKED["table"])
    assert adapters.ids() == ()
    assert fresh.adapters.nbytes == 0


def test_slots_are_added_as_adapters_come_and_one_by_one_where_room_is_short() -> None:
    fresh = tiny(slots=20)
    assert fresh.adapters is not None
    bank, asked, left = fresh.adapters, [], None

    def room(keeps_kv: bool) -> int | None:
        asked.append(keeps_kv)
        return left

    adapters = EngineAdapters(bank, room)
    sizes = []
    for number in range(3):
        take(adapters, f"{number}", PACKED["table"])
        sizes.append(bank.slots)
    assert sizes == [1, 2, 4]
    take(adapters, "3", PACKED["letter"])
    left = bank.nbytes // 5
    take(adapters, "4", PACKED["letter"])
    assert bank.slots == 5
    left = 0
    with pytest.raises(MemoryRefused, match="slots for this adapter"):
        take(adapters, "5", PACKED["table"])
    take(adapters, "5", PACKED["table"], instead_of="0")
    left = None
    for number in range(6, 21):
        take(adapters, f"{number}", PACKED["table"])
    assert bank.slots == 20
    assert not any(asked[:-1])
    assert asked[-1], "slots behind the first ones leave KV its room"
    with pytest.raises(MemoryRefused, match="all 20 hold"):
        take(adapters, "21", PACKED["table"])


def test_damaged_bytes_change_nothing(rig: AdapterRig, prompt: list[int]) -> None:
    take(rig.adapters, "a", PACKED["table"])
    expected = rig.alone(job(prompt, "a"))
    for damaged in (b"", PACKED["letter"][:-256], b"x" * 4096):
        with pytest.raises(InvalidArgument):
            take(rig.adapters, "a", damaged)
    assert rig.alone(job(prompt, "a")) == expected
