"""Answers that go on at another node after the loss of the one that streamed them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kakeya.core.errors import (
    Conflict,
    DeadlineExceeded,
    Denied,
    KakeyaError,
    NotFound,
    PeerUnavailable,
    UnknownMethod,
)
from kakeya.dispatch.peers.held_answers import AnswerCopy, HeldAnswers
from kakeya.dispatch.routed.copied import AnswerCopies
from kakeya.generation.frames import Done, Frame, Tokens
from kakeya.generation.request import DecodeRequest, Sampling
from tests.dispatch.peers.world import QuotedToy, facts_of
from tests.dispatch.routed.copies import CopyFleet, CopyPeers
from tests.dispatch.routed.world import Shelf
from tests.laws import law
from tests.sessions.toy import expected
from tests.waiting import until

PROMPT = [5, 6, 7]


def new(max_tokens: int = 60, **more: Any) -> AnswerCopy:
    request = DecodeRequest(
        token_ids=PROMPT, max_tokens=max_tokens, sampling=Sampling(temperature=0.8, seed=3), **more
    )
    return AnswerCopy(
        answer_id="resp_1", client="", model_id="toy", body=b"{}", created_at=1, request=request
    )


async def take(copies: AnswerCopies, copy: AnswerCopy, model: Any, most: int = 10**6) -> list[int]:
    """The tokens of an answer, up to `most`, after which its client is lost."""
    got: list[int] = []
    async with aclosing(copies.begin(copy).decode(model, copy.request)) as frames:
        async for frame in frames:
            got += frame.token_ids if isinstance(frame, Tokens) else ()
            if len(got) >= most:
                break
    return got


async def sought(copies: AnswerCopies) -> AnswerCopy | None:
    try:
        return await copies.find("resp_1", "")
    except NotFound:
        return None


async def found(fleet: CopyFleet, at: str, tokens: int) -> AnswerCopy:
    copies = fleet.at(at)
    for _ in range(1000):
        copy = await sought(copies)
        if copy is not None and count(copy.frames) >= tokens:
            return copy
        await asyncio.sleep(0.001)
    raise AssertionError(f"no copy with {tokens} tokens came")


def count(frames: Sequence[Frame]) -> int:
    return sum(len(frame.token_ids) for frame in frames if isinstance(frame, Tokens))


# --- the law


@given(
    st.integers(1, 59),
    st.integers(1, 5),
    st.sampled_from(["left", "right"]),
    st.integers(0, 20),
    st.sampled_from([1, 7]),
)
@law(60)
def test_whichever_node_goes_on_the_tokens_are_the_same(
    at: int, step: int, second: str, later: int, other_step: int
) -> None:
    async def run() -> None:
        fleet = CopyFleet("front", "left", "right")
        whole = expected(PROMPT, 60, sampling=Sampling(temperature=0.8, seed=3))[0]
        first = await take(fleet.at("front"), new(), QuotedToy(tokens_per_step=step), at)
        assert first == whole[: len(first)]
        copy = await found(fleet, second, len(first))
        # The second one is lost too, and a third one goes on.
        model = QuotedToy(tokens_per_step=other_step)
        got = await take(fleet.at(second), copy, model, len(first) + later)
        assert got == whole[: len(got)]
        third = "right" if second == "left" else "left"
        copy = await found(fleet, third, len(got))
        model = QuotedToy(tokens_per_step=other_step)
        assert await take(fleet.at(third), copy, model) == whole
        asked = model.requests[-1:]
        assert all(one.prompt_tokens in (0, len(PROMPT)) for one in asked)
        assert (await found(fleet, "front", len(whole))).frames

    asyncio.run(run())


# --- the copies


async def test_the_request_is_held_before_the_first_token_is_told() -> None:
    fleet = CopyFleet("front", "left")
    copy = new()
    async with aclosing(fleet.at("front").begin(copy).decode(QuotedToy(), copy.request)) as frames:
        async for frame in frames:
            if isinstance(frame, Tokens):
                break
        assert fleet.held["left"].find("resp_1", "") is not None


async def test_a_complete_answer_is_told_again_and_nothing_is_computed() -> None:
    fleet = CopyFleet("front", "left")
    whole = await take(fleet.at("front"), new(), QuotedToy())
    copy = await found(fleet, "left", len(whole))
    await until(lambda: fleet.held["left"].find("resp_1", "").is_complete)  # type: ignore[union-attr]
    copy = await found(fleet, "left", len(whole))
    assert isinstance(copy.frames[-1], Done)
    model = QuotedToy()
    sent = len(fleet.sent)
    assert await take(fleet.at("left"), copy, model) == whole
    assert not model.requests
    assert len(fleet.sent) == sent


async def test_a_lost_holder_is_replaced_by_another_with_the_whole_copy() -> None:
    fleet = CopyFleet("front", "left", "right")
    copies, copy = fleet.at("front"), new()
    got = 0
    async with aclosing(copies.begin(copy).decode(QuotedToy(), copy.request)) as frames:
        async for frame in frames:
            got += count([frame])
            if got == 20:
                lost = fleet.sent[0][0]
                fleet.fails[lost] = PeerUnavailable("it is lost")
                fleet.held[lost] = HeldAnswers(most_bytes=10**6, mono=fleet.clock.mono)
    other = "right" if lost == "left" else "left"
    await until(lambda: fleet.held[other].find("resp_1", "") is not None)
    copy = await found(fleet, other, got)
    assert count(copy.frames) == got


async def test_an_answer_may_be_found_yet_while_a_node_that_may_hold_it_does_not_answer() -> None:
    fleet = CopyFleet("front", "left", "right")
    fleet.fails["left"] = PeerUnavailable("it starts")
    with pytest.raises(PeerUnavailable, match="not asked with success: left") as caught:
        await fleet.at("front").find("resp_1", "")
    assert caught.value.retry_after_s
    fleet.fails["left"] = UnknownMethod("it knows no FindAnswer")
    with pytest.raises(NotFound, match="is held for this client by this node"):
        await fleet.at("front").find("resp_1", "")


async def test_without_peers_the_node_holds_its_copies_itself() -> None:
    fleet = CopyFleet("front")
    got = await take(fleet.at("front"), new(), QuotedToy(), 10)
    assert count((await found(fleet, "front", len(got))).frames) >= 10


async def held_at_its_own_node(
    fleet: CopyFleet, copies: AnswerCopies, then: Callable[[], Awaitable[object]]
) -> int:
    """Make an answer whose peer is late at first; `then` runs in the middle of it, when the peer
    is there and is due to be asked again. How many tokens there are."""
    fleet.fails["left"] = DeadlineExceeded("it is busy")
    copy, got = new(), 0
    assert copy.request is not None
    async with aclosing(copies.begin(copy).decode(QuotedToy(), copy.request)) as frames:
        async for frame in frames:
            got += count([frame])
            if got == 20:
                await until(lambda: fleet.held["front"].find("resp_1", "") is not None)
                assert fleet.held["left"].find("resp_1", "") is None
                fleet.fails.clear()
                await then()
                await fleet.clock.sleep(2.0)
    return got


async def test_a_copy_that_only_its_own_node_holds_goes_to_a_peer_as_soon_as_one_answers() -> None:
    fleet = CopyFleet("front", "left")
    got = await held_at_its_own_node(fleet, fleet.at("front"), lambda: asyncio.sleep(0))
    await until(lambda: fleet.held["left"].find("resp_1", "") is not None)
    assert count((await found(fleet, "left", got)).frames) == got


async def test_a_copy_that_only_its_own_node_holds_goes_to_no_peer_once_it_was_deleted() -> None:
    fleet = CopyFleet("front", "left")
    copies = fleet.at("front")
    await held_at_its_own_node(fleet, copies, lambda: copies.forget("resp_1", ""))
    await until(lambda: not fleet.is_sending)
    assert await sought(copies) is None
    assert fleet.held["left"].find("resp_1", "") is None


@pytest.mark.parametrize("kind", [UnknownMethod, Denied])
async def test_a_node_of_an_older_build_serves_and_holds_nothing(kind: type[KakeyaError]) -> None:
    fleet = CopyFleet("front", "left", "right")
    fleet.fails["left"] = kind("it knows no HoldAnswer")
    copies = fleet.at("front")
    peers = copies.peers
    await take(copies, new(), QuotedToy(), 30)
    await found(fleet, "right", 30)
    assert isinstance(peers, CopyPeers)
    assert peers.failures == []
    assert [name for name, _ in fleet.sent].count("left") == 1, "it was asked, and not again"


async def test_other_weights_do_not_go_on() -> None:
    fleet = CopyFleet("front", "left")
    got = await take(fleet.at("front"), new(), QuotedToy(), 10)
    copy = await found(fleet, "left", len(got))
    other = QuotedToy(facts=facts_of(base_fingerprint="others"))
    with pytest.raises(Conflict, match="weights"):
        await take(fleet.at("left"), copy, other)


async def test_a_routed_model_goes_on_at_nodes_with_the_weights_alone() -> None:
    fleet = CopyFleet("front", "left")
    first = Shelf()
    whole = await take(fleet.at("front"), new(), first.routed())
    again = CopyFleet("front", "left")
    got = await take(again.at("front"), new(), first.routed(), 10)
    copy = await found(again, "left", len(got))
    assert copy.origin.weights
    second = Shelf()
    second.told("left", base_fingerprint="others")
    assert await take(again.at("left"), copy, second.routed()) == whole
    assert second.fleet.tries == ["right"]


async def test_no_copy_of_an_answer_that_was_deleted_comes_again() -> None:
    fleet = CopyFleet("front", "left", "right")
    copies, copy, got = fleet.at("front"), new(), 0
    async with aclosing(copies.begin(copy).decode(QuotedToy(), copy.request)) as frames:
        async for frame in frames:
            got += count([frame])
            if got == 20:
                assert await fleet.at("right").forget("resp_1", "")
    for _ in range(100):  # the sender comes to its end
        await asyncio.sleep(0)
    assert await sought(fleet.at("left")) is None
    assert await sought(fleet.at("front")) is None


async def test_copies_are_forgotten_everywhere() -> None:
    fleet = CopyFleet("front", "left", "right")
    await take(fleet.at("front"), new(), QuotedToy())

    def is_whole() -> bool:
        copies = (one.find("resp_1", "") for one in fleet.held.values())
        return any(copy is not None and copy.is_complete for copy in copies)

    await until(is_whole)
    assert await fleet.at("right").forget("resp_1", "")
    assert await sought(fleet.at("left")) is None
    assert not await fleet.at("left").forget("resp_1", "")
