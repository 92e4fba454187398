"""A child's end, whichever way the system refuses to signal what is left of it."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest

from kakeya.backends.engine.process import EngineProcess

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
