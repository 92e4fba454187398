"""The gossip loop: when rounds happen, whom they reach, and what a split costs."""

from __future__ import annotations

import itertools
import logging
import random
import time
from collections.abc import Callable

import pytest

from kakeya.core.clock import SystemClock
from kakeya.core.tasks import Supervisor
from kakeya.fleet.cards.cards import Offer
from kakeya.fleet.cards.convert import MAX_BATCH_CARDS, join_cards, split_cards
from kakeya.fleet.gossip.gossip import FULL_EVERY, Gossip, GossipConfig, GossipStats
from kakeya.fleet.gossip.outcome import PeerOutcome, Round
from kakeya.fleet.gossip.sync import MAX_REPAIR_BYTES, Sync
from kakeya.fleet.gossip.targets import MAX_DIALS, choose_targets, fit_batch
from kakeya.fleet.view.registry import REMEMBER_S
from kakeya.fleet.view.slices import finish
from kakeya.wire.channels import Channels
from tests.fakes import FakeClock
from tests.fleet.nodes import NOW, make_registry, make_wire, running_node, verifier
from tests.waiting import LIMIT_S, until

# --- whom


def _choose(**sets: object) -> tuple[str, ...]:
    given = {"live": (), "remembered": (), "seeds": (), "own": (), "fanout": 3}
    return choose_targets(**(given | sets), rng=random.Random(4))  # type: ignore[arg-type]


def test_a_round_takes_fanout_live_peers_and_never_ourselves() -> None:
    live = [f"n{i}:1" for i in range(20)]
    chosen = _choose(live=live, own={"n3:1"})
    assert len(chosen) == 3
    assert "n3:1" not in chosen
    everybody = {a for s in range(99) for a in _pick(live, s)}
    assert everybody == set(live) - {"n3:1"}


def _pick(live: list[str], seed: int) -> tuple[str, ...]:
    return choose_targets(
        live=live, remembered=(), seeds=(), own={"n3:1"}, fanout=3, rng=random.Random(seed)
    )


def test_every_seed_that_is_not_live_is_tried_and_one_lost_address() -> None:
    chosen = _choose(
        live=["a:1"], seeds=["a:1", "s:1", "t:1", "me:1"], remembered=["x:1", "y:1"], own={"me:1"}
    )
    assert set(chosen) - {"x:1", "y:1"} == {"a:1", "s:1", "t:1"}
    assert len(chosen) == 4


def test_a_seed_that_is_also_remembered_is_tried_once() -> None:
    assert _choose(seeds=["s:1", "s:1"], remembered=["s:1"]) == ("s:1",)


def test_seeds_are_never_crowded_out_by_what_cards_claim() -> None:
    poison = [f"10.6.6.{i}:1" for i in range(250)]
    chosen = _choose(
        live=poison, remembered=poison, sightings=poison, seeds=[f"s{i}:1" for i in range(20)]
    )
    assert {f"s{i}:1" for i in range(20)} <= set(chosen)
    assert len(chosen) <= 20 + MAX_DIALS


def test_two_sightings_a_round_are_dialled_and_known_ones_are_not() -> None:
    chosen = _choose(live=["a:1"], sightings=["a:1", "b:1", "c:1", "d:1"], fanout=1)
    assert chosen[0] == "a:1"
    assert len(chosen) == 3


def test_what_may_not_be_dialled_is_passed_over_unless_a_person_typed_it() -> None:
    chosen = _choose(
        live=["127.0.0.1:1", "10.0.0.1:1"],
        remembered=["0.0.0.0:1"],
        sightings=["224.0.0.1:1"],
        seeds=["localhost:5"],
        may_dial=lambda address: address.startswith("10."),
    )
    assert chosen == ("localhost:5", "10.0.0.1:1")


def test_a_live_seed_is_dialled_though_the_policy_would_not() -> None:
    chosen = _choose(live=["localhost:5"], seeds=["localhost:5"], may_dial=lambda address: False)
    assert chosen == ("localhost:5",)


def test_the_fanout_never_grows_beyond_the_bound_of_a_round() -> None:
    live = [f"n{i}:1" for i in range(100)]
    assert len(_choose(live=live, fanout=50)) == MAX_DIALS


def test_alone_there_is_nobody_to_call() -> None:
    assert _choose() == ()


def test_a_view_larger_than_a_message_is_sent_in_random_parts_with_the_own_card() -> None:
    wires = [b"own", *(bytes([i]) * 96 for i in range(50))]
    assert fit_batch(wires, 10_000, random.Random(1)) == wires
    sent: set[bytes] = set()
    for seed in range(40):
        batch = fit_batch(wires, 1000, random.Random(seed))
        assert batch[0] == b"own"
        assert sum(map(len, batch)) <= 1000
        sent.update(batch)
    assert sent == set(wires)


# --- when


