"""The line of requests for a model's turns: the most urgent first, and no place is lost."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kakeya.core.errors import QueueFull
from kakeya.generation.waiting import WaitTeller
from kakeya.memory.arbiter.policy import Rules
from kakeya.memory.arbiter.resident import VISION, RequestPriority
from kakeya.memory.arbiter.runner import Lane
from tests.memory.toy import Toy, capability
from tests.memory.worlds import key

URGENT, NORMAL, BATCH = RequestPriority.URGENT, RequestPriority.NORMAL, RequestPriority.BATCH
RULES = Rules(age_s=5.0)


class Line:
    """A lane whose holders leave when a test says so."""

    def __init__(
        self, concurrency: int = 1, max_waiting: int = 10, run_s: float | None = None
    ) -> None:
        self.now = 0.0
        self.served: list[str] = []
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self.waits: dict[str, WaitTeller] = {}
        self._gates: dict[str, asyncio.Event] = {}
        offered = capability("see", VISION, Toy(), concurrency=concurrency, max_waiting=max_waiting)
        self.lane = Lane(key("m"), offered, RULES, mono=lambda: self.now, usual_s=lambda: run_s)

    async def come(self, name: str, priority: RequestPriority = NORMAL) -> None:
        self._gates[name] = asyncio.Event()
        self.waits[name] = WaitTeller(lambda: None)

        async def run() -> None:
            async with self.lane.turn(priority, self.waits[name]):
                self.served.append(name)
                await self._gates[name].wait()

        self.tasks[name] = asyncio.create_task(run())
        await _settle()

    async def leave(self, name: str) -> None:
        self._gates[name].set()
        await self.tasks.pop(name)
        await _settle()

    async def serve_all(self) -> list[str]:
        while running := [one for one in self.served if one in self.tasks]:
            await self.leave(running[0])
        return self.served

    def places(self) -> dict[str, int | None]:
        told = {name: wait.ask() for name, wait in self.waits.items()}
        return {name: wait.position for name, wait in told.items() if wait is not None}


async def _settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_the_most_urgent_is_next_and_equals_keep_their_order() -> None:
    line = Line()
    for name, priority in (("first", BATCH), ("a", BATCH), ("b", NORMAL), ("c", URGENT)):
        await line.come(name, priority)
    await line.come("d", NORMAL)
    assert line.places() == {"c": 1, "b": 2, "d": 3, "a": 4}
    assert await line.serve_all() == ["first", "c", "b", "d", "a"]
    assert line.places() == {}
    assert line.lane.is_empty


async def test_it_says_its_place_and_the_time_of_the_runs_ahead() -> None:
    line = Line(run_s=30.0)
    for name in ("first", "a", "b"):
        await line.come(name)
    assert line.waits["first"].describe() == ""
    assert line.waits["b"].describe() == "2nd for a place, m, about 60 s"
    assert await line.serve_all() == ["first", "a", "b"]


@pytest.mark.parametrize(("run_s", "waited_s"), [(None, 20.0), (60.0, 240.0)])
async def test_a_wait_of_four_periods_makes_a_batch_request_urgent(
    run_s: float | None, waited_s: float
) -> None:
    """A period is five seconds, or a run that is longer."""
    for waited, order in ((waited_s - 1, ["new", "old"]), (waited_s, ["old", "new"])):
        line = Line(run_s=run_s)
        await line.come("first")
        await line.come("old", BATCH)
        line.now += waited
        await line.come("new", URGENT)
        assert (await line.serve_all())[1:] == order


async def test_more_than_may_wait_are_refused() -> None:
    line = Line(max_waiting=1, run_s=7.0)
    await line.come("first")
    await line.come("second")
    with pytest.raises(QueueFull, match="2 requests wait") as refused:
        async with line.lane.turn(URGENT, None):
            pass
    assert refused.value.retry_after_s == 7.0
    assert await line.serve_all() == ["first", "second"]


@given(
    st.integers(1, 3),
    st.lists(
        st.tuples(st.sampled_from(["come", "leave", "cancel"]), st.integers(0, 99)), max_size=30
    ),
)
def test_whatever_comes_leaves_or_is_cancelled_no_place_is_lost(
    concurrency: int, steps: list[tuple[str, int]]
) -> None:
    asyncio.run(_check_conservation(concurrency, steps))


async def _check_conservation(concurrency: int, steps: list[tuple[str, int]]) -> None:
    line = Line(concurrency, max_waiting=99)
    priorities = tuple(RequestPriority)
    for number, (what, which) in enumerate(steps):
        names = sorted(line.tasks)
        running = [one for one in names if one in line.served]
        if what == "come":
            await line.come(f"{number:02}", priorities[which % len(priorities)])
        elif what == "leave" and running:
            await line.leave(running[which % len(running)])
        elif what == "cancel" and names:
            task = line.tasks.pop(names[which % len(names)])
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        running = [one for one in line.tasks if one in line.served]
        assert len(running) == min(concurrency, len(line.tasks))
        assert sorted(line.places().values()) == [*range(1, len(line.tasks) - len(running) + 1)]
    await line.serve_all()
    assert not line.tasks
    assert line.lane.is_empty


async def test_a_place_given_to_a_request_that_is_cancelled_goes_on() -> None:
    line = Line()
    for name in ("first", "second", "third"):
        await line.come(name)
    line._gates["first"].set()
    await line.tasks.pop("first")  # the place is the second's, which has not run on
    line.tasks.pop("second").cancel()
    await _settle()
    assert line.served[-1] == "third"
    assert await line.serve_all()
    assert line.lane.is_empty
