"""The model thread: turns, cancellation, faults, questions between steps."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial

import pytest

from kakeya.core.errors import InvalidArgument, InvariantBroken, KakeyaError
from kakeya.engine.steps.scheduler import QueueTicket, Scheduler
from kakeya.generation.frames import Done, EngineFrame, Progress, QueuePlace, Tokens
from kakeya.generation.request import DecodeJob
from tests.engine.rig import Rig, load_rig, tools
from tests.waiting import wait_until

WAIT_S = 20.0


class Sink:
    """Collects the frames of one ticket."""

    def __init__(self) -> None:
        self.frames: list[EngineFrame] = []
        self.error: KakeyaError | None = None
        self.ended = threading.Event()
        self.first = threading.Event()
        self.goes_on = threading.Event()
        self.goes_on.set()

    def put(self, frame: EngineFrame) -> None:
        self.frames.append(frame)
        if not isinstance(frame, QueuePlace):
            self.first.set()
            assert self.goes_on.wait(WAIT_S)
        if isinstance(frame, Done):
            self.ended.set()

    def fail(self, failure: KakeyaError) -> None:
        self.error = failure
        self.ended.set()

    def tokens(self) -> list[int]:
        return [t for f in self.frames if isinstance(f, Tokens) for t in f.token_ids]


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Rig:
    return load_rig(tmp_path_factory.mktemp("model") / "llama", "llama")


@pytest.fixture
def scheduler(rig: Rig) -> Iterator[Scheduler]:
    scheduler = Scheduler(rig.model, tools(), max_running=2)
    thread = threading.Thread(target=scheduler.run, daemon=True)
    thread.start()
    yield scheduler
    scheduler.stop()
    thread.join(WAIT_S)
    assert not thread.is_alive()


def submit(
    scheduler: Scheduler, *, sink: Sink | None = None, **job: object
) -> tuple[QueueTicket, Sink]:
    sink = sink or Sink()
    values: dict[str, object] = {"token_ids": [5, 6, 7, 8], "max_tokens": 8}
    ticket = QueueTicket(DecodeJob(**{**values, **job}), sink.put, sink.fail)  # type: ignore[arg-type]
    scheduler.submit(ticket)
    return ticket, sink


def test_sequences_that_share_the_thread_get_what_each_gets_alone(
    scheduler: Scheduler, rig: Rig
) -> None:
    prompts = [[5, 6, 7], [9, 9, 9, 9], [1, 2, 3, 4, 5, 6], [80, 81]]
    alone = [rig.run(DecodeJob(token_ids=p, max_tokens=20))[0] for p in prompts]
    sinks = [submit(scheduler, token_ids=p, max_tokens=20)[1] for p in prompts]
    for sink in sinks:
        assert sink.ended.wait(WAIT_S)
    assert [sink.tokens() for sink in sinks] == alone


def test_a_cancelled_sequence_stops_and_the_others_go_on(scheduler: Scheduler) -> None:
    endless_sink = Sink()
    endless_sink.goes_on.clear()
    endless, _ = submit(scheduler, sink=endless_sink, max_tokens=400)
    assert endless_sink.first.wait(WAIT_S)
    endless.cancel()
    endless_sink.goes_on.set()
    _, other = submit(scheduler)
    assert other.ended.wait(WAIT_S)
    assert len(endless_sink.tokens()) < 400
    assert not endless_sink.ended.is_set()
    assert scheduler.call(scheduler.load).result(WAIT_S).running == 0


def test_a_cancellation_during_prefill_ends_it(scheduler: Scheduler, rig: Rig) -> None:
    prompt = [(7 * i) % 96 for i in range(505)]
    sink = Sink()
    sink.goes_on.clear()
    ticket, _ = submit(scheduler, sink=sink, token_ids=prompt)
    assert sink.first.wait(WAIT_S)
    ticket.cancel()
    sink.goes_on.set()
    wait_until("it ended", lambda: scheduler.call(scheduler.load).result(WAIT_S).running == 0)
    assert not sink.ended.is_set()
    assert isinstance(sink.frames[0], Progress)


def test_a_bad_job_fails_alone(scheduler: Scheduler) -> None:
    _, bad = submit(scheduler, token_ids=[4_000])
    _, good = submit(scheduler)
    assert bad.ended.wait(WAIT_S)
    assert isinstance(bad.error, InvalidArgument)
    assert good.ended.wait(WAIT_S)
    assert len(good.tokens()) == 8


def test_a_fault_in_a_step_ends_that_sequence_only(rig: Rig) -> None:
    class Breaking:
        def open(self):
            state = rig.model.open()
            state.collect = lambda: (_ for _ in ()).throw(RuntimeError("boom"))
            return state

        def __getattr__(self, name: str) -> object:
            return getattr(rig.model, name)

    scheduler = Scheduler(Breaking(), tools(), max_running=2)  # type: ignore[arg-type]
    thread = threading.Thread(target=scheduler.run, daemon=True)
    thread.start()
    _, sink = submit(scheduler)
    assert sink.ended.wait(WAIT_S)
    assert isinstance(sink.error, InvariantBroken)
    assert scheduler.call(lambda: 42).result(WAIT_S) == 42
    scheduler.stop()
    thread.join(WAIT_S)


def test_questions_are_answered_between_steps(scheduler: Scheduler, rig: Rig) -> None:
    ticket, sink = submit(scheduler, max_tokens=400)
    assert sink.first.wait(WAIT_S)
    draft = scheduler.call(lambda: rig.model.draft([5, 6, 7], 4, None, 0.0)).result(WAIT_S)
    assert len(draft.tokens) == 4
    with pytest.raises(ZeroDivisionError):
        scheduler.call(lambda: 1 // 0).result(WAIT_S)
    ticket.cancel()


def test_more_than_may_run_wait_their_turn(scheduler: Scheduler) -> None:
    loads = []
    todo = [DecodeJob(token_ids=[5, 6, 7, 8], max_tokens=20) for _ in range(5)]
    sinks = [Sink() for _ in todo]

    def put(sink: Sink, frame: EngineFrame) -> None:
        loads.append(scheduler.load())
        sink.put(frame)

    tickets = [
        QueueTicket(job, partial(put, sink), sink.fail)
        for job, sink in zip(todo, sinks, strict=True)
    ]
    scheduler.call(lambda: [scheduler.submit(ticket) for ticket in tickets]).result(WAIT_S)
    for sink in sinks:
        assert sink.ended.wait(WAIT_S)
        assert len(sink.tokens()) == 20
    assert (loads[0].running, loads[0].waiting) == (2, 3)
    assert max(load.running for load in loads) == 2


def test_a_draft_is_the_models_own_greedy_continuation(rig: Rig) -> None:
    prompt = [5, 9, 13, 2, 7]
    tokens, _ = rig.run(DecodeJob(token_ids=prompt, max_tokens=12))
    for at in range(4):
        draft = rig.model.draft(prompt + tokens[:at], 6, None, 0.0)
        assert list(draft.tokens) == tokens[at : at + 6]
        assert all(0 <= value <= 1 for value in draft.confidence)
    other = rig.model.draft([50, 51, 52], 4, None, 0.0)
    assert list(other.tokens) == rig.run(DecodeJob(token_ids=[50, 51, 52], max_tokens=4))[0]


def test_a_drafter_follows_many_prefixes(rig: Rig) -> None:
    for first in range(20):
        prompt = [first, first + 1, first + 2]
        expected, _ = rig.run(DecodeJob(token_ids=prompt, max_tokens=3))
        assert list(rig.model.draft(prompt, 3, None, 0.0).tokens) == expected
