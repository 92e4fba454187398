"""Round trips on the own card: measured honestly, told seldom."""

from __future__ import annotations

import itertools
import random

from hypothesis import given
from hypothesis import strategies as st

from kakeya.fleet.cards.cards import Endpoint
from kakeya.fleet.paths.round_trips import (
    HOLD_S,
    MAX_PEERS,
    SETTLE_S,
    STEPS_MS,
    RoundTrips,
    coarse_ms,
)
from tests.laws import law

CABLE, LAN = "169.254.0.1:50051", "10.0.0.1:50051"
OWN = (Endpoint(CABLE, "thunderbolt", 10), Endpoint(LAN, "lan", 20))


def _shown(trips: RoundTrips) -> list[float]:
    return [way.rtt_ms for way in trips.measured(OWN)]


def _settle(trips: RoundTrips, mono: float) -> bool:
    return trips.settle([CABLE, LAN], mono=mono)


def test_nothing_is_shown_before_it_was_measured_for_a_while() -> None:
    trips = RoundTrips()
    assert not _settle(trips, 1000.0)
    trips.note(CABLE, "a", rtt_ms=0.2, mono=1000.0)
    assert not _settle(trips, 1000.0 + SETTLE_S - 1)
    assert _shown(trips) == [0.0, 0.0]
    assert _settle(trips, 1000.0 + SETTLE_S)
    assert _shown(trips) == [0.25, 0.0]
    assert [way.network for way in trips.measured(OWN)] == ["thunderbolt", "lan"]


def test_of_a_peer_the_least_counts_and_of_peers_the_median() -> None:
    trips = RoundTrips()
    for peer, times in {"a": (9.0, 0.4, 30.0), "b": (1.5, 8.0), "c": (90.0, 80.0)}.items():
        for rtt_ms in times:
            trips.note(LAN, peer, rtt_ms=rtt_ms, mono=0.0)
    assert _settle(trips, SETTLE_S)
    assert _shown(trips) == [0.0, 2.0]


def test_the_first_figure_of_another_network_does_not_wait_for_long() -> None:
    trips = RoundTrips()
    trips.note(LAN, "a", rtt_ms=0.7, mono=0.0)
    assert _settle(trips, SETTLE_S)
    trips.note(CABLE, "a", rtt_ms=0.1, mono=SETTLE_S)
    assert not _settle(trips, 2 * SETTLE_S - 1)
    assert _settle(trips, 2 * SETTLE_S)
    assert _shown(trips) == [0.25, 1.0]


def test_a_link_that_became_slow_is_told_once_the_old_times_are_forgotten() -> None:
    trips = RoundTrips()
    for tick in range(200):
        mono = 10.0 * tick
        trips.note(LAN, "a", rtt_ms=0.8 if mono < 400.0 else 30.0, mono=mono)
        _settle(trips, mono)
        if mono < 400.0:
            assert _shown(trips)[1] in (0.0, 1.0)
        if mono > 400.0 + 2 * HOLD_S + 20.0:
            assert _shown(trips)[1] == 50.0


def test_a_cable_that_is_pulled_and_a_fleet_that_is_gone_keep_their_figures() -> None:
    trips = RoundTrips()
    trips.note(CABLE, "a", rtt_ms=0.1, mono=0.0)
    trips.note(LAN, "a", rtt_ms=0.7, mono=0.0)
    assert _settle(trips, SETTLE_S)
    trips.note(LAN, "a", rtt_ms=15.0, mono=5000.0)
    assert trips.settle([LAN], mono=5000.0)
    assert _shown(trips) == [0.25, 20.0]
    assert not _settle(trips, 90_000.0)
    assert _shown(trips) == [0.25, 20.0]


def test_what_is_no_time_is_passed_over_and_peers_are_bounded() -> None:
    trips = RoundTrips()
    for rtt_ms in (0.0, -1.0, float("inf"), float("nan")):
        trips.note(LAN, "liar", rtt_ms=rtt_ms, mono=0.0)
    assert not _settle(trips, SETTLE_S)
    for number in range(10 * MAX_PEERS):
        trips.note(LAN, f"n{number}", rtt_ms=1.0, mono=0.0)
    assert len(trips._peers[LAN]) == MAX_PEERS


@given(
    times=st.lists(st.floats(0.001, 5000.0), min_size=1, max_size=400),
    gap_s=st.floats(1.0, 60.0),
)
@law(100, part=4)
def test_whatever_is_measured_the_card_changes_at_most_once_in_five_minutes(
    times: list[float], gap_s: float
) -> None:
    trips, changes, mono = RoundTrips(), [], 0.0
    for index, rtt_ms in enumerate(times):
        mono = index * gap_s
        trips.note(LAN, f"n{index % 3}", rtt_ms=rtt_ms, mono=mono)
        if _settle(trips, mono):
            changes.append(mono)
        assert _shown(trips)[1] in (0.0, *STEPS_MS)
    assert all(later - earlier >= HOLD_S for earlier, later in itertools.pairwise(changes))


@given(center_ms=st.floats(0.05, 900.0), seed=st.integers(0, 99))
@law(200, part=4)
def test_noise_on_a_steady_link_changes_nothing_after_the_first_figure(
    center_ms: float, seed: int
) -> None:
    """A day of rounds in virtual time: work and waiting make some answers late, never early."""
    trips, rng, changes = RoundTrips(), random.Random(seed), []
    for tick in range(0, 86_400, 60):
        for peer in "abc":
            late = 1.0 + rng.random() * 0.1 + (rng.random() < 0.2) * rng.random() * 50.0
            trips.note(LAN, peer, rtt_ms=center_ms * late, mono=float(tick))
        if _settle(trips, float(tick)):
            changes.append(tick)
    # The first figure is of a few times, of which most may have been late.
    assert 1 <= len(changes) <= 2
    assert changes[-1] < 900
    (shown,) = (way.rtt_ms for way in trips.measured(OWN[1:]))
    assert center_ms <= shown * 1.25
    assert shown in (coarse_ms(center_ms), coarse_ms(center_ms * 1.1), coarse_ms(center_ms * 1.25))


@given(rtt_ms=st.floats(0.001, 5000.0))
def test_a_step_is_the_next_one_up(rtt_ms: float) -> None:
    step = coarse_ms(rtt_ms)
    assert step in STEPS_MS
    assert rtt_ms <= step or step == STEPS_MS[-1]
    assert all(other >= step for other in STEPS_MS if other >= rtt_ms)
    assert coarse_ms(rtt_ms, step) == step
