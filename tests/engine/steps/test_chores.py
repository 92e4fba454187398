"""Checks and measurements of a model take no time from requests."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace

import pytest

from kakeya.engine.queue.policy import ROUND_S
from kakeya.engine.steps.chores import LEAST_IDLE_S, Chores
from tests.engine.virtual_rig import CHUNK_S, STEP_S, HashModel, VirtualRig

IDLE_S = 1.0


class TestChores:
    def test_a_slice_is_due_once_the_engine_was_idle_for_so_long(self) -> None:
        now_s = 10.0
        chores = Chores(iter([IDLE_S, IDLE_S]), lambda: now_s)
        assert chores.wait_s(now_s) == IDLE_S
        assert chores.wait_s(now_s + 2 * IDLE_S) == 0
        chores.busy(now_s + 2 * IDLE_S)
        assert chores.wait_s(now_s + 2 * IDLE_S) == IDLE_S

    def test_a_request_that_waited_for_the_load_comes_before_the_first_check(self) -> None:
        chores = Chores(iter([0.0]), lambda: 10.0)
        assert chores.is_urgent
        assert chores.wait_s(10.0) == pytest.approx(LEAST_IDLE_S)

    def test_without_chores_the_engine_waits_for_requests_alone(self) -> None:
        assert Chores(iter(()), lambda: 0.0).wait_s(math.inf) is None

    def test_a_failure_ends_the_chores(self, caplog: pytest.LogCaptureFixture) -> None:
        def broken() -> Iterator[float]:
            yield 0.0
            raise RuntimeError("the device is gone")

        chores = Chores(broken(), lambda: 0.0)
        assert chores.is_urgent
        chores.work()
        assert chores.wait_s(0.0) is None
        assert "a chore failed" in caplog.text


def rig_with(chores: Callable[[HashModel], Iterator[float]], monkeypatch) -> VirtualRig:
    monkeypatch.setattr(HashModel, "chores", chores, raising=False)
    return VirtualRig()


def test_no_measurement_is_made_while_a_request_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    slices: list[float] = []

    def chores(model: HashModel) -> Iterator[float]:
        while True:
            yield IDLE_S
            slices.append(model._rig.now_s)

    rig = rig_with(chores, monkeypatch)
    told = rig.submit(max_tokens=50)
    rig.run()
    assert told.done is not None
    assert slices == []


def test_sequences_that_could_share_forwards_do_so_once_they_are_checked_between_their_rounds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def chores(model: HashModel) -> Iterator[float]:
        yield 0.0
        yield 0.0
        model.facts = replace(model.facts, batch_rows=8)

    monkeypatch.setattr(HashModel, "chores", chores, raising=False)
    rig = VirtualRig()
    rig.model.facts = replace(rig.model.facts, batch_rows=1)
    jobs = [rig.submit(token_ids=[number], max_tokens=20) for number in range(1, 4)]
    rig.run()
    assert all(len(job.tokens) == 20 for job in jobs)
    assert rig.scheduler.load().batch_rows == 3


def test_checks_between_rounds_let_no_prompt_compute_for_longer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What they take is no time of a step, by which prompts before a batch's steps go."""
    checks: list[None] = []

    def chores(model: HashModel) -> Iterator[float]:
        for _ in range(6):
            yield 0.0
            checks.append(model.work(1.0))

    monkeypatch.setattr(HashModel, "chores", chores, raising=False)
    rig = VirtualRig()
    batch = [rig.submit(token_ids=[number], max_tokens=60, priority=4) for number in (1, 2)]
    rig.submit(6.05, token_ids=[at % 100 for at in range(3000)], max_tokens=2, priority=2)
    rig.run()
    others_s = sorted(batch[0].gaps_s)[: 1 - len(checks)]  # the first two lie in one gap
    assert max(others_s) <= 4 * ROUND_S + CHUNK_S + STEP_S


def test_an_idle_engine_measures_and_goes_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    is_done: Future[None] = Future()

    def chores(model: HashModel) -> Iterator[float]:
        yield 0.0
        model.facts = replace(model.facts, forward_costs_s={1: 2.0, 2: 2.5})
        yield 0.0
        is_done.set_result(None)

    rig = rig_with(chores, monkeypatch)
    thread = threading.Thread(target=rig.scheduler.run, daemon=True)
    thread.start()
    is_done.result(timeout=60)
    rig.scheduler.stop()
    thread.join(timeout=60)
    assert rig.scheduler._tools.controller.report().row_costs_s[:2] == (2.0, 2.5)
