"""The inbox: everything once and in order, failures to who asked, and since when nothing moved."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kakeya.engine.inbox import Inbox, Item
from kakeya.engine.queue.rows import QueueTicket
from kakeya.generation.request import DecodeJob


def ticket() -> QueueTicket:
    return QueueTicket(DecodeJob(token_ids=(1,), max_tokens=1), lambda _: None, lambda _: None)


class Clock:
    def __init__(self) -> None:
        self.now_s = 1.0

    def __call__(self) -> float:
        return self.now_s


@given(kinds=st.lists(st.sampled_from(("ticket", "call", "stop")), min_size=1))
def test_everything_comes_out_once_in_the_order_in_which_it_went_in(kinds: list[str]) -> None:
    inbox = Inbox(lambda: 0.0)
    made: list[object] = []
    for number, kind in enumerate(kinds):
        if kind == "ticket":
            made.append(ticket())
            inbox.submit(made[-1])  # type: ignore[arg-type]
        elif kind == "call":
            made.append(inbox.call(lambda number=number: number))
        else:
            made.append(None)
            inbox.stop()
    taken: list[Item] = list(inbox.items(is_idle=True))
    assert len(taken) == len(kinds)
    for number, (kind, before, after) in enumerate(zip(kinds, made, taken, strict=True)):
        if kind == "call":
            assert callable(after)
            after()
            assert before.result(timeout=0) == number  # type: ignore[attr-defined]
        else:
            assert before is after
    assert list(inbox.items(is_idle=False)) == []


def test_work_that_fails_fails_for_who_asked_and_given_up_work_is_not_done() -> None:
    inbox = Inbox(lambda: 0.0)
    done: list[str] = []
    failing = inbox.call(lambda: [][0])
    given_up = inbox.call(lambda: done.append("given up"))
    assert given_up.cancel()
    for item in inbox.items(is_idle=False):
        assert callable(item)
        item()
    with pytest.raises(IndexError):
        failing.result(timeout=0)
    assert done == []


def test_it_tells_for_how_long_its_reader_has_been_at_one_thing() -> None:
    clock = Clock()
    inbox = Inbox(clock)
    assert inbox.silent_s() == 0
    inbox.submit(ticket())
    clock.now_s = 5.0
    for _ in inbox.items(is_idle=True):
        clock.now_s = 7.0  # the arrival took so long
        assert inbox.silent_s() == 2.0
    assert inbox.read_s == 5.0
    assert list(inbox.items(is_idle=False)) == []
    assert (inbox.read_s, inbox.silent_s()) == (7.0, 0)
    clock.now_s = 9.0  # a forward that takes two seconds
    assert inbox.silent_s() == 2.0
