"""The prewarmer: one at a time, in order, only where nobody is in need, and never again after a
fault."""

from __future__ import annotations

import asyncio
import gc
import logging
import weakref
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kakeya.core.errors import PeerUnavailable
from kakeya.generation.retention import Retention
from kakeya.memory.arbiter.policy import PressureLevel
from kakeya.prefix.seam import Tokens, Warmed, WarmOutcome, WarmReport
from kakeya.prefix.warm import prewarm
from kakeya.prefix.warm.prewarm import Prewarmer
from kakeya.prefix.warm.warming import Kind, Prefix
from tests.fakes import FakeClock


@dataclass
class Source:
    """Keeps what was warmed, token by token; records what it was asked."""

    clock: FakeClock
    kept: dict[tuple[int, ...], float] = field(default_factory=dict)
    warmed: list[str] = field(default_factory=list)
    pinned: dict[str, tuple[int, ...]] = field(default_factory=dict)
    refusal: WarmReport | None = None
    has_free_room: bool = True
    unpinnable: WarmReport | None = None
    keeps: bool = True
    fault: Exception | None = None
    gate: asyncio.Event | None = None
    yields: WarmReport | None = None

    async def refuse(self, prefix: Prefix) -> WarmReport | None:
        return self.refusal

    async def keep(self, prefix: Prefix, tokens: Tokens) -> int:
        whole = tuple(tokens)
        lengths = [n for n in range(1, len(whole) + 1) if whole[:n] in self.kept]
        for n in lengths:
            self.kept[whole[:n]] = self.clock.mono()
        return max(lengths, default=0)

    async def refuse_pin(self, prefix: Prefix, tokens: Tokens, missing: int) -> WarmReport | None:
        return self.unpinnable

    def pin(self, prefix: Prefix, tokens: Tokens) -> None:
        self.pinned[prefix.key] = tuple(tokens)

    async def has_room(self, prefix: Prefix, tokens: int) -> bool:
        return self.has_free_room

    async def warm(self, prefix: Prefix, tokens: Tokens) -> Warmed | WarmReport:
        self.warmed.append(prefix.key)
        if self.gate is not None:
            await self.gate.wait()
        if self.yields is not None:
            return self.yields
        if self.fault is not None:
            raise self.fault
        there = await self.keep(prefix, tokens)
        if self.keeps:
            self.kept[tuple(tokens)[:-1]] = self.clock.mono()
        return Warmed(tokens=len(tokens), cached=there, computed=len(tokens) - 1 - there)

    def unpin(self, key: str) -> None:
        self.pinned.pop(key, None)


def prefix(key: str, tokens: Tokens = (1, 2, 3), **more: object) -> Prefix:
    async def render() -> Tokens:
        return tokens

    return Prefix(key=key, model_id="m", tokens=render, **more)


@dataclass
class World:
    clock: FakeClock
    source: Source
    prewarmer: Prewarmer
    running: asyncio.Task[None]

    async def settle(self) -> None:
        for _ in range(60):
            await asyncio.sleep(0)

    async def stop(self) -> None:
        self.running.cancel()
        with suppress(asyncio.CancelledError):
            await self.running


class StillClock(FakeClock):
    """Moves only by `advance`."""

    async def _jump(self) -> None:
        return None


@asynccontextmanager
async def world(keep_alive_s: float = 240.0, clock: FakeClock | None = None):
    clock = clock or StillClock()
    source = Source(clock)
    prewarmer = Prewarmer(source, clock=clock, keep_alive_s=keep_alive_s)
    built = World(clock, source, prewarmer, asyncio.ensure_future(prewarmer.run()))
    yield built
    await built.stop()


async def test_a_prefix_is_computed_once_and_then_found():
    async with world() as w:
        first = await w.prewarmer.ask(prefix("a", range(100)))
        assert first == WarmReport(
            outcome=WarmOutcome.WARM, warmed=Warmed(tokens=100, cached=0, computed=99)
        )
        again = await w.prewarmer.ask(prefix("a", range(100)))
        assert again.warmed == Warmed(tokens=100, cached=99, computed=0)
        assert w.source.warmed == ["a"]
        stats = w.prewarmer.stats
        assert (stats.computed_tokens, stats.cached_tokens) == (99, 99)
        assert stats.outcomes[WarmOutcome.WARM] == 2


