"""News of peers in the log, by label: each change once, and nothing while all is well."""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine

import pytest

from benchmarks.virtual_fleet import VirtualFleet, VirtualNode
from benchmarks.virtual_time import run_virtual
from kakeya.core.tasks import Supervisor
from kakeya.fleet.liveness.news import UNJUDGED_S, PeerChanges, PeerNews, SeenPeer
from kakeya.fleet.view.suspicion import Doubt
from tests.fleet.nodes import make_card

Work = Callable[[VirtualFleet, VirtualNode], Coroutine[None, None, None]]


def in_a_fleet(work: Work) -> None:
    """Run `work` beside three nodes, with the news of the first one in the log."""

    async def run() -> None:
        fleet = VirtualFleet(3, seed=5, contacts=lambda index, _: (0, 1, 2), has_probes=True)
        first = next(iter(fleet.nodes.values()))
        async with Supervisor(first.clock) as tasks:
            tasks.start("news", PeerNews(first.registry, first.clock).run)
            fleet.start()
            await work(fleet, first)
            assert all(task.failures == 0 for task in tasks.health())
        await fleet.stop()

    run_virtual(run())


def test_an_idle_hour_is_silent_and_each_change_of_a_peer_is_one_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, logger="kakeya")

    def told() -> list[tuple[str, str]]:
        found = []
        for record in caplog.records:
            fields = record.kakeya_fields  # type: ignore[attr-defined]
            reason = f": {fields['reason']}" if "reason" in fields else ""
            found.append((record.message + reason, fields.get("peer", "")))
        caplog.clear()
        return sorted(found)

    async def live(fleet: VirtualFleet, _: VirtualNode) -> None:
        one, two = list(fleet.nodes.values())[1:]
        await fleet.run(60.0)
        appeared = "a peer appeared"
        assert told() == [(appeared, "mini 10.0.0.2"), (appeared, "mini 10.0.0.3")]
        await fleet.run(3600.0)
        assert told() == []
        await one.kill()
        await fleet.run(60.0)
        silent = "a peer does not answer: no other node reaches it either"
        assert told() == [(silent, "mini 10.0.0.2")]
        await fleet.run(600.0)
        assert told() == [("a peer is gone", "mini 10.0.0.2")]
        one.restart()
        await fleet.run(60.0)
        assert told() == [(appeared, "mini 10.0.0.2")]
        await two.suspend()
        await fleet.run(60.0)
        two.wake(slept_s=0.0)
        await fleet.run(60.0)
        assert told() == [
            ("a peer answers again", "mini 10.0.0.3"),
            (silent, "mini 10.0.0.3"),
        ]
        await two.leave()
        await fleet.run(60.0)
        assert [line for line in told() if line[1]] == [("a peer left", "mini 10.0.0.3")]

    in_a_fleet(live)


def test_a_doubt_that_ends_before_it_is_judged_is_no_news() -> None:
    changes, card = PeerChanges(), make_card("mini")

    def look(doubt: Doubt | None, mono: float) -> list[str]:
        return [news for news, _ in changes.look([SeenPeer(card, doubt)], mono)]

    assert look(Doubt.UNJUDGED, 0.0) == []  # nor is one of which nothing good was heard yet
    assert look(None, 1.0) == ["a peer appeared"]
    assert look(Doubt.UNJUDGED, 10.0) == []
    assert changes.is_unsettled
    assert look(None, 11.0) == []
    assert not changes.is_unsettled
    assert look(Doubt.UNJUDGED, 20.0) == []
    assert look(Doubt.UNJUDGED, 20.0 + UNJUDGED_S) == ["a peer does not answer"]
    assert look(Doubt.FLEET_WIDE, 40.0) == []
    assert look(None, 50.0) == ["a peer answers again"]
    assert look(Doubt.ASYMMETRIC, 60.0) == ["a peer does not answer"]


def test_what_relays_alone_tell_of_is_no_news_until_it_answers() -> None:
    changes, card = PeerChanges(), make_card("mini")
    assert [*changes.look([SeenPeer(card, is_hearsay=True)], 0.0)] == []
    assert [*changes.look([], 1.0)] == []
    assert [*changes.look([SeenPeer(card)], 2.0)] == [("a peer appeared", card)]
