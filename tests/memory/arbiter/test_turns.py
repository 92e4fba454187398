"""Models that do not fit together take turns, however busy each of them is.

Clients in closed loops, who come again when they are told to: each is served, those who use a model
are never cut off, and nobody waits for much longer than the uses take that are in the way.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import count, islice

import hypothesis.strategies as st
import pytest
from hypothesis import given

from benchmarks.swap import collation_loads
from kakeya.core import errors
from kakeya.memory.arbiter.resident import LeaseId, RequestPriority, State, Warmth
from tests.laws import law
from tests.memory.worlds import World, ask, key

WARM = Warmth(stay_warm_s=300)


@dataclass
class Client:
    """Asks, uses, and asks again at once; comes again `late_s` after it was told to."""

    model: str
    use_s: float
    begins_s: float = 0.0
    priority: RequestPriority = RequestPriority.NORMAL
    late_s: float = 0.0
    asked_s: float | None = None
    lease: LeaseId | None = None
    waits_s: list[float] = field(default_factory=list)
    refusals: int = 0


@dataclass
class Town:
    """Room for one of its models at a time."""

    clients: list[Client]
    world: World = field(default_factory=lambda: World.of(100))
    todo: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    numbers: count[int] = field(default_factory=count)

    def live(self, seconds: float) -> None:
        for client in self.clients:
            self._later(client.begins_s, partial(self._ask, client))
        world = self.world
        while world.now < seconds:
            due = world.arbiter.next_wake_mono(world.now)
            world.now = min(self.todo[0][0], seconds if due is None else due)
            while self.todo and self.todo[0][0] <= world.now:
                heapq.heappop(self.todo)[2]()
            world.take(world.arbiter.settle(world.now))
            for client in self.clients:
                self._follow(client)

    def _later(self, at: float, step: Callable[[], None]) -> None:
        heapq.heappush(self.todo, (at, next(self.numbers), step))

    def _ask(self, client: Client) -> None:
        if client.asked_s is None:
            client.asked_s = self.world.now
        client.lease = self.world.ask(
            ask(client.model, "text-target", 60, priority=client.priority, warmth=WARM)
        )

    def _follow(self, client: Client) -> None:
        """Use what was granted, come again where that was refused."""
        now, lease = self.world.now, client.lease
        if lease in self.world.grants and client.asked_s is not None:
            client.waits_s.append(now - client.asked_s)
            client.asked_s = None
            self._later(now + client.use_s, partial(self._end, client))
        elif lease in self.world.refusals:
            error = self.world.refusals[lease]
            assert isinstance(error, errors.DrainTimeout)
            assert error.retry_after_s is not None
            client.lease = None
            client.refusals += 1
            self._later(now + error.retry_after_s + client.late_s, partial(self._ask, client))

    def _end(self, client: Client) -> None:
        assert client.lease is not None
        lease, client.lease = client.lease, None
        self.world.release(lease)  # raises, if it was taken away
        self._ask(client)

    def longest_s(self, client: Client) -> float:
        """How long it waited at most, counting the wait that is not over."""
        since = self.world.now if client.asked_s is None else client.asked_s
        return max((*client.waits_s, self.world.now - since))


def busy(model: str, use_s: float, clients: int = 4) -> list[Client]:
    """Clients that leave a model no pause between them."""
    return [Client(model, use_s, begins_s=use_s * n / clients) for n in range(clients)]


def limit_s(town: Town) -> float:
    """Ageing, drains that are refused and the ways back, and each other model's turn: who waits for
    one comes when all who use it have let go."""
    models = {client.model for client in town.clients}
    return 60.0 + 2 * len(models) * max(client.use_s for client in town.clients)


@pytest.mark.parametrize("use_s", [8.0, 25.0, 100.0, 400.0])
@pytest.mark.parametrize("priority", list(RequestPriority))
def test_who_goes_on_asking_gets_the_room_of_a_busy_model(
    use_s: float, priority: RequestPriority
) -> None:
    """Uses overlap so that the model is never idle, and are longer than a drain is waited for."""
    one = Client("text:b", 1.0, begins_s=0.8 * use_s, priority=priority, late_s=2)
    town = Town([*busy("text:a", use_s), one])
    town.live(5 * use_s + 200)
    for client in town.clients:
        assert client.waits_s, "never served"
        assert town.longest_s(client) <= limit_s(town)


@given(
    clients=st.lists(
        st.builds(
            Client,
            st.sampled_from(["text:a", "text:b", "text:c"]),
            st.floats(0.5, 90),
            st.floats(0, 30),
            st.sampled_from(list(RequestPriority)),
            st.floats(0, 4.9),
        ),
        min_size=2,
        max_size=8,
    )
)
@law(30, part=3)
def test_whoever_goes_on_asking_is_served(clients: list[Client]) -> None:
    """Of whichever priority: nobody starves behind a stream of others, nor do they behind it."""
    town = Town(clients)
    town.live(700)
    for client in clients:
        assert town.longest_s(client) <= limit_s(town)


def test_who_comes_again_finds_its_place_and_keeps_it_until_it_is_served() -> None:
    """The first time, nothing is kept while it is away: it may never come again."""
    world = World.of(100)
    uses = [world.lease(ask("text:a", "text-target", 60))]
    wish = ask("text:b", "text-target", 60)
    world.ask(wish)
    world.wait(15)
    uses.append(world.lease(ask("text:a", "text-target", 60)))
    again = world.ask(wish)
    assert world.arbiter.find(key("text:a")).state is State.DRAINING  # type: ignore[union-attr]
    world.wait(10)
    assert isinstance(world.refusals[again], errors.DrainTimeout)
    newcomer = world.ask(ask("text:a", "text-target", 60))
    for use in uses:
        world.release(use)
    assert newcomer not in world.grants
    assert world.resident == {"text"}
    assert world.lease(wish)


def test_a_place_lapses_when_nobody_comes_for_it() -> None:
    world = World.of(100)
    world.lease(ask("text:a", "text-target", 60))
    wish = ask("text:b", "text-target", 60)
    for _ in range(2):
        world.ask(wish)
        world.wait(15)
    newcomer = world.ask(ask("text:a", "text-target", 60))
    assert world.arbiter.snapshot().kept == (key("text:b"),)
    world.wait(4.9)
    assert newcomer not in world.grants
    world.wait(0.2)
    assert newcomer in world.grants
    assert world.arbiter.snapshot().kept == ()
    world.ask(wish)
    assert world.arbiter.find(key("text:a")).state is State.READY  # type: ignore[union-attr]


def test_a_place_is_that_of_its_priority_and_overtakes_no_equal() -> None:
    world = World.of(100)
    world.lease(ask("text:a", "text-target", 60))
    world.ask(ask("text:b", "text-target", 60))
    world.wait(15)
    urgent = ask("text:b", "text-target", 60, priority=RequestPriority.URGENT)
    batch = ask("text:b", "text-target", 60, priority=RequestPriority.BATCH)
    for wish in (batch, urgent):
        ticket = world.arbiter._tickets.get(world.ask(wish))
        assert not ticket.has_come_again


def test_one_use_that_takes_hours_keeps_others_from_the_same_model_for_some_time_only() -> None:
    """The door opens after 1, 2, 4, ... minutes, once for all who wait at it."""
    one = Client("text:b", 1.0, begins_s=10)
    others = [Client("text:a", 5.0, begins_s=12), Client("text:a", 7.0, begins_s=13)]
    town = Town([Client("text:a", 1e6), one, *others])
    town.live(3600)
    assert not one.waits_s
    for client in others:
        assert client.waits_s[-4:] == pytest.approx([120, 240, 480, 960], abs=20)


def turn_of_b() -> tuple[World, LeaseId, LeaseId]:
    """B was just loaded, with its lease; a request for A, older than an ageing step, waits."""
    world = World.of(100)
    use = world.lease(ask("text:a", "text-target", 60, warmth=WARM))
    other = world.ask(ask("text:b", "text-target", 60, warmth=WARM))
    world.wait(6)
    waiting = world.ask(ask("text:a", "text-target", 60, warmth=WARM))
    world.wait(6)
    world.release(use)
    assert other in world.grants
    return world, other, waiting


def test_requests_share_a_load_while_its_turn_lasts_and_no_longer() -> None:
    world, use, waiting = turn_of_b()
    for _ in range(4):
        again = world.lease(ask("text:b", "text-target", 60, warmth=WARM))
        world.release(use)
        use = again
        world.wait(1.2)
        assert waiting not in world.grants
    world.wait(0.3)
    late = world.ask(ask("text:b", "text-target", 60, warmth=WARM))
    assert late not in world.grants
    world.release(use)
    assert waiting in world.grants


def test_a_turn_ends_early_when_nobody_uses_the_model_or_a_more_urgent_request_wants_its_room() -> (
    None
):
    world, use, waiting = turn_of_b()
    world.release(use)
    world.wait(0.9)
    assert waiting not in world.grants
    world.wait(0.2)
    assert waiting in world.grants

    world, use, waiting = turn_of_b()
    urgent = ask("text:a", "text-target", 60, priority=RequestPriority.URGENT)
    wants = world.ask(urgent)
    world.release(use)
    assert {wants, waiting} <= world.grants.keys()


@pytest.mark.parametrize("clients", [4, 24])
def test_models_for_one_place_are_loaded_as_seldom_as_by_plain_collation(clients: int) -> None:
    """Requests in random order, each served as soon as its model is there."""
    rng = random.Random(clients)
    orders = [f"text:{rng.choice('abc')}" for _ in range(120)]
    world, coming = World.of(100), iter(orders)
    waiting = [
        world.ask(ask(one, "text-target", 60, warmth=WARM)) for one in islice(coming, clients)
    ]
    while waiting:
        served = next((lease for lease in waiting if lease in world.grants), None)
        world.wait(0.5 if served is None else 0.01)
        if served is not None:
            waiting.remove(served)
            world.release(served)
            waiting += [
                world.ask(ask(one, "text-target", 60, warmth=WARM)) for one in islice(coming, 1)
            ]
    loads = sum(plan.load is not None for plan in world.plans)
    assert loads <= collation_loads(orders, clients)
