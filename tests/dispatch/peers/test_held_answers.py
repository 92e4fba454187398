"""Copies of answers in memory: found by their client alone, bounded, and not for long."""

from __future__ import annotations

import pytest

from kakeya.core.errors import CapacityExhausted, NotFound
from kakeya.dispatch.peers.held_answers import KEEP_S, AnswerCopy, HeldAnswers
from kakeya.dispatch.peers.quote import AnswerOrigin
from kakeya.dispatch.peers.wire import copy_from_wire, copy_to_wire
from kakeya.generation.frames import Done, Frame, StopReason, Tokens
from kakeya.generation.request import DecodeRequest
from tests.fakes import FakeClock

ORIGIN = AnswerOrigin(weights="w", numerics="n")
END = Done(reason=StopReason.MAX_TOKENS)


def copy_of(*frames: Frame, answer_id: str = "resp_1", client: str = "", size: int = 1, **more):
    request = DecodeRequest(token_ids=[5, 6, 7], max_tokens=9, kv_key="mine", client="me")
    return AnswerCopy(
        answer_id=answer_id,
        client=client,
        model_id="toy",
        body=b"x" * size,
        created_at=7,
        request=request,
        frames=frames,
        **more,
    )


def tokens(*ids: int) -> Tokens:
    return Tokens(token_ids=ids)


def hold(held: HeldAnswers, copy: AnswerCopy, before: int = 0) -> None:
    held.hold(copy_to_wire(copy, before), before)


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def held(clock: FakeClock) -> HeldAnswers:
    return HeldAnswers(most_bytes=4000, mono=clock.mono)


def test_a_copy_grows_and_is_found_whole(held: HeldAnswers) -> None:
    hold(held, copy_of(tokens(1)))
    hold(held, copy_of(tokens(2, 3), origin=ORIGIN), 1)
    hold(held, copy_of(END, is_complete=True, origin=ORIGIN), 2)
    found = held.find("resp_1", "")
    assert found is not None
    copy = copy_from_wire(found)
    assert list(copy.frames) == [tokens(1), tokens(2, 3), END]
    assert (copy.is_complete, copy.origin, copy.created_at) == (True, ORIGIN, 7)
    assert (copy.model_id, copy.body, copy.request.max_tokens) == ("toy", b"x", 9)
    assert list(copy.request.token_ids) == [5, 6, 7]
    assert (copy.request.kv_key, copy.request.client) == ("", ""), "those of the other node"


def test_new_frames_of_an_unknown_copy_are_refused(held: HeldAnswers) -> None:
    with pytest.raises(NotFound):
        hold(held, copy_of(tokens(1)), 1)
    hold(held, copy_of(tokens(1)))
    with pytest.raises(NotFound):
        hold(held, copy_of(tokens(3)), 2)
    with pytest.raises(NotFound):
        hold(held, copy_of(tokens(3), client="other"), 1)
    hold(held, copy_of())
    found = held.find("resp_1", "")
    assert found is not None
    assert not found.frames, "a whole copy takes the place of the one before"


def test_a_copy_is_of_its_client_alone(held: HeldAnswers) -> None:
    hold(held, copy_of(client="ann"))
    assert held.find("resp_1", "") is held.find("resp_1", "bob") is None
    assert not held.forget("resp_1", "bob")
    assert held.find("resp_1", "ann") is not None
    assert held.forget("resp_1", "ann")
    assert held.find("resp_1", "ann") is None
    assert held.size_bytes == 0


def test_a_copy_is_held_for_ten_minutes_behind_its_last_token(
    held: HeldAnswers, clock: FakeClock
) -> None:
    hold(held, copy_of())
    clock.advance(KEEP_S - 1)
    hold(held, copy_of(tokens(1)))
    clock.advance(KEEP_S - 1)
    assert held.find("resp_1", "") is not None
    clock.advance(1)
    assert held.find("resp_1", "") is None
    assert held.size_bytes == 0


def test_the_memory_is_bounded_and_those_that_grew_last_stay(held: HeldAnswers) -> None:
    for number in range(8):
        hold(held, copy_of(answer_id=f"resp_{number}", size=700))
        hold(held, copy_of(tokens(number), answer_id="resp_0", size=700))
    assert held.size_bytes <= 4000
    assert held.find("resp_0", "") is not None
    assert held.find("resp_1", "") is None
    assert held.find("resp_7", "") is not None
    with pytest.raises(CapacityExhausted, match="http_resume_mb"):
        hold(held, copy_of(answer_id="large", size=1500))
    assert held.find("large", "") is None
