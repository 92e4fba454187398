"""Ranks that other nodes ask for: one call has each, and the leader hears of it from the start."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kakeya.backends.engine.process import EngineProcess
from kakeya.backends.ring import host as host_module
from kakeya.backends.ring.canary_node import GroupChecks
from kakeya.backends.ring.host import RankHost, RankOrder
from kakeya.backends.ring.members import Memberships
from kakeya.backends.ring.service import RingService
from kakeya.backends.ring.spec import RingSeat, RingSpec
from kakeya.core.errors import Conflict, PeerUnavailable
from kakeya.core.units import MIB
from kakeya.generation.spec import EMBEDDED_FOLDER
from kakeya.memory.api import MemoryArbiter
from kakeya.v1 import ring_pb2 as pb
from kakeya.wire import beats
from tests.fakes import FakeClock

SPEC = RingSpec(
    name="big",
    source="kakeya-tiny",
    split="tensor",
    seats=(RingSeat(node="left"), RingSeat(node="right")),
)


def order(leader: str) -> RankOrder:
    return RankOrder(spec=SPEC, rank=1, leader=leader)


@asynccontextmanager
async def hosting(clock: FakeClock | None = None) -> AsyncIterator[tuple[MemoryArbiter, RankHost]]:
    clock = clock or FakeClock()
    own: Any = SimpleNamespace(
        folder=lambda _: EMBEDDED_FOLDER / "kakeya-tiny", label=lambda: "right"
    )
    command: Any = None
    async with MemoryArbiter(budget=4000 * MIB, clock=clock, grace_s=0) as arbiter:
        host = RankHost(arbiter, own, command, None, clock=clock, on_change=lambda: None)
        yield arbiter, host


async def test_two_leaders_that_ask_at_once_for_one_rank_do_not_share_its_memory() -> None:
    async with hosting() as (arbiter, host), AsyncExitStack() as stack:
        calls = [stack.enter_async_context(host.lent(order(leader))) for leader in ("a", "b")]
        found = await asyncio.gather(*calls, return_exceptions=True)
        assert sorted(isinstance(one, Conflict) for one in found) == [False, True], found
        assert len(arbiter.status().residents) == 1
        assert len(host.ranks) == 1
        await stack.aclose()
        assert [*host.ranks] == []


async def test_a_rank_of_another_group_keeps_no_node_from_the_audits_of_its_own(
    tmp_path: Path,
) -> None:
    async with hosting() as (arbiter, host), host.lent(order("a")):
        model: Any = SimpleNamespace(model_id="own", capability="text")
        engines: Any = SimpleNamespace(models=lambda: (), alone={"own": model})
        checks = GroupChecks(engines, arbiter, data_dir=tmp_path, clock=FakeClock())
        checks.add(model)
        assert model.check._is_idle()


async def test_a_rank_far_above_its_lease_and_the_budget_is_ended_and_no_other_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = FakeClock()
    async with hosting(clock) as (arbiter, host), host.lent(order("a")) as rank:
        killed: list[str] = []
        process: Any = SimpleNamespace(pid=7, has_exited=False, aclose=_closed)

        def kill(why: str) -> None:
            killed.append(why)
            process.has_exited = True

        process.kill, rank.process = kill, process
        budget = arbiter.budget_bytes
        for used, ends in ((rank.bytes, 0), (budget, 0), (budget * 21 // 20, 0), (2 * budget, 1)):
            monkeypatch.setattr(
                "kakeya.backends.ring.host.resident_bytes", lambda _, used=used: used
            )
            for _ in range(10):
                host.measure()
                clock.advance(1.0)
            assert len(killed) == ends, killed
        assert "of a lease of" in killed[0]


async def _closed(_: float) -> None:
    pass


async def test_a_leader_that_asks_again_gets_the_rank_anew() -> None:
    async with hosting() as (_, host):
        first = asyncio.Event()

        async def call() -> None:
            async with host.lent(order("a")) as rank:
                first.set()
                await rank.leaves.wait()

        earlier = asyncio.create_task(call())
        await first.wait()
        async with host.lent(order("a")) as again:
            assert host.ranks == (again,)
        await earlier


class Call:
    """The context of a call, with what was written."""

    def __init__(self) -> None:
        self.written: list[pb.RankReport] = []

    async def write(self, report: pb.RankReport) -> None:
        self.written.append(report)

    def peer(self) -> str:
        return "ipv4:10.0.0.1:5757"

    async def abort(self, status: object, said: str, **_: object) -> None:
        raise ValueError(said)


async def test_a_leader_hears_of_a_rank_while_models_make_room_for_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(beats, "BEAT_S", 0.001)
    call, room = Call(), asyncio.Event()

    @asynccontextmanager
    async def lent(_: RankOrder) -> AsyncIterator[Any]:
        await room.wait()
        yield SimpleNamespace(port=1, folder=EMBEDDED_FOLDER / "kakeya-tiny", bytes=2, reports=none)

    async def none() -> AsyncIterator[Any]:
        for nothing in list[Any]():
            yield nothing

    host, members = SimpleNamespace(lent=lent, measure=lambda: None), Memberships(tmp_path)
    groups: Any = SimpleNamespace(host=host, members=members)
    context: Any = call
    request = pb.HostRankRequest(group=SPEC.to_wire(), rank=1, leader="left")
    serving = asyncio.create_task(RingService(groups, lambda: False).HostRank(request, context))
    while len(call.written) < 3:
        assert not serving.done()
        await asyncio.sleep(0)
    assert not any(report.HasField("lent") for report in call.written)
    room.set()
    await serving
    told = [report.lent for report in call.written if report.HasField("lent")]
    assert [(one.leader_host, one.lent_bytes) for one in told] == [("10.0.0.1", 2)]
    assert told[0].facts["weights"]


async def test_a_node_that_is_drained_lends_no_new_rank() -> None:
    groups: Any = SimpleNamespace(host=None)
    context: Any = Call()
    request = pb.HostRankRequest(group=SPEC.to_wire(), rank=1, leader="left")
    with pytest.raises(ValueError, match="takes no ranks: it is being drained"):
        await RingService(groups, lambda: True).HostRank(request, context)


async def test_a_wish_that_was_ended_here_gets_no_rank(tmp_path: Path) -> None:
    members, call = Memberships(tmp_path), Call()
    await members.note(SPEC.name, "left", "wish")
    await members.end(SPEC.name, "left")
    groups: Any = SimpleNamespace(host=None, members=members)
    context: Any = call
    request = pb.HostRankRequest(group=replace(SPEC, wish="wish").to_wire(), rank=1, leader="left")
    await RingService(groups, lambda: False).HostRank(request, context)
    assert [report.is_ended for report in call.written] == [True]


async def test_a_rank_that_died_before_its_group_ended_it_is_told_as_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rank 0 may be faster: its ring broke, and it had the group end."""
    monkeypatch.setattr(host_module, "_SEEN_S", 60.0)
    async with hosting() as (_, host), host.lent(order("a")) as rank:
        rank.process = process = await EngineProcess.start(
            "rank", lambda _: ("sleep", "600"), Path("none")
        )
        try:
            reports = asyncio.create_task(anext(rank.reports()))
            await asyncio.sleep(0)
            os.kill(process.pid, signal.SIGKILL)
            rank.leaves.set()
            rank.poke()
            with pytest.raises(PeerUnavailable, match="rank 1 ended by signal SIGKILL"):
                await reports
        finally:
            await process.aclose(0)
