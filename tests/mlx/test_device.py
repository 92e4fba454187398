"""A device that fails ends the engine's thread, whichever call hears of it; no limit is set.

The failure is injected: mlx on a CPU has no command buffers.
"""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import pytest
from mlx_lm.utils import maybe_set_recommended_wired_limit

from kakeya.engine.model import DeviceLost
from kakeya.engine.steps.scheduler import QueueTicket, Scheduler
from kakeya.generation.request import DecodeJob
from kakeya.mlx.batch.batch import why_by_turns
from kakeya.mlx.device import working_set_bytes
from tests.engine.rig import Rig, load_rig

FAILURE = "[METAL] Command buffer execution failed: Insufficient Memory (00000008:kIOGPU...)"


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Rig:
    return load_rig(tmp_path_factory.mktemp("model") / "llama", "llama")


def failing(call: Callable[..., object], after: int, text: str) -> Callable[..., object]:
    """Fail once, at the call behind so many good ones; mlx clears the failure then."""
    calls = 0

    def fails(*given: object) -> object:
        nonlocal calls
        calls += 1
        if calls == after + 1:
            raise RuntimeError(text)
        return call(*given)

    return fails


def submit(scheduler: Scheduler, told: list[object], rows: int) -> None:
    for row in range(rows):
        job = DecodeJob(token_ids=[5, 9, 13, row], max_tokens=12, kv_key=f"k{row}")
        scheduler.submit(QueueTicket(job, lambda _: None, told.append))


@pytest.mark.parametrize(
    ("call", "after", "rows"),
    [
        ("eval", 0, 1),
        ("eval", 0, 3),
        ("async_eval", 0, 1),
        ("async_eval", 3, 1),
        ("async_eval", 3, 3),
    ],
)
def test_a_failed_command_buffer_ends_the_thread_and_no_sequence_survives_it(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, call: str, after: int, rows: int
) -> None:
    scheduler = Scheduler(rig.model, rig.tools, max_running=4)
    refused: list[object] = []
    submit(scheduler, refused, rows)
    monkeypatch.setattr(mx, call, failing(getattr(mx, call), after, FAILURE))
    with pytest.raises(DeviceLost, match="Insufficient Memory"):
        scheduler.run()
    assert refused == []  # the agent goes on from the history, in another engine
    assert rig.tools.slots.bytes_by_key() == {}


def test_another_fault_of_a_step_ends_its_sequence_alone(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = Scheduler(rig.model, rig.tools, max_running=4)
    refused: list[object] = []

    def refuse(failure: object) -> None:
        refused.append(failure)
        scheduler.stop()

    scheduler.submit(QueueTicket(DecodeJob(token_ids=[5, 9], max_tokens=3), print, refuse))
    monkeypatch.setattr(mx, "eval", failing(mx.eval, 0, "shapes do not match"))
    scheduler.run()
    assert "shapes do not match" in str(refused)


def test_no_helper_sets_how_much_metal_keeps_wired(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mx, "device_info", lambda: {"max_recommended_working_set_size": 1 << 34})
    with pytest.raises(RuntimeError, match="panics the machine"):
        maybe_set_recommended_wired_limit()


def test_a_processor_has_no_limit_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    assert working_set_bytes() == 0
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
    monkeypatch.setattr(mx, "device_info", lambda: {"max_recommended_working_set_size": 1 << 34})
    assert working_set_bytes() == 1 << 34
    monkeypatch.setattr(mx, "device_info", dict)
    assert working_set_bytes() == 0


def test_a_chore_that_hears_of_a_failed_command_buffer_ends_the_thread_too(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = rig.model._loaded
    monkeypatch.setattr(mx, "eval", failing(mx.eval, 2, FAILURE))
    with pytest.raises(DeviceLost):
        why_by_turns(loaded)
    monkeypatch.setattr(mx, "eval", failing(mx.eval, 2, "no such kernel"))
    assert "no such kernel" in why_by_turns(loaded)