def _looping(
    clock: FakeClock,
    rounds: list[float],
    then: Callable[[Round], None] = lambda done: None,
    **config: object,
) -> Gossip:
    registry = make_registry(now=clock.wall())

    def note(done: Round) -> None:
        rounds.append(clock.mono())
        then(done)

    return Gossip(
        registry,
        GossipConfig(**config),  # type: ignore[arg-type]
        channels=None,  # type: ignore[arg-type] # nobody is called
        clock=clock,
        rng=random.Random(5),
        on_round=note,
    )


async def test_the_first_round_is_at_once_and_the_next_after_a_jittered_interval() -> None:
    clock, rounds = FakeClock(), []
    begin = clock.mono()
    async with Supervisor(clock) as supervisor:
        _looping(clock, rounds).start(supervisor)
        await until(lambda: len(rounds) >= 20)
    assert rounds[0] == begin
    gaps = [after - before for before, after in itertools.pairwise(rounds)]
    assert all(9.0 <= gap <= 11.0 for gap in gaps)
    assert max(gaps) - min(gaps) > 0.3


async def test_changes_of_the_own_card_share_one_early_round() -> None:
    clock, rounds = FakeClock(), []

    def change(done: Round) -> None:
        if len(rounds) == 1:
            for speed in (1.0, 2.0, 3.0, 3.0):
                gossip.announce(Offer(models=(verifier("m", speed),)))

    gossip = _looping(clock, rounds, change, interval_s=100.0, debounce_s=0.5, jitter=0.0)
    async with Supervisor(clock) as supervisor:
        gossip.start(supervisor)
        await until(lambda: len(rounds) >= 3)
    assert rounds[1] - rounds[0] == pytest.approx(0.5)
    assert rounds[2] - rounds[0] == pytest.approx(100.0)  # from the poke


async def test_an_unchanged_offer_wakes_nobody() -> None:
    clock, rounds = FakeClock(), []
    gossip = _looping(clock, rounds)
    own = gossip._registry.own
    gossip.announce(gossip._registry.offer)
    assert gossip._registry.own is own
    assert not gossip._wake.is_set()


# --- with real nodes


async def test_two_nodes_with_one_seed_find_each_other_and_log_each_round(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG, logger="kakeya.fleet")
    async with running_node("a") as a, running_node("b") as b:
        gossip = a.gossip(b.address)
        async with Supervisor(a.clock) as supervisor:
            gossip.start(supervisor)
            await until(lambda: a.known() == ["a", "b"] and b.known() == ["b", "a"])
            await until(lambda: gossip.stats.rounds == 1)
            assert all(task.failures == 0 for task in supervisor.health())
    assert [r.message for r in caplog.records if r.name == "kakeya.fleet.gossip.gossip"] == [
        "round"
    ]
    assert (gossip.stats.exchanges, gossip.stats.failures) == (1, 0)
    assert gossip.stats.cards_changed == 1


async def test_a_poke_spreads_a_new_offer_within_a_second() -> None:
    async with running_node("a") as a, running_node("b") as b:
        gossip = a.gossip(b.address, debounce_s=0.05)
        async with Supervisor(a.clock) as supervisor:
            gossip.start(supervisor)
            await until(lambda: "a" in b.known())
            gossip.announce(Offer(grpc_address=a.address, models=(verifier("new"),)))
            await until(lambda: bool(b.card_of("a").models))


async def test_a_farewell_reaches_the_live_peers() -> None:
    async with running_node("a", models=[verifier("m")]) as a, running_node("b") as b:
        await a.exchange(b.address)
        a.merge(make_registry("ghost", now=a.clock.wall(), address="127.0.0.1:1").own.wire)
        assert await a.gossip().farewell(timeout_s=2.0) == 1
        card = b.card_of("a")
        assert (card.models, card.ttl_s) == ((), 10.0)


class ShiftedClock(SystemClock):
    """The machine's clock, some time later."""

    later_s = 0.0

    def wall(self) -> float:
        return super().wall() + self.later_s

    def mono(self) -> float:
        return super().mono() + self.later_s


async def test_the_channel_to_a_forgotten_address_is_closed() -> None:
    clock = ShiftedClock()
    async with running_node("a", clock=clock) as a, running_node("b") as b:
        gossip = a.gossip()
        await gossip.round([b.address])
        assert a.channels.addresses == {b.address}
        clock.later_s = 121
        await gossip.round([])
        assert a.channels.addresses == {b.address}  # still remembered
        clock.later_s += REMEMBER_S + 1
        for _ in range(FULL_EVERY):
            await gossip.round([])
        assert not a.channels.addresses