async def test_who_waits_comes_first_then_turns_then_what_is_only_kept():
    async with world() as w:
        w.source.gate = asyncio.Event()
        w.prewarmer.submit(prefix("first", (9, 9)), Kind.KEPT)
        await w.settle()
        w.prewarmer.submit(prefix("kept", (1, 1)), Kind.KEPT)
        w.prewarmer.submit(prefix("turn", (2, 2)), Kind.TURN)
        w.prewarmer.submit(prefix("turn2", (4, 4)), Kind.TURN)
        asking = asyncio.ensure_future(w.prewarmer.ask(prefix("asked", (3, 3))))
        await w.settle()
        assert (w.prewarmer.stats.queued, w.prewarmer.stats.running) == (4, "first")
        w.source.gate.set()
        assert (await asking).outcome is WarmOutcome.WARM
        await w.settle()
        assert w.source.warmed == ["first", "asked", "turn", "turn2", "kept"]


async def test_a_later_prompt_takes_the_place_of_one_that_waits():
    async with world() as w:
        w.source.gate = asyncio.Event()
        w.prewarmer.submit(prefix("busy", (9, 9)), Kind.TURN)
        await w.settle()
        w.prewarmer.submit(prefix("a", range(5)), Kind.TURN)
        w.prewarmer.submit(prefix("a", range(8), is_kept=True), Kind.TURN)
        w.source.gate.set()
        await w.settle()
        assert w.source.warmed == ["busy", "a"]
        assert w.prewarmer.stats.kept_tokens == 8


async def test_who_asks_is_told_of_what_it_asked_for_whatever_comes_under_its_key():
    async with world() as w:
        w.source.gate = asyncio.Event()
        w.prewarmer.submit(prefix("busy", (9, 9)), Kind.TURN)
        await w.settle()
        asking = [
            asyncio.ensure_future(w.prewarmer.ask(prefix("a", range(10 * n, 11 * n))))
            for n in (5, 7)
        ]
        await w.settle()
        w.prewarmer.submit(prefix("a", range(8), is_kept=True), Kind.TURN)
        assert w.prewarmer.stats.queued == 3
        w.source.gate.set()
        assert [(await one).warmed.tokens for one in asking] == [5, 7]
        await w.settle()
        assert w.source.warmed == ["busy", "a", "a", "a"]
        assert w.prewarmer.stats.kept_tokens == 8


@pytest.mark.parametrize("level", [PressureLevel.LOW, PressureLevel.CRITICAL])
async def test_under_pressure_nothing_begins_and_what_runs_ends(level):
    async with world() as w:
        w.source.gate = asyncio.Event()
        asking = asyncio.ensure_future(w.prewarmer.ask(prefix("a")))
        await w.settle()
        w.prewarmer.pressed(level)
        report = await asking
        assert (report.outcome, report.reason) == (
            WarmOutcome.PRESSURE,
            "memory became short meanwhile",
        )
        report = await w.prewarmer.ask(prefix("b"))
        assert report.reason == f"memory pressure is {level.name.lower()}"
        assert w.source.warmed == ["a"]
        w.source.gate.set()
        w.prewarmer.pressed(PressureLevel.NOMINAL)
        assert (await w.prewarmer.ask(prefix("a"))).outcome is WarmOutcome.WARM
        assert w.prewarmer.stats.outcomes[WarmOutcome.PRESSURE] == 2


async def test_without_free_room_nothing_is_computed():
    async with world() as w:
        w.source.has_free_room = False
        report = await w.prewarmer.ask(prefix("a", range(100)))
        assert report.outcome is WarmOutcome.NO_ROOM
        assert "99 tokens" in report.reason
        assert w.source.warmed == []


async def test_a_model_that_is_away_is_not_asked_but_what_is_there_of_it_is_kept():
    async with world() as w:
        await w.prewarmer.ask(prefix("a", range(10), is_kept=True))
        w.source.refusal = WarmReport(outcome=WarmOutcome.AWAY, reason="m is unloaded")
        assert (await w.prewarmer.ask(prefix("b"))).outcome is WarmOutcome.AWAY
        await w.settle()
        w.clock.advance(241)
        await w.settle()
        assert w.prewarmer.stats.refreshed == 1
        assert w.source.warmed == ["a"]


