"""The precache of a node: conversations on slots, what is warmed when, and what it costs nobody."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from kakeya.core.errors import ConfigError
from kakeya.generation.facts import ModelState
from kakeya.generation.request import GenerationPriority
from kakeya.generation.retention import BlockClass, Retention
from kakeya.memory.arbiter.events import MemoryPressure
from kakeya.memory.arbiter.policy import PressureLevel
from kakeya.prefix.names.keys import CacheKeys
from kakeya.prefix.seam import CacheUse, WarmOutcome, WarmReport
from kakeya.prefix.warm.declared_prompts import DeclaredPrompt
from tests.gateway.toy import TEMPLATE, make_folder
from tests.prefix.warm.world import BLOCK, StillClock, Turn, precache_world, prompt_of
from tests.text.texts import chat_of


def source_of(tokens: Sequence[int]):
    async def render() -> Sequence[int]:
        return tokens

    return render


def rate(turns: Sequence[Turn]) -> float:
    return sum(turn.cached for turn in turns) / sum(turn.prompt for turn in turns)


async def test_fifty_turns_on_a_long_prefix_read_nearly_all_of_it():
    async with precache_world(StillClock()) as w:
        history = prompt_of(4096, 1)
        turns = [await w.turn(history, prompt_of(20, n), "room") for n in range(50)]
        assert rate(turns) >= 0.95
        assert all(turn.cached >= turn.known - 1 for turn in turns[1:])


async def test_after_a_prewarm_the_first_request_computes_only_what_the_user_said():
    async with precache_world(StillClock()) as w:
        prefix = prompt_of(4097, 1)
        report = await w.precache.warm(await w.claim("room"), source_of(prefix))
        assert (report.outcome, report.warmed.computed) == (WarmOutcome.WARM, 4096)
        turn = await w.turn(prefix, prompt_of(30, 2), "room")
        assert turn.cached >= 4000
        assert turn.created < 50


async def test_nothing_is_computed_before_the_weights_have_the_name_under_which_kv_is_kept():
    async with precache_world(StillClock()) as w:
        w.pages.is_named = False
        claim, source = await w.claim("room"), source_of(prompt_of(100, 1))
        report = await w.precache.warm(claim, source)
        assert report.outcome is WarmOutcome.AWAY
        assert "weights of toy are still read" in report.reason
        assert not w.warmed
        w.pages.is_named = True
        assert (await w.precache.warm(claim, source)).warmed.computed == 99


async def test_a_conversation_that_is_opened_again_finds_what_was_lost_meanwhile():
    async with precache_world(StillClock()) as w:
        history = prompt_of(600, 1)
        assert w.precache.opened(await w.claim("room")) is None  # nothing is known of it yet
        await w.turn(history, [1], "room")
        await w.settle()
        w.pages.kept.clear()
        w.model.slots.clear()
        report = w.precache.opened(await w.claim("room"))
        assert report is not None
        warmed = (await report).warmed
        assert (warmed.tokens, warmed.computed) == (len(history), len(history) - 1)
        turn = await w.turn(history, [2], "room")
        assert turn.cached == 576  # all whole blocks; the slot's own KV is gone


async def test_opening_during_a_turn_waits_for_that_turn():
    async with precache_world(StillClock()) as w:
        history = prompt_of(600, 1)
        await w.turn(history, [1], "room")
        await w.settle()
        await w.turn(history, [2], "room")
        report = w.precache.opened(await w.claim("room"))
        assert report is not None
        assert (await report).warmed.tokens == len(history)


async def test_a_hundred_conversations_on_sixteen_slots_hit_in_every_turn_but_the_first():
    async with precache_world(StillClock(), parallel=16) as w:
        histories = {n: prompt_of(2 * BLOCK + 10, n) for n in range(100)}
        turns: list[list[Turn]] = [[] for _ in range(10)]
        for number in range(10):
            for n, history in histories.items():
                said = prompt_of(12, 1000 * number + n)
                turns[number].append(await w.turn(history, said, f"c{n}"))
                await w.settle()
        every = [turn for row in turns for turn in row]
        warm = [turn for row in turns[1:] for turn in row]
        hits = [turn for turn in every if turn.cached >= turn.known // BLOCK * BLOCK > 0]
        assert len(hits) / len(every) >= 0.895
        assert len([turn for turn in warm if turn in hits]) / len(warm) >= 0.99
        loads = w.precache._registry.status()["toy"].loads
        assert max(loads) - min(loads) <= 1


async def test_twenty_conversations_on_four_slots_are_told_of_and_none_is_refused(caplog):
    async with precache_world(StillClock(), parallel=4) as w:
        for number in range(3):
            for n in range(20):
                turn = await w.turn(prompt_of(300, n), [number], f"c{n}")
                assert turn.prompt > 0
                assert turn.cached > 0 or number == 0
        (slots,) = w.precache.status()["slots"]
        assert (slots["recommended"], slots["high_water"], slots["loads"]) == (25, 20, [5] * 4)
        assert "precache.parallel = 25" in slots["warning"]
        told = [r for r in caplog.records if "more conversations than slots" in r.message]
        assert [r.levelno for r in told] == [logging.WARNING]


async def test_no_more_slots_are_recommended_than_memory_holds():
    """Of 8,192 tokens each, at a byte a token, a quarter of this memory holds 40."""
    async with precache_world(StillClock(), usable_bytes=4 * 40 * 8192) as w:
        for n in range(4000):
            w.precache.kv_key(await w.claim(f"c{n}"))
        (slots,) = w.precache.status()["slots"]
        assert (slots["recommended"], slots["high_water"]) == (40, 4000)
        assert "memory holds precache.parallel = 40" in slots["warning"]
    async with precache_world(StillClock(), usable_bytes=4 * 8192) as w:
        for n in range(9):
            w.precache.kv_key(await w.claim(f"c{n}"))
        (slots,) = w.precache.status()["slots"]
        assert slots["recommended"] == slots["parallel"] == 4
        assert "memory holds no more" in slots["warning"]


async def test_a_slot_that_another_one_used_since_keeps_its_kv():
    clock = StillClock()
    async with precache_world(clock, parallel=1) as w:
        await w.turn(prompt_of(100, 1), [1], "old")
        clock.advance(1800)
        await w.turn(prompt_of(100, 2), [1], "young")
        clock.advance(1801)
        await w.precache.sweep()
        assert w.precache.status()["conversations"] == 1
        assert len(w.model.slots) == 1


async def test_a_wipe_leaves_nothing_and_what_comes_is_kept_again():
    clock = StillClock()
    async with precache_world(clock) as w:
        history = prompt_of(600, 1)
        await w.turn(history, [1], "room")
        await w.settle()
        w.model.gate = asyncio.Event()
        asked = [
            asyncio.ensure_future(
                w.precache.warm(await w.claim(f"r{n}"), source_of(prompt_of(300, 5 + n)))
            )
            for n in range(2)
        ]
        while not w.precache.status()["running"]:
            await asyncio.sleep(0)
        assert (await w.precache.wipe()).blocks > 0
        assert [(await one).outcome for one in asked] == [WarmOutcome.AWAY] * 2
        assert (w.pages.kept, w.model.slots, w.precache.status()["kept"]) == ({}, {}, 0)
        w.model.gate = None
        clock.advance(3600)
        await w.settle()
        assert w.pages.kept == {}
        turn = await w.turn(history, [2], "room")
        assert turn.cached == 0
        await w.settle()
        assert w.precache.status()["kept"] == 1
        assert (await w.turn(history, [3], "room")).cached >= turn.prompt


async def test_idle_conversations_give_their_slot_back_and_come_back_to_their_blocks():
    clock = StillClock()
    async with precache_world(clock) as w:
        history = prompt_of(600, 1)
        await w.turn(history, [1], "room")
        await w.settle()
        clock.advance(3601)
        await w.precache.sweep()
        assert w.model.slots == {}  # nor does the engine hold anything of it
        assert w.precache.status()["conversations"] == 0
        assert w.precache.status()["kept"] == 0
        assert w.precache.status()["slots"][0]["high_water"] == 1
        turn = await w.turn(history, [2], "room")
        assert turn.cached >= turn.known // BLOCK * BLOCK
        assert w.precache.status()["conversations"] == 1


async def test_a_conversation_that_was_closed_during_its_turn_is_looked_after_no_more():
    clock = StillClock()
    async with precache_world(clock) as w:
        claim, history = await w.claim("room"), prompt_of(600, 1)
        w.precache.kv_key(claim)
        w.model.gate = asyncio.Event()
        w.precache.turn_ended(claim, source_of(history))
        while not w.warmed:
            await asyncio.sleep(0)
        clock.advance(3601)
        await w.precache.sweep()
        w.precache.turn_ended(claim, source_of(history))  # that turn took as long
        w.model.gate.set()
        await w.settle()
        assert w.precache.status()["kept"] == 0
        await w.turn(history, [1], "room")
        await w.settle()
        assert w.precache.status()["kept"] == 1


async def test_many_cycles_of_conversations_leave_nothing_behind():
    clock = StillClock()
    async with precache_world(clock, parallel=4) as w:
        for _ in range(50):
            for n in range(32):
                w.precache.kv_key(await w.claim(f"c{n}"))
            clock.advance(4000)
            await w.precache.sweep()
        status = w.precache.status()
        assert (status["conversations"], status["kept"], status["queued"]) == (0, 0, 0)
        assert status["slots"][0]["loads"] == [0] * 4
        assert status["slots"][0]["high_water"] == 32


async def test_a_hundred_conversations_that_open_at_once_are_spread_evenly():
    async with precache_world(StillClock(), parallel=16) as w:
        await asyncio.gather(*(w.turn(prompt_of(40, n), [1], f"c{n}") for n in range(100)))
        await w.settle()
        loads = w.precache.status()["slots"][0]["loads"]
        assert sum(loads) == 100
        assert max(loads) - min(loads) <= 1


async def test_a_conversation_on_two_models_shares_nothing():
    async with precache_world(StillClock(), names=("one", "two")) as w:
        mine, other = prompt_of(600, 1), prompt_of(600, 1)
        await w.turn(mine, [1], "room", model=0)
        await w.settle()
        turn = await w.turn(other, [1], "room", model=1)
        assert turn.cached == 0
        assert [slots["model_id"] for slots in w.precache.status()["slots"]] == ["one", "two"]


async def test_clients_that_call_their_rooms_alike_have_two_conversations():
    async with precache_world(StillClock()) as w:
        keys = [
            w.precache.kv_key(await w.claim("room", client=client)) for client in ("", "a", "b")
        ]
        assert len(set(keys)) == 3
        assert w.precache.status()["conversations"] == 3


async def test_without_a_key_nothing_is_named_kept_or_warmed():
    async with precache_world(StillClock()) as w:
        claim = await w.claim("", use=CacheUse())
        assert w.precache.kv_key(claim) == ""
        w.precache.turn_ended(claim, source_of(prompt_of(600, 1)))
        await w.settle()
        assert w.warmed == []


async def test_a_cache_key_has_the_slot_of_its_hash_and_is_no_conversation():
    async with precache_world(StillClock()) as w:
        claim = await w.claim("", use=CacheUse(keys=CacheKeys(prompt_cache_key="agent")))
        keys = {w.precache.kv_key(claim) for _ in range(3)}
        assert len(keys) == 1
        assert keys <= {f"slot:{n}" for n in range(4)}
        assert w.precache.status()["conversations"] == 0


async def test_what_is_warmed_is_speculative_and_touches_no_slot():
    async with precache_world(StillClock()) as w:
        history = prompt_of(600, 1)
        await w.turn(history, [1], "room")
        slots = {key: list(held) for key, held in w.model.slots.items()}
        await w.settle()
        (request,) = w.warmed
        assert list(request.token_ids) == history
        assert (request.max_tokens, request.kv_key) == (0, "")
        assert request.priority is GenerationPriority.SPECULATIVE
        assert w.model.slots == slots
        assert set(w.pages.classes) == {BlockClass.USER}


async def test_keep_alive_looks_after_conversations_and_takes_nothing_from_others():
    clock = StillClock()
    async with precache_world(clock) as w:
        await w.turn(prompt_of(600, 1), [1], "one")
        await w.turn(prompt_of(600, 2), [1], "two")
        await w.settle()
        before = {key: list(held) for key, held in w.model.slots.items()}
        warmed = len(w.warmed)
        for _ in range(10):
            for _ in range(50):
                await asyncio.sleep(0)
            clock.advance(250)
        await w.settle()
        assert w.precache.status()["refreshed"] >= 18
        assert len(w.warmed) == warmed
        assert w.model.slots == before


async def test_a_model_that_is_away_is_not_loaded_to_warm_it():
    async with precache_world(StillClock()) as w:
        w.model.state = ModelState.UNLOADED
        report = await w.precache.warm(await w.claim("room"), source_of(prompt_of(300, 1)))
        assert (report.outcome, w.warmed) == (WarmOutcome.AWAY, [])


async def test_while_a_model_waits_for_room_nothing_is_warmed_and_what_runs_gives_way():
    async with precache_world(StillClock()) as w:
        w.waiting.append("another")
        claim = await w.claim("room")
        report = await w.precache.warm(claim, source_of(prompt_of(300, 1)))
        assert report.reason == "a model waits for room in memory"
        assert w.warmed == []


async def test_pressure_ends_what_is_warmed():
    async with precache_world(StillClock()) as w:
        w.model.gate = asyncio.Event()
        asking = asyncio.ensure_future(
            w.precache.warm(await w.claim("room"), source_of(prompt_of(300, 1)))
        )
        while not w.warmed:
            await asyncio.sleep(0)
        w.precache.happened(MemoryPressure(level=PressureLevel.CRITICAL, source="test"))
        assert (await asking).outcome is WarmOutcome.PRESSURE


async def test_what_would_take_the_place_of_others_is_not_warmed():
    async with precache_world(StillClock()) as w:
        w.pages.room_tokens = 200
        report = await w.precache.warm(await w.claim("room"), source_of(prompt_of(300, 1)))
        assert (report.outcome, w.warmed) == (WarmOutcome.NO_ROOM, [])
        w.pages.is_on = False
        report = await w.precache.warm(await w.claim("room"), source_of(prompt_of(100, 1)))
        assert "precache.memory_mb is 0" in report.reason
        w.pages.is_on, w.model.block_tokens = True, 0
        report = await w.precache.warm(await w.claim("room"), source_of(prompt_of(100, 1)))
        assert "cannot be kept in blocks" in report.reason


async def test_a_pinned_prefix_is_pinned_until_it_is_sent_without():
    async with precache_world(StillClock()) as w:
        claim = await w.claim("", use=CacheUse(keys=CacheKeys(prompt_cache_key="k")))
        prefix = prompt_of(300, 1)
        report = await w.precache.warm(claim, source_of(prefix), is_pinned=True)
        assert report.is_pinned
        assert set(w.pages.pinned.values()) == {("toy", "", tuple(prefix))}
        assert w.precache.status()["kept"] == 1
        report = await w.precache.warm(claim, source_of(prefix))
        assert not report.is_pinned
        assert w.pages.pinned == {}
        assert w.precache.status()["kept"] == 0


async def test_pins_take_half_of_the_pages_together_and_one_more_is_refused():
    async with precache_world(StillClock()) as w:
        w.pages.room_tokens = 1000

        async def pin(key: str, tokens: int) -> WarmReport:
            use = CacheUse(keys=CacheKeys(prompt_cache_key=key))
            claim = await w.claim("", use=use)
            return await w.precache.warm(claim, source_of(prompt_of(tokens, 1)), is_pinned=True)

        assert (await pin("one", 301)).is_pinned
        refused = await pin("other", 202)
        assert (refused.outcome, refused.is_pinned) == (WarmOutcome.NO_ROOM, False)
        assert "half of precache.memory_mb" in refused.reason
        assert len(w.warmed) == 1
        assert (await pin("other", 201)).is_pinned
        assert (await pin("one", 301)).is_pinned  # as it was


async def test_a_pin_ends_after_a_day_where_nobody_said_when():
    clock = StillClock()
    async with precache_world(clock) as w:
        claim = await w.claim("", use=CacheUse(keys=CacheKeys(prompt_cache_key="k")))
        await w.precache.warm(claim, source_of(prompt_of(300, 1)), is_pinned=True)
        for hours, pins in ((0, 1), (23, 1), (2, 0)):
            clock.advance(3600 * hours)
            for _ in range(60):
                await asyncio.sleep(0)
            assert len(w.pages.pinned) == pins


async def test_a_turn_of_its_conversation_does_not_end_a_pin():
    async with precache_world(StillClock()) as w:
        prefix = prompt_of(300, 1)
        claim = await w.claim("room")
        await w.precache.warm(claim, source_of(prefix), is_pinned=True)
        await w.turn(list(prefix), [1], "room")
        await w.settle()
        assert set(w.pages.pinned.values()) == {("toy", "", tuple(prefix))}
        assert w.precache.status()["kept"] == 2  # the pin, and the conversation as it goes on
        await w.precache.warm(claim, source_of(prefix))
        assert w.pages.pinned == {}


async def test_who_asks_for_a_pin_during_a_turn_hears_of_the_pin():
    async with precache_world(StillClock()) as w:
        w.model.gate = asyncio.Event()
        claim, prefix = await w.claim("room"), prompt_of(300, 1)
        w.precache.turn_ended(await w.claim("other"), source_of(prompt_of(100, 2)))
        while not w.warmed:
            await asyncio.sleep(0)
        asking = asyncio.ensure_future(w.precache.warm(claim, source_of(prefix), is_pinned=True))
        for _ in range(10):
            await asyncio.sleep(0)
        w.precache.turn_ended(claim, source_of(prompt_of(50, 3)))
        w.model.gate.set()
        report = await asking
        assert (report.warmed.tokens, report.is_pinned) == (300, True)
        assert set(w.pages.pinned.values()) == {("toy", "", tuple(prefix))}
        await w.settle()
        assert len(w.warmed) == 3


async def test_a_retention_without_a_conversation_is_given_to_what_was_computed():
    async with precache_world(StillClock()) as w:
        prompt = prompt_of(300, 1)
        w.pages.add("toy", "", prompt[:-1])
        use = CacheUse(retention=Retention.EXTENDED)
        w.precache.turn_ended(await w.claim("", use=use), source_of(prompt))
        await w.settle()
        assert Retention.EXTENDED in w.pages.kept.values()
        assert (w.warmed, w.precache.status()["kept"]) == ([], 0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_folder(tmp_path / "toy")


async def test_declared_prompts_are_warm_after_each_load(folder, tmp_path):
    system = tmp_path / "system.txt"
    system.write_text("You are kind. " * 40)
    declared = DeclaredPrompt(system_file=str(system))
    async with precache_world(StillClock(), prompts=[declared], folder=str(folder)) as w:
        text = await w.precache.texts.get(str(folder))

        def said() -> list[str]:
            return [text.tokenizer.decode(list(r.token_ids)) for r in w.warmed]

        w.model.state = ModelState.LOADING
        w.precache.engine_changed(w.model)
        await w.settle()
        assert said() == []
        w.model.state = ModelState.READY
        w.precache.engine_changed(w.model)
        w.precache.engine_changed(w.model)
        while not w.warmed:
            await asyncio.sleep(0.001)
        await w.settle()
        assert len(said()) == 1
        assert "You are kind." in said()[0]
        w.pages.kept.clear()  # another engine, other weights, other text
        system.write_text("You are strict. " * 40)
        w.model.pid = 2
        w.precache.engine_changed(w.model)
        while len(w.warmed) < 2:
            await asyncio.sleep(0.001)
        await w.settle()
        assert "You are strict." in said()[1]
        assert w.precache.status()["kept"] == 1
        assert w.precache.status()["conversations"] == 0
        assert set(w.pages.classes) == {BlockClass.SYSTEM}


async def test_a_declared_prompt_whose_file_changes_is_warmed_by_the_next_sweep(folder, tmp_path):
    system = tmp_path / "system.txt"
    system.write_text("You are kind. " * 40)
    declared = DeclaredPrompt(system_file=str(system))
    async with precache_world(StillClock(), prompts=[declared], folder=str(folder)) as w:
        w.precache.engine_changed(w.model)
        while not w.warmed:
            await asyncio.sleep(0.001)
        await w.settle()
        await w.precache.sweep()
        system.unlink()  # as an editor does
        await w.precache.sweep()
        await w.settle()
        assert len(w.warmed) == 1
        system.write_text("You are strict. " * 40)
        await w.precache.sweep()
        while len(w.warmed) < 2:
            await asyncio.sleep(0.001)
        await w.settle()
        await w.precache.sweep()
        await w.settle()
        text = await w.precache.texts.get(str(folder))
        assert len(w.warmed) == 2
        assert "You are strict." in text.tokenizer.decode(list(w.warmed[1].token_ids))
        assert w.precache.status()["kept"] == 1


async def test_a_declared_prompt_is_warm_on_the_day_that_its_template_writes(tmp_path):
    dated = "{{ strftime_now('%d %b %Y') }} " + TEMPLATE
    folder, clock = make_folder(tmp_path / "dated", template=dated), StillClock()
    declared = DeclaredPrompt(system="You are kind. " * 40)
    async with precache_world(clock, prompts=[declared], folder=str(folder)) as w:
        text = await w.precache.texts.get(str(folder))
        asked = [{"role": "system", "content": declared.system}, {"role": "user", "content": "hi"}]
        w.precache.engine_changed(w.model)
        while not w.warmed:
            await asyncio.sleep(0.001)
        await w.settle()
        days = set()
        for _ in range(30):
            clock.advance(3600)
            await w.precache.sweep()
            while w.precache.status()["queued"] or w.precache.status()["running"]:
                await asyncio.sleep(0.001)
            prompt = await text.encode_chat(chat_of(*asked), at_most=1000)
            assert w.pages.find("toy", "", prompt) >= len(prompt) // BLOCK * BLOCK - BLOCK
            days.add(text.tokenizer.decode(prompt)[:11])
        assert len(w.warmed) == len(days) > 1
        assert w.precache.status()["kept"] == 1


async def test_a_template_that_changed_is_taken_with_the_next_load(folder):
    declared = DeclaredPrompt(system="You are kind.")
    async with precache_world(StillClock(), prompts=[declared], folder=str(folder)) as w:
        w.precache.engine_changed(w.model)
        while not w.warmed:
            await asyncio.sleep(0.001)
        await w.settle()
        before = await w.precache.texts.get(str(folder))
        template = folder / "chat_template.jinja"
        template.write_text("A preface." + template.read_text())
        w.model.pid = 2
        w.precache.engine_changed(w.model)
        while len(w.warmed) < 2:
            await asyncio.sleep(0.001)
        await w.settle()
        after = await w.precache.texts.get(str(folder))
        said = [before.tokenizer.decode(list(r.token_ids)) for r in w.warmed]
        assert after is not before
        assert ["A preface." in one for one in said] == [False, True]
        w.model.pid = 3
        w.precache.engine_changed(w.model)
        assert await w.precache.texts.get(str(folder)) is after


async def test_a_declared_prompt_ends_where_the_user_begins(folder):
    declared = DeclaredPrompt(system="Be brief.", messages=(("user", "a"), ("assistant", "b")))
    async with precache_world(StillClock(), prompts=[declared], folder=str(folder)) as w:
        w.precache.declared.warm("toy")
        while not w.warmed:
            await asyncio.sleep(0.001)
        text = await w.precache.texts.get(str(folder))
        messages = [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "b"},
            {"role": "user", "content": "whatever comes"},
        ]
        asked = await text.encode_chat(chat_of(*messages), at_most=1000)
        (request,) = w.warmed
        shared = list(request.token_ids)[:-1]
        assert asked[: len(shared)] == shared
        assert len(shared) in await text.cuts_of(asked, chat_of(*messages), at_most=1000)
        assert text.tokenizer.decode(shared, skip_special_tokens=False).endswith("user\n")


async def test_prompts_for_models_or_files_that_are_not_there_end_the_start(folder):
    unknown = DeclaredPrompt(model="other", system="x")
    with pytest.raises(ConfigError, match="prompt 0 is for model 'other'"):
        async with precache_world(StillClock(), prompts=[unknown], folder=str(folder)):
            pass
    missing = DeclaredPrompt(system_file=str(folder / "nowhere"))
    with pytest.raises(ConfigError, match="cannot be read"):
        async with precache_world(StillClock(), prompts=[missing], folder=str(folder)):
            pass


async def test_a_prompt_for_an_adapter_is_warmed_with_its_base(folder):
    declared = DeclaredPrompt(model="toy:poet", system="x")
    async with precache_world(StillClock(), prompts=[declared], folder=str(folder)) as w:
        w.precache.declared.warm("toy")
        await w.settle()
        assert w.precache.status()["prewarms"]["skipped_away"] == 1  # no such adapter here


async def test_metrics_and_status_tell_of_everything():
    async with precache_world(StillClock()) as w:
        await w.turn(prompt_of(600, 1), [1], "room")
        await w.settle()
        samples = {
            (figure.name, *labels): value
            for figure in w.precache.figures()
            for labels, value in figure.values.items()
        }
        assert samples["kakeya_prewarms", "warm"] == 1
        assert samples["kakeya_prewarms", "skipped_pressure"] == 0
        assert samples["kakeya_conversations", "toy"] == 1
        assert samples["kakeya_conversation_slots", "toy"] == 4
        assert samples["kakeya_prefixes_kept_warm",] == 1
        assert {health.name for health in w.precache.health()} == {"prewarm", "conversations"}


async def test_slots_are_counted_from_memory_where_nobody_said_how_many():
    async with precache_world(StillClock(), parallel=0) as w:
        facts = await w.model.ready(0)
        claim = await w.claim("room", facts=replace(facts, kv_bytes_per_token=1 << 20))
        w.precache.kv_key(claim)
        (slots,) = w.precache.status()["slots"]
        assert slots["parallel"] == 2
