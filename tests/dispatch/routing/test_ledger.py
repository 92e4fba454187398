"""What was routed since the figures of a node were made counts, once, and no longer than it may."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from kakeya.dispatch.routing.candidate import (
    NodeSpeed,
    QueuedWork,
    RouteCandidate,
    RoutedRequest,
)
from kakeya.dispatch.routing.decision import choose
from kakeya.dispatch.routing.ledger import KEPT_S, RouteLedger, common_tokens

SPEED = NodeSpeed(prefill_tokens_per_s=250, decode_tokens_per_s=20)
SHELF = tuple(RouteCandidate(node_id=f"mini-{number}", speed=SPEED) for number in range(4))
BLOCK = 64


def request_of(*texts: str, tokens: int = 2200) -> RoutedRequest:
    """A prompt with blocks named by `texts`, 10 blocks each."""
    names = [
        f"{'/'.join(texts[: at + 1])}#{block}" for at in range(len(texts)) for block in range(10)
    ]
    return RoutedRequest(
        prompt_tokens=tokens,
        blocks=tuple(name.encode() for name in names),
        block_tokens=BLOCK,
    )


def route(ledger: RouteLedger, key: str, request: RoutedRequest, shelf, now: float) -> str:
    decision = choose(request, ledger.corrected(request, shelf, now))
    ledger.begin(key, request, decision, now)
    return decision.node_id


def test_many_requests_at_once_spread_over_nodes_that_were_idle_a_moment_ago() -> None:
    ledger = RouteLedger()
    shelf = [replace(node, age_s=5.0) for node in SHELF]
    chosen = Counter(
        route(ledger, str(number), request_of(f"own {number}"), shelf, 100.0) for number in range(8)
    )
    assert set(chosen.values()) == {2}


@pytest.mark.parametrize("warm_tokens", [0, 2000], ids=["cold", "warm at one node"])
def test_a_hot_prefix_spreads_where_its_blocks_can_be_carried(warm_tokens: int) -> None:
    """Of 8 requests at once with one prefix of 2000 tokens the busiest node gets at most 1.5 times
    the mean."""
    shelf = fetching(1e8)
    shelf[0] = replace(shelf[0], warm_tokens=warm_tokens, held_tokens=warm_tokens)
    ledger = RouteLedger()
    chosen = Counter(route(ledger, str(number), hot(), shelf, 100.0) for number in range(8))
    assert max(chosen.values()) <= 1.5 * 8 / 4, chosen


def test_one_after_the_other_requests_stay_with_the_warm_node() -> None:
    shelf = fetching(1e8)
    shelf[2] = replace(shelf[2], warm_tokens=2000, held_tokens=2000)
    ledger = RouteLedger()
    for number in range(8):
        now = 100.0 + 20 * number
        assert route(ledger, str(number), hot(), shelf, now) == "mini-2"
        ledger.first_token(str(number), now + 1)
        ledger.end(str(number), now + 8)


def fetching(bytes_per_s: float) -> list[RouteCandidate]:
    """Nodes to which KV comes from each other so fast."""
    return [
        replace(node, kv_rates={one.node_id: bytes_per_s for one in SHELF if one is not node})
        for node in SHELF
    ]


def hot() -> RoutedRequest:
    prefix = tuple(f"system {block}".encode() for block in range(2000 // BLOCK))
    return RoutedRequest(
        prompt_tokens=2200,
        output_tokens=128,
        blocks=prefix,
        block_tokens=BLOCK,
        kv_bytes_per_token=12_000,
    )


def test_news_counts_what_was_routed_before_it() -> None:
    ledger = RouteLedger()
    request = request_of("a")
    ledger.begin("1", request, choose(request, SHELF[:1]), 10.0)
    old = ledger.corrected(request_of("b"), [replace(SHELF[0], age_s=3.0)], 12.0)[0]
    assert (old.work.prompt_tokens, old.work.prompts, old.work.rows) == (2200, 1, ())
    new = ledger.corrected(request_of("b"), [replace(SHELF[0], age_s=1.0)], 12.0)[0]
    assert (new.work.prompt_tokens, new.work.prompts) == (0, 0)
    ledger.first_token("1", 12.5)
    old = ledger.corrected(request_of("b"), [replace(SHELF[0], age_s=5.0)], 13.0)[0]
    assert (old.work.prompt_tokens, old.work.rows) == (0, (request.output_tokens,))


def test_the_prefix_of_a_request_on_its_way_is_promised_until_the_node_tells_itself() -> None:
    ledger = RouteLedger()
    one, other = request_of("system", "own"), request_of("system", "another")
    assert common_tokens(one, other) == 10 * BLOCK
    ledger.begin("1", one, choose(one, SHELF[:1]), 10.0)

    def promised(now: float, age_s: float) -> int:
        return ledger.corrected(other, [replace(SHELF[0], age_s=age_s)], now)[0].warm_tokens

    assert promised(11.0, 0.0) == 10 * BLOCK, "exact figures do not count what is computed yet"
    ledger.first_token("1", 12.0)
    ledger.end("1", 13.0)
    assert promised(14.0, 5.0) == 10 * BLOCK
    assert promised(14.0, 0.5) == 0, "the node would tell it, and was evicted or lost it"
    assert len(ledger) == 0


def test_a_request_that_ended_without_a_token_promises_nothing() -> None:
    ledger = RouteLedger()
    request = request_of("a")
    ledger.begin("1", request, choose(request, SHELF[:1]), 10.0)
    ledger.end("1", 11.0)
    assert ledger.corrected(request, [replace(SHELF[0], age_s=9.0)], 11.0)[0].warm_tokens == 0
    ledger.end("1", 12.0)
    ledger.first_token("1", 12.0)
    assert len(ledger) == 0


def test_ended_requests_are_forgotten_without_news_too() -> None:
    ledger = RouteLedger()
    request = request_of("a")
    for number in range(100):
        now = float(number)
        ledger.begin(str(number), request, choose(request, SHELF[:1]), now)
        ledger.first_token(str(number), now)
        ledger.end(str(number), now)
    ledger.corrected(request, [], 100.0 + KEPT_S)
    assert len(ledger) == 0


def test_requests_alike_that_a_node_tells_are_not_counted_twice() -> None:
    ledger = RouteLedger()
    request = request_of("a", tokens=640)
    for number in range(3):
        ledger.begin(str(number), request, choose(request, SHELF[:1]), 10.0)

    def sharers(told: int, age_s: float) -> int:
        node = replace(SHELF[0], sharers=told, age_s=age_s)
        return ledger.corrected(request, [node], 12.0)[0].sharers

    assert sharers(5, age_s=0.0) == 5, "the node counts the three too"
    assert sharers(0, age_s=0.0) == 3, "an older node tells nothing"
    assert sharers(5, age_s=3.0) == 8, "they came after its figures were made"


def test_rates_of_own_requests_count_where_a_node_tells_no_higher_ones() -> None:
    ledger = RouteLedger()
    request = request_of("a", tokens=250)
    for number in range(30):
        ledger.begin(str(number), request, choose(request, SHELF[:1]), float(number))
    told = QueuedWork(prompts_per_s=3.0, busy_share=0.1)
    idle, busy = ledger.corrected(request_of("b"), [SHELF[0], replace(SHELF[1], work=told)], 30.0)
    assert idle.work.prompts_per_s == 1.0
    assert idle.work.busy_share == 1.0
    assert (busy.work.prompts_per_s, busy.work.busy_share) == (3.0, 0.1)
