"""The soak's virtual day, small, and that it finds what it is there to find."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.soak.slopes import flat, slope
from benchmarks.soak.virtual_day import run_day
from kakeya.fleet.cards.cards import Card
from kakeya.fleet.view.registry import CapabilityRegistry
from tests.laws import law


class Haunted(CapabilityRegistry):
    """The control: it shows each card that it has ever shown."""

    def snapshot(self, *, mono: float) -> tuple[Card, ...]:
        seen = self.__dict__.setdefault("seen", {})
        seen |= {card.node_id: card for card in super().snapshot(mono=mono)}
        return tuple(seen.values())


def _hour(
    told: list[str], registry_type: type[CapabilityRegistry] = CapabilityRegistry
) -> set[str]:
    """The rows that do not hold after an hour of three nodes."""
    rows, done = run_day(
        7, 1, told.append, nodes=3, faults=8, registry_type=registry_type, measure_mib=lambda: 1.0
    )
    assert any(kind.startswith("killed") for kind in done)
    return {row.what for row in rows if row.is_met is False}


def test_an_hour_of_faults_breaks_nothing() -> None:
    assert _hour([]) == set()


@pytest.mark.slow
def test_the_same_seed_gives_the_same_hour() -> None:
    runs: list[list[str]] = [[], []]
    for told in runs:
        _hour(told)
    assert runs[0] == runs[1]


@pytest.mark.slow
def test_a_fleet_that_shows_the_dead_fails() -> None:
    assert "virtual: no resurrection" in _hour([], Haunted)


@given(
    st.floats(-5, 5), st.lists(st.floats(-1e6, 1e6), max_size=9), st.randoms(use_true_random=False)
)
@law(60)
def test_a_few_wild_samples_do_not_move_a_slope(rate, wild, rng) -> None:  # type: ignore[no-untyped-def]
    points = [(at / 60, 100 + rate * at / 60) for at in range(60)]
    for value in wild:
        at = rng.randrange(60)
        points[at] = (points[at][0], value)
    found = slope(points)
    assert abs(found - rate) < 1e-6 + abs(rate)
    if not wild:
        assert found == pytest.approx(rate)
        assert flat("it", points, rate + 0.01, unit="MiB", least_hours=0.9).is_met
        assert not flat("it", points, rate - 0.01, unit="MiB", least_hours=0.9).is_met
        assert flat("it", points, rate, unit="MiB", least_hours=1.0).is_met is None


def test_two_hundred_thousand_pairs_are_not_all_looked_at() -> None:
    assert slope([(at / 1000, 2.0 * at) for at in range(5000)]) == pytest.approx(2000.0)
