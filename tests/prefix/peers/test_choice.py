from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kakeya.fleet.paths.link_rates import LinkRate
from kakeya.prefix.peers.choice import (
    BlockHolder,
    Hit,
    best_first,
    due_s,
    in_order,
    is_worth_asking,
    is_worth_taking,
    to_ask,
)
from kakeya.prefix.peers.seams import LEAST_SLACK_S, LOOKUP_S, MOST_LOOKUP_S, SLACK_S, usable
from tests.prefix.peers.world import BLOCK_BYTES, BLOCK_TOKENS, wanted


def holder(name: str, blocks: int = 0) -> BlockHolder:
    return BlockHolder(node_id=name, address=f"{name}:1", blocks=blocks)


def hit(name: str, blocks: int) -> Hit:
    return Hit(holder=holder(name), blocks=blocks, lease_id="l")


def rates(**by_name: float) -> dict[str, LinkRate]:
    return {name: LinkRate(rate) for name, rate in by_name.items()}


@given(
    st.integers(1, 30),
    st.floats(1.0, 1e5),
    st.lists(st.floats(0.0, 5.0), max_size=30),
    st.just(0.0) | st.floats(1e3, 1e12),
)
def test_whatever_a_peer_does_all_is_there_hardly_later_than_without_it(count, rate, gaps, link):
    want = wanted(count, rate=rate, most_slack_s=SLACK_S)
    slack_s = due_s(want, 0, link)
    lookup_s = want.lookup_s
    assert LOOKUP_S <= lookup_s <= max(LOOKUP_S, min(MOST_LOOKUP_S, 0.1 * count * want.block_s))
    now, taken = lookup_s, 0  # the lookup took all of its time
    for gap in gaps[:count]:
        if now + gap > lookup_s + due_s(want, taken, link):
            now = max(now, lookup_s + due_s(want, taken, link))  # given up at this moment
            break
        now, taken = now + gap, taken + 1
    else:
        # It fell silent, or everything came.
        now = now if taken == count else max(now, lookup_s + due_s(want, taken, link))
    all_there_s = now + (count - taken) * want.block_s
    assert all_there_s <= count * want.block_s * (1 + 1e-9) + lookup_s + slack_s
    assert slack_s <= min(SLACK_S, want.block_s)
    if not link:
        assert slack_s <= max(LEAST_SLACK_S, want.block_s / 4)


def test_a_link_pays_when_a_block_comes_sooner_than_it_is_computed():
    want = wanted(4)
    even = BLOCK_BYTES / want.block_s
    assert not is_worth_taking(want, even)
    assert is_worth_taking(want, 1.2 * even)
    assert is_worth_taking(want, 0.0)


def test_nothing_pays_where_nobody_measured_the_prefill():
    want = replace(wanted(100), prefill_tokens_per_s=0.0)
    assert not is_worth_asking(want)
    assert not is_worth_taking(want, 0.0)
    assert not is_worth_taking(want, 1e12)


def test_a_question_pays_when_the_answer_saves_more_than_it_takes():
    rate = BLOCK_TOKENS / LOOKUP_S  # a block takes as long as a lookup
    assert not is_worth_asking(wanted(2, rate=rate))
    assert is_worth_asking(wanted(3, rate=rate))
    assert not is_worth_asking(wanted(3, have=1, rate=rate))


def test_those_are_asked_whose_cards_name_the_most_and_fast_ones_among_equals():
    holders = [holder("a", 2), holder("b", 5), holder("c", 5), holder("d"), holder("e", 1)]
    known = rates(b=1e8, c=2e8)
    assert [h.node_id for h in to_ask(wanted(8), holders, known)] == ["c", "b", "a"]


names = st.sampled_from("abcdef")
links = st.dictionaries(
    names, st.builds(LinkRate, st.just(0.0) | st.floats(1e3, 1e10), st.integers(0, 4))
)
named = st.dictionaries(names, st.integers(0, 12), min_size=1)


def best(holding: dict[str, int], known: dict[str, LinkRate]) -> str:
    holders = [holder(name, blocks) for name, blocks in holding.items()]
    order = best_first(wanted(10, have=2), holders, known)
    assert sorted(order, key=repr) == sorted(holders, key=repr)
    assert order == best_first(wanted(10, have=2), holders[::-1], known)
    return order[0].node_id


@given(named, st.floats(1e5, 1e9), st.integers(0, 4))
def test_of_equal_links_the_one_to_most_blocks_is_best(holding, rate, streams):
    known = {name: LinkRate(rate, streams) for name in holding}
    most = max(min(blocks, 10) for blocks in holding.values())
    assert min(holding[best(holding, known)], 10) == most or most <= 2


@given(named, links)
def test_of_equal_holders_the_one_whose_link_is_free_is_best(holding, known):
    equal = dict.fromkeys(holding, 8)
    rate = {name: LinkRate(1e7, known.get(name, LinkRate()).streams) for name in equal}
    assert rate[best(equal, rate)].streams == min(rate[name].streams for name in equal)


@given(named, links, names, st.integers(1, 5))
def test_more_load_on_another_never_takes_the_first_place_away(holding, known, other, more):
    first = best(holding, known)
    if other != first and other in known:
        known[other] = replace(known[other], streams=known[other].streams + more)
        assert best(holding, known) == first


@given(named, links)
def test_of_equal_holders_one_whose_link_is_known_is_best(holding, known):
    known = {name: replace(link, streams=0) for name, link in known.items()}
    first = best(dict.fromkeys(holding, 6), known)
    is_any = any(name in holding and link.bytes_per_s for name, link in known.items())
    assert bool(known.get(first, LinkRate()).bytes_per_s) == is_any


def test_those_are_not_asked_who_have_no_more_or_are_slower_than_the_prefill():
    holders = [holder("a", 2), holder("b", 5), holder("c", 3)]
    assert [h.node_id for h in to_ask(wanted(8, have=3), holders, rates())] == ["b"]
    assert to_ask(wanted(8, have=3), holders, rates(b=1.0)) == ()


def test_the_longest_run_is_taken_of_those_whose_link_beats_the_prefill():
    hits = [hit("slow", 8), hit("long", 6), hit("fast", 6), hit("short", 3), hit("none", 2)]
    known = rates(slow=1.0, long=1e8, fast=1e9)
    order = in_order(wanted(8, have=2), hits, known)
    assert [found.holder.node_id for found in order] == ["fast", "long", "short"]


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ((), 0),
        ((BLOCK_BYTES,) * 3, 3),
        ((BLOCK_BYTES,) * 9, 4),
        ((BLOCK_BYTES, BLOCK_BYTES - 1, BLOCK_BYTES), 1),
        ((0,), 0),
    ],
)
def test_blocks_count_up_to_the_first_of_an_impossible_size(sizes, expected):
    assert usable(wanted(4), sizes) == expected
