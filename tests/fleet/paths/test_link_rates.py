"""The rate of a link: what it does lately, else what it did, else what its kind does."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kakeya.fleet.paths.link_rates import (
    EXPECTED,
    MOST_LINKS,
    RATE_KEPT_S,
    UNKNOWN,
    LinkRate,
    LinkRates,
    fetch_seconds,
)
from tests.laws import law


def test_the_rate_of_a_link_follows_what_it_does() -> None:
    link = LinkRate()
    link.observe(1000, 1.0, 5.0)
    assert link.bytes_per_s == 1000.0
    for _ in range(30):
        link.observe(1000, 0.1, 6.0)
    assert link.bytes_per_s == pytest.approx(10_000, rel=0.01)


def test_a_link_that_was_slow_is_tried_again_after_a_while_and_is_still_expected_to_be() -> None:
    link = LinkRate()
    link.observe(1, 1.0, 10.0)
    link.age(10.0 + RATE_KEPT_S)
    assert link.bytes_per_s == 1.0
    for mono in (10.1 + RATE_KEPT_S, 10.2 + RATE_KEPT_S):
        link.age(mono)
        assert link.bytes_per_s == 0.0
        assert link.known == 1.0


def test_a_link_without_a_measurement_is_reckoned_as_its_kind_of_network() -> None:
    links = LinkRates()
    assert links.expected("a", "thunderbolt") > links.expected("a", "lan")
    assert links.expected("a", "lan") == EXPECTED["lan"]
    assert links.expected("a", "") == links.expected("a", "of a later build") == UNKNOWN
    links.link("a").observe(5000, 1.0, 1.0)
    assert links.expected("a", "thunderbolt") == 5000.0
    assert links.measured() == {"a": 5000.0}


@given(st.lists(st.tuples(st.integers(1, 10**8), st.floats(1e-6, 100)), min_size=1, max_size=20))
@law(600)
def test_a_rate_lies_within_what_was_observed_and_a_fetch_takes_no_less_than_its_bytes(
    observed: list[tuple[int, float]],
) -> None:
    link = LinkRate()
    for size, seconds in observed:
        link.observe(size, seconds, 0.0)
    rates = [size / seconds for size, seconds in observed]
    assert min(rates) * 0.999 <= link.known <= max(rates) * 1.001
    assert fetch_seconds(1e6, link.known) > 1e6 / link.known


def test_the_links_are_bounded() -> None:
    links = LinkRates()
    for number in range(MOST_LINKS + 9):
        links.link(str(number)).observe(1, 1.0, 0.0)
    assert len(links.measured()) == MOST_LINKS
    assert "0" not in links.measured()
