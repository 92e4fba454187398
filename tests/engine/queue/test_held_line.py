"""Who waited long and needs much room, beside those that come and need little, in virtual time."""

from __future__ import annotations

import pytest

from kakeya.core.units import KV_BLOCK_TOKENS
from kakeya.engine.queue.policy import HELD_S
from tests.engine.virtual_rig import Told, VirtualRig, expected

BLOCK = KV_BLOCK_TOKENS
LARGE = 10 * BLOCK
"""Of a prompt: with its answer it takes 11 of 12 blocks."""


def prompt(length: int, first: int = 3) -> list[int]:
    return [(first + 7 * at) % 100 for at in range(length)]


def waits_s(told: list[Told], every_s: float) -> list[float]:
    return [one.at_s[0] - (1.0 + every_s * at) for at, one in enumerate(told)]


@pytest.mark.parametrize("priority", [2, 3])
def test_an_urgent_request_waits_for_no_less_urgent_one_that_holds_the_line(priority: int) -> None:
    rig = VirtualRig(places=8, kv_bytes=12 * BLOCK)
    for at in range(18):
        rig.submit(4.0 * at + 0.1, token_ids=prompt(100, at), max_tokens=1900, client=f"{at % 3}")
    large = rig.submit(
        0.5,
        token_ids=prompt(LARGE, 50),
        max_tokens=4 if priority < 3 else 0,
        priority=priority,
        client="large",
    )
    urgent = [
        rig.submit(1.0 + 0.5 * at, token_ids=prompt(20, at), max_tokens=2, priority=0, client="u")
        for at in range(160)
    ]
    rig.run()
    assert max(waits_s(urgent, 0.5)) < 0.5
    assert large.done is not None
    if priority < 3:
        # It holds the line for as long as those that ran go on, each for less than ten seconds.
        assert HELD_S < large.at_s[0] < HELD_S + 20.0
    assert all(one.tokens == expected(one.job.token_ids, 2) for one in urgent)


@pytest.mark.parametrize("priority", [1, 2])
def test_who_holds_the_line_gets_its_turn_though_urgent_ones_never_end(priority: int) -> None:
    """Together they always take more than it leaves them, and none of them waits for long."""
    rig = VirtualRig(places=8, kv_bytes=12 * BLOCK)
    rig.submit(0.2, token_ids=prompt(100), max_tokens=2900, client="load")
    large = rig.submit(0.5, token_ids=prompt(LARGE, 50), max_tokens=4, priority=priority)
    urgent = [
        rig.submit(1.0 + 0.2 * at, token_ids=prompt(20, at), max_tokens=200, priority=0, client="u")
        for at in range(360)
    ]
    rig.run()
    assert large.tokens == expected(large.job.token_ids, 4)
    assert large.at_s[0] < HELD_S + 10.0
    assert max(waits_s(urgent, 0.2)) < 5.0
