"""A child's end, whichever way the system refuses to signal what is left of it."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from pathlib import Path

import pytest

from kakeya.backends.engine.process import EngineProcess, SocketFolder

SLEEPER = (sys.executable, "-c", "import time; time.sleep(60)")


@pytest.mark.parametrize("refusal", [PermissionError, ProcessLookupError])
async def test_a_group_that_cannot_be_signalled_any_more_ends_all_the_same(
    refusal: type[OSError], short_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """macOS answers so while the child has ended and was not waited for."""
    socket = short_path / "1.sock"
    child = await EngineProcess.start("toy", lambda _: SLEEPER, socket)
    socket.touch()
    os.killpg(child.pid, 9)

    def refuse(group: int, number: int) -> None:
        raise refusal("all of the group have ended")

    monkeypatch.setattr(os, "killpg", refuse)
    child.end("was in the way")
    child.kill("was in the way")
    await asyncio.wait_for(child.aclose(5.0), 60)
    assert not socket.exists()
    assert (await child.exited()).returncode == -9


async def test_a_folder_leaves_nothing_behind_where_its_maker_is_cancelled(
    short_path: Path,
) -> None:
    async def hold() -> None:
        async with SocketFolder.lent(short_path):
            await asyncio.Event().wait()

    for steps in range(20):
        holding = asyncio.create_task(hold())
        for _ in range(steps):  # from before it is asked for to after it is made
            await asyncio.sleep(0)
        holding.cancel()
        with pytest.raises(asyncio.CancelledError):
            await holding
        assert [*short_path.iterdir()] == []


async def test_the_traceback_of_a_child_is_one_line_of_the_log(
    short_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="kakeya.child")
    broken = (sys.executable, "-c", "print('begun', flush=True)\n{}['weights']")
    child = await EngineProcess.start("toy", lambda _: broken, short_path / "1.sock")
    assert (await child.exited()).last_line == "KeyError: 'weights'"
    await child.aclose(5.0)
    begun, fault = caplog.records
    assert (begun.message, begun.levelname) == ("begun", "INFO")
    assert (fault.message, fault.levelname) == ("KeyError: 'weights'", "ERROR")
    assert fault.kakeya_fields["traceback"].startswith("Traceback (most recent")  # type: ignore[attr-defined]
