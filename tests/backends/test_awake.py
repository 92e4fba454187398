"""A Mac is kept awake while the setting says so, by one program that ends when it has to."""

from __future__ import annotations

import asyncio
import logging
import sys
from typing import Literal

import pytest

from kakeya.backends.awake import LINGER_S, StayAwake
from tests.memory.worlds import ManualClock
from tests.waiting import until

SLEEPER = (sys.executable, "-c", "import time; time.sleep(600)")
How = Literal["offered", "working", "never"]


def stay(how: How, clock: ManualClock, *command: str, platform: str = "darwin") -> StayAwake:
    return StayAwake(how, clock=clock, platform=platform, command=command or SLEEPER)


@pytest.mark.parametrize(
    ("how", "offers", "works", "is_due"),
    [
        ("offered", True, False, True),
        ("offered", False, False, False),
        ("offered", False, True, True),
        ("working", True, False, False),
        ("working", True, True, True),
        ("never", True, True, False),
    ],
)
def test_a_mac_stays_awake_as_it_is_set(how: How, offers: bool, works: bool, is_due: bool) -> None:
    assert stay(how, ManualClock()).follow(offers=offers, works=works) is is_due


def test_another_system_is_left_alone() -> None:
    assert not stay("offered", ManualClock(), platform="linux").follow(offers=True, works=True)


def test_it_stays_awake_for_a_moment_after_the_last_request() -> None:
    clock = ManualClock()
    awake = stay("working", clock)
    assert awake.follow(offers=True, works=True)
    clock.advance(LINGER_S - 1)
    assert awake.follow(offers=True, works=False)
    clock.advance(1)
    assert not awake.follow(offers=True, works=False)


async def test_the_program_runs_while_it_is_due_and_ends_with_the_task() -> None:
    awake = stay("offered", ManualClock())
    running = asyncio.ensure_future(awake.run())
    awake.follow(offers=True, works=False)
    await until(lambda: awake.is_held)
    awake.follow(offers=False, works=False)
    await until(lambda: not awake.is_held)
    awake.follow(offers=True, works=False)
    await until(lambda: awake.is_held)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert not awake.is_held


async def test_a_signal_that_ended_the_program_too_does_not_hold_up_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As Ctrl-C does it, and launchd: both processes are of one group."""
    awake = stay("offered", ManualClock())
    running = asyncio.ensure_future(awake.run())
    awake.follow(offers=True, works=False)
    await until(lambda: awake.is_held)
    end = asyncio.subprocess.Process.terminate

    def ended_already(child: asyncio.subprocess.Process) -> None:
        end(child)
        raise ProcessLookupError

    monkeypatch.setattr(asyncio.subprocess.Process, "terminate", ended_already)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(running, 30)


@pytest.mark.parametrize(
    ("command", "words"),
    [(("/no/such/program",), "No such file"), ((sys.executable, "-c", "exit(3)"), "ended with 3")],
)
async def test_a_program_that_fails_is_told_once_and_tried_again(
    command: tuple[str, ...], words: str, caplog: pytest.LogCaptureFixture
) -> None:
    clock = ManualClock()
    awake = stay("offered", clock, *command)
    running = asyncio.ensure_future(awake.run())
    with caplog.at_level(logging.WARNING):
        awake.follow(offers=True, works=False)
        for _ in range(2):
            await until(lambda: bool(clock._sleepers))
            clock.advance(60)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert [record.getMessage() for record in caplog.records] == [
        "this Mac may fall asleep while it serves"
    ]
    assert words in str(vars(caplog.records[0]))
