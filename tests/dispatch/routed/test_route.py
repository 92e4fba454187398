"""What a decision is made on: the nodes that are asked, and what is known of a request."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kakeya.core.errors import PeerUnavailable
from kakeya.dispatch.peers.neighbours import LATE, MOST_QUOTED
from kakeya.dispatch.routed.history import RouteHistory
from kakeya.dispatch.routed.route import RequestRoute
from kakeya.dispatch.routing.candidate import RouteCandidate, RoutedRequest
from kakeya.dispatch.routing.decision import NoRoute, choose
from kakeya.generation.continuation import Continuation
from kakeya.generation.facts import ModelFacts, ModelState, PromptsAlike, RequestLoad
from kakeya.generation.frames import Tokens
from kakeya.generation.kv import NO_HOLDER, KvHolder
from kakeya.generation.request import DecodeRequest
from tests.dispatch.peers.world import facts_of
from tests.dispatch.routed.world import OWN, Shelf
from tests.fakes import FakeClock


def route_of(shelf: Shelf, facts: ModelFacts | None = None) -> RequestRoute:
    facts = facts or facts_of()
    return RequestRoute("toy", "owner", shelf.own, facts, shelf.fleet, shelf.history)  # type: ignore[arg-type]


def job_of(tokens: int = 3, **others: object) -> Continuation:
    request = DecodeRequest(token_ids=range(tokens), max_tokens=9, **others)  # type: ignore[arg-type]
    return Continuation(request, 1000.0)


async def test_the_estimates_are_made_of_quotes() -> None:
    shelf = Shelf()
    shelf.node("left").model.load = RequestLoad(answers=(250,), waiting=2, waiting_tokens=500)
    shelf.node("right").model.held = 900
    decision, told = await route_of(shelf).decide(job_of(1000))
    assert (told.prompt_tokens, told.output_tokens) == (1000, 9)
    right, left = decision.estimates
    assert (right.node_id, right.warm_tokens) == ("right", 900)
    assert right.prefill_s == pytest.approx(0.1)
    # A step of the row that decodes stands between two pieces of 128 tokens.
    assert left.wait_s == pytest.approx(0.5 * (1 + 0.01 * 1000 / 128))


async def test_requests_of_other_nodes_count_by_the_rates_that_a_node_tells() -> None:
    """This node sent nothing, and knows of no request."""
    shelf = Shelf()
    left = shelf.node("left").model
    left.load = RequestLoad(prompts_per_s=2.0, busy_share=0.5)
    decision, _ = await route_of(shelf).decide(job_of(2000))
    right, left_estimate = decision.estimates
    assert right.node_id == "right"
    assert right.later_s == right.places_s == 0
    assert left_estimate.later_s > 0
    assert left_estimate.places_s > 0


async def test_what_was_routed_to_a_node_while_it_quoted_counts() -> None:
    shelf = Shelf()

    def meanwhile() -> None:
        shelf.clock.advance(0.01)
        other = RoutedRequest(prompt_tokens=5000)
        shelf.history.begin(other, choose(other, [RouteCandidate(node_id="left")]))
        shelf.clock.advance(0.01)

    shelf.fleet.meanwhile = meanwhile
    decision, _ = await route_of(shelf).decide(job_of())
    assert decision.node_id == "right"
    assert {one.node_id: one.wait_s > 1 for one in decision.estimates} == {
        "left": True,
        "right": False,
    }


async def test_a_prefix_that_a_node_computes_for_another_one_is_warm_there() -> None:
    shelf = Shelf()
    shelf.node("right").model.beside = PromptsAlike(requests=3, tokens=1920)
    decision, _ = await route_of(shelf).decide(job_of(2000))
    assert (decision.node_id, decision.chosen.warm_tokens) == ("right", 1920)
    left = next(one for one in decision.estimates if one.node_id == "left")
    # A copy of what three more want is worth all that it takes.
    assert left.copy_s == pytest.approx(-1.92)
    shelf.node("right").model.beside = PromptsAlike(requests=0, tokens=1920)
    again, _ = await route_of(shelf).decide(job_of(2000))
    left = next(one for one in again.estimates if one.node_id == "left")
    assert left.copy_s == pytest.approx(-0.3 * 1.92)


async def test_a_model_that_was_never_loaded_comes_behind_one_that_serves() -> None:
    shelf = Shelf()
    left = shelf.node("left").model
    left.state, left.facts, left.load_s = ModelState.UNLOADED, None, None
    decision, _ = await route_of(shelf).decide(job_of())
    assert [one.node_id for one in decision.estimates] == ["right", "left"]
    assert decision.estimates[1].load_s == 30.0
    left.load_s = 2.0
    decision, _ = await route_of(shelf).decide(job_of())
    assert decision.estimates[1].load_s == 2.0


@pytest.mark.parametrize("own", [False, True])
async def test_a_node_in_doubt_is_asked_only_where_no_other_has_the_model(own: bool) -> None:
    shelf = Shelf(own=own)
    shelf.node("left").is_suspect = True
    await route_of(shelf).decide(job_of())
    assert shelf.node("left").quoted == []
    shelf.node("right").is_suspect = True
    decision, _ = await route_of(shelf).decide(job_of())
    assert bool(shelf.node("left").quoted) is not own
    assert decision.node_id == (OWN if own else "left")


async def test_a_node_that_does_not_quote_is_left_out_with_its_words() -> None:
    shelf = Shelf()
    shelf.node("left").quote_fails = "left: it drains"
    decision, _ = await route_of(shelf).decide(job_of())
    assert decision.node_id == "right"
    assert decision.unfit == (("left", "left: it drains"),)
    shelf.node("right").quote_fails = "right: it drains"
    with pytest.raises(NoRoute, match="left: left: it drains; right: right: it drains"):
        await route_of(shelf).decide(job_of())


async def test_an_own_model_of_other_words_is_left_out() -> None:
    """It was loaded after a peer had told how the prompt is written."""
    shelf = Shelf(own=True)
    assert shelf.own is not None
    shelf.own.facts = facts_of(vocabulary_digest="other words")
    decision, _ = await route_of(shelf).decide(job_of())
    assert decision.node_id == "left"
    assert dict(decision.unfit) == {OWN: "its vocabulary is not that of the prompt"}


async def test_the_blocks_of_a_prompt_name_all_before_them() -> None:
    shelf = Shelf()
    route = route_of(shelf, facts_of(kv_block_tokens=64))
    _, one = await route.decide(job_of(200))
    _, longer = await route.decide(job_of(300))
    _, other = await route.decide(
        Continuation(DecodeRequest(token_ids=[7, *range(1, 200)], max_tokens=9), 0.0)
    )
    assert len(one.blocks) == 3
    assert longer.blocks[:3] == one.blocks
    assert not set(other.blocks) & set(one.blocks)
    assert one.block_tokens == 64
    _, small = await route_of(shelf, facts_of(kv_block_tokens=0)).decide(job_of(200))
    assert small.block_tokens == 64


async def test_requests_at_once_do_not_all_go_to_the_node_that_was_idle() -> None:
    shelf, taken = Shelf(), []
    for first in range(4):
        prompt = [first, *range(2000)]
        job = Continuation(DecodeRequest(token_ids=prompt, max_tokens=9), 1000.0)
        decision, told = await route_of(shelf).decide(job)
        shelf.history.begin(told, decision)
        taken.append(decision.node_id)
    assert taken == ["left", "right", "left", "right"]


async def test_weights_are_those_of_the_first_node_with_a_token() -> None:
    shelf = Shelf(("left", "right", "third"))
    shelf.told("right", base_fingerprint="others")
    route, job = route_of(shelf), job_of()
    first, _ = await route.decide(job)
    assert first.node_id == "left"
    job.take(Tokens(token_ids=(1,)), 1000.0)
    route.began_at("left")
    job.interrupt()
    route.lost("left", PeerUnavailable("it is gone"))
    second, _ = await route.decide(job)
    assert second.node_id == "third"
    assert dict(second.unfit)["right"] == "its weights are not those that began the answer"


async def test_an_answer_of_unknown_weights_is_not_continued() -> None:
    """Its node was not loaded when it quoted, and of an older build, which tells no more."""
    shelf = Shelf()
    left = shelf.node("left")
    left.is_old, left.model.facts = True, None
    shelf.node("right").model.load_s = 60.0
    route, job = route_of(shelf), job_of()
    first, _ = await route.decide(job)
    assert first.node_id == "left"
    job.take(Tokens(token_ids=(1,)), 1000.0)
    route.began_at("left")
    job.interrupt()
    route.lost("left", PeerUnavailable("it is gone"))
    began_mono = shelf.clock.mono()
    with pytest.raises(PeerUnavailable, match=r"no other is known to have its weights.*it is gone"):
        await route.decide(job)
    assert shelf.clock.mono() == began_mono, "waiting would bring nothing"


def test_only_so_many_conversations_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    from kakeya.dispatch.routed import history

    monkeypatch.setattr(history, "_MOST_CONVERSATIONS", 2)
    known = RouteHistory(FakeClock())
    for name in ("c1", "c2", "c1", "c3"):
        request = RoutedRequest(prompt_tokens=1, conversation=name)
        known.begin(request, choose(request, [RouteCandidate(node_id="left")]))
    assert [known.last_node(name) for name in ("c1", "c2", "c3", "")] == ["left", "", "left", ""]
    figures = {figure.name: figure for figure in known.figures()}
    assert len(figures) == 2


async def test_a_node_that_is_late_with_its_quote_serves_where_no_other_can() -> None:
    """A busy node answers late; a request is not refused for that."""
    shelf = Shelf()
    shelf.node("left").quote_fails = LATE
    decision, _ = await route_of(shelf).decide(job_of())
    assert (decision.node_id, decision.unfit) == ("right", (("left", LATE),))
    shelf.node("right").quote_fails = "right: it drains"
    decision, _ = await route_of(shelf).decide(job_of())
    assert (decision.node_id, decision.unfit) == ("left", (("right", "right: it drains"),))


async def test_of_many_nodes_prompts_with_one_beginning_ask_the_same_few() -> None:
    shelf = Shelf([f"n{number}" for number in range(3 * MOST_QUOTED)])

    async def asked_for(prompt: int, tail: int) -> set[str]:
        for node in shelf.fleet.nodes.values():
            node.quoted.clear()
        ids = [prompt] * 64 + [tail] * 70
        await route_of(shelf).decide(Continuation(DecodeRequest(token_ids=ids, max_tokens=9), 0.0))
        return {name for name, node in shelf.fleet.nodes.items() if node.quoted}

    first = await asked_for(1, 1)
    assert len(first) == MOST_QUOTED
    assert await asked_for(1, 2) == first
    asked = [await asked_for(prompt, 0) for prompt in range(40)]
    assert set.union(*asked) == shelf.fleet.nodes.keys()


async def test_of_many_nodes_the_one_of_the_conversation_is_asked() -> None:
    shelf = Shelf([f"n{number}" for number in range(3 * MOST_QUOTED)])
    request = DecodeRequest(token_ids=range(3), max_tokens=9, kv_key="chat")
    decision, told = await route_of(shelf).decide(Continuation(request, 0.0))
    for name in shelf.fleet.nodes:
        estimate = replace(decision.chosen, node_id=name)
        there = replace(decision, node_id=name, estimates=(estimate,))
        shelf.history.begin(told, there)
        for node in shelf.fleet.nodes.values():
            node.quoted.clear()
        await route_of(shelf).decide(Continuation(request, 0.0))
        assert shelf.node(name).quoted


def sharing(shelf: Shelf, bytes_per_s: float = 1e8) -> None:
    """Have all nodes exchange KV, with links so fast."""
    names = (OWN, *shelf.fleet.nodes)
    for name in names:
        shelf.fleet.rates[name] = {one: bytes_per_s for one in names if one != name}


async def test_a_node_that_would_fetch_is_expected_to_and_told_from_where() -> None:
    shelf = Shelf()
    sharing(shelf)
    facts = facts_of(kv_bytes_per_token=10_000)
    left = shelf.node("left").model
    left.held, left.load = 900, RequestLoad(waiting=4, waiting_tokens=5000)
    route = route_of(shelf, facts)
    decision, told = await route.decide(job_of(1000))
    assert decision.node_id == "right"
    assert (decision.chosen.fetched_tokens, decision.chosen.fetch.node_id) == (900, "left")
    assert route.kv_holder(decision, told) == KvHolder(node_id="left", tokens=900)
    left.load = RequestLoad()
    route = route_of(shelf, facts)
    decision, told = await route.decide(job_of(1000))
    assert decision.node_id == "left"
    assert route.kv_holder(decision, told) == NO_HOLDER


@pytest.mark.parametrize("unlike", ["shares none", "other arithmetic", "other weights", "slow"])
async def test_kv_that_a_node_cannot_use_or_has_later_is_not_expected(unlike: str) -> None:
    shelf = Shelf()
    sharing(shelf, 1e4 if unlike == "slow" else 1e8)
    left = shelf.node("left").model
    left.held, left.load = 900, RequestLoad(waiting=4, waiting_tokens=5000)
    match unlike:
        case "shares none":
            del shelf.fleet.rates["left"]
        case "other arithmetic":
            shelf.told("left", kv_exactness="of another processor")
        case "other weights":
            shelf.told("left", base_fingerprint="of another quantization")
    route = route_of(shelf, facts_of(kv_bytes_per_token=10_000))
    decision, told = await route.decide(job_of(1000))
    assert decision.node_id == "right"
    assert decision.chosen.fetched_tokens == 0
    # A slow link may have become faster: the node is told, and decides by what it measures.
    expected = KvHolder(node_id="left", tokens=900) if unlike == "slow" else NO_HOLDER
    assert route.kv_holder(decision, told) == expected


async def test_a_conversation_whose_node_takes_no_requests_any_more_may_fetch_from_it() -> None:
    shelf = Shelf()
    sharing(shelf)
    await anext(shelf.routed().decode(DecodeRequest(token_ids=[1], max_tokens=1, kv_key="talk")))
    last = shelf.history.last_node("talk")
    del shelf.fleet.nodes[last]
    route = route_of(shelf)
    decision, told = await route.decide(job_of(kv_key="talk"))
    assert decision.node_id != last
    assert route.kv_holder(decision, told) == KvHolder(node_id=last)


async def test_the_node_that_has_the_kv_is_told_to_the_one_that_computes() -> None:
    shelf = Shelf(own=True)
    sharing(shelf)
    shelf.node("left").model.held = 900
    shelf.node("left").model.load = RequestLoad(waiting=4, waiting_tokens=5000)
    for name in ("left", "right"):
        shelf.told(name, kv_bytes_per_token=10_000)
    assert shelf.own is not None
    shelf.own.told = facts_of(kv_bytes_per_token=10_000)
    request = DecodeRequest(token_ids=range(1000), max_tokens=2)
    frames = [frame async for frame in shelf.routed().decode(request)]
    assert frames
    (asked,) = shelf.own.requests
    assert asked.kv_holder == KvHolder(node_id="left", tokens=900)
