"""What follows each ending of a stream: the table, without an event loop."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from kakeya.backends.endings import (
    MOST_UNKNOWN,
    AdapterUnknown,
    AttemptEnding,
    EndWith,
    EngineLost,
    MakeWay,
    Retry,
    after,
    ending_of,
)
from kakeya.backends.engine.failures import EngineOutgrew
from kakeya.core.errors import KvRefused, MemoryRefused, NotFound, PeerUnavailable
from kakeya.generation.continuation import Continuation
from kakeya.generation.frames import Done, Progress, StopReason, Tokens
from kakeya.generation.request import DecodeRequest
from kakeya.prefix.request.exchange import Superseded

LOST = EngineLost(model_id="m", error=PeerUnavailable("it died"), most=3, retry_after_s=7.0)
WAY = MakeWay(refusal=MemoryRefused("others need the room", retry_after_s=2.0), most=3)
UNKNOWN = AdapterUnknown(adapter="m:a", error=NotFound("no such slot"))


def job(engines: int = 0, adapters: int = 0) -> Continuation:
    made = Continuation(DecodeRequest(token_ids=[1], max_tokens=9), 0.0)
    for _ in range(engines):
        made.interrupt("engine")
    for _ in range(adapters):
        made.interrupt("adapter")
    return made


def ended(failure: Exception, of: Continuation, *, is_alone: bool = False) -> AttemptEnding:
    return ending_of(
        failure, of, model_id="m", adapter="", is_alone=is_alone, most=3, retry_after_s=7.0
    )


@pytest.mark.parametrize(
    ("ending", "follows"),
    [
        (Done(reason=StopReason.STOP_TOKEN), None),
        (Superseded(), Retry(gives_back=True)),
        (LOST, Retry()),
        (WAY, Retry(in_s=2.0)),
        (UNKNOWN, Retry(gives_back=True)),
    ],
)
def test_a_generation_goes_on_after_every_ending_but_the_last(
    ending: AttemptEnding, follows: Retry | None
) -> None:
    assert after(ending, job(1, 1)) == follows
    assert after(ending, job(2, 2)) == follows


@pytest.mark.parametrize(
    ("ending", "lost", "says"),
    [
        (LOST, job(engines=3), "model m lost 3 engines in a row .* the last with: it died"),
        (WAY, job(engines=3), "others need the room"),
        (UNKNOWN, job(adapters=MOST_UNKNOWN), "forgot adapter m:a 3 times in a row: no such slot"),
    ],
)
def test_too_many_losses_in_a_row_are_told_with_a_time_to_come_again(
    ending: AttemptEnding, lost: Continuation, says: str
) -> None:
    follows = after(ending, lost)
    assert isinstance(follows, EndWith)
    assert follows.error.retry_after_s is not None
    with pytest.raises(type(follows.error), match=says):
        raise follows.error


def test_losses_for_memory_end_with_its_reason_and_no_time_to_come_again() -> None:
    """The same request would end the engine again."""
    grew = EngineOutgrew("the engine grew to 900 MiB, beyond its lease of 800 MiB")
    lost, outgrew = replace(LOST, error=grew), job()
    assert after(LOST, outgrew) == Retry()
    assert ended(grew, outgrew, is_alone=True) == lost
    assert after(lost, outgrew) == Retry()
    assert ended(grew, outgrew, is_alone=True) == lost
    follows = after(lost, outgrew)
    assert isinstance(follows, EndWith)
    assert isinstance(follows.error, MemoryRefused)
    assert follows.error.retry_after_s is None
    assert re.search(
        "too little memory .* a prompt of 1 tokens: 2 engines were ended in a row, the last as the "
        "engine grew to 900 MiB, beyond its lease of 800 MiB; send a shorter prompt",
        follows.error.message,
    )


def test_a_generation_that_waits_while_another_one_outgrows_the_memory_goes_on() -> None:
    """The engine that runs a single sequence at a time has it in its queue."""
    grew = EngineOutgrew("the engine grew to 900 MiB, beyond its lease of 800 MiB")
    lost, waits, runs = replace(LOST, error=grew), job(), job()
    for _ in range(2):
        runs.take(Progress(computed_tokens=64, total_tokens=4000), 1.0)
        assert ended(grew, runs) == lost
        assert ended(grew, waits) == lost
    assert isinstance(after(lost, runs), EndWith)
    assert after(lost, waits) == Retry()
    assert ended(grew, waits) == lost
    follows = after(lost, waits)
    assert isinstance(follows, EndWith)
    assert isinstance(follows.error, PeerUnavailable)
    assert follows.error.retry_after_s == 7.0, "its turn comes another time"


def test_a_token_between_them_forgives_all_losses() -> None:
    lost = job(engines=3, adapters=3)
    lost.take(Tokens(token_ids=(5,)), 1.0)
    assert after(LOST, lost) == Retry()
    assert after(UNKNOWN, lost) == Retry(gives_back=True)


def test_dead_engines_and_unknown_adapters_are_counted_apart() -> None:
    """A death leaves slots empty, so each is followed by one that does not know the adapter."""
    assert after(LOST, job(engines=2, adapters=2)) == Retry()
    assert after(UNKNOWN, job(engines=2, adapters=2)) == Retry(gives_back=True)


def test_a_refusal_before_work_is_the_callers_and_no_ending() -> None:
    refusal = KvRefused("no memory for so many tokens", retry_after_s=10.0)
    with pytest.raises(KvRefused):
        ended(refusal, job())


def test_a_refusal_without_a_time_is_final() -> None:
    refusal = MemoryRefused("the model takes more than there is")
    assert after(MakeWay(refusal=refusal, most=3), job(engines=1)) == EndWith(refusal)
