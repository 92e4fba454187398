"""A drain in virtual time: it waits for what runs, within its owner's patience, and stops once."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

from kakeya.dispatch.drain import NodeDrain
from tests.fakes import FakeClock
from tests.waiting import eventually


class Node:
    """The parts of a node that a drain touches."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.requests = 2
        self.passed = 0
        """Requests that came after the drain began."""
        self.answering = 0
        self.is_closed = False
        self.is_taken = False
        self.begun: list[str] = []
        self.stopped = 0
        self.drain = NodeDrain(
            begin=self.begun.append,
            left=self.left,
            port=self,
            close=lambda: None,
            stop=self.stop,
            clock=self.clock,
        )
        self._began_mono = self.clock.mono()

    def left(self, mono: float) -> int:
        return self.requests + (self.passed if mono > self._began_mono else 0)

    def close(self) -> None:
        self.is_closed = True

    def stop(self) -> None:
        self.stopped += 1

    async def end_after(self, seconds: float) -> None:
        await self.clock.sleep(seconds)
        self.requests = 0


async def test_a_drain_goes_on_without_its_caller_and_stops_the_node_once() -> None:
    node = Node()
    assert not node.drain.is_under_way
    ending = asyncio.create_task(node.end_after(7.0))
    async with aclosing(node.drain.run(60)) as steps:
        assert (await anext(steps)).requests == 2
    assert node.drain.is_under_way
    async with aclosing(node.drain.run(60)) as steps:
        last = [step async for step in steps][-1]
    assert last.requests == 0
    assert 7.0 <= last.seconds < 7.5
    await eventually("it is stopped", lambda: node.stopped)
    await ending
    assert node.begun == ["it is being drained"]
    assert node.stopped == 1


async def test_a_drain_cuts_off_what_runs_for_longer_than_its_owner_waits() -> None:
    node = Node()
    async with aclosing(node.drain.run(5)) as steps:
        last = [step async for step in steps][-1]
    assert last.requests == 2
    assert 5.0 <= last.seconds < 5.5
    await eventually("it is stopped", lambda: node.stopped == 1)


async def test_a_drain_ends_while_clients_go_on_asking_and_lets_what_was_passed_on_end() -> None:
    node = Node()

    async def clients() -> None:
        """Another request always runs, until the port is closed."""
        await node.clock.sleep(2.0)
        node.requests, node.passed = 0, 1
        while not node.is_closed:
            await node.clock.sleep(0.1)
        await node.clock.sleep(9.0)
        assert node.stopped == 0
        node.passed = 0

    asking = asyncio.create_task(clients())
    async with aclosing(node.drain.run(60)) as steps:
        last = [step async for step in steps][-1]
    await asking
    assert last.requests == 0
    assert 11.0 <= last.seconds < 12.0
    await eventually("it is stopped", lambda: node.stopped == 1)


async def test_a_drain_waits_for_requests_that_are_read_and_not_counted_yet() -> None:
    node = Node()
    node.requests, node.answering = 0, 2

    async def answer() -> None:
        await node.clock.sleep(8.0)
        assert node.is_closed
        assert node.stopped == 0
        node.answering = 0

    answering = asyncio.create_task(answer())
    async with aclosing(node.drain.run(60)) as steps:
        last = [step async for step in steps][-1]
    await answering
    assert last.requests == 0
    assert 8.0 <= last.seconds < 8.5
    await eventually("it is stopped", lambda: node.stopped == 1)


async def test_a_drain_keeps_the_port_until_another_node_has_it() -> None:
    node = Node()
    node.requests = 0

    async def start() -> None:
        await node.clock.sleep(20.0)
        assert not node.is_closed
        node.is_taken = True

    starting = asyncio.create_task(start())
    async with aclosing(node.drain.run(60, until_replaced=True)) as steps:
        last = [step async for step in steps][-1]
    await starting
    assert node.is_closed
    assert 20.0 <= last.seconds < 20.5


async def test_a_drain_leaves_the_port_at_the_end_of_its_patience() -> None:
    node = Node()
    node.requests = 0
    async with aclosing(node.drain.run(5, until_replaced=True)) as steps:
        last = [step async for step in steps][-1]
    assert node.is_closed
    assert 5.0 <= last.seconds < 5.5
