"""When models come back that pressure evicted."""

from __future__ import annotations

from kakeya.memory.arbiter.comeback import CALM_S, LONGEST_S, SETTLED_S, Comeback
from kakeya.memory.arbiter.policy import PressureLevel
from kakeya.memory.arbiter.resident import ResidentKey

KEY = ResidentKey("draft", "small")


def test_a_model_comes_back_when_it_was_calm_for_a_while() -> None:
    comeback = Comeback()
    assert comeback.may(KEY, 0.0), "nothing ever pressed"
    comeback.pressed(PressureLevel.LOW, 10.0)
    comeback.taken(KEY, 11.0)
    assert not comeback.may(KEY, 11.0 + SETTLED_S)
    comeback.pressed(PressureLevel.NOMINAL, 1000.0)
    assert not comeback.may(KEY, 1000.0 + CALM_S - 0.1)
    assert comeback.may(KEY, 1000.0 + CALM_S)


def test_a_model_that_is_taken_again_and_again_comes_back_later_each_time() -> None:
    comeback, now, pauses = Comeback(), 0.0, []
    for _ in range(9):
        comeback.pressed(PressureLevel.LOW, now)
        comeback.taken(KEY, now)
        comeback.pressed(PressureLevel.NOMINAL, now)
        since = now
        while not comeback.may(KEY, now):
            now += 1.0
        pauses.append(now - since)
    assert pauses[:4] == [CALM_S, 2 * CALM_S, 4 * CALM_S, 8 * CALM_S]
    assert max(pauses) == LONGEST_S
    now += SETTLED_S
    comeback.taken(KEY, now)
    assert comeback.may(KEY, now + CALM_S), "it stayed for long, so it begins anew"
