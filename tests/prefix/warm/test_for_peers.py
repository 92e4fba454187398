"""Prefixes that a node keeps warm for others: while these say so, in room that is free."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from kakeya.fleet.placement.keepers import Keeping
from kakeya.generation.kv import KvHolder
from kakeya.generation.retention import BlockClass
from kakeya.prefix.seam import WarmOutcome
from kakeya.prefix.warm import for_peers
from kakeya.prefix.warm.declared_prompts import DeclaredPrompt
from kakeya.prefix.warm.for_peers import LAPSE_S, PeerPrefix
from tests.gateway.toy import make_folder
from tests.prefix.warm.world import StillClock, precache_world, prompt_of
from tests.waiting import until

PROMPT = tuple(prompt_of(200, 1))
THERE = KvHolder(node_id="declares", tokens=len(PROMPT))


def asked(tokens: Sequence[int] = PROMPT, name: bytes = b"digest") -> PeerPrefix:
    return PeerPrefix(model_id="toy", digest=name, tokens=tokens, holder=THERE)


async def test_a_prefix_is_kept_warm_and_its_tokens_are_sent_once():
    async with precache_world(StillClock()) as w:
        keeper = w.precache.for_peers
        assert keeper.keeping(b"digest") is Keeping.NOTHING
        assert await keeper.keep(asked(())) is None
        report = await keeper.keep(asked())
        assert (report.outcome, report.warmed.tokens) == (WarmOutcome.WARM, 200)
        assert keeper.keeping(b"digest") is Keeping.KEPT
        assert [one.kv_holder for one in w.warmed] == [THERE]
        again = await keeper.keep(asked(()))
        assert (again.outcome, again.warmed.computed) == (WarmOutcome.WARM, 0)
        assert len(w.warmed) == 1
        assert set(w.pages.classes) == {BlockClass.SYSTEM}


async def test_a_prefix_of_which_nothing_is_heard_any_more_is_looked_after_no_more():
    clock = StillClock()
    async with precache_world(clock) as w:
        keeper = w.precache.for_peers
        await keeper.keep(asked())
        clock.advance(LAPSE_S - 1)
        await keeper.keep(asked(()))
        clock.advance(LAPSE_S - 1)
        assert keeper.keeping(b"digest") is Keeping.KEPT
        clock.advance(2)
        assert keeper.keeping(b"digest") is Keeping.NOTHING
        assert w.precache.status()["kept"] == 0
        assert await keeper.keep(asked(())) is None


async def test_a_prefix_whose_call_ended_before_it_was_warm_lapses_too():
    clock = StillClock()
    async with precache_world(clock) as w:
        keeper = w.precache.for_peers
        w.model.gate = asyncio.Event()
        call = asyncio.create_task(keeper.keep(asked()))
        await until(lambda: w.model.requests)
        call.cancel()
        await asyncio.wait((call,))
        w.model.gate.set()
        await until(lambda: w.precache.status()["kept"] == 1)
        clock.advance(LAPSE_S + 1)
        assert keeper.keeping(b"digest") is Keeping.NOTHING
        assert w.precache.status()["kept"] == 0


async def test_without_free_room_it_is_not_kept_and_what_is_wiped_is_not_known():
    async with precache_world(StillClock()) as w:
        keeper = w.precache.for_peers
        w.pages.room_tokens = 10
        report = await keeper.keep(asked())
        assert report.outcome is WarmOutcome.NO_ROOM
        assert keeper.keeping(b"digest") is Keeping.NOTHING
        w.pages.room_tokens = 1000
        await keeper.keep(asked())
        await w.precache.wipe()
        assert keeper.keeping(b"digest") is Keeping.NOTHING
        assert await keeper.keep(asked(())) is None


async def test_prefixes_of_others_are_bounded(monkeypatch):
    monkeypatch.setattr(for_peers, "MOST_KEPT", 1)
    async with precache_world(StillClock()) as w:
        keeper = w.precache.for_peers
        await keeper.keep(asked())
        report = await keeper.keep(asked(name=b"another"))
        assert report.outcome is WarmOutcome.CROWDED


async def test_what_is_declared_here_too_is_warmed_once(tmp_path):
    folder = make_folder(tmp_path / "toy")
    declared = DeclaredPrompt(system="You are kind. " * 40)
    async with precache_world(StillClock(), prompts=[declared], folder=str(folder)) as w:
        changes = []
        w.precache.declared.changed = lambda: changes.append(1)
        w.precache.declared.warm("toy")
        while not w.warmed:
            await asyncio.sleep(0.001)
        await w.settle()
        (text,) = w.precache.declared.texts
        keeper = w.precache.for_peers
        assert keeper.keeping(text.digest) is Keeping.DECLARED
        report = await keeper.keep(asked(text.tokens, text.digest))
        assert (report.outcome, report.warmed.computed) == (WarmOutcome.WARM, 0)
        assert len(w.warmed) == len(changes) == 1
        assert len(keeper) == 0
        w.precache.declared.warm("toy")
        await w.settle()
        assert len(changes) == 1, "it is the same text"
