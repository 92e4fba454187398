"""The choice of a node: its laws, deadlines, ties and refusals."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kakeya.core.errors import PeerUnavailable
from kakeya.dispatch.routing.candidate import (
    NodeLink,
    NodeSpeed,
    QueuedWork,
    RouteCandidate,
    RoutedRequest,
)
from kakeya.dispatch.routing.decision import NoRoute, choose
from kakeya.dispatch.routing.estimate import estimate_all
from kakeya.generation.facts import ModelState
from tests.laws import law

SPEED = NodeSpeed(prefill_tokens_per_s=500, decode_tokens_per_s=30)
REQUEST = RoutedRequest(prompt_tokens=2000, output_tokens=100)

speeds = st.builds(
    NodeSpeed,
    prefill_tokens_per_s=st.sampled_from([0.0, 100.0, 500.0, 5000.0]),
    decode_tokens_per_s=st.sampled_from([0.0, 10.0, 60.0]),
    row_cost=st.floats(0, 1),
    piece_tokens=st.sampled_from([0, 256, 512]),
    max_rows=st.integers(1, 8),
)
works = st.builds(
    QueuedWork,
    prompt_tokens=st.integers(0, 50_000),
    prompts=st.integers(0, 12),
    rows=st.lists(st.integers(0, 1000), max_size=12).map(tuple),
    prompts_per_s=st.floats(0, 5),
    busy_share=st.floats(0, 1),
)
links = st.builds(
    NodeLink, round_trip_s=st.floats(0, 0.2), bytes_per_s=st.sampled_from([0.0, 1e6, 1e9])
)
nodes = st.builds(
    RouteCandidate,
    node_id=st.sampled_from([f"mini-{number}" for number in range(8)]),
    is_local=st.booleans(),
    state=st.sampled_from([ModelState.READY, ModelState.LOADING, ModelState.UNLOADED]),
    load_s=st.floats(0, 60),
    speed=speeds,
    work=works,
    link=links,
    warm_tokens=st.integers(0, 4000),
    warm_s=st.floats(0, 1),
    held_tokens=st.integers(0, 4000),
    kv_rates=st.dictionaries(
        st.sampled_from([f"mini-{number}" for number in range(8)]),
        st.sampled_from([1e5, 1e7, 1e9]),
    ),
    sharers=st.integers(0, 8),
    age_s=st.floats(0, 60),
    unfit=st.sampled_from(["", "", "", "it drains"]),
)
shelves = st.lists(nodes, min_size=1, max_size=6, unique_by=lambda node: node.node_id)
requests = st.builds(
    RoutedRequest,
    prompt_tokens=st.integers(1, 20_000),
    output_tokens=st.integers(0, 2000),
    deadline_s=st.none() | st.floats(0.1, 100),
    last_node=st.sampled_from(["", "mini-0", "mini-1", "mini-2"]),
    kv_bytes_per_token=st.sampled_from([0, 10_000]),
)


@given(requests, shelves, st.randoms(use_true_random=False))
@law(3600)
def test_the_order_of_the_candidates_has_no_part_in_the_choice(request_, shelf, random) -> None:
    mixed = list(shelf)
    random.shuffle(mixed)
    if all(node.unfit for node in shelf):
        with pytest.raises(NoRoute) as one:
            choose(request_, shelf)
        with pytest.raises(NoRoute) as other:
            choose(request_, mixed)
        assert one.value.message == other.value.message
    else:
        assert choose(request_, shelf) == choose(request_, mixed)


@st.composite
def better_and_worse(draw: st.DrawFn) -> tuple[RouteCandidate, RouteCandidate]:
    """Two nodes, the first of which has better figures in everything."""
    worse = draw(nodes)
    rate, decode = draw(st.floats(50, 5000)), draw(st.floats(5, 100))
    factor = st.floats(1.1, 3)
    less = st.floats(0, 0.9)
    rows = worse.work.rows
    worse = replace(
        worse,
        node_id="a",
        is_local=False,
        unfit="",
        load_s=worse.load_s + 1,
        warm_s=worse.warm_s + 0.1,
        speed=replace(worse.speed, prefill_tokens_per_s=rate, decode_tokens_per_s=decode),
        link=NodeLink(round_trip_s=worse.link.round_trip_s + 0.01, bytes_per_s=1e6),
    )
    better = replace(
        worse,
        node_id="b",
        load_s=worse.load_s * draw(less),
        warm_s=worse.warm_s * draw(less),
        warm_tokens=worse.warm_tokens + draw(st.integers(1, 1000)),
        speed=replace(
            worse.speed,
            prefill_tokens_per_s=rate * draw(factor),
            decode_tokens_per_s=decode * draw(factor),
            row_cost=worse.speed.row_cost * draw(less),
        ),
        work=QueuedWork(
            prompt_tokens=int(worse.work.prompt_tokens * draw(less)),
            prompts=worse.work.prompts // 2,
            rows=rows[: draw(st.integers(0, len(rows)))],
            prompts_per_s=worse.work.prompts_per_s * draw(less),
            busy_share=worse.work.busy_share * draw(less),
        ),
        link=NodeLink(round_trip_s=worse.link.round_trip_s * draw(less), bytes_per_s=2e6),
    )
    return better, worse


@given(requests, better_and_worse(), st.sampled_from(["", "b"]))
@law(3600)
def test_a_node_that_is_better_in_everything_is_chosen(request_, pair, last_node) -> None:
    better, worse = pair
    told = replace(request_, last_node=last_node, kv_bytes_per_token=0, deadline_s=None)
    decision = choose(told, [worse, better])
    assert decision.node_id == "b"
    assert decision.chosen.first_s <= decision.estimates[-1].first_s


@given(requests, shelves)
@law(3600)
def test_kv_is_fetched_only_where_that_is_sooner_than_computing_it_by_the_same_figures(
    request_, shelf
) -> None:
    kept = replace(request_, kv_bytes_per_token=10_000)
    held = {node.node_id: node for node in shelf}
    with_kv = estimate_all(kept, shelf)
    alone = estimate_all(replace(kept, kv_bytes_per_token=0), shelf)
    for here, without in zip(with_kv, alone, strict=True):
        assert here.first_s <= without.first_s
        fetch, node = here.fetch, held[here.node_id]
        if not fetch.tokens:
            assert here.first_s == without.first_s
            continue
        assert fetch.node_id != here.node_id
        assert here.warm_tokens + fetch.tokens < kept.prompt_tokens
        assert here.warm_tokens + fetch.tokens <= held[fetch.node_id].held_tokens
        assert fetch.bytes_per_s == node.kv_rates[fetch.node_id]
        assert fetch.seconds > fetch.tokens * 10_000 / fetch.bytes_per_s


def test_a_decision_tells_from_where_kv_comes_and_at_what_speed() -> None:
    shelf = [
        RouteCandidate(
            node_id="a",
            speed=SPEED,
            work=QueuedWork(prompt_tokens=9000, prompts=3),
            warm_tokens=1900,
            held_tokens=1900,
        ),
        RouteCandidate(node_id="b", speed=SPEED, kv_rates={"a": 1e8}),
    ]
    decision = choose(replace(REQUEST, kv_bytes_per_token=10_000), shelf)
    assert decision.node_id == "b"
    assert "1900 come from a" in decision.reason
    told = decision.describe()["candidates"][0]
    assert told["fetched_tokens"] == 1900
    assert told["fetch"] == {"node": "a", "seconds": 0.229, "bytes_per_second": 100_000_000}
    slow = [shelf[0], replace(shelf[1], kv_rates={"a": 1e6})]
    alone = choose(replace(REQUEST, kv_bytes_per_token=10_000), slow)
    assert all(one.fetch.tokens == 0 for one in alone.estimates)
    assert alone.describe()["candidates"][0]["fetch"] is None


def test_no_candidate_is_an_error_that_names_the_reason_of_each() -> None:
    shelf = [
        RouteCandidate(node_id="b", state=ModelState.STOPPED),
        RouteCandidate(node_id="a", unfit="its context has 2048 tokens"),
    ]
    with pytest.raises(NoRoute) as refusal:
        choose(REQUEST, shelf)
    assert isinstance(refusal.value, PeerUnavailable)
    assert refusal.value.retryable
    assert refusal.value.reasons == (
        ("a", "its context has 2048 tokens"),
        ("b", "the model is stopped there"),
    )
    assert "its context has 2048 tokens" in refusal.value.message
    with pytest.raises(NoRoute, match="no node has the model"):
        choose(REQUEST, [])


def test_a_deadline_that_one_node_meets_chooses_it() -> None:
    quick = RouteCandidate(
        node_id="quick", speed=SPEED, warm_tokens=1900, work=QueuedWork(rows=(900,) * 7)
    )
    slow = RouteCandidate(node_id="slow", speed=replace(SPEED, decode_tokens_per_s=400))
    long = replace(REQUEST, output_tokens=4000)
    assert choose(long, [quick, slow]).node_id == "slow"
    assert choose(replace(long, deadline_s=2.0), [quick, slow]).node_id == "quick"
    late = choose(replace(long, deadline_s=0.01), [quick, slow])
    assert late.node_id == "slow"
    assert "no node is expected to meet the deadline" in late.reason


def test_equals_stay_with_the_node_that_served_the_conversation_last() -> None:
    shelf = [RouteCandidate(node_id=name, speed=SPEED) for name in ("a", "b", "c")]
    assert choose(REQUEST, shelf).node_id == "a"
    assert choose(replace(REQUEST, last_node="c"), shelf).node_id == "c"
    shelf[1] = replace(shelf[1], is_local=True)
    assert choose(REQUEST, shelf).node_id == "b"


def test_a_decision_tells_its_terms_and_its_reason() -> None:
    shelf = [
        RouteCandidate(node_id="a", speed=SPEED, warm_tokens=1500),
        RouteCandidate(node_id="b", speed=SPEED),
        RouteCandidate(node_id="c", unfit="it drains"),
    ]
    decision = choose(REQUEST, shelf)
    assert decision.chosen.prefill_s == pytest.approx(1.0)
    assert decision.reason == (
        "first token in about 1.00 s, 1500 of 2000 tokens are warm there; "
        "the next best, b, in 4.00 s"
    )
    first = decision.chosen
    assert first.first_s + first.decode_s == first.end_s
    said = decision.describe()
    assert [one["node"] for one in said["candidates"]] == ["a", "b"]
    assert said["candidates"][0]["terms_s"]["prefill"] == 1.0
    assert said["unfit"] == {"c": "it drains"}


def test_a_node_that_did_not_measure_itself_yet_keeps_its_warm_conversations() -> None:
    """Its speed is not known yet; to compute the prompt anew elsewhere takes far longer."""
    again = RouteCandidate(node_id="a", is_local=True, speed=NodeSpeed(), warm_tokens=1900)
    speed = NodeSpeed(prefill_tokens_per_s=4000, decode_tokens_per_s=300)
    other = RouteCandidate(node_id="b", speed=speed)
    assert choose(REQUEST, [again, other]).node_id == "a"
    cold = replace(again, warm_tokens=0, load_s=5.0)
    assert choose(REQUEST, [cold, other]).node_id == "b"