async def test_a_fault_is_told_once_and_not_tried_again(caplog):
    async with world() as w:
        w.source.fault = PeerUnavailable("the engine is gone")
        for _ in range(3):
            report = await w.prewarmer.ask(prefix("a", is_kept=True))
            assert report == WarmReport(outcome=WarmOutcome.FAILED, reason="the engine is gone")
        w.clock.advance(100_000)
        await w.settle()
        assert w.source.warmed == ["a"] * 3
        assert w.prewarmer.stats.kept == 0
        told = [r for r in caplog.records if "could not be warmed" in r.message]
        assert [r.levelno for r in told] == [logging.WARNING]
        w.source.fault = None
        assert (await w.prewarmer.ask(prefix("a"))).outcome is WarmOutcome.WARM


async def test_a_prefix_that_cannot_be_rendered_is_a_fault_of_its_own():
    async def broken() -> Tokens:
        raise PeerUnavailable("no template")

    async with world() as w:
        report = await w.prewarmer.ask(Prefix(key="a", model_id="m", tokens=broken))
        assert report.reason == "no template"
        assert (await w.prewarmer.ask(prefix("b"))).outcome is WarmOutcome.WARM


async def test_a_fault_of_ours_ends_the_task_and_not_those_who_wait():
    w = World(clock := StillClock(), source := Source(clock), *_built(source, clock))
    source.fault = RuntimeError("a bug")
    report = await w.prewarmer.ask(prefix("a"))
    assert report.outcome is WarmOutcome.FAILED
    with pytest.raises(RuntimeError, match="a bug"):
        await w.running


def _built(source, clock):
    prewarmer = Prewarmer(source, clock=clock, keep_alive_s=240.0)
    return prewarmer, asyncio.ensure_future(prewarmer.run())


async def test_kept_prefixes_are_seen_again_within_their_window():
    async with world(clock=FakeClock()) as w:
        w.prewarmer.submit(prefix("short", range(5), is_kept=True), Kind.KEPT)
        w.prewarmer.submit(
            prefix("long", range(50, 55), is_kept=True, retention=Retention.LONG), Kind.KEPT
        )
        began = w.clock.mono()
        while w.clock.mono() < began + 8_000:
            await w.clock.sleep(10.0)
            for first, window in ((0, 300), (50, 3600)):
                at = w.source.kept.get(tuple(range(first, first + 4)), began)
                assert w.clock.mono() - at <= window
        assert w.source.warmed == ["short", "long"]
        assert w.prewarmer.stats.refreshed > 30
        assert w.prewarmer.stats.kept == 2


async def test_what_went_for_others_is_computed_again_at_its_deadline():
    async with world() as w:
        await w.prewarmer.ask(prefix("a", range(5), is_kept=True))
        w.source.kept.clear()
        w.clock.advance(239)
        await w.settle()
        assert w.source.warmed == ["a"]
        w.prewarmer.used("a")
        w.clock.advance(239)
        await w.settle()
        assert w.source.warmed == ["a"]
        w.clock.advance(2)
        await w.settle()
        assert w.source.warmed == ["a", "a"]


async def test_what_was_computed_in_vain_is_not_called_warm_nor_tried_again_at_once():
    async with world() as w:
        w.source.keeps = False
        report = await w.prewarmer.ask(prefix("a", range(5)))
        assert (report.outcome, report.warmed.computed) == (WarmOutcome.NO_ROOM, 4)
        w.prewarmer.submit(prefix("sys", range(9), is_kept=True), Kind.KEPT)
        await w.settle()
        w.clock.advance(239)
        await w.settle()
        assert w.source.warmed == ["a", "sys"]
        w.source.keeps = True
        w.clock.advance(2)
        await w.settle()
        assert w.source.warmed == ["a", "sys", "sys"]
        assert w.prewarmer.stats.outcomes[WarmOutcome.WARM] == 1


async def test_a_declared_prompt_that_met_pressure_comes_back_when_it_is_over():
    async with world() as w:
        w.prewarmer.pressed(PressureLevel.LOW)
        w.prewarmer.submit(prefix("sys", range(5), is_kept=True), Kind.KEPT)
        await w.settle()
        w.prewarmer.pressed(PressureLevel.NOMINAL)
        w.clock.advance(prewarm.RETRY_S + 1)
        await w.settle()
        assert w.source.warmed == ["sys"]


async def test_what_a_kept_prefix_was_rendered_from_is_let_go():
    class Rendering:
        async def __call__(self) -> Tokens:
            return range(9)

    async with world() as w:
        rendering = Rendering()
        held = weakref.ref(rendering)
        w.prewarmer.submit(Prefix(key="a", model_id="m", tokens=rendering, is_kept=True), Kind.TURN)
        del rendering
        await w.settle()
        gc.collect()
        assert held() is None
        w.source.kept.clear()
        w.clock.advance(241)
        await w.settle()
        assert w.source.warmed == ["a", "a"]