async def test_a_machine_that_slept_doubts_everybody_before_its_next_round() -> None:
    """RELIABILITY row 12: no work is placed on cards from before the sleep."""
    clock = FakeClock()
    rounds: list[tuple[float, frozenset[str]]] = []
    registry = make_registry(now=clock.wall(), mono=clock.mono())
    wire = make_registry("peer", now=clock.wall()).own.wire
    registry.merge([wire], now=clock.wall(), mono=clock.mono())

    def note(done: Round) -> None:
        rounds.append((clock.mono(), registry.suspects()))
        if len(rounds) == 1:
            clock.shift_wall(1800.0)

    gossip = Gossip(
        registry,
        GossipConfig(interval_s=100.0),
        channels=Channels(),
        clock=clock,
        rng=random.Random(1),
        may_dial=lambda address: False,
        on_round=note,
    )
    async with Supervisor(clock) as supervisor:
        gossip.start(supervisor)
        await until(lambda: len(rounds) >= 2)
    (slept_mono, before), (woken_mono, after) = rounds[:2]
    assert (before, after) == (frozenset(), {"peer"})
    assert woken_mono - slept_mono <= 3.0


async def test_one_round_in_twelve_tells_one_peer_everything() -> None:
    async with running_node("a") as a, running_node("b") as b:
        gossip = a.gossip()
        sent = [(await gossip.round([b.address])).sent_bytes for _ in range(24)]
    usual = sent[1]
    assert [i for i, size in enumerate(sent) if i and size > 1.5 * usual] == [11, 23]


async def test_counts_of_rounds_add_up() -> None:
    good = PeerOutcome(address="a:1", changed=("x", "y"), dropped={})
    bad = PeerOutcome(address="b:1", error="b:1: gone", error_code="unavailable", dropped={})
    done = Round(outcomes=(good, bad), seconds=0.5, sent_bytes=100)
    stats = GossipStats().after(done, NOW).after(done, NOW + 1)
    assert (stats.rounds, stats.exchanges, stats.failures) == (2, 2, 2)
    assert (stats.cards_changed, stats.sent_bytes, stats.last_round_at) == (4, 200, NOW + 1)


def test_a_batch_has_no_more_cards_than_its_reader_takes() -> None:
    wires = [b"own", *(f"{number:04d}".encode() for number in range(MAX_BATCH_CARDS + 500))]
    batch = fit_batch(wires, 10_000_000, random.Random(1))
    assert len(batch) == MAX_BATCH_CARDS
    assert batch[0] == b"own"
    assert split_cards(join_cards(batch)) == batch


@pytest.fixture
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A target that is late is not taken for a silent one."""
    monkeypatch.setattr("kakeya.fleet.gossip.round.PATIENCE_S", LIMIT_S)


@pytest.mark.usefixtures("patience")
async def test_another_peer_is_asked_for_each_that_does_not_answer() -> None:
    async with running_node("a") as a, running_node("b") as b, running_node("c") as c:
        dead = "127.0.0.1:1"
        wires = [node.registry.own.wire for node in (b, c)]
        gone = make_wire("gone", at=time.time(), address=dead)
        a.registry.merge([*wires, gone], now=time.time(), mono=time.monotonic())
        gossip = a.gossip(fanout=1, timeout_s=LIMIT_S)
        asked_others = 0
        for _ in range(12):
            done = await gossip.round()
            addresses = [outcome.address for outcome in done.outcomes]
            assert len(addresses) == (2 if dead in addresses else 1)
            asked_others += dead in addresses
        assert asked_others


@pytest.mark.usefixtures("patience")
async def test_seeds_that_are_down_cost_no_further_exchange() -> None:
    async with running_node("a") as a, running_node("b") as b, running_node("c") as c:
        wires = [node.registry.own.wire for node in (b, c)]
        a.registry.merge(wires, now=time.time(), mono=time.monotonic())
        done = await a.gossip("127.0.0.1:1", fanout=1, timeout_s=LIMIT_S).round()
        assert len(done.outcomes) == 2


def test_between_nodes_with_digests_a_full_exchange_of_a_large_fleet_is_a_draw() -> None:
    registry = make_registry("me")
    wires = [make_wire(f"n{number}", platform="x" * 200) for number in range(1000)]
    registry.merge(wires, now=NOW, mono=0.0)
    sync = Sync(registry, rng=random.Random(1))
    asked = Sync(make_registry("you"), rng=random.Random(2)).batch(now=NOW, mono=0.0)
    drawn = finish(sync.answering_batch(asked, now=NOW, mono=0.0)).response
    assert len(drawn) < MAX_REPAIR_BYTES + 64 * 1024  # the beats of the drawn cards come with them
    plain = finish(
        sync.answering_batch(join_cards([make_wire("old", is_plain=True)]), now=NOW, mono=0.0)
    )
    assert len(split_cards(plain.response)) == 1003  # with me, you and old


async def test_a_card_without_room_for_all_is_told_of_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    many = [verifier(f"{at:02}" + "m" * 200) for at in range(64)]
    registry = make_registry("me", models=many)
    channels = Channels()
    gossip = Gossip(
        registry, GossipConfig(), channels=channels, clock=FakeClock(), rng=random.Random(1)
    )
    for _ in range(3):
        await gossip.round(())
    await channels.aclose()
    told = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert [record.message.partition(":")[0] for record in told] == ["this node's card is full"]