async def test_what_is_forgotten_is_not_looked_after():
    async with world() as w:
        await w.prewarmer.ask(prefix("a", range(5), is_kept=True))
        w.source.kept.clear()
        w.prewarmer.forget("a")
        w.prewarmer.forget("unknown")
        w.clock.advance(10_000)
        await w.settle()
        assert w.source.warmed == ["a"]
        assert (w.prewarmer.stats.kept, w.prewarmer.stats.kept_tokens) == (0, 0)


@pytest.mark.parametrize("kind", [Kind.TURN, Kind.KEPT])
async def test_what_is_forgotten_while_it_is_computed_is_not_looked_after_either(kind):
    async with world() as w:
        w.source.gate = asyncio.Event()
        w.prewarmer.submit(prefix("a", range(5), is_kept=True, is_pinned=True), kind)
        await w.settle()
        w.prewarmer.forget("a")
        w.source.gate.set()
        await w.settle()
        assert (w.prewarmer.stats.kept, w.source.pinned) == (0, {})
        w.clock.advance(241)
        await w.settle()
        assert w.prewarmer.stats.refreshed == 0


async def test_what_is_forgotten_while_it_waits_is_computed_only_for_those_who_asked():
    async with world() as w:
        w.source.gate = asyncio.Event()
        w.prewarmer.submit(prefix("busy", (9, 9)), Kind.TURN)
        await w.settle()
        pin = prefix("a", range(5), is_kept=True, is_pinned=True)
        asking = asyncio.ensure_future(w.prewarmer.ask(pin))
        w.prewarmer.submit(prefix("b", range(5), is_kept=True), Kind.TURN)
        await w.settle()
        for key in "ab":
            w.prewarmer.forget(key)
        w.source.gate.set()
        report = await asking
        assert (report.outcome, report.is_pinned) == (WarmOutcome.WARM, False)
        await w.settle()
        assert w.source.warmed == ["busy", "a"]
        assert (w.prewarmer.stats.kept, w.source.pinned) == (0, {})


async def test_a_fault_of_one_prompt_is_none_of_another_that_waits_under_its_key():
    async with world() as w:
        told = asyncio.Event()

        async def broken() -> Tokens:
            await told.wait()
            raise PeerUnavailable("no template")

        asking = asyncio.ensure_future(
            w.prewarmer.ask(Prefix(key="a", model_id="m", tokens=broken))
        )
        await w.settle()
        w.prewarmer.submit(prefix("a", range(7), is_kept=True), Kind.TURN)
        told.set()
        assert (await asking).outcome is WarmOutcome.FAILED
        await w.settle()
        assert w.prewarmer.stats.kept_tokens == 7


async def test_pins_end_with_their_prefix_and_with_the_next_one_under_their_key():
    async with world() as w:
        for length in (5, 5, 7):
            pin = prefix("a", range(length), is_kept=True, is_pinned=True)
            assert (await w.prewarmer.ask(pin)).is_pinned
            assert w.source.pinned == {"a": tuple(range(length))}
        assert not (await w.prewarmer.ask(prefix("a", range(7)))).is_pinned
        assert w.source.pinned == {}
        assert w.prewarmer.stats.kept == 0
        await w.prewarmer.ask(prefix("a", range(7), is_kept=True, is_pinned=True))
        w.prewarmer.forget("a")
        assert w.source.pinned == {}


async def test_a_pin_is_looked_after_for_its_retention_and_ends_with_it():
    async with world() as w:
        pin = prefix("a", range(5), is_kept=True, is_pinned=True, retention=Retention.LONG)
        await w.prewarmer.ask(pin)
        await w.settle()
        w.clock.advance(3000)
        await w.settle()
        assert (w.prewarmer.stats.refreshed, list(w.source.pinned)) == (1, ["a"])
        w.clock.advance(599)
        w.prewarmer.used("a")
        await w.settle()
        assert list(w.source.pinned) == ["a"]
        w.clock.advance(2)
        await w.settle()
        assert (w.prewarmer.stats.kept, w.source.pinned) == (0, {})


async def test_a_pin_that_is_sent_again_lasts_from_then_on():
    async with world() as w:
        pin = prefix("a", range(5), is_kept=True, is_pinned=True)
        for _ in range(3):
            await w.prewarmer.ask(pin)
            await w.settle()
            w.clock.advance(299)
            await w.settle()
        assert list(w.source.pinned) == ["a"]
        w.clock.advance(2)
        await w.settle()
        assert w.source.pinned == {}


async def test_what_may_not_be_pinned_is_not_computed_for_it_and_what_was_pinned_stays():
    async with world() as w:
        await w.prewarmer.ask(prefix("a", range(5), is_kept=True, is_pinned=True))
        w.source.unpinnable = WarmReport(outcome=WarmOutcome.NO_ROOM, reason="too many pins")
        report = await w.prewarmer.ask(prefix("a", range(9), is_kept=True, is_pinned=True))
        assert (report.outcome, report.reason) == (WarmOutcome.NO_ROOM, "too many pins")
        assert (report.is_pinned, report.warmed.computed) == (False, 0)
        assert (w.source.warmed, w.source.pinned) == (["a"], {"a": (0, 1, 2, 3, 4)})


@pytest.mark.parametrize("keeps", [True, False])
async def test_what_could_not_be_warmed_is_not_pinned_as_far_as_it_is_there(keeps):
    async with world() as w:
        await w.prewarmer.ask(prefix("a", range(5)))
        w.source.has_free_room, w.source.keeps = not keeps, keeps
        pin = prefix("b", range(9), is_kept=True, is_pinned=True)
        report = await w.prewarmer.ask(pin)
        assert (report.outcome, report.is_pinned) == (WarmOutcome.NO_ROOM, False)
        assert w.source.pinned == {}


async def test_who_asks_and_leaves_again_and_again_fills_no_queue():
    async with world() as w:
        w.source.gate = asyncio.Event()
        w.prewarmer.submit(prefix("busy", (9, 9)), Kind.TURN)
        await w.settle()
        for _ in range(5):
            leaving = asyncio.ensure_future(w.prewarmer.ask(prefix("a")))
            await w.settle()
            leaving.cancel()
            await w.settle()
        assert w.prewarmer.stats.queued == 1


async def test_of_too_many_kept_tokens_the_least_used_go(monkeypatch):
    monkeypatch.setattr(prewarm, "MAX_KEPT_TOKENS", 25)
    async with world() as w:
        for first, key in ((0, "a"), (100, "b"), (200, "c")):
            if key == "c":
                w.prewarmer.used("a")
            await w.prewarmer.ask(prefix(key, range(first, first + 10), is_kept=True))
        assert w.prewarmer.stats.kept_tokens == 20
        await w.settle()
        w.clock.advance(300)
        await w.settle()
        assert w.prewarmer.stats.refreshed == 2
        assert set(w.prewarmer._kept) == {"a", "c"}


async def test_of_too_many_kept_tokens_those_of_pins_stay(monkeypatch):
    monkeypatch.setattr(prewarm, "MAX_KEPT_TOKENS", 25)
    async with world() as w:
        for first, key in ((0, "a"), (100, "b"), (200, "c")):
            ids = range(first, first + 10)
            await w.prewarmer.ask(prefix(key, ids, is_kept=True, is_pinned=key == "a"))
        assert set(w.prewarmer._kept) == {"a", "c"}
        assert set(w.source.pinned) == {"a"}


async def test_of_too_many_that_wait_the_last_is_refused(monkeypatch):
    monkeypatch.setattr(prewarm, "MAX_QUEUED", 2)
    async with world() as w:
        w.source.gate = asyncio.Event()
        w.prewarmer.submit(prefix("runs"), Kind.TURN)
        await w.settle()
        w.prewarmer.submit(prefix("a"), Kind.TURN)
        w.prewarmer.submit(prefix("b"), Kind.TURN)
        assert (await w.prewarmer.ask(prefix("c"))).outcome is WarmOutcome.CROWDED
        w.prewarmer.submit(prefix("b"), Kind.TURN)
        assert w.prewarmer.stats.queued == 2
        w.source.gate.set()


async def test_who_leaves_does_not_disturb_the_others():
    async with world() as w:
        w.source.gate = asyncio.Event()
        leaving = asyncio.ensure_future(w.prewarmer.ask(prefix("a")))
        await w.settle()
        leaving.cancel()
        w.source.gate.set()
        assert (await w.prewarmer.ask(prefix("b"))).outcome is WarmOutcome.WARM


async def test_work_that_gave_way_is_no_fault_and_comes_again_where_it_is_kept():
    async with world() as w:
        w.source.yields = WarmReport(outcome=WarmOutcome.PRESSURE, reason="a model waits for room")
        w.prewarmer.submit(prefix("sys", range(5), is_kept=True), Kind.KEPT)
        await w.settle()
        assert await w.prewarmer.ask(prefix("a")) == w.source.yields
        w.source.yields = None
        await w.settle()
        w.clock.advance(prewarm.RETRY_S + 1)
        await w.settle()
        assert w.source.warmed == ["sys", "a", "sys"]
        assert w.prewarmer.stats.outcomes[WarmOutcome.FAILED] == 0


async def test_at_the_end_whoever_waits_is_told():
    async with world() as w:
        w.source.gate = asyncio.Event()
        asking = [asyncio.ensure_future(w.prewarmer.ask(prefix(k))) for k in "ab"]
        await w.settle()
        await w.stop()
        assert [(await one).reason for one in asking] == ["this node is stopping"] * 2


async def test_requests_that_leave_no_time_are_no_fault(monkeypatch):
    monkeypatch.setattr(prewarm, "PREWARM_S", 0.01)
    async with world() as w:
        w.source.gate = asyncio.Event()
        report = await w.prewarmer.ask(prefix("a"))
        assert report.outcome is WarmOutcome.LATE


actions = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), st.sampled_from("abcd"), st.sampled_from(list(Kind))),
        st.tuples(st.just("pin"), st.sampled_from("abcd")),
        st.tuples(st.just("press"), st.sampled_from(list(PressureLevel))),
        st.tuples(st.just("forget"), st.sampled_from("abcd")),
        st.tuples(st.just("lose")),
        st.tuples(st.just("advance"), st.floats(0, 300)),
        st.tuples(st.just("fail"), st.booleans()),
        st.tuples(st.just("turns"), st.integers(1, 6)),
    ),
    max_size=25,
)


@settings(max_examples=60, deadline=None)
@given(actions)
def test_whatever_comes_one_runs_at_a_time_none_under_pressure_and_only_what_is_wanted_is_kept(
    script,
):
    asyncio.run(_play(script))


async def _play(script):
    async with world() as w:
        at_once, most = 0, 0
        level = PressureLevel.NOMINAL
        compute = w.source.warm

        async def warm(prefix, tokens):
            nonlocal at_once, most
            assert level is PressureLevel.NOMINAL
            at_once += 1
            most = max(most, at_once)
            try:
                await asyncio.sleep(0)
                return await compute(prefix, tokens)
            finally:
                at_once -= 1

        w.source.warm = warm
        waiters, wanted = [], set()
        for name, *more in script:
            match name:
                case "submit" if more[1] is Kind.ASKED:
                    waiters.append(
                        asyncio.ensure_future(w.prewarmer.ask(prefix(more[0], range(9))))
                    )
                    await asyncio.sleep(0)
                case "pin":
                    wanted.add(more[0])
                    pin = prefix(more[0], range(7), is_kept=True, is_pinned=True)
                    waiters.append(asyncio.ensure_future(w.prewarmer.ask(pin)))
                    await asyncio.sleep(0)
                case "submit":
                    wanted.add(more[0])
                    ids = range(ord(more[0]), ord(more[0]) + 9)
                    w.prewarmer.submit(prefix(more[0], ids, is_kept=True), more[1])
                case "press":
                    level = more[0]
                    w.prewarmer.pressed(level)
                case "forget":
                    wanted.discard(more[0])
                    w.prewarmer.forget(more[0])
                case "lose":
                    w.source.kept.clear()
                case "advance":
                    w.clock.advance(more[0])
                case "fail":
                    w.source.fault = PeerUnavailable("gone") if more[0] else None
                case "turns":
                    for _ in range(more[0]):
                        await asyncio.sleep(0)
        level, w.source.fault = PressureLevel.NOMINAL, None
        w.prewarmer.pressed(level)
        for _ in range(4):
            await w.settle()
        assert most <= 1
        assert all(waiter.done() for waiter in waiters)
        stats = w.prewarmer.stats
        assert (stats.queued, stats.running) == (0, "")
        assert stats.kept == len(w.prewarmer._deadlines)
        kept = w.prewarmer._kept
        assert kept.keys() <= wanted
        assert w.source.pinned.keys() == {key for key in kept if kept[key].prefix.is_pinned}
        assert stats.kept_tokens == sum(len(k.tokens or ()) for k in w.prewarmer._kept.values())
